"""How models write tool calls: named readers of a reply's text, one for each way that is in use.

    hermes       <tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>        Qwen2.5, Qwen3, Hermes, SmolLM3
    llama3_json  {"name": "look", "parameters": {"x": 1}}                              Llama 3.1 to 3.3
    mistral      [TOOL_CALLS][{"name": "look", "arguments": {"x": 1}}]                 Mistral; also [TOOL_CALLS]look[ARGS]{"x": 1}
    qwen3_coder  <tool_call><function=look><parameter=x>1</parameter></function></tool_call>
    pythonic     [look(x=1)]                                                           Llama 3.2, Llama 4

What a policy writes may be anything: a reader raises nothing, takes time linear in the text, and lists what is no call as broken. Arguments
are JSON within `ARGUMENTS`, so that a history may hold every call that was read: `sendable`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from marl_llm.text.messages import ToolCall
from marl_llm.untrusted import Bounds, read_json

ARGUMENTS = Bounds(size=1 << 20, values=50_000)  # of a call
LONGEST_NAME = 1024  # characters of a tool's name that a policy may have invented
LONGEST = 1 << 16  # characters of one call in Python's syntax; its parser takes memory by the hundredfold
_JSON, _BLANKS = json.JSONDecoder(), re.compile(r"\s*")
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MISTRAL, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_PYTHON_TAG = "<|python_tag|>"


class Read(NamedTuple):
    """A text without its calls, the calls, and the texts of calls that cannot be read."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CallReader:
    """One way to write calls."""

    name: str  # as configs spell it
    read: Callable[[str], Read]  # a reply's text -> `Read`
    marks: tuple[str, ...]  # texts with which a call begins
    anywhere: bool  # whether a call may stand behind other text; else a reply is calls from its first sign on, or has none


def split_tagged(text: str) -> tuple[str, list[str]]:
    """A text without what stands in `<tool_call>` tags, and what stands in them. In linear time."""
    rest, bodies, place = [], [], 0
    while (start := text.find(_CALL, place)) >= 0 and (end := end_of_tagged(text, start + len(_CALL))) >= 0:
        rest.append(text[place:start])
        bodies.append(text[start + len(_CALL) : end])
        place = end + len(_END_CALL)
    return "".join([*rest, text[place:]]), bodies


def end_of_tagged(text: str, start: int) -> int:
    """Where the end tag of a call stands, -1 without one: behind its JSON, whose texts may hold the tag, else the next one."""
    try:
        behind = _JSON.raw_decode(text, _BLANKS.match(text, start).end())[1]
        behind = _BLANKS.match(text, behind).end()
        if text.startswith(_END_CALL, behind):
            return behind
    except (ValueError, RecursionError):
        pass  # what a policy writes may be anything
    return text.find(_END_CALL, start)


def _call_of(value: Any, arguments: str) -> ToolCall | None:
    """The call that a JSON value is."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(arguments), dict):
        return None
    return ToolCall(value["name"], value[arguments])


def _value_of(text: str) -> Any:
    """A JSON value; None for anything else, integers of 5,000 digits too."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _sorted_out(content: str, bodies: list[str], calls: list[ToolCall | None]) -> Read:
    broken = tuple(body for body, call in zip(bodies, calls, strict=True) if call is None)
    return Read(content, tuple(call for call in calls if call is not None), broken)


def _read_hermes(text: str) -> Read:
    rest, bodies = split_tagged(text)
    if not bodies:
        return Read(text)
    return _sorted_out(rest.strip(), bodies, [_call_of(_value_of(body), "arguments") for body in bodies])


def _read_llama3_json(text: str) -> Read:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return Read(text)
    calls, place = [], 0
    while place < len(body):
        try:
            value, place = _JSON.raw_decode(body, place)
        except (ValueError, RecursionError):
            return Read("", (), (body,)) if '"name"' in body else Read(text)
        call = _call_of(value, "parameters") or _call_of(value, "arguments")
        if call is None:
            return Read(text)  # an answer that is JSON
        calls.append(call)
        place = _BLANKS.match(body, place).end()
        if place < len(body) and body[place] == ";":
            place = _BLANKS.match(body, place + 1).end()
    return Read("", tuple(calls))


def _read_mistral(text: str) -> Read:
    content, mark, calls_text = text.partition(_MISTRAL)
    if not mark:
        return Read(text)
    bodies, calls = [], []
    for body in calls_text.split(_MISTRAL):
        name, parted, arguments = body.partition(_ARGUMENTS)
        if parted:
            value = {"name": name.partition(_CALL_ID)[0].strip(), "arguments": _value_of(arguments)}
            parsed_calls = [_call_of(value, "arguments")]
        else:
            values = _value_of(body)
            parsed_calls = [_call_of(value, "arguments") for value in (values if isinstance(values, list) and values else [values])]
        calls += [None] if None in parsed_calls else parsed_calls
        bodies += [body] * (1 if None in parsed_calls else len(parsed_calls))
    return _sorted_out(content.strip(), bodies, calls)


def _read_qwen3_coder(text: str) -> Read:
    rest, bodies = split_tagged(text)
    if not bodies:
        return Read(text)
    return _sorted_out(rest.strip(), bodies, [_function_in(body.strip()) for body in bodies])


def _function_in(body: str) -> ToolCall | None:
    """`<function=name>`, and within it `<parameter=name>value</parameter>`. A value that is JSON is what it says, any other is text."""
    if not body.startswith("<function=") or not body.endswith("</function>"):
        return None
    name, mark, rest = body.removeprefix("<function=").removesuffix("</function>").partition(">")
    head, *parts = rest.split("<parameter=")
    if not mark or not name or head.strip():
        return None
    arguments = {}
    for part in parts:
        key, mark, value = part.partition(">")
        value, ended, behind = value.rpartition("</parameter>")
        if not mark or not key or not ended or behind.strip():
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        read = _value_of(value)
        arguments[key] = value if read is None and value.strip() != "null" else read
    return ToolCall(name, arguments)


def _read_pythonic(text: str) -> Read:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("[") or not body.endswith("]") or "(" not in body:
        return Read(text)
    if len(body) > LONGEST:
        return Read("", (), (body,))
    try:
        tree = ast.parse(body, mode="eval").body
        calls = tuple(map(_python_call, tree.elts)) if isinstance(tree, ast.List) else ()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return Read("", (), (body,))
    return Read("", calls) if calls else Read(text)


def _python_call(tree: ast.expr) -> ToolCall:
    """A call with named arguments that are plain values. Raises `ValueError` for any other expression."""
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name | ast.Attribute) or tree.args:
        raise ValueError("no call of a function by name with named arguments")
    if any(keyword.arg is None for keyword in tree.keywords):
        raise ValueError("arguments without names")
    return ToolCall(ast.unparse(tree.func), {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords})


def sendable(call: ToolCall) -> ToolCall | None:
    """The call, by a name that is a valid text; None if JSON cannot hold it within the bounds."""
    try:
        read = read_json(json.dumps([call.name, dict(call.arguments)]), ARGUMENTS)
    except (TypeError, ValueError, RecursionError):  # a set, bytes, a complex number, a key that is no text
        return None
    return ToolCall(read.value[0], call.arguments) if read.ok and len(read.value[0]) <= LONGEST_NAME else None


READERS: dict[str, CallReader] = {
    reader.name: reader
    for reader in (
        CallReader("hermes", _read_hermes, (_CALL,), True),
        CallReader("qwen3_coder", _read_qwen3_coder, (_CALL,), True),
        CallReader("mistral", _read_mistral, (_MISTRAL,), True),
        CallReader("llama3_json", _read_llama3_json, ("{", _PYTHON_TAG), False),
        CallReader("pythonic", _read_pythonic, ("[", _PYTHON_TAG), False),
    )
}
