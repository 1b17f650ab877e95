"""Reading a response while it is sampled: text as soon as it is certain, without half characters.

A token may end inside a character (byte-level BPE cuts UTF-8 anywhere), so that decoding token by token would show U+FFFD where a
character is on its way. `stream_text` holds such bytes back until they are whole or turn out broken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import SupportsInt

from marl_llm.text.tokenizer import Tokenizer

LONGEST_PART = 3  # bytes of a character that can be there without the last one
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
    """
    held = (*stream.held, *(int(i) for i in ids))
    text = _text(tokenizer, stream.context, held)
    certain = text
    if not last:
        tail = len(text) - len(text.rstrip("\ufffd"))
        certain = text[: len(text) - min(tail, LONGEST_PART)]
    new = certain[stream.shown :]
    if certain == text and text:
        return TextStream(context=(stream.context + held)[-1:]), new
    shown = max(stream.shown, len(certain))
    if len(held) > WINDOW:  # an endless run of broken bytes: forget its head where that changes nothing
        for cut in range(len(held) - LONGEST_PART - 1, 0, -1):
            head, rest = _text(tokenizer, stream.context, held[:cut]), _text(tokenizer, held[cut - 1 : cut], held[cut:])
            if head + rest == text and len(head) <= shown:
                return TextStream(context=held[cut - 1 : cut], held=held[cut:], shown=shown - len(head)), new
    return TextStream(stream.context, held, shown), new


def _text(tokenizer: Tokenizer, context: tuple[int, ...], ids: tuple[int, ...]) -> str:
    """Text of `ids` where they stand right of `context`."""
    return tokenizer.decode((*context, *ids))[len(tokenizer.decode(context)) :]
