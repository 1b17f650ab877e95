"""What a scorer sees of one action, and what the author of an environment tells it about the team.

A view holds nothing of the task's hidden fields, nor what tools made of them, unless the scorer may know the truth: `Workflow.secret`
names those fields, and is found in the graph before anyone plays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.nodes import Call, walk
from marl_llm.workflows.roles import Fields, Role
from marl_llm.workflows.trajectory import Event, RoleCall, Task, ToolUse, state_writes

TRUTHS = ("none", "last", "last_role", "all")
MOMENTS = ("action", "end")


@dataclasses.dataclass(frozen=True, eq=False)
class ActionView:
    """What a scorer sees of one action.

    Attributes:
      workflow: its name.
      role: who acted, with its prompt's template and budgets.
      call: what the role read and said, verbatim, and what is wrong with its format.
      task: the task's open fields.
      stratum: the kind of task, see `Task.stratum`.
      before: the open fields when the role was asked, without items of an `each` and what ran beside it.
      observations: the tool calls that this action caused: those that follow it before another role speaks.
      earlier: what happened before, as events.
      later: what followed; empty for `when="action"`, but for what is in `observations`.
      outcome: the open fields at the end, empty for `when="action"`.
      truth: hidden fields of the task and what tools made of them, for a scorer that may know them; otherwise empty.
      history: figures of the run so far, for a coach with a strategy.
      result: of the play, as `Scorer.result` measures it, once it is over; None where the scorer has none.
      residual: what later actions left unexplained of the result, for a coach that goes backwards; None: it judges the action itself.
    """

    workflow: str
    role: Role
    call: RoleCall
    task: Fields
    earlier: tuple[Event, ...] = ()
    later: tuple[Event, ...] = ()
    outcome: Fields = dataclasses.field(default_factory=dict)
    truth: Fields = dataclasses.field(default_factory=dict)
    stratum: str = ""
    before: Fields = dataclasses.field(default_factory=dict)
    observations: tuple[ToolUse, ...] = ()
    history: Mapping[str, float] = dataclasses.field(default_factory=dict)
    result: float | int | None = None
    residual: str | None = None

    @property
    def after(self) -> dict[str, Any]:
        """The open fields after the action and the tools that it caused."""
        fields = {**self.before, **self.call.writes}
        for use in self.observations:
            fields |= use.writes
        return fields

    @property
    def own_earlier(self) -> tuple[RoleCall, ...]:
        """This role's earlier actions in the play."""
        return tuple(event for event in self.earlier if isinstance(event, RoleCall) and event.role == self.call.role)


@dataclasses.dataclass(frozen=True, eq=False)
class CoachGuide:
    """What the author of an environment tells a coach: `Environment(..., guide=CoachGuide(...))`.

    Attributes:
      workflow_text: what the team does and who is in it, in the order in which they speak.
      role_texts: role -> what it must deliver. Every role of the workflow.
      success: what decides whether a play succeeded.
      questions: role -> what to ask about its actions, one question each; of other roles, `prompts.QUESTIONS`.
      scale: what the numbers from 0 to 10 mean here; "": `prompts.SCALE`.
      rubric: a coach without a model: view -> a `Score`, or (value, correct, reason) with a value in [0, 10] and correct True, False or
        None. A pure function.
      brief: what a small coach (`config.coach.kind=small`) reads in place of a prompt: view -> a text of few different words. A pure
        function that lays out what happened and judges nothing.
      contribution: view with a `result` -> what the action changed of it, in [-1, 1], e.g. by putting a teacher's action in its place; what
        a rubric says when it goes backwards (`config.coach.backward`). A pure function.
      better: view -> what a teacher would have said in the action's place, or "": what a rubric corrects. A pure function.
      corrects: whether coaches are asked for such a text beside the score (`config.coach.corrections`).
      version: of the rubric and the texts; enters the names of caches.
      feedback: view -> what the tools said, as text, in place of the fields that they wrote.
      cap: view -> the highest score that its facts allow, or None. Arithmetic that no model is trusted with.
      strategic: whether the rubric reads `ActionView.history`, so that it means nothing without (`config.coach.history`).
      when: when actions are scored unless the config says otherwise: "action" or "end".

    Raises:
      WorkflowError: no text, or an unknown `when`.
    """

    workflow_text: str
    role_texts: Mapping[str, str]
    success: str = ""
    questions: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    scale: str = ""
    rubric: Callable[[ActionView], Any] | None = None
    brief: Callable[[ActionView], str] | None = None
    contribution: Callable[[ActionView], float] | None = None
    better: Callable[[ActionView], str] | None = None
    corrects: bool = False
    version: str = "1"
    feedback: Callable[[ActionView], str] | None = None
    cap: Callable[[ActionView], float | int | None] | None = None
    strategic: bool = False
    when: str = "end"

    def __post_init__(self):
        if not self.workflow_text.strip():
            raise WorkflowError("CoachGuide: workflow_text is empty; say what the team does and who is in it")
        if self.when not in MOMENTS:
            raise WorkflowError(f"CoachGuide: when={self.when!r} is unknown; choose one of {', '.join(MOMENTS)}")

    def check(self, workflow: Any) -> None:
        """Raises `WorkflowError` naming a role without a text, or a text or question without a role."""
        for role in workflow.roles:
            if role not in self.role_texts:
                raise WorkflowError(f"CoachGuide of {workflow.name!r}: role_texts lacks the role {role!r}")
        for role in (*self.role_texts, *self.questions):
            if role not in workflow.roles:
                raise WorkflowError(f"CoachGuide of {workflow.name!r}: there is no role {role!r}; it has {', '.join(workflow.roles)}")


def _followed(events: Sequence[Event], call: RoleCall) -> list[Event]:
    """Those of the events that the call followed, and not what ran beside it."""
    ids, followed = set(call.parents), []
    for event in reversed(events):
        if event.id in ids:
            ids |= set(event.parents)
            followed.insert(0, event)
    return followed


class ViewMaker:
    """Makes the views of one play's actions."""

    def __init__(self, workflow: Any, task: Task):
        self._workflow, self._task = workflow, task
        self._secret = workflow.secret
        self._last_role = [node.role.name for node in walk(workflow.body) if isinstance(node, Call)][-1]

    def make(self, call: RoleCall, events: Sequence[Event], when: str, truth: str, end: Fields | None, history: Fields) -> ActionView:
        """The view of one call.

        Args:
          events: of the play up to now, or to its end.
          when: "end" shows what followed the action.
          truth: one of `TRUTHS`.
          end: all fields at the end of the play; None while it goes on.
        """
        number = next(i for i, event in enumerate(events) if event.id == call.id)
        knows = self._knows(call, events, truth, end is not None)
        shown = [event if knows else self._open(event) for event in events]
        caused, observations = {call.id}, []
        for event in shown[number + 1 :]:
            if isinstance(event, ToolUse) and caused & set(event.parents):
                caused.add(event.id)
                observations.append(event)
        before = {**self._workflow.start, **self._task.fields}
        for event in _followed(shown[:number], call):
            before |= state_writes(event)
        outcome = {name: value for name, value in (end or {}).items() if knows or name not in self._secret} if when == "end" else {}
        secrets = dict(self._task.hidden)
        for event in events:
            secrets |= {name: value for name, value in event.writes.items() if name in self._secret}
        return ActionView(
            self._workflow.name, self._workflow.roles[call.role], shown[number], self._task.fields, tuple(shown[:number]),
            tuple(shown[number + 1 :]) if when == "end" else (), outcome, secrets if knows else {}, self._task.stratum, before,
            tuple(observations), history,
        )  # fmt: skip

    def _knows(self, call: RoleCall, events: Sequence[Event], truth: str, over: bool) -> bool:
        """Whether the truth is shown with this action."""
        if truth in ("none", "all"):
            return truth == "all"
        if call.role != self._last_role:
            return False
        calls = [event for event in events if isinstance(event, RoleCall) and event.role == call.role]
        return truth == "last_role" or (over and calls[-1].id == call.id)

    def _open(self, event: Event) -> Event:
        """The event without what comes from hidden fields."""
        if not self._secret & set(event.writes):
            return event
        return dataclasses.replace(event, writes={name: value for name, value in event.writes.items() if name not in self._secret})
