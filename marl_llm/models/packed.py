"""Scoring a group in one packed row: the prompt once, and K responses that each see the prompt and themselves.

A row of a group with P prompt tokens and K responses of R tokens is `[prompt | response 1 | ... | response K]`, of length
`P + K R` instead of the `K (P + R)` of unrolled rows. Prompts are padded on the left, responses on the right; positions count
real tokens, so padding changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.config import ModelConfig
from marl_llm.models.transformer import Decoder


class Scores(NamedTuple):
    """Per response token: its log-prob under the (tempered) policy, and that policy's entropy, in nats. `[B, K, R]`."""

    log_probs: Float[Array, "B K R"]
    entropy: Float[Array, "B K R"]


def prompt_positions(where: Bool[Array, "B P"]) -> Int[Array, "B P"]:
    """Position of each prompt token among the real ones; padding gets 0."""
    return jnp.maximum(jnp.cumsum(where, axis=-1) - 1, 0)


def prompt_mask(where: Bool[Array, "B P"]) -> Bool[Array, "B P P"]:
    """Causal mask over real prompt tokens."""
    p = where.shape[-1]
    return jnp.tril(jnp.ones((p, p), bool)) & where[:, None, :]


def tree_mask(prompt_where: Bool[Array, "B P"], branches: int, response_length: int) -> Bool[Array, "B L L"]:
    """Who sees whom in a packed row, `L = P + K R`. For P = 2, K = 2, R = 2 (1 = sees):

        prompt      1 . | . . | . .
                    1 1 | . . | . .
        response 1  1 1 | 1 . | . .
                    1 1 | 1 1 | . .
        response 2  1 1 | . . | 1 .
                    1 1 | . . | 1 1
    """
    b, p = prompt_where.shape
    kr = branches * response_length
    branch = jnp.arange(kr) // response_length
    depth = jnp.arange(kr) % response_length
    own = (branch[:, None] == branch[None, :]) & (depth[:, None] >= depth[None, :])
    top = jnp.concatenate([prompt_mask(prompt_where), jnp.zeros((b, p, kr), bool)], axis=-1)
    to_prompt = jnp.broadcast_to(prompt_where[:, None, :], (b, kr, p))
    bottom = jnp.concatenate([to_prompt, jnp.broadcast_to(own, (b, kr, kr))], axis=-1)
    return jnp.concatenate([top, bottom], axis=1)


def score_responses(
    config: ModelConfig,
    params: dict,
    prompt: Int[Array, "B P"],
    prompt_where: Bool[Array, "B P"],
    responses: Int[Array, "B K R"],
    temperature: float = 1.0,
) -> Scores:
    """Log-probs of K given responses per prompt, and the entropies, in one forward of the packed rows.

    The last prompt token is at index P-1 (left padding). Log-probs are those of `softmax(logits / temperature)`. Positions
    past a response's end are scored too; mask them.
    """
    b, p = prompt.shape
    _, k, r = responses.shape
    model = Decoder(config)
    tokens = jnp.concatenate([prompt, responses.reshape(b, k * r)], axis=-1)
    start = jnp.sum(prompt_where, axis=-1, dtype=jnp.int32)[:, None]
    depth = jnp.arange(k * r) % r
    positions = jnp.concatenate([prompt_positions(prompt_where), start + depth[None, :]], axis=-1)
    hidden, _ = model.apply({"params": params}, tokens, positions, tree_mask(prompt_where, k, r))
    # the token at depth 0 is predicted by the prompt's last token, deeper ones by the branch's previous token
    first = jnp.broadcast_to(hidden[:, p - 1, None, None, :], (b, k, 1, hidden.shape[-1]))
    rest = hidden[:, p:].reshape(b, k, r, -1)[:, :, :-1]
    with jax.named_scope("head"):
        logits = model.apply({"params": params}, jnp.concatenate([first, rest], axis=2), method="head")
        log_softmax = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    log_probs = jnp.take_along_axis(log_softmax, responses[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
    return Scores(log_probs, entropy)
