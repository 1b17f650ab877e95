"""What a play costs, free of any machine: tokens that were sampled, and those of them that nothing else could be sampled beside.

The critical path is the chain of calls, each following from the one before, that has most tokens. A team that speaks at once has the
longest of its responses on it, a team that speaks in turn all of them; at equal speed per token their response times are in this ratio.
"""

from __future__ import annotations

from marl_llm.workflows.trajectory import RoleCall, Trajectory


def sampled_tokens(path: Trajectory) -> float:
    """Tokens of all responses of a trajectory, stop tokens included."""
    return float(sum(len(call.tokens) for call in path.calls))


def critical_path_tokens(path: Trajectory) -> float:
    """Most tokens on one chain of events, each a parent of the next."""
    reached: dict[str, int] = {}
    for event in path.events:  # parents stand before their children
        own = len(event.tokens) if isinstance(event, RoleCall) else 0
        reached[event.id] = own + max((reached.get(parent, 0) for parent in event.parents), default=0)
    return float(max(reached.values(), default=0))


EFFICIENCY = {"sampled_tokens": sampled_tokens, "critical_path_tokens": critical_path_tokens}  # metrics of a workflow
