"""What one asks of a sampling engine, and what comes back: plain values that know nothing of devices."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

FINISHED = ("stop", "length", "cancelled", "timeout")
MAX_KEPT = 128  # kept ids per token where a nucleus is trained on: 512 bytes a token


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: temperature, then top-k, then top-p over what is left, then min-p (the order of Hugging Face), then `max_kept`.

    Raises `ValueError` naming the field that cannot be.
    """

    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest; None keeps all
    top_p: float = 1.0  # keep the likeliest until their mass reaches this
    min_p: float = 0.0  # keep tokens at least this many times as likely as the likeliest
    max_kept: int | None = None  # keep the likeliest of what is left, this many at most, and hand back their ids; None: no ids, no limit

    def __post_init__(self):
        for field, good, want in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k is None or self.top_k >= 1, "None, or 1 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("max_kept", self.max_kept is None or self.max_kept >= 1, "None, or 1 or more"),
        ):
            if not good:
                raise ValueError(f"sampling.{field}={getattr(self, field)!r} must be {want}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens of positive probability may be left out."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0 or self.max_kept is not None

    @classmethod
    def to_train(cls, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
        """SamplingParams whose draws can be trained on: a scorer renormalises over the very set that each token was drawn from.

        With a top-k all of its tokens are handed back. A nucleus may be as large as the vocabulary, so at most `MAX_KEPT` tokens of it are
        drawn from: `kept_log_mass` below `log(top_p)` shows where that bound. Without truncation there is nothing to hand back.
        """
        plain = cls(temperature, top_k, top_p, min_p)
        return dataclasses.replace(plain, max_kept=top_k or MAX_KEPT) if plain.truncates else plain


PLAIN = SamplingParams()  # the policy's own distribution


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it.

    `seed` is the request's identity, for example (step, env, agent, turn, branch): every token's key is folded from the engine's root
    key, these numbers and the token's position, so the same request gets the same tokens alone, in any company, in any slot (law 6).
    """

    prompt: tuple[int, ...]  # token ids, at least one
    seed: tuple[int, ...]  # each 0 <= n < 2**31
    max_tokens: int  # budget of the response, with its stop token
    model: str = "policy"
    settings: SamplingParams = PLAIN
    stop_ids: tuple[int, ...] = ()  # a response ends with the first of these, which belongs to it
    stop_strings: tuple[str, ...] = ()  # ... or with the token that completes one of these in the text
    timeout: float | None = None  # seconds from submission; what there is by then comes back as 'timeout'


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to a request. Tokens are the ids that were drawn, never re-encoded text (law 1).

    Log-probs are those of the parameters that drew each token. Where parameters were exchanged within an answer
    (`EngineConfig.weight_update="in_flight"`),
    later tokens read the keys and values of earlier ones as the parameters of then wrote them: the log-prob is exact for what was computed,
    and a scorer, which computes all of it with one set of parameters, finds another one. In-flight updates: PipelineRL, arXiv 2509.19128.
    """

    tokens: Int[np.ndarray, "R"]
    log_probs: Float[np.ndarray, "R"]  # of the raw policy, softmax(logits)
    sampled_log_probs: Float[np.ndarray, "R"]  # of the distribution drawn from: tempered and truncated
    entropy: Float[np.ndarray, "R"] | None  # of the raw policy, nats; None from a server that does not tell it
    finish: str  # one of FINISHED: a stop token or string, the budget, `cancel`, the deadline
    version: int  # of the model's parameters: how often they had been set when the first token was drawn
    reused: int = 0  # prompt tokens whose keys and values were still there from an earlier turn
    kept_ids: Int[np.ndarray, "R M"] | None = None  # with `SamplingParams.max_kept` (M): the tokens each was drawn from, -1 behind them
    kept_log_mass: Float[np.ndarray, "R"] | None = None  # ... and the log of their probability under softmax(logits / temperature)
    versions: Int[np.ndarray, "R"] | None = None  # of the parameters that drew each token, never falling; None: all are `version`

    @property
    def mixed(self) -> bool:
        """Whether several versions of the parameters drew it."""
        return self.versions is not None and self.versions.size > 0 and bool(self.versions[-1] != self.version)


@runtime_checkable
class Generator(Protocol):
    """Whoever answers requests: the engine, an outside model behind a tokenizer, or a script in a test."""

    async def generate(self, request: Request) -> Completion:
        """The answer. Raises `RequestError` for a request that can never be served (too long, unknown model)."""
        ...


class RequestError(ValueError):
    """A request that cannot be served; the message says what is wrong with it and what would be served."""
