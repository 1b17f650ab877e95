"""The state of a play between two nodes: a value, so that a fork costs nothing and a branch cannot disturb another (law 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from marl_llm.text import Conversation, Message
from marl_llm.workflows.nodes import Each, FunctionNode, Node, Repeat, Together, written
from marl_llm.workflows.trajectory import Event, RoleCall, state_writes


class RoleHistory(NamedTuple):
    """What a role that continues has read and said, its last response included."""

    conversation: Conversation | None  # None for a player without a renderer
    messages: tuple[Message, ...]


class Round(NamedTuple):
    """What stands behind the body of a loop: the decision on round `number`."""

    loop: Repeat
    number: int


Todo = tuple | None  # (Node or Round, number of its first request, what is to do after it)


def push(todo: Todo, node: Node, base: int) -> Todo:
    """A node before what is to do."""
    return (node, base, todo)


class State(NamedTuple):
    """See the module's text."""

    fields: dict[str, Any]  # never changed in place
    todo: Todo = None
    turn: int = 0
    spoken: bool = False  # whether a role has spoken in this turn
    last: tuple[str, ...] = ()  # ids of the events that the next one follows
    events: tuple[Event, ...] = ()
    past: tuple[Event, ...] = ()  # what happened before the part began that runs beside others; `events` are its own
    items: tuple[int, ...] = ()  # which item of each `each` around
    path_id: int = 0  # number of the forks taken, injective: digits 1..K in base K_max + 1
    journal: tuple = ()  # of a team that is a function: what it asked and was answered (`function_replay.Journal`)
    histories: Mapping[str, RoleHistory] = MappingProxyType({})  # of roles that continue
    tool_use: str = ""  # of a sub-agent: the `ToolUse` that its response answers
    tokens_left: int | None = None  # of a sub-agent: how many it may draw

    def after(self, *events: Event) -> State:
        """The state once these events happened, one after the other."""
        fields = dict(self.fields)
        for event in events:
            fields.update(state_writes(event))
        spoken = self.spoken or any(isinstance(event, RoleCall) for event in events)
        return self._replace(fields=fields, spoken=spoken, last=(events[-1].id,), events=(*self.events, *events))

    def child(self, todo: Todo, item: int | None = None, fields: Mapping[str, Any] | None = None) -> State:
        """The state in which a part begins that runs beside others."""
        items = self.items if item is None else (*self.items, item)
        past = (*self.past, *self.events)
        return self._replace(fields={**self.fields, **(fields or {})}, todo=todo, events=(), past=past, items=items)


def merge(node: Together | Each | FunctionNode, before: State, ends: Sequence[State]) -> State:
    """The state after parts that ran beside each other: what they wrote, and their events in the order written.

    Conversations go on behind a `Together`; those of an `Each` end with their items.
    """
    fields, histories = dict(before.fields), dict(before.histories)
    for end in ends if isinstance(node, Together) else ():
        histories.update({role: history for role, history in end.histories.items() if history is not before.histories.get(role)})
    if isinstance(node, Each):
        fields.update({to: tuple(end.fields[field] for end in ends) for field, to in node.collect.items()})
    if isinstance(node, Together):
        for part, end in zip(node.parts, ends):
            fields.update({field: end.fields[field] for field in written(part) if field in end.fields})
    return before._replace(
        fields=fields,
        turn=max((end.turn for end in ends), default=before.turn),
        spoken=before.spoken or any(end.spoken for end in ends),
        last=tuple(dict.fromkeys(name for end in ends for name in end.last)) or before.last,
        events=(*before.events, *(event for end in ends for event in end.events)),
        histories=histories,
    )
