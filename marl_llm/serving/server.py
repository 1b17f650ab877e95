"""A server with OpenAI's chat completions and completions, of the standard library: for coaches and other programs on this machine.

Each request has a thread; at most `concurrency` are answered at a time, `queue` more wait, and the next one gets status 429 with
Retry-After. Nothing that anybody says is logged or kept, unless `record` asks for it. It listens on the loopback interface:
whoever can reach it may use it, so it has no keys.
"""

from __future__ import annotations

import collections
import http.server
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from marl_llm.sampling.requests import RequestError
from marl_llm.serving.policy import Answer, PolicyAnswers
from marl_llm.tools.chat import ChatReply, ChatRequest, Options
from marl_llm.untrusted import Bounds, read_json

MAX_BODY = 4 << 20  # bytes
RETRY_S = 1
READ_S = 60.0  # most seconds for a request's text to arrive
_BOUNDS = Bounds(size=MAX_BODY, values=100_000)
_IGNORED = (
    "user", "metadata", "store", "n", "stream", "stream_options", "model", "messages", "max_completion_tokens", "logprobs", "top_logprobs",
)  # fmt: skip
_SERVED = (
    "served are /v1/chat/completions, /v1/completions, both also behind /episodes/ID, /episodes/ID/reward, /v1/models and /health"
)
_PATH = re.compile(r"(?:/episodes/(?P<episode>[\w.:-]{1,128}))?/v1/(?P<kind>chat/completions|completions)")
_REWARD = re.compile(r"/episodes/(?P<episode>[\w.:-]{1,128})/reward")
_OPTIONS = ("max_tokens", "temperature", "top_p", "stop", "seed")


class ChatServer:
    """Serves models by name until it is closed; a context manager.

    Args:
      models: name -> how it answers; see `policy_answers`, or any function of (messages, options).
      port: 0 takes a free one.
      concurrency: most requests that are answered at a time.
      queue: most requests that wait.
      record: a file that gets a line of JSON per reply to a request at `/episodes/ID/v1/...`: `episode` (ID), `number` (from 0, of that
        episode's replies), `model`, `messages`, `text`, `finish_reason`, and what the engine drew (`ChatReply.sampled`): enough to train
        the model on an environment that is not of this library, whose rewards come to `/episodes/ID/reward`. Read it with
        `marl_llm.training.read_recorded`. IDs must be new to the file. Other requests are never written down.

    Attributes:
      url: up to and without `/chat/completions`.
    """

    def __init__(
        self,
        models: Mapping[str, Answer],
        port: int = 0,
        concurrency: int = 64,
        queue: int = 1024,
        record: str | os.PathLike | None = None,
    ):
        if not models:
            raise ValueError("a server needs at least one model")
        if concurrency < 1 or queue < 0:
            raise ValueError(f"concurrency={concurrency} must be at least 1 and queue={queue} at least 0")
        self.models = dict(models)
        self._room, self._slots = threading.BoundedSemaphore(concurrency + queue), threading.BoundedSemaphore(concurrency)
        self._lock, self._counts = threading.Lock(), dict.fromkeys(("requests", "refused", "busy", "failed", "tokens"), 0)
        self._record, self._numbers = None if record is None else open(record, "a", encoding="utf-8"), collections.Counter()
        self._paid: set[str] = set()
        handler = type("ChatHandler", (_Handler,), {"owner": self})
        self._server = _ManyThreads(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, name="chat-server", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int]:
        """Counts since the start: requests, those refused for what they ask, those turned away, failures, tokens of replies."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Stops listening; requests under way are finished by their threads."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        with self._lock:
            if self._record is not None:
                self._record.close()
                self._record = None

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def answer(
        self, body: bytes, kind: str = "chat/completions", episode: str | None = None, send: Callable[[dict[str, Any]], None] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """(status, JSON) for the body of a request: of chat `messages`, or with the kind "completions" of a `prompt`.

        Of a request with `stream`, `send` gets the events as they come, and the JSON is {} unless the status is an error's.
        """
        self._count("requests")
        if not self._room.acquire(blocking=False):
            self._count("busy")
            return 429, _error("the server's queue is full")
        try:
            with self._slots:
                if episode is not None and self._record is None:
                    raise ValueError("this server keeps no episodes: start it with --record=FILE, or leave /episodes/ID out of the address")
                asked = _read(body, self.models, kind)
                name, said, options, model = asked.model, asked.said, asked.options, self.models[asked.model]
                if asked.log_probs and not isinstance(model, PolicyAnswers):
                    raise ValueError(f"the model {name!r} tells no logprobs")
                events = _Events(name, kind, send) if asked.stream and send is not None else None
                if events is not None and isinstance(model, PolicyAnswers):
                    reply = model.stream(said, options, events.text)
                else:
                    reply = model(said, options)
                    if events is not None and reply.text:
                        events.text(reply.text)
                told = _log_probs(model.log_probs(reply), kind, asked.log_probs - 1) if asked.log_probs else None
                if events is not None:
                    events.end(reply, asked.usage, told)
                if episode is not None:
                    self._keep(episode, name, said, reply)
        except _HungUp:
            self._count("failed")
            raise
        except (RequestError, ValueError) as error:
            self._count("refused")
            return 400, _error(str(error))
        except Exception as error:  # of the model or its engine; the text of a request is no part of the message
            self._count("failed")
            return 500, _error(f"the model failed: {type(error).__name__}")
        finally:
            self._room.release()
        self._count("tokens", reply.completion_tokens or 0)
        return 200, {} if events is not None else _completion(name, reply, kind, told)

    def _keep(self, episode: str, model: str, said: Any, reply: ChatReply) -> None:
        """A line of the record."""
        with self._lock:
            if self._record is None:  # closed meanwhile
                return
            line = {"episode": episode, "number": self._numbers[episode], "model": model, "messages": said, "text": reply.text}
            self._numbers[episode] += 1
            self._record.write(json.dumps(line | {"finish_reason": reply.finish_reason} | dict(reply.sampled or {})) + "\n")
            self._record.flush()

    def pay(self, body: bytes, episode: str) -> tuple[int, dict[str, Any]]:
        """(status, JSON) for a play's pay, once per episode: `reward` for the team, `rewards` by model, and perhaps its `task`, a text."""
        try:
            line = _read_reward(body, self.models)
            with self._lock:
                if self._record is None or not self._numbers[episode]:
                    raise ValueError(f"no reply of episode {episode!r} was recorded here")
                if episode in self._paid:
                    raise ValueError(f"episode {episode!r} has its reward already")
                self._paid.add(episode)
                self._record.write(json.dumps({"episode": episode} | line) + "\n")
                self._record.flush()
                return 200, {"episode": episode, "replies": self._numbers[episode]}
        except ValueError as error:
            self._count("refused")
            return 400, _error(str(error))

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by


class _Asked(NamedTuple):
    """A request: of which model, its messages or prompt, its options; whether to stream, with token counts; log-probs: 0 for none, 1 for
    those of the drawn tokens, 2 for those of the likeliest tokens beside them."""

    model: str
    said: Any
    options: Options
    stream: bool
    usage: bool
    log_probs: int


def _read(body: bytes, models: Mapping[str, Answer], kind: str) -> _Asked:
    """A request. Raises `ValueError` with a reason."""
    said = read_json(body, _BOUNDS)
    if not said.ok or not isinstance(said.value, dict):
        raise ValueError(f"the body must be a JSON object ({said.problem or type(said.value).__name__})")
    given = {name: value for name, value in said.value.items() if value is not None}
    if strange := [name for name in given if name not in (*_OPTIONS, *_IGNORED, "prompt")]:
        raise ValueError(f"{strange[0]!r} is not served; what is: {', '.join(_OPTIONS)}")
    if given.get("n", 1) != 1:
        raise ValueError("n must be 1: ask again with another seed")
    name = given.get("model")
    if not isinstance(name, str) or name not in models:
        raise ValueError(f"there is no model {name!r:.100}; there are {', '.join(models)}")
    options = {key: given[key] for key in _OPTIONS if key in given}
    if "max_completion_tokens" in given:
        options.setdefault("max_tokens", given["max_completion_tokens"])
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    for key, kinds in (("max_tokens", int), ("seed", int), ("temperature", int | float), ("top_p", int | float), ("stop", list)):
        if key in options and (isinstance(options[key], bool) or not isinstance(options[key], kinds)):
            raise ValueError(f"{key} is a {type(options[key]).__name__}")
    for key in options.keys() & {"temperature", "top_p"}:
        if not abs(options[key]) < 1e9:
            raise ValueError(f"{key} is too large, or no number")
        options[key] = float(options[key])
    if options.get("max_tokens", 1) < 1 or not all(isinstance(one, str) for one in options.get("stop", ())):
        raise ValueError("max_tokens must be at least 1, and stop texts")
    if "stop" in options:
        options["stop"] = tuple(options["stop"])
    stream, extra = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool) or not isinstance(extra, dict):
        raise ValueError("stream must be true or false, and stream_options an object")
    told = (stream, bool(extra.get("include_usage")), _wants_log_probs(given, kind))
    if kind == "completions":
        if not isinstance(given.get("prompt"), str) or not given["prompt"]:
            raise ValueError("prompt must be one text")
        return _Asked(name, given["prompt"], Options(**options), *told)
    messages = given.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise ValueError("messages must be a list of objects")
    if not all(isinstance(one.get("role"), str) for one in messages):
        raise ValueError("every message needs a role, which is a text")
    request = ChatRequest(tuple(messages), Options(**options))
    return _Asked(name, request.messages, request.options, *told)


def _wants_log_probs(given: Mapping[str, Any], kind: str) -> int:
    """What a request asks for, as in `_Asked`: a chat with `logprobs` true and `top_logprobs` 0 or 1, completions with `logprobs` 0 or 1.

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


def _read_reward(body: bytes, models: Mapping[str, Answer]) -> dict[str, Any]:
    """What a body says that a play is paid. Raises `ValueError` with a reason."""
    said = read_json(body, _BOUNDS)
    given = said.value if said.ok and isinstance(said.value, dict) else {}
    by_model, number = given.get("rewards", {}), lambda x: isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e30
    if not {"reward", "rewards"} & given.keys() or set(given) - {"reward", "rewards", "task"}:
        raise ValueError('a JSON object is expected, like {"reward": 1.0} or {"rewards": {"coder": 1.0}}, perhaps with a "task"')
    if not number(given.get("reward", 0)) or not isinstance(by_model, dict) or not all(map(number, by_model.values())):
        raise ValueError("a reward is a finite number")
    if strange := [name for name in by_model if name not in models]:
        raise ValueError(f"there is no model {strange[0]!r:.100}; there are {', '.join(models)}")
    if not isinstance(given.get("task", ""), str):
        raise ValueError("task is a text")
    return given


def _log_probs(drawn: list[dict[str, Any]], kind: str, top: int) -> dict[str, Any]:
    """Drawn tokens as the field `logprobs` of a choice; with `top` 1 each is its own likeliest one."""
    if kind != "completions":
        likeliest = lambda one: [one | {"bytes": None}] * top  # noqa: E731
        return {"content": [one | {"bytes": None, "top_logprobs": likeliest(one)} for one in drawn], "refusal": None}
    told = {name: [one[key] for one in drawn] for name, key in (("tokens", "token"), ("token_logprobs", "logprob"), ("ids", "id"))}
    return told | ({"top_logprobs": [{one["token"]: one["logprob"]} for one in drawn]} if top else {})


def _completion(name: str, reply: ChatReply, kind: str, log_probs: dict[str, Any] | None = None) -> dict[str, Any]:
    used = {"prompt_tokens": reply.prompt_tokens or 0, "completion_tokens": reply.completion_tokens or 0}
    told = {"finish_reason": reply.finish_reason, "logprobs": log_probs}
    choice = {"index": 0, "message": {"role": "assistant", "content": reply.text}} | told
    if kind == "completions":
        choice = {"index": 0, "text": reply.text} | told
        head = {"id": f"cmpl-{time.time_ns()}", "object": "text_completion", "created": int(time.time()), "model": name}
        return head | {"choices": [choice], "usage": used | {"total_tokens": sum(used.values())}}
    head = {"id": f"chatcmpl-{time.time_ns()}", "object": "chat.completion", "created": int(time.time()), "model": name}
    return head | {"choices": [choice], "usage": used | {"total_tokens": sum(used.values())}}


class _Events:
    """The events of one streamed reply; `send` takes them to the client."""

    def __init__(self, name: str, kind: str, send: Callable[[dict[str, Any]], None]):
        self._chat, self._send, self._first = kind != "completions", send, True
        whole = _completion(name, ChatReply(""), kind)
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


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


class _HungUp(Exception):
    """The client left in the middle of its stream."""


class _ManyThreads(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # the default of 5 drops connections

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not this server's fault; anything else is worth a traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: ChatServer
    protocol_version = "HTTP/1.1"
    timeout = READ_S

    def do_GET(self) -> None:
        """The models, or that the server is there."""
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.owner.models]})
        elif self.path == "/health":
            self._send(200, {"ok": True})
        else:
            self._send(404, _error(_SERVED))

    def do_POST(self) -> None:
        """A chat completion."""
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit() and len(size) < 10 and int(size) <= MAX_BODY):
            self.close_connection = True
            return self._send(413, _error(f"a body needs a Content-Length of at most {MAX_BODY}"))
        body = self.rfile.read(int(size))
        if paid := _REWARD.fullmatch(self.path):
            return self._send(*self.owner.pay(body, paid["episode"]))
        match = _PATH.fullmatch(self.path)
        if not match:
            return self._send(404, _error(_SERVED))
        self._streaming = False
        try:
            status, found = self.owner.answer(body, match["kind"], match["episode"], self._event)
            if not self._streaming:
                return self._send(status, found)
            self._write("[DONE]" if status == 200 else json.dumps(found))
        except _HungUp:
            self.close_connection = True

    def _send(self, status: int, found: dict[str, Any]) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if status == 429:
            self.send_header("Retry-After", str(RETRY_S))
        self.end_headers()
        self.wfile.write(text)

    def _event(self, event: dict[str, Any]) -> None:
        """An event of a stream, whose end is that of the connection."""
        if not self._streaming:
            self._streaming = self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
        self._write(json.dumps(event))

    def _write(self, text: str) -> None:
        try:
            self.wfile.write(f"data: {text}\n\n".encode())
        except OSError as error:
            raise _HungUp from error

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""
