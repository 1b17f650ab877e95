"""Who sits where: a team whose models have habits instead of a network, so that each table of seats has one right result."""

import types

import jax
import jax.numpy as jnp
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.games import JointLetter
from marl_llm.models import ModelConfig, init_params
from marl_llm.runs.measuring import measure, tables
from marl_llm.sampling import Responses
from marl_llm.training import CompiledTeam, LearnerOptions, ModelSpec, compiled, make_mesh, make_optimizer
from marl_llm.training.update import Trained
from marl_llm.workflows import Assignment

GAME = JointLetter(letters=4)
SHAPE = ModelConfig(GAME.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
OPTIONS = LearnerOptions(make_recipe("grpo", group_size=2), make_optimizer(), row_tokens=64, minibatch=8)


def habits(letter, role, echo=True):
    """The parameters of a model that is no network: it says this letter, and repeats its digit when it plays `role`."""
    return {"letter": jnp.int32("abcd".index(letter)), "role": jnp.int32(role), "echo": jnp.bool_(echo)}


def habitual_player(game, assignment, configs, params, temperature):
    """Stands for `model_player`."""
    names = [role.name for role in game.roles]

    def ids(words):
        return jnp.asarray(game.tokenizer.ids_of(list(words)))

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
def team(monkeypatch):
    """A function (start, trained, seed, devices, chunk) -> a team of "x", who speaks first, and "y"."""
    monkeypatch.setattr(compiled, "model_player", habitual_player)
    monkeypatch.setattr(CompiledTeam, "_sampled_from", lambda self, params: params)
    specs = dict.fromkeys("xy", ModelSpec(SHAPE, init_params(SHAPE, jax.random.key(0))))

    def make(start, trained, seed=0, devices=2, chunk=4):
        monkeypatch.setattr(compiled, "CHUNK", chunk)
        one = CompiledTeam(GAME, Assignment({"first": "x", "second": "y"}), specs, OPTIONS, make_mesh(devices), seed=seed)
        for name, learner in one.learners.items():
            learner.began_with(start[name])
            learner.trained = Trained(learner.policy._replace(params=trained[name]))
        return one

    return make


TRAINED = {"x": habits("b", 0), "y": habits("b", 1)}
UNTRAINED = {"x": habits("c", 0), "y": habits("b", 1, echo=False)}


def page_of(team, tasks=4):
    """The page that `experiments.train` ends with."""
    played = types.SimpleNamespace(random_player={})
    plan = types.SimpleNamespace(assignment=team.assignment, played=played, shapes=dict.fromkeys("xy", SHAPE))
    page, records = measure(team, tables(plan), "test", tasks)
    return {name: one["success"] for name, one in (page | page.pop("pairs")).items()}, records


def tasks_of(record):
    return [play["task"] for play, _ in record.episodes(len(record.outcomes), "x")]


def test_every_table_of_seats_has_its_own_result_on_the_same_instances_with_one_program(team):
    compiled._evaluation_rollout.cache_clear()
    one = team(UNTRAINED, TRAINED)
    success, records = page_of(one, 6)
    wanted = {"before": 0.0, "after": 1.0, "swapped": 0.0, "first untrained": 0.0, "second untrained": 0.0}
    assert {name: success[name] for name in wanted} == wanted  # swapped, each repeats the wrong role's digit
    assert all(len(record.outcomes) == 6 for record in records.values())
    assert all(records[name].well_formed["second"] == 1.0 for name in ("before", "after", "swapped", "random"))
    met = tasks_of(records["after"])
    assert len({str(task) for task in met}) > 1
    assert all(tasks_of(record) == met for record in records.values())
    assert compiled._evaluation_rollout.cache_info().currsize == 2  # models, and the floor


def test_a_pair_holds_the_model_that_its_name_says(team):
    """y was as good before: the team with it put back wins, and the one with x put back does not."""
    success, _ = page_of(team({"x": habits("c", 0), "y": habits("b", 1)}, TRAINED))
    assert (success["second untrained"], success["first untrained"]) == (1.0, 0.0)


def test_swapped_hands_the_models_on(team):
    """Parameters that suit the other role win only when swapped."""
    crossed = {"x": habits("b", 1), "y": habits("b", 0)}
    success, _ = page_of(team(crossed, crossed))
    assert (success["after"], success["swapped"]) == (0.0, 1.0)


def test_tasks_depend_neither_on_the_runs_seed_nor_on_the_chunk_and_the_devices(team):
    met = tasks_of(team(UNTRAINED, TRAINED).evaluate({}, "test", 7))
    assert tasks_of(team(UNTRAINED, TRAINED, seed=1, devices=1, chunk=8).evaluate({}, "test", 7)) == met


def test_the_floor_says_anything_well_formed(team):
    """Random letters of 4 agree in a quarter of the plays, and each random digit is right in a tenth: 0.25 %."""
    one = team(UNTRAINED, TRAINED, chunk=64)
    floor = one.evaluate({"first": "random", "second": "random"}, "test", 512)
    assert floor.success <= 0.02
    assert floor.well_formed == {"first": 1.0, "second": 1.0}
    with pytest.raises(ValueError, match="'tset'"):
        one.evaluate({}, "tset", 4)
