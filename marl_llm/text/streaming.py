"""Reading a response while it is sampled: text as soon as it is certain, without half characters.

A token may end inside a character (byte-level BPE cuts UTF-8 anywhere), so that decoding token by token would show U+FFFD where a
character is on its way. `stream_text` holds such bytes back until they are whole or turn out broken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import SupportsInt

from marl_llm.text.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character
LONGEST_PART = 3  # bytes of a character that can be there without the last one
MOST_PARTS = LONGEST_PART + 1  # tokens that one character can be cut into
WINDOW = 32  # tokens held at most, unless cutting them would change the text


@dataclasses.dataclass(frozen=True)
class TextStream:
    """What has been read so far. Start with `TextStream()`."""

    context: tuple[int, ...] = ()  # the tokens before `held`: some decoders look at the left neighbour (sentencepiece's spaces)
    held: tuple[int, ...] = ()  # tokens whose text is not certain to its end
    shown: int = 0  # characters of `held` that were given out


def stream_text(tokenizer: Tokenizer, stream: TextStream, ids: Iterable[SupportsInt], last: bool = False) -> tuple[TextStream, str]:
    """Takes the next `ids` and gives the text that has become certain.

    The texts of all calls, joined, are `tokenizer.decode` of all ids, if the final call has `last=True` (it gives out what is held).
    A byte-fallback decoder shows a whole run of bytes as broken once one of them is: a character that was given out before stays.
    """
    ids = tuple(int(i) for i in ids)
    texts = []
    for i in ids[:-1]:
        stream, text = _next_token(tokenizer, stream, (i,), last=False)
        texts.append(text)
    stream, text = _next_token(tokenizer, stream, ids[-1:], last)
    return stream, "".join((*texts, text))


def _next_token(tokenizer: Tokenizer, stream: TextStream, ids: tuple[int, ...], last: bool) -> tuple[TextStream, str]:
    """One token, or none: a decoder that reads runs of bytes as a whole shows a whole character behind which another begins as broken."""
    held = stream.held + ids
    text = _text(tokenizer, stream.context, held)
    certain = text
    if not last:
        tail = len(text) - len(text.rstrip(BROKEN))
        certain = text[: len(text) - min(tail, LONGEST_PART)]
    new = certain[stream.shown :]
    if certain == text and text:
        return TextStream(context=_whole_end(tokenizer, stream.context + held)), new
    if len(held) > WINDOW:  # an endless run of broken bytes: forget its head where that changes nothing
        for cut in range(len(held) - LONGEST_PART - 1, 0, -1):
            head, rest = _text(tokenizer, stream.context, held[:cut]), _text(tokenizer, held[cut - 1 : cut], held[cut:])
            if head + rest == text and len(head) <= len(certain):
                return TextStream(context=held[cut - 1 : cut], held=held[cut:], shown=len(certain) - len(head)), new
    return TextStream(stream.context, held, len(certain)), new


def _whole_end(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The fewest last tokens that are no part of a character: half of one would make a run of bytes that follows it broken too."""
    ends = (ids[-count:] for count in range(1, MOST_PARTS + 1))
    return next((end for end in ends if BROKEN not in tokenizer.decode(end)), ids[-1:])


def _text(tokenizer: Tokenizer, context: tuple[int, ...], ids: tuple[int, ...]) -> str:
    """Text of `ids` where they stand right of `context`."""
    before, whole = tokenizer.decode(context), tokenizer.decode((*context, *ids))
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)
