"""The old policy of a ratio is the policy before the update: an update that changes nothing clips nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_packed_update import in_one_shape, make_samples, reference
from test_update import CONFIG, SGD, params

from marl_llm.algorithms import RECIPES, make_recipe
from marl_llm.models import LoraConfig, init_adapters
from marl_llm.training import LearnerOptions, Trained, Update, make_mesh, make_train_state, with_value_head

NARROW = dict(clip_low=1e-4, clip_high=1e-4)
PUBLISHED = {name: make_recipe(name) for name in RECIPES}
OTHERS = {
    "sapo": make_recipe("grpo", loss="sapo"),
    "cispo": make_recipe("grpo", loss="cispo"),
    "narrow magrpo": make_recipe("magrpo", kl_coef=0.0, **NARROW),
    "narrow ppo": make_recipe("ppo", **NARROW),
    "corrected gspo": make_recipe("gspo", rollout_correction="truncate", off_policy_kl=10.0),
    "charged gspo": make_recipe("gspo", kl_coef=0.1, kl_where="reward", returns="immediate"),
}
IN_FLOAT32 = ("gspo", "narrow ppo", "corrected gspo")
CASES = PUBLISHED | OTHERS


def silent_update(recipe, dtype="bfloat16", lora=None, rate=0.0, **options):
    """Figures of an update, by default at the learning rate 0, of samples whose sampler is far off."""
    config = dataclasses.replace(CONFIG, compute_dtype=dtype)
    settings = dict(row_tokens=32, minibatch=2) | options
    update = Update(LearnerOptions(recipe, SGD, **settings), config, make_mesh(1), lora)
    samples, table = make_samples()
    own = recipe.advantage_estimator == "critic" and options.get("critic", "own") == "own"
    head = recipe.advantage_estimator == "critic" and not own
    start = init_adapters(config, jax.random.key(1), lora) if lora else with_value_head(params()) if head else params()
    trained = Trained(make_train_state(start, SGD), make_train_state(with_value_head(params()), SGD) if own else None)
    ref, base = reference() if recipe.kl_coef else None, params() if lora else None
    samples = in_one_shape(samples, settings["minibatch"])
    return update(trained, ref, samples, table, jnp.asarray([True, True]), jnp.float32(rate), 0, base=base)[1]


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in CASES), *((name, "float32") for name in IN_FLOAT32)])
def test_the_first_step_of_every_recipe_has_a_ratio_of_exactly_one(name, dtype):
    metrics = silent_update(CASES[name], dtype, minibatch=100)
    assert metrics["updates"] == 1
    assert metrics["log_prob_gap"] > 0.01  # the sampler's log-probs are others
    assert metrics["approx_kl"] == 0
    assert metrics.get("ratio", 1) == 1
    assert metrics.get("clip_low", 0) + metrics.get("clip_high", 0) == 0
    assert "ratio" in metrics or CASES[name].loss in ("reinforce", "cispo", "sapo")  # which tell none


@pytest.mark.parametrize("options", [dict(epochs=2), dict(epochs=2, microbatch_tokens=64)], ids=str)
@pytest.mark.parametrize("name", ["gspo", "narrow ppo", "corrected gspo"])
def test_later_steps_of_an_update_that_changes_nothing_have_a_ratio_of_one_up_to_rounding(name, options):
    metrics = silent_update(CASES[name], **options)
    assert metrics["updates"] >= 4
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_low"] + metrics["clip_high"] == 0


@pytest.mark.parametrize("options", [dict(lora=LoraConfig(rank=2)), dict(dtype="float32")], ids=["adapters", "float32"])
def test_adapters_and_float32_have_a_ratio_of_one_too(options):
    metrics = silent_update(CASES["gspo"], epochs=2, **options)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert metrics["clip_low"] + metrics["clip_high"] == 0


def test_a_critic_on_the_policys_own_network_has_a_ratio_of_one_too():
    metrics = silent_update(CASES["narrow ppo"], epochs=2, critic="head")
    assert metrics["clip_low"] + metrics["clip_high"] == 0


def test_a_later_step_is_measured_to_the_policy_before_the_first():
    metrics = silent_update(CASES["grpo"], "float32", rate=0.5, epochs=2)
    assert abs(metrics["ratio"] - 1) > 1e-4
