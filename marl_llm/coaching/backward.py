"""Reward backpropagation (MAPPA, Appendix F): what each action did well, and its share in the play's outcome.

    f_t = α · p_t + β · Δ_t                  Eq. 6
    Σ_t Δ_t = v(R)                           Eq. 7, here exactly

p_t is scored without the outcome. Then a coach that knows the outcome goes from the last action to the first and scores how much each
explains of what the later ones left unexplained: 5 nothing, 10 it alone brought the success, 0 it alone brought the failure. Readings:
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
from marl_llm.tools.waiting import Clock
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.trajectory import RoleCall, Score
from marl_llm.workflows.views import ActionView, CoachGuide

GRID = 2.0**-20  # contributions are multiples of it, so that their sum is exact


def attributed(contributions: Sequence[float | int], outcome: float | int) -> tuple[list[float], float]:
    """(Δ_t, error): shares whose sum is v(R) = `outcome`, to the next multiple of `GRID`, and |Σ contributions − v(R)| (Eq. 7)."""
    total = round(outcome / GRID) * GRID
    error = abs(math.fsum(contributions) - total)
    kept = [float(share) if share * total > 0 else 0.0 for share in contributions]
    kept_sum = math.fsum(kept)
    shares = [share / kept_sum * total for share in kept] if kept_sum else [total / len(contributions)] * len(contributions)
    shares = [round(share / GRID) * GRID for share in shares]
    largest = max(range(len(shares)), key=lambda i: abs(shares[i]))
    shares[largest] += total - math.fsum(shares)
    return shares, error


@dataclasses.dataclass(eq=False)
class _Play:
    """The actions of one play that were scored so far, and the future with all their results.

    Attributes:
      clock: of the work on it, nobody's own: whoever waits for the play shares it.
      askers: how many wait. work: is under way once every action was asked for.
    """

    views: dict[str, ActionView]
    done: asyncio.Future
    clock: Clock
    askers: int = 0
    work: asyncio.Task | None = None


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
        """See `Coach`. Waits for the play's other actions; where one has no score, none has, and where one raises, all do. The clocks of
        all stand still while either coach waits in a queue. Whoever is late or cancelled leaves the others their play."""
        if view.result is None:
            raise WorkflowError("reward backpropagation needs the outcome of the play: score with when='end' and Scorer(result=...)")
        calls = [event for event in (*view.earlier, view.call, *view.later) if isinstance(event, RoleCall)]
        loop = asyncio.get_running_loop()
        key = (loop, *((call.id, call.seed) for call in calls))  # a rollout that was given up may have left its own
        play = self._plays.setdefault(key, _Play({}, loop.create_future(), Clock(apart=True)))
        play.views[view.call.id] = view
        play.askers += 1
        if play.work is None and len(play.views) == len(calls):
            with play.clock.use():
                play.work = loop.create_task(self._explain(key, play, [play.views[call.id] for call in calls]))
        try:
            with play.clock.shared():
                scores = await asyncio.shield(play.done)
        finally:
            play.askers -= 1
            if not play.askers and not play.done.done():  # nobody waits for it any more
                self._forget(key, play)
                if play.work is not None and not loop.is_closed():
                    play.work.cancel()
        return scores if isinstance(scores, ToolResult) else scores[view.call.id]

    def metrics(self) -> Mapping[str, float]:
        """Those of the coach, how many plays were explained, and the mean error of their contributions before they were rescaled."""
        mean = self._error / max(1, self._count)
        same = self._backward is self._forward
        counts = dict(metrics_of(self._forward))
        for name, value in ({} if same else metrics_of(self._backward)).items():
            counts[name] = counts.get(name, 0.0) + value
        return counts | {"backward_plays": float(self._count), "backward_error": mean}

    async def _explain(self, key: tuple, play: _Play, views: Sequence[ActionView]) -> None:
        """Tells everyone who waits for a play every action's score, or the error."""
        try:
            play.done.set_result(await self._whole(views))
        except Exception as error:
            play.done.set_exception(error)
            play.done.exception()  # read, even where nobody awaits it any more
        except asyncio.CancelledError:
            play.done.cancel()
            raise
        finally:
            self._forget(key, play)

    def _forget(self, key: tuple, play: _Play) -> None:
        if self._plays.get(key) is play:
            del self._plays[key]

    async def _whole(self, views: Sequence[ActionView]) -> ToolResult | dict[str, ToolResult[Score]]:
        """Every action's score, or the first failure."""
        hidden = [dataclasses.replace(view, later=(), outcome={}, result=None) for view in views]
        process = await asyncio.gather(*map(self._forward.score, hidden))
        if failures := [result for result in process if result.failure is not None]:
            return failures[0]
        explained = f"The play's result is {views[0].result:g}, from 0 (failed) to 1 (as good as can be)."
        contributions, reasons = [], []
        for view in reversed(views):
            result = await self._backward.score(dataclasses.replace(view, residual=explained))
            if result.failure is not None:
                return result
            score = result.outcome()
            contributions.insert(0, (float(score.value) - 5.0) / 5.0)
            reasons.insert(0, score.reason)
            explained += f"\n{view.call.role}, {view.call.id}, explains {contributions[0]:+.2f}: {score.reason}"
        shares, error = attributed(contributions, 2.0 * views[0].result - 1.0)
        self._count, self._error = self._count + 1, self._error + error
        alpha, beta = self._weights
        scores = {}
        for view, result, share, why in zip(views, process, shares, reasons, strict=True):
            score = result.outcome()
            reason = f"{score.reason}\ncontribution {share:+.3f}: {why}".strip()
            process_value = float(score.value)
            value = alpha * process_value + beta * share
            combined = dataclasses.replace(score, value=value, reason=reason, members=(process_value, share))
            scores[view.call.id] = success(combined, result.seconds, result.attempts)
        return scores


def counterfactual_coach(guide: CoachGuide) -> ChatCoach:
    """An environment's `CoachGuide.contribution` as the coach that goes backwards. Raises `WorkflowError` if the environment has none."""
    if guide.contribution is None:
        raise WorkflowError("the environment's guide has no contribution, which a rubric needs: give CoachGuide(contribution=...)")

    def rubric(view: ActionView) -> tuple[Any, None, str]:
        share = guide.contribution(view)
        return 5.0 + 5.0 * share, None, f"with the teacher's action in its place the result changes by {-share:+g}"

    return ChatCoach(of_rubric(rubric), guide, format_attempts=1)
