"""Bytes of arrays per parameter while a team starts, learns, goes on and is written: parameters and moments are 12, the rest passes."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.models import LoraConfig, ModelConfig, init_params, save_pretrained
from marl_llm.planning.programs import PlanSizes, memory, programs
from marl_llm.runs.building import restored
from marl_llm.training import LearnerOptions, make_mesh, make_optimizer
from marl_llm.training.checkpoints import Checkpoints
from marl_llm.training.learner import Learner, ModelSpec
from marl_llm.training.refills import Refills
from marl_llm.training.team import Team

SHAPE = ModelConfig(vocab_size=64, width=128, layers=2, query_heads=2, key_value_heads=2, head_dim=64, feed_forward=256)
LIMIT = 16.2  # the counters of optimizers and keys are small against a model
PARAMETERS = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda key: init_params(SHAPE, key), jax.random.key(0))))
COUNTS = {"step": 0, "seed": 0, "samples": 0, "sampled_tokens": 0, "wall_s": 0, "cpu_s": 0, "silent": {}}


class Peak:
    """The most bytes of living arrays before and after every call of the functions that make arrays while models begin and are read."""

    MAKERS = ((jax, "device_put"), (jnp, "array"), (jnp, "zeros_like"), (Learner, "_placed"), (Checkpoints, "_read"))

    def __init__(self, monkeypatch):
        gc.collect()
        self.buffers = {}  # id of an array -> a weak reference to it, and its buffers: they are asked for once
        self.before, self.most = self.living(), 0
        for place, name in self.MAKERS:
            monkeypatch.setattr(place, name, self.watching(getattr(place, name)))

    def living(self):
        """Two arrays may be views of one buffer, which counts once."""
        sizes = {}
        for array in jax.live_arrays():
            if not array.is_deleted():
                sizes |= self.buffers_of(array)
        return sum(sizes.values())

    def buffers_of(self, array):
        """Pointer -> bytes. The id of an array that is gone may be that of a new one."""
        reference, sizes = self.buffers.get(id(array), (None, {}))
        if reference is None or reference() is not array:
            counts = not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            sizes = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes for shard in array.addressable_shards} if counts else {}
            self.buffers[id(array)] = weakref.ref(array), sizes
        return sizes

    def watching(self, function):
        def call(*args, **options):
            self.look()
            found = function(*args, **options)
            self.look()
            return found

        return call

    def look(self):
        self.most = max(self.most, self.living() - self.before)

    def taken(self):
        """Bytes of the highest moment since the last call."""
        self.look()
        most, self.most = self.most, 0
        return most


class Models(Team):
    """The models of a team, without a game."""

    play = demonstrate = evaluate = close = None

    def __init__(self, learners):
        self.learners, self.trained_coach, self.kl_coef, self.running = learners, None, dict.fromkeys(learners, 0.0), np.zeros(1)
        self._taught, self.refills = {}, Refills(0, 1)

    def _families(self):
        return {name: [name] for name in self.learners}

    def _serve(self, names):
        pass


Models.__abstractmethods__ = frozenset()


def learner(params, critic=False, lora=None, base=None):
    options = LearnerOptions(make_recipe("ppo" if critic else "grpo"), make_optimizer(), row_tokens=8, minibatch=1)
    return Learner(ModelSpec(SHAPE, params, lora=lora), options, make_mesh(1), jax.random.key(1), base)


@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("models", [1, 2])
def test_a_team_starts_and_goes_on_within_16_bytes_per_parameter(monkeypatch, tmp_path, models, critic):
    trained = models * PARAMETERS * (2 if critic else 1)
    peak = Peak(monkeypatch)
    params = init_params(SHAPE, jax.random.key(0))
    team = Models({name: learner(params, critic) for name in "ab"[:models]})
    assert peak.taken() / trained <= LIMIT
    del params
    team.start_rl()
    assert peak.taken() / trained <= LIMIT
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, team.policies(), COUNTS | {"team": team.state()})
        want = jax.tree.map(np.array, team.policies())
        peak.taken()
        restored(team, checkpoints, 0)
        assert peak.taken() / trained <= LIMIT
    jax.tree.map(np.testing.assert_array_equal, team.policies(), want)
    jax.tree.map(np.testing.assert_array_equal, team.learners["a"].start, want["a"].params)


def test_models_of_another_run_are_read_without_their_moments(monkeypatch, tmp_path):
    params = init_params(SHAPE, jax.random.key(0))
    team = Models({"a": learner(params)})
    del params
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, team.policies(), COUNTS | {"team": team.state()})
        peak = Peak(monkeypatch)
        held = peak.living()
        found = checkpoints.restore_params(0, team.models())
        assert peak.taken() <= 4.2 * PARAMETERS
        assert held >= 12 * PARAMETERS
        team.start_from(found)
        assert peak.taken() <= 4.2 * PARAMETERS  # its own are given up before the copy is made
    jax.tree.map(np.testing.assert_array_equal, team.learners["a"].policy.params, found["a"])


def test_adapters_on_one_base_hold_the_base_once(monkeypatch):
    peak = Peak(monkeypatch)
    params, lora = init_params(SHAPE, jax.random.key(0)), LoraConfig(rank=2)
    first = learner(params, lora=lora)
    team = Models({"a": first, "b": learner(params, lora=lora, base=first.base)})
    adapters = sum(x.size for x in jax.tree.leaves(first.policy.params))
    del params, first
    peak.taken()
    team.start_rl()
    gc.collect()
    assert peak.living() - peak.before <= 4.2 * PARAMETERS + 2 * 16 * adapters


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_step_makes_gradient_and_moments_once(recipe):
    """As XLA lays out the programs of a CPU: the arrays, the gradient, and for few tokens little more. What is more here is what the
    gradient of attention transposes; a second gradient or a copy of a moment would be 4 bytes."""
    shape = ModelConfig(vocab_size=512, width=256, layers=4, query_heads=4, key_value_heads=2, head_dim=64, feed_forward=1024)
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda key: init_params(shape, key), jax.random.key(0))))
    critic = "own" if recipe == "ppo" else None
    lowered, *_ = programs(PlanSizes(make_recipe(recipe), shape, 1, 8, 4, critic=critic, sft=True), make_mesh(1), 1, 0)
    assert {"update", "sft"} <= lowered.keys()
    for program in lowered.values():
        assert memory(program.compile())["peak"] / parameters <= 16 + 3.2


def test_a_model_with_adapters_is_written_from_one_merged_copy(monkeypatch, tmp_path):
    one = learner(init_params(SHAPE, jax.random.key(0)), lora=LoraConfig(rank=2))
    gc.collect()
    peak = Peak(monkeypatch)
    save_pretrained(tmp_path, one.config, one.params)
    assert peak.taken() <= 4.2 * PARAMETERS
