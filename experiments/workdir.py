"""A run directory that explains itself: who ran what, when, on which hardware and commit."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

from ml_collections import config_dict

from experiments.base import ConfigError


def commit_of(folder: pathlib.Path) -> str:
    """The git commit of the code, with `+changes` when the tree is dirty; `unknown` outside a checkout."""
    try:
        run = lambda *a: subprocess.run(["git", *a], cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout  # noqa: E731
        return run("rev-parse", "HEAD").strip() + ("+changes" if run("status", "--porcelain").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def differences(old: dict, new: dict, path: str = "config") -> list[str]:
    """Lines `path: old -> new` for every value that differs."""
    out = []
    for key in sorted(set(old) | set(new)):
        a, b, here = old.get(key), new.get(key), f"{path}.{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, here)
        elif a != b:
            out.append(f"{here}: {a!r} -> {b!r}")
    return out


def plain(config: config_dict.ConfigDict) -> dict:
    """The config as JSON values."""
    return json.loads(config.to_json())


def open_workdir(workdir: pathlib.Path, config: config_dict.ConfigDict, config_file: str, hardware: str) -> bool:
    """Creates the directory with its `config.json`, or recognises a run to be continued; returns whether it continues.

    Raises `ConfigError` when the directory holds a run of another config (the message lists the differences), holds other files, or
    cannot be written.
    """
    path = workdir / "config.json"
    if path.exists():
        try:
            old = json.loads(path.read_text())["config"]
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); choose another --workdir") from error
        changed = differences(old, plain(config))
        if changed:
            raise ConfigError(
                f"{workdir} holds a run of another config; nothing was touched. It differs in:\n  "
                + "\n  ".join(changed)
                + f"\nChoose another --workdir, or continue that run with --resume={workdir}"
            )
        return True
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise ConfigError(f"{workdir} exists and is not a run directory; choose another --workdir")
    record = {
        "name": config.name,
        "config_file": config_file,
        "command": " ".join([os.path.basename(sys.executable), "-m", "experiments.train", *sys.argv[1:]]),
        "commit": commit_of(pathlib.Path(__file__).parent),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": hardware,
        "python": platform.python_version(),
        "seed": config.seed,
        "config": plain(config),
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1))
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}. Free space or choose another --workdir") from error
    return False


def read_config(workdir: pathlib.Path) -> tuple[config_dict.ConfigDict, str]:
    """The config of a run directory and the name of its file. Raises `ConfigError` when there is none."""
    path = pathlib.Path(workdir) / "config.json"
    try:
        record = json.loads(path.read_text())
        return config_dict.ConfigDict(record["config"]), record.get("config_file", "")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); --resume needs the directory of an earlier run") from error


def write_json(path: pathlib.Path, value) -> None:
    """Writes JSON beside and renames, so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.rename(path)
