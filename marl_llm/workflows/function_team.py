"""A team as plain `async` Python: `@team` makes an `Environment` of a function, which is trained, checked and looked at as any other.

    @team(hidden=("target",), tasks=rows)
    async def solve(t, task):
        draft = await t.solver(f"Solve: {task.question}")
        remark = await t.checker(f"{task.question}\\n{draft}\\nReply OK or say what is wrong.")
        if remark != "OK":
            draft = await t.solver(f"{task.question}\\n{draft}\\n{remark}\\nTry again.")
        return Reward(team=float(draft == task.target))

`function_replay` carries it out, `hidden_values` guards what no prompt may hold.
"""

from __future__ import annotations

import dataclasses
import dis
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.workflows.assignment import ScriptTurn
from marl_llm.workflows.environment import Environment
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.function_replay import TeamHandle
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.named_roles import nested_codes
from marl_llm.workflows.nodes import PAID, PROMPT, REPLY, Call, FunctionNode
from marl_llm.workflows.renderer import Renderer
from marl_llm.workflows.rewards import Award
from marl_llm.workflows.roles import Role
from marl_llm.workflows.splits import Tasks, listed_tasks, split_of
from marl_llm.workflows.trajectory import Task, Trajectory

SHARES = {"train": 0.65, "validation": 0.15, "test": 0.20}
OF_TASK = ("number", "split")  # what a task has beside its fields
ROLE_OPTIONS = ("system", "max_tokens", "max_prompt", "settings", "stop", "timeout_s")
TOOL_OPTIONS = ("tools", "max_tool_rounds")  # of roles whose requests a function makes
Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class FunctionTeam:
    """Makes an `Environment` of an `async` function of (t, task); used as a decorator under the name `team`.

    Attributes:
      hidden: fields of the task that no prompt may hold.
      tasks: rows, each a mapping from field to value, which are split by their content (65, 15 and 20 %); or split -> rows; or a function
        (split, first, count) -> list of `Task`, as an `Environment` has it. None: the team can be built, and not played.
      roles: names of the roles, or role -> options of `Role` (`ROLE_OPTIONS`, `TOOL_OPTIONS`). Empty: those that the function's code
        names as `t.NAME`.
      at_most: most requests of roles in one play, and most uses of tools. Beyond them the request raises in the function.
      timeout_s: most seconds that the function itself takes between two requests; after them the play is aborted.
      on_error: the team's reward where the function raises, which `errors` counts. None: the play is aborted, as a failure "team".
      metrics: names of the figures that its `Reward` may have.
      headline: the figure in [0, 1] that says how well the team did; by default what the team was paid.
      renderer, script, random_player: as an `Environment` has them.

    Raises:
      WorkflowError: options that fit no team; the message names the first.
    """

    hidden: Sequence[str] = ()
    tasks: Tasks | Rows | Mapping[str, Rows] | None = None
    roles: Sequence[str] | Mapping[str, Mapping[str, Any]] = ()
    at_most: int = 16
    timeout_s: float | int = 10.0
    on_error: float | int | None = None
    metrics: Sequence[str] = ()
    headline: str = "reward"
    renderer: Renderer | None = None
    script: Callable[[ScriptTurn], str | tuple[int, ...]] | None = None
    random_player: Callable[[ScriptTurn], str | tuple[int, ...]] | None = None

    def __post_init__(self):
        for option in ("hidden", "roles", "metrics"):
            if isinstance(value := getattr(self, option), str):
                raise WorkflowError(f"team: {option}={value!r} must be a tuple of names, e.g. {option}=({value!r},)")
        if isinstance(self.at_most, bool) or self.at_most < 1 or self.timeout_s <= 0:
            raise WorkflowError(f"team: at_most={self.at_most} and timeout_s={self.timeout_s} must be above 0")
        if taken := [name for name in self.metrics if name in ("reward", "errors")]:
            raise WorkflowError(f"team: the metric {taken[0]!r} is there already; give yours another name")

    def __call__(self, function: Callable) -> Environment:
        """The team of a function. Raises `WorkflowError`."""
        name = getattr(function, "__name__", type(function).__name__)
        if not inspect.iscoroutinefunction(function) or len(inspect.signature(function).parameters) != 2:
            raise WorkflowError(f"team {name!r}: write it as `async def {name}(t, task):`")
        of_team, of_task = attributes_of(function)
        roles = self._roles(name, of_team)
        tasks = _no_tasks(name) if self.tasks is None else self.tasks if callable(self.tasks) else tasks_of_rows(self.tasks, self.hidden)
        first = () if self.tasks is None else tasks("train", 0, 1)
        inputs = tuple(first[0].fields) if first else tuple(field for field in of_task if field not in (*self.hidden, *OF_TASK))
        if clash := [field for field in inputs if field in OF_TASK]:
            raise WorkflowError(f"team {name!r}: a task's field is called {clash[0]!r}, which every task has: rename it")
        calls = {role: Call(options, role) for role, options in roles.items()}
        body = FunctionNode(name, function, calls, self.at_most, self.timeout_s, self.on_error, tuple(self.metrics))
        figures = {"reward": paid_to_team, "errors": _errors, **{metric: _metric(metric) for metric in self.metrics}}
        team = Workflow(name, body, inputs, tuple(self.hidden), rewards=(paid_to_calls,), metrics=figures, score="at_end")
        return Environment(team, tasks, self.headline, self.renderer, self.script, self.random_player)

    def _roles(self, name: str, of_team: Sequence[str]) -> dict[str, Role]:
        options = self.roles if isinstance(self.roles, Mapping) else dict.fromkeys(self.roles, {})
        options = options or {role: {} for role in of_team if not hasattr(TeamHandle, role) and role != "random"}
        if not options:
            raise WorkflowError(f"team {name!r} asks no role: await t.solver(...), or name them in roles=(...)")
        for role, given in options.items():
            if hasattr(TeamHandle, role) or role == "random":
                raise WorkflowError(f"team {name!r}: the role {role!r} has the name of a method of t; rename it")
            known = (*ROLE_OPTIONS, *TOOL_OPTIONS)
            if strange := [option for option in given if option not in known]:
                raise WorkflowError(f"team {name!r}: role {role!r} has no option {strange[0]!r}; there are {', '.join(known)}")
        return {role: Role(role, f"{{{PROMPT}}}", stripped, {REPLY: ""}, **given) for role, given in options.items()}


team = FunctionTeam


def tasks_of_rows(rows: Rows | Mapping[str, Rows], hidden: Sequence[str]) -> Tasks:
    """Tasks of rows of fields, given by split or split by their content. Raises `WorkflowError` for a split without rows."""
    if isinstance(rows, Mapping):
        parts = {split: list(rows.get(split, ())) for split in SHARES}
    else:
        parts = {split: [] for split in SHARES}
        for row in rows:
            parts[split_of(json.dumps(row, sort_keys=True, default=repr), SHARES)].append(row)
    if empty := [split for split, part in parts.items() if not part]:
        raise WorkflowError(f"the split {empty[0]!r} has no tasks: give more rows, or rows by split: tasks={{'train': [...], ...}}")

    def task(number: int, row: Mapping[str, Any], split: str) -> Task:
        fields = {name: value for name, value in row.items() if name not in hidden}
        return Task(number, fields, {name: value for name, value in row.items() if name in hidden}, split)

    return listed_tasks({split: [task(n, row, split) for n, row in enumerate(part)] for split, part in parts.items()})


def attributes_of(function: Callable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The attributes that a function's code, and what is defined within it, reads of its first and of its second parameter."""
    names = list(inspect.signature(function).parameters)[:2]
    attributes: dict[str, dict[str, None]] = {name: {} for name in names}
    for code in nested_codes(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP")]
        for step, after in zip(steps, steps[1:]):
            loaded = step.argval if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else None
            loaded = loaded[-1] if isinstance(loaded, tuple) else loaded  # two at once, the second of which is on top
            if loaded in attributes and after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes[loaded][after.argval] = None
    return tuple(tuple(attributes[name]) for name in names)


def stripped(text: str) -> dict[str, str]:
    """A reply as it is read: without blanks at its ends."""
    return {REPLY: text.strip()}


def _no_tasks(name: str) -> Tasks:
    def tasks(split: str, first: int, count: int) -> list[Task]:
        raise WorkflowError(f"team {name!r} has no tasks: @team(tasks=rows), each row a mapping from field to value")

    return tasks


def paid_to_calls(path: Trajectory) -> list[Award]:
    """The team's reward to every call, and to each call what its role was paid on top."""
    paid, awards = path.fields[PAID], []
    for call in path.calls:
        awards.append(Award(call, paid["team"], "team", team=True))
        pay = paid["local"].get(call.role)
        if isinstance(pay, float):
            awards.append(Award(call, pay, "local"))
        elif pay is not None and not call.tool_use:
            awards.append(Award(call, pay[call.turn], "local"))
    return awards


def paid_to_team(path: Trajectory) -> float:
    """What the team was paid."""
    return path.fields[PAID]["team"]


def _errors(path: Trajectory) -> float:
    return float(bool(path.fields[PAID]["error"]))


def _metric(name: str) -> Callable[[Trajectory], float | None]:
    def metric(path: Trajectory) -> float | None:
        return path.fields[PAID]["metrics"].get(name)

    return metric
