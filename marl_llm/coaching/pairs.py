"""The reward of a coach that trains beside the team: pair by pair, whether its scores agree with how plays ended.

MAPPA trains no coach and leaves it as future work (section 4.4). Here two actions of the same role in plays of the *same task* make a pair
if one play ended better than the other, and the coach is right about it if its score of the first is *higher*. Equal scores are wrong, so
that a coach that says 10 to everything is paid nothing, less than one that guesses. Two actions whose briefs are equal make no pair: nobody
can tell them apart. Tasks are not compared with each other, so that nothing is earned by telling easy tasks from hard ones.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from marl_llm.coaching.small import brief_of, views_of
from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.rewards import COACH
from marl_llm.workflows.views import ActionView, CoachGuide


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
    """An action with its score, and how its play ended.

    Attributes:
      task, view: whose it is, as a coach without the truth sees it.
      brief: what the coach read of it, see `small.brief_of`.
      score: what the team was paid for.
      outcome: the environment's headline of the play; of an action that belongs to several paths, their mean.
    """

    task: int
    view: ActionView
    brief: str
    score: float
    outcome: float


def judged(rollout: Rollout, headline: str, guide: CoachGuide, when: str) -> list[Judged]:
    """The actions of a rollout that have a score. Aborted plays are left out."""
    score_of, views = rollout.workflow.metrics[headline], iter(views_of(rollout, when))
    scored: dict[tuple, tuple[int, ActionView, float]] = {}
    outcomes = collections.defaultdict(list)
    for path in rollout.trajectories:
        outcome = float(score_of(path))
        for call in path.calls:
            view, score = next(views), path.scores.get(call.id, {}).get(COACH)
            if score is not None and score.value is not None:
                scored[path.task.number, call.id] = (path.task.number, view, float(score.value))
                outcomes[path.task.number, call.id].append(outcome)
    ends = {key: sum(per_path) / len(per_path) for key, per_path in outcomes.items()}
    return [Judged(task, view, brief_of(view, guide), score, ends[key]) for key, (task, view, score) in scored.items()]


def rivals(actions: Sequence[Judged]) -> list[tuple[list[int], list[int]]]:
    """For each action the indices of its rivals: those of plays that ended better, and those of plays that ended worse."""
    groups = collections.defaultdict(list)
    for number, action in enumerate(actions):
        groups[action.task, action.view.call.role].append(number)
    compared = []
    for action in actions:
        others = [i for i in groups[action.task, action.view.call.role] if actions[i].brief != action.brief]
        better = [i for i in others if actions[i].outcome > action.outcome]
        compared.append((better, [i for i in others if actions[i].outcome < action.outcome]))
    return compared


def share_right(score: float | int | None, better: Sequence[float | int], worse: Sequence[float | int]) -> float:
    """The share of its pairs that a score puts in their order, in [0, 1]: below the scores of actions whose plays ended better, above those
    of plays that ended worse. 0 for a reply that cannot be read (None), and where there are no pairs."""
    if score is None or not (better or worse):
        return 0.0
    return (sum(score < other for other in better) + sum(score > other for other in worse)) / (len(better) + len(worse))
