"""pass@k, acc@k and coop@k: the exact expectation against every subset, and its edges."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.evaluation import Evaluation, Outcome, at_k, at_k_by_draws, best_of
from marl_llm.runs.command import ConfigError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.data())
def test_the_expectation_is_the_mean_of_the_maximum_over_every_subset(values, data):
    k = data.draw(st.integers(1, len(values)))
    subsets = list(itertools.combinations(values, k))
    assert best_of(values, k) == pytest.approx(math.fsum(map(max, subsets)) / len(subsets))


def test_of_passes_and_failures_it_is_the_estimator_of_chen_et_al():
    for n, c, k in ((15, 4, 3), (15, 0, 5), (15, 15, 10), (15, 6, 10), (5, 1, 1)):
        want = 1.0 - math.prod(1.0 - k / np.arange(n - c + 1, n + 1)) if n - c >= k else 1.0
        assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(want)


def test_it_grows_with_k_from_the_mean_to_the_maximum():
    rng = np.random.default_rng(0)
    pool = rng.uniform(size=15).tolist()
    found = [best_of(pool, k) for k in range(1, 16)]
    assert found[0] == pytest.approx(np.mean(pool))
    assert found[-1] == max(pool)
    assert all(a <= b + 1e-12 for a, b in zip(found, found[1:]))


def test_draws_come_near_the_expectation_and_one_draw_is_one_subset():
    pools = [[0.0, 0.5, 1.0, 0.25], [1.0, 0.0, 0.0, 0.0]]
    assert at_k_by_draws(pools, 2, draws=4000) == pytest.approx(at_k(pools, 2), abs=0.02)
    assert at_k_by_draws(pools, 4) == at_k(pools, 4) == 1.0


def test_a_pool_that_is_too_small_and_no_task_are_errors():
    with pytest.raises(ValueError, match="k=3 of a pool of 2 samples"):
        at_k([[1.0, 0.0]], 3)
    with pytest.raises(ValueError, match="k=0"):
        at_k_by_draws([[1.0]], 0)
    for function in (at_k, at_k_by_draws):
        with pytest.raises(ValueError, match="no task"):
            function([], 1)


def test_an_evaluation_measures_its_plays_by_task_and_leaves_aborted_ones_out():
    plays = [(0, 1.0, 0.2), (0, 0.0, 0.6), (1, 0.0, 0.0), (1, 0.0, 1.0)]
    outcomes = [Outcome(task, n, score, 1.0, team={"coop": coop}) for n, (task, score, coop) in enumerate(plays)]
    outcomes.append(Outcome(1, 9, 1.0, 0.0, aborted=True))
    record = Evaluation("test", {}, 1.0, "passed", tuple(outcomes), {})
    assert record.at_k("passed", 1) == pytest.approx(0.25)
    assert record.at_k("passed", 2) == 0.5
    assert record.at_k("coop", 2) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="no metric 'cop' was measured; there are passed, coop"):
        record.at_k("cop", 1)


def test_the_command_measures_every_figure_at_every_k_and_refuses_more_than_the_plays():
    from marl_llm.cli.evaluate import at_k_text
    from marl_llm.runs.evaluate_run import EvaluationOptions, best_of_plays

    outcomes = tuple(Outcome(0, n, float(n == 0), 1.0, team={"tests": n / 3}) for n in range(3))
    record = Evaluation("test", {}, 1.0, "passed", outcomes, {})
    found, left_out = best_of_plays(record, (1, 3))
    assert found == {"passed": {"1": pytest.approx(1 / 3), "3": 1.0}, "tests": {"1": pytest.approx(1 / 3), "3": pytest.approx(2 / 3)}}
    assert left_out == {"passed": {"1": 0, "3": 0}, "tests": {"1": 0, "3": 0}}
    assert at_k_text({"after": found}, {"after": left_out}).endswith("@1 0.333  @3 0.667")
    for bad in (4, 0, -1):
        with pytest.raises(ConfigError, match="is no whole number between 1 and --plays=3"):
            EvaluationOptions(plays=3, best_of=(1, bad))


def test_a_task_with_an_aborted_play_is_left_out_where_its_plays_are_too_few_and_takes_nothing_else_along():
    from marl_llm.cli.evaluate import at_k_text
    from marl_llm.runs.evaluate_run import best_of_plays

    team = {(0, 0): {"tests": 0.5}, (0, 1): {"tests": 1.0}}  # of the second task's play it was not measured
    aborted = ((1, 1), (2, 0), (2, 1))
    each = [(task, n) for task in range(3) for n in (0, 1)]
    plays = [Outcome(*play, float(play[0]), 1.0, aborted=play in aborted, team=team.get(play, {})) for play in each]
    best, left_out = best_of_plays(Evaluation("test", {}, 1.0, "passed", tuple(plays), {}), (1, 2))
    assert best == {"passed": {"1": 0.5, "2": 0.0}, "tests": {"1": 0.75, "2": 1.0}}
    assert left_out == {"passed": {"1": 1, "2": 2}, "tests": {"1": 2, "2": 2}}
    assert "@2 0.000 (2 of the tasks left out: too few plays)" in at_k_text({"after": best}, {"after": left_out})
    best, left_out = best_of_plays(Evaluation("test", {}, 1.0, "passed", tuple(plays[4:]), {}), (1,))
    assert (best, left_out) == ({"passed": {"1": None}}, {"passed": {"1": 1}})
    assert "@1 – (1 of the tasks left out: too few plays)" in at_k_text({"after": best}, {"after": left_out})
