"""Questions with accepted answers, from the files that the published systems train on.

Parquet or JSON lines, as released for NQ and HotpotQA (UnityMAS-O's `<name>/{train,test}_verl.parquet`, M-ASK's and Search-R1's files): the
question is in `question`, `query` or `problem`, the answers in `golden_answers`, `answers`, `answer`, `ground_truth` or
`reward_model.ground_truth` (there a list, a text, or an object with `target`). Rows without a usable question or answer are an error, or
left out with `bad_rows="drop"`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from marl_llm.workflows import Task
from marl_llm.workflows.answers import normalise_answer
from marl_llm.workflows.rows import RowRefused, log_dropped, read_tasks

QUESTION = ("question", "query", "problem")
ANSWERS = ("golden_answers", "answers", "answer", "ground_truth", "reward_model.ground_truth")


def load_questions(path: str | pathlib.Path, split: str, limit: int | None = None, bad_rows: str = "refuse") -> list[Task]:
    """Tasks with `question`, and hidden `answers`, numbered by row.

    Args:
      split: what the tasks are marked as; the file decides what is in it, so check with `check_disjoint`.
      limit: read only so many rows.
      bad_rows: "refuse" rows that cannot be used, or "drop" them and say in the log how many for which reason.

    Raises:
      DataError: naming the row.
    """

    def read(number: int, row: Mapping[str, Any]) -> Task:
        question = next((text for name in QUESTION if isinstance(text := _get(row, name), str) and text.strip()), None)
        if question is None:
            raise RowRefused("no question", f"expected a text in one of {', '.join(QUESTION)}; the row has {', '.join(row)}")
        return Task(number, {"question": question.strip()}, {"answers": accepted_answers(row)}, split)

    return log_dropped(path, read_tasks(path, read, "", bad_rows, limit))


def accepted_answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Accepted answers of a row, each once.

    An answer without a word after normalisation, such as the blood type "A", would equal an empty reply: it is left out, and a row that has
    no other raises `RowRefused`, as does one without an answer, or with one that is no text and no number. A missing one (null, or a
    table's NaN) is left out too.
    """
    for name in ANSWERS:
        if answers := _present(_get(row, name)):
            if unknown := [answer for answer in answers if isinstance(answer, bool) or not isinstance(answer, str | int | float)]:
                raise RowRefused("an answer of an unknown form", f"{name} holds a {type(unknown[0]).__name__}")
            texts = tuple(dict.fromkeys(str(answer).strip() for answer in answers))
            usable = tuple(text for text in texts if normalise_answer(text))
            if not usable:
                raise RowRefused("no answer with a word", f"the answer {texts[0]!r:.80} has no word left after normalisation")
            return usable
    raise RowRefused("no answer", f"expected a text or a list in one of {', '.join(ANSWERS)}; the row has {', '.join(row)}")


def _present(answers: Any) -> list[Any]:
    """The answers of a value that are not missing: neither null nor NaN, which differs from itself."""
    if isinstance(answers, Mapping):
        answers = answers.get("target")
    if isinstance(answers, str):
        answers = [answers]
    return [answer for answer in answers if answer is not None and answer == answer] if isinstance(answers, list | tuple) else []


def _get(row: Mapping[str, Any], name: str) -> Any:
    """A value by dotted name; None where there is none."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
