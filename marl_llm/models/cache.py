"""Attention of the plain sampler: a decode step of K branches per prompt over cached keys and values. The engine's is in `pages`.

The cache keeps keys as `[..., J, d, S]` and values as `[..., J, S, d]`: both products of a decode step then run along memory, and a
step writes one column. A prompt's part is stored once for its K branches; the two parts meet in one softmax, by their maxima and sums.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.attention import MASKED, platform
from marl_llm.models.masks import Window, in_window, prompt_positions

FEW_QUERIES = 4  # up to this many queries per key head, a CPU multiplies and adds faster than it calls a matrix product


class BranchCache(NamedTuple):
    """Per layer: the prompt's keys and values, shared by K branches, and the branches' own."""

    prompt_keys: Float[Array, "E J d P"]
    prompt_values: Float[Array, "E J P d"]
    keys: Float[Array, "E K J d R"]
    values: Float[Array, "E K J R d"]


class DecodeMask(NamedTuple):
    """What the K new tokens of each prompt see, and where their own keys and values are written.

    One column serves all rows, so that the write is a slice: rows that began at other times use the columns as a ring.
    """

    prompt: Bool[Array, "E P"]
    own: Bool[Array, "E K R"]  # with the column that this step writes
    column: Int[Array, ""]
    window: Window | None = None  # its positions [E K]

    def prompt_seen(self) -> Bool[Array, "E _ P"]:
        """The prompt's tokens that each branch sees, or one line for all of them."""
        if self.window is None:
            return self.prompt[:, None]
        positions = prompt_positions(self.prompt)[:, None]
        return self.prompt[:, None] & in_window(self.window.positions[..., None], positions, self.window.size)

    def own_seen(self) -> Bool[Array, "E K R"]:
        """The branch's own tokens that it sees; the newest lies in `column`, and each earlier one a column before, in a ring."""
        if self.window is None:
            return self.own
        columns = self.own.shape[-1]
        newest = self.window.positions[..., None]
        return self.own & in_window(newest, newest - (self.column - jnp.arange(columns)) % columns, self.window.size)


def to_cache(keys: Float[Array, "*B L J d"], values: Float[Array, "*B L J d"]) -> tuple[Float[Array, "*B J d L"], Float[Array, "*B J L d"]]:
    """Keys and values of rows, as the cache keeps them."""
    return jnp.einsum("...ljd->...jdl", keys), jnp.einsum("...ljd->...jld", values)


def _scores(q: Float[Array, "*n q d"], keys: Float[Array, "*n d S"]) -> Float[Array, "*n q S"]:
    if q.shape[-2] <= FEW_QUERIES and platform() == "cpu":
        return jnp.sum(q[..., None].astype(jnp.float32) * keys[..., None, :, :], axis=-2)
    return jnp.matmul(q, keys, preferred_element_type=jnp.float32)


def _weighted(w: Float[Array, "*n q S"], values: Float[Array, "*n S d"]) -> Float[Array, "*n q d"]:
    if w.shape[-2] <= FEW_QUERIES and platform() == "cpu":
        return jnp.sum(w[..., None] * values[..., None, :, :].astype(jnp.float32), axis=-2)
    return jnp.matmul(w.astype(values.dtype), values, preferred_element_type=jnp.float32)


def decode_attention(
    queries: Float[Array, "E K H d"], keys: Float[Array, "E K J d"], values: Float[Array, "E K J d"], cache: BranchCache, mask: DecodeMask
) -> tuple[Float[Array, "E K H d"], BranchCache]:
    """One new token per branch: writes its key and value, and attends to the prompt and to the branch's own tokens."""
    e, k, h, d = queries.shape
    j = keys.shape[2]
    g = h // j
    cache = cache._replace(
        keys=jax.lax.dynamic_update_slice_in_dim(cache.keys, keys[..., None], mask.column, 4),
        values=jax.lax.dynamic_update_slice_in_dim(cache.values, values[:, :, :, None], mask.column, 3),
    )
    q = (queries * d**-0.5).reshape(e, k, j, g, d)
    shared = q.transpose(0, 2, 1, 3, 4).reshape(e, j, k * g, d)
    to_prompt = _scores(shared, cache.prompt_keys).reshape(e, j, k, g, -1).transpose(0, 2, 1, 3, 4)
    to_prompt = jnp.where(mask.prompt_seen()[:, :, None, None], to_prompt, MASKED)  # e k j g P
    to_own = jnp.where(mask.own_seen()[:, :, None, None], _scores(q, cache.keys), MASKED)  # e k j g R
    top = jnp.maximum(jnp.max(to_prompt, axis=-1, keepdims=True), jnp.max(to_own, axis=-1, keepdims=True))
    w_prompt, w_own = jnp.exp(to_prompt - top), jnp.exp(to_own - top)
    total = jnp.sum(w_prompt, axis=-1) + jnp.sum(w_own, axis=-1)
    shared = w_prompt.transpose(0, 2, 1, 3, 4).reshape(e, j, k * g, -1)
    from_prompt = _weighted(shared, cache.prompt_values).reshape(e, j, k, g, d).transpose(0, 2, 1, 3, 4)
    out = (from_prompt + _weighted(w_own, cache.values)) / total[..., None]
    return out.reshape(e, k, h, d).astype(queries.dtype), cache
