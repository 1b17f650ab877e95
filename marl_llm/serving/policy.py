"""A model of an engine as a function from chat messages to a reply."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.sampling.prompt_scores import PromptScores
from marl_llm.sampling.requests import Completion, Request, RequestError, SamplingParams
from marl_llm.serving.certain import CertainText, text_before
from marl_llm.serving.tool_messages import call_of, said_by
from marl_llm.text import Reply, ToolCall, pieces_of, unknown_words
from marl_llm.text.rendering import TemplateError
from marl_llm.text.replies import read_reply
from marl_llm.tools.chat import ChatReply, Message, Options

MOST_CHARACTERS = 32  # of a prompt, per token that is served; encoding more takes 200 bytes of memory a character, only to be refused
OVER_BUDGET = ("cap", "refuse")
NOT_FINITE = "its log-probs are not finite: do its parameters hold NaN or infinity?"
Answer = Callable[[Sequence[Message], Options], ChatReply]


class NotFinite(RuntimeError):
    """A model drew with log-probs that are no numbers, so that its tokens mean nothing."""


class LateReply(RuntimeError):
    """A reply that a time limit cut off, not the model: no sample of its policy (law 9)."""


class TokenIds(tuple):
    """A prompt as ids, which the model continues as it stands."""


def check_numbers(reply: ChatReply) -> None:
    """Raises `NotFinite` for a reply whose log-probs are not all finite."""
    for name in ("log_probs", "sampled_log_probs"):
        if not all(map(math.isfinite, (reply.sampled or {}).get(name, ()))):
            raise NotFinite(NOT_FINITE)


def check_in_time(replies: Sequence[ChatReply]) -> None:
    """Raises `LateReply` if a time limit of the engine cut one off."""
    if any(isinstance(reply, PolicyReply) and reply.is_late for reply in replies):
        raise LateReply("a reply was cut off by the time limit; nothing of it is recorded")


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """What a model is asked.

    Attributes:
      messages: of a chat, in OpenAI's form (`tool_messages.read_messages`); or a text or ids, which the model continues as they stand.
      options: how to draw.
      tools: that are offered, as chat templates read them.
      reads_calls: whether calls to them are taken out of the reply's text; else they remain text.
      past: the conversation that the first `covered` messages are; its ids stand at the head of the prompt. None: all are encoded.
    """

    messages: Sequence[Mapping[str, Any]] | str | TokenIds
    options: Options = Options()
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = False
    past: Any = None
    covered: int = 0

    def texts(self, first: int = 0) -> list[str]:
        """The texts of the messages from `first` on."""
        if isinstance(self.messages, TokenIds):
            return []
        return [self.messages] if isinstance(self.messages, str) else [message["content"] for message in self.messages[first:]]

    def characters(self) -> int:
        """Characters of all messages, tools and calls."""
        texts = [text for text in self.texts() if isinstance(text, str)]
        if not isinstance(self.messages, str | TokenIds):
            texts += [json.dumps(message["tool_calls"]) for message in self.messages if "tool_calls" in message]
        return sum(map(len, texts)) + (len(json.dumps(self.tools)) if self.tools else 0)

    def seed(self, draw: int = 0) -> tuple[int, ...]:
        """Four numbers below 2**31 of what a reply depends on; `draw` counts the replies to one request."""
        parts: list[Any] = [self.messages if isinstance(self.messages, str) else list(self.messages), self.options.seed]
        parts += [list(self.tools)] if self.tools else []
        parts += [draw] if draw else []
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
        return tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "big") % 2**31 for i in range(4))


@dataclasses.dataclass(frozen=True)
class PolicyReply(ChatReply):
    """A reply of an engine's model.

    Attributes:
      tool_calls: in OpenAI's form.
      malformed: tool calls that cannot be read, or are cut off; they remain text.
      shown: the text that a stream says: without thinking, whether or not the reply was cut off.
      streamed: all that a stream said; else the text.
      conversation: with this reply, as ids; None of a text that was continued.
      is_late: whether a time limit cut it off.
      stopped_by: the stop text that ended it; "" if it was another end.
    """

    tool_calls: tuple[dict[str, Any], ...] = ()
    malformed: int = 0
    shown: str = ""
    streamed: str = dataclasses.field(default="", compare=False)
    conversation: Any = dataclasses.field(default=None, compare=False, repr=False)
    is_late: bool = False
    stopped_by: str = ""


@dataclasses.dataclass(frozen=True)
class PolicyAnswers:
    """Replies of a model, to be used by threads; also what `tools.chat.PolicyBackend` wants.

    The draw's identity is made of the messages and the options' seed: equal requests get equal replies, whoever else is served.

    Attributes:
      engine: a `sampling.Engine` that serves `model`.
      renderer: how the model reads and writes: `text.Chat`, or `workflows.PlainText`.
      max_prompt, max_tokens: what the engine's lane holds; `max_tokens` is also that of a request that names none, or more.
      timeout_s: of one reply in the engine; what there is by then comes back with the finish reason "length", and in an episode not at all.
      version: of the parameters, told beside what was drawn; None: how often the engine was given new ones.
      over_budget: what becomes of a request for more tokens than `max_tokens`: "cap" cuts it to them, "refuse" refuses it. Raises
        `ValueError` for another word.
    """

    engine: Any
    model: str
    renderer: Any
    max_prompt: int
    max_tokens: int
    timeout_s: float | int | None
    version: int | None = None
    over_budget: str = "cap"

    def __post_init__(self):
        if self.over_budget not in OVER_BUDGET:
            raise ValueError(f"over_budget={self.over_budget!r} must be one of {', '.join(OVER_BUDGET)}")

    def __call__(self, messages: Sequence[Message] | str, options: Options) -> ChatReply:
        """The reply. In place of messages there may be a text, which the model continues as it stands. Raises `RequestError` for messages
        that cannot be served, and `NotFinite`."""
        return self.reply_to(ModelRequest(messages, options))

    def stream(self, messages: Sequence[Message] | str, options: Options, say: Callable[[str], None]) -> ChatReply:
        """The same reply. `say` gets its text in pieces while it is drawn, a piece per chunk of the engine.

        A piece holds whole characters. Thinking and tool calls are held back, as they are no part of a reply's text. A reply that is cut
        off after its thinking is streamed without the thinking, which `text` of the whole reply has. What `say` raises ends the request.
        """
        return self.reply_to(ModelRequest(messages, options), say)

    def reply_to(self, model_request: ModelRequest, say: Callable[[str], None] | None = None) -> PolicyReply:
        """The reply to a request with tools; see `__call__`, and `stream` for `say`."""
        return self.replies_to(model_request, 1, None if say is None else lambda _, text: say(text))[0]

    def replies_to(self, model_request: ModelRequest, count: int = 1, say: Callable[[int, str], None] | None = None) -> list[PolicyReply]:
        """So many replies to one request, each drawn by itself. `say` gets a reply's number and a piece of it, reply after reply."""
        request, conversation = self._request(model_request)
        requests = [dataclasses.replace(request, seed=model_request.seed(draw)) for draw in range(count)]
        if say is None:
            handles = [self.engine.submit(engine_request) for engine_request in requests]
            pairs = zip(requests, handles, strict=True)
            return [self._reply(model_request, engine_request, conversation, handle.result()) for engine_request, handle in pairs]
        chunks: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in requests]
        handles = [self.engine.submit(engine_request, on_tokens.put) for engine_request, on_tokens in zip(requests, chunks, strict=True)]
        replies = []
        try:
            for draw, (engine_request, on_tokens, handle) in enumerate(zip(requests, chunks, handles, strict=True)):
                streamed = self._stream(model_request, conversation, engine_request, on_tokens, functools.partial(say, draw))
                reply = self._reply(model_request, engine_request, conversation, handle.result())
                if rest := _unsaid(streamed, reply, conversation is not None):
                    say(draw, rest)
                replies.append(dataclasses.replace(reply, streamed=streamed + rest))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return replies

    def _stream(
        self, model_request: ModelRequest, conversation: Any, request: Request, chunks: queue.SimpleQueue, say: Callable[[str], None]
    ) -> str:
        """Streams the certain part of a reply while it is drawn, and gives all that was streamed."""
        certain, pieces = CertainText(self.renderer, conversation, request.stop_strings, model_request.reads_calls), []
        while (chunk := chunks.get()) is not None:
            if piece := certain.read(chunk.tolist()):
                say(piece)
                pieces.append(piece)
        return "".join(pieces)

    def _conversation(self, model_request: ModelRequest) -> Any:
        """The messages as a conversation. Raises `ValueError` for what the chat template refuses."""
        messages = said_by(model_request.messages)
        if model_request.past is not None:
            rest = messages[model_request.covered :]
            try:
                if any(message.role == "assistant" for message in rest):
                    return self.renderer.extend(model_request.past, rest, foreign=True)
                return self.renderer.extend(model_request.past, rest)
            except TemplateError:
                pass  # the template writes them in no conversation that goes on; perhaps it does from the start
        return self.renderer.start(messages, model_request.tools) if model_request.tools else self.renderer.start(messages)

    def _encode(self, model_request: ModelRequest, most: int) -> tuple[tuple[int, ...], Any]:
        """(ids of a prompt of at most so many tokens, conversation, or None for a text). Raises `RequestError`."""
        messages, conversation = model_request.messages, None
        if (characters := model_request.characters()) > MOST_CHARACTERS * most:
            raise RequestError(
                f"request refused: the prompt has {characters:,} characters, which do not fit in the {most} tokens that are served"
            )
        try:
            if isinstance(messages, str | TokenIds):
                ids = tuple(self.renderer.tokenizer.encode(messages) if isinstance(messages, str) else messages)
            else:
                conversation = self._conversation(model_request)
                ids = tuple(conversation.ids)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise RequestError(f"request refused: the model's format cannot hold these messages: {reason}") from error
        texts = model_request.texts(model_request.covered)
        if unknown := [word for text in texts for word in unknown_words(self.renderer.tokenizer, text)]:
            raise RequestError(
                f"request refused: the model's vocabulary lacks {len(unknown)} of the words ({', '.join(map(repr, unknown[:8]))}): it was "
                "made for one game, and reads that game's words alone"
            )
        if not 0 < len(ids) <= most:
            raise RequestError(f"request refused: the prompt has {len(ids)} tokens, 1 to {most} are served")
        return ids, conversation

    def scored_ids(self, model_request: ModelRequest) -> tuple[int, ...]:
        """Ids of a prompt that is scored and not continued; it may use the tokens of a reply too. Raises `RequestError`."""
        return self._encode(model_request, self.max_prompt + self.max_tokens)[0]

    def score(self, ids: Sequence[int], top_k: int = 0) -> PromptScores:
        """See `Engine.score`. Raises `RequestError`, and `NotFinite`."""
        (scores,) = self.engine.score(self.model, [ids], top_k)
        if not (np.isfinite(scores.log_probs).all() and np.isfinite(scores.top_log_probs).all()):
            raise NotFinite(NOT_FINITE)
        return scores

    def _request(self, model_request: ModelRequest) -> tuple[Request, Any]:
        """(request, conversation, or None for a text)."""
        options = model_request.options
        ids, conversation = self._encode(model_request, self.max_prompt)
        if self.over_budget == "refuse" and (options.max_tokens or 0) > self.max_tokens:
            most = f"a reply of {self.model!r} has at most {self.max_tokens}"
            raise RequestError(f"request refused: max_tokens={options.max_tokens}, but {most}")
        settings = SamplingParams(
            temperature=1.0 if options.temperature is None else float(options.temperature),
            top_p=1.0 if options.top_p is None else float(options.top_p),
        )
        stops, budget = tuple(options.stop or ()), min(options.max_tokens or self.max_tokens, self.max_tokens)
        seed = model_request.seed()
        return Request(ids, seed, budget, self.model, settings, tuple(self.renderer.stop_ids), stops, self.timeout_s), conversation

    def log_probs(self, reply: ChatReply) -> list[dict[str, Any]]:
        """What a reply of this model drew, thinking and stop token included, as in OpenAI's `logprobs`: for each token its text and its
        log-prob under the raw policy in nats (the record's `log_probs`); with its `id`, so that nothing need be encoded again (law 1)."""
        drawn, texts = reply.sampled["ids"], pieces_of(self.renderer.tokenizer, reply.sampled["ids"])
        return [{"token": texts[str(i)], "logprob": value, "id": i} for i, value in zip(drawn, reply.sampled["log_probs"], strict=True)]

    def _without_stop(self, drawn: list[int]) -> str:
        return self.renderer.tokenizer.decode(drawn[:-1] if drawn and drawn[-1] in self.renderer.stop_ids else drawn)

    def _reply(self, model_request: ModelRequest, request: Request, conversation: Any, done: Completion) -> PolicyReply:
        drawn, ended = done.tokens.tolist(), done.finish == "stop"  # at a stop token or a stop text
        calls: tuple[ToolCall, ...] = ()
        malformed, after = 0, None
        if conversation is None:
            text = shown = self._without_stop(drawn)
        else:
            after = self.renderer.reply(conversation, drawn)
            read = self.renderer.read(after)
            shown = read.content
            if model_request.tools:
                shown, calls, malformed = self._called(model_request, conversation, drawn, read, ended)
            text = shown if ended else self.renderer.tokenizer.decode(drawn)
        version, drawing = done.version if self.version is None else self.version, request.settings
        sampled = {"prompt": list(request.prompt), "ids": drawn, "version": version}
        sampled |= {"temperature": drawing.temperature, "top_p": drawing.top_p}
        sampled |= {name: getattr(done, name).tolist() for name in ("log_probs", "sampled_log_probs")}
        said = self._without_stop(drawn) if request.stop_strings else ""
        stopped_by = min((stop for stop in request.stop_strings if stop in said), key=said.find, default="")
        text, shown = text_before(text, request.stop_strings), text_before(shown, request.stop_strings)
        named = tuple(call_of(_id_of(request.seed, place), call.name, call.arguments) for place, call in enumerate(calls))
        reply = PolicyReply(
            text, "stop" if ended else "length", len(request.prompt), len(drawn), sampled=sampled, tool_calls=named, malformed=malformed,
            shown=shown, streamed=text, conversation=after, is_late=done.finish in ("timeout", "cancelled"), stopped_by=stopped_by,
        )  # fmt: skip
        check_numbers(reply)
        return reply

    def _called(
        self, model_request: ModelRequest, conversation: Any, drawn: list[int], read: Reply, ended: bool
    ) -> tuple[str, tuple[ToolCall, ...], int]:
        """(text, calls, number of malformed calls) of a reply to a request with tools.

        A reply with a call that cannot be read, or is cut off, remains text as a whole: half of it would be misread. `ended`: it was not
        cut off. A stop text and what is behind it are no part of the reply.
        """
        reader, thinks = self.renderer.call_reader, self.renderer.thinks
        opening = conversation.turns[-1].opening
        said = self._without_stop([*opening, *drawn])
        whole = read_reply(said, read.finished, thinks, None).content
        if not model_request.reads_calls:
            return whole, (), 0
        if ended and not read.finished:
            begin = len(self.renderer.tokenizer.decode(opening))  # the prompt's own words are none of the reply's
            until_stop = said[:begin] + text_before(said[begin:], model_request.options.stop or ())
            read = read_reply(until_stop, ended, thinks, reader)
        cut_off = reader.anywhere and any(mark in read.content for mark in reader.marks)
        malformed = len(read.broken_calls) or int(cut_off)
        if malformed or not ended or not read.tool_calls:
            return whole, (), malformed
        return read.content, read.tool_calls, 0


def policy_answers(
    engine: Any, model: str, renderer: Any, *, max_prompt: int, max_tokens: int = 1024, timeout_s: float | int | None = 120.0,
    version: int | None = None,
) -> PolicyAnswers:  # fmt: skip
    """See `PolicyAnswers`."""
    return PolicyAnswers(engine, model, renderer, max_prompt, max_tokens, timeout_s, version)


def _unsaid(streamed: str, reply: PolicyReply, is_chat: bool) -> str:
    """The rest of a reply, which was not streamed."""
    whole = reply.text
    if is_chat and not whole.startswith(streamed):  # thinking that was not streamed, or blanks that a tool call takes away
        streamed, whole = streamed.lstrip(), reply.shown.lstrip()
    return whole[len(streamed) :] if whole.startswith(streamed) else ""


def _id_of(seed: Sequence[int], place: int) -> str:
    """The ID of a reply's call: equal requests get equal replies, to the letter."""
    return f"call_{hashlib.sha256(json.dumps([*seed, place]).encode()).hexdigest()[:24]}"
