"""Asynchronous scorers: a coach, a judge model, a slow metric, asked once per action and awaited before a play ends.

    async def judge(view: ActionView) -> Score: ...

    Workflow(..., scorers=(Scorer("judge", judge),), rewards=(scored("judge", weight=0.1), ...))

A scorer is no part of the graph: it reads what an action was and what it led to, and no role ever reads what it says. Scores stand in the
trajectory (`scores[call id][scorer]`), where rewards find them; they are stored, and a replay takes them from the record. A scorer that
fails, is late or gives no finite number aborts the play (law 9): there is no score in its place. `marl_llm.coaching` has coaches.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from marl_llm.tools.results import FailureKind, ToolResult
from marl_llm.tools.waiting import Expired, within
from marl_llm.workflows.errors import PlayFailure, WorkflowError, from_error, from_tool
from marl_llm.workflows.finite import is_finite_number, shown
from marl_llm.workflows.trajectory import Event, RoleCall, Score, Task, Trajectory
from marl_llm.workflows.views import MOMENTS, TRUTHS, ActionView, ViewMaker

MISSING = ("abort", "mask")


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """Who scores actions.

    Attributes:
      name: of its scores.
      ask: `async`; the view of an action -> a `Score`, or a `ToolResult` of one.
      roles: whose actions; by default everybody's.
      when: "end", when the play is over, with what followed; or "action", when the action and the tools that it caused are done, beside the
        rest of the play.
      truth: with which actions the hidden fields are shown: "none", "last" (the last action of the last role in the graph, once the play is
        over), "last_role" (each of its actions) or "all".
      timeout_s: of one score; time in a queue of the tool that answers does not count.
      missing: what happens to an action without a score: "abort", the whole play is; or "mask", that action alone trains nobody.
      history: figures of the run so far, for the view; asked anew for each.
      result: of a trajectory that is over, for `ActionView.result`; e.g. a metric of the workflow. It is told whatever `truth` says.

    Raises:
      WorkflowError: an `ask` that is no function, an unknown `when`, `truth` or `missing`, a deadline that is not above 0.
    """

    name: str
    ask: Callable[[ActionView], Awaitable[Any]]
    roles: tuple[str, ...] | None = None
    when: str = "end"
    truth: str = "none"
    timeout_s: float | int = 120.0
    missing: str = "abort"
    history: Callable[[], Mapping[str, float]] | None = None
    result: Callable[[Trajectory], float | int] | None = None

    def __post_init__(self):
        if not callable(self.ask):
            raise WorkflowError(f"scorer {self.name!r}: ask is a {type(self.ask).__name__}; it must be an async function of a view")
        for field, choices in (("when", MOMENTS), ("truth", TRUTHS), ("missing", MISSING)):
            if getattr(self, field) not in choices:
                raise WorkflowError(
                    f"scorer {self.name!r}: {field}={getattr(self, field)!r} is unknown; choose one of {', '.join(choices)}"
                )
        if self.timeout_s <= 0:
            raise WorkflowError(f"scorer {self.name!r}: timeout_s={self.timeout_s} must be above 0")


class Scoring:
    """The scores of one play: every scorer is asked once per action, however many trajectories the action is part of."""

    def __init__(self, workflow: Any, task: Task):
        self._workflow = workflow
        self._views = ViewMaker(workflow, task) if workflow.scorers else None
        self._asked: dict[tuple[str, str], asyncio.Task[Score]] = {}

    def settled(self, events: Sequence[Event]) -> None:
        """Asks those who score at the action: a role is about to speak, so the tools after earlier actions are done."""
        self._ask_all(events, "action", None)

    async def scores(self, trajectory: Trajectory) -> dict[str, dict[str, Score]]:
        """Call id -> scorer -> score, of a trajectory that is over. Raises `PlayFailure`."""
        for when in MOMENTS:
            self._ask_all(trajectory.events, when, trajectory)
        by_call: dict[str, dict[str, Score]] = {}
        missing = {scorer.name: scorer.missing for scorer in self._workflow.scorers}
        for (name, call), task in list(self._asked.items()):
            try:
                score = await task
            except PlayFailure as failure:
                if missing[name] == "abort":
                    raise
                score = Score(None, missing=f"{failure.kind}: {failure}")
            by_call.setdefault(call, {})[name] = score
        ids = {call.id for call in trajectory.calls}
        return {call: scores for call, scores in by_call.items() if call in ids}

    def cancel(self) -> None:
        """Lets go of scores that nobody awaits any more."""
        for task in self._asked.values():
            task.cancel()

    def _ask_all(self, events: Sequence[Event], when: str, end: Trajectory | None) -> None:
        scorers = [scorer for scorer in self._workflow.scorers if scorer.when == when]
        for event in events if scorers else ():
            for scorer in scorers:
                if isinstance(event, RoleCall) and (scorer.roles is None or event.role in scorer.roles):
                    self._ask(scorer, event, events, end)

    def _ask(self, scorer: Scorer, call: RoleCall, events: Sequence[Event], end: Trajectory | None) -> None:
        key = (scorer.name, call.id)
        if key in self._asked:
            return
        try:
            history = dict(scorer.history()) if scorer.history else {}
            told = scorer.result is not None and end is not None and scorer.when == "end"
            result = float(scorer.result(end)) if told else None
        except Exception as error:
            raise WorkflowError(f"scorer {scorer.name!r}: its result or history raised {type(error).__name__}: {error}") from error
        view = self._views.make(call, events, scorer.when, scorer.truth, None if end is None else end.fields, history)
        view = dataclasses.replace(view, result=result)
        task = self._asked[key] = asyncio.get_running_loop().create_task(_score(scorer, view))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error is read even where nobody awaits it any more


class Recorded:
    """The scores of a play that is played again: nobody is asked."""

    def __init__(self, scores: Mapping[str, Mapping[str, Score]]):
        self._scores = scores

    def settled(self, events: Sequence[Event]) -> None:
        """Nothing: what was said is known."""

    async def scores(self, trajectory: Trajectory) -> dict[str, dict[str, Score]]:
        """As recorded."""
        return {call.id: dict(self._scores[call.id]) for call in trajectory.calls if call.id in self._scores}

    def cancel(self) -> None:
        """Nothing is under way."""


async def _score(scorer: Scorer, view: ActionView) -> Score:
    """One score. Whatever goes wrong aborts the play: a scorer reads what models wrote, and may be one."""
    node = f"scorer {scorer.name}"
    try:
        score = await within(scorer.timeout_s, scorer.ask(view))
    except (PlayFailure, WorkflowError):  # the latter: an environment's own function has a fault, which ends the rollout (law 10)
        raise
    except Expired:
        raise PlayFailure(node, FailureKind.DEADLINE.value, f"no score of {view.call.id} within {scorer.timeout_s} s") from None
    except Exception as error:
        failure = from_error(node, error)
        raise failure or PlayFailure(node, "scorer", f"{view.call.id}: {type(error).__name__}: {error}") from error
    if isinstance(score, ToolResult):
        if score.failure is not None:
            raise from_tool(node, score.failure)
        score = score.value
    if not isinstance(score, Score) or isinstance(score.value, bool) or not is_finite_number(score.value):
        raise PlayFailure(node, "scorer", f"{view.call.id}: the score is {shown(score)}; it must be a Score of a finite number")
    return score
