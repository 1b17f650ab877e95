"""Chat formats as data: how messages are spelled for Qwen2.5, Qwen3 and DeepSeek-R1-Distill-Qwen.

A format says which text stands before and after a message of each role, how tools are announced, called and answered, and how thinking is
opened. `spell` renders messages as the model family's official Jinja template does, or (`history="keep"`) without dropping anything, as
pieces marked *trusted* (written by the format: special tokens are meant) or not (somebody's content: never special tokens).

Sources: the chat templates that Qwen2.5-Instruct, Qwen3 and DeepSeek-R1-Distill-Qwen ship; tests compare with them, text by text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool"]
History = Literal["keep", "strip"]

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
THINK, END_THINK = "<think>", "</think>"


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


class Piece(NamedTuple):
    """Text, and whether the format wrote it."""

    text: str
    trusted: bool


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How one model family spells a conversation. `heads` and `tails` are by role; `end` is the token that ends an assistant's turn.

    `openings` maps each thinking mode that the family offers to what the generation prompt adds after the assistant's head; the first is
    the default. `needs` are the special tokens without which a tokenizer cannot speak the format.
    """

    name: str
    needs: tuple[str, ...]
    bos: str
    heads: Mapping[str, str]
    tails: Mapping[str, str]
    end: str
    openings: Mapping[str, str]
    default_system: str | None = None
    tools: bool = True
    thinks: bool = False  # <think> blocks have a meaning of their own
    strip_newlines: bool = False  # dropping a think block drops the newlines after it
    steps_keep_thinking: bool = False  # thinking since the last user query stays, between tool calls
    system_anywhere: bool = True


_CHATML_HEADS = {role: f"<|im_start|>{role}\n" for role in ("system", "user", "assistant")}
_CHATML_TAILS = dict.fromkeys(("system", "user", "assistant"), "<|im_end|>\n")
_CHATML = {"bos": "", "heads": _CHATML_HEADS, "tails": _CHATML_TAILS, "end": "<|im_end|>"}

QWEN2_5 = ChatFormat(
    name="qwen2.5",
    needs=("<|im_start|>", "<|im_end|>"),
    openings={"off": ""},
    default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    **_CHATML,
)
QWEN2_5_BASE = dataclasses.replace(QWEN2_5, name="qwen2.5-base", default_system="You are a helpful assistant.")
QWEN2_5_MATH = dataclasses.replace(
    QWEN2_5, name="qwen2.5-math", default_system="Please reason step by step, and put your final answer within \\boxed{}."
)
QWEN3 = ChatFormat(
    name="qwen3",
    needs=("<|im_start|>", "<|im_end|>", THINK, END_THINK),
    openings={"on": "", "off": f"{THINK}\n\n{END_THINK}\n\n"},
    thinks=True,
    strip_newlines=True,
    steps_keep_thinking=True,
    **_CHATML,
)
DEEPSEEK_R1_DISTILL_QWEN = ChatFormat(
    name="deepseek-r1-distill-qwen",
    needs=("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", THINK, END_THINK),
    bos="<｜begin▁of▁sentence｜>",
    heads={"system": "", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"},
    tails={"system": "", "user": "", "assistant": "<｜end▁of▁sentence｜>"},
    end="<｜end▁of▁sentence｜>",
    openings={"on": f"{THINK}\n"},
    tools=False,
    thinks=True,
    system_anywhere=False,
)
FORMATS: tuple[ChatFormat, ...] = (QWEN3, QWEN2_5, QWEN2_5_BASE, QWEN2_5_MATH, DEEPSEEK_R1_DISTILL_QWEN)


def opening_of(form: ChatFormat, thinking: str | None) -> str:
    """What the generation prompt adds in this thinking mode; `None` is the format's first. Raises `ValueError` on a mode it lacks."""
    if thinking is not None and thinking not in form.openings:
        raise ValueError(f"thinking={thinking!r}: the format {form.name} offers {sorted(form.openings)}")
    return form.openings[next(iter(form.openings)) if thinking is None else thinking]


def as_json(value: Any) -> str:
    """JSON as the templates' `tojson` writes it in `transformers`: no escapes beyond JSON's own, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def is_query(message: Message) -> bool:
    """Whether a user asks something; a tool's answer in a user's clothes is none (Qwen3's template looks at the content)."""
    text = message.content
    return message.role == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def last_query(messages: Sequence[Message]) -> int:
    """Index of the last user query, or of the last message if there is none."""
    return max((i for i, m in enumerate(messages) if is_query(m)), default=len(messages) - 1)


def split_thinking(content: str, newlines: bool) -> tuple[str, str]:
    """(thinking, the rest) of an assistant's text, cut at the last `</think>`; `newlines`: those at the cut are dropped."""
    if END_THINK not in content:
        return "", content
    before, after = content.split(END_THINK)[0], content.split(END_THINK)[-1]
    return before.rstrip("\n").split(THINK)[-1].lstrip("\n"), after.lstrip("\n") if newlines else after


def spell_start(form: ChatFormat, system: Message | None, tools: Sequence[Mapping[str, Any]]) -> list[Piece]:
    """Start of text, system prompt (the format's own if none is given) and tools. Raises `ValueError` if the format has no tools."""
    if tools and not form.tools:
        raise ValueError(f"the format {form.name} has no way to announce tools; describe them in the system prompt")
    text = form.default_system if system is None else system.content
    pieces = [Piece(form.bos, True)]
    if tools:
        before = [] if text is None else [Piece(text, system is None), Piece("\n\n", True)]
        lines = [piece for tool in tools for piece in (Piece("\n", True), Piece(as_json(tool), False))]
        body = [*before, Piece(TOOLS_BEFORE, True), *lines, Piece(TOOLS_AFTER, True)]
    elif text is not None:
        body = [Piece(text, system is None)]
    else:
        return pieces
    return [*pieces, Piece(form.heads["system"], True), *body, Piece(form.tails["system"], True)]


def spell_assistant(form: ChatFormat, message: Message, thinking: str, content: str, block: bool) -> list[Piece]:
    """An assistant's message, with a think block or without."""
    if message.tool_calls and not form.tools:
        raise ValueError(f"the format {form.name} has no tool calls")
    pieces = [Piece(form.heads["assistant"], True)]
    if block:
        pieces += [Piece(f"{THINK}\n", True), Piece(thinking.strip("\n"), False), Piece(f"\n{END_THINK}\n\n", True)]
    pieces.append(Piece(content.lstrip("\n") if block else content, False))
    for i, call in enumerate(message.tool_calls):
        pieces.append(Piece("\n" if i or content else "", True))
        pieces += [Piece('<tool_call>\n{"name": "', True), Piece(call.name, False), Piece('", "arguments": ', True)]
        pieces += [Piece(as_json(dict(call.arguments)), False), Piece("}\n</tool_call>", True)]
    return [*pieces, Piece(form.tails["assistant"], True)]


def spell(
    form: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: str | None = None,
    history: History = "strip",
) -> list[list[Piece]]:
    """Messages as pieces: the start (system prompt, tools), then one list per message; the first, if a system's, is in the start.

    `strip` drops past thinking just as the official template does; `keep` writes every think block as it would have been sampled: an
    assistant's message has one if it carries thinking, or if thinking is off and the format then opens with an empty one.
    `thinking` is one of the format's modes (`None`: its first). Raises `ValueError` on messages that the format cannot say.
    """
    opening = opening_of(form, thinking)
    system = messages[0] if messages and messages[0].role == "system" else None
    spelled = [spell_start(form, system, tools)]
    last = last_query(messages)
    for i, message in enumerate(messages):
        if i == 0 and system is not None:
            continue
        if message.role == "tool":
            if not form.tools:
                raise ValueError(f"the format {form.name} has no tool responses")
            first, final = i == 0 or messages[i - 1].role != "tool", i + 1 == len(messages) or messages[i + 1].role != "tool"
            head = form.heads["user"].rstrip("\n") if first else ""
            after = "\n</tool_response>" + (form.tails["user"] if final else "")
            spelled.append([Piece(f"{head}\n<tool_response>\n", True), Piece(message.content, False), Piece(after, True)])
        elif message.role == "assistant":
            thought, content = "" if message.thinking is None else message.thinking, message.content
            # DeepSeek's template knows no thoughts apart from content: it cuts the content in any case.
            if form.thinks and (message.thinking is None or (history == "strip" and not form.steps_keep_thinking)):
                thought, content = split_thinking(content, form.strip_newlines)
            if history == "keep":
                block = form.thinks and bool(thought or END_THINK in opening)
            else:
                block = form.steps_keep_thinking and i > last and bool(thought or i + 1 == len(messages))
            spelled.append(spell_assistant(form, message, thought, content, block))
        elif message.role == "system" and not form.system_anywhere:
            raise ValueError(f"the format {form.name} takes a system prompt at the start only; message {i} is another")
        else:
            head, tail = form.heads[message.role], form.tails[message.role]
            spelled.append([Piece(head, True), Piece(message.content, False), Piece(tail, True)])
    return spelled


def spell_text(
    form: ChatFormat,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: str | None = None,
    history: History = "strip",
    generate: bool = True,
) -> str:
    """The whole rendering as text, for people and for comparing with a template; `generate` adds the generation prompt."""
    text = "".join(piece.text for pieces in spell(form, messages, tools, thinking, history) for piece in pieces)
    return text + (form.heads["assistant"] + opening_of(form, thinking) if generate else "")
