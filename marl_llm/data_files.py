"""Rows of the files that tasks and passages are read from: parquet, JSON lines (also compressed with gzip) and JSON.

A file is somebody else's: it may be damaged, of another kind than its name says, or made to unpack to far more than it weighs. Rows are
read one after the other, so that memory does not grow with the file, and each refusal is one line with the file, the place and what to do.

| what | is read up to | why |
|---|---|---|
| rows, without a limit | `MOST_ROWS` | tasks are kept in memory |
| a line, or a whole `.json` | `MOST_LINE`, `MOST_JSON` bytes | it is read at once |
| what a file unpacks to | `UNPACKED` times its size, and `SPARE` bytes more | gzip and parquet repeat a text for next to nothing |
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import decimal
import gzip
import io
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

from marl_llm import hints
from marl_llm.errors import UserError
from marl_llm.untrusted import Bounds, open_file, parse_json, read_file

MOST_ROWS = 1_000_000
MOST_LINE = 256 << 20
MOST_JSON = 1 << 30
UNPACKED, SPARE = 64, 256 << 20
BATCH_BYTES, BATCH_ROWS = 64 << 20, (16, 1024)  # a batch of fewer than 16 rows costs more than what it holds
# NaN is how tables write that a value is missing; an integer may have as many digits as Python reads.
ROW = Bounds(size=MOST_LINE, depth=64, values=5_000_000, digits=4300, infinite=True, nan=True)
TABLE = Bounds(size=MOST_JSON, depth=64, values=20_000_000, digits=4300, infinite=True, nan=True)
KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json")
_OTHER_KINDS = {
    b"PAR1": ("a parquet file", "name it .parquet"),
    b"\x1f\x8b": ("compressed with gzip", "name it .jsonl.gz"),
    b"BZh": ("compressed with bzip2", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    codecs.BOM_UTF32_LE: ("UTF-32 text", "save it as UTF-8"),
    codecs.BOM_UTF16_LE: ("UTF-16 text", "save it as UTF-8"),
    codecs.BOM_UTF16_BE: ("UTF-16 text", "save it as UTF-8"),
}


class DataError(UserError, ValueError):
    """A file or a row that is not what a loader reads; the message says which, what was found, and what belongs there."""


def read_rows(path: str | pathlib.Path, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a `.parquet`, a `.jsonl` (or `.jsonl.gz`) or a `.json` file (a list of objects), one after the other.

    Lines end at a line feed alone, and a byte-order mark in front of one is left out. All texts can be stored: halves of characters are
    replaced. Of parquet, decimals and times become texts, and bytes that are UTF-8 too.

    Args:
      limit: read only so many rows; None: all, and more than `MOST_ROWS` are refused.

    Raises:
      DataError: naming file and place: another kind of file, a damaged one, a row that is no object, too many rows.
      FileNotFoundError: there is no such file.
    """
    most = None if limit is not None else MOST_ROWS
    for number, (_, row) in enumerate(located_rows(path, most)):
        if limit is not None and number >= limit:
            return
        yield row


def located_rows(path: str | pathlib.Path, most: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `read_rows`, each row with the words that name its place; a file of more than `most` rows is refused (None: of any number)."""
    path = pathlib.Path(path)
    kind = next((kind for kind in KINDS if path.name.lower().endswith(kind)), "")
    _check_file(path, kind)
    if kind == ".parquet":
        rows = _parquet_rows(path, most)
    else:
        rows = _json_rows(path) if kind == ".json" else _line_rows(path, kind == ".jsonl.gz")
    for number, row in enumerate(rows):
        _check_count(path, number + 1, most)
        yield row


def _check_count(path: pathlib.Path, rows: int, most: int | None) -> None:
    if most is not None and rows > most:
        raise DataError(f"{path}: more than {most:,} rows, which do not fit into memory; take a part of them into another file")


def _check_file(path: pathlib.Path, kind: str) -> None:
    """Raises for a file that is not there, is not regular or is, by its first bytes, of another kind than its name says."""
    if not kind:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    try:
        with open_file(path, DataError) as file:
            head = file.read(6)
    except FileNotFoundError:
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = hints.meant(path.name, beside)
        if not path.parent.is_dir():
            hint = f": there is no directory {path.parent}"
        elif any(sign in path.name for sign in "*?["):
            hint = ": patterns are not expanded, name one file"
        raise FileNotFoundError(f"there is no file {path} (from {os.getcwd()}){hint}") from None
    if not head and kind == ".jsonl.gz":
        raise DataError(f"{path}: damaged or cut before line 1 (it is empty); get the file again")
    for mark, (description, remedy) in _OTHER_KINDS.items():
        if head.startswith(mark) and remedy != f"name it {kind}":
            raise DataError(f"{path}: not a {kind} file, it is {description}; {remedy}")


def _allowed(path: pathlib.Path) -> int:
    """Bytes that a file may unpack to."""
    return UNPACKED * path.stat().st_size + SPARE


def _unpacked_too_much(path: pathlib.Path) -> DataError:
    return DataError(
        f"{path}: its {path.stat().st_size:,} bytes unpack to more than {_allowed(path):,}; at most {UNPACKED} times the size of a file "
        f"and {SPARE >> 20} MiB are read. If it is what you want, unpack it into a .jsonl file"
    )


def _line_rows(path: pathlib.Path, packed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    left, number = _allowed(path), 0
    with open_file(path, DataError) as raw, gzip.GzipFile(fileobj=raw) if packed else contextlib.nullcontext(raw) as lines:
        while line := _next_line(path, lines, number):
            number, left = number + 1, left - len(line)
            if left < 0:
                raise _unpacked_too_much(path)
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield f"{path}, line {number}", _object(line, f"{path}, line {number}")


def _next_line(path: pathlib.Path, lines: io.BufferedIOBase, before: int) -> bytes:
    try:
        line = lines.readline(MOST_LINE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged or cut behind line {before:,} ({error}); get the file again") from error
    if len(line) > MOST_LINE:
        raise DataError(f"{path}, line {before + 1}: longer than {MOST_LINE:,} bytes")
    return line


def _object(line: bytes, where: str) -> dict[str, Any]:
    row = parse_json(line, where, None, ROW, DataError)
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; expected an object")
    return row


def _json_rows(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    data = read_file(path, MOST_JSON, DataError)
    try:
        rows = parse_json(data, os.fspath(path), None, TABLE, DataError)
    except DataError as error:
        first = data.split(b"\n", 1)[0]
        if data.lstrip(codecs.BOM_UTF8 + b" \r\n\t").startswith(b"{") and first.rstrip().endswith(b"}"):
            raise DataError(f"{error}; if each line of it is an object, name it .jsonl") from None
        raise
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path}: expected a list of objects")
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", row


def _parquet_rows(path: pathlib.Path, most: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: reading parquet needs pyarrow: pip install 'marl_llm[tools]'") from error
    left, number = _allowed(path), 0
    try:
        with open_file(path, DataError) as raw, pyarrow.parquet.ParquetFile(raw) as table:
            _check_count(path, table.metadata.num_rows, most)
            for batch in table.iter_batches(batch_size=_batch_rows(table.metadata, path)):
                columns = [_values(column, f"{path}, column {name!r}") for name, column in zip(batch.schema.names, batch.columns)]
                for row in zip(*columns):
                    left -= _weight(row)
                    if left < 0:
                        raise _unpacked_too_much(path)
                    yield f"{path}, row {number}", dict(zip(batch.schema.names, row))
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: a damaged parquet file, or one of an unknown kind ({_short(error)}); get it again") from error


def _batch_rows(about: Any, path: pathlib.Path) -> int:
    """Rows to read at once, so that a batch is small even if each of its values is the largest that the file can hold."""
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    largest = max((group.total_byte_size for group in groups), default=0)
    values = max((group.column(number).num_values for group in groups for number in range(group.num_columns)), default=0)
    if not 0 <= max(largest, 8 * values) <= _allowed(path):  # a million nulls of a list weigh nothing in the file
        raise _unpacked_too_much(path)
    least, most = BATCH_ROWS
    return min(most, max(least, BATCH_BYTES // max(largest, 1)))


def _values(column: Any, where: str) -> list[Any]:
    """The values of a column of a batch. Raises `DataError` for one that Python cannot hold or that is not UTF-8."""
    import pyarrow

    try:
        if pyarrow.types.is_temporal(column.type):
            column = column.cast(pyarrow.string())
        return [_plain(value) for value in column.to_pylist()]
    except UnicodeDecodeError:
        raise DataError(f"{where}: a text that is not UTF-8; write the file again with UTF-8 texts") from None
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{where}: a value of type {column.type} that cannot be read ({_short(error)})") from error


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it: decimals and times as text, bytes as text if they are one."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):  # then it is no text, such as a picture
            return value.decode()
    return value


def _weight(value: Any) -> int:
    """About as many bytes as a value takes in memory."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple):
        return 8 * len(value) + sum(map(_weight, value))
    return sum(map(_weight, value.values())) if isinstance(value, dict) else 8


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
