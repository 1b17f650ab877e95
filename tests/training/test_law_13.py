"""Law 13: a value-state game played compiled and hosted fills one table, for every recipe, and trains to the same parameters."""

import contextlib
import dataclasses
import functools
import pathlib
import sys

import jax
import numpy as np
import optax
import pytest

from marl_llm.algorithms import RECIPES, advantages_for, make_recipe
from marl_llm.games import JointLetter, PlanPath, speaking_order
from marl_llm.models import ModelConfig, init_params
from marl_llm.training import Learner, LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer, make_team
from marl_llm.training.packing import RowShape
from marl_llm.training.update import by_identity, rows_of
from marl_llm.workflows import Assignment

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "games"))
from tally import Tally

GAMES = {
    "plan_path": PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2),
    "joint_letter": JointLetter(letters=2),
    "tally": Tally(),
}
E = 6
PLAY = PlayOptions(max_num_seqs=8, decode_steps=4, batch_invariant=True)  # few programs
ROWS = RowShape(rows=16, tokens=64, targets=32, samples=16)
FIRST = make_recipe("grpo", group_size=3)  # how all recipes below sample
SGD = optax.sgd(1.0)  # one object, so that both teams share their programs


def team(game, hosted, params=None, optimizer=None, recipe=FIRST):
    config = ModelConfig(
        vocab_size=game.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16
    )
    params = params or jax.jit(lambda key: jax.tree.map(lambda x: 1.5 * x, init_params(config, key)))(jax.random.key(1))
    roles = {role.name: "odd" if number % 2 else "even" for number, role in enumerate(game.roles)}
    options = LearnerOptions(recipe, optimizer or SGD, row_tokens=64, minibatch=512)
    specs = {name: ModelSpec(config, params) for name in dict.fromkeys(roles.values())}
    return make_team(game, Assignment(roles), specs, options, make_mesh(1), play=PLAY, seed=3, hosted=hosted)


def responses(tokens):
    """The ids of each sample's response."""
    ids = np.asarray(tokens.ids)
    ids = ids[len(ids) - len(np.asarray(tokens.log_probs)) :]
    return [tuple(ids[at : at + n].tolist()) for at, n in zip(tokens.response_at, tokens.size)]


def both_ways(name, recipe=FIRST):
    """(tokens, columns, numbers in the order of identity) of the samples that count, compiled and hosted."""
    found = []
    for hosted in (False, True):
        with team(GAMES[name], hosted, recipe=recipe) as one:
            batch = one.play(2, 5, E)
            assert one.roles == speaking_order(GAMES[name])
        order = by_identity(batch.tokens, batch.table)
        found.append((batch.tokens, batch.table, order[batch.table.where[order]]))
    return found


@functools.cache
def compared(recipe):
    return jax.jit(lambda table: advantages_for(recipe, table))


@pytest.mark.parametrize("name", ["plan_path", "tally"])  # in turn; at once and in turn, some plays ending early
def test_b1_law_13_one_table_and_equal_advantages_for_every_recipe(name):
    """The same plays both ways; then whatever a recipe compares, groups, returns and advantages are equal."""
    (tokens, table, mine), (tokens_on_host, on_host, theirs) = both_ways(name)
    assert len(mine) == len(theirs) > 2 * E
    said, said_on_host = responses(tokens), responses(tokens_on_host)
    assert np.mean([said[i] == said_on_host[j] for i, j in zip(mine, theirs)]) >= 0.999
    for column in ("instance", "agent", "turn", "team", "local", "tokens"):
        np.testing.assert_allclose(getattr(table, column)[mine], getattr(on_host, column)[theirs], atol=1e-6, err_msg=column)
    for column in ("env", "trajectory", "prompt_ids"):  # numbers of things: equal where the others are equal
        a, b = getattr(table, column)[mine], getattr(on_host, column)[theirs]
        np.testing.assert_array_equal(a[:, None] == a, b[:, None] == b, err_msg=column)
    together = table.trajectory[mine][:, None] == table.trajectory[mine]
    later, later_on_host = (x[:, None] > x for x in (table.order[mine], on_host.order[theirs]))
    np.testing.assert_array_equal(later & together, later_on_host & together)
    recipes = [recipe for recipe in map(make_recipe, RECIPES) if recipe.advantage_estimator != "critic"]
    assert len(recipes) >= 5
    for recipe in recipes:
        size, found = 160, []  # one shape for all games
        for columns, chosen in ((table, mine), (on_host, theirs)):
            charge = np.linspace(0, 1, len(chosen), dtype=np.float32)
            kl = np.zeros(len(columns.team), np.float32)
            kl[chosen] = charge
            found.append(jax.device_get(compared(recipe)(rows_of(dataclasses.replace(columns, kl=kl, team_where=None), chosen, size))))
        (one, figures, tied), (two, figures_on_host, tied_on_host) = found
        np.testing.assert_allclose(one, two, atol=1e-5, err_msg=recipe.name)
        np.testing.assert_array_equal(tied, tied_on_host, err_msg=recipe.name)
        for figure in figures:
            assert figures[figure] == pytest.approx(figures_on_host[figure], abs=1e-5), (recipe.name, figure)


def test_law_13_a_tree_has_the_same_candidates_and_advantages():
    """AT-GRPO on a game whose roles act at once: K candidates per prompt, each scored when it is made, the same random one goes on.

    That the best one does where it is asked for: `tests/games/test_hosted.py`, and the three steps below.
    """
    recipe = make_recipe("at_grpo", group_size=3, pick="random")
    found = []
    for tokens, table, chosen in both_ways("tally", recipe):
        said = responses(tokens)

        def identity(i, t=table, said=said):
            return (t.instance[i], t.turn[i], t.agent[i], said[i], t.team[i])

        chosen = np.asarray(sorted(chosen, key=identity))  # candidates of one prompt in the order of what they say
        advantages, _, tied = compared(recipe)(rows_of(dataclasses.replace(table, team_where=None), chosen, 160))
        same_prompt = table.env[chosen][:, None] == table.env[chosen]
        found.append(([identity(i)[:4] for i in chosen], table.team[chosen], table.local[chosen], same_prompt, advantages, tied))
    (names, *one), (names_on_host, *two) = found
    assert names == names_on_host
    assert len(names) > 2 * E
    for a, b in zip(one, two):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert np.abs(one[3]).max() > 0.5


@pytest.fixture(scope="module")
def teams():
    """A compiled and a hosted team of Plan-Path that have seen some of it, so that their plays differ in their pay."""
    with team(GAMES["plan_path"], False, optimizer=make_optimizer()) as one:
        for step in range(25):
            one.sft_step(step % 5, 8, 0.03)
        one.start_rl()
        params = one.learners["odd"].params
    with team(GAMES["plan_path"], False, params) as compiled, team(GAMES["plan_path"], True, params) as on_host:
        yield compiled, on_host


def trained(one, recipe, shape):
    """Its policies after three steps by a recipe, and before. Rows have this shape, or that which the team gives them."""
    one.options = dataclasses.replace(one.options, recipe=recipe)
    specs = {name: dataclasses.replace(learner.spec, params=learner.start) for name, learner in one.learners.items()}
    one.learners = {name: Learner(spec, one.options, one.mesh, jax.random.key(0)) for name, spec in specs.items()}
    one._serve(list(one.learners))
    for step in range(3):
        batch = one.play(step, E * step, E)
        tokens = dataclasses.replace(batch.tokens, shape=shape or batch.tokens.shape)
        assert tokens.kept_ids is None
        figures = one.learn(dataclasses.replace(batch, tokens=tokens), 0.1)
        assert max(found["log_prob_gap"] for found in figures.values()) < 1e-4
        assert all(found.get("ratio", 1.0) == pytest.approx(1.0, abs=1e-3) for found in figures.values())
    return jax.device_get((one.policies(), {name: learner.start for name, learner in one.learners.items()}))


def test_law_2_what_was_sampled_truncated_is_what_is_scored(teams):
    """The scorer renormalises over the sampler's kept set, in both kinds of play. Untruncated: see `trained`."""
    for one in teams:
        recipe = make_recipe("grpo", group_size=3, temperature=0.8, top_k=3, top_p=0.9, rewards="mixed")
        one.options = dataclasses.replace(one.options, recipe=recipe)
        models = {name: ModelSpec(learner.spec.config, learner.start, learner.spec.renderer) for name, learner in one.learners.items()}
        options = dict(play=PLAY, seed=3, hosted=one is teams[1])
        with make_team(GAMES["plan_path"], one.assignment, models, one.options, one.mesh, **options) as other:
            batch = other.play(0, 0, E)
            assert batch.tokens.kept_ids is not None
            figures = other.learn(batch, 0.1)
        assert max(found["log_prob_gap"] for found in figures.values()) < 1e-4
        assert all(found["ratio"] == pytest.approx(1.0, abs=1e-3) for found in figures.values())


@pytest.mark.parametrize("name", ["grpo", "at_grpo", "magrpo", "mappa", "ppo"])
def test_law_13_three_steps_end_at_the_same_parameters(name, teams):
    """One recipe with the rows that each kind of play makes, the others in one shape: how rows are cut changes nothing (law 5)."""
    recipe = make_recipe(name, group_size=3, rewards="mixed", temperature=1.0)
    with contextlib.ExitStack() as stack:
        if recipe.sampling == "tree":  # played otherwise, by teams of its own that begin at the same parameters
            start = teams[0].learners["odd"].start
            teams = [stack.enter_context(team(GAMES["plan_path"], hosted, start, recipe=recipe)) for hosted in (False, True)]
        (one, start), (two, _) = (trained(one, recipe, None if name == "grpo" else ROWS) for one in teams)
    assert set(one) == set(two)
    for model in one:
        for a, b in zip(jax.tree.leaves(one[model].params), jax.tree.leaves(two[model].params), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, err_msg=model)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), {name: one[name].params for name in start}, start)
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize("rewards", ["team", "mixed"])
def test_both_kinds_of_play_report_and_pick_by_the_reward_of_the_recipe(rewards):
    assert make_recipe("at_grpo", rewards="local").reward_weights == (0, 1)  # all that a reward is made of
    recipe = make_recipe("at_grpo", rewards=rewards, group_size=3, **({"alpha": 3.0} if rewards == "mixed" else {}))
    for hosted in (False, True):
        with team(GAMES["plan_path"], hosted, recipe=recipe) as one:
            batch = one.play(0, 0, E)
            for role in one.roles:
                paid, own = (batch.figures[f"role/{role}/{part}"] for part in ("team", "local"))
                reward = {"team": paid, "mixed": 3 * paid + own}[rewards]
                assert batch.figures[f"role/{role}/reward"] == pytest.approx(reward, abs=1e-6)
            if hosted:
                forks = one._training._forks
                assert (forks.alpha, forks.local_weight) == {"team": (1, 0), "mixed": (3, 1)}[rewards]
