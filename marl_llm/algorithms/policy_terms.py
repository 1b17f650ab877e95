"""The policy term of a recipe's loss: which loss, which weights against the gap to the sampler, and which tokens are in it."""

import jax.numpy as jnp
from jaxtyping import Array

from marl_llm.algorithms import gated, losses, ratios, trust_regions
from marl_llm.algorithms._arrays import Scalar, as_float
from marl_llm.algorithms.functions import own_policy_loss
from marl_llm.algorithms.recipes import Recipe


def policy_term(recipe: Recipe, new: Array, old: Array, advantages, where: Array) -> tuple[Array, dict[str, Array]]:
    """The recipe's loss per token `[S, R]` or per sample `[S]`, and what is measured about it per token."""
    if recipe.policy_loss is not None:
        spread = as_float(advantages)
        return own_policy_loss(recipe, new, old, spread[:, None] if spread.ndim == 1 else spread, where), {}
    if recipe.loss == "cispo":
        return losses.cispo(new, old, advantages, where=where, clip_low=recipe.clip_low, clip_high=recipe.clip_high), {}
    if recipe.loss == "sapo":
        gates = dict(temperature_positive=recipe.gate_positive, temperature_negative=recipe.gate_negative)
        return gated.sapo(new, old, advantages, where=where, level=recipe.importance_level, **gates), {}
    if recipe.loss == "gmpo":
        spread = as_float(advantages)
        spread = spread if spread.ndim == 1 else jnp.sum(losses.masked(spread, where), axis=1) / jnp.maximum(jnp.sum(where, axis=1), 1)
        return trust_regions.gmpo(new, old, spread, where=where, clip_low=recipe.clip_low, clip_high=recipe.clip_high), {}
    if recipe.loss.startswith("dppo"):
        kind, bounds = recipe.loss.removeprefix("dppo_"), dict(clip_low=recipe.clip_low, clip_high=recipe.clip_high)
        return trust_regions.dppo(new, old, advantages, where=where, kind=kind, **bounds), {}
    if recipe.loss == "vespo":
        return gated.vespo(new, old, advantages, where=where), {}
    if recipe.loss == "reinforce":
        return losses.reinforce(new, advantages, where=where), {}
    clips = dict(clip_low=recipe.clip_low, clip_high=recipe.clip_high)
    policy = losses.clipped_ratio(new, old, advantages, where=where, level=recipe.importance_level, dual_clip=recipe.dual_clip, **clips)
    ratio, spread = losses.importance_ratio(new, old, where=where, level=recipe.importance_level), as_float(advantages)
    ratio = jnp.broadcast_to(ratio[:, None] if ratio.ndim == 1 else ratio, where.shape)
    spread = jnp.broadcast_to(spread[:, None] if spread.ndim == 1 else spread, where.shape)
    low, high = losses.clip_masks(ratio, spread, **clips)
    return policy, {"ratio": ratio, "clip_low": as_float(low), "clip_high": as_float(high)}


def correct(recipe: Recipe, policy: Array, old: Array, sampler: Array, where: Array) -> tuple[Array, Array]:
    """The policy term times the importance weights of `recipe.rollout_correction`, and which tokens' weights were cut."""
    weights, cut = ratios.importance_weights(
        old,
        sampler,
        where=where,
        how=recipe.rollout_correction,
        cap=recipe.rollout_correction_threshold,
        level=recipe.rollout_correction_level,
    )
    return (policy if recipe.rollout_correction == "none" else weights * policy.reshape(len(policy), -1)), cut


def tokens_kept(
    recipe: Recipe, new: Array, sampler: Array | None, advantages, where: Array, entropy, entropy_threshold: Scalar | None
) -> Array:
    """Tokens `[S R]` that stay in the policy term: those of rows that are near enough to the sampler, and of high entropy."""
    kept = where
    if recipe.off_policy_kl is not None:
        kept = kept & gated.on_policy_rows(new, sampler, advantages, where=where, max_kl=recipe.off_policy_kl)
    if recipe.entropy_quantile < 1:
        kept = kept & (as_float(entropy) >= entropy_threshold)
    return kept
