"""A team that is an `async` function, carried out by deterministic replay.

    start ─▶ run until every task of the function waits ─▶ answer all that was asked (roles, tools) ─▶ run from the start again, ...

The function's own state is no value, but a position in it is: the rounds of requests that it made, and their answers. So a play goes on,
and forks, by running the function from its start with the recorded answers. All that is asked at one time is one round, and is answered
together: `asyncio.gather` asks in the same order whoever answers first. A function that asks otherwise in a replay is not deterministic,
and the play fails with the request that differs (law 6).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import math
import random
import selectors
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from marl_llm.reporting.files import to_json
from marl_llm.tools.results import FailureKind, InfrastructureError, ToolResult
from marl_llm.workflows.errors import PlayFailure, ToolCallError, WorkflowError
from marl_llm.workflows.finite import is_finite_number
from marl_llm.workflows.hidden_values import Hidden, HiddenValueError, hidden_name, open_value
from marl_llm.workflows.nodes import ERROR, HIDDEN_RESULT, REPLY, RESULT, FunctionNode, Tool
from marl_llm.workflows.trajectory import Task

CLEANUP_ROUNDS = 10  # turns of the loop that a cancelled function has for its `finally` blocks
SHOWN = 60  # characters of a request in a message


@dataclasses.dataclass(frozen=True)
class Reward:
    """What a play is paid; the value that an `async` team returns.

    Attributes:
      team: to every call of every role.
      local: role -> what each of its calls is paid on top, those as a tool of others too; or a list with a number for each request that
        the function made, in order.
      metrics: figures of the play for tables, of the names that the team declares.
    """

    team: Any = 0.0  # a number; one made of hidden values too
    local: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FunctionRequest:
    """What the function asks for: the reply of a role, or the result of a tool.

    Attributes:
      name, number: the role or tool, and which of its requests in this play this is, from 0.
      text: the prompt; of a tool its arguments, to be compared in a replay.
      tool: the tool as a node of a workflow; None: a role is asked.
      hidden: the hidden field that the tool's result is made of; "": the result is open.
      place: of a tool, which use of any tool in this play it is.
    """

    name: str
    number: int
    text: str
    tool: Tool | None = None
    hidden: str = ""
    place: int = 0

    def __str__(self) -> str:
        return f"request {self.number} of {self.name!r} ({self.text[:SHOWN]!r})"

    def answer_in(self, fields: Mapping[str, Any]) -> tuple[Any, str]:
        """Its answer and the tool's error ("": none), from the fields after the event that answered it."""
        if self.tool is None:
            return fields[REPLY], ""
        return fields[self.tool.writes[0]], fields[ERROR]


@dataclasses.dataclass(frozen=True)
class FunctionStep:
    """How far the function came: it asks something, or it has ended. `revealed`: hidden values that it said roles may read."""

    requests: tuple[FunctionRequest, ...] = ()
    result: dict[str, Any] | None = None
    revealed: tuple[Any, ...] = ()


Round = tuple[tuple[FunctionRequest, tuple[Any, str]], ...]  # requests with their answers
Journal = tuple[Round, ...]


class TeamTask:
    """The task as an `async` team sees it: its fields as attributes, the hidden ones as `Hidden`; beside them `number` and `split`."""

    def __init__(self, task: Task):
        self.number, self.split = task.number, task.split
        vars(self).update(copy.deepcopy(dict(task.fields)))
        vars(self).update({name: Hidden(copy.deepcopy(value), name) for name, value in task.hidden.items()})


class TeamHandle:
    """The first argument of an `async` team: `await t.solver("...")` asks the role `solver`, and returns its reply as text.

    Attributes:
      random: a generator that is the same in every play of the task.
    """

    def __init__(self, replay: _Replay, task: Task):
        self._replay = replay
        self.random = random.Random(f"{task.split} {task.number}")

    def __getattr__(self, role: str) -> Callable[[str], Awaitable[str]]:
        if role not in self._replay.node.calls:
            known = ", ".join(self._replay.node.calls)
            raise AttributeError(f"the team has no role {role!r}; it has {known}: name all roles in roles=(...)")
        return lambda prompt: self.ask(role, prompt)

    async def ask(self, role: str, prompt: Any) -> str:
        """The reply of a role to a prompt, stripped.

        Raises `HiddenValueError` for a hidden prompt, and `WorkflowError` for one that is no text or a request beyond the bound.
        """
        if isinstance(prompt, Hidden):
            str(prompt)
        if not isinstance(prompt, str):
            raise WorkflowError(f"role {role!r} was asked with a {type(prompt).__name__}: a prompt is a text")
        return await self._replay.ask(role, prompt)

    async def tool(self, function: Callable, *arguments: Any, timeout_s: float | int = 30.0, reveals: bool = False, **named: Any) -> Any:
        """What a function returns, plain (in a thread) or `async`, called once and recorded: a replay does not call it again.

        Args:
          timeout_s: the play is aborted, or played again, when the call takes longer.
          reveals: roles may read the result although an argument is hidden. Otherwise it is hidden.

        Raises `ToolCallError` with what the function raised, of hidden arguments the type alone. What the infrastructure breaks aborts the
        play (law 9).
        """
        return await self._replay.use(function, (arguments, named), timeout_s, reveals)

    def compute(self, function: Callable, *arguments: Any, reveals: bool = False, **named: Any) -> Any:
        """What a pure function of no duration returns of these arguments, hidden ones opened; `reveals` as in `tool`.

        What it raises is raised; of hidden arguments, unless `reveals`, a `ToolCallError` with the type of that alone.
        """
        secret = hidden_name([*arguments, *named.values()])
        opened = {key: open_value(item) for key, item in named.items()}
        try:
            value = function(*map(open_value, arguments), **opened)
        except Exception as error:
            if secret is None or reveals or isinstance(error, InfrastructureError):
                raise
            name = getattr(function, "__name__", type(function).__name__)
            raise ToolCallError(f"t.compute({name}) raised {_withheld(error, secret)}") from None
        if secret is None:
            return value
        if not reveals:
            return Hidden(value, secret)
        self._replay.revealed.append(value)
        return value


class _IdleSelector(selectors.DefaultSelector):
    """Tells the replay when no callback of the loop is ready, which is when every task of the function waits."""

    replay: _Replay

    def select(self, timeout: float | int | None = None) -> list:
        """As the selectors of the standard library; a loop asks with a timeout of 0 while callbacks are ready."""
        left = self.replay.deadline - time.monotonic()
        if left <= 0:
            self.replay.fail("does not end, nor ask for anything", FailureKind.DEADLINE.value)
            return []
        if timeout is None or timeout > 0:
            if self.replay.all_wait():
                return []
            timeout = left if timeout is None else min(timeout, left)
        return super().select(timeout)


class _Replay:
    """One run of the function from its start, over the recorded rounds, to the first request that has no answer."""

    def __init__(self, node: FunctionNode, journal: Journal):
        self.node, self.journal = node, journal
        self.deadline = time.monotonic() + node.timeout_s
        self.revealed: list[Any] = []
        self.pending: tuple[FunctionRequest, ...] = ()
        self.failure: PlayFailure | None = None
        self._done = 0  # rounds that were answered
        self._waiting: list[tuple[FunctionRequest, asyncio.Future]] = []
        self._counts: Counter[str] = Counter()
        selector = _IdleSelector()
        selector.replay = self
        self._loop = asyncio.SelectorEventLoop(selector)
        self._loop.set_exception_handler(lambda loop, context: None)  # what a forgotten task raised is nobody's

    def run(self, task: Task) -> FunctionStep:
        """Raises `PlayFailure`."""
        main = self._loop.create_task(self.node.function(TeamHandle(self, task), TeamTask(task)))
        main.add_done_callback(lambda done: self._loop.stop())
        try:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # the task holds them too
                self._loop.run_forever()
            if self.failure is None and not self.pending and self._done < len(self.journal):
                self.fail(f"ended without {self.journal[self._done][0][0]}, which it asked for before", "team")
            if self.failure is not None:
                raise self.failure
            if self.pending:
                return FunctionStep(self.pending, revealed=tuple(self.revealed))
            return FunctionStep(result=self._result(main), revealed=tuple(self.revealed))
        finally:
            self._clean_up()

    def fail(self, why: str, kind: str) -> None:
        """Ends the run: the play cannot be finished."""
        self.failure = self.failure or PlayFailure(self.node.name, kind, f"team {self.node.name!r} {why}", retriable=False)
        self._loop.stop()

    def all_wait(self) -> bool:
        """Answers the round that is asked for, or ends the run at the first one without answers. False: nothing is asked for."""
        waiting = [(request, future) for request, future in self._waiting if not future.done()]
        if not waiting or self.failure or self.pending:
            return bool(self.failure or self.pending)
        self._waiting = []
        requests = tuple(request for request, _ in waiting)
        if self._done == len(self.journal):
            self.pending = requests
            self._loop.stop()
            return True
        recorded = self.journal[self._done]
        self._done += 1
        if difference := _difference(requests, tuple(request for request, _ in recorded)):
            self.fail(f"is not deterministic: {difference}", "team")
            return True
        for (_, future), (_, answer) in zip(waiting, recorded):
            future.set_result(answer)
        return True

    async def ask(self, role: str, prompt: str) -> str:
        """The reply of a role."""
        return (await self._answer(FunctionRequest(role, self._count("role", role), prompt)))[0]

    async def use(self, function: Callable, call: tuple[tuple, dict], timeout_s: float | int, reveals: bool) -> Any:
        """The result of a tool."""
        name = getattr(function, "__name__", type(function).__name__)
        name = "tool" if name == "<lambda>" else name
        secret = hidden_name([*call[0], *call[1].values()])
        arguments, named = open_value(call[0]), open_value(call[1])
        field = RESULT if secret is None or reveals else HIDDEN_RESULT
        guarded = _guarded(function, (arguments, named), field, secret if field == HIDDEN_RESULT else None)
        tool = Tool(name, guarded, (), (field, ERROR), timeout_s, instant=False)
        text = json.dumps([arguments, named], sort_keys=True, default=lambda value: type(value).__name__)
        number = self._count("tool", name)
        request = FunctionRequest(name, number, text, tool, secret or "", place=self._counts["all tool"] - 1)
        value, error = await self._answer(request)
        if error:
            raise ToolCallError(f"tool {name!r} raised {error}")
        if secret is None:
            return copy.deepcopy(value)
        if not reveals:
            return Hidden(copy.deepcopy(value), secret)
        self.revealed.append(value)
        return copy.deepcopy(value)

    def _count(self, kind: str, name: str) -> int:
        """The number of the next request. Raises `WorkflowError` beyond the bound."""
        if self._counts[f"all {kind}"] >= self.node.at_most:
            raise WorkflowError(f"more than at_most={self.node.at_most} requests of {kind}s in one play, at {name!r}")
        self._counts[f"all {kind}"] += 1
        self._counts[f"{kind} {name}"] += 1
        return self._counts[f"{kind} {name}"] - 1

    async def _answer(self, request: FunctionRequest) -> tuple[Any, str]:
        future = self._loop.create_future()
        self._waiting.append((request, future))
        return await future

    def _result(self, main: asyncio.Task) -> dict[str, Any]:
        """What the function returned, checked; of one that raised what `on_error` says. Raises `PlayFailure`."""
        calls = Counter(request.name for each in self.journal for request, _ in each if request.tool is None)
        try:
            return checked_reward(main.result(), calls, self.node)
        except (HiddenValueError, InfrastructureError, asyncio.CancelledError) as error:
            why = f"raised {type(error).__name__}: {error}"
            raise PlayFailure(self.node.name, "team", f"team {self.node.name!r} {why}", retriable=False) from error
        except BaseException as error:  # whatever the author's code raises, `sys.exit` included
            why = f"{type(error).__name__}: {error}"
            if self.node.on_error is None:
                raise PlayFailure(self.node.name, "team", f"team {self.node.name!r} raised {why}", retriable=False) from error
            return {"team": self.node.on_error, "local": {}, "metrics": {}, "error": why}

    def _clean_up(self) -> None:
        """Cancels what still waits, and closes the loop."""
        self.deadline = math.inf
        self._done, self.journal = 0, ()
        for _ in range(CLEANUP_ROUNDS):
            if not (tasks := asyncio.all_tasks(self._loop)):
                break
            for task in tasks:
                task.cancel()
            self._loop.call_soon(self._loop.stop)
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task._log_destroy_pending = False  # it will not end, and was given the time to
        self._loop.close()


def advance(node: FunctionNode, task: Task, journal: Journal) -> FunctionStep:
    """Runs the function over the recorded rounds: what it asks for next, or what it returned. Raises `PlayFailure`."""
    return _Replay(node, journal).run(task)


def checked_reward(value: Any, calls: Mapping[str, int], node: FunctionNode) -> dict[str, Any]:
    """A `Reward`, or a number for the team, as plain values; `calls`: how often each role spoke. Raises `WorkflowError`."""
    value = open_value(value)
    reward = value if isinstance(value, Reward) else Reward(team=value)
    if strange := [role for role in reward.local if role not in node.calls]:
        raise WorkflowError(f"the reward pays {strange[0]!r}, which is no role of the team: {', '.join(node.calls)}")
    if strange := [name for name in reward.metrics if name not in node.metrics]:
        raise WorkflowError(f"the reward has the metric {strange[0]!r}, which is not declared: add it to metrics=(...)")
    local = {}
    for role, pay in reward.local.items():
        if not isinstance(pay, Sequence):
            local[role] = _number(open_value(pay), f"local[{role!r}]")
            continue
        each = list(map(open_value, pay))
        if len(each) != calls.get(role, 0):
            raise WorkflowError(f"the reward has {len(each)} numbers for {role!r}, which spoke {calls.get(role, 0)} times")
        local[role] = [_number(number, f"local[{role!r}]") for number in each]
    metrics = {name: _number(open_value(number), f"metrics[{name!r}]") for name, number in reward.metrics.items()}
    return {"team": _number(open_value(reward.team), "team"), "local": local, "metrics": metrics, "error": ""}


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or not is_finite_number(value):
        shown = value if isinstance(value, float) else type(value).__name__
        raise WorkflowError(f"the reward's {what} is {shown}: return a finite number, or Reward(team=...)")
    return float(value)


def _difference(requests: Sequence[FunctionRequest], recorded: Sequence[FunctionRequest]) -> str | None:
    """Where a round differs from the recorded one, in words; None if it does not."""
    for now, before in zip(requests, recorded):
        if (now.name, now.number, now.text) != (before.name, before.number, before.text):
            at = next((i for i, (a, b) in enumerate(zip(now.text, before.text)) if a != b), min(len(now.text), len(before.text)))
            cut = slice(max(0, at - SHOWN // 2), at + SHOWN // 2)
            text_now, text_before = (f"request {x.number} of {x.name!r} …{x.text[cut]!r}" for x in (now, before))
            return f"with the same answers it asked {text_now}, and before {text_before}"
    if len(requests) != len(recorded):
        rest = (*requests, *recorded)[min(len(requests), len(recorded)) :][0]
        return f"with the same answers it asked {len(requests)} things at once, and before {len(recorded)}; {rest} is one"
    return None


def _withheld(error: Exception, secret: str) -> str:
    """An exception of a function that read a hidden field, without its text, which may tell the field to a role."""
    return f"{type(error).__name__}; its text may tell the hidden field {secret!r}: reveals=True shows it"


def _guarded(function: Callable, call: tuple[tuple, dict[str, Any]], field: str, secret: str | None) -> Callable:
    """The call of a tool as a function without arguments, `async` if the tool is. What the tool raises becomes data.

    `secret`: the hidden field that its arguments hold something of, which no text may tell; None: there is none, or it may.
    """
    arguments, named = call

    def outcome(value: Any) -> Any:
        if isinstance(value, ToolResult):
            if value.failure is not None:
                return value
            value = value.value
        json.dumps(value, allow_nan=False, default=to_json)  # raises for what no record holds
        return {field: value, ERROR: ""}

    def refused(error: Exception) -> dict[str, Any]:
        if isinstance(error, OSError | InfrastructureError):
            raise error
        return {field: None, ERROR: _withheld(error, secret) if secret is not None else f"{type(error).__name__}: {error}"}

    async def call_async() -> Any:
        try:
            return outcome(await function(*arguments, **named))
        except Exception as error:
            return refused(error)

    def call() -> Any:
        try:
            return outcome(function(*arguments, **named))
        except Exception as error:
            return refused(error)

    is_async = asyncio.iscoroutinefunction(function) or asyncio.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    return call_async if is_async else call
