"""Sampling by a vLLM server, behind the engine's surface: `submit`, `generate`, `set_params`, `stats`, `close`.

The server draws; parameters, scores and updates stay here. After each update the parameters are written as a directory of Hugging Face's
form, the server reloads them, and they are confirmed: log-probs of a fixed row of tokens must be those of this program. Every answer
carries the label of the parameters that drew it, so one from a server that was started anew, or that somebody else gave other parameters,
is a failure. What the server breaks raises `InfrastructureError`, which aborts a play (law 9).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from marl_llm.models import ModelConfig, log_prob_gap_bound, log_probs, save_pretrained
from marl_llm.sampling.drafting import DRAFT_COUNTS
from marl_llm.sampling.engine import Engine, EngineError, Handle
from marl_llm.sampling.prompt_scores import PromptScores
from marl_llm.sampling.requests import Completion, Request, RequestError, SamplingParams
from marl_llm.sampling.sequences import EngineConfig
from marl_llm.sampling.stops import stop_rule
from marl_llm.text import Tokenizer
from marl_llm.tools.chat import BackendError
from marl_llm.tools.vllm import Asked, SampledIds, VllmClient, VllmServer

PROBE = 32  # tokens of the fixed row
UNCHANGED = 0.25  # a server whose log-probs are so much nearer to the parameters of before than to the new ones has not taken the new ones


def confirmed_gap(dtype: str) -> float:
    """Largest difference of a log-prob, in nats, between two programs that compute in `dtype` with the same parameters."""
    return max(1e-3, log_prob_gap_bound(dtype))


def check_settings(settings: SamplingParams) -> None:
    """Raises `ValueError` for draws of which a server does not tell all that is kept of a sample."""
    if settings.truncates or settings.temperature not in (0, 1):
        raise ValueError(
            f"temperature={settings.temperature:g}, top_k={settings.top_k}, top_p={settings.top_p:g}: a vLLM server tells log-probs under "
            "one distribution and no sets of kept tokens; with sampler='vllm' draws are at temperature 1 (or 0), no top-k, top-p, min-p"
        )


def check_model(model: str, known: Iterable[str]) -> None:
    """Raises `RequestError` for a model that is not served."""
    if model not in known:
        raise RequestError(f"request refused: no model {model!r}; served are {', '.join(known)}")


def seed_of(key: Key[Array, ""], identity: Sequence[int]) -> int:
    """A request's seed at the server, 63 bits of a hash: requests of different identities share nothing."""
    root = np.asarray(jax.random.key_data(key)).tobytes()
    return int.from_bytes(hashlib.sha256(root + np.asarray(identity, np.int64).tobytes()).digest()[:8], "big") >> 1


@functools.partial(jax.jit, static_argnums=0)
def _scores(config: ModelConfig, params: dict, ids: Int[Array, "L"]) -> Float[Array, "P"]:
    return log_probs(config, params, ids[None]).log_probs[0, 1:]


class VllmSampler:
    """One model, drawn by one server. It has the server's parameters to itself. Close it.

    Args:
      name, config, params: the model, in any layout. Its value head stays here.
      server: where it is drawn.
      key: the root of all draws: a request's seed at the server is made of it and the request's own.
      sizes: `max_num_seqs` requests are under way at a time; longest prompt and budget.
      tokenizer: for stop strings, which are looked for here: the server draws to the budget and what is behind them is cut.

    Raises:
      EngineError: the server cannot be reached, refuses the parameters, or has others afterwards.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        params: dict,
        server: VllmServer,
        key: Key[Array, ""],
        *,
        sizes: EngineConfig,
        tokenizer: Tokenizer | None = None,
    ):
        self.name, self.config, self.sizes, self.tokenizer = name, dataclasses.replace(config, value_head=False), sizes, tokenizer
        self.version = -1
        self._root = key
        self._run, self._label = uuid.uuid4().hex[:12], ""
        self._folder = pathlib.Path(server.folder)
        self._kept: pathlib.Path | None = None  # what the server was given last
        size = max(2, min(PROBE, sizes.prompt_tokens + sizes.response_tokens - 1))
        self._probe = tuple(np.random.default_rng(0).integers(0, config.vocab_size, size).tolist())
        self._before: Float[np.ndarray, "P"] | None = None
        self._closed = False
        self._client = VllmClient(server, sizes.max_num_seqs)
        try:
            self.set_params(name, params)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ requests
    async def generate(self, request: Request) -> Completion:
        """The answer. Raises `RequestError` for one that can never be served, `InfrastructureError` for what the server breaks."""
        payload, version = self._asked(request), self.version
        return self._completion(request, (await self._client.generate(payload)).outcome(), version)

    def submit(self, request: Request, on_tokens: Callable[[np.ndarray | None], None] | None = None) -> Future[Completion]:
        """See `Engine.submit`; `on_tokens` gets the whole answer at once. The future's `result` raises as `generate` does."""
        payload, version, done = self._asked(request), self.version, Future()

        def answered(reply: Future) -> None:
            if done.set_running_or_notify_cancel():
                try:
                    completion = self._completion(request, reply.result().outcome(), version)
                    if on_tokens is not None:
                        on_tokens(completion.tokens)
                    done.set_result(completion)
                except BaseException as error:  # for whoever waits for it
                    done.set_exception(error)
            if on_tokens is not None:
                on_tokens(None)

        self._client.submit(payload).add_done_callback(answered)
        return done

    def score(self, model: str, prompts: Iterable[Sequence[int]], top_k: int = 0) -> list[PromptScores]:
        """See `Engine.score`. Raises `RequestError`: only an engine of this program scores."""
        raise RequestError(f"request refused: a vLLM server draws for model {model!r}: ask it for the log-probs of prompts")

    def _asked(self, request: Request) -> Asked:
        if self._closed or not self._label:
            raise EngineError(f"model {self.name!r} is not served: its sampler is closed, or has not taken its last parameters")
        check_model(request.model, (self.name,))
        n, o = len(request.prompt), self.sizes
        if not 1 <= n <= o.prompt_tokens or not 1 <= request.max_tokens <= o.response_tokens:
            most = f"prompts of 1 to {o.prompt_tokens} and answers of up to {o.response_tokens} tokens are served"
            raise RequestError(f"request refused: a prompt of {n} and an answer of {request.max_tokens} tokens; {most}")
        try:
            check_settings(request.settings)
            stop_rule(self.config.vocab_size, request.stop_ids, request.stop_strings, self.tokenizer)
        except ValueError as error:
            raise RequestError(f"request refused: {error}") from error
        if outside := [i for i in request.prompt if not 0 <= i < self.config.vocab_size]:
            raise RequestError(f"request refused: {outside[:4]} are outside of the vocabulary of {self.config.vocab_size}")
        settings = {"temperature": float(request.settings.temperature), "seed": seed_of(self._root, request.seed)}
        timeout_s = Asked.timeout_s if request.timeout is None else request.timeout
        return Asked(request.prompt, request.max_tokens, request.stop_ids, self.config.vocab_size, self._label, settings, timeout_s)

    def _completion(self, request: Request, sampled: SampledIds, version: int) -> Completion:
        """What was drawn up to where the request's stop rule ends it."""
        rule = stop_rule(self.config.vocab_size, request.stop_ids, request.stop_strings, self.tokenizer)
        state, size = 0, 0
        while size < len(sampled.ids) and not rule.ends[state]:
            state, size = int(rule.next(state, sampled.ids[size])), size + 1
        log_probs = np.asarray(sampled.log_probs[:size], np.float32)
        drawn_from = np.zeros_like(log_probs) if request.settings.temperature == 0 else log_probs
        finish = "stop" if rule.ends[state] else "length"
        return Completion(np.asarray(sampled.ids[:size], np.int32), log_probs, drawn_from, None, finish, version)

    # ------------------------------------------------------------------------------------------------ parameters
    def set_params(self, model: str, params: dict) -> None:
        """New parameters: written, reloaded by the server, confirmed. Nothing of this program may be under way.

        Raises `EngineError` if the server cannot be reached, refuses them, or has others afterwards; nothing is drawn then until they
        are set again.
        """
        check_model(model, (self.name,))
        params = {name: leaf for name, leaf in params.items() if name != "value_head"}
        label, self._label = f"{self._run}-{self.version + 1}", ""
        place = self._folder / f"{self.name}-{label}"
        try:
            save_pretrained(place, self.config, params, dtype=self.config.compute_dtype)
            self._client.reload(str(place), label)
            served = np.asarray(self._client.prompt_log_probs(self._probe, label), np.float32)
        except (BackendError, OSError) as error:
            shutil.rmtree(place, ignore_errors=True)
            again = "Once that is mended, the same command goes on from the last checkpoint"
            raise EngineError(f"model {self.name!r} could not be given to its sampler: {error}. {again}") from error
        expected = np.asarray(jax.device_get(_scores(self.config, params, jnp.asarray(self._probe))), np.float32)
        try:
            self._check(served, expected)
        except EngineError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        if self._kept is not None:
            shutil.rmtree(self._kept, ignore_errors=True)
        self._kept, self._before, self._label, self.version = place, expected, label, self.version + 1

    def _check(self, served: np.ndarray, expected: np.ndarray) -> None:
        """Raises `EngineError` unless the server's log-probs are those of the new parameters."""
        bound, gap = confirmed_gap(self.config.compute_dtype), float(np.max(np.abs(served - expected)))
        gap_before = np.inf if self._before is None else float(np.max(np.abs(served - self._before)))
        stale = bound / 100 < gap and gap_before < UNCHANGED * gap
        if not stale and gap <= bound:
            return
        why = "they are those of before" if stale else f"more than {bound:g}; is it the same model, in the same dtype (vllm serve --dtype)?"
        raise EngineError(
            f"model {self.name!r}: after the reload the server's log-probs differ from this program's by {gap:.1e} nats: {why}"
        )

    def stats(self) -> dict[str, dict[str, float | int]]:
        """See `VllmClient.stats`, under the model's name."""
        return {self.name: self._client.stats()}

    def draft_counts(self) -> dict[str, float | int]:
        """None: a server's drafts are its own."""
        return {}

    def close(self) -> None:
        """Finishes what is under way and removes the parameters from the folder. The server goes on."""
        self._closed = True
        self._client.close()
        if self._kept is not None:
            shutil.rmtree(self._kept, ignore_errors=True)


class Samplers:
    """Several models, each where it is drawn: an engine of this program for some, servers for the others. Has the engine's surface.

    Args:
      by_model: name -> who draws it. Closed with this.
    """

    def __init__(self, by_model: Mapping[str, Engine | VllmSampler]):
        self._by_model = dict(by_model)

    def _of(self, model: str) -> Engine | VllmSampler:
        check_model(model, self._by_model)
        return self._by_model[model]

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate` and `VllmSampler.generate`."""
        return await self._of(request.model).generate(request)

    def submit(self, request: Request, on_tokens: Callable[[np.ndarray | None], None] | None = None) -> Handle | Future[Completion]:
        """See `Engine.submit` and `VllmSampler.submit`."""
        return self._of(request.model).submit(request, on_tokens)

    def score(self, model: str, prompts: Iterable[Sequence[int]], top_k: int = 0) -> list[PromptScores]:
        """See `Engine.score` and `VllmSampler.score`."""
        return self._of(model).score(model, prompts, top_k)

    def set_params(self, model: str, params: dict) -> None:
        """See `Engine.set_params` and `VllmSampler.set_params`."""
        self._of(model).set_params(model, params)

    def stats(self) -> dict[str, dict[str, float | int]]:
        """Of all models together."""
        return {name: value for sampler in self._distinct() for name, value in sampler.stats().items()}

    def draft_counts(self) -> dict[str, float | int]:
        """See `Engine.draft_counts`; of all together."""
        counts = dict.fromkeys(DRAFT_COUNTS, 0)
        for sampler in self._distinct():
            for name, count in sampler.draft_counts().items():
                counts[name] += count
        return counts

    def close(self) -> None:
        """Closes all."""
        for sampler in self._distinct():
            sampler.close()

    def _distinct(self) -> list[Engine | VllmSampler]:
        return list({id(sampler): sampler for sampler in self._by_model.values()}.values())
