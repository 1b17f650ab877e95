"""A decode step over pages against attention over the same tokens in one row, with as many blocks as it takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_llm.models import pages as module
from marl_llm.models.masks import Window
from marl_llm.models.pages import GROUP, PagedCache, PagedMask, PageList, Pages, PageTable, paged_attention

PARTS, ROWS, KEY_HEADS, GROUPS, DIM, PAGE, COLUMNS = 2, 3, 2, 2, 4, 2, 4  # rows of a part; query heads of a key head
# tokens of each row that lie in pages; the first two rows of a part share their first page where both have one
LENGTHS = ((9, 4, 0), (1, 10, 6))
COLUMN = 1  # this step writes it, and column 0 is there already


def random_cache(rng):
    """(pages, tables of page numbers by part and row, keys and values of each row's own columns)."""
    tables, count = [], 0
    for lengths in LENGTHS:
        shared, part = 0, []
        for row, length in enumerate(lengths):
            own = list(range(10 * row + 1, 10 * row + 1 + -(-length // PAGE)))
            part.append([shared, *own[1:]] if row < 2 and own else own)
        tables.append(part)
        count = max([count, *(page + 1 for pages in part for page in pages)])

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    pages = Pages(normal(PARTS, count, KEY_HEADS, DIM, PAGE), normal(PARTS, count, KEY_HEADS, PAGE, DIM))
    rows = PARTS * ROWS
    return pages, tables, normal(rows, KEY_HEADS, COLUMNS, DIM), normal(rows, KEY_HEADS, COLUMNS, DIM)


def listed(tables, run, group):
    """Every (page, rows) pair once, up to `run` pages and `group` rows an entry, a part's in any order, with room behind the end."""
    room = 16
    page, first = np.zeros((PARTS, room, run), np.int32), np.zeros((PARTS, room, run), np.int32)
    length = np.zeros((PARTS, room), np.int32)
    rows = np.full((PARTS, room, group), ROWS, np.int32)
    most = 0
    for part, found in enumerate(tables):
        entries = {}
        for at in range(max(map(len, found))):
            readers = {}
            for row, numbers in enumerate(found):
                if at < len(numbers):
                    there = min(PAGE, LENGTHS[part][row] - at * PAGE)
                    readers.setdefault((numbers[at], there, row if group == 1 else 0), []).append(row)
            for (number, there, _), who in readers.items():
                entries.setdefault(tuple(who), []).append((number, there, at * PAGE))
        runs = [(who, pages[at : at + run]) for who, pages in entries.items() for at in range(0, len(pages), run)]
        most = max(most, len(runs))
        for entry, (who, pages) in enumerate(runs):
            page[part, entry, : len(pages)], length[part, entry] = [n for n, _, _ in pages], sum(there for _, there, _ in pages)
            first[part, entry, : len(pages)], rows[part, entry, : len(who)] = [at for *_, at in pages], who
    return PageList(*map(jnp.asarray, (page, rows, length, most, first)))


def tabled(tables):
    table = np.zeros((PARTS, ROWS, max(len(numbers) for part in tables for numbers in part)), np.int32)
    for part, found in enumerate(tables):
        for row, numbers in enumerate(found):
            table[part, row, : len(numbers)] = numbers
    return PageTable(jnp.asarray(table), jnp.asarray(LENGTHS, jnp.int32))


def dense(queries, keys, values, pages, tables, own_keys, own_values, window=100):
    """Attention of each row over the last `window` of its pages' tokens, its columns before this one and its new token, in float64."""
    out = np.zeros(queries.shape)
    for part, found in enumerate(tables):
        for row, numbers in enumerate(found):
            s, n = part * ROWS + row, LENGTHS[part][row]
            for head in range(KEY_HEADS * GROUPS):
                j = head // GROUPS
                k = [pages.keys[part, number, j].T for number in numbers] + [own_keys[s, j, :COLUMN], keys[s, :, j]]
                v = [pages.values[part, number, j] for number in numbers] + [own_values[s, j, :COLUMN], values[s, :, j]]
                k, v = (np.concatenate([np.concatenate(x[:-2])[:n] if x[:-2] else np.zeros((0, DIM)), *x[-2:]])[-window:] for x in (k, v))
                weights = np.exp(k.astype(np.float64) @ np.asarray(queries[s, 0, head], np.float64) / np.sqrt(DIM))
                out[s, 0, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("block", [1, 2, 8, 64])
@pytest.mark.parametrize("form", ["lists 1", "lists 2", "single rows", "table"])
def test_a_decode_step_over_pages_is_attention_over_their_tokens(form, block, monkeypatch):
    monkeypatch.setattr(module, "block_pages", lambda page: block)
    monkeypatch.setattr(module, "TABLE_BLOCK", block * PAGE)
    rng = np.random.default_rng(0)
    pages, tables, own_keys, own_values = random_cache(rng)
    heads = KEY_HEADS * GROUPS
    queries, keys, values = (
        jnp.asarray(2 * rng.normal(size=(PARTS * ROWS, 1, n, DIM)), jnp.float32) for n in (heads, KEY_HEADS, KEY_HEADS)
    )
    run, group = (2, 1) if form == "single rows" else (1 if form == "lists 1" else 2, GROUP)
    lists = tabled(tables) if form == "table" else (listed(tables, run, group),)
    got, cache = paged_attention(
        queries, keys, values, PagedCache(pages, own_keys, own_values), PagedMask(lists, jnp.asarray(COLUMN))
    )
    np.testing.assert_allclose(got, dense(queries, keys, values, pages, tables, own_keys, own_values), atol=2e-6)
    np.testing.assert_array_equal(cache.keys[:, :, COLUMN], keys[:, 0])
    np.testing.assert_array_equal(cache.keys[:, :, COLUMN + 1 :], own_keys[:, :, COLUMN + 1 :])


@pytest.mark.parametrize("form", ["lists 2", "single rows", "table"])
def test_a_window_ends_within_a_page_or_at_its_edge_or_before_all_tokens(form, monkeypatch):
    monkeypatch.setattr(module, "block_pages", lambda page: 2)
    monkeypatch.setattr(module, "TABLE_BLOCK", 2 * PAGE)
    rng = np.random.default_rng(0)
    pages, tables, own_keys, own_values = random_cache(rng)
    queries, keys, values = (
        jnp.asarray(2 * rng.normal(size=(PARTS * ROWS, 1, n, DIM)), jnp.float32) for n in (KEY_HEADS * GROUPS, KEY_HEADS, KEY_HEADS)
    )
    lists = tabled(tables) if form == "table" else (listed(tables, 2, 1 if form == "single rows" else GROUP),)
    positions = jnp.asarray(LENGTHS, jnp.int32).reshape(-1, 1) + COLUMN

    @jax.jit
    def run(size):
        mask = PagedMask(lists, jnp.asarray(COLUMN), Window(size, positions))
        return paged_attention(queries, keys, values, PagedCache(pages, own_keys, own_values), mask)[0]

    for size in (1, 2, 3, 4, 5, 11, 12, 100):
        want = dense(queries, keys, values, pages, tables, own_keys, own_values, size)
        np.testing.assert_allclose(run(size), want, atol=2e-6, err_msg=str(size))


@pytest.mark.parametrize("few", [True, False])
def test_devices_that_share_the_key_heads_gather_their_own_without_the_others(few):
    over_heads = NamedSharding(Mesh(jax.devices()[:2], ("tensor",)), PartitionSpec(None, None, "tensor"))
    rng, page = np.random.default_rng(0), jnp.asarray([[[3, 0], [1, 3], [2, 2]]])
    pages = Pages(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 4, 2, DIM, PAGE), (1, 4, 2, PAGE, DIM))))
    gather = jax.jit(jax.vmap(lambda pages, page: module._gathered(pages, page, few)), out_shardings=over_heads)
    program = gather.lower(jax.device_put(pages, over_heads), page).compile()
    keys, values = program(jax.device_put(pages, over_heads), page)
    for entry, (first, second) in enumerate(page[0]):
        np.testing.assert_array_equal(keys[0, entry], jnp.concatenate([pages.keys[0, first], pages.keys[0, second]], axis=-1))
        np.testing.assert_array_equal(values[0, entry], jnp.concatenate([pages.values[0, first], pages.values[0, second]], axis=-2))
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", program.as_text())
