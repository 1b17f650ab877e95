"""A decoder in Flax linen, used only through `init` and `apply`: all of `config_files.ARCHITECTURES` by configuration.

Pre-norm blocks (with four norms in Gemma), RMSNorm, rotary positions, grouped-query attention (per-head RMSNorm on queries and keys in
Qwen3 and Gemma) over all that comes before or a sliding window, SwiGLU or its GELU form. It serves three uses, which differ only in the
keys that a token may see:

- rows `[B, L]` under a `RowMask`, plain or packed (a prompt and K responses that each see the prompt and themselves);
- the prefill of E prompts, which is a plain row whose keys and values are kept, or new tokens behind cached pages (`PrefixMask`);
- a decode step of K branches per prompt (`DecodeMask`), whose keys are the prompt's (shared, computed once) and each branch's own, or of
  the engine's rows (`PagedMask`), whose keys lie in pages.

Parameters have one of three layouts: one subtree per layer (`block_0`, `block_1`, ...); all layers stacked (`blocks`, scanned with
`nn.scan`), which compiles faster and has fewer leaves; or, for sampling, one subtree per layer with fused and transposed matrices
(`marl_llm.models.serving`). `stack_layers` and `unstack_layers` convert, bit for bit; functions read the layout off the parameters.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from marl_llm.models.attention import platform, self_attention
from marl_llm.models.cache import BranchCache, DecodeMask, decode_attention
from marl_llm.models.config import NO_WINDOW, ModelConfig
from marl_llm.models.experts import mixture
from marl_llm.models.masks import RowMask, Window, prompt_mask
from marl_llm.models.pages import PagedCache, PagedMask, Pages, PrefixMask, paged_attention, prefix_attention, shifted, with_window
from marl_llm.models.rotary import rotary_angles, rotate
from marl_llm.models.sharding import constrain

COLUMNS = 256  # rows up to which a CPU multiplies faster with the rows as columns


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last axis, in float32; with `unit_offset` the factor is 1 + weight."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        c = self.config
        init = nn.initializers.zeros if c.unit_offset else nn.initializers.ones
        weight = self.param("weight", init, (x.shape[-1],), jnp.dtype(c.param_dtype))
        weight = 1.0 + weight.astype(jnp.float32) if c.unit_offset else weight
        y = x.astype(jnp.float32)
        return (weight * y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + c.norm_epsilon)).astype(x.dtype)


PRODUCT = "product"  # the name under which a policy of rematerialisation knows what a `Projection` gives


class Projection(nn.Module):
    """A matrix product over the last `inputs` axes of `x`, with an optional bias and optional low-rank adapters.

    Adapters live in the collection 'lora' at the same path: `a [N, in, r]`, `b [N, r, out]`, already scaled, one pair per agent (see
    `marl_llm.models.lora`). `agents [B, N]` holds each row's weights over them; None takes the only pair. A `transposed` kernel is the
    matrix `[out, in]` of the serving layout, and has no adapters.
    """

    features: tuple[int, ...]
    config: ModelConfig
    scale: float
    use_bias: bool = False
    inputs: int = 1
    transposed: bool = False

    @nn.compact
    def __call__(self, x, agents: Float[Array, "B N"] | None = None):
        c = self.config
        lead, inside = x.shape[: x.ndim - self.inputs], x.shape[x.ndim - self.inputs :]
        size, out = _prod(inside), _prod(self.features)
        if self.transposed:
            y = columns_product(x.reshape(*lead, size), self.variables["params"]["kernel"], jnp.dtype(c.compute_dtype))
            y = y + self.variables["params"]["bias"].astype(y.dtype) if self.use_bias else y
            return y.reshape(*lead, *self.features)
        # drawn as one matrix, so that heads do not change what an initializer gives

        def draw(key, shape, dtype):
            return (jax.random.normal(key, (size, out), dtype) * self.scale).reshape(shape)

        kernel = self.param("kernel", draw, (*inside, *self.features), jnp.dtype(c.param_dtype))
        dtype = jnp.dtype(c.compute_dtype)
        flat = x.reshape(*lead, size).astype(dtype)
        y = rows_product(flat, kernel.reshape(size, out).astype(dtype))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, self.features, jnp.dtype(c.param_dtype))
            y = y + bias.reshape(out).astype(dtype)
        if self.has_variable("lora", "a"):
            a, b = (self.get_variable("lora", name).astype(dtype) for name in ("a", "b"))
            if agents is None:
                y = y + rows_product(flat @ a[0], b[0])
            else:
                weight = agents.astype(dtype).reshape(agents.shape[0], *(1,) * (flat.ndim - 2), agents.shape[1], 1)
                low = jnp.einsum("...i,nir->...nr", flat, a) * weight
                y = y + jnp.einsum("...nr,nro->...o", low, b)
        return checkpoint_name(y, PRODUCT).reshape(*lead, *self.features)


def columns_product(x: Float[Array, "*rows D"], matrix: Float[Array, "O D"], dtype, out=None) -> Float[Array, "*rows O"]:
    """`x @ matrix.T`. On a CPU with the rows as columns where they are few (a decode step), which makes a product with weights that come
    from memory a quarter to a third faster; the barriers keep XLA from turning it around again."""
    flat, matrix = x.reshape(-1, x.shape[-1]).astype(dtype), matrix.astype(dtype)
    if platform() == "cpu" and flat.shape[0] <= COLUMNS:
        y = jax.lax.optimization_barrier(matrix @ jax.lax.optimization_barrier(flat.T)).T
    else:
        y = jax.lax.dot_general(flat, matrix, (((1,), (1,)), ((), ())), preferred_element_type=out)
    return y.reshape(*x.shape[:-1], matrix.shape[0])


def rows_product(x: Float[Array, "*rows D"], matrix: Float[Array, "D O"]) -> Float[Array, "*rows O"]:
    """`x @ matrix`, whose weight gradient is taken with an explicitly transposed `x` on a CPU: the contraction over rows that autodiff
    asks for is left to a slower kernel there (84 against 99 GFLOP/s at 640 rows)."""
    return _rows_product(x, matrix) if platform() == "cpu" else x @ matrix


@jax.custom_jvp
def _rows_product(x, matrix):
    return x @ matrix


@_rows_product.defjvp
def _rows_product_tangent(primals, tangents):
    (x, matrix), (x_tangent, matrix_tangent) = primals, tangents
    return _rows_product(x, matrix), x_tangent @ matrix + _turned_product(x, matrix_tangent)


@functools.partial(jax.checkpoint, prevent_cse=False)  # so that the backward pass keeps x, which others keep too, and not its transpose
def _turned_product(x, matrix):
    """`x @ matrix`, linear in `matrix`: autodiff transposes it to `turned @ gradient`."""
    turned = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)  # otherwise XLA folds the transpose into the product again
    y = jax.lax.dot_general(turned, jax.lax.optimization_barrier(matrix), (((0,), (0,)), ((), ())))
    return y.reshape(*x.shape[:-1], matrix.shape[-1])


class Attention(nn.Module):
    """Grouped-query attention."""

    config: ModelConfig
    serving: bool = False

    @nn.compact
    def __call__(self, x, angles, mask, cache, agents):
        c = self.config

        def project(name, heads):
            bias = c.attention_bias
            return Projection((heads, c.head_dim), c, c.width**-0.5, use_bias=bias, transposed=self.serving, name=name)(x, agents)

        if self.serving:
            q, k, v = jnp.split(
                project("qkv", c.query_heads + 2 * c.key_value_heads), (c.query_heads, c.query_heads + c.key_value_heads), axis=-2
            )
        else:
            q, k, v = project("query", c.query_heads), project("key", c.key_value_heads), project("value", c.key_value_heads)
        if c.qk_norm:
            q, k = RMSNorm(c, name="query_norm")(q), RMSNorm(c, name="key_norm")(k)
        q, k = rotate(q, angles), rotate(k, angles)
        if c.query_scalar:  # every attention divides by the root of head_dim; bfloat16 has the factor with an error of up to 0.4 %
            q = (q.astype(jnp.float32) * (c.head_dim / c.query_scalar) ** 0.5).astype(q.dtype)
        q = constrain(q, "batch", None, "heads", None)
        k, v = (constrain(y, "batch", None, "key_value_heads", None) for y in (k, v))
        if cache is None:
            out, new = self_attention(c.attention, q, k, v, mask), (k, v)
        elif isinstance(mask, PrefixMask):
            out, new = prefix_attention(q, k, v, cache, mask), (k, v)
        elif isinstance(mask, PagedMask):
            out, new = paged_attention(q, k, v, cache, mask, c.attention)
        else:
            out, new = decode_attention(q, k, v, cache, mask)
        scale = (c.query_heads * c.head_dim) ** -0.5 / (2 * c.layers) ** 0.5
        out = Projection((c.width,), c, scale, use_bias=c.output_bias, inputs=2, transposed=self.serving, name="output")(out, agents)
        return out, new


class Block(nn.Module):
    """One pre-norm transformer block, with `post_norms` one of four norms; `sparse` makes its feed-forward a mixture of experts."""

    config: ModelConfig
    sparse: bool = False
    serving: bool = False

    @nn.compact
    def __call__(self, x, angles, mask, cache, agents):
        c = self.config
        x = constrain(x, "batch", None, None)
        with jax.named_scope("attention"):
            h = RMSNorm(c, name="attention_norm")(x)
            h, new = Attention(c, self.serving, name="attention")(h, angles, mask, cache, agents)
            x = x + (RMSNorm(c, name="attention_post_norm")(h) if c.post_norms else h)
        with jax.named_scope("feed_forward"):
            h = RMSNorm(c, name="feed_forward_norm")(x)
            h = Experts(c, name="experts")(h) if self.sparse else self._feed_forward(h, agents)
            h = RMSNorm(c, name="feed_forward_post_norm")(h) if c.post_norms else h
        return x + h, new

    def _feed_forward(self, h, agents):
        c = self.config
        matrix = functools.partial(Projection, config=c, use_bias=c.feed_forward_bias, transposed=self.serving)
        scale = c.feed_forward**-0.5 / (2 * c.layers) ** 0.5
        if self.serving:
            gate, up = jnp.split(matrix((2 * c.feed_forward,), scale=scale, name="gate_up")(h), 2, axis=-1)
        else:
            gate = matrix((c.feed_forward,), scale=c.width**-0.5, name="gate")(h, agents)
            up = matrix((c.feed_forward,), scale=c.width**-0.5, name="up")(h, agents)
        act = jax.nn.silu if c.activation == "silu" else functools.partial(jax.nn.gelu, approximate=True)
        hidden = constrain(act(gate) * up, "batch", None, "feed_forward")
        return matrix((c.width,), scale=scale, name="down")(hidden, agents)


class Experts(nn.Module):
    """A mixture of SwiGLU experts behind a softmax router (Qwen3-MoE)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x):
        c = self.config
        d, f, n, dtype = c.width, c.expert_feed_forward, c.experts, jnp.dtype(c.param_dtype)
        into, out = nn.initializers.normal(d**-0.5), nn.initializers.normal(f**-0.5 / (2 * c.layers) ** 0.5)
        router = self.param("router", into, (d, n), dtype)
        gate, up = (self.param(name, into, (n, d, f), dtype) for name in ("gate", "up"))
        down = self.param("down", out, (n, f, d), dtype)
        return mixture(x.astype(jnp.dtype(c.compute_dtype)), router, gate, up, down, c.experts_per_token, c.normalize_experts)


# What the backward pass finds there; the rest is computed again. JAX's policy for products does not see those of `rows_product`.
_REMAT = {"dots": jax.checkpoint_policies.save_only_these_names(PRODUCT), "full": jax.checkpoint_policies.nothing_saveable}


class _Layer(NamedTuple):
    """What layers of one structure differ in: all of them `[Y]`, or one of them."""

    number: Int[Array, "*Y"]
    window: Int[Array, "*Y"] | None = None  # None: no layer has one
    rope: Int[Array, "*Y"] | None = None  # which angles it has, a number of `ModelConfig.ropes`; None: all layers have the same

    @classmethod
    def every(cls, config: ModelConfig) -> _Layer:
        """All layers of a model."""
        layers = range(config.layers)
        windows = jnp.asarray([config.window(y) or NO_WINDOW for y in layers], jnp.int32) if config.windowed else None
        ropes = jnp.asarray([config.ropes.index(config.rope(y)) for y in layers]) if len(config.ropes) > 1 else None
        return cls(jnp.arange(config.layers), windows, ropes)


class _Scanned(nn.Module):
    """A block in the form that `nn.scan` wants. Each layer gets what it differs in from others and its `columns`, the keys and values of a
    `PagedCache`; the `pages` are those of all layers. Keys and values come out stacked, `[Y, ...]`."""

    config: ModelConfig
    sparse: bool

    @nn.compact
    def __call__(self, x, layer: _Layer, columns, positions, angles, mask, agents, pages):
        block, cache = Block(self.config, self.sparse, name="block"), None
        if layer.window is not None:
            mask = with_window(mask, Window(layer.window, positions))
        angles = angles if layer.rope is None else jax.tree.map(lambda x: x[layer.rope], angles)
        if pages is not None:
            mask = shifted(mask, layer.number * (pages.keys.shape[1] // self.config.layers))
            cache = pages if columns is None else PagedCache(pages, *columns)
        x, new = block(x, angles, mask, cache, agents)
        return x, new if columns is None else (new.keys, new.values)


class Decoder(nn.Module):
    """Tokens to hidden states; `head` turns hidden states into logits, `value` into one scalar each.

    `__call__` with `cache=None` runs rows under a `RowMask` and also returns every layer's keys and values. With a cache per layer it
    runs a decode step (`BranchCache` and `DecodeMask`, or `PagedCache` and `PagedMask`; returns the caches) or rows behind cached
    beginnings (`Pages` and a `PrefixMask`, returns the rows' keys and values). Stacked layers have one cache, their pages in one array and
    their columns as `[Y, ...]`, and return one pair of keys and values (or one cache), `[Y, ...]`; they know no `BranchCache`. `serving`
    reads the layout of `marl_llm.models.serving`.
    """

    config: ModelConfig
    stacked: bool = False
    serving: bool = False

    def setup(self):
        c = self.config
        dtype = jnp.dtype(c.param_dtype)
        self.embedding = self.param("embedding", nn.initializers.normal(c.width**-0.5), (c.vocab_size, c.width), dtype)
        if self.stacked:
            scanned = nn.scan(
                self._remat(_Scanned),
                variable_axes={"params": 0, "lora": 0},
                split_rngs={"params": True},
                in_axes=(0, 0, *(nn.broadcast,) * 5),
                length=c.layers,
            )
            self.blocks = scanned(c, c.is_sparse(0))
        else:
            self.layers = [self._remat(Block)(c, c.is_sparse(y), self.serving, name=f"block_{y}") for y in range(c.layers)]
        self.final_norm = RMSNorm(c)
        if not c.tie_embeddings and not self.serving:
            self.output = self.param("output", nn.initializers.normal(c.width**-0.5), (c.width, c.vocab_size), dtype)
        if c.value_head:
            self.value_head = _ValueHead()

    def _remat(self, module):
        policy = _REMAT.get(self.config.remat)
        return nn.remat(module, policy=policy, prevent_cse=not self.stacked) if policy else module

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        mask: RowMask | DecodeMask | PrefixMask | PagedMask,
        cache: list[BranchCache] | list[PagedCache] | list[Pages] | None = None,
        agents: Float[Array, "B N"] | None = None,
    ):
        """Hidden states `[B, L, D]` after the final norm, and per layer the keys and values (or the updated cache)."""
        c = self.config
        x = self.embedding[tokens].astype(jnp.dtype(c.compute_dtype))
        x = x * jnp.asarray(c.width**0.5, x.dtype) if c.scale_embeddings else x
        x = constrain(x, "batch", None, None)
        angles = {rope: rotary_angles(c, positions, rope) for rope in c.ropes}
        if self.stacked:
            pages, columns = self._one_cache(cache)
            angles = angles[c.ropes[0]] if len(c.ropes) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *angles.values())
            x, kept = self.blocks(x, _Layer.every(c), columns, positions, angles, mask, agents, pages)
            new = [kept if columns is None else PagedCache(pages, *kept)]
        else:
            new = []
            for y, block in enumerate(self.layers):
                seen = with_window(mask, Window(c.window(y), positions)) if c.window(y) else mask
                x, layer = block(x, angles[c.rope(y)], seen, None if cache is None else cache[y], agents)
                new.append(layer)
        return self.final_norm(x), new

    @staticmethod
    def _one_cache(cache: list[PagedCache] | list[Pages] | None) -> tuple[Pages | None, tuple | None]:
        """(pages, columns) of stacked layers."""
        if cache is None:
            return None, None
        (cache,) = cache
        return (cache.pages, (cache.keys, cache.values)) if isinstance(cache, PagedCache) else (cache, None)

    def head(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """Logits of hidden states, float32."""
        dtype = jnp.dtype(self.config.compute_dtype)
        if self.serving:
            matrix = self.embedding if self.config.tie_embeddings else self.variables["params"]["output"]
            return columns_product(hidden, matrix, dtype, jnp.float32).astype(jnp.float32)
        weight = (self.embedding.T if self.config.tie_embeddings else self.output).astype(dtype)
        return jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)

    def value(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape"]:
        """One scalar per hidden state, float32. Raises `ValueError` when the config has no value head."""
        if not self.config.value_head:
            raise ValueError("this model has no value head; set ModelConfig.value_head")
        return self.value_head(hidden)

    def everything(self, tokens, positions, mask):
        """Touches every parameter; what `init` runs."""
        hidden, _ = self(tokens, positions, mask)
        return self.head(hidden), self.value(hidden) if self.config.value_head else None


class _ValueHead(nn.Module):
    """A linear map to one scalar that starts at zero, so that a fresh critic predicts 0."""

    @nn.compact
    def __call__(self, hidden):
        kernel = self.param("kernel", nn.initializers.zeros, (hidden.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, ())
        return jnp.sum(hidden.astype(jnp.float32) * kernel, axis=-1) + bias


def _prod(shape) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


@functools.partial(jax.jit, static_argnames=("config", "stacked"))
def init_params(config: ModelConfig, key: jax.Array, stacked: bool = False) -> dict:
    """Random parameters of a decoder, a plain pytree, the same numbers in both layouts. `key` is consumed."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Decoder(config).init(key, tokens, tokens, prompt_mask(jnp.ones((1, 2), bool)), method="everything")["params"]
    return stack_layers(params) if stacked else params


def is_stacked(params: dict) -> bool:
    """Whether the layers of a parameter pytree are stacked."""
    return "blocks" in params


def stack_layers(params: dict) -> dict:
    """One leaf per weight with all layers in front, `[Y, ...]`. Bit-exact inverse of `unstack_layers`.

    Raises `ValueError` when the layers differ in structure (a mixture model with some dense layers) or are stacked already.
    """
    names = sorted((n for n in params if n.startswith("block_")), key=lambda n: int(n.removeprefix("block_")))
    if not names:
        raise ValueError("these parameters have no layers to stack; are they stacked already?")
    if len({jax.tree.structure(params[n]) for n in names}) > 1:
        raise ValueError("layers of different structure (dense and mixture) cannot be stacked; keep them apart")
    rest = {n: v for n, v in params.items() if n not in names}
    return rest | {"blocks": {"block": jax.tree.map(lambda *x: jnp.stack(x), *(params[n] for n in names))}}


def unstack_layers(params: dict) -> dict:
    """One subtree per layer, as sampling wants it; separate layers are returned as they are."""
    if "lora" in params:
        return {name: unstack_layers(part) for name, part in params.items()}
    if not is_stacked(params):
        return params
    layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    rest = {n: v for n, v in params.items() if n != "blocks"}
    return rest | {f"block_{y}": jax.tree.map(lambda x, y=y: x[y], params["blocks"]["block"]) for y in range(layers)}
