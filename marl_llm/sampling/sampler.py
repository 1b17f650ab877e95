"""The sampler: K responses to each of E prompts, every prompt computed once.

A pure function of `(params, prompts, keys)`. Each draw's key is the row's key folded with the token's position, so a response
depends on its own identity and on nothing else: not on the batch it was in, its slot or the device (law 6). Each token comes
with its log-prob under the distribution it was drawn from and under the raw policy (law 2).
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from marl_llm.models import (
    BranchCache,
    DecodeMask,
    Decoder,
    ModelConfig,
    constrain,
    is_serving,
    outside_vocabulary,
    prompt_mask,
    prompt_positions,
    serving_layout,
    split_adapters,
    to_cache,
)
from marl_llm.sampling.requests import PLAIN, SamplingParams
from marl_llm.sampling.stops import StopRule
from marl_llm.sampling.token_sampling import SampledToken, sample_token


class Responses(NamedTuple):
    """K responses to each of E prompts. A response ends with a stop token, which belongs to it, or is cut at its budget."""

    tokens: Int[Array, "E K R"]  # padded with `pad_id` after the end
    where: Bool[Array, "E K R"]  # True up to and with the stop token
    log_probs: Float[Array, "E K R"]  # of the raw policy, softmax(logits); 0 after the end
    sampled_log_probs: Float[Array, "E K R"]  # of the distribution drawn from: tempered and truncated
    entropy: Float[Array, "E K R"]  # of the raw policy, nats
    truncated: Bool[Array, "E K"]  # finish reason: cut at its budget (True) or stopped (False)
    kept_ids: Int[Array, "E K R M"] | None = None  # with `SamplingParams.max_kept` (M): the tokens each was drawn from, -1 behind them
    kept_log_mass: Float[Array, "E K R"] | None = None  # ... and the log of their probability under softmax(logits / temperature)


def checked_stop(stop: Any, vocab_size: int) -> tuple[int, ...] | StopRule:
    """Stop ids as a tuple, or the rule. None and () end no response before its budget.

    Raises `ValueError` on an id outside the vocabulary and on a rule for another one, `TypeError` on what is no stop at all.
    """
    if isinstance(stop, StopRule):
        if len(stop.classes) != vocab_size:
            raise ValueError(f"stop is a rule over {len(stop.classes)} token ids; the model's vocabulary has {vocab_size}")
        return stop
    try:
        ids = () if stop is None else tuple(map(operator.index, stop if np.ndim(stop) else (stop,)))
    except TypeError as error:
        raise TypeError(f"stop={stop!r} must be a token id, several, a StopRule, or None") from error
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(f"stop ids {outside} are outside the vocabulary of {vocab_size}; None ends responses at their budget alone")
    return ids


def ends_with(stop: tuple[int, ...] | StopRule, token: Int[Array, "*rows"], state: Int[Array, "*rows"]):
    """`(state, ended)` after a token: by comparison with stop ids, or by the automaton of a `StopRule`."""
    if isinstance(stop, StopRule):
        rule = StopRule(*map(jnp.asarray, stop))
        state = rule.next(state, token)
        return state, rule.ends[state]
    ended = jnp.zeros(token.shape, bool)
    for i in stop:
        ended |= token == i
    return state, ended


def sample(
    config: ModelConfig,
    params: dict,
    prompt: Int[Array, "E P"],
    prompt_where: Bool[Array, "E P"],
    keys: Key[Array, "E K"],
    *,
    max_tokens: int,
    stop: Any,
    pad_id: int,
    settings: SamplingParams = PLAIN,
    budgets: Int[Array, "E K"] | None = None,
) -> Responses:
    """Samples K responses of at most `max_tokens` (R) tokens per prompt; prompts are padded on the left.

    Args:
      config: shape of the model. params: its parameters, in any layout; outside of a loop, convert once with `serving_layout`.
      prompt: token ids; prompt_where: True on real tokens. The last column must be real.
      keys: one per response, folded (not consumed) with the token position.
      stop: the token or tokens that end a response (integers of Python or NumPy), a `StopRule` with stop strings, or None.
      settings: how tokens are drawn; `SamplingParams.to_train` where truncated draws are to be scored.
      budgets: most tokens of each response, at least 1 each; None: R for all.
    Returns:
      `Responses`. The loop ends early once every response has ended. All log-probs of a prompt with an id outside the vocabulary are NaN.
    Raises:
      ValueError: a prompt id (unless traced), a stop id or the padding id outside the vocabulary, or `max_tokens` below 1.
    """
    stop = checked_stop(stop, config.vocab_size)
    if max_tokens < 1 or not 0 <= pad_id < config.vocab_size:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1, and pad_id={pad_id} one of {config.vocab_size} token ids")
    outside = outside_vocabulary(config, "prompt", prompt, prompt_where)
    e, p = prompt.shape
    k = keys.shape[1]
    variables, base = split_adapters(serving_layout(params))
    model = Decoder(config, serving=is_serving(base))
    budgets = jnp.full((e, k), max_tokens) if budgets is None else jnp.minimum(budgets, max_tokens)
    with jax.named_scope("prefill"):
        logits, cache = _prefill(model, variables, prompt, prompt_where, k, max_tokens)
    start = jnp.sum(prompt_where, axis=-1, dtype=jnp.int32)
    fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)), in_axes=(0, None))
    out = _blank_responses(e, k, max_tokens, settings.max_kept, pad_id)

    def emit(out: Responses, logits, step, alive, state) -> tuple[Responses, Array, Array, Array]:
        drawn = sample_token(logits, fold(keys, step), settings)
        state, ended = ends_with(stop, drawn.token, state)
        ended &= alive
        out = _written(out, drawn, step, alive, ended, pad_id)
        return out, drawn.token, alive & ~ended & (step + 1 < budgets), state

    def more(carry):
        _, _, _, alive, _, step = carry
        return (step < max_tokens) & jnp.any(alive)

    def decode(carry):
        out, cache, token, alive, state, step = carry
        own = jnp.broadcast_to(jnp.arange(max_tokens) < step, (e, k, max_tokens))
        position = jnp.broadcast_to(start[:, None] + step - 1, token.shape)
        hidden, cache = model.apply(variables, token, position, DecodeMask(prompt_where, own, step - 1), cache=cache)
        logits = model.apply(variables, hidden, method="head")
        out, token, alive, state = emit(out, logits, step, alive, state)
        return out, cache, token, alive, state, step + 1

    with jax.named_scope("decode"):
        logits = jnp.broadcast_to(logits[:, None], (e, k, logits.shape[-1]))
        out, token, alive, state = emit(out, logits, jnp.int32(0), jnp.ones((e, k), bool), jnp.zeros((e, k), jnp.int32))
        out, *_ = jax.lax.while_loop(more, decode, (out, cache, token, alive, state, jnp.int32(1)))

    def unknown(x):
        return jnp.where(jnp.any(outside, axis=-1)[:, None, None] & out.where, jnp.nan, x)

    return out._replace(log_probs=unknown(out.log_probs), sampled_log_probs=unknown(out.sampled_log_probs))


def _prefill(
    model: Decoder, variables: dict, prompt: Int[Array, "E P"], prompt_where: Bool[Array, "E P"], k: int, max_tokens: int
) -> tuple[Float[Array, "E V"], list[BranchCache]]:
    """Logits of the first tokens, and per layer the prompt's keys and values with room for K responses."""
    hidden, layers = model.apply(variables, prompt, prompt_positions(prompt_where), prompt_mask(prompt_where))
    e, j, d = prompt.shape[0], model.config.key_value_heads, model.config.head_dim
    own_keys = constrain(jnp.zeros((e, k, j, d, max_tokens), hidden.dtype), "batch", None, "key_value_heads", None, None)
    own_values = constrain(jnp.zeros((e, k, j, max_tokens, d), hidden.dtype), "batch", None, "key_value_heads", None, None)
    cache = [BranchCache(*to_cache(*layer), own_keys, own_values) for layer in layers]
    return model.apply(variables, hidden[:, -1], method="head"), cache


def _blank_responses(e: int, k: int, max_tokens: int, width: int | None, pad_id: int) -> Responses:
    """`[E, K, R]` responses before their first token; `width`: of the kept ids, None where they are not asked for."""
    blank = jnp.zeros((e, k, max_tokens), jnp.float32)
    return Responses(
        jnp.full((e, k, max_tokens), pad_id, jnp.int32), blank.astype(bool), blank, blank, blank, jnp.ones((e, k), bool),
        *(None, None) if width is None else (jnp.full((e, k, max_tokens, width), -1, jnp.int32), blank),
    )  # fmt: skip


def _written(
    out: Responses, drawn: SampledToken, step: Int[Array, ""], alive: Bool[Array, "E K"], ended: Bool[Array, "E K"], pad_id: int
) -> Responses:
    """The responses with the tokens `[E K]` of a step, where they are alive; `ended` with this token."""
    def put(all_, new):
        return jax.lax.dynamic_update_slice_in_dim(all_, jnp.expand_dims(new, 2), step, axis=2)

    keep = alive.astype(jnp.float32)
    return Responses(
        put(out.tokens, jnp.where(alive, drawn.token, pad_id)),
        put(out.where, alive),
        put(out.log_probs, drawn.log_prob * keep),
        put(out.sampled_log_probs, drawn.sampled_log_prob * keep),
        put(out.entropy, drawn.entropy * keep),
        out.truncated & ~ended,
        *(None, None) if out.kept_ids is None else (
            put(out.kept_ids, jnp.where(alive[..., None], drawn.kept_ids, -1)), put(out.kept_log_mass, drawn.kept_log_mass * keep),
        ),
    )  # fmt: skip
