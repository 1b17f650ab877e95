"""The controller: plays many workflow instances at once over a sampling engine and tools (UnityMAS-O, sections 5.1 and 5.2).

    with Controller(workflow, assignment, generator, renderer) as controller:
        rollout = await controller.rollout(tasks, step=3, plays=4)

Each instance is a task of one event loop, so that whoever waits, for a long answer or a slow tool, waits alone; plain tool functions run in
threads. What an instance does depends on its identity and on what the tools answered, never on who else is played or on who was faster:
every request's seed is (step, task, agent, request, branch), where the request is its number among all that the workflow could make.

**Failures.** What the infrastructure breaks (a failed `ToolResult`, a deadline, a lost connection) fails the instance. It is played again
from its start with the same seeds, `attempts` times in all; then it is aborted as a whole, and says why (law 9). A parser, tool or
condition with a fault of its own ends the rollout with an error that names it (law 10).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marl_llm.activity import doing
from marl_llm.sampling.requests import Generator, SamplingParams
from marl_llm.tools.results import FailureKind
from marl_llm.tools.waiting import Expired, within
from marl_llm.workflows.assignment import Assignment, Inside
from marl_llm.workflows.calls import Speaker
from marl_llm.workflows.checks import SCORED, check_shown
from marl_llm.workflows.coroutines import LIMIT, Coroutines
from marl_llm.workflows.errors import PlayFailure, RolloutError, WorkflowError
from marl_llm.workflows.finite import is_finite
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import Call, Each, Together, walk
from marl_llm.workflows.play import PICKS, Draw, Forks, Play, any_draw, finish, run_all
from marl_llm.workflows.renderer import Renderer
from marl_llm.workflows.roles import AgentTool
from marl_llm.workflows.scoring import Scoring
from marl_llm.workflows.threads import Threads
from marl_llm.workflows.trajectory import Episode, FailedAttempt, Task, Trajectory

MAX_NUMBER = 2**31  # seeds are made of numbers below it


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rollout:
    """Everything that was played in one step, in the order of the tasks and plays, whoever finished first."""

    workflow: Workflow
    assignment: Assignment
    step: int
    plays: int
    episodes: tuple[Episode, ...]
    seconds: float
    pick: str | None = None  # which candidate of a fork forks again; see `Controller`
    hung: Mapping[str, int] = dataclasses.field(default_factory=dict)  # calls of plain tools that ended after their deadline, or never

    def __repr__(self) -> str:
        aborted = sum(episode.aborted for episode in self.episodes)
        return f"Rollout({self.workflow.name}, step {self.step}: {len(self.episodes)} episodes, {aborted} aborted)"

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Of all episodes that are not aborted."""
        return tuple(trajectory for episode in self.episodes for trajectory in episode.trajectories)


@runtime_checkable
class EpisodePlayer(Protocol):
    """Plays the episodes of a rollout: a `Controller`, or what takes its place."""

    def play(self, tasks: Iterable[Task], step: int = 0, plays: int = 1, *, share: bool = False) -> Rollout:
        """See `Controller.rollout`."""
        ...

    def check_played(self, episodes: Sequence[Episode]) -> None:
        """See `Controller.check_played`."""
        ...


class Controller:
    """Plays one workflow; a context manager, because it owns threads.

    Args:
      workflow, assignment: who plays what.
      generator: whoever answers requests for the assignment's policies (`marl_llm.sampling.Generator`); None if there is no policy.
      renderer: how models read and write: one for all, or by model. Scripted players may have one too, for imitation data.
      branching: role -> K: its prompt gets K responses and the play goes on from each (tree sampling); its call must not run beside others.
      pick: which of the K candidates forks again at later calls: None, all of them (K to the power of the calls); "first", "random", or
        "greedy", the one that was paid most (AT-GRPO, Algorithm 1).
      score: when the candidates of a `pick` are scored; by default as the workflow says. "when_made": each on the state after it and the
        tools that follow it up to the next role, so that N calls cost N·K responses, and calls beside others may fork too. "at_end": the
        others are played to their ends without further forks, n + (K−1)·n·(n+1)/2 responses for n calls.
      alpha, local_weight: of team and of local rewards when "greedy" picks.
      attempts: how often an instance is played before it is aborted.
      timeout_s: of one attempt at one instance, waiting in queues of tools not counted; None: only the nodes' deadlines count.
      concurrency: most instances under way; the others wait in order.
      threads: for the plain function of each tool, so that a tool that hangs holds up no other. A call's deadline begins once it has one; a
        call that is late leaves its thread behind, and another takes its place (`workflows.threads`).
      draw: decides for `pick="random"`, see `play.Draw`; `sampling.pick_by_identity` of the generator's key draws as compiled play does.
      calls: of each async tool at a time; the others wait, and their deadline begins with them (`workflows.coroutines`).
      settings: how tokens are drawn, in place of the roles' own, e.g. `SamplingParams(temperature=0)` for a greedy evaluation.

    Raises:
      WorkflowError: an unassigned role, a policy without a renderer, a role that branches where it cannot.
    """

    def __init__(
        self,
        workflow: Workflow,
        assignment: Assignment,
        generator: Generator | None,
        renderer: Renderer | Mapping[str, Renderer],
        branching: Mapping[str, int] | None = None,
        attempts: int = 2,
        timeout_s: float | int | None = None,
        concurrency: int = 1024,
        threads: int = 32,
        calls: int = LIMIT,
        settings: SamplingParams | None = None,
        pick: str | None = None,
        alpha: float | int = 1.0,
        local_weight: float | int = 1.0,
        score: str | None = None,
        draw: Draw = any_draw,
    ):
        assignment.check(workflow)
        if min(attempts, concurrency, threads, calls) < 1 or (timeout_s is not None and timeout_s <= 0):
            raise WorkflowError("attempts, concurrency, threads, calls and timeout_s must be above 0")
        self.workflow, self.assignment = workflow, assignment
        self._renderer = dict(renderer) if isinstance(renderer, Mapping) else dict.fromkeys(assignment.roles.values(), renderer)
        for role in workflow.roles:
            model = assignment.roles[role]
            if isinstance(assignment.model(role), Inside) and (generator is None or model not in self._renderer):
                lacks = "a generator" if generator is None else "an entry in renderer"
                raise WorkflowError(f"the role {role!r} is played by the policy {model!r}, which needs {lacks}")
        if pick not in (None, *PICKS):
            raise WorkflowError(f"pick={pick!r} is unknown; choose None or one of {', '.join(PICKS)}")
        branching = checked_branching(workflow, branching or {}, pick, score)
        scored = when_scored(workflow, pick, score) if branching else "at_end"
        self._forks = Forks(branching, pick, alpha, local_weight, scored, draw)
        self.scoring: Callable[[Task], Any] = functools.partial(Scoring, workflow)
        self.settings = settings
        self._attempts, self._timeout_s, self._concurrency = attempts, timeout_s, concurrency
        self._threads, self._coroutines = Threads(threads), Coroutines(calls)
        self.speaker = Speaker(workflow, assignment, generator, self._renderer, self._threads, self._coroutines, settings)

    def close(self) -> None:
        """Releases the threads; results of calls under way are dropped."""
        self._threads.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def play(
        self, tasks: Iterable[Task], step: int = 0, plays: int = 1, *, share: bool = False, heard: Callable[[Episode], None] | None = None
    ) -> Rollout:
        """`rollout` for callers that do not await: scripts, and notebooks, whose own event loop is running and is left alone."""
        return finish(self.rollout(tasks, step, plays, share=share, heard=heard))

    async def rollout(
        self, tasks: Iterable[Task], step: int = 0, plays: int = 1, *, share: bool = False, heard: Callable[[Episode], None] | None = None
    ) -> Rollout:
        """Plays every task `plays` times, all at once.

        Args:
          tasks: distinct numbers.
          step: of training; part of every seed.
          plays: plays per task, e.g. the group of GRPO. They differ in their seeds only.
          share: these are only some of the step's tasks; whoever joins the shares calls `check_played`.
          heard: is given each episode when it ends, in the event loop: it must not wait.

        Returns:
          The episodes in order of task, then play. Aborted ones are among them.

        Raises:
          WorkflowError: a task without a field that the workflow needs, two of one number, or a fault in a parser, tool or condition.
          RolloutError: every single episode is aborted.
        """
        tasks = list(tasks)
        start, hung = time.perf_counter(), self.hung()
        _check_tasks(self.workflow, tasks)
        if not 0 <= step < MAX_NUMBER or plays < 1:
            raise WorkflowError(f"step={step} must be 0 or more and plays={plays} at least 1")
        gate = asyncio.Semaphore(self._concurrency)

        async def run_episode(task: Task, play: int) -> Episode:
            async with gate:
                episode = await self.episode(task, step, play, plays)
            work.done += 1
            if heard is not None:
                heard(episode)
            return episode

        with doing("playing: episode", len(tasks) * plays) as work:
            episodes = await run_all([run_episode(task, play) for task in tasks for play in range(plays)])
        if not share:
            self.check_played(episodes)
        return self.joined(episodes, step, plays, time.perf_counter() - start, hung)

    def joined(self, episodes: Sequence[Episode], step: int, plays: int, seconds: float, hung: Mapping[str, int]) -> Rollout:
        """A rollout of these episodes; `hung`: what `hung()` was when it began."""
        late = {tool: count - hung.get(tool, 0) for tool, count in self.hung().items()}
        return Rollout(self.workflow, self.assignment, step, plays, tuple(episodes), seconds, self._forks.pick, late)

    def check_played(self, episodes: Sequence[Episode]) -> None:
        """Raises `RolloutError` if there are episodes and every one is aborted."""
        if episodes and all(episode.aborted for episode in episodes):
            failure = episodes[0].failures[-1]
            raise RolloutError(
                f"all {len(episodes)} plays of workflow {self.workflow.name!r} failed; the first at node {failure.node!r}: "
                f"{failure.kind}: {failure.message}"
            )

    def hung(self) -> dict[str, int]:
        """Calls that were late, by tool: one is plain or async, never both."""
        return {**self._threads.hung(), **self._coroutines.hung()}

    async def episode(self, task: Task, step: int, play: int, plays: int) -> Episode:
        """One play of one task, tried again after a failure; aborted if every attempt failed."""
        start, failures = time.perf_counter(), []
        for attempt in range(1, self._attempts + 1):
            attempted = Play(self.workflow, self.speaker, self.scoring(task), self._forks, task, (step, play, plays))
            try:
                trajectories, candidates = await within(self._timeout_s, attempted.run())
            except PlayFailure as failure:
                failures.append(FailedAttempt(failure.node, failure.kind, str(failure)))
                if not failure.retriable:
                    break
            except Expired:
                message = f"not finished within {self._timeout_s} s"
                failures.append(FailedAttempt(attempted.now, FailureKind.DEADLINE.value, message))
            else:
                return Episode(task, step, play, trajectories, tuple(failures), attempt, (), time.perf_counter() - start, candidates)
        remains = tuple(sorted(attempted.log, key=lambda event: (event.request_number, event.branch)))
        return Episode(task, step, play, (), tuple(failures), attempt, remains, time.perf_counter() - start)


def _check_tasks(workflow: Workflow, tasks: list[Task]) -> None:
    seen: set[int] = set()
    for task in tasks:
        if not isinstance(task, Task):
            raise WorkflowError(f"tasks hold a {type(task).__name__}; make Task(number, fields, hidden) of each")
        if not 0 <= task.number < MAX_NUMBER or task.number in seen:
            raise WorkflowError(f"task {task.number}: numbers must be distinct, 0 or more and below 2**31")
        seen.add(task.number)
        for kind, values, others, declared in (
            ("fields", task.fields, workflow.hidden, "hidden: give it in hidden"),
            ("hidden", task.hidden, workflow.inputs, "inputs: give it in fields"),
        ):
            if misplaced := [name for name in values if name in others]:
                where = f"which workflow {workflow.name!r} declares as {declared}"
                raise WorkflowError(f"task {task.number}: {kind} holds {misplaced[0]!r}, {where}")
            if strange := [name for name, value in values.items() if not is_finite(value)]:
                raise WorkflowError(f"task {task.number}: {kind} gives {strange[0]!r} a number that is not finite, which no record holds")
        for kind, names, values in (("fields", workflow.inputs, task.fields), ("hidden", workflow.hidden, task.hidden)):
            if missing := [name for name in names if name not in values]:
                raise WorkflowError(f"task {task.number}: {kind} lacks {missing[0]!r}, which workflow {workflow.name!r} needs")
            if extra := [name for name in values if name not in names]:
                raise WorkflowError(
                    f"task {task.number}: {kind} holds {extra[0]!r}, which workflow {workflow.name!r} does not declare; add it there"
                )


def when_scored(workflow: Workflow, pick: str | None, score: str | None) -> str:
    """When candidates are scored: as asked for, or as the workflow says. Without a pick every candidate goes on to the end.

    Raises `WorkflowError` for "when_made" of a workflow that says "at_end", or without a pick.
    """
    if score not in (None, *SCORED):
        raise WorkflowError(f"score={score!r} is unknown; choose None or one of {', '.join(SCORED)}")
    if score == "when_made" and pick is None:
        raise WorkflowError("score='when_made' scores candidates so that one is picked: say which with pick='greedy', 'first' or 'random'")
    if score == "when_made" and workflow.score == "at_end":
        raise WorkflowError(f"score='when_made': workflow {workflow.name!r} says score='at_end', because its pay shows only at the end")
    return "at_end" if pick is None else score or workflow.score


def checked_branching(
    workflow: Workflow, branching: Mapping[str, int], pick: str | None = None, score: str | None = None
) -> dict[str, int]:
    """A copy. Raises `WorkflowError` naming a role that does not exist, cannot fork, or whose pay shows later than it is picked by."""
    agents = {tool.role: name for name, role in workflow.roles.items() for tool in role.tools if isinstance(tool, AgentTool)}
    for role, branches in branching.items():
        if role not in workflow.roles:
            raise WorkflowError(f"branching: there is no role {role!r}; the roles are {', '.join(workflow.roles)}")
        if branches < 2:
            raise WorkflowError(f"branching: {role}={branches} forks nothing; leave it out, or ask for 2 or more")
        if workflow.roles[role].tools:
            raise WorkflowError(f"branching: the role {role!r} calls tools within its response, which is no place for a fork")
        if role in agents:
            raise WorkflowError(
                f"branching: the role {role!r} is a tool of {agents[role]!r} and speaks within its response, which is no place for a fork; "
                "play whole instances several times (plays=K), as recipe.name=grpo does"
            )
    if branching and when_scored(workflow, pick, score) == "when_made":
        check_shown(workflow, branching)
        return dict(branching)
    concurrent = [inside for node in walk(workflow.body) if isinstance(node, Together | Each) for inside in walk(node)]
    for node in concurrent:
        if isinstance(node, Call) and node.role.name in branching:
            raise WorkflowError(
                f"branching: node {node.name!r} runs beside others, where a play cannot fork to its end; play whole instances "
                "several times (plays=K), or pick one and score candidates when they are made"
            )
    return dict(branching)
