"""A reply read as text: thinking, content and tool calls. Never fails on what a policy may have said."""

from __future__ import annotations

import dataclasses

from marl_llm.text.messages import ToolCall
from marl_llm.text.tool_calls import CallReader, Read, end_of_tagged, sendable, split_tagged

THINK, END_THINK = "<think>", "</think>"
CALL = "<tool_call>"


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply read as text. `broken_calls` are the texts of tool calls that cannot be read; if there are any, `content` has all texts."""

    content: str
    thinking: str | None
    tool_calls: tuple[ToolCall, ...]
    broken_calls: tuple[str, ...]
    finished: bool  # it ended with a stop token, not at the limit of tokens
    unfinished_think: bool | None = None  # it ended within a think block, its own or the prompt's; None: the template has no such blocks


def read_reply(text: str, finished: bool, thinks: bool, reader: CallReader | None) -> Reply:
    """A reply, the prompt's opening of a think block before it. `reader` is None where nobody reads calls."""
    thinking = unfinished = None
    if thinks:
        outside = split_tagged(text)[0] if reader is not None else text
        unfinished = outside.rfind(THINK) > outside.rfind(END_THINK)
        thinking, text = _split_thought(text)
    read = Read(text) if reader is None else _read_calls(text, reader)
    return Reply(read.content, thinking, read.calls, read.broken, finished, unfinished)


def _read_calls(text: str, reader: CallReader) -> Read:
    """The calls of a text. Where one cannot be read or sent, the text stays whole: nothing that a model said is lost."""
    read = reader.read(text)
    calls = tuple(map(sendable, read.calls))
    if None in calls:
        return Read(text, (), (text,))
    return Read(text if read.broken else read.content, calls, read.broken)


def _split_thought(text: str) -> tuple[str | None, str]:
    """(thinking, the rest) of a reply: its thinking ends at the first `</think>` that is no text of a tool call."""
    call = text.find(CALL)
    if THINK not in text[: max(call, 0)] and 0 <= call < text.find(END_THINK) < end_of_tagged(text, call + len(CALL)):
        return None, text
    before, mark, after = text.partition(END_THINK)
    if mark:
        return before.rstrip("\n").split(THINK)[-1].lstrip("\n"), after.lstrip("\n")
    if text.lstrip().startswith(THINK):
        return text.lstrip().removeprefix(THINK).lstrip("\n"), ""  # cut off while it thought
    return None, text
