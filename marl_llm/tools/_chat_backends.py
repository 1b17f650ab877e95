"""Who answers a chat request: a server with OpenAI's API, or a policy of our own in this process."""

import dataclasses
import datetime
import email.utils
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marl_llm.local_server import is_loopback
from marl_llm.tools._http import HttpError, HttpReply, post_json, split_url
from marl_llm.tools.results import FailureKind
from marl_llm.untrusted import Bounds, flatten_text, read_json

Message = dict[str, str]
ROLES = ("system", "developer", "user", "assistant")
BOUNDS = Bounds(size=4 << 20, values=100_000)  # of an answer
MAX_HEADER = 100  # characters of a Retry-After
HIDDEN = "[key]"  # stands where somebody repeats a key
FLOOR = -9000.0  # nats; a vLLM server writes -9999 where a log-prob is no number or minus infinity
ROUNDING = 1e-3  # nats by which rounding may lift a log-prob above 0


@dataclasses.dataclass(frozen=True)
class Options:
    """How a reply is sampled; None leaves the choice to the backend.

    Attributes:
      max_tokens: most tokens of the reply. Needed under a spending cap, which could not be kept without.
      stop: texts that end the reply.
      seed: of the backend's sampling, where it knows one.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """One request.

    Attributes:
      messages: each with `role` and `content`.
      draw: number of the sample. Equal requests share one cached reply; a second sample of the same prompt has another number.
    """

    messages: tuple[Message, ...]
    options: Options = Options()
    draw: int = 0

    def __post_init__(self):
        if not self.messages:
            raise ValueError("a chat request needs at least one message")
        for position, message in enumerate(self.messages):
            if set(message) != {"role", "content"} or message["role"] not in ROLES or not isinstance(message["content"], str):
                raise ValueError(f"messages[{position}] must have a 'role' of {ROLES} and a 'content' string, and nothing else")


@dataclasses.dataclass(frozen=True)
class ChatReply:
    """What the model answered.

    Attributes:
      text: empty where the model said nothing.
      finish_reason: as the backend gives it: `stop`, `length`, `content_filter`, ...
      prompt_tokens, completion_tokens: None where the backend does not count.
      cached: whether it came from the cache and cost nothing.
      sampled: what an engine of this library drew: `prompt` and `ids`, `log_probs` under the raw policy, `sampled_log_probs` under the
        distribution drawn from, the parameters' `version`. None from anybody else.
    """

    text: str
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached: bool = False
    sampled: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)


class BackendError(Exception):
    """No reply.

    Attributes:
      kind: why.
      retry_after_s: the pause that the server asked for, or None.
      billed: whether the provider may charge for it all the same.
    """

    def __init__(self, kind: FailureKind, message: str, retry_after_s: float | None = None, billed: bool = False):
        super().__init__(message)
        self.kind, self.retry_after_s, self.billed = kind, retry_after_s, billed


@runtime_checkable
class Backend(Protocol):
    """Whoever answers."""

    identity: str | None  # enters the cache's key; None: replies must not be cached

    def complete(self, request: ChatRequest, timeout_s: float) -> ChatReply:
        """One attempt. Raises BackendError for every failure of the infrastructure."""
        ...


class PolicyBackend:
    """A policy of our own, served in process.

    Args:
      policy: `(messages, options) -> ChatReply`. It is called from several threads if the client's concurrency is above 1, and cannot be
        interrupted: a reply after the deadline is dropped. What it raises is a fault of this program and reaches the caller.
      version: names the parameters, for the cache; None: not cached, because a policy in training changes.
    """

    def __init__(self, policy: Callable[[Sequence[Message], Options], ChatReply], version: str | None = None):
        self._policy = policy
        self.identity = None if version is None else f"policy:{version}"

    def complete(self, request: ChatRequest, timeout_s: float) -> ChatReply:
        """See `Backend.complete`."""
        start = time.monotonic()
        reply = self._policy(request.messages, request.options)
        if not isinstance(reply, ChatReply):
            raise TypeError(f"the policy must return a ChatReply, not {type(reply).__name__}")
        if time.monotonic() - start > timeout_s:
            raise BackendError(FailureKind.DEADLINE, f"the policy answered after {time.monotonic() - start:.3g} s, not {timeout_s:.3g} s")
        return reply


class OpenAICompatible:
    """A server with OpenAI's chat completions (vLLM, SGLang, Gemini's and others' compatible endpoints).

    Args:
      base_url: with or without `/chat/completions`, e.g. http://127.0.0.1:8000/v1.
      model: its name there.
      key_env: environment variable with the key, read anew for each request and kept nowhere; None for servers without one.
      allow_plain_http: sends a key over unencrypted http to another machine.
      extra: further fields of the request body, as the server documents them.

    Raises:
      ValueError: the variable is not set or holds no usable key, or the key would travel unencrypted.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        key_env: str | None = "OPENAI_API_KEY",
        allow_plain_http: bool = False,
        extra: dict[str, Any] | None = None,
    ):
        check_key(base_url, key_env, allow_plain_http)
        base = base_url.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        self.url, self.model, self._key_env, self._extra = f"{base}/chat/completions", model, key_env, dict(extra or {})
        self.identity = json.dumps([self.url, model, self._extra], sort_keys=True)

    def complete(self, request: ChatRequest, timeout_s: float) -> ChatReply:
        """See `Backend.complete`."""
        options = {name: value for name, value in dataclasses.asdict(request.options).items() if value is not None}
        payload = dict(model=self.model, messages=list(request.messages), **options, **self._extra)
        body = post_with_key(self.url, payload, timeout_s, self._key_env)
        try:
            return read_reply(body)
        except ValueError as error:
            raise BackendError(FailureKind.BAD_REPLY, str(error), billed=True) from None


def post_with_key(url: str, payload: Any, timeout_s: float, key_env: str | None) -> bytes:
    """The body of an answer of status 200, without the key where the server repeats it: it would stand in messages and records.

    Raises `BackendError` for another status, for no answer, and where the variable holds no usable key any more.
    """
    try:
        key = read_key(key_env)
    except ValueError as error:
        raise BackendError(FailureKind.REFUSED, str(error)) from None
    try:
        answer = post_json(url, payload, timeout_s, {"Authorization": f"Bearer {key}"} if key else None)
    except HttpError as error:
        raise BackendError(error.kind, redacted(str(error), key), billed=error.sent) from None
    if key:
        answer = dataclasses.replace(answer, body=answer.body.replace(key.encode(), HIDDEN.encode()))
    if answer.status != 200:
        raise refusal(answer)
    return answer.body


def check_key(url: str, key_env: str | None, allow_plain_http: bool = False) -> None:
    """Raises `ValueError` for no http(s) URL, and a key that is not set or would travel unencrypted to another machine."""
    parts = split_url(url)
    if read_key(key_env) and parts.scheme == "http" and not is_loopback(parts.hostname) and not allow_plain_http:
        raise ValueError(f"the key in {key_env} would travel unencrypted to {parts.hostname}: use https, or a tunnel to this machine")


def read_key(key_env: str | None) -> str | None:
    """The key in an environment variable; None without one. Raises `ValueError` if it is not set or holds no usable key."""
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ValueError(f"the environment variable {key_env} holds no key: set it, or pass key_env=None")
    # http.client would refuse it too, with a message that shows it.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"the environment variable {key_env} holds characters that no key has (a newline, a space, a quote?)")
    return key


def read_reply(body: bytes) -> ChatReply:
    """The first choice of a chat completion. Counts of tokens that are none (negative, no integers) are None.

    Raises:
      ValueError: truncated or not JSON, beyond `BOUNDS`, or not of this form.
    """
    parsed = read_json(body, BOUNDS)
    if not parsed.ok:
        raise ValueError(f"the answer is not JSON within bounds ({parsed.problem})")
    answer = parsed.value
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
        raise ValueError("the answer has no choices[0].message.content")
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    counts = [count if type(count) is int and count >= 0 else None for count in counts]
    finish = choice.get("finish_reason")
    return ChatReply(message.get("content") or "", finish if isinstance(finish, str) else None, *counts)


def retry_after_s(header: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None if it is missing or unreadable."""
    if header is None or len(header) > MAX_HEADER:
        return None
    try:
        seconds = float(header)
        return None if math.isnan(seconds) else max(0.0, seconds)
    except ValueError:
        pass
    try:
        moment = email.utils.parsedate_to_datetime(header)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError, IndexError):  # what the parser of dates makes of texts that are none
        return None


def refusal(answer: HttpReply) -> BackendError:
    """What a status other than 200 means."""
    text = flatten_text(answer.body, 500)
    pause = retry_after_s(answer.headers.get("retry-after"))
    if answer.status == 429:
        # OpenAI's 429 for an empty account: no pause helps.
        kind = FailureKind.BUDGET if "insufficient_quota" in text else FailureKind.RATE_LIMITED
    elif answer.status in (408, 409, 425) or answer.status >= 500:
        kind = FailureKind.UNAVAILABLE
    else:
        kind = FailureKind.REFUSED
    return BackendError(kind, f"status {answer.status}: {text}", pause)


def redacted(text: str, key: str | None) -> str:
    """The text without the key."""
    return text.replace(key, HIDDEN) if key else text


def read_log_prob(value: Any) -> float:
    """A log-prob of an answer. Raises `BackendError` for what is none."""
    if type(value) not in (int, float):
        raise bad_reply(f"a log-prob that is no number but {'null' if value is None else type(value).__name__}")
    if not FLOOR < value <= ROUNDING:
        raise bad_reply(f"a log-prob of {value:.6g}")
    return float(value)


def bad_reply(why: str) -> BackendError:
    """An answer that cannot be used."""
    return BackendError(FailureKind.BAD_REPLY, why)
