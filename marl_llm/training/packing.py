"""Packing of samples of uneven length into rows of a fixed token budget, planned on the host.

Samples with the very same prompt ids form a family: one copy of the prompt, and behind it their responses, each of which sees the prompt
and itself (sharing is a matter of computation only, so content decides, not identity). A sample that shares its prompt with none is a
family of one, a plain sequence. Families go into rows first-fit, largest first; one that is larger than a row is cut between responses,
with a copy of the prompt in each part. No sample is dropped, copied or cut (law 5). For a budget of 12 tokens:

    tokens      p p p a a b b b | q q c .      p, q: prompts   a, b, c: responses   .: padding
    segments    1 1 1 1 1 1 1 1   2 2 2 0
    branches    0 0 0 1 1 2 2 2   0 0 3 0
    positions   0 1 2 3 4 3 4 5   0 1 2 0
    predict     2 3 2 5 6 9                    who predicts a a b b b c

`Tokens` holds the ids of all samples of a step. They may lie on the host or, straight from a compiled rollout, on the devices: a plan
of rows needs lengths only, and the ids are then gathered where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from marl_llm.errors import UserError
from marl_llm.sampling.sequences import bucket

ROWS = 16  # per device at least, where empty rows are not computed
SAMPLE_PLACES = 2**17  # samples x targets of a row, up to which places for samples cost next to nothing


class PackingError(UserError, ValueError):
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
    kept_ids: Any = None  # [r, M] int, the tokens that each one was drawn from, -1 behind them; None: the whole vocabulary

    def __post_init__(self):
        if self.kept_ids is not None:
            object.__setattr__(self, "kept_ids", np.asarray(self.kept_ids, np.int32))
            if self.kept_ids.shape[:1] != (np.size(self.response),) or self.kept_ids.ndim != 2:
                raise PackingError(f"sample {self.name!r} has kept ids {self.kept_ids.shape} for {np.size(self.response)} response tokens")
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
    sample: Int[Array, "B N"]  # index of the sample among those of the step
    first: Int[Array, "B N"]  # index of its first token along Q
    length: Int[Array, "B N"]  # response tokens
    kept_ids: Int[Array, "B Q M"] | None = None  # the tokens that each target was drawn from, -1 behind them; None: all

    @property
    def inputs(self) -> tuple[Int[Array, "B _"], ...]:
        """What a forward pass reads, in the order of `marl_llm.models.score_packed`: tokens to targets."""
        return self[:6]


class RowShape(NamedTuple):
    """A fixed shape of rows, so that all steps of a compiled rollout share a program."""

    rows: int  # B over all devices; a multiple of it where more are needed
    tokens: int  # L, unless a row may hold less
    targets: int  # Q, and the most response tokens of a row
    samples: int  # N


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """The ids of S samples, with what a plan of rows needs to know of them.

    Attributes:
      ids: all ids in one array; those of the responses are its end, in the order of `log_probs`. NumPy, or JAX on the devices.
      log_probs: of all response tokens, of the distribution that was drawn from.
      prompt_at, response_at: where each sample's prompt begins in `ids`, and its response in `log_probs`.
      prompt_size, size: how many tokens each has.
      prompt: number of its prompt; equal numbers mean equal ids.
      rank: breaks ties in an order by identity: candidates of one prompt by their content or branch.
      names: of the samples, for messages.
      kept_ids: of all response tokens, the tokens that they were drawn from, -1 behind them; None: the whole vocabulary.
      shape: of rows; None: by what they hold, see `pack`.
      joint: the same responses behind what a centralised critic reads, see `training.centralised`; None: nobody reads it.
    """

    ids: Int[Any, "X"]
    log_probs: Float[Any, "Y"]
    prompt_at: Int[np.ndarray, "S"]
    prompt_size: Int[np.ndarray, "S"]
    response_at: Int[np.ndarray, "S"]
    size: Int[np.ndarray, "S"]
    prompt: Int[np.ndarray, "S"]
    rank: Int[np.ndarray, "S"]
    names: Sequence[str] | None = None
    shape: RowShape | None = None
    kept_ids: Int[Any, "Y M"] | None = None
    joint: Tokens | None = None

    def __len__(self) -> int:
        return len(self.size)

    @classmethod
    def of(cls, samples: Sequence[TokenSample]) -> Tokens:
        """The tokens of samples that were made on the host."""
        if not samples:
            none = np.zeros(0, np.int32)
            return cls(none, none.astype(np.float32), *(none,) * 6)
        prompts: dict[bytes, int] = {}
        prompt = np.asarray([prompts.setdefault(s.prompt.tobytes(), len(prompts)) for s in samples], np.int32)
        order = {content: place for place, content in enumerate(sorted({s.response.tobytes() for s in samples}))}
        prompt_size = np.asarray([s.prompt.size for s in samples], np.int32)
        size = np.asarray([s.response.size for s in samples], np.int32)

        def begins(sizes):
            return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)

        return cls(
            ids=np.concatenate([*(s.prompt for s in samples), *(s.response for s in samples)]),
            log_probs=np.concatenate([s.log_probs for s in samples]),
            prompt_at=begins(prompt_size),
            prompt_size=prompt_size,
            response_at=begins(size),
            size=size,
            prompt=prompt,
            rank=np.asarray([order[s.response.tobytes()] for s in samples], np.int32),
            names=[s.name for s in samples],
            kept_ids=None if all(s.kept_ids is None for s in samples) else _kept(samples),
        )

    def samples(self, chosen: Sequence[int] | np.ndarray) -> list[TokenSample]:
        """The chosen samples, each with its ids, on the host: the reverse of `of`."""
        ids, log_probs = np.asarray(self.ids), np.asarray(self.log_probs)
        responses, samples = ids[len(ids) - len(log_probs) :], []
        for i in map(int, chosen):
            prompt = ids[self.prompt_at[i] : self.prompt_at[i] + self.prompt_size[i]]
            place = slice(self.response_at[i], self.response_at[i] + self.size[i])
            kept_ids, name = None if self.kept_ids is None else self.kept_ids[place], self.names[i] if self.names else ""
            samples.append(TokenSample(prompt, responses[place], log_probs[place], name, kept_ids))
        return samples

    def families(self, chosen: Sequence[int] | np.ndarray) -> list[list[int]]:
        """The chosen samples that have the same prompt ids, together, in the order of their first appearance."""
        families: dict[int, list[int]] = {}
        for i in map(int, chosen):
            families.setdefault(int(self.prompt[i]), []).append(i)
        return list(families.values())

    def plan(self, chosen: Sequence[int] | np.ndarray, row_tokens: int, targets: int | None = None) -> list[list[list[int]]]:
        """Which of the chosen samples lie in which row: rows of families of sample numbers. `targets`: most response tokens of a row.

        Raises `PackingError` naming the first sample that is longer than a row.
        """
        for i in chosen:
            if (total := int(self.prompt_size[i] + self.size[i])) > row_tokens:
                raise PackingError(
                    f"sample {(self.names and self.names[i]) or i!r} has {self.prompt_size[i]} + {self.size[i]} = {total} tokens, more "
                    f"than a row's {row_tokens}: raise row_tokens, or shorten prompts or responses where they are made"
                )
        room = (targets or row_tokens, row_tokens) if self.shape is None else (self.shape.targets, self.shape.samples)
        most = (row_tokens, *room)
        parts = []
        for family in self.families(chosen):
            room = (row_tokens - int(self.prompt_size[family[0]]), *most[1:])
            sizes = [(int(self.size[i]), int(self.size[i]), 1) for i in family]
            parts += [[family[i] for i in sorted(bin_)] for bin_ in first_fit(sizes, room)]
        answers = [int(self.size[part].sum()) for part in parts]
        sizes = [(int(self.prompt_size[part[0]]) + n, n, len(part)) for part, n in zip(parts, answers)]
        return [[parts[i] for i in row] for row in first_fit(sizes, most)]

    @functools.cached_property
    def _share(self) -> float:
        """Share of response tokens in all tokens, a prompt counted once."""
        _, first = np.unique(self.prompt, return_index=True)
        return float(self.size.sum() / max(1, self.size.sum() + self.prompt_size[first].sum()))

    def _targets(self, row_tokens: int) -> int:
        """Response tokens that a row has room for where shapes are to be few: all, or a quarter where prompts are long. It follows from all
        samples of a step, not from those of a minibatch, so that it seldom changes."""
        quarter = row_tokens // 4
        return quarter if self._share < 0.2 and max([1, *self.size]) <= quarter else row_tokens

    def _length(self, family: Sequence[int]) -> int:
        return int(self.prompt_size[family[0]] + self.size[list(family)].sum())

    def pack(self, chosen: Sequence[int] | np.ndarray, row_tokens: int, devices: int = 1, few_shapes: bool = False) -> PackedRows:
        """The chosen samples in rows for `devices` that take equal blocks of them; `sample` numbers those of this table.

        Rows are dealt by how full they are, and each block begins with rows that hold something. With `few_shapes`, for programs that stop
        before empty rows, L is `row_tokens`, Q that (or a quarter, where prompts are long), and B per device and N are powers of four
        from large numbers on, so that a run compiles one program or two. Otherwise every place costs: L is `row_tokens`, or a half, a
        quarter, ... that holds the longest row; Q is a multiple of a quarter of L; B and N are powers of two. With `shape`, L is its
        `tokens`, or `row_tokens` if that is less, and the rest is as it says. Raises `PackingError`.
        """
        row_tokens = row_tokens if self.shape is None else min(row_tokens, self.shape.tokens)
        rows = self.plan(chosen, row_tokens, self._targets(row_tokens) if few_shapes else row_tokens)
        used = [sum(map(self._length, row)) for row in rows]
        order = sorted(range(len(rows)), key=lambda b: -used[b])
        length, share = row_tokens, -(-len(rows) // devices)
        if self.shape is None:
            while not few_shapes and length % 2 == 0 and length // 2 >= max([64, *used]):
                length //= 2
            answers = max([1, *(sum(int(self.size[f].sum()) for f in row) for row in rows)])
            quarter = max(1, length // 4)
            q = -(-answers // quarter) * quarter
            n = max([1, *(sum(map(len, row)) for row in rows)])
            if few_shapes:
                q = self._targets(row_tokens)
                n, each = bucket(n, bucket(max(1, SAMPLE_PLACES // length), growth=4), growth=4), bucket(share, ROWS, growth=4)
            else:
                n, each = bucket(n), bucket(share)
        else:
            q, n, least = self.shape.targets, self.shape.samples, -(-self.shape.rows // devices)
            each = least * bucket(-(-share // least), growth=4 if few_shapes else 2)

        def make(width, fill=0):
            return np.full((devices * each, width), fill, np.int32)

        plan = PackedRows(  # `tokens` and `targets` say where the ids lie, -1 for padding
            tokens=make(length, -1), positions=make(length), segments=make(length), branches=make(length), predict=make(q),
            targets=make(q, -1), log_probs=None, sample=make(n, -1), first=make(n), length=make(n),
        )  # fmt: skip
        offset = self.ids.shape[0] - self.log_probs.shape[0]
        for place, b in enumerate(order):
            self._fill(plan, place % devices * each + place // devices, rows[b], offset)
        gather = _gather.__wrapped__ if isinstance(self.ids, np.ndarray) else _gather
        return plan._replace(**gather(self.ids, self.log_probs, self.kept_ids, plan.tokens, plan.targets, offset))

    def _fill(self, out: PackedRows, b: int, row: list[list[int]], offset: int) -> None:
        """Writes one row of families into the plan `out`: where its ids lie, and the columns that need lengths only."""
        at = answer = number = 0
        for segment, family in enumerate(row, start=1):
            p, start, total = int(self.prompt_size[family[0]]), at, self._length(family)
            out.segments[b, start : start + total] = segment
            out.tokens[b, start : start + p] = np.arange(p) + self.prompt_at[family[0]]
            out.positions[b, start : start + p] = np.arange(p)
            at += p
            for i in family:
                r, here = int(self.size[i]), int(self.response_at[i])
                steps = np.arange(r)
                out.tokens[b, at : at + r] = steps + offset + here
                out.positions[b, at : at + r] = p + steps
                out.branches[b, at : at + r] = number + 1
                out.predict[b, answer] = start + p - 1
                out.predict[b, answer + 1 : answer + r] = steps[1:] + at - 1
                out.targets[b, answer : answer + r] = steps + here
                out.sample[b, number], out.first[b, number], out.length[b, number] = i, answer, r
                at, answer, number = at + r, answer + r, number + 1


def _kept(samples: Sequence[TokenSample]) -> Int[np.ndarray, "Y M"]:
    """Kept ids of all response tokens. Raises `PackingError` where some samples have none."""
    if lacking := [s.name for s in samples if s.kept_ids is None]:
        raise PackingError(f"sample {lacking[0]!r} does not say which tokens it was drawn from, others do: sample all of them alike")
    width = max(s.kept_ids.shape[1] for s in samples)
    return np.concatenate([np.pad(s.kept_ids, [(0, 0), (0, width - s.kept_ids.shape[1])], constant_values=-1) for s in samples])


@functools.partial(jax.jit, static_argnums=5)
def _gather(ids, log_probs, kept_ids, token_places, target_places, offset):
    """Columns of `PackedRows` that hold ids and log-probs, gathered where they lie: NumPy of NumPy arrays, JAX under jit."""
    xp = np if isinstance(ids, np.ndarray) else jnp

    def take(values, places, shift=0, fill=0):
        if values is None:
            return None
        if not values.shape[0]:
            return xp.full(places.shape + values.shape[1:], fill, values.dtype)
        mask = (places >= 0).reshape(places.shape + (1,) * (values.ndim - 1))
        return xp.where(mask, values[xp.maximum(places, 0) + shift], fill).astype(values.dtype)

    return {
        "tokens": take(ids, token_places),
        "targets": take(ids, target_places, offset),
        "log_probs": take(log_probs, target_places),
        "kept_ids": take(kept_ids, target_places, fill=-1),
    }


def first_fit(sizes: Sequence[tuple[int, ...]], capacity: tuple[int, ...]) -> list[list[int]]:
    """Bins of indices whose sizes add up to `capacity` at most, in each component: first-fit decreasing, ties in the order given."""
    bins: list[list[int]] = []
    free: list[tuple[int, ...]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i][0]):
        place = next((b for b, room in enumerate(free) if all(r >= s for r, s in zip(room, sizes[i]))), None)
        if place is None:
            place = len(bins)
            bins.append([])
            free.append(capacity)
        bins[place].append(i)
        free[place] = tuple(r - s for r, s in zip(free[place], sizes[i]))
    return bins


def pack(samples: Sequence[TokenSample], row_tokens: int, devices: int = 1, few_shapes: bool = False) -> PackedRows:
    """Packs samples that were made on the host; see `Tokens.pack`."""
    return Tokens.of(samples).pack(range(len(samples)), row_tokens, devices, few_shapes)
