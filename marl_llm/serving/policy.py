"""A model of an engine as a function from chat messages to a reply."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.sampling.requests import Request, RequestError, Settings
from marl_llm.text.formats import Message as Said
from marl_llm.tools.chat import ChatReply, Message, Options

Answer = Callable[[Sequence[Message], Options], ChatReply]


def policy_answers(
    engine: Any, model: str, speech: Any, *, max_prompt: int, max_tokens: int = 1024, timeout_s: float | int | None = 120.0
) -> Answer:
    """Replies of a model, to be used by threads; also what `tools.chat.PolicyBackend` wants.

    The draw's identity is made of the messages and the options' seed: equal requests get equal replies, whoever else is served.

    Args:
      engine: a `sampling.Engine` that serves `model`.
      speech: how the model reads and writes: `text.Chat`, or `workflows.PlainText`.
      max_prompt, max_tokens: what the engine's lane holds; `max_tokens` is also that of a request that names none.
      timeout_s: of one reply in the engine; what there is by then comes back with the finish reason "length".

    In place of messages the function takes a text, which the model continues as it stands. It raises `RequestError` for messages that
    cannot be served.
    """

    def answer(messages: Sequence[Message] | str, options: Options) -> ChatReply:
        roles, talk = {"developer": "system"}, None
        try:
            if isinstance(messages, str):
                ids = tuple(speech.tokenizer.encode(messages))
            else:
                talk = speech.start([Said(roles.get(one["role"], one["role"]), one["content"]) for one in messages])
                ids = tuple(talk.ids)
        except (ValueError, TypeError) as error:
            raise RequestError(f"request refused: the model's format cannot hold these messages: {error}") from error
        if not 0 < len(ids) <= max_prompt:
            raise RequestError(f"request refused: the prompt has {len(ids)} tokens, 1 to {max_prompt} are served")
        if options.max_tokens is not None and options.max_tokens > max_tokens:
            raise RequestError(f"request refused: max_tokens={options.max_tokens}, {max_tokens} are served")
        settings = Settings(
            temperature=1.0 if options.temperature is None else float(options.temperature),
            top_p=1.0 if options.top_p is None else float(options.top_p),
        )
        stops, budget = tuple(options.stop or ()), options.max_tokens or max_tokens
        seed = _seed(messages, options)
        done = engine.submit(Request(ids, seed, budget, model, settings, tuple(speech.stop_ids), stops, timeout_s)).result()
        drawn = done.tokens.tolist()
        if talk is None:
            text = speech.tokenizer.decode(drawn[:-1] if drawn and drawn[-1] in speech.stop_ids else drawn)
        else:
            reply = speech.read(speech.reply(talk, drawn))
            text = reply.content if reply.finished else speech.tokenizer.decode(drawn)
        sampled = {"prompt": list(ids), "ids": drawn, "version": done.version}
        sampled |= {name: getattr(done, name).tolist() for name in ("log_probs", "sampled_log_probs")}
        return ChatReply(text, "stop" if done.finish == "stop" else "length", len(ids), len(drawn), sampled=sampled)

    return answer


def _seed(messages: Sequence[Message] | str, options: Options) -> tuple[int, ...]:
    """Four numbers below 2**31 of what a reply depends on."""
    said = json.dumps([messages if isinstance(messages, str) else list(messages), options.seed], sort_keys=True).encode()
    digest = hashlib.sha256(said).digest()
    return tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "big") % 2**31 for i in range(4))
