"""Tokenizers behind one small protocol: bytes, and sentencepiece with one piece per fact.

A tokenizer turns text into ids and back. Everything that is trained stays in ids (law 1): text is made for people, from ids,
and is never encoded again. `PieceTokenizer` wraps a real sentencepiece model in which every fact of a game's text protocol
("a wall one up and two right") is one user-defined piece, so that a tiny model reads a fact as one token; any other text
encodes as `<unk>`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsInt, runtime_checkable

import numpy as np
import sentencepiece

SPACE = "\u2581"  # sentencepiece writes a word's leading space as this sign


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer offers. Ids are ints in `[0, vocab_size)`; `pad_id` never occurs inside a text."""

    vocab_size: int
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Text to ids."""

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Ids to text; padding is left out."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes shifted by one: id 0 is padding, id `b + 1` is byte `b`. Lossless on any text."""

    vocab_size: int = 257
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`, each plus one."""
        return [b + 1 for b in text.encode("utf-8")]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Inverse of `encode`; bytes that are no UTF-8 become U+FFFD. Raises `ValueError` on an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"ids {bad[:5]} are outside the byte vocabulary of {self.vocab_size}")
        return bytes(i - 1 for i in ids if i != self.pad_id).decode("utf-8", errors="replace")


class PieceTokenizer:
    """A sentencepiece model; `ids_of` looks pieces up by name. Made by `train_pieces` or `load`."""

    def __init__(self, model_proto: bytes):
        """Wraps a serialised sentencepiece model. Raises `ValueError` when the bytes are no such model."""
        self.model_proto = model_proto
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model_proto)
        except RuntimeError as error:
            raise ValueError(f"these {len(model_proto)} bytes are not a sentencepiece model: {error}") from error
        self.vocab_size = self._model.get_piece_size()
        self.pad_id = self._model.pad_id()
        if self.pad_id < 0:
            raise ValueError("the sentencepiece model has no padding piece; train it with pad_id=0")

    def __eq__(self, other) -> bool:
        """Equal when the sentencepiece models are, byte by byte."""
        return isinstance(other, PieceTokenizer) and self.model_proto == other.model_proto

    def __hash__(self) -> int:
        return hash(self.model_proto)

    def encode(self, text: str) -> list[int]:
        """Text to ids; facts are separated by one space."""
        return self._model.encode(text)

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Ids to text, padding left out."""
        return self._model.decode([int(i) for i in ids if int(i) != self.pad_id])

    def ids_of(self, pieces: Sequence[str]) -> np.ndarray:
        """Ids of named pieces, `[len(pieces)]` int32. Raises `KeyError` naming the pieces that the model lacks."""
        ids = [self._model.piece_to_id(SPACE + p) for p in pieces]
        missing = [p for p, i in zip(pieces, ids, strict=True) if i == self._model.unk_id()]
        if missing:
            raise KeyError(f"the tokenizer has no piece for {missing[:8]}")
        return np.asarray(ids, np.int32)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the sentencepiece model file."""
        pathlib.Path(path).write_bytes(self.model_proto)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> PieceTokenizer:
        """Reads a sentencepiece model file. Raises `FileNotFoundError` or `ValueError`."""
        return cls(pathlib.Path(path).read_bytes())


@functools.lru_cache(maxsize=64)
def train_pieces(pieces: tuple[str, ...]) -> PieceTokenizer:
    """Trains a sentencepiece model in which each of `pieces` is one token and nothing else is. Deterministic.

    Id 0 is padding, 1 is `<unk>`, then the pieces in order. Raises `ValueError` on a doubled, empty or spaced piece.
    """
    if len(set(pieces)) != len(pieces):
        raise ValueError(f"pieces occur twice: {sorted({p for p in pieces if pieces.count(p) > 1})[:8]}")
    bad = [p for p in pieces if not p or any(c.isspace() for c in p)]
    if bad:
        raise ValueError(f"pieces must be non-empty and without white space: {bad[:8]}")
    model = io.BytesIO()
    alphabet = "?"  # sentencepiece wants something to learn from
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([alphabet]),
        model_writer=model,
        model_type="char",
        vocab_size=len(pieces) + 2 + 128,
        hard_vocab_limit=False,
        user_defined_symbols=[SPACE + p for p in pieces],
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    return PieceTokenizer(model.getvalue())
