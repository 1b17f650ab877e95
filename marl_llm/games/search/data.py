"""Questions with accepted answers, from the files that the published systems train on.

Parquet or JSON lines, as released for NQ and HotpotQA (UnityMAS-O's `<name>/{train,test}_verl.parquet`, M-ASK's and Search-R1's files): the
question is in `question`, `query` or `problem`, the answers in `golden_answers`, `answers`, `answer`, `ground_truth` or
`reward_model.ground_truth` (there a list, a text, or an object with `target`). Rows without a usable question or answer are an error, not
silence.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.workflows import Task
from marl_llm.workflows.answers import normalise_answer
from marl_llm.workflows.rows import DataError, read_rows

QUESTION = ("question", "query", "problem")
ANSWERS = ("golden_answers", "answers", "answer", "ground_truth", "reward_model.ground_truth")


def load_questions(path: str | pathlib.Path, split: str, limit: int | None = None) -> list[Task]:
    """Tasks with `question`, and hidden `answers`, numbered by row.

    Args:
      split: what the tasks are marked as; the file decides what is in it, so check with `check_disjoint`.
      limit: read only so many rows.

    Raises:
      DataError: naming the row.
    """
    tasks = []
    for number, row in enumerate(read_rows(path)):
        if limit is not None and number >= limit:
            break
        where = f"{path}, row {number}"
        question = next((found for name in QUESTION if isinstance(found := _get(row, name), str) and found.strip()), None)
        if question is None:
            raise DataError(f"{where}: no question; expected a text in one of {', '.join(QUESTION)}; the row has {', '.join(row)}")
        tasks.append(Task(number, {"question": question.strip()}, {"answers": accepted_answers(row, where)}, split))
    return tasks


def accepted_answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Accepted answers of a row, each once. Raises `DataError` if there is none, or one without a word."""
    for name in ANSWERS:
        found = _get(row, name)
        if isinstance(found, Mapping):
            found = found.get("target")
        if isinstance(found, str):
            found = [found]
        if isinstance(found, Sequence) and found:
            texts = tuple(dict.fromkeys(str(one).strip() for one in found))
            if empty := [one for one in texts if not normalise_answer(one)]:
                raise DataError(f"{where}: the answer {empty[0]!r} has no word left after normalisation")
            return texts
    raise DataError(f"{where}: no answer; expected a text or a list in one of {', '.join(ANSWERS)}; the row has {', '.join(row)}")


def _get(row: Mapping[str, Any], name: str) -> Any:
    """A value by dotted name; None where there is none."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def check_disjoint(train: Sequence[Task], held_out: Sequence[Task], field: str = "question") -> None:
    """Raises `DataError` naming a question, compared after normalisation, that stands in both (law 12)."""
    seen = {normalise_answer(str(task.fields[field])): task for task in train}
    for task in held_out:
        if (other := seen.get(normalise_answer(str(task.fields[field])))) is not None:
            raise DataError(
                f"{field} {task.fields[field]!r:.120} is row {other.number} of {other.split} and row {task.number} of {task.split}: "
                "remove it from one of them"
            )
