"""Responses that are lists of words ended by a stop word, `R D R ;`, and their kin in ordinary text: what several games share.

A game's roles answer with a list whose every word means something (a move, a fill). The word's meaning is a number; -1 marks the places
past the end. In ordinary text the answer stands behind `####` on the last line that begins with it (Stronger-MAS, Appendices C and D).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from marl_llm.games.protocol import Prompt
from marl_llm.workflows import FormatError, after_hashes

_after_hashes = after_hashes("answer")
STOP = ";"
# What became of a list: none yet, all of it was done, something in it was illegal, it solved the task, it could not be read.
STATUS = ("-", "o", "x", "g", "f")
NONE, DONE, ILLEGAL, SOLVED, MALFORMED = range(5)
LONGEST = 10_000  # characters of a text that are read, from the end: an answer is short


def left_padded(parts: list, pad_id: int) -> Prompt:
    """The prompt of ids in parts, each `[n]`, in which padding may stand anywhere: padding moves to the left, the rest keeps its order."""
    ids = jnp.concatenate([jnp.atleast_1d(jnp.asarray(part)) for part in parts]).astype(jnp.int32)
    real = ids != pad_id
    order = jnp.argsort(real, stable=True)
    return Prompt(ids[order], real[order])


def read_list(tokens: Int[Array, "R"], meaning: np.ndarray, longest: int, stop_id: int) -> tuple[Int[Array, "M"], Bool[Array, ""]]:
    """What the words mean `[longest]`, and whether the response parses.

    Args:
      tokens: padded behind its end. meaning: `[V]`, what each word means, -1 of a word that may not stand in the list.
    A response parses if it has known words alone, at most `longest`, up to the stop word. One that does not means nothing: all -1.
    """
    return accepted(tokens, jnp.asarray(meaning, jnp.int32)[tokens[:longest]], stop_id)


def accepted(tokens: Int[Array, "R"], means: Int[Array, "M"], stop_id: int) -> tuple[Int[Array, "M"], Bool[Array, ""]]:
    """As `read_list`, of a response whose first words have these meanings."""
    stop = tokens == stop_id
    ended = jnp.any(stop)
    listed = jnp.arange(means.shape[0]) < jnp.where(ended, jnp.argmax(stop), 0)
    good = ended & jnp.all((means >= 0) | ~listed)
    return jnp.where(listed & good, means, -1), good


def write_list(means: Int[Array, "M"], words: np.ndarray, stop_id: int, pad_id: int) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
    """The response that says a list, `[M + 1]`, and where it is real. words: id of each meaning."""
    count = jnp.sum(means >= 0)
    place = jnp.arange(means.shape[0] + 1)
    ids = jnp.append(jnp.asarray(words, jnp.int32)[jnp.maximum(means, 0)], stop_id)
    ids = jnp.where(place < count, ids, jnp.where(place == count, stop_id, pad_id))
    return ids.astype(jnp.int32), place <= count


def unreadable(longest: int, pad_id: int) -> tuple[int, ...]:
    """A response that does not parse, in place of a text that says nothing."""
    return (pad_id,) * (longest + 1)


def answer_in(text: str) -> str | None:
    """What stands behind `####` on the last line that begins with it; None if there is no such line, or nothing behind it."""
    try:
        return _after_hashes(text[-LONGEST:])["answer"]
    except FormatError:
        return None
