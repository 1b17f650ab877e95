"""Packing of samples of uneven length into rows of a fixed token budget, on the host.

Samples with the very same prompt ids form a family: one copy of the prompt, and behind it their responses, each of which sees the prompt
and itself (sharing is a matter of computation only, so content decides, not identity). A sample that shares its prompt with none is a
family of one, a plain sequence. Families go into rows first-fit, largest first; one that is larger than a row is cut between responses,
with a copy of the prompt in each part. No sample is dropped, copied or cut (law 5). For a budget of 12 tokens:

    tokens      p p p a a b b b | q q c .      p, q: prompts   a, b, c: responses   .: padding
    segments    1 1 1 1 1 1 1 1   2 2 2 0
    branches    0 0 0 1 1 2 2 2   0 0 3 0
    positions   0 1 2 3 4 3 4 5   0 1 2 0
    predict     2 3 2 5 6 9                    who predicts a a b b b c
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from marl_llm.sampling.lane import bucket


class PackingError(ValueError):
    """A sample cannot be packed; the message names it and says why."""


@dataclasses.dataclass(frozen=True)
class TokenSample:
    """One response as the loss needs it: the ids that were sampled, behind the ids that they were sampled from (law 1).

    Raises `PackingError` when the response or the prompt is empty, or the log-probs are not one per response token.
    """

    prompt: Any  # [p] int, as are the response's ids; lists and arrays are kept as NumPy arrays
    response: Any  # [r] int
    log_probs: Any  # [r] float, of the distribution that was sampled from
    name: str = ""  # for messages

    def __post_init__(self):
        for field, dtype in (("prompt", np.int32), ("response", np.int32), ("log_probs", np.float32)):
            object.__setattr__(self, field, np.asarray(getattr(self, field), dtype).reshape(-1))
        who = f"sample {self.name!r}"
        if not self.response.size:
            raise PackingError(f"{who} has an empty response: there is nothing to score; leave it out, and count it")
        if not self.prompt.size:
            raise PackingError(f"{who} has an empty prompt: nothing predicts its first token; begin with a token of its own")
        if self.log_probs.size != self.response.size:
            raise PackingError(f"{who} has {self.log_probs.size} log-probs for {self.response.size} response tokens")

    @property
    def tokens(self) -> int:
        """Of prompt and response."""
        return self.prompt.size + self.response.size


class PackedRows(NamedTuple):
    """B rows of L tokens with Q response tokens and N samples at most, padded with zeros (`sample`: -1)."""

    tokens: Int[Array, "B L"]
    positions: Int[Array, "B L"]  # depth in the token's own sequence
    segments: Int[Array, "B L"]  # 1, 2, ...: which family of the row; 0: padding
    branches: Int[Array, "B L"]  # 1, 2, ...: which response of the row; 0: a prompt
    predict: Int[Array, "B Q"]  # index of the token whose hidden state predicts the response token
    targets: Int[Array, "B Q"]  # ids of response tokens, one response after the other
    log_probs: Float[Array, "B Q"]  # the sampler's
    sample: Int[Array, "B N"]  # index of the sample in the list that was packed
    first: Int[Array, "B N"]  # index of its first token along Q
    length: Int[Array, "B N"]  # response tokens


def families(samples: Sequence[TokenSample]) -> list[list[int]]:
    """Indices of the samples that have the same prompt ids, in the order of their first appearance."""
    out: dict[bytes, list[int]] = {}
    for i, s in enumerate(samples):
        out.setdefault(s.prompt.tobytes(), []).append(i)
    return list(out.values())


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose sizes add up to `capacity` at most: first-fit decreasing, ties in the order given."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = next((b for b, room in enumerate(free) if room >= sizes[i]), None)
        if at is None:
            at = len(bins)
            bins.append([])
            free.append(capacity)
        bins[at].append(i)
        free[at] -= sizes[i]
    return bins


def plan_rows(samples: Sequence[TokenSample], row_tokens: int) -> list[list[list[int]]]:
    """Which samples lie in which row: rows of families of sample indices.

    Raises `PackingError` naming the first sample that is longer than a row.
    """
    for i, s in enumerate(samples):
        if s.tokens > row_tokens:
            raise PackingError(
                f"sample {s.name or i!r} has {s.prompt.size} + {s.response.size} = {s.tokens} tokens, more than a row's {row_tokens}: "
                "raise row_tokens, or shorten prompts or responses where they are made"
            )
    parts = []
    for family in families(samples):
        room = row_tokens - samples[family[0]].prompt.size
        parts += [[family[i] for i in sorted(bin_)] for bin_ in first_fit([samples[i].response.size for i in family], room)]
    sizes = [samples[part[0]].prompt.size + sum(samples[i].response.size for i in part) for part in parts]
    return [[parts[i] for i in row] for row in first_fit(sizes, row_tokens)]


def pack(samples: Sequence[TokenSample], row_tokens: int, devices: int = 1, growth: int = 2) -> PackedRows:
    """Packs samples into rows, NumPy arrays, for `devices` that take equal blocks of them.

    Rows are dealt by how full they are, and each block begins with rows that hold something. L is `row_tokens`, or a half, a quarter, ...
    that holds the longest row; Q is a multiple of a quarter of L; B per device and N are powers of `growth`. Raises `PackingError`.
    """
    rows = plan_rows(samples, row_tokens)
    used = [sum(samples[f[0]].prompt.size + sum(samples[i].response.size for i in f) for f in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda b: -used[b])
    length = row_tokens
    while length % 2 == 0 and length // 2 >= max([64, *used]):
        length //= 2
    answers = max([1, *(sum(samples[i].response.size for f in row for i in f) for row in rows)])
    quarter = max(1, length // 4)
    q = -(-answers // quarter) * quarter
    n = bucket(max([1, *(sum(map(len, row)) for row in rows)]), growth=growth)
    each = bucket(-(-len(rows) // devices), growth=growth)
    whole = lambda *shape: np.zeros((devices * each, *shape), np.int32)  # noqa: E731
    out = PackedRows(
        *(whole(length) for _ in range(4)), whole(q), whole(q), whole(q).astype(np.float32), whole(n) - 1, whole(n), whole(n)
    )
    for place, b in enumerate(order):
        _fill(out, place % devices * each + place // devices, [[(i, samples[i]) for i in f] for f in rows[b]])
    return out


def _fill(out: PackedRows, b: int, row: list[list[tuple[int, TokenSample]]]) -> None:
    """Writes one row of families in place."""
    at = answer = number = 0
    for segment, family in enumerate(row, start=1):
        prompt = family[0][1].prompt
        p, start = prompt.size, at
        end = start + p + sum(s.response.size for _, s in family)
        out.segments[b, start:end] = segment
        out.tokens[b, start : start + p] = prompt
        out.positions[b, start : start + p] = np.arange(p)
        at += p
        for i, s in family:
            r = s.response.size
            out.tokens[b, at : at + r] = s.response
            out.positions[b, at : at + r] = p + np.arange(r)
            out.branches[b, at : at + r] = number + 1
            out.predict[b, answer : answer + r] = np.concatenate([[start + p - 1], np.arange(at, at + r - 1)])
            out.targets[b, answer : answer + r] = s.response
            out.log_probs[b, answer : answer + r] = s.log_probs
            out.sample[b, number], out.first[b, number], out.length[b, number] = i, answer, r
            at, answer, number = at + r, answer + r, number + 1
