"""The parts that a workflow is made of, as values, and what can be read off them. `graph` has the words that make them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from marl_llm.workflows.roles import Role


@dataclasses.dataclass(frozen=True)
class Call:
    """A role speaks."""

    role: Role
    name: str

    @property
    def request_count(self) -> int:
        """How many requests it can make, which are its places in the numbering of all requests."""
        return 1 + (self.role.max_tool_rounds if self.role.tools else 0)


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
    """An `async` function that asks roles and tools as it goes; see `function_replay`.

    Attributes:
      function: of a `TeamHandle` and a `TeamTask`; returns a `Reward` or a number.
      calls: role -> its call.
      at_most: most requests of roles in one play, and most uses of tools.
      timeout_s: of what the function does itself between two requests.
      on_error: what a play is paid in which the function raises; None: it is aborted.
      metrics: names of the figures that its reward may have.
    """

    name: str
    function: Callable[..., Any]
    calls: Mapping[str, Call]
    at_most: int
    timeout_s: float | int
    on_error: float | int | None = None
    metrics: tuple[str, ...] = ()

    @property
    def request_count(self) -> int:
        """Places of all requests that it could make, of its tools, and of its end."""
        return self.at_most * (len(self.calls) + 1) + 1

    def place(self, role: str, number: int) -> int:
        """The place of a role's n-th request: as many per number as there are roles, so that rounds of all roles come one after another."""
        return number * len(self.calls) + list(self.calls).index(role)


Node = FunctionNode | Call | Tool | Sequence | Together | Each | Choose | Repeat | Stop
Part = Node | Role


def step_of(body: Node) -> int:
    """How far apart the places of two rounds, or of two items, are: at least 1, so that a tool's uses have names of their own."""
    return max(1, body.request_count)


def walk(node: Node) -> Iterator[Node]:
    """A node and everything inside it, in the order written."""
    yield node
    if isinstance(node, Sequence | Together):
        for part in node.parts:
            yield from walk(part)
    elif isinstance(node, Each | Repeat):
        yield from walk(node.body)
    elif isinstance(node, Choose | FunctionNode):
        for case in (node.cases if isinstance(node, Choose) else node.calls).values():
            yield from walk(case)


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
    found: dict[str, frozenset[str]] = {}

    def back(node: Node, later: frozenset[str], leave: frozenset[str]) -> frozenset[str]:
        """What may be written from the beginning of a node on, given what may be behind it and behind the loop around it."""
        if isinstance(node, Call):
            found[node.name] = found.get(node.name, frozenset()) | set(node.role.writes) | later
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
        own = frozenset().union(*(back(part, frozenset(), frozenset()) for part in inside))
        return own if any(isinstance(one, Call) for one in walk(node)) else own | written(node) | later

    back(body, frozenset(), frozenset())
    return found
