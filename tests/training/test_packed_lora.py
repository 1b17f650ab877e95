"""Imitation of host samples, adapters on a frozen base, and a KL charged to rewards: the packed steps equal what plain rows say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_update import BOTH, make_samples, packed_for, packed_step, padded, plain_step, recipe_of, reference, unrolled
from test_update import CONFIG, SGD, assert_close, assert_same, params

from marl_llm.algorithms import make_recipe
from marl_llm.models import LoraConfig, init_adapters, merge
from marl_llm.training import (
    LearnerOptions,
    PackingError,
    Tokens,
    TokenSample,
    Trained,
    Update,
    make_mesh,
    make_sft,
    make_token_kl,
    make_train_state,
    with_value_head,
)

LORA = LoraConfig(rank=2, alpha=3.0, targets=("query", "output", "up"))
ONE = jnp.float32(1.0)


@functools.cache
def adapters():
    """Adapters that already change the model."""
    fresh = init_adapters(CONFIG, jax.random.key(5), LORA)
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)


@functools.cache
def imitation_for(lora=None, devices=1, fsdp=1, row_tokens=32, microbatch_tokens=0):
    options = LearnerOptions(make_recipe("grpo"), SGD, row_tokens, 1, microbatch_tokens=microbatch_tokens)
    sft_step = make_sft(options, CONFIG, make_mesh(devices, fsdp), lora)
    return lambda policy, samples, *rest: sft_step(policy, samples, range(len(samples)), *rest)


def pairs():
    return make_samples()[0]


@functools.cache
def plain_imitation():
    """Mean negative log-likelihood per response token on unrolled rows, and its gradient."""
    prompt, prompt_where, response, where, _ = padded(make_samples()[0])

    def loss(p):
        return -jnp.sum(unrolled(p, prompt, prompt_where, response, 1.0)[0], where=where) / where.sum()

    return jax.jit(jax.value_and_grad(loss))


def test_imitation_steps_on_the_mean_likelihood_of_plain_rows_however_it_is_cut():
    value, gradient = plain_imitation()(params())
    for options in ({}, dict(microbatch_tokens=40), dict(devices=2, row_tokens=11, microbatch_tokens=22)):
        policy, metrics = imitation_for(**options)(make_train_state(params(), SGD), pairs(), 1.0)
        assert_close(jax.tree.map(lambda a, b: a - b, params(), policy.params), gradient)
        assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
        assert metrics["tokens"] == sum(s.response.size for s in make_samples()[0])
        assert metrics["grad_norm"] > 0.1
    assert set(metrics) == {"loss", "grad_norm", "tokens"}


def test_imitation_of_nothing_changes_nothing_and_what_does_not_fit_is_named():
    sft_step = imitation_for()
    policy, metrics = sft_step(make_train_state(params(), SGD), [], 1.0)
    assert_same(policy.params, params())
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
    with pytest.raises(PackingError, match="'pair 1' has 30 "):
        sft_step(policy, [TokenSample([1], [2], [0.0]), TokenSample([1] * 30, [2] * 8, [0.0] * 8, "pair 1")], 1.0)
    with pytest.raises(ValueError, match="frozen base"):
        sft_step(policy, pairs(), 1.0, params())


def test_imitation_with_adapters_has_the_loss_of_the_merged_model_and_moves_them_alone():
    base = jax.tree.map(jnp.copy, params())
    value, _ = plain_imitation()(merge(base, adapters(), LORA))
    of_adapters = jax.jit(jax.grad(lambda a: plain_imitation()(merge(base, a, LORA))[0]))
    for options in ({}, dict(fsdp=2, microbatch_tokens=32)):
        policy, metrics = imitation_for(LORA, **options)(make_train_state(adapters(), SGD), pairs(), 1.0, base)
        assert metrics["loss"] == pytest.approx(float(value), rel=1e-4)
        assert_close(jax.tree.map(lambda a, b: a - b, adapters(), policy.params), of_adapters(adapters()))
        assert_same(base, params())
    with pytest.raises(ValueError, match="frozen base"):
        imitation_for(LORA)(policy, pairs(), 1.0)


def projected(full_before, full_after):
    """What a gradient of all parameters is for the adapters alone."""
    _, back = jax.vjp(lambda a: merge(params(), a, LORA), adapters())
    return back(jax.tree.map(lambda a, b: a - b, full_before, full_after))[0]


def test_the_update_of_adapters_is_the_full_update_seen_through_them():
    recipe = recipe_of("at_grpo", "paper")
    recipe = dataclasses.replace(recipe, kl_coef=0.05)  # the reference is plain, whatever the policy is
    merged, base = merge(params(), adapters(), LORA), jax.tree.map(jnp.copy, params())
    args = reference(), *make_samples(), BOTH, ONE, 0
    (full, _), usual = packed_for(recipe)(Trained(make_train_state(merged, SGD)), *args)
    (policy, _), metrics = packed_for(recipe, lora=LORA)(Trained(make_train_state(adapters(), SGD)), *args, base=base)
    assert_close(jax.tree.map(lambda a, b: a - b, adapters(), policy.params), projected(merged, full.params))
    assert metrics["loss"] == pytest.approx(usual["loss"], rel=1e-4)
    assert metrics["kl"] == pytest.approx(usual["kl"], rel=1e-4)
    assert_same(base, params())
    assert jax.tree.structure(policy.params) == jax.tree.structure(adapters())
    assert not np.array_equal(policy.params["block_0"]["attention"]["query"]["a"], adapters()["block_0"]["attention"]["query"]["a"])
    for options, extra in ((dict(lora=LORA), None), ({}, base)):
        with pytest.raises(ValueError, match="frozen base"):
            packed_for(recipe, **options)(Trained(make_train_state(merged, SGD)), *args, base=extra)


def test_ppo_trains_adapters_beside_a_critic_of_full_parameters():
    recipe = make_recipe("ppo")
    merged, critic = merge(params(), adapters(), LORA), with_value_head(params())
    moved = []
    for start, lora, base in ((merged, None, None), (adapters(), LORA, params())):
        update = Update(LearnerOptions(recipe, SGD, 32, 100), CONFIG, make_mesh(1), lora)
        policies = Trained(make_train_state(start, SGD), make_train_state(critic, SGD))
        moved.append(update(policies, None, *make_samples(), BOTH, ONE, 0, base=base))
    ((full, full_critic), usual), ((policy, own_critic), metrics) = moved
    assert_close(jax.tree.map(lambda a, b: a - b, adapters(), policy.params), projected(merged, full.params))
    assert_same(own_critic.params, full_critic.params)
    assert not np.array_equal(own_critic.params["value_head"]["kernel"], critic["value_head"]["kernel"])
    assert metrics["loss"] == pytest.approx(usual["loss"], rel=1e-4, abs=1e-6)


def test_a_kl_in_the_reward_is_charged_from_the_samplers_own_log_probs():
    recipe = make_recipe("mappa", kl_coef=0.3)
    samples, table = make_samples()
    *rows, where, drawn = padded(samples)
    charge = np.where(where, drawn - np.asarray(unrolled(reference(), *rows, recipe.temperature)[0]), 0)  # k1
    bare = dataclasses.replace(table, kl=None)
    value, gradient = plain_step(recipe, samples, dataclasses.replace(table, kl=charge.sum(1)))
    moved, metrics = packed_step(recipe, samples, bare, microbatch_tokens=64)
    assert_close(jax.tree.map(lambda a, b: a - b, params(), moved), gradient)
    assert metrics["loss"] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert metrics["kl"] == pytest.approx(charge.sum() / where.sum(), rel=1e-4)
    free, _ = packed_step(make_recipe("mappa", kl_coef=0.0), samples, bare)
    assert max(float(abs(a - b).max()) for a, b in zip(jax.tree.leaves(free), jax.tree.leaves(moved), strict=True)) > 1e-3
    # a column that is given is charged as it is, and rows that do not count are not charged
    given, figures = packed_step(recipe, samples, table, microbatch_tokens=64)
    assert_close(given, jax.tree.map(lambda p, g: p - g, params(), plain_step(recipe, samples, table)[1]))
    assert figures["kl"] == pytest.approx(table.kl.sum() / where.sum(), rel=1e-5)
    scores = make_token_kl(recipe, CONFIG, make_mesh(2), row_tokens=16, minibatch=3, microbatch_tokens=16)
    some = scores(reference(), Tokens.of(samples), [4, 1])
    np.testing.assert_allclose(some[[1, 4], : where.shape[1]], charge[[1, 4]], atol=1e-5)
    assert not np.delete(some, [1, 4], axis=0).any()
    with pytest.raises(ValueError, match="pass the reference's parameters"):
        scores(None, Tokens.of(samples), [0])
