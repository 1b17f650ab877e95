"""The kernel of a decode step over pages, in Pallas' interpret mode: attention over the listed pages, which it reads once and no others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import SAMPLE, Decoder, ModelConfig, attention, init_params, page_kernel, use_rules
from marl_llm.models.page_kernel import bytes_on_chip, bytes_read
from marl_llm.models.pages import PagedCache, PagedMask, PageList, Pages, by_kernel, paged_attention
from marl_llm.training import make_mesh

TOKENS, ROWS, ROOM, COLUMNS = 128, 5, 12, 3  # of a page; of a part; entries that a list has room for; of a chunk


def random_lists(rng, parts: int, pages: int, run: int, groups=(1, 4)):
    """A list for each size of group: entries of up to `run` pages and so many rows; the last row has no page. A part has a few entries
    less than the one before."""
    lists = []
    for group in groups:
        page, rows = np.zeros((parts, ROOM, run), np.int32), np.full((parts, ROOM, group), ROWS, np.int32)
        length, most = np.zeros((parts, ROOM), np.int32), ROOM - 3
        for part in range(parts):
            for entry in range(most - 2 * part):
                readers, count = rng.integers(1, group + 1), rng.integers(1, run + 1)
                rows[part, entry, :readers] = rng.choice(ROWS - 1, readers, replace=False)
                page[part, entry, :count] = rng.choice(np.arange(1, pages), count, replace=False)
                length[part, entry] = (count - 1) * TOKENS + rng.integers(1, TOKENS + 1)
        lists.append(PageList(*map(jnp.asarray, (page, rows, length)), jnp.int32(most)))
    return tuple(lists)


def given(rng, parts: int, pages: int, j: int, g: int, d: int):
    """(queries, new keys and values, cache) of a step."""
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    s = parts * ROWS
    columns = normal(s, j, COLUMNS, d), normal(s, j, COLUMNS, d)
    cache = PagedCache(Pages(normal(parts, pages, j, d, TOKENS), normal(parts, pages, j, TOKENS, d)), *columns)
    return 2 * normal(s, 1, j * g, d), normal(s, 1, j, d), normal(s, 1, j, d), cache


def want(q, k, v, cache: PagedCache, lists):
    """Attention in float64 over each row's listed tokens, its first column and its new token."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    cache, lists = jax.tree.map(np.asarray, (cache, lists))
    out, (j, d) = np.zeros(q.shape), k.shape[2:]
    for s in range(q.shape[0]):
        part, row = divmod(s, ROWS)
        keys, values = [cache.keys[s, :, :1], k[s].swapaxes(0, 1)], [cache.values[s, :, :1], v[s].swapaxes(0, 1)]
        for page, rows, length, most, _ in lists:
            for entry in range(most):
                if row in rows[part, entry]:
                    some = cache.pages.keys[part][page[part, entry]].transpose(1, 0, 3, 2).reshape(j, -1, d)
                    keys.append(some[:, : length[part, entry]])
                    some = cache.pages.values[part][page[part, entry]].transpose(1, 0, 2, 3).reshape(j, -1, d)
                    values.append(some[:, : length[part, entry]])
        keys, values = (np.concatenate(x, axis=1).astype(np.float64) for x in (keys, values))
        for head in range(q.shape[2]):
            scores = keys[head * j // q.shape[2]] @ q[s, 0, head] / d**0.5
            weights = np.exp(scores - scores.max())
            out[s, 0, head] = weights @ values[head * j // q.shape[2]] / weights.sum()
    return out


@pytest.mark.parametrize(("parts", "run", "j", "g", "d"), [(1, 1, 1, 1, 16), (2, 3, 2, 3, 8), (1, 2, 1, 9, 160)])
def test_a_step_is_attention_over_the_listed_pages(parts, run, j, g, d):
    rng = np.random.default_rng(run)
    lists, step = random_lists(rng, parts, 6, run), given(rng, parts, 6, j, g, d)
    got, cache = jax.jit(paged_attention, static_argnums=5)(*step, PagedMask(lists, jnp.int32(1)), "splash")
    np.testing.assert_allclose(got, want(*step, lists), atol=3e-6)
    np.testing.assert_array_equal(cache.keys[:, :, 1], step[1][:, 0])


def test_sixteen_bits_differ_from_float32_by_their_rounding():
    rng = np.random.default_rng(0)
    lists, step = random_lists(rng, 1, 6, 2), given(rng, 1, 6, 2, 2, 16)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), step)
    got = jax.jit(paged_attention, static_argnums=5)(*half, PagedMask(lists, jnp.int32(1)), "splash")[0]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want(*jax.tree.map(lambda x: x.astype(jnp.float32), half), lists), atol=0.03)


def test_pages_that_are_not_listed_are_not_read():
    rng = np.random.default_rng(1)
    lists, (q, k, v, cache) = random_lists(rng, 1, 6, 2), given(rng, 1, 9, 1, 2, 16)
    bad = PagedCache(Pages(*(x.at[:, 6:].set(jnp.nan) for x in cache.pages)), cache.keys, cache.values)
    f = jax.jit(lambda cache: paged_attention(q, k, v, cache, PagedMask(lists, jnp.int32(1)), "splash")[0])
    np.testing.assert_array_equal(f(bad), f(cache))


def test_without_entries_a_row_sees_its_own_columns():
    rng = np.random.default_rng(2)
    step = given(rng, 1, 3, 1, 2, 16)
    lists = tuple(x._replace(rows=jnp.full_like(x.rows, ROWS), length=x.length * 0, most=jnp.int32(0)) for x in random_lists(rng, 1, 3, 2))
    got = jax.jit(paged_attention, static_argnums=5)(*step, PagedMask(lists, jnp.int32(1)), "splash")[0]
    np.testing.assert_allclose(got, want(*step, lists), atol=3e-6)


def test_each_device_reads_its_own_parts_and_heads():
    rng, mesh = np.random.default_rng(3), make_mesh(1, 2, 2)
    lists, step = random_lists(rng, 2, 6, 2), given(rng, 2, 6, 2, 2, 16)

    @jax.jit
    def on_mesh(*step):
        with use_rules(mesh, SAMPLE):
            return paged_attention(*step, PagedMask(lists, jnp.int32(1)), "splash")[0]

    np.testing.assert_allclose(on_mesh(*step), want(*step, lists), atol=3e-6)


def test_what_a_call_reads_is_each_page_once_and_the_queries():
    queries = 2 * 7 * 3 * 16 * 4  # J s g d, float32
    once = 2 * 2 * 16 * 128 * 2  # keys and values, of both heads, in 16 bits
    assert bytes_read(np.asarray([128, 129, 1, 384, 0]), 7, (2, 3, 16), 128, 2) == queries + (1 + 2 + 1 + 3) * once
    assert bytes_read(np.zeros(4, int), 7, (2, 3, 16), 128, 2) == queries


@pytest.mark.parametrize(
    ("kernel", "kind", "platform", "page", "rows", "entries"),
    [
        (True, "auto", "tpu", 128, 256, 8192), (True, "splash", "tpu", 256, 256, 512), (True, "splash", "cpu", 128, 256, 512),
        (False, "auto", "cpu", 128, 256, 512), (False, "auto", "gpu", 128, 256, 512), (False, "splash", "gpu", 128, 256, 512),
        (False, "tree", "tpu", 128, 256, 512), (False, "auto", "tpu", 64, 256, 512),
        (False, "auto", "tpu", 128, 4096, 512), (False, "auto", "tpu", 128, 256, 16384),
    ],
)  # fmt: skip
def test_the_kernel_takes_a_tpus_pages_unless_told_otherwise_or_there_is_no_room(kernel, kind, platform, page, rows, entries):
    lists = [PageList(np.zeros((1, n, 8)), np.zeros((1, n, g)), np.zeros((1, n)), np.int32(0)) for n, g in ((entries, 1), (512, 8))]
    with attention.for_platform(platform):
        assert by_kernel(kind, page, rows, (8, 4, 128), 2, tuple(lists)) == kernel


def test_half_of_the_heads_lie_on_the_chip_at_once_in_whole_vectors():
    vectors = 256 * 8 * 4 * 128 * 4  # sums, largest scores, and queries twice
    entries = 2 * 2 * 1024 * 128 * 2  # keys and values
    for g, d in ((2, 64), (8, 128)):
        assert bytes_on_chip(256, (2, g, d), 1024, 2) == vectors + entries
        assert bytes_on_chip(256, (3, g, d), 1024, 2) == 3 * bytes_on_chip(256, (1, g, d), 1024, 2) == 3 * (vectors + entries)
    assert bytes_on_chip(256, (2, 9, 128), 1024, 2) == 2 * vectors + entries


def test_a_model_reads_its_pages_as_its_attention_says(monkeypatch):
    """Of a decoder's step, both ways."""
    calls = []
    real = page_kernel.over_lists
    monkeypatch.setattr(page_kernel, "over_lists", lambda *given, **how: calls.append(1) or real(*given, **how))
    config = ModelConfig(vocab_size=32, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    rng = np.random.default_rng(4)
    lists, (*_, cache) = random_lists(rng, 1, 6, 1), given(rng, 1, 6, 1, 2, 8)
    params = init_params(config, jax.random.key(0))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(kind: str, windows=()):
        tokens, places = jnp.arange(ROWS)[:, None], jnp.full((ROWS, 1), 700)
        model = Decoder(dataclasses.replace(config, attention=kind, window_pattern=windows))
        return model.apply({"params": params}, tokens, places, PagedMask(lists, jnp.int32(1)), cache=[cache])[0]

    got = step("splash")
    assert len(calls) == 1
    np.testing.assert_allclose(got, step("xla"), atol=3e-6)
    lists = tuple(x._replace(first=jnp.zeros_like(x.page)) for x in lists)
    np.testing.assert_allclose(got, step("splash", (1000,)), atol=3e-6)  # layers with a window are not the kernel's
    assert len(calls) == 1
