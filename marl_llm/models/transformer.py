"""A Qwen3-style decoder in Flax linen, used only through `init` and `apply`.

Pre-norm blocks, RMSNorm, rotary positions, grouped-query attention with per-head RMSNorm on queries and keys (Qwen3
technical report, section 2), SwiGLU. One attention function serves three uses, which differ only in their key *segments*:

- a plain or packed sequence `[B, L]`, where a mask `[B, L, L]` says who sees whom (a group's packed row is one prompt and K
  responses, each seeing the prompt and itself: the tree mask);
- the prefill of E prompts;
- a decode step of K branches per prompt, whose keys are the prompt's (shared, computed once) and each branch's own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.config import ModelConfig

MASKED = -1e30  # finite, so that a row that sees nothing gets a uniform softmax instead of NaN


class Segment(NamedTuple):
    """Keys and values that a block of queries may see.

    `shared` segments hold one row of keys per batch row, `[B, S, J, d]`, with `where [B, L, S]`; private ones hold a row per
    query, `[B, L, S, J, d]`, with `where` of the same shape as a mask, `[B, L, S]`.
    """

    keys: Array
    values: Array
    where: Bool[Array, "B L S"]


class BranchCache(NamedTuple):
    """Per layer: the prompt's keys and values `[E, P, J, d]`, shared by K branches, and the branches' own `[E, K, R, J, d]`."""

    prompt_keys: Float[Array, "E P J d"]
    prompt_values: Float[Array, "E P J d"]
    keys: Float[Array, "E K R J d"]
    values: Float[Array, "E K R J d"]


def rotary_angles(positions: Int[Array, "B L"], head_dim: int, theta: float) -> tuple[Array, Array]:
    """Sine and cosine of the rotary angles, each `[B, L, 1, d/2]`, float32; computed once and shared by all layers."""
    half = head_dim // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def rotate(x: Float[Array, "B L h d"], angles: tuple[Array, Array]) -> Float[Array, "B L h d"]:
    """Rotary embedding, rotate-half form."""
    sin, cos = angles
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(queries: Float[Array, "B L H d"], segments: list[Segment]) -> Float[Array, "B L H d"]:
    """Softmax attention over the union of the segments' keys; H/J queries share a key head.

    Shared segments are one matrix product per (row, key head) with that head's queries stacked: on CPU twice as fast as the
    einsum over five axes.
    """
    b, length, h, d = queries.shape
    j = segments[0].keys.shape[-2]
    g = h // j
    q = (queries * d**-0.5).reshape(b, length, j, g, d).transpose(0, 2, 3, 1, 4)  # b j g l d
    scores = []
    for s in segments:
        if s.keys.ndim == 4:
            keys = s.keys.transpose(0, 2, 3, 1)  # b j d s
            score = (q.reshape(b, j, g * length, d) @ keys).reshape(b, j, g, length, -1)
        else:
            score = jnp.einsum("bjgld,blsjd->bjgls", q, s.keys)
        scores.append(jnp.where(s.where[:, None, None], score, MASKED))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out, start = 0.0, 0
    for s in segments:
        size = s.where.shape[-1]
        part = weights[..., start : start + size]
        if s.values.ndim == 4:
            values = s.values.transpose(0, 2, 1, 3)  # b j s d
            out = out + (part.reshape(b, j, g * length, size) @ values).reshape(b, j, g, length, d)
        else:
            out = out + jnp.einsum("bjgls,blsjd->bjgld", part, s.values)
        start += size
    return out.transpose(0, 3, 1, 2, 4).reshape(b, length, h, d)


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last axis."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],))
        return weight * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)


class Attention(nn.Module):
    """Grouped-query attention with q/k norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, angles, where, cache: BranchCache | None, step):
        c = self.config
        init = nn.initializers.normal(c.width**-0.5)
        project = lambda name, heads: nn.DenseGeneral((heads, c.head_dim), use_bias=False, kernel_init=init, name=name)(x)  # noqa: E731
        q = RMSNorm(c.norm_epsilon, name="query_norm")(project("query", c.query_heads))
        k = RMSNorm(c.norm_epsilon, name="key_norm")(project("key", c.key_value_heads))
        v = project("value", c.key_value_heads)
        q, k = rotate(q, angles), rotate(k, angles)
        if cache is None:
            out, new = attend(q, [Segment(k, v, where)]), (k, v)
        else:
            keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, k[:, :, None], step, axis=2)
            values = jax.lax.dynamic_update_slice_in_dim(cache.values, v[:, :, None], step, axis=2)
            e, branches, r = keys.shape[:3]
            own = jnp.broadcast_to(jnp.arange(r) <= step, (e, branches, r))
            new = cache._replace(keys=keys, values=values)
            out = attend(q, [Segment(cache.prompt_keys, cache.prompt_values, where), Segment(keys, values, own)])
        scale = nn.initializers.normal((c.query_heads * c.head_dim) ** -0.5 / (2 * c.layers) ** 0.5)
        return nn.DenseGeneral(c.width, axis=(-2, -1), use_bias=False, kernel_init=scale, name="output")(out), new


class Block(nn.Module):
    """One pre-norm transformer block."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, angles, where, cache, step):
        c = self.config
        init = nn.initializers.normal(c.width**-0.5)
        with jax.named_scope("attention"):
            h, new = Attention(c, name="attention")(
                RMSNorm(c.norm_epsilon, name="attention_norm")(x), angles, where, cache, step
            )
            x = x + h
        with jax.named_scope("feed_forward"):
            h = RMSNorm(c.norm_epsilon, name="feed_forward_norm")(x)
            gate = nn.Dense(c.feed_forward, use_bias=False, kernel_init=init, name="gate")(h)
            up = nn.Dense(c.feed_forward, use_bias=False, kernel_init=init, name="up")(h)
            scale = nn.initializers.normal(c.feed_forward**-0.5 / (2 * c.layers) ** 0.5)
            down = nn.Dense(c.width, use_bias=False, kernel_init=scale, name="down")
            x = x + down(jax.nn.silu(gate) * up)
        return x, new


class Decoder(nn.Module):
    """Tokens to hidden states; `head` turns hidden states into logits.

    `__call__` with `cache=None` runs a sequence under a mask and also returns every layer's keys and values; with a cache it
    runs one decode step of K branches (see `BranchCache`).
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        self.embedding = self.param("embedding", nn.initializers.normal(c.width**-0.5), (c.vocab_size, c.width))
        self.blocks = [Block(c, name=f"block_{y}") for y in range(c.layers)]
        self.final_norm = RMSNorm(c.norm_epsilon)
        if not c.tie_embeddings:
            self.output = self.param("output", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab_size))

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        where: Bool[Array, "B L S"],
        cache: list[BranchCache] | None = None,
        step: Int[Array, ""] | int | None = None,
    ):
        """Hidden states `[B, L, D]` after the final norm, and per layer the keys and values (or the updated cache)."""
        x = self.embedding[tokens]
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        new = []
        for y, block in enumerate(self.blocks):
            x, layer = block(x, angles, where, None if cache is None else cache[y], step)
            new.append(layer)
        return self.final_norm(x), new

    def head(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Logits of hidden states."""
        return hidden @ (self.embedding.T if self.config.tie_embeddings else self.output)


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Random parameters of a decoder, a plain pytree. `key` is consumed."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    where = jnp.ones((1, 2, 2), bool)
    # `head` needs no parameters of its own beyond those that `setup` makes
    return Decoder(config).init(key, tokens, tokens, where)["params"]
