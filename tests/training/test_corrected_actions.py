"""A team takes a step towards what its coach would have said: it learns that, and the optimizer of reinforcement does not notice."""

import dataclasses

import jax
import numpy as np
import pytest
from test_team import ECHO, ENVIRONMENT, GRPO, team

from marl_llm.coaching import CoachGuide, rubric_coach
from marl_llm.coaching.coached import Coaching
from marl_llm.training.train_state import make_plain_optimizer
from marl_llm.workflows import shared

UNPAID = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=()))


def coaching(better, corrections=0.3):
    guide = CoachGuide(
        "One says a letter, the other says it again.", {"first": "says it", "second": "repeats it"}, rubric=lambda view: (5, None, ""),
        better=better, corrects=True,
    )  # fmt: skip
    return Coaching(rubric_coach(guide), guide, corrections=corrections)


def coached_team(better, **options):
    return team(GRPO, shared(ECHO), UNPAID, coaching=coaching(better, **options))


def test_a_step_without_memory_is_as_long_as_one_of_adam_where_all_terms_agree():
    gradient = {"a": jax.numpy.full((3, 5), 0.02), "b": jax.numpy.full((1,), 0.02)}
    found, _ = make_plain_optimizer().update(gradient, make_plain_optimizer().init(gradient))
    for leaf in jax.tree.leaves(found):
        np.testing.assert_allclose(leaf, -1.0, rtol=1e-5)
    silent, _ = make_plain_optimizer().update(jax.tree.map(lambda x: 0 * x, gradient), None)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(silent))


def test_a_team_learns_what_its_coach_would_have_said_while_all_scores_are_equal():
    with coached_team(lambda view: view.task["letter"]) as one:
        before = one.evaluate({}, "test", 12).success
        figures = []
        for step in range(12):
            batch = one.play(step, 6 * step, 6)
            figures.append(next(iter(one.learn(batch, 3e-2).values())))
        assert figures[0]["corrected"] == len(batch.corrected[1]) > 0
        assert figures[-1]["corrected_loss"] < figures[0]["corrected_loss"] / 2
        assert one.evaluate({}, "test", 12).success > before
        (learner,) = one.learners.values()
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(learner.policy.opt_state) if leaf.ndim), "equal scores moved nothing"


@pytest.mark.parametrize("better", ["", "no letter", "a a a"])
def test_nobody_is_taught_nothing_or_what_a_role_cannot_say(better):
    with coached_team(lambda view: better) as one:
        batch = one.play(0, 0, 3)
        assert len(batch.corrected[0]) == len(batch.corrected[1]) == 0
        (learner,) = one.learners.values()
        start = jax.tree.map(np.array, learner.policy.params)
        figures = one.learn(batch, 1e-2)
        assert all(found["corrected"] == 0 for found in figures.values())
        for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(learner.policy.params), strict=True):
            np.testing.assert_array_equal(a, b)


def test_without_corrections_a_batch_has_none():
    with coached_team(lambda view: "a", corrections=0.0) as one:
        assert one.play(0, 0, 3).corrected is None
