"""A mixture of experts (Qwen3-MoE): softmax router, top-k experts per token, weights optionally renormalised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from marl_llm.models.sharding import constrain


def route(
    x: Float[Array, "n D"], router: Float[Array, "D X"], per_token: int, normalize: bool
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """The chosen experts of each token and their weights, float32: top-k of the softmax over all experts."""
    logits = jnp.matmul(x, router.astype(x.dtype), preferred_element_type=jnp.float32)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), per_token)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def mixture(
    x: Float[Array, "*rows D"],
    router: Float[Array, "D X"],
    gate: Float[Array, "X D F"],
    up: Float[Array, "X D F"],
    down: Float[Array, "X F D"],
    per_token: int,
    normalize: bool,
) -> Float[Array, "*rows D"]:
    """`Σ_k w_k expert_k(x)`: tokens sorted by expert, one ragged matrix product per weight, no capacity limit and no dropped token."""
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = route(flat, router, per_token, normalize)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=router.shape[-1]).astype(jnp.int32)
    rows = flat[order // per_token]

    def ragged(h, w):
        return jax.lax.ragged_dot(h, w.astype(h.dtype), sizes)

    hidden = constrain(jax.nn.silu(ragged(rows, gate)) * ragged(rows, up), None, "feed_forward")
    out = ragged(hidden, down) * weights.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(flat).at[order // per_token].add(out).reshape(x.shape)
