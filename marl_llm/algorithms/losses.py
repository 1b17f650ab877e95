"""Policy losses: one equation each, to be minimised, unreduced, with the mask of optax's `where=`.

Log-probs are `[S, R]`: natural log-probabilities of the sampled tokens, and both sides of a ratio must belong to the same
distribution (same temperature, top-k and top-p; see `ratios`). Masked tokens never enter: their value may be anything, NaN
included, the result there is 0 and so is the gradient. `reduce_parts` keeps sum and count apart so that micro-batches and
devices add up to exactly the loss of the whole batch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real, Shaped

from marl_llm.algorithms._arrays import Scalar, as_float, as_mask, check_choice, psum

LEVELS = ("token", "sequence", "sequence_token", "product")
KL_KINDS = ("k1", "abs", "k2", "k3", "k1+", "k3+")
REDUCTIONS = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "constant")

# e^20 is 4.9e8: finite in float32 with room for sums, and far outside every clip range in use.
LOG_RATIO_LIMITS = (-20.0, 20.0)


def masked(x, where: Array) -> Array:
    """Zero the masked entries before anything is computed, so that no NaN reaches the gradient."""
    return jnp.where(where, jnp.broadcast_to(as_float(x), where.shape), 0)


@functools.partial(jax.jit, static_argnames=("level", "log_ratio_limits"))
def importance_ratio(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    level: str = "token",
    log_ratio_limits: tuple[float, float] | None = LOG_RATIO_LIMITS,
) -> Float[Array, "S R"] | Float[Array, "S"]:
    """Ratio of the probability of what was sampled under the present and under the sampling policy.

    token:          ρ_{s,r} = exp(log π_{s,r} − log π_old_{s,r})                       [S, R]
    sequence:       ρ_s = exp(mean_r (log π − log π_old))                              [S]     GSPO
    sequence_token: value of `sequence`, gradient of each token's own log-prob         [S, R]  GSPO-token
    product:        ρ_s = exp(Σ_r (log π − log π_old)), the ratio of whole responses   [S]     MAGRPO Eq. 2, Stronger-MAS Eq. 2

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: the same under the old policy: the model before the update.
      level: which ratio.
      where: `[S, R]` response tokens; masked ones are left out of means and sums, and get ratio 1.
      log_ratio_limits: the log of the ratio is clamped to (low, high) before the exponential, with zero gradient
        outside; None switches it off. TRL has none, verl's token ratio (−20, 20), verl's GSPO (−inf, 10).

    Raises:
      ValueError: unknown level.
    """
    check_choice("level", level, LEVELS)
    where = as_mask(where, jnp.shape(log_probs))
    new = masked(log_probs, where)
    log_ratio = new - masked(old_log_probs, where)
    if level != "token":
        total = jnp.sum(log_ratio, axis=1)
        if level != "product":
            total = total / jnp.maximum(jnp.sum(where, axis=1), 1)
        log_ratio = total
    if level == "sequence_token":
        log_ratio = jax.lax.stop_gradient(log_ratio)[:, None] + new - jax.lax.stop_gradient(new)
    if log_ratio_limits is not None:
        log_ratio = jnp.clip(log_ratio, *log_ratio_limits)
    return jnp.exp(log_ratio)


def advantages_like(advantages, ratio: Array, where: Array) -> tuple[Array, Array]:
    """Broadcast advantages `[S]`, `[S, 1]` or `[S, R]` against a ratio `[S]` or `[S, R]`: (advantages, ratio), no gradient into the first.

    Masked advantages become 0 before they meet a ratio that a whole row shares, or their NaN would be in its gradient.
    """
    advantages = jax.lax.stop_gradient(as_float(advantages))
    if ratio.ndim == 1 and advantages.ndim == 1:
        return jnp.where(jnp.any(where, axis=1), advantages, 0), ratio
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    if ratio.ndim == 1:
        ratio = ratio[:, None]
    return masked(advantages, where), jnp.broadcast_to(ratio, where.shape)


@functools.partial(jax.jit, static_argnames=("level", "dual_clip", "ratio_cap", "log_ratio_limits"))
def clipped_ratio(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    clip_low: Scalar = 0.2,
    clip_high: Scalar = 0.2,
    level: str = "token",
    dual_clip: float | None = None,
    log_ratio_limits: tuple[float, float] | None = LOG_RATIO_LIMITS,
    ratio_cap: float | None = None,
) -> Float[Array, "S R"] | Float[Array, "S"]:
    """PPO's clipped surrogate as a loss (Stronger-MAS Eq. 2, MAGRPO Eq. 2, MAPPA Eq. 5; asymmetric clip: DAPO).

    ℓ = −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A), and for A < 0 at most −c A (dual clip)

    Where both arms are equal the gradient is that of the unclipped one, so the edges 1 − clip_low and 1 + clip_high still learn.

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: the same under the old policy: the model before the update.
      advantages: one per sample `[S]`, or per token `[S, R]` (or `[S, 1]`); no gradient flows into them.
      clip_low: how far below 1 the ratio may push.
      clip_high: how far above 1.
      level: see `importance_ratio`.
      dual_clip: c > 1, the largest ratio that a negative advantage may count with; None for no such bound.
      where: `[S, R]` response tokens.
      log_ratio_limits: see `importance_ratio`.
      ratio_cap: δ, the largest ratio of the unclipped arm, ρ A above (TRL's `delta`). From 1 + clip_high on it is `dual_clip`;
        below, the clipped arm alone learns from ratios between δ and 1 + clip_high. None for no such bound.

    Returns:
      The loss, 0 where masked: `[S, R]`, or `[S]` at the levels "sequence" and "product" with one advantage per sample (0 for
      a sample without tokens).

    Raises:
      ValueError: unknown level, or dual_clip not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1: it bounds a ratio from above.")
    where = as_mask(where, jnp.shape(log_probs))
    ratio = importance_ratio(log_probs, old_log_probs, level=level, where=where, log_ratio_limits=log_ratio_limits)
    advantages, ratio = advantages_like(advantages, ratio, where)
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    if ratio_cap is None:
        unclipped, clipped = -advantages * ratio, -advantages * jax.lax.stop_gradient(bounded)
    else:
        unclipped, clipped = -advantages * jnp.where(ratio > ratio_cap, ratio_cap, ratio), -advantages * bounded
    loss = jnp.where(clipped > unclipped, clipped, unclipped)
    if dual_clip is not None:
        loss = jnp.where((advantages < 0) & (loss > -dual_clip * advantages), -dual_clip * advantages, loss)
    return jnp.where(jnp.any(where, axis=1) if loss.ndim == 1 else where, loss, 0)


def clip_masks(
    ratio: Float[Array, "*S"], advantages: Float[Array, "*S"], clip_low: Scalar, clip_high: Scalar
) -> tuple[Shaped[Array, "*S"], Shaped[Array, "*S"]]:
    """Say where the clip is active: (ratio below the range with A < 0, ratio above the range with A > 0)."""
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


@functools.partial(jax.jit, static_argnames="log_ratio_limits")
def cispo(
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    clip_low: Scalar = 1.0,
    clip_high: Scalar = 4.0,
    log_ratio_limits: tuple[float, float] | None = LOG_RATIO_LIMITS,
) -> Float[Array, "S R"]:
    """Policy gradient weighted by a clipped ratio, which no token loses its gradient to (CISPO; MiniMax-M1 2025).

    ℓ = −sg[clip(ρ, 1 − clip_low, 1 + clip_high)] A log π

    Args:
      log_probs: log π of the sampled tokens.
      old_log_probs: the same under the old policy: the model before the update.
      advantages: `[S]`, `[S, 1]` or `[S, R]`; no gradient flows into them.
      clip_low: the weight is at least 1 − clip_low; 1 means no lower bound (TRL).
      clip_high: the weight is at most 1 + clip_high. TRL's `epsilon_high` is this bound itself: 5 there is 4 here.
      where: `[S, R]` response tokens; the loss is 0 elsewhere.
      log_ratio_limits: see `importance_ratio`.
    """
    where = as_mask(where, jnp.shape(log_probs))
    new = masked(log_probs, where)
    ratio = importance_ratio(new, old_log_probs, level="token", where=where, log_ratio_limits=log_ratio_limits)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    advantages, _ = advantages_like(advantages, ratio, where)
    return jnp.where(where, -weight * advantages * new, 0)


@jax.jit
def reinforce(
    log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
) -> Float[Array, "S R"]:
    """Policy gradient without a ratio (Williams 1992; MAGRPO as released).

    ℓ_{s,r} = −A log π_{s,r}

    Args:
      log_probs: log π of the sampled tokens.
      advantages: `[S]`, `[S, 1]` or `[S, R]`; no gradient flows into them.
      where: `[S, R]` response tokens; the loss is 0 elsewhere.
    """
    where = as_mask(where, jnp.shape(log_probs))
    log_probs = masked(log_probs, where)
    advantages, log_probs = advantages_like(advantages, log_probs, where)
    return jnp.where(where, -advantages * log_probs, 0)


def _exp_minus_line(d: Array) -> Array:
    """e^d − d − 1 to full precision: below |d| = 3e-4 the plain difference is all rounding in float32."""
    near = jnp.abs(d) < 0.1
    small = jnp.where(near, d, 0)
    series = jnp.ones_like(d)
    for n in range(12, 2, -1):  # the next term is 0.1^11 / 13! of the first
        series = 1 + small / n * series
    return jnp.where(near, 0.5 * small**2 * series, jnp.expm1(d) - d)


@functools.partial(jax.jit, static_argnames=("kind", "log_ratio_limit", "value_limit"))
def kl(
    log_probs: Float[ArrayLike, "*S"],
    reference_log_probs: Float[ArrayLike, "*S"],
    *,
    where: Shaped[ArrayLike, "*S"] | None = None,
    kind: str = "k3",
    log_ratio_limit: float | None = 20.0,
    value_limit: float | None = None,
) -> Float[Array, "*S"]:
    """Per-token estimate of KL(π ‖ π_ref) from the sampled tokens (Schulman 2020, "Approximating KL divergence").

    k1 = −d, abs = |d|, k2 = d² / 2, k3 = e^d − d − 1, with d = log π_ref − log π

    "k1+" and "k3+" have the value of k1 and k3 and the gradient of k2, which is the unbiased gradient of the KL divergence. As a
    penalty inside the reward only the value matters; as a loss prefer k2 or a "+".

    Args:
      log_probs: log π of the sampled tokens.
      reference_log_probs: log π_ref of the same tokens; give it without gradient.
      kind: which estimator.
      where: optional; 0 where False.
      log_ratio_limit: in k3, d is clamped to ± this before the exponential (verl 20; TRL none, equal up to there). None: off.
      value_limit: k3 itself is clamped to ± this, with zero gradient outside (verl 10; TRL none). None: off.

    Raises:
      ValueError: unknown kind.
    """
    check_choice("kind", kind, KL_KINDS)
    where = as_mask(where, jnp.shape(log_probs))
    d = masked(reference_log_probs, where) - masked(log_probs, where)
    base = kind.rstrip("+")
    if base == "k1":
        value = -d
    elif base == "abs":
        value = jnp.abs(d)
    elif base == "k2":
        value = 0.5 * d**2
    else:
        limited = d if log_ratio_limit is None else jnp.clip(d, -log_ratio_limit, log_ratio_limit)
        value = _exp_minus_line(limited)
        value = value if value_limit is None else jnp.clip(value, -value_limit, value_limit)
    if kind.endswith("+"):
        straight = 0.5 * d**2
        value = jax.lax.stop_gradient(value) + straight - jax.lax.stop_gradient(straight)
    return jnp.where(where, value, 0)


def adapt_kl_coef(kl_coef: Scalar, kl: Scalar, *, target: Scalar, samples: Scalar, horizon: Scalar) -> Float[Array, ""]:
    """Steer β so that the measured KL stays near a target (Ziegler et al. 2019; verl's adaptive controller).

    β ← β max(1 + clip(KL / target − 1, −0.2, 0.2) · n / horizon, 0.2)

    The lower bound is ours. Without it a step of five horizons or more turns β negative, and a negative β rewards the KL.

    Args:
      kl_coef: β of this step.
      kl: measured KL of this step.
      target: wanted KL, in the same unit.
      samples: n, how many samples the step had.
      horizon: over how many samples β may change by about a fifth.
    """
    error = jnp.clip(as_float(kl) / target - 1, -0.2, 0.2)
    return kl_coef * jnp.maximum(1 + error * samples / horizon, 0.2)


@jax.jit
def entropy(logits: Float[ArrayLike, "*S V"], *, temperature: Scalar = 1.0) -> Float[Array, "*S"]:
    """Entropy of the policy at each position, in nats.

    H = log Σ_v e^{z_v} − Σ_v p_v z_v, with z = logits / temperature

    Args:
      logits: raw logits. −inf entries (forbidden tokens) count as probability 0.
      temperature: of the distribution whose entropy is meant.
    """
    log_p = jax.nn.log_softmax(as_float(logits) / temperature, axis=-1)
    possible = log_p > -jnp.inf
    return -jnp.sum(jnp.where(possible, jnp.exp(log_p) * jnp.where(possible, log_p, 0), 0), axis=-1)


@jax.jit
def value_loss(
    values: Float[ArrayLike, "*S"],
    old_values: Float[ArrayLike, "*S"] | None,
    targets: Float[ArrayLike, "*S"],
    *,
    where: Shaped[ArrayLike, "*S"] | None = None,
    value_clip: Scalar | None = None,
) -> Float[Array, "*S"]:
    """Squared error of a critic, clipped as in PPO (Schulman et al. 2017; UnityMAS-O trains its critic so, with 0.5).

    ℓ = ½ max((V − G)², (clip(V, V_old − ε, V_old + ε) − G)²)

    Args:
      values: V, per token or per sample.
      old_values: V_old, around which `value_clip` clips; None without a clip.
      targets: G, same shape, from `gae`; no gradient flows into them.
      where: optional; 0 where False.
      value_clip: ε; None for the plain squared error.

    Raises:
      ValueError: `value_clip` without `old_values`, or the reverse.
    """
    if (value_clip is None) != (old_values is None):
        raise ValueError("value_clip and old_values belong together: the clip is around the old values.")
    where = as_mask(where, jnp.shape(values))
    values, targets = masked(values, where), jax.lax.stop_gradient(masked(targets, where))
    error = (values - targets) ** 2
    if value_clip is not None:
        old = jax.lax.stop_gradient(masked(old_values, where))
        error = jnp.maximum(error, (jnp.clip(values, old - value_clip, old + value_clip) - targets) ** 2)
    return jnp.where(where, 0.5 * error, 0)


@functools.partial(jax.jit, static_argnames=("how", "max_length", "empty_rows"))
def reduce_parts(
    x: Float[ArrayLike, "S *R"],
    *,
    where: Shaped[ArrayLike, "S *Q"] | None = None,
    how: str = "token_mean",
    max_length: int | None = None,
    empty_rows: bool = False,
    token_epsilon: Scalar = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Split a reduction into its sum and its count, which add up over micro-batches and devices.

    how                        sum                        count
    "token_mean"               Σ_s Σ_r x                  tokens
    "sequence_mean_token_sum"  Σ_s Σ_r x                  rows
    "sequence_mean_token_mean" Σ_s (Σ_r x / n_s)          rows
    "constant"                 Σ_s Σ_r x                  rows · max_length (Dr. GRPO)

    Args:
      x: loss per token `[S, R]` or per sample `[S]`.
      where: mask of the rank of `x`; everything by default. A per-sample `x` with a mask `[S, R]` counts at each of its tokens.
      how: which reduction.
      max_length: Dr. GRPO's constant, usually the longest response allowed; needed by and only by "constant".
      empty_rows: whether rows without any token count as rows (TRL: yes; verl: no; padding rows must not: no by default).
      token_epsilon: added to n_s (verl 1e-8).

    Returns:
      (sum, count), scalars. No division has happened: divide the total sum by the total count, see `reduce`.

    Raises:
      ValueError: unknown `how`, or `max_length` missing or given without effect.
    """
    check_choice("how", how, REDUCTIONS)
    if (max_length is not None) != (how == "constant"):
        raise ValueError(f"max_length belongs to how='constant' and only to it; got how={how!r}, max_length={max_length!r}.")
    x = as_float(x)
    if x.ndim == 1 and where is not None and jnp.ndim(where) == 2:
        x = jnp.broadcast_to(x[:, None], jnp.shape(where))
    where, shape = as_mask(where, x.shape), x.shape
    inner = tuple(range(1, len(shape)))
    x = jnp.where(where, x, 0)
    tokens = jnp.sum(where, axis=inner).astype(x.dtype)
    rows = jnp.asarray(shape[0], x.dtype) if empty_rows else jnp.sum(tokens > 0).astype(x.dtype)
    per_row = jnp.sum(x, axis=inner)
    if how == "token_mean":
        return jnp.sum(per_row), jnp.sum(tokens)
    if how == "sequence_mean_token_mean":
        per_row = per_row / (jnp.maximum(tokens, 1) + token_epsilon)
    if how == "constant":
        rows = rows * max_length
    return jnp.sum(per_row), rows


@functools.partial(jax.jit, static_argnames=("how", "max_length", "empty_rows", "axis_name"))
def reduce(
    x: Float[ArrayLike, "S *R"],
    *,
    where: Shaped[ArrayLike, "S *Q"] | None = None,
    how: str = "token_mean",
    max_length: int | None = None,
    empty_rows: bool = False,
    token_epsilon: Scalar = 0.0,
    axis_name=None,
) -> Float[Array, ""]:
    """Reduce a loss to a scalar: the sum over the count of `reduce_parts`, 0 (with zero gradient) when the count is 0.

    Args:
      x, where, how, max_length, empty_rows, token_epsilon: see `reduce_parts`.
      axis_name: mesh axis (or axes) over which sum and count are added up before the division, inside `shard_map`.
    """
    total, count = reduce_parts(x, where=where, how=how, max_length=max_length, empty_rows=empty_rows, token_epsilon=token_epsilon)
    total, count = psum(total, axis_name), psum(count, axis_name)
    return total / jnp.where(count > 0, count, 1)


def sum_blocks(function: Callable, *arrays: Shaped[Array, "S ..."], rows: int = 4096):
    """Add up `function(*block)` over blocks of rows, so that what it computes in between stays in the cache of a CPU.

    At 10^6 samples a loss per token is written to memory and read back; a block of it is not. Use it on `reduce_parts`:

        >>> def parts(new, old, advantages, where):
        ...     return reduce_parts(clipped_ratio(new, old, advantages, where=where), where=where)
        >>> new, old, advantages, where = jnp.zeros((4, 3)), jnp.zeros((4, 3)), jnp.ones(4), jnp.ones((4, 3), bool)
        >>> total, count = sum_blocks(parts, new, old, advantages, where, rows=2)
        >>> float(total / count)
        -1.0

    Args:
      function: takes a block of each array and returns a pytree of sums, in which no row knows of another.
      *arrays: with the same number S of rows; S may be anything.
      rows: rows of a block; 4096 rows of 16 float32 tokens are 256 KiB.

    Returns:
      The pytree of sums over all rows.
    """
    size = arrays[0].shape[0]
    whole = size // rows
    total = function(*(x[whole * rows :] for x in arrays))
    # Blocks are read in place: arrays[:whole * rows].reshape(...) would copy them.

    def block(i):
        return function(*(jax.lax.dynamic_slice_in_dim(x, i * rows, rows) for x in arrays))

    def add(sums, i):
        return (jax.tree.map(jnp.add, sums, block(i)), None)

    return jax.lax.scan(add, total, jnp.arange(whole))[0] if whole else total
