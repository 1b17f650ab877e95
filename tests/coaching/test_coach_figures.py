"""Figures of a coached run: bias, slope on length, coach against outcome, missing scores, the alarm."""

import dataclasses
import math

import coach_lab as lab
import numpy as np
import pytest

from marl_llm.coaching import coached, rubric_coach
from marl_llm.coaching.figures import (
    ScoredAction,
    auc,
    coach_figures,
    gap,
    length_slope,
    own_slope,
    rising_while_falling,
    scored_actions,
)
from marl_llm.coaching.studies import study
from marl_llm.runs.coaching import first_failure
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import Workflow, sequence
from marl_llm.workflows.trajectory import Score


def actions(n=400, shift=0.0, verbose=0.0, seed=0):
    """Actions of 2 kinds of tasks, three of each task; kind b succeeds more often, and success is worth 3 points."""
    rng, found = np.random.default_rng(seed), []
    for task in range(n):
        stratum = "ab"[task % 2]
        outcome, own = float(rng.random() < (0.7 if stratum == "b" else 0.3)), rng.normal(0, 0.7)
        for _ in range(3):
            tokens = int(rng.integers(5, 200))
            score = 4 + 3 * outcome + own + rng.normal(0, 0.5) + (shift if stratum == "b" else 0.0) + verbose * math.log(tokens)
            found.append(ScoredAction(task, "r", stratum, score, tokens, outcome))
    return found


def test_a_shift_between_kinds_of_tasks_is_measured_as_what_it_is():
    value, low, high = gap(actions(2000, shift=1.5), "b", "a", matched=True, draws=40)
    assert value == pytest.approx(1.5, abs=0.1)
    assert low < 1.5 < high < low + 0.4
    unmatched = gap(actions(2000, shift=1.5), "b", "a", draws=0)[0]
    assert unmatched == pytest.approx(1.5 + 0.4 * 3, abs=0.2)


def test_without_a_shift_the_interval_holds_zero_after_matching_on_success():
    held = [low < 0 < high for _, low, high in (gap(actions(seed=s), "b", "a", matched=True, draws=60) for s in range(6))]
    assert sum(held) >= 5
    value, low, high = gap(actions(), "b", "a", draws=200)
    assert low > 0


def test_the_interval_is_one_over_tasks_not_over_actions():
    """Three copies of every action carry no more evidence than one."""
    once = actions(200)
    single, tripled = (gap(x, "b", "a", matched=True, draws=200)[1:] for x in (once, once * 3))
    assert single == pytest.approx(tripled, abs=1e-9)


def test_a_coach_that_favours_length_shows_in_the_slope():
    value, low, high = length_slope(actions(verbose=0.5), draws=200)
    assert value == pytest.approx(0.5, abs=0.1)
    assert low > 0.3
    value, low, high = length_slope(actions(), draws=200)
    assert low < 0 < high
    assert math.isnan(length_slope([ScoredAction(0, "r", "", 5.0, 7, 1.0)] * 3)[0])


def test_a_coach_that_favours_its_own_texts_shows_in_the_slope_on_their_log_prob():
    rng = np.random.default_rng(1)
    likely = rng.normal(-1.0, 0.4, 300)
    own = [dataclasses.replace(one, log_prob=float(x), score=one.score + 2.0 * x) for one, x in zip(actions(100), likely)]
    value, low, high = own_slope(own, draws=100)
    assert low < 2.0 < high
    assert low > 1.0
    free = own_slope([dataclasses.replace(one, log_prob=float(x)) for one, x in zip(actions(100), likely)], draws=100)
    assert free[1] < 0 < free[2]
    assert math.isnan(own_slope(actions(10))[0])  # nobody's log-probs are known


def test_the_auc_is_the_share_of_pairs_in_order():
    def one(score, outcome):
        return ScoredAction(0, "r", "", score, 1, outcome)

    assert auc([one(8, 1), one(3, 0), one(9, 1), one(8.5, 0)]) == 0.75
    assert auc([one(5, 1), one(5, 0)]) == 0.5
    assert auc([one(5, 1), one(None, 0), one(1, 0)]) == 1
    assert math.isnan(auc([one(5, 1)]))


def test_an_alarm_where_scores_rise_while_success_falls():
    rising, falling = np.linspace(5, 7, 20).tolist(), np.linspace(0.6, 0.4, 20).tolist()
    assert rising_while_falling(rising, falling)
    assert not rising_while_falling(rising, rising)
    assert not rising_while_falling(falling, falling)
    assert not rising_while_falling(rising[:19], falling[:19])
    assert not rising_while_falling(np.linspace(5, 5.4, 20).tolist(), falling)


def test_a_step_has_figures_per_role_and_kind_and_counts_what_is_missing():
    guide = lab.guide()
    workflow = coached(lab.team(metrics={"long": lambda path: float(len(path.calls[0].text) > 3)}), rubric_coach(guide), guide)
    found = coach_figures(lab.play(workflow, n=6), "long", draws=5)
    assert (found["coach/asked"], found["coach/missing"], found["coach/a/score"], found["coach/b/score"]) == (18, 0, 8, 6.5)
    assert found["coach/a/score/even"] == found["coach/a/score/odd"] == 8
    assert found["coach/a/gap"] == found["coach/a/spread"] == 0
    slope = [found[f"coach/a/{name}"] for name in ("own_slope", "own_slope_low", "own_slope_high")]
    assert slope == [0, 0, 0]  # of a rubric that gives one score
    for missing, kinds in (("abort", 1), ("mask", 0)):
        failing = coached(lab.team(metrics=workflow.metrics), study(rubric_coach(guide), "failing:0.2"), guide, missing=missing)
        rollout = lab.play(failing, n=8, attempts=1)
        found = coach_figures(rollout, "long", draws=5)
        assert found["coach/missing"] == found["coach/failed_unavailable"] > 0
        assert kinds == any(episode.aborted for episode in rollout.episodes)
    assert coach_figures(lab.play(lab.team(metrics=workflow.metrics)), "long") == {}


@pytest.mark.parametrize(("score", "when", "asked"), [("at_end", "end", 11), ("when_made", "action", 8)])
def test_in_a_tree_an_action_counts_once_and_a_candidate_that_was_not_picked_counts_too(score, when, asked):
    seen = []

    def rubric(view):
        seen.append(view.call.id)
        return len(seen) / 2, None, ""

    metrics = {"long": lambda path: float(path.branch == 0)}
    workflow = Workflow("w", sequence(lab.role("a"), lab.role("b", "{a}")), ("question",), ("gold",), metrics=metrics, score=score)
    guide = lab.guide(rubric=rubric)
    rollout = lab.play(coached(workflow, rubric_coach(guide), guide, when=when), branching={"a": 4, "b": 4}, pick="first")
    figures = coach_figures(rollout, "long", draws=2)
    assert len(seen) == len(set(seen)) == figures["coach/asked"] == asked
    assert figures["coach/score"] == pytest.approx((asked + 1) / 4)
    actions = scored_actions(rollout, "long")
    trunk, *_ = (action.outcome for action in actions)
    assert trunk == (0.25 if score == "at_end" else 1.0)  # the mean over the four paths that begin with it
    assert sum(math.isnan(action.outcome) for action in actions) == (0 if score == "at_end" else 6)


def test_a_missing_score_of_a_candidate_that_was_not_picked_is_told():
    class Picky:
        async def score(self, view):
            return success(Score(5.0), 0.0) if view.call.choice == 0 else failed(FailureKind.UNAVAILABLE, "gone", 0.0)

    workflow = Workflow("w", lab.role("a"), ("question",), ("gold",), metrics={"long": lambda path: 1.0}, score="when_made")
    rollout = lab.play(coached(workflow, Picky(), when="action", missing="mask"), branching={"a": 3}, pick="first")
    figures = coach_figures(rollout, "long", draws=2)
    assert [figures[f"coach/{name}"] for name in ("asked", "missing", "failed_unavailable", "score")] == [3, 2, 2, 5]
    assert first_failure(rollout) == "unavailable: gone"
