"""The record of an evaluation: what each play of each task came to, and the figures that follow from it. One form for all games."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.evaluation.at_k import at_k
from marl_llm.evaluation.intervals import clustered, difference


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One play of one task."""

    task: int  # its number in the split
    play: int
    score: float | int  # the headline, in [0, 1]; meaningless where aborted
    turns: float | int
    aborted: bool = False  # could not be played, and counts for nothing
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
      rollout: of hosted play, the whole plays as graphs (`marl_llm.workflows.Rollout`); None: compiled play has none.
    """

    split: str
    seats: Mapping[str, str]
    temperature: float
    headline: str
    outcomes: tuple[Outcome, ...]
    well_formed: Mapping[str, float]
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    episodes: Callable[..., Sequence[tuple[dict, dict]]] = lambda count, when, advantages=None: ()
    rollout: Any = None

    @property
    def success(self) -> float:
        """Mean over tasks of their mean scores, of the plays that are not aborted: every task weighs alike, as in `interval` and `paired`.
        0 without any."""
        return float(np.mean(list(self.per_task.values()))) if self.played else 0.0

    @property
    def played(self) -> tuple[Outcome, ...]:
        """Outcomes that count."""
        return tuple(outcome for outcome in self.outcomes if not outcome.aborted)

    @property
    def per_task(self) -> dict[int, float]:
        """Task -> mean score of its plays that are not aborted."""
        scores: dict[int, list[float]] = {}
        for outcome in self.played:
            scores.setdefault(outcome.task, []).append(outcome.score)
        return {task: float(np.mean(scores_of_task)) for task, scores_of_task in scores.items()}

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of `success`, clustered by task, or by the tasks' clusters where they have some; see `clustered`."""
        groups: dict[str | int, list[float]] = {}
        alike = {outcome.task: outcome.cluster or outcome.task for outcome in self.played}
        for task, score in self.per_task.items():
            groups.setdefault(alike[task], []).append(score)
        return clustered(list(groups.values()))

    def at_k(self, metric: str, k: int) -> float:
        """Mean over tasks of the expected best of k plays, by a team metric or the headline; see `marl_llm.evaluation.at_k`.

        Raises `ValueError` where a task has fewer than k plays that are not aborted, or for a metric that was not measured.
        """
        pools = self.pools(metric)
        if not pools and self.played:
            names = dict.fromkeys(name for outcome in self.played for name in outcome.team)
            raise ValueError(f"at_k: no metric {metric!r} was measured; there are {', '.join((self.headline, *names))}")
        return at_k(list(pools.values()), k)

    def pools(self, metric: str) -> dict[int, list[float]]:
        """Task -> the headline, or a team metric, of those of its plays that are not aborted and measured it. No task has an empty pool."""
        pools: dict[int, list[float]] = {}
        for outcome in self.played:
            measured = {**outcome.team, self.headline: outcome.score}
            if metric in measured:
                pools.setdefault(outcome.task, []).append(measured[metric])
        return pools

    def summary(self) -> dict[str, Any]:
        """JSON: success, interval, episodes, aborted, turns, split, plays, temperature, roles (well_formed), team (further metrics)."""
        played = self.played
        names = dict.fromkeys(name for outcome in played for name in outcome.team)
        return {
            "success": self.success,
            "interval": list(self.interval),
            "episodes": len(played),
            "tasks": len(self.per_task),
            "aborted": len(self.outcomes) - len(played),
            "turns": float(np.mean([outcome.turns for outcome in played])) if played else 0.0,
            "split": self.split,
            "headline": self.headline,
            "temperature": self.temperature,
            "seats": dict(self.seats),
            "roles": {role: {"well_formed": share} for role, share in self.well_formed.items()},
            "team": {name: float(np.mean([outcome.team[name] for outcome in played if name in outcome.team])) for name in names},
        }


def paired(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """Difference of two evaluations of the same tasks, second minus first, task by task: `{difference, interval, tasks}`, clustered as
    `Evaluation.interval` is; see `intervals.difference`. Over the tasks that both played it is the difference of the two successes.

    Raises `ValueError` when they share no task.
    """
    a, b = first.per_task, second.per_task
    common = [task for task in a if task in b]
    alike = {outcome.task: outcome.cluster for outcome in first.played}
    if not common or first.split != second.split:
        raise ValueError("the two evaluations share no task: evaluate both on the same split with the same seed")
    groups: dict[str | int, list[float]] = {}
    for task in common:
        groups.setdefault(alike[task] or task, []).append(b[task] - a[task])
    low, high = difference(list(groups.values()))
    return {"difference": float(np.mean([b[task] - a[task] for task in common])), "interval": [low, high], "tasks": len(common)}
