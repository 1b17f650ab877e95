"""Who sees whom in a row of tokens, as a value that every attention kernel can read.

A row is `[prompt | response 1 | ... | response K]`: prompt tokens see earlier ones, a response's tokens see the prompt and their own
branch. A plain causal row is a prompt alone. Tokens of different `segments` never see each other: padding is segment 0, and a row that
packs several sequences numbers them. In a layer with a sliding window a token sees only the last positions of its own sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from marl_llm.models.config import ModelConfig

RULE = 8  # rows of an array of ranges, of which four are used: a TPU's sublanes


class Window(NamedTuple):
    """The sliding window of a layer (Longformer, arXiv 2004.05150; Mistral 7B, arXiv 2310.06825, section 2)."""

    size: Any  # int or Int[Array, ""]: tokens that a token sees, itself among them. Any, because tree transformations put other things here
    positions: Any  # Int[Array, "B L"]: of the queries, each in its own sequence


def in_window(query: ArrayLike, key: ArrayLike, size: ArrayLike) -> ArrayLike:
    """Whether a token at position `query` sees one at an earlier position `key`, or itself, through a window of `size` tokens.

    >>> [in_window(5, key, 3) for key in (2, 3, 5)]
    [False, True, True]
    """
    return key > query - size


@functools.partial(jax.tree_util.register_dataclass, data_fields=["segments", "branches", "window"], meta_fields=["prompt", "response"])
@dataclasses.dataclass(frozen=True)
class RowMask:
    """The mask of rows `[B, L]`, `L = prompt + K * response`."""

    segments: Any  # Int[Array, "B L"]; Any, because tree transformations put other things here
    prompt: int  # P; the whole row if there are no branches
    response: int  # R
    branches: Any = None  # Int[Array, "B L"], 0 for a prompt's tokens, which all branches of its segment see; None: as P and R say
    window: Window | None = None

    def sees(self, query, key):
        """Whether index `query` may see index `key`, segments, `branches` and window apart. Works on ints, NumPy and JAX arrays alike."""
        same = (query - self.prompt) // self.response == (key - self.prompt) // self.response
        return (key <= query) & ((key < self.prompt) | same)

    def numbers(self) -> Int[Array, "B L"]:
        """`branches`, or what they are as P and R say."""
        if self.branches is not None:
            return self.branches
        at = jnp.arange(self.segments.shape[1], dtype=jnp.int32)
        return jnp.broadcast_to(jnp.where(at < self.prompt, 0, 1 + (at - self.prompt) // self.response), self.segments.shape)

    def rows(self, start, size: int) -> Bool[Array, "B size L"]:
        """The dense mask of `size` queries from index `start`."""
        length = self.segments.shape[1]
        query = start + jnp.arange(size)

        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)[:, :, None]

        seen = self.sees(query[:, None], jnp.arange(length)[None])[None] & (cut(self.segments) == self.segments[:, None, :])
        if self.branches is not None:
            key = self.branches[:, None, :]
            seen &= (key == 0) | (key == cut(self.branches))
        if self.window is not None:
            seen &= in_window(cut(self.window.positions), self.window.positions[:, None, :], self.window.size)
        return seen

    def padded(self, more: int) -> RowMask:
        """The mask of rows with `more` tokens of padding behind them."""
        def wide(x):
            return jnp.pad(x, ((0, 0), (0, more)))

        branches = None if self.branches is None else wide(self.branches)
        window = None if self.window is None else self.window._replace(positions=wide(self.window.positions))
        return dataclasses.replace(self, segments=wide(self.segments), branches=branches, window=window)

    def dense(self) -> Bool[Array, "B L L"]:
        """The whole mask. For P = 2, K = 2, R = 2 without padding (1 = sees):

            prompt      1 . | . . | . .
                        1 1 | . . | . .
            response 1  1 1 | 1 . | . .
                        1 1 | 1 1 | . .
            response 2  1 1 | . . | 1 .
                        1 1 | . . | 1 1
        """
        return self.rows(0, self.segments.shape[1])


def token_ranges(
    segments: Int[Array, "B L"], branches: Int[Array, "B L"], windows: Int[Array, "B L"] | None = None
) -> Int[Array, "B 8 L"]:
    """A packed row as numbers, for kernels.

    Of each token i: `[:, 0]` where what it sees of its own sequence begins (it ends at i), `[:, 1]` and `[:, 2]` where its prompt begins
    and ends, if it lies in a response, and `[:, 3]` the first token behind all that see it. Padding sees itself. A prompt and each of
    its responses must be one run of tokens, the responses right behind the prompt, as `marl_llm.training.packing` lays them. `windows`:
    the size of each token's window; positions go up by one within a run, and from a prompt's last token to each of its responses.
    """
    b, length = segments.shape
    at = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (b, length))

    def changed(x):
        return jnp.concatenate([jnp.ones((b, 1), bool), x[:, 1:] != x[:, :-1]], axis=1)

    def since(begins):
        return jax.lax.cummax(jnp.where(begins, at, 0), axis=1)

    def until(begins):
        return jax.lax.cummin(jnp.where(jnp.roll(begins, -1, axis=1), at + 1, length), axis=1, reverse=True)

    new_segment = changed(segments)
    new_run = new_segment | changed(branches)
    before = jnp.concatenate([jnp.zeros((b, 1), branches.dtype), branches[:, :-1]], axis=1)
    first_response = new_run & (branches != 0) & (new_segment | (before == 0))
    real, response = segments != 0, (segments != 0) & (branches != 0)
    own, begin, end = since(new_run), since(new_segment), since(first_response)
    seen = jnp.where(response, until(new_run), until(new_segment))
    if windows is not None:
        begin = jnp.clip(end + at - own - windows + 1, begin, end)
        own = jnp.maximum(own, at - windows + 1)
        seen = jnp.where(at + windows <= until(new_run), at + windows, seen)
    own, seen = jnp.where(real, own, at), jnp.where(real, seen, at + 1)
    rule = [own, jnp.where(response, begin, 0), jnp.where(response, end, 0), seen]
    return jnp.stack(rule + [jnp.zeros_like(own)] * (RULE - len(rule)), axis=1)


def tree_ranges(prompt: int, branches: int, response: int, block: int) -> Int[Array, "1 8 L"]:
    """`token_ranges` of a row of a prompt and its responses, whose end lies at a multiple of `block`."""
    row = RowMask(jnp.ones((1, prompt + branches * response), jnp.int32), prompt, response)

    def wide(x):
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)))

    return jax.jit(token_ranges)(wide(row.segments), wide(row.numbers()))


def outside_vocabulary(
    config: ModelConfig, name: str, tokens: Int[ArrayLike, "*s"], where: Bool[ArrayLike, "*s"] | None = None
) -> Bool[ArrayLike, "*s"]:
    """True at real tokens that are no id of the vocabulary, whose scores are defined as NaN: an embedding's look-up would clamp them, and
    give plausible numbers. Raises `ValueError` naming `name` if there are any and the tokens are not traced."""
    outside = (tokens < 0) | (tokens >= config.vocab_size)
    outside = outside if where is None else outside & where
    if not isinstance(outside, jax.core.Tracer) and bool(outside.any()):
        bad = jnp.asarray(tokens)[jnp.asarray(outside)]
        raise ValueError(f"{name} holds ids from {int(bad.min())} to {int(bad.max())}; the vocabulary is 0 to {config.vocab_size - 1}")
    return outside


def prompt_positions(where: Bool[Array, "B P"]) -> Int[Array, "B P"]:
    """Position of each prompt token among the real ones; padding gets 0."""
    return jnp.maximum(jnp.cumsum(where, axis=-1) - 1, 0)


def prompt_mask(where: Bool[Array, "B P"]) -> RowMask:
    """Causal rows; padding, on either side, is where `where` is False."""
    return RowMask(where.astype(jnp.int32), where.shape[-1], 1)


def packed_mask(segments: Int[Array, "B L"], branches: Int[Array, "B L"]) -> RowMask:
    """Rows that each pack their own sequences and trees: `segments` numbers them (0: padding), `branches` their responses (0: prompt)."""
    return RowMask(segments, segments.shape[1], 1, branches)


def tree_mask(prompt_where: Bool[Array, "B P"], branches: int, response_length: int) -> RowMask:
    """Rows of a prompt, padded on the left, and `branches` responses of `response_length` tokens."""
    b, p = prompt_where.shape
    responses = jnp.ones((b, branches * response_length), jnp.int32)
    return RowMask(jnp.concatenate([prompt_where.astype(jnp.int32), responses], axis=1), p, response_length)
