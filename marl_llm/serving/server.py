"""A server with OpenAI's chat completions and completions, for coaches and other programs on this machine.

Each request has a thread; at most `concurrency` are answered at a time, `queue` more wait, and the next one gets status 429 with
Retry-After. Nothing that anybody says is logged or kept, unless `record` asks for it. `marl_llm.local_server` says who may ask.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import pathlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.local_server import LocalHandler, LocalServer, Refused
from marl_llm.reporting.files import LineFile
from marl_llm.sampling.requests import RequestError
from marl_llm.serving.completions import (
    MAX_BODY,
    CompletionRequest,
    Events,
    ToldReply,
    completion,
    error_of,
    read_request,
    read_reward,
    told_log_probs,
)
from marl_llm.serving.policy import Answer, ModelRequest, NotFinite, PolicyAnswers, check_numbers
from marl_llm.untrusted import read_json

RETRY_S = 1
_COUNTS = ("requests", "refused", "busy", "failed", "tokens", "malformed_calls", "unmet")
_SERVED = (
    "served are /v1/chat/completions, /v1/completions, both also behind /episodes/ID, /episodes/ID/reward, /v1/models and /health"
)
_PATH = re.compile(r"(?:/episodes/(?P<episode>[\w.:-]{1,128}))?/v1/(?P<kind>chat/completions|completions)")
_REWARD = re.compile(r"/episodes/(?P<episode>[\w.:-]{1,128})/reward")


class EpisodeRefused(ValueError):
    """A request to an episode that cannot have it; the message says why."""


class Record:
    """The file of replies to requests of episodes, and of what the episodes were paid. For threads.

    Once an episode is paid nothing more is written of it: its pay is for the replies that are in the file.
    """

    def __init__(self, path: str | os.PathLike):
        self._path, self._lock, self._numbers = pathlib.Path(path), threading.Lock(), collections.Counter()
        self._paid: set[str] = set()
        self._file: LineFile | None = LineFile(self._path)
        self._old = _episodes_of(self._path)

    def check(self, episode: str) -> None:
        """Raises `EpisodeRefused` for an episode that takes no further replies."""
        if self._file is None:
            raise EpisodeRefused("this server has stopped: nothing more is recorded")
        if episode in self._old:
            raise EpisodeRefused(f"{self._path} has an episode {episode!r} of an earlier server: IDs must be new to the file")
        if episode in self._paid:
            raise EpisodeRefused(f"episode {episode!r} has its reward already: replies come before it")

    def keep(self, episode: str, line: dict[str, Any]) -> None:
        """Writes a reply. Raises `EpisodeRefused`."""
        with self._lock:
            self.check(episode)
            self._file.append(json.dumps({"episode": episode, "number": self._numbers[episode]} | line, allow_nan=False))
            self._numbers[episode] += 1

    def pay(self, episode: str, reward: dict[str, Any]) -> int:
        """Writes what an episode was paid, and gives the number of its replies. Raises `EpisodeRefused`."""
        with self._lock:
            self.check(episode)
            if not self._numbers[episode]:
                raise EpisodeRefused(f"no reply of episode {episode!r} was recorded here")
            self._file.append(json.dumps({"episode": episode} | reward, allow_nan=False))
            self._paid.add(episode)
            return self._numbers[episode]

    def close(self) -> None:
        """Nothing is written any more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def _episodes_of(path: pathlib.Path) -> set[str]:
    """The IDs in a record; lines that are none are the reader's to refuse."""
    with path.open("rb") as file:
        lines = (read_json(line).value for line in file)
        return {line["episode"] for line in lines if isinstance(line, dict) and isinstance(line.get("episode"), str)}


class ChatServer:
    """Serves models by name until it is closed; a context manager.

    Args:
      models: name -> how it answers; see `policy_answers`, or any function of (messages, options).
      port: 0 takes a free one.
      concurrency: most requests that are answered at a time.
      queue: most requests that wait.
      key: clients must send it as a bearer token; None: whoever is on this machine may ask.
      record: a file that gets a line of JSON per reply to a request at `/episodes/ID/v1/...`: `episode` (ID), `number` (from 0, of that
        episode's replies), `model`, `messages`, `text`, `finish_reason`, and what the engine drew (`ChatReply.sampled`): enough to train
        the model on an environment that is not of this library, whose rewards come to `/episodes/ID/reward`. Read it with
        `marl_llm.training.read_recorded`. IDs must be new to the file. Other requests are never written down.

    Attributes:
      url: up to and without `/chat/completions`.

    Raises:
      ValueError: no models, numbers below their bounds, an empty key, or a port that is taken.
      OSError: the record cannot be written.
    """

    def __init__(
        self,
        models: Mapping[str, Answer],
        port: int = 0,
        concurrency: int = 64,
        queue: int = 1024,
        record: str | os.PathLike | None = None,
        key: str | None = None,
    ):
        if not models:
            raise ValueError("a server needs at least one model")
        if concurrency < 1 or queue < 0:
            raise ValueError(f"concurrency={concurrency} must be at least 1 and queue={queue} at least 0")
        self.models = dict(models)
        self._room, self._slots = threading.BoundedSemaphore(concurrency + queue), threading.BoundedSemaphore(concurrency)
        self._lock, self._counts = threading.Lock(), dict.fromkeys(_COUNTS, 0)
        self._record = None if record is None else Record(record)
        self._server = LocalServer(_Handler, self, port, key=key)
        self.url = f"{self._server.url}/v1"

    def stats(self) -> dict[str, int]:
        """Counts since the start: requests, those refused for what they ask, those turned away, failures, tokens of replies, tool calls
        that could not be read, replies that do not keep to a field of their request."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Stops listening; requests under way are finished by their threads, and not recorded."""
        self._server.close()
        if self._record is not None:
            self._record.close()

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
            return 429, error_of("the server's queue is full")
        try:
            with self._slots:
                tokens, found = self._answer(body, kind, episode, send)
        except _HungUp:
            self._count("failed")
            raise
        except (RequestError, ValueError) as error:
            self._count("refused")
            return 400, error_of(str(error))
        except Exception as error:  # of the model or its engine; the text of a request is no part of the message
            self._count("failed")
            reason = f": {error}" if isinstance(error, NotFinite) else ""
            return 500, error_of(f"the model failed: {type(error).__name__}{reason}")
        finally:
            self._room.release()
        self._count("tokens", tokens)
        return 200, found

    def _answer(
        self, body: bytes, kind: str, episode: str | None, send: Callable[[dict[str, Any]], None] | None
    ) -> tuple[int, dict[str, Any]]:
        """(drawn tokens, JSON). Raises `ValueError` and `RequestError` for what is not served."""
        if episode is not None:
            if self._record is None:
                raise ValueError("this server keeps no episodes: start it with --record=FILE, or leave /episodes/ID out of the address")
            self._record.check(episode)
        asked = read_request(body, self.models, kind)
        events = Events(asked.model, kind, asked.usage, send) if asked.stream and send is not None else None
        choice = self._choice(asked, kind, events)
        if episode is not None:
            reply = choice.reply
            about = {"model": asked.model, "messages": asked.said, "text": reply.text, "finish_reason": choice.finish_reason}
            if use := asked.expected.tool_use.tools:
                about |= {"tools": use, "tool_calls": choice.calls}
            self._record.keep(episode, about | dict(reply.sampled or {}))
        tokens = choice.reply.completion_tokens or 0
        if events is None:
            return tokens, completion(asked.model, [choice], kind)
        events.end(0, choice)
        events.finish([choice])
        return tokens, {}

    def _choice(self, asked: CompletionRequest, kind: str, events: Events | None) -> ToldReply:
        """The reply of the model, checked. Raises `ValueError` where it is asked for what it cannot do."""
        model, use = self.models[asked.model], asked.expected.tool_use
        if not isinstance(model, PolicyAnswers):
            if asked.log_probs or use.tools:
                what = "tells no logprobs" if asked.log_probs else "takes no tools"
                raise ValueError(f"the model {asked.model!r} {what}")
            reply = model(asked.said, asked.options)
            check_numbers(reply)
            if events is not None and reply.text:
                events.text(0, reply.text)
            return ToldReply(reply)
        say = None if events is None else functools.partial(events.text, 0)
        reply = model.reply_to(ModelRequest(asked.said, asked.options, use.tools, use.reads_calls), say)
        unmet = asked.expected.unmet(reply.text, reply.tool_calls)
        calls = reply.tool_calls if use.parallel else reply.tool_calls[:1]
        self._count("malformed_calls", reply.malformed)
        self._count("unmet", bool(unmet))
        told = told_log_probs(model.log_probs(reply), kind, asked.log_probs - 1) if asked.log_probs else None
        return ToldReply(reply, calls, tuple(unmet), told)

    def pay(self, body: bytes, episode: str) -> tuple[int, dict[str, Any]]:
        """(status, JSON) for a play's pay, once per episode: `reward` for the team, `rewards` by model, and perhaps its `task`, a text."""
        try:
            reward = read_reward(body, self.models)
            if self._record is None:
                raise EpisodeRefused("this server keeps no episodes: start it with --record=FILE")
            return 200, {"episode": episode, "replies": self._record.pay(episode, reward)}
        except ValueError as error:
            self._count("refused")
            return 400, error_of(str(error))

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by


class _HungUp(Exception):
    """The client left in the middle of its stream."""


class _Handler(LocalHandler):
    max_body = MAX_BODY

    def error(self, reason: str) -> dict[str, Any]:
        return error_of(reason)

    def get(self) -> None:
        """The models, or that the server is there."""
        if self.path == "/v1/models":
            models = [{"id": name, "object": "model"} for name in self.server.service.models]
            self.reply(200, {"object": "list", "data": models})
        elif self.path == "/health":
            self.reply(200, {"ok": True})
        else:
            raise Refused(404, _SERVED)

    def post(self, body: bytes) -> None:
        """A completion, or an episode's pay."""
        if paid := _REWARD.fullmatch(self.path):
            return self.reply(*self.server.service.pay(body, paid["episode"]))
        match = _PATH.fullmatch(self.path)
        if not match:
            raise Refused(404, _SERVED)
        self._streaming = False
        try:
            status, found = self.server.service.answer(body, match["kind"], match["episode"], self._event)
            if not self._streaming:
                return self.reply(status, found, {"Retry-After": str(RETRY_S)} if status == 429 else None)
            self._write("[DONE]" if status == 200 else json.dumps(found))
        except _HungUp:
            self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        """An event of a stream, whose end is that of the connection."""
        if not self._streaming:
            self._streaming = self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Connection", "close")
            self.end_headers()
        self._write(json.dumps(event, allow_nan=False))

    def _write(self, text: str) -> None:
        try:
            self.wfile.write(f"data: {text}\n\n".encode())
        except OSError as error:
            raise _HungUp from error
