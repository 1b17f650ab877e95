"""What a role that does not train is paid counts in the returns of those that do, and nowhere else."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from test_recorded import reply
from test_team import ECHO, ENVIRONMENT, right, team

from marl_llm.algorithms import Samples, advantages_for, make_recipe
from marl_llm.algorithms.paid import returns_for
from marl_llm.games import PlanPath
from marl_llm.models import ModelConfig, init_params
from marl_llm.training import LearnerOptions, ModelSpec, make_mesh, make_optimizer, make_team, read_recorded
from marl_llm.workflows import Assignment, Inside, Scripted
from marl_llm.workflows.rewards import broadcast

LAST_PAID = dataclasses.replace(
    ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=(broadcast(right, roles=("second",), name="right"),))
)
ROLES = {"first": "first", "second": "second"}
GRPO = make_recipe("grpo", group_size=4)


def table(where, played=None):
    """Two plays of two turns, two agents that speak one after the other."""
    numbers = np.arange(4, dtype=np.int32)
    return Samples(
        instance=np.zeros(4, np.int32), env=numbers // 2, agent=numbers % 2, turn=np.zeros(4, np.int32), trajectory=numbers // 2,
        order=numbers % 2, team=np.asarray([0, 1, 0, 3], np.float32), local=np.zeros(4, np.float32), where=np.asarray(where, bool),
        played=played,
    )  # fmt: skip


@pytest.mark.parametrize("returns", ["outcome", "outcome_plus_local", "to_go", "to_go_mean", "trajectory"])
def test_returns_are_those_of_the_whole_play(returns):
    more = {"scope": "trajectory"} if returns.startswith("to_go") else {"rewards": "mixed"} if returns == "outcome_plus_local" else {}
    recipe = make_recipe("grpo", group_size=2, returns=returns, **more)
    whole = np.asarray(returns_for(recipe, table([True] * 4)))
    first = np.asarray([True, False, True, False])
    found = np.asarray(returns_for(recipe, table(first, np.ones(4, bool))))
    np.testing.assert_array_equal(found, np.where(first, whole, 0))
    assert found[2] > found[0]
    assert not returns_for(recipe, table(first)).any()  # the others were aborted: nothing was paid
    advantages, metrics, _ = advantages_for(recipe, table(first, np.ones(4, bool)))
    assert (advantages[2] > 0 > advantages[0], advantages[1], metrics["samples"]) == (True, 0, 2)


@pytest.mark.parametrize("second", [Inside(trained=False), Scripted(lambda turn: turn.fields["one"])])
def test_the_pay_of_the_last_role_reaches_the_first_whoever_plays_the_last(second):
    with team(GRPO, Assignment(ROLES, {"second": second}), LAST_PAID) as one:
        one.start_rl()
        batch = one.play(0, 0, 8)
        table, first = batch.table, batch.table.agent == 0
        by_play = dict(zip(table.trajectory[~first].tolist(), table.team[~first].tolist()))
        expected = [by_play[play] for play in table.trajectory[first].tolist()]
        assert np.asarray(returns_for(GRPO, table))[first].tolist() == expected
        assert (max(expected) > 0, np.any(table.where[~first]), len(batch.version)) == (True, False, len(batch.tokens))
        assert one.learn(batch, 1e-3)["first"]["grad_norm"] > 0
        [play, *_] = batch.episodes(1, "train", one.advantages)
    assert play


def test_a_hosted_team_learns_the_same_whether_its_other_role_trains():
    learned = []
    for models in ({}, {"second": Inside(trained=False)}):
        with team(GRPO, Assignment(ROLES, models), LAST_PAID) as one:
            one.start_rl()
            one.learn(one.play(0, 0, 8), 1e-2)
            learned.append(jax.device_get(one.learners["first"].policy.params))
    jax.tree.map(np.testing.assert_array_equal, *learned)


def test_a_compiled_team_has_the_same_returns_whether_its_other_role_trains():
    game = PlanPath(height=3, width=3, max_distance=3, min_distance=1, max_turns=2)
    shape = ModelConfig(game.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    spec = ModelSpec(shape, init_params(shape, jax.random.key(1)))
    options = LearnerOptions(GRPO, make_optimizer(), row_tokens=256, minibatch=8)
    roles, specs, returns = {"tool": "t", "planner": "p"}, {"t": spec, "p": spec}, []
    with make_team(game, Assignment(roles), specs, options, make_mesh(1)) as one:
        for step in range(20):
            one.sft_step(step, 8, 1e-2)
        one.start_rl()
        specs = {name: ModelSpec(shape, jax.device_get(learner.policy.params)) for name, learner in one.learners.items()}
    for models in ({}, {"p": Inside(trained=False)}):
        with make_team(game, Assignment(roles, models), specs, options, make_mesh(1)) as one:
            one.start_rl()
            table = one.play(0, 0, 32).table
            returns.append(np.asarray(returns_for(GRPO, table))[table.agent == 0])
    np.testing.assert_array_equal(*returns)
    assert len(np.unique(returns[0])) > 1


def test_the_pay_of_a_recorded_role_that_does_not_train_moves_no_other(tmp_path):
    recipe, found = make_recipe("reinforce_pp", rewards="mixed", returns="immediate"), []
    with team(recipe, Assignment(ROLES, {"second": Inside(trained=False)})) as one:
        one.start_rl()
        for pay in (0.0, 50.0):
            lines = []
            for n in range(6):
                lines += [reply(episode=str(n), ids=[3 + n % 2]), reply(episode=str(n), number=1, model="second", ids=[4])]
                lines += [{"episode": str(n), "reward": float(n % 2), "rewards": {"second": pay}, "task": "t"}]
            (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
            batch = read_recorded(tmp_path / "r.jsonl", one.roles)
            assert set(one.learn(batch, 0.0)) == {"first"}
            found.append(one.advantages[batch.table.agent == 0])
    np.testing.assert_array_equal(*found)
    assert np.ptp(found[0]) > 1


@pytest.mark.parametrize(("changed", "message"), [({"ids": [99]}, "reply 1' has the token 99"), ({"prompt": [1, 99]}, "has the token 99")])
def test_a_recorded_token_that_the_model_does_not_have_is_named(changed, message, tmp_path):
    lines = [reply(), reply(number=1, **changed), {"episode": "a", "reward": 1.0}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with team() as one:
        one.start_rl()
        with pytest.raises(ValueError, match=message):
            one.learn(read_recorded(tmp_path / "r.jsonl", one.roles), 1e-3)
