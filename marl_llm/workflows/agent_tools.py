"""Roles as tools of roles: which sub-agents a workflow's calls have, and whether one more call of a sub-agent is within its limits.

A sub-agent's call is numbered by its place: the caller's request, the tool, and which call of it this is within the caller's response. So
the seed of each of its responses follows from who asks and how often, and not from who answers first (law 6).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.hints import suggestion
from marl_llm.workflows.errors import LimitReached, PromptTooLong, ToolRefusal, WorkflowError
from marl_llm.workflows.nodes import PROMPT, Call, Node, changed_calls, walk
from marl_llm.workflows.roles import MAX_REASON, AgentTool, Role
from marl_llm.workflows.state import State
from marl_llm.workflows.trajectory import Event, RoleCall, ToolUse

MOST_REQUESTS = 2**31  # of a workflow, because their numbers are parts of seeds


def with_agents(body: Node, sub_agents: Sequence[Role], workflow: str) -> Node:
    """The body with the calls of all sub-agents within its role calls.

    Raises `WorkflowError` for a tool that names no role, or one that cannot be a sub-agent; for roles that could call each other without
    end; and for a sub-agent that nobody calls.
    """
    roles = {call.role.name: call.role for call in walk(body) if isinstance(call, Call)}
    for role in sub_agents:
        if roles.setdefault(role.name, role) is not role:
            raise WorkflowError(f"workflow {workflow!r}: two different roles are called {role.name!r}: rename one of them")
    tools = [(role, tool) for role in roles.values() for tool in role.tools if isinstance(tool, AgentTool)]
    if unused := [role.name for role in sub_agents if role.name not in {tool.role for _, tool in tools}]:
        raise WorkflowError(f"workflow {workflow!r}: sub_agents has {unused[0]!r}, which is a tool of no role: leave it out")
    if not tools:
        return body
    named = {role.name: _with_arguments(role, roles) for role in roles.values()}
    for name in named:
        _check_ends(name, named, ())
    body = changed_calls(body, lambda call: _with_calls(Call(named[call.role.name], call.name), named, 1))
    if body.request_count >= MOST_REQUESTS:
        raise WorkflowError(f"workflow {workflow!r} could make {body.request_count} requests: lower at_most or depth of its AgentTools")
    return body


def _with_arguments(role: Role, roles: Mapping[str, Role]) -> Role:
    """The role with the names of its tools' arguments; the same role if it has no sub-agents."""
    if not any(isinstance(tool, AgentTool) for tool in role.tools):
        return role
    return dataclasses.replace(role, tools=tuple(_named(tool, role, roles) if isinstance(tool, AgentTool) else tool for tool in role.tools))


def _named(tool: AgentTool, caller: Role, roles: Mapping[str, Role]) -> AgentTool:
    who = f"role {caller.name!r}: its AgentTool {tool.name!r}"
    role = roles.get(tool.role)
    if role is None:
        hint = suggestion(tool.role, roles)
        raise WorkflowError(f"{who} names the role {tool.role!r}, which the team does not have; {hint}, or add it to sub_agents=(...)")
    if role.speaks_ids or role.continues or role.parse_reads:
        why = "reads ids" if role.speaks_ids else "continues its conversation" if role.continues else "has a parser that reads the state"
        raise WorkflowError(f"{who} calls {role.name!r}, which {why}: a sub-agent reads its arguments alone, anew in each call")
    names = tool.arguments or tuple("prompt" if field == PROMPT else field for field in role.reads)
    if len(names) != len(role.reads) or len(set(names)) != len(names):
        raise WorkflowError(f"{who} names the arguments {names}, and the prompt of {role.name!r} reads {role.reads}: name each once")
    return dataclasses.replace(tool, arguments=names)


def _check_ends(name: str, roles: Mapping[str, Role], callers: tuple[str, ...]) -> None:
    """Refuses roles that could call each other without end, because no tool among theirs has a depth."""
    if name in callers:
        circle = " → ".join((*callers[callers.index(name) :], name))
        raise WorkflowError(f"the role {name!r} is its own tool ({circle}) without a bound: give its AgentTool a depth, e.g. depth=2")
    for tool in roles[name].tools:
        if isinstance(tool, AgentTool) and tool.depth is None:
            _check_ends(tool.role, roles, (*callers, name))


def _with_calls(call: Call, roles: Mapping[str, Role], level: int) -> Call:
    """The call with those of its sub-agents, which would speak at this level."""
    agents = {
        tool.name: _with_calls(Call(roles[tool.role], f"{call.name}.{tool.name}"), roles, level + 1)
        for tool in call.role.tools
        if isinstance(tool, AgentTool) and (tool.depth is None or level <= tool.depth)
    }
    return dataclasses.replace(call, agents=agents)


@dataclasses.dataclass(frozen=True)
class Caller:
    """A response of a role that calls tools."""

    node: Call  # the role's call. first: the number of the node's first request
    first: int
    called: RoleCall  # the response
    state: State  # as the role was asked. events: what the node has done since, `called` included
    events: tuple[Event, ...]

    @functools.cached_property
    def past(self) -> tuple[Event, ...]:
        """All that happened before the tools are called."""
        return (*self.state.past, *self.state.events, *self.events)


@dataclasses.dataclass(frozen=True)
class SubAgentCall:
    """A call of a sub-agent that is within its limits: the node that speaks, the number of its first request, and the state it reads."""

    node: Call
    first: int
    state: State

    def answer(self, events: Sequence[Event]) -> str:
        """What the caller reads: the field that the sub-agent wrote, or all of them as JSON. Raises `ToolRefusal` for a broken format."""
        last = events[-1]
        if last.illegal is not None:
            raise ToolRefusal(f"the answer of {self.node.role.name!r} broke its format: {last.illegal}"[:MAX_REASON])
        (value, *more) = last.writes.values()
        if isinstance(value, str) and not more:
            return value
        try:
            return json.dumps(last.writes, default=str)
        except Exception as error:  # `default` asks any object for its text
            raise ToolRefusal(f"the answer of {self.node.role.name!r} is no JSON: {type(error).__name__}: {error}"[:MAX_REASON]) from error


class SubAgentLimits:
    """How often the tools of one caller may still be called, and for how many tokens. `past` is counted once, then each call admitted."""

    def __init__(self, caller: Caller):
        self._caller = caller
        self._uses: dict[str, dict[str, int]] = {}  # tool -> its use -> tokens
        self._here: dict[str, int] = {}  # tool -> calls within this node's response
        speakers = {event.id: event for event in caller.past if isinstance(event, RoleCall)}
        asked = [(call.tool_use, len(call.tokens)) for call in speakers.values() if call.tool_use]
        uses = [event for event in caller.past if isinstance(event, ToolUse)]
        asked += [(use.id, 0) for use in uses if use.refused == PromptTooLong.__name__]  # admitted, and nobody spoke
        for use, drawn in asked:
            asked_by, tool, _ = use.rsplit(":", 2)
            if asked_by not in speakers or speakers[asked_by].role != caller.node.role.name:
                continue
            uses_of_tool = self._uses.setdefault(tool, {})
            if use not in uses_of_tool and any(asked_by == event.id for event in caller.events):
                self._here[tool] = self._here.get(tool, 0) + 1
            uses_of_tool[use] = uses_of_tool.get(use, 0) + drawn

    def admit(self, tool: AgentTool, values: Mapping[str, Any], use: str) -> SubAgentCall:
        """A call of this tool, whose `ToolUse` will have the id `use`.

        Raises `LimitReached` beyond a limit, and `ToolRefusal` for arguments that are not its own.
        """
        caller, uses = self._caller, self._uses.setdefault(tool.name, {})
        node = caller.node.agents.get(tool.name)
        if node is None:
            raise LimitReached(f"{tool.name!r} cannot be called at this depth: the limit is {tool.depth}")
        if set(values) != set(tool.arguments):
            raise ToolRefusal(f"{tool.name!r} takes the arguments {', '.join(tool.arguments) or 'none'}, not {', '.join(values) or 'none'}")
        if len(uses) >= tool.at_most:
            raise LimitReached(f"{tool.name!r} was called {len(uses)} times, which is the limit: answer without it")
        left = None if tool.max_tokens is None else tool.max_tokens - sum(uses.values())
        if left is not None and left < 1:
            raise LimitReached(f"{tool.name!r} has used up its {tool.max_tokens} tokens: answer without it")
        first = caller.first + caller.node.agent_place(tool.name, self._here.get(tool.name, 0))
        self._here[tool.name] = self._here.get(tool.name, 0) + 1
        uses[use] = 0 if left is None else min(left, node.role.max_tokens * node.own_requests)  # kept for it: others run beside it
        fields = {field: values[name] for field, name in zip(node.role.reads, tool.arguments)}
        state = State(fields, turn=caller.called.turn, last=(caller.called.id,), past=caller.past, items=caller.state.items)
        return SubAgentCall(node, first, state._replace(path_id=caller.state.path_id, tool_use=use, tokens_left=left and uses[use]))
