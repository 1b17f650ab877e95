"""A decode step's attention over pages, as a Pallas kernel for TPUs: of the cache it reads each listed page once, and nothing else.

XLA's form (`_over_list` in `marl_llm.models.pages`) gathers a block of pages and multiplies what it gathered. Where that lies, and the
running sums, is the compiler's choice; in main memory they are read again for every block. Here the grid goes over the entries of the
lists: an entry's pages come to the chip while the one before is computed, and the sums of all rows stay there until the last (paged
attention, arXiv 2309.06180; the softmax of arXiv 2205.14135). An entry is a run of pages with the same readers, so that a row's sums change
once for all of them. A chip of two cores computes half of the heads on each.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from marl_llm.models.attention import LANES, MASKED

NAME = "paged_attention"  # of the kernel in a compiled program
SPACE = 4 * 2**20  # bytes of the chip's memory for scores, beside `bytes_on_chip`
ROOM = 40 * 2**20  # of those, at most: with SPACE two thirds of what a v5p has
NUMBERS = 15 * 2**16  # bytes of lists, at most: of a chip's 2^20 for scalars


def over_lists(
    queries: Float[Array, "s J g d"],
    keys: Float[Array, "N J d T"],
    values: Float[Array, "N J T d"],
    lists: Sequence[tuple[Int[Array, "_ _"], Int[Array, "_ _"], Int[Array, " _"], Int[Array, ""]]],
    interpret: bool = False,
) -> Float[Array, "J s g D"]:
    """What s rows see in the pages of lists, in D = `LANES` + d numbers: the largest score in lane 0, the sum of weights in the other
    lanes, and behind them the weighted values. A row that is in no list has `MASKED` and zeros.

    Args:
      queries: scaled; g of them share a key head. keys, values: all pages of a layer, T a multiple of `LANES`.
      lists: of each (page [n, M], rows [n, G], length [n], most) as in `PageList`, of one part; n, M and G may differ.
      interpret: let Pallas compute it on any platform, slowly.
    """
    s, j, g, d = queries.shape
    run, group, t = max(page.shape[1] for page, *_ in lists), max(rows.shape[1] for _, rows, *_ in lists), keys.shape[-1]
    begins = tuple(itertools.accumulate((length.shape[0] for *_, length, _ in lists), initial=0))
    most = jnp.stack([most for *_, most in lists])
    page = jnp.concatenate([jnp.pad(page, ((0, 0), (0, run - page.shape[1]))) for page, *_ in lists])
    rows = jnp.concatenate([jnp.pad(rows, ((0, 0), (0, group - rows.shape[1])), constant_values=s) for _, rows, *_ in lists])
    length = jnp.concatenate([length for *_, length, _ in lists])
    heads = _heads(j)
    far, sums = pl.BlockSpec(memory_space=pltpu.HBM), (heads, s, g, LANES + d)
    if not interpret:  # or the compiler first brings all pages to the chip, where they have room
        keys, values = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (keys, values))
    return pl.pallas_call(
        functools.partial(_body, run=run, group=group, begins=begins[:-1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(j // heads, jnp.maximum(most.sum(), 1)),
            in_specs=[pl.BlockSpec((heads, s, g, d), lambda part, *_: (part, 0, 0, 0)), far, far],
            out_specs=far,
            scratch_shapes=[
                pltpu.VMEM(sums, jnp.float32),
                pltpu.VMEM((heads, group * g, d), jnp.float32),
                pltpu.VMEM((2, run, heads, d, t), keys.dtype),
                pltpu.VMEM((2, run, heads, t, d), values.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((j, *sums[1:]), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=SPACE + bytes_on_chip(s, (j, g, d), run * t, keys.dtype.itemsize),
        ),
        name=NAME,
        interpret=interpret,
    )(most, page.reshape(-1), rows.reshape(-1), length, queries.astype(jnp.float32).swapaxes(0, 1), keys, values)


def _body(
    most, page, rows, length, q, keys, values, out, sums, some, near_keys, near_values, arrived, *, run: int, group: int,
    begins: tuple[int, ...],
):  # fmt: skip
    part, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    heads, s, g, _ = q.shape
    t, here, slot = keys.shape[-1], pl.ds(part * heads, heads), jax.lax.rem(step, 2)

    def entry_of(step):
        """The lists' entries that are there, one list behind the other."""
        entry, passed = step, 0
        for i, begin in enumerate(begins[1:]):
            passed = passed + most[i]
            entry = jnp.where(step >= passed, begin + step - passed, entry)
        return entry

    def copies(step, slot, do):
        """Of an entry's pages, as many as it has."""
        entry = entry_of(step)
        for m in range(run):

            @pl.when(m * t < length[entry])
            def _(m=m):
                for far, near in ((keys, near_keys), (values, near_values)):
                    do(pltpu.make_async_copy(far.at[page[entry * run + m], here], near.at[slot, m], arrived.at[slot]))

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, sums.shape, 3) == 0, MASKED, 0.0)
        near_values[...] = jnp.zeros_like(near_values)  # where no page comes, weights are 0, and must not meet what is no number
        copies(0, 0, lambda copy: copy.start())

    @pl.when(step + 1 < steps)
    def _():
        copies(step + 1, 1 - slot, lambda copy: copy.start())

    copies(step, slot, lambda copy: copy.wait())
    entry = entry_of(step)
    who = [rows[entry * group + k] for k in range(group)]
    for head in range(heads):
        _weigh(head, who, length[entry], q, near_keys.at[slot], near_values.at[slot], sums, some, run)

    @pl.when(step == steps - 1)
    def _():
        pltpu.sync_copy(sums, out.at[here])


def _weigh(head: int, who, length, q, keys, values, sums, some, run: int):
    """Adds what the rows of an entry see in its pages to their sums of a head."""
    _, s, g, _ = q.shape
    for k, row in enumerate(who):
        some[head, k * g : (k + 1) * g] = q[head, jnp.minimum(row, s - 1)]
    queries = some[head].astype(keys.dtype)
    column = jax.lax.broadcasted_iota(jnp.int32, (len(who) * g, keys.shape[-1]), 1)
    seen = [column + m * column.shape[1] < length for m in range(run)]
    scores = [jnp.where(there, _dot(queries, keys[m, head]), MASKED) for m, there in enumerate(seen)]
    top = functools.reduce(jnp.maximum, [score.max(axis=1, keepdims=True) for score in scores])
    weights = [jnp.where(there, jnp.exp(score - top), 0.0) for there, score in zip(seen, scores, strict=True)]
    total = sum(weight.sum(axis=1, keepdims=True) for weight in weights)
    gathered = sum(_dot(weight.astype(values.dtype), values[m, head]) for m, weight in enumerate(weights))
    lane = jax.lax.broadcasted_iota(jnp.int32, (g, LANES), 1)
    for k, row in enumerate(who):

        @pl.when(row < s)
        def _(k=k, row=row):
            mine = slice(k * g, (k + 1) * g)
            before = sums[head, row, :, :LANES]
            most = jnp.maximum(before[:, :1], top[mine])
            old, new = jnp.exp(before[:, :1] - most), jnp.exp(top[mine] - most)
            sums[head, row, :, :LANES] = jnp.where(lane == 0, most, old * before + new * total[mine])
            sums[head, row, :, LANES:] = old * sums[head, row, :, LANES:] + new * gathered[mine]


def _dot(a, b):
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _heads(j: int) -> int:
    """Key heads of a step of the grid: half of them, for chips of two cores, where that is a whole number."""
    return j // 2 if j % 2 == 0 else j


def bytes_on_chip(s: int, heads: tuple[int, int, int], tokens: int, itemsize: int) -> int:
    """What a step of s rows takes on the chip, in whole vectors: their sums, their queries twice, and two entries of so many tokens.

    heads: J, g and d of `over_lists`. itemsize: bytes of a number of keys and values."""
    j, g, d = heads
    wide = -(-d // LANES) * LANES
    return _heads(j) * (s * -(-g // 8) * 8 * (LANES + 3 * wide) * 4 + 4 * tokens * wide * itemsize)


def fits(s: int, heads: tuple[int, int, int], t: int, itemsize: int, lists: Sequence[tuple]) -> bool:
    """Whether a step of s rows has room on the chip; `lists` as in `over_lists`, `heads` and `itemsize` as in `bytes_on_chip`. t: tokens of
    a page."""
    run, group = (max(x[i].shape[-1] for x in lists) for i in range(2))
    entries = sum(page.shape[-2] for page, *_ in lists)
    return bytes_on_chip(s, heads, run * t, itemsize) <= ROOM and 4 * entries * (run + group + 1) <= NUMBERS


def bytes_read(length: Int[np.ndarray, " n"], s: int, heads: tuple[int, int, int], t: int, itemsize: int) -> int:
    """What a call reads of main memory: the pages of all entries, and the queries; see `bytes_on_chip`. t: tokens of a page."""
    j, g, d = heads
    return j * (2 * int((-(-length // t)).sum()) * d * t * itemsize + s * g * d * 4)
