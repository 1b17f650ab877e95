"""Law 13: a value-state game played compiled and hosted fills one table, for every recipe, and trains to the same parameters."""

import functools
import pathlib
import sys

import jax
import numpy as np
import optax
import pytest

from marl_llm.algorithms import RECIPES, make_recipe
from marl_llm.games import JointLetter, PlanPath, speaking_order
from marl_llm.models import ModelConfig, init_params
from marl_llm.training import LearnerOptions, ModelSpec, PlayOptions, advise, make_mesh, make_optimizer, make_team
from marl_llm.training.update import by_identity
from marl_llm.workflows import Assignment

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "games"))
from tally import Tally

GAMES = {
    "plan_path": PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2),
    "joint_letter": JointLetter(letters=2),
    "tally": Tally(),
}
E = 6
PLAY = PlayOptions(slots=8, chunk=4)


@functools.cache
def taught():
    """Parameters of a small model that has seen some Plan-Path, so that its plays differ in their pay."""
    with team(GAMES["plan_path"], make_recipe("at_grpo"), False, optimizer=make_optimizer()) as one:
        for step in range(25):
            one.imitate(step % 5, 8, 0.03)
        one.begin()
        return one.learners["odd"].params


def team(game, recipe, hosted, params=None, optimizer=optax.identity()):
    config = ModelConfig(
        vocab_size=game.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16
    )
    params = params or jax.jit(lambda key: jax.tree.map(lambda x: 1.5 * x, init_params(config, key)))(jax.random.key(1))
    roles = {role.name: "odd" if number % 2 else "even" for number, role in enumerate(game.roles)}
    options = LearnerOptions(recipe, optimizer, row_tokens=64, minibatch=512)
    specs = {name: ModelSpec(config, params) for name in dict.fromkeys(roles.values())}
    return make_team(game, Assignment(roles), specs, options, make_mesh(1), play=PLAY, seed=3, hosted=hosted)


def responses(tokens):
    """The ids of each sample's response."""
    ids = np.asarray(tokens.ids)
    ids = ids[len(ids) - len(np.asarray(tokens.log_probs)) :]
    return [tuple(ids[at : at + n].tolist()) for at, n in zip(tokens.response_at, tokens.size)]


def both_ways(name, recipe):
    """(tokens, columns) of the samples that count, in the order of their identity, compiled and hosted."""
    found = []
    for hosted in (False, True):
        with team(GAMES[name], recipe, hosted) as one:
            batch = one.play(2, 5, E)
            assert one.roles == speaking_order(GAMES[name])
        order = by_identity(batch.tokens, batch.table)
        found.append((batch.tokens, batch.table, order[batch.table.where[order]]))
    return found


@pytest.mark.parametrize("name", GAMES)
def test_law_13_one_table_and_equal_advantages_for_every_recipe(name):
    """Plays of both kinds, four of each task; then whatever a recipe compares, groups, returns and advantages are equal."""
    (tokens, table, mine), (tokens_on_host, on_host, theirs) = both_ways(name, make_recipe("grpo", branches=4))
    assert len(mine) == len(theirs) > 4 * E // 2
    said, said_on_host = responses(tokens), responses(tokens_on_host)
    assert np.mean([said[i] == said_on_host[j] for i, j in zip(mine, theirs)]) >= 0.999
    for column in ("instance", "agent", "turn", "team", "local", "tokens"):
        np.testing.assert_allclose(getattr(table, column)[mine], getattr(on_host, column)[theirs], atol=1e-6, err_msg=column)
    for column in ("env", "trajectory", "prompt_ids"):  # numbers of things: equal where the others are equal
        a, b = getattr(table, column)[mine], getattr(on_host, column)[theirs]
        np.testing.assert_array_equal(a[:, None] == a, b[:, None] == b, err_msg=column)
    for i, j in ((i, j) for i in range(len(mine)) for j in range(len(mine)) if table.trajectory[mine[i]] == table.trajectory[mine[j]]):
        later = table.order[mine[i]] > table.order[mine[j]]
        assert later == (on_host.order[theirs[i]] > on_host.order[theirs[j]])
    compared = 0
    for recipe in RECIPES:
        made = make_recipe(recipe)
        if made.normaliser == "critic":
            continue
        charge = {"kl": np.zeros(len(table.team), np.float32)}, {"kl": np.zeros(len(on_host.team), np.float32)}
        one = advise(made, tokens, type(table)(**vars(table) | charge[0]))
        two = advise(made, tokens_on_host, type(on_host)(**vars(on_host) | charge[1]))
        np.testing.assert_allclose(one.advantages[mine], two.advantages[theirs], atol=1e-5, err_msg=recipe)
        np.testing.assert_array_equal(one.tied[mine], two.tied[theirs], err_msg=recipe)
        for figure in set(one.metrics) & {"groups", "groups_of_one", "tied_groups", "mixed_prompt_share", "return_mean", "return_std"}:
            assert one.metrics[figure] == pytest.approx(two.metrics[figure], abs=1e-5), (recipe, figure)
        compared += 1
    assert compared >= 5


def trained(recipe, hosted):
    with team(GAMES["plan_path"], recipe, hosted, taught()) as one:
        for step in range(3):
            figures = one.learn(one.play(step, E * step, E), 0.1)
            assert max(found["log_prob_gap"] for found in figures.values()) < 1e-4
        start = {name: learner.start for name, learner in one.learners.items()}
        return jax.device_get((one.policies(), start))


@pytest.mark.parametrize("name", ["grpo", "magrpo", "mappa", "ppo", "dr_mas"])
def test_law_13_three_steps_end_at_the_same_parameters(name):
    recipe = make_recipe(name, branches=3, rewards="mixed", temperature=1.0)
    (one, start), (two, _) = (trained(recipe, hosted) for hosted in (False, True))
    assert set(one) == set(two)
    moved = 0.0
    for model in one:
        for a, b in zip(jax.tree.leaves(one[model].params), jax.tree.leaves(two[model].params), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, err_msg=model)
    for model in start:
        moved = max(moved, *(float(abs(a - b).max()) for a, b in zip(jax.tree.leaves(one[model].params), jax.tree.leaves(start[model]))))
    assert moved > 1e-3
