"""Splits by content, and the tasks of each by number (law 12)."""

import pytest

from marl_llm.workflows import Task
from marl_llm.workflows.splits import check_split, drawn_tasks, hold_out, listed_tasks, split_of

SHARES = {"train": 0.5, "validation": 0.2, "test": 0.3}


def test_contents_fall_into_splits_by_their_shares_and_always_into_the_same():
    found = [split_of(f"content {n}", SHARES) for n in range(4000)]
    for split, share in SHARES.items():
        assert abs(found.count(split) / 4000 - share) < 0.03, split
    assert found == [split_of(f"content {n}", SHARES) for n in range(4000)]


def test_what_rounding_leaves_belongs_to_the_last_split():
    assert {split_of(str(n), {"train": 0.0, "test": 0.0}) for n in range(20)} == {"test"}


def test_listed_rows_come_again_from_the_start_with_their_own_numbers():
    tasks = listed_tasks({"train": [Task(7, {"q": "a"}, {"gold": 1}), Task(8, {"q": "b"})], "test": [Task(0, {"q": "c"})]})
    found = tasks("train", 3, 3)
    assert [(task.number, task.fields["q"], task.split) for task in found] == [(3, "b", "train"), (4, "a", "train"), (5, "b", "train")]
    assert found[1].hidden == {"gold": 1}
    assert tasks("train", 4, 1) == tasks("train", 3, 3)[1:2]


def test_a_listed_task_keeps_all_that_is_no_place():
    tasks = listed_tasks({"train": [Task(5, {"q": 1}, {"gold": 2}, "", "regression", "template 3")]})
    assert tasks("train", 7, 1) == [Task(7, {"q": 1}, {"gold": 2}, "train", "regression", "template 3")]


@pytest.mark.parametrize("tasks", [listed_tasks({"train": [], "test": []}), drawn_tasks(lambda split, n: Task(n, {}), SHARES)])
def test_an_unknown_split_is_refused_with_those_that_there_are(tasks):
    with pytest.raises(ValueError, match=r"unknown split 'dev'; the splits are train, "):
        tasks("dev", 0, 1)
    with pytest.raises(ValueError, match="unknown split"):
        check_split("dev", SHARES)


@pytest.mark.parametrize(("rows", "held"), [(5, 1), (4, 0), (100, 20), (5000, 1000), (9000, 1000)])
def test_the_last_fifth_is_for_validation_and_never_more_than_a_thousand(rows, held):
    kept, validation = hold_out(range(rows))
    assert len(validation) == held
    assert kept + validation == list(range(rows))
