"""Submissions: predictions in a CSV file, joined by id with what they are about. Whoever wrote the file is a program of a policy.

Anything that is missing, doubled, unreadable or not finite makes a submission invalid; the order of its rows and columns, and columns that
nobody asked for, change nothing. (The release compares by position, cuts both to the shorter, and reads text as 0.)
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from marl_llm.untrusted import valid_text

MAX_BYTES = 256 << 20  # of a submission; a larger one is invalid
MAX_FIELD = 4096  # characters of one value
# Why a submission is invalid.
PROBLEMS = (
    "missing", "empty", "too_large", "unreadable", "column_missing", "column_doubled", "row_length",
    "id_doubled", "id_unknown", "id_missing", "value_missing", "not_a_number", "not_finite", "out_of_range",
)  # fmt: skip
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_NOT_FINITE = re.compile(r"(?i)[+-]?(?:nan|inf|infinity)|<na>|na|null|none")


@dataclasses.dataclass(frozen=True, eq=False)
class Joined:
    """A submission beside what it is about."""

    columns: Mapping[str, np.ndarray]  # target -> its values in the order of the ids; empty of an invalid submission
    problem: str = ""  # the empty string, or one of `PROBLEMS`
    detail: str = ""  # where, for people

    @property
    def ok(self) -> bool:
        """Whether every id has a value of every target."""
        return not self.problem


class SubmissionError(ValueError):
    """Why a value or a submission is invalid: `problem` of `PROBLEMS`, and where, as `detail`."""

    def __init__(self, problem: str, detail: str = ""):
        super().__init__(problem)
        self.problem, self.detail = problem, detail


def number(text: str) -> float:
    """A finite number. Raises `SubmissionError`."""
    if not _NUMBER.fullmatch(text):
        raise SubmissionError("not_finite" if _NOT_FINITE.fullmatch(text) else "not_a_number", text[:40])
    value = float(text)
    if not math.isfinite(value):
        raise SubmissionError("not_finite", text[:40])
    return value


def label(text: str) -> str:
    """A class as text; whole numbers are written in one way, so that 1.0 is 1. Raises `SubmissionError` for none."""
    if _NOT_FINITE.fullmatch(text):
        raise SubmissionError("not_finite", text)
    if _NUMBER.fullmatch(text) and math.isfinite(value := float(text)) and value == round(value) and abs(value) < 2**53:
        return str(int(value))
    return text


def same_id(text: str) -> str:
    """An id as it is compared: like a label, because a table that was read and written holds 7.0 for 7."""
    return label(text) if not _NOT_FINITE.fullmatch(text) else text


def join(
    data: bytes | None,
    ids: Sequence[str],
    id_column: str,
    targets: Sequence[str],
    numbers: bool,
    low_high: tuple[float, float] | None = None,
) -> Joined:
    """A submission joined with `ids`.

    Args:
      data: the content of the file; None: there is none.
      ids: each once, as `same_id` writes them.
      id_column, targets: columns that it must have, each once; others are ignored.
      numbers: whether values are numbers (arrays of float64) or labels (arrays of texts).
      low_high: bounds of numbers, e.g. of probabilities.
    """
    try:
        return Joined(_columns(data, ids, id_column, targets, numbers, low_high))
    except SubmissionError as invalid:
        return Joined({}, invalid.problem, invalid.detail)


def _columns(
    data: bytes | None,
    ids: Sequence[str],
    id_column: str,
    targets: Sequence[str],
    numbers: bool,
    low_high: tuple[float, float] | None,
) -> dict[str, np.ndarray]:
    header, rows = _table(data)
    places = {}
    for column in (id_column, *targets):
        if header.count(column) != 1:
            raise SubmissionError("column_doubled" if column in header else "column_missing", column)
        places[column] = header.index(column)
    place_of_id = {row_id: place for place, row_id in enumerate(ids)}
    columns: dict[str, list] = {target: [None] * len(ids) for target in targets}
    seen = [False] * len(ids)
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise SubmissionError("row_length", f"line {line}")
        place = place_of_id.get(same_id(row[places[id_column]].strip()))
        if place is None or seen[place]:
            raise SubmissionError("id_unknown" if place is None else "id_doubled", f"line {line}")
        seen[place] = True
        for target in targets:
            text = row[places[target]].strip()
            if not text:
                raise SubmissionError("value_missing", f"line {line}, {target}")
            value = number(text) if numbers else label(text)
            if numbers and low_high and not low_high[0] <= value <= low_high[1]:
                raise SubmissionError("out_of_range", f"line {line}, {target}")
            columns[target][place] = value
    if not all(seen):
        raise SubmissionError("id_missing", f"{seen.count(False)} of {len(ids)}")
    return {target: np.asarray(values, np.float64 if numbers else object) for target, values in columns.items()}


def _table(data: bytes | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV file; lines without anything are left out. Raises `SubmissionError`."""
    if data is None:
        raise SubmissionError("missing")
    if len(data) > MAX_BYTES:
        raise SubmissionError("too_large", f"{len(data):,} bytes")
    text = valid_text(data).removeprefix("\ufeff")
    if not text.strip():
        raise SubmissionError("empty")
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error as error:
        raise SubmissionError("unreadable", str(error)) from error
    if any(len(value) > MAX_FIELD for row in rows for value in row):
        raise SubmissionError("unreadable", f"a value of over {MAX_FIELD} characters")
    return [name.strip() for name in rows[0]], rows[1:]
