"""Rewards: who is paid for what, attributed to the call that earned it (UnityMAS-O, section 4.4 and Eqs. 9 to 12).

A reward is a function of a whole trajectory that yields awards, each to one call. It may look at a single response (its format), at a turn
(what the turn improved), or at the end (the final answer); the functions here make the usual ones. `team` awards and local ones are kept
apart, and so is every named component, in the table of samples and in the metrics.

    rewards=(broadcast(final_f1, name="f1"), format_penalty(1.0))                       # every call: the answer's F1, and its own format
    rewards=(delta("pass_rate", ("planner", "coder")), delayed("pass_rate", ("reflector",)))

What a recipe reads of them is its own affair: with `rewards="team"` (grpo, magrpo, dr_mas) it leaves local awards out, with "local" (mappa)
team awards; "mixed" (at_grpo, ppo) takes both. Aborted trajectories have no rewards, and calls of players that do not train are paid like
others, for the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from marl_llm.workflows.checks import title
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.finite import is_finite_number, shown
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.trajectory import Earned, RoleCall, Trajectory


@dataclasses.dataclass(frozen=True)
class Award:
    """A payment to one call. `team`: for the team's result, as against the role's own work."""

    call: RoleCall
    value: float | int
    component: str
    team: bool = False


@dataclasses.dataclass(frozen=True)
class Paid:
    """All that a call is paid by someone who has added it up: both sums, and the components under the names that they have there."""

    call: RoleCall
    team: float | int
    local: float | int
    components: Mapping[str, float | int]
    team_paid: bool = True  # whether it is a payment for the team's result too, be it 0


COACH = "coach"  # the scorer that `marl_llm.coaching` adds
Reward = Callable[[Trajectory], Iterable[Award | Paid]]
Scores = str | Callable[[Trajectory], Mapping[int, float]]  # a field that each turn writes, or turn -> score


def broadcast(
    score: Callable[[Trajectory], float], roles: tuple[str, ...] | None = None, name: str = "score", weight: float | int = 1.0
) -> Reward:
    """The trajectory's score to every call of these roles (all by default), as a team reward (UnityMAS-O, section 6, A and B)."""

    def reward(trajectory: Trajectory) -> list[Award]:
        value = weight * score(trajectory)
        return [Award(call, value, name, team=True) for call in _calls(trajectory, roles)]

    return _described(reward, f"broadcast {name!r}", roles)


def format_penalty(
    weight: float | int = 1.0,
    roles: tuple[str, ...] | None = None,
    exempt: Callable[[RoleCall], bool] | None = None,
    name: str = "format",
) -> Reward:
    """−weight to every call whose format is broken, 0 to the others; `exempt` calls get nothing."""

    def reward(trajectory: Trajectory) -> list[Award]:
        calls = [call for call in _calls(trajectory, roles) if not (exempt and exempt(call))]
        return [Award(call, 0.0 if call.legal else -weight, name) for call in calls]

    return _described(reward, f"format_penalty {name!r}", roles)


def absolute(
    score: Callable[[RoleCall, Trajectory], float], roles: tuple[str, ...], name: str = "score", weight: float | int = 1.0
) -> Reward:
    """A score of each call of these roles by itself."""

    def reward(trajectory: Trajectory) -> list[Award]:
        return [Award(call, weight * score(call, trajectory), name) for call in _calls(trajectory, roles)]

    return _described(reward, f"absolute {name!r}", roles)


def delta(
    scores: Scores,
    roles: tuple[str, ...],
    name: str = "delta",
    start: float | int | Callable[[Trajectory], float] = 0.0,
) -> Reward:
    """What the call's turn improved: score_t − score_{t−1}, and score_t − `start` in the first turn that has a score.

    With start=0 the first turn is paid its score and all turns together the last score, so that a detour through a bad solution earns
    nothing. Turns without a score are paid 0.
    """

    def reward(trajectory: Trajectory) -> list[Award]:
        by_turn = _scores(scores, trajectory)
        before, gains = (start(trajectory) if callable(start) else start), {}
        for turn in sorted(by_turn):
            gains[turn] = by_turn[turn] - before
            before = by_turn[turn]
        return [Award(call, gains.get(call.turn, 0.0), name) for call in _calls(trajectory, roles)]

    return _described(reward, f"delta {name!r}", roles, scores)


def delayed(scores: Scores, roles: tuple[str, ...], name: str = "delayed") -> Reward:
    """What the next scored turn improved over the call's own: score_{t+1} − score_t; 0 if no score follows.

    The reward of a reflector, which is committed only when the work that it led to has been scored.
    """

    def reward(trajectory: Trajectory) -> list[Award]:
        by_turn = _scores(scores, trajectory)
        turns = sorted(by_turn)
        following = dict(zip(turns, turns[1:]))
        gains = {turn: by_turn[after] - by_turn[turn] for turn, after in following.items()}
        return [Award(call, gains.get(call.turn, 0.0), name) for call in _calls(trajectory, roles)]

    paid = _described(reward, f"delayed {name!r}", roles, scores)
    paid.shows_later = True
    return paid


def per_turn(fields: Sequence[str], roles: tuple[str, ...] | None = None, names: Sequence[str] | None = None) -> Reward:
    """What each turn wrote to these fields, to every call of the turn by these roles, as team rewards: the joint reward of MAGRPO.

    Each field is a component of its own, called as in `names` (by default as the field). A turn that wrote no score pays 0.
    """
    names = tuple(names or fields)

    def reward(trajectory: Trajectory) -> list[Award]:
        scores = {field: _scores(field, trajectory) for field in fields}
        calls = _calls(trajectory, roles)
        return [Award(call, scores[f].get(call.turn, 0.0), name, team=True) for call in calls for f, name in zip(fields, names)]

    paid = _described(reward, f"per_turn {', '.join(names)}", roles)
    paid.reads = tuple(fields)
    return paid


def scored(scorer: str, roles: tuple[str, ...] | None = None, weight: float | int = 1.0, name: str | None = None) -> Reward:
    """weight · the scorer's score of each call that it scores; see `scoring`. `name` of the component: by default the scorer's."""

    def reward(trajectory: Trajectory) -> list[Award]:
        scores = [(call, trajectory.scores.get(call.id, {}).get(scorer)) for call in _calls(trajectory, roles)]
        known = [(call, score.value) for call, score in scores if score is not None and score.value is not None]
        return [Award(call, weight * value, name or scorer) for call, value in known]

    paid = _described(reward, f"scored {scorer!r}", roles)
    paid.scorers = (scorer,)
    return paid


def coach_score(weight: float | int = 0.1, roles: tuple[str, ...] | None = None) -> Reward:
    """weight · the coach's score of each call, as a local reward named "coach" (MAPPA, section 2.2: a tenth of a score from 0 to 10).

    A workflow may hold it before anyone coaches it: `marl_llm.coaching.coached` adds the coach, and this reward where it is missing.
    """
    return scored(COACH, roles, weight)


def earned(workflow: Workflow, trajectory: Trajectory) -> dict[str, Earned]:
    """Call id -> what the workflow's rewards paid it, for every role call of the trajectory.

    A play computes it once for each trajectory, when it ends, and keeps it as `Trajectory.earned`; everybody else reads it there.

    Raises `WorkflowError` naming the reward that fails, pays no finite number, or pays a call of another trajectory.
    """
    sums = {call.id: [0.0, 0.0, {}, False] for call in trajectory.calls}
    for number, reward in enumerate(workflow.rewards):
        who = f"{title(number, reward)} of workflow {workflow.name!r}"
        try:
            awards = list(reward(trajectory))
        except Exception as error:
            raise WorkflowError(f"{who} raised {type(error).__name__}: {error}; task {trajectory.task.number}") from error
        for award in awards:
            if isinstance(award, Award):
                team, local = (award.value, 0.0) if award.team else (0.0, award.value)
                award = Paid(award.call, team, local, {award.component: award.value}, award.team)
            if not isinstance(award, Paid):
                raise WorkflowError(f"{who} yields {type(award).__name__}; it must yield Award(call, value, component)")
            if award.call.id not in sums:
                raise WorkflowError(f"{who} pays {award.call.id}, which is no call of the trajectory of task {trajectory.task.number}")
            for value in (award.team, award.local, *award.components.values()):
                if not is_finite_number(value):
                    whom = f"{award.call.id} of task {trajectory.task.number}"
                    raise WorkflowError(f"{who} pays {shown(value)} to {whom}; pay a finite number")
            total = sums[award.call.id]
            total[0] += float(award.team)
            total[1] += float(award.local)
            total[3] = total[3] or award.team_paid
            for name, value in award.components.items():
                total[2][name] = total[2].get(name, 0.0) + float(value)
    return {name: Earned(*parts) for name, parts in sums.items()}


def _described(reward: Reward, name: str, roles: tuple[str, ...] | None, scores: Any = None) -> Reward:
    """The reward with what `checks` and messages say of it."""
    if isinstance(roles, str):
        raise WorkflowError(f"{name}: roles={roles!r} must be a tuple of names, e.g. roles=({roles!r},)")
    reward.__qualname__ = name
    reward.pays, reward.reads = tuple(roles or ()), (scores,) if isinstance(scores, str) else ()
    return reward


def _calls(trajectory: Trajectory, roles: tuple[str, ...] | None) -> list[RoleCall]:
    return [call for call in trajectory.calls if roles is None or call.role in roles]


def _scores(scores: Scores, trajectory: Trajectory) -> dict[int, float]:
    by_turn = trajectory.per_turn(scores) if isinstance(scores, str) else scores(trajectory)
    return {int(turn): float(score) for turn, score in by_turn.items()}
