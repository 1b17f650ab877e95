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

import jax
import numpy as np

from marl_llm.algorithms.joint import cross
from marl_llm.workflows.assignment import Assignment, Scripted, ScriptTurn
from marl_llm.workflows.controller import Controller, Rollout
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import Call, Each, FunctionNode, Repeat, Together, label, walk
from marl_llm.workflows.trajectory import Earned, Episode, RoleCall, Trajectory

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
    paid = _judged(rollout, groups_played, joints) if groups_played else {}
    episodes = tuple(_paid_anew(episode, rollout, groups_played, joints, paid) for episode in rollout.episodes)
    return dataclasses.replace(rollout, episodes=episodes), sum(map(len, joints.values()))


def _joints(rollout: Rollout, task: int, subset: int | None) -> np.ndarray:
    """Joint actions of a task: number of the play of each agent's response, `[B, N]`."""
    agents = len(rollout.workflow.roles)
    if subset is None:
        return np.asarray(cross(agents, rollout.plays))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(DRAWN), rollout.step), task)
    return np.asarray(cross(agents, rollout.plays, subset=subset, key=key))


def _judged(
    rollout: Rollout, groups: Mapping[int, Sequence[Episode]], joints: Mapping[int, np.ndarray]
) -> dict[int, list[dict[str, Earned] | None]]:
    """Task -> for each joint action, role -> what it earned; None where the infrastructure broke it."""
    roles = list(rollout.workflow.roles)
    calls = {(number, play): {call.role: call for call in episode.trajectories[0].calls} for number, group in groups.items()
            for play, episode in enumerate(group)}  # fmt: skip

    def again(turn: ScriptTurn) -> str | tuple[int, ...]:
        _, task, _, _, play = turn.seed
        agent = roles.index(turn.role.name)
        call: RoleCall = calls[task, int(joints[task][play][agent])][turn.role.name]
        return tuple(call.tokens.tolist()) if turn.role.speaks_ids else call.text

    players = Assignment(dict.fromkeys(roles, "again"), {"again": Scripted(again)})
    plays = len(next(iter(joints.values())))
    tasks = [group[0].task for group in groups.values()]
    with Controller(rollout.workflow, players, None, {}) as controller:
        judged = controller.play(tasks, rollout.step, plays)
    paid: dict[int, list] = {number: [] for number in groups}
    for episode in judged.episodes:
        path = episode.trajectories[0] if not episode.aborted else None
        paid[episode.task.number].append({call.role: path.earned[call.id] for call in path.calls} if path else None)
    return paid


def _paid_anew(episode: Episode, rollout: Rollout, groups: Mapping, joints: Mapping, paid: Mapping) -> Episode:
    number = episode.task.number
    if number not in groups:
        return dataclasses.replace(episode, trajectories=(), candidates=())
    (path,), roles = episode.trajectories, list(rollout.workflow.roles)
    earned = {}
    for call in path.calls:
        own_joints = np.flatnonzero(joints[number][:, roles.index(call.role)] == episode.play)
        parts = [paid[number][joint][call.role] for joint in own_joints if paid[number][joint] is not None]
        if not parts:
            return dataclasses.replace(episode, trajectories=(), candidates=())
        earned[call.id] = _mean(parts)
    return dataclasses.replace(episode, trajectories=(_with_pay(path, earned),))


def _mean(parts: Sequence[Earned]) -> Earned:
    def mean(values):
        return math.fsum(values) / len(parts)

    names = dict.fromkeys(name for part in parts for name in part.components)
    components = {name: mean(part.components.get(name, 0.0) for part in parts) for name in names}
    team, local = mean(part.team for part in parts), mean(part.local for part in parts)
    return Earned(team, local, components, any(part.team_paid for part in parts))


def _with_pay(path: Trajectory, earned: Mapping[str, Earned]) -> Trajectory:
    return dataclasses.replace(path, earned=earned)
