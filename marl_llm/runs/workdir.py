"""A run directory that explains itself: who ran what, when, on which hardware and commit, with the user's own game in it.

Read as a config file (`--config=marl_llm/runs/workdir.py:DIR`, which `--resume=DIR` stands for), it gives the config of run directory DIR.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import os
import pathlib
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ml_collections import config_dict

from marl_llm import old_names
from marl_llm.runs import trust
from marl_llm.runs.command import ConfigError
from marl_llm.runs.sections import fill_defaults
from marl_llm.untrusted import Bounds, read_json_file

LAYOUT = 4  # of config.json's config; an earlier one had no "layout"
OLD_NAMES = (2, 3)  # the layouts whose options have the names of `marl_llm.old_names`
RECORD_BOUNDS = Bounds(infinite=True)  # `max_grad_norm` may be one
# on continuing; steps may grow, and so may what a coach costs
MAY_CHANGE = ("devices", "mesh", "placement", "steps", "optimizer.decay_steps", "tools", "coach.cap_usd", "checkpoint.background")


def commit_of(folder: pathlib.Path) -> str:
    """The git commit of the code, with `+changes` when the tree is dirty; `unknown` outside a checkout."""
    try:
        def run(*a):
            return subprocess.run(["git", *a], cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout

        return run("rev-parse", "HEAD").strip() + ("+changes" if run("status", "--porcelain").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def differences(old: dict, new: dict, path: str = "config") -> list[str]:
    """Lines `path: old -> new` for every value that differs."""
    out = []
    for key in sorted(set(old) | set(new)):
        a, b, key_path = old.get(key), new.get(key), f"{path}.{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, key_path)
        elif a is None and isinstance(b, dict) and all(value is None for value in b.values()):
            continue  # a section that is newer than the run
        elif a != b:
            out.append(f"{key_path}: {a!r} -> {b!r}")
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


def game_dir_of(workdir: pathlib.Path) -> pathlib.Path:
    """Where a run directory keeps the file of a user's own game."""
    return pathlib.Path(workdir) / "game"


def read_record(workdir: pathlib.Path) -> dict:
    """What config.json holds. Raises `ConfigError` when there is none, or when another version of this library wrote it."""
    path = pathlib.Path(workdir) / "config.json"
    try:
        record = read_json_file(path, dict, RECORD_BOUNDS)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); name the directory of an earlier run") from error
    if not isinstance(record.get("config"), dict):
        raise ConfigError(f"{path} cannot be read (config: an object is expected); name the directory of an earlier run")
    if record.get("layout") in OLD_NAMES:
        try:
            record |= {"layout": LAYOUT, "config": old_names.convert_config(record["config"])}
        except ValueError as error:
            raise ConfigError(f"{path} cannot be read ({error}); was it edited?") from error
    if record.get("layout") != LAYOUT:
        commit = str(record.get("commit", "unknown"))
        code = "the code of that time" if commit == "unknown" else f"its code: git checkout {commit.removesuffix('+changes')}"
        raise ConfigError(
            f"{path.parent} was written by an earlier version of marl_llm, whose configs had other keys: it cannot be continued; "
            f"evaluate it with {code}, or train again in another --workdir"
        )
    fill_defaults(record["config"])  # an option that is newer than the run, or was left open by it
    return record


def read_config(workdir: pathlib.Path, trusted: bool = False) -> config_dict.ConfigDict:
    """The config of a run directory, locked. What it would run or send is refused unless it is trusted (`marl_llm.runs.trust`).

    Raises `ConfigError` as `read_record`, and `trust.check`.
    """
    workdir = pathlib.Path(workdir)
    record = read_record(workdir)["config"]
    trust.check(workdir, trust.claims_of(record, workdir), trusted)
    from marl_llm.runs.base import base_config

    for where, value in (("name", record.get("name")), *((f"{key}.name", _name(record.get(key))) for key in ("game", "recipe"))):
        if not isinstance(value, str):
            raise ConfigError(f"{workdir / 'config.json'} cannot be read (config.{where}: a text is expected); was it edited?")
    try:
        config = config_dict.ConfigDict(record)
        # what was not set comes back without its type, so the base gives it again
        typed = base_config(config.name, config.game.name, config.recipe.name, game_dir_of(workdir))
        for section in ("models", "teachers"):
            for name in config.get(section) or ():
                _ = typed[section][name]  # which makes it
        typed.update(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{workdir / 'config.json'} cannot be read ({' '.join(str(error).split())}); was it edited?") from error
    return typed


def _name(section) -> str | None:
    """The name in a section, if that is one."""
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """The config of run directory `arg`: this module as a config file."""
    return read_config(pathlib.Path(arg), trust.asked())


def open_workdir(
    workdir: pathlib.Path, config: config_dict.ConfigDict, config_file: str, hardware: str,
    own_files: Mapping[pathlib.Path, pathlib.Path] = MappingProxyType({}), headline: str = "success",
) -> bool:
    """Creates the directory with its `config.json`, or recognises a run to be continued; returns whether it continues.

    `own_files`: a user's files, from their names in the run's folder `game/` to where they are; they are copied. `headline` is what
    "success" means in the run's files, e.g. "f1". A run of another config that ended before it learned anything is set aside under another
    name. A run that continues is not written to here: what may change (more steps, other devices, another mesh) is `taken_over` later.

    Raises `ConfigError` when the directory holds a run of another config (the message lists the differences), holds other files or links,
    or cannot be written, and when another process trains in it.
    """
    if (workdir / "config.json").exists():
        record = read_record(workdir)
        trust.check(workdir, trust.links_of(workdir), trust.asked())
        changed = differences(record["config"], plain(config))
        of_file = _changed_files(workdir, own_files) + _changed_data(record, plain(config))
        refused = [line for line in changed if not _may_change(line)] + of_file
        if not refused and config.steps >= record["config"].get("steps", 0):
            _hold(workdir)
            return True
        if _has_learned(workdir) or any(file.parent == game_dir_of(workdir).resolve() for file in own_files.values()):
            lines = "\n  ".join(changed + of_file)
            raise ConfigError(
                f"{workdir} holds a run of another config; nothing was touched. It differs in:\n  {lines}\n"
                f"Choose another --workdir, or continue that run with --resume={workdir} (--config.steps may grow, devices, "
                "mesh, placement, tools, optimizer.decay_steps and checkpoint.background may change)"
            )
        _hold(workdir)
        print(f"note: the run in {workdir} ended before it learned anything; it is now in {_set_aside(workdir)}", file=sys.stderr)
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
        "data": _data_of(plain(config)),
    }
    _begin(workdir, record, own_files)
    trust.remember(workdir, trust.claims_of(record["config"], workdir))
    return False


def _begin(workdir: pathlib.Path, record: dict, own_files: Mapping[pathlib.Path, pathlib.Path]) -> None:
    """Makes a run directory with its record and a copy of the user's files. Raises `ConfigError` as `open_workdir`."""
    path, game_dir = workdir / "config.json", game_dir_of(workdir)
    if workdir.exists() and (not workdir.is_dir() or any(p not in (path.with_suffix(".partial"), game_dir) for p in workdir.iterdir())):
        raise ConfigError(f"{workdir} exists and is not a run directory; choose another --workdir")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if links := trust.links_of(workdir):
            raise ConfigError(f"{workdir} holds a {next(iter(links))}, which would be written through; choose another --workdir")
        _hold(workdir)
        for file, source in own_files.items():
            (game_dir / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, game_dir / file)
            _keep_to_user(game_dir / file)
        write_json(path, record)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}. Free space or choose another --workdir") from error


def taken_over(workdir: pathlib.Path, config: config_dict.ConfigDict, hardware: str) -> None:
    """Records the changed keys and the owner of a run that continues, once nothing can stop it before its next step."""
    record = read_record(workdir)
    if changed := differences(record["config"], plain(config)):
        change = {"date": now(), "commit": commit_of(pathlib.Path(__file__).parent), "hardware": hardware, "changed": changed}
        write_json(workdir / "config.json", record | {"config": plain(config), "continued": [*record.get("continued", []), change]})
        print(f"note: this run goes on with {'; '.join(changed)}", file=sys.stderr)
    if record.get("hardware") != hardware:
        print(f"note: this run began on {record.get('hardware')}; on {hardware} its last digits may differ", file=sys.stderr)
    claims = trust.claims_of(plain(config), workdir)
    for name in ("config.json", *(key for key in claims if key.startswith("game/"))):
        _keep_to_user(workdir / name)
    trust.remember(workdir, claims)
    trust.remember(workdir, trust.links_of(workdir))


def _keep_to_user(path: pathlib.Path) -> None:
    """Makes a file of this user writable by nobody else: what it holds is known as this user's own."""
    if path.is_symlink():
        return
    with contextlib.suppress(PermissionError):  # another's file stays as it is, and then asks for --trust
        path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def _has_learned(workdir: pathlib.Path) -> bool:
    """Whether a run has taken a step: a checkpoint after the supervised warm-up, a line of training, or a final evaluation."""
    if any(path.name.isdecimal() and int(path.name) for path in (workdir / "checkpoints").glob("*")):
        return True
    metrics = workdir / "metrics.jsonl"
    if (workdir / "evaluation.json").exists() or not metrics.is_file():
        return (workdir / "evaluation.json").exists()
    with metrics.open("rb") as lines:
        return any(b'"phase": "train"' in line for line in lines)


def _set_aside(workdir: pathlib.Path) -> pathlib.Path:
    """Gives a held directory the next free name `DIR.unlearned_N`, and lets go of it; returns that name."""
    aside = next(name for n in itertools.count(1) if not os.path.lexists(name := f"{workdir}.unlearned_{n}"))
    if (handle := _HELD.pop(str(workdir.resolve()), None)) is not None:  # none on a file system without locks
        os.close(handle)
    return workdir.rename(aside)


def _may_change(line: str) -> bool:
    key = line.split(":")[0].removeprefix("config.")
    return key in MAY_CHANGE or key.partition(".")[0] in MAY_CHANGE


def _changed_files(workdir: pathlib.Path, own_files: Mapping[pathlib.Path, pathlib.Path]) -> list[str]:
    """A user's files that are no longer what the run began with."""
    changed = []
    for file, source in own_files.items():
        kept = game_dir_of(workdir) / file
        if source != kept.resolve() and (not kept.is_file() or kept.read_bytes() != source.read_bytes()):
            changed.append(f"{source}: another text than {kept}")
    return changed


def _data_of(config: dict) -> dict[str, str]:
    """Option of the game that names a file -> the digest of that file, which is not copied."""
    digests = {}
    for key, value in config["game"].items():
        if isinstance(value, str) and os.path.isfile(value):
            with contextlib.suppress(ValueError, OSError):  # too large, or not to be read: whoever makes the game is told
                digests[key], _ = trust.file_digest(pathlib.Path(value))
    return digests


def _changed_data(record: dict, config: dict) -> list[str]:
    """Data files that are no longer what the run began with. A run of an earlier version kept no digests."""
    before = record.get("data")
    if not isinstance(before, dict):
        return []
    now = _data_of(config)
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    return [f"config.game.{key}: {config['game'][key]} has other bytes than when the run began" for key in changed]


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
    partial.unlink(missing_ok=True)  # never through a link
    partial.write_text(json.dumps(value, indent=1))
    _keep_to_user(partial)
    partial.rename(path)
