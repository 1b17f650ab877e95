"""One token per row: temperature, top-k, top-p and min-p, drawn by inverse CDF, with its log-prob before and after (law 2).

Kept sets are found by bisection on the ordered bits of a float32, 32 passes over the vocabulary, 25 times as fast as a sort on a
CPU; they are those of `marl_llm.algorithms.kept_tokens`, up to the rounding of a sum where mass decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from marl_llm.sampling.requests import SamplingParams

BLOCK, MOST_BLOCKS = 32, 256  # a search goes through blocks of so many numbers, and through at most so many at once


class SampledToken(NamedTuple):
    """A token per row and what it cost."""

    token: Int[Array, "*rows"]
    log_prob: Float[Array, "*rows"]  # of the raw policy, softmax(logits)
    sampled_log_prob: Float[Array, "*rows"]  # of the distribution drawn from
    entropy: Float[Array, "*rows"]  # of the raw policy, nats
    kept_ids: Int[Array, "*rows M"] | None = None  # the tokens it was drawn from, likeliest first, -1 behind them; with `max_kept` only
    kept_log_mass: Float[Array, "*rows"] | None = None  # log of their probability under softmax(logits / temperature)


class RowSamplingParams(NamedTuple):
    """`SamplingParams` as arrays, one value per row; `top_k` 0, `top_p` 1 and `max_kept` 0 keep everything."""

    temperature: Float[Array, "*rows"]
    top_k: Int[Array, "*rows"]
    top_p: Float[Array, "*rows"]
    min_p: Float[Array, "*rows"]
    max_kept: Int[Array, "*rows"]


def identity_key(root: Key[Array, ""], identity: Int[Array, "C"], count: Int[Array, ""] | int) -> Key[Array, ""]:
    """The key of a response: the root folded with the first `count` numbers of its identity, one after the other (law 6).

    The identity of a team's response is (step, task, agent, request, branch), in compiled play and in the engine alike: the numbers of the
    task, of the role in the order of speaking, of the request among all that the game could make, and of the play and candidate. Whoever
    draws folds in the token's position.
    """
    def fold(key, x):
        return (jnp.where(x[1] < count, jax.random.fold_in(key, x[0]), key), None)

    return jax.lax.scan(fold, root, (identity, jnp.arange(identity.shape[0])))[0]


def random_pick(key: Key[Array, ""], count: Int[Array, ""] | int) -> Int[Array, ""]:
    """Which of `count` candidates goes on under `pick="random"`, of the key of the first one, which is folded."""
    return jax.random.randint(jax.random.fold_in(key, 1_000_003), (), 0, count)


def pick_by_identity(root: Key[Array, ""]) -> Callable[[tuple[int, ...], int], int]:
    """`random_pick` on the host: a function of the first candidate's identity and the number of candidates."""
    pick = jax.jit(lambda identity, count: random_pick(identity_key(root, identity, identity.shape[0]), count))
    return lambda identity, count: int(pick(jnp.asarray(identity, jnp.int32), count))


def inverse_cdf(probabilities: Float[Array, "*rows V"], uniform: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The first token whose cumulative probability exceeds `uniform` (in [0, 1)) of the total; never one of probability 0."""
    return _search(probabilities, uniform, lambda x: x, 0.0)[0]


def _blocks(x: Float[Array, "*rows V"], nothing: float = 0.0) -> Float[Array, "*rows blocks B"]:
    """Blocks of `BLOCK` numbers, the last one filled up with `nothing`."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    return jnp.pad(x, pad, constant_values=nothing).reshape(*x.shape[:-1], -1, BLOCK)


def _first_above(weights: Float[Array, "*rows n"], threshold: Float[Array, "*rows"]) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """Where the cumulative weight first exceeds the threshold, and what of the threshold is left there. Few numbers are added up faster by
    a triangular product than by a scan; at its default precision an accelerator would round the weights to 8 or 11 bits."""
    n = weights.shape[-1]
    cumulative = jnp.matmul(weights, jnp.triu(jnp.ones((n, n), weights.dtype)), precision="highest")
    total = cumulative[..., -1]
    # strictly below the total, so that rounding can never select past the last number with a weight
    threshold = jnp.clip(threshold, 0.0, jnp.nextafter(total, jnp.zeros_like(total)))
    at = jnp.argmax(cumulative > threshold[..., None], axis=-1)
    return at, threshold - jnp.where(at > 0, _pick(cumulative, jnp.maximum(at - 1, 0)), 0.0)


def _search(
    x: Float[Array, "*rows V"], uniform: Float[Array, "*rows"], weight: Callable[[Array], Array], nothing: float
) -> tuple[Int[Array, "*rows"], Float[Array, "*rows"]]:
    """The token where the cumulative weight exceeds `uniform` of the total, and the total.

    `weight` makes weights of `[*rows, blocks, B]` of x, and 0 of `nothing`. Sums of blocks, of blocks of blocks and so on are searched from
    the last one down: of a vocabulary's weights nothing is kept but these sums and one block a row.
    """
    tokens = _blocks(x, nothing)
    sums = [jnp.sum(weight(tokens), axis=-1)]
    while sums[-1].shape[-1] > MOST_BLOCKS:
        sums.append(jnp.sum(_blocks(sums[-1]), axis=-1))
    total = jnp.sum(sums[-1], axis=-1)
    at, threshold = _first_above(sums[-1], uniform * total)

    def of(blocks, at):
        return jnp.take_along_axis(blocks, at[..., None, None], axis=-2)

    for below in (*(_blocks(s) for s in reversed(sums[:-1])), tokens):
        block = of(below, at) if below is not tokens else weight(of(below, at))
        inside, threshold = _first_above(block[..., 0, :], threshold)
        at = at * BLOCK + inside
    return at.astype(jnp.int32), total


def _ordered(x: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _keep_until(
    order: Int[Array, "*rows V"], mass: Float[Array, "*rows V"], enough: Float[Array, "*rows"]
) -> Bool[Array, "*rows V"]:
    """The likeliest tokens until their mass reaches `enough` (> 0): a token is kept if the mass before it is less. Of equals the lower
    ids come first. Tokens without mass are never kept; all others are where there is not enough."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1) + ((low ^ high) & 1)  # the mean, rounded up, without overflow
        reached = jnp.sum(jnp.where(order >= middle[..., None], mass, 0.0), axis=-1) >= enough
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    lowest = jnp.full(enough.shape, jnp.iinfo(jnp.int32).min)
    border, _ = jax.lax.fori_loop(0, 32, halve, (lowest, jnp.full_like(lowest, jnp.iinfo(jnp.int32).max)))
    above, tied = order > border[..., None], (order == border[..., None]) & (mass > 0)
    missing = enough - jnp.sum(jnp.where(above, mass, 0.0), axis=-1)
    each = jnp.max(jnp.where(tied, mass, 0.0), axis=-1)
    wanted = jnp.ceil(missing / jnp.where(each > 0, each, 1.0))

    def first():
        return tied & (jnp.cumsum(tied, axis=-1) <= wanted[..., None])

    kept_ties = jax.lax.cond(jnp.any(jnp.sum(tied, axis=-1) > wanted), first, lambda: tied)  # the scan over V only where a tie straddles
    return (above & (mass > 0)) | kept_ties


def kept(z: Float[Array, "*rows V"], settings: RowSamplingParams) -> Bool[Array, "*rows V"]:
    """Which tokens may be drawn, given tempered logits: top-k, then top-p over what is left, then min-p. The likeliest always is."""
    order = _ordered(jnp.where(z == 0, 0.0, z))  # -0.0 and 0.0 are equals
    allowed = (z > -jnp.inf).astype(jnp.float32)
    size = z.shape[-1]
    keep = _keep_until(order, allowed, jnp.where(settings.top_k > 0, settings.top_k, size).astype(jnp.float32))
    p = jax.nn.softmax(jnp.where(keep, z, -jnp.inf), axis=-1)
    nucleus = _keep_until(order, p, settings.top_p)
    keep &= nucleus | (settings.top_p >= 1.0)[..., None]
    return keep & (p >= settings.min_p[..., None] * jnp.max(p, axis=-1, keepdims=True))


def likeliest_kept(
    z: Float[Array, "*rows V"], keep: Bool[Array, "*rows V"], most: Int[Array, "*rows"], width: int
) -> tuple[Bool[Array, "*rows V"], Int[Array, "*rows M"]]:
    """The `most` likeliest of the kept tokens of each row, as a mask and as ids (`width` columns, likeliest first, -1 behind them).

    The mask is made of the ids, so that both are one set. `most` 0 leaves a row as it is, and gives it no ids.
    """
    v = z.shape[-1]
    value, ids = jax.lax.top_k(jnp.where(keep, jnp.where(z == 0, 0.0, z), -jnp.inf), min(width, v))
    real = (value > -jnp.inf) & (jnp.arange(ids.shape[-1]) < most[..., None])
    flat = jnp.where(real, ids, v).reshape(-1, ids.shape[-1])
    mask = jax.vmap(lambda i: jnp.zeros((v,), bool).at[i].set(True, mode="drop"))(flat).reshape(z.shape)
    ids = jnp.pad(jnp.where(real, ids, -1), [(0, 0)] * (ids.ndim - 1) + [(0, max(0, width - v))], constant_values=-1)
    return jnp.where((most > 0)[..., None], mask, keep), ids


def rows_of(settings: SamplingParams, shape: tuple[int, ...]) -> RowSamplingParams:
    """The same settings for every row."""
    def full(x, dtype):
        return jnp.full(shape, x, dtype)

    return RowSamplingParams(
        full(settings.temperature, jnp.float32), full(settings.top_k or 0, jnp.int32), full(settings.top_p, jnp.float32),
        full(settings.min_p, jnp.float32), full(settings.max_kept or 0, jnp.int32),
    )  # fmt: skip


def _pick(x: Float[Array, "*rows V"], token: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    return jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]


def sample_token(
    logits: Float[Array, "*rows V"], keys: Key[Array, "*rows"], settings: SamplingParams | RowSamplingParams, truncates: bool = True,
    width: int = 0,
) -> SampledToken:  # fmt: skip
    """One token per row. Keys are consumed.

    Temperature 0 takes the argmax (ties: the lowest id), whose sampled log-prob is 0. With `RowSamplingParams`, `truncates=False` promises
    that no row leaves tokens out, and saves the search; `width` (M) is the largest `max_kept` of the rows, and 0 promises that none has
    one. A row drawn at temperature 0 has kept the likeliest token.
    """
    if isinstance(settings, SamplingParams):
        truncates, width = settings.truncates, settings.max_kept or 0
        settings = rows_of(settings, keys.shape)
    logits = logits.astype(jnp.float32)
    greedy, top = settings.temperature == 0, jnp.max(logits, axis=-1)
    temperature = jnp.where(greedy, 1.0, settings.temperature)
    raw = logits - top[..., None]
    p_raw = jnp.exp(raw)  # times `total`
    total = jnp.sum(p_raw, axis=-1)
    entropy = jnp.log(total) - jnp.sum(jnp.where(p_raw > 0, p_raw * raw, 0.0), axis=-1) / total
    ids = log_mass = None
    if truncates:
        z = logits / temperature[..., None]
        keep = kept(z, settings)
        if width:
            keep, ids = likeliest_kept(z, keep, jnp.where(greedy & (settings.max_kept > 0), 1, settings.max_kept), width)
            log_mass = jax.nn.logsumexp(jnp.where(keep, z, -jnp.inf), axis=-1) - jax.nn.logsumexp(z, axis=-1)
        drawn_from = jnp.where(keep, logits, -jnp.inf)
    else:
        drawn_from = logits

    def weight(x: Float[Array, "*rows n m"]) -> Float[Array, "*rows n m"]:
        def by_row(y):
            return y[..., None, None]

        return jnp.where(by_row(greedy), x == by_row(top), jnp.exp((x - by_row(top)) / by_row(temperature)))

    uniform = jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(keys.shape)
    token, mass = _search(drawn_from, jnp.where(greedy, 0.0, uniform), weight, -jnp.inf)  # greedy: the first of the likeliest
    picked = _pick(logits, token) - top
    return SampledToken(
        token, picked - jnp.log(total), jnp.where(greedy, 0.0, picked / temperature - jnp.log(mass)), entropy, ids, log_mass
    )
