"""The form of OpenAI's chat completions and completions: what a request asks for, and what answers it.

What a request says and this server cannot do is refused by name. What programs send by habit and that has no effect is taken: `NEUTRAL`
lists the values, `IGNORED` the fields that only concern whoever asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from marl_llm.serving.policy import Answer
from marl_llm.tools.chat import ChatReply, ChatRequest, Options
from marl_llm.untrusted import Bounds, read_json

MAX_BODY = 4 << 20  # bytes
BOUNDS = Bounds(size=MAX_BODY, values=100_000)
OPTIONS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")
READ = (*OPTIONS, "model", "messages", "prompt", "stream", "stream_options", "logprobs", "top_logprobs")
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none", "auto"),  # there are no tools to choose from
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),  # a model thinks as its chat template says
}
EMPTY_IN_MESSAGES = ("name", "refusal", "tool_calls", "function_call", "audio", "annotations")  # taken where they say nothing


class CompletionRequest(NamedTuple):
    """A request: of which model, its messages or prompt, its options; whether to stream, with token counts; log-probs: 0 for none, 1 for
    those of the drawn tokens, 2 for those of the likeliest tokens beside them."""

    model: str
    said: Any
    options: Options
    stream: bool
    usage: bool
    log_probs: int


def read_request(body: bytes, models: Mapping[str, Answer], kind: str) -> CompletionRequest:
    """A request of the kind "chat/completions" or "completions". Raises `ValueError` with a reason."""
    said = read_json(body, BOUNDS)
    if not said.ok or not isinstance(said.value, dict):
        raise ValueError(f"the body must be a JSON object ({said.problem or type(said.value).__name__})")
    given = {name: value for name, value in said.value.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL and not any(_equal(value, neutral) for neutral in NEUTRAL[name]):
            served = " or ".join(repr(neutral) for neutral in NEUTRAL[name])
            raise ValueError(f"{name}={value!r:.50} is not served, only {served}, which has no effect")
        if name not in (*READ, *IGNORED, *NEUTRAL):
            raise ValueError(f"{name!r:.50} is not served; options that are: {', '.join(OPTIONS)}")
    name = given.get("model")
    if not isinstance(name, str) or name not in models:
        raise ValueError(f"there is no model {name!r:.100}; there are {', '.join(models)}")
    options = _read_options(given)
    stream, extra = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool) or not isinstance(extra, dict):
        raise ValueError("stream must be true or false, and stream_options an object")
    told = (stream, bool(extra.get("include_usage")), _wants_log_probs(given, kind))
    if (other := "messages" if kind == "completions" else "prompt") in given:
        raise ValueError(f"{other!r} is not served at /v1/{kind}")
    if kind == "completions":
        if not isinstance(given.get("prompt"), str) or not given["prompt"]:
            raise ValueError("prompt must be one text")
        return CompletionRequest(name, given["prompt"], options, *told)
    messages = given.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("messages must be a list of objects")
    request = ChatRequest(tuple(_read_message(one, f"messages[{place}]") for place, one in enumerate(messages)), options)
    return CompletionRequest(name, request.messages, request.options, *told)


def _equal(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _read_options(given: Mapping[str, Any]) -> Options:
    """How to draw. Raises `ValueError`."""
    options = {name: given[name] for name in OPTIONS if name in given}
    kinds = {"temperature": int | float, "top_p": int | float, "stop": str | list}
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, kinds.get(name, int)):
            raise ValueError(f"{name} is a {type(value).__name__}")
    for name in options.keys() & {"temperature", "top_p"}:
        if not abs(options[name]) < 1e9:
            raise ValueError(f"{name} is too large, or no number")
        options[name] = float(options[name])
    budgets = [options.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in options]
    stop = options.pop("stop", [])
    stops = tuple([stop] if isinstance(stop, str) else stop)
    if budgets and min(budgets) < 1:
        raise ValueError("max_tokens must be at least 1")
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError("stop holds texts that are not empty")
    return Options(**options, max_tokens=min(budgets, default=None), stop=stops or None)


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message with its content as one text; the texts of its parts are joined as they stand. Raises `ValueError`."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: every message needs a role, which is a text")
    kept = {name: value for name, value in message.items() if name not in EMPTY_IN_MESSAGES}
    if strange := [name for name in message if name not in ("role", "content") and (name in kept or message[name])]:
        raise ValueError(f"{where}: {strange[0]!r:.50} is not served; a message has its role and its content")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, list):
        if not content:
            raise ValueError(f"{where}.content is an empty list")
        content = "".join(_read_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    return kept | {"content": content}


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str) or len(part) > 2:
        about = f"type {kind!r:.50}" if kind not in (None, "text") else "another form"
        raise ValueError(f'{where}: parts like {{"type": "text", "text": "..."}} are served, none of {about}')
    return part["text"]


def _wants_log_probs(given: Mapping[str, Any], kind: str) -> int:
    """Field `log_probs` of a `CompletionRequest`: a chat has `logprobs` true and `top_logprobs` 0 or 1, completions `logprobs` 0 or 1.

    The engine keeps the log-prob of the token that it drew. That token is the likeliest one where the temperature is 0, and only there one
    is served as the top. Raises `ValueError`.
    """
    asked, greedy, chat = given.get("logprobs"), given.get("temperature") == 0, kind != "completions"
    top = given.get("top_logprobs", 0) if chat else asked or 0
    if not isinstance(asked, bool | None) if chat else asked is not None and type(asked) is not int:
        raise ValueError(f"logprobs must be {'true or false' if chat else '0 or 1'}")
    if type(top) is not int or top not in ((0, 1) if greedy else (0,)):
        name = "top_logprobs" if chat else "logprobs"
        raise ValueError(f"{name} must be 0, or 1 at temperature 0: the log-prob of the drawn token is kept, and no others")
    if chat and top and not asked:
        raise ValueError("top_logprobs needs logprobs=true")
    return 0 if asked is None or asked is False else 1 + top


def read_reward(body: bytes, models: Mapping[str, Answer]) -> dict[str, Any]:
    """What a body says that a play is paid. Raises `ValueError` with a reason."""
    said = read_json(body, BOUNDS)
    given = said.value if said.ok and isinstance(said.value, dict) else {}
    by_model = given.get("rewards", {})
    if not ("reward" in given or by_model) or set(given) - {"reward", "rewards", "task"}:
        raise ValueError('a JSON object is expected, like {"reward": 1.0} or {"rewards": {"coder": 1.0}}, perhaps with a "task"')
    if not isinstance(by_model, dict) or not all(map(_is_reward, [given.get("reward", 0), *by_model.values()])):
        raise ValueError("a reward is a finite number")
    if strange := [name for name in by_model if name not in models]:
        raise ValueError(f"there is no model {strange[0]!r:.100}; there are {', '.join(models)}")
    if not isinstance(given.get("task", ""), str):
        raise ValueError("task is a text")
    return given


def _is_reward(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def told_log_probs(drawn: list[dict[str, Any]], kind: str, top: int) -> dict[str, Any]:
    """Drawn tokens as the field `logprobs` of a choice; with `top` 1 each is its own likeliest one."""
    if kind != "completions":
        def likeliest(one):
            return [one | {"bytes": None}] * top

        return {"content": [one | {"bytes": None, "top_logprobs": likeliest(one)} for one in drawn], "refusal": None}
    told = {name: [one[key] for one in drawn] for name, key in (("tokens", "token"), ("token_logprobs", "logprob"), ("ids", "id"))}
    return told | ({"top_logprobs": [{one["token"]: one["logprob"]} for one in drawn]} if top else {})


def completion(name: str, reply: ChatReply, kind: str, log_probs: dict[str, Any] | None = None) -> dict[str, Any]:
    used = {"prompt_tokens": reply.prompt_tokens or 0, "completion_tokens": reply.completion_tokens or 0}
    told = {"finish_reason": reply.finish_reason, "logprobs": log_probs}
    choice = {"index": 0, "message": {"role": "assistant", "content": reply.text}} | told
    if kind == "completions":
        choice = {"index": 0, "text": reply.text} | told
        head = {"id": f"cmpl-{time.time_ns()}", "object": "text_completion", "created": int(time.time()), "model": name}
        return head | {"choices": [choice], "usage": used | {"total_tokens": sum(used.values())}}
    head = {"id": f"chatcmpl-{time.time_ns()}", "object": "chat.completion", "created": int(time.time()), "model": name}
    return head | {"choices": [choice], "usage": used | {"total_tokens": sum(used.values())}}


class Events:
    """The events of one streamed reply; `send` takes them to the client."""

    def __init__(self, name: str, kind: str, send: Callable[[dict[str, Any]], None]):
        self._chat, self._send, self._first = kind != "completions", send, True
        whole = completion(name, ChatReply(""), kind)
        self._head = {key: whole[key] for key in ("id", "object", "created", "model")}
        if self._chat:
            self._head["object"] = "chat.completion.chunk"

    def text(self, text: str, finish: str | None = None, log_probs: dict[str, Any] | None = None) -> None:
        """A piece of the reply, or with `finish` its end."""
        choice: dict[str, Any] = {"index": 0, "text": text}
        if self._chat:
            delta = ({"role": "assistant"} if self._first else {}) | ({"content": text} if text or self._first else {})
            choice = {"index": 0, "delta": delta}
        self._first = False
        self._send(self._head | {"choices": [choice | {"finish_reason": finish, "logprobs": log_probs}]})

    def end(self, reply: ChatReply, usage: bool, log_probs: dict[str, Any] | None) -> None:
        """The finish reason, with the log-probs of all tokens and the counts of tokens if they are asked for."""
        self.text("", reply.finish_reason, log_probs)
        if usage:
            used = {"prompt_tokens": reply.prompt_tokens or 0, "completion_tokens": reply.completion_tokens or 0}
            self._send(self._head | {"choices": [], "usage": used | {"total_tokens": sum(used.values())}})


def error_of(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
