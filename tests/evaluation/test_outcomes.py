"""The record of an evaluation: its mean, its interval by task, what void plays count for, and paired comparisons."""

import math

import numpy as np
import pytest

from marl_llm.evaluation import Evaluation, Outcome, clustered, paired, wilson


def record(outcomes, split="test", formed=None):
    return Evaluation(split, {"tool": "trained"}, 0.0, "success", tuple(outcomes), formed or {"tool": 0.5})


FIVE = [
    Outcome(0, 0, 1.0, 1, team={"moves": 3.0}),
    Outcome(1, 0, 0.0, 2, team={"moves": 5.0}),
    Outcome(2, 0, 1.0, 9, void=True),
    Outcome(3, 0, 1.0, 2, team={"moves": 1.0}),
    Outcome(4, 0, 1.0, 1, team={"moves": 3.0}),
]


def test_void_plays_win_nothing_and_count_for_nothing():
    out = record(FIVE).summary()
    assert (out["episodes"], out["tasks"], out["void"]) == (4, 4, 1)
    assert out["success"] == 3 / 4
    assert out["interval"] == list(wilson(3, 4))
    assert out["turns"] == (1 + 2 + 2 + 1) / 4
    assert out["team"] == {"moves": 3.0}
    assert out["roles"] == {"tool": {"well_formed": 0.5}}


def test_an_evaluation_of_nothing_but_void_plays_is_defined():
    out = record([Outcome(0, 0, 1.0, 3, void=True)]).summary()
    assert (out["success"], out["interval"], out["episodes"], out["turns"]) == (0.0, [0.0, 1.0], 0, 0.0)


def test_the_interval_is_clustered_by_task():
    """Ten plays of one task that all end alike say no more than one play of it."""
    rng = np.random.default_rng(0)
    tasks = rng.random(40)
    once = clustered([[x] for x in tasks])
    repeated = clustered([[x] * 10 for x in tasks])
    assert repeated == pytest.approx(once)
    independent = clustered([list(rng.random(10)) for _ in range(40)])
    assert independent[1] - independent[0] < 0.6 * (once[1] - once[0])


def test_an_evaluation_s_interval_takes_plays_of_one_task_and_tasks_of_one_cluster_together():
    plays = [Outcome(task, n, float(task % 2), 1, cluster="ab"[task // 2] if task < 4 else "") for task in range(6) for n in range(3)]
    assert record(plays).interval == clustered([[0.0] * 3 + [1.0] * 3, [0.0] * 3 + [1.0] * 3, [0.0] * 3, [1.0] * 3])
    assert record([one for one in plays if one.task >= 4]).interval == clustered([[0.0] * 3, [1.0] * 3]) == (0.0, 1.0)


def test_the_interval_of_single_plays_is_students_and_that_of_successes_is_wilsons():
    x = np.asarray([0.1, 0.4, 0.35, 0.8])
    half = 3.182 * x.std(ddof=1) / 2  # t with three degrees of freedom, n = 4
    assert clustered([[v] for v in x]) == pytest.approx((max(0, x.mean() - half), min(1, x.mean() + half)))
    assert clustered([[1.0], [0.0], [1.0]]) == wilson(2, 3)
    assert clustered([[0.5, 0.7]]) == (0.0, 1.0)
    assert clustered([]) == (0.0, 1.0)


def test_the_clustered_interval_holds_what_it_says():
    """Coverage of the true mean over many draws of tasks with their own difficulty, four plays each."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        difficulty = rng.beta(2, 2, 30)
        low, high = clustered([list((rng.random(4) < p).astype(float)) for p in difficulty])
        hits += low <= 0.5 <= high
    assert 0.92 < hits / 400 < 0.98


def test_two_teams_are_compared_task_by_task():
    first = record([Outcome(n, 0, s, 1) for n, s in enumerate((0.0, 0.2, 0.4, 0.6))])
    second = record([Outcome(n, 0, s, 1) for n, s in enumerate((0.1, 0.3, 0.5, 0.7, 0.9))])
    out = paired(first, second)
    assert out["tasks"] == 4
    assert out["difference"] == pytest.approx(0.1)
    assert out["interval"] == pytest.approx([0.1, 0.1])
    one = paired(record(FIVE[:1]), record(FIVE[:1]))
    assert one == {"difference": 0.0, "interval": [-math.inf, math.inf], "tasks": 1}
    with pytest.raises(ValueError, match="share no task"):
        paired(first, record(FIVE[:1], split="validation"))


def test_a_task_counts_once_in_a_comparison_however_often_it_was_played():
    """Task 0 is played four times and half won, task 1 once: it is the tasks' means whose differences are averaged."""
    plays = lambda *scores: [Outcome(0, n, score, 1) for n, score in enumerate(scores)]  # noqa: E731
    first, second = record([*plays(1.0, 0.0, 1.0, 0.0), Outcome(1, 0, 0.0, 1)]), record([*plays(1.0, 1.0), Outcome(1, 0, 0.0, 1)])
    assert first.per_task == {0: 0.5, 1: 0.0}
    assert paired(first, second)["difference"] == pytest.approx((0.5 + 0.0) / 2)
