"""Splits: the part of an environment that a problem belongs to, and the tasks of each part by number.

A generated problem belongs to a split by its content, so that no seed can make a training problem equal a test problem (law 12). Rows of
files are parts already; the last of the training rows are the validation split.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from marl_llm.workflows.trajectory import Task

HOLD_OUT = 1000  # most rows at the end of a training file that are for validation
Tasks = Callable[[str, int, int], list[Task]]
Row = TypeVar("Row")


def split_of(content: str, shares: Mapping[str, float]) -> str:
    """The split of this content by a hash, uniform over all contents. `shares` sum to 1; what rounding leaves is the last split's."""
    place = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") / 2**64
    for split, share in shares.items():
        if place < share:
            return split
        place -= share
    return list(shares)[-1]


def check_split(split: str, known: Collection[str]) -> None:
    """Raises `ValueError` for a split that is not known."""
    if split not in known:
        raise ValueError(f"unknown split {split!r}; the splits are {', '.join(known)}")


def drawn_tasks(draw: Callable[[str, int], Task], splits: Collection[str]) -> Tasks:
    """(split, first, count) -> generated tasks, by `draw(split, number)`. The function raises `ValueError` for an unknown split."""

    def tasks(split: str, first: int, count: int) -> list[Task]:
        check_split(split, splits)
        return [draw(split, number) for number in range(first, first + count)]

    return tasks


def listed_tasks(parts: Mapping[str, Sequence[Task]]) -> Tasks:
    """(split, first, count) -> tasks of these parts, again and again from their start. It raises `ValueError` for an unknown split."""

    def tasks(split: str, first: int, count: int) -> list[Task]:
        check_split(split, parts)
        part = parts[split]
        drawn = [part[number % len(part)] for number in range(first, first + count)]
        return [dataclasses.replace(task, number=number, split=split) for number, task in enumerate(drawn, first)]

    return tasks


def hold_out(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Training rows and validation rows: the last fifth, 1,000 at most."""
    kept = len(rows) - min(HOLD_OUT, len(rows) // 5)
    return list(rows[:kept]), list(rows[kept:])
