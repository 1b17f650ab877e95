"""Coaches over coaches: several that agree on a score, and wrappers that spoil one on purpose, to measure what that does.

`shift`, `verbose`, `own` and `noisy` add to a score and may leave [0, 10]: a bias that is cut off could not be measured. What is random is
drawn by the identity of the action, not by who asks first; `permuted` is the exception.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from marl_llm.coaching.coach import Answers, ChatCoach, Coach, metrics_of
from marl_llm.tools.chat import ChatReply, Message
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.trajectory import Score
from marl_llm.workflows.views import ActionView

AGREEMENTS = ("median", "mean", "trimmed")


def dice(view: ActionView, *more: Any) -> random.Random:
    """Randomness of an action: its draw's seed and place."""
    return random.Random(repr((view.call.seed, view.call.id, *more)))


class Ensemble:
    """Several coaches that are asked at once.

    Args:
      members: at least two.
      how: the "median", the "mean", or the mean without the highest and the lowest ("trimmed").
      quorum: how many have to answer; None: all.

    Raises:
      WorkflowError: an unknown `how`, too few members, or a quorum that is none.
    """

    def __init__(self, members: Sequence[Coach], how: str = "median", quorum: int | None = None):
        least = 3 if how == "trimmed" else 2
        if how not in AGREEMENTS:
            raise WorkflowError(f"how={how!r} is unknown; choose one of {', '.join(AGREEMENTS)}")
        if len(members) < least:
            raise WorkflowError(f"an ensemble by {how} needs {least} members or more, not {len(members)}")
        if quorum is not None and not (least if how == "trimmed" else 1) <= quorum <= len(members):
            raise WorkflowError(f"quorum={quorum} of {len(members)} members by {how} is impossible")
        self._members, self._how, self._quorum = tuple(members), how, quorum or len(members)

    async def score(self, view: ActionView) -> ToolResult[Score]:
        """What the members agree on; the failure of the first that failed where fewer than the quorum answered."""
        start = time.monotonic()
        results = await asyncio.gather(*(member.score(view) for member in self._members))
        scores = [result.value for result in results if result.failure is None]
        if len(scores) < self._quorum:
            return next(result for result in results if result.failure is not None)
        values = sorted(score.value for score in scores)
        kept = values[1:-1] if self._how == "trimmed" else values
        value = statistics.median(values) if self._how == "median" else statistics.fmean(kept)
        votes = [score.correct for score in scores if score.correct is not None]
        correct = None if 2 * sum(votes) == len(votes) else 2 * sum(votes) > len(votes)
        cached, capped = all(score.cached for score in scores), any(score.capped for score in scores)
        members = tuple(score.value for score in scores)
        return success(Score(value, correct, scores[0].reason, members, capped, cached), time.monotonic() - start)

    def metrics(self) -> dict[str, float]:
        """The members' counts, summed."""
        counts: collections.Counter[str] = collections.Counter()
        for member in self._members:
            counts.update(metrics_of(member))
        return dict(counts)


class Changed:
    """A coach whose scores are changed by a function of the view and the score.

    Args:
      change: (view, value) -> the new value.
    """

    def __init__(self, coach: Coach, change: Callable[[ActionView, float], float]):
        self._coach, self._change = coach, change

    async def score(self, view: ActionView) -> ToolResult[Score]:
        """See `Coach`."""
        result = await self._coach.score(view)
        if result.failure is not None:
            return result
        value = float(self._change(view, float(result.value.value)))
        return dataclasses.replace(result, value=dataclasses.replace(result.value, value=value))

    def metrics(self) -> dict[str, float]:
        """Those of the coach that is changed."""
        return dict(metrics_of(self._coach))


def shift(coach: Coach, stratum: str, by: float) -> Changed:
    """Adds `by` for tasks of one kind: a coach that favours it."""
    return Changed(coach, lambda view, value: value + (by if view.stratum == stratum else 0.0))


def verbose(coach: Coach, weight: float) -> Changed:
    """Adds weight · ln(tokens): a coach that favours length."""
    return Changed(coach, lambda view, value: value + weight * math.log(max(view.call.tokens.size, 1)))


def own(coach: Coach, weight: float) -> Changed:
    """Adds weight · mean log-prob of the response under the policy that gave it: a coach that is the same model favours its own texts."""
    def likely(call):
        return 0.0 if call.log_probs is None or not call.log_probs.size else float(np.mean(call.log_probs))

    return Changed(coach, lambda view, value: value + weight * likely(view.call))


def noisy(coach: Coach, sigma: float, seed: int = 0) -> Changed:
    """Adds a normal draw of the action's identity."""
    return Changed(coach, lambda view, value: value + dice(view, seed, "noisy").gauss(0.0, sigma))


def constant(coach: Coach, value: float) -> Changed:
    """Gives every action the same score."""
    return Changed(coach, lambda view, score: value)


def permuted(coach: Coach, seed: int = 0) -> Changed:
    """Gives an action the score of a random earlier action of its role, itself included: scores without their actions.

    The draw follows from identity, but which scores came before depends on timing; `config.control.permute_rewards` permutes exactly.
    """
    earlier, lock = {}, threading.Lock()

    def change(view: ActionView, value: float) -> float:
        with lock:
            known = earlier.setdefault(view.call.role, [])
            known.append(value)
            return known[dice(view, seed, "permuted").randrange(len(known))]

    return Changed(coach, change)


class Failing:
    """A coach that fails for a share of the actions; with `coach` None it always fails."""

    def __init__(self, coach: Coach | None, share: float, seed: int = 0):
        self._coach, self._share, self._seed = coach, share, seed

    async def score(self, view: ActionView) -> ToolResult[Score]:
        """See `Coach`."""
        if self._coach is None or dice(view, self._seed, "failing").random() < self._share:
            return failed(FailureKind.UNAVAILABLE, f"{view.call.id}: a study lets the coach fail", 0.0)
        return await self._coach.score(view)

    def metrics(self) -> dict[str, float]:
        """Those of the coach behind it."""
        return dict(metrics_of(self._coach))


def babbling(coach: Any, share: float, seed: int = 0) -> ChatCoach:
    """A share of the replies cannot be read, drawn anew for each attempt."""
    if not isinstance(coach, ChatCoach):
        raise WorkflowError("babbling changes replies: it must be the first study, over a coach that gives replies")

    def over(answers: Answers) -> Answers:
        async def babble(view: ActionView, messages: Sequence[Message]) -> ToolResult[ChatReply]:
            if dice(view, seed, "babbling", len(messages)).random() < share:
                return success(ChatReply("hard to say: 8 or 9 of 10", "stop", 0, 0), 0.0)
            return await answers(view, messages)

        return babble

    return coach.over(over)


_STUDIES: dict[str, tuple[Callable[..., Coach], int]] = {  # name -> (wrapper, how many values)
    "shift": (lambda coach, stratum, by: shift(coach, stratum, float(by)), 2),
    "verbose": (lambda coach, weight: verbose(coach, float(weight)), 1),
    "own": (lambda coach, weight: own(coach, float(weight)), 1),
    "noisy": (lambda coach, sigma: noisy(coach, float(sigma)), 1),
    "constant": (lambda coach, value: constant(coach, float(value)), 1),
    "permuted": (permuted, 0),
    "failing": (lambda coach, share: Failing(coach, float(share)), 1),
    "babbling": (lambda coach, share: babbling(coach, float(share)), 1),
}


def study(coach: Coach, text: str) -> Coach:
    """The coach behind the wrappers that a text names, the first innermost: "shift:regression:1.5,noisy:2"; the same for the empty text.

    Raises:
      WorkflowError: an unknown wrapper, or values that it cannot read.
    """
    for part in filter(None, text.replace(" ", "").split(",")):
        name, *values = part.split(":")
        wrapper, count = _STUDIES.get(name, (None, 0))
        if wrapper is None or len(values) != count:
            known = ", ".join(":".join([name, *"abc"[:n]]) for name, (_, n) in _STUDIES.items())
            raise WorkflowError(f"study={part!r} is none of {known}")
        try:
            coach = wrapper(coach, *values)
        except ValueError as error:
            raise error if isinstance(error, WorkflowError) else WorkflowError(f"study={part!r}: {error}") from error
    return coach
