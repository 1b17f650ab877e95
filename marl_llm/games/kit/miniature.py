"""What small worlds for tiny models share: the shares of their splits, and how their models read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from marl_llm.text import ByteTokenizer, PieceTokenizer
from marl_llm.workflows import PlainText
from marl_llm.workflows.splits import check_split, split_of

SHARES = {"train": 0.65, "validation": 0.15, "test": 0.20}
Kind = TypeVar("Kind")


def kinds_of_split(split: str, kinds: Iterable[Kind], content: Callable[[Kind], str]) -> tuple[Kind, ...]:
    """The kinds of problems that belong to a split by their content (law 12). Raises `ValueError` for an unknown split."""
    check_split(split, SHARES)
    return tuple(kind for kind in kinds if split_of(content(kind), SHARES) == split)


def word_renderer(tokenizer: PieceTokenizer, end: str = ".", between: str = "\n") -> PlainText:
    """Words of a small world; the word `end` ends a response."""
    return PlainText(tokenizer, (int(tokenizer.ids_of([end])[0]),), between=between)


def byte_renderer() -> PlainText:
    """Any text, byte by byte, for tiny models in games whose texts are not known beforehand."""
    tokenizer = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
    return PlainText(tokenizer, tokenizer.stop_ids)
