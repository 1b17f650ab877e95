"""Rows of the files that tasks are read from."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any


class DataError(ValueError):
    """A file or a row that is not what a loader reads; the message says which, what was found, and what belongs there."""


def read_rows(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """Rows of a `.parquet`, a `.jsonl` or a `.json` file (a list of objects), one after the other.

    Raises `DataError` for another kind of file, a broken line (with its number), or a row that is no object; `FileNotFoundError`.
    """
    path = pathlib.Path(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet  # of the extra `tools`: only who reads parquet needs it

        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(line, f"{path}, line {number}")
    elif path.suffix == ".json":
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not JSON: {error}") from error
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise DataError(f"{path}: expected a list of objects")
        yield from found
    else:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use .parquet, .jsonl or .json")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; expected an object")
    return row
