"""Ratios between distributions that are not quite the policy: tempered, truncated, or computed by another program.

A sampler with temperature, top-k or top-p draws from μ, not from π:

    μ(a) = π_T(a) / Z  for a in the kept set,   π_T = softmax(logits / T),   Z = Σ_kept π_T

A ratio is right when both of its sides are the same kind of distribution. Scoring with the full softmax while the sampler
reports log μ gives the true ratio times Z, so an unchanged policy already looks clipped. The cure is to score with the
temperature and with the kept set of the sampler (`token_log_probs`), whose expected score under μ is zero, or to take Z out of
the sampler's side (`untruncate`).

What remains, because a sampler and a scorer round differently, is corrected by `importance_weights`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from marl_llm.algorithms._arrays import Scalar, as_float, as_mask, check_choice
from marl_llm.algorithms.losses import importance_ratio

CORRECTIONS = ("none", "truncate", "mask")


@functools.partial(jax.jit, static_argnames=("temperature", "top_k", "top_p"))
def kept_tokens(
    logits: Float[ArrayLike, "*S V"], *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Bool[Array, "*S V"]:
    """Say which tokens a sampler with these settings can draw.

    Top-k first, then top-p on what is left and renormalised, the order of Hugging Face and vLLM. Among equal logits the lower
    token id wins.

    Args:
      logits: raw logits.
      temperature: divides the logits before top-p looks at their mass.
      top_k: keep the k likeliest; None keeps all. k of V or more keeps all.
      top_p: keep the likeliest tokens until their mass reaches this: a token is kept if the mass before it is below top_p, so
        the likeliest always is. 1 keeps every token of positive probability, however small.

    Raises:
      ValueError: temperature not positive, top_k below 1 or top_p outside (0, 1].
    """
    if not temperature > 0 or not 0 < top_p <= 1 or (top_k is not None and top_k < 1):
        raise ValueError(f"Need temperature > 0, top_k >= 1 or None, 0 < top_p <= 1; got {temperature}, {top_k}, {top_p}.")
    z = as_float(logits) / temperature
    size = z.shape[-1]
    order = jnp.argsort(-z, axis=-1, stable=True)
    ranked = jnp.take_along_axis(z, order, axis=-1)
    keep = ranked > -jnp.inf
    if top_k is not None and top_k < size:
        keep = keep & (jnp.arange(size) < top_k)
    if top_p < 1:
        mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
        keep = keep & (jnp.cumsum(mass, axis=-1) - mass < top_p)
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=-1), axis=-1)


@jax.jit
def token_log_probs(
    logits: Float[ArrayLike, "*S V"],
    tokens: Int[ArrayLike, "*S"],
    *,
    temperature: Scalar = 1.0,
    kept: Shaped[ArrayLike, "*S V"] | None = None,
) -> Float[Array, "*S"]:
    """Log-probability of each token under the tempered, and if asked truncated, distribution.

    log μ(a) = z_a − log Σ_{v kept} e^{z_v},   z = logits / temperature

    Args:
      logits: raw logits.
      tokens: sampled token ids.
      temperature: of the sampler.
      kept: kept set of the sampler at each position; all tokens by default. Pass the set of the sampling policy on both sides
        of a ratio: then the new policy is compared on the same support, and an unchanged policy has ratio 1.

    Returns:
      Natural log-probabilities; −inf for a token outside the kept set.
    """
    z = as_float(logits) / temperature
    if kept is not None:
        z = jnp.where(as_mask(kept, z.shape), z, -jnp.inf)
    chosen = jnp.take_along_axis(z, jnp.asarray(tokens)[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(z, axis=-1)


@jax.jit
def kept_log_mass(logits: Float[ArrayLike, "*S V"], kept: Shaped[ArrayLike, "*S V"], *, temperature: Scalar = 1.0) -> Float[Array, "*S"]:
    """log Z, the log of the probability that the tempered policy gives to the kept set; 0 when everything is kept."""
    z = as_float(logits) / temperature
    inside = jax.nn.logsumexp(jnp.where(as_mask(kept, z.shape), z, -jnp.inf), axis=-1)
    return inside - jax.nn.logsumexp(z, axis=-1)


def untruncate(sampler_log_probs: Float[ArrayLike, "*S"], log_mass: Float[ArrayLike, "*#S"]) -> Float[Array, "*S"]:
    """Turn the truncated sampler's log μ into log π_T, so that a full-softmax scorer can be compared with it.

    log π_T(a) = log μ(a) + log Z
    """
    return as_float(sampler_log_probs) + as_float(log_mass)


@functools.partial(jax.jit, static_argnames=("how", "level"))
def importance_weights(
    scorer_log_probs: Float[ArrayLike, "S R"],
    sampler_log_probs: Float[ArrayLike, "S R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    how: str = "truncate",
    cap: Scalar = 2.0,
    floor: Scalar = 0.0,
    level: str = "token",
) -> tuple[Float[Array, "S R"], Bool[Array, "S R"]]:
    """Weights that repair the gap between the program that sampled and the program that scores the same policy.

    w = exp(log π_scorer − log π_sampler) per token, per sequence (geometric mean) or as the product over the response;
    truncate: min(w, cap) (TIS);   mask: w if floor ≤ w ≤ cap, else 0

    Multiply the unreduced loss by the weights and keep the denominators as they were.

    Args:
      scorer_log_probs: the trainer's log-probs under the policy that sampled (the "old" side of the ratio); no gradient.
      sampler_log_probs: the sampler's own, of the same distribution: same temperature, top-k and top-p.
      how: "truncate", "mask", or "none" (all ones).
      cap: largest weight. 2 is usual for truncation, TRL masks whole sequences above 3.
      floor: smallest weight kept by "mask".
      level: "token", "sequence" or "product", see `losses.importance_ratio`.
      where: response tokens.

    Returns:
      (weights `[S, R]` without gradient, 1 where masked; touched `[S, R]`: tokens whose weight was cut or set to 0).

    Raises:
      ValueError: unknown `how` or `level`.
    """
    check_choice("how", how, CORRECTIONS)
    check_choice("level", level, ("token", "sequence", "product"))
    where = as_mask(where, jnp.shape(scorer_log_probs))
    weights = importance_ratio(scorer_log_probs, sampler_log_probs, level=level, where=where)
    weights = jax.lax.stop_gradient(jnp.broadcast_to(weights if weights.ndim == 2 else weights[:, None], where.shape))
    if how == "none":
        return jnp.ones_like(weights), jnp.zeros_like(where)
    touched = where & ((weights > cap) | ((weights < floor) & (how == "mask")))
    changed = jnp.minimum(weights, cap) if how == "truncate" else jnp.where(touched, 0, weights)
    return jnp.where(where, changed, 1), touched
