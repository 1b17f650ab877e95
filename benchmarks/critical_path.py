"""What `benchmarks.latency` counts: the longest path of a play in tokens, and the waves of Stronger-MAS' Appendix G."""

from __future__ import annotations

import math

from marl_llm.workflows import Episode


def critical_tokens(episode: Episode) -> int:
    """The longest path through a play's calls, in tokens; a call is as long as the longest of its candidates, which are waited for."""
    longest: dict[str, int] = {}
    for trajectory in (*episode.trajectories, *episode.candidates):
        for call in trajectory.calls:
            longest[call.group] = max(longest.get(call.group, 0), len(call.tokens))
    ends: dict[str, int] = {}
    for call in episode.trajectories[0].calls:  # parents first
        ends[call.id] = longest[call.group] + max((ends[parent] for parent in call.parents), default=0)
    return max(ends.values())


def waves(agents: int, parallel: bool, slots: int, requests: int) -> int:
    """Of one turn, by the formula of Appendix G; `requests` are those of one agent, E K. Where not even they fit at once, an agent takes
    several waves."""
    at_once = slots // requests
    if not at_once:
        return agents * math.ceil(requests / slots)
    return math.ceil(agents / at_once) if parallel else agents
