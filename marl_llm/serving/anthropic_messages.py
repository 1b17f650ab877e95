"""Anthropic's `/v1/messages`, translated to OpenAI's chat completions and back. Nothing is decided here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.serving.completions import Choice, CompletionRequest, used_by
from marl_llm.serving.policy import PolicyReply

SAME = ("model", "max_tokens", "temperature", "top_p", "stream", "seed")  # `seed` is none of Anthropic's; equal requests need it
NEUTRAL = {"thinking": ({"type": "disabled"},), "service_tier": ("auto", "standard_only"), "mcp_servers": ([],), "container": ()}
READ = (*SAME, "messages", "system", "stop_sequences", "tools", "tool_choice", "metadata")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def translate(value: Mapping[str, Any]) -> dict[str, Any]:
    """A request as one of chat completions. Raises `ValueError` with the place of what is not served."""
    fields = {name: field for name, field in value.items() if field is not None}
    for name, field in fields.items():
        if name not in READ and field not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name!r:.50} is not served at /v1/messages, or not with this value; leave it out")
    if "max_tokens" not in fields:
        raise ValueError("max_tokens is missing: it bounds the reply")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    translated = [{"role": "system", "content": _text_of(fields["system"], "system")}] if "system" in fields else []
    for place, message in enumerate(messages):
        translated += _read_message(message, f"messages[{place}]")
    if translated[-1]["role"] == "assistant":
        raise ValueError(f"messages[{len(messages) - 1}]: a message of the assistant is not continued here; let the last one be the user's")
    body = {name: fields[name] for name in SAME if name in fields} | {"messages": translated}
    if "stop_sequences" in fields:
        body["stop"] = fields["stop_sequences"]
    if "tools" in fields:
        if not isinstance(fields["tools"], list):
            raise ValueError("tools must be a list")
        body["tools"] = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(fields["tools"])]
    return body | (_read_choice(fields["tool_choice"]) if "tool_choice" in fields else {})


def _text_of(content: Any, where: str) -> str:
    """A text, or the texts of text blocks as they stand."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a text, or a list of text blocks")
    for place, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ValueError(f'{where}[{place}]: blocks like {{"type": "text", "text": "..."}} are served here')
    return "".join(block["text"] for block in content)


def _read_message(message: Any, where: str) -> list[dict[str, Any]]:
    """A message as one or more of chat completions: results of tools are messages of their own, before the text."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant"):
        raise ValueError(f"{where}.role must be user or assistant; the system's text stands in the field system")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": _text_of(content, f"{where}.content")}]
    texts, calls, results = [], [], []
    for place, block in enumerate(content):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}.content[{place}]"
        if kind == "text":
            texts.append(_text_of([block], at))
        elif kind == "tool_use" and role == "assistant":
            if not isinstance(block.get("input"), dict):
                raise ValueError(f"{at}.input must be an object")
            function = {"name": block.get("name"), "arguments": json.dumps(block["input"])}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _text_of(block.get("content") or "", f"{at}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            raise ValueError(f"{at}: a block of type {kind!r:.50} is not served in a message of the role {role}")
    if role == "assistant":
        return [{"role": role, "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})]
    return results + ([{"role": role, "content": "".join(texts)}] if texts or not results else [])


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        raise ValueError(f"{where}: only tools of the caller are served, with name, description and input_schema")
    if strange := [name for name in tool if name not in ("type", "name", "description", "input_schema", "cache_control", "strict")]:
        raise ValueError(f"{where}.{strange[0]:.50} is not served; a tool has name, description and input_schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function | {"strict": tool.get("strict")}}


def _read_choice(choice: Any) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise ValueError("tool_choice.type must be one of auto, any, none, tool")
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise ValueError("tool_choice.disable_parallel_tool_use must be true or false")
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if alone else {})


def write(request: CompletionRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """The answer."""
    reply, used = choices[0], used_by(choices)
    blocks = [{"type": "text", "text": reply.reply.text}] if reply.reply.text else []
    blocks += [_block(call, json.loads(call["function"]["arguments"])) for call in reply.calls]
    usage = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    return _head(request) | _ending(reply) | {"content": blocks, "usage": usage}


def _head(request: CompletionRequest) -> dict[str, Any]:
    return {"id": f"msg_{time.time_ns()}", "type": "message", "role": "assistant", "model": request.model, "content": []}


def _ending(choice: Choice) -> dict[str, Any]:
    ending = {"stop_reason": REASONS.get(choice.finish_reason or "stop", "end_turn"), "stop_sequence": None}
    if isinstance(choice.reply, PolicyReply) and choice.reply.stopped_by and not choice.calls:
        ending = {"stop_reason": "stop_sequence", "stop_sequence": choice.reply.stopped_by}
    return ending | ({"unmet": list(choice.unmet)} if choice.unmet else {})


def _block(call: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": dict(arguments)}


def error_of(message: str) -> dict[str, Any]:
    """A refusal."""
    return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


class MessageEvents:
    """The events of one streamed message; `send` takes them to the client."""

    def __init__(self, request: CompletionRequest, send: Callable[[dict[str, Any]], None]):
        self._request, self._send, self._begun, self._blocks = request, send, False, 0
        self._in_text = False

    def text(self, number: int, text: str) -> None:
        """A piece of the reply's text."""
        self._begin()
        if not self._in_text:
            self._start({"type": "text", "text": ""})
            self._in_text = True
        self._change({"type": "text_delta", "text": text})

    def end(self, number: int, choice: Choice) -> None:
        """The reply's calls, each whole."""
        self._begin()
        if self._in_text:
            self._stop()
        for call in choice.calls:
            self._start(_block(call, {}))
            self._change({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
            self._stop()

    def finish(self, choices: Sequence[Choice]) -> None:
        """The reason why it ended, and the counts of tokens."""
        used = used_by(choices)
        usage = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
        self._send({"type": "message_delta", "delta": _ending(choices[0]), "usage": usage})
        self._send({"type": "message_stop"})

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
            message = _head(self._request) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
            self._send({"type": "message_start", "message": message})

    def _start(self, block: dict[str, Any]) -> None:
        self._send({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _change(self, delta: dict[str, Any]) -> None:
        self._send({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _stop(self) -> None:
        self._send({"type": "content_block_stop", "index": self._blocks})
        self._blocks += 1
