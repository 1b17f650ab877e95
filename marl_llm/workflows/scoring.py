"""Asynchronous scorers: a coach, a judge model, a slow metric, asked once per action and awaited before a play ends.

    async def judge(view: ActionView) -> Score: ...

    Workflow(..., scorers=(Scorer("coach", judge),), rewards=(scored("coach", weight=0.1), ...))

A scorer is no part of the graph: it reads what an action was and what it led to, and no role ever reads what it says. Scores stand in the
trajectory (`scores[call id][scorer]`), where rewards find them; they are stored, and a replay takes them from the record. A scorer that
fails, is late or gives no finite number voids the play (law 9): there is no score in its place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from marl_llm.tools.results import FailureKind, ToolResult
from marl_llm.workflows.errors import PlayFailure, WorkflowError, from_error, from_tool
from marl_llm.workflows.roles import Fields, Role
from marl_llm.workflows.trajectory import Event, RoleCall, Score, Task, Trajectory

MOMENTS = ("action", "end")


@dataclasses.dataclass(frozen=True, eq=False)
class ActionView:
    """What a scorer sees of one action.

    Attributes:
      workflow: its name.
      role: who acted, with its prompt's template and budgets.
      call: what the role read and said, verbatim, and what is wrong with its format.
      task: the task's open fields.
      earlier: what happened before, as events.
      later: what followed; empty for `when="action"`.
      outcome: the open fields at the end, empty for `when="action"`.
      truth: the task's hidden fields, for a scorer with `truth=True`; otherwise empty.
    """

    workflow: str
    role: Role
    call: RoleCall
    task: Fields
    earlier: tuple[Event, ...]
    later: tuple[Event, ...]
    outcome: Fields
    truth: Fields


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """Who scores actions.

    Attributes:
      name: of its scores.
      ask: `async`; the view of an action -> a `Score`, or a `ToolResult` of one.
      roles: whose actions; by default everybody's.
      when: "end", when the play is over, with what followed; or "action", at once and beside the rest of the play.
      truth: whether the view holds the task's hidden fields.
      timeout_s: of one score.

    Raises:
      WorkflowError: an `ask` that is no function, an unknown `when`, a deadline that is not above 0.
    """

    name: str
    ask: Callable[[ActionView], Awaitable[Any]]
    roles: tuple[str, ...] | None = None
    when: str = "end"
    truth: bool = False
    timeout_s: float | int = 120.0

    def __post_init__(self):
        if not callable(self.ask):
            raise WorkflowError(f"scorer {self.name!r}: ask is a {type(self.ask).__name__}; it must be an async function of a view")
        if self.when not in MOMENTS:
            raise WorkflowError(f"scorer {self.name!r}: when={self.when!r} is unknown; choose one of {', '.join(MOMENTS)}")
        if self.timeout_s <= 0:
            raise WorkflowError(f"scorer {self.name!r}: timeout_s={self.timeout_s} must be above 0")


class Scoring:
    """The scores of one play: every scorer is asked once per action, however many trajectories the action is part of."""

    def __init__(self, workflow: Any, task: Task):
        self._workflow, self._task = workflow, task
        self._asked: dict[tuple[str, str], asyncio.Task[Score]] = {}

    def acted(self, call: RoleCall, earlier: tuple[Event, ...]) -> None:
        """Asks those who score at once."""
        for scorer in self._workflow.scorers:
            if scorer.when == "action":
                self._ask(scorer, call, earlier)

    async def scores(self, trajectory: Trajectory) -> dict[str, dict[str, Score]]:
        """Call id -> scorer -> score, of a trajectory that is over. Raises `PlayFailure`."""
        found: dict[str, dict[str, Score]] = {}
        events = trajectory.events
        for number, event in enumerate(events) if self._workflow.scorers else ():
            if isinstance(event, RoleCall):
                for scorer in self._workflow.scorers:
                    self._ask(scorer, event, events[:number], events[number + 1 :], trajectory.fields)
        for (name, call), task in list(self._asked.items()):
            found.setdefault(call, {})[name] = await task
        ids = {call.id for call in trajectory.calls}
        return {call: scores for call, scores in found.items() if call in ids}

    def cancel(self) -> None:
        """Lets go of scores that nobody awaits any more."""
        for task in self._asked.values():
            task.cancel()

    def _ask(self, scorer: Scorer, call: RoleCall, earlier: tuple[Event, ...], later: tuple[Event, ...] = (), end: Fields = {}) -> None:  # noqa: B006
        key = (scorer.name, call.id)
        if key in self._asked or (scorer.roles is not None and call.role not in scorer.roles):
            return
        outcome = {name: value for name, value in end.items() if name not in self._workflow.hidden}
        truth = self._task.hidden if scorer.truth else {}
        role = self._workflow.roles[call.role]
        view = ActionView(self._workflow.name, role, call, self._task.fields, earlier, later, outcome, truth)
        task = self._asked[key] = asyncio.get_running_loop().create_task(_score(scorer, view))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error is read even where nobody awaits it any more


class Recorded:
    """The scores of a play that is played again: nobody is asked."""

    def __init__(self, scores: Mapping[str, Mapping[str, Score]]):
        self._scores = scores

    def acted(self, call: RoleCall, earlier: tuple[Event, ...]) -> None:
        """Nothing: what was said is known."""

    async def scores(self, trajectory: Trajectory) -> dict[str, dict[str, Score]]:
        """As recorded."""
        return {call.id: dict(self._scores[call.id]) for call in trajectory.calls if call.id in self._scores}

    def cancel(self) -> None:
        """Nothing is under way."""


async def _score(scorer: Scorer, view: ActionView) -> Score:
    """One score. Whatever goes wrong voids the play: a scorer reads what models wrote, and may be one."""
    node = f"scorer {scorer.name}"
    try:
        async with asyncio.timeout(scorer.timeout_s) as deadline:
            found = await scorer.ask(view)
    except PlayFailure:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and deadline.expired():
            raise PlayFailure(node, FailureKind.DEADLINE.value, f"no score of {view.call.id} within {scorer.timeout_s} s") from None
        failure = from_error(node, error)
        raise failure or PlayFailure(node, "scorer", f"{view.call.id}: {type(error).__name__}: {error}") from error
    if isinstance(found, ToolResult):
        if found.failure is not None:
            raise from_tool(node, found.failure)
        found = found.value
    if not isinstance(found, Score) or isinstance(found.value, bool) or not math.isfinite(found.value):
        raise PlayFailure(node, "scorer", f"{view.call.id}: the score is {found!r:.200}; it must be a Score of a finite number")
    return found
