"""A run directory that explains itself: who ran what, when, on which hardware and commit, with the user's own game in it.

Read as a config file (`--config=experiments/workdir.py:DIR`, which `--resume=DIR` stands for), it gives the config of run directory DIR.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator

from ml_collections import config_dict

from experiments.command import ConfigError

LAYOUT = 2  # of config.json's config; an earlier one had no "layout"
# on continuing; steps may grow, and so may what a coach costs
MAY_CHANGE = ("devices", "mesh", "placement", "steps", "tools", "coach.cap_usd", "checkpoint.background")


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
        elif a is None and isinstance(b, dict) and all(value is None for value in b.values()):
            continue  # a section that is newer than the run
        elif a != b:
            out.append(f"{here}: {a!r} -> {b!r}")
    return out


def plain(config: config_dict.ConfigDict) -> dict:
    """The config as JSON values."""
    return json.loads(config.to_json())


def now() -> str:
    """Date and time, with the zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


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


def home_of(workdir: pathlib.Path) -> pathlib.Path:
    """Where a run directory keeps the file of a user's own game."""
    return pathlib.Path(workdir) / "game"


def read_record(workdir: pathlib.Path) -> dict:
    """What config.json holds. Raises `ConfigError` when there is none, or when another version of this library wrote it."""
    path = pathlib.Path(workdir) / "config.json"
    try:
        record = json.loads(path.read_text())
        record["config"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name the directory of an earlier run") from error
    if record.get("layout") != LAYOUT:
        commit = str(record.get("commit", "unknown"))
        code = "the code of that time" if commit == "unknown" else f"its code: git checkout {commit.removesuffix('+changes')}"
        raise ConfigError(
            f"{path.parent} was written by an earlier version of marl_llm, whose configs had other keys: it cannot be continued; "
            f"evaluate it with {code}, or train again in another --workdir"
        )
    return record


def read_config(workdir: pathlib.Path) -> config_dict.ConfigDict:
    """The config of a run directory, locked. Raises `ConfigError` as `read_record`."""
    config = config_dict.ConfigDict(read_record(workdir)["config"])
    # what was not set comes back without its type, so the base gives it again
    from experiments.base import base_config, model_section

    try:
        typed = base_config(config.name, config.game.name, config.recipe.name, home_of(workdir))
        for name in config.models:
            typed.models[name] = model_section()
        typed.update(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{pathlib.Path(workdir) / 'config.json'} cannot be read ({error}); was it edited?") from error
    return typed


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """The config of run directory `arg`: this module as a config file."""
    return read_config(pathlib.Path(arg))


def open_workdir(
    workdir: pathlib.Path, config: config_dict.ConfigDict, config_file: str, hardware: str, found=None, headline: str = "success"
) -> bool:
    """Creates the directory with its `config.json`, or recognises a run to be continued; returns whether it continues.

    `found` is what the game's name stands for (`marl_llm.games.Found`): a user's file is copied into the directory. `headline` is what
    "success" means in the run's files, e.g. "f1". More steps, and other
    devices or another mesh, are taken over and recorded. Raises `ConfigError` when the directory holds a run of another config (the message
    lists the differences), holds other files or cannot be written, and when another process trains in it.
    """
    path = workdir / "config.json"
    partial = path.with_suffix(".partial")
    if path.exists():
        record = read_record(workdir)
        changed = differences(record["config"], plain(config))
        of_file = _changed_files(workdir, found)
        if config.steps < record["config"].get("steps", 0) or of_file or any(not _may_change(line) for line in changed):
            raise ConfigError(
                f"{workdir} holds a run of another config; nothing was touched. It differs in:\n  "
                + "\n  ".join(changed + of_file)
                + f"\nChoose another --workdir, or continue that run with --resume={workdir} (--config.steps may grow, devices, "
                "mesh, placement, tools and checkpoint.background may change)"
            )
        _hold(workdir)
        if changed:
            change = {"date": now(), "commit": commit_of(pathlib.Path(__file__).parent), "hardware": hardware, "changed": changed}
            write_json(path, record | {"config": plain(config), "continued": [*record.get("continued", []), change]})
            print(f"note: this run goes on with {'; '.join(changed)}", file=sys.stderr)
        if record.get("hardware") != hardware:
            print(f"note: this run began on {record.get('hardware')}; on {hardware} its last digits may differ", file=sys.stderr)
        return True
    home = home_of(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(p not in (partial, home) for p in workdir.iterdir())):
        raise ConfigError(f"{workdir} exists and is not a run directory; choose another --workdir")
    record = {
        "name": config.name,
        "layout": LAYOUT,
        "config_file": config_file,
        "command": " ".join([os.path.basename(sys.executable), "-m", "experiments.train", *sys.argv[1:]]),
        "commit": commit_of(pathlib.Path(__file__).parent),
        "date": now(),
        "hardware": hardware,
        "python": platform.python_version(),
        "seed": config.seed,
        "headline": headline,
        "config": plain(config),
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _hold(workdir)
        for file in found.files if found else ():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found.folder / file, home / file)
        write_json(path, record)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}. Free space or choose another --workdir") from error
    return False


def _may_change(line: str) -> bool:
    key = line.split(":")[0].removeprefix("config.")
    return key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE


def _changed_files(workdir: pathlib.Path, found) -> list[str]:
    """Files of a user's game that are no longer what the run began with."""
    home, out = home_of(workdir), []
    for file in found.files if found else ():
        kept = home / file
        if found.folder != home.resolve() and (not kept.is_file() or kept.read_bytes() != (found.folder / file).read_bytes()):
            out.append(f"{found.folder / file}: another text than {kept}")
    return out


@contextlib.contextmanager
def process_log(workdir: pathlib.Path) -> Iterator[None]:
    """What processes other than the first print goes to logs/process_<rank>.log; the terminal belongs to process 0."""
    from marl_llm.training import processes

    if processes.leads():
        yield
        return
    path = pathlib.Path(workdir) / "logs" / f"process_{processes.rank()}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", buffering=1) as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        print(f"{now()}: process {processes.rank()} on {platform.node()}, pid {os.getpid()}")
        yield


def write_json(path: pathlib.Path, value) -> None:
    """Writes JSON beside and renames, so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1))
    partial.rename(path)
