"""Whether two tokenizers give every id the same meaning, so that one model can score the ids that another one sampled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from marl_llm.text.huggingface import HuggingFaceTokenizer
from marl_llm.text.token_bytes import token_bytes
from marl_llm.text.tokenizer import Tokenizer


def spellings(tokenizer: Tokenizer) -> Sequence[bytes]:
    """Per id the bytes of its token, empty for ids without one: `token_bytes`, or the token's name where its bytes are not known."""
    try:
        return token_bytes(tokenizer)
    except ValueError:
        if isinstance(tokenizer, HuggingFaceTokenizer):
            names = [tokenizer.token(i) or "" for i in range(tokenizer.vocab_size)]
        else:
            names = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
        return [name.encode("utf-8", "replace") for name in names]


def vocabulary_difference(tokenizer: Tokenizer, other: Tokenizer) -> str:
    """Where two vocabularies differ first, in words; empty where every id means the same.

    Tokens that pad are not compared, nor how a text is cut into tokens: ids that were sampled are never encoded again. Ids without a token,
    to which published sizes of one family round up differently, count as none.

    >>> from marl_llm.text import ByteTokenizer
    >>> vocabulary_difference(ByteTokenizer(("<end>",)), ByteTokenizer(("<stop>",)))
    "token 257 is '<end>' and '<stop>'"
    >>> vocabulary_difference(ByteTokenizer(("<end>",)), ByteTokenizer(("<end>", "<more>")))
    "token 258 is '' and '<more>'"
    """
    if tokenizer == other:
        return ""
    first, second = spellings(tokenizer), spellings(other)
    padding = {tokenizer.pad_id, other.pad_id}
    for i, (a, b) in enumerate(itertools.zip_longest(first, second, fillvalue=b"")):
        if a != b and i not in padding:
            return f"token {i} is {a.decode('utf-8', 'replace')!r} and {b.decode('utf-8', 'replace')!r}"
    return ""
