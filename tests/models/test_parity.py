"""Logits, log-probs, entropies, gradients and greedy generations against recorded figures of Hugging Face transformers in float64.

The checkpoints in tests/data/parity are tiny random ones, written by transformers 5.23; the figures beside them by the same models.
"""

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import Decoder, load_pretrained, log_probs, prompt_mask, prompt_positions, stack_layers
from marl_llm.models.checkpoint_names import weight_of
from marl_llm.models.sharding import path_name
from marl_llm.sampling import SamplingParams, sample

DATA = pathlib.Path(__file__).parents[1] / "data" / "parity"
NAMES = sorted(p.name for p in DATA.iterdir() if p.is_dir())


@functools.cache
def model(name):
    config, params = load_pretrained(DATA / name)
    return config, params, dict(np.load(DATA / f"parity_{name}.npz"))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, ids, where):
    hidden, _ = Decoder(config).apply({"params": params}, ids, prompt_positions(where), prompt_mask(where))
    return Decoder(config).apply({"params": params}, hidden, method="head")


@pytest.mark.parametrize("name", NAMES)
def test_logits_with_padding_on_either_side_and_a_row_of_one(name):
    config, params, ref = model(name)
    right, left = (jnp.asarray(ref[f"mask_{side}"].astype(bool)) for side in ("right", "left"))
    assert int(right.sum(1).min()) == 1
    got = logits_of(config, params, jnp.asarray(ref["ids_right"]), right)
    np.testing.assert_allclose(np.asarray(got)[right], ref["logits64_right"][right], atol=2e-5)
    got = logits_of(config, params, jnp.asarray(ref["ids_left"]), left)
    np.testing.assert_allclose(got[:, -1], ref["last_logits64_left"], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_entropy_loss_and_every_gradient(name):
    config, params, ref = model(name)
    ids, where = jnp.asarray(ref["ids_right"]), jnp.asarray(ref["mask_right"].astype(bool))

    @jax.jit
    def run(params):
        def loss(p):
            scores = log_probs(config, p, ids, where)
            return -jnp.sum(scores.log_probs) / jnp.sum(where[:, 1:]), scores

        return jax.value_and_grad(loss, has_aux=True)(params), log_probs(config, params, ids, where, temperature=0.7)

    ((loss, scores), gradient), warm = run(params)
    real = np.asarray(where)[:, 1:]
    np.testing.assert_allclose(np.asarray(scores.log_probs)[:, 1:][real], ref["lp_T1_right"][real], atol=2e-5)
    np.testing.assert_allclose(np.asarray(warm.log_probs)[:, 1:][real], ref["lp_T07_right"][real], atol=2e-5)
    np.testing.assert_allclose(np.asarray(scores.entropy)[:, 1:][real], ref["ent_T1_right"][:, :-1][real], atol=2e-5)
    np.testing.assert_allclose(loss, ref["loss"], rtol=1e-5)
    theirs = dict(zip(ref["grad_names"], ref["grad_norms"], strict=True))
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        (tensor,) = weight_of(path_name(path), leaf.shape, config).names
        np.testing.assert_allclose(np.linalg.norm(leaf), theirs.pop(tensor), rtol=1e-4, err_msg=tensor)
        if f"grad/{tensor}" in ref:
            np.testing.assert_allclose(np.ravel(leaf), ref[f"grad/{tensor}"], atol=1e-5, err_msg=tensor)
    assert not theirs


@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_tokens_in_both_layouts(name):
    config, params, ref = model(name)
    for layout in (params, stack_layers(params)):
        got = jax.jit(lambda p: log_probs(config, p, jnp.asarray(ref["long_ids"])).log_probs)(layout)
        np.testing.assert_allclose(got[:, 1:], ref["long_lp"], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_generations_are_equal(name):
    config, params, ref = model(name)
    ids, where = jnp.asarray(ref["ids_left"]), jnp.asarray(ref["mask_left"].astype(bool))
    run = functools.partial(sample, config, max_tokens=32, pad_id=0, settings=SamplingParams(0.0))
    keys = jax.random.split(jax.random.key(0), (4, 1))
    free = jax.jit(lambda p, stop: run(p, ids, where, keys, stop=stop), static_argnums=1)
    out = free(params, None)
    np.testing.assert_array_equal(out.tokens[:, 0], ref["gen_ids"])
    np.testing.assert_allclose(out.log_probs[:, 0], ref["gen_lp"], atol=5e-5)
    stopped = free(params, int(ref["eos_id"]))
    np.testing.assert_array_equal(np.where(stopped.where[:, 0], stopped.tokens[:, 0], 0), ref["gen_eos_ids"])


@pytest.mark.parametrize("name", NAMES)
def test_both_generations_of_config_files_say_the_same(name, tmp_path):
    config, _, _ = model(name)
    shutil.copy(DATA / name / "config_legacy.json", tmp_path / "config.json")
    shutil.copy(DATA / name / "model.safetensors", tmp_path / "model.safetensors")
    assert load_pretrained(tmp_path)[0] == config
