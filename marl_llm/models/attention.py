"""Attention behind one seam: `self_attention` for rows under a `RowMask`.

| name | where | how |
|---|---|---|
| `xla` | everywhere | all scores at once, `[B, H, L, L]` |
| `chunked` | everywhere | queries in chunks, computed again in the backward pass: memory `[B, H, chunk, L]` |
| `tree` | everywhere | the prompt in causal blocks; responses over the prompt and themselves in one softmax: no score between branches |
| `cudnn` | GPU, 16-bit | `jax.nn.dot_product_attention` with the mask, a byte or more for each pair of tokens |
| `flash` | GPU | flash attention of the blocks that a query sees (`tree_kernel_gpu`) |
| `splash` | TPU | flash attention of the blocks that a query sees: JAX's kernel for one tree without a window, else ours (`tree_kernel`) |

All give the same numbers (tests/models/test_attention.py; flash and splash in Pallas' interpret mode on CPU). A decode step over pages has
a kernel of its own where `auto` or `splash` meets a TPU (`pages.by_kernel`).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.masks import RowMask, in_window, token_ranges
from marl_llm.models.sharding import constrain, per_device, ways

MASKED = -1e30  # finite, so that a row that sees nothing gets a uniform softmax instead of NaN
CHUNK = 256  # queries per chunk
LONG = 1024  # from this length on, the scores of a whole row cost more memory than they save time
BLOCK = 128  # queries of a causal block: below, a product costs more to start than its masked half costs to compute
BLOCKS = 8  # causal blocks at most; they are unrolled, and eight already leave 9/16 of the square
LANES = 128  # a TPU's lane width; splash attention wants lengths and head sizes in multiples

_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


@contextlib.contextmanager
def for_platform(name: str):
    """Within it, models are traced for another platform than JAX's own: ahead-of-time compilation for a TPU on a machine without one."""
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def platform() -> str:
    """The platform that models are traced for: 'cpu', 'gpu' or 'tpu'."""
    return _platform.get() or jax.default_backend()


def attend(
    queries: Float[Array, "B L H d"], keys: Float[Array, "B S J d"], values: Float[Array, "B S J d"], where: Bool[Array, "B L S"]
) -> Float[Array, "B L H d"]:
    """Softmax attention; H/J queries share a key head. Scores and softmax are float32.

    One matrix product per (row, key head) with that head's queries stacked: on CPU twice as fast as the einsum over five axes.
    """
    b, length, h, d = queries.shape
    j = keys.shape[-2]
    g = h // j
    q = rearrange(queries * d**-0.5, "b l (j g) d -> b j (g l) d", j=j)
    score = jnp.matmul(q, keys.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32).reshape(b, j, g, length, -1)
    weights = jax.nn.softmax(jnp.where(where[:, None, None], score, MASKED), axis=-1).astype(queries.dtype)
    out = weights.reshape(b, j, g * length, -1) @ values.transpose(0, 2, 1, 3)
    return rearrange(out, "b j (g l) d -> b l (j g) d", l=length)


def choose(name: str, length: int, dtype, mask: RowMask | None = None) -> str:
    """What `auto` means for rows of `length` on the platform; other names are returned as they are."""
    if name != "auto":
        return name
    if platform() == "tpu" and (length % LANES == 0 or (mask is not None and mask.branches is not None)):
        return "splash"
    if platform() == "gpu" and jnp.dtype(dtype).itemsize == 2:
        return "flash"
    if mask is not None and length > BLOCK:  # shorter rows cost the same either way, and compile faster as one product
        return "tree"
    return "chunked" if length >= LONG else "xla"


def self_attention(
    name: str, queries: Float[Array, "B L H d"], keys: Float[Array, "B L J d"], values: Float[Array, "B L J d"], mask: RowMask
) -> Float[Array, "B L H d"]:
    """Attention of rows to themselves by the named implementation. Outputs at padding are finite and mean nothing."""
    kind = choose(name, queries.shape[1], queries.dtype, mask)
    if kind == "xla":
        return attend(queries, keys, values, mask.dense())
    if kind == "chunked":
        return _chunked(queries, keys, values, mask)
    if kind == "tree":
        return _tree(queries, keys, values, mask)
    if kind == "cudnn":
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask.dense()[:, None], implementation="cudnn")
    if kind == "flash":
        if platform() == "gpu" and queries.dtype.itemsize != 2:
            raise ValueError(
                f"flash attention takes 16-bit numbers on a GPU, not {queries.dtype}: "
                "set model.compute_dtype='bfloat16', or model.attention='tree'"
            )
        return _packed(queries, keys, values, mask, gpu=True)
    return (_splash if mask.branches is None and mask.window is None else _packed)(queries, keys, values, mask)


def _chunked(queries, keys, values, mask: RowMask):
    b, length, h, d = queries.shape
    chunk = min(CHUNK, length)
    count = -(-length // chunk)
    padded = jnp.pad(queries, ((0, 0), (0, count * chunk - length), (0, 0), (0, 0)))
    wide = mask.padded(count * chunk - length)

    @jax.checkpoint
    def some(i):
        part = jax.lax.dynamic_slice_in_dim(padded, i * chunk, chunk, axis=1)
        where = wide.rows(i * chunk, chunk)[:, :, :length]
        return attend(part, keys, values, where)

    out = jax.lax.map(some, jnp.arange(count))  # [count, B, chunk, H, d]
    return out.transpose(1, 0, 2, 3, 4).reshape(b, count * chunk, h, d)[:, :length]


def _tree(queries, keys, values, mask: RowMask):
    b, length, h, d = queries.shape
    p, r, j = min(mask.prompt, length), mask.response, keys.shape[2]
    k = (length - p) // r
    long, out = length >= LONG, []
    size = max(BLOCK, -(-p // BLOCKS))
    for begin in range(0, p, size):
        end = min(begin + size, p)

        def block(start, n, begin=begin, end=end):
            key, value = (rearrange(x[:, :end], "b s j d -> b j 1 s d") for x in (keys, values))
            where = mask.rows(begin + start, n)[:, None, None, :, :end]
            q = jax.lax.dynamic_slice_in_dim(queries, begin + start, n, axis=1)
            q = rearrange(q, "b n (j g) d -> b j g n d", j=j)
            return rearrange(_weigh([_scores(q, key, where)], [value]), "b j g n d -> b n (j g) d")

        out.append(_in_chunks(block, end - begin, CHUNK if long else 0, axis=1))
    if k:

        def branches(start, n):
            # the heads' queries of a key head are stacked, and all branches are one product over the prompt
            key, value = (rearrange(x[:, :p], "b p j d -> b j 1 1 p d") for x in (keys, values))
            own_key, own_value = (rearrange(x[:, p:], "b (k r) j d -> b j k 1 r d", k=k) for x in (keys, values))
            q = jax.lax.dynamic_slice_in_dim(rearrange(queries[:, p:], "b (k r) h d -> b k r h d", k=k), start, n, axis=2)
            q = rearrange(q, "b k n (j g) d -> b j k g n d", j=j)

            def of_queries(x):
                return jax.lax.dynamic_slice_in_dim(x, start, n, axis=5).swapaxes(-1, -2)  # b 1 k 1 n 1

            segments = rearrange(mask.segments[:, p:], "b (k r) -> b 1 k 1 1 r", k=k)
            see = of_queries(segments) == mask.segments[:, None, None, None, None, :p]
            see_own = (jnp.arange(r) <= start + jnp.arange(n)[:, None]) & (of_queries(segments) == segments)
            if mask.window is not None:
                size, positions = mask.window
                own = rearrange(positions[:, p:], "b (k r) -> b 1 k 1 1 r", k=k)
                see &= in_window(of_queries(own), positions[:, None, None, None, None, :p], size)
                see_own &= in_window(of_queries(own), own, size)
            part = _weigh([_scores(q, key, see), _scores(q, own_key, see_own)], [value, own_value])
            return rearrange(part, "b j k g n d -> b k n (j g) d")

        part = _in_chunks(branches, r, max(1, CHUNK // k) if long else 0, axis=2)
        out.append(part.reshape(b, k * r, h, d))
    return jnp.concatenate(out, axis=1)


def _in_chunks(f, total: int, chunk: int, axis: int):
    """`f(start, n)` over `total` queries, which lie along `axis` of its result: at once for chunk 0, else in chunks that are computed
    again in the backward pass."""
    if not chunk:
        return f(0, total)
    f, whole = jax.checkpoint(f, static_argnums=(1,)), total // chunk
    out = []
    if whole:
        parts = jnp.moveaxis(jax.lax.map(lambda i: f(i * chunk, chunk), jnp.arange(whole)), 0, axis)
        out.append(parts.reshape(*parts.shape[:axis], whole * chunk, *parts.shape[axis + 2 :]))
    if total % chunk:
        out.append(f(whole * chunk, total % chunk))
    return jnp.concatenate(out, axis=axis)


def _stacked_product(left, right, transpose: bool):
    """`left [*lead, m, c] @ right`, where `right` has size 1 along lead axes that it shares: those are stacked into one product's rows."""
    n = left.ndim - 2
    cut = next((i for i in range(n) if all(right.shape[a] == 1 for a in range(i, n))), n)
    flat = left.reshape(*left.shape[:cut], -1, left.shape[-1])
    other = right.reshape(*right.shape[:cut], *right.shape[-2:])
    other = other.swapaxes(-1, -2) if transpose else other
    out = jnp.matmul(flat, other, preferred_element_type=jnp.float32)
    return out.reshape(*left.shape[:-1], other.shape[-1])


def _scores(q, key, where):
    """Scaled scores, float32, with the mask in them."""
    return jnp.where(where, _stacked_product(q * q.shape[-1] ** -0.5, key, True), MASKED)


def _weigh(scores: list, values: list):
    """Softmax over the union of the scores' last axes, times the values; the division is made on the result, which is smaller."""
    top = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s in scores])
    weights = [jnp.exp(s - jax.lax.stop_gradient(top)) for s in scores]
    total = sum(jnp.sum(w, axis=-1, keepdims=True) for w in weights)
    out = sum(_stacked_product(w.astype(v.dtype), v, False) for w, v in zip(weights, values, strict=True))
    return (out / total).astype(values[0].dtype)


@functools.cache
def _tree_mask_class():
    """The tree part of a `RowMask` for splash attention, computed inside the kernel. Made on first use: Pallas takes a second to import."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    class TreeMask(splash_attention_mask._ComputableMask):
        def __init__(self, length: int, prompt: int, response: int):
            self.rule = (length, prompt, response)
            super().__init__(shape=(length, length), mask_function=RowMask(None, prompt, response).sees)

        def __eq__(self, other):
            return isinstance(other, TreeMask) and self.rule == other.rule

        def __hash__(self):
            return hash((type(self), self.rule))

    return TreeMask


def _splash(queries, keys, values, mask: RowMask):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    length, h, d = queries.shape[1:]
    block = max(size for size in (512, 256, LANES) if length % size == 0) if length % LANES == 0 else None
    if block is None:
        raise ValueError(f"splash attention needs a row length in multiples of {LANES}, not {length}; pad, or set attention='xla'")
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    interpret = platform() == "cpu"

    def kernel_of(heads: int):
        tree = splash_attention_mask.MultiHeadMask([_tree_mask_class()(length, mask.prompt, mask.response)] * heads)
        return splash_attention_kernel.make_splash_mha(
            mask=tree, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
        )

    def local(q, k, v, segments):
        kernel = kernel_of(q.shape[1])
        both = splash_attention_kernel.SegmentIds(segments, segments)
        return jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=s))(q, k, v, both)

    return _per_head(local, -(-d // LANES) * LANES, queries, keys, values, mask.segments)


def tree_attention(
    kernel: ModuleType,
    queries: Float[Array, "B J G L d"],
    keys: Float[Array, "B J L d"],
    values: Float[Array, "B J L d"],
    *numbers: Int[Array, "B L"],
    interpret: bool = False,
) -> Float[Array, "B J G L d"]:
    """Softmax attention of packed rows of any length by a kernel, `tree_kernel` or `tree_kernel_gpu`; the queries are scaled already, and G
    of them share a key head. `numbers`: segments, branches and, in a layer with one, windows (see `token_ranges`). With `interpret` Pallas
    computes it on any platform, slowly."""
    length = queries.shape[3]
    more = -length % kernel.block_size(length)

    def wide(x, axis):
        return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])

    ranges = token_ranges(*(wide(x, 1) for x in numbers))
    return kernel.attention(wide(queries, 3), wide(keys, 2), wide(values, 2), ranges, interpret)[:, :, :, :length]


def _packed(queries, keys, values, mask: RowMask, gpu: bool = False):
    """Flash attention whose rows are data: Pallas' kernel for GPUs or for TPUs, each of which takes a second to import."""
    kernel = importlib.import_module("marl_llm.models.tree_kernel" + "_gpu" * gpu)

    def local(q, k, v, *numbers):
        group = q.shape[1] // k.shape[1]
        split = q.reshape(q.shape[0], -1, group, *q.shape[2:])
        return tree_attention(kernel, split, k, v, *numbers, interpret=platform() == "cpu").reshape(q.shape)

    numbers = [mask.segments, mask.numbers()]
    if mask.window is not None:
        numbers.append(jnp.broadcast_to(jnp.asarray(mask.window.size, jnp.int32), mask.segments.shape))
    size = queries.shape[-1]
    wide = max(16, 2 ** (size - 1).bit_length()) if gpu else -(-size // LANES) * LANES
    return _per_head(local, wide, queries, keys, values, *numbers)


def _per_head(kernel, wide: int, queries, keys, values, *numbers: Int[Array, "B L"]):
    """`kernel(q [B, H, L, wide], k [B, J, L, wide], v, *numbers)` for each device's heads; queries are scaled."""
    h, d = queries.shape[2:]

    def spread(x):
        return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, 0), (0, wide - d)))

    if keys.shape[2] % ways("heads"):  # too few key heads to split beside the query heads
        keys, values = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (keys, values))
    heads = ("batch", "heads", None, None)
    run = per_device(kernel, (heads, heads, heads, *[("batch", None)] * len(numbers)), heads)
    out = run(spread(queries * d**-0.5), spread(keys), spread(values), *numbers)
    return constrain(out[..., :d].transpose(0, 2, 1, 3), "batch", None, "heads", None)
