"""OpenAI's `/v1/responses`, translated to chat completions and back. Nothing is decided here, and no response is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.serving.completions import Choice, CompletionRequest, used_by

SAME = ("model", "temperature", "top_p", "stream", "seed", "parallel_tool_calls", "user", "metadata", "store", "safety_identifier")
IGNORED = ("include", "reasoning", "prompt_cache_key", "prompt_cache_retention", "stream_options", "service_tier")  # have no effect here
NEUTRAL = {"background": (False,), "truncation": ("disabled", "auto"), "top_logprobs": (0,)}
READ = (*SAME, *IGNORED, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text")
PARTS = ("input_text", "output_text", "text")


def translate(value: Mapping[str, Any]) -> dict[str, Any]:
    """A request as one of chat completions. Raises `ValueError` with the place of what is not served."""
    fields = {name: field for name, field in value.items() if field is not None}
    if "previous_response_id" in fields or "conversation" in fields:
        raise ValueError("no response is stored here: send the whole conversation as input, without previous_response_id")
    for name, field in fields.items():
        if name not in READ and field not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name!r:.50} is not served at /v1/responses, or not with this value; leave it out")
    system = [{"role": "system", "content": fields["instructions"]}] if fields.get("instructions") else []
    body = {name: fields[name] for name in SAME if name in fields} | {"messages": system + _read_input(fields.get("input"))}
    if "max_output_tokens" in fields:
        body["max_tokens"] = fields["max_output_tokens"]
    if "tools" in fields:
        if not isinstance(fields["tools"], list):
            raise ValueError("tools must be a list")
        body["tools"] = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(fields["tools"])]
    if "tool_choice" in fields:
        choice = fields["tool_choice"]
        named = isinstance(choice, dict) and choice.get("type") == "function"
        body["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if named else choice
    return body | _read_format(fields.get("text"))


def _read_input(items: Any) -> list[dict[str, Any]]:
    """The input as messages. Calls that follow each other, and the text before them, are one assistant's message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise ValueError("input must be a text, or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where, kind = f"input[{place}]", item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text_of(item.get("content"), f"{where}.content")})
        elif kind == "function_call":
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            output = _text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise ValueError(f"{where}: an item of type {kind!r:.50} is not served, only message, function_call and function_call_output")
    return messages


def _text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a text, or a list of parts with texts")
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f'{where}[{place}]: parts like {{"type": "input_text", "text": "..."}} are served')
    return "".join(part["text"] for part in content)


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError(f"{where}: only functions of the caller are served")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _read_format(text: Any) -> dict[str, Any]:
    if text is None:
        return {}
    if not isinstance(text, dict) or not isinstance(text.get("format", {}), dict | None):
        raise ValueError("text must be an object, perhaps with a format")
    form = text.get("format") or {"type": "text"}
    if form.get("type") != "json_schema":
        return {"response_format": form}
    return {"response_format": {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}}


def write(request: CompletionRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """The answer."""
    number = time.time_ns()
    return _response(request, number, choices[0], _items(number, choices[0], choices[0].reply.text), choices)


def _response(
    request: CompletionRequest, number: int, reply: Choice | None, items: list[dict[str, Any]], choices: Sequence[Choice]
) -> dict[str, Any]:
    """A response; one that is under way has no reply yet."""
    cut = reply is not None and reply.finish_reason == "length"
    use = request.expected.tools
    head = {"id": f"resp_{number}", "object": "response", "created_at": number // 10**9, "model": request.model, "error": None}
    head |= {"status": "in_progress" if reply is None else "incomplete" if cut else "completed", "output": items}
    head |= {"incomplete_details": {"reason": "max_output_tokens"} if cut else None, "parallel_tool_calls": use.parallel}
    head |= {"tool_choice": {"type": "function", "name": use.name} if use.choice == "named" else use.choice}
    head |= {"tools": [{"type": "function", "strict": tool["function"]["name"] in use.strict} | tool["function"] for tool in use.offered]}
    if reply is None:
        return head | {"usage": None}
    used = used_by(choices)
    usage = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"], "total_tokens": used["total_tokens"]}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return head | {"usage": usage} | ({"unmet": list(reply.unmet)} if reply.unmet else {})


def _items(number: int, choice: Choice, text: str) -> list[dict[str, Any]]:
    items = [_message(number, [_part(text)], "completed")] if text or not choice.calls else []
    return items + [_call(number, place, call, call["function"]["arguments"], "completed") for place, call in enumerate(choice.calls)]


def _message(number: int, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _call(number: int, place: int, call: Mapping[str, Any], arguments: str, status: str) -> dict[str, Any]:
    about = {"call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}
    return {"type": "function_call", "id": f"fc_{number}_{place}", "status": status} | about


class ResponseEvents:
    """The events of one streamed response; `send` takes them to the client."""

    def __init__(self, request: CompletionRequest, send: Callable[[dict[str, Any]], None]):
        self._request, self._send, self._number, self._sequence = request, send, time.time_ns(), 0
        self._pieces: list[str] = []
        self._begun = self._in_text = False

    def text(self, number: int, text: str) -> None:
        """A piece of the reply's text."""
        self._begin()
        if not self._in_text:
            self._in_text = True
            self._say("output_item.added", output_index=0, item=_message(self._number, [], "in_progress"))
            self._say("content_part.added", **self._place(), part=_part(""))
        self._pieces.append(text)
        self._say("output_text.delta", **self._place(), delta=text, logprobs=[])

    def end(self, number: int, choice: Choice) -> None:
        """The end of the text, and the reply's calls, each whole."""
        if not choice.calls and not self._in_text:
            self.text(0, "")
        self._begin()
        items = _items(self._number, choice, "".join(self._pieces))
        if self._in_text:
            part = items[0]["content"][0]
            self._say("output_text.done", **self._place(), text=part["text"], logprobs=[])
            self._say("content_part.done", **self._place(), part=part)
            self._say("output_item.done", output_index=0, item=items[0])
        first = len(items) - len(choice.calls)
        for place, call in enumerate(choice.calls):
            at = {"output_index": first + place, "item_id": items[first + place]["id"]}
            item = _call(self._number, place, call, "", "in_progress")
            self._say("output_item.added", output_index=first + place, item=item)
            self._say("function_call_arguments.delta", **at, delta=call["function"]["arguments"])
            self._say("function_call_arguments.done", **at, arguments=call["function"]["arguments"], name=item["name"])
            self._say("output_item.done", output_index=first + place, item=items[first + place])

    def finish(self, choices: Sequence[Choice]) -> None:
        """The whole response."""
        items = _items(self._number, choices[0], "".join(self._pieces))
        whole = _response(self._request, self._number, choices[0], items, choices)
        self._say(whole["status"], response=whole)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            for kind in ("created", "in_progress"):
                self._say(kind, response=_response(self._request, self._number, None, [], ()))

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._number}", "output_index": 0, "content_index": 0}

    def _say(self, kind: str, /, **fields: Any) -> None:
        self._send({"type": f"response.{kind}", "sequence_number": self._sequence} | fields)
        self._sequence += 1
