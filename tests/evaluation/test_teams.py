"""Figures of batches made by hand, and what TeamEvaluation plays against whom."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.evaluation import TeamEvaluation, figures, teams, wilson
from marl_llm.games import SPLITS, make_game
from marl_llm.models import ModelConfig
from marl_llm.rollout import Episodes, Rollout
from marl_llm.sampling import Responses
from marl_llm.training import Batch, make_mesh

# --- figures ---------------------------------------------------------------------------------------------------------------------


def batch(outcome, turns, void, where, well_formed):
    """A batch of E episodes; `where` and `well_formed` map a role to `[T, E]`."""
    column = lambda x, kind: jnp.asarray(x, kind)[:, None]  # noqa: E731
    tables = {
        role: types.SimpleNamespace(
            where=jnp.asarray(where[role], bool)[:, :, None],
            rewards=types.SimpleNamespace(well_formed=jnp.asarray(well_formed[role], bool)[:, :, None, None]),
        )
        for role in where
    }
    ended = Episodes(
        column(outcome, jnp.float32), column(turns, jnp.int32), column(np.asarray(outcome) >= 1, bool), column(void, bool)
    )
    return Batch(None, {}, Rollout(tables, ended, None), None)


@pytest.fixture
def batches():
    """Five episodes: success after 1 turn, failure after 2, a void one; success after 2, and one that a limit of 4 leaves out."""
    one = batch(
        outcome=[1.0, 0.25, 0.0],
        turns=[1, 2, 0],
        void=[False, False, True],
        where={"tool": [[1, 1, 0], [0, 1, 0]], "planner": [[1, 1, 0], [0, 1, 0]]},
        well_formed={"tool": [[1, 1, 1], [1, 1, 1]], "planner": [[1, 0, 1], [1, 0, 1]]},
    )
    two = batch(
        outcome=[1.0, 1.0],
        turns=[2, 1],
        void=[False, False],
        where={"tool": [[1, 1], [1, 0]], "planner": [[1, 1], [1, 0]]},
        well_formed={"tool": [[0, 0], [1, 0]], "planner": [[1, 0], [1, 0]]},
    )
    return [one, two]


def test_figures_of_all(batches):
    out = figures(batches, 5)
    assert out["episodes"] == 4  # the void one counts for nothing
    assert out["success"] == 3 / 4
    assert out["interval"] == list(wilson(3, 4))
    assert out["turns"] == (1 + 2 + 2 + 1) / 4
    assert out["roles"] == {"tool": {"well_formed": 4 / 6}, "planner": {"well_formed": 3 / 6}}


def test_figures_stop_at_the_episodes_asked_for(batches):
    out = figures(batches, 4)
    assert (out["episodes"], out["success"], out["turns"]) == (3, 2 / 3, 5 / 3)
    assert out["roles"] == {"tool": {"well_formed": 4 / 5}, "planner": {"well_formed": 3 / 5}}
    assert figures(batches, 1)["roles"] == {"tool": {"well_formed": 1.0}, "planner": {"well_formed": 1.0}}


def test_figures_of_nothing_but_void_episodes_are_defined():
    nothing = batch([0.0], [0], [True], {"solo": [[0]]}, {"solo": [[0]]})
    assert figures([nothing], 1) == {
        "success": 0.0, "interval": [0.0, 1.0], "episodes": 0, "turns": 0.0, "roles": {"solo": {"well_formed": 0.0}},
    }  # fmt: skip


# --- who plays -------------------------------------------------------------------------------------------------------------------

GAME = make_game("joint_letter", letters=4)
SHAPE = ModelConfig(vocab_size=GAME.tokenizer.vocab_size)


def habits(letter, role, echo=True):
    """The parameters of a model that is no network: it says this letter, and repeats its digit when it plays `role`."""
    return {"letter": jnp.int32("abcd".index(letter)), "role": jnp.int32(role), "echo": jnp.bool_(echo)}


def habitual_player(game, assignment, configs, params, temperature):
    """Stands for `model_player`."""
    names = [r.name for r in game.roles]
    ids = lambda words: jnp.asarray(game.tokenizer.ids_of(list(words)))  # noqa: E731

    def respond(role, states, prompt, keys):
        habit = params[assignment[role]]
        digit = states.digits[:, names.index(role)]
        right = habit["echo"] & (habit["role"] == names.index(role))
        said = jnp.stack([jnp.broadcast_to(ids("abcd")[habit["letter"]], digit.shape), ids("0123456789")[(digit + ~right) % 10]], -1)
        said = said[:, None].astype(jnp.int32)
        zero = jnp.zeros(said.shape, jnp.float32)
        return Responses(said, jnp.ones(said.shape, bool), zero, zero, zero, jnp.zeros(said.shape[:-1], bool))

    return respond


@pytest.fixture
def evaluation(monkeypatch):
    monkeypatch.setattr(teams, "model_player", habitual_player)

    def make(assignment=None, chunk=4, seed=0, devices=2):
        assignment = assignment or {"first": "x", "second": "y"}
        return TeamEvaluation(GAME, assignment, dict.fromkeys(assignment.values(), SHAPE), make_mesh(devices), chunk=chunk, seed=seed)

    return make


TRAINED = {"x": habits("b", 0), "y": habits("b", 1)}
UNTRAINED = {"x": habits("c", 0), "y": habits("b", 1, echo=False)}


def instances(batches, count):
    return np.concatenate([np.asarray(b.instances) for b in batches])[:count].tolist()


def test_everything_plays_each_team(evaluation):
    out = evaluation().everything(UNTRAINED, TRAINED, 6)
    assert out["split"] == "test"
    success = {name: out[name]["success"] for name in ("before", "after", "swapped")}
    assert success == {"before": 0.0, "after": 1.0, "swapped": 0.0}  # swapped, each repeats the wrong role's digit
    pairs = out["pairs"]
    assert list(pairs) == ["x=trained, y=untrained", "x=untrained, y=trained"]
    assert [p["success"] for p in pairs.values()] == [0.0, 0.0]
    assert all(out[name]["roles"]["second"]["well_formed"] == 1.0 for name in ("before", "after", "swapped", "random"))
    assert all(out[name]["episodes"] == 6 for name in ("before", "after", "swapped", "random"))


def test_pairs_hold_the_model_that_their_name_says(evaluation):
    """Untrained y is as good as trained y: then `y=untrained` wins beside trained x, and only there."""
    before = {"x": habits("c", 0), "y": habits("b", 1)}
    pairs = evaluation().everything(before, TRAINED, 4)["pairs"]
    assert {name: p["success"] for name, p in pairs.items()} == {"x=trained, y=untrained": 1.0, "x=untrained, y=trained": 0.0}


def test_swapped_hands_the_models_on(evaluation):
    """Parameters that suit the other role win only when swapped."""
    crossed = {"x": habits("b", 1), "y": habits("b", 0)}
    out = evaluation().everything(crossed, crossed, 4)
    assert (out["after"]["success"], out["swapped"]["success"]) == (0.0, 1.0)


def test_one_shared_model_has_nothing_to_swap(evaluation):
    shared = {"s": habits("b", 0)}
    out = evaluation({"first": "s", "second": "s"}).everything(shared, shared, 4)
    assert "swapped" not in out
    assert "pairs" not in out


def test_every_team_meets_the_same_instances(evaluation):
    team = evaluation()
    first = instances(team.batches(TRAINED, "test", 8), 8)
    assert instances(team.batches(UNTRAINED, "test", 8), 8) == first
    assert instances(evaluation(chunk=8).batches(TRAINED, "test", 8), 8) == first  # whatever the chunk
    assert instances(evaluation(chunk=2, devices=1).batches(TRAINED, "test", 7), 7) == first[:7]  # and the devices
    assert instances(evaluation(seed=1).batches(TRAINED, "test", 8), 8) != first
    assert len({tuple(x) for x in first}) > 1
    played = []
    monkey = team.batches
    team.batches = lambda *a, **k: played.append(monkey(*a, **k)) or played[-1]
    team.everything(UNTRAINED, TRAINED, 8)
    assert len(played) == 6  # before, after, random, swapped, two pairs
    assert all(instances(b, 8) == first for b in played)


def test_splits_are_apart_and_named(evaluation):
    team = evaluation(chunk=32)
    seen = {s: {tuple(x) for x in instances(team.batches(TRAINED, s, 64), 64)} for s in SPLITS}
    assert not seen["test"] & seen["validation"]
    assert not (seen["test"] | seen["validation"]) & seen["train"]
    assert team.team(TRAINED, "validation", 5)["split"] == "validation"
    assert team.team(TRAINED, "validation", 5)["episodes"] == 5
    assert len(team.batches(TRAINED, "test", 33)) == 2
    with pytest.raises(ValueError, match="unknown split 'tset'"):
        team.team(TRAINED, "tset", 4)


def test_the_floor_is_a_player_that_says_anything_well_formed(evaluation):
    """Random letters of 4 agree in a quarter of the plays, and each random digit is right in a tenth: 0.25 %."""
    floor = evaluation(chunk=64).floor("test", 512)
    assert floor["success"] <= 0.02
    assert floor["roles"] == {"first": {"well_formed": 1.0}, "second": {"well_formed": 1.0}}
    assert floor["episodes"] == 512
    assert floor["split"] == "test"


def test_one_compilation_serves_all_teams_and_splits(evaluation):
    team = evaluation()
    team.everything(UNTRAINED, TRAINED, 8)
    team.team(TRAINED, "validation", 4)
    assert team.compiled._cache_size() == 1


def test_chunks_must_divide_over_the_devices(evaluation):
    with pytest.raises(ValueError, match="evaluation.episodes=5 do not divide over 2 devices"):
        evaluation(chunk=5)
