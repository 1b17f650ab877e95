"""Drafts for decode steps: what a response may go on with, copied from text that ended the same way, and whether to verify it.

A model that quotes needs few of its own steps: the tokens that it will draw stand in its prompt, in what it has said, or in earlier
responses to the same task. A draft is copied from behind the longest match of a response's last tokens (prompt lookup decoding, Saxena
2023; suffix decoding, Oliaro et al., arXiv 2411.04975), and one program verifies it (`model_runner.verify`; speculative decoding,
Leviathan et al., arXiv 2211.17192). Draws follow from identity, so a draft is never sampled from: each token is drawn as it would be
without, and a draft only says for which positions that can be done at once.

Whether it pays is measured. A draft is made before each chunk and compared with what the chunk then draws, which costs the device nothing.
So the acceptance rate of each request is known before its first draft is verified, and a program that verifies runs only where it promises
more tokens a second than a chunk.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int

from marl_llm.sampling.sequences import SequenceState

LEAST_MATCH, MOST_MATCH = 2, 32  # tokens at the end that must stand before a draft, and that are compared at most
FEW_COLUMNS = 4  # of the narrower of two programs: many rows gain by short drafts only
DECAY = 0.9  # of what is known of acceptance, per draft
DOUBT = 4.0  # comparisons that a request's own rate needs to count as much as that of all requests
GAIN = 1.05  # a step with drafts must promise so many times the tokens a second of a chunk
UNTRIED_GAIN = 1.5  # ... and so many times its tokens where its seconds are not known yet
RELAX = 0.995  # the seconds of a program that was not chosen, per choice: they were measured on a machine that others use too
MOST_TASKS, MOST_TOKENS = 512, 4096  # tasks whose responses are kept, and tokens of each
DRAFT_COUNTS = ("drafted_tokens", "accepted_tokens", "draft_steps", "saved_steps")  # of a scheduler's figures
NO_TOKEN = -1  # between two responses of a task


@dataclasses.dataclass(frozen=True)
class Draft:
    """Tokens that a request may draw next, and the length of the match that they stood behind."""

    tokens: Int[np.ndarray, "n"]
    match: int


@dataclasses.dataclass
class Acceptance:
    """How often the next token of a draft was the one that was drawn, later drafts counting more."""

    accepted: float = 0.0
    refused: float = 0.0

    def add(self, accepted: int, refused: int) -> None:
        """Counts a draft."""
        self.accepted = DECAY * self.accepted + accepted
        self.refused = DECAY * self.refused + refused


def expected_tokens(rate: float, length: int) -> float:
    """Tokens of a draft that are accepted on average, each with probability `rate` (arXiv 2211.17192, eq. 1, less the last)."""
    return float(length) if rate >= 1 else rate * (1 - rate**length) / (1 - rate)


def longest_match(text: Int[np.ndarray, "n"], end: Int[np.ndarray, "m"]) -> tuple[int, int]:
    """(where the longest match of the end of `end` in `text` ends, its length); something must stand behind it. Of equals the last.

    >>> longest_match(np.array([1, 2, 3, 9, 2, 3, 7]), np.array([1, 2, 3]))
    (3, 3)
    """
    places = np.flatnonzero(text[:-1] == end[-1]) + 1
    length = min(1, len(places))
    while 0 < length < min(len(end), MOST_MATCH):
        longer = places[places > length]
        longer = longer[text[longer - length - 1] == end[-length - 1]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return (int(places[-1]), length) if length else (0, 0)


def copy_draft(ids: Int[np.ndarray, "n"], others: Int[np.ndarray, "m"], most: int) -> Draft | None:
    """Up to `most` tokens from behind the longest match of the end of `ids`, in `ids` itself or in `others`.

    A match in `ids` is continued beyond its end by itself: a response that repeats three tokens is drafted as their repetition.
    """
    place, length = longest_match(ids, ids)
    other, longer = longest_match(others, ids) if len(others) > 1 else (0, 0)
    if max(length, longer) < LEAST_MATCH or most < 1:
        return None
    if length >= longer:
        return Draft(np.resize(ids[place:], most), length)
    tokens = others[other : other + most]
    ends = np.flatnonzero(tokens == NO_TOKEN)
    tokens = tokens[: ends[0]] if len(ends) else tokens
    return Draft(tokens, longer) if len(tokens) else None


class Drafter:
    """Makes the drafts of a scheduler's requests and decides when to verify them. Not thread-safe: the engine's thread owns it.

    Args:
      draft_tokens: of a draft, at most.

    Attributes:
      columns: tokens of each row in the programs that verify, the narrower first.
    """

    def __init__(self, draft_tokens: int):
        self.draft_tokens = draft_tokens
        self.columns = tuple(sorted({min(FEW_COLUMNS, draft_tokens + 1), draft_tokens + 1}))
        self._seconds: dict[tuple[int, int], float] = {}  # (rows, columns) of a program -> of one step
        self._of_match: dict[int, Acceptance] = collections.defaultdict(lambda: Acceptance(1.0, 9.0))  # by the match's length, in bits
        self._of_request: weakref.WeakKeyDictionary[SequenceState, Acceptance] = weakref.WeakKeyDictionary()
        self._said: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()  # by task

    def drafts(self, running: Sequence[SequenceState]) -> dict[SequenceState, Draft]:
        """A draft for each request that has one."""
        drafts = {}
        for sequence in running:
            most = min(self.draft_tokens, sequence.request.max_tokens - sequence.drawn - 1)  # one more is drawn in any case
            draft = copy_draft(sequence.ids[: sequence.size], self._said_of(sequence), most)
            if draft is not None:
                drafts[sequence] = draft
        return drafts

    def rate(self, sequence: SequenceState, draft: Draft) -> float:
        """The probability that the next token of a draft is accepted, from the request's own drafts and from all with such a match."""
        everyone = self._of_match[draft.match.bit_length()]
        own = self._of_request.get(sequence, Acceptance())
        usual = everyone.accepted / (everyone.accepted + everyone.refused)
        return (own.accepted + DOUBT * usual) / (own.accepted + own.refused + DOUBT)

    def choose(self, rows: int, places: int, drafts: Mapping[SequenceState, Draft]) -> int:
        """How many columns the next step of `rows` requests in a program of so many `places` has: 1 for a chunk without drafts."""
        chunk = self._seconds.get((places, 1))
        if chunk is None or not drafts:
            return 1
        best, promise = 1, GAIN * rows / chunk
        for columns in self.columns:
            gained = sum(expected_tokens(self.rate(s, draft), min(len(draft.tokens), columns - 1)) for s, draft in drafts.items())
            seconds = self._seconds.get((places, columns), UNTRIED_GAIN / GAIN * chunk)
            if (rows + gained) / seconds > promise:
                best, promise = columns, (rows + gained) / seconds
        for columns in self.columns:
            if columns != best and (places, columns) in self._seconds:
                self._seconds[places, columns] = max(chunk, RELAX * self._seconds[places, columns])
        return best

    def observe(self, sequence: SequenceState, draft: Draft, drawn: Int[np.ndarray, "n"]) -> int:
        """Learns from what was drawn where a draft was made, verified or not. Returns how many of its tokens were drawn."""
        length = min(len(draft.tokens), len(drawn))
        same = draft.tokens[:length] == drawn[:length]
        accepted = length if same.all() else int(np.argmin(same))
        for known in (self._of_match[draft.match.bit_length()], self._of_request.setdefault(sequence, Acceptance())):
            known.add(accepted, accepted < length)
        return accepted

    def measure(self, places: int, columns: int, seconds: float) -> None:
        """Updates the mean seconds of a step; an outlier counts as little more than usual."""
        before = self._seconds.get((places, columns), seconds)
        self._seconds[places, columns] = 0.8 * before + 0.2 * min(seconds, 1.5 * before)

    def leave(self, sequence: SequenceState) -> None:
        """Keeps the response of an answered request: drafts for others of its task may copy from it."""
        response = sequence.ids[sequence.size - sequence.drawn : sequence.size]
        self._said[self._task(sequence)] = np.concatenate([self._said_of(sequence), response, [NO_TOKEN]])[-MOST_TOKENS:].astype(np.int32)
        self._said.move_to_end(self._task(sequence))
        while len(self._said) > MOST_TASKS:
            self._said.popitem(last=False)

    def _said_of(self, sequence: SequenceState) -> Int[np.ndarray, "n"]:
        return self._said.get(self._task(sequence), np.zeros(0, np.int32))

    @staticmethod
    def _task(sequence: SequenceState) -> int:
        """The task's number in an identity (step, task, ...); see `token_sampling.identity_key`."""
        seed = sequence.request.seed
        return seed[1] if len(seed) > 1 else NO_TOKEN
