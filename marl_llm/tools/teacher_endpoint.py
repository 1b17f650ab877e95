"""A teacher behind an endpoint: the log-probs that its model gives the tokens which a student drew.

The endpoint is that of `marl serve`, of vLLM, or another one whose completions have vLLM's `prompt_logprobs`. Tokens travel as ids, so both
models need one vocabulary; nothing is encoded again. What the endpoint says is data: an answer is whole and consistent, or the request is
sent again, a few times, and then a `TeacherError` names the address.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from marl_llm.errors import TeacherError
from marl_llm.tools._chat_backends import ROUNDING, BackendError, bad_reply, check_key, post_with_key, read_log_prob
from marl_llm.tools._http import MAX_BODY
from marl_llm.tools.results import FailureKind
from marl_llm.untrusted import Bounds, flatten_text, json_problem, read_json

ATTEMPTS = 4
PAUSE_S = 2.0  # before the second attempt; each later one waits twice as long
MOST_PAUSE_S = 60.0
CONCURRENCY = 8
MOST_TOP = 20  # likeliest tokens that an endpoint tells
LEAST_TAIL = 1e-6  # probability of all tokens that are not told, at least: sums of rounded numbers know no smaller one
MAX_MESSAGE = 300  # characters of why something failed
BOUNDS = Bounds(size=MAX_BODY, values=8_000_000)
FINAL = (FailureKind.REFUSED, FailureKind.BUDGET)  # another attempt would be answered alike


@dataclasses.dataclass(frozen=True)
class TeacherServer:
    """Where a teacher answers.

    Attributes:
      url: up to `/completions`, e.g. http://127.0.0.1:8000/v1. model: its name there.
      key_env: environment variable with the key; None: there is none. timeout_s: of one request.

    Raises:
      ValueError: no http(s) URL, or a key that is not set or would travel unencrypted.
    """

    url: str
    model: str
    key_env: str | None = None
    timeout_s: float | int = 120.0

    def __post_init__(self):
        check_key(self.url, self.key_env)


@dataclasses.dataclass(frozen=True, eq=False)
class StudentSample:
    """The ids of a prompt and of the response that a student drew behind it. Raises `ValueError` where either is empty."""

    prompt: Int[np.ndarray, "P"]
    response: Int[np.ndarray, "R"]

    def __post_init__(self):
        if not (len(self.prompt) and len(self.response)):
            sizes = f"a prompt of {len(self.prompt)} ids and a response of {len(self.response)}"
            raise ValueError(f"{sizes}: a teacher scores 1 or more behind 1")


@dataclasses.dataclass(frozen=True, eq=False)
class TaughtSample:
    """What a teacher says of the R tokens of a response: their log-probs, and with K > 0 its K likeliest tokens in their places.

    `spans`: number of the span that each token was scored in, 0: in none; None: each by itself.
    """

    log_probs: Float[np.ndarray, "R"]
    top_ids: Int[np.ndarray, "R K"]
    top_log_probs: Float[np.ndarray, "R K"]
    spans: Int[np.ndarray, "R"] | None = None


class TeacherEndpoint:
    """Scores samples by a server, several at a time; for one thread.

    Args:
      vocab_size: of the student: ids below it mean the same to both.
    """

    def __init__(self, server: TeacherServer, vocab_size: int):
        self.server, self.vocab_size = server, vocab_size
        self._url = server.url.rstrip("/").removesuffix("/completions").rstrip("/") + "/completions"

    def score(self, samples: Sequence[StudentSample], top_k: int = 0) -> list[TaughtSample]:
        """What the teacher says of each sample, in their order. Raises `TeacherError` once a request has failed too often."""
        stop = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(CONCURRENCY, "teacher") as pool:
            futures = [pool.submit(self._score_patiently, sample, top_k, stop) for sample in samples]
            try:
                return [future.result() for future in futures]
            except BaseException:
                stop.set()  # nobody waits for the others any more
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def pieces(self, ids: Sequence[int]) -> dict[int, str]:
        """The text that the endpoint gives each of these ids, as far as it tells; one attempt. Raises `TeacherError`."""
        try:
            entries = self._ask([0, *ids], 0)
        except BackendError as error:
            raise self._failure(error, 1) from None
        texts = {i: entry[str(i)].get("decoded_token") for i, entry in zip(ids, entries[1:])}
        return {i: text for i, text in texts.items() if isinstance(text, str)}

    def _score_patiently(self, sample: StudentSample, top_k: int, stop: threading.Event) -> TaughtSample:
        """A sample's scores, after a few attempts at most. Raises `TeacherError`."""
        pause = PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._taught(sample, top_k)
            except BackendError as error:
                if attempt == ATTEMPTS or error.kind in FINAL or stop.wait(min(max(pause, error.retry_after_s or 0), MOST_PAUSE_S)):
                    raise self._failure(error, attempt) from None
                pause *= 2
        raise AssertionError

    def _failure(self, error: BackendError, attempts: int) -> TeacherError:
        why = flatten_text(str(error), MAX_MESSAGE)
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        return TeacherError(f"the teacher {self.server.model!r} at {self.server.url} gave no prompt log-probs{tried} ({error.kind}): {why}")

    def _taught(self, sample: StudentSample, top_k: int) -> TaughtSample:
        """One attempt. Raises `BackendError`."""
        ids, size = [*sample.prompt.tolist(), *sample.response.tolist()], len(sample.response)
        entries = self._ask(ids, top_k)[-size:]
        own = [read_log_prob(entry[str(i)].get("logprob")) for entry, i in zip(entries, ids[-size:], strict=True)]
        top_ids, top = np.zeros((size, top_k), np.int32), np.zeros((size, top_k), np.float32)
        for place, entry in enumerate(entries if top_k else []):
            likeliest = sorted(((read_log_prob(scores.get("logprob")), token) for token, scores in entry.items()), reverse=True)[:top_k]
            if len(likeliest) < top_k:
                raise bad_reply(f"{len(entry)} likeliest tokens in place of {top_k}")
            top[place], top_ids[place] = [value for value, _ in likeliest], [self._id(token) for _, token in likeliest]
        if top_k and np.exp(top.astype(np.float64)).sum(axis=1).max() > 1 + top_k * ROUNDING:
            raise bad_reply("probabilities of more than 1 together")
        return TaughtSample(np.asarray(own, np.float32), top_ids, top)

    def _ask(self, ids: list[int], top_k: int) -> list[Any]:
        """The field `prompt_logprobs` of one prompt: each entry behind the first is an object that has its own token. Raises
        `BackendError`."""
        server = self.server
        body = {"model": server.model, "prompt": ids, "max_tokens": 0, "echo": True, "prompt_logprobs": top_k, "temperature": 1.0}
        answer = read_json(post_with_key(self._url, body, server.timeout_s, server.key_env), BOUNDS)
        if not answer.ok:
            raise bad_reply(f"the answer cannot be read: {json_problem(answer.problem, BOUNDS)}")
        choices = answer.value.get("choices") if isinstance(answer.value, dict) else None
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict):
            raise bad_reply("the answer has not one choice")
        entries = choice.get("prompt_logprobs")
        if entries is None:
            raise BackendError(FailureKind.REFUSED, "its answers have no prompt_logprobs; `marl serve` and vLLM give them")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise bad_reply("prompt_logprobs are not one per token of the prompt")
        for token, entry in zip(ids[1:], entries[1:], strict=True):
            if not isinstance(entry, dict) or not all(isinstance(scores, dict) for scores in entry.values()) or str(token) not in entry:
                raise bad_reply(f"prompt_logprobs have no entry of the token {token} in its place")
        return entries

    def _id(self, token: str) -> int:
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and str(int(token)) == token and int(token) < self.vocab_size):
            raise bad_reply(f"the token {token[:MAX_MESSAGE]!r}, which the student's vocabulary of {self.vocab_size} has not")
        return int(token)


def tail_log_probs(top_log_probs: Float[np.ndarray, "*S K"]) -> Float[np.ndarray, "*S"]:
    """The log of what the likeliest tokens leave to all others."""
    rest = 1 - np.exp(top_log_probs.astype(np.float64)).sum(axis=-1)
    return np.log(np.maximum(rest, LEAST_TAIL)).astype(np.float32)
