"""What is wrong with a workflow before it is played: fields that nobody wrote, nodes that nothing reaches, names that clash.

The check follows the state through the graph: at each node it knows the fields that every way to it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from marl_llm.hints import suggestion
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.finite import is_finite
from marl_llm.workflows.named_roles import named_roles
from marl_llm.workflows.nodes import (
    PROMPT,
    Call,
    Choose,
    FunctionNode,
    Node,
    Repeat,
    Sequence,
    Stop,
    Together,
    Tool,
    label,
    walk,
    writes,
    written,
    written_before_next_role,
)
from marl_llm.workflows.secrecy import check_secrecy

SCORED = ("when_made", "at_end")
Known = frozenset[str] | None  # fields that are there for certain; None: control never comes here


def check(workflow: Any) -> None:
    """Of a `graph.Workflow` that is being built. Raises `WorkflowError` naming the first node that cannot be, and what to do about it."""
    for kind, names in (("inputs", workflow.inputs), ("hidden", workflow.hidden)):
        if isinstance(names, str):
            raise WorkflowError(f"workflow {workflow.name!r}: {kind}={names!r} must be a tuple of names, e.g. {kind}=({names!r},)")
    fields = [*workflow.inputs, *workflow.hidden, *workflow.start]
    if clash := [field for field in fields if fields.count(field) > 1]:
        raise WorkflowError(f"workflow {workflow.name!r}: the field {clash[0]!r} is given twice among inputs, hidden and start")
    if strange := [name for name, value in workflow.start.items() if not is_finite(value)]:
        raise WorkflowError(f"workflow {workflow.name!r}: start gives {strange[0]!r} a number that is not finite, which no record holds")
    _check_names(workflow)
    for node in walk(workflow.body):
        for field in sorted(writes(node)):
            if field in (*workflow.inputs, *workflow.hidden):
                raise WorkflowError(f"node {label(node)!r} writes {field!r}, which is a field of the task: give it another name")
    _Flow(workflow).follow(workflow.body, frozenset(fields), [])
    _check_continued(workflow)
    check_secrecy(workflow.body, workflow.hidden)
    _check_rewards(workflow)
    _check_scorers(workflow)


def _check_names(workflow: Any) -> None:
    seen: dict[str, Node] = {}
    roles: dict[str, object] = {}
    for node in walk(workflow.body, agents=True):
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


def _check_continued(workflow: Any) -> None:
    """Refuses a role that continues but can speak only once."""
    loops = [node for node in walk(workflow.body) if isinstance(node, Repeat) and node.at_most > 1]
    again = {node.name for loop in loops for node in _calls(loop.body)}
    for role in workflow.roles.values():
        if not role.continues:
            continue
        places = [node.name for node in _calls(workflow.body) if node.role is role]
        if len(places) == 1 and places[0] not in again:
            raise WorkflowError(f"the role {role.name!r} has continues=True but speaks once, so that it never continues: leave it out")


def _calls(node: Node) -> list[Call]:
    return [inside for inside in walk(node) if isinstance(inside, Call)]


def _check_rewards(workflow: Any) -> None:
    """Refuses a reward or a metric that names a role, or reads a field, which the workflow does not have.

    Of a function that is not made by `rewards`, only the roles that its code names are known before it is called.
    """
    if callable(workflow.rewards) or isinstance(workflow.rewards, str):
        raise WorkflowError(f"workflow {workflow.name!r}: rewards must be a tuple of rewards, e.g. rewards=(broadcast(...),)")
    fields = [field for node in walk(workflow.body) for field in sorted(writes(node))]
    for number, reward in enumerate(workflow.rewards):
        who = f"{title(number, reward)} of workflow {workflow.name!r}"
        if not callable(reward):
            raise WorkflowError(f"{who} is no function of a trajectory")
        pays, reads = getattr(reward, "pays", ()), getattr(reward, "reads", ())
        for names, known, relation in ((pays, list(workflow.roles), "pays the role"), (reads, fields, "reads the field")):
            if missing := [name for name in names if name not in known]:
                raise WorkflowError(f"{who} {relation} {missing[0]!r}, which the workflow does not have; {suggestion(missing[0], known)}")
        _check_named_roles(workflow, who, reward)
    for name, metric in workflow.metrics.items():
        _check_named_roles(workflow, f"metric {name!r} of workflow {workflow.name!r}", metric)


def _check_named_roles(workflow: Any, who: str, function: Callable) -> None:
    if missing := [name for name in named_roles(function) if name not in workflow.roles]:
        hint = suggestion(missing[0], workflow.roles)
        raise WorkflowError(f"{who} names the role {missing[0]!r}, which the workflow does not have; {hint}")


def _check_scorers(workflow: Any) -> None:
    """Refuses scorers of one name or of no role, and rewards that read a scorer which is not there."""
    names = [scorer.name for scorer in workflow.scorers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise WorkflowError(f"workflow {workflow.name!r}: two scorers are called {twice[0]!r}")
    for scorer in workflow.scorers:
        if missing := [role for role in scorer.roles or () if role not in workflow.roles]:
            raise WorkflowError(f"scorer {scorer.name!r} scores the role {missing[0]!r}; {suggestion(missing[0], workflow.roles)}")
    for number, reward in enumerate(workflow.rewards):
        if missing := [name for name in getattr(reward, "scorers", ()) if name not in (*names, "coach")]:  # a coach may come later
            who = f"{title(number, reward)} of workflow {workflow.name!r}"
            raise WorkflowError(f"{who} reads the scorer {missing[0]!r}, which is not among scorers=(...); {suggestion(missing[0], names)}")
    if workflow.score not in SCORED:
        raise WorkflowError(f"workflow {workflow.name!r}: score={workflow.score!r} is unknown; choose one of {', '.join(SCORED)}")


def check_shown(workflow: Any, roles: Iterable[str]) -> None:
    """Refuses to score candidates of these roles when they are made, by a reward that shows later: `delayed`, or one of a field that
    nothing writes between the role and the next one, or one of a scorer that waits for the end."""
    after = written_before_next_role(workflow.body)
    late = {scorer.name for scorer in workflow.scorers if scorer.when == "end"}
    for number, reward in enumerate(workflow.rewards):
        pays = [role for role in getattr(reward, "pays", ()) or workflow.roles if role in roles]
        why = "later" if getattr(reward, "shows_later", False) else ""
        for name in getattr(reward, "scorers", ()):
            why = why or (f"by the scorer {name!r}, which is asked at the end" if name in late else "")
        for role in pays:
            nodes = [node for node in workflow.nodes.values() if isinstance(node, Call) and node.role.name == role]
            unseen = [f for f in getattr(reward, "reads", ()) for node in nodes if f not in after[node.name]]
            if why or unseen:
                how = why or f"for {unseen[0]!r}, which nothing writes between it and the next role"
                raise WorkflowError(
                    f"{title(number, reward)} of workflow {workflow.name!r} pays {role!r} {how}: "
                    "its candidates cannot be scored when they are made; let the workflow say score='at_end'"
                )


def title(number: int, reward: Callable) -> str:
    """What to call a workflow's reward in a message."""
    return f"reward {number} ({getattr(reward, '__qualname__', type(reward).__name__)})"


def _meet(paths: Iterable[Known]) -> Known:
    """Fields that all paths have written; paths that never arrive do not count."""
    arriving = [path for path in paths if path is not None]
    return frozenset.intersection(*arriving) if arriving else None


class _Flow:
    """Follows control and fields through one workflow. `exits` collects what is known where a `stop` leaves."""

    def __init__(self, workflow: Any):
        self.writers: dict[str, list[str]] = {}
        for node in walk(workflow.body):
            for field in writes(node):
                self.writers.setdefault(field, []).append(label(node))
        self.start_fields = [*workflow.inputs, *workflow.hidden, *workflow.start]

    def need(self, node: Node, reads: Iterable[str], known: frozenset[str]) -> None:
        for field in reads:
            if field in known:
                continue
            where = f"node {label(node)!r} reads the field {field!r}, "
            if field in self.writers:
                writers = " and ".join(map(repr, self.writers[field]))
                raise WorkflowError(f"{where}which {writers} may not have written by then: move it, or give it a value in start={{...}}")
            hint = suggestion(field, [*self.start_fields, *self.writers])
            raise WorkflowError(f"{where}which no node writes and the task does not give; {hint}")

    def follow(self, node: Node, known: frozenset[str], exits: list[Known]) -> Known:
        if isinstance(node, Call | Tool):
            if isinstance(node, Call):
                known = self._call(node, known)
            else:
                self.need(node, node.reads, known)
            return known | writes(node)
        if isinstance(node, Stop):
            exits.append(known)
            return None
        if isinstance(node, Sequence):
            reached: Known = known
            for part in node.parts:
                if reached is None:
                    raise WorkflowError(f"node {self._first(part)!r} cannot be reached: every way before it stops")
                reached = self.follow(part, reached, exits)
            return reached
        if isinstance(node, Choose):
            self.need(node, node.reads, known)
            return _meet([self.follow(case, known, exits) for case in node.cases.values()])
        if isinstance(node, Repeat):
            inside: list[Known] = []
            after = self.follow(node.body, known, inside)
            if after is not None:
                self.need(node, node.reads, after)
                if node.at_most > 1 and any(isinstance(inner, Call) and inner.role.continues for inner in walk(node.body)):
                    self.follow(node.body, after, [])  # a second round reads observations
            elif node.until is not None:
                raise WorkflowError(f"the condition of loop {node.name!r} cannot be reached: every way before it stops")
            return _meet([after, *inside])
        if isinstance(node, Together):
            return self._together(node, known)
        if isinstance(node, FunctionNode):
            for inside in node.calls.values():
                self._call(inside, known | {PROMPT})
            return known | writes(node)
        self.need(node, (node.over,), known)
        if node.item in known:
            raise WorkflowError(f"node {label(node)!r}: the item's field {node.item!r} exists already; choose another as_=...")
        self._no_stop(node, node.body)
        after = self.follow(node.body, known | {node.item}, [])
        if missing := [field for field in node.collect if field not in (after or ())]:
            raise WorkflowError(f"node {label(node)!r} collects {missing[0]!r}, which its body does not write on every way")
        return known | set(node.collect.values())

    def _call(self, node: Call, known: frozenset[str]) -> frozenset[str]:
        """What is known behind a role's call; that it continues is known once it has spoken on every way."""
        role = node.role
        self.need(node, (*role.reads, *role.parse_reads), known)
        began = f"{role.name} has spoken"  # no field's name
        if began in known:
            self.need(node, role.observes, known)
        return known | {began} if role.continues else known

    def _together(self, node: Together, known: frozenset[str]) -> Known:
        result, owner = known, {}
        for part in node.parts:
            for role in {n.role.name for n in walk(part) if isinstance(n, Call) and n.role.continues}:
                if f"{role} has spoken beside" in owner:
                    raise WorkflowError(f"the role {role!r} continues one conversation and cannot speak at two places at once")
                owner[f"{role} has spoken beside"] = role
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
