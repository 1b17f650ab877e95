"""Advantages: what a return is compared with, and on which scale.

Released systems differ here in ways that nobody states, so every convention is an argument: the degrees of freedom of the
standard deviation (`ddof`), where epsilon enters, what a group of one gets, and whether a sample or a trajectory has one vote.
Two results are exact, not approximate: a group whose returns are all equal up to rounding gets 0, and a masked sample gets 0.
Rounding is a range, or a standard deviation, of at most 4 units in the last place of the largest return, or of 1 where that is more
(4.8e-7 in float32): equal rewards may have been added up in different orders, and a KL of zero is only zero up to the rounding of
its log-probs. It is the floor of every scale here, for below it the division would make advantages out of rounding. An unmasked
NaN is not hidden: its group becomes NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Real, Shaped

from marl_llm.algorithms._arrays import (
    Scalar,
    as_float,
    as_mask,
    check_choice,
    differ,
    gather,
    integer_arguments,
    masked_ids,
    nan_if_infinite,
    per_group_sum,
    positive,
    psum,
    rounding_of,
)
from marl_llm.algorithms.groups import NO_GROUP, group_ids, group_keys, slots_of, stats_of

SCALES = ("std", "none", "range", "batch", "mean")
SINGLETONS = ("zero", "raw")


@integer_arguments("ids")
@functools.partial(jax.jit, static_argnames=("scale", "singleton"))
def group_relative(
    returns: Real[ArrayLike, "S"],
    ids: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    scale: str = "std",
    ddof: Scalar = 1,
    epsilon: Scalar = 1e-6,
    weights: Real[ArrayLike, "S"] | None = None,
    singleton: str = "zero",
) -> Float[Array, "S"]:
    """Compare each return with the mean of its group (GRPO; Stronger-MAS Eq. 1; MAGRPO Eq. 1).

    A_s = (R_s − mean_g R) / (F_norm(g) + ε)

    Args:
      returns: return of each sample.
      ids: group ids from `group_ids`, or any other integers; `NO_GROUP` (-1) is no group.
      where: optional; False samples take no part in any statistic and get 0.
      scale: F_norm. "std": the group's standard deviation; "range": max − min; "none": no division at all, ε unused (Dr. GRPO);
        "batch": the standard deviation of all unmasked returns about their own mean (TRL's `scale_rewards="batch"`); "mean": the group's
        mean return (MaxRL, Tajwar et al. 2026, arXiv:2602.02710), for rewards of at least 0: a group without a success gets 0.
      ddof: the variance is Σ w (R − mean)² / max(Σ w − ddof, tiny). 1 is the sample estimate (verl, TRL, Dr. MAS), 0 the
        population's (MAGRPO as released).
      epsilon: added to the divisor. verl 1e-6, TRL 1e-4.
      weights: votes `[S]`, at least 0; one each by default. With 1/n for the n samples of a trajectory inside the group, each
        trajectory has one vote, and long plays do not dominate the baseline.
      singleton: what a group of one gets: "zero" (nothing to compare with) or "raw" (its return itself, as verl does).

    Returns:
      Advantages `[S]`. Exactly 0 for masked samples and for groups whose returns are all equal up to rounding (see the module's
      text); the only exception is `singleton="raw"`.

    Raises:
      ValueError: unknown `scale` or `singleton`.
    """
    check_choice("scale", scale, SCALES)
    check_choice("singleton", singleton, SINGLETONS)
    returns = as_float(returns)
    slots = slots_of(ids, as_mask(where, ids.shape))
    used = slots < ids.shape[0]
    returns = jnp.where(used, returns, 0)
    weights = None if weights is None else jnp.where(used, as_float(weights).astype(returns.dtype), 0)
    stats = stats_of(returns, slots, weights, ddof)
    if scale == "std":
        divisor = stats.std + epsilon
    elif scale == "mean":
        divisor = jnp.where(stats.mean > 0, stats.mean + epsilon, jnp.inf)
    elif scale == "range":
        divisor = stats.maximum - stats.minimum + epsilon
    elif scale == "batch":
        votes = used.astype(returns.dtype) if weights is None else weights
        total = jnp.sum(votes)
        deviation = jnp.where(used, returns - jnp.sum(votes * returns) / positive(total), 0)
        divisor = jnp.sqrt(jnp.sum(votes * deviation**2) / positive(total - ddof)) + epsilon
    else:
        divisor = jnp.ones((), returns.dtype)
    # Over infinity a tied group is exactly 0, and so is a masked row.
    divisor = jnp.where(stats.is_tied | (divisor == 0), jnp.inf, divisor)
    advantages = (returns - gather(stats.mean, slots)) / gather(divisor, slots, jnp.inf)
    if singleton == "raw":
        alone = gather(stats.size, slots) == 1
        advantages = jnp.where(alone, returns / (1 + epsilon if scale in ("std", "range", "mean") else 1), advantages)
    return advantages


@integer_arguments("ids", "trajectory")
@jax.jit
def trajectory_weights(
    ids: Int[ArrayLike, "S"], trajectory: Int[ArrayLike, "S"], *, where: Shaped[ArrayLike, "S"] | None = None
) -> Float[Array, "S"]:
    """Give every trajectory one vote in each group, split evenly over its samples there; 0 for masked samples.

    Args:
      ids: dense group ids.
      trajectory: id of the play each sample belongs to.
      where: optional.
    """
    used = as_mask(where, ids.shape) & (ids != NO_GROUP)
    slots = masked_ids(group_ids(group_keys(group=ids, trajectory=trajectory), where=used), used)
    share = 1 / jnp.maximum(per_group_sum(used.astype(jnp.int32), slots), 1).astype(jnp.result_type(float))
    return gather(share, slots)


def agent_wise(
    returns: Real[ArrayLike, "S"],
    instance: Int[ArrayLike, "S"],
    agent: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    ddof: Scalar = 1,
    epsilon: Scalar = 1e-6,
    trajectory: Int[ArrayLike, "S"] | None = None,
    singleton: str = "zero",
) -> Float[Array, "S"]:
    """Give every agent its own baseline and its own scale for each instance (Dr. MAS, 2026).

    A_s = (R_s − mean_{i,k} R) / (std_{i,k} R + ε), over the samples of agent k on instance i

    Args:
      returns: return of each sample, usually the outcome of its trajectory.
      instance: which problem.
      agent: who acted.
      where: optional; False samples take no part and get 0.
      ddof: see `group_relative`; 1 as released.
      epsilon: added to the standard deviation; 1e-6 as released.
      trajectory: if given, each trajectory has one vote in an agent's statistics, however often it called the agent; by
        default each call has one, as released.
      singleton: what an agent called once on an instance gets: "zero" or "raw", as released.
    """
    ids = group_ids(group_keys(instance=instance, agent=agent), where=where)
    weights = None if trajectory is None else trajectory_weights(ids, trajectory, where=where)
    return group_relative(returns, ids, where=where, scale="std", ddof=ddof, epsilon=epsilon, weights=weights, singleton=singleton)


@integer_arguments("ids")
@functools.partial(jax.jit, static_argnames="singleton")
def leave_one_out(
    returns: Real[ArrayLike, "S"],
    ids: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    singleton: str = "zero",
) -> Float[Array, "S"]:
    """Compare each return with the mean of the others in its group (RLOO; Kool et al. 2019, Ahmadian et al. 2024).

    A_s = R_s − (Σ_{g} R − R_s) / (n − 1)

    Args:
      returns: return of each sample.
      ids: dense group ids.
      where: optional; False samples take no part and get 0.
      singleton: what a group of one gets: "zero", or "raw", its return.

    Returns:
      Advantages `[S]`; exactly 0 in groups whose returns are all equal (a group of one under "raw" excepted).
    """
    check_choice("singleton", singleton, SINGLETONS)
    returns = as_float(returns)
    slots = slots_of(ids, as_mask(where, ids.shape))
    returns = jnp.where(slots < ids.shape[0], returns, 0)
    stats = stats_of(returns, slots, None, 0)
    # n / (n - 1) times the distance to the full mean is the distance to the mean of the others.
    size = stats.size.astype(returns.dtype)
    factor = gather(jnp.where(stats.is_tied, 0, size / jnp.maximum(size - 1, 1)), slots)
    advantages = jnp.where(factor == 0, 0, factor * (returns - gather(stats.mean, slots)))
    return jnp.where(gather(stats.size, slots) == 1, returns, advantages) if singleton == "raw" else advantages


@integer_arguments("ids")
@jax.jit
def preference(
    returns: Real[ArrayLike, "S"], ids: Int[ArrayLike, "S"], *, where: Shaped[ArrayLike, "S"] | None = None
) -> Float[Array, "S"]:
    """How many of its group a sample beats, less how many beat it, over n − 1: preferences within the group in place of returns.

    A_s = (#{t: R_t < R_s} − #{t: R_t > R_s}) / (n − 1)

    This is, but for β / 2, minus the slope of the mean DPO loss over the group's pairs (arXiv:2305.18290, Eq. 7) against the policy that
    sampled them. Where the returns are a play's and all its roles learn from them, the pairs are of joint actions (`joint_dpo`).

    Args:
      returns: return of each sample; differences of rounding are ties.
      ids: dense group ids.
      where: optional; False samples take no part and get 0.

    Returns:
      Advantages `[S]` in [-1, 1], whose sum over a group is 0; exactly 0 in groups of one and of equal returns.
    """
    returns = as_float(returns)
    slots = slots_of(ids, as_mask(where, ids.shape))
    returns = jnp.where(slots < ids.shape[0], returns, 0)
    stats, order = stats_of(returns, slots, None, 0), jnp.lexsort((returns, slots))
    group, ranked, place = slots[order], returns[order], jnp.arange(ids.shape[0])
    begins = jnp.diff(group, prepend=-1) > 0
    rises = begins | (jnp.diff(ranked, prepend=0) > rounding_of(jnp.abs(ranked)))
    value = jnp.cumsum(rises) - 1  # number of the value in its group, equal ones alike
    lower = jax.ops.segment_min(place, value, len(place))[value] - jax.ops.segment_min(place, group, len(place) + 1)[group]
    higher = jax.ops.segment_max(place, group, len(place) + 1)[group] - jax.ops.segment_max(place, value, len(place))[value]
    wins = jnp.zeros_like(returns).at[order].set((lower - higher).astype(returns.dtype))
    advantages = jnp.where(jnp.isfinite(gather(stats.mean, slots)), wins / jnp.maximum(gather(stats.size, slots) - 1, 1), jnp.nan)
    return jnp.where((slots < ids.shape[0]) & ~gather(stats.is_tied, slots), advantages, 0)


@integer_arguments("ids")
@jax.jit
def decoupled(
    rewards: Real[ArrayLike, "S C"],
    ids: Int[ArrayLike, "S"],
    coefficients: Real[ArrayLike, "C"],
    *,
    where: Shaped[ArrayLike, "S C"] | None = None,
    ddof: Scalar = 1,
    epsilon: Scalar = 1e-4,
) -> Float[Array, "S"]:
    """Normalise each of several rewards within its group before adding them up (GDPO 2026; TRL's "normalize_then_sum").

    A_s = normalised over the batch of Σ_c w_c (R_{s,c} − mean_g R_c) / (std_g R_c + ε)

    Added up first, the reward with the largest variance drowns the others.

    Args:
      rewards: one column per reward.
      ids: dense group ids.
      coefficients: w_c.
      where: optional; a reward that does not apply to a sample is False there. A sample without any reward gets 0 and takes no
        part in the normalisation over the batch.
      ddof: see `group_relative`.
      epsilon: added to both standard deviations; TRL 1e-4.
    """
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)
    slots = slots_of(ids, jnp.ones(ids.shape, bool))
    ids = jnp.where(slots < slots.shape[0], slots, NO_GROUP)
    column = jax.vmap(lambda r, w: group_relative(r, ids, where=w, scale="std", ddof=ddof, epsilon=epsilon), in_axes=1, out_axes=1)
    total = jnp.sum(column(rewards, where) * jnp.asarray(coefficients).astype(rewards.dtype), axis=1)
    counted = jnp.any(where, axis=1) & (ids != NO_GROUP)
    return group_relative(total, jnp.zeros_like(ids), where=counted, scale="std", ddof=ddof, epsilon=epsilon)


def above_running(returns: Float[Array, "S"], running: Real[ArrayLike, "S"]) -> Float[Array, "S"]:
    """What a return exceeds its role's running mean by (`running_means`); exactly 0 where they are equal up to rounding."""
    above = returns - running
    return jnp.where(jnp.abs(above) <= rounding_of(jnp.abs(returns)), 0, above)


@functools.partial(jax.jit, static_argnames=("shift_mean", "axis_name"))
def whiten(
    values: Float[ArrayLike, "S *R"],
    *,
    where: Shaped[ArrayLike, "S *R"] | None = None,
    weights: Real[ArrayLike, "S *R"] | None = None,
    ddof: Scalar = 0,
    epsilon: Scalar = 1e-8,
    shift_mean: bool = True,
    axis_name=None,
    count_epsilon: Scalar = 0.0,
) -> Float[Array, "S *R"]:
    """Bring all unmasked values to mean 0 and variance 1 (PPO's whitening; with token weights, MAPPA Eq. 4).

    μ = Σ w x / Σ w,   σ² = Σ w (x − μ)² / (Σ w − ddof),   out = (x − μ) / √(σ² + ε), plus μ where `shift_mean` is False

    Args:
      values: `[S]` per sample or `[S, R]` per token.
      where: optional, same shape; masked entries take no part and get 0.
      weights: optional votes, same shape; one each by default.
      ddof: 0 (MAPPA) or 1 (verl's masked_whiten).
      epsilon: added to the variance, under the root.
      shift_mean: False adds the mean back and changes only the scale about it (TRL, verl).
      axis_name: mesh axis (or axes) over which sums are added inside `shard_map`, so that μ and σ are those of all devices.
      count_epsilon: added to Σ w wherever a mean is taken; 0 is exact, verl's masked_whiten has 1e-8.

    Returns:
      Whitened values. If all values are equal up to rounding (see the module's text), or there is one, or none: exactly 0 (with
      `shift_mean=False`: unchanged).
    """
    values = as_float(values)
    where = as_mask(where, values.shape)
    x = jnp.where(where, values, 0)
    weights = where.astype(x.dtype) if weights is None else jnp.where(where, as_float(weights).astype(x.dtype), 0)
    total = psum(jnp.sum(weights), axis_name)
    divisor = positive(total) + count_epsilon
    mean = nan_if_infinite(psum(jnp.sum(weights * x), axis_name) / divisor)
    squares = psum(jnp.sum(weights * jnp.where(where, x - mean, 0) ** 2), axis_name)
    variance = squares / divisor
    variance = variance * (total / positive(total - ddof))
    high = jnp.max(x, where=where & (weights > 0), initial=-jnp.inf)
    low = jnp.min(x, where=where & (weights > 0), initial=jnp.inf)
    if axis_name is not None:
        high, low = jax.lax.pmax(high, axis_name), jax.lax.pmin(low, axis_name)
    varied = differ(low, high, jnp.sqrt(squares / positive(total)))
    scale = jax.lax.rsqrt(jnp.where(varied, variance, 1) + epsilon)
    whitened = jnp.where(where & varied, (x - mean) * scale, 0)
    return whitened if shift_mean else jnp.where(where, jnp.where(varied, whitened + mean, x), 0)


def normalise_globally(
    returns: Real[ArrayLike, "S"],
    tokens: Real[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    epsilon: Scalar = 1e-8,
    axis_name=None,
) -> Float[Array, "S"]:
    """Normalise over all agents, all experiences and all devices, one vote per token (MAPPA Eq. 4).

    μ = Σ_s n_s A_s / Σ_s n_s,   σ² = Σ_s n_s (A_s − μ)² / Σ_s n_s,   Â_s = (A_s − μ) / √(σ² + ε)

    The mask m of the equation runs over tokens; as a sample's tokens share its A, each sample votes with its number of tokens n.

    Args:
      returns: A_s `[S]`.
      tokens: number of response tokens n_s.
      where: optional; False samples take no part and get 0.
      epsilon: under the root.
      axis_name: mesh axis to add the statistics over, inside `shard_map`. Under jit with sharded arrays nothing is needed.
    """
    return whiten(as_float(returns), where=where, weights=tokens, ddof=0, epsilon=epsilon, shift_mean=True, axis_name=axis_name)


def running_means(
    running: Real[np.ndarray, "N"],
    returns: Real[ArrayLike, "S"],
    agent: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    *,
    decay: float | int = 0.95,
    where: Bool[ArrayLike, "S"] | None = None,
) -> Float[np.ndarray, "N"]:
    """Each role's running mean of its returns after a step of self-play (SPIRAL, Liu et al. 2025: role-conditioned advantage estimation).

    b ← d^n b + (1 − d^n) R̄, n the plays in which the role spoke and R̄ the mean over them of its mean return: what n updates with R̄ one
    after the other give, whatever the order of the plays. Recipes with `advantage_estimator="ema"` take b off; NumPy, between two steps.

    Args:
      running: of agents 0 ... N − 1 before the step; zeros at the start. A loop keeps it in its checkpoint.
      returns: of each sample. agent, trajectory: who acted, in which play.
      decay: d, what stays of b after one play.
      where: optional; rows that are False take no part.
    """
    returns, agent, trajectory = np.asarray(returns, np.float64), np.asarray(agent), np.asarray(trajectory)
    where, out = np.ones(returns.shape, bool) if where is None else np.asarray(where), np.array(running, np.float64)
    for number in range(len(out)):
        mine = where & (agent == number)
        plays = np.unique(trajectory[mine], return_inverse=True)[1]
        if plays.size:
            means = np.bincount(plays, returns[mine]) / np.bincount(plays)
            kept = decay ** len(means)
            out[number] = kept * out[number] + (1 - kept) * means.mean()
    return out
