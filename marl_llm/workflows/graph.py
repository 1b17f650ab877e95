"""Workflows: who acts when, written with a few constructors. The graph G of UnityMAS-O, section 4.3, as a value.

    search = sequence(
        decompose,                                                  # a Role is a call of it
        each("queries", as_="query", do=retrieve, collect="passages", at_most=3),
        repeat(coder, verify, when(passed, stop()), reflector, at_most=3),
    )
    team = Workflow("search", search, inputs=("question",), hidden=("answers",), rewards=(...))

The state is a set of named fields, and a value: every node reads some and writes some. Roles never read hidden fields (gold answers,
hidden tests), nor what was made of them; tools, conditions and rewards may. What they make of them is hidden too, unless they say
`reveals`; see `secrecy`. A workflow is checked when it is built; see `checks`.

**Turns.** A turn is a round of a loop: each iteration of a `repeat` begins one, unless no role has spoken yet since the last began. Nodes
outside of loops belong to turn 0, or to the last turn of the loop before them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from marl_llm.hints import suggestion
from marl_llm.workflows.agent_tools import with_agents
from marl_llm.workflows.checks import check
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.nodes import Call, Choose, Each, Node, Part, Repeat, Sequence, Stop, Together, Tool, changed_calls, walk
from marl_llm.workflows.roles import Role, parameters
from marl_llm.workflows.secrecy import secret_fields


def _node(part: Any) -> Node:
    if isinstance(part, Role):
        return call(part)
    if not isinstance(part, Node):
        raise WorkflowError(f"{part!r:.80} is no part of a workflow: put a Role, or what call, tool, compute, each, ... return")
    return part


def _reads(function: Callable, reads: tuple[str, ...] | None, name: str) -> tuple[str, ...]:
    return parameters(function, f"node {name!r}") if reads is None else tuple(reads)


def _name(function: Callable, name: str | None, kind: str) -> str:
    name = name or getattr(function, "__name__", "") or type(function).__name__
    if name == "<lambda>":
        raise WorkflowError(f"a {kind} made of a lambda needs name='...', for errors, pictures and transcripts")
    return name


def _revealed(reveals: tuple[str, ...], known: tuple[str, ...], who: str, verb: str) -> tuple[str, ...]:
    if isinstance(reveals, str):
        raise WorkflowError(f"{who}: reveals={reveals!r} must be a tuple of names, e.g. reveals=({reveals!r},)")
    if unknown := [field for field in reveals if field not in known]:
        raise WorkflowError(f"{who} reveals {unknown[0]!r}, which it does not {verb}; {suggestion(unknown[0], known)}")
    return tuple(reveals)


def _bound(at_most: Any, what: str) -> int:
    if isinstance(at_most, bool) or not isinstance(at_most, int) or at_most < 1:
        raise WorkflowError(f"{what} is unbounded: at_most={at_most!r} must be a whole number, 1 or more")
    return at_most


def call(role: Role, name: str | None = None) -> Call:
    """A role speaks. Its name is the role's; a role that speaks at two places needs a name for one of them."""
    return Call(role, name or role.name)


def tool(
    function: Callable[..., Any],
    writes: str | tuple[str, ...],
    name: str | None = None,
    timeout_s: float | int = 30.0,
    reads: tuple[str, ...] | None = None,
    reveals: tuple[str, ...] = (),
) -> Tool:
    """A tool call.

    Args:
      function: of the fields that its parameters name, plain (it then runs in a thread) or `async`. It returns the value of the one field
        in `writes`, or a dictionary of all; or a `ToolResult` of that, whose failure aborts the play or has it played again.
      writes: output fields.
      name: by default the function's.
      timeout_s: after it the call has failed, as infrastructure.
      reads: fields, by position; by default the parameters without a default.
      reveals: those of `writes` that roles may read although the tool reads hidden fields, e.g. the verdict of hidden tests. Without this
        word everything that a tool writes is as hidden as what it reads.
    """
    name = _name(function, name, "tool")
    if timeout_s <= 0:
        raise WorkflowError(f"tool {name!r}: timeout_s={timeout_s} must be above 0")
    writes = (writes,) if isinstance(writes, str) else tuple(writes)
    reveals = _revealed(reveals, writes, f"tool {name!r}", "write")
    return Tool(name, function, _reads(function, reads, name), writes, timeout_s, instant=False, reveals=reveals)


def compute(
    function: Callable[..., Any],
    writes: str | tuple[str, ...],
    name: str | None = None,
    reads: tuple[str, ...] | None = None,
    reveals: tuple[str, ...] = (),
) -> Tool:
    """A pure function of fields that takes no time to speak of; arguments as `tool`. It must not wait for anything."""
    name = _name(function, name, "computation")
    writes = (writes,) if isinstance(writes, str) else tuple(writes)
    reveals = _revealed(reveals, writes, f"computation {name!r}", "write")
    return Tool(name, function, _reads(function, reads, name), writes, 1.0, instant=True, reveals=reveals)


def sequence(*parts: Part) -> Sequence:
    """One after the other; each sees what the others wrote."""
    if not parts:
        raise WorkflowError("a sequence needs at least one part")
    return Sequence(tuple(_node(part) for part in parts))


def together(*parts: Part) -> Together:
    """All at once: they see the same state, and none sees what another writes."""
    if len(parts) < 2:
        raise WorkflowError("together needs two parts or more; one alone is simply a part of a sequence")
    return Together(tuple(_node(part) for part in parts))


def each(over: str, as_: str, do: Part, collect: str | Mapping[str, str], at_most: int | None) -> Each:
    """`do` once per item of the list `over`, all at once.

    Args:
      over: a field that holds a list; items beyond `at_most` are left out.
      as_: the field in which `do` finds its item.
      do: the body.
      collect: the field of the body whose values become a list under the same name, or {field of the body: field of the list}.
    """
    collect = {collect: collect} if isinstance(collect, str) else dict(collect)
    return Each(over, as_, _node(do), collect, _bound(at_most, f"each over {over!r}"))


def choose(
    by: Callable[..., Hashable],
    cases: Mapping[Hashable, Part],
    name: str | None = None,
    reads: tuple[str, ...] | None = None,
    reveals: tuple[str, ...] = (),
) -> Choose:
    """The case whose key `by` returns; another value is an error of the workflow. A case that does nothing is `NOTHING`.

    `reveals`: those of the fields that `by` reads which roles may learn of by the case that is taken, although they are hidden.
    """
    name = _name(by, name, "choice")
    if not cases:
        raise WorkflowError(f"choice {name!r} has no cases")
    reads = _reads(by, reads, name)
    reveals = _revealed(reveals, reads, f"choice {name!r}", "read")
    return Choose(name, by, reads, {key: _node(case) for key, case in cases.items()}, reveals)


def when(
    condition: Callable[..., bool],
    then: Part,
    otherwise: Part | None = None,
    name: str | None = None,
    reads: tuple[str, ...] | None = None,
    reveals: tuple[str, ...] = (),
) -> Choose:
    """`then` if the condition on the state holds, else `otherwise`, or nothing; `reveals` as in `choose`."""
    return choose(condition, {True: then, False: NOTHING if otherwise is None else otherwise}, name, reads, reveals)


def repeat(
    *parts: Part,
    at_most: int | None,
    until: Callable[..., bool] | None = None,
    name: str = "loop",
    reads: tuple[str, ...] | None = None,
    reveals: tuple[str, ...] = (),
) -> Repeat:
    """The parts in sequence, at most so often; ends early when `until` holds after a round, or at a `stop()` inside.

    `reveals`: those of the fields that `until` reads which roles may learn of by there being another round, although they are hidden.
    """
    bound = _bound(at_most, f"loop {name!r}")
    reads = () if until is None else _reads(until, reads, name)
    return Repeat(name, sequence(*parts), bound, until, reads, _revealed(reveals, reads, f"loop {name!r}", "read"))


def stop() -> Stop:
    """Leaves the innermost loop; outside of any it ends the workflow."""
    return Stop()


NOTHING = Sequence(())


@dataclasses.dataclass(frozen=True)
class Workflow:
    """A team's graph with its rewards: everything about it that no model, device or algorithm changes.

    Attributes:
      name: of the workflow.
      body: what `sequence` and its kin return, or one Role.
      inputs: fields of the task that everyone may read.
      hidden: fields of the task that only tools, conditions and rewards may read. What tools make of them is hidden too; see `secrecy`.
      start: fields that have a value before anyone has spoken, e.g. an empty report.
      rewards: functions of a whole trajectory that say who earned what; see `rewards`.
      metrics: name -> function of a whole trajectory; a float, or None where it does not apply, for tables. Never trained on.
      scorers: who is asked once per action before a play ends, asynchronously; see `scoring`.
      score: when a tree's candidates are scored: "when_made", on the state after the candidate and the tools that follow it up to the next
        role; or "at_end", for a team whose pay shows only when the play is over.
      group_seats: whether seats of one `each` that are asked the very same prompt in the same round are candidates for it: N seats are then
        a group of N without a fork (Stronger-MAS Fig. 5 with K = 1), and one of N K with it.
      sub_agents: roles that are only called by other roles, as an `AgentTool`.

    Raises:
      WorkflowError: a node that cannot be reached, reads what nobody wrote, is written twice at once or shares its name; it says which.
    """

    name: str
    body: Part
    inputs: tuple[str, ...]
    hidden: tuple[str, ...] = ()
    start: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rewards: tuple[Callable[..., Any], ...] = ()
    metrics: Mapping[str, Callable[..., float | None]] = dataclasses.field(default_factory=dict)
    scorers: tuple[Any, ...] = ()
    score: str = "when_made"
    group_seats: bool = False
    sub_agents: tuple[Role, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "body", with_agents(_node(self.body), self.sub_agents, self.name))
        check(self)

    @functools.cached_property
    def nodes(self) -> dict[str, Call | Tool]:
        """Role calls and tool calls by name, in the order written."""
        return {node.name: node for node in walk(self.body, agents=True) if isinstance(node, Call | Tool)}

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """Roles by name, in the order in which they first occur. A role's number, its `agent`, is its place here."""
        return {node.role.name: node.role for node in walk(self.body, agents=True) if isinstance(node, Call)}

    @functools.cached_property
    def agents(self) -> dict[str, int]:
        """Number of each role."""
        return {name: number for number, name in enumerate(self.roles)}

    @functools.cached_property
    def secret(self) -> frozenset[str]:
        """The hidden fields of the task and what is made of them: nothing of it may be shown to a scorer that does not know the truth."""
        return secret_fields(self.body, self.hidden)


def with_roles(workflow: Workflow, change: Callable[[Role], Role]) -> Workflow:
    """The same workflow with other roles, e.g. with smaller budgets; names, and what roles write, stay as they are.

    Raises `WorkflowError` as building does.
    """

    roles = {name: change(role) for name, role in workflow.roles.items()}  # once each: a role may be called at several places
    body = changed_calls(workflow.body, lambda call: dataclasses.replace(call, role=roles[call.role.name]))
    return dataclasses.replace(workflow, body=body, sub_agents=tuple(roles[role.name] for role in workflow.sub_agents))
