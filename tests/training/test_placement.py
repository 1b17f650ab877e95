"""Models with devices of their own learn what they learn by turns on all devices, and do it at the same time."""

import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from test_team import ENVIRONMENT, FIRST, SECOND, SHAPE, SPEECH

from experiments.configs import quickstart
from marl_llm.algorithms import make_recipe
from marl_llm.games import JointLetter
from marl_llm.models import ModelConfig, init_params
from marl_llm.runs.building import placed
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.sampling import Samplers
from marl_llm.training import LearnerOptions, ModelSpec, PlacementError, PlayOptions, make_mesh, make_optimizer, make_team, parts_of
from marl_llm.training.placement import at_once, split_evenly
from marl_llm.workflows import Assignment

GAME = JointLetter(letters=2)
LETTERS = ModelConfig(GAME.tokenizer.vocab_size, 16, 1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
ROLES = {LETTERS: [role.name for role in GAME.roles], SHAPE: [FIRST.name, SECOND.name]}
MESH = make_mesh(2)


def team(hosted, split, recipe, optimizer):
    shape = SHAPE if hosted else LETTERS
    names = ROLES[shape]
    specs = {name: ModelSpec(shape, init_params(shape, jax.random.key(n)), SPEECH if hosted else None) for n, name in enumerate(names)}
    parts = parts_of(split_evenly(names, 2), names, MESH) if split else None
    options = LearnerOptions(recipe, optimizer, row_tokens=64, minibatch=8)
    play = PlayOptions(max_num_seqs=16, decode_steps=4, batch_invariant=True) if hosted else None
    game = ENVIRONMENT if hosted else GAME
    return make_team(game, Assignment({n: n for n in names}), specs, options, MESH, parts=parts, play=play, seed=1)


def ids_of(batch):
    """(identity, tokens) of every sample that counts, in an order of their own."""
    t, ids = batch.tokens, np.asarray(batch.tokens.ids)
    ids = ids[len(ids) - len(np.asarray(t.log_probs)) :]
    table = batch.table
    names = zip(table.instance, table.agent, table.turn, table.trajectory, t.rank)
    return sorted((*map(int, name), *ids[at : at + n].tolist()) for name, at, n, w in zip(names, t.response_at, t.size, table.where) if w)


def trained(hosted, split, recipe):
    with team(hosted, split, recipe, make_optimizer()) as one:
        for step in range(2):
            one.sft_step(step, 4, 1e-3)
        one.start_rl()
        said = []
        for step in range(3):
            batch = one.play(step, 6 * step, 6)
            said.append(ids_of(batch))
            one.learn(batch, 1e-3)
        success = one.evaluate({}, "test", 4).success, one.evaluate({FIRST.name: "start"}, "test", 4).success
        where = {name: {d.id for d in jax.tree.leaves(learner.params)[0].devices()} for name, learner in one.learners.items()}
        engine = one._current.engine if hosted else None
        return said, success, {name: jax.device_get(learner.params) for name, learner in one.learners.items()}, where, engine


@pytest.mark.parametrize("hosted", [False, True])
def test_models_with_a_part_of_the_devices_draw_and_learn_as_with_all_of_them(hosted):
    recipe = make_recipe("grpo", group_size=4, rewards="mixed", returns="immediate", kl_coef=0.01)
    shared, split = trained(hosted, False, recipe), trained(hosted, True, recipe)
    assert shared[0] == split[0]
    assert shared[1] == split[1]
    for name in shared[2]:
        for x, y in zip(jax.tree.leaves(shared[2][name]), jax.tree.leaves(split[2][name]), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)
    names = list(shared[2])
    assert [len(shared[3][name]) for name in names] == [2, 2]
    assert [split[3][name] for name in names] == [{0}, {1}]
    assert not hosted or isinstance(split[4], Samplers)


def test_a_critic_of_its_own_lies_beside_its_policy():
    with team(False, True, make_recipe("ppo"), make_optimizer()) as one:
        one.learn(one.play(0, 0, 6), 1e-3)
        for number, learner in enumerate(one.learners.values()):
            def of(tree):
                return {d.id for leaf in jax.tree.leaves(tree) for d in leaf.devices()}

            assert of(learner.trained.critic.params) == of(learner.trained.policy.params) == {number}


def test_parts_work_at_the_same_time_and_models_of_one_part_by_turns():
    both, alone, seen = threading.Barrier(2, timeout=60), threading.Lock(), []
    one, other = make_mesh(1), make_mesh(1, devices=jax.devices()[1:2])

    def work(name):
        if name != "b":
            both.wait()  # a and c meet, so they are under way together
        assert name == "c" or alone.acquire(blocking=False)  # a and b do not
        seen.append(name)
        if name != "c":
            alone.release()
        return name.upper()

    assert at_once({"a": one, "b": one, "c": other}, "abc", work) == {"a": "A", "b": "B", "c": "C"}
    assert seen.index("a") < seen.index("b")
    assert at_once({"a": one, "b": one}, "ba", str.upper) == {"b": "B", "a": "A"}
    with pytest.raises(ZeroDivisionError):
        at_once({"a": one, "c": other}, "ac", lambda name: 1 / (name == "a"))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"a": (0, 1)}, "'b' has no devices"),
        ({"a": (0, 1), "b": (2, 3), "c": (0,)}, "'c' is no model of this run"),
        ({"a": (0, 1), "b": (2, 4)}, r"b has the positions \(2, 4\); along 'data' there are 0 to 3"),
        ({"a": (0, 0), "b": (1, 2, 3)}, "each once"),
        ({"a": (), "b": (1, 2, 3)}, "each once"),
        ({"a": (0, 1, 2), "b": (2, 3)}, "a and b share some devices but not all"),
        ({"a": (0,), "b": (1, 2)}, "nobody has the devices 3"),
    ],
)
def test_parts_that_cannot_be_are_told(table, why):
    with pytest.raises(PlacementError, match=why):
        parts_of(table, ("a", "b"), make_mesh(4))


def test_parts_keep_the_splits_inside_of_a_model_and_may_be_shared():
    parts = parts_of({"a": (1,), "b": (0, 2), "c": (0, 2)}, "abc", make_mesh(3, 2))
    assert dict(parts["a"].shape) == {"data": 1, "fsdp": 2, "tensor": 1}
    assert [d.id for d in parts["a"].devices.flat] == [2, 3]
    assert parts["b"] is parts["c"]
    assert [d.id for d in parts["b"].devices.flat] == [0, 1, 4, 5]


def test_several_processes_are_told(monkeypatch):
    monkeypatch.setattr("marl_llm.training.processes.spans", lambda mesh: True)
    with pytest.raises(PlacementError, match="need one process"):
        parts_of({"a": (0,), "b": (1,)}, ("a", "b"), make_mesh(2))


@pytest.mark.parametrize(
    ("placement", "devices", "why"),
    [
        ("split", 3, r"config.placement='split': 2 models \(tool, planner\) do not divide 3 devices"),
        ("spilt", 2, "no one of shared, split.*did you mean 'split'"),
        ("tool:0-1", 2, "config.placement: 'planner' has no devices"),
        ("tool:0-1,planner:x", 4, "'planner:x' is not like"),
    ],
)
def test_a_config_that_cannot_be_placed_is_told(placement, devices, why):
    config = quickstart.get_config("smoke")
    config.placement = placement
    with pytest.raises(ConfigError, match=why), resolve(config) as plan:
        placed(plan, config, make_mesh(devices))


def test_a_config_places_its_models():
    config, mesh = quickstart.get_config("smoke"), make_mesh(4)
    with resolve(config) as plan:
        assert placed(plan, config, mesh) is None
        config.placement = "split"
        parts = placed(plan, config, mesh)
        assert all(isinstance(part, Mesh) and part.size == 2 for part in parts.values())
        config.placement = "planner:0,tool:1-3"
        assert {name: part.size for name, part in placed(plan, config, mesh).items()} == {"planner": 1, "tool": 3}


def test_a_frozen_model_must_be_placed_by_name_and_one_model_cannot_be_split():
    config = quickstart.get_config("smoke")
    config.placement = "split"
    config.assignment = "shared"
    with resolve(config) as plan, pytest.raises(ConfigError, match="needs two models at least, here is shared alone"):
        placed(plan, config, make_mesh(2))
