"""The part of a reply's text that is certain while it is drawn: streamed text cannot be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marl_llm.text import Chat, TextStream, stream_text
from marl_llm.text.replies import CALL, END_THINK, THINK


class CertainText:
    """Takes the ids of a reply as they come and gives the text that no later id can change. Linear in the reply's length.

    Held back are half characters, thinking, tool calls and what may become one, blanks that a tool call would take away, and what may
    become a stop text.

    Args:
      renderer: how the model reads and writes.
      conversation: that is answered; None: a text that is continued as it stands.
      stops: texts that end the reply.
      hides_calls: whether tool calls are no part of the text.
    """

    def __init__(self, renderer: Any, conversation: Any, stops: Sequence[str] = (), hides_calls: bool = True):
        self._renderer, self._stops = renderer, [stop for stop in stops if stop]
        self._is_chat = conversation is not None and isinstance(renderer, Chat)
        self._calls = renderer.call_reader if self._is_chat and hides_calls else None
        self._begun = False  # text was streamed: calls that stand at a reply's start alone can no longer come
        self._thinks = self._is_chat and renderer.thinks  # it may still turn out to be thinking
        self._strips_newlines = self._ended = self._opens_thought = False
        self._tail, self._held, self._stream = "", [], TextStream()
        if self._is_chat:
            self.read(conversation.turns[-1].opening)

    def read(self, ids: Sequence[int]) -> str:
        """The text that became certain with the next ids; a stop id is the last one."""
        if ids and ids[-1] in self._renderer.stop_ids:
            ids = ids[:-1]
        self._stream, text = stream_text(self._renderer.tokenizer, self._stream, ids)
        text = self._without_thinking(text)
        if self._ended or not text:
            return ""
        if self._is_chat and text.isspace():
            self._held.append(text)
            return ""
        text = "".join((*self._held, text))
        certain = self._without_call(text) if self._calls is not None else text
        certain = self._without_stop(certain)
        self._begun = self._begun or bool(certain)
        self._held = [text[len(certain) :]]
        return certain

    def _without_thinking(self, text: str) -> str:
        if self._thinks:
            before, mark, after = (self._tail + text).partition(END_THINK)
            self._opens_thought = self._opens_thought or THINK in text_before(before, (CALL,))
            if not self._opens_thought and CALL in before:  # whose texts may hold the tag: only the whole reply tells
                self._ended = True
                return ""
            if not mark:
                self._tail = before[1 - max(len(CALL), len(END_THINK)) :]
                return ""
            self._thinks, self._strips_newlines, text = False, True, after
        if self._strips_newlines:
            text = text.lstrip("\n")
            self._strips_newlines = not text
        return text

    def _without_call(self, text: str) -> str:
        """The text before a call, or before what may become one."""
        marks = self._calls.marks
        if not self._calls.anywhere:
            start = text.lstrip()
            may_call = not self._begun and any(start.startswith(mark) or mark.startswith(start) for mark in marks)
            return "" if may_call else text
        before = text_before(text, marks)
        self._ended = len(before) < len(text)
        if not self._ended:
            before = before[: len(before) - longest_beginning(before, marks)]
        return before.rstrip()

    def _without_stop(self, text: str) -> str:
        before = text_before(text, self._stops)
        if len(before) < len(text):
            self._ended = True
            return before
        return text[: len(text) - longest_beginning(text, self._stops)]


def text_before(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop text."""
    return text[: min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=len(text))]


def longest_beginning(text: str, marks: Sequence[str]) -> int:
    """How many of the last characters of a text begin one of the marks."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
