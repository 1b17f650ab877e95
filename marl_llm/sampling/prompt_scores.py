"""Log-probs of given tokens under a served model, each given those before it: forward passes between the chunks of those who decode.

Nothing is drawn, and no pages are read or written: a prompt is computed whole, with the parameters in force when its turn comes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from marl_llm.models import ModelConfig, prompt_mask, prompt_positions, use_rules
from marl_llm.models.log_probs import pairs_of_a_chunk
from marl_llm.models.sharding import SAMPLE
from marl_llm.sampling.model_runner import adapters_of, served_decoder
from marl_llm.sampling.requests import RequestError
from marl_llm.sampling.scheduler import PROGRAM_TOKENS, Scheduler
from marl_llm.sampling.sequences import bucket
from marl_llm.sampling.timed import Timed

LEAST_LENGTH = 16  # tokens of a program's rows


class PromptScores(NamedTuple):
    """What a model says of each token of a prompt but the first, given those before it, under softmax(logits)."""

    log_probs: Float[np.ndarray, "N"]  # in nats
    ranks: Int[np.ndarray, "N"]  # how many tokens are at least as likely, this one among them
    top_ids: Int[np.ndarray, "N K"]  # the likeliest tokens, the likeliest first
    top_log_probs: Float[np.ndarray, "N K"]
    version: int  # of the model's parameters


@dataclasses.dataclass(frozen=True, eq=False)
class ScoringRequest:
    """A prompt to be scored.

    Attributes:
      top_k: how many of the likeliest tokens are asked for at each place.
      shape: (length of a row, likeliest tokens) of the program that scores it.
    """

    model: str
    ids: tuple[int, ...]
    top_k: int
    shape: tuple[int, int]
    future: Future = dataclasses.field(default_factory=Future)


class PromptScorer:
    """The prompts that wait to be scored by one scheduler's models.

    `waiting` and `next_batch` need the engine's lock; the engine's thread scores.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.waiting: collections.deque[ScoringRequest] = collections.deque()
        self.active: list[ScoringRequest] = []  # taken last

    def check(self, model: str, ids: Sequence[int], top_k: int) -> ScoringRequest:
        """Raises `RequestError` for a prompt that can never be scored here."""
        sizes, vocabulary = self._scheduler.sizes, self._scheduler.config.vocab_size
        most = sizes.prompt_tokens + sizes.response_tokens
        if not 1 <= len(ids) <= most:
            raise RequestError(f"request refused: a prompt of {len(ids)} tokens; prompts of 1 to {most} are scored")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise RequestError(f"request refused: ids from {min(ids)} to {max(ids)}; the vocabulary is 0 to {vocabulary - 1}")
        if not 0 <= top_k <= vocabulary:
            raise RequestError(f"request refused: the {top_k} likeliest tokens are asked for; the vocabulary has {vocabulary}")
        shape = bucket(len(ids), LEAST_LENGTH), min(bucket(top_k), vocabulary) if top_k else 0
        return ScoringRequest(model, tuple(ids), top_k, shape)

    def next_batch(self) -> list[ScoringRequest]:
        """Takes the oldest prompt, with others of its shape as far as one program holds them."""
        if not self.waiting:
            return []
        shape, sizes = self.waiting[0].shape, self._scheduler.sizes
        most = 0 if sizes.batch_invariant else PROGRAM_TOKENS // shape[0]
        self.active = [request for request in self.waiting if request.shape == shape][: max(self._scheduler.parts, most)]
        taken = set(self.active)
        self.waiting = collections.deque(request for request in self.waiting if request not in taken)
        return self.active

    def score(self, batch: Sequence[ScoringRequest]) -> None:
        """Answers prompts of one shape."""
        scheduler, (length, top_k) = self._scheduler, batch[0].shape
        count = scheduler.parts * bucket(-(-len(batch) // scheduler.parts))
        tokens, lengths, models = np.zeros((count, length), np.int32), np.ones(count, np.int32), np.zeros(count, np.int32)
        for row, request in enumerate(batch):
            tokens[row, : len(request.ids)], lengths[row] = request.ids, len(request.ids)
            models[row] = scheduler.names.index(request.model)
        with Timed(scheduler.name, scheduler.stats, scheduler.shapes, ("score", count, length, top_k)):
            table = score_prompts(scheduler.config, scheduler.weights.params, tokens, lengths, models, top_k=top_k, mesh=scheduler.mesh)
            log_probs, ranks, top_ids, top_log_probs = map(np.asarray, table)
        scheduler.stats["scored_tokens"] += int(lengths[: len(batch)].sum())
        for row, request in enumerate(batch):
            known, top = slice(len(request.ids) - 1), (row, slice(len(request.ids) - 1), slice(request.top_k))
            version = scheduler.weights.versions[request.model]
            scores = PromptScores(log_probs[row, known], ranks[row, known], top_ids[top], top_log_probs[top], version)
            request.future.set_result(scores)


@functools.partial(jax.jit, static_argnames=("config", "top_k", "mesh"))
def score_prompts(
    config: ModelConfig, params: dict, tokens: Int[Array, "n L"], lengths: Int[Array, "n"], models: Int[Array, "n"],
    *, top_k: int, mesh: Mesh | None,
) -> tuple[Float[Array, "n L"], Int[Array, "n L"], Int[Array, "n L K"], Float[Array, "n L K"]]:  # fmt: skip
    """(log-prob and rank of token t + 1, the likeliest tokens there and their log-probs) at each place t of prompts, padded on the right.

    The logits of a part of the places exist at a time. `models`: whose adapters, where several models share a base. What stands at a row's
    last token and behind it means nothing.
    """
    model, variables = served_decoder(config, params)
    where = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    agents = jax.nn.one_hot(models, adapters_of(params)) if adapters_of(params) > 1 else None
    targets = jnp.roll(tokens, -1, axis=1)

    def score(part: tuple[Any, Any]) -> tuple[Array, ...]:
        hidden, target = part
        log_probs = jax.nn.log_softmax(model.apply(variables, hidden, method="head"))
        chosen = jnp.take_along_axis(log_probs, target[..., None], axis=-1)
        rank = jnp.sum(log_probs >= chosen, axis=-1, dtype=jnp.int32)
        top, ids = jax.lax.top_k(log_probs, top_k)
        return chosen[..., 0], rank, ids.astype(jnp.int32), top

    def parts(x: Array, size: int) -> Array:
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    with use_rules(mesh, SAMPLE) if mesh is not None else jax.named_scope("score"):
        hidden, _ = model.apply(variables, tokens, prompt_positions(where), prompt_mask(where), agents=agents)
        most = max(1, pairs_of_a_chunk(config.vocab_size) // len(tokens))
        size = min(tokens.shape[1], bucket(1 + most) // 2)  # a power of two, as the length is
        scores = jax.lax.map(score, (parts(hidden, size), parts(targets, size)))
    return tuple(jnp.moveaxis(x, 0, 1).reshape(*tokens.shape, *x.shape[3:]) for x in scores)
