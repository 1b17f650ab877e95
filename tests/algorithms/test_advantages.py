"""Advantages: parity with slow twins, and the exact results of the degenerate cases."""

import dataclasses

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl
from marl_llm.algorithms.advantages import SCALES


def table(seed, size=30):
    rng = np.random.default_rng(seed)
    returns = rng.normal(size=size).round(1)
    ids = rng.integers(0, 8, size)
    returns[ids == 3] = 0.1
    ids[ids == 5] = -1
    ids[0] = 9
    return returns, ids, rng.random(size) < 0.8, rng.random(size) + 0.1


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("singleton", ["zero", "raw"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["std", "none", "range"])
def test_group_relative(scale, ddof, weighted, singleton, dtype):
    returns, ids, where, weights = table(ddof)
    weights = 3 * weights if weighted else None
    where = where | (np.arange(30) == 0)
    desired = oracle.group_relative(returns, ids, where & (ids >= 0), scale, ddof, 1e-4, weights, singleton)
    with jax.enable_x64(dtype == np.float64):
        def cast(x):
            return None if x is None else jnp.asarray(x.astype(dtype))

        actual = rl.group_relative(
            cast(returns), ids, where=where, scale=scale, ddof=ddof, epsilon=1e-4, weights=cast(weights), singleton=singleton
        )
        assert actual.dtype == dtype
        oracle.close(actual, desired, 1e-12 if dtype == np.float64 else 1e-5)


def test_batch_scale():
    returns, ids, where, _ = table(7)
    with jax.enable_x64(True):
        actual = rl.group_relative(returns, ids, where=where, scale="batch", ddof=1, epsilon=1e-4)
        oracle.close(actual, oracle.group_relative(returns, ids, where & (ids >= 0), "batch", 1, 1e-4), 1e-12)


def test_leave_one_out():
    returns, ids, where, _ = table(2)
    with jax.enable_x64(True):
        oracle.close(rl.leave_one_out(returns, ids, where=where), oracle.leave_one_out(returns, ids, where & (ids >= 0)), 1e-12)


@pytest.mark.parametrize("estimate", [rl.group_relative, rl.leave_one_out, rl.preference])
def test_equal_returns_give_exactly_nothing(estimate):
    # 0.1 + 0.1 + 0.1 is not 3 x 0.1: a mean that is taken and subtracted leaves 1e-17, and divided by a zero deviation much more.
    returns = jnp.array([0.1, 0.1, 0.1, 1e30, 1e30, 5.0])
    ids = jnp.array([0, 0, 0, 1, 1, 2])
    np.testing.assert_array_equal(estimate(returns, ids), np.zeros(6))


@pytest.mark.parametrize("estimate", [rl.group_relative, rl.leave_one_out, rl.preference])
def test_equal_up_to_the_order_of_addition_is_equal(estimate):
    one, other = np.float32(0.1) + np.float32(0.2) + np.float32(0.7), np.float32(0.1) + (np.float32(0.2) + np.float32(0.7))
    returns = jnp.array([one, np.nextafter(other, np.float32(2)), 0.5, 0.5001])
    out = estimate(returns, jnp.array([0, 0, 1, 1]))
    np.testing.assert_array_equal(out[:2], [0, 0])
    np.testing.assert_array_equal(jnp.sign(out[2:]), [-1, 1])


@pytest.mark.parametrize("estimate", [rl.group_relative, rl.leave_one_out, rl.preference])
def test_an_unmasked_nan_is_not_hidden(estimate):
    out = estimate(jnp.array([jnp.nan, 1.0, 1.0, 2.0]), jnp.array([0, 0, 1, 1]))
    np.testing.assert_array_equal(jnp.isnan(out), [True, True, False, False])
    assert bool(jnp.isnan(rl.whiten(jnp.array([jnp.nan, 1.0]))).any())


@pytest.mark.parametrize("scale", ["std", "none", "range", "batch"])
def test_masked_nan_and_an_empty_table(scale):
    returns, ids = jnp.array([1.0, 2.0, jnp.nan]), jnp.zeros(3, int)
    out = rl.group_relative(returns, ids, where=jnp.array([True, True, False]), scale=scale)
    np.testing.assert_array_equal(jnp.sign(out), [-1, 1, 0])
    np.testing.assert_array_equal(rl.group_relative(returns, ids, where=jnp.zeros(3, bool), scale=scale), np.zeros(3))


def test_a_group_of_one():
    returns, ids = jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 1, 1])
    assert rl.group_relative(returns, ids)[0] == 0
    np.testing.assert_allclose(rl.group_relative(returns, ids, singleton="raw")[0], 3.0 / (1 + 1e-6))
    np.testing.assert_array_equal(rl.leave_one_out(returns, ids, singleton="raw"), [3.0, -1.0, 1.0])


def test_agent_wise_gives_each_agent_its_own_baseline():
    rng = np.random.default_rng(0)
    instance, agent, trajectory = rng.integers(0, 3, (3, 40))
    returns, where = rng.normal(size=40), rng.random(40) < 0.9
    with jax.enable_x64(True):
        desired = oracle.group_relative(returns, instance * 10 + agent, where)
        oracle.close(rl.agent_wise(returns, instance, agent, where=where), desired, 1e-12)
        ids = instance * 10 + agent

        def alike(r, s):
            return where[s] and ids[s] == ids[r] and trajectory[s] == trajectory[r]

        votes = np.array([1 / max(sum(alike(r, s) for s in range(40)), 1) for r in range(40)])
        desired = oracle.group_relative(returns, ids, where, weights=votes)
        oracle.close(rl.agent_wise(returns, instance, agent, where=where, trajectory=trajectory), desired, 1e-12)


class TestWhiten:
    def test_token_weights_equal_the_equation_over_tokens(self):
        # MAPPA Eq. 4 written out: every token of a sample carries the sample's A and has one vote.
        rng = np.random.default_rng(0)
        returns, tokens = rng.normal(size=7), rng.integers(0, 9, 7)
        flat = np.repeat(returns, tokens)
        with jax.enable_x64(True):
            actual = rl.normalise_globally(returns, tokens)
            oracle.close(actual, (returns - flat.mean()) / np.sqrt(flat.var() + 1e-8), 1e-12)
            laid_out = rl.whiten(jnp.repeat(returns[:, None], 9, axis=1), where=np.arange(9) < tokens[:, None])
            oracle.close(jnp.where(tokens > 0, actual, 0), laid_out[:, 0], 1e-12)

    @pytest.mark.parametrize("ddof", [0, 1])
    def test_ddof_and_mask(self, ddof):
        rng = np.random.default_rng(1)
        values, where = rng.normal(size=(4, 5)), rng.random((4, 5)) < 0.7
        inside = values[where]
        desired = np.where(where, (values - inside.mean()) / np.sqrt(inside.var(ddof=ddof) + 1e-8), 0)
        with jax.enable_x64(True):
            oracle.close(rl.whiten(np.where(where, values, np.nan), where=where, ddof=ddof), desired, 1e-12)
            scaled = (values - inside.mean()) / np.sqrt(inside.var(ddof=ddof) + 1e-8)
            unshifted = np.where(where, scaled + inside.mean(), 0)
            oracle.close(rl.whiten(values, where=where, ddof=ddof, shift_mean=False), unshifted, 1e-12)

    def test_nothing_to_whiten(self):
        same = jnp.array([0.1, 0.1, 0.1])
        np.testing.assert_array_equal(rl.whiten(same), np.zeros(3))
        np.testing.assert_array_equal(rl.whiten(same, shift_mean=False), same)
        np.testing.assert_array_equal(rl.whiten(same, where=jnp.zeros(3, bool)), np.zeros(3))
        np.testing.assert_array_equal(rl.whiten(same, where=jnp.array([True, False, False]), ddof=1), np.zeros(3))


def test_unknown_values_list_the_valid_ones():
    with pytest.raises(ValueError, match="'std', 'none', 'range', 'batch'"):
        rl.group_relative(jnp.zeros(2), jnp.zeros(2, int), scale="sigma")
    with pytest.raises(ValueError, match="'zero', 'raw'"):
        rl.leave_one_out(jnp.zeros(2), jnp.zeros(2, int), singleton="one")


ROUNDING = {
    "nobody is paid, and the charge is rounding": lambda rng: 2e-8 * rng.normal(size=64),
    "a KL of rounding size on equal pay": lambda rng: 1 - 1e-7 * rng.normal(size=64),
    "a big mean": lambda rng: 1e6 + 0.1 * rng.normal(size=64),
    "a big negative mean": lambda rng: -3e4 + 2e-3 * rng.normal(size=64),
    "one stray among equals": lambda rng: np.where(np.arange(64) == 7, 1 + 1e-6, 1.0),
}
IDS = np.arange(64) % 8
NORMALISERS = {
    "whiten": lambda x: rl.whiten(x),
    "whiten by tokens": lambda x: rl.whiten(x, weights=1 + np.arange(64) % 5, ddof=1),
    "global": lambda x: rl.normalise_globally(x, np.full(64, 3)),
    **{scale: (lambda x, scale=scale: rl.group_relative(x, IDS * 0, scale=scale, epsilon=0.0)) for scale in SCALES},
    "weighted": lambda x: rl.group_relative(x, IDS * 0, weights=1 + np.arange(64) % 5),
    "leave one out": lambda x: rl.leave_one_out(x, IDS * 0),
    "groups of one": lambda x: rl.group_relative(x, np.arange(64), epsilon=0.0),
    "decoupled": lambda x: rl.decoupled(jnp.stack([x, x], axis=1), IDS * 0, np.ones(2)),
}


@pytest.mark.parametrize("name", NORMALISERS)
@pytest.mark.parametrize("case", ROUNDING)
def test_no_scale_makes_advantages_of_rounding(name, case):
    returns = jnp.asarray(ROUNDING[case](np.random.default_rng(3)), jnp.float32)
    np.testing.assert_array_equal(NORMALISERS[name](returns), np.zeros(64))


@pytest.mark.parametrize("name", [name for name in NORMALISERS if name != "groups of one"])
@pytest.mark.parametrize("high", [1e-5, 1.0, 1e6])
def test_what_is_more_than_rounding_keeps_its_advantage(name, high):
    for low in (0.0, high * (1 - 1e-5)):
        if high - low < 2e-6:
            continue
        advantages = NORMALISERS[name](jnp.asarray(np.where(IDS < 4, high, low), jnp.float32))
        assert float(jnp.min(advantages[IDS < 4])) > 0 > float(jnp.max(advantages[IDS >= 4]))


@pytest.mark.parametrize("name", ["mappa", "grpo", "rloo", "reinforce_pp", "spiral"])
def test_a_step_in_which_nobody_is_paid_has_no_advantages(name):
    rng = np.random.default_rng(0)
    zeros, kl = np.zeros(64, int), 2e-6 * rng.normal(size=64)
    recipe = rl.make_recipe(name, kl_coef=0.01, kl_where="reward")
    samples = rl.Samples(instance=IDS, env=IDS, agent=zeros, turn=zeros, trajectory=np.arange(64), team=np.zeros(64, np.float32),
                         local=np.zeros(64, np.float32), tokens=zeros + 5, kl=jnp.asarray(kl, jnp.float32))  # fmt: skip
    np.testing.assert_array_equal(rl.advantages_for(recipe, samples)[0], np.zeros(64))
    drifted = rl.advantages_for(recipe, dataclasses.replace(samples, kl=jnp.asarray(1e4 * kl, jnp.float32)))[0]
    assert float(jnp.max(jnp.abs(drifted))) > 1e-5  # a policy that has moved is charged


def test_a_return_at_its_running_mean_has_no_advantage():
    samples = rl.Samples(**dict.fromkeys(("instance", "env", "agent", "turn"), np.zeros(3, int)), trajectory=np.arange(3),
                         team=np.zeros(3), local=np.asarray([0.3, 1.0, 0.3 + 1e-3], np.float32),
                         running=np.asarray([0.3 + 3e-8, 1 - 6e-8, 0.3], np.float32))  # fmt: skip
    np.testing.assert_allclose(rl.advantages_for(rl.make_recipe("spiral"), samples)[0], [0, 0, 1e-3], rtol=1e-3, atol=0)
