"""A model of an engine as a function from chat messages to a reply."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import queue
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.sampling.requests import Completion, Request, RequestError, Settings
from marl_llm.serving.certain import CertainText, text_before
from marl_llm.text import Message as Said
from marl_llm.text import pieces_of, unknown_words
from marl_llm.tools.chat import ChatReply, Message, Options

MOST_CHARACTERS = 32  # of a prompt, per token that is served; encoding more takes 200 bytes of memory a character, only to be refused
OVER_BUDGET = ("cap", "refuse")
Answer = Callable[[Sequence[Message], Options], ChatReply]


class NotFinite(RuntimeError):
    """A model drew with log-probs that are no numbers, so that its tokens mean nothing."""


def check_numbers(reply: ChatReply) -> None:
    """Raises `NotFinite` for a reply whose log-probs are not all finite."""
    for name in ("log_probs", "sampled_log_probs"):
        if not all(map(math.isfinite, (reply.sampled or {}).get(name, ()))):
            raise NotFinite("its log-probs are not finite: do its parameters hold NaN or infinity?")


@dataclasses.dataclass(frozen=True)
class PolicyAnswers:
    """Replies of a model, to be used by threads; also what `tools.chat.PolicyBackend` wants.

    The draw's identity is made of the messages and the options' seed: equal requests get equal replies, whoever else is served.

    Attributes:
      engine: a `sampling.Engine` that serves `model`.
      speech: how the model reads and writes: `text.Chat`, or `workflows.PlainText`.
      max_prompt, max_tokens: what the engine's lane holds; `max_tokens` is also that of a request that names none, or more.
      timeout_s: of one reply in the engine; what there is by then comes back with the finish reason "length".
      version: of the parameters, told beside what was drawn; None: how often the engine was given new ones.
      over_budget: what becomes of a request for more tokens than `max_tokens`: "cap" cuts it to them, "refuse" refuses it. Raises
        `ValueError` for another word.
    """

    engine: Any
    model: str
    speech: Any
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
        request, talk = self._request(messages, options)
        return self._reply(request, talk, self.engine.submit(request).result())

    def stream(self, messages: Sequence[Message] | str, options: Options, say: Callable[[str], None]) -> ChatReply:
        """The same reply. `say` gets its text in pieces while it is drawn, a piece per chunk of the engine.

        A piece holds whole characters. Thinking and tool calls are held back, as they are no part of a reply's text. A reply that is cut
        off after its thinking is said without the thinking, which `text` of the whole reply has. What `say` raises ends the request.
        """
        request, talk = self._request(messages, options)
        chunks: queue.SimpleQueue = queue.SimpleQueue()
        handle, drawn, pieces = self.engine.submit(request, chunks.put), [], []
        certain = CertainText(self.speech, talk, request.stop_strings)
        try:
            while (chunk := chunks.get()) is not None:
                drawn += chunk.tolist()
                if piece := certain.read(chunk.tolist()):
                    say(piece)
                    pieces.append(piece)
        except BaseException:
            handle.cancel()
            raise
        reply = self._reply(request, talk, handle.result())
        said, whole = "".join(pieces), reply.text
        if talk is not None and not whole.startswith(said):  # thinking that was not said, or blanks that a tool call takes away
            content = self.speech.read(self.speech.reply(talk, drawn)).content
            said, whole = said.lstrip(), text_before(content, request.stop_strings).lstrip()
        if whole.startswith(said) and whole != said:
            say(whole[len(said) :])
        return reply

    def _request(self, messages: Sequence[Message] | str, options: Options) -> tuple[Request, Any]:
        """(request, conversation, or None for a text)."""
        roles, talk = {"developer": "system"}, None
        texts = [messages] if isinstance(messages, str) else [one["content"] for one in messages]
        if (characters := sum(len(text) for text in texts if isinstance(text, str))) > MOST_CHARACTERS * self.max_prompt:
            raise RequestError(
                f"request refused: the prompt has {characters:,} characters, which do not fit in the {self.max_prompt} tokens that are "
                "served"
            )
        try:
            if isinstance(messages, str):
                ids = tuple(self.speech.tokenizer.encode(messages))
            else:
                talk = self.speech.start([Said(roles.get(one["role"], one["role"]), one["content"]) for one in messages])
                ids = tuple(talk.ids)
        except (ValueError, TypeError) as error:
            raise RequestError(f"request refused: the model's format cannot hold these messages: {error}") from error
        if unknown := [word for text in texts for word in unknown_words(self.speech.tokenizer, text)]:
            raise RequestError(
                f"request refused: the model's vocabulary lacks {len(unknown)} of the words ({', '.join(map(repr, unknown[:8]))}): it was "
                "made for one game, and reads that game's words alone"
            )
        if not 0 < len(ids) <= self.max_prompt:
            raise RequestError(f"request refused: the prompt has {len(ids)} tokens, 1 to {self.max_prompt} are served")
        if self.over_budget == "refuse" and (options.max_tokens or 0) > self.max_tokens:
            most = f"a reply of {self.model!r} has at most {self.max_tokens}"
            raise RequestError(f"request refused: max_tokens={options.max_tokens}, but {most}")
        settings = Settings(
            temperature=1.0 if options.temperature is None else float(options.temperature),
            top_p=1.0 if options.top_p is None else float(options.top_p),
        )
        stops, budget = tuple(options.stop or ()), min(options.max_tokens or self.max_tokens, self.max_tokens)
        seed = _seed(messages, options)
        return Request(ids, seed, budget, self.model, settings, tuple(self.speech.stop_ids), stops, self.timeout_s), talk

    def log_probs(self, reply: ChatReply) -> list[dict[str, Any]]:
        """What a reply of this model drew, thinking and stop token included, as in OpenAI's `logprobs`: for each token its text and its
        log-prob under the raw policy in nats (the record's `log_probs`); with its `id`, so that nothing need be encoded again (law 1)."""
        drawn, texts = reply.sampled["ids"], pieces_of(self.speech.tokenizer, reply.sampled["ids"])
        return [{"token": texts[str(i)], "logprob": value, "id": i} for i, value in zip(drawn, reply.sampled["log_probs"], strict=True)]

    def _without_stop(self, drawn: list[int]) -> str:
        return self.speech.tokenizer.decode(drawn[:-1] if drawn and drawn[-1] in self.speech.stop_ids else drawn)

    def _reply(self, request: Request, talk: Any, done: Completion) -> ChatReply:
        drawn = done.tokens.tolist()
        if talk is None:
            text = self._without_stop(drawn)
        else:
            reply = self.speech.read(self.speech.reply(talk, drawn))
            text = reply.content if reply.finished else self.speech.tokenizer.decode(drawn)
        version, drawing = done.version if self.version is None else self.version, request.settings
        sampled = {"prompt": list(request.prompt), "ids": drawn, "version": version}
        sampled |= {"temperature": drawing.temperature, "top_p": drawing.top_p}
        sampled |= {name: getattr(done, name).tolist() for name in ("log_probs", "sampled_log_probs")}
        text = text_before(text, request.stop_strings)
        finish = "stop" if done.finish == "stop" else "length"
        reply = ChatReply(text, finish, len(request.prompt), len(drawn), sampled=sampled)
        check_numbers(reply)
        return reply


def policy_answers(
    engine: Any, model: str, speech: Any, *, max_prompt: int, max_tokens: int = 1024, timeout_s: float | int | None = 120.0,
    version: int | None = None,
) -> PolicyAnswers:  # fmt: skip
    """See `PolicyAnswers`."""
    return PolicyAnswers(engine, model, speech, max_prompt, max_tokens, timeout_s, version)


def _seed(messages: Sequence[Message] | str, options: Options) -> tuple[int, ...]:
    """Four numbers below 2**31 of what a reply depends on."""
    said = json.dumps([messages if isinstance(messages, str) else list(messages), options.seed], sort_keys=True).encode()
    digest = hashlib.sha256(said).digest()
    return tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "big") % 2**31 for i in range(4))
