"""Where a response ends: stop tokens, and stop strings matched on the bytes of tokens by an automaton over token ids.

A string can be cut into tokens in many ways, and can begin in the middle of one. So the strings' Aho-Corasick automaton over bytes is
run through every token's bytes once, for every state: the sampler then needs one table look-up per token, inside the compiled loop.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from marl_llm.text.token_bytes import token_bytes
from marl_llm.text.tokenizer import Tokenizer


class StopRule(NamedTuple):
    """State 0 is the start of every response; a response ends with the token that leads to a state where `ends` is True."""

    table: Int[np.ndarray, "states V"]
    ends: Bool[np.ndarray, "states"]


def _automaton(strings: tuple[bytes, ...]) -> tuple[np.ndarray, int]:
    """Aho-Corasick over bytes: `(next state [states, 256], the accepting state)`; accepting is final."""
    edges: list[dict[int, int]] = [{}]
    final: set[int] = set()
    for string in strings:
        at = 0
        for byte in string:
            if byte not in edges[at]:
                edges.append({})
                edges[at][byte] = len(edges) - 1
            at = edges[at][byte]
        final.add(at)
    go = np.zeros((len(edges), 256), np.int32)
    fail = [0] * len(edges)
    queue = []
    for byte, state in edges[0].items():
        go[0, byte] = state
        queue.append(state)
    for state in queue:  # breadth first: a state's failure link is shallower, so its row is complete
        if fail[state] in final:
            final.add(state)
        go[state] = go[fail[state]]
        for byte, child in edges[state].items():
            fail[child] = go[fail[state], byte]
            go[state, byte] = child
            queue.append(child)
    accept = len(edges)
    go = np.vstack([go, np.full((1, 256), accept, np.int32)])
    go[np.isin(go, list(final))] = accept
    return go, accept


@functools.lru_cache(maxsize=64)
def stop_rule(
    vocab_size: int, stop_ids: tuple[int, ...], stop_strings: tuple[str, ...] = (), tokenizer: Tokenizer | None = None
) -> StopRule:
    """The rule of a request. States: 0, the strings' prefixes, and one that ends.

    Raises `ValueError` on a stop id outside the vocabulary, an empty string, or strings without a tokenizer.
    """
    if bad := [i for i in stop_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"stop_ids {bad} are outside the vocabulary of {vocab_size}")
    if any(not s for s in stop_strings):
        raise ValueError("an empty stop string would end every response before it begins")
    if stop_strings and tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings} need a tokenizer, to know the bytes of tokens")
    go, accept = _automaton(tuple(s.encode("utf-8") for s in stop_strings))
    table = np.repeat(np.arange(accept + 1, dtype=np.int32)[:, None], vocab_size, axis=1)
    if stop_strings:
        pieces = token_bytes(tokenizer)[:vocab_size]
        longest = max(map(len, pieces))
        spelled = np.full((vocab_size, longest), -1, np.int16)
        for i, piece in enumerate(pieces):
            spelled[i, : len(piece)] = np.frombuffer(piece, np.uint8)
        for column in spelled.T:  # all tokens and states at once, byte by byte
            real = column >= 0
            table[:, real] = go[table[:, real], column[real]]
    table[:, list(stop_ids)] = accept
    return StopRule(table, np.arange(accept + 1) == accept)
