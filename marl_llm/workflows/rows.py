"""Tasks of the rows of a file (`marl_llm.data_files`)."""

from __future__ import annotations

import collections
import logging
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.data_files import DataError, read_rows
from marl_llm.workflows.trajectory import Task

log = logging.getLogger(__name__)
BAD_ROWS = ("refuse", "drop")


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
    tasks, dropped = [], collections.Counter()
    for number, row in enumerate(read_rows(path, limit)):
        if difficulty and str(row.get("difficulty")) != difficulty:
            dropped["another difficulty"] += 1
            continue
        try:
            tasks.append(read(number, row))
        except RowRefused as refused:
            if bad_rows == "refuse":
                raise row_error(path, number, refused) from refused
            dropped[refused.kind] += 1
    return Loaded(tasks, dict(dropped))


def log_dropped(path: str | pathlib.Path, loaded: Loaded) -> list[Task]:
    """The tasks of a file; says in the log which of its rows are left out."""
    for reason, count in sorted(loaded.dropped.items()):
        log.warning("%s: %d rows are left out: %s", path, count, reason)
    return loaded.tasks


def row_error(path: str | pathlib.Path, number: int, refused: RowRefused) -> DataError:
    """A row that cannot be used, as an error that says where it is and what to do."""
    return DataError(f"{path}, row {number}: {refused}; remove it, or leave such rows out with bad_rows=drop")


def without(tasks: Sequence[Task], others: Sequence[Task], field: str) -> Loaded:
    """Tasks whose `field` is none of the others', but for case and white space, and how many were left out."""
    def text(task):
        return " ".join(str(task.fields[field]).lower().split())

    known = {text(task) for task in others}
    kept = [task for task in tasks if text(task) not in known]
    return Loaded(kept, {f"a {field} of the test file": len(tasks) - len(kept)} if len(kept) < len(tasks) else {})
