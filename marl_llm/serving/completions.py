"""The form of OpenAI's chat completions and completions: what a request asks for, and what answers it.

Options that this server cannot serve are refused by name. Fields that have no effect are accepted: `NEUTRAL` lists the values, `IGNORED`
the fields that only concern the client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.serving.expected import Expected, read_format
from marl_llm.serving.policy import Answer, PolicyReply, TokenIds
from marl_llm.serving.scored_prompts import PromptScoring, read_scoring
from marl_llm.serving.tool_messages import read_messages, read_tool_use
from marl_llm.tools.chat import ChatReply, Options
from marl_llm.untrusted import Bounds, is_bounded_number, read_json

MAX_BODY = 4 << 20  # bytes
BOUNDS = Bounds(size=MAX_BODY, values=100_000)
OPTIONS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "seed")
READ = (*OPTIONS, "model", "messages", "n", "stream", "stream_options", "logprobs", "top_logprobs")
OF_PROMPTS = ("prompt", "echo", "prompt_logprobs")  # of completions alone
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
HARMLESS = (  # of completions too
    ("tool_choice", "none"), ("tool_choice", "auto"), ("parallel_tool_calls", False), ("parallel_tool_calls", True),
    ("response_format", {"type": "text"}), ("echo", False),
)  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none", "minimal", "low", "medium", "high", "xhigh"),  # a model thinks as its chat template says
}
OF_CHATS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
MOST_REPLIES = 64  # to one request


class CompletionRequest(NamedTuple):
    """A request: of which model, its messages or prompt, its options; whether to stream, with token counts; log-probs: 0 for none, 1 for
    those of the drawn tokens, 2 for those of the likeliest tokens beside them; what is expected of the reply; how many replies there
    should be, and further prompts, each of which gets as many; what is asked of the prompts' own tokens."""

    model: str
    prompt: Any
    options: Options
    stream: bool
    usage: bool
    log_probs: int
    expected: Expected = Expected()
    count: int = 1
    further: tuple[str | TokenIds, ...] = ()
    scoring: PromptScoring = PromptScoring()

    def by_prompt(self) -> list[CompletionRequest]:
        """A request for each prompt."""
        return [self._replace(prompt=prompt, further=()) for prompt in (self.prompt, *self.further)]


def read_request(
    body: bytes, models: Mapping[str, Answer], kind: str, translate: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> CompletionRequest:
    """A request of the kind "chat/completions" or "completions", perhaps translated. Raises `ValueError` with a reason."""
    parsed = read_json(body, BOUNDS)
    if not parsed.ok or not isinstance(parsed.value, dict):
        raise ValueError(f"the body must be a JSON object ({parsed.problem or type(parsed.value).__name__})")
    fields = {name: value for name, value in translate(parsed.value).items() if value is not None}
    _check_names(fields, kind)
    name = fields.get("model")
    if not isinstance(name, str) or name not in models:
        raise ValueError(f"there is no model {name!r:.100}; there are {', '.join(models)}")
    scoring = read_scoring(fields) if kind == "completions" else PromptScoring()
    options = _read_options(fields if scoring.draws else fields | {"max_tokens": 1})
    stream, extra = fields.get("stream", False), fields.get("stream_options", {})
    if not isinstance(stream, bool) or not isinstance(extra, dict):
        raise ValueError("stream must be true or false, and stream_options an object")
    log_probs = 0 if scoring.echo else _wants_log_probs(fields, kind)
    answer = (stream, bool(extra.get("include_usage")), log_probs if scoring.draws else 0)
    if kind == "completions":
        first, *further = _read_prompts(fields.get("prompt"))
        if (count := _read_count(fields)) * (1 + len(further)) > MOST_REPLIES:
            raise ValueError(f"prompt: {1 + len(further)} prompts with n={count} are more than {MOST_REPLIES} replies")
        return CompletionRequest(name, first, options, *answer, count=count, further=tuple(further), scoring=scoring)
    expected = Expected(read_tool_use(fields), *read_format(fields.get("response_format", {"type": "text"})))
    return CompletionRequest(name, read_messages(fields.get("messages")), options, *answer, expected, _read_count(fields))


def _read_prompts(field: Any) -> list[str | TokenIds]:
    """The prompts to continue. Raises `ValueError`."""
    prompts = field if isinstance(field, list) and not _are_ids(field) else [field]
    if not prompts or not all(isinstance(prompt, str) and prompt or _are_ids(prompt) for prompt in prompts):
        raise ValueError("prompt must be a text or the ids of one, or a list of texts or of lists of ids, none of them empty")
    return [TokenIds(prompt) if isinstance(prompt, list) else prompt for prompt in prompts]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in value)


def _read_count(fields: Mapping[str, Any]) -> int:
    """How many replies. Raises `ValueError`."""
    count = fields.get("n", 1)
    if type(count) is not int or not 1 <= count <= MOST_REPLIES:
        raise ValueError(f"n must be 1 to {MOST_REPLIES} replies")
    return count


def _check_names(fields: Mapping[str, Any], kind: str) -> None:
    """Raises `ValueError` for a field that is not served at the kind's address, and for a value that would have an effect."""
    for name, value in fields.items():
        if name in NEUTRAL and not any(_equal(value, neutral) for neutral in NEUTRAL[name]):
            served = " or ".join(repr(neutral) for neutral in NEUTRAL[name])
            raise ValueError(f"{name}={value!r:.50} is not served, only {served}, which has no effect")
        if name not in (*READ, *OF_CHATS, *OF_PROMPTS, *IGNORED, *NEUTRAL):
            raise ValueError(f"{name!r:.50} is not served; options that are: {', '.join(OPTIONS)}")
    for name in ("messages", *OF_CHATS) if kind == "completions" else OF_PROMPTS:
        if name in fields and not any(name == known and _equal(fields[name], value) for known, value in HARMLESS):
            raise ValueError(f"{name!r} is not served at /v1/{kind}")


def _equal(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _read_options(fields: Mapping[str, Any]) -> Options:
    """The sampling options. Raises `ValueError`."""
    options = {name: fields[name] for name in OPTIONS if name in fields}
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


def _wants_log_probs(fields: Mapping[str, Any], kind: str) -> int:
    """Field `log_probs` of a `CompletionRequest`: a chat has `logprobs` true and `top_logprobs` 0 or 1, completions `logprobs` 0 or 1.

    The engine keeps the log-prob of the token that it drew. That token is the likeliest one where the temperature is 0, and only there one
    is served as the top. Raises `ValueError`.
    """
    logprobs, greedy, chat = fields.get("logprobs"), fields.get("temperature") == 0, kind != "completions"
    top = fields.get("top_logprobs", 0) if chat else logprobs or 0
    if not isinstance(logprobs, bool | None) if chat else logprobs is not None and type(logprobs) is not int:
        raise ValueError(f"logprobs must be {'true or false' if chat else '0 or 1'}")
    if type(top) is not int or top not in ((0, 1) if greedy else (0,)):
        name = "top_logprobs" if chat else "logprobs"
        raise ValueError(f"{name} must be 0, or 1 at temperature 0: the log-prob of the drawn token is kept, and no others")
    if chat and top and not logprobs:
        raise ValueError("top_logprobs needs logprobs=true")
    return 0 if logprobs is None or logprobs is False else 1 + top


def read_reward(body: bytes, models: Mapping[str, Answer]) -> dict[str, Any]:
    """The rewards that a body gives a play. Raises `ValueError` with a reason."""
    parsed = read_json(body, BOUNDS)
    fields = parsed.value if parsed.ok and isinstance(parsed.value, dict) else {}
    by_model = fields.get("rewards", {})
    if not ("reward" in fields or by_model) or set(fields) - {"reward", "rewards", "task"}:
        raise ValueError('a JSON object is expected, like {"reward": 1.0} or {"rewards": {"coder": 1.0}}, perhaps with a "task"')
    if not isinstance(by_model, dict) or not all(map(is_bounded_number, [fields.get("reward", 0), *by_model.values()])):
        raise ValueError("a reward is a finite number")
    if strange := [name for name in by_model if name not in models]:
        raise ValueError(f"there is no model {strange[0]!r:.100}; there are {', '.join(models)}")
    if not isinstance(fields.get("task", ""), str):
        raise ValueError("task is a text")
    return fields


def listed_log_probs(drawn: list[dict[str, Any]], kind: str, top: int) -> dict[str, Any]:
    """Drawn tokens as the field `logprobs` of a choice; with `top` 1 each is its own likeliest one."""
    if kind != "completions":
        def likeliest(token):
            return [token | {"bytes": None}] * top

        return {"content": [token | {"bytes": None, "top_logprobs": likeliest(token)} for token in drawn], "refusal": None}
    columns = {name: [token[key] for token in drawn] for name, key in (("tokens", "token"), ("token_logprobs", "logprob"), ("ids", "id"))}
    return columns | ({"top_logprobs": [{token["token"]: token["logprob"]} for token in drawn]} if top else {})


class Choice(NamedTuple):
    """A reply as it is sent: with its tool calls in OpenAI's form, the fields of the request that it does not keep to, its log-probs, and
    those of its prompt."""

    reply: ChatReply
    calls: tuple[dict[str, Any], ...] = ()
    unmet: tuple[str, ...] = ()
    log_probs: dict[str, Any] | None = None
    prompt_log_probs: list[dict[str, Any] | None] | None = None

    @property
    def streamed(self) -> str:
        """All that a stream says of its text."""
        return self.reply.streamed if isinstance(self.reply, PolicyReply) else self.reply.text

    @property
    def finish_reason(self) -> str | None:
        """`tool_calls` of a reply that calls tools, else the reply's own."""
        return "tool_calls" if self.calls else self.reply.finish_reason


def used_by(choices: Sequence[Choice], count: int | None = None) -> dict[str, int]:
    """The tokens of the prompts, each with `count` replies (None: there is one prompt), and of all replies."""
    prompt = sum(choice.reply.prompt_tokens or 0 for choice in choices[:: count or len(choices)])
    drawn = sum(choice.reply.completion_tokens or 0 for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def completion(request: CompletionRequest, choices: Sequence[Choice], kind: str) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    listed = [_choice(number, choice, kind) for number, choice in enumerate(choices)]
    return _head(request.model, kind) | {"choices": listed, "usage": used_by(choices, request.count)}


def _head(name: str, kind: str, streams: bool = False) -> dict[str, Any]:
    mark, form = ("cmpl", "text_completion") if kind == "completions" else ("chatcmpl", "chat.completion")
    form += ".chunk" if streams and kind != "completions" else ""
    return {"id": f"{mark}-{time.time_ns()}", "object": form, "created": int(time.time()), "model": name}


def _choice(number: int, choice: Choice, kind: str) -> dict[str, Any]:
    ending = {"finish_reason": choice.finish_reason, "logprobs": choice.log_probs} | _unmet(choice)
    if kind == "completions":
        scored = {} if choice.prompt_log_probs is None else {"prompt_logprobs": choice.prompt_log_probs}
        return {"index": number, "text": choice.reply.text} | ending | scored
    message: dict[str, Any] = {"role": "assistant", "content": choice.reply.text}
    if choice.calls:
        message |= {"content": choice.reply.text or None, "tool_calls": list(choice.calls)}
    return {"index": number, "message": message} | ending


def _unmet(choice: Choice) -> dict[str, Any]:
    return {"unmet": list(choice.unmet)} if choice.unmet else {}


class Events:
    """The events of one streamed answer; `send` takes them to the client."""

    def __init__(self, request: CompletionRequest, kind: str, send: Callable[[dict[str, Any]], None]):
        self._chat, self._request, self._send = kind != "completions", request, send
        self._begun: set[int] = set()
        self._head = _head(request.model, kind, streams=True)

    def text(self, number: int, text: str) -> None:
        """A piece of a reply."""
        self._say(number, {"content": text} if self._chat else {"text": text})

    def end(self, number: int, choice: Choice) -> None:
        """A reply's tool calls, and its finish reason with the log-probs of all its tokens."""
        if choice.calls:
            calls = [{"index": place} | call for place, call in enumerate(choice.calls)]
            self._say(number, {"tool_calls": calls} | ({} if number in self._begun else {"content": None}))
        last = {} if number in self._begun else {"content": ""}
        last = last if self._chat else {"text": ""}
        self._say(number, last, {"finish_reason": choice.finish_reason, "logprobs": choice.log_probs} | _unmet(choice))

    def finish(self, choices: Sequence[Choice]) -> None:
        """The counts of tokens, if they are asked for."""
        if self._request.usage:
            self._send(self._head | {"choices": [], "usage": used_by(choices, self._request.count)})

    def _say(self, number: int, piece: dict[str, Any], end: Mapping[str, Any] | None = None) -> None:
        if self._chat:
            piece = {"delta": ({} if number in self._begun else {"role": "assistant"}) | piece}
        self._begun.add(number)
        self._send(self._head | {"choices": [{"index": number} | piece | dict(end or {"finish_reason": None, "logprobs": None})]})


def error_of(message: str) -> dict[str, Any]:
    """The body of a refusal, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "invalid_request_error"}}
