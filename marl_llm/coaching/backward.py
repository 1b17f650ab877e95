"""Reward backpropagation (MAPPA, Appendix F): what each action did well, and what of the play's outcome it answers for.

    f_t = α · p_t + β · Δ_t                  Eq. 6
    Σ_t Δ_t = v(R)                           Eq. 7, here exactly

p_t is asked for without the outcome. Then, from the last action to the first, a coach that knows the outcome says how much of what the
later actions left unexplained the action explains: 5 nothing, 10 it alone brought the success, 0 it alone brought the failure. Readings:
v(R) = 2 · result − 1, from −1 (failed) to 1; a contribution against the outcome counts as none, so that no action of a failed play has
Δ > 0 (F.5); the others are scaled to v(R), and where there is none all share it alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.coaching.coach import ChatCoach, Coach, metrics_of, of_rubric
from marl_llm.tools.results import ToolResult, success
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.trajectory import RoleCall, Score
from marl_llm.workflows.views import ActionView, CoachGuide

GRID = 2.0**-20  # contributions are multiples of it, so that their sum is exact


def attributed(said: Sequence[float | int], outcome: float | int) -> tuple[list[float], float]:
    """(Δ_t, error): contributions whose sum is v(R) = `outcome`, to the next multiple of `GRID`, and |Σ said − v(R)| before (Eq. 7)."""
    total = round(outcome / GRID) * GRID
    error = abs(math.fsum(said) - total)
    kept = [float(one) if one * total > 0 else 0.0 for one in said]
    whole = math.fsum(kept)
    shares = [one / whole * total for one in kept] if whole else [total / len(said)] * len(said)
    shares = [round(share / GRID) * GRID for share in shares]
    largest = max(range(len(shares)), key=lambda i: abs(shares[i]))
    shares[largest] += total - math.fsum(shares)
    return shares, error


@dataclasses.dataclass
class _Play:
    """The actions of one play that have been asked for, and what all of them get."""

    views: dict[str, ActionView]
    done: asyncio.Future
    waiting: int = 0  # how many await it


class Backward:
    """A coach of whole plays: scores α · p + β · Δ, see the module's text. Every action of a play has to be asked for, once it is over.

    Args:
      forward: says p, without the outcome.
      backward: says what an action contributed, 5 + 5 Δ, reading `ActionView.residual`.
      alpha, beta: weights; beta in points.

    Raises:
      WorkflowError: a weight that is negative or not finite.
    """

    def __init__(self, forward: Coach, backward: Coach, alpha: float | int, beta: float | int):
        if not (0 <= alpha < math.inf and 0 <= beta < math.inf):
            raise WorkflowError(f"backward: alpha={alpha} and beta={beta} must be 0 or more, and finite")
        self._forward, self._backward, self._weights = forward, backward, (float(alpha), float(beta))
        self._plays: dict[tuple, _Play] = {}
        self._count, self._error = 0, 0.0

    async def score(self, view: ActionView) -> ToolResult[Score]:
        """See `Coach`. Waits for the play's other actions; where one has no score, none has."""
        if view.result is None:
            raise WorkflowError("reward backpropagation needs the outcome of the play: score with when='end' and Scorer(result=...)")
        calls = [event for event in (*view.earlier, view.call, *view.later) if isinstance(event, RoleCall)]
        loop = asyncio.get_running_loop()
        key = (loop, *((call.id, call.seed) for call in calls))  # a rollout that was given up may have left its own
        play = self._plays.setdefault(key, _Play({}, loop.create_future()))
        play.views[view.call.id] = view
        if len(play.views) < len(calls):
            play.waiting += 1
            try:
                found = await asyncio.shield(play.done)
            finally:
                play.waiting -= 1
                if not play.waiting and not play.done.done():  # nobody is left who could hear of it
                    self._plays.pop(key, None)
        else:
            try:
                found = await self._whole([play.views[call.id] for call in calls])
                play.done.set_result(found)
            finally:
                self._plays.pop(key, None)
                if not play.done.done():
                    play.done.cancel()
        return found if isinstance(found, ToolResult) else found[view.call.id]

    def metrics(self) -> Mapping[str, float]:
        """Those of the coach, how many plays were explained, and the mean error of their contributions before they were rescaled."""
        mean = self._error / max(1, self._count)
        same = self._backward is self._forward
        found = dict(metrics_of(self._forward))
        for name, value in ({} if same else metrics_of(self._backward)).items():
            found[name] = found.get(name, 0.0) + value
        return found | {"backward_plays": float(self._count), "backward_error": mean}

    async def _whole(self, views: Sequence[ActionView]) -> ToolResult | dict[str, ToolResult[Score]]:
        """Every action's score, or the first failure."""
        hidden = [dataclasses.replace(view, later=(), outcome={}, result=None) for view in views]
        process = await asyncio.gather(*map(self._forward.score, hidden))
        if failures := [one for one in process if one.failure is not None]:
            return failures[0]
        told = f"The play's result is {views[0].result:g}, from 0 (failed) to 1 (as good as can be)."
        said, reasons = [], []
        for view in reversed(views):
            result = await self._backward.score(dataclasses.replace(view, residual=told))
            if result.failure is not None:
                return result
            one = result.outcome()
            said.insert(0, (float(one.value) - 5.0) / 5.0)
            reasons.insert(0, one.reason)
            told += f"\n{view.call.role}, {view.call.id}, explains {said[0]:+.2f}: {one.reason}"
        shares, error = attributed(said, 2.0 * views[0].result - 1.0)
        self._count, self._error = self._count + 1, self._error + error
        alpha, beta = self._weights
        found = {}
        for view, result, share, why in zip(views, process, shares, reasons, strict=True):
            one = result.outcome()
            reason = f"{one.reason}\ncontribution {share:+.3f}: {why}".strip()
            both = dataclasses.replace(one, value=alpha * float(one.value) + beta * share, reason=reason, members=(float(one.value), share))
            found[view.call.id] = success(both, result.seconds, result.attempts)
        return found


def counterfactual_coach(guide: CoachGuide) -> ChatCoach:
    """An environment's `CoachGuide.contribution` as the coach that goes backwards. Raises `WorkflowError` if the environment has none."""
    if guide.contribution is None:
        raise WorkflowError("the environment's guide has no contribution, which a rubric needs: give CoachGuide(contribution=...)")

    def rubric(view: ActionView) -> tuple[Any, None, str]:
        share = guide.contribution(view)
        return 5.0 + 5.0 * share, None, f"with the teacher's action in its place the result changes by {-share:+g}"

    return ChatCoach(of_rubric(rubric), dataclasses.replace(guide, cap=None), format_attempts=1)
