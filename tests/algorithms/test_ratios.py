"""Samplers with temperature, top-k and top-p; and programs that disagree about the same policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

LOGITS = jnp.array([[2.0, 1.0, 0.5, 0.5, -1.0, -jnp.inf], [0.0, 3.0, 2.9, 2.8, 2.7, 2.6]])
SETTINGS = [dict(), dict(top_k=2), dict(top_p=0.7), dict(temperature=2.0, top_k=4, top_p=0.8), dict(temperature=0.5, top_p=0.1)]


def slow_kept(logits, temperature=1.0, top_k=None, top_p=1.0):
    """Sort, cut at k, renormalise, cut where the mass before reaches p."""
    z = np.asarray(logits, np.float64) / temperature
    ranked = sorted((v for v in range(len(z)) if np.isfinite(z[v])), key=lambda v: (-z[v], v))[:top_k]
    mass = np.exp(z[ranked] - z[ranked].max())
    mass /= mass.sum()
    kept = [v for i, v in enumerate(ranked) if top_p == 1 or mass[:i].sum() < top_p]
    return np.isin(np.arange(len(z)), kept)


@pytest.mark.parametrize("settings", SETTINGS)
def test_kept_tokens(settings):
    np.testing.assert_array_equal(rl.kept_tokens(LOGITS, **settings), [slow_kept(row, **settings) for row in LOGITS])


def test_ties_go_to_the_lower_id():
    np.testing.assert_array_equal(rl.kept_tokens(jnp.zeros(4), top_k=2), [True, True, False, False])
    np.testing.assert_array_equal(rl.kept_tokens(jnp.zeros(4), top_p=0.5), [True, True, False, False])


@pytest.mark.parametrize("bad", [dict(temperature=0.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.1)])
def test_senseless_settings_are_refused(bad):
    with pytest.raises(ValueError, match="temperature > 0"):
        rl.kept_tokens(LOGITS, **bad)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_the_sampler_s(settings):
    temperature = settings.get("temperature", 1.0)
    kept = rl.kept_tokens(LOGITS, **settings)
    every = jnp.broadcast_to(jnp.arange(6), (2, 6))

    def wide(x):
        return jnp.broadcast_to(x[:, None], (2, 6, 6))

    log_mu = rl.token_log_probs(wide(LOGITS), every, temperature=temperature, kept=wide(kept))
    np.testing.assert_allclose(jnp.sum(jnp.exp(log_mu), axis=1), [1, 1], rtol=1e-6)
    np.testing.assert_array_equal(jnp.isfinite(log_mu), kept)
    # Taking the kept mass out again gives the tempered policy.
    log_pi = rl.token_log_probs(wide(LOGITS), every, temperature=temperature)
    log_mass = rl.kept_log_mass(LOGITS, kept, temperature=temperature)[:, None]
    np.testing.assert_allclose(rl.untruncate(log_mu, log_mass)[kept], log_pi[kept], rtol=2e-5, atol=1e-6)


def test_gradient_of_a_truncated_log_prob_is_finite_and_centred():
    kept = rl.kept_tokens(LOGITS[1], top_k=3)
    tokens = jnp.arange(1, 4)
    grads = jax.vmap(jax.grad(lambda z, a: rl.token_log_probs(z, a, temperature=1.0, kept=kept)), (None, 0))(LOGITS[1], tokens)
    assert jnp.all(jnp.isfinite(grads))
    mu = jnp.exp(jax.vmap(lambda a: rl.token_log_probs(LOGITS[1], a, temperature=1.0, kept=kept))(tokens))
    np.testing.assert_allclose(mu @ grads, np.zeros(6), atol=1e-6)


class TestImportanceWeights:
    scorer = jnp.log(jnp.array([[1.0, 4.0, 0.1], [2.0, 2.0, 9.0]]))
    sampler = jnp.zeros((2, 3))
    where = jnp.array([[True, True, True], [True, True, False]])

    def test_truncate(self):
        weights, touched = rl.importance_weights(self.scorer, self.sampler, how="truncate", cap=3.0, where=self.where)
        np.testing.assert_allclose(weights, [[1, 3, 0.1], [2, 2, 1]], rtol=1e-6)
        np.testing.assert_array_equal(touched, [[0, 1, 0], [0, 0, 0]])

    def test_mask(self):
        weights, touched = rl.importance_weights(self.scorer, self.sampler, how="mask", cap=3.0, floor=0.5, where=self.where)
        np.testing.assert_allclose(weights, [[1, 0, 0], [2, 2, 1]], rtol=1e-6)
        np.testing.assert_array_equal(touched, [[0, 1, 1], [0, 0, 0]])

    def test_levels(self):
        product, _ = rl.importance_weights(self.scorer, self.sampler, how="mask", cap=3.0, floor=0.0, level="product", where=self.where)
        np.testing.assert_allclose(product, [[0.4, 0.4, 0.4], [0, 0, 1]], rtol=1e-6)
        sequence, _ = rl.importance_weights(
            self.scorer, self.sampler, how="truncate", cap=3.0, floor=0.0, level="sequence", where=self.where
        )
        np.testing.assert_allclose(sequence, [[0.4 ** (1 / 3)] * 3, [2, 2, 1]], rtol=1e-6)

    def test_none_and_no_gradient(self):
        weights, touched = rl.importance_weights(self.scorer, self.sampler, how="none")
        np.testing.assert_array_equal(weights, np.ones((2, 3)))
        assert not touched.any()
        grad = jax.grad(lambda x: rl.importance_weights(x, self.sampler)[0].sum())(self.scorer)
        np.testing.assert_array_equal(grad, 0)
