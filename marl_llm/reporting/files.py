"""Files that survive a kill and a full disk: append-only JSON lines, and whole-file replacement.

A JSON-lines file holds one JSON object per line, each ended by a newline. A process that is killed while it writes
leaves at most one torn line, the last. Readers leave that line out, writers cut it off before they append, and a write
that fails half-way is taken back: whatever happens, the lines written before stay readable.
"""

import contextlib
import errno
import os
import pathlib
import stat
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from marl_llm.errors import DamagedError
from marl_llm.untrusted import Bounds, json_lines, open_file, read_json

Path = str | os.PathLike

LINE = Bounds(size=256 << 20, values=5_000_000)  # of one line: a play with its tokens
_BLOCK = 1 << 16  # bytes read at a time, from the end of a file, in search of its last newline
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space, then start the same command again",
    errno.EDQUOT: "the disk quota is used up: free some space, then start the same command again",
    errno.EACCES: "permission denied: make the directory writable, or choose another work directory",
    errno.EROFS: "the file system is read-only: choose another work directory",
}


class WriteError(OSError):
    """A file of the work directory could not be written. Names the file (`filename`), the cause (`errno`) and the cure."""


class LineError(DamagedError, ValueError):
    """A line of a JSON-lines file is not a JSON object. Names the file, the line and the cure."""


def write_error(error: OSError, path: Path, note: str = "") -> WriteError:
    """The `WriteError` that tells what to do about `error`, raised while `path` was written."""
    advice = _ADVICE.get(error.errno or 0, f"{error.strerror or error}: check the file and its disk, then start again")
    return WriteError(error.errno or errno.EIO, f"could not write: {advice}{note}", os.fspath(path))


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into a `WriteError` about `path`."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise write_error(error, path) from error


@runtime_checkable
class Jsonable(Protocol):
    """A value with a JSON form of its own."""

    def to_json(self) -> Any:
        """Python numbers, texts, lists and dictionaries."""


def to_json(value: Any) -> Any:
    """NumPy scalars and arrays as Python numbers and lists, a `Jsonable` in its form: the `default` of `json.dumps` throughout this room.

    Raises:
      TypeError: for anything else that JSON cannot hold.
    """
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Jsonable):
        return value.to_json()
    raise TypeError(f"{type(value).__name__} is not JSON: pass a str, int, float, bool, list, dict or NumPy array")


class LineFile:
    """An append-only file of JSON lines. Each line is written at once; a write that fails leaves no trace in the file.

    Args:
      path: the file; its directory is made if need be, and a torn last line is cut off.

    Raises:
      WriteError: when the file cannot be opened or written.
    """

    def __init__(self, path: Path):
        self.path = pathlib.Path(path)
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if stat.S_ISREG(os.fstat(self._fd).st_mode):
                    _mend_end(self._fd)
            except OSError:
                os.close(self._fd)
                raise

    def append(self, line: str) -> None:
        """Appends `line` (without newline). After a `WriteError` the file ends where it ended before the call."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed: write before close(), or open a new writer")
        data = memoryview(line.encode("utf-8") + b"\n")
        before = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            note = ""
            try:
                os.ftruncate(self._fd, before)
            except OSError as second:  # not a regular file, or a disk that refuses everything
                note = f" (and the half-written last line could not be removed: {second.strerror}; readers leave it out)"
            raise write_error(error, self.path, note) from error

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with explained(self.path):
                os.close(fd)


def _mend_end(fd: int) -> None:
    """Cuts a torn last line off, or ends it with the newline that it lacks when it is whole."""
    size = end = os.fstat(fd).st_size
    tail = b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - _BLOCK)
        tail = os.pread(fd, end - start, start) + tail
        end = start
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return
    if _is_object(torn):
        os.write(fd, b"\n")
    else:
        os.ftruncate(fd, size - len(torn))


def _is_object(line: bytes) -> bool:
    return _object(line) is not None


def _object(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it is none, or beyond the bounds."""
    parsed = read_json(line, LINE)
    return parsed.value if isinstance(parsed.value, dict) else None


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All objects of a JSON-lines file, and one sentence per line that is not one (a torn last line is no fault).

    Returns:
      The objects in the order of the file, and the faults, for instance `["runs/1/metrics.jsonl, line 3: ..."]`.

    Raises:
      FileNotFoundError: when there is no such file.
      LineError: when it is no regular file, or cannot be opened.
    """
    objects, faults, torn = [], [], False
    with open_file(path, LineError) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
            file.seek(0)
        for _, value, fault in json_lines(file, os.fspath(path), LINE):
            if value is not None:
                objects.append(value)
            elif not torn or file.tell() < size:
                faults.append(f"{fault}; delete that line or restore the file")
    return objects, faults


def read_whole(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSON-lines file; a torn last line is left out.

    Raises:
      FileNotFoundError: when there is no such file.
      LineError: for any other line that is not a JSON object.
    """
    objects, faults = read_lines(path)
    if faults:
        raise LineError(faults[0])
    return objects


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrites a JSON-lines file with the lines whose object `keep` accepts, byte for byte; atomic.

    Raises:
      LineError: when a line before the last is not a JSON object (nothing is changed then).
      WriteError: when the new file cannot be written (the old one is intact then).
    """
    path = pathlib.Path(path)
    if not path.exists():
        return
    read_whole(path)  # refuses a damaged file before anything is changed
    old = path.read_bytes()
    lines = [(line, _object(line)) for line in old.split(b"\n")]
    new = b"".join(line + b"\n" for line, value in lines if value is not None and keep(value))
    if new != old:
        replace_file(path, new)


def replace_file(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that a reader sees the old file or the new one, and never a part of either.

    Raises:
      WriteError: when it cannot be written; the old file is intact then.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
