"""Every implementation behind the seam gives the numbers of the plain one, forward and backward; flash and splash in Pallas' interpret
mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import attention as room
from marl_llm.models import for_platform, prompt_mask, self_attention, tree_mask
from marl_llm.models.attention import choose
from marl_llm.models.masks import Window, packed_mask, token_ranges
from marl_llm.models.pages import with_window


def arrays(length, heads=4, key_heads=2, size=8, rows=2, seed=0):
    rng = np.random.default_rng(seed)

    def shape(h):
        return (rows, length, h, size)

    return [jnp.asarray(rng.normal(size=shape(h)), jnp.float32) for h in (heads, key_heads, key_heads)]


def numpy_attention(q, k, v, where):
    """One query at a time, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(where[b, i])
        if len(seen):
            s = k[b, seen, h // group] @ q[b, i, h] / np.sqrt(q.shape[3])
            w = np.exp(s - s.max())
            out[b, i, h] = w @ v[b, seen, h // group] / w.sum()
    return out


def masks(length):
    where = np.ones((2, length), bool)
    where[1, : length // 4] = False  # left padding
    yield "causal", prompt_mask(jnp.asarray(where))
    p = length // 2
    yield "tree", tree_mask(jnp.asarray(where[:, :p]), 2, (length - p) // 2)
    part = np.arange(length) * 8 // length  # a prompt, its responses 1 and 2, a second prompt, its response, a plain sequence, padding
    segments, branches = np.asarray([1, 1, 1, 2, 2, 3, 3, 0])[part], np.asarray([0, 1, 2, 0, 3, 0, 0, 0])[part]

    def both(x):
        return jnp.asarray(np.stack([x, x[::-1].copy() if x is segments else np.zeros_like(x)]), jnp.int32)

    yield "packed", packed_mask(both(segments), both(branches))


def with_a_window(mask, size):
    """The mask with its tokens' positions: of a prompt or a plain sequence from 0 on, of a response from its prompt's end on."""
    segments, branches = np.asarray(mask.segments), np.asarray(mask.numbers())
    positions = np.zeros(segments.shape, np.int32)
    for row, i in np.ndindex(segments.shape):
        before = segments[row, :i] == segments[row, i]
        positions[row, i] = np.sum(before & ((branches[row, :i] == 0) | (branches[row, :i] == branches[row, i])))
    return with_window(mask, Window(size, jnp.asarray(positions)))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in ("xla", "chunked", "tree", "flash", "splash") for k in ("causal", "tree", "packed")]
    + [("tree", "long tree"), ("tree", "long causal")]
    + [(n, "windowed packed") for n in ("xla", "chunked", "flash", "splash")]
    + [("tree", "windowed tree"), ("splash", "windowed causal")],
)
def test_implementations_equal_numpy_and_each_others_gradients(name, kind, monkeypatch):
    length, long, windowed = 128, kind.startswith("long"), kind.startswith("windowed")
    kind = kind.split()[-1]
    monkeypatch.setattr(room, "CHUNK", 48)  # does not divide the length: the last chunk is ragged
    monkeypatch.setattr(room, "BLOCK", 100 if long else 24)
    monkeypatch.setattr(room, "LONG", length if long else 2 * length)  # from there on, in chunks that are computed again
    mask = dict(masks(length))[kind]
    mask = with_a_window(mask, 20) if windowed else mask
    dense = np.asarray(mask.dense())
    q, k, v = arrays(length)
    real = np.asarray(mask.segments, bool)
    weight = jnp.asarray(real[:, :, None, None] * np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def loss(name, q, k, v):
        out = self_attention(name, q, k, v, mask)
        return jnp.sum(out * weight), out

    (_, out), got = jax.jit(lambda *x: jax.value_and_grad(lambda *y: loss(name, *y), (0, 1, 2), has_aux=True)(*x))(q, k, v)
    np.testing.assert_allclose(np.asarray(out)[real], numpy_attention(q, k, v, dense)[real], atol=2e-5)
    assert np.all(np.isfinite(out))
    if name != "xla":
        want = jax.jit(jax.grad(lambda *x: loss("xla", *x)[0], (0, 1, 2)))(q, k, v)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5)


def test_the_library_kernel_takes_the_same_mask():
    """The cudnn path's call with the library's portable implementation in its place."""
    mask = dict(masks(32))["tree"]
    q, k, v = arrays(32)
    real = np.asarray(mask.segments, bool)
    got = jax.jit(lambda *x: jax.nn.dot_product_attention(*x, mask=mask.dense()[:, None], implementation="xla"))(q, k, v)
    want = jax.jit(lambda *x: self_attention("xla", *x, mask))(q, k, v)
    np.testing.assert_allclose(np.asarray(got)[real], np.asarray(want)[real], atol=2e-5)


def test_rows_with_branches_of_their_own_see_what_the_words_say():
    segments, branches = [1, 1, 1, 1, 2, 2, 0], [0, 0, 5, 6, 0, 0, 0]
    mask = packed_mask(jnp.asarray([segments]), jnp.asarray([branches]))
    dense = np.asarray(mask.dense())
    for i, j in np.ndindex(7, 7):
        want = j <= i and segments[i] == segments[j] and (branches[j] == 0 or branches[i] == branches[j])
        assert dense[0, i, j] == want, (i, j)
    np.testing.assert_array_equal(mask.rows(3, 2), dense[:, 3:5])


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("kind", ["causal", "tree", "packed"])
def test_a_window_counts_positions_and_not_indices(kind, size):
    """A row of 32: a response of a packed prompt sees as much of it as if the responses before it were not there."""
    plain = dict(masks(32))[kind]
    mask = with_a_window(plain, size)
    at = np.asarray(mask.window.positions)
    want = np.asarray(plain.dense()) & (at[:, :, None] - at[:, None, :] < size)
    np.testing.assert_array_equal(mask.dense(), want)
    np.testing.assert_array_equal(mask.rows(20, 8), want[:, 20:28])
    ranges = np.asarray(token_ranges(mask.segments, mask.numbers(), jnp.full((2, 32), size)))
    index = np.arange(32)
    own, begin, end, behind = (ranges[:, i, :, None] for i in range(4))
    seen = ((index >= own) & (index <= index[:, None])) | ((index >= begin) & (index < end))
    real = np.asarray(mask.segments) != 0
    np.testing.assert_array_equal(seen[real], want[real])
    for row, i in np.argwhere(real):  # of all who see a token the last one
        last = np.flatnonzero(want[row, :, i])[-1]
        assert last < behind[row, i, 0]
        if kind == "causal":
            assert last + 1 == behind[row, i, 0]


def test_scores_of_responses_are_those_that_the_tree_needs():
    """P (P + K R) + K R^2 scores, not (P + K R)^2: the largest product of a response is over the prompt or over itself."""
    p, k, r = 64, 4, 16
    q, key, value = arrays(p + k * r)
    text = str(jax.make_jaxpr(lambda *x: self_attention("tree", *x, tree_mask(jnp.ones((2, p), bool), k, r)))(q, key, value))
    assert f"{p + k * r},{p + k * r}]" not in text.replace(" ", "")


def test_auto_goes_by_platform_and_shape():
    assert choose("auto", 64, jnp.float32) == "xla"
    assert choose("auto", 4096, jnp.float32) == "chunked"
    assert choose("splash", 64, jnp.float32) == "splash"
    for kind in ("tree", "causal", "packed"):
        assert choose("auto", 64, jnp.float32, dict(masks(64))[kind]) == "xla"
        assert choose("auto", 256, jnp.float32, dict(masks(256))[kind]) == "tree"
    with for_platform("tpu"):
        assert choose("auto", 4096, jnp.bfloat16) == "splash"
        assert choose("auto", 4000, jnp.bfloat16) == "chunked"
        assert choose("auto", 4096, jnp.bfloat16, dict(masks(4096))["tree"]) == "splash"
        assert choose("auto", 4000, jnp.bfloat16, dict(masks(4000))["packed"]) == "splash"
    with for_platform("gpu"):
        assert choose("auto", 4096, jnp.bfloat16) == "flash"
        assert choose("auto", 64, jnp.bfloat16, dict(masks(64))["tree"]) == "flash"
        assert choose("auto", 64, jnp.float32) == "xla"


def test_flash_refuses_on_a_gpu_what_its_registers_cannot_hold():
    mask = prompt_mask(jnp.ones((2, 64), bool))
    with for_platform("gpu"), pytest.raises(ValueError, match=r"16-bit numbers on a GPU, not float32: set model\.compute_dtype"):
        self_attention("flash", *arrays(64), mask)


def test_a_length_that_splash_cannot_take_is_told():
    with pytest.raises(ValueError, match="multiples of 128, not 100"):
        self_attention("splash", *arrays(100), prompt_mask(jnp.ones((2, 100), bool)))

