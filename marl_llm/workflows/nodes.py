"""The parts that a workflow is made of, as values, and what can be read off them. `graph` has the words that make them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from marl_llm.workflows.roles import AgentTool, Role


@dataclasses.dataclass(frozen=True)
class Call:
    """A role speaks."""

    role: Role
    name: str
    agents: Mapping[str, Call] = dataclasses.field(default_factory=dict)  # of its tools that are roles, by name; see `agent_tools`

    @functools.cached_property
    def request_count(self) -> int:
        """How many requests it can make, its sub-agents' too, which are its places in the numbering of all requests."""
        return self.own_requests + sum(self.limits[name] * agent.request_count for name, agent in self.agents.items())

    @property
    def own_requests(self) -> int:
        """How many requests it can make itself."""
        return 1 + (self.role.max_tool_rounds if self.role.tools else 0)

    @property
    def limits(self) -> dict[str, int]:
        """Most calls of each sub-agent."""
        return {tool.name: tool.at_most for tool in self.role.tools if isinstance(tool, AgentTool)}

    def agent_place(self, name: str, number: int) -> int:
        """The place of the first request of a sub-agent's n-th call within one response of this role, counted from its own first."""
        place = self.own_requests
        for other, agent in self.agents.items():
            if other == name:
                return place + number * agent.request_count
            place += self.limits[other] * agent.request_count
        raise KeyError(name)


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function runs: outside of the event loop if it is plain, in it if it is `async`, and at once if `instant`."""

    name: str
    function: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    timeout_s: float | int
    instant: bool
    request_count: int = 0  # it makes no request
    reveals: tuple[str, ...] = ()  # fields written that roles may read though hidden ones were read for them


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One after the other."""

    parts: tuple[Node, ...]

    @functools.cached_property
    def request_count(self) -> int:
        """Places of all parts."""
        return sum(part.request_count for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Together:
    """All at once, on the same state; what they write must differ."""

    parts: tuple[Node, ...]

    @functools.cached_property
    def request_count(self) -> int:
        """Places of all parts."""
        return sum(part.request_count for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Each:
    """The body once per item of a list, all at once; what it writes is collected into lists in the order of the items."""

    over: str
    item: str
    body: Node
    collect: Mapping[str, str]  # field of the body -> field of the list
    at_most: int

    @functools.cached_property
    def request_count(self) -> int:
        """Places of all items."""
        return self.at_most * step_of(self.body)


@dataclasses.dataclass(frozen=True)
class Choose:
    """One of several ways, by the value of a function of the state."""

    name: str
    by: Callable[..., Hashable]
    reads: tuple[str, ...]
    cases: Mapping[Hashable, Node]
    reveals: tuple[str, ...] = ()  # hidden fields read that roles may learn of by the case that is taken

    @functools.cached_property
    def request_count(self) -> int:
        """Places of all ways."""
        return sum(case.request_count for case in self.cases.values())


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The body again and again, until a condition, a `stop` inside, or the bound."""

    name: str
    body: Node
    at_most: int
    until: Callable[..., bool] | None
    reads: tuple[str, ...]
    reveals: tuple[str, ...] = ()  # hidden fields read that roles may learn of by the number of rounds

    @functools.cached_property
    def request_count(self) -> int:
        """Places of all rounds."""
        return self.at_most * step_of(self.body)


@dataclasses.dataclass(frozen=True)
class Stop:
    """Leaves the innermost loop, or ends the workflow outside of any."""

    request_count: int = 0


# Fields of a `FunctionNode`: the prompt of the role that is asked, its reply, a tool's result and error, what was revealed, the end.
PROMPT, REPLY, RESULT, HIDDEN_RESULT = "asked_prompt", "reply_text", "tool_result", "hidden_result"
ERROR, REVEALED, PAID = "tool_error", "revealed_values", "paid"
ROUND_FIELDS = (PROMPT, REPLY, RESULT, HIDDEN_RESULT, ERROR)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionNode:
    """An `async` function that asks roles and tools as it goes; see `function_replay`."""

    name: str
    function: Callable[..., Any]  # of a `TeamHandle` and a `TeamTask`; returns a `Reward` or a number
    calls: Mapping[str, Call]  # role -> its call
    at_most: int  # most requests of roles in one play, and most uses of tools
    timeout_s: float | int  # of what the function does itself between two requests
    on_error: float | int | None = None  # what a play is paid in which the function raises; None: it is aborted
    metrics: tuple[str, ...] = ()  # names of the figures that its reward may have

    @property
    def request_count(self) -> int:
        """Places of all requests that it could make, of its tools, and of its end."""
        return self.at_most * (self._round_size + 1) + 1

    @property
    def _round_size(self) -> int:
        return sum(call.request_count for call in self.calls.values())

    def place(self, role: str, number: int) -> int:
        """The place of a role's n-th request: all roles have one per number, so that rounds of all roles come one after another."""
        before = itertools.takewhile(lambda name: name != role, self.calls)
        return number * self._round_size + sum(self.calls[name].request_count for name in before)

    def tool_place(self, number: int) -> int:
        """The place of the n-th use of any tool, behind those of all roles."""
        return self.at_most * self._round_size + number


Node = FunctionNode | Call | Tool | Sequence | Together | Each | Choose | Repeat | Stop
Part = Node | Role


def step_of(body: Node) -> int:
    """How far apart the places of two rounds, or of two items, are: at least 1, so that a tool's uses have names of their own."""
    return max(1, body.request_count)


def walk(node: Node, agents: bool = False) -> Iterator[Node]:
    """A node and everything inside it, in the order written; with `agents` also the calls of sub-agents."""
    yield node
    inside: Iterable[Node] = ()
    if isinstance(node, Sequence | Together):
        inside = node.parts
    elif isinstance(node, Each | Repeat):
        inside = (node.body,)
    elif isinstance(node, Choose | FunctionNode):
        inside = (node.cases if isinstance(node, Choose) else node.calls).values()
    elif isinstance(node, Call) and agents:
        inside = node.agents.values()
    for part in inside:
        yield from walk(part, agents)


def changed_calls(node: Node, change: Callable[[Call], Call]) -> Node:
    """The same node with other role calls inside; of sub-agents' calls `change` decides itself."""
    if isinstance(node, Call):
        return change(node)
    if isinstance(node, Sequence | Together):
        return dataclasses.replace(node, parts=tuple(changed_calls(part, change) for part in node.parts))
    if isinstance(node, Each | Repeat):
        return dataclasses.replace(node, body=changed_calls(node.body, change))
    if isinstance(node, FunctionNode):
        return dataclasses.replace(node, calls={name: change(part) for name, part in node.calls.items()})
    if isinstance(node, Choose):
        return dataclasses.replace(node, cases={key: changed_calls(case, change) for key, case in node.cases.items()})
    return node


def label(node: Node) -> str:
    """What to call a node in a message."""
    if isinstance(node, Each):
        return f"each {node.item} in {node.over}"
    return getattr(node, "name", type(node).__name__.lower())


def writes(node: Node) -> set[str]:
    """Fields that a node itself writes."""
    if isinstance(node, Call):
        return set(node.role.writes)
    if isinstance(node, Tool):
        return set(node.writes)
    if isinstance(node, FunctionNode):
        return {PAID, RESULT, HIDDEN_RESULT, ERROR, REVEALED}
    return {node.item, *node.collect.values()} if isinstance(node, Each) else set()


def written(node: Node) -> set[str]:
    """Fields that may leave a node: its own and those inside. The body of an `Each` keeps its fields to itself."""
    if isinstance(node, Each):
        return set(node.collect.values())
    fields = writes(node)
    inside = node.parts if isinstance(node, Sequence | Together) else ()
    inside = node.cases.values() if isinstance(node, Choose) else inside
    inside = (node.body,) if isinstance(node, Repeat) else inside
    return fields.union(*map(written, inside))


def written_before_next_role(body: Node) -> dict[str, frozenset[str]]:
    """Name of a role call -> fields that it or the tools behind it may write before the next role speaks, beside others or after it."""
    fields_of: dict[str, frozenset[str]] = {}

    def back(node: Node, later: frozenset[str], leave: frozenset[str]) -> frozenset[str]:
        """What may be written from the beginning of a node on, given what may be behind it and behind the loop around it."""
        if isinstance(node, Call):
            fields_of[node.name] = fields_of.get(node.name, frozenset()) | set(node.role.writes) | later
            return frozenset()
        if isinstance(node, Tool):
            return later | set(node.writes)
        if isinstance(node, Stop):
            return leave
        if isinstance(node, Sequence):
            for part in reversed(node.parts):
                later = back(part, later, leave)
            return later
        if isinstance(node, Choose):
            return frozenset().union(*(back(case, later, leave) for case in node.cases.values()))
        if isinstance(node, FunctionNode):
            for inside in node.calls.values():
                back(inside, frozenset(), leave)
            return frozenset()
        if isinstance(node, Repeat):
            first = back(node.body, later, later)
            return back(node.body, later | first, later)
        inside = node.parts if isinstance(node, Together) else (node.body,)
        fields = frozenset().union(*(back(part, frozenset(), frozenset()) for part in inside))
        return fields if any(isinstance(child, Call) for child in walk(node)) else fields | written(node) | later

    back(body, frozenset(), frozenset())
    return fields_of
