"""What a play costs, free of any machine: tokens that were sampled, and those of them that nothing else could be sampled beside.

The critical path is the chain of calls, each following from the one before, that has most tokens. A team that speaks at once has the
longest of its responses on it, a team that speaks in turn all of them; at equal speed per token their response times are in this ratio.
"""

from __future__ import annotations

from collections.abc import Callable

from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.trajectory import RoleCall, ToolUse, Trajectory


def sampled_tokens(path: Trajectory) -> float:
    """Tokens of all responses of a trajectory, stop tokens included."""
    return float(sum(len(call.tokens) for call in path.calls))


def critical_path_tokens(path: Trajectory) -> float:
    """Most tokens on one chain of events, each a parent of the next."""
    return _longest(path, lambda call: len(call.tokens))


def critical_path_calls(path: Trajectory) -> float:
    """Most responses on one chain of events: the critical steps of PARL (Kimi K2.5 technical report, 2026, on Agent Swarm)."""
    return _longest(path, lambda call: 1)


def _longest(path: Trajectory, length: Callable[[RoleCall], int]) -> float:
    reached: dict[str, int] = {}
    for event in path.events:  # parents stand before their children
        own = length(event) if isinstance(event, RoleCall) else 0
        reached[event.id] = own + max((reached.get(parent, 0) for parent in event.parents), default=0)
    return float(max(reached.values(), default=0))


def critical_path_cost(budget: float | int) -> Callable[[Trajectory], float]:
    """What the critical path costs, in [-1, 0]: −min(1, its tokens / `budget`). Sub-agents beside each other cost as much as the longest.

    PARL bounds critical steps where this charges for them. A team that says nothing pays nothing: give it less weight than the result.

        rewards=(broadcast(score), broadcast(critical_path_cost(2048), name="path", weight=0.1))

    Raises:
      WorkflowError: a budget of 0 or less.
    """
    if not budget > 0:
        raise WorkflowError(f"critical_path_cost: budget={budget!r} tokens must be above 0")

    def cost(path: Trajectory) -> float:
        return -min(1.0, critical_path_tokens(path) / budget)

    return cost


def finished_share(path: Trajectory) -> float:
    """Share of the sub-tasks given to sub-agents that ended with a whole answer of the right format; 0 where none was given.

    PARL's r_finish (Kimi K2.5 technical report, 2026: r = λ1 r_parallel + λ2 r_finish + r_perf), which makes sub-agents that were started
    for nothing worthless. A call beyond a limit is a sub-task that did not end.
    """
    last = {call.tool_use: call for call in path.calls if call.tool_use}
    uses = [event for event in path.events if isinstance(event, ToolUse) and (event.id in last or event.refused == "LimitReached")]
    finished = [use for use in uses if use.refused is None and not last[use.id].truncated]
    return len(finished) / len(uses) if uses else 0.0


EFFICIENCY = {"sampled_tokens": sampled_tokens, "critical_path_tokens": critical_path_tokens}  # metrics of a workflow
