"""Tools in the form of OpenAI's chat completions: what a request offers, and the calls and answers that its messages hold.

The chat template tells the model of its tools. Whether it calls them is up to it: `tool_choice` and `parallel_tool_calls` are checked after
the reply (`marl_llm.serving.expected`), since a token that the model did not choose cannot be trained on.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.serving.json_schema import check_schema
from marl_llm.text import Message as Said
from marl_llm.text import ToolCall
from marl_llm.text.tool_calls import ARGUMENTS, LONGEST_NAME
from marl_llm.untrusted import read_json, read_text

MAX_TOOLS = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
CHOICES = ("auto", "none", "required")
EMPTY_IN_MESSAGES = ("name", "refusal", "tool_calls", "function_call", "audio", "annotations")  # taken where they say nothing
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True)
class OfferedTools:
    """What a request says about tools.

    Attributes:
      offered: the tools, `{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates read them.
      choice: one of `CHOICES`, or "named".
      name: of the tool that must be called, where the choice is "named".
      parallel: whether a reply may have several calls.
      strict: names of the tools whose calls are checked against their parameters.
    """

    offered: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    name: str = ""
    parallel: bool = True
    strict: tuple[str, ...] = ()

    @property
    def reads_calls(self) -> bool:
        """Whether calls are taken out of a reply's text; with the choice "none" they remain text."""
        return bool(self.offered) and self.choice != "none"

    def schema_of(self, name: str) -> Any:
        """The parameters of a tool as a JSON schema; None for a tool that is not offered, or has none."""
        return next((tool["function"].get("parameters") for tool in self.offered if tool["function"]["name"] == name), None)


def read_tool_use(fields: Mapping[str, Any]) -> OfferedTools:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises `ValueError` with the field's place."""
    listed, parallel, choice = fields.get("tools", []), fields.get("parallel_tool_calls", True), fields.get("tool_choice", "auto")
    if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        raise ValueError(f"tools must be a list of at most {MAX_TOOLS} tools")
    if not isinstance(parallel, bool):
        raise ValueError("parallel_tool_calls must be true or false")
    read = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(listed)]
    tools, names = tuple(tool for tool, _ in read), [tool["function"]["name"] for tool, _ in read]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"tools: {doubled[0]!r} stands there twice; every tool needs a name of its own")
    strict = tuple(name for name, (_, checked) in zip(names, read, strict=True) if checked)
    choice, name = _read_choice(choice, names)
    return OfferedTools(tools, choice, name, parallel, strict)


def _read_tool(tool: Any, where: str) -> tuple[dict[str, Any], bool]:
    """(a tool as templates read it, whether it is strict)."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise ValueError(f'{where}: only functions are served, as {{"type": "function", "function": {{"name": "look"}}}}')
    function = {name: value for name, value in tool["function"].items() if value is not None}
    if strange := [name for name in function if name not in ("name", "description", "parameters", "strict")]:
        raise ValueError(f"{where}.function.{strange[0]:.50} is not served; a function has name, description, parameters and strict")
    if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
        raise ValueError(f"{where}.function.name must be 1 to 64 letters, digits and _ . -")
    if not isinstance(function.get("description", ""), str) or not isinstance(function.get("parameters", {}), dict):
        raise ValueError(f"{where}.function: the description must be a text, and the parameters a JSON schema")
    strict = function.pop("strict", False)
    if not isinstance(strict, bool):
        raise ValueError(f"{where}.function.strict must be true or false")
    if strict:
        check_schema(function.get("parameters", {}), f"{where}.function.parameters")
    return {"type": "function", "function": function}, strict


def _read_choice(choice: Any, names: Sequence[str]) -> tuple[str, str]:
    """(the choice, the name of the tool that must be called)."""
    if isinstance(choice, str) and choice in CHOICES:
        if choice == "required" and not names:
            raise ValueError("tool_choice='required' needs tools to choose from; add some to tools")
        return choice, ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'tool_choice must be one of {", ".join(CHOICES)}, or {{"type": "function", "function": {{"name": "look"}}}}')
    if function["name"] not in names:
        raise ValueError(f"tool_choice names {function['name']!r:.80}, which is none of the tools: {', '.join(names) or 'there are none'}")
    return "named", function["name"]


def read_messages(listed: Any) -> tuple[dict[str, Any], ...]:
    """The messages of a request, each with its `role` and its `content` as one text, an assistant's with its `tool_calls`, a tool's with
    its `tool_call_id`. Tools' answers stand in the order of the calls. Raises `ValueError` with the message's place."""
    if not isinstance(listed, list) or not all(isinstance(message, dict) for message in listed):
        raise ValueError("messages must be a list of objects")
    if not listed:
        raise ValueError("messages: at least one message is needed")
    messages = [_read_message(message, f"messages[{place}]") for place, message in enumerate(listed)]
    return tuple(_in_order_of_calls(messages))


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}")
    fields = {name: value for name, value in message.items() if value or name not in EMPTY_IN_MESSAGES}
    own = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}.get(role, ())
    if strange := [name for name in fields if name not in ("role", "content", *own)]:
        names = " and ".join(("its role", "its content", *(f"its {name}" for name in own[:1])))
        raise ValueError(f"{where}: {strange[0]!r:.50} is not served; {_article(role)} message has {names}")
    read = {"role": role, "content": _read_content(fields, role, where)}
    if calls := fields.get("tool_calls"):
        if not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls must be a list")
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
        ids = [call["id"] for call in read["tool_calls"]]
        if len(set(ids)) < len(ids):
            raise ValueError(f"{where}.tool_calls: two calls have one id")
    if role == "tool":
        if not isinstance(fields.get("tool_call_id"), str):
            raise ValueError(f"{where}.tool_call_id must name the call that this message answers")
        read["tool_call_id"] = fields["tool_call_id"]
    return read


def _article(role: str) -> str:
    return f"an {role}'s" if role == "assistant" else f"a {role}'s"


def _read_content(fields: Mapping[str, Any], role: str, where: str) -> str:
    """A message's content as one text; the texts of its parts are joined as they stand."""
    content = fields.get("content")
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        if not content:
            raise ValueError(f"{where}.content is an empty list")
        return "".join(_read_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))
    if not isinstance(content, str):
        raise ValueError(f"{where}.content must be a text, or a list of parts with texts")
    return content


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str) or len(part) > 2:
        about = f"type {kind!r:.50}" if kind not in (None, "text") else "another form"
        raise ValueError(f'{where}: parts like {{"type": "text", "text": "..."}} are served, none of {about}')
    return part["text"]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str) or not isinstance(function.get("name"), str):
        form = '{"id": "...", "type": "function", "function": {"name": "look", "arguments": "{}"}}'
        raise ValueError(f"{where} must be a call of a function, as {form}")
    if not call["id"] or len(function["name"]) > LONGEST_NAME:  # of any letters: a model may have invented it, and be told so
        raise ValueError(f"{where}: the id must not be empty, and the name must have at most {LONGEST_NAME:,} characters")
    arguments = function.get("arguments", "{}")
    value = read_json(arguments or "{}", ARGUMENTS).value if isinstance(arguments, str) else None
    if not isinstance(value, dict):
        raise ValueError(f"{where}.function.arguments must be a JSON object as text")
    return call_of(call["id"], function["name"], value)


def call_of(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call in OpenAI's form, with valid texts, as a client reads them from JSON."""
    text = read_text(json.dumps(dict(arguments), ensure_ascii=False)).value
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages; of those that answer one message's calls, each stands in its call's place. Raises `ValueError`."""
    ordered: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        if message["role"] == "tool":
            raise ValueError(f"messages[{place}].tool_call_id: no assistant's message before it has a call {message['tool_call_id']!r:.80}")
        ordered.append(message)
        place += 1
        if not (calls := [call["id"] for call in message.get("tool_calls", ())]):
            continue
        answers: dict[str, dict[str, Any]] = {}
        while place < len(messages) and messages[place]["role"] == "tool":
            answered = messages[place]["tool_call_id"]
            if answered not in calls or answered in answers:
                why = "has its answer already" if answered in answers else "is none of the calls before it"
                raise ValueError(f"messages[{place}].tool_call_id: {answered!r:.80} {why}")
            answers[answered] = messages[place]
            place += 1
        if missing := [call for call in calls if call not in answers]:
            raise ValueError(f"messages[{place - 1}]: the call {missing[0]!r:.80} has no answer; add a message of the role tool for it")
        ordered += [answers[call] for call in calls]
    return ordered


def said_by(messages: Sequence[Mapping[str, Any]]) -> list[Said]:
    """Messages of OpenAI's form as a chat template's. A developer is the system."""
    converted = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = tuple(ToolCall(function["name"], json.loads(function["arguments"])) for function in functions)
        converted.append(Said(role, message["content"], None, calls))
    return converted
