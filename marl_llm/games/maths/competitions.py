"""Problems of AIME and AMC, in the files of MAPPA's release: `AIME_1983_2024.json` (933 rows), `aime_2025.json` (30), `amc_eval_32.json`.

Columns: `prompt` and `answer`; `id`, `year`, `problem_number`, `part` and `source` are not read. The paper draws 512 rows of the first
file (seed 42) for training. No file was at hand: the columns are those that the specification of the release names.
"""

from __future__ import annotations

import math
import pathlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.games.maths.data import TARGET_CHARACTERS, Understood, understood_tasks
from marl_llm.tools.maths import extract_target
from marl_llm.workflows import Task
from marl_llm.workflows.rows import DataError, Loaded, RowRefused, read_tasks

COLUMNS = ("prompt", "answer")


def load_competition(
    path: str | pathlib.Path, split: str, understood: Understood | None = None, bad_rows: str = "refuse", limit: int | None = None
) -> Loaded:
    """Tasks of a `.json`, `.jsonl` or `.parquet` file, numbered by row.

    Args:
      understood: which of these answers the checker can read, e.g. `understood_by(checker)`; asked for those that are no plain number.
      bad_rows: "refuse" or "drop" those that cannot be used.
      limit: read only so many rows.

    Raises:
      DataError: naming file, row and reason: no text in `prompt`, no answer or several, one that the checker cannot read, a problem that
        came before; or a file without rows.
    """
    seen: dict[str, int] = {}

    def read(number: int, row: Mapping[str, Any]) -> Task:
        problem, target = read_row(row)
        before = seen.setdefault(plain_text(problem), number)
        if before != number:
            raise RowRefused("a problem that came before", f"in row {before}")
        return Task(number, {"problem": problem}, {"target": target}, split)

    loaded = understood_tasks(path, read_tasks(path, read, "", bad_rows, limit), understood, bad_rows)
    if not loaded.tasks:
        raise DataError(f"{path} has no rows that can be used; rows of {' and '.join(COLUMNS)} are expected")
    return loaded


def read_row(row: Mapping[str, Any]) -> tuple[str, str]:
    """(problem, target). Raises `RowRefused`."""
    if missing := [name for name in COLUMNS if row.get(name) in (None, "", [])]:
        raise RowRefused(f"no {missing[0]}", f"{' and '.join(COLUMNS)} are expected; the row has {', '.join(map(str, row)) or 'nothing'}")
    problem, answer = row["prompt"], row["answer"]
    if not isinstance(problem, str) or not problem.strip():
        raise RowRefused("no prompt", f"prompt is a {type(problem).__name__}; a text is expected, not messages of a chat")
    if isinstance(answer, list | tuple):
        raise RowRefused("several answers", f"answer is a list of {len(answer)}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or (isinstance(answer, float) and not math.isfinite(answer)):
        raise RowRefused("an answer of an unknown form", f"answer is {answer!r:.60}")
    text = str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()
    target = extract_target(text)
    if not target or len(target) > TARGET_CHARACTERS:
        raise RowRefused("an answer of an unknown form", f"answer has {len(target)} characters; 1 to {TARGET_CHARACTERS} are expected")
    return problem.strip(), target


def plain_text(problem: str) -> str:
    """What two problems are compared by: case and white space left out. Signs stay, for they are all that some problems differ by."""
    return " ".join(problem.lower().split())


def check_apart(parts: Mapping[str, Sequence[Task]]) -> None:
    """Raises `DataError` naming a problem that stands in two splits (law 12)."""
    seen: dict[str, Task] = {}
    for tasks in parts.values():
        for task in tasks:
            other = seen.setdefault(plain_text(task.fields["problem"]), task)
            if other is not task:
                where = f"row {other.number} of {other.split} and row {task.number} of {task.split}"
                raise DataError(f"problem {task.fields['problem']!r:.120} is {where}: remove it from one of them")


def pool_of(tasks: Sequence[Task], size: int, seed: int) -> list[Task]:
    """`size` tasks drawn at random, in the order of the file; 0: all. Reading: which 512 the paper drew cannot be told from its seed alone.

    Raises `DataError` where there are fewer.
    """
    if not 0 <= size <= len(tasks):
        raise DataError(f"pool={size}: there are {len(tasks)} training rows; choose 1 to {len(tasks)}, or 0 for all")
    return sorted(random.Random(seed).sample(list(tasks), size), key=lambda task: task.number) if size else list(tasks)
