"""Tokenizers behind one small protocol: bytes, sentencepiece, and (in `huggingface.py`) Hugging Face's `tokenizer.json`.

A tokenizer turns text into ids and back. Everything that is trained stays in ids (law 1): text is made for people, from ids,
and is never encoded again. Tokens that steer a conversation (`<|im_start|>`, `<think>`, ...) are *special*: they have ids, and no text
that anybody writes ever becomes one of them, because `encode` reads their spelling as plain text. Only `chat.py` writes them, by id.

`PieceTokenizer` wraps a sentencepiece model. `train_pieces` makes one in which every fact of a game's text protocol ("a wall one up
and two right") is one user-defined piece, so that a tiny model reads a fact as one token; any other text encodes as `<unk>`.
`train_sentencepiece` learns an ordinary lossless one from text.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsInt, runtime_checkable

import numpy as np
import sentencepiece

SPACE = "\u2581"  # sentencepiece writes a word's leading space as this sign


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer offers. Ids are ints in `[0, vocab_size)`.

    `encode` never gives `pad_id` nor any of `special_ids`, whatever the text. A policy may sample any id, so `decode` takes all of them.
    `special_ids` maps the spelling of each special token to its id; `eos_id` ends a text (`None`: this vocabulary has no such token);
    sampling stops at any of `stop_ids`, which hold `eos_id` if there is one.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def special_ids(self) -> Mapping[str, int]: ...

    def encode(self, text: str) -> list[int]:
        """Text to ids, special spellings as plain text. Raises `ValueError` on a lone surrogate."""

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Ids to text: padding is left out, special tokens are spelled. Raises `ValueError` on an id outside the vocabulary."""


def checked_ids(ids: Iterable[SupportsInt], vocab_size: int, vocabulary: str) -> list[int]:
    """`ids` as ints. Raises `ValueError` naming those outside `[0, vocab_size)` of the vocabulary called `vocabulary`."""
    ids = list(map(int, ids))
    bad = [i for i in ids if not 0 <= i < vocab_size]
    if bad:
        raise ValueError(f"ids {bad[:5]} are outside the {vocabulary} vocabulary of {vocab_size}")
    return ids


def checked_text(text: str) -> str:
    """`text`, if UTF-8 can hold it. Raises `ValueError` with the place of a lone surrogate (half a character, as JSON's `\\ud800`)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 10) : error.start + 10]
        message = f"character {error.start} is a lone surrogate, near {near!r}: no UTF-8 text; replace it before encoding"
        raise ValueError(message) from error
    return text


def runs_between(ids: Sequence[int], marks: Iterable[int]) -> Iterator[tuple[bool, list[int]]]:
    """Cuts `ids` at the ids in `marks`: pairs of (is it a mark, the one mark or the run between two), in order."""
    for is_mark, run in itertools.groupby(ids, frozenset(marks).__contains__):
        if is_mark:
            yield from ((True, [mark]) for mark in run)
        else:
            yield False, list(run)


def pieces_of(tokenizer: Tokenizer, ids: Iterable[SupportsInt]) -> dict[str, str]:
    """Id, as text, -> the text of that token alone, of each of these ids: for people. Padding is "" and half a character U+FFFD."""
    return {str(i): tokenizer.decode([i]) for i in sorted({int(i) for i in ids})}


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes shifted by one: id 0 is padding, id `b + 1` is byte `b`, then `specials` in order. Lossless on any text.

    `stops` are the specials that end a response, the first of them the end of text. Raises `ValueError` on a doubled or empty special, or a
    stop that is none.
    """

    specials: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    pad_id: int = 0

    def __post_init__(self):
        if len(set(self.specials)) != len(self.specials) or "" in self.specials:
            raise ValueError(f"special tokens must be distinct and not empty: {self.specials}")
        if unknown := [s for s in self.stops if s not in self.specials]:
            raise ValueError(f"stops {unknown} are not among the specials {self.specials}")
        if self.pad_id != 0:
            raise ValueError(f"pad_id={self.pad_id}: a byte tokenizer pads with 0, the other ids are bytes and specials")

    @property
    def vocab_size(self) -> int:
        """256 bytes, padding, and the specials."""
        return 257 + len(self.specials)

    @functools.cached_property
    def special_ids(self) -> Mapping[str, int]:
        """Spelling to id, from 257 on."""
        return {s: 257 + i for i, s in enumerate(self.specials)}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of `stops`."""
        return tuple(self.special_ids[s] for s in self.stops)

    @property
    def eos_id(self) -> int | None:
        """Id of the first of `stops`."""
        return self.stop_ids[0] if self.stops else None

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`, each plus one."""
        return [b + 1 for b in checked_text(text).encode("utf-8")]

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Inverse of `encode`, specials spelled; broken UTF-8 becomes U+FFFD. Raises `ValueError` on an id outside the vocabulary."""
        ids = [i for i in checked_ids(ids, self.vocab_size, "byte") if i != self.pad_id]
        text = [
            self.specials[run[0] - 257] if mark else bytes(i - 1 for i in run).decode("utf-8", errors="replace")
            for mark, run in runs_between(ids, self.special_ids.values())
        ]
        return "".join(text)


class PieceTokenizer:
    """A sentencepiece model; `ids_of` looks pieces up by name. Made by `train_pieces`, `train_sentencepiece` or `load`.

    Special tokens are the model's control pieces (`<s>`, `</s>` and its `control_symbols`); user-defined pieces are ordinary text.
    """

    def __init__(self, model_proto: bytes, pad: str | None = None, stops: tuple[str, ...] = ()):
        """Wraps a serialised sentencepiece model.

        Args:
          model_proto: the bytes of a `.model` file.
          pad: the piece that pads, for a model trained without a padding piece (Llama 2's: `"<unk>"`, as bytes spell what it lacks).
          stops: control pieces that end a response besides the model's own end of text, for instance `("<|im_end|>",)`.

        Raises `ValueError` when the bytes are no such model, it has no padding piece and `pad` names none, text can become the piece that
        pads, or a stop is no control piece.
        """
        self.model_proto = model_proto
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model_proto)
        except RuntimeError as error:
            raise ValueError(f"these {len(model_proto)} bytes are not a sentencepiece model: {error}") from error
        self.pad, self.stops = pad, tuple(stops)
        self.vocab_size = self._model.get_piece_size()
        self.unk_id = self._model.unk_id()
        self.pad_id = self._model.pad_id() if pad is None else self._id(pad)
        if self.pad_id < 0:
            raise ValueError("the sentencepiece model has no padding piece; train it with pad_id=0, or name one that pads: pad='<s>'")
        if self._is_written(self.pad_id):
            piece = self._model.id_to_piece(self.pad_id)
            raise ValueError(f"pad={piece!r}: text becomes this piece and would be lost as padding; name a control piece: pad='<s>'")
        self.special_ids: Mapping[str, int] = {
            self._model.id_to_piece(i): i for i in range(self.vocab_size) if self._model.is_control(i) and i != self.pad_id
        }
        if unknown := [s for s in stops if s not in self.special_ids]:
            raise ValueError(f"stops {unknown} are no control pieces of the sentencepiece model; it has {sorted(self.special_ids)}")
        ends = [self.special_ids[s] for s in stops] + [i for i in [self._model.eos_id()] if i >= 0]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self.eos_id: int | None = self.stop_ids[0] if self.stop_ids else None

    def _is_written(self, i: int) -> bool:
        """Whether text can become this piece; the unknown one does where no bytes stand in for unseen characters."""
        if i == self.unk_id:
            return not any(map(self._model.is_byte, range(self.vocab_size)))
        return not (self._model.is_control(i) or self._model.is_unused(i))

    def _id(self, piece: str) -> int:
        piece_id = self._model.piece_to_id(piece)
        if self._model.id_to_piece(piece_id) != piece:
            raise ValueError(f"the sentencepiece model has no piece {piece!r}")
        return piece_id

    def __eq__(self, other) -> bool:
        """Equal when the sentencepiece models are, byte by byte, and padding and stops too."""
        return isinstance(other, PieceTokenizer) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        return self.model_proto, self.pad, self.stops

    def encode(self, text: str) -> list[int]:
        """Text to ids; in a model of `train_pieces`, facts are separated by one space. Raises `ValueError` on a lone surrogate."""
        return self._model.encode(checked_text(text))

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Ids to text, padding left out, control pieces spelled. Raises `ValueError` on an id outside the vocabulary."""
        ids = [i for i in checked_ids(ids, self.vocab_size, "sentencepiece") if i != self.pad_id]
        runs = runs_between(ids, self.special_ids.values())
        return "".join(self._model.id_to_piece(run[0]) if mark else self._model.decode(run) for mark, run in runs)

    def piece(self, i: int) -> str:
        """The piece of an id, with its leading space as the model writes it."""
        return self._model.id_to_piece(int(i))

    def ids_of(self, pieces: Sequence[str]) -> np.ndarray:
        """Ids of named pieces, `[len(pieces)]` int32. Raises `KeyError` naming the pieces that the model lacks."""
        ids = [self._model.piece_to_id(SPACE + p) for p in pieces]
        missing = [p for p, i in zip(pieces, ids, strict=True) if i == self.unk_id]
        if missing:
            raise KeyError(f"the tokenizer has no piece for {missing[:8]}")
        return np.asarray(ids, np.int32)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the sentencepiece model file."""
        pathlib.Path(path).write_bytes(self.model_proto)

    @classmethod
    def load(cls, path: str | pathlib.Path, pad: str | None = None, stops: tuple[str, ...] = ()) -> PieceTokenizer:
        """Reads a sentencepiece model file; `pad` and `stops` as in the constructor. Raises `FileNotFoundError` or `ValueError`."""
        return cls(pathlib.Path(path).read_bytes(), pad, stops)


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
    alphabet = next(chr(code) for code in range(ord("?"), 0x3000) if chr(code) not in pieces)  # sentencepiece wants something to learn from
    symbols = [SPACE + p for p in pieces]
    size = len(pieces) + 2 + 128
    return PieceTokenizer(_trained([alphabet], model_type="char", vocab_size=size, user_defined_symbols=symbols, add_dummy_prefix=True))


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, specials: tuple[str, ...] = (), stops: tuple[str, ...] = ()
) -> PieceTokenizer:
    """Learns a byte-pair sentencepiece model, lossless on text without U+2581: bytes stand in for unseen characters. Deterministic.

    Id 0 is padding, 1 `<unk>` (never needed), then `specials` as control pieces, then bytes and learned pieces, `vocab_size` at most. White
    space and case are kept as they are, and nothing is normalised. Raises `ValueError` on `texts` without a character, or a size too small
    for bytes, specials and alphabet.
    """
    lines = [line for text in texts for line in checked_text(text).splitlines() if line.strip()]
    if not lines:
        raise ValueError("there is no text to learn a sentencepiece model from")
    try:
        model = _trained(
            lines,
            model_type="bpe",
            vocab_size=vocab_size,
            control_symbols=list(specials),
            byte_fallback=True,
            character_coverage=1.0,
            add_dummy_prefix=False,
            max_sentence_length=1 << 20,
            num_threads=1,
        )
    except RuntimeError as error:
        raise ValueError(f"no sentencepiece model of {vocab_size} pieces with {len(specials)} specials: {error}") from error
    return PieceTokenizer(model, stops=stops)


def _trained(lines: Iterable[str], **options: Any) -> bytes:
    """A sentencepiece model of these lines: 0 pads, 1 is `<unk>`, no other ids are set apart, and no text is normalised."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()
