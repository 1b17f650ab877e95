"""The record of an evaluation: what each play of each task came to, and the figures that follow from it. One form for all games."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.evaluation.at_k import at_k
from marl_llm.evaluation.intervals import T95, Z95, wilson


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One play of one task."""

    task: int  # its number in the split
    play: int
    score: float | int  # the headline, in [0, 1]; meaningless where void
    turns: float | int
    void: bool = False  # could not be played, and counts for nothing
    team: Mapping[str, float] = dataclasses.field(default_factory=dict)  # further metrics of the team
    cluster: str = ""  # tasks of one cluster are alike; "": a cluster of its own


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """How a team did on held-out tasks.

    Attributes:
      split: of the tasks. seats: who played, by role; see `marl_llm.training.seats`. temperature: 0 is greedy.
      headline: what the score is, e.g. "success" or "f1".
      outcomes: in the order of task, then play.
      well_formed: role -> share of its responses that kept the format.
      figures: everything else that was measured, by name.
      episodes: `(count, when, advantages=None) -> plays` for `marl_llm.reporting.EpisodeWriter`.
    """

    split: str
    seats: Mapping[str, str]
    temperature: float
    headline: str
    outcomes: tuple[Outcome, ...]
    well_formed: Mapping[str, float]
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    episodes: Callable[..., Sequence[tuple[dict, dict]]] = lambda count, when, advantages=None: ()

    @property
    def success(self) -> float:
        """Mean score of the plays that are not void; 0 without any."""
        return float(np.mean([one.score for one in self.played])) if self.played else 0.0

    @property
    def played(self) -> tuple[Outcome, ...]:
        """Outcomes that count."""
        return tuple(one for one in self.outcomes if not one.void)

    @property
    def per_task(self) -> dict[int, float]:
        """Task -> mean score of its plays that are not void."""
        scores: dict[int, list[float]] = {}
        for one in self.played:
            scores.setdefault(one.task, []).append(one.score)
        return {task: float(np.mean(of)) for task, of in scores.items()}

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `success`, clustered by task, or by the tasks' clusters where they have some; see `clustered`."""
        groups: dict[str | int, list[float]] = {}
        for one in self.played:
            groups.setdefault(one.cluster or one.task, []).append(one.score)
        return clustered(list(groups.values()))

    def at_k(self, metric: str, k: int) -> float:
        """Mean over tasks of the expected best of k plays, by a team metric or the headline; see `marl_llm.evaluation.at_k`.

        Raises `ValueError` where a task has fewer than k plays that are not void, or for a metric that was not measured.
        """
        pools: dict[int, list[float]] = {}
        for one in self.played:
            if metric != self.headline and metric not in one.team:
                raise ValueError(f"at_k: no metric {metric!r} was measured; there are {', '.join((self.headline, *one.team))}")
            pools.setdefault(one.task, []).append(one.score if metric == self.headline else one.team[metric])
        return at_k(list(pools.values()), k)

    def summary(self) -> dict[str, Any]:
        """JSON: success, interval, episodes, void, turns, split, plays, temperature, roles (well_formed), team (further metrics)."""
        played = self.played
        names = dict.fromkeys(name for one in played for name in one.team)
        return {
            "success": self.success,
            "interval": list(self.interval),
            "episodes": len(played),
            "tasks": len(self.per_task),
            "void": len(self.outcomes) - len(played),
            "turns": float(np.mean([one.turns for one in played])) if played else 0.0,
            "split": self.split,
            "headline": self.headline,
            "temperature": self.temperature,
            "seats": dict(self.seats),
            "roles": {role: {"well_formed": share} for role, share in self.well_formed.items()},
            "team": {name: float(np.mean([one.team[name] for one in played if name in one.team])) for name in names},
        }


def clustered(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % interval of the mean of all scores, where those of one task (one inner list) belong together.

    With one score of 0 or 1 per task it is Wilson's. Otherwise the variance is that of task totals about the mean (Miller, "Adding Error
    Bars to Evals", arXiv 2411.00640, Eq. 4, with its G/(G−1)), and Student's t with G − 1 degrees of freedom. Cut to [0, 1] where all
    scores lie there. One task, or none, says nothing: (0, 1).
    """
    flat = [one for task in scores for one in task]
    if not flat:
        return 0.0, 1.0
    if all(len(task) == 1 for task in scores) and all(one in (0.0, 1.0) for one in flat):
        return wilson(int(sum(flat)), len(flat))
    if len(scores) < 2:
        return 0.0, 1.0
    mean, half = float(np.mean(flat)), half_width(scores)
    low, high = mean - half, mean + half
    inside = min(flat) >= 0 and max(flat) <= 1
    return (max(0.0, low), min(1.0, high)) if inside else (low, high)


def half_width(scores: Sequence[Sequence[float]]) -> float:
    """Half of the 95 % interval of the mean of all scores, by clusters; of two at least."""
    n, groups = sum(map(len, scores)), len(scores)
    mean = sum(map(sum, scores)) / n
    spread = sum((sum(cluster) - len(cluster) * mean) ** 2 for cluster in scores) * groups / (groups - 1)
    df = groups - 1
    t = T95[df - 1] if df <= len(T95) else Z95 + (Z95**3 + Z95) / (4 * df) + 2.823 / df**2
    return t * math.sqrt(spread) / n


def paired(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """Difference of two evaluations of the same tasks, second minus first, task by task: `{difference, interval, tasks}`, clustered as
    `Evaluation.interval` is.

    Raises `ValueError` when they share no task.
    """
    a, b = first.per_task, second.per_task
    common = [task for task in a if task in b]
    alike = {one.task: one.cluster for one in first.played}
    if not common or first.split != second.split:
        raise ValueError("the two evaluations share no task: evaluate both on the same split with the same seed")
    groups: dict[str | int, list[float]] = {}
    for task in common:
        groups.setdefault(alike[task] or task, []).append(b[task] - a[task])
    differences = [one for group in groups.values() for one in group]
    n, mean = len(differences), float(np.mean(differences))
    if len(groups) < 2:
        return {"difference": mean, "interval": [-math.inf, math.inf], "tasks": n}
    half = half_width(list(groups.values()))
    return {"difference": mean, "interval": [mean - half, mean + half], "tasks": n}
