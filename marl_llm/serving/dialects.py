"""The addresses of requests: how each is translated to OpenAI's chat completions, and how its answers are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from marl_llm.serving import anthropic_messages, openai_responses
from marl_llm.serving.completions import Choice, CompletionRequest, Events, completion, error_of

Send = Callable[[dict[str, Any]], None]


@runtime_checkable
class EventWriter(Protocol):
    """Writes the events of one streamed answer."""

    def text(self, number: int, text: str) -> None:
        """A piece of a reply."""
        ...

    def end(self, number: int, choice: Choice) -> None:
        """The end of a reply."""
        ...

    def finish(self, choices: Sequence[Choice]) -> None:
        """The end of the answer."""
        ...


class Dialect(NamedTuple):
    """One way to ask and to be answered.

    Attributes:
      kind: "chat/completions" or "completions", as which it is read.
      translate: a request's JSON -> the JSON of that kind. Raises `ValueError` with the place of what is not served.
      write: a request and its replies -> the answer.
      events: a request and `send` -> what writes its events.
      error: a reason -> the JSON of a refusal.
      names_events: whether an event of a stream has a name, its `type`; such a stream ends without `[DONE]`.
    """

    kind: str
    translate: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[CompletionRequest, Sequence[Choice]], dict[str, Any]]
    events: Callable[[CompletionRequest, Send], EventWriter]
    error: Callable[[str], dict[str, Any]] = error_of
    names_events: bool = False


def _own(kind: str) -> Dialect:
    def write(request: CompletionRequest, choices: Sequence[Choice]) -> dict[str, Any]:
        return completion(request, choices, kind)

    def events(request: CompletionRequest, send: Send) -> EventWriter:
        return Events(request, kind, send)

    return Dialect(kind, dict, write, events)


DIALECTS = {
    "chat/completions": _own("chat/completions"),
    "completions": _own("completions"),
    "messages": Dialect(
        "chat/completions", anthropic_messages.translate, anthropic_messages.write, anthropic_messages.MessageEvents,
        anthropic_messages.error_of, names_events=True,
    ),
    "responses": Dialect(
        "chat/completions", openai_responses.translate, openai_responses.write, openai_responses.ResponseEvents, names_events=True
    ),
}  # fmt: skip
