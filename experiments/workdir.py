"""A run directory that explains itself: who ran what, when, on which hardware and commit."""

from __future__ import annotations

import datetime
import fcntl
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


_HELD: dict[str, int] = {}  # directories that this process writes; the lock goes with the process, however it ends


def _hold(workdir: pathlib.Path) -> None:
    """Takes the directory for this process. Raises `ConfigError` when another one writes it."""
    key = str(workdir.resolve())
    if key in _HELD:
        return
    handle = os.open(workdir, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(f"another process trains in {workdir}; wait for it, or choose another --workdir") from error
    except OSError:  # a file system without locks
        os.close(handle)
        return
    _HELD[key] = handle


def open_workdir(workdir: pathlib.Path, config: config_dict.ConfigDict, config_file: str, hardware: str) -> bool:
    """Creates the directory with its `config.json`, or recognises a run to be continued; returns whether it continues.

    Raises `ConfigError` when the directory holds a run of another config (the message lists the differences), holds other files or
    cannot be written, and when another process trains in it.
    """
    path = workdir / "config.json"
    partial = path.with_suffix(".partial")
    if path.exists():
        try:
            record = json.loads(path.read_text())
            changed = differences(record["config"], plain(config))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); choose another --workdir") from error
        if changed:
            raise ConfigError(
                f"{workdir} holds a run of another config; nothing was touched. It differs in:\n  "
                + "\n  ".join(changed)
                + f"\nChoose another --workdir, or continue that run with --resume={workdir}"
            )
        _hold(workdir)
        if record.get("hardware") != hardware:
            print(f"note: this run began on {record.get('hardware')}; on {hardware} its last digits may differ", file=sys.stderr)
        return True
    if workdir.exists() and (not workdir.is_dir() or any(p != partial for p in workdir.iterdir())):
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
        _hold(workdir)
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); --resume needs the directory of an earlier run") from error


def write_json(path: pathlib.Path, value) -> None:
    """Writes JSON beside and renames, so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.rename(path)
