"""One attempt at one instance: the graph carried out node by node, and the paths that it forks into (tree sampling)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_llm.workflows.coroutines import run_loop
from marl_llm.workflows.errors import PlayFailure, WorkflowError
from marl_llm.workflows.function_replay import FunctionRequest
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import (
    PAID,
    PROMPT,
    REVEALED,
    ROUND_FIELDS,
    Call,
    Choose,
    Each,
    FunctionNode,
    Node,
    Repeat,
    Stop,
    Together,
    Tool,
    step_of,
    walk,
)
from marl_llm.workflows.nodes import Sequence as InOrder
from marl_llm.workflows.rewards import earned
from marl_llm.workflows.state import Round, State, Todo, merge, push
from marl_llm.workflows.trajectory import Earned, Event, Task, Trajectory

PICKS = ("first", "random", "greedy")
Draw = Callable[[tuple[int, ...], int], int]  # the identity of a fork's first candidate, the number of candidates -> which goes on


def any_draw(identity: tuple[int, ...], count: int) -> int:
    """A draw that the identity alone decides."""
    return random.Random(repr(identity)).randrange(count)


@dataclasses.dataclass(frozen=True)
class Forks:
    """Where a play forks and which candidate forks again; see `Controller`."""

    branching: Mapping[str, int]
    pick: str | None = None
    alpha: float | int = 1.0
    local_weight: float | int = 1.0
    score: str = "at_end"
    draw: Draw = any_draw

    @property
    def base(self) -> int:
        """K_max, for the numbering of paths."""
        return max(self.branching.values(), default=1)


class _Fork(NamedTuple):
    """A call of a role that branches, before anyone has spoken."""

    node: Call
    request_number: int
    state: State


class _Asking(NamedTuple):
    """A round of a team that is a function, whose requests are answered one after the other."""

    node: FunctionNode
    requests: tuple[FunctionRequest, ...]
    answers: tuple[tuple[Any, str], ...] = ()
    begun: bool = False  # whether the answer to the next request is in the state's fields


class Play:
    """One attempt at one instance. `log` holds what it did, `now` names the node that began last.

    `speaker` is a `calls.Speaker` and `scoring` a `scoring.Scoring`, or who stands in for one.
    """

    def __init__(self, workflow: Workflow, speaker: Any, scoring: Any, forks: Forks, task: Task, identity: tuple[int, int, int]):
        self.workflow, self.speaker, self.scoring, self.forks = workflow, speaker, scoring, forks
        self.task, self.identity = task, identity
        self.log: list[Event] = []
        self.now = "start"
        self._candidates: list[Trajectory] = []
        self._made: dict[str, Earned] = {}  # what picked candidates were paid when they were made

    async def run(self) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
        """The play's trajectories, and the candidates that were scored when they were made and not picked.

        Where candidates are played to the end, the trunk's trajectory stands first, then the others of each fork in the order of forks.
        """
        fields = {**self.workflow.start, **self.task.fields, **self.task.hidden}
        start = State(fields, todo=push(None, self.workflow.body, 0))
        try:
            if self.forks.score == "when_made":
                (end,) = await self.drive(start)
                trunk = await self._finished(end)
                trunk = dataclasses.replace(trunk, earned={**trunk.earned, **self._made})
                return (trunk,), tuple(sorted(self._candidates, key=lambda path: (path.calls[-1].request_number, path.calls[-1].choice)))
            if self.forks.pick is None or not self.forks.branching:
                return tuple([await self._finished(end) for end in await self.drive(start)]), ()
            return await self._forked_to_the_end(start), ()
        finally:
            self.scoring.cancel()

    async def _forked_to_the_end(self, start: State) -> tuple[Trajectory, ...]:
        """Plays every candidate to its end. The picked candidate's path becomes the trunk; only the trunk forks again."""
        forks: list[_Fork] = []
        (end,) = await self.drive(start, forks)
        trunk = await self._finished(end)
        paths, number = [trunk], 0
        while number < len(forks):
            fork, later = forks[number], forks[number + 1 :]
            others = [self._other(fork, choice) for choice in range(1, self.forks.branching[fork.node.role.name])]
            ends = [(trunk, later), *await run_all(others)]
            paths += [path for path, _ in ends[1:]]
            pays = [self._worth(fork.request_number, path) for path, _ in ends]
            trunk, later = ends[self._picked(fork.node, fork.request_number, pays)]
            forks, number = [*forks[: number + 1], *later], number + 1
        return tuple(paths)

    async def _other(self, fork: _Fork, choice: int) -> tuple[Trajectory, list[_Fork]]:
        """Another candidate of a fork, played to its end, and the forks that it could have had."""
        forks: list[_Fork] = []
        number = fork.request_number
        after = await self._answered(fork.node, number, fork.state, choice, self._branch_off(number, fork.state, choice))
        (end,) = await self.drive(after, forks)
        return await self._finished(end), forks

    def _branch_off(self, number: int, state: State, choice: int) -> State:
        """The state of another candidate. A trunk forks at a request once, so no two candidates share a number."""
        return state if choice == 0 else state._replace(path_id=number * self.forks.base + choice)

    async def _pick_now(self, node: Call, number: int, state: State, branches: int) -> State:
        """K candidates on the same state, each scored when it is made; the picked one's state (AT-GRPO, Algorithm 1, lines 9 to 14)."""
        starts = [state._replace(path_id=choice) for choice in range(branches)]  # the identity that a compiled game's candidates have
        candidates = await run_all([self._candidate(node, number, state, choice, candidate) for choice, candidate in enumerate(starts)])
        picked = self._picked(node, number, [self._worth(number, trajectory) for _, trajectory in candidates])
        self._candidates += [trajectory for choice, (_, trajectory) in enumerate(candidates) if choice != picked]
        after, trajectory = candidates[picked]
        self._made.update(trajectory.earned)
        return after._replace(path_id=0)

    async def _candidate(self, node: Call, number: int, before: State, choice: int, state: State) -> tuple[State, Trajectory]:
        """The state after a candidate and the tools that follow it up to the next role, and what the candidate is paid on it."""
        after = await self._answered(node, number, before, choice, state)
        (after,) = await self.drive(after, to_next_role=True)
        try:
            trajectory = await self._finished(after, after.turn + after.spoken)  # a round that has begun without a role is not counted
        except WorkflowError as error:
            hint = "candidates are scored when they are made: a workflow whose pay shows only at the end says score='at_end'"
            raise WorkflowError(f"{error}; {hint}") from error
        call = trajectory.calls[-1]
        return after, dataclasses.replace(trajectory, earned={call.id: trajectory.earned[call.id]})

    def _worth(self, number: int, trajectory: Trajectory) -> float:
        """What a fork's candidate was paid: its team and its local reward, weighed as a recipe's `reward_weights` say."""
        call = next(call for call in trajectory.calls if call.request_number == number)
        pay = trajectory.earned[call.id]
        of_team, of_local, team, local = map(np.float32, (self.forks.alpha, self.forks.local_weight, pay.team, pay.local))
        return float(of_team * team + of_local * local)  # in float32, where compiled play sees the same ties

    def _picked(self, node: Call, number: int, pays: Sequence[float]) -> int:
        """Which candidate goes on; of equals the first."""
        if self.forks.pick == "first":
            return 0
        if self.forks.pick == "random":
            step, play, _ = self.identity
            return self.forks.draw((step, self.task.number, self.workflow.agents[node.role.name], number, play), len(pays))
        return pays.index(max(pays))

    async def _finished(self, state: State, turns: int | None = None) -> Trajectory:
        """The trajectory of a path that is over, with its scores and rewards, which are computed here alone."""
        _, play, plays = self.identity
        events, turns = (*state.past, *state.events), state.turn + 1 if turns is None else turns
        roles = tuple(self.workflow.roles)
        trajectory = Trajectory(self.task, events, state.fields, turns, state.path_id * plays + play, roles=roles)
        trajectory = dataclasses.replace(trajectory, scores=await self.scoring.scores(trajectory))
        return dataclasses.replace(trajectory, earned=earned(self.workflow, trajectory))

    async def drive(self, state: State, forks: list[_Fork] | None = None, to_next_role: bool = False) -> list[State]:
        """Carries out `state.todo` until it is empty. Returns one state, or one per path after a fork.

        With `forks` it follows one candidate, and notes there where it could have forked. With `to_next_role` it ends before a role speaks.
        """
        while state.todo is not None:
            node, base, rest = state.todo
            if to_next_role and isinstance(node, Call | Together | Each) and any(isinstance(inside, Call) for inside in walk(node)):
                break
            state = state._replace(todo=rest)
            if isinstance(node, Call):
                self.now = node.name
                self.scoring.settled((*state.past, *state.events))
                branches = self.forks.branching.get(node.role.name, 1)
                if branches > 1 and forks is not None:
                    forks.append(_Fork(node, base, state))
                    branches = 1
                if branches > 1 and self.forks.score == "when_made":
                    state = await self._pick_now(node, base, state, branches)
                    continue
                paths = await self._speak(node, base, state, branches)
                if len(paths) > 1:
                    done = await run_all([self.drive(path) for path in paths])
                    return [leaf for leaves in done for leaf in leaves]
                state = paths[0]
            elif isinstance(node, Tool):
                self.now = node.name
                use = await self.speaker.use(node, base, state, self.identity)
                self.log.append(use)
                state = state.after(use)
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
            elif isinstance(node, FunctionNode):
                self.now = node.name
                state = await self._advance(node, base, state)
            elif isinstance(node, _Asking):
                state = self._ask_next(node, base, state)
            else:
                state = await self._beside(node, base, state)
        return [state]

    async def _advance(self, node: FunctionNode, base: int, state: State) -> State:
        """Runs the function to its next requests and pushes or answers them, or pays what it returned.

        Requests of one round run at the same time, or in order where a role among them branches, so that the play can fork.
        """
        step = await self.speaker.advance(node, self.task, state.journal)
        if step.revealed:
            state = state._replace(fields={**state.fields, REVEALED: step.revealed})
        if step.result is not None:
            turn = max((event.turn for event in (*state.past, *state.events)), default=0)
            ending = Tool(node.name, lambda: {PAID: step.result}, (), (PAID,), 1.0, instant=True)
            use = await self.speaker.use(ending, base + node.request_count - 1, state._replace(turn=turn), self.identity)
            self.log.append(use)
            return state.after(use)._replace(turn=turn)
        if len(step.requests) == 1 or any(request.name in self.forks.branching for request in step.requests):
            return state._replace(todo=(_Asking(node, step.requests), base, state.todo))
        parts = [self._asked(node, request, base, state) for request in step.requests]
        children = [part.child(todo=part.todo, item=item) for item, part in enumerate(parts)]
        ends = await run_all([self.drive(child) for child in children])
        answers = tuple(request.answer_in(end.fields) for request, (end,) in zip(step.requests, ends))
        merged = merge(node, state, [end for (end,) in ends])
        return self._answered_round(node, step.requests, answers, base, merged)

    def _asked(self, node: FunctionNode, request: FunctionRequest, base: int, state: State) -> State:
        """The state in which one request is to be answered, and nothing else."""
        if request.tool is not None:
            number = base + node.tool_place(request.place)
            return state._replace(todo=push(None, request.tool, number))
        fields = {**state.fields, PROMPT: request.text}
        todo = push(None, node.calls[request.name], base + node.place(request.name, request.number))
        return state._replace(todo=todo, fields=fields, turn=request.number)

    def _ask_next(self, asking: _Asking, base: int, state: State) -> State:
        """Adds the last request's answer to the round, and asks the next request."""
        node, requests, answers, is_begun = asking
        if is_begun:
            answers = (*answers, requests[len(answers)].answer_in(state.fields))
        if len(answers) == len(requests):
            return self._answered_round(node, requests, answers, base, state)
        next_state = self._asked(node, requests[len(answers)], base, state)
        after: Todo = (_Asking(node, requests, answers, begun=True), base, state.todo)
        part, number, _ = next_state.todo
        return next_state._replace(todo=push(after, part, number))

    def _answered_round(
        self, node: FunctionNode, requests: tuple[FunctionRequest, ...], answers: tuple[tuple[Any, str], ...], base: int, state: State
    ) -> State:
        """The state after a round: its answers are in the journal, and the function goes on."""
        journal = (*state.journal, tuple(zip(requests, answers)))
        fields = {name: value for name, value in state.fields.items() if name not in ROUND_FIELDS}  # they are of the round
        return state._replace(journal=journal, fields=fields, todo=push(state.todo, node, base))

    async def _speak(self, node: Call, base: int, state: State, branches: int) -> list[State]:
        """The states after a role spoke: one, or K where it branches."""
        starts = [state] * branches
        if branches > 1:
            starts = [state._replace(path_id=state.path_id * (self.forks.base + 1) + choice + 1) for choice in range(branches)]
        return await run_all([self._answered(node, base, state, choice, start) for choice, start in enumerate(starts)])

    async def _answered(self, node: Call, base: int, before: State, choice: int, state: State) -> State:
        """The state after one candidate for the prompt of the state `before`."""
        events, after = await self.speaker.speak(node, base, state, self.task, self.identity, choice, before.path_id)
        self.log += events
        return after

    def _loop(self, node: Repeat | Round, base: int, state: State) -> State:
        """Begins the loop's next round, or leaves it."""
        loop, number = (node, 0) if isinstance(node, Repeat) else (node.loop, node.number)
        if number == loop.at_most or (number and loop.until and self._ask(loop.until, loop.reads, state, loop.name)):
            return state
        if state.spoken:
            state = state._replace(turn=state.turn + 1, spoken=False)
        todo: Todo = (Round(loop, number + 1), base, state.todo)
        return state._replace(todo=push(todo, loop.body, base + number * step_of(loop.body)))

    def _choose(self, node: Choose, base: int, state: State) -> State:
        key = self._ask(node.by, node.reads, state, node.name)
        if key not in node.cases:
            raise WorkflowError(f"choice {node.name!r} returned {key!r}, which is none of its cases: {', '.join(map(repr, node.cases))}")
        for case, part in node.cases.items():
            if case == key:
                return state._replace(todo=push(state.todo, part, base))
            base += part.request_count
        raise AssertionError("a key of the cases is found among them")

    async def _beside(self, node: Together | Each, base: int, state: State) -> State:
        """Runs parts at the same time, each on a state of its own, and merges their fields and events."""
        if isinstance(node, Together):
            bases = [base + sum(part.request_count for part in node.parts[:i]) for i in range(len(node.parts))]
            children = [state.child(push(None, part, start)) for part, start in zip(node.parts, bases)]
        else:
            items = state.fields[node.over]
            if isinstance(items, str) or not isinstance(items, Sequence):
                raise WorkflowError(
                    f"each {node.item} in {node.over}: the field holds {type(items).__name__}; it must be a list or a tuple"
                )
            children = [
                state.child(push(None, node.body, base + i * step_of(node.body)), i, {node.item: item})
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
    """Puts parts before what is to do, each with the number of its first request."""
    end = base + sum(part.request_count for part in parts)
    for part in reversed(parts):
        end -= part.request_count
        todo = push(todo, part, end)
    return todo


def finish(job: Coroutine) -> Any:
    """The result of a coroutine, for callers that do not await; under a running event loop it runs in a thread of its own."""
    try:
        asyncio.get_running_loop()
        running = True
    except RuntimeError:
        running = False
    if not running:  # out of the handler, so that an error of the job's own has no other before it
        return run_loop(job)
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="workflow-play") as thread:
        return thread.submit(run_loop, job).result()


async def run_all(jobs: list[Coroutine]) -> list[Any]:
    """Results in order. The first error cancels the others; a fault of the program is raised before one of the infrastructure."""
    if len(jobs) == 1:
        return [await jobs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as several:
        errors = sorted(several.exceptions, key=lambda error: isinstance(error, PlayFailure))
        raise errors[0] from None
    return [task.result() for task in tasks]
