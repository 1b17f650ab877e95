"""Mathematical problems with one answer, from files in the public schemas of Polaris, AIME24, AIME25, OlympiadBench and GSM8K.

Columns are tried in this order: the problem in `problem`, `Problem`, `question`; the answer in `answer`, `Answer`, `final_answer`, and,
where none of these is, behind the last box or `####` of `solution`, `Solution`. A list of one answer is unwrapped: math-verify reads
nothing from the text `['2']`, so that a list kept as text would mark a right integer wrong. GSM8K's answer is what follows its `####`.
OlympiadBench's `context`, what several questions share, is read before the question; a problem with a picture is refused.

Parquet (needs pyarrow, of the extra `tools`), JSON lines or JSON. A row that cannot be used is refused by file, row and reason; with
`bad_rows="drop"` it is left out and counted under its reason, because the published files hold some.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.tools.maths import extract_answer, extract_target, is_number
from marl_llm.workflows import Task
from marl_llm.workflows.rows import Loaded, RowRefused, read_tasks, row_error

PROBLEM = ("problem", "Problem", "question")
ANSWER = ("answer", "Answer", "final_answer")
SOLUTION = ("solution", "Solution")
TARGET_CHARACTERS = 500
UNREAD = "an answer that the checker cannot read"
Understood = Callable[[Sequence[str]], Sequence[bool]]


def load_maths(
    path: str | pathlib.Path,
    split: str,
    understood: Understood | None = None,
    difficulty: str = "",
    bad_rows: str = "refuse",
    limit: int | None = None,
) -> Loaded:
    """Tasks of a file, numbered by row.

    Args:
      understood: which of these answers the checker can read, e.g. `understood_by(checker)`; asked for those that are no plain number.
      difficulty: only rows with this `difficulty`, e.g. Polaris's "5/8"; empty: all.
      bad_rows: "refuse" or "drop" those that cannot be used.
      limit: read only so many rows.

    Raises:
      DataError: naming file, row and reason.
    """

    def read(number: int, row: Mapping[str, Any]) -> Task:
        problem, target = read_problem(row)
        return Task(number, {"problem": problem}, {"target": target}, split)

    return understood_tasks(path, read_tasks(path, read, difficulty, bad_rows, limit), understood, bad_rows)


def understood_tasks(path: str | pathlib.Path, loaded: Loaded, understood: Understood | None, bad_rows: str) -> Loaded:
    """The tasks whose answers the checker can read; all where `understood` is None. Raises `DataError` for another, with "refuse"."""
    doubtful = [task for task in loaded.tasks if not is_number(task.hidden["target"])]
    if understood is None or not doubtful:
        return loaded
    unread = {task.number: task for task, good in zip(doubtful, understood([t.hidden["target"] for t in doubtful])) if not good}
    for number, task in unread.items() if bad_rows == "refuse" else ():
        raise row_error(path, number, RowRefused(UNREAD, repr(task.hidden["target"])[:100]))
    kept = [task for task in loaded.tasks if task.number not in unread]
    return Loaded(kept, {**loaded.dropped, UNREAD: len(unread)} if unread else loaded.dropped)


def read_problem(row: Mapping[str, Any]) -> tuple[str, str]:
    """(problem, target) of a row of any of the schemas."""
    problem = next((row[name] for name in PROBLEM if isinstance(row.get(name), str) and row[name].strip()), None)
    if problem is None:
        columns = ", ".join(map(str, row)) or "nothing"
        raise RowRefused("no problem", f"a text is expected in one of {', '.join(PROBLEM)}; the row has {columns}")
    if row.get("is_multiple_answer") is True or str(row.get("is_multiple_answer")).lower() == "true":
        raise RowRefused("several answers", "is_multiple_answer is true")
    if row.get("error") not in (None, "", "None", 0, "0"):
        raise RowRefused("an answer with a tolerance", f"error is {row['error']!r:.40}")
    if row.get("image_1") not in (None, ""):
        raise RowRefused("a problem with a picture", "image_1 is set")
    if isinstance(row.get("context"), str) and row["context"].strip():
        problem = f"{row['context'].strip()}\n{problem}"
    name = next((name for name in ANSWER if row.get(name) not in (None, "", [])), None)
    if name is not None:
        answer = _one(row[name], name)
        if extract_answer(answer) is None and "####" in answer:
            raise RowRefused("no answer", f"{name} has nothing behind its ####")
        return problem.strip(), _checked(extract_target(answer), name)
    name = next((name for name in SOLUTION if isinstance(row.get(name), str) and row[name].strip()), None)
    if name is None:
        raise RowRefused("no answer", f"one of {', '.join((*ANSWER, *SOLUTION))} is expected; the row has {', '.join(map(str, row))}")
    if extract_answer(row[name]) is None:
        raise RowRefused("no answer", f"{name} ends in no box and no ####")
    return problem.strip(), _checked(extract_target(row[name]), name)


def _one(value: Any, name: str) -> str:
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise RowRefused("several answers", f"{name} is a list of {len(value)}")
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowRefused("an answer of an unknown form", f"{name} is a {type(value).__name__}")
    text = str(value).strip()
    if not text:
        raise RowRefused("no answer", f"{name} is empty")
    return text


def _checked(target: str, name: str) -> str:
    target = target.strip()
    if len(target) > TARGET_CHARACTERS:
        raise RowRefused("an answer that is too long", f"{name} has {len(target)} characters; {TARGET_CHARACTERS} are allowed")
    if not _finite(target):
        raise RowRefused("an answer that is not finite", f"{name} is {target}")
    return target.removeprefix("$").removesuffix("$").strip() if target.count("$") == 2 else target


def _finite(text: str) -> bool:
    """False for nan, inf and numbers beyond a float, which a missing value of a table becomes; True for what is no number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return True


def understood_by(checker: Any) -> Understood:
    """Which targets a `MathsChecker` can read. Raises `InfrastructureError` where it gives no outcome for another reason."""

    def understood(targets: Sequence[str]) -> list[bool]:
        results = checker.check_batch(["#### 0"] * len(targets), targets, "hashes")
        for result in results:
            if not result.ok and result.failure.kind != "bad_input":
                result.outcome()
        return [result.ok for result in results]

    return understood
