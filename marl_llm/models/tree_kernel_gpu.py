"""Flash attention of packed trees, as Pallas kernels for GPUs (Triton): who sees whom is data.

What a token sees is at most two ranges of tokens (`masks.token_ranges`), so a block of queries sees two ranges of blocks of keys, of its
prompts and of its own sequences, and a block of keys is seen by one range of blocks of queries, for responses lie right behind their
prompt. Each program goes over such ranges alone: other blocks are neither read nor computed, and no mask lies in memory. The softmax is the
running one of FlashAttention (Dao 2023, FlashAttention-2). The backward pass has a kernel for the queries and one for keys and values, so
scores are computed twice; one kernel for both would add up the gradients of queries in any order, and a run would not repeat byte for byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from marl_llm.models.masks import RULE, tree_ranges

MASKED = -1e30  # finite; a query sees itself, so that its real maximum wipes out what a block in which it sees nobody left
LOG2E = math.log2(math.e)
QUERIES, KEYS = 128, 64  # tokens of a block of queries and of keys; the former are whole blocks of the latter
FORWARD, OF_QUERIES, OF_KEYS = "tree_attention_forward", "tree_attention_of_queries", "tree_attention_of_keys"
PRODUCTS = {FORWARD: 2, OF_QUERIES: 3, OF_KEYS: 4}  # matrix products of a pair of blocks


def key_blocks(ranges: Int[Array, "B 8 L"]) -> Int[Array, "B n 4"]:
    """Of each block of queries: the first block of keys of the prompts that it sees, how many those are, the first one that it sees of its
    own sequences, and how many up to its end. A block of several sequences may count blocks between them that it does not see."""
    b, _, length = ranges.shape
    own, begin, end = ranges[:, :3].reshape(b, 3, length // QUERIES, QUERIES).swapaxes(0, 1)
    seen = end > begin
    mine = own.min(axis=-1) // KEYS
    first = jnp.where(seen, begin, length).min(axis=-1) // KEYS
    behind = jnp.minimum(-(-jnp.where(seen, end, 0).max(axis=-1) // KEYS), mine)  # what lies in both ranges is the second's
    last = (jnp.arange(length // QUERIES) + 1) * (QUERIES // KEYS)
    return jnp.stack([first, jnp.maximum(behind - first, 0), mine, last - mine], axis=-1)


def query_blocks(ranges: Int[Array, "B 8 L"]) -> Int[Array, "B m 2"]:
    """Of each block of keys: the first block of queries that sees it, and how many do."""
    b, _, length = ranges.shape
    behind = -(-ranges[:, 3].reshape(b, length // KEYS, KEYS).max(axis=-1) // QUERIES)
    first = jnp.broadcast_to(jnp.arange(length // KEYS) // (QUERIES // KEYS), behind.shape)
    return jnp.stack([first, behind - first], axis=-1)


def kernel_flops(prompt: int, branches: int, response: int, group: int) -> dict[str, Callable[[tuple[int, ...]], int]]:
    """What each kernel computes for rows of a prompt and its responses, as a function of its first result's shape: [B, J, G, L, d], or
    [B, J, L, d] of `OF_KEYS`, for whose keys `group` = G queries are gone over. Two FLOPs per multiply-add of all that is computed, whoever
    is masked in it."""
    ranges = tree_ranges(prompt, branches, response, QUERIES)
    of_queries, of_keys = int(jax.jit(key_blocks)(ranges)[..., 1::2].sum()), int(jax.jit(query_blocks)(ranges)[..., 1].sum())
    pairs = {FORWARD: of_queries, OF_QUERIES: of_queries, OF_KEYS: group * of_keys}
    return {name: lambda s, n=n * pairs[name]: 2 * n * QUERIES * KEYS * math.prod(s[:-2]) * s[-1] for name, n in PRODUCTS.items()}


def block_size(length: int) -> int:
    """Tokens in multiples of which rows of `length` come."""
    return QUERIES


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(
    queries: Float[Array, "B J G L d"],
    keys: Float[Array, "B J L d"],
    values: Float[Array, "B J L d"],
    ranges: Int[Array, "B 8 L"],
    interpret: bool,
) -> Float[Array, "B J G L d"]:
    """What `marl_llm.models.attention.tree_attention` calls. d: a power of two from 16 on."""
    return _forward(queries, keys, values, ranges, interpret)[0]


def _attention_forward(queries, keys, values, ranges, interpret):
    out, sums = _forward(queries, keys, values, ranges, interpret)
    return out, (queries, keys, values, ranges, out, sums)


def _attention_backward(interpret, residuals, slope):
    queries, keys, values, ranges, out, sums = residuals
    mean = jnp.einsum("bjgld,bjgld->bjgl", out.astype(jnp.float32), slope.astype(jnp.float32))
    inputs = ("queries", queries), ("keys", keys), ("keys", values), ("ranges", ranges), ("queries", slope), ("sums", sums), ("sums", mean)

    def like(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    (dq,) = _call(OF_QUERIES, _of_queries, queries.shape, QUERIES, key_blocks(ranges), inputs, [("queries", like(queries))], interpret)
    outputs = [("keys", like(keys)), ("keys", like(values))]
    dk, dv = _call(OF_KEYS, _of_keys, queries.shape, KEYS, query_blocks(ranges), inputs, outputs, interpret)
    return dq, dk, dv, None


attention.defvjp(_attention_forward, _attention_backward)


# ---------------------------------------------------------------------------------------------------- the kernels
def _dot(a, b):
    """float32 [m, n] of [m, k] and [k, n]; of float32 without rounding."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision="highest" if a.dtype == jnp.float32 else None)


def _seen(own, begin, end, query, key):
    """Who of the keys is seen, for the three ranges of the queries; all broadcast against each other."""
    return ((key <= query) & (key >= own)) | ((key >= begin) & (key < end))


def _key_block(steps, number):
    """The number-th block of keys that a block of queries goes over."""
    return jnp.where(number < steps[1], steps[0] + number, steps[2] + number - steps[1]) * KEYS


def _forward_body(q, k, v, ranges, steps, out, sums):
    query, own, begin, end = q[...], *(ranges[i, :][:, None] for i in range(3))
    here = pl.program_id(0) * QUERIES + jnp.arange(QUERIES)[:, None]

    def step(number, carry):
        gathered, top, total = carry
        at = _key_block(steps, number)
        part = pl.ds(at, KEYS)
        value = v[part, :]
        score = jnp.where(_seen(own, begin, end, here, at + jnp.arange(KEYS)[None]), _dot(query, k[part, :].T) * LOG2E, MASKED)
        most = jnp.maximum(top, score.max(axis=1))
        weight, old = jnp.exp2(score - most[:, None]), jnp.exp2(top - most)
        gathered = old[:, None] * gathered + _dot(weight.astype(value.dtype), value)
        return gathered, most, old * total + weight.sum(axis=1)

    nothing = jnp.zeros(query.shape, jnp.float32), jnp.full(QUERIES, MASKED, jnp.float32), jnp.zeros(QUERIES, jnp.float32)
    gathered, top, total = jax.lax.fori_loop(0, steps[1] + steps[3], step, nothing)
    out[...] = (gathered / total[:, None]).astype(out.dtype)
    sums[...] = top + jnp.log2(total)


def _of_queries(q, k, v, ranges, slope, sums, mean, steps, dq):
    query, up, total, middle = q[...], slope[...], sums[...][:, None], mean[...][:, None]
    own, begin, end = (ranges[i, :][:, None] for i in range(3))
    here = pl.program_id(0) * QUERIES + jnp.arange(QUERIES)[:, None]

    def step(number, gathered):
        at = _key_block(steps, number)
        part = pl.ds(at, KEYS)
        key = k[part, :]
        seen = _seen(own, begin, end, here, at + jnp.arange(KEYS)[None])
        weight = jnp.where(seen, jnp.exp2(_dot(query, key.T) * LOG2E - total), 0.0)
        turned = (weight * (_dot(up, v[part, :].T) - middle)).astype(key.dtype)
        return gathered + _dot(turned, key)

    dq[...] = jax.lax.fori_loop(0, steps[1] + steps[3], step, jnp.zeros(query.shape, jnp.float32)).astype(dq.dtype)


def _of_keys(q, k, v, ranges, slope, sums, mean, steps, dk, dv):
    """Queries lie along the second axis of scores here, in blocks of `KEYS`."""
    key, value = k[...], v[...]
    here = pl.program_id(0) * KEYS + jnp.arange(KEYS)[:, None]
    blocks = steps[1] * (QUERIES // KEYS)

    def step(number, carry):
        head, at = jax.lax.div(number, blocks), steps[0] * QUERIES + jax.lax.rem(number, blocks) * KEYS
        part = pl.ds(at, KEYS)
        query, up = q[head, part, :], slope[head, part, :]
        own, begin, end = (ranges[i, part][None] for i in range(3))
        seen = _seen(own, begin, end, at + jnp.arange(KEYS)[None], here)
        weight = jnp.where(seen, jnp.exp2(_dot(key, query.T) * LOG2E - sums[head, part][None]), 0.0)
        turned = (weight * (_dot(value, up.T) - mean[head, part][None])).astype(query.dtype)
        return carry[0] + _dot(turned, query), carry[1] + _dot(weight.astype(up.dtype), up)

    zeros = jnp.zeros(key.shape, jnp.float32)
    sums_of_keys = jax.lax.fori_loop(0, q.shape[0] * blocks, step, (zeros, zeros))
    dk[...], dv[...] = (x.astype(dk.dtype) for x in sums_of_keys)


def _specs(shape, size: int) -> dict[str, pl.BlockSpec]:
    """What of each array a program sees, by what it is, for blocks of queries or of keys: its own block, and of the other kind all."""
    _, _, group, length, d = shape
    if size == QUERIES:  # the grid: block of queries, query head, row
        def head(h):
            return jax.lax.div(h, group)

        def of_query(i, h, b):
            return (b, head(h), jax.lax.rem(h, group), i)

        return {
            "queries": pl.BlockSpec((None, None, None, QUERIES, d), lambda i, h, b: (*of_query(i, h, b), 0)),
            "sums": pl.BlockSpec((None, None, None, QUERIES), of_query),
            "keys": pl.BlockSpec((None, None, length, d), lambda i, h, b: (b, head(h), 0, 0)),
            "ranges": pl.BlockSpec((None, RULE, QUERIES), lambda i, h, b: (b, 0, i)),
        }
    return {
        "queries": pl.BlockSpec((None, None, group, length, d), lambda i, j, b: (b, j, 0, 0, 0)),
        "sums": pl.BlockSpec((None, None, group, length), lambda i, j, b: (b, j, 0, 0)),
        "keys": pl.BlockSpec((None, None, KEYS, d), lambda i, j, b: (b, j, i, 0)),
        "ranges": pl.BlockSpec((None, RULE, length), lambda i, j, b: (b, 0, 0)),
    }


def _call(name: str, body, shape, size: int, steps, inputs, outputs, interpret: bool):
    """A kernel with a program for each block of `size` tokens, head and row. `inputs`: (kind, array); `outputs`: (kind, what it is)."""
    b, j, group, length, d = shape
    specs = _specs(shape, size)
    return pl.pallas_call(
        body,
        grid=(length // size, j * group if size == QUERIES else j, b),
        in_specs=[*(specs[kind] for kind, _ in inputs), pl.BlockSpec((None, None, steps.shape[-1]), lambda i, h, b: (b, i, 0))],
        out_specs=[specs[kind] for kind, _ in outputs],
        out_shape=[s for _, s in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        name=name,
        interpret=interpret,
    )(*(x for _, x in inputs), steps)


def _forward(queries, keys, values, ranges, interpret):
    inputs = [("queries", queries), ("keys", keys), ("keys", values), ("ranges", ranges)]
    sums = jax.ShapeDtypeStruct(queries.shape[:-1], jnp.float32)
    outputs = [("queries", jax.ShapeDtypeStruct(queries.shape, queries.dtype)), ("sums", sums)]
    return _call(FORWARD, _forward_body, queries.shape, QUERIES, key_blocks(ranges), inputs, outputs, interpret)
