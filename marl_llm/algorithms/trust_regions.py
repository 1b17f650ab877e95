"""Losses and masks that keep a policy near the one that sampled by other measures than the clip of a token's ratio.

The geometric mean of clipped ratios (GMPO), the divergence of two distributions in place of their ratio (DPPO), and the covariance of
log-probs and advantages, which drives the entropy down (Clip-Cov, KL-Cov). Masks as in `losses`: 0 where False, in the gradient too.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Key, Real, Shaped

from marl_llm.algorithms._arrays import Scalar, as_float, as_mask, check_choice
from marl_llm.algorithms.losses import LOG_RATIO_LIMITS, advantages_like, importance_ratio, masked

DIVERGENCES = ("tv", "kl")


@jax.jit
def gmpo(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    clip_low: Scalar = 0.4,
    clip_high: Scalar = 0.4,
) -> Float[Array, "S"]:
    """Geometric mean of the clipped ratios of a response (GMPO, Zhao et al. 2025, arXiv:2507.20673; verl's `geo_mean`).

    ℓ_s = −A exp(mean_r d_r),   d = min(Δ, clip_high) where A > 0 and max(Δ, −clip_low) where A < 0,   Δ = log π − log π_old

    Unlike GSPO's, each token's log ratio is clipped before the mean, so that one token cannot carry a response.

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: the same under the old policy: the model before the update.
      advantages: one per sample; no gradient flows into them.
      where: `[S, R]` response tokens; the loss of a sample without tokens is 0.
      clip_low: lowest log ratio, below 0; the paper's 0.4 is a ratio of e^-0.4.
      clip_high: highest log ratio.
    """
    where = as_mask(where, jnp.shape(log_probs))
    advantages, _ = advantages_like(advantages, jnp.zeros(where.shape[0]), where)
    change = masked(log_probs, where) - masked(old_log_probs, where)
    up = (advantages > 0)[:, None]
    kept = jnp.where(up, jnp.minimum(change, clip_high), jnp.maximum(change, -clip_low))
    ratio = jnp.exp(jnp.sum(kept, axis=1) / jnp.maximum(jnp.sum(where, axis=1), 1))
    return jnp.where(jnp.any(where, axis=1), -advantages * ratio, 0)


def binary_divergence(
    log_probs: Float[ArrayLike, "*S"], old_log_probs: Float[ArrayLike, "*S"], *, kind: str = "tv"
) -> Float[Array, "*S"]:
    """Divergence of two policies, each taken as "this token or any other" (DPPO's binary approximation, arXiv:2602.04879).

    tv: |p − μ|;   kl: μ log(μ / p) + (1 − μ) log((1 − μ) / (1 − p)), with p = π(a) and μ = π_old(a)

    Both are lower bounds of the divergence over the whole vocabulary. An infinite kl says that one of both has probability 1.

    Raises:
      ValueError: unknown kind.
    """
    check_choice("kind", kind, DIVERGENCES)
    new, old = as_float(log_probs), as_float(old_log_probs)
    p, mu = jnp.exp(new), jnp.exp(old)
    if kind == "tv":
        return jnp.abs(p - mu)
    rest, old_rest = (jnp.log1p(-jnp.minimum(x, 1)) for x in (p, mu))
    others = jnp.where(mu < 1, (1 - mu) * (jnp.where(mu < 1, old_rest, 0) - rest), 0)
    return jnp.maximum(mu * (old - new) + others, 0)


@functools.partial(jax.jit, static_argnames=("kind", "log_ratio_limits"))
def dppo(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    kind: str = "tv",
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    log_ratio_limits: tuple[float, float] | None = LOG_RATIO_LIMITS,
) -> Float[Array, "S R"]:
    """Unclipped ratio, without the tokens that leave a trust region in their advantage's direction.

    DPPO (Qi et al. 2026, arXiv:2602.04879) with its binary divergence:

    ℓ = −M ρ A,   M = 0 where (A > 0, ρ > 1, D > clip_high) or (A < 0, ρ < 1, D > clip_low), with D of `binary_divergence`

    A ratio of 3 of a token of probability 0.01 moves little mass, and one of 0.8 of a token of 0.9 much: D sees that.

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: of the policy that bounds the region. The paper takes the sampler's own log-probs.
      advantages: `[S]`, `[S, 1]` or `[S, R]`; no gradient flows into them.
      where: `[S, R]` response tokens; the loss is 0 elsewhere.
      kind: "tv" or "kl".
      clip_low: largest divergence of tokens whose probability falls.
      clip_high: and of those whose probability rises.
      log_ratio_limits: see `losses.importance_ratio`.
    """
    where = as_mask(where, jnp.shape(log_probs))
    new, old = masked(log_probs, where), masked(old_log_probs, where)
    ratio = importance_ratio(new, old, where=where, log_ratio_limits=log_ratio_limits)
    advantages, ratio = advantages_like(advantages, ratio, where)
    moved = jax.lax.stop_gradient(binary_divergence(new, old, kind=kind))
    left = ((advantages > 0) & (new > old) & (moved > clip_high)) | ((advantages < 0) & (new < old) & (moved > clip_low))
    return jnp.where(where & ~left, -ratio * advantages, 0)


@jax.jit
def token_covariance(
    log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
) -> Float[Array, "S R"]:
    """Each token's part in the covariance of log-prob and advantage, whose sum the entropy falls by (Cui et al. 2025, arXiv:2505.22617).

    c = (log π − mean log π) (A − mean A), means over all unmasked tokens; 0 where masked; no gradient
    """
    where = as_mask(where, jnp.shape(log_probs))
    new = jax.lax.stop_gradient(masked(log_probs, where))
    advantages, new = advantages_like(advantages, new, where)
    count = jnp.maximum(jnp.sum(where), 1)
    return jnp.where(where, (new - jnp.sum(new) / count) * (advantages - jnp.sum(advantages) / count), 0)


def _first(rank: Array, where: Array, count: Array) -> Array:
    """The `count` unmasked entries of the lowest rank."""
    flat = jnp.where(where, rank, jnp.inf).reshape(-1)
    place = jnp.zeros(flat.shape, jnp.int32).at[jnp.argsort(flat, stable=True)].set(jnp.arange(flat.size, dtype=jnp.int32))
    return where & (place.reshape(where.shape) < count)


def _share(where: Array, share: Scalar) -> Array:
    """How many of the unmasked tokens a share is: at least one."""
    return jnp.maximum(jnp.floor(jnp.sum(where) * share + 1e-6), 1)


@jax.jit
def clip_cov_tokens(
    covariance: Float[ArrayLike, "S R"],
    key: Key[Array, ""],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    share: Scalar = 2e-4,
    low: Scalar = 1.0,
    high: Scalar = 5.0,
) -> Bool[Array, "S R"]:
    """Tokens that Clip-Cov leaves out of the policy term (Cui et al. 2025, arXiv:2505.22617; verl's `clip_cov`).

    A random share of all tokens, out of those with low < c < high. Multiply the policy term by the complement and keep the denominators.

    Args:
      covariance: from `token_covariance`, over the tokens of a whole step.
      key: decides which of the eligible ones.
      where: tokens that may be left out; leave those out that a clip already stops.
      share: of the unmasked tokens, at least one if any is eligible.
      low, high: bounds of the covariance; the release has 1 and 5.
    """
    covariance = as_float(covariance)
    where = as_mask(where, covariance.shape)
    eligible = where & (covariance > low) & (covariance < high)
    return _first(jax.random.uniform(key, covariance.shape), eligible, _share(where, share))


@jax.jit
def kl_cov(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    share: Scalar = 2e-4,
    coefficient: Scalar = 1.0,
) -> Float[Array, "S R"]:
    """Unclipped ratio, with a KL penalty on the tokens of the highest covariance (KL-Cov; Cui et al. 2025, arXiv:2505.22617).

    ℓ = −ρ A + coefficient · |log π − log π_old| on the `share` of tokens of highest `token_covariance`;   ℓ = −ρ A elsewhere

    The covariances are of the arrays that are given: pass the tokens of a whole step.
    """
    where = as_mask(where, jnp.shape(log_probs))
    new, old = masked(log_probs, where), masked(old_log_probs, where)
    covariance = token_covariance(new, advantages, where=where)
    chosen = _first(-covariance, where, _share(where, share))
    ratio = importance_ratio(new, old, where=where)
    advantages, ratio = advantages_like(advantages, ratio, where)
    return jnp.where(where, -ratio * advantages + jnp.where(chosen, coefficient * jnp.abs(new - old), 0), 0)
