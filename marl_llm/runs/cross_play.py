"""Players of one team's game against each other, or with each other: every pair, every seat, the same tasks.

A player is a checkpoint. In a pair one of them takes one role and the other all others, then they swap, so that a seat's worth falls out.
Where seats win and lose the table gives ratings. Where they share one outcome it is a matrix of cross-play: its diagonal is self-play, and
what is off it says whether a team plays with partners that it was not trained with (Hu et al. 2020, arXiv:2003.02979).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from marl_llm.runs.command import ConfigError

if TYPE_CHECKING:
    from marl_llm.evaluation import Outcome, Ratings


@dataclasses.dataclass(frozen=True, eq=False)
class CrossPlay:
    """What came of every pair.

    Attributes:
      players: names. competitive: whether seats win and lose.
      wins, draws: `[N, N]` episodes that the row's player won against the column's, and that they drew; of a shared outcome, zeros.
      score: `[N, N]` mean result of the row's player: 1 won, 1/2 drawn, 0 lost, or the outcome that both share. NaN on the diagonal of a
        competitive game. plays: `[N, N]` episodes that count.
      by_task: of a shared outcome, task -> the outcomes of all its episodes, in self-play and in cross-play.
    """

    players: tuple[str, ...]
    competitive: bool
    wins: Float[np.ndarray, "N N"]
    draws: Float[np.ndarray, "N N"]
    score: Float[np.ndarray, "N N"]
    plays: Float[np.ndarray, "N N"]
    by_task: tuple[dict[int, list[float]], dict[int, list[float]]]

    def ratings(self) -> Ratings | None:
        """Elo with 95 % intervals; None where seats share their outcome."""
        from marl_llm.evaluation import elo_ratings

        return elo_ratings(self.wins, self.draws) if self.competitive else None

    def means(self) -> dict[str, tuple[float, float, float]]:
        """Of a shared outcome, self-play and cross-play: the mean of the diagonal, and of all else, with the ends of its 95 % interval.

        The interval is clustered by task (`marl_llm.evaluation.intervals.clustered`): these players, on other tasks.
        """
        from marl_llm.evaluation.intervals import clustered

        if self.competitive:
            return {}
        diagonal = np.eye(len(self.players), dtype=bool)
        cells = {"self_play": diagonal, "cross_play": ~diagonal}
        return {
            name: (float(self.score[where].mean()), *clustered(list(outcomes.values())))
            for (name, where), outcomes in zip(cells.items(), self.by_task)
        }


def result_of(outcome: Outcome, role: str) -> float | None:
    """Of one episode for a role: 1 won, 1/2 drawn or not finished, 0 lost; None where all seats share the outcome."""
    if f"result_{role}" not in outcome.team:
        return None
    return 0.5 if outcome.team.get("unfinished") else float(np.sign(outcome.team[f"result_{role}"]) + 1) / 2


def cross_play(team: Any, players: dict[str, str], split: str, tasks: int, temperature: float = 1.0) -> CrossPlay:
    """Plays every pair of players in every seat, each on the first `tasks` of a split.

    Args:
      team: of the game, a `marl_llm.training.Team`. players: name -> seat, e.g. "run:runs/first@20" (`marl_llm.training.seats`).

    Raises `ConfigError` for fewer than two players or roles.
    """
    names, size = tuple(players), len(players)
    if size < 2 or len(team.roles) < 2:
        raise ConfigError(f"cross-play needs two players and two roles; here are {size} and {len(team.roles)}")
    wins, draws, totals, plays = np.zeros((4, size, size))
    competitive, by_task = False, ({}, {})
    for i, j in itertools.product(range(size), repeat=2):
        if len(team.roles) == 2 and i > j:
            continue  # seats are swapped below: the pair was played
        for role in team.roles if i != j else team.roles[:1]:
            seats = {other: players[names[i if other == role else j]] for other in team.roles}
            played = team.evaluate(seats, split, tasks, temperature=temperature).played
            results = [result_of(outcome, role) for outcome in played]
            competitive = None not in results
            if competitive and i != j:
                won, drawn = (sum(result == value for result in results) for value in (1.0, 0.5))
                wins[i, j] += won
                wins[j, i] += len(results) - won - drawn
                draws[i, j] = draws[j, i] = draws[i, j] + drawn
            scores = results if competitive else [outcome.team.get("outcome", outcome.score) for outcome in played]
            for outcome, score in zip(played, scores):
                by_task[i != j].setdefault(outcome.task, []).append(score)
            totals[i, j] += sum(scores)
            plays[i, j] += len(scores)
            if i != j:
                totals[j, i] += sum(scores) if not competitive else len(scores) - sum(scores)
                plays[j, i] += len(scores)
    with np.errstate(invalid="ignore"):
        score = totals / plays
    if competitive:
        np.fill_diagonal(score, np.nan)
    return CrossPlay(names, competitive, wins, draws, score, plays, by_task)


def spread_steps(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, evenly spread, the first and the last among them.

    >>> spread_steps([0, 1, 2, 3, 4, 5, 6, 7, 8], 3)
    [0, 4, 8]
    """
    places = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))
    return [steps[place] for place in places]


def table_rows(result: CrossPlay) -> list[list[str]]:
    """The table with its head: a row per player with its rating and interval, or nothing, and its score against or with each."""
    ratings = result.ratings()
    rows = [["player", *(["Elo", "95 %"] if ratings else []), *result.players]]
    for number, name in enumerate(result.players):
        cells = [] if ratings is None else [f"{ratings.rating[number]:.0f}", f"[{ratings.low[number]:.0f}, {ratings.high[number]:.0f}]"]
        rows.append([name, *cells, *("" if np.isnan(x) else f"{x:.3f}" for x in result.score[number])])
    return rows


def csv_rows(result: CrossPlay) -> list[list[Any]]:
    """A line per ordered pair: player, opponent, plays, wins, draws, losses, score, and the player's rating with its interval."""
    ratings = result.ratings()
    rows: list[list[Any]] = [["player", "other", "plays", "wins", "draws", "losses", "score", "elo", "elo_low", "elo_high"]]
    for (i, name), (j, other) in itertools.product(enumerate(result.players), repeat=2):
        if np.isnan(result.score[i, j]):
            continue
        rating = ["", "", ""] if ratings is None else [f"{column[i]:.2f}" for column in ratings]
        counts = [int(x) for x in (result.plays[i, j], result.wins[i, j], result.draws[i, j], result.wins[j, i])]
        rows.append([name, other, *counts, f"{result.score[i, j]:.6f}", *rating])
    return rows
