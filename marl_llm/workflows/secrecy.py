"""What comes from hidden fields is hidden: the way of a gold answer through a workflow, followed before anyone plays it.

A field is hidden if it was computed of a hidden one, is an item or the list of items of one, or was written where a hidden field decided
whether it is written: in a case of a `choose`, once per item of an `each`, after a `stop`, in a later round. No role may read such a field,
nor speak where a hidden field decides whether it speaks. The word `reveals` ends this for what it names: of a tool or computation the
fields that it writes, of a choice or loop the fields that its condition reads.

This is the information flow of Denning and Denning, "Certification of programs for secure information flow", CACM 1977, with the program
counter's label in `control`. Role calls keep it simple: whatever a role reads is open, hence what it writes is, unless its parser (a
`Reader`) reads a hidden field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.nodes import (
    HIDDEN_RESULT,
    PAID,
    Call,
    Choose,
    Each,
    FunctionNode,
    Node,
    Repeat,
    Sequence,
    Stop,
    Together,
    Tool,
    label,
    walk,
    written,
)


class Origin(NamedTuple):
    """Where a hidden value comes from."""

    field: str  # the task's hidden field
    by: str = ""  # the node that made the value of it; empty: it is the task's field itself
    remedy: str = ""  # what that node would have to say, so that roles may know it


class Known(NamedTuple):
    """What is hidden when control comes to a node."""

    fields: Mapping[str, Origin]  # hidden fields
    control: Origin | None  # what decides whether control comes here at all; None: nothing hidden

    def source(self, reads: Iterable[str], reveals: Iterable[str] = ()) -> Origin | None:
        """The origin of the first of these fields that is hidden and not revealed."""
        return next((self.fields[field] for field in reads if field in self.fields and field not in reveals), None)

    def wrote(self, fields: Iterable[str], origin: Origin | None) -> Known:
        """After these fields were written, hidden if they have an origin."""
        kept = {field: old for field, old in self.fields.items() if field not in fields}
        return self._replace(fields=kept if origin is None else {**kept, **dict.fromkeys(fields, origin)})


def check_secrecy(body: Node, hidden: Iterable[str]) -> None:
    """Raises `WorkflowError` naming the first role that would learn of a hidden field, the way it took, and what would allow it."""
    _follow(body, Known({field: Origin(field) for field in hidden}, None), [])


def secret_fields(body: Node, hidden: Iterable[str]) -> frozenset[str]:
    """Hidden fields of the task, and every field that any way through the graph makes of one; `reveals` ends it. The order of
    nodes is not looked at: a field that is hidden anywhere is hidden."""
    secret = set(hidden)
    while True:
        before = len(secret)
        for node in walk(body):
            reads = () if isinstance(node, Each) else getattr(node, "reads", ())
            if isinstance(node, Tool) and secret & set(reads):
                secret |= set(node.writes) - set(node.reveals)
            elif isinstance(node, Call) and secret & set(node.role.parse_reads):
                secret |= set(node.role.writes)
            elif isinstance(node, FunctionNode) and secret:
                secret |= {HIDDEN_RESULT, PAID}
            elif isinstance(node, Choose | Repeat) and (secret & set(reads)) - set(node.reveals):
                secret |= written(node)
            elif isinstance(node, Each):
                if node.over in secret:
                    secret |= {node.item, *node.collect.values()}
                secret |= {to for field, to in node.collect.items() if field in secret}
        if len(secret) == before:
            return frozenset(secret)


def _follow(node: Node, known: Known, exits: list[Known]) -> Known | None:
    """What is hidden after a node, or None if control does not leave it; `exits` collects what is hidden where a `stop` leaves."""
    if isinstance(node, Call):
        return _speak(node, known)
    if isinstance(node, Tool):
        source = known.source(node.reads) or known.control
        for field in node.writes:
            open_ = source is None or field in node.reveals
            known = known.wrote((field,), None if open_ else Origin(source.field, node.name, f"{node.name!r} says reveals=({field!r},)"))
        return known
    if isinstance(node, Stop):
        exits.append(known)
        return None
    if isinstance(node, Sequence):
        reached: Known | None = known
        for part in node.parts:
            reached = None if reached is None else _follow(part, reached, exits)
        return reached
    if isinstance(node, Choose):
        return _choose(node, known, exits)
    if isinstance(node, Repeat):
        return _repeat(node, known)
    if isinstance(node, Together):
        ends = [(part, _follow(part, known, [])) for part in node.parts]
        for part, end in ends:
            for field in written(part) if end is not None else ():
                known = known.wrote((field,), end.fields.get(field))
        return known
    if isinstance(node, FunctionNode):  # its hidden values refuse to become text: see `hidden_values`
        origin = next(iter(known.fields.values()), known.control)
        return known.wrote((HIDDEN_RESULT, PAID), origin and Origin(origin.field, node.name, f"{node.name!r} reads no hidden field"))
    return _each(node, known)


def _speak(node: Call, known: Known) -> Known:
    """A role speaks: nothing that it reads may be hidden, nor whether it speaks. What it writes is as open as what its parser reads."""
    who = f"node {node.name!r}: role {node.role.name!r} reads"
    for field in (*node.role.reads, *node.role.observes):
        if origin := known.fields.get(field):
            if not origin.by:
                raise WorkflowError(f"{who} the hidden field {field!r}; a prompt may not hold it")
            raise WorkflowError(
                f"{who} {field!r}, which comes from the hidden field {origin.field!r} by {origin.by!r}; a prompt may not hold it, "
                f"unless {origin.remedy}"
            )
    if origin := known.control:
        raise WorkflowError(
            f"whether {node.name!r} speaks depends on the hidden field {origin.field!r} by {origin.by!r}; its prompt would tell, "
            f"unless {origin.remedy}"
        )
    origin = known.source(node.role.parse_reads)
    remedy = f"its parser reads no hidden field but leaves that to a tool after {node.name!r}"
    return known.wrote(node.role.writes, None if origin is None else Origin(origin.field, node.name, remedy))


def _condition(node: Choose | Repeat, known: Known) -> Origin | None:
    """The hidden field that decides at a choice or a loop's condition."""
    for field in node.reads:
        if origin := known.source((field,), node.reveals):
            return Origin(origin.field, node.name, f"{node.name!r} says reveals=({field!r},)")
    return None


def _choose(node: Choose, known: Known, exits: list[Known]) -> Known | None:
    decides = _condition(node, known)
    inside = known._replace(control=known.control or decides)
    before = len(exits)
    ends = [_follow(case, inside, exits) for case in node.cases.values()]
    after = _meet(ends)
    if after is None or (decides and len(exits) > before):  # a case left the loop: whether the others go on is decided here
        return after
    return after._replace(control=known.control) if decides else after


def _repeat(node: Repeat, known: Known) -> Known | None:
    """Rounds are followed until nothing more becomes hidden: fields only ever join."""
    start = known
    while True:
        exits: list[Known] = []
        after = _follow(node.body, start, exits)
        if after is not None:
            after = after._replace(control=after.control or _condition(node, after))
        again = _meet([start, after]) if node.at_most > 1 else start
        if again is None or again == start:
            break
        start = again
    end = _meet([after, *exits])
    if end is None or known.control is not None or end.control is None:
        return end
    fields = {field: end.fields.get(field, end.control) for field in sorted(written(node.body))}  # how often they were written is hidden
    return Known({**end.fields, **fields}, None)


def _each(node: Each, known: Known) -> Known:
    source = known.source((node.over,))
    name = label(node)
    remedy = f"a computation makes a list of it for {name!r} and says reveals=(...)"
    decides = None if source is None else Origin(source.field, name, remedy)
    inside = Known({**known.wrote((node.item,), decides).fields}, known.control or decides)
    end = _follow(node.body, inside, [])
    for field, to in node.collect.items():
        origin = None if end is None else end.fields.get(field)
        known = known.wrote((to,), origin or decides or known.control)
    return known


def _meet(paths: Iterable[Known | None]) -> Known | None:
    """Hidden after several paths: what is hidden after any. Paths that never arrive do not count."""
    arriving = [path for path in paths if path is not None]
    if not arriving:
        return None
    fields: dict[str, Origin] = {}
    for path in arriving:
        for field, origin in path.fields.items():
            fields.setdefault(field, origin)
    return Known(fields, next((path.control for path in arriving if path.control), None))
