"""What the debates of coding and of maths share (Stronger-MAS, Fig. 2): two roles speak at once and read what both said before."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.workflows import Role

QUOTED_CHARACTERS = 500  # of a text in the history
Entries = Sequence[Mapping[str, Any]]  # the history: what happened in each turn


def quoted(text: Any, most: int = QUOTED_CHARACTERS) -> str:
    """A text on one line in quotes, cut; nothing in it can end the quotes, so that it cannot pass for another part of a prompt."""
    text = json.dumps(text if isinstance(text, str) else str(text), ensure_ascii=False)
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more)"


def fenced_code(code: str) -> str:
    """A program of the history as a prompt shows it."""
    return f"```python\n{code.rstrip()}\n```" if code else "No program could be read."


def instructions(first: str, later: str, history_text: Callable[[Entries], str]) -> Callable[[Entries], str]:
    """For `Role.show`: what a role is asked to do, before there is a history and with one."""
    return lambda entries: later.replace("{history}", history_text(entries)) if entries else first


def alone(role: Role, first: str, later: str, history_text: Callable[[Entries], str]) -> Role:
    """A role of a debate as the single agent, which reads its own last answer."""
    return dataclasses.replace(role, show={"history": instructions(first, later, history_text)})


def kept(history: Sequence[Any], entry: Mapping[str, Any], most: int) -> tuple[Any, ...]:
    """The history with one more entry: the latest `most`, or all where that is 0."""
    return (*history, entry)[-most:]
