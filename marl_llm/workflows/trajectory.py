"""What happened: role calls and tool calls as a graph of values, along each way through the workflow.

An `Episode` is one play of one task. It holds one `Trajectory`, or several that share their beginning where a role's candidates were all
carried on (tree sampling). An event knows the events that it followed, so that the graph can be drawn from any trajectory. All of these
print themselves in one line: asyncio prints what a task returned when its loop closes, and printing arrays takes longer than playing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from marl_llm.hints import suggestion
from marl_llm.text import Message
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.roles import Fields


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem: a question, a programming problem.

    Attributes:
      number: its place in its data set, part of every seed; 0 <= number < 2**31.
      fields: what everyone may read; `inputs` of the workflow.
      hidden: what only tools, conditions and rewards may read: gold answers, hidden tests.
      split: which split it belongs to, for transcripts and checks.
      stratum: the kind of task, by which figures are compared, e.g. "regression"; "" where an environment has one kind.
      cluster: tasks of one cluster are alike, e.g. made by one template: an interval counts them as one; "": it is a cluster of its own.
    """

    number: int
    fields: Fields
    hidden: Fields = dataclasses.field(default_factory=dict)
    split: str = "train"
    stratum: str = ""
    cluster: str = ""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RoleCall:
    """One response of one role: what it read, what it said, what its words meant.

    Log-probs are None where no policy of this program spoke (outside models and scripts).
    """

    id: str  # node, number of the request and branch; unique among all plays of a task
    node: str
    role: str
    agent: int  # the role's number in its workflow
    model: str
    parents: tuple[str, ...]  # ids of the events that this one followed
    turn: int
    request_number: int  # number of this request among all that the workflow could make
    items: tuple[int, ...]  # which item of each `each` around it
    group: str  # calls of the same group answered the same prompt
    choice: int  # which of the candidates of its group it is
    branch: int  # number of the path that led here and of the play
    seed: tuple[int, ...]
    prompt: str  # as text; of a conversation that continues, what extends it
    prompt_ids: tuple[int, ...]
    text: str
    tokens: Int[np.ndarray, "R"]  # the ids that were drawn, stop token included
    log_probs: Float[np.ndarray, "R"] | None  # of the raw policy
    sampled_log_probs: Float[np.ndarray, "R"] | None  # of the distribution drawn from
    finish: str
    version: int  # of the model's parameters that drew the first token
    writes: Mapping[str, Any]  # output fields; empty for a response that only called tools
    illegal: str | None  # why the format is broken; None: it is not
    trimmed: int = 0  # items or characters that were cut from the prompt to fit its budget
    entropy: Float[np.ndarray, "R"] | None = None  # of the raw policy at each token, nats
    kept_ids: Int[np.ndarray, "R M"] | None = None  # the tokens that each was drawn from, where the settings hand them back
    replaced: int = 0  # characters of the prompt and the response that were no valid text and became U+FFFD
    versions: Int[np.ndarray, "R"] | None = None  # of the parameters that drew each token; None: all are `version`
    unfinished_think: bool | None = None  # the response ended within a think block; None: its template has none, or no policy spoke
    rewritten: bool | None = None  # its chat template would have written another prompt; None: a first prompt, or no template
    tool_use: str = ""  # of a sub-agent: the id of the `ToolUse` that its response answers; "": the workflow asked it
    messages: tuple[Message, ...] = ()  # the whole prompt as text; records leave it out, and so do episodes of other programs

    def __repr__(self) -> str:
        return f"RoleCall({self.id}, {self.text[:60]!r}{'' if self.legal else ', illegal'})"

    @property
    def legal(self) -> bool:
        """The format's verdict."""
        return self.illegal is None

    @property
    def truncated(self) -> bool:
        """Whether the budget ended the response."""
        return self.finish == "length"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ToolUse:
    """One tool call: what it wrote, and how long it took."""

    id: str
    node: str
    parents: tuple[str, ...]
    turn: int
    request_number: int
    items: tuple[int, ...]
    branch: int
    writes: Mapping[str, Any]
    seconds: float = 0.0
    attempts: int = 1
    replaced: int = 0  # characters of the answer (of a role's call: of its arguments too) that were no valid text
    refused: str | None = None  # why a call that a role made could not be served; None: it was

    def __repr__(self) -> str:
        return f"ToolUse({self.id})"


Event = RoleCall | ToolUse


def state_writes(event: Event) -> Fields:
    """What an event changes in the state; nothing if a sub-agent spoke, whose words only its caller reads."""
    return {} if isinstance(event, RoleCall) and event.tool_use else event.writes


@dataclasses.dataclass(frozen=True)
class Score:
    """What a scorer said of one action; see `scoring`.

    Attributes:
      value: a coach's lies in [0, 10]. None: there is no score, and `missing` says why; only where a scorer says missing="mask".
      correct: whether the action's answer is right, where the scorer was asked that.
      reason: for people; no role ever reads it.
      members: values of the members of an ensemble.
      capped: whether arithmetic lowered the value, see `CoachGuide.cap`.
      cached: whether it came from a cache and cost nothing.
      missing: kind of failure and message, where there is no value.
      better: what the scorer would have said in the action's place; "": nothing. A team may imitate it (`config.coach.corrections`).
    """

    value: float | int | None
    correct: bool | None = None
    reason: str = ""
    members: tuple[float | int, ...] = ()
    capped: bool = False
    cached: bool = False
    missing: str = ""
    better: str = ""


@dataclasses.dataclass(frozen=True)
class Earned:
    """What one call earned: the sums of its awards, and each component. team + local = Σ components."""

    team: float = 0.0
    local: float = 0.0
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    team_paid: bool = False  # whether there was a team award, be it 0


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """One way through the workflow, from the task to its end.

    Attributes:
      task: the problem.
      events: in the order of play; of what ran at the same time, in the order written.
      fields: the state at the end, hidden fields included.
      turns: how many turns were begun.
      branch: number of this path and play; the branch of its last fork.
      scores: call id -> scorer -> what it said.
      earned: call id -> what the workflow's rewards paid it, computed once when the trajectory ended; of a candidate that was scored when
        it was made, what it was paid then.
      roles: names of the workflow's roles; empty for a trajectory that was read from a file.
    """

    task: Task
    events: tuple[Event, ...]
    fields: Fields
    turns: int
    branch: int
    scores: Mapping[str, Mapping[str, Score]] = dataclasses.field(default_factory=dict)
    earned: Mapping[str, Earned] = dataclasses.field(default_factory=dict)
    roles: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Trajectory(task {self.task.number}: {' '.join(event.node for event in self.events)})"

    @property
    def calls(self) -> tuple[RoleCall, ...]:
        """Role calls in the order of play."""
        return tuple(event for event in self.events if isinstance(event, RoleCall))

    def by(self, *roles: str) -> tuple[RoleCall, ...]:
        """Calls of these roles; a role that did not speak has none. Raises `WorkflowError` for a role that the workflow does not have."""
        if unknown := [role for role in roles if self.roles and role not in self.roles]:
            raise WorkflowError(f"by({unknown[0]!r}): the workflow has no such role; {suggestion(unknown[0], self.roles)}")
        return tuple(call for call in self.calls if call.role in roles)

    def written(self, field: str) -> tuple[tuple[int, Any], ...]:
        """(turn, value) each time that this field was written, in the order of play."""
        return tuple((event.turn, event.writes[field]) for event in self.events if field in state_writes(event))

    def per_turn(self, field: str) -> dict[int, Any]:
        """The last value that each turn wrote to this field; turns that wrote none are left out."""
        return dict(self.written(field))


@dataclasses.dataclass(frozen=True)
class FailedAttempt:
    """Why a play could not be finished: the infrastructure's doing, or a prompt beyond its budget."""

    node: str
    kind: str  # a `FailureKind`, or "prompt"
    message: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Episode:
    """One play of one task.

    Attributes:
      trajectories: one, or one per path where candidates were carried on; none if the play is aborted.
      failures: of every attempt that failed.
      attempts: how often it was tried.
      aborted: it has no outcome, and none of its samples may be trained (law 9).
      remains: what the last attempt of an aborted play had done, for people.
      seconds: wall time, all attempts.
      candidates: responses that were scored when they were made and not picked: trajectories up to the tools that follow such a response,
        which is the last of their calls and the only one in `earned`.
    """

    task: Task
    step: int
    play: int
    trajectories: tuple[Trajectory, ...]
    failures: tuple[FailedAttempt, ...] = ()
    attempts: int = 1
    remains: tuple[Event, ...] = ()
    seconds: float = 0.0
    candidates: tuple[Trajectory, ...] = ()

    def __repr__(self) -> str:
        return f"Episode({self.name}, {'aborted' if self.aborted else f'{len(self.trajectories)} trajectories'})"

    @property
    def aborted(self) -> bool:
        """Whether it could not be finished."""
        return not self.trajectories

    @property
    def name(self) -> str:
        """Identity within a run: step, task and play."""
        return f"{self.step}/{self.task.number}/{self.play}"

    def events(self) -> tuple[Event, ...]:
        """All events of all ways, each once, parents first."""
        seen: dict[str, Event] = {}
        for trajectory in (*self.trajectories, *self.candidates):
            seen.update((event.id, event) for event in trajectory.events)
        return tuple(seen.values())
