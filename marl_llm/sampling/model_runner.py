"""The device part of the engine: keys and values in pages, as a value and three pure functions.

`admit` computes new prompts, pieces of prompts, or what is new in them into pages, and draws the token behind each; `decode` draws up to a
chunk of tokens in all rows at once; `verify` draws in one step as many as drafts allow. What a row is (its tokens so far, its pages, how it
draws) comes from the host with every call, so that rows are any requests in any order; only pages live on the devices. Within a chunk a
row's new keys and values are columns beside the pages, which a step writes as one slice; they go into pages when the chunk ends.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from marl_llm.models import (  # fmt: skip
    SAMPLE,
    Decoder,
    ModelConfig,
    PagedCache,
    PagedMask,
    Pages,
    PrefixMask,
    is_serving,
    is_stacked,
    prompt_mask,
    split_adapters,
    to_cache,
    use_rules,
)
from marl_llm.models.pages import written, written_to_layers
from marl_llm.sampling.token_sampling import RowSamplingParams, SampledToken, identity_key, sample_token
from marl_llm.sampling.transfer import Layout, layout_of, packed, unpacked

SEEDS = 8  # numbers in a request's identity, at most


class SamplingMetadata(NamedTuple):
    """How n rows draw: who they are, what they have drawn, when they end."""

    seeds: Int[Array, "n 8"]
    seed_count: Int[Array, "n"]
    count: Int[Array, "n"]  # tokens drawn so far
    budget: Int[Array, "n"]
    state: Int[Array, "n"]  # of the stop rule's automaton
    settings: RowSamplingParams
    model: Int[Array, "n"]  # whose adapters, where several models share a base


class Admission(NamedTuple):
    """n = A b rows of new tokens; those of a part lie together. A row of padding has targets that are no pages."""

    tokens: Int[Array, "n L"]  # padded on the right
    new: Int[Array, "n"]  # how many of them are real, at least 1
    beginning: Int[Array, "A b M"]  # pages that hold what comes before
    kept: Int[Array, "A b"]  # how many tokens of it there are
    base: Int[Array, "A b"]  # page that holds the last of them, if it is not full
    target: Int[Array, "A b W"]  # pages that the new tokens go into
    sampling: SamplingMetadata


class Row(NamedTuple):
    """S rows that decode; those of a part lie together."""

    token: Int[Array, "S"]  # the last one drawn; its keys and values are not in the pages yet
    length: Int[Array, "S"]  # tokens whose keys and values are
    alive: Bool[Array, "S"]
    target: Int[Array, "A s W"]  # pages that the chunk's tokens go into, from column length % T of the first on
    sampling: SamplingMetadata


class Chunk(NamedTuple):
    """What `decode` drew: C steps of S rows."""

    drawn: SampledToken  # each [C, S]
    where: Bool[Array, "C S"]


class Entered(NamedTuple):
    """What `admit` drew: the token behind each of n rows, the state of its stop rule, and whether it goes on."""

    drawn: SampledToken  # each [n]
    state: Int[Array, "n"]
    alive: Bool[Array, "n"]


class Decoded(NamedTuple):
    """What `decode` made of S rows."""

    chunk: Chunk
    state: Int[Array, "S"]
    alive: Bool[Array, "S"]


class Rules(NamedTuple):
    """The stop rules of all requests, their states numbered through."""

    table: Int[Array, "states classes"]
    ends: Bool[Array, "states"]
    rule: Int[Array, "states"]  # which one a state belongs to
    classes: Int[Array, "rules V"]

    def next(self, state: Int[Array, "n"], token: Int[Array, "n"]) -> Int[Array, "n"]:
        """The states behind tokens."""
        return self.table[state, self.classes[self.rule[state], token]]


def adapters_of(params: dict) -> int:
    """How many models' adapters parameters carry."""
    return jax.tree.leaves(params["lora"])[0].shape[-3] if params.get("lora") else 0


def init_pages(config: ModelConfig, parts: int, pages: int, size: int, stacked: bool = False) -> list[Pages]:
    """Empty pages of `size` (T) tokens, `pages` in each of `parts` (A), per layer: an array each, or `stacked` one for all layers."""
    j, d, dtype = config.key_value_heads, config.head_dim, jnp.dtype(config.compute_dtype)
    shape, arrays = (parts, pages * config.layers if stacked else pages, j), 1 if stacked else config.layers
    return [Pages(jnp.zeros((*shape, d, size), dtype), jnp.zeros((*shape, size, d), dtype)) for _ in range(arrays)]


def page_bytes(config: ModelConfig, size: int) -> int:
    """Bytes of one page of `size` tokens, all layers."""
    return 2 * config.layers * size * config.key_value_heads * config.head_dim * jnp.dtype(config.compute_dtype).itemsize


def served_decoder(config: ModelConfig, params: dict) -> tuple[Decoder, dict]:
    """(model, variables for its `apply`) of parameters as they are served."""
    variables, base = split_adapters(params)
    return Decoder(config, stacked=is_stacked(base), serving=is_serving(base)), variables


def _stored(pages: list[Pages], layers: list[tuple], base: Array, target: Array, offset: Array) -> list[Pages]:
    """The pages with new keys and values of each layer, or of all stacked layers; see `written`."""
    put = written if layers[0][0].ndim == 4 else written_to_layers
    return [put(old, base, target, offset, *new) for old, new in zip(pages, layers, strict=True)]


def _chosen(params: dict, sampling: SamplingMetadata) -> Float[Array, "n N"] | None:
    """Whose adapters each row reads, of the N that there are; None where there is no choice."""
    count = adapters_of(params)
    return jax.nn.one_hot(sampling.model, count) if count > 1 else None


def _rules(mesh: Mesh | None):
    return contextlib.nullcontext() if mesh is None else use_rules(mesh, SAMPLE)


def _given(vector: Int[Array, "words"], layout: Layout, mesh: Mesh | None) -> Any:
    """The host's inputs, replicated on every device. Without this constraint XLA's partitioner copies every layer's pages."""
    given = unpacked(vector, layout)
    if mesh is None:
        return given
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec())), given)


def _keys(root: Key[Array, ""], sampling: SamplingMetadata) -> Key[Array, "n"]:
    return jax.vmap(identity_key, (None, 0, 0))(root, sampling.seeds, sampling.seed_count)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "layout", "fresh", "truncates", "width"), donate_argnames=("pages",))
def admit(
    config: ModelConfig, params: dict, pages: list[Pages], given: Int[Array, "words"], rules: Rules, root: Key[Array, ""],
    *, mesh: Mesh | None, layout: Layout, fresh: bool, truncates: bool, width: int,
) -> tuple[list[Pages], Int[Array, "out"]]:  # fmt: skip
    """Computes n rows of new tokens into pages: the pages, and an `Entered` as `entered_layout` says.

    `given` is an `Admission` and `layout` how it lies there (`transfer`). `fresh` promises that nothing comes before; `truncates` and
    `width`: see `token_sampling.sample_token`. The pages are donated.
    """
    a: Admission = _given(given, layout, mesh)
    model, variables = served_decoder(config, params)
    with _rules(mesh):
        hidden, layers = _forward(model, variables, a, None if fresh else pages, _chosen(params, a.sampling))
        last = jnp.take_along_axis(hidden, (a.new - 1)[:, None, None], axis=1)[:, 0]
        logits = model.apply(variables, last, method="head")
    keys = jax.vmap(jax.random.fold_in)(_keys(root, a.sampling), a.sampling.count)
    drawn = sample_token(logits, keys, a.sampling.settings, truncates, width)
    state = rules.next(a.sampling.state, drawn.token)
    alive = ~rules.ends[state] & (a.sampling.count + 1 < a.sampling.budget)
    return _entered(pages, layers, a, drawn.token), packed(Entered(drawn, state, alive))


def _forward(model: Decoder, variables: dict, a: Admission, pages: list[Pages] | None, agents: Array | None) -> tuple[Array, list]:
    """Hidden states of new tokens behind their beginnings, and their keys and values. pages: None where nothing comes before."""
    length, kept = a.tokens.shape[1], a.kept.reshape(-1)
    where = jnp.arange(length)[None] < a.new[:, None]
    positions = kept[:, None] + jnp.minimum(jnp.arange(length)[None], a.new[:, None] - 1)
    if pages is None:
        return model.apply(variables, a.tokens, positions, prompt_mask(where), agents=agents)
    mask = PrefixMask(prompt_mask(where), a.beginning, a.kept)
    return model.apply(variables, a.tokens, positions, mask, cache=pages, agents=agents)


def _entered(pages: list[Pages], layers: list[tuple], a: Admission, drawn: Int[Array, "n"]) -> list[Pages]:
    """The pages with the keys and values of new tokens. They are written in place only if nothing can read them later: the targets wait for
    the draw, or XLA copies the whole cache."""
    target = jnp.where(drawn.reshape(*a.kept.shape, 1) >= 0, a.target, pages[0].keys.shape[1])
    offset = a.kept % pages[0].keys.shape[-1]
    return _stored(pages, [to_cache(*new) for new in layers], a.base, target, offset)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "layout", "truncates", "width"), donate_argnames=("pages",))
def verify(
    config: ModelConfig, params: dict, pages: list[Pages], given: Int[Array, "words"], rules: Rules, root: Key[Array, ""],
    *, mesh: Mesh | None, layout: Layout, truncates: bool, width: int,
) -> tuple[list[Pages], Int[Array, "out"]]:  # fmt: skip
    """A step of n rows, each with the last token that it drew and a draft behind it: the pages, and a `Decoded` of L columns in place of
    steps, as `decoded_layout` says. `given` is an `Admission`; the others are those of `decode`.

    At each position the token is drawn with the key that it has without a draft. The first of them always counts, and a further one while
    what was drawn before it is what the draft says (`accept_drafts`). So a draft changes how many tokens are drawn at once, and none of
    them.
    """
    a: Admission = _given(given, layout, mesh)
    model, variables = served_decoder(config, params)
    n, columns = a.tokens.shape
    with _rules(mesh):
        hidden, layers = _forward(model, variables, a, pages, _chosen(params, a.sampling))
        logits = model.apply(variables, hidden.reshape(n * columns, -1), method="head")
    count = a.sampling.count[:, None] + jnp.arange(columns)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(_keys(root, a.sampling), count).reshape(-1)
    settings = jax.tree.map(lambda x: jnp.repeat(x, columns), a.sampling.settings)
    drawn = sample_token(logits, keys, settings, truncates, width)
    drawn = jax.tree.map(lambda x: x.reshape(n, columns, *x.shape[1:]).swapaxes(0, 1), drawn)
    where, state, alive = accept_drafts(drawn.token, a, rules)
    return _entered(pages, layers, a, drawn.token[0]), packed(Decoded(Chunk(drawn, where), state, alive))


def accept_drafts(
    drawn: Int[Array, "L n"], a: Admission, rules: Rules
) -> tuple[Bool[Array, "L n"], Int[Array, "n"], Bool[Array, "n"]]:
    """Which tokens that were drawn behind rows of drafts count, the state of each row's stop rule behind the last, and whether it goes on.

    Exact-match verification: a column counts if the one before it does, drew what this column's token says, and did not end the response.
    """
    def accept_column(carry, column):
        counts, state, alive = carry
        token, draft, step = column
        state = jnp.where(counts, rules.next(state, token), state)
        alive = jnp.where(counts, ~rules.ends[state] & (a.sampling.count + step + 1 < a.sampling.budget), alive)
        follows = counts & alive & (step + 1 < a.new) & (draft == token)
        return (follows, state, alive), counts

    drafts = jnp.roll(a.tokens.T, -1, axis=0)  # the draft's token for what a column draws
    active = jnp.ones(a.new.shape, bool)
    (_, state, alive), where = jax.lax.scan(accept_column, (active, a.sampling.state, active), (drawn, drafts, jnp.arange(drawn.shape[0])))
    return where, state, alive


@functools.partial(jax.jit, static_argnames=("config", "mesh", "layout", "chunk", "truncates", "width"), donate_argnames=("pages",))
def decode(
    config: ModelConfig, params: dict, pages: list[Pages], given: Int[Array, "words"], rules: Rules, root: Key[Array, ""],
    *, mesh: Mesh | None, layout: Layout, chunk: int, truncates: bool, width: int,
) -> tuple[list[Pages], Int[Array, "out"]]:  # fmt: skip
    """Up to `decode_steps` (C) tokens in every running row; ends early when none is left: the pages, and a `Decoded` as `decoded_layout`
    says.

    `given` is (`Row`, who reads which pages: two `PageList`, or a `PageTable`) and `layout` how they lie there (`transfer`). `truncates`
    and `width`: see `token_sampling.sample_token`. The pages are donated.
    """
    rows, lists = _given(given, layout, mesh)
    model, variables = served_decoder(config, params)
    s, t = rows.token.shape[0], pages[0].keys.shape[-1]
    keys_of_rows, agents = _keys(root, rows.sampling), _chosen(params, rows.sampling)
    real = jnp.zeros((chunk, s), jnp.float32)
    kept = (jnp.full((chunk, s, width), -1, jnp.int32), real) if width else (None, None)
    out = Chunk(SampledToken(jnp.zeros((chunk, s), jnp.int32), real, real, real, *kept), jnp.zeros((chunk, s), bool))
    j, d, dtype = config.key_value_heads, config.head_dim, pages[0].keys.dtype
    rows_of = (config.layers, s) if model.stacked else (s,)
    own = [(jnp.zeros((*rows_of, j, chunk, d), dtype),) * 2 for _ in pages]

    def more(carry):
        _, step, alive, *_ = carry
        return (step < chunk) & jnp.any(alive)

    def decode_step(carry):
        out, step, alive, own, token, state = carry
        cache = [PagedCache(old, *new) for old, new in zip(pages, own, strict=True)]
        where = PagedMask(lists, step)
        hidden, cache = model.apply(variables, token[:, None], (rows.length + step)[:, None], where, cache=cache, agents=agents)
        logits = model.apply(variables, hidden[:, 0], method="head")
        keys = jax.vmap(jax.random.fold_in)(keys_of_rows, rows.sampling.count + step)
        drawn = sample_token(logits, keys, rows.sampling.settings, truncates, width)

        def put(all_, new):
            return jax.lax.dynamic_update_slice_in_dim(all_, new[None], step, axis=0)

        out = Chunk(jax.tree.map(put, out.drawn, drawn), put(out.where, alive))
        token = jnp.where(alive, drawn.token, token)
        state = jnp.where(alive, rules.next(state, drawn.token), state)
        alive = alive & ~rules.ends[state] & (rows.sampling.count + step + 1 < rows.sampling.budget)
        return out, step + 1, alive, [(c.keys, c.values) for c in cache], token, state

    with _rules(mesh):
        carry = (out, jnp.int32(0), rows.alive, own, rows.token, rows.sampling.state)
        out, _, alive, own, _, state = jax.lax.while_loop(more, decode_step, carry)
    parts = rows.target.shape[0]
    base, offset = rows.target[:, :, 0], (rows.length % t).reshape(parts, s // parts)
    pages = _stored(pages, [(keys.swapaxes(-1, -2), values) for keys, values in own], base, rows.target, offset)
    return pages, packed(Decoded(out, state, alive))


def _drawn(*rows: int, width: int) -> SampledToken:
    """Shapes and dtypes of draws."""
    i32, f32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (np.int32, np.float32))
    return SampledToken(i32(rows), f32(rows), f32(rows), f32(rows), *(i32((*rows, width)), f32(rows)) if width else (None, None))


@functools.cache
def entered_layout(n: int, width: int) -> Layout:
    """Of what `admit` gives back for n rows."""
    rows = functools.partial(jax.ShapeDtypeStruct, (n,))
    return layout_of(Entered(_drawn(n, width=width), rows(np.int32), rows(np.bool_)))


@functools.cache
def decoded_layout(chunk: int, s: int, width: int) -> Layout:
    """Of what `decode` gives back for `s` rows."""
    rows = functools.partial(jax.ShapeDtypeStruct, (s,))
    where = jax.ShapeDtypeStruct((chunk, s), np.bool_)
    return layout_of(Decoded(Chunk(_drawn(chunk, s, width=width), where), rows(np.int32), rows(np.bool_)))
