"""Law 15: what somebody else made is data. What a run directory would have done, and whether the person at the keyboard said so.

A run directory names code (a game's file or module), addresses, environment variables whose values are sent there, and files outside of
it. These are its *claims*. They hold if every one is named on the command line, if `--trust` is there, or if the files belong to this
user and a run of this user made the very same claims on this machine: then their digest lies in the user's state directory. A library's
game without addresses claims nothing. docs/trust.md has the rules for people.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from marl_llm.runs.command import ConfigError
from marl_llm.untrusted import valid_text

MOST_BYTES = 4 << 30  # of all files of a game together, 4 s to read; more cannot be known as one's own
UNREADABLE = "cannot be read"
# keys of any section whose text is an address, a variable that is sent, or a place outside of the run directory that is written
OUTSIDE = ("url", "key_env", "address", "folder", "members", "cache", "logger")
FUNCTIONS = ("advantages", "policy_loss")  # keys of a recipe that name a user's function
_SHOWN = 4


def asked(argv: list[str] | None = None) -> bool:
    """Whether `--trust` stands on the command line; for what is read before flags are."""
    given = [arg for arg in (sys.argv if argv is None else argv) if re.fullmatch(r"--?(no)?trust(=.*)?", arg)]
    return bool(given) and re.fullmatch(r"--?trust(=(true|t|1|yes|y))?", given[-1], re.IGNORECASE) is not None


def claims_of(config: Mapping[str, Any], run: pathlib.Path) -> dict[str, str]:
    """Key of the config -> its text, of all that a run directory would have run, paid for, sent or written elsewhere.

    The files of a user's game are among them, `game/lock.py` -> its digest. `config` holds JSON values, of whatever types.
    """
    from marl_llm.games import GAMES

    leaves = dict(_leaves(config))
    name = leaves.get("game.name")
    own = not isinstance(name, str) or name not in GAMES
    claims = {key: value for key, value in leaves.items() if isinstance(value, str) and value and _reaches_out(key, value, own)}
    if own:
        claims["game.name"] = str(name)
    if any(value.rpartition(":")[0].endswith(".py") for key, value in claims.items() if _names_code(key)):
        claims |= {f"game/{file}": digest for file, digest in _digests(run / "game").items()}
    return claims


def _names_code(key: str) -> bool:
    """Whether a key's value names code: a game, or a function of a recipe."""
    return key == "game.name" or key.rpartition(".")[0].endswith("recipe") and key.rpartition(".")[2] in FUNCTIONS


def _reaches_out(key: str, value: str, own_game: bool) -> bool:
    section, _, last = key.rpartition(".")
    if key == "tools.backend":
        return value != "local"
    return last in OUTSIDE or _names_code(key) and key != "game.name" or "://" in value or (own_game and section in ("game", "script"))


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        elif isinstance(value, list):
            yield from _leaves({str(number): item for number, item in enumerate(value)}, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """File of a game's folder -> its digest, compiled files too; in place of one that cannot be read, why."""
    digests, left = {}, MOST_BYTES
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        try:
            digests[str(path.relative_to(folder))], size = file_digest(path, left)
        except (OSError, ValueError) as error:
            digests[str(path.relative_to(folder))], size = f"{UNREADABLE}: {error}", 0
        left -= size
    return digests


def file_digest(path: pathlib.Path, most: int = MOST_BYTES) -> tuple[str, int]:
    """The digest of a file, and its size. Raises `ValueError` for what is no regular file or larger, and `OSError`."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_size > most:
            raise ValueError(f"{path} is no regular file of at most {most:,} bytes")
        return hashlib.file_digest(file, "sha256").hexdigest(), about.st_size


def links_of(run: pathlib.Path) -> dict[str, str]:
    """`link FILE` -> where it leads, of the links among the files that a run writes.

    Raises `ConfigError` for what is neither file nor folder, such as a named pipe.
    """
    links = {}
    folders = [path for path in run.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "wandb"]
    for path in sorted(inner for folder in (run, *folders) for inner in folder.iterdir()):
        if path.is_symlink():
            links[f"link {path.relative_to(run)}"] = os.readlink(path)
        elif not path.is_file() and not path.is_dir():
            raise ConfigError(f"{path} is neither a file nor a folder, so a run cannot write it; remove it")
    return links


def check(run: pathlib.Path, claims: Mapping[str, str], trusted: bool) -> None:
    """Raises `ConfigError` saying what would be done, unless somebody who may has said so; see the module's text."""
    if trusted or not _unnamed(claims) or (_belongs_to_user(run, claims) and _known(claims)):
        return
    texts = [_told(key, value) for key, value in _unnamed(claims).items()]
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    raise ConfigError(
        f"{run} is not as a run of yours on this machine wrote it, and it would {', '.join(texts[:_SHOWN])}{more}. Nothing of it was run. "
        "Look at these files and values; if you trust them, add --trust (docs/trust.md)"
    )


def remember(run: pathlib.Path, claims: Mapping[str, str]) -> None:
    """Keeps the digest of claims that a run of this user makes. Without a place for it a note says what that means."""
    if not claims:
        return
    try:
        marker = _marker(claims)
        marker.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        marker.write_text(f"{run.absolute()}\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        print(f"note: {error}; so whoever continues or evaluates {run} has to say --trust", file=sys.stderr)


def _unnamed(claims: Mapping[str, str]) -> dict[str, str]:
    """The claims that do not stand on this command line, as `--config.KEY=VALUE`."""
    given = {match[1]: match[2] for arg in sys.argv if (match := re.fullmatch(r"--?config\.([\w.]+)=(.*)", arg, re.DOTALL))}
    return {key: value for key, value in claims.items() if given.get(key) != value}


def _marker(claims: Mapping[str, str]) -> pathlib.Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    state = pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".local" / "state"
    return state / "marl_llm" / "runs" / hashlib.sha256(json.dumps(dict(claims), sort_keys=True).encode()).hexdigest()


def _known(claims: Mapping[str, str]) -> bool:
    try:
        return _marker(claims).stat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return False  # there is none, or no place for one: the answer is --trust


def _belongs_to_user(run: pathlib.Path, claims: Mapping[str, str]) -> bool:
    """Whether the files that the claims were read from are plain ones of this user, and nobody else can write them."""
    try:
        about = [(run / name).lstat() for name in ("config.json", *(key for key in claims if key.startswith("game/")))]
    except OSError:
        return False
    if any(value.startswith(UNREADABLE) for key, value in claims.items() if key.startswith("game/")):
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return all(stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & others for status in about)


def _told(key: str, value: str) -> str:
    """What a claim would do, in words, with nothing in it that a terminal obeys."""
    short = ascii(valid_text(value)[:200])
    kind = key.rpartition(".")[2]
    if _names_code(key):
        return f"run the code of {short}"
    if key.startswith("game/"):
        return f"load {ascii(key)}"
    if key.startswith("link "):
        return f"write through the {ascii(key)[1:-1]} to {short}"
    if kind == "key_env":
        return f"send the value of the environment variable {short} ({key})"
    return f"use {key}={short}"
