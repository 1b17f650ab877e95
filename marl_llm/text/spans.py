"""A response in the tokens of two tokenizers, cut into spans of text at whose ends both have a token boundary.

What a student sampled stays in its ids. A teacher of another tokenizer reads the text that they stand for, encoded anew, and the two are
compared span by span: never token by token, and never where the text is not known (TRL's GOLD; chunks of arXiv 2503.20083 and 2606.09456).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os.path
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from marl_llm.text.token_bytes import token_bytes
from marl_llm.text.tokenizer import Tokenizer, runs_between


class Reading(NamedTuple):
    """How another tokenizer reads sampled tokens. A span's tokens have its number, from 1 to R; 0: the token is in no span."""

    ids: Int[np.ndarray, "T"]  # of the other tokenizer
    id_spans: Int[np.ndarray, "T"]  # of `ids`
    spans: Int[np.ndarray, "R"]  # of the sampled tokens


def align_spans(pieces: Sequence[bytes], tokenizer: Tokenizer) -> Reading:
    """Reads the text of ordinary tokens with another tokenizer, and cuts it wherever a token ends in both.

    Bytes that are no UTF-8, e.g. half a character, are left out of the text; a span that such a byte lies in counts for nothing. So does
    what stands behind the first byte that the other tokenizer does not keep (it has no such character, or normalises the text).

    Args:
      pieces: the bytes of each sampled token. tokenizer: the other one; its tokens have bytes (`token_bytes`).

    >>> from marl_llm.text import ByteTokenizer
    >>> reading = align_spans([b"ca", b"f", b"\\xc3", b"\\xa9", b"\\xf0"], ByteTokenizer())
    >>> reading.spans.tolist(), reading.id_spans.tolist()
    ([1, 2, 3, 4, 0], [1, 1, 2, 3, 4])
    """
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    valid = np.asarray([not "\udc80" <= sign <= "\udcff" for sign in text], bool)
    widths = [len(sign.encode("utf-8", "surrogateescape")) for sign in text]
    kept = np.append(0, np.cumsum(np.repeat(valid, widths)))  # [bytes + 1]: bytes of the text before each
    sizes = np.asarray([len(piece) for piece in pieces], int)
    begins, ends = kept[np.cumsum(sizes) - sizes], kept[np.cumsum(sizes)]
    text = "".join(itertools.compress(text, valid))
    try:
        ids = np.asarray(tokenizer.encode(text), np.int32)
    except ValueError:  # its normaliser makes special tokens of the text: nothing of it is compared
        ids = np.zeros(0, np.int32)
    vocabulary = token_bytes(tokenizer)
    id_ends, agreed = _ends_in(text.encode(), [vocabulary[i] for i in ids])
    cuts = np.intersect1d(ends, id_ends)
    cuts = cuts[(cuts > 0) & (cuts <= agreed)]
    spans, id_spans = _number(ends, cuts), _number(id_ends, cuts)
    unread = (ends - begins < sizes) | (sizes == 0)
    within = (begins < ends) | ~np.isin(ends, [0, *cuts])  # of a span, not between two
    spans[unread | np.isin(spans, spans[unread & within])] = 0
    return Reading(ids, id_spans, spans)


def _ends_in(text: bytes, pieces: Sequence[bytes]) -> tuple[Int[np.ndarray, "T"], int]:
    """Where each piece ends in a text, and up to where they spell it. A space that a metaspace tokenizer puts first is not counted."""
    joined = b"".join(pieces)
    agreed = {lead: len(os.path.commonprefix([joined[lead:], text])) for lead in range(1 + joined.startswith(b" "))}
    lead = max(agreed, key=agreed.get)
    return np.cumsum([len(piece) for piece in pieces], dtype=int) - lead, agreed[lead]


def _number(ends: Int[np.ndarray, "T"], cuts: Int[np.ndarray, "C"]) -> Int[np.ndarray, "T"]:
    """The number of the span that each token ends in, from 1; 0 behind the last cut."""
    number = np.searchsorted(cuts, ends)
    return np.where(number < len(cuts), number + 1, 0).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class SpanReader:
    """Reads a student's responses with a teacher's tokenizer.

    A special token is a span of its own where the teacher has one of the same spelling. The token that ends a response is the teacher's
    end, however the two are spelled. Any other special token is left out and in no span.

    Attributes:
      student, teacher: tokenizers whose tokens have bytes. stop_ids: where the student's responses end. end: the teacher's end; None: none.
    """

    student: Tokenizer
    teacher: Tokenizer
    stop_ids: tuple[int, ...]
    end: int | None

    @functools.cached_property
    def _special(self) -> dict[int, int | None]:
        """Of each special token of the student the teacher's id, or None."""
        shared = {i: self.teacher.special_ids.get(spelling) for spelling, i in self.student.special_ids.items()}
        return {**dict.fromkeys(self.stop_ids), **shared, self.student.pad_id: None}

    def read(self, response: Sequence[int]) -> Reading:
        """The teacher's reading of sampled ids."""
        pieces, place = token_bytes(self.student), 0
        ids, id_spans, spans = [], [], []
        for is_special, run in runs_between(response, self._special):
            if is_special:
                ends = place + 1 == len(response) and run[0] in self.stop_ids
                other = self.end if ends else self._special[run[0]]
                part = Reading([], [], [0]) if other is None else Reading([other], [1], [1])
            else:
                part = align_spans([pieces[i] for i in run], self.teacher)
            ids += list(part.ids)
            id_spans += [number and number + place for number in part.id_spans]
            spans += [number and number + place for number in part.spans]
            place += len(run)
        return Reading(*(np.asarray(column, np.int32) for column in (ids, id_spans, spans)))
