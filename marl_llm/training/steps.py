"""One optimizer step, cut into micro-batches: sums are added over micro-batches and devices, and divided once (law 5).

What all updates share: the policy loss of a micro-batch of responses, the loop that adds up sums and gradients, the exact denominators,
and the metrics as sums over tokens with their counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from marl_llm.algorithms import Recipe, loss_for, needs
from marl_llm.models import LoraConfig, attach, constrain_params
from marl_llm.models.sharding import ways
from marl_llm.training.mesh import largest, summed
from marl_llm.training.train_state import TrainState, apply_gradient

# tokens that one could train on while a gradient is added: 12 bytes a parameter against 6 FLOPs a parameter and token
GRADIENT_ADD_TOKENS = 64


class Sums(NamedTuple):
    """What micro-batches add up to, besides their gradients."""

    total: Float[Array, ""]  # of the loss
    count: Float[Array, ""]  # its denominator
    parts: dict[str, tuple[Array, Array]]  # name -> (sum, count), the metrics
    gap: Float[Array, ""]  # largest |sampler - scorer| before the first step, in nats


def microbatch_size(tokens: int, row_tokens: int, rows: int, multiple: int = 1) -> int:
    """Rows per micro-batch: of the sizes that `tokens` hold (one row at least) the one that costs least; all of them for 0 tokens.

    A micro-batch costs its rows, empty places included, and one addition of the gradient.

    Args:
      tokens: per device. row_tokens: of one row. rows: of a minibatch, on the devices that one program spans.
      multiple: over how many devices the compiler splits a micro-batch; `tokens` are those of each, and the size is a multiple.
    """
    if tokens < 0:
        raise ValueError(f"microbatch_tokens={tokens} must be 0 (the whole minibatch at once) or more")
    if tokens == 0:
        return rows
    shares = -(-rows // multiple)

    def cost(size):
        return -(-shares // size) * (size * row_tokens + GRADIENT_ADD_TOKENS)

    return min(range(1, min(max(1, tokens // row_tokens), shares) + 1), key=cost) * multiple


def cut(arrays: tuple, tokens: int, axis: str | None) -> tuple[Callable, Int[Array, ""], int]:
    """Packed rows, and arrays that go with them row by row, in micro-batches: `(part, count, most)` for `accumulate`.

    Args:
      arrays: `PackedRows` first, those that hold something before those that do not.
      tokens: per device, see `microbatch_size`. axis: see `marl_llm.training.mesh`.
    `part(j)` is the j-th micro-batch of all arrays; the last one is filled up with zeros, which must weigh nothing.
    """
    places, length = arrays[0].tokens.shape
    size = microbatch_size(tokens, length, places, ways("batch") if axis is None else 1)
    most = -(-places // size)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, most * size - places)] + [(0, 0)] * (x.ndim - 1)), arrays)

    def part(j):
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, j * size, size), padded)

    return part, (jnp.sum(arrays[0].length[:, 0] > 0) + size - 1) // size, most


def few_shapes(tokens: int) -> bool:
    """Whether rows are packed into few shapes (see `pack`) if a micro-batch holds `tokens`.

    The loop over micro-batches ends before rows that hold nothing, so that they cost next to nothing and a shape less to compile is worth
    more. All at once (0 tokens), every row is computed.
    """
    return tokens > 0


def whole(params: dict, base: dict | None, lora: LoraConfig | None) -> dict:
    """The parameters to score with: a policy's own, or with `lora` the frozen `base` that carries the policy's adapters."""
    return params if lora is None else attach(base, params, lora)


def check_base(base: dict | None, lora: LoraConfig | None) -> None:
    """Raises `ValueError` unless a base is given exactly where adapters are trained."""
    if (base is None) != (lora is None):
        raise ValueError("lora= trains adapters on a frozen base: pass base= to the update, and only then")


def _pinned(tree):
    """`constrain_params` of parameters or adapters: the table of logical axes knows adapters by a 'lora' in their path."""
    return constrain_params({"lora": tree})["lora"]


def policy_loss(
    recipe: Recipe,
    log_probs: Float[Array, "S R"],
    entropy: Float[Array, "S R"],
    sampled_log_probs: Float[Array, "S R"],
    advantages: Float[Array, "S"] | Float[Array, "S R"],
    where: Bool[Array, "S R"],
    reference_log_probs: Float[Array, "S R"] | None,
    old_log_probs: Float[Array, "S R"],
    **scalars: Float[Array, ""],
) -> tuple[Float[Array, ""], Sums]:
    """The recipe's loss of the responses of one micro-batch, as sums. The first output is the one to differentiate.

    `old_log_probs` are those of the parameters before the first step, as the update's own program scores them. The sampler's serve the
    correction of the gap between sampler and scorer alone, for they round differently. `scalars` are `kl_coef` and, where it is needed,
    `entropy_threshold`.
    """
    total, count, parts = loss_for(
        recipe,
        log_probs,
        old_log_probs,
        advantages,
        where=where,
        entropy=entropy,
        reference_log_probs=reference_log_probs,
        sampler_log_probs=sampled_log_probs if "sampler_log_probs" in needs(recipe) else None,
        **scalars,
    )
    gap = jnp.max(jnp.where(where, jnp.abs(old_log_probs - sampled_log_probs), 0.0))
    return total, jax.lax.stop_gradient(Sums(total, count, parts, gap))


def accumulate(loss: Callable, params: dict, count: Int[Array, ""] | int, most: int) -> tuple[Sums, dict]:
    """Sums and gradient of `loss(params, j) -> (total, Sums)` over the micro-batches j < count.

    `most` is the largest count there can be, known when traced: with one micro-batch there is no loop. The loop is a while loop with the
    gradient taken inside, so micro-batches that are not needed cost nothing, and only one's activations live.
    """
    differentiate = jax.value_and_grad(loss, has_aux=True)
    if most == 1:
        (_, sums), gradient = differentiate(params, jnp.int32(0))
        return sums, gradient

    def add(j, carry):
        kept, gradient = carry
        (_, sums), addition = differentiate(params, j)
        gap = jnp.maximum(kept.gap, sums.gap)  # NaN stays NaN, so that it alarms
        kept = jax.tree.map(jnp.add, kept, sums)._replace(gap=gap)
        return kept, _pinned(jax.tree.map(jnp.add, gradient, addition))

    (_, sums), gradient = jax.eval_shape(differentiate, params, jnp.int32(0))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (sums, gradient))
    return jax.lax.fori_loop(0, count, add, (zero[0], _pinned(zero[1])))


def exact_step(
    policy: TrainState,
    loss: Callable,
    count: Int[Array, ""] | int,
    most: int,
    learning_rate: Float[Array, ""],
    optimizer: optax.GradientTransformation,
    axis: str | None,
    denominator_scale: Float[Array, ""] | float = 1.0,
) -> tuple[TrainState, dict[str, tuple[Array, Array]], Float[Array, ""]]:
    """One step on the mean of `loss` over the micro-batches of all devices: `(policy, metrics, log-prob gap)`.

    Each metric is a (sum, count) pair, so that those of several steps are added before the division, see `mean_metrics`.

    Args:
      loss, count, most: see `accumulate`; `count` is this device's.
      axis: of the devices whose sums are added, see `marl_llm.training.mesh`.
      denominator_scale: the denominator counts this many times what was scored: samples that were left out, but count.
    """
    sums, gradient = accumulate(loss, policy.params, count, most)
    total, n, parts, gradient = summed((sums.total, sums.count, sums.parts, gradient), axis)
    n = jnp.where(jnp.isfinite(total), jnp.maximum(n * denominator_scale, 1e-9), jnp.nan)  # clipping gives a NaN the gradient 0
    gradient = _pinned(jax.tree.map(lambda x: x / n, gradient))
    policy, norm = apply_gradient(policy, gradient, learning_rate, optimizer)
    return _pinned(policy), parts | {"loss": (total, n), "grad_norm": (norm, jnp.float32(1))}, largest(sums.gap, axis)


def mean_metrics(metrics: Sequence[dict[str, tuple]]) -> dict[str, Any]:
    """Means over all units of several steps, from (sum, count) pairs: sums and counts are added, and divided once (law 5)."""
    means = {}
    for name in metrics[0]:
        total = sum(step[name][0] for step in metrics)
        count = sum(step[name][1] for step in metrics)
        means[name] = total / (count + (count == 0))
    return means
