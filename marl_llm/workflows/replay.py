"""Replay: an episode played again from what was written down, without a model and without tools.

Every role call is answered with its recorded tokens and every tool call with its recorded output; the workflow's own functions (conditions,
computations, parsers, rewards) run for real. An episode therefore replays exactly as long as the workflow means the same, and says where it
no longer does.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from marl_llm.reporting.files import Jsonable
from marl_llm.sampling.requests import Completion, Request
from marl_llm.workflows.assignment import Assignment
from marl_llm.workflows.calls import Speaker
from marl_llm.workflows.controller import Controller
from marl_llm.workflows.errors import ReplayError
from marl_llm.workflows.function_replay import FunctionStep
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import Tool
from marl_llm.workflows.play import finish
from marl_llm.workflows.renderer import Renderer
from marl_llm.workflows.roles import RoleTool
from marl_llm.workflows.scoring import Recorded
from marl_llm.workflows.state import State
from marl_llm.workflows.storage import from_json
from marl_llm.workflows.trajectory import Episode, RoleCall, ToolUse


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A `Generator` of recorded responses, by seed."""

    calls: Mapping[tuple[int, ...], RoleCall]

    async def generate(self, request: Request) -> Completion:
        call = self.calls.get(request.seed)
        if call is None:
            raise ReplayError(f"the workflow now asks for a response that was never given: seed {request.seed}")
        if call.prompt_ids != request.prompt:
            raise ReplayError(f"{call.id}: the prompt is another than the recorded one, which was {call.prompt[:200]!r}")
        entropy = np.zeros(call.tokens.size) if call.entropy is None else call.entropy
        sampled = (call.tokens, call.log_probs, call.sampled_log_probs, entropy, call.finish, call.version)
        return Completion(*sampled, kept_ids=call.kept_ids, versions=call.versions)


@dataclasses.dataclass(frozen=True)
class _RecordedTools:
    """A speaker whose tools answer as they did. Pure computations run for real, and must give what they gave."""

    speaker: Speaker
    uses: Mapping[str, ToolUse]

    async def speak(self, *call: Any) -> Any:
        return await self.speaker.speak(*call)

    async def advance(self, *function: Any) -> FunctionStep:
        return await self.speaker.advance(*function)

    async def use(self, node: Tool, number: int, state: State, identity: tuple[int, int, int]) -> ToolUse:
        name = f"{node.name}:{number}:{state.path_id * identity[2] + identity[1]}"
        known = self.uses.get(name)
        if known is None:
            raise ReplayError(f"the workflow now makes a tool call that was never made: {name}")
        if known.parents != state.last:
            raise ReplayError(f"{name}: it now follows {', '.join(state.last)}, and followed {', '.join(known.parents)}")
        if not node.instant:
            return known
        use = await self.speaker.use(node, number, state, identity)
        if _plain(use.writes) != _plain(known.writes):
            raise ReplayError(f"{name}: computed {use.writes!r:.200}, and once {known.writes!r:.200}")
        return dataclasses.replace(use, seconds=known.seconds)


def replay(
    episode: Episode | Mapping[str, Any],
    workflow: Workflow,
    assignment: Assignment,
    renderer: Renderer | Mapping[str, Renderer],
    plays: int = 1,
    branching: Mapping[str, int] | None = None,
    pick: str | None = None,
    alpha: float | int = 1.0,
    local_weight: float | int = 1.0,
    score: str | None = None,
    folder: str | pathlib.Path | None = None,
) -> Episode:
    """Plays an episode again and returns it.

    Args:
      episode: as played, or a line of `storage.read_trajectories`.
      plays, branching, pick, alpha, local_weight, score: of its rollout, which the numbers of branches depend on.
      workflow, assignment, renderer: as when it was played. Roles of scripts and outside models cannot be replayed, for they are asked by
        text; nor can functions that a role calls within its response.
      folder: of the line's file, where its fields hold workspaces; see `storage.from_json`.

    Raises:
      ReplayError: something is different; or the episode is aborted, or cannot be replayed for the reasons above.
    """
    if isinstance(episode, Mapping):
        episode = from_json(episode, folder)
    if episode.aborted:
        raise ReplayError(f"episode {episode.name} is aborted: there is nothing to replay")
    events = episode.events()
    calls = [event for event in events if isinstance(event, RoleCall)]
    if strange := [call for call in calls if call.log_probs is None]:
        raise ReplayError(f"{strange[0].id} was spoken by {strange[0].model!r}, which is no policy: its answers were not asked for by ids")
    if tooled := [name for name, role in workflow.roles.items() if any(isinstance(tool, RoleTool) for tool in role.tools)]:
        raise ReplayError(f"role {tooled[0]!r} calls functions within its response; such episodes cannot be replayed")
    scores = {name: by_scorer for path in (*episode.trajectories, *episode.candidates) for name, by_scorer in path.scores.items()}
    recorded = _Recorded({call.seed: call for call in calls})
    picking = dict(branching=branching, pick=pick, alpha=alpha, local_weight=local_weight, score=score)
    with Controller(workflow, assignment, recorded, renderer, attempts=1, **picking) as controller:
        controller.scoring = lambda task: Recorded(scores)
        controller.speaker = _RecordedTools(controller.speaker, {event.id: event for event in events if isinstance(event, ToolUse)})
        replayed = finish(controller.episode(episode.task, episode.step, episode.play, plays))
    _check_same(episode, replayed)
    return replayed


def _check_same(episode: Episode, replayed: Episode) -> None:
    """Raises `ReplayError` with the first event that is another than it was."""
    if replayed.aborted:
        failure = replayed.failures[-1]
        raise ReplayError(f"the replay failed at node {failure.node!r}: {failure.kind}: {failure.message}")
    recorded, events = episode.events(), replayed.events()
    for before, after in zip(recorded, events):
        if (before.id, before.parents, _plain(before.writes)) != (after.id, after.parents, _plain(after.writes)):
            raise ReplayError(f"{after.id} is not what it was: it wrote {after.writes!r:.200}, and once {before.id} {before.writes!r:.200}")
    if len(events) != len(recorded):
        raise ReplayError(f"{len(events)} events, once {len(recorded)}: the first that is missing is {recorded[len(events)].id}")


def _plain(value: Any) -> Any:
    """Tuples and lists alike, and what JSON holds of other values, because a record may have been read from JSON."""
    if isinstance(value, Jsonable):
        value = value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
