"""A folder as one value: what a workspace is between two executions.

A record is kind (d, f or l), mode, path and content. The writer and the reader both run inside a box with the rights of a candidate; the
host only reads, and trusts nothing: every length is checked and every path stays below the folder.
"""

import os
import stat
import struct

MAX_PATH = 1000  # bytes; the kernel takes 4,096 at once, box and folder included
PAGE = 4096
_RECORD = struct.Struct("<cHHQ")
Entry = tuple[str, str, int, bytes]  # kind, relative path, permission bits, content or link target


def dump_entries(entries: list[Entry]) -> bytes:
    """The bytes of a snapshot."""
    parts = []
    for kind, path, mode, content in entries:
        name = os.fsencode(path)
        parts += [_RECORD.pack(kind.encode(), mode & 0o777, len(name), len(content)), name, content]
    return b"".join(parts)


def load_entries(data: bytes) -> list[Entry]:
    """The entries of a snapshot.

    Raises:
      ValueError: lengths that do not add up, an unknown kind, or a path that leaves the folder.
    """
    entries, at = [], 0
    while at < len(data):
        if len(data) - at < _RECORD.size:
            raise ValueError(f"snapshot cut off at byte {at}")
        kind, mode, name, size = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if kind not in (b"d", b"f", b"l") or name + size > len(data) - at:
            raise ValueError(f"bad snapshot record before byte {at}")
        path = os.fsdecode(data[at : at + name])
        if not path or path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise ValueError(f"snapshot path {path!r} is not a plain relative path")
        entries.append((kind.decode(), path, mode, data[at + name : at + name + size]))
        at += name + size
    return entries


class TooLarge(ValueError):
    """More than a workspace may hold."""


def pack(folder: str, limit: int, inodes: int) -> bytes:
    """A snapshot of `folder`: directories, plain files and symbolic links; sockets and FIFOs are left out.

    What is packed can be unpacked again under the same limits, so files count in whole pages (a sparse one with its full length), and an
    entry may not lie deeper than a path of `MAX_PATH` bytes.

    Raises:
      TooLarge: more than `limit` bytes, or more than `inodes` entries.
      OSError, ValueError: what is there cannot be read.
    """
    entries, total, stack = [], 0, [""]
    while stack:
        below = stack.pop()
        for name in sorted(os.listdir(os.path.join(folder, below))):
            path = os.path.join(below, name)
            if len(os.fsencode(path)) > MAX_PATH:
                raise ValueError(f"a path of more than {MAX_PATH} bytes")
            full = os.path.join(folder, path)
            info = os.lstat(full)
            mode, content = stat.S_IMODE(info.st_mode), b""
            if stat.S_ISDIR(info.st_mode):
                kind = "d"
                if mode & 0o700 != 0o700:
                    os.chmod(full, mode | 0o700)
                stack.append(path)
            elif stat.S_ISREG(info.st_mode):
                kind = "f"
                if total + info.st_size > limit:
                    raise TooLarge(f"workspace holds more than {limit} bytes")
                if not mode & 0o400:
                    os.chmod(full, mode | 0o400)
                with open(full, "rb") as file:
                    content = file.read(limit - total + 1)
            elif stat.S_ISLNK(info.st_mode):
                kind, content = "l", os.fsencode(os.readlink(full))
            else:
                continue
            total += -(-len(content) // PAGE) * PAGE
            entries.append((kind, path, mode, content))
            if total > limit or len(entries) > inodes:
                raise TooLarge(f"workspace holds more than {limit} bytes or {inodes} entries")
    return dump_entries(entries)


def unpack(data: bytes, folder: str) -> None:
    """Writes a snapshot below `folder`. Links come last, so that no content is written through one."""
    entries = load_entries(data)
    for kind, path, _, content in sorted(entries, key=lambda entry: (entry[0] == "l", entry[1].count("/"), entry[0] != "d")):
        full = os.path.join(folder, path)
        if kind != "d":
            os.makedirs(os.path.dirname(full), exist_ok=True)
        if kind == "d":
            os.makedirs(full, exist_ok=True)
        elif kind == "f":
            with open(full, "wb") as file:
                file.write(content)
        else:
            os.symlink(os.fsdecode(content), full)
    for kind, path, mode, _ in reversed(entries):
        if kind != "l":
            os.chmod(os.path.join(folder, path), mode)
