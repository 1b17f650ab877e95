"""Dynamic sampling: tasks without signal are replaced, deterministically, up to a bound, and whoever plays draws the same ones."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from test_law_13 import GAMES, PLAY, SGD, responses
from test_team import ENVIRONMENT
from test_team import team as workflow_team

from marl_llm.algorithms import Samples, make_recipe
from marl_llm.models import ModelConfig, init_params
from marl_llm.training import LearnerOptions, ModelSpec, make_mesh, make_team
from marl_llm.training.packing import Tokens, TokenSample
from marl_llm.training.refills import RefillRound, Refills, chosen_tasks, refill_conflict, refill_figures, signal_of, tasks_left_out
from marl_llm.training.update import by_identity
from marl_llm.workflows import Assignment, WorkflowError

E = 6
RECIPE = make_recipe("grpo", group_size=3, rewards="mixed")


def one_round(first, signal, **figures):
    return RefillRound(tuple(range(first, first + len(signal))), {first + i: pair for i, pair in enumerate(signal)}, figures, None)


def team(hosted, refills, recipe=RECIPE, seed=3):
    game = GAMES["joint_letter"]
    config = ModelConfig(
        vocab_size=game.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16
    )
    params = jax.jit(lambda key: jax.tree.map(lambda x: 1.5 * x, init_params(config, key)))(jax.random.key(1))
    roles = {role.name: "odd" if number % 2 else "even" for number, role in enumerate(game.roles)}
    options = LearnerOptions(recipe, SGD, row_tokens=64, minibatch=512)
    specs = {name: ModelSpec(config, params) for name in dict.fromkeys(roles.values())}
    return make_team(game, Assignment(roles), specs, options, make_mesh(1), play=PLAY, seed=seed, hosted=hosted, refills=refills)


def test_the_first_tasks_with_signal_are_chosen_and_the_first_without_fill_up():
    rounds = [one_round(0, [(1, 2), (0, 2), (0, 2), (2, 2)]), one_round(4, [(0, 1), (1, 1)])]
    assert chosen_tasks(rounds, 4) == [0, 1, 3, 5]
    assert chosen_tasks(rounds, 2) == [0, 3]
    assert chosen_tasks(rounds, 3) == [0, 3, 5]
    assert chosen_tasks([one_round(7, [(0, 1)] * 3)], 3) == [7, 8, 9]
    assert tasks_left_out(rounds, [0, 1, 3, 5]) == (2, 4)
    unplayed = RefillRound((9, 10, 11), {10: (0, 1), 11: (1, 1)}, {}, None)  # every play of task 9 is aborted
    assert [chosen_tasks([unplayed], count) for count in (1, 2, 3)] == [[11], [10, 11], [9, 10, 11]]


def test_figures_are_of_the_first_round_and_costs_of_all():
    first = one_round(0, [(1, 2), (0, 2)], success=0.5, samples=8.0, sampled_tokens=80.0)
    rounds = [first, one_round(2, [(2, 2), (1, 1)], success=1.0, samples=4.0, sampled_tokens=50.0)]
    found = refill_figures(rounds, chosen_tasks(rounds, 2))
    assert (found["success"], found["samples"], found["sampled_tokens"]) == (0.5, 12.0, 130.0)
    assert (found["refills/rounds"], found["refills/tasks"]) == (1.0, 4.0)
    assert (found["refills/signal_before"], found["refills/signal_after"]) == (1 / 4, 3 / 4)
    assert (found["refills/tied"], found["refills/unused"], found["refills/filled_up"]) == (1.0, 1.0, 0.0)
    alone = refill_figures(rounds[:1], [0, 1])
    assert (alone["refills/rounds"], alone["refills/filled_up"], alone["refills/unused"]) == (0.0, 1.0, 0.0)


def rounds_of(refills, step, first, count, signal_every):
    """Plays rounds in which each `signal_every`-th task has signal; (rounds, what was asked for)."""
    asked = []

    def play(at, size, drawn):
        asked.append((at, size))
        return one_round(at, [(int(number % signal_every == 0), 1) for number in range(at, at + size)])

    return refills.rounds(play, step, first, count), asked


def test_rounds_end_at_the_bound_or_when_a_step_has_enough_and_the_next_step_begins_behind_them():
    refills = Refills(5)
    found, asked = rounds_of(refills, 0, 0, 8, 2)
    assert asked == [(0, 8), (8, 4), (12, 2), (14, 2)]
    assert sum(pair[0] for one in found for pair in one.signal.values()) == 8
    bounded = Refills(2)
    found, asked = rounds_of(bounded, 0, 0, 8, 100)
    assert asked == [(0, 8), (8, 8), (16, 8)]  # task 0 alone has signal
    _, asked = rounds_of(bounded, 1, 8, 8, 1)
    assert asked == [(24, 8)]
    _, again = rounds_of(bounded, 1, 8, 8, 1)
    assert again == asked  # a step that is played again plays the same tasks
    other = Refills(2)
    other.restore(json.loads(json.dumps(bounded.state())))
    assert rounds_of(other, 2, 16, 8, 1)[1] == rounds_of(bounded, 2, 16, 8, 1)[1] == [(32, 8)]
    fresh = Refills(2)
    fresh.restore({})  # a checkpoint of a run without refills
    assert rounds_of(fresh, 2, 16, 8, 1)[1] == [(16, 8)]
    for extra in (-8, "8", 8.0, None):
        with pytest.raises(ValueError, match=r"refilled\.2 must be a whole number"):
            fresh.restore({"refilled": {"2": extra}})


def test_a_small_split_that_begins_anew_ends_the_refilling():
    refills = Refills(3)
    played = []

    def play(first, count, drawn):
        numbers = tuple(number % 6 for number in range(first, first + count))
        if drawn & set(numbers):
            return None
        played.append(numbers)
        return RefillRound(numbers, dict.fromkeys(numbers, (0, 1)), {}, None)

    assert len(refills.rounds(play, 0, 0, 4)) == 1
    assert played == [(0, 1, 2, 3)]
    assert refills.extra == {0: 0, 1: 0}


def test_signal_is_counted_by_group_over_samples_that_count():
    columns = dict(
        instance=[4, 4, 4, 4, 5, 5, 6, 6], agent=[0, 0, 1, 1, 0, 0, 0, 0], team=[1.0, 0, 1, 1, 0, 0, 1, 0],
        where=[True, True, True, True, True, True, True, False],
    )  # fmt: skip
    arrays = {name: np.asarray(values, np.float32 if name == "team" else None) for name, values in columns.items()}
    rows = np.arange(8, dtype=np.int32)
    table = Samples(env=rows, turn=np.zeros(8, np.int32), trajectory=rows, local=np.zeros(8, np.float32), **arrays)
    tokens = Tokens.of([TokenSample([1], [2 + i], [-0.5]) for i in range(8)])
    assert signal_of(make_recipe("grpo"), tokens, table) == {4: (1, 2), 5: (0, 1), 6: (0, 1)}
    charged = dataclasses.replace(table, kl=np.linspace(0, 1, 8, dtype=np.float32))  # a KL penalty is no signal
    assert signal_of(make_recipe("grpo", kl_coef=0.5, kl_where="reward"), tokens, charged) == {4: (1, 2), 5: (0, 1), 6: (0, 1)}


def test_law_13_compiled_and_hosted_play_refill_the_same_tasks_with_the_same_samples():
    found = []
    for hosted in (False, True):
        with team(hosted, 3) as one:
            batches = [one.play(step, E * step, E) for step in range(2)]
            one.learn(batches[0], 0.1)
        found.append(batches)
    for batch, on_host in zip(*found):
        assert batch.left_out == on_host.left_out
        assert {name: x for name, x in batch.figures.items() if name.startswith("refills/")} == {
            name: x for name, x in on_host.figures.items() if name.startswith("refills/")
        }
        for name in ("samples", "sampled_tokens", "success"):
            assert batch.figures[name] == pytest.approx(on_host.figures[name]), name
        orders = [by_identity(one.tokens, one.table) for one in (batch, on_host)]
        mine, theirs = (order[one.table.where[order]] for order, one in zip(orders, (batch, on_host)))
        assert len(mine) == len(theirs)
        for column in ("instance", "agent", "turn", "team", "local", "tokens"):
            np.testing.assert_allclose(getattr(batch.table, column)[mine], getattr(on_host.table, column)[theirs], atol=1e-6)
        said, said_on_host = responses(batch.tokens), responses(on_host.tokens)
        assert [said[i] for i in mine] == [said_on_host[i] for i in theirs]
        assert len(np.unique(batch.table.instance[mine])) == E
    first, second = found[0]
    assert first.figures["refills/rounds"] + second.figures["refills/rounds"] > 0
    assert first.figures["refills/signal_after"] > first.figures["refills/signal_before"]
    drawn = int(first.figures["refills/tasks"])
    assert second.table.instance.min() >= drawn > E  # no task is drawn twice
    plays = first.episodes(E * 3, "train", np.arange(len(first.table.team), dtype=np.float32))
    assert len(plays) == E * 3
    assert sum("advantage" in one for _, drawn in plays for step in drawn["steps"] for one in step["responses"]) > 0


@pytest.mark.parametrize("hosted", [False, True])
def test_a_resumed_team_draws_the_tasks_that_it_would_have_drawn(hosted):
    with team(hosted, 2) as one:
        one.play(0, 0, E)
        state, policies = json.loads(json.dumps(one.state())), one.policies()
        want = one.play(1, E, E)
        again = one.play(1, E, E)
    with team(hosted, 2) as other:
        other.restore(policies, state)
        got = other.play(1, E, E)
    assert state["refilled"]["1"] > 0
    for batch in (again, got):
        assert batch.left_out == want.left_out
        np.testing.assert_array_equal(batch.table.instance, want.table.instance)
        np.testing.assert_array_equal(np.asarray(batch.tokens.ids), np.asarray(want.tokens.ids))


def test_without_refills_nothing_is_counted_or_kept():
    with workflow_team() as one:
        batch = one.play(0, 0, 4)
        assert batch.left_out is None
        assert not [name for name in batch.figures if name.startswith("refills/")]
        assert "refilled" not in one.state()


def test_what_has_no_groups_or_does_not_know_its_next_tasks_is_refused():
    def why(recipe="grpo", beside=None, **fields):
        return refill_conflict(2, make_recipe(recipe, **fields), **(beside or {}))

    assert why() == why("at_grpo") == ""
    assert "advantage_estimator='critic' makes no groups" in why("ppo")
    assert "group_by=('agent',) puts several tasks" in why(group_by="agent")
    assert "joint='cross'" in why(joint="cross")
    assert "max_staleness=1" in why(beside=dict(max_staleness=1))
    assert "oversample" in why(beside=dict(oversample=2))
    assert "a coach" in why(beside=dict(coached=True))
    assert "permute_rewards" in why(beside=dict(permuted=True))
    assert refill_conflict(0, make_recipe("ppo"), max_staleness=1) == ""
    with pytest.raises(WorkflowError, match=r"refills=2: control\.permute_rewards"):
        workflow_team(refills=2, permute_rewards=True)
    with pytest.raises(WorkflowError, match="refills=2: max_staleness=1"):
        workflow_team(make_recipe("grpo", group_size=4, rollout_correction="mask"), environment=ENVIRONMENT, refills=2, max_staleness=1)
