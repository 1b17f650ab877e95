"""What is wrong with a workflow before it is played: fields that nobody wrote, nodes that nothing reaches, names that clash.

The check follows the state through the graph: at each node it knows the fields that every way to it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from marl_llm.hints import suggestion
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.nodes import Call, Choose, Node, Repeat, Sequence, Stop, Together, Tool, label, walk, writes, written
from marl_llm.workflows.secrecy import check_secrecy

Known = frozenset[str] | None  # fields that are there for certain; None: control never comes here


def check(workflow: Any) -> None:
    """Of a `graph.Workflow` that is being built. Raises `WorkflowError` naming the first node that cannot be, and what to do about it."""
    for what, names in (("inputs", workflow.inputs), ("hidden", workflow.hidden)):
        if isinstance(names, str):
            raise WorkflowError(f"workflow {workflow.name!r}: {what}={names!r} must be a tuple of names, e.g. {what}=({names!r},)")
    given = [*workflow.inputs, *workflow.hidden, *workflow.start]
    if clash := [field for field in given if given.count(field) > 1]:
        raise WorkflowError(f"workflow {workflow.name!r}: the field {clash[0]!r} is given twice among inputs, hidden and start")
    _check_names(workflow)
    for node in walk(workflow.body):
        for field in sorted(writes(node)):
            if field in (*workflow.inputs, *workflow.hidden):
                raise WorkflowError(f"node {label(node)!r} writes {field!r}, which is a field of the task: give it another name")
    _Flow(workflow).follow(workflow.body, frozenset(given), [])
    check_secrecy(workflow.body, workflow.hidden)
    _check_rewards(workflow)


def _check_names(workflow: Any) -> None:
    seen: dict[str, Node] = {}
    roles: dict[str, object] = {}
    for node in walk(workflow.body):
        if isinstance(node, Call | Tool):
            if node.name in seen:
                how = f"call({node.name}, name=...)" if isinstance(node, Call) else "name=..."
                raise WorkflowError(f"two nodes are called {node.name!r}: give one of them another name with {how}")
            seen[node.name] = node
        if isinstance(node, Call):
            if roles.setdefault(node.role.name, node.role) is not node.role:
                raise WorkflowError(f"two different roles are called {node.role.name!r}: rename one of them")
    if not roles:
        raise WorkflowError(f"workflow {workflow.name!r} calls no role: there is nobody to train")


def _check_rewards(workflow: Any) -> None:
    """Refuses a reward that pays a role or reads a field which the workflow does not have.

    Of a reward that is not made by `rewards`, nothing is known before it is called.
    """
    if callable(workflow.rewards) or isinstance(workflow.rewards, str):
        raise WorkflowError(f"workflow {workflow.name!r}: rewards must be a tuple of rewards, e.g. rewards=(broadcast(...),)")
    fields = [field for node in walk(workflow.body) for field in sorted(writes(node))]
    for number, reward in enumerate(workflow.rewards):
        who = f"{title(number, reward)} of workflow {workflow.name!r}"
        if not callable(reward):
            raise WorkflowError(f"{who} is no function of a trajectory")
        pays, reads = getattr(reward, "pays", ()), getattr(reward, "reads", ())
        for names, known, what in ((pays, list(workflow.roles), "pays the role"), (reads, fields, "reads the field")):
            if missing := [name for name in names if name not in known]:
                raise WorkflowError(f"{who} {what} {missing[0]!r}, which the workflow does not have; {suggestion(missing[0], known)}")


def title(number: int, reward: Callable) -> str:
    """What to call a workflow's reward in a message."""
    return f"reward {number} ({getattr(reward, '__qualname__', type(reward).__name__)})"


def _meet(ways: Iterable[Known]) -> Known:
    """Fields that all ways have written; ways that never arrive do not count."""
    arriving = [way for way in ways if way is not None]
    return frozenset.intersection(*arriving) if arriving else None


class _Flow:
    """Follows control and fields through one workflow. `exits` collects what is known where a `stop` leaves."""

    def __init__(self, workflow: Any):
        self.writers: dict[str, list[str]] = {}
        for node in walk(workflow.body):
            for field in writes(node):
                self.writers.setdefault(field, []).append(label(node))
        self.given = [*workflow.inputs, *workflow.hidden, *workflow.start]

    def need(self, node: Node, reads: Iterable[str], known: frozenset[str]) -> None:
        for field in reads:
            if field in known:
                continue
            where = f"node {label(node)!r} reads the field {field!r}, "
            if field in self.writers:
                writers = " and ".join(map(repr, self.writers[field]))
                raise WorkflowError(f"{where}which {writers} may not have written by then: move it, or give it a value in start={{...}}")
            hint = suggestion(field, [*self.given, *self.writers])
            raise WorkflowError(f"{where}which no node writes and the task does not give; {hint}")

    def follow(self, node: Node, known: frozenset[str], exits: list[Known]) -> Known:
        if isinstance(node, Call | Tool):
            self.need(node, (*node.role.reads, *node.role.parse_reads) if isinstance(node, Call) else node.reads, known)
            return known | writes(node)
        if isinstance(node, Stop):
            exits.append(known)
            return None
        if isinstance(node, Sequence):
            here: Known = known
            for part in node.parts:
                if here is None:
                    raise WorkflowError(f"node {self._first(part)!r} cannot be reached: every way before it stops")
                here = self.follow(part, here, exits)
            return here
        if isinstance(node, Choose):
            self.need(node, node.reads, known)
            return _meet([self.follow(case, known, exits) for case in node.cases.values()])
        if isinstance(node, Repeat):
            inside: list[Known] = []
            after = self.follow(node.body, known, inside)
            if after is not None:
                self.need(node, node.reads, after)
            elif node.until is not None:
                raise WorkflowError(f"the condition of loop {node.name!r} cannot be reached: every way before it stops")
            return _meet([after, *inside])
        if isinstance(node, Together):
            return self._together(node, known)
        self.need(node, (node.over,), known)
        if node.item in known:
            raise WorkflowError(f"node {label(node)!r}: the item's field {node.item!r} exists already; choose another as_=...")
        self._no_stop(node, node.body)
        after = self.follow(node.body, known | {node.item}, [])
        if missing := [field for field in node.collect if field not in (after or ())]:
            raise WorkflowError(f"node {label(node)!r} collects {missing[0]!r}, which its body does not write on every way")
        return known | set(node.collect.values())

    def _together(self, node: Together, known: frozenset[str]) -> Known:
        result, owner = known, {}
        for part in node.parts:
            self._no_stop(node, part)
            for field in sorted(written(part)):
                if field in owner:
                    first = f"{owner[field]!r} and {self._first(part)!r}"
                    raise WorkflowError(f"{first} run together and both write {field!r}: give the field two names")
                owner[field] = self._first(part)
            result = result | (self.follow(part, known, []) or frozenset())
        return result

    @staticmethod
    def _first(node: Node) -> str:
        """The first node inside that has a name of its own."""
        return next((label(n) for n in walk(node) if not isinstance(n, Sequence | Together)), "nothing")

    def _no_stop(self, parent: Node, part: Node) -> None:
        """A stop that would leave what runs at the same time beside it has no meaning."""

        def stops(node: Node) -> bool:
            if isinstance(node, Stop):
                return True
            if isinstance(node, Sequence | Together):
                return any(map(stops, node.parts))
            return isinstance(node, Choose) and any(map(stops, node.cases.values()))

        if stops(part):
            raise WorkflowError(
                f"a stop inside {label(parent)!r} would end what runs beside it; put it after, or inside a repeat of its own"
            )
