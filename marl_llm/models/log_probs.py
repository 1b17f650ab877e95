"""Log-probs and entropies of given tokens with the output head inside, a chunk of positions at a time.

At V = 151,936 the logits of one row of 4,096 tokens take 2.5 GB in float32, and a backward pass holds several of them. Here a chunk's
logits live only while its log-sum-exp is taken, and again in the backward pass. Under tensor sharding the vocabulary stays sharded: the
target's logit is picked by comparison instead of a gather, so that only sums travel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from marl_llm.models.config import ModelConfig
from marl_llm.models.masks import prompt_mask, prompt_positions
from marl_llm.models.sharding import constrain
from marl_llm.models.transformer import Decoder, is_stacked

BLOCK_LOGITS = 1 << 23  # logits per chunk: 32 MB in float32


class TokenScores(NamedTuple):
    """Per token: its log-prob under softmax(logits / temperature), and that distribution's entropy, in nats."""

    log_probs: Float[Array, "*shape"]
    entropy: Float[Array, "*shape"]


def score_hidden(
    weight: Float[Array, "D V"],
    hidden: Float[Array, "*shape D"],
    targets: Int[Array, "*shape"],
    temperature: float = 1.0,
    chunk: int | None = None,
) -> TokenScores:
    """Scores of `targets` given the hidden states that predict them; `weight` is the head.

    Args:
      chunk: positions whose logits exist at a time; None takes what fits into 32 MB (everything, for a small vocabulary).
    """
    v, d = weight.shape[1], hidden.shape[-1]
    n = targets.size
    chunk = chunk or max(1, BLOCK_LOGITS // v)

    def score(h, t) -> TokenScores:
        logits = jnp.matmul(h, weight.astype(h.dtype), preferred_element_type=jnp.float32)
        if temperature != 1:
            logits = logits / temperature
        logits = constrain(logits, "batch", *(None,) * (logits.ndim - 2), "vocab")
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        shifted = logits - top
        weights = jnp.exp(shifted)
        total = jnp.sum(weights, axis=-1)
        target = jnp.sum(jnp.where(jnp.arange(v) == t[..., None], shifted, 0.0), axis=-1)
        log_total = jnp.log(total)
        return TokenScores(target - log_total, log_total - jnp.sum(weights * shifted, axis=-1) / total)

    with jax.named_scope("head"):
        if chunk >= n:
            return score(hidden, targets)
        # chunks run along the last token axis, so that a batch axis stays sharded as it is
        length, lead = targets.shape[-1], targets.shape[:-1]
        size = max(1, chunk // max(1, n // length))
        count = -(-length // size)
        pad = count * size - length
        at = len(lead)
        h = jnp.pad(hidden, [(0, 0)] * at + [(0, pad), (0, 0)]).reshape(*lead, count, size, d)
        t = jnp.pad(targets, [(0, 0)] * at + [(0, pad)]).reshape(*lead, count, size)
        step = jax.checkpoint(lambda _, x: (None, score(*x)))
        _, out = jax.lax.scan(step, None, (jnp.moveaxis(h, at, 0), jnp.moveaxis(t, at, 0)))
        join = lambda x: jnp.moveaxis(x, 0, at).reshape(*lead, count * size)[..., :length]  # noqa: E731
        return TokenScores(*map(join, out))


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
    """
    where = jnp.ones(tokens.shape, bool) if where is None else where
    variables, base = split_adapters(params)
    model = Decoder(config, stacked=is_stacked(base))
    hidden, _ = model.apply(variables, tokens, prompt_positions(where), prompt_mask(where), agents=agents)
    targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)  # the last position predicts nothing that is kept
    out = score_hidden(head_weight(config, base), hidden, targets, temperature, chunk)
    known = where & jnp.concatenate([jnp.zeros_like(where[:, :1]), where[:, :-1]], axis=1)
    shift = lambda x: jnp.where(known, jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1), 0.0)  # noqa: E731
    return TokenScores(*map(shift, out))
