"""Scoring packed rows: a group as its prompt once and K responses that each see the prompt and themselves, and rows of any such trees.

A row of a group with P prompt tokens and K responses of R tokens is `[prompt | response 1 | ... | response K]`, of length
`P + K R` instead of the `K (P + R)` of unrolled rows. Prompts are padded on the left, responses on the right; positions count
real tokens, so padding changes nothing. `score_packed` scores rows that each hold their own mixture of trees and plain sequences
(`marl_llm.training.packing` makes them).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.config import ModelConfig
from marl_llm.models.frozen_head import score_frozen
from marl_llm.models.log_probs import TokenScores, head_weight, score_hidden, split_adapters
from marl_llm.models.masks import outside_vocabulary, packed_mask, prompt_positions, tree_mask
from marl_llm.models.sharding import ways
from marl_llm.models.transformer import Decoder, is_stacked


class Scores(NamedTuple):
    """Per response token: its log-prob under the (tempered, truncated) policy, and that policy's entropy, in nats. `[B, K, R]`."""

    log_probs: Float[Array, "B K R"]
    entropy: Float[Array, "B K R"]


def score_responses(
    config: ModelConfig,
    params: dict,
    prompt: Int[Array, "B P"],
    prompt_where: Bool[Array, "B P"],
    responses: Int[Array, "B K R"],
    temperature: float = 1.0,
    *,
    kept_ids: Int[Array, "B K R M"] | None = None,
) -> Scores:
    """Log-probs of K given responses per prompt, and the entropies, in one forward of the packed rows.

    The last prompt token is at index P-1 (left padding). Log-probs are those of `softmax(logits / temperature)`,
    over the sampler's `kept_ids` if given (see `score_hidden`). Positions past a response's end are scored too; mask them.
    A token outside the vocabulary raises `ValueError`; where tokens are traced, it and all behind it get NaN.
    """
    unknown = jnp.any(outside_vocabulary(config, "prompt", prompt, prompt_where), axis=-1)[:, None, None]
    unknown |= jnp.cumsum(outside_vocabulary(config, "responses", responses), axis=-1) > 0
    b, p = prompt.shape
    _, k, r = responses.shape
    variables, base = split_adapters(params)
    model = Decoder(config, stacked=is_stacked(base))
    tokens = jnp.concatenate([prompt, responses.reshape(b, k * r)], axis=-1)
    start = jnp.sum(prompt_where, axis=-1, dtype=jnp.int32)[:, None]
    depth = jnp.arange(k * r) % r
    positions = jnp.concatenate([prompt_positions(prompt_where), start + depth[None, :]], axis=-1)
    hidden, _ = model.apply(variables, tokens, positions, tree_mask(prompt_where, k, r))
    # the token at depth 0 is predicted by the prompt's last token, deeper ones by the branch's previous token
    first = jnp.broadcast_to(hidden[:, p - 1, None, None, :], (b, k, 1, hidden.shape[-1]))
    rest = hidden[:, p:].reshape(b, k, r, -1)[:, :, :-1]
    hidden = jnp.concatenate([first, rest], axis=2)
    scores = score_hidden(head_weight(config, base), hidden, responses, temperature, kept_ids=kept_ids)
    return Scores(*(jnp.where(unknown, jnp.nan, x) for x in scores))


def score_packed(
    config: ModelConfig,
    params: dict,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    branches: Int[Array, "B L"],
    predict: Int[Array, "B Q"],
    targets: Int[Array, "B Q"],
    temperature: float = 1.0,
    *,
    kept_ids: Int[Array, "B Q M"] | None = None,
    where: Bool[Array, "B Q"] | None = None,
) -> TokenScores:
    """Log-probs and entropies `[B, Q]` of `targets`, each predicted by the token at index `predict` of its row.

    Args:
      positions: depth of each token in its own sequence. segments, branches: who sees whom, see `marl_llm.models.masks.RowMask`.
      kept_ids: the sampler's. where: True on targets that are no padding. See `score_hidden` for both.
    The head runs on the Q predicting positions only, and under adapters it has no gradient. What padding of `predict` and `targets`
    (index 0, any id) scores means nothing.
    A token outside the vocabulary raises `ValueError`; where tokens are traced, its whole row gets NaN.
    """
    unknown = jnp.any(outside_vocabulary(config, "tokens", tokens, segments > 0), axis=-1)[:, None]
    weight, hidden = packed_hidden(config, params, tokens, positions, segments, branches, predict)
    if "lora" in params and kept_ids is None and ways("batch") == ways("vocab") == 1:
        scores = score_frozen(weight.T, hidden, targets, temperature, where)
    else:
        scores = score_hidden(weight, hidden, targets, temperature, kept_ids=kept_ids, where=where)
    return TokenScores(*(jnp.where(unknown, jnp.nan, x) for x in scores))


def packed_hidden(
    config: ModelConfig,
    params: dict,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    branches: Int[Array, "B L"],
    predict: Int[Array, "B Q"],
) -> tuple[Float[Array, "D V"], Float[Array, "B Q D"]]:
    """(the head, the hidden states that predict the targets of packed rows); arguments as those of `score_packed`."""
    variables, base = split_adapters(params)
    model = Decoder(config, stacked=is_stacked(base))
    hidden, _ = model.apply(variables, tokens, positions, packed_mask(segments, branches))
    return head_weight(config, base), jnp.take_along_axis(hidden, predict[..., None], axis=1)
