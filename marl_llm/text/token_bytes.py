"""Which bytes of text each token stands for: what stop strings are matched on, however a text is cut into tokens."""

from __future__ import annotations

import functools
import json

from marl_llm.text.huggingface import HuggingFaceTokenizer
from marl_llm.text.tokenizer import ByteTokenizer, PieceTokenizer, Tokenizer

SPACE = "\u2581"


@functools.lru_cache(maxsize=1)
def _byte_level() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode("utf-8")


def _decoders(tokenizer_json: dict) -> set[str]:
    decoder = tokenizer_json.get("decoder") or {}
    return {d.get("type", "") for d in decoder.get("decoders", [decoder])}


@functools.lru_cache(maxsize=8)
def token_bytes(tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Per id the bytes it adds to a text; empty for padding and ids without a token. A special token adds its spelling.

    A sentencepiece or metaspace token keeps the space in front of it, also where a decoder drops the one that begins a text.
    Raises `ValueError` for a tokenizer whose tokens have no bytes of their own (WordPiece).
    """
    known = {i: spelling.encode("utf-8") for spelling, i in tokenizer.special_ids.items()} | {tokenizer.pad_id: b""}
    if isinstance(tokenizer, ByteTokenizer):
        return tuple(known[i] if i in known else bytes([i - 1]) for i in range(tokenizer.vocab_size))
    if isinstance(tokenizer, PieceTokenizer):
        return tuple(known[i] if i in known else _piece(tokenizer.piece(i)) for i in range(tokenizer.vocab_size))
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ValueError(f"stop strings need a tokenizer whose tokens are bytes; {type(tokenizer).__name__} is not known here")
    kinds = _decoders(json.loads(tokenizer.files["tokenizer.json"]))
    if "ByteLevel" in kinds:
        table = _byte_level()

        def of(token):
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode("utf-8")
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        of = _piece
    else:
        raise ValueError(f"stop strings need a byte-level or sentencepiece-like tokenizer; this one's decoder is {sorted(kinds)}")
    tokens = ((i, tokenizer.token(i)) for i in range(tokenizer.vocab_size))
    return tuple(known[i] if i in known else b"" if token is None else of(token) for i, token in tokens)
