"""Conventions of two popular trainers at extreme ratios (e^±12), with ragged masks and holes, against slow NumPy twins.

Values and gradients. The recorded figures of `test_oracle_parity` hold moderate ratios and one shape; here the equations
themselves are written down a second time, token by token, clamps included.
"""

import math

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

PRECISIONS = pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-10), (np.float32, 1e-5)], ids=["f64", "f32"])
S, R = 7, 11


def batch():
    """Return (new, old, advantages [S], where) with log-ratios up to ±12 (beyond ±20 in one row), values exact in float32."""
    rng = np.random.default_rng(5)

    def exact(x):
        return np.round(x * 256) / 256

    old = exact(-rng.exponential(size=(S, R)))
    new = old + exact(rng.uniform(-12, 12, (S, R)))
    new[0] = old[0] + exact(rng.uniform(-0.3, 0.3, R))
    new[4] = old[4] + exact(rng.uniform(11, 23, R))
    where = (np.arange(R) < np.array([11, 5, 1, 8, 11, 3, 0])[:, None]) & (rng.random((S, R)) < 0.8)
    where[2, 0] = True
    return new, old, exact(rng.normal(size=S) * np.array([1, -1, 1, -1, -1, 1, 1])), where


def ppo(d, a, low, high, dual):
    """(loss, slope) of one token's clipped surrogate with verl's clamp of the log-ratio and dual clip."""
    ratio, free = math.exp(min(max(d, -20), 20)), abs(d) < 20
    plain, bounded = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
    loss, slope = (plain, -a * ratio * free) if plain >= bounded else (bounded, 0.0)
    return (-dual * a, 0.0) if a < 0 and loss > -dual * a else (loss, slope)


def gspo(d_mean, a, low, high):
    """(loss, slope of the token's own log-prob) of GSPO with the log-ratio clamped from above at 10."""
    ratio = math.exp(min(d_mean, 10))
    plain, bounded = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
    return (plain, -a * ratio * (d_mean < 10)) if plain >= bounded else (bounded, 0.0)


def sapo(d, a):
    ratio, tau = math.exp(min(max(d, -20), 20)), 1.0 if a > 0 else 1.05
    x = tau * (ratio - 1)
    gate = 1 / (1 + math.exp(-x))
    slope = gate * math.exp(-x) / (1 + math.exp(-x)) if x < 700 else 0.0
    return -4 / tau * gate * a, -4 * slope * a * ratio * (abs(d) < 20)


def vespo_weight(total, a):
    log_w, (k, rate) = min(max(total, math.log(1e-8)), 20), (2, 3) if a >= 0 else (3, 2)
    return math.exp(k * log_w + rate * (1 - math.exp(log_w)))


def expected(name):
    new, old, advantages, where = batch()
    value, slope = np.zeros((S, R)), np.zeros((S, R))
    for s in range(S):
        tokens = np.flatnonzero(where[s])
        gaps = [new[s, r] - old[s, r] for r in tokens]
        for r, d in zip(tokens, gaps):
            a, x = advantages[s], new[s, r]
            if name == "ppo":
                value[s, r], slope[s, r] = ppo(d, a, 0.2, 0.28, 3.0)
            elif name == "gspo":
                value[s, r], slope[s, r] = gspo(sum(gaps) / len(gaps), a, 3e-4, 4e-4)
            elif name == "cispo":
                weight = min(max(math.exp(min(max(d, -20), 20)), 0.8), 1.28)
                value[s, r], slope[s, r] = -weight * a * x, -weight * a
            elif name == "sapo":
                value[s, r], slope[s, r] = sapo(d, a)
            else:
                weight = vespo_weight(sum(min(max(g, -20), 20) for g in gaps), a)
                value[s, r], slope[s, r] = -weight * a * x, -weight * a
    return value, slope


LOSSES = {
    "ppo": lambda x, old, a, w: rl.clipped_ratio(x, old, a, clip_low=0.2, clip_high=0.28, level="token", dual_clip=3.0, where=w),
    "gspo": lambda x, old, a, w: rl.clipped_ratio(
        x, old, a, clip_low=3e-4, clip_high=4e-4, level="sequence_token", dual_clip=None, where=w, log_ratio_limits=(-math.inf, 10.0)
    ),
    "cispo": lambda x, old, a, w: rl.cispo(x, old, a, clip_low=0.2, clip_high=0.28, where=w),
    "sapo": lambda x, old, a, w: rl.sapo(x, old, a, where=w),
    "vespo": lambda x, old, a, w: rl.vespo(x, old, a, where=w),
}


@PRECISIONS
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype, rtol):
    new, old, advantages, where = batch()

    def hide(x, junk):
        return np.where(where, x, junk).astype(dtype)

    with jax.enable_x64(dtype == np.float64):
        def loss(x):
            return LOSSES[name](x, hide(old, np.inf), advantages.astype(dtype), where)

        value, slope = expected(name)
        oracle.close(loss(hide(new, np.nan)), value, rtol)
        oracle.close(jax.grad(lambda x: loss(x).sum())(jnp.asarray(hide(new, np.nan))), slope, rtol)


@PRECISIONS
@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_with_both_clamps(kind, dtype, rtol):
    new, reference, _, where = batch()
    value, slope = np.zeros((S, R)), np.zeros((S, R))
    for s, r in np.argwhere(where):
        d = reference[s, r] - new[s, r]
        bounded = min(max(d, -20), 20)
        k3 = math.exp(bounded) - bounded - 1
        value[s, r] = {"k1": -d, "abs": abs(d), "k2": d * d / 2, "k3": min(k3, 10)}[kind.rstrip("+")]
        inside = 1 - math.exp(d) if abs(d) < 20 and k3 < 10 else 0.0
        slope[s, r] = -d if kind.endswith("+") else {"k1": 1, "abs": -np.sign(d), "k2": -d, "k3": inside}[kind]
    with jax.enable_x64(dtype == np.float64):
        def estimate(x):
            return rl.kl(x, reference.astype(dtype), kind=kind, where=where, value_limit=10.0)

        oracle.close(estimate(new.astype(dtype)), value, rtol)
        oracle.close(jax.grad(lambda x: estimate(x).sum())(jnp.asarray(new.astype(dtype))), slope, rtol)


def test_the_five_aggregations():
    x = np.random.default_rng(0).normal(size=(S, R))
    where = batch()[3]
    rows = [x[s, where[s]] for s in range(S) if where[s].any()]
    desired = {
        ("token_mean", None): np.concatenate(rows).mean(),
        ("sequence_mean_token_sum", None): np.mean([row.sum() for row in rows]),
        ("sequence_mean_token_mean", None): np.mean([row.sum() / (len(row) + 1e-8) for row in rows]),
        ("constant", R): np.mean([row.sum() for row in rows]) / R,
        ("constant", 7): np.mean([row.sum() for row in rows]) / 7,
    }
    with jax.enable_x64(True):
        for (how, length), value in desired.items():
            epsilon = 1e-8 if how == "sequence_mean_token_mean" else 0.0
            oracle.close(rl.reduce(x, where=where, how=how, max_length=length, token_epsilon=epsilon), value, 1e-12)


@pytest.mark.parametrize("cap", [1.1, 3.0])
def test_the_cap_of_the_unclipped_arm(cap):
    log_ratio = np.log([[0.5, 0.9, 1.05, 1.15, 1.5, 9.0]])
    with jax.enable_x64(True):
        for a in (1.0, -1.0):
            def loss(x, a=a):
                return rl.clipped_ratio(x, np.zeros((1, 6)), np.full(1, a), ratio_cap=cap).sum()

            value, slope = 0.0, np.zeros((1, 6))
            for r, d in enumerate(log_ratio[0]):
                ratio = math.exp(d)
                capped, bounded = min(ratio, cap), min(max(ratio, 0.8), 1.2)
                value -= min(a * capped, a * bounded)
                free = ratio <= cap if a * capped <= a * bounded else bounded == ratio
                slope[0, r] = -a * ratio * free
            oracle.close(loss(log_ratio), value, 1e-12)
            oracle.close(jax.grad(loss)(jnp.asarray(log_ratio)), slope, 1e-12)


@pytest.mark.parametrize(("measured", "coef"), [(0.1, 0.4 * (1 + 0.2 * 32 / 1000)), (0.021, 0.4 * (1 + 0.05 * 32 / 1000)),
                                                (0.0, 0.4 * (1 - 0.2 * 32 / 1000))])  # fmt: skip
def test_adaptive_kl(measured, coef):
    np.testing.assert_allclose(rl.adapt_kl_coef(0.4, measured, target=0.02, samples=32, horizon=1000), coef, rtol=1e-6)


@pytest.mark.parametrize(("samples", "factor"), [(100, 0.6), (200, 0.2), (250, 0.2), (512, 0.2)])
def test_a_step_of_many_horizons_does_not_turn_the_kl_coefficient_negative(samples, factor):
    np.testing.assert_allclose(rl.adapt_kl_coef(0.1, 0.001, target=0.02, samples=samples, horizon=50), 0.1 * factor, rtol=1e-6)
    np.testing.assert_allclose(rl.adapt_kl_coef(0.1, 1.0, target=0.02, samples=samples, horizon=50), 0.1 * (1 + samples / 250), rtol=1e-6)


class TestMasks:
    def test_only_bad_responses_that_moved_away_are_left_out(self):
        # Means of the gap over the unmasked tokens: 1.0, 1.0, 0.25, and a row without tokens.
        gap = jnp.array([[1.0, 1.0, 9.0], [2.0, 0.0, 9.0], [0.25, 9.0, 9.0], [9.0, 9.0, 9.0]])
        where = jnp.array([[True, True, False], [True, True, False], [True, False, False], [False] * 3])

        def keep(limit):
            return rl.on_policy_rows(-gap, jnp.zeros((4, 3)), jnp.array([1.0, -1, -1, -1]), max_kl=limit, where=where)[:, 0]

        np.testing.assert_array_equal(keep(0.25), [True, False, True, True])
        np.testing.assert_array_equal(keep(1.0), [True] * 4)
        np.testing.assert_array_equal(keep(0.2), [True, False, False, True])
        zero = rl.on_policy_rows(-gap, jnp.zeros((4, 3)), jnp.zeros(4), max_kl=0.0, where=where)
        assert bool(jnp.all(zero))

    @pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.05])
    def test_the_quantile_is_that_of_the_unmasked_tokens(self, share):
        rng = np.random.default_rng(3)
        entropy, where = rng.random((5, 7)), rng.random((5, 7)) < 0.6
        desired = where & (entropy >= np.quantile(entropy[where], 1 - share))
        with jax.enable_x64(True):
            np.testing.assert_array_equal(rl.high_entropy(np.where(where, entropy, np.nan), share, where=where), desired)
        assert not rl.high_entropy(entropy, share, where=np.zeros((5, 7), bool)).any()


@pytest.mark.parametrize("rows", [1, 4, 5, 7, 100])
def test_sums_over_blocks_are_the_sums(rows):
    new, old, advantages, where = batch()

    def parts(n, o, a, w):
        return rl.reduce_parts(rl.clipped_ratio(n, o, a, where=w), where=w, how="sequence_mean_token_mean")

    with jax.enable_x64(True):
        args = tuple(map(jnp.asarray, (new, old, advantages, where)))
        for actual, desired in zip(rl.sum_blocks(parts, *args, rows=rows), parts(*args)):
            oracle.close(actual, desired, 1e-12)
        blocked = jax.grad(lambda x: rl.sum_blocks(parts, x, *args[1:], rows=rows)[0])(args[0])
        oracle.close(blocked, jax.grad(lambda x: parts(x, *args[1:])[0])(args[0]), 1e-12)


def test_the_count_of_rows_that_were_not_scored():
    # Four rows, two of them skipped, one of these without tokens: the denominator is that of all four, for every reduction.
    where = jnp.array([[True, True, True], [True, False, False], [True, True, False], [False, False, False]])
    for how, count in (("token_mean", 6), ("sequence_mean_token_mean", 3), ("sequence_mean_token_sum", 3), ("constant", 30)):
        extra = dict(max_length=10) if how == "constant" else {}
        recipe = rl.make_recipe("grpo", loss_aggregation=how, filter_zero_variance=True, **extra)
        assert float(rl.count_for(recipe, where=where)) == count
        whole = rl.loss_for(recipe, jnp.zeros((4, 3)), jnp.zeros((4, 3)), jnp.ones(4), where=where)[1]
        assert float(whole) == count


def test_rewards_on_different_scales_weigh_alike_when_decoupled():
    # The second reward is a hundred times the first and ranks the samples the other way round.
    rewards = jnp.array([[0.0, 300.0], [1.0, 200.0], [2.0, 100.0], [3.0, 0.0]])
    ids = jnp.zeros(4, int)
    # Weighted two to one the first decides; added up first, the second drowns it.
    np.testing.assert_array_equal(jnp.sign(rl.decoupled(rewards, ids, jnp.array([2.0, 1.0]))), [-1, -1, 1, 1])
    np.testing.assert_array_equal(jnp.sign(rl.group_relative(rewards @ jnp.array([2.0, 1.0]), ids)), [1, 1, -1, -1])
    masked = rl.decoupled(rewards, ids, jnp.ones(2), where=jnp.array([[True, False]] * 3 + [[False, False]]))
    np.testing.assert_allclose(masked, [-1, 0, 1, 0], atol=1e-3)
