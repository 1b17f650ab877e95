"""Cross joint sampling (MAGRPO as released): every response of a task's group is judged beside every response of the partners.

G plays of a task give G responses per agent. Aligned, the k-th of one meets the k-th of the others, and G joint actions are judged.
Crossed, all G^N are (or a balanced part of them), by playing the workflow again with the responses that are there, so that only tools
run; each response is paid the mean over the joint actions that it takes part in. The rows stay G per agent, and nothing more is sampled.

That needs a workflow in which all roles speak once and at once, and only tools follow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from marl_llm.algorithms.joint import cross
from marl_llm.workflows.assignment import Assignment, Scripted
from marl_llm.workflows.calls import Speaker
from marl_llm.workflows.controller import Controller, Rollout
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import Call, Each, FunctionNode, Repeat, Together, label, walk
from marl_llm.workflows.state import State
from marl_llm.workflows.trajectory import Earned, Episode, Event, Task, ToolUse

DRAWN = 0x63726F73  # in the key of which joint actions are judged


def check_cross(workflow: Workflow) -> None:
    """Raises `WorkflowError` naming the node unless all roles speak once, in one `together`, with tools alone beside it."""
    nodes = list(walk(workflow.body))
    groups = [node for node in nodes if isinstance(node, Together) and any(isinstance(part, Call) for part in node.parts)]
    if loops := [node for node in nodes if isinstance(node, Repeat | Each | FunctionNode)]:
        raise WorkflowError(f"joint='cross': {label(loops[0])} lets roles speak more than once; all must speak once and at once")
    speakers = {part.name for node in groups[:1] for part in node.parts if isinstance(part, Call)}
    if others := [node for node in nodes if isinstance(node, Call) and node.name not in speakers]:
        raise WorkflowError(f"joint='cross': {label(others[0])} does not speak beside all the others; all must speak once and at once")


def crossed(rollout: Rollout, subset: int | None = None) -> tuple[Rollout, int]:
    """The rollout with every call paid the mean over its joint actions, and how many joint actions were judged.

    Args:
      rollout: of G >= 2 plays of each task, without forks.
      subset: how many joint actions to judge per task, a multiple of G; None: all G^N.

    A task with an aborted play is aborted as a whole: its group lacks a response. A joint action that the infrastructure breaks counts for
    nobody, and a play whose response is left without one is aborted.

    Raises `WorkflowError` as `check_cross`, `ValueError` as `algorithms.joint.cross`.
    """
    check_cross(rollout.workflow)
    groups: dict[int, list[Episode]] = {}
    for episode in rollout.episodes:
        groups.setdefault(episode.task.number, []).append(episode)
    groups_played = {number: group for number, group in groups.items() if not any(episode.aborted for episode in group)}
    joints = {number: _joints(rollout, number, subset) for number in groups_played}
    judged = _judged(rollout, groups_played, joints) if groups_played else {}
    episodes = []
    for episode in rollout.episodes:
        number = episode.task.number
        episodes.append(_paid_anew(episode, rollout.workflow, groups[number], joints.get(number), judged.get(number, ())))
    return dataclasses.replace(rollout, episodes=tuple(episodes)), sum(map(len, joints.values()))


def _joints(rollout: Rollout, task: int, subset: int | None) -> np.ndarray:
    """Joint actions of a task: number of the play of each speaker's response, `[B, N]`."""
    agents = len(_speakers(rollout.workflow))
    if subset is None:
        return np.asarray(cross(agents, rollout.plays))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(DRAWN), rollout.step), task)
    return np.asarray(cross(agents, rollout.plays, subset=subset, key=key))


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A speaker whose roles respond as they did, with the tokens, the log-probs and the ending; tools are called."""

    speaker: Speaker
    speakers: Sequence[str]
    groups: Mapping[int, Sequence[Episode]]
    joints: Mapping[int, np.ndarray]

    async def speak(self, node: Call, first: int, state: State, task: Task, identity: tuple[int, int, int], *fork: int) -> Any:
        joint, place = self.joints[task.number][identity[1]], self.speakers.index(node.name)
        path = self.groups[task.number][int(joint[place])].trajectories[0]
        opening, *more = (event for event in path.events if _speaks_in(event, node.name))
        events = (dataclasses.replace(opening, parents=state.last), *more)
        return events, state.after(*events)

    async def use(self, *call: Any) -> ToolUse:
        return await self.speaker.use(*call)


def _judged(
    rollout: Rollout, groups: Mapping[int, Sequence[Episode]], joints: Mapping[int, np.ndarray]
) -> dict[int, list[Episode]]:
    """Task -> for each joint action the play in which it was judged."""
    players = Assignment(dict.fromkeys(rollout.workflow.roles, "recorded"), {"recorded": Scripted(lambda turn: "")})  # nobody asks it
    plays = len(next(iter(joints.values())))
    tasks = [group[0].task for group in groups.values()]
    with Controller(rollout.workflow, players, None, {}) as controller:
        controller.speaker = _Recorded(controller.speaker, _speakers(rollout.workflow), groups, joints)
        played = controller.play(tasks, rollout.step, plays)
    judged: dict[int, list[Episode]] = {number: [] for number in groups}
    for episode in played.episodes:
        judged[episode.task.number].append(episode)
    return judged


def _paid_anew(
    episode: Episode, workflow: Workflow, group: Sequence[Episode], joints: np.ndarray | None, judged: Sequence[Episode]
) -> Episode:
    """The play with the mean pay of its joint actions. `group`: all plays of its task; `joints`: None where one of them is aborted."""
    if episode.aborted:
        return episode
    if joints is None:
        return _aborted(episode, next(mate for mate in group if mate.aborted))
    (path,) = episode.trajectories
    earned = {}
    for place, speaker in enumerate(_speakers(workflow)):
        plays = [judged[joint] for joint in np.flatnonzero(joints[:, place] == episode.play)]
        pays = [play.trajectories[0].earned for play in plays if not play.aborted]
        if not pays:
            return _aborted(episode, plays[0])
        earned |= {call.id: _mean([pay[call.id] for pay in pays]) for call in path.calls if _speaks_in(call, speaker)}
    return dataclasses.replace(episode, trajectories=(dataclasses.replace(path, earned=earned),))


def _aborted(episode: Episode, cause: Episode) -> Episode:
    """The play without an outcome, because this other one has none."""
    failures = [dataclasses.replace(failure, message=f"{cause.name} beside it: {failure.message}") for failure in cause.failures[-1:]]
    return dataclasses.replace(
        episode, trajectories=(), candidates=(), failures=(*episode.failures, *failures), remains=episode.trajectories[0].events
    )


def _speakers(workflow: Workflow) -> list[str]:
    """The nodes that speak, in the order of the columns of joint actions."""
    return [node.name for node in walk(workflow.body) if isinstance(node, Call)]


def _speaks_in(event: Event, node: str) -> bool:
    """Whether it happened within a node's response: the role spoke, or a tool or a sub-agent that it called."""
    return f"{event.node}.".startswith(f"{node}.")


def _mean(parts: Sequence[Earned]) -> Earned:
    def mean(values):
        return math.fsum(values) / len(parts)

    names = dict.fromkeys(name for part in parts for name in part.components)
    components = {name: mean(part.components.get(name, 0.0) for part in parts) for name in names}
    team, local = mean(part.team for part in parts), mean(part.local for part in parts)
    return Earned(team, local, components, any(part.team_paid for part in parts))
