"""The device part of the engine: a fixed number of slots, each answering one request, as a value and two pure functions.

`admit` computes new prompts (or what is new in them) into slots and draws their first tokens; `decode` draws up to a chunk of tokens in all
slots at once. Slots begin and end at different times but step together, so the column of the cache that a step writes is the same for all
(`clock`), and each slot's own columns are a stretch of a ring that begins where the slot did.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from marl_llm.models import (
    BranchCache,
    DecodeMask,
    Decoder,
    ModelConfig,
    PrefixMask,
    is_serving,
    prompt_mask,
    split_adapters,
    to_cache,
)
from marl_llm.sampling.draws import Drawn, RowSettings, draw, identity_key

SEEDS = 8  # numbers in a request's identity, at most


class Slots(NamedTuple):
    """S slots of one model. A slot that is not alive keeps its keys and values until it is given away, for prompts that begin alike."""

    cache: list[BranchCache]  # per layer, E = S and K = 1: prompt [S, J, d, P] and [S, J, P, d], own [S, 1, J, d, R] and [S, 1, J, R, d]
    length: Int[Array, "S"]  # prompt tokens in the cache, columns 0 ... length - 1
    began: Int[Array, "S"]  # column of the first own token
    count: Int[Array, "S"]  # tokens drawn; the keys and values of all but the last are in the cache
    budget: Int[Array, "S"]
    token: Int[Array, "S"]  # the last one drawn
    alive: Bool[Array, "S"]
    state: Int[Array, "S"]  # of the stop rule's automaton
    keys: Key[Array, "S"]
    settings: RowSettings
    clock: Int[Array, ""]  # steps taken; the column to write is clock % R


class Admission(NamedTuple):
    """n requests to put into slots. A row of padding has `slot` S, which is nowhere."""

    tokens: Int[Array, "n L"]  # what is new in the prompt, padded on the right
    new: Int[Array, "n"]  # how many of them are real, at least 1
    slot: Int[Array, "n"]
    source: Int[Array, "n"]  # the slot whose keys and values begin the prompt
    keep_prompt: Int[Array, "n"]  # columns of the source's prompt that are taken over
    keep_own: Int[Array, "n"]  # ... and, if that is all of them, of its own tokens behind them
    seeds: Int[Array, "n 8"]
    seed_count: Int[Array, "n"]
    budget: Int[Array, "n"]
    state: Int[Array, "n"]  # where the request's stop rule begins
    settings: RowSettings


class Chunk(NamedTuple):
    """What `decode` drew: C steps of S slots."""

    drawn: Drawn  # each [C, S]
    where: Bool[Array, "C S"]


class Rules(NamedTuple):
    """The stop rules of all requests, their states numbered through."""

    table: Int[Array, "states V"]
    ends: Bool[Array, "states"]


@functools.partial(jax.jit, static_argnames=("config", "slots", "prompt", "response"))
def init_slots(config: ModelConfig, slots: int, prompt: int, response: int) -> Slots:
    """Empty slots for prompts of at most `prompt` (P) and responses of at most `response` (R) tokens."""
    j, d, dtype = config.key_value_heads, config.head_dim, jnp.dtype(config.compute_dtype)
    zero = lambda *shape: jnp.zeros((slots, *shape), dtype)  # noqa: E731
    one = BranchCache(zero(j, d, prompt), zero(j, prompt, d), zero(1, j, d, response), zero(1, j, response, d))
    number = jnp.zeros((slots,), jnp.int32)
    keys = jnp.broadcast_to(jax.random.key(0), (slots,))
    real = jnp.ones((slots,), jnp.float32)
    return Slots(
        [jax.tree.map(jnp.copy, one) for _ in range(config.layers)], number, number, number, number, number, number.astype(bool), number,
        keys, RowSettings(real, number, real, real * 0, number), jnp.int32(0),
    )  # fmt: skip


def _model(config: ModelConfig, params: dict):
    variables, base = split_adapters(params)
    return Decoder(config, serving=is_serving(base)), variables


def _taken_over(cache: BranchCache, slots: Slots, a: Admission):
    """Keys `[n, J, d, P + R]` and values of the sources, their own tokens moved behind their prompts."""
    r = cache.keys.shape[-1]

    def one(source, keep):
        own_keys = jnp.roll(cache.keys[source, 0], -slots.began[source], axis=-1)
        own_values = jnp.roll(cache.values[source, 0], -slots.began[source], axis=-2)
        keys = jnp.pad(cache.prompt_keys[source], ((0, 0), (0, 0), (0, r)))
        values = jnp.pad(cache.prompt_values[source], ((0, 0), (0, r), (0, 0)))
        put = jax.lax.dynamic_update_slice_in_dim
        return put(keys, own_keys, keep, 2), put(values, own_values, keep, 1)

    return jax.vmap(one)(a.source, a.keep_prompt)


@functools.partial(jax.jit, static_argnames=("config", "fresh", "truncates", "width"), donate_argnames=("slots",))
def admit(
    config: ModelConfig, params: dict, slots: Slots, a: Admission, rules: Rules, root: Key[Array, ""],
    *, fresh: bool, truncates: bool, width: int,
) -> tuple[Slots, Drawn, Bool[Array, "n"]]:  # fmt: skip
    """Puts n requests into slots: the new slots, each row's first token, and whether it goes on after it.

    `fresh` promises that nothing is taken over; `truncates` and `width`: see `draws.draw`. The slots are donated.
    """
    model, variables = _model(config, params)
    n, length = a.tokens.shape
    room = slots.cache[0].prompt_keys.shape[-1]
    kept = a.keep_prompt + a.keep_own
    where = jnp.arange(length)[None] < a.new[:, None]
    positions = kept[:, None] + jnp.minimum(jnp.arange(length)[None], a.new[:, None] - 1)
    if fresh:
        hidden, layers = model.apply(variables, a.tokens, positions, prompt_mask(where))
        old = None
    else:
        old = [_taken_over(layer, slots, a) for layer in slots.cache]
        seen = jnp.arange(old[0][0].shape[-1])[None] < kept[:, None]
        hidden, layers = model.apply(variables, a.tokens, positions, PrefixMask(prompt_mask(where), seen), cache=old)
    last = jnp.take_along_axis(hidden, (a.new - 1)[:, None, None], axis=1)[:, 0]
    logits = model.apply(variables, last, method="head")
    keys = jax.vmap(identity_key, (None, 0, 0))(root, a.seeds, a.seed_count)
    drawn = draw(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, 0), a.settings, truncates, width)
    state = rules.table[a.state, drawn.token]
    alive = ~rules.ends[state] & (a.budget > 1)

    def stored(cache: BranchCache, number: int) -> BranchCache:
        new_keys, new_values = to_cache(*layers[number])
        if old is None:
            keys = jnp.pad(new_keys, ((0, 0), (0, 0), (0, 0), (0, max(0, room - length))))[..., :room]
            values = jnp.pad(new_values, ((0, 0), (0, 0), (0, max(0, room - length)), (0, 0)))[:, :, :room]
        else:
            put = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
            wide = lambda x, axis: jnp.pad(x, [(0, length if i == axis else 0) for i in range(4)])  # noqa: E731
            keys = put(wide(old[number][0], 3), new_keys, kept, 2)[..., :room]
            values = put(wide(old[number][1], 2), new_values, kept, 1)[:, :, :room]
        at = lambda x, y: x.at[a.slot].set(y, mode="drop")  # noqa: E731
        return cache._replace(prompt_keys=at(cache.prompt_keys, keys), prompt_values=at(cache.prompt_values, values))

    with jax.named_scope("store"):
        cache = [stored(layer, y) for y, layer in enumerate(slots.cache)]
    at = lambda x, y: x.at[a.slot].set(y, mode="drop")  # noqa: E731
    r = slots.cache[0].keys.shape[-1]
    slots = Slots(
        cache=cache,
        length=at(slots.length, kept + a.new),
        began=at(slots.began, jnp.broadcast_to(slots.clock % r, (n,))),
        count=at(slots.count, jnp.ones((n,), jnp.int32)),
        budget=at(slots.budget, a.budget),
        token=at(slots.token, drawn.token),
        alive=at(slots.alive, alive),
        state=at(slots.state, state),
        keys=at(slots.keys, keys),
        settings=RowSettings(*map(at, slots.settings, a.settings)),
        clock=slots.clock,
    )
    return slots, drawn, alive


@functools.partial(jax.jit, static_argnames=("config", "chunk", "window", "truncates", "width"), donate_argnames=("slots",))
def decode(
    config: ModelConfig, params: dict, slots: Slots, rules: Rules, stop: Bool[Array, "S"], rows: Int[Array, "n"] | None,
    *, chunk: int, window: int, truncates: bool, width: int,
) -> tuple[Slots, Chunk]:  # fmt: skip
    """Up to `chunk` (C) tokens in every living slot; ends early when none is left. Slots in `stop` end before the first step.

    `rows` names distinct slots, all the living ones among them, when these are few: only they are computed (S is n in what is returned
    as a `Chunk`); None computes all. `window` promises that no living slot's prompt is longer; `truncates` and `width`: see `draws.draw`.
    The slots are donated.
    """
    slots = slots._replace(alive=slots.alive & ~stop)
    if rows is None:
        return _decode(config, params, slots, rules, chunk, window, truncates, width)
    apart = lambda x: x[rows] if x.ndim else x  # noqa: E731
    some, out = _decode(config, params, jax.tree.map(apart, slots), rules, chunk, window, truncates, width)
    return jax.tree.map(lambda x, y: x.at[rows].set(y) if x.ndim else y, slots, some), out


def _decode(
    config: ModelConfig, params: dict, slots: Slots, rules: Rules, chunk: int, window: int, truncates: bool, width: int
) -> tuple[Slots, Chunk]:
    model, variables = _model(config, params)
    s, r = slots.alive.shape[0], slots.cache[0].keys.shape[-1]
    prompts = [(c.prompt_keys[..., :window], c.prompt_values[:, :, :window]) for c in slots.cache]
    in_prompt = jnp.arange(window)[None] < slots.length[:, None]
    real = jnp.zeros((chunk, s), jnp.float32)
    kept = (jnp.full((chunk, s, width), -1, jnp.int32), real) if width else (None, None)
    out = Chunk(Drawn(jnp.zeros((chunk, s), jnp.int32), real, real, real, *kept), jnp.zeros((chunk, s), bool))

    def more(carry):
        _, step, alive, *_ = carry
        return (step < chunk) & jnp.any(alive)

    def one(carry):
        out, step, alive, own, token, count, state, clock = carry
        began = (jnp.arange(r)[None] - slots.began[:, None]) % r < count[:, None]
        mask = DecodeMask(in_prompt, began[:, None], clock % r, alive[:, None])
        cache = [BranchCache(*p, *o) for p, o in zip(prompts, own, strict=True)]
        hidden, cache = model.apply(variables, token[:, None], (slots.length + count - 1)[:, None], mask, cache=cache)
        logits = model.apply(variables, hidden[:, 0], method="head")
        drawn = draw(logits, jax.vmap(jax.random.fold_in)(slots.keys, count), slots.settings, truncates, width)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new[None], step, axis=0)  # noqa: E731
        out = Chunk(jax.tree.map(put, out.drawn, drawn), put(out.where, alive))
        token, count = jnp.where(alive, drawn.token, token), count + alive
        state = jnp.where(alive, rules.table[state, drawn.token], state)
        alive = alive & ~rules.ends[state] & (count < slots.budget)
        return out, step + 1, alive, [(c.keys, c.values) for c in cache], token, count, state, clock + 1

    own = [(c.keys, c.values) for c in slots.cache]
    carry = (out, jnp.int32(0), slots.alive, own, slots.token, slots.count, slots.state, slots.clock)
    out, _, alive, own, token, count, state, clock = jax.lax.while_loop(more, one, carry)
    cache = [c._replace(keys=k, values=v) for c, (k, v) in zip(slots.cache, own, strict=True)]
    return slots._replace(cache=cache, alive=alive, token=token, count=count, state=state, clock=clock), out


def cache_bytes(config: ModelConfig, slots: int, prompt: int, response: int) -> int:
    """Bytes of the keys and values of a lane, on all devices together."""
    columns = slots * (prompt + response)
    return 2 * config.layers * columns * config.key_value_heads * config.head_dim * jnp.dtype(config.compute_dtype).itemsize

