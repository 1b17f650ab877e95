"""Teams that train side by side in one program do what each would do alone."""

import dataclasses

import jax
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.games import PlanPath
from marl_llm.models import ModelConfig, init_params
from marl_llm.training import LearnerOptions, ModelSpec, make_mesh, make_optimizer, make_team
from marl_llm.training.sweep import Sweep, SweepError, stacked_rows
from marl_llm.workflows import Assignment

GAME = PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2)
SHAPE = ModelConfig(
    vocab_size=GAME.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16
)
ASSIGNMENT = Assignment({role.name: name for role, name in zip(GAME.roles, ("one", "two"))})
RECIPE = make_recipe("at_grpo", group_size=3, filter_zero_variance=True, scale_advantages="none", entropy_coef=0.01)
OPTIONS = LearnerOptions(RECIPE, make_optimizer(), row_tokens=64, minibatch=4, epochs=2, microbatch_tokens=128)
TASKS = 8


def team(seed, options=OPTIONS, **changes):
    params = init_params(SHAPE, jax.random.key(seed))
    return make_team(GAME, ASSIGNMENT, dict.fromkeys(("one", "two"), ModelSpec(SHAPE, params)), options, make_mesh(1), seed=seed, **changes)


def params_of(one):
    return {name: learner.policy.params for name, learner in one.learners.items()}


def largest_difference(a, b):
    return max(float(np.max(np.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.fixture(scope="module")
def both():
    """Three teams that learned alone, with a warm-up and rates of their own, and the same three in a sweep."""
    rates = (1e-3, 3e-3, 0.0)
    alone, swept = [team(seed) for seed in (5, 6, 7)], [team(seed) for seed in (5, 6, 7)]
    sweep = Sweep(swept, jax.devices()[:2])
    found = {"alone": [], "swept": []}
    for step in range(12):
        for one in alone:
            one.sft_step(step, TASKS, 1e-2)
        sweep.sft_step(step, TASKS, 1e-2)
    for one in alone:
        one.start_rl()
    sweep.start_rl()
    for step in range(2):
        batches = [one.play(step, TASKS * step, TASKS) for one in alone]
        learned = [one.learn(batch, rate) for one, batch, rate in zip(alone, batches, rates)]
        found["alone"] = [
            batch.figures | {f"model/{name}/{key}": x for name, of in more.items() for key, x in of.items()}
            for batch, more in zip(batches, learned)
        ]
        found["swept"] = sweep.step(step, TASKS * step, TASKS, rates)
    evaluations = {"alone": [one.evaluate({}, "test", 12) for one in alone], "swept": sweep.evaluate("test", 12)}
    sweep.unstack()
    return alone, swept, found, evaluations


def test_teams_of_a_sweep_learn_what_they_learn_alone(both):
    alone, swept, _, _ = both
    for one, other in zip(alone, swept, strict=True):
        assert largest_difference(params_of(one), params_of(other)) < 2e-5
    assert largest_difference(params_of(swept[0]), params_of(swept[1])) > 1e-2


def test_a_rate_of_zero_leaves_its_team_as_it_began(both):
    _, swept, _, _ = both
    for learner in swept[2].learners.values():
        assert largest_difference(learner.policy.params, learner.begun) == 0
    assert largest_difference(swept[0].learners["one"].policy.params, swept[0].learners["one"].begun) > 1e-3


def test_figures_of_a_sweep_are_those_of_each_team(both):
    _, _, found, _ = both
    for one, other in zip(found["alone"], found["swept"], strict=True):
        assert other == pytest.approx(one, rel=2e-3, abs=1e-5)
    assert one["model/one/groups_with_signal"] > 0


def test_evaluations_of_a_sweep_are_those_of_each_team(both):
    _, _, _, evaluations = both
    for one, other in zip(evaluations["alone"], evaluations["swept"], strict=True):
        assert [dataclasses.astuple(x) for x in other.outcomes] == [dataclasses.astuple(x) for x in one.outcomes]
        assert other.interval == one.interval


def test_teams_of_a_sweep_continue_alone(both):
    alone, swept, _, _ = both
    for one in (alone[1], swept[1]):
        one.learn(one.play(2, 16, TASKS), 1e-3)
    assert largest_difference(params_of(alone[1]), params_of(swept[1])) < 5e-5


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (make_recipe("ppo"), "a critic"),
        (make_recipe("magrpo", group_size=3, kl_coef=0.1), "a KL to the start"),
        (make_recipe("spiral"), "running means"),
        (make_recipe("grpo", entropy_quantile=0.5), "entropies of a whole step"),
        (make_recipe("grpo", mask_truncated=True), "truncated responses"),
    ],
)
def test_what_a_sweep_cannot_have_is_refused(recipe, message):
    with pytest.raises(SweepError, match=message):
        Sweep([team(1, dataclasses.replace(OPTIONS, recipe=recipe))])


def test_teams_that_differ_are_refused():
    with pytest.raises(SweepError, match="at least one team"):
        Sweep([])
    with pytest.raises(SweepError, match="differ in their options"):
        Sweep([team(1), team(2, dataclasses.replace(OPTIONS, minibatch=8))])
    models = {name: ModelSpec(SHAPE, init_params(SHAPE, jax.random.key(number))) for number, name in enumerate(("one", "two"))}
    with pytest.raises(SweepError, match="differ in their groups of models that begin alike"):  # the first team's warm-up is one for both
        Sweep([team(1), make_team(GAME, ASSIGNMENT, models, OPTIONS, make_mesh(1))])
    with pytest.raises(SweepError, match=r"a sweep cannot have tasks .* \(refills\)"):
        Sweep([team(1), team(2, refills=1)])


def test_rows_of_teams_are_filled_up_with_empty_ones():
    one = team(3)
    tokens = one.play(0, 0, TASKS).tokens
    few, many = (tokens.pack(range(n), 64, 1, True) for n in (3, 60))
    stacked = stacked_rows([few, many])
    filled = few.tokens.shape[0]
    assert filled < many.tokens.shape[0]
    assert stacked.tokens.shape[:2] == (2, many.tokens.shape[0])
    assert np.all(stacked.sample[0, filled:] == -1)
    assert not np.any(stacked.length[0, filled:])
