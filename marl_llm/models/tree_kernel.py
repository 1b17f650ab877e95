"""Flash attention of packed trees, as a Pallas kernel for TPUs: who sees whom is data.

In a packed row (`RowMask.branches`) a token sees at most two ranges of tokens: of its own prompt or response what lies before it, and, if
it is a response's, its whole prompt. So a row is described by three numbers per token (`token_ranges`), and its work is the list of pairs
(block of queries, block of keys) in which anybody sees anybody (`block_pairs`). The grid runs over this list alone, as long as the data
make it: other blocks are neither read nor computed. The softmax is the running one of FlashAttention (Dao et al. 2022), and the backward
pass goes over the same list once, with the gradients of all keys and values of a head in the chip's memory.

Scores lie transposed, keys by queries, so that what belongs to a query (maximum, sum, ranges) is a row along the lanes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from marl_llm.models.masks import RULE, tree_ranges

MASKED = -1e30  # finite; a query sees itself, so that its real maximum wipes out what a block in which it sees nobody left
FORWARD, BACKWARD = "tree_attention_forward", "tree_attention_backward"  # how the kernels are called in a compiled program
PRODUCTS = {FORWARD: 2, BACKWARD: 5}  # matrix products of a pair of blocks: scores, values; scores, and the gradients of 4 matrices
_BOTH, _LEFT, _FIRST = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))


class Pairs(NamedTuple):
    """The live pairs of B rows, ordered by block of queries; behind `count` the last one is repeated."""

    query: Int[Array, "B M"]
    key: Int[Array, "B M"]
    count: Int[Array, " B"]


def block_size(length: int) -> int:
    """Tokens of a block for rows of `length`, which are padded to a multiple of it; the same for a length that is such a multiple."""
    return 512 if length > 1792 else 256 if length > 384 else 128


def block_pairs(ranges: Int[Array, "B 8 L"], block: int) -> Pairs:
    """The pairs of blocks of `block` tokens in which a query's ranges meet a key; L is a multiple of `block`."""
    b, _, length = ranges.shape
    n = length // block
    low = (jnp.arange(n) * block)[:, None]  # [keys, 1]
    own, begin, end = (ranges[:, i, None, :] for i in range(3))
    at = jnp.arange(length)
    meets = ((own < low + block) & (at >= low)) | ((begin < low + block) & (end > low) & (end > begin))  # [B, keys, L]
    live = meets.reshape(b, n, n, block).any(axis=-1).swapaxes(1, 2).reshape(b, n * n)  # by query block, then key block
    so_far = jnp.cumsum(live, axis=1, dtype=jnp.int32)
    count = so_far[:, -1]
    number = jnp.minimum(jnp.arange(n * (n + 1) // 2), count[:, None] - 1)  # nobody sees what lies behind
    where = (so_far[:, None, :] <= number[:, :, None]).sum(axis=2, dtype=jnp.int32)  # the number-th live one lies behind so many
    return Pairs(where // n, where % n, count)


def kernel_flops(prompt: int, branches: int, response: int) -> dict[str, Callable[[tuple[int, ...]], int]]:
    """What each kernel computes for rows of a prompt and its responses, as a function of its queries' shape [B, J, G, L, d]: two FLOPs per
    multiply-add of all live pairs of blocks, whoever is masked in them."""
    block = block_size(prompt + branches * response)
    pairs = int(jax.jit(block_pairs, static_argnums=1)(tree_ranges(prompt, branches, response, block), block).count[0])
    return {name: lambda s, n=n: 2 * n * pairs * block**2 * math.prod(s[:3]) * s[-1] for name, n in PRODUCTS.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(
    queries: Float[Array, "B J G L d"],
    keys: Float[Array, "B J L d"],
    values: Float[Array, "B J L d"],
    ranges: Int[Array, "B 8 L"],
    interpret: bool,
) -> Float[Array, "B J G L d"]:
    """What `marl_llm.models.attention.tree_attention` calls. d: a multiple of 128."""
    return _attention_forward(queries, keys, values, ranges, interpret)[0]


def _attention_forward(queries, keys, values, ranges, interpret):
    block = block_size(queries.shape[3])
    pairs = block_pairs(ranges, block)
    out, sums = _forward(queries, keys, values, ranges, pairs, block, interpret)
    return out, (queries, keys, values, ranges, pairs, out, sums)


def _attention_backward(interpret, kept, slope):
    queries, keys, values, ranges, pairs, out, sums = kept
    mean = jnp.einsum("bjgld,bjgld->bjgl", out.astype(jnp.float32), slope.astype(jnp.float32))
    dq, dk, dv = _backward(queries, keys, values, ranges, pairs, slope, sums, mean, block_size(queries.shape[3]), interpret)
    return dq, dk.astype(keys.dtype), dv.astype(values.dtype), None


attention.defvjp(_attention_forward, _attention_backward)


# ---------------------------------------------------------------------------------------------------- the kernels
def _step(query_block, key_block, count):
    """(block of queries, block of keys, whether the pair is real, whether it opens and closes its block of queries) in a kernel's body."""
    b, t = pl.program_id(0), pl.program_id(2)
    n, here = count[b], query_block[b, t]
    first = (t == 0) | (query_block[b, jnp.maximum(t - 1, 0)] != here)
    last = (t == n - 1) | (query_block[b, jnp.minimum(t + 1, n - 1)] != here)
    real = t < n
    return here, key_block[b, t], real, real & first, real & last


def _seen(ranges, query_block, key_block, block: int):
    """Keys by queries of a pair of blocks: who is seen."""
    key = key_block * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 0)
    query = query_block * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 1)
    own, begin, end = ranges[0:1, :], ranges[1:2, :], ranges[2:3, :]
    return ((key <= query) & (key >= own)) | ((key >= begin) & (key < end))


def _dot(a, b, over):
    return jax.lax.dot_general(a, b, over, preferred_element_type=jnp.float32)


def _forward_body(query_block, key_block, count, q, k, v, ranges, out, sums, top, total, gathered, *, group: int, block: int):
    here, at, real, first, last = _step(query_block, key_block, count)

    @pl.when(first)
    def _():
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        gathered[...] = jnp.zeros_like(gathered)

    @pl.when(real)
    def _():
        seen, key, value = _seen(ranges, here, at, block), k[...], v[...]
        for g in range(group):
            score = jnp.where(seen, _dot(key, q[g], _BOTH), MASKED)
            most = jnp.maximum(top[g], score.max(axis=0, keepdims=True))
            weight, old = jnp.exp(score - most), jnp.exp(top[g] - most)
            total[g] = old * total[g] + weight.sum(axis=0, keepdims=True)
            gathered[g] = old * gathered[g] + _dot(value, weight.astype(value.dtype), _FIRST)
            top[g] = most

    @pl.when(last)
    def _():
        for g in range(group):
            out[g] = (gathered[g] / total[g]).T.astype(out.dtype)
            sums[g] = (top[g] + jnp.log(total[g]))[0]


def _backward_body(
    query_block, key_block, count, q, k, v, ranges, slope, sums, mean, dq, dk_out, dv_out, gathered, dk, dv, *, group: int, block: int
):
    here, at, real, first, last = _step(query_block, key_block, count)
    begins, ends = pl.program_id(2) == 0, pl.program_id(2) == pl.num_programs(2) - 1
    row, head = pl.program_id(0), pl.program_id(1)

    @pl.when(begins)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    @pl.when(first)
    def _():
        gathered[...] = jnp.zeros_like(gathered)

    @pl.when(real)
    def _():
        seen, key, value = _seen(ranges, here, at, block), k[...], v[...]
        part = pl.ds(at * block, block)
        for g in range(group):
            query, up = q[g], slope[g]
            weight = jnp.where(seen, jnp.exp(_dot(key, query, _BOTH) - sums[g : g + 1, :]), 0.0)
            dv[part, :] += _dot(weight.astype(up.dtype), up, _LEFT)
            turned = (weight * (_dot(value, up, _BOTH) - mean[g : g + 1, :])).astype(query.dtype)
            dk[part, :] += _dot(turned, query, _LEFT)
            gathered[g] += _dot(key, turned, _FIRST)

    @pl.when(last)
    def _():
        for g in range(group):
            dq[g] = gathered[g].T.astype(dq.dtype)

    @pl.when(ends)
    def _():
        pltpu.sync_copy(dk, dk_out.at[row, head])
        pltpu.sync_copy(dv, dv_out.at[row, head])


def _specs(shape, block: int) -> dict[str, pl.BlockSpec]:
    """Where each array's block of a step lies, by what it is; behind the grid's place come the lists of pairs."""
    *_, group, _, d = shape
    return {
        "query": pl.BlockSpec((None, None, group, block, d), lambda b, j, t, q, k, n: (b, j, 0, q[b, t], 0)),
        "key": pl.BlockSpec((None, None, block, d), lambda b, j, t, q, k, n: (b, j, k[b, t], 0)),
        "range": pl.BlockSpec((None, RULE, block), lambda b, j, t, q, k, n: (b, 0, q[b, t])),
        "sum": pl.BlockSpec((None, None, group, block), lambda b, j, t, q, k, n: (b, j, 0, q[b, t])),
        "all keys": pl.BlockSpec(memory_space=pl.ANY),
    }


def _call(name: str, body, shape, block: int, pairs: Pairs, inputs, outputs, scratch, memory: int, interpret: bool):
    """A kernel over the live pairs of each row and key head. `inputs`: (kind, array); `outputs`: (kind, shape and dtype)."""
    specs = _specs(shape, block)
    grid = (shape[0], shape[1], pairs.count.max())
    return pl.pallas_call(
        functools.partial(body, group=shape[2], block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[specs[kind] for kind, _ in inputs],
            out_specs=[specs[kind] for kind, _ in outputs],
            scratch_shapes=[pltpu.VMEM(s, jnp.float32) for s in scratch],
        ),
        out_shape=[s for _, s in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=memory
        ),
        name=name,
        interpret=interpret,
    )(*pairs, *(x for _, x in inputs))


def _forward(queries, keys, values, ranges, pairs, block, interpret):
    b, j, group, length, d = queries.shape
    return _call(
        FORWARD, _forward_body, queries.shape, block, pairs,
        [("query", queries), ("key", keys), ("key", values), ("range", ranges)],
        [("query", jax.ShapeDtypeStruct(queries.shape, queries.dtype)), ("sum", jax.ShapeDtypeStruct((b, j, group, length), jnp.float32))],
        [(group, 1, block), (group, 1, block), (group, d, block)], 32 * 2**20, interpret,
    )  # fmt: skip


def _backward(queries, keys, values, ranges, pairs, slope, sums, mean, block, interpret):
    group, length, d = queries.shape[2:]
    wide = jax.ShapeDtypeStruct(keys.shape, jnp.float32)
    return _call(
        BACKWARD, _backward_body, queries.shape, block, pairs,
        [("query", queries), ("key", keys), ("key", values), ("range", ranges), ("query", slope), ("sum", sums), ("sum", mean)],
        [("query", jax.ShapeDtypeStruct(queries.shape, queries.dtype)), ("all keys", wide), ("all keys", wide)],
        [(group, d, block), (length, d), (length, d)], 16 * 2**20 + 2 * length * d * 4, interpret,
    )  # fmt: skip
