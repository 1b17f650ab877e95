"""Log-probs and entropies under a head that nothing trains, as adapters leave it: two products per token in a gradient in place of three.

The gradient of a log-prob with respect to the hidden state is `W[target] - sum_v p(v) W[v]`, which does not depend on what comes after
it. So the forward pass takes it while a block's probabilities are there, and nothing is computed again. That is the idea of Liger's fused
linear cross-entropy (arXiv 2410.10989, section 3.2), for a head without a gradient of its own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.attention import platform
from marl_llm.models.log_probs import TokenScores, pairs_of_a_chunk

CPU_BLOCK = 64  # targets: a gradient of 256 among 456 places takes .35 CPU seconds at 64, .39 at 128, .48 at 256, for padding in the last


class _Block(NamedTuple):
    """Scores of a block of targets, and the derivatives by their hidden states where these are asked for."""

    log_probs: Float[Array, "n"]
    entropy: Float[Array, "n"]
    log_prob_slope: Float[Array, "n D"] | None = None
    entropy_slope: Float[Array, "n D"] | None = None


def score_frozen(
    head: Float[Array, "V D"],
    hidden: Float[Array, "*shape D"],
    targets: Int[Array, "*shape"],
    temperature: float = 1.0,
    where: Bool[Array, "*shape"] | None = None,
) -> TokenScores:
    """`marl_llm.models.score_hidden` for a head without a gradient, given as `[V, D]`; 0 in blocks of targets without any `where`.

    Raises `ValueError` where the head is differentiated.
    """
    where = jnp.ones(targets.shape, bool) if where is None else where
    flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), where.reshape(-1)
    with jax.named_scope("head"):
        scores = _scores(float(temperature), head, *flat)
    return TokenScores(*(x.reshape(targets.shape) for x in scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(temperature, head, hidden, targets, where) -> tuple[Array, Array]:
    return tuple(_in_blocks(temperature, "", head, hidden, targets, where))[:2]


def _forward(temperature, head, hidden, targets, where):
    if head.perturbed:
        raise ValueError("score_frozen is asked for the gradient of its head: use score_hidden")
    inputs = head.value, hidden.value, targets.value, where.value
    block = _in_blocks(temperature, "log_probs", *inputs)
    return (block.log_probs, block.entropy), (block.log_prob_slope, inputs)


def _backward(temperature, residuals, cotangents):
    slope, inputs = residuals
    hidden = inputs[1]
    of_log_probs, of_entropy = cotangents
    out = jnp.zeros(hidden.shape, jnp.float32)
    if not isinstance(of_log_probs, SymbolicZero):
        out += of_log_probs[:, None] * slope
    if not isinstance(of_entropy, SymbolicZero):  # only where the recipe has an entropy term
        out += of_entropy[:, None] * _in_blocks(temperature, "entropy", *inputs).entropy_slope
    return None, out.astype(hidden.dtype), None, None


_scores.defvjp(_forward, _backward, symbolic_zeros=True)


def _in_blocks(temperature: float, slope: str, head, hidden, targets, where) -> _Block:
    """`_score_block` of all targets, a block at a time; blocks without any `where` are not computed."""
    count, places = targets.shape[0], pairs_of_a_chunk(head.shape[0])
    size = min(count, CPU_BLOCK, places) if platform() == "cpu" else min(count, places)
    blocks = -(-count // size)
    size = -(-count // blocks)
    score = functools.partial(_score_block, temperature, slope, head)

    def cut(x):
        padded = jnp.pad(x, [(0, blocks * size - count), *((0, 0),) * (x.ndim - 1)])
        return padded.reshape(blocks, size, *x.shape[1:])

    def unless_empty(given):
        counts, *inputs = given
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(score, *inputs))
        return jax.lax.cond(jnp.any(counts), score, lambda *_: nothing, *inputs)

    out = jax.lax.map(unless_empty, tuple(map(cut, (where, hidden, targets))))
    return jax.tree.map(lambda x: x.reshape(blocks * size, *x.shape[2:])[:count], out)


def _score_block(temperature: float, slope: str, head, hidden, targets) -> _Block:
    """One block. The logits lie as `[V, n]`, so that a tied embedding is read as it is: on a CPU its transpose is a copy, and a product
    with that has a quarter of the speed."""
    dtype = hidden.dtype
    matrix = head.astype(dtype)
    logits = jnp.matmul(matrix, hidden.T, preferred_element_type=jnp.float32) / temperature
    shifted = logits - jnp.max(logits, axis=0)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=0)
    chosen = jnp.sum(jnp.where(jnp.arange(head.shape[0])[:, None] == targets, shifted, 0.0), axis=0)
    log_total = jnp.log(total)
    mean_shifted = jnp.sum(weights * shifted, axis=0) / total
    block = _Block(chosen - log_total, log_total - mean_shifted)
    if slope == "log_probs":
        mean = _weighed(weights / total, matrix)
        return block._replace(log_prob_slope=(matrix[targets].astype(jnp.float32) - mean) / temperature)
    if slope == "entropy":  # -p (log p + H), and log p + H is how far a logit lies above the mean
        return block._replace(entropy_slope=-_weighed(weights / total * (shifted - mean_shifted), matrix) / temperature)
    return block


def _weighed(weights: Float[Array, "V n"], matrix: Float[Array, "V D"]) -> Float[Array, "n D"]:
    """Sums of the head's rows."""
    return jnp.matmul(weights.T.astype(matrix.dtype), matrix, preferred_element_type=jnp.float32)
