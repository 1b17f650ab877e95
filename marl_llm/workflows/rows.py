"""Rows of the files that tasks are read from."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.untrusted import valid_text
from marl_llm.workflows.trajectory import Task

BAD_ROWS = ("refuse", "drop")


class DataError(ValueError):
    """A file or a row that is not what a loader reads; the message says which, what was found, and what belongs there."""


def read_rows(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """Rows of a `.parquet`, a `.jsonl` (or `.jsonl.gz`) or a `.json` file (a list of objects), one after the other.

    Raises `DataError` for another kind of file, a broken line (with its number), or a row that is no object; `FileNotFoundError`.
    """
    path = pathlib.Path(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet  # of the extra `tools`: only who reads parquet needs it

        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    elif path.suffix == ".jsonl" or path.suffixes[-2:] == [".jsonl", ".gz"]:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(line, f"{path}, line {number}")
    elif path.suffix == ".json":
        try:
            found = _valid(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not JSON: {error}") from error
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise DataError(f"{path}: expected a list of objects")
        yield from found
    else:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; use .parquet, .jsonl, .jsonl.gz or .json")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = _valid(json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}; expected an object")
    return row


def _valid(value: Any) -> Any:
    """A JSON value whose texts can be stored: halves of characters, which JSON can spell out, are replaced."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, list):
        return [_valid(item) for item in value]
    return {valid_text(key): _valid(item) for key, item in value.items()} if isinstance(value, dict) else value


class RowRefused(ValueError):
    """Raised by who reads a row, which cannot be used: `kind` counts it, `detail` says more."""

    def __init__(self, kind: str, detail: str = ""):
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class Loaded(NamedTuple):
    """Tasks of a file, and how many rows were left out for which reason."""

    tasks: list[Task]
    dropped: dict[str, int]


def read_tasks(
    path: str | pathlib.Path,
    read: Callable[[int, Mapping[str, Any]], Task],
    difficulty: str = "",
    bad_rows: str = "refuse",
    limit: int | None = None,
) -> Loaded:
    """Tasks of a file's rows.

    Args:
      read: (number, row) -> its task; raises `RowRefused` for a row that cannot be used.
      difficulty: only rows whose `difficulty` is this; empty: all.
      bad_rows: "refuse" raises for a row that cannot be used, "drop" leaves it out and counts it.
      limit: read only so many rows.

    Raises:
      DataError: naming file, row and reason; or an unknown `bad_rows`.
    """
    if bad_rows not in BAD_ROWS:
        raise DataError(f"bad_rows={bad_rows!r} is unknown; choose one of {', '.join(BAD_ROWS)}")
    found, dropped = [], collections.Counter()
    for number, row in enumerate(read_rows(path)):
        if limit is not None and number >= limit:
            break
        if difficulty and str(row.get("difficulty")) != difficulty:
            dropped["another difficulty"] += 1
            continue
        try:
            found.append(read(number, row))
        except RowRefused as refused:
            if bad_rows == "refuse":
                raise row_error(path, number, refused) from refused
            dropped[refused.kind] += 1
    return Loaded(found, dict(dropped))


def row_error(path: str | pathlib.Path, number: int, refused: RowRefused) -> DataError:
    """A row that cannot be used, as an error that says where it is and what to do."""
    return DataError(f"{path}, row {number}: {refused}; remove it, or leave such rows out with bad_rows=drop")


def without(tasks: Sequence[Task], others: Sequence[Task], field: str) -> Loaded:
    """Tasks whose `field` is none of the others', but for case and white space, and how many were left out."""
    text = lambda task: " ".join(str(task.fields[field]).lower().split())  # noqa: E731
    known = {text(task) for task in others}
    kept = [task for task in tasks if text(task) not in known]
    return Loaded(kept, {f"a {field} of the test file": len(tasks) - len(kept)} if len(kept) < len(tasks) else {})
