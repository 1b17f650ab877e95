"""Imitation of host samples, and adapters: the packed steps equal what plain rows say, and a frozen base stays as it is."""

import functools

import jax
import jax.numpy as jnp
import pytest
from test_packed_update import make_samples, padded, unrolled
from test_update import CONFIG, SGD, assert_close, assert_same, params

from marl_llm.models import LoraConfig, init_adapters, merge
from marl_llm.training import PackingError, make_mesh, make_packed_imitation, make_policy

LORA = LoraConfig(rank=2, alpha=3.0, targets=("query", "output", "up"))
ONE = jnp.float32(1.0)


@functools.cache
def adapters():
    """Adapters that already change the model."""
    fresh = init_adapters(CONFIG, jax.random.key(5), LORA)
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)


@functools.cache
def imitation_for(lora=None, devices=1, row_tokens=32, microbatch_tokens=0):
    return make_packed_imitation(CONFIG, SGD, make_mesh(devices), row_tokens=row_tokens, microbatch_tokens=microbatch_tokens, lora=lora)


def pairs():
    return [(tuple(s.prompt.tolist()), s.response) for s in make_samples()[0]]


@functools.cache
def plain_imitation():
    """Mean negative log-likelihood per response token on unrolled rows, and its gradient."""
    prompt, prompt_where, response, where, _ = padded(make_samples()[0])
    loss = lambda p: -jnp.sum(unrolled(p, prompt, prompt_where, response, 1.0)[0], where=where) / where.sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))


def test_imitation_steps_on_the_mean_likelihood_of_plain_rows_however_it_is_cut():
    value, gradient = plain_imitation()(params())
    for options in ({}, dict(microbatch_tokens=40), dict(devices=2, row_tokens=11, microbatch_tokens=22)):
        policy, metrics = imitation_for(**options)(make_policy(params(), SGD), pairs(), 1.0)
        assert_close(jax.tree.map(lambda a, b: a - b, params(), policy.params), gradient)
        assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
        assert metrics["tokens"] == sum(s.response.size for s in make_samples()[0])
        assert metrics["grad_norm"] > 0.1
    assert set(metrics) == {"loss", "grad_norm", "tokens"}


def test_imitation_of_nothing_changes_nothing_and_what_does_not_fit_is_named():
    imitate = imitation_for()
    policy, metrics = imitate(make_policy(params(), SGD), [], 1.0)
    assert_same(policy.params, params())
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
    with pytest.raises(PackingError, match="'pair 1' has 30 "):
        imitate(policy, [((1,), (2,)), ((1,) * 30, (2,) * 8)], 1.0)
    with pytest.raises(ValueError, match="frozen base"):
        imitate(policy, pairs(), 1.0, params())


def test_imitation_with_adapters_has_the_loss_of_the_merged_model_and_moves_them_alone():
    base = jax.tree.map(jnp.copy, params())
    value, _ = plain_imitation()(merge(base, adapters(), LORA))
    of_adapters = jax.jit(jax.grad(lambda a: plain_imitation()(merge(base, a, LORA))[0]))
    policy, metrics = imitation_for(LORA)(make_policy(adapters(), SGD), pairs(), 1.0, base)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-4)
    assert_close(jax.tree.map(lambda a, b: a - b, adapters(), policy.params), of_adapters(adapters()))
    assert_same(base, params())
    with pytest.raises(ValueError, match="frozen base"):
        imitation_for(LORA)(policy, pairs(), 1.0)
