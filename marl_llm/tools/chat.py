"""Chat with a model outside this program, for coaches and external feedback: bounded, paced, retried, cached, and never over the cap.

  client = ChatClient(OpenAICompatible("https://.../v1", "some-model"), cache="runs/coach.sqlite", cap_usd=20.0, prices=(0.3, 2.5))
  result = client.complete([{"role": "user", "content": "Score this action from 0 to 10: ..."}], max_tokens=64)
  result.outcome().text

A reply is an outcome, whatever it says. Everything else (a dead server, a deadline, the cap) is a failure and no reward of 0.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from marl_llm.tools._calls import Calls
from marl_llm.tools._chat_backends import (
    Backend,
    BackendError,
    ChatReply,
    ChatRequest,
    Message,
    OpenAICompatible,
    Options,
    PolicyBackend,
    read_key,
)
from marl_llm.tools._chat_store import ChatStore
from marl_llm.tools.results import FINAL_KINDS, FailureKind, ToolResult, failed, success
from marl_llm.untrusted import Said, read_json, valid_text

__all__ = [
    "Backend", "BackendError", "ChatClient", "ChatReply", "ChatRequest", "Message", "OpenAICompatible", "Options", "PolicyBackend",
    "read_key",
]  # fmt: skip

TOKENS_PER_MESSAGE = 16  # more than any chat template adds around a message
KEY_VERSION = 1
MAX_TEXT = 1 << 20  # characters of a reply, and tokens where the request has no bound
MAX_FINISH = 64  # characters of a finish reason


class Pace:
    """Spreads attempts over time: at most so many requests and tokens per minute, evenly, and none while a server wants a pause."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self._per_request = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60.0 / tokens_per_minute if tokens_per_minute else 0.0
        self._next_request = self._next_token = self._paused_until = 0.0
        self._lock = threading.Lock()

    def wait(self, tokens: int, deadline: float) -> bool:
        """Sleeps until an attempt of so many tokens may go; False at once, and nothing taken, if that is after `deadline`."""
        with self._lock:
            turn = max(time.monotonic(), self._next_request, self._next_token, self._paused_until)
            if turn >= deadline:
                return False
            self._next_request = turn + self._per_request
            self._next_token = turn + self._per_token * tokens
        time.sleep(max(0.0, turn - time.monotonic()))
        return True

    def pause(self, seconds: float) -> None:
        """Holds back the attempts that have no turn yet."""
        with self._lock:
            self._paused_until = max(self._paused_until, time.monotonic() + seconds)


class ChatClient:
    """Calls a backend. Safe for threads; `close` it, or use it in a `with`.

    Args:
      backend: `OpenAICompatible` or `PolicyBackend`.
      concurrency: most requests under way; further ones wait in order.
      deadline_s: of one call from when it leaves that queue, all attempts, pauses and waits included.
      attempt_s: of one attempt.
      attempts: most tries. Between them the client waits a random time up to `backoff_s`, 2 · `backoff_s`, 4 · ... and at least what
        the server's Retry-After says.
      requests_per_minute, tokens_per_minute: what the provider allows. Tokens are bounded from above before a request is sent: the bytes of
        its text, since no token is shorter, and `max_tokens`.
      cache: file for replies by content, and for what was spent over runs; None keeps both in memory for this client.
      cap_usd: most that may be spent, over all runs that share the cache. The bound of each attempt is set aside before it is sent, and an
        attempt that broke off after it was sent counts with its bound: the provider may charge for it. So does a reply that counts no
        tokens, or a number below 0 or beyond the request's own bound.
      prices: USD per million tokens of prompt and of reply.

    Raises:
      ValueError: settings that contradict each other.
    """

    def __init__(
        self,
        backend: Backend,
        concurrency: int = 8,
        deadline_s: float = 120.0,
        attempt_s: float = 60.0,
        attempts: int = 6,
        backoff_s: float = 0.5,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        cache: str | pathlib.Path | None = None,
        cap_usd: float | None = None,
        prices: tuple[float, float] | None = None,
    ):
        if cap_usd is not None and prices is None:
            raise ValueError("a spending cap needs prices=(USD per million prompt tokens, USD per million reply tokens)")
        if attempts < 1 or min(deadline_s, attempt_s) <= 0 or backoff_s < 0:
            raise ValueError("attempts must be at least 1, deadline_s and attempt_s positive, backoff_s not negative")
        if cache is not None and backend.identity is None:
            raise ValueError("this backend's replies must not be cached (a policy without a version): cache would have no effect")
        self._backend, self._prices, self._cap_usd = backend, prices or (0.0, 0.0), cap_usd
        self._deadline_s, self._attempt_s, self._attempts, self._backoff_s = deadline_s, attempt_s, attempts, backoff_s
        self._pace = Pace(requests_per_minute, tokens_per_minute)
        self._store = ChatStore(cache)
        self._calls: Calls = Calls(self._call, concurrency, "chat-client")
        self._jitter = random.Random()  # when, not what: no result depends on it
        self._lock = threading.Lock()
        self._flights: dict[str, list] = {}  # cache key -> [lock, number of calls that hold or await it]
        names = "calls cache_hits attempts retries prompt_tokens completion_tokens uncounted_replies truncated_replies seconds".split()
        self._counts = dict.fromkeys([*names, *(f"failed_{kind.value}" for kind in FailureKind)], 0.0)

    def complete(self, messages: Sequence[Message], draw: int = 0, **options: Any) -> ToolResult[ChatReply]:
        """One reply.

        Args:
          messages: each with `role` and `content`.
          draw: see `ChatRequest`.
          **options: fields of `Options`.

        Raises:
          ValueError, TypeError: a malformed request.
        """
        return self._calls.call(self._checked(ChatRequest(tuple(messages), Options(**options), draw)))

    def complete_batch(self, requests: Sequence[ChatRequest]) -> list[ToolResult[ChatReply]]:
        """Many replies, in order."""
        return self._calls.batch([self._checked(request) for request in requests])

    async def acomplete(self, messages: Sequence[Message], draw: int = 0, **options: Any) -> ToolResult[ChatReply]:
        """`complete` from an event loop."""
        return await self._calls.acall(self._checked(ChatRequest(tuple(messages), Options(**options), draw)))

    async def acomplete_batch(self, requests: Sequence[ChatRequest]) -> list[ToolResult[ChatReply]]:
        """`complete_batch` from an event loop."""
        return await self._calls.abatch([self._checked(request) for request in requests])

    def metrics(self, prefix: str = "chat") -> dict[str, float]:
        """Counts since the client was made, seconds summed over calls, and USD spent (over all runs that share the cache)."""
        with self._lock:
            counts = dict(self._counts)
        return {f"{prefix}/{name}": value for name, value in counts.items()} | {f"{prefix}/usd": self._store.spent()}

    def close(self) -> None:
        """Finishes the calls under way and closes the cache."""
        self._calls.close()
        self._store.close()

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _checked(self, request: ChatRequest) -> ChatRequest:
        if self._cap_usd is not None and request.options.max_tokens is None:
            raise ValueError("under a spending cap every request needs max_tokens: without it a reply has no highest price")
        return request

    def _call(self, request: ChatRequest) -> ToolResult[ChatReply]:
        start = time.monotonic()
        deadline = start + self._deadline_s
        key = None if self._backend.identity is None else content_key(self._backend.identity, request)
        if key is None:
            result = self._attempt_all(request, start, deadline)
        else:
            with self._flight(key, deadline) as alone:
                known = kept_reply(self._store.reply(key))
                if known is not None:
                    result = success(known, time.monotonic() - start, 0)
                elif not alone:
                    message = f"an equal request was not answered within {self._deadline_s} s"
                    result = failed(FailureKind.DEADLINE, message, time.monotonic() - start, 0)
                else:
                    result = self._attempt_all(request, start, deadline)
                    if result.ok:
                        self._store.keep(key, json.dumps(dataclasses.asdict(result.value)))
        self._count(result)
        return result

    @contextlib.contextmanager
    def _flight(self, key: str, deadline: float) -> Iterator[bool]:
        """Lets equal requests through one after the other, so that only the first is paid for. False: not before the deadline."""
        with self._lock:
            flight = self._flights.setdefault(key, [threading.Lock(), 0])
            flight[1] += 1
        alone = flight[0].acquire(timeout=max(0.0, deadline - time.monotonic()))
        try:
            yield alone
        finally:
            if alone:
                flight[0].release()
            with self._lock:
                flight[1] -= 1
                if flight[1] == 0:
                    del self._flights[key]

    def _attempt_all(self, request: ChatRequest, start: float, deadline: float) -> ToolResult[ChatReply]:
        prompt_bound = sum(len(message["content"].encode("utf-8", "surrogatepass")) + TOKENS_PER_MESSAGE for message in request.messages)
        reply_bound = request.options.max_tokens or 0
        bound_usd = self._usd(prompt_bound, reply_bound)
        attempt = 0
        while True:
            reservation = self._store.reserve(bound_usd, self._cap_usd)
            if reservation is None:
                message = f"the cap of {self._cap_usd} USD leaves no room for a call of up to {bound_usd:.6f} USD"
                return failed(FailureKind.BUDGET, message, time.monotonic() - start, attempt)
            cost = 0.0
            try:
                if not self._pace.wait(prompt_bound + reply_bound, deadline):
                    late = time.monotonic() >= deadline
                    message = f"{self._deadline_s} s are over" if late else f"the rate limits leave no turn within {self._deadline_s} s"
                    kind = FailureKind.DEADLINE if late else FailureKind.RATE_LIMITED
                    return failed(kind, message, time.monotonic() - start, attempt)
                attempt += 1
                with self._lock:
                    self._counts["attempts"] += 1
                cost = bound_usd  # until it is known better, whatever happens
                reply = self._backend.complete(request, min(self._attempt_s, deadline - time.monotonic()))
                reply = checked_reply(reply, prompt_bound, request.options.max_tokens)
                if reply.prompt_tokens is not None and reply.completion_tokens is not None:
                    cost = self._usd(reply.prompt_tokens, reply.completion_tokens)
                return success(reply, time.monotonic() - start, attempt)
            except BackendError as error:
                cost = bound_usd if error.billed else 0.0
                failure = error
            finally:
                self._store.settle(reservation, cost)
            if failure.retry_after_s is not None:
                self._pace.pause(min(failure.retry_after_s, self._deadline_s))
            pause = max(failure.retry_after_s or 0.0, self._jitter.uniform(0.0, self._backoff_s * 2 ** (attempt - 1)))
            if failure.kind in FINAL_KINDS or attempt == self._attempts or time.monotonic() + pause >= deadline:
                return failed(failure.kind, f"after {attempt} attempts: {failure}", time.monotonic() - start, attempt)
            time.sleep(pause)

    def _usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (self._prices[0] * prompt_tokens + self._prices[1] * completion_tokens) / 1e6

    def _count(self, result: ToolResult[ChatReply]) -> None:
        with self._lock:
            counts = self._counts
            counts["calls"] += 1
            counts["seconds"] += result.seconds
            counts["retries"] += max(0, result.attempts - 1)
            if result.failure is not None:
                counts[f"failed_{result.failure.kind.value}"] += 1
                return
            reply = result.value
            counts["cache_hits"] += reply.cached
            counts["truncated_replies"] += reply.finish_reason == "length"
            if not reply.cached:
                counts["uncounted_replies"] += reply.prompt_tokens is None or reply.completion_tokens is None
                counts["prompt_tokens"] += reply.prompt_tokens or 0
                counts["completion_tokens"] += reply.completion_tokens or 0


def checked_reply(reply: ChatReply, prompt_bound: int, max_tokens: int | None) -> ChatReply:
    """A reply whose texts are valid and whose counts of tokens are None unless both lie within the request's bounds.

    Raises:
      BackendError: the reply has no text, or one of more than `MAX_TEXT` characters.
    """
    if not isinstance(reply, ChatReply) or not isinstance(reply.text, str) or len(reply.text) > MAX_TEXT:
        raise BackendError(FailureKind.BAD_REPLY, f"a reply needs a text of at most {MAX_TEXT} characters", billed=True)
    finish = valid_text(reply.finish_reason[:MAX_FINISH]) if isinstance(reply.finish_reason, str) else None
    pairs = ((reply.prompt_tokens, prompt_bound), (reply.completion_tokens, MAX_TEXT if max_tokens is None else max_tokens))
    if not all(type(count) is int and 0 <= count <= bound for count, bound in pairs):
        pairs = ((None, 0), (None, 0))
    return ChatReply(valid_text(reply.text), finish, pairs[0][0], pairs[1][0], reply.cached is True)


def kept_reply(kept: str | None) -> ChatReply | None:
    """A reply from the cache; None if there is none, or none that can be read: it is asked for again."""
    parsed = read_json(kept) if kept is not None else Said()
    try:
        return None if parsed.value is None else dataclasses.replace(ChatReply(**parsed.value), cached=True)
    except TypeError:
        return None


def content_key(identity: str, request: ChatRequest) -> str:
    """SHA-256 of everything that a reply depends on, and of nothing else: no key, no deadline, no time."""
    content = [KEY_VERSION, identity, list(request.messages), dataclasses.asdict(request.options), request.draw]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
