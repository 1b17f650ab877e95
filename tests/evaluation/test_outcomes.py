"""The record of an evaluation: its mean, its interval by task, what aborted plays count for, and paired comparisons."""


import math

import numpy as np
import pytest

from marl_llm.evaluation import Evaluation, Outcome, clustered, paired, wilson
from marl_llm.evaluation.intervals import difference, jeffreys


def record(outcomes, split="test", formed=None):
    return Evaluation(split, {"tool": "trained"}, 0.0, "success", tuple(outcomes), formed or {"tool": 0.5})


FIVE = [
    Outcome(0, 0, 1.0, 1, team={"moves": 3.0}),
    Outcome(1, 0, 0.0, 2, team={"moves": 5.0}),
    Outcome(2, 0, 1.0, 9, aborted=True),
    Outcome(3, 0, 1.0, 2, team={"moves": 1.0}),
    Outcome(4, 0, 1.0, 1, team={"moves": 3.0}),
]


def outer(successes, episodes):
    """The outer ends of Wilson's and Jeffreys' intervals."""
    (low, high), (lowest, highest) = wilson(successes, episodes), jeffreys(successes, episodes)
    return min(low, lowest), max(high, highest)


def test_aborted_plays_win_nothing_and_count_for_nothing():
    out = record(FIVE).summary()
    assert (out["episodes"], out["tasks"], out["aborted"]) == (4, 4, 1)
    assert out["success"] == 3 / 4
    assert out["interval"] == list(outer(3, 4))
    assert out["turns"] == (1 + 2 + 2 + 1) / 4
    assert out["team"] == {"moves": 3.0}
    assert out["roles"] == {"tool": {"well_formed": 0.5}}


def test_an_evaluation_of_nothing_but_aborted_plays_is_defined():
    out = record([Outcome(0, 0, 1.0, 3, aborted=True)]).summary()
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
    assert record([one for one in plays if one.task >= 4]).interval == clustered([[0.0] * 3, [1.0] * 3]) == pytest.approx(outer(1, 2))


def test_the_interval_of_single_successes_has_the_outer_ends_and_that_of_scores_beyond_0_and_1_is_students():
    x = np.asarray([1.0, 4.0, 3.5, 8.0])
    half = 3.1824463 * x.std(ddof=1) / 2  # t with three degrees of freedom, n = 4
    assert clustered([[v] for v in x]) == pytest.approx((x.mean() - half, x.mean() + half))
    size = 0.4125 * 0.5875 / (x / 10).var(ddof=1) * 4  # of as many single plays, without the pseudo-cluster
    low, high = clustered([[v / 10] for v in x])
    assert outer(0.4125 * 4, 4)[0] <= low < outer(0.4125 * size, size)[0]
    assert high - low < 1
    assert clustered([[1.0], [0.0], [1.0]]) == outer(2, 3)
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


@pytest.mark.parametrize(("tasks", "plays"), [(2, 1), (3, 2), (3, 8), (5, 2), (10, 8)])
@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_tasks_that_agree_leave_as_wide_an_interval_as_so_many_single_plays(tasks, plays, score):
    won = [[score] * plays for _ in range(tasks)]
    low, high = clustered(won)
    assert 0 <= low <= score <= high <= 1
    if score != 0.5:
        assert (low, high) == pytest.approx(outer(score * tasks, tasks))
    assert high - low > 0.15


@pytest.mark.parametrize(("tasks", "plays", "rate"), [(3, 2, 0.9), (5, 8, 0.5), (10, 1, 0.5), (10, 8, 0.1)])
def test_intervals_of_few_tasks_hold_the_truth_as_often_as_they_say(tasks, plays, rate):
    dice, held, kept = np.random.default_rng(0), 0, 0
    for _ in range(400):
        chance = dice.beta(2 * rate, 2 * (1 - rate), tasks)
        one, two = ((dice.random((tasks, plays)) < chance[:, None]).mean(1) for _ in range(2))
        low, high = clustered([[x] for x in one])
        held += low <= rate <= high
        low, high = difference([[x] for x in two - one])
        kept += low <= 0 <= high
    assert min(held, kept) / 400 > 0.92


@pytest.mark.parametrize("tasks", [3, 5, 10, 100])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_single_plays_hold_the_rate_at_least_as_often_as_stated(tasks, rate):
    """Exact coverage over all outcomes of the binomial. Wilson's interval alone holds .1 and .9 in 91.9 % with five tasks."""
    held = 0.0
    for won in range(tasks + 1):
        low, high = clustered([[1.0]] * won + [[0.0]] * (tasks - won))
        held += math.comb(tasks, won) * rate**won * (1 - rate) ** (tasks - won) * (low <= rate <= high)
    assert held >= 0.93


@pytest.mark.parametrize(("change", "clusters"), [(0.0, 3), (1.0, 3), (-1.0, 5), (0.25, 10)])
def test_differences_that_agree_are_not_certain(change, clusters):
    low, high = difference([[change]] * clusters)
    assert -1 <= low <= change <= high <= 1
    assert high - low > 0.2
    assert difference([[change]]) == difference([]) == (-1.0, 1.0)
    assert difference([[change * 50], [0.0], [50.0]]) == pytest.approx(tuple(50 * x for x in difference([[change], [0.0], [1.0]])))
    assert difference([[change] * 4, [0.0] * 4]) == pytest.approx(difference([[change], [0.0]]))


def test_the_gain_over_common_tasks_is_the_difference_of_the_printed_means_whatever_was_aborted():
    first = record([Outcome(0, 0, 1.0, 1), Outcome(0, 1, 1.0, 1), Outcome(1, 0, 0.0, 1), Outcome(1, 1, 0.0, 1, aborted=True)])
    second = record([Outcome(0, 0, 1.0, 1), Outcome(0, 1, 0.0, 1, aborted=True), Outcome(1, 0, 1.0, 1), Outcome(1, 1, 0.0, 1)])
    assert (first.success, second.success) == (0.5, 0.75)
    assert paired(first, second)["difference"] == pytest.approx(second.success - first.success)


def test_two_teams_are_compared_task_by_task():
    first = record([Outcome(n, 0, s, 1) for n, s in enumerate((0.0, 0.2, 0.4, 0.6))])
    second = record([Outcome(n, 0, s, 1) for n, s in enumerate((0.1, 0.3, 0.5, 0.7, 0.9))])
    out = paired(first, second)
    assert out["tasks"] == 4
    assert out["difference"] == pytest.approx(0.1)
    assert out["interval"][0] < 0.1 < out["interval"][1]
    one = paired(record(FIVE[:1]), record(FIVE[:1]))
    assert one == {"difference": 0.0, "interval": [-1.0, 1.0], "tasks": 1}
    with pytest.raises(ValueError, match="share no task"):
        paired(first, record(FIVE[:1], split="validation"))


def test_a_task_counts_once_in_a_comparison_however_often_it_was_played():
    """Task 0 is played four times and half won, task 1 once: it is the tasks' means whose differences are averaged."""
    def plays(*scores):
        return [Outcome(0, n, score, 1) for n, score in enumerate(scores)]

    first, second = record([*plays(1.0, 0.0, 1.0, 0.0), Outcome(1, 0, 0.0, 1)]), record([*plays(1.0, 1.0), Outcome(1, 0, 0.0, 1)])
    assert first.per_task == {0: 0.5, 1: 0.0}
    assert paired(first, second)["difference"] == pytest.approx((0.5 + 0.0) / 2)


@pytest.mark.parametrize("aborted", [False, True])
def test_the_interval_of_a_comparison_takes_tasks_of_one_cluster_together(aborted):
    """Six tasks of two alike groups of three: what changes together is no more evidence than two changes."""
    change = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    names = ("a", "a", "a", "b", "b", "b")
    lone = [Outcome(6, 0, 0.0, 1), Outcome(7, 0, 1.0, 1, aborted=aborted)]
    first = record([*(Outcome(n, 0, 0.0, 1, cluster=names[n]) for n in range(6)), *lone])
    second = record([*(Outcome(n, 0, change[n], 1, cluster=names[n]) for n in range(6)), *lone])
    alone = [[0.0]] if aborted else [[0.0], [0.0]]
    together = difference([[1.0] * 3, [0.0] * 3, *alone])
    found = paired(first, second)
    assert found["interval"] == pytest.approx(list(together))
    apart = difference([*([x] for x in change), *alone])
    assert found["interval"][1] - found["interval"][0] > 1.2 * (apart[1] - apart[0])
    assert found["tasks"] == 6 + len(alone)


def test_a_comparison_with_several_plays_and_clusters_weighs_every_task_alike():
    def outcomes(won):
        return [
            Outcome(task, n, float(n < won[task]), 1, cluster="pair" if task < 2 else "") for task in range(4) for n in range(1 + task)
        ]

    first, second = record(outcomes((0, 1, 1, 0))), record(outcomes((1, 2, 0, 2)))
    gains = [1.0, 0.5, -1 / 3, 0.5]
    found = paired(first, second)
    assert found["difference"] == pytest.approx(np.mean(gains)) == pytest.approx(second.success - first.success)
    assert found["interval"] == pytest.approx(list(difference([gains[:2], gains[2:3], gains[3:]])))
    assert paired(second, first)["interval"] == pytest.approx([-found["interval"][1], -found["interval"][0]])


def test_the_best_of_several_plays_leaves_out_aborted_ones_and_reads_the_metric_that_was_asked():
    plays = [Outcome(0, n, float(n == 1), 1, team={"tests": n / 4}) for n in range(3)]
    plays += [Outcome(1, n, 1.0, 1, aborted=n == 2, team={"tests": 1.0}) for n in range(3)]
    found = record(plays)
    assert found.at_k("success", 2) == pytest.approx((2 / 3 + 1) / 2)
    assert found.at_k("tests", 2) == pytest.approx(((0.25 + 0.5 + 0.5) / 3 + 1) / 2)
    with pytest.raises(ValueError, match="k=3"):
        found.at_k("success", 3)
