"""Messages of a conversation as text, and as the mappings that chat templates read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call: the tool's name and its arguments, a JSON object."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Message:
    """One message as text. `thinking` (`None`: none was written) and `tool_calls` belong to an assistant only."""

    role: Role
    content: str
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self):
        if self.role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"role {self.role!r}: use system, user, assistant or tool")
        if self.role != "assistant" and (self.thinking is not None or self.tool_calls):
            raise ValueError(f"a {self.role} message has no thinking and calls no tools; only an assistant's does")


def as_dicts(messages: Sequence[Message], text_arguments: bool = False) -> list[dict[str, Any]]:
    """Messages as `transformers` and OpenAI's interface write them.

    Calls have ids of nine letters and digits, which Mistral's templates ask for. A tool's message names the call that it answers: of the
    assistant's before it, the first that has no answer yet, or else the last. `text_arguments`: as JSON text, which some templates join.
    """
    count, unanswered, written = 0, [], []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            entry["reasoning_content"] = message.thinking
        if message.role == "tool" and unanswered:
            call = unanswered.pop(0) if len(unanswered) > 1 else unanswered[0]
            entry |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
        elif message.role == "assistant":
            unanswered = []
            for number, call in enumerate(message.tool_calls, start=count):
                arguments = json.dumps(dict(call.arguments), ensure_ascii=False) if text_arguments else dict(call.arguments)
                function = {"name": call.name, "arguments": arguments}
                unanswered.append({"type": "function", "id": f"call{number:05d}", "function": function})
            count += len(unanswered)
            if unanswered:
                entry["tool_calls"] = list(unanswered)
        written.append(entry)
    return written
