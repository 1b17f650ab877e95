"""The kernels of packed trees, a TPU's (splash) and a GPU's (flash), in Pallas' interpret mode: any layout equals dense attention, and
blocks that nobody sees are left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import SAMPLE, packed_mask, self_attention, tree_kernel, tree_kernel_gpu, use_rules
from marl_llm.models.attention import attend, tree_attention
from marl_llm.models.masks import token_ranges
from marl_llm.models.tree_kernel import block_pairs, block_size, kernel_flops
from marl_llm.models.tree_kernel_gpu import KEYS, QUERIES, key_blocks, query_blocks
from marl_llm.training import make_mesh


def random_row(rng, length: int, longest: int):
    """Trees, plain sequences and padding, as rows are packed."""
    segments, branches, segment, branch = [], [], 0, 0
    while len(segments) < length:
        segment += 1
        sizes = rng.integers(1, longest, 1 + rng.integers(0, 4))
        for i, size in enumerate(sizes):
            branch += i > 0
            segments += [segment] * int(size)
            branches += [branch if i else 0] * int(size)
    empty = int(rng.integers(0, length // 3))
    segments, branches = segments[: length - empty] + [0] * empty, branches[: length - empty] + [0] * empty
    return segments, branches


def rows(seed: int, count: int, length: int, longest: int):
    """The last one is a single sequence, in which every earlier block is seen: rows have different numbers of live pairs."""
    rng = np.random.default_rng(seed)
    every = [random_row(rng, length, longest) for _ in range(count - 1)] + [([1] * length, [0] * length)]
    return [jnp.asarray(x, jnp.int32) for x in zip(*every)]


def arrays(rng, count, length, heads, group, size):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return normal(count, length, heads * group, size), normal(count, length, heads, size), normal(count, length, heads, size)


@pytest.mark.parametrize("kernel", ["splash", "flash"])
@pytest.mark.parametrize(("length", "longest", "heads", "group"), [(384, 60, 2, 1), (300, 200, 1, 3)])
def test_any_layout_equals_dense_attention_and_its_gradient(kernel, length, longest, heads, group):
    segments, branches = rows(length, 3, length, longest)
    q, k, v = arrays(np.random.default_rng(1), 3, length, heads, group, 16)
    real = np.asarray(segments, bool)
    weight = jnp.asarray(real[:, :, None, None] * np.random.default_rng(2).normal(size=q.shape), jnp.float32)
    mask = packed_mask(segments, branches)
    padded = [jnp.pad(x, ((0, 0), (0, -length % 128))) for x in (segments, branches)]
    assert len(set(block_pairs(token_ranges(*padded), 128).count.tolist())) > 1

    def value(kind):
        def loss(q, k, v):
            out = self_attention(kernel, q, k, v, mask) if kind else attend(q, k, v, mask.dense())
            return jnp.sum(out * weight), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    (_, out), got = value(True)
    (_, want), slopes = value(False)
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(want)[real], atol=2e-6)
    assert np.isfinite(out).all()
    for a, b in zip(got, slopes, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_rows_are_padded_to_blocks_of_the_size_that_the_padded_row_has():
    for length in range(1, 5000):
        padded = length + -length % block_size(length)
        assert block_size(padded) == block_size(length)
        assert padded % 128 == 0


@pytest.mark.parametrize("longest", [6, 40])
def test_a_pair_of_blocks_is_listed_if_and_only_if_somebody_sees_somebody(longest):
    segments, branches = rows(longest, 5, 96, longest)
    mask = np.asarray(packed_mask(segments, branches).dense()).copy()
    padding = np.asarray(segments) == 0
    mask[padding] = np.eye(96, dtype=bool)[None].repeat(5, 0)[padding]  # which sees itself here, and nothing else
    live = mask.reshape(5, 12, 8, 12, 8).any(axis=(2, 4))
    pairs = jax.jit(lambda *x: block_pairs(token_ranges(*x), 8))(segments, branches)
    for row, (query, key, count) in enumerate(zip(*map(np.asarray, pairs), strict=True)):
        assert list(zip(query[:count], key[:count], strict=True)) == [tuple(p) for p in np.argwhere(live[row])]
        assert (query[count:] == query[count - 1]).all()
        assert (key[count:] == key[count - 1]).all()


@pytest.mark.parametrize("longest", [30, 400])
def test_a_block_of_a_gpu_goes_over_what_it_sees_and_little_else(longest):
    """All blocks in which anybody sees anybody; no others, unless the block holds several sequences, or rows of its half would."""
    length = 1024
    segments, branches = rows(longest, 4, length, longest)
    ranges, numbers = token_ranges(segments, branches), np.asarray(segments)
    mask = np.asarray(packed_mask(segments, branches).dense()).copy()
    padding = numbers == 0
    mask[padding] = np.eye(length, dtype=bool)[None].repeat(4, 0)[padding]
    live = mask.reshape(4, length // QUERIES, QUERIES, length // KEYS, KEYS).any(axis=(2, 4))
    by_query, by_key = (np.asarray(jax.jit(blocks)(ranges)) for blocks in (key_blocks, query_blocks))
    tight = 0
    for row, i in np.ndindex(live.shape[:2]):
        first, count, own, more = by_query[row, i]
        visited = [*range(first, first + count), *range(own, own + more)]
        assert len(set(visited)) == len(visited)
        assert set(np.flatnonzero(live[row, i])) <= set(visited)
        if len(set(numbers[row, i * QUERIES : (i + 1) * QUERIES])) == 1 and not padding[row, i * QUERIES]:
            tight += 1
            assert len(visited) == live[row, i].sum()
    assert tight
    for row, j in np.ndindex(live.shape[0], live.shape[2]):
        first, count = by_key[row, j]
        seen_by = np.flatnonzero(live[row, :, j])
        assert (first, first + count - 1) == (seen_by[0], seen_by[-1])


@pytest.mark.parametrize("kernel", [tree_kernel, tree_kernel_gpu])
def test_keys_of_blocks_that_nobody_sees_are_not_read(kernel):
    """A tree's keys and values are NaN: what lies in other blocks does not notice, forward or backward."""
    length = 384
    segments = jnp.asarray([[1] * 128 + [2] * 256], jnp.int32)
    branches = jnp.asarray([[0] * 64 + [1] * 64 + [0] * 100 + [2] * 100 + [3] * 56], jnp.int32)
    q, k, v = arrays(np.random.default_rng(0), 1, length, 1, 1, 128)
    bad = jnp.asarray(np.arange(length) < 128)[None, :, None, None]
    wrong = [jnp.where(bad, jnp.nan, x) for x in (k, v)]

    @jax.jit
    def value(k, v):
        def loss(q, k, v):
            heads = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
            out = tree_attention(kernel, heads[0][:, :, None], *heads[1:], segments, branches, interpret=True)
            return jnp.sum(out[:, :, :, 128:]), out[:, :, :, 128:]

        (_, out), slopes = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *(x[:, 128:] for x in slopes)

    for a, b in zip(value(*wrong), value(k, v), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kernel", ["splash", "flash"])
def test_heads_and_rows_on_several_devices_give_the_same(kernel):
    segments, branches = rows(3, 2, 128, 40)
    q, k, v = arrays(np.random.default_rng(4), 2, 128, 2, 2, 16)
    mask = packed_mask(segments, branches)
    alone = jax.jit(lambda *x: self_attention(kernel, *x, mask))(q, k, v)
    mesh = make_mesh(2, 1, 2)
    with use_rules(mesh, SAMPLE):
        text = jax.jit(lambda *x: self_attention(kernel, *x, mask)).lower(q, k, v)
        together = text.compile()(q, k, v)
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert together.sharding.shard_shape(together.shape) == (1, 128, 2, 16)


def test_the_work_of_a_plan_is_that_of_the_live_pairs():
    """A prompt of two blocks sees 3 pairs, and each of two responses of one block 2 + 1."""
    flops = kernel_flops(1024, 2, 512)
    assert block_size(2048) == 512
    shape, square = (3, 2, 2, 2048, 128), 512**2
    live = 3 + 2 * (2 + 1)
    assert flops["tree_attention_forward"](shape) == 2 * 2 * live * square * 128 * 12
    assert flops["tree_attention_backward"](shape) == 2 * 5 * live * square * 128 * 12


def test_the_work_of_a_plan_for_gpus_is_that_of_the_blocks_that_are_gone_over():
    """Of 4 blocks of queries of a prompt, the first sees 2 blocks of keys, the second 4, then 6 and 8; each of two responses of 2 blocks
    all 8 of the prompt, and 2 and 4 of its own. A block of a prompt's keys is seen by its own block of queries and all behind it."""
    flops, square, shape = tree_kernel_gpu.kernel_flops(512, 2, 256, group=2), QUERIES * KEYS, (3, 2, 2, 1024, 128)
    pairs = (2 + 4 + 6 + 8) + 2 * (2 * 8 + 2 + 4)
    assert flops["tree_attention_forward"](shape) == 2 * 2 * pairs * square * 128 * 12
    assert flops["tree_attention_of_queries"](shape) == 2 * 3 * pairs * square * 128 * 12
    of_keys = 2 * (8 + 7 + 6 + 5) + 2 * 2 * (2 + 1)
    assert of_keys == pairs  # a pair is a pair, from either side
    assert flops["tree_attention_of_keys"]((3, 2, 1024, 128)) == 2 * 4 * of_keys * square * 128 * 12
