"""Teachers behind endpoints in an update: they are asked before it, and what they said lies beside the packed rows.

All teachers of a step are asked before any model learns, so that one which does not answer leaves the team as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from marl_llm.algorithms import Recipe, Samples
from marl_llm.tools.teacher_endpoint import StudentSample, TaughtSample, tail_log_probs
from marl_llm.training.packing import PackedRows, Tokens


@runtime_checkable
class OutsideTeacher(Protocol):
    """Whoever scores samples elsewhere, e.g. a `TeacherEndpoint`."""

    vocab_size: int  # of the student

    def score(self, samples: Sequence[StudentSample], top_k: int = 0) -> list[TaughtSample]:
        """What the teacher says of each sample, in their order. Raises `TeacherError`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class TaughtTokens:
    """What outside teachers said of a step's response tokens, in the order of `Tokens.log_probs`; 0 where nobody was asked.

    Attributes:
      log_probs: of the tokens. top_ids: the teacher's K likeliest in their places; K is 0 where only the tokens' own are compared.
      bins: the log-probs of these, and of all others together.
      spans: number of the span of text that each token was scored in, within its response, see `span_reverse_kl`; 0: it was not.
    """

    log_probs: Float[np.ndarray, "Y"]
    top_ids: Int[np.ndarray, "Y K"]
    bins: Float[np.ndarray, "Y C"]
    spans: Int[np.ndarray, "Y"]

    def beside(self, tokens: Tokens, rows: PackedRows) -> dict[str, np.ndarray]:
        """Columns of packed rows, 0 in padding: "taught_log_probs" `[B, Q]`, "taught_ids" `[B, Q, K]`, "taught_bins" `[B, Q, C]` and
        "taught_spans" `[B, Q]`, with other numbers in each response of a row."""
        columns = {"taught_log_probs": self.log_probs, "taught_ids": self.top_ids, "taught_bins": self.bins, "taught_spans": self.spans}
        packed = {name: np.zeros((*rows.targets.shape, *x.shape[1:]), x.dtype) for name, x in columns.items()}
        for b, n in np.argwhere(rows.sample >= 0):
            start, length = rows.first[b, n], rows.length[b, n]
            first = int(tokens.response_at[rows.sample[b, n]])
            for name, column in columns.items():
                packed[name][b, start : start + length] = column[first : first + length]
            spans = packed["taught_spans"][b, start : start + length]
            spans[spans > 0] += start
        return packed


def top_k_of(recipe: Recipe) -> int:
    """How many of a teacher's likeliest tokens a recipe's divergence reads. Raises `ValueError` for one of whole vocabularies."""
    if recipe.distill_divergence == "sampled":
        return 0
    if recipe.distill_top_k is None:
        raise ValueError(
            f"distill_divergence={recipe.distill_divergence!r} compares whole vocabularies, which no endpoint tells: set distill_top_k, or "
            "distill_divergence='sampled'"
        )
    return recipe.distill_top_k


def ask_teachers(
    recipe: Recipe, teachers: Mapping[int, OutsideTeacher], tokens: Tokens, table: Samples, privileged: Sequence[Any] | None = None
) -> TaughtTokens | None:
    """Asks the teachers, by agent number, about a step's samples, each once for all its agents. None without teachers. Raises
    `TeacherError`. `privileged`: what a sample's teacher reads in place of its prompt, by sample, of those that
    train, which come first; None: the prompt; (): nothing."""
    if not teachers:
        return None
    top_k, count = top_k_of(recipe), len(tokens.log_probs)
    columns = TaughtTokens(
        np.zeros(count, np.float32), np.zeros((count, top_k), np.int32), np.zeros((count, top_k + 1), np.float32), np.zeros(count, np.int32)
    )  # fmt: skip
    ids = np.asarray(tokens.ids)
    responses = ids[len(ids) - count :]
    counts = np.ones(len(tokens), bool) if table.where is None else np.asarray(table.where)
    readable = np.full(len(tokens), privileged is None)
    if privileged is not None:
        readable[: len(privileged)] = [prompt != () for prompt in privileged]
    for teacher in {id(teacher): teacher for teacher in teachers.values()}.values():
        agents = [agent for agent, its_teacher in teachers.items() if its_teacher is teacher]
        learning = np.flatnonzero(counts & np.isin(table.agent, agents) & (tokens.size > 0))
        chosen = learning[readable[learning]]
        places = [slice(first, end) for first, end in _spans(tokens.response_at[chosen], tokens.size[chosen])]
        prompts = [ids[first:end] for first, end in _spans(tokens.prompt_at[chosen], tokens.prompt_size[chosen])]
        if privileged is not None:
            prompts = [prompt if privileged[number] is None else np.asarray(privileged[number]) for number, prompt in zip(chosen, prompts)]
        samples = [StudentSample(prompt, responses[place]) for prompt, place in zip(prompts, places, strict=True)]
        for place, taught in zip(places, teacher.score(samples, top_k), strict=True):
            columns.log_probs[place], columns.top_ids[place] = taught.log_probs, taught.top_ids
            columns.bins[place] = np.concatenate([taught.top_log_probs, tail_log_probs(taught.top_log_probs)[:, None]], axis=1)
            columns.spans[place] = np.arange(1, len(taught.log_probs) + 1) if taught.spans is None else taught.spans
        _fill_unread(columns, np.asarray(tokens.log_probs), _spans(tokens.response_at[learning], tokens.size[learning]))
    return columns


def _fill_unread(columns: TaughtTokens, log_probs: Float[np.ndarray, "Y"], responses: Sequence[tuple[int, int]]) -> None:
    """Sets the teacher's log-probs of the tokens that it could not read so that their gap to the student's is the mean gap of all others.

    The gap of a token that was read is that of its whole span, as in its gradient. The mean makes unread tokens neither likelier nor less
    likely. A gap of 0 would reward the student for text that the teacher cannot read, wherever the two disagree.
    """
    gaps_read = [np.zeros(0)]
    for first, end in responses:
        spans = columns.spans[first:end]
        span_gaps = np.bincount(spans, weights=log_probs[first:end] - columns.log_probs[first:end])
        gaps_read.append(span_gaps[spans[spans > 0]])
    gaps = np.concatenate(gaps_read)
    mean_gap = np.mean(gaps) if len(gaps) else 0.0
    for first, end in responses:
        unread = first + np.flatnonzero(columns.spans[first:end] == 0)
        columns.log_probs[unread] = log_probs[unread] - mean_gap


def _spans(firsts: Int[np.ndarray, "S"], sizes: Int[np.ndarray, "S"]) -> list[tuple[int, int]]:
    """(first, end) of stretches of ids."""
    return list(zip(firsts.tolist(), (firsts + sizes).tolist(), strict=True))
