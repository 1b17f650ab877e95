"""Tasks of two data files: one to train on, whose last fifth is for validation, and one for the test; no problem is in both (law 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marl_llm.workflows import Task
from marl_llm.workflows.answers import normalise_answer
from marl_llm.workflows.rows import DataError, Loaded, log_dropped, without
from marl_llm.workflows.splits import Tasks, hold_out, listed_tasks

FEWEST = 5  # training rows, for the last fifth is the validation split
LeaveOut = Callable[[list[Task], list[Task]], list[Task]]  # tasks, others -> those of the tasks that are none of the others


def check_two_files(train: str, test: str, error: type[ValueError] = ValueError) -> None:
    """Raises `error` unless both files are named."""
    if not train or not test:
        raise error("train and test must name parquet, jsonl or json files, e.g. --config.game.train=nq/train.parquet")


def check_disjoint(train: Sequence[Task], held_out: Sequence[Task], field: str = "question") -> None:
    """Raises `DataError` naming a `field`, compared after normalisation, that stands in both (law 12)."""
    seen = {normalise_answer(str(task.fields[field])): task for task in train}
    for task in held_out:
        if (other := seen.get(normalise_answer(str(task.fields[field])))) is not None:
            raise DataError(
                f"{field} {task.fields[field]!r:.120} is row {other.number} of {other.split} and row {task.number} of {task.split}: "
                "remove it from one of them"
            )


def apart_from_test(rows: Loaded, held_out: Loaded, field: str, train: str, test: str) -> list[Task]:
    """The training tasks whose `field` is that of no test task; the log says which rows of both files are left out."""
    apart = without(rows.tasks, held_out.tasks, field)
    for path, loaded in ((train, rows), (train, apart), (test, held_out)):
        log_dropped(path, loaded)
    return apart.tasks


def unlike(field: str) -> LeaveOut:
    """Leaves out tasks whose `field`, normalised as an answer is, is that of another."""

    def text(task: Task) -> str:
        return normalise_answer(str(task.fields[field]))

    def leave_out(tasks: list[Task], others: list[Task]) -> list[Task]:
        known = {text(task) for task in others}
        return [task for task in tasks if text(task) not in known]

    return leave_out


def disjoint_files(load: Callable[..., list[Task]], train: str, test: str, field: str, bad_rows: str) -> Tasks:
    """The tasks of two files. Raises `ValueError` for files that are not named, `DataError` for a `field` that is in both."""
    check_two_files(train, test)
    rows, held_out = load(train, "train", bad_rows=bad_rows), load(test, "test", bad_rows=bad_rows)
    check_disjoint(rows, held_out, field)
    return split_tasks(rows, held_out, unlike(field), train, test)


def split_tasks(rows: Sequence[Task], held_out: Sequence[Task], leave_out: LeaveOut, train: str, test: str) -> Tasks:
    """The tasks of both files, again and again from their start. The last fifth of `rows` is the validation split.

    Args:
      leave_out: takes those that come again for validation out of the rest.
      train, test: files, for messages.

    Raises `DataError` for too few rows, or where nothing is left to train on.
    """
    if len(rows) < FEWEST or not held_out:
        sizes = f"{train} has {len(rows)} usable rows and {test} {len(held_out)}"
        raise DataError(f"{sizes}; at least {FEWEST} and 1 are needed: the last fifth of the first is the validation split")
    kept, validation = hold_out(rows)
    training = leave_out(kept, validation)
    if not training:
        raise DataError(f"{train}: each of its first {len(kept)} rows comes again in the last ones, which are the validation split")
    return listed_tasks({"train": training, "validation": validation, "test": list(held_out)})
