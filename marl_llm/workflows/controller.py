"""The controller: plays many workflow instances at once over a sampling engine and tools (UnityMAS-O, sections 5.1 and 5.2).

    with Controller(workflow, assignment, generator, speech) as controller:
        rollout = await controller.rollout(tasks, step=3, plays=4)

Each instance is a task of one event loop, so that whoever waits, for a long answer or a slow tool, waits alone; plain tool functions run in
threads. What an instance does depends on its identity and on what the tools answered, never on who else is played or on who was faster:
every request's seed is (step, task, agent, place, branch), where the place numbers all requests that the workflow could make.

**Failures.** What the infrastructure breaks (a failed `ToolResult`, a deadline, a lost connection) fails the instance. It is played again
from its start with the same seeds, `attempts` times in all; then it is void as a whole, and says why (law 9). A parser, tool or condition
with a fault of its own ends the rollout with an error that names it (law 10).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from marl_llm.sampling.requests import Generator
from marl_llm.tools.results import FailureKind
from marl_llm.workflows.assignment import Assignment, Policy
from marl_llm.workflows.calls import Speaker
from marl_llm.workflows.failures import PlayFailure, RolloutError
from marl_llm.workflows.graph import Call, Choose, Each, Node, Repeat, Stop, Together, Tool, Workflow, walk
from marl_llm.workflows.graph import Sequence as InOrder
from marl_llm.workflows.roles import WorkflowError
from marl_llm.workflows.speech import Speech
from marl_llm.workflows.state import Round, State, Todo, merge, push
from marl_llm.workflows.trajectory import Episode, Event, Failure, Task, Trajectory

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

    def __repr__(self) -> str:
        return f"Rollout({self.workflow.name}, step {self.step}: {len(self.episodes)} episodes, {sum(e.void for e in self.episodes)} void)"

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Of all episodes that are not void."""
        return tuple(trajectory for episode in self.episodes for trajectory in episode.trajectories)


class Controller:
    """Plays one workflow; a context manager, because it owns threads.

    Args:
      workflow, assignment: who plays what.
      generator: whoever answers requests for the assignment's policies (`marl_llm.sampling.Generator`); None if there is no policy.
      speech: how models read and write: one for all, or by model. Scripted players may have one too, for imitation data.
      branching: role -> K: its prompt gets K responses and the play goes on from each (tree sampling); its call must not run beside others.
      attempts: how often an instance is played before it is void.
      timeout_s: of one attempt at one instance; None: only the nodes' deadlines count.
      concurrency: most instances under way; the others wait in order.
      threads: for plain tool functions. A call waits for a free one, within its deadline.

    Raises:
      WorkflowError: an unassigned role, a policy without speech, a role that branches where it cannot.
    """

    def __init__(
        self,
        workflow: Workflow,
        assignment: Assignment,
        generator: Generator | None,
        speech: Speech | Mapping[str, Speech],
        branching: Mapping[str, int] | None = None,
        attempts: int = 2,
        timeout_s: float | int | None = None,
        concurrency: int = 1024,
        threads: int = 32,
    ):
        assignment.check(workflow)
        if attempts < 1 or concurrency < 1 or threads < 1 or (timeout_s is not None and timeout_s <= 0):
            raise WorkflowError("attempts, concurrency, threads and timeout_s must be above 0")
        self.workflow, self.assignment = workflow, assignment
        self._speech = dict(speech) if isinstance(speech, Mapping) else dict.fromkeys(assignment.roles.values(), speech)
        for role in workflow.roles:
            model = assignment.roles[role]
            if isinstance(assignment.model(role), Policy) and (generator is None or model not in self._speech):
                lacks = "a generator" if generator is None else "an entry in speech"
                raise WorkflowError(f"the role {role!r} is played by the policy {model!r}, which needs {lacks}")
        self._branching = _checked_branching(workflow, branching or {})
        self._attempts, self._timeout_s, self._concurrency = attempts, timeout_s, concurrency
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="workflow-tool")
        self.speaker = Speaker(workflow, assignment, generator, self._speech, self._pool, max(self._branching.values(), default=1))

    def close(self) -> None:
        """Lets the threads go; calls under way finish unheard."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def play(self, tasks: Iterable[Task], step: int = 0, plays: int = 1) -> Rollout:
        """`rollout` for callers without an event loop."""
        return asyncio.run(self.rollout(tasks, step, plays))

    async def rollout(self, tasks: Iterable[Task], step: int = 0, plays: int = 1) -> Rollout:
        """Plays every task `plays` times, all at once.

        Args:
          tasks: distinct numbers.
          step: of training; part of every seed.
          plays: plays per task, e.g. the group of GRPO. They differ in their seeds only.

        Returns:
          The episodes in order of task, then play. Void ones are among them.

        Raises:
          WorkflowError: a task without a field that the workflow needs, two of one number, or a fault in a parser, tool or condition.
          RolloutError: every single episode is void.
        """
        tasks = list(tasks)
        start = time.perf_counter()
        _check_tasks(self.workflow, tasks)
        if not 0 <= step < MAX_NUMBER or plays < 1:
            raise WorkflowError(f"step={step} must be 0 or more and plays={plays} at least 1")
        gate = asyncio.Semaphore(self._concurrency)

        async def one(task: Task, play: int) -> Episode:
            async with gate:
                return await self.episode(task, step, play, plays)

        jobs = [one(task, play) for task in tasks for play in range(plays)]
        episodes = await run_all(jobs)
        if episodes and all(episode.void for episode in episodes):
            failure = episodes[0].failures[-1]
            raise RolloutError(
                f"all {len(episodes)} plays of workflow {self.workflow.name!r} failed; the first at node {failure.node!r}: "
                f"{failure.kind}: {failure.message}"
            )
        return Rollout(self.workflow, self.assignment, step, plays, tuple(episodes), time.perf_counter() - start)

    async def episode(self, task: Task, step: int, play: int, plays: int) -> Episode:
        """One play of one task, tried again after a failure; void if every attempt failed."""
        start, failures = time.perf_counter(), []
        for attempt in range(1, self._attempts + 1):
            one = _Play(self, task, (step, play, plays))
            try:
                async with asyncio.timeout(self._timeout_s):
                    ways = await one.run()
            except PlayFailure as failure:
                failures.append(Failure(failure.node, failure.kind, str(failure)))
                if not failure.retriable:
                    break
            except TimeoutError:
                message = f"not finished within {self._timeout_s} s"
                failures.append(Failure(one.now, FailureKind.DEADLINE.value, message))
            else:
                return Episode(task, step, play, ways, tuple(failures), attempt, (), time.perf_counter() - start)
        remains = tuple(sorted(one.log, key=lambda event: (event.place, event.branch)))
        return Episode(task, step, play, (), tuple(failures), attempt, remains, time.perf_counter() - start)


class _Play:
    """One attempt at one instance. `log` holds what it did, `now` names the node that began last."""

    def __init__(self, controller: Controller, task: Task, identity: tuple[int, int, int]):
        self.workflow, self.speaker = controller.workflow, controller.speaker
        self.branching = controller._branching
        self.task, self.identity = task, identity
        self.log: list[Event] = []
        self.now = "start"

    async def run(self) -> tuple[Trajectory, ...]:
        fields = {**self.workflow.start, **self.task.fields, **self.task.hidden}
        ways = await self.drive(State(fields, todo=push(None, self.workflow.body, 0)))
        _, play, plays = self.identity
        return tuple(Trajectory(self.task, s.events, s.fields, s.turn + 1, s.way * plays + play) for s in ways)

    async def drive(self, state: State) -> list[State]:
        """Carries out what is to do until nothing is; one state comes back, or one per way after a fork."""
        while state.todo is not None:
            node, base, rest = state.todo
            state = state._replace(todo=rest)
            if isinstance(node, Call):
                self.now = node.name
                ways = await self._speak(node, base, state)
                if len(ways) > 1:
                    done = await run_all([self.drive(way) for way in ways])
                    return [leaf for leaves in done for leaf in leaves]
                state = ways[0]
            elif isinstance(node, Tool):
                self.now = node.name
                used = await self.speaker.use(node, base, state, self.identity)
                self.log.append(used)
                state = state.after(used)
            elif isinstance(node, InOrder):
                state = state._replace(todo=push_parts(rest, node.parts, base))
            elif isinstance(node, Repeat | Round):
                state = self._loop(node, base, state)
            elif isinstance(node, Choose):
                state = self._choose(node, base, state)
            elif isinstance(node, Stop):
                while rest is not None and not isinstance(rest[0], Round):
                    rest = rest[2]
                state = state._replace(todo=None if rest is None else rest[2])
            else:
                state = await self._beside(node, base, state)
        return [state]

    async def _speak(self, node: Call, base: int, state: State) -> list[State]:
        """The states after a role spoke: one, or K where it branches."""
        branches = self.branching.get(node.role.name, 1)
        talks = [self.speaker.speak(node, base, state, self.task, self.identity, choice, branches) for choice in range(branches)]
        ways = await run_all(talks)
        for events, _ in ways:
            self.log += events
        return [after for _, after in ways]

    def _loop(self, node: Repeat | Round, base: int, state: State) -> State:
        """Begins the loop's next round, or leaves it."""
        loop, number = (node, 0) if isinstance(node, Repeat) else (node.loop, node.number)
        if number == loop.at_most or (number and loop.until and self._ask(loop.until, loop.reads, state, loop.name)):
            return state
        if state.spoken:
            state = state._replace(turn=state.turn + 1, spoken=False)
        todo: Todo = (Round(loop, number + 1), base, state.todo)
        return state._replace(todo=push(todo, loop.body, base + number * loop.body.size))

    def _choose(self, node: Choose, base: int, state: State) -> State:
        key = self._ask(node.by, node.reads, state, node.name)
        if key not in node.cases:
            raise WorkflowError(f"choice {node.name!r} returned {key!r}, which is none of its cases: {', '.join(map(repr, node.cases))}")
        for case, part in node.cases.items():
            if case == key:
                return state._replace(todo=push(state.todo, part, base))
            base += part.size
        raise AssertionError("a key of the cases is found among them")

    async def _beside(self, node: Together | Each, base: int, state: State) -> State:
        """What runs at the same time: each part on a state of its own; then their fields and events are brought together."""
        if isinstance(node, Together):
            bases = [base + sum(part.size for part in node.parts[:i]) for i in range(len(node.parts))]
            children = [state.child(push(None, part, start)) for part, start in zip(node.parts, bases)]
        else:
            items = state.fields[node.over]
            if isinstance(items, str) or not isinstance(items, Sequence):
                raise WorkflowError(
                    f"each {node.item} in {node.over}: the field holds {type(items).__name__}; it must be a list or a tuple"
                )
            children = [
                state.child(push(None, node.body, base + i * node.body.size), i, {node.item: item})
                for i, item in enumerate(items[: node.at_most])
            ]
        ends = await run_all([self.drive(child) for child in children])
        return merge(node, state, [end for (end,) in ends])

    def _ask(self, condition: Any, reads: tuple[str, ...], state: State, name: str) -> Any:
        try:
            return condition(*(state.fields[field] for field in reads))
        except Exception as error:
            raise WorkflowError(f"the condition {name!r} raised {type(error).__name__}: {error}") from error


def push_parts(todo: Todo, parts: Sequence[Node], base: int) -> Todo:
    """Puts parts before what is to do, each with its own place."""
    end = base + sum(part.size for part in parts)
    for part in reversed(parts):
        end -= part.size
        todo = push(todo, part, end)
    return todo


async def run_all(jobs: list[Coroutine]) -> list[Any]:
    """Results in order. The first error cancels the others; one of the program outweighs one of the infrastructure."""
    if len(jobs) == 1:
        return [await jobs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as several:
        errors = sorted(several.exceptions, key=lambda error: isinstance(error, PlayFailure))
        raise errors[0] from None
    return [task.result() for task in tasks]


def _check_tasks(workflow: Workflow, tasks: list[Task]) -> None:
    seen: set[int] = set()
    for task in tasks:
        if not 0 <= task.number < MAX_NUMBER or task.number in seen:
            raise WorkflowError(f"task {task.number}: numbers must be distinct, 0 or more and below 2**31")
        seen.add(task.number)
        for kind, names, given in (("fields", workflow.inputs, task.fields), ("hidden", workflow.hidden, task.hidden)):
            if missing := [name for name in names if name not in given]:
                raise WorkflowError(f"task {task.number}: {kind} lacks {missing[0]!r}, which workflow {workflow.name!r} needs")
            if extra := [name for name in given if name not in names]:
                raise WorkflowError(
                    f"task {task.number}: {kind} holds {extra[0]!r}, which workflow {workflow.name!r} does not declare; add it there"
                )


def _checked_branching(workflow: Workflow, branching: Mapping[str, int]) -> dict[str, int]:
    for role, branches in branching.items():
        if role not in workflow.roles:
            raise WorkflowError(f"branching: there is no role {role!r}; the roles are {', '.join(workflow.roles)}")
        if branches < 2:
            raise WorkflowError(f"branching: {role}={branches} forks nothing; leave it out, or ask for 2 or more")
        if workflow.roles[role].tools:
            raise WorkflowError(f"branching: the role {role!r} calls tools within its response, which is no place for a fork")
    beside = [inside for node in walk(workflow.body) if isinstance(node, Together | Each) for inside in walk(node)]
    for node in beside:
        if isinstance(node, Call) and node.role.name in branching:
            raise WorkflowError(
                f"branching: node {node.name!r} runs beside others, where a play cannot fork; play whole instances several times (plays=K)"
            )
    return dict(branching)
