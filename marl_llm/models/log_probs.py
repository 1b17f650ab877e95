"""Log-probs and entropies of given tokens with the output head inside, a chunk of positions at a time.

At V = 151,936 the logits of one row of 4,096 tokens take 2.5 GB in float32, and a backward pass holds several of them. Here a chunk's
logits live only while its log-sum-exp is taken, and again in the backward pass. Under tensor sharding the vocabulary stays sharded: the
target's logit is picked by comparison instead of a gather, so that only sums travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.attention import platform
from marl_llm.models.config import ModelConfig
from marl_llm.models.masks import outside_vocabulary, prompt_mask, prompt_positions
from marl_llm.models.sharding import constrain, ways
from marl_llm.models.transformer import Decoder, is_stacked

BLOCK_LOGITS = {"cpu": 1 << 24}  # logits of a chunk per device: 64 MB in float32; products with half as many rows take about as long,
BLOCK_ELSEWHERE = 1 << 27  # 512 MB elsewhere: 883 rows of a product with 151,936 columns; 55 would leave its units idle
LEFT_OUT = -1e30  # a logit of no weight; finite, so that weight times logit is 0


def log_prob_gap_bound(dtype: str) -> float:
    """Largest |sampler - scorer| log-prob difference, in nats, of a healthy run whose matrix products are in `dtype` (law 2).

    Both compute the same numbers in another order (cached keys against whole rows, other blocks), so they differ by rounding alone.
    float32 rounds at 2^-24: a few 1e-6 in practice, and 1e-4 is law 2's bound. bfloat16 rounds every product's inputs at 2^-9, which
    moves a logit of size 32, about the largest of trained models, by 1/16; the largest of many thousand differences may be four
    such steps, 0.25 (a small model measures 0.02). What the alarm is for is larger: another's row, another temperature or kept set
    cost a nat and more.

    Raises `ValueError` on a dtype that no model computes in.
    """
    bounds = {"float32": 1e-4, "bfloat16": 0.25}
    if str(dtype) not in bounds:
        raise ValueError(f"dtype={dtype!r}: models compute in {' or '.join(bounds)}")
    return bounds[str(dtype)]


class TokenScores(NamedTuple):
    """Per token: its log-prob under softmax(logits / temperature), over the kept tokens if these are given, and that distribution's
    entropy, in nats."""

    log_probs: Float[Array, "*shape"]
    entropy: Float[Array, "*shape"]


def score_hidden(
    weight: Float[Array, "D V"],
    hidden: Float[Array, "*shape D"],
    targets: Int[Array, "*shape"],
    temperature: float = 1.0,
    chunk: int | None = None,
    kept_ids: Int[Array, "*shape M"] | None = None,
    where: Bool[Array, "*shape"] | None = None,
) -> TokenScores:
    """Scores of `targets` given the hidden states that predict them; `weight` is the head.

    Args:
      chunk: (row, position) pairs whose logits exist at a time, however many rows there are; None: as many as `BLOCK_LOGITS` says
        (everything, for a small vocabulary).
      kept_ids: the ids that each target was drawn from, -1 behind them, as samplers return them (`SamplingParams.max_kept`): it is
        renormalised over these. The same ids on both sides of a ratio make it 1 for an unchanged policy. -1 alone keeps all tokens; a
        target outside of its kept ids has log-prob -inf.
      where: True on targets that count. What others score means nothing: chunks without any are not computed.
    """
    v = weight.shape[1]
    chunk = chunk or pairs_of_a_chunk(v)

    def score(h, t, ids=None) -> TokenScores:
        logits = jnp.matmul(h, weight.astype(h.dtype), preferred_element_type=jnp.float32)
        if temperature != 1:
            logits = logits / temperature
        logits = constrain(logits, "batch", *(None,) * (logits.ndim - 2), "vocab")
        out = _scores(logits, jnp.arange(v) == t[..., None])
        if ids is None:
            return out
        real = ids >= 0
        target = real & (ids == t[..., None])
        kept = _scores(jnp.where(real, jnp.take_along_axis(logits, jnp.maximum(ids, 0), axis=-1), LEFT_OUT), target)
        kept = kept._replace(log_probs=jnp.where(jnp.any(target, axis=-1), kept.log_probs, -jnp.inf))
        return jax.tree.map(functools.partial(jnp.where, jnp.any(real, axis=-1)), kept, out)

    with jax.named_scope("head"):
        inputs = (hidden, targets) if kept_ids is None else (hidden, targets, kept_ids)
        if chunk >= targets.size:
            return score(*inputs)
        return in_chunks(score, inputs, jnp.ones(targets.shape, bool) if where is None else where, chunk)


def pairs_of_a_chunk(vocabulary: int) -> int:
    """(row, position) pairs whose logits may exist at a time, over all devices that share the rows."""
    return max(1, BLOCK_LOGITS.get(platform(), BLOCK_ELSEWHERE) // vocabulary) * ways("batch")


def in_chunks(score: Callable, inputs: tuple, where: Bool[Array, "*shape"], chunk: int) -> Any:
    """`score(*inputs)`, a NamedTuple of numbers per target, for `chunk` (row, position) pairs at a time; 0 in chunks without any `where`.

    `inputs` have the shape of `where` and any axes behind it.
    """
    shares, n = ways("batch"), where.size
    # a chunk takes `size` positions of `group` rows; every device gets its share of each, so that a sharded batch axis stays so
    lead, length = where.shape[:-1], where.shape[-1]
    rows = n // length
    group = max(shares, min(rows, chunk) // shares * shares)
    size = max(1, min(length, chunk // group))
    across, along = -(-rows // group), -(-length // size)
    size = -(-length // along)
    wide, long = across * group, along * size

    def chunks(x):
        x = x.reshape(rows, length, *x.shape[len(lead) + 1 :])
        x = jnp.pad(x, [(0, wide - rows), (0, long - length), *((0, 0),) * (x.ndim - 2)])
        x = x.reshape(group, across, along, size, *x.shape[2:])  # rows of a group are `across` apart
        return jnp.moveaxis(x, 0, 2).reshape(across * along, group, size, *x.shape[4:])

    def nothing(*x):
        return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(score, *x))

    def unless_empty(_, x):
        counts, *x = x
        return None, jax.lax.cond(jnp.any(counts), score, nothing, *x)

    _, out = jax.lax.scan(jax.checkpoint(unless_empty), None, tuple(map(chunks, (where, *inputs))))

    def join(x):
        x = jnp.moveaxis(x.reshape(across, along, group, size), 2, 0)
        return x.reshape(wide, long)[:rows, :length].reshape(*lead, length)

    return jax.tree.map(join, out)


def _scores(logits: Float[Array, "*shape W"], target: Bool[Array, "*shape W"]) -> TokenScores:
    """Of the token where `target` is True, and the entropy of softmax(logits)."""
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1)
    log_total = jnp.log(total)
    chosen = jnp.sum(jnp.where(target, shifted, 0.0), axis=-1)
    return TokenScores(chosen - log_total, log_total - jnp.sum(weights * shifted, axis=-1) / total)


def head_weight(config: ModelConfig, params: dict) -> Float[Array, "D V"]:
    """The matrix from hidden states to logits."""
    return params["embedding"].T if config.tie_embeddings else params["output"]


def split_adapters(params: dict) -> tuple[dict, dict]:
    """`(variables for apply, base parameters)` of plain parameters or of `{'base': ..., 'lora': ...}` (see `marl_llm.models.lora`)."""
    if "lora" in params:
        return {"params": params["base"], "lora": params["lora"]}, params["base"]
    return {"params": params}, params


def log_probs(
    config: ModelConfig,
    params: dict,
    tokens: Int[Array, "B L"],
    where=None,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    agents: Float[Array, "B N"] | None = None,
) -> TokenScores:
    """Log-prob and entropy of each token given those before it in its row, `[B, L]`; 0 for the first token of a row and for padding.

    Args:
      params: of either layout, with or without adapters.
      where: True on real tokens, which must be contiguous (padding on either side); None: all are real.
      chunk: see `score_hidden`. agents: each row's weights over stacked adapters.
    A token outside the vocabulary raises `ValueError`; where tokens are traced, it and all behind it in its row get NaN.
    """
    where = jnp.ones(tokens.shape, bool) if where is None else where
    unknown = jnp.cumsum(outside_vocabulary(config, "tokens", tokens, where), axis=-1) > 0
    variables, base = split_adapters(params)
    model = Decoder(config, stacked=is_stacked(base))
    hidden, _ = model.apply(variables, tokens, prompt_positions(where), prompt_mask(where), agents=agents)
    targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)  # the last position predicts nothing that is kept
    out = score_hidden(head_weight(config, base), hidden, targets, temperature, chunk)
    known = where & jnp.concatenate([jnp.zeros_like(where[:, :1]), where[:, :-1]], axis=1)

    def shift(x):
        return jnp.where(known, jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1), 0.0)

    return TokenScores(*(jnp.where(unknown & where, jnp.nan, shift(x)) for x in out))
