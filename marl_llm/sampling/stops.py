"""Where a response ends: stop tokens, and stop strings matched on the bytes of tokens by an automaton over classes of tokens.

A string can be cut into tokens in many ways, and can begin in the middle of one. So the strings' Aho-Corasick automaton over bytes is
run through tokens' bytes once, for every state: the sampler then needs two table look-ups per token, inside the compiled loop. Most tokens
do the same in every state, as they neither lie within a string nor end one: tokens that do the same are one class, one column of the table.
"""

from __future__ import annotations

import collections
import threading
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from marl_llm.text.token_bytes import token_bytes
from marl_llm.text.tokenizer import Tokenizer

MOST_BYTES = 1023  # of all stop strings of a request together
MOST_CLASSES = 8192
CACHED = 32 << 20  # bytes of rules that are kept


class StopRule(NamedTuple):
    """State 0 is the start of every response; a response ends with the token that leads to a state where `ends` is True."""

    table: Int[np.ndarray, "states classes"]
    ends: Bool[np.ndarray, "states"]
    classes: Int[np.ndarray, "V"]  # of each token

    def next(self, state, token):
        """The state behind a token: integers, or arrays of NumPy or JAX."""
        return self.table[state, self.classes[token]]


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
    queue: list[int] = []
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


class _Cache:
    """The rules that were asked for last, `CACHED` bytes of them. Equal requests share one rule."""

    def __init__(self):
        self._lock, self._rules, self._bytes = threading.Lock(), collections.OrderedDict(), 0

    def get(self, key: tuple) -> StopRule | None:
        """The rule, if it is kept."""
        with self._lock:
            if key in self._rules:
                self._rules.move_to_end(key)
            return self._rules.get(key)

    def add(self, key: tuple, rule: StopRule) -> StopRule:
        """Keeps a rule; another thread's that came first is given instead."""
        with self._lock:
            if key not in self._rules:
                self._rules[key] = rule
                self._bytes += sum(part.nbytes for part in rule)
            while self._bytes > CACHED and len(self._rules) > 1:
                self._bytes -= sum(part.nbytes for part in self._rules.popitem(last=False)[1])
            return self._rules.get(key, rule)


_CACHE = _Cache()


def stop_rule(
    vocab_size: int, stop_ids: tuple[int, ...], stop_strings: tuple[str, ...] = (), tokenizer: Tokenizer | None = None
) -> StopRule:
    """The rule of a request. States: 0, the strings' prefixes, and one that ends.

    Raises `ValueError` on a stop id outside the vocabulary, an empty string, strings without a tokenizer, and strings of more than
    `MOST_BYTES` together.
    """
    if bad := [i for i in stop_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"stop_ids {bad[:8]} are outside the vocabulary of {vocab_size}")
    if any(not s for s in stop_strings):
        raise ValueError("an empty stop string would end every response before it begins")
    if stop_strings and tokenizer is None:
        raise ValueError(f"stop_strings={stop_strings[:4]} need a tokenizer, to know the bytes of tokens")
    if (characters := sum(map(len, stop_strings))) > MOST_BYTES:  # before anything is made of them
        raise ValueError(f"the stop strings have {characters:,} characters together; at most {MOST_BYTES:,} bytes are served")
    strings = tuple(dict.fromkeys(s.encode("utf-8", "surrogatepass") for s in stop_strings))
    if sum(map(len, strings)) > MOST_BYTES:
        raise ValueError(f"the stop strings have {sum(map(len, strings)):,} bytes together; at most {MOST_BYTES:,} are served")
    key = vocab_size, tuple(sorted(set(stop_ids))), strings, tokenizer if strings else None
    return _CACHE.get(key) or _CACHE.add(key, _make_rule(*key))


def _make_rule(vocab_size: int, stop_ids: tuple[int, ...], strings: tuple[bytes, ...], tokenizer: Tokenizer | None) -> StopRule:
    go, accept = _automaton(strings)
    pieces = token_bytes(tokenizer)[:vocab_size] if strings else ()
    kinds: dict[object, int] = {b"": 0}  # what tells one class of tokens from another -> its number
    members: list[bytes] = [b""]  # bytes of one token of each class; none: every state stays
    classes = np.zeros(vocab_size, np.int32)
    joined = b"".join(string + b"\xff" for string in strings)  # no text has the byte 0xff
    tails = {string[start:] for string in strings for start in range(len(string))}
    first = {tail[0] for tail in tails}
    for i, piece in enumerate(pieces):
        if not piece:
            continue
        # A match that began before the token goes on through it (it lies within a string), ends in it (it begins with the end of one),
        # or falls back to one that begins in the token: then only the state behind the token alone counts.
        if piece in joined:
            kind: object = piece
        else:
            ended = tuple(n for n in range(1, len(piece)) if piece[:n] in tails) if piece[0] in first else ()
            kind = piece[: ended[-1]] if ended else b"", _state_behind(go, accept, piece)
        if kind not in kinds:
            kinds[kind] = len(members)
            members.append(piece)
            if len(members) >= MOST_CLASSES:
                raise ValueError(f"the stop strings tell more than {MOST_CLASSES:,} kinds of tokens apart; use shorter ones")
        classes[i] = kinds[kind]
    table = np.repeat(np.arange(accept + 1, dtype=np.int32)[:, None], len(members) + 1, axis=1)
    for number, piece in enumerate(members):
        for byte in piece:
            table[:, number] = go[table[:, number], byte]
    table[:, -1] = accept
    classes[list(stop_ids)] = len(members)
    return StopRule(table, np.arange(accept + 1) == accept, classes)


def _state_behind(go: np.ndarray, accept: int, piece: bytes) -> int:
    """The state behind a token that begins a response."""
    state = 0
    for byte in piece:
        state = go[state, byte]
    return int(state)
