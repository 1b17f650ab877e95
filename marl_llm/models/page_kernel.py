"""A decode step's attention over pages, as a Pallas kernel for TPUs: of the cache it reads each listed page once, and nothing else.

XLA's form (`_over_list` in `marl_llm.models.pages`) gathers a block of pages and multiplies what it gathered. Where that lies, and the
running sums, is the compiler's choice; in main memory they are read again for every block. Here the grid goes over the entries of a list,
for each key head: an entry's pages come to the chip while the one before is computed, and the sums of all rows stay there until the last
(paged attention, arXiv 2309.06180; the softmax of arXiv 2205.14135). An entry is a run of pages with the same readers, so that a row's sums
change once for all of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from marl_llm.models.attention import LANES, MASKED

NAME = "paged_attention"  # of the kernel in a compiled program
SPACE = 8 * 2**20  # bytes of the chip's memory for pages and scores, beside what grows with the rows
ROOM = 32 * 2**20  # bytes for that, at most: half of what a v5p has


def over_list(
    queries: Float[Array, "s J g d"],
    keys: Float[Array, "N J d T"],
    values: Float[Array, "N J T d"],
    page: Int[Array, "n M"],
    rows: Int[Array, "n G"],
    length: Int[Array, " n"],
    most: Int[Array, ""],
    interpret: bool = False,
) -> Float[Array, "J s g D"]:
    """What s rows see in the pages of a list (`PageList`, one part), in D = `LANES` + d numbers: the largest score in lane 0, the sum of
    weights in the other lanes, and behind them the weighted values. A row that is not in the list has `MASKED` and zeros.

    Args:
      queries: scaled; g of them share a key head. keys, values: all pages of a layer, T a multiple of `LANES`.
      page: a place without a page names again what the entry before had there: Pallas does not fetch it a second time.
      rows: a number that is no row reads nothing. length: tokens of an entry's pages. most: entries that are there.
      interpret: let Pallas compute it on any platform, slowly.
    """
    s, j, g, d = queries.shape
    run, group, t = page.shape[1], rows.shape[1], keys.shape[-1]

    def of_page(m: int, *block: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *block), lambda head, entry, page, *_: (page[entry * run + m], head, 0, 0))

    if not interpret:  # or the compiler may first bring all pages to the chip, where they have room
        keys, values = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (keys, values))
    sums = (s, g, LANES + d)
    return pl.pallas_call(
        functools.partial(_body, run=run, group=group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(j, jnp.maximum(most, 1)),
            in_specs=[
                pl.BlockSpec((None, s, g, d), lambda head, *_: (head, 0, 0, 0)),
                *(of_page(m, d, t) for m in range(run)),
                *(of_page(m, t, d) for m in range(run)),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.VMEM(sums, jnp.float32), pltpu.VMEM((group * g, d), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((j, *sums), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=SPACE + bytes_of_rows(s, g, d)
        ),
        name=NAME,
        interpret=interpret,
    )(page.reshape(-1), rows.reshape(-1), length, queries.astype(jnp.float32).swapaxes(0, 1), *[keys] * run, *[values] * run)


def _body(page, rows, length, q, *refs, run: int, group: int):
    keys, values, (out, sums, some) = refs[:run], refs[run : 2 * run], refs[2 * run :]
    head, entry = pl.program_id(0), pl.program_id(1)
    s, g, _ = q.shape
    lane = jax.lax.broadcasted_iota(jnp.int32, (g, LANES), 1)

    @pl.when(entry == 0)
    def _():
        sums[...] = jnp.where(jax.lax.broadcasted_iota(jnp.int32, sums.shape, 2) == 0, MASKED, 0.0)

    who = [rows[entry * group + k] for k in range(group)]
    for k, row in enumerate(who):
        some[k * g : (k + 1) * g] = q[jnp.minimum(row, s - 1)]
    queries = some[...].astype(keys[0].dtype)
    column = jax.lax.broadcasted_iota(jnp.int32, (group * g, keys[0].shape[-1]), 1)
    seen = [column + m * column.shape[1] < length[entry] for m in range(run)]
    scores = [jnp.where(there, _dot(queries, key[...]), MASKED) for there, key in zip(seen, keys, strict=True)]
    top = functools.reduce(jnp.maximum, [score.max(axis=1, keepdims=True) for score in scores])
    weights = [jnp.where(there, jnp.exp(score - top), 0.0) for there, score in zip(seen, scores, strict=True)]
    total = sum(weight.sum(axis=1, keepdims=True) for weight in weights)
    gathered = sum(_dot(weight.astype(value.dtype), value[...]) for weight, value in zip(weights, values, strict=True))
    for k, row in enumerate(who):

        @pl.when(row < s)
        def _(k=k, row=row):
            mine = slice(k * g, (k + 1) * g)
            before = sums[row, :, :LANES]
            most = jnp.maximum(before[:, :1], top[mine])
            old, new = jnp.exp(before[:, :1] - most), jnp.exp(top[mine] - most)
            sums[row, :, :LANES] = jnp.where(lane == 0, most, old * before + new * total[mine])
            sums[row, :, LANES:] = old * sums[row, :, LANES:] + new * gathered[mine]

    @pl.when(entry == pl.num_programs(1) - 1)
    def _():
        pltpu.sync_copy(sums, out.at[head])


def _dot(a, b):
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def bytes_of_rows(s: int, g: int, d: int) -> int:
    """What s rows take on the chip: their sums, and their queries twice, in whole vectors."""
    return s * -(-g // 8) * 8 * (LANES + 3 * -(-d // LANES) * LANES) * 4


def bytes_read(page: Int[np.ndarray, "n M"], most: int, s: int, heads: tuple[int, int, int], t: int, itemsize: int) -> int:
    """What a call reads of main memory: the pages that the entry before did not have at the same place, and the queries.

    heads: J, g and d of `over_list`. t: tokens of a page. itemsize: bytes of a number of its keys and values."""
    (j, g, d), entries = heads, page[: max(most, 1)]
    fetched = entries[:1].size + int((entries[1:] != entries[:-1]).sum())
    return j * (2 * fetched * d * t * itemsize + s * g * d * 4)
