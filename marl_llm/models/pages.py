"""Attention over keys and values that lie in pages: a decode step, and new tokens behind an old beginning.

A page holds T tokens of one sequence, keys as `[J, d, T]` and values as `[J, T, d]`, and may belong to several sequences. All pages of a
layer are one array, in A parts, one per device that rows are split over; those of stacked layers lie in one array, layer after layer. A
decode step goes through a list of (page, rows) pairs, a block of pages at a time with an online softmax: its cost follows the tokens that
are there, no shape follows a length, and what is gathered at a time is one block (PagedAttention, arXiv 2309.06180; the softmax of arXiv
2205.14135).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from marl_llm.models.attention import LANES, MASKED, platform
from marl_llm.models.cache import FEW_QUERIES, DecodeMask, to_cache
from marl_llm.models.masks import RowMask, Window, in_window
from marl_llm.models.sharding import per_device, ways

# tokens of pages that are gathered at a time, 2,048 elsewhere: about what a cache holds. On a GPU each time starts some ten kernels
BLOCK = {"cpu": 512, "gpu": 8192}
TABLE_BLOCK = 64  # tokens of each row that a decode step of the exact engine gathers at a time
FEW_TOKENS = 16  # new tokens of a row below which a CPU gathers its beginning in such blocks too
GROUP = 8  # rows that read shared pages together
ENTRY = {1: 64, GROUP: 128}  # tokens of a list's entry, by its rows: larger products, and up to half an entry that is computed for nothing
KERNEL_ENTRY = 1024  # the same of a TPU, whose kernel changes a row's sums once for all of them


def block_pages(page: int) -> int:
    """Pages that are gathered at a time, a power of two: see `BLOCK`."""
    return 1 << max(1, BLOCK.get(platform(), 2048) // page).bit_length() - 1


def entry_pages(page: int, group: int) -> int:
    """Pages of an entry of a list whose entries have `group` rows."""
    return max(1, (KERNEL_ENTRY if platform() == "tpu" and page % LANES == 0 else ENTRY[group]) // page)


def entries_at_once(page: int, group: int, run: int) -> int:
    """How many entries of a list of pages are gathered at a time: fewer where their rows are many."""
    return max(1, block_pages(page) // (run * (1 if group == 1 else 2)))


class Pages(NamedTuple):
    """The pages of one layer, or of stacked layers: then N counts those of all, and layer y's page i of n is number `y n + i`."""

    keys: Float[Array, "A N J d T"]
    values: Float[Array, "A N J T d"]


class PageList(NamedTuple):
    """Which rows read which pages, M pages an entry. Rows are numbered within their part; a number that is no row reads nothing."""

    page: Int[Array, "A n M"]
    rows: Int[Array, "A n G"]
    length: Int[Array, "A n"]  # tokens of the pages that are there, all but the last one full; 0 behind the list's end
    most: Int[Array, ""]  # entries of the longest part
    first: Int[Array, "A n M"] | None = None  # position of each page's first token, where a layer has a window


class PageTable(NamedTuple):
    """Each row's own pages in order, whoever else reads them: what a decode step of the exact engine reads instead of lists."""

    page: Int[Array, "A s M"]
    kept: Int[Array, "A s"]  # tokens that lie in them


class PagedCache(NamedTuple):
    """What a decode step of S rows reads: pages, and the rows' own columns of the present chunk, which are not in pages yet."""

    pages: Pages
    keys: Float[Array, "S J C d"]
    values: Float[Array, "S J C d"]


class PagedMask(NamedTuple):
    """What the rows of a decode step see: the pages in `lists`, and their own columns up to `column`, which this step writes.

    With a `PageTable` no row's arithmetic depends on what other rows read; with lists shared pages are read once for several rows.
    """

    lists: tuple[PageList, ...] | PageTable
    column: Int[Array, ""]
    window: Window | None = None  # its positions [S 1]


class PrefixMask(NamedTuple):
    """What rows of new tokens see: each other by `rows`, and of their row's beginning the first `kept` tokens, which lie in its pages."""

    rows: RowMask
    pages: Int[Array, "A b M"]  # B = A b rows
    kept: Int[Array, "A b"]


def shifted(mask: PagedMask | PrefixMask, first: Int[Array, ""]) -> PagedMask | PrefixMask:
    """What rows see in a layer whose page 0 is number `first` of its array."""
    if isinstance(mask, PrefixMask):
        return mask._replace(pages=mask.pages + first)
    if isinstance(mask.lists, PageTable):
        return mask._replace(lists=mask.lists._replace(page=mask.lists.page + first))
    return mask._replace(lists=tuple(entries._replace(page=entries.page + first) for entries in mask.lists))


def with_window(mask: RowMask | DecodeMask | PagedMask | PrefixMask, window: Window) -> RowMask | DecodeMask | PagedMask | PrefixMask:
    """What a mask's rows see in a layer with a window."""
    if isinstance(mask, PrefixMask):
        return mask._replace(rows=with_window(mask.rows, window))
    return dataclasses.replace(mask, window=window) if isinstance(mask, RowMask) else mask._replace(window=window)


class _Sums(NamedTuple):
    """An online softmax of rows: weighted values, largest score, sum of weights."""

    values: Float[Array, "*rows d"]
    top: Float[Array, "*rows"]
    total: Float[Array, "*rows"]


def _nothing(*shape: int) -> _Sums:
    rows = jnp.zeros(shape[:-1], jnp.float32)
    return _Sums(jnp.zeros(shape, jnp.float32), rows + MASKED, rows)


def _product(left, right):
    return jnp.matmul(left.astype(right.dtype), right, preferred_element_type=jnp.float32)


def _few_product(left: Float[Array, "*n q D"], right: Float[Array, "*n D S"]) -> Float[Array, "*n q S"]:
    """The same, of so few queries that a CPU multiplies and adds faster than it calls products."""
    if left.shape[-2] <= FEW_QUERIES and platform() == "cpu":
        return jnp.sum(left[..., None].astype(jnp.float32) * right[..., None, :, :].astype(jnp.float32), axis=-2)
    return _product(left, right)


def _with(sums: _Sums, scores: Float[Array, "*rows S"], values: Float[Array, "*lead S d"]) -> _Sums:
    """The sums with further columns, whose scores are `MASKED` where they are not seen."""
    top = jnp.maximum(sums.top, jnp.max(scores, axis=-1))
    scale, weights = jnp.exp(sums.top - top), jnp.exp(scores - top[..., None])
    return _Sums(sums.values * scale[..., None] + _product(weights, values), top, sums.total * scale + jnp.sum(weights, axis=-1))


def _gathered(pages: Pages, page: Int[Array, "n M"], few: bool) -> tuple[Float[Array, "n J d MT"], Float[Array, "n J MT d"]]:
    """Keys and values of n times M pages of one part. `few` queries read them: on a CPU values are then gathered in runs of memory, a key
    head of a page each, faster than slices of several axes. A product turns slices around for nothing, and elsewhere a page is no run."""
    (n, m), (_, j, d, t) = page.shape, pages.keys.shape
    keys = pages.keys[page].transpose(0, 2, 3, 1, 4).reshape(n, j, d, m * t)
    if not few or platform() != "cpu":
        return keys, pages.values[page].transpose(0, 2, 1, 3, 4).reshape(n, j, m * t, d)
    runs = jax.vmap(lambda head: head[page], 1, 1)(pages.values.reshape(-1, j, t * d))  # an index of heads would cross devices
    return keys, runs.reshape(n, j, m * t, d)


def by_kernel(attention: str, page: int, s: int, heads: tuple[int, int, int], itemsize: int, lists: tuple[PageList, ...]) -> bool:
    """Whether a decode step of s rows reads lists of pages of so many tokens by a TPU's kernel (`page_kernel`), for the `attention` of a
    `ModelConfig`. heads: key heads of a device, query heads of each, and their numbers, of which keys have `itemsize` bytes."""
    wanted = {"auto": ("tpu",), "splash": ("tpu", "cpu")}  # on a CPU in Pallas' interpret mode
    if page % LANES or platform() not in wanted.get(attention, ()):
        return False
    from marl_llm.models.page_kernel import fits  # Pallas takes a second to import

    return fits(s, heads, page, itemsize, lists)


def _over_list(q: Float[Array, "s J g d"], pages: Pages, entries: PageList, window: Window | None, sums: _Sums) -> _Sums:
    """One part's rows over one part's pages. A row that sees nothing of an entry may get weights for it while its largest score is still
    `MASKED`; the row's own column, which comes last, scales them to zero."""
    s, j, g, d = q.shape
    (n, group), m, t = entries.rows.shape, entries.page.shape[-1], pages.keys.shape[-1]
    size = min(entries_at_once(t, group, m), n)

    def block(i, sums: _Sums) -> _Sums:
        page, rows, length = (jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (entries.page, entries.rows, entries.length))
        keys, values = _gathered(pages, page, group * g <= FEW_QUERIES)

        def by_entry(x):
            return x.swapaxes(1, 2).reshape(size, j, group * g, *x.shape[4:])

        def by_row(x):
            return x.reshape(size, j, group, g, *x.shape[3:]).swapaxes(1, 2).reshape(size * group, j, g, *x.shape[3:])

        who = jnp.minimum(rows, s - 1)
        there = jnp.repeat(rows < s, g, axis=1)[:, None, :, None] & (jnp.arange(m * t) < length[:, None, None, None])
        if window is not None:
            first = jax.lax.dynamic_slice_in_dim(entries.first, i * size, size)
            positions = (first[..., None] + jnp.arange(t)).reshape(size, 1, m * t)
            there &= jnp.repeat(in_window(window.positions[who][..., None], positions, window.size), g, axis=1)[:, None]
        scores = jnp.where(there, _few_product(by_entry(q[who]), keys), MASKED)
        here = rows.reshape(1, -1) == jnp.arange(s)[:, None]  # s, (entry, row) pairs
        most = jnp.max(jnp.where(here[:, :, None, None], by_row(jnp.max(scores, axis=-1)), MASKED), axis=1)
        top = jnp.maximum(sums.top, most)
        weights = jnp.exp(scores - by_entry(top[who])[..., None])
        add = functools.partial(jnp.matmul, here.astype(jnp.float32), precision="highest")  # a row's pairs are summed by a product
        values = add(by_row(_few_product(weights, values)).reshape(size * group, -1)).reshape(s, j, g, d)
        total = add(by_row(jnp.sum(weights, axis=-1)).reshape(size * group, -1)).reshape(s, j, g)
        scale = jnp.exp(sums.top - top)
        return _Sums(sums.values * scale[..., None] + values, top, sums.total * scale + total)

    return jax.lax.fori_loop(0, (entries.most + size - 1) // size, block, sums)


def _by_kernel(q: Float[Array, "A s J g d"], pages: Pages, lists: tuple[PageList, ...]) -> _Sums:
    """All parts' rows over their pages, each device its own parts and heads."""
    from marl_llm.models.page_kernel import over_lists  # Pallas takes a second to import

    def local(q, keys, values, *numbers):
        here = [PageList(*numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
        parts = ([(x.page[a], x.rows[a], x.length[a], x.most) for x in here] for a in range(q.shape[0]))
        return jnp.stack([over_lists(q[a], keys[a], values[a], some, platform() == "cpu") for a, some in enumerate(parts)])

    heads, numbers = ("batch", None, "key_value_heads", None, None), ("batch", None, None)
    axes = (heads,) * 3 + (numbers, numbers, numbers[:2], ()) * len(lists)
    given = itertools.chain.from_iterable(x[:4] for x in lists)  # all but `first`, which layers with a window alone read
    out = per_device(local, axes, ("batch", "key_value_heads", None, None, None))(q, *pages, *given)
    out = out.swapaxes(1, 2)
    return _Sums(out[..., LANES:], out[..., 0], out[..., 1])


def _here(j: int) -> int:
    """Of j key heads those of a device."""
    split = ways("key_value_heads")
    return j if j % split else j // split


def _over_table(q: Float[Array, "A b J x d"], pages: Pages, table: PageTable, size: int, window: Window | None) -> _Sums:
    """All parts' rows over their own pages, `size` at a time up to the longest row; the window's positions are [A b x]. A block behind a
    row's end leaves its sums as they are, bit for bit, because its weights are zero and its scale is one."""
    t, room = pages.keys.shape[-1], table.page.shape[-1]
    size = min(size, room)
    blocks = (jnp.max(table.kept) + size * t - 1) // (size * t)
    table = table._replace(page=jnp.pad(table.page, ((0, 0), (0, 0), (0, -room % size))))

    def part(q, pages, table, positions):
        def block(i, sums):
            some = jax.lax.dynamic_slice_in_dim(table.page, i * size, size, axis=1)  # b m
            k, v = _gathered(pages, some, False)
            at = i * size * t + jnp.arange(size * t)
            seen = (at < table.kept[:, None])[:, None]
            if window is not None:
                seen &= in_window(positions[..., None], at, window.size)  # b x S
            return _with(sums, jnp.where(seen[:, None], _product(q, k), MASKED), v)

        return jax.lax.fori_loop(0, blocks, block, _nothing(*q.shape))

    return jax.vmap(part)(q, pages, table, None if window is None else window.positions)


def paged_attention(
    queries: Float[Array, "S 1 H d"], keys: Float[Array, "S 1 J d"], values: Float[Array, "S 1 J d"], cache: PagedCache, mask: PagedMask,
    attention: str = "auto",
) -> tuple[Float[Array, "S 1 H d"], PagedCache]:  # fmt: skip
    """One new token per row: writes its key and value into the chunk's column, and attends to its row's pages and columns.

    `attention`: of the `ModelConfig`; see `by_kernel`."""
    rows, _, h, d = queries.shape
    j, parts = keys.shape[2], cache.pages.keys.shape[0]

    def put(columns, new):
        return jax.lax.dynamic_update_slice_in_dim(columns, new[:, 0, :, None], mask.column, 2)

    cache = cache._replace(keys=put(cache.keys, keys), values=put(cache.values, values))
    q = (queries * d**-0.5).reshape(parts, rows // parts, j, h // j, d)
    window = mask.window
    positions = None if window is None else window.positions.reshape(parts, rows // parts)
    with jax.named_scope("pages"):
        page = cache.pages.keys.shape[-1]
        if isinstance(mask.lists, PageTable):
            over = None if window is None else Window(window.size, jnp.repeat(positions[..., None], h // j, axis=-1))
            sums = _over_table(q, cache.pages, mask.lists, max(1, TABLE_BLOCK // page), over)
        elif window is None and by_kernel(attention, page, rows // parts, (_here(j), h // j, d), keys.dtype.itemsize, mask.lists):
            sums = _by_kernel(q, cache.pages, mask.lists)
        else:
            sums = jax.vmap(lambda _: _nothing(*q.shape[1:]))(jnp.arange(parts))
            for entries in mask.lists:
                def over(q, pages, part, positions, sums, most=entries.most):
                    here = None if window is None else Window(window.size, positions)
                    return _over_list(q, pages, part._replace(most=most), here, sums)

                sums = jax.vmap(over)(q, cache.pages, entries._replace(most=None), positions, sums)
    q, sums = q.reshape(rows, j, h // j, d), jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), sums)
    columns = jnp.arange(cache.keys.shape[2])
    seen = columns <= mask.column
    if window is not None:  # columns are positions, counted from the same token
        seen &= in_window(mask.column, columns, window.size)
    sums = _with(sums, jnp.where(seen, _product(q, cache.keys.swapaxes(2, 3)), MASKED), cache.values)
    return (sums.values / sums.total[..., None]).reshape(rows, 1, h, d).astype(queries.dtype), cache


def prefix_attention(
    queries: Float[Array, "B L H d"], keys: Float[Array, "B L J d"], values: Float[Array, "B L J d"], pages: Pages, mask: PrefixMask
) -> Float[Array, "B L H d"]:
    """New tokens attend to their row's pages, a block at a time, and to each other. Memory: `[B, H, L, block]` and `[B, H, L, L]`."""
    rows, length, h, d = queries.shape
    j = keys.shape[2]
    parts, b, _ = mask.pages.shape
    g = h // j
    stacked = (queries * d**-0.5).reshape(rows, length, j, g, d).transpose(0, 2, 3, 1, 4).reshape(parts, b, j, g * length, d)
    window = mask.rows.window
    if window is not None:
        window = window._replace(positions=jnp.tile(window.positions.reshape(parts, b, length), g))  # of the stacked queries
    page = pages.keys.shape[-1]
    size = max(1, TABLE_BLOCK // page) if length < FEW_TOKENS and platform() == "cpu" else block_pages(page)
    sums = _over_table(stacked, pages, PageTable(mask.pages, mask.kept), size, window)
    sums = jax.tree.map(lambda x: x.reshape(rows, j, g, length, *x.shape[4:]), sums)
    own_keys, own_values = to_cache(keys, values)
    q = stacked.reshape(rows, j, g * length, d)
    scores = jnp.where(mask.rows.dense()[:, None, None], _product(q, own_keys).reshape(rows, j, g, length, length), MASKED)
    sums = _with(sums, scores, own_values[:, :, None])
    out = sums.values / sums.total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, length, h, d).astype(queries.dtype)


def written(
    pages: Pages,
    base: Int[Array, "A b"],
    target: Int[Array, "A b W"],
    offset: Int[Array, "A b"],
    keys: Float[Array, "B J d L"],
    values: Float[Array, "B J L d"],
) -> Pages:
    """The pages with L new tokens per row, from column `offset` of page `base` on; the result lies in the pages `target`.

    Where `base` is not the first target, its columns before `offset` are copied (copy on write). A target that is no page is dropped; what
    lies behind the real tokens of a row means nothing.
    """
    t, (parts, b, width) = pages.keys.shape[-1], target.shape

    def apart(x):
        return x.reshape(parts, b, *x.shape[1:])

    def put(pages: Pages, base, target, offset, keys, values) -> Pages:
        def wide(x, axis):
            return jnp.pad(x, [(0, (width - 1) * t if i == axis else 0) for i in range(4)])

        place = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
        k = place(wide(pages.keys[base], 3), keys, offset, 2)
        v = place(wide(pages.values[base], 2), values, offset, 1)
        k = k.reshape(*k.shape[:3], width, t).transpose(0, 3, 1, 2, 4)
        v = v.reshape(*v.shape[:2], width, t, -1).transpose(0, 2, 1, 3, 4)
        return Pages(pages.keys.at[target].set(k, mode="drop"), pages.values.at[target].set(v, mode="drop"))

    with jax.named_scope("store"):
        return jax.vmap(put)(pages, base, target, offset, apart(keys), apart(values))


def written_to_layers(
    pages: Pages,
    base: Int[Array, "A b"],
    target: Int[Array, "A b W"],
    offset: Int[Array, "A b"],
    keys: Float[Array, "Y B J d L"],
    values: Float[Array, "Y B J L d"],
) -> Pages:
    """`written` to the pages of Y stacked layers; `base` and `target` are numbers of a layer's pages."""
    (parts, b, width), (layers, rows), count = target.shape, keys.shape[:2], pages.keys.shape[1]
    first = (jnp.arange(layers) * (count // layers))[:, None]
    base = (base[:, None] + first).reshape(parts, layers * b)
    target = jnp.where(target[:, None] < count // layers, target[:, None] + first[..., None], count).reshape(parts, layers * b, width)

    def apart(x):
        return x.reshape(layers, parts, b, *x.shape[2:]).swapaxes(0, 1).reshape(layers * rows, *x.shape[2:])

    return written(pages, base, target, jnp.tile(offset, (1, layers)), apart(keys), apart(values))


def touched(page: int, tokens: int) -> int:
    """Pages that so many new tokens can touch, wherever they begin (W of `written`)."""
    return -(-(page - 1 + tokens) // page)
