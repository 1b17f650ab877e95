"""What small worlds for tiny models share: the shares of their splits, and how their models read and write."""

from __future__ import annotations

from marl_llm.text import ByteTokenizer, PieceTokenizer
from marl_llm.workflows import PlainText

SHARES = {"train": 0.65, "validation": 0.15, "test": 0.20}


def word_speech(tokenizer: PieceTokenizer, end: str = ".", between: str = "\n") -> PlainText:
    """Words of a small world; the word `end` ends a response."""
    return PlainText(tokenizer, (int(tokenizer.ids_of([end])[0]),), between=between)


def byte_speech() -> PlainText:
    """Any text, byte by byte, for tiny models in games whose texts are not known beforehand."""
    tokenizer = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
    return PlainText(tokenizer, tokenizer.stop_ids)
