"""What the debates of coding and of maths share (Stronger-MAS, Fig. 2): two roles speak at once and read what both said before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.workflows import compute
from marl_llm.workflows.graph import Node

QUOTED_CHARACTERS = 500  # of a text in the history
Entries = Sequence[Mapping[str, Any]]  # the history: what happened in each turn


def quoted(text: Any, most: int = QUOTED_CHARACTERS) -> str:
    """A text on one line in quotes, cut; nothing in it can end the quotes, so that it cannot pass for another part of a prompt."""
    text = json.dumps(text if isinstance(text, str) else str(text), ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more)"


def fenced_code(code: str) -> str:
    """A program of the history as a prompt shows it."""
    return f"```python\n{code.rstrip()}\n```" if code else "No program could be read."


def show_instructions(instructions: Mapping[str, str], history_text: Callable[[Entries], str]) -> dict[str, Callable[[Entries], str]]:
    """For `Role.show`: what a role is asked "first", without a history, and "later", where the history takes the place of {history}."""

    def show(entries: Entries) -> str:
        return instructions["later"].replace("{history}", history_text(entries)) if entries else instructions["first"]

    return {"history": show}


def note_turn(fields: Sequence[str], most: int) -> Node:
    """The end of a turn: an entry of the history with these fields, those of a mapping one by one. `most` entries are kept; 0: all."""

    def note(history: Entries, turn_: int, *values: Any) -> dict[str, Any]:
        entry = {"turn": turn_ + 1}
        for field, value in zip(fields, values):
            entry |= value if isinstance(value, Mapping) else {field: value}
        return {"history": (*history, entry)[-most:], "turn_": turn_ + 1}

    return compute(note, ("history", "turn_"), reads=("history", "turn_", *fields))
