"""The digests of a checkpoint's files: written when it is whole, checked when it is read.

They lie beside the files in the form of `sha256sum`, so that `sha256sum -c SHA256SUMS` checks them too; the first line, a comment there,
has the digest of the others. SHA-256 because processors have instructions for it: 1.5 to 2 GB/s on one core, in threads of several files.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import pathlib
import re
from collections.abc import Callable

from marl_llm.untrusted import read_file

FILE = "SHA256SUMS"
MOST_BYTES = 64 << 20  # of the digests' file
THREADS = 4
_HEAD = "# sha256 of the lines below: "
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write(folder: pathlib.Path) -> None:
    """Writes the digests of all files under a folder into it. Raises `OSError`."""
    names = _files(folder)
    lines = "".join(f"{digest}  {name}\n" for name, digest in zip(names, _digests(folder, names), strict=True))
    (folder / FILE).write_text(f"{_HEAD}{hashlib.sha256(lines.encode()).hexdigest()}\n{lines}", encoding="utf-8")


def check(folder: pathlib.Path, wanted: Callable[[str], bool]) -> None:
    """Compares the files whose names are wanted with their digests.

    Raises `ValueError` naming a file that is missing, is not what was written, or was not written at all; `OSError` if one cannot be read.
    """
    known = {name: digest for name, digest in _read(folder).items() if wanted(name)}
    files = {name for name in _files(folder) if wanted(name)}
    if missing := sorted(set(known) - files):
        raise ValueError(f"{folder / missing[0]} is missing")
    if extra := sorted(files - set(known)):
        raise ValueError(f"{folder / extra[0]} does not belong to it: no digest was written for it")
    for name, digest in zip(known, _digests(folder, list(known)), strict=True):
        if digest != known[name]:
            raise ValueError(f"{folder / name} is damaged: its bytes are not those that were written")


def _read(folder: pathlib.Path) -> dict[str, str]:
    """Name -> digest. Raises `ValueError` if the file of digests is missing or is itself damaged."""
    path = folder / FILE
    try:
        head, _, lines = read_file(path, MOST_BYTES).partition(b"\n")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    if head != (_HEAD + hashlib.sha256(lines).hexdigest()).encode():
        raise ValueError(f"{path} is damaged: its lines are not those that were written")
    pairs = [_LINE.fullmatch(line) for line in lines.decode("utf-8", "replace").splitlines()]
    if None in pairs:
        raise ValueError(f"{path} is damaged: line {pairs.index(None) + 2} has no digest and name")
    return {match[2]: match[1] for match in pairs if match}


def _files(folder: pathlib.Path) -> list[str]:
    """All under a folder that is no folder, links too, without the digests; relative, in one order."""
    paths = [os.path.join(parent, name) for parent, folders, files in os.walk(folder) for name in [*files, *_links(parent, folders)]]
    return sorted(name for path in paths if (name := pathlib.Path(path).relative_to(folder).as_posix()) != FILE)


def _links(at: str, folders: list[str]) -> list[str]:
    return [name for name in folders if os.path.islink(os.path.join(at, name))]


def _digests(folder: pathlib.Path, names: list[str]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda name: _digest(folder / name), names))


def _digest(path: pathlib.Path) -> str:
    """Raises `ValueError` for what is no plain file: a link, a folder or a named pipe in its place."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path} is no plain file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


__all__ = ["FILE", "check", "write"]
