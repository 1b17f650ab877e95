"""Losses: slow twins at ordinary and extreme ratios, exact edges, estimators of the KL divergence, reductions and critics."""

import functools

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl


def batch(seed, spread=0.3, shape=(5, 6)):
    """Return (new, old, advantages [S, R], where): ragged rows with holes, one empty row, garbage where masked."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=shape)
    new = old + spread * rng.uniform(-1, 1, size=shape)
    where = rng.random(shape) < 0.7
    where[1] = False
    return np.where(where, new, np.nan), np.where(where, old, -np.inf), rng.normal(size=shape), where


@pytest.mark.parametrize("spread", [0.3, 12.0])
@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "product"])
def test_clipped_ratio(level, dual, spread):
    new, old, advantages, where = batch(0, spread / (3 if level == "product" else 1))
    if level == "product":
        advantages = advantages[:, :1]
    desired = oracle.clipped(new, old, np.broadcast_to(advantages, new.shape), 0.2, 0.3, level, dual, where)
    options = dict(clip_low=0.2, clip_high=0.3, level=level, dual_clip=dual, where=where)
    for dtype, rtol in ((np.float64, 1e-10), (np.float32, 1e-5)):
        with jax.enable_x64(dtype == np.float64):
            cast = [jnp.asarray(x.astype(dtype)) for x in (new, old, advantages)]
            actual = rl.clipped_ratio(*cast, **options)
            assert actual.dtype == dtype
            oracle.close(actual, desired, rtol)
            if level in ("sequence", "product") and advantages.shape[1] == 1:
                per_sample = rl.clipped_ratio(*cast[:2], cast[2][:, 0], **options)
                oracle.close(per_sample, [np.max(row, where=ok, initial=-np.inf) if ok.any() else 0
                                          for row, ok in zip(desired, where)], rtol)  # fmt: skip


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "product"])
def test_gradient_is_the_numerical_one(level):
    new, old, advantages, where = batch(3, 0.4)
    new, advantages = np.where(where, new, 0.0), advantages[:, :1]
    old = np.where(where, old, 0.0)

    def loss(x, level=level):
        options = dict(clip_low=0.2, clip_high=0.3, dual_clip=2.0, where=where)
        return rl.reduce(rl.clipped_ratio(x, old, advantages, level=level, **options), where=where)

    with jax.enable_x64(True):
        grad = jax.grad(loss)(jnp.asarray(new))
        if level == "sequence_token":
            # Same value as "sequence", but each token gets the gradient of its own log-prob: n times that of the mean.
            other = functools.partial(loss, level="sequence")
            np.testing.assert_allclose(loss(new), other(new), rtol=1e-12)
            # With one advantage per row the tokens' gradients add up to the row's, and here they are equal, so they agree.
            oracle.close(grad, jax.grad(other)(jnp.asarray(new)), 1e-10)
            return
        step = 1e-6
        numerical = np.zeros_like(new)
        jitted = jax.jit(loss)
        for s, r in np.ndindex(new.shape):
            bump = np.zeros_like(new)
            bump[s, r] = step
            numerical[s, r] = (jitted(new + bump) - jitted(new - bump)) / (2 * step)
        oracle.close(grad, numerical, 1e-7)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_what_stands_behind_the_mask_of_advantages_reaches_no_gradient(level):
    """A ratio that the whole row shares meets every advantage of the row, also those of masked tokens."""
    new, old, advantages, where = batch(4)
    new = jnp.asarray(np.where(where, new, 0.0), jnp.float32)

    def loss(x, advantages):
        return rl.reduce(rl.clipped_ratio(x, old, advantages, level=level, where=where), where=where)

    spoiled, clean = (jax.grad(loss)(new, np.where(where, advantages, fill)) for fill in (np.nan, 0.0))
    assert np.any(clean)
    np.testing.assert_array_equal(spoiled, clean)


def test_gradient_by_hand():
    # ρ = e^x. Inside the range the gradient is −A ρ; a clipped arm and a dual-clipped one have none.
    x = jnp.log(jnp.array([[1.1, 1.5, 0.5, 1.5, 0.5, 9.0]]))
    advantages = jnp.array([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    grad = jax.grad(lambda y: rl.clipped_ratio(y, jnp.zeros((1, 6)), advantages, dual_clip=3.0).sum())(x)
    np.testing.assert_allclose(grad, [[-2.2, 0, -1.0, 3.0, 0, 0]], rtol=1e-6)


def test_the_edge_of_the_clip_still_learns():
    with jax.enable_x64(True):
        edge = jnp.log(jnp.array([[1.25, 0.75]]))
        grad = jax.grad(lambda y: rl.clipped_ratio(y, jnp.zeros((1, 2)), jnp.array([[1.0, -1.0]]), clip_low=0.25, clip_high=0.25).sum())(
            edge
        )
        np.testing.assert_allclose(np.abs(grad), [[1.25, 0.75]], rtol=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("level", ["token", "sequence", "product"])
def test_absurd_ratios_stay_finite(level, advantage):
    new = jnp.array([[500.0, -500.0], [500.0, 500.0]])
    value, grad = jax.value_and_grad(
        lambda x: rl.clipped_ratio(x, jnp.zeros((2, 2)), jnp.full(2, advantage), level=level).sum()
    )(new)
    assert jnp.isfinite(value)
    assert jnp.all(jnp.isfinite(grad))


def test_limits_of_the_log_ratio():
    new, old = jnp.array([[25.0, -25.0, 12.0]]), jnp.zeros((1, 3))
    np.testing.assert_allclose(rl.importance_ratio(new, old), jnp.exp(jnp.array([[20.0, -20.0, 12.0]])), rtol=1e-6)
    np.testing.assert_allclose(rl.importance_ratio(new, old, log_ratio_limits=None), jnp.exp(new), rtol=1e-6)
    np.testing.assert_allclose(rl.importance_ratio(new, old, log_ratio_limits=(-jnp.inf, 10.0)), jnp.exp(jnp.minimum(new, 10)))


def test_dual_clip_must_exceed_one():
    with pytest.raises(ValueError, match="greater than 1"):
        rl.clipped_ratio(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.zeros(1), dual_clip=0.5)


def test_no_gradient_into_advantages():
    grad = jax.grad(lambda a: rl.clipped_ratio(jnp.zeros((2, 3)), jnp.zeros((2, 3)), a).sum())(jnp.ones(2))
    np.testing.assert_array_equal(grad, 0)


def test_reinforce_and_cispo():
    new, old, advantages, where = batch(5, 2.0)
    with jax.enable_x64(True):
        oracle.close(rl.reinforce(new, advantages[:, 0], where=where), np.where(where, -advantages[:, :1] * new, 0), 1e-12)
        weight = np.clip(oracle.ratio(new, old, where, "token"), 0.8, 1.3)
        actual, grad = jax.value_and_grad(lambda x: rl.cispo(x, old, advantages, clip_low=0.2, clip_high=0.3, where=where).sum())(
            jnp.asarray(new)
        )
        oracle.close(actual, np.sum(-weight * advantages * new, where=where), 1e-12)
        oracle.close(grad, np.where(where, -weight * advantages, 0), 1e-12)


class TestKL:
    new, reference, _, where = batch(1, 2.0)

    @pytest.mark.parametrize(("kind", "formula"), [
        ("k1", lambda d: -d), ("abs", np.abs), ("k2", lambda d: d**2 / 2), ("k3", lambda d: np.exp(d) - d - 1),
    ])  # fmt: skip
    def test_values_and_gradients(self, kind, formula):
        d = np.where(self.where, np.where(self.where, self.reference, 0) - np.where(self.where, self.new, 0), 0)
        slope = dict(k1=np.ones_like(d), abs=-np.sign(d), k2=-d, k3=1 - np.exp(d))[kind]
        with jax.enable_x64(True):
            value = rl.kl(self.new, self.reference, kind=kind, where=self.where)
            oracle.close(value, np.where(self.where, formula(d), 0), 1e-10)
            grad = jax.grad(lambda x: rl.kl(x, self.reference, kind=kind, where=self.where).sum())(jnp.asarray(self.new))
            oracle.close(grad, np.where(self.where, slope, 0), 1e-10)
            if kind in ("k1", "k3"):
                straight = rl.kl(self.new, self.reference, kind=f"{kind}+", where=self.where)
                oracle.close(straight, value, 1e-10)
                grad = jax.grad(lambda x: rl.kl(x, self.reference, kind=f"{kind}+", where=self.where).sum())(jnp.asarray(self.new))
                oracle.close(grad, -d, 1e-10)

    def test_clamps(self):
        d = jnp.array([2.0, 3.0, 25.0, -25.0])

        def k3(**kw):
            return rl.kl(jnp.zeros(4), d, kind="k3", **kw)

        np.testing.assert_allclose(k3(value_limit=10.0), [np.e**2 - 3, 10, 10, 10], rtol=1e-6)
        np.testing.assert_allclose(k3()[2:], [np.exp(20.0) - 21, 19 + np.exp(-20.0)], rtol=1e-6)
        np.testing.assert_allclose(k3(log_ratio_limit=None)[2], np.exp(25.0) - 26, rtol=1e-6)

    def test_k3_keeps_its_digits_in_float32(self):
        np.testing.assert_allclose(rl.kl(jnp.zeros(2), jnp.array([1e-3, -1e-3])), [5.001667e-7, 4.998334e-7], rtol=1e-6)

    def test_estimators_agree_with_the_divergence(self):
        # Exact expectation over a small vocabulary: k1 and k3 are unbiased for KL(π ‖ π_ref).
        p, q = jax.nn.log_softmax(jnp.array([[0.1, 0.5, -0.3], [0.3, 0.1, 0.2]]))
        truth = jnp.sum(jnp.exp(p) * (p - q))
        for kind in ("k1", "k3"):
            np.testing.assert_allclose(jnp.sum(jnp.exp(p) * rl.kl(p, q, kind=kind)), truth, rtol=1e-4)


class TestReduce:
    x, _, _, where = batch(2)

    @pytest.mark.parametrize("empty_rows", [False, True])
    @pytest.mark.parametrize("how", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant"])
    def test_against_rows(self, how, empty_rows):
        extra = dict(max_length=9) if how == "constant" else {}
        with jax.enable_x64(True):
            actual = rl.reduce(self.x, where=self.where, how=how, empty_rows=empty_rows, **extra)
            oracle.close(actual, oracle.reduced(self.x, self.where, how, extra.get("max_length"), empty_rows), 1e-12)
            total, count = rl.reduce_parts(self.x, where=self.where, how=how, empty_rows=empty_rows, **extra)
            oracle.close(actual, total / count, 1e-12)

    def test_a_loss_per_sample_counts_at_each_of_its_tokens(self):
        x = jnp.array([2.0, 4.0, 8.0])
        where = jnp.array([[True, True], [True, False], [False, False]])
        np.testing.assert_allclose(rl.reduce(x, where=where), 8 / 3, rtol=1e-6)
        assert float(rl.reduce(x, where=where, how="sequence_mean_token_mean")) == 3.0
        assert float(rl.reduce(x, where=where[:, 0], how="sequence_mean_token_mean")) == 3.0
        np.testing.assert_allclose(rl.reduce(x, how="sequence_mean_token_mean"), 14 / 3, rtol=1e-6)

    @pytest.mark.parametrize("how", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
    def test_an_empty_table(self, how):
        assert [float(part) for part in rl.reduce_parts(jnp.zeros((0, 3)), where=jnp.zeros((0, 3), bool), how=how)] == [0, 0]
        assert float(rl.reduce(jnp.zeros(0), how=how)) == 0

    def test_token_epsilon(self):
        assert float(rl.reduce(jnp.ones((1, 2)), where=None, how="sequence_mean_token_mean", token_epsilon=2.0)) == 0.5

    def test_refuses_what_would_do_nothing(self):
        with pytest.raises(ValueError, match="max_length belongs"):
            rl.reduce(jnp.ones((1, 2)), max_length=4)
        with pytest.raises(ValueError, match="max_length belongs"):
            rl.reduce(jnp.ones((1, 2)), how="constant")
        with pytest.raises(ValueError, match="'token_mean'"):
            rl.reduce(jnp.ones((1, 2)), how="mean")


class TestCritic:
    values, old, targets = np.random.default_rng(0).normal(size=(3, 4, 5))
    where = np.random.default_rng(1).random((4, 5)) < 0.7

    def test_value_loss(self):
        near = np.clip(self.values, self.old - 0.5, self.old + 0.5)
        desired = 0.5 * np.maximum((self.values - self.targets) ** 2, (near - self.targets) ** 2)
        with jax.enable_x64(True):
            actual = rl.value_loss(np.where(self.where, self.values, np.nan), self.old, self.targets, value_clip=0.5, where=self.where)
            oracle.close(actual, np.where(self.where, desired, 0), 1e-12)
            oracle.close(rl.value_loss(self.values, None, self.targets), 0.5 * (self.values - self.targets) ** 2, 1e-12)

    def test_clip_and_old_values_go_together(self):
        with pytest.raises(ValueError, match="belong together"):
            rl.value_loss(jnp.zeros(2), None, jnp.zeros(2), value_clip=0.5)
        with pytest.raises(ValueError, match="belong together"):
            rl.value_loss(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2))


def test_entropy():
    logits = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -jnp.inf, -jnp.inf], [100.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(rl.entropy(logits), [np.log(4), np.log(2), 0], atol=1e-6)
    hot = jax.nn.softmax(jnp.array([1.0, 0.5]))
    np.testing.assert_allclose(rl.entropy(jnp.array([2.0, 1.0]), temperature=2.0), -jnp.sum(hot * jnp.log(hot)), rtol=1e-6)
    assert jnp.all(jnp.isfinite(jax.grad(lambda z: rl.entropy(z).sum())(logits)))
