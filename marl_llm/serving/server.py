"""A server with OpenAI's chat completions and completions, for coaches and other programs on this machine.

Each request has a thread; at most `concurrency` are answered at a time, `queue` more wait, and the next one gets status 429 with
Retry-After. Nothing that anybody says is logged or kept, unless `record` asks for it. `marl_llm.local_server` says who may ask.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from marl_llm.local_server import LocalHandler, LocalServer, Refused
from marl_llm.reporting.files import LineFile
from marl_llm.sampling.requests import RequestError
from marl_llm.serving.completions import (
    MAX_BODY,
    Choice,
    CompletionRequest,
    error_of,
    listed_log_probs,
    read_request,
    read_reward,
)
from marl_llm.serving.dialects import DIALECTS, EventWriter
from marl_llm.serving.policy import (
    Answer,
    LateReply,
    ModelRequest,
    NotFinite,
    PolicyAnswers,
    PolicyReply,
    TokenIds,
    check_in_time,
    check_numbers,
)
from marl_llm.serving.resent import RETRIES, STAYING, ClientLeft, Connection, KeptAnswers
from marl_llm.serving.scored_prompts import score_prompt
from marl_llm.serving.sessions import Match, SessionTrees, keys_of
from marl_llm.tools.chat import ChatReply
from marl_llm.untrusted import read_json

RETRY_S = 1
_COUNTS = ("requests", "refused", "busy", "failed", "tokens", "malformed_calls", "unmet")
_SERVED = (
    "served are /v1/chat/completions, /v1/completions, /v1/messages and /v1/responses, also behind /episodes/ID; "
    "/episodes/ID, /episodes/ID/task, /episodes/ID/reward, /v1/models and /health"
)
_PATH = re.compile(r"(?:/episodes/(?P<episode>[\w.:-]{1,128}))?/v1/(?P<kind>chat/completions|completions|messages|responses)")
_EPISODE = re.compile(r"/episodes/(?P<episode>[\w.:-]{1,128})")
_TASK = re.compile(r"/episodes/(?P<episode>[\w.:-]{1,128})/task")
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

    def keep(self, episode: str, *lines: dict[str, Any]) -> None:
        """Writes the replies to one request. Raises `EpisodeRefused`."""
        with self._lock:
            self.check(episode)
            for line in lines:
                self._file.append(json.dumps({"episode": episode, "number": self._numbers[episode]} | line, allow_nan=False))
                self._numbers[episode] += 1

    def about(self, episode: str) -> dict[str, Any]:
        """How many replies of an episode were written, and whether it was paid."""
        with self._lock:
            return {"replies": self._numbers[episode], "paid": episode in self._paid}

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
        self._sessions, self._kept = SessionTrees(), KeptAnswers()
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
        self,
        body: bytes,
        kind: str = "chat/completions",
        episode: str | None = None,
        send: Callable[[dict[str, Any]], None] | None = None,
        connection: Connection = STAYING,
    ) -> tuple[int, dict[str, Any]]:
        """(status, JSON) for the body of a request; `kind` is one of `marl_llm.serving.dialects.DIALECTS`.

        Of a request with `stream`, `send` gets the events as they come, and the JSON is {} unless the status is an error's. Raises
        `ClientLeft` if the client leaves before a reply of an episode is recorded.
        """
        refusal = DIALECTS[kind].error
        self._count("requests")
        if not self._room.acquire(blocking=False):
            self._count("busy")
            if episode is not None:
                self._kept.turn_away(self._kept.key(episode, kind, body), connection)
            return 429, refusal("the server's queue is full")
        try:
            with self._slots:
                tokens, response = self._answer(body, kind, episode, send, connection)
        except ClientLeft:
            self._count("failed")
            raise
        except (RequestError, ValueError) as error:
            self._count("refused")
            return 400, refusal(str(error))
        except Exception as error:  # of the model or its engine; the text of a request is no part of the message
            self._count("failed")
            reason = f": {error}" if isinstance(error, NotFinite | LateReply) else ""
            return 500, refusal(f"the model failed: {type(error).__name__}{reason}")
        finally:
            self._room.release()
        self._count("tokens", tokens)
        return 200, response

    def _answer(
        self, body: bytes, kind: str, episode: str | None, send: Callable[[dict[str, Any]], None] | None, connection: Connection
    ) -> tuple[int, dict[str, Any]]:
        """(drawn tokens, JSON). Raises `ValueError` and `RequestError` for what is not served, and `ClientLeft`."""
        if episode is not None:
            if self._record is None:
                raise ValueError("this server keeps no episodes: start it with --record=FILE, or leave /episodes/ID out of the address")
            self._record.check(episode)
        dialect = DIALECTS[kind]
        request = read_request(body, self.models, dialect.kind, dialect.translate)
        events = dialect.events(request, send) if request.stream and send is not None else None
        key = None if episode is None else self._kept.key(episode, kind, body)
        kept, connection = (None, connection) if key is None else self._kept.find(key, connection)
        choices = self._draw(request, dialect.kind, episode, events, connection) if kept is None else kept
        if key is not None:
            self._kept.keep(key, choices)
        tokens = sum(choice.reply.completion_tokens or 0 for choice in choices)
        if events is None:
            return tokens, dialect.write(request, choices)
        for number, choice in enumerate(choices):
            if kept is not None:
                events.text(number, choice.streamed)
            events.end(number, choice)
        events.finish(choices)
        return tokens, {}

    def _draw(
        self, request: CompletionRequest, kind: str, episode: str | None, events: EventWriter | None, connection: Connection
    ) -> list[Choice]:
        """The replies to a request, recorded if it is an episode's. Raises `ClientLeft` in place of recording what nobody would read."""
        choices: list[Choice] = []
        lines: list[dict[str, Any]] = []
        if episode is not None and connection.is_closed():  # while it waited for its turn
            raise ClientLeft
        if episode is not None and request.scoring.is_asked and request.scoring.draws:
            raise ValueError("max_tokens must be 0 with echo or prompt_logprobs in an episode: a prompt that is scored is no sample")
        with contextlib.ExitStack() as drawing:
            for prompt_request in request.by_prompt():
                prompt_request = drawing.enter_context(self._drawn_as(prompt_request, episode, connection))
                if prompt_request.scoring.is_asked:
                    choices.append(self._scored(prompt_request, 1 + len(request.further)))
                    continue
                match = self._match(prompt_request, episode)
                say = None if events is None else functools.partial(_say, events, len(choices))
                replies = self._replies(prompt_request, match, say)
                if episode is not None and connection.is_closed():
                    raise ClientLeft
                if episode is not None:
                    check_in_time(replies)
                more = [self._choice(prompt_request, reply, kind) for reply in replies]
                counts = {} if episode is None else self._keep_conversations(prompt_request, episode, match, replies)
                lines += [_line(prompt_request, choice) | counts for choice in more]
                choices += more
            if episode is not None:
                self._record.keep(episode, *lines)
        return choices

    @contextlib.contextmanager
    def _drawn_as(self, request: CompletionRequest, episode: str | None, connection: Connection) -> Iterator[CompletionRequest]:
        """The request with its sampling options, here its own. An error within the context means that it was not answered."""
        yield request

    def _match(self, request: CompletionRequest, episode: str | None) -> Match:
        """The prefix of a request's messages that the episode's earlier replies hold as ids."""
        if episode is None or isinstance(request.prompt, str | TokenIds) or not isinstance(self.models[request.model], PolicyAnswers):
            return Match()
        return self._sessions.match(episode, request.model, request.expected.tools.offered, request.prompt)

    def _replies(self, request: CompletionRequest, match: Match, say: Callable[[int, str], None] | None) -> Sequence[ChatReply]:
        """The replies of the model; `say` gets a reply's number and a piece of it. Raises `ValueError` for what the model cannot do."""
        model, tools = self.models[request.model], request.expected.tools
        if isinstance(model, PolicyAnswers):
            known = match.conversation, match.covered
            model_request = ModelRequest(request.prompt, request.options, tools.offered, tools.reads_calls, *known)
            return model.replies_to(model_request, request.count, say)
        if request.log_probs or tools.offered:
            lack = "tells no logprobs" if request.log_probs else "takes no tools"
            raise ValueError(f"the model {request.model!r} {lack}")
        if isinstance(request.prompt, TokenIds):
            raise ValueError(f"the model {request.model!r} takes no prompt as ids")
        replies = [model(request.prompt, request.options) for _ in range(request.count)]
        for number, reply in enumerate(replies):
            check_numbers(reply)
            if say is not None and reply.text:
                say(number, reply.text)
        return replies

    def _scored(self, request: CompletionRequest, prompts: int) -> Choice:
        """A prompt, one of so many, with the log-probs of its tokens and its reply. Raises `ValueError` and `RequestError`."""
        model = self.models[request.model]
        if not isinstance(model, PolicyAnswers):
            raise ValueError(f"the model {request.model!r} scores no prompts (echo, prompt_logprobs)")
        scored = score_prompt(model, ModelRequest(request.prompt, request.options), request.scoring, prompts)
        choice = self._choice(request, scored.reply, "completions")
        return choice._replace(log_probs=scored.log_probs or choice.log_probs, prompt_log_probs=scored.prompt_log_probs)

    def _choice(self, request: CompletionRequest, reply: ChatReply, kind: str) -> Choice:
        """A reply, checked and counted."""
        calls = reply.tool_calls if isinstance(reply, PolicyReply) else ()
        unmet = request.expected.unmet(reply.text, calls)
        self._count("unmet", bool(unmet))
        self._count("malformed_calls", reply.malformed if isinstance(reply, PolicyReply) else 0)
        log_probs = None
        if request.log_probs:
            log_probs = listed_log_probs(self.models[request.model].log_probs(reply), kind, request.log_probs - 1)
        return Choice(reply, calls if request.expected.tools.parallel else calls[:1], tuple(unmet), log_probs)

    def _keep_conversations(self, request: CompletionRequest, episode: str, match: Match, replies: Sequence[ChatReply]) -> dict[str, int]:
        """Keeps the ids of replies for the episode's next requests. Gives the request's counts; none of a prompt or a function."""
        if isinstance(request.prompt, str | TokenIds) or not all(isinstance(reply, PolicyReply) for reply in replies):
            return {}
        keys, tools = {}, request.expected.tools
        for reply in replies:
            calls = reply.tool_calls if tools.parallel else reply.tool_calls[:1]
            for text in {reply.text, reply.streamed}:
                message = {"role": "assistant", "content": text, "tool_calls": calls}
                keys[keys_of(request.model, tools.offered, [*request.prompt, message])[-1]] = reply.conversation
        return self._sessions.keep(episode, match, replies[0].sampled["prompt"], keys)

    def episode(self, episode: str) -> dict[str, Any]:
        """What was kept of an episode: its `replies`, whether it is `paid`, and `SessionTree.counts`."""
        record = {"replies": 0, "paid": False} if self._record is None else self._record.about(episode)
        return {"episode": episode} | record | self._sessions.counts(episode)

    def task(self, episode: str) -> Any:
        """The task of an episode, as JSON. Raises `EpisodeRefused` where this server has given none."""
        raise EpisodeRefused("this server gives no tasks")

    def pay(self, body: bytes, episode: str) -> tuple[int, dict[str, Any]]:
        """(status, JSON) for a play's pay, once per episode: `reward` for the team, `rewards` by model, and perhaps its `task`, a text."""
        try:
            reward = read_reward(body, self.models)
            if self._record is None:
                raise EpisodeRefused("this server keeps no episodes: start it with --record=FILE")
            replies = self._record.pay(episode, reward)
            self._sessions.end(episode)
            return 200, {"episode": episode, "replies": replies}
        except ValueError as error:
            self._count("refused")
            return 400, error_of(str(error))

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by


def _line(request: CompletionRequest, choice: Choice) -> dict[str, Any]:
    """A reply as it is recorded."""
    line = {"model": request.model, "messages": request.prompt, "text": choice.reply.text, "finish_reason": choice.finish_reason}
    if tools := request.expected.tools.offered:
        line |= {"tools": tools, "tool_calls": choice.calls}
    return line | dict(choice.reply.sampled or {})


def _say(events: EventWriter, first: int, number: int, text: str) -> None:
    """Sends a piece of a reply; `first` is the number of its prompt's first one in the answer."""
    events.text(first + number, text)


class _Handler(LocalHandler):
    max_body = MAX_BODY

    def error(self, reason: str) -> dict[str, Any]:
        return error_of(reason)

    def get(self) -> None:
        """The models, what was kept of an episode, or that the server is there."""
        if self.path == "/v1/models":
            models = [{"id": name, "object": "model"} for name in self.server.service.models]
            self.reply(200, {"object": "list", "data": models})
        elif match := _EPISODE.fullmatch(self.path):
            self.reply(200, self.server.service.episode(match["episode"]))
        elif match := _TASK.fullmatch(self.path):
            try:
                self.reply(200, {"task": self.server.service.task(match["episode"])})
            except EpisodeRefused as error:
                raise Refused(404, str(error)) from None
        elif self.path == "/health":
            self.reply(200, {"ok": True})
        else:
            raise Refused(404, _SERVED)

    def post(self, body: bytes) -> None:
        """A completion, or an episode's pay."""
        if paid := _REWARD.fullmatch(self.path):
            return self.reply(*self.server.service.pay(body, paid["episode"]))
        match = _PATH.fullmatch(self.path.removesuffix("?beta=true"))  # which the package `anthropic` may add
        if not match:
            raise Refused(404, _SERVED)
        self._streaming, self._names_events = False, DIALECTS[match["kind"]].names_events
        try:
            connection = Connection(self.client_has_left, self.headers.get(RETRIES, "0").strip() not in ("", "0"))
            status, response = self.server.service.answer(body, match["kind"], match["episode"], self._event, connection)
            if not self._streaming:
                return self.reply(status, response, {"Retry-After": str(RETRY_S)} if status == 429 else None)
            if status != 200:
                self._write(json.dumps(response), "error")
            elif not self._names_events:
                self._write("[DONE]")
        except ClientLeft:
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
        self._write(json.dumps(event, allow_nan=False), event.get("type"))

    def _write(self, text: str, name: str | None = None) -> None:
        named = f"event: {name}\n" if self._names_events else ""
        try:
            self.wfile.write(f"{named}data: {text}\n\n".encode())
        except OSError as error:
            raise ClientLeft from error
