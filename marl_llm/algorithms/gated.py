"""Losses and masks that gate instead of clip: how much a token, or a whole response, is learned from.

A clip switches the gradient of a token off at an edge. These methods fade it out (SAPO, VESPO), or leave tokens and responses
out of the policy term on grounds of their own: low entropy (Wang et al. 2025), or a bad response that the policy has already
left behind (off-policy sequence masking, DeepSeek-V3.2 2025). Masks as in `losses`: 0 where False, in the gradient too.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Real, Shaped

from marl_llm.algorithms._arrays import Scalar, as_float, as_mask
from marl_llm.algorithms.losses import LOG_RATIO_LIMITS, advantages_like, importance_ratio, masked

# The log of VESPO's weight is clamped to (log 1e-8, 20), as TRL does.
VESPO_LIMITS = (-18.420680743952367, 20.0)


@functools.partial(jax.jit, static_argnames=("level", "log_ratio_limits"))
def sapo(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    temperature_positive: Scalar = 1.0,
    temperature_negative: Scalar = 1.05,
    level: str = "token",
    log_ratio_limits: tuple[float, float] | None = LOG_RATIO_LIMITS,
) -> Float[Array, "S R"] | Float[Array, "S"]:
    """Surrogate with a soft gate in place of the clip (SAPO; Gao et al. 2025).

    ℓ = −(4/τ) σ(τ (ρ − 1)) A, with τ = τ_positive where A > 0 and τ_negative elsewhere

    At ρ = 1 the gradient is that of the unclipped surrogate; away from it, it fades like 4 σ (1 − σ).

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: the same under the old policy: the model before the update.
      advantages: `[S]`, `[S, 1]` or `[S, R]`; no gradient flows into them.
      temperature_positive: τ of tokens with a positive advantage; larger closes the gate sooner.
      temperature_negative: τ of the others. The paper has it above the positive one.
      level: see `losses.importance_ratio`.
      where: `[S, R]` response tokens; the loss is 0 elsewhere.
      log_ratio_limits: see `losses.importance_ratio`.

    Returns:
      The loss: `[S, R]`, or `[S]` at the levels "sequence" and "product" with one advantage per sample.
    """
    where = as_mask(where, jnp.shape(log_probs))
    ratio = importance_ratio(log_probs, old_log_probs, level=level, where=where, log_ratio_limits=log_ratio_limits)
    advantages, ratio = advantages_like(advantages, ratio, where)
    temperature = jnp.where(advantages > 0, temperature_positive, temperature_negative).astype(ratio.dtype)
    loss = -4 / temperature * jax.nn.sigmoid(temperature * (ratio - 1)) * advantages
    return jnp.where(jnp.any(where, axis=1) if loss.ndim == 1 else where, loss, 0)


@jax.jit
def vespo(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    shape_positive: tuple[Scalar, Scalar] = (2.0, 3.0),
    shape_negative: tuple[Scalar, Scalar] = (3.0, 2.0),
) -> Float[Array, "S R"]:
    """Policy gradient weighted by a gamma-shaped function of the ratio of whole responses (VESPO, 2026; TRL's `vespo`).

    ℓ = −sg[φ(w)] A log π,   φ(w) = w^k e^{λ (1 − w)},   w = exp(Σ_r (log π − log π_old))

    φ(1) = 1, it peaks at w = k/λ, and both a vanished and an exploded ratio count for nothing.

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: the same under the old policy: the model before the update.
      advantages: `[S]`, `[S, 1]` or `[S, R]`; no gradient flows into them.
      shape_positive: (k, λ) where A >= 0.
      shape_negative: (k, λ) where A < 0.
      where: `[S, R]` response tokens; the loss is 0 elsewhere.
    """
    where = as_mask(where, jnp.shape(log_probs))
    new = masked(log_probs, where)
    log_ratio = jnp.clip(new - masked(old_log_probs, where), *LOG_RATIO_LIMITS)
    log_w = jnp.clip(jnp.sum(log_ratio, axis=1, keepdims=True), *VESPO_LIMITS)
    advantages, log_w = advantages_like(advantages, log_w, where)
    k, rate = (jnp.where(advantages >= 0, *pair) for pair in zip(shape_positive, shape_negative))
    weight = jax.lax.stop_gradient(jnp.exp(k * log_w + rate * (1 - jnp.exp(log_w))))
    return jnp.where(where, -weight.astype(new.dtype) * advantages * new, 0)


@jax.jit
def on_policy_rows(
    log_probs: Float[ArrayLike, "S R"],
    sampler_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    max_kl: Scalar,
) -> Bool[Array, "S R"]:
    """Say which tokens off-policy sequence masking keeps: bad responses that the policy has left behind teach nothing.

    keep = A >= 0  or  mean_r (log π_sampler − log π) <= δ

    Multiply the policy term (not the KL term) by it and keep the denominators (DeepSeek-V3.2 2025; TRL's
    `off_policy_mask_threshold`).

    Args:
      log_probs: log π of the sampled tokens; no gradient.
      sampler_log_probs: those of the policy that sampled them.
      advantages: `[S]`, `[S, 1]` or `[S, R]`.
      max_kl: δ, in nats per token.
      where: `[S, R]` response tokens, over which the mean is taken.
    """
    where = as_mask(where, jnp.shape(log_probs))
    gap = masked(sampler_log_probs, where) - jax.lax.stop_gradient(masked(log_probs, where))
    gap = jnp.sum(gap, axis=1, keepdims=True) / jnp.maximum(jnp.sum(where, axis=1, keepdims=True), 1)
    advantages, gap = advantages_like(advantages, gap, where)
    return (advantages >= 0) | (gap <= max_kl)


@jax.jit
def entropy_threshold(entropy: Float[ArrayLike, "*S"], share: Scalar, *, where: Shaped[ArrayLike, "*S"] | None = None) -> Float[Array, ""]:
    """The entropy above which the given share of the tokens lies: quantile_{1 − share}(H), interpolated linearly; 0 without tokens.

    Args:
      entropy: H of each token of a whole step, in nats.
      share: of the tokens, in (0, 1].
      where: optional; masked tokens do not count.
    """
    entropy = as_float(entropy)
    where = as_mask(where, entropy.shape)
    if entropy.size == 0:
        return jnp.zeros((), entropy.dtype)
    ranked = jnp.sort(jnp.where(where, entropy, jnp.inf).reshape(-1))
    count = jnp.sum(where)
    place = (1 - share) * jnp.maximum(count - 1, 0).astype(entropy.dtype)
    below = jnp.floor(place).astype(jnp.int32)
    above = jnp.minimum(below + 1, jnp.maximum(count - 1, 0))
    low, high = ranked[below], ranked[above]
    threshold = jnp.where(above > below, low + (high - low) * (place - below), low)
    return jnp.where(count > 0, threshold, 0)


@jax.jit
def high_entropy(entropy: Float[ArrayLike, "*S"], share: Scalar, *, where: Shaped[ArrayLike, "*S"] | None = None) -> Bool[Array, "*S"]:
    """Say which tokens are among the share with the highest entropy ("beyond the 80/20 rule", Wang et al. 2025).

    keep = H >= quantile_{1 − share}(H over the unmasked tokens), the quantile interpolated linearly

    The quantile is one of the array it is given: take it over the whole step, before micro-batches are cut. Multiply the policy
    term by the result and keep the denominators (TRL's `top_entropy_quantile`).

    Args:
      entropy: H of each token, in nats.
      share: of the tokens, in (0, 1]; 1 keeps all.
      where: optional; masked tokens are not kept and do not count.
    """
    entropy = as_float(entropy)
    where = as_mask(where, entropy.shape)
    return where & (entropy >= entropy_threshold(entropy, share, where=where))
