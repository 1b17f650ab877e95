"""Adapters: no change at first, equal to merged weights, mixed in one batch, and in PEFT's format."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_files import BASE, SHAPES, params_of, same

from marl_llm.models import (
    CheckpointFileError,
    LoraConfig,
    attach,
    attach_many,
    init_adapters,
    load_adapters,
    log_probs,
    merge,
    save_adapters,
    save_pretrained,
    score_responses,
    stack_layers,
    unstack_layers,
)
from marl_llm.models.tensor_files import read_header
from marl_llm.sampling import sample

LORA = LoraConfig(rank=3, alpha=6.0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 24, (4, 6)), jnp.int32)


def adapters_of(seed, lora=LORA, config=BASE):
    """Adapters with nothing at zero."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init_adapters(config, jax.random.key(0), lora)))
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype) for x in leaves])


@jax.jit
def scores(params, agents=None):
    return log_probs(BASE, params, TOKENS, agents=agents).log_probs


def test_fresh_adapters_change_nothing_and_receive_a_gradient():
    base = params_of(BASE)
    fresh = init_adapters(BASE, jax.random.key(0), LORA)
    np.testing.assert_array_equal(scores(attach(base, fresh, LORA)), scores(base))
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(scores(attach(base, a, LORA)))))(fresh)
    assert all(float(jnp.abs(g["b"]).max()) > 0 for g in [gradient["block_0"]["attention"]["query"], gradient["block_1"]["down"]])


def test_merged_adapters_add_their_product_times_alpha_over_rank():
    base, adapters = params_of(BASE), adapters_of(1)
    a, b = (np.asarray(adapters["block_0"]["down"][name]) for name in "ab")
    got, old = (np.asarray(params["block_0"]["down"]["kernel"]) for params in (merge(base, adapters, LORA), base))
    np.testing.assert_allclose(got - old, 6.0 / 3 * a @ b, atol=1e-5)


@pytest.mark.parametrize("targets", [("query", "value"), LORA.targets])
@pytest.mark.parametrize("stacked", [False, True])
def test_attached_equals_merged_in_both_layouts(targets, stacked):
    lora = dataclasses.replace(LORA, targets=targets)
    base, adapters = params_of(BASE), adapters_of(1, lora)
    base = stack_layers(base) if stacked else base
    merged = merge(base, adapters, lora)
    assert ("blocks" in merged) == stacked
    attached = scores(attach(base, adapters, lora))
    np.testing.assert_allclose(attached, scores(merged), atol=2e-5)
    assert float(jnp.abs(attached - scores(base)).max()) > 1e-2


def test_stacked_adapters_are_those_of_single_layers(tmp_path):
    """Fresh ones, attached to a base of either layout, merged and saved."""
    fresh, stacked_fresh = (init_adapters(BASE, jax.random.key(3), LORA, stacked) for stacked in (False, True))
    same(stack_layers(fresh), stacked_fresh)
    base, adapters = params_of(BASE), adapters_of(1)
    stacked = stack_layers(adapters)
    for layout in (lambda x: x, stack_layers):
        want = attach(layout(base), adapters, LORA)
        same(attach(layout(base), stacked, LORA), want)
        same(merge(layout(base), stacked, LORA), merge(layout(base), adapters, LORA))
    for name, one in (("apart", adapters), ("stacked", stacked)):
        save_adapters(tmp_path / name, one, LORA)
    apart, together = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("apart", "stacked"))
    assert apart == together


def test_a_batch_that_mixes_agents_is_served_in_one_forward():
    base, agents = params_of(BASE), [adapters_of(1), adapters_of(2)]
    who = np.asarray([0, 1, 1, 0])
    both = scores(attach_many(base, agents, LORA), jax.nn.one_hot(who, 2))
    for row, agent in enumerate(who):
        alone = scores(attach(base, agents[agent], LORA))
        np.testing.assert_allclose(both[row], alone[row], atol=2e-5)


@pytest.mark.parametrize("config", [BASE, SHAPES["gemma3"]])
def test_the_sampler_and_the_scorer_take_adapters(config):
    params = attach(stack_layers(params_of(config)), adapters_of(1), LORA)
    where = jnp.ones((2, 3), bool)
    keys = jax.random.split(jax.random.key(0), (2, 2))
    out = jax.jit(lambda p: sample(config, p, TOKENS[:2, :3], where, keys, max_tokens=4, stop=None, pad_id=0))(params)
    score = jax.jit(lambda p: score_responses(config, p, TOKENS[:2, :3], where, out.tokens))
    scored = score(params)
    np.testing.assert_allclose(out.log_probs, scored.log_probs, atol=2e-5)
    plain = score(unstack_layers(params)["base"])
    assert float(jnp.abs(plain.log_probs - scored.log_probs).max()) > 1e-2


def test_peft_files_round_trip_and_carry_the_names_of_the_base(tmp_path):
    lora = dataclasses.replace(LORA, targets=("query", "output", "down"))
    adapters = adapters_of(1, lora)
    save_adapters(tmp_path, adapters, lora, base_name="some/base")
    got, read = load_adapters(tmp_path, BASE)
    assert read == lora
    same(got, adapters)
    names = read_header(tmp_path / "adapter_model.safetensors")
    assert names["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (3, 16)
    assert names["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"].shape == (16, 3)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6.0, ["q_proj", "o_proj", "down_proj"])


def test_adapters_of_a_base_that_sees_images_are_not_written_for_peft(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ValueError, match="sees images, and PEFT calls its layers otherwise; merge the adapters"):
        save_adapters(tmp_path / "adapters", adapters_of(1), LORA, base_name=str(tmp_path))
    assert not (tmp_path / "adapters").exists()


def test_adapters_that_do_not_fit_are_told(tmp_path):
    save_adapters(tmp_path, adapters_of(1), LORA)
    with pytest.raises(CheckpointFileError, match=r"layers.0.self_attn.q_proj.lora_A.weight: \[3, 16\], the model wants \[3, 20\]"):
        load_adapters(tmp_path, dataclasses.replace(BASE, width=20))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, says in (({"use_dora": True}, "use_dora=True"), ({"target_modules": "all-linear"}, "all-linear")):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointFileError, match=says):
            load_adapters(tmp_path, BASE)


def test_what_makes_no_adapter_is_told(tmp_path):
    with pytest.raises(ValueError, match="targets"):
        LoraConfig(targets=("query", "embedding"))
    with pytest.raises(ValueError, match="rank"):
        LoraConfig(rank=0)
    with pytest.raises(ValueError, match="same targets"):
        attach_many(params_of(BASE), [adapters_of(1), adapters_of(2, dataclasses.replace(LORA, targets=("query",)))], LORA)
    with pytest.raises(ValueError, match="merge them"):
        save_pretrained(tmp_path, BASE, attach(params_of(BASE), adapters_of(1), LORA))
