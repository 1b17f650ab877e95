"""Ratings of players from who beat whom, and how often an opponent is worth meeting.

A rating is Elo's: 400 points are odds of ten to one. The model is that of Bradley and Terry (1952, doi 10.2307/2334029): player i beats
player j with chance σ(r_i − r_j), r in nats. A draw counts as half a win of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy.special import expit

from marl_llm.evaluation.intervals import Z95

POINTS = 400 / math.log(10)  # Elo points per nat
STEPS = 100  # of Newton; from equal ratings it takes about ten
PRIORITIES = ("hard", "even", "uniform")


class Ratings(NamedTuple):
    """Elo points of N players around their mean, and the ends of the 95 % intervals of what each differs from it."""

    rating: Float[np.ndarray, "N"]
    low: Float[np.ndarray, "N"]
    high: Float[np.ndarray, "N"]


def elo_ratings(wins: ArrayLike, draws: ArrayLike | None = None, *, prior: float | int = 1.0) -> Ratings:
    """Maximum-likelihood ratings from counts `[N, N]`: `wins[i, j]` is how often i beat j, `draws[i, j]` how often they drew, symmetric.

    `prior` virtual wins and as many losses of every player against one whose rating is 0 are added to the likelihood, so that a player that
    never lost has a finite rating. 0: none. The intervals follow from the Fisher information of all that, with independent episodes; since
    a draw counts as half a win they are too wide where many are drawn, never too narrow.

    Raises `ValueError` for tables that are no counts, for players that no chain of episodes connects, and, without a prior, for players
    that lost nothing, or won nothing, against the others: their ratings would be infinite.
    """
    scores = checked_scores(wins, draws)
    if not 0 <= prior < math.inf:
        raise ValueError(f"prior={prior} must be 0 or more, and finite")
    if len(parted := reached(scores + scores.T > 0)) < len(scores):
        missing = min(set(range(len(scores))) - set(parted))
        raise ValueError(f"players {missing} and 0 are connected by no chain of episodes, so that their ratings cannot be compared")
    if not prior:
        for beaten, what in ((scores > 0, "lost"), (scores.T > 0, "won")):
            if len(group := reached(beaten)) < len(scores):
                rest = sorted(set(range(len(scores))) - set(group))
                raise ValueError(f"players {rest} {what} nothing against the others: their ratings are infinite without a prior")
    rating, information = fit(scores, prior)
    size = len(scores)
    centred = np.eye(size) - 1 / size
    variance = np.diag(centred @ np.linalg.pinv(information) @ centred)
    rating, half = POINTS * (rating - rating.mean()), POINTS * Z95 * np.sqrt(np.maximum(variance, 0.0))
    return Ratings(rating, rating - half, rating + half)


def checked_scores(wins: ArrayLike, draws: ArrayLike | None) -> Float[np.ndarray, "N N"]:
    """Wins with half of the draws. Raises `ValueError` naming what is wrong with the tables."""
    wins = np.asarray(wins, np.float64)
    draws = np.zeros_like(wins) if draws is None else np.asarray(draws, np.float64)
    if wins.ndim != 2 or wins.shape[0] != wins.shape[1] or not len(wins) or draws.shape != wins.shape:
        raise ValueError(f"wins {wins.shape} and draws {draws.shape} must be square tables of the same players")
    if not np.all((wins >= 0) & (draws >= 0) & np.isfinite(wins) & np.isfinite(draws)):
        raise ValueError("wins and draws must be counts: finite, and 0 or more")
    if not np.array_equal(draws, draws.T):
        raise ValueError("draws must be symmetric: a draw of i with j is one of j with i")
    if np.diag(wins).any() or np.diag(draws).any():
        raise ValueError("a player's episodes against itself say nothing of its rating: leave the diagonal 0")
    return wins + draws / 2


def reached(edges: Bool[np.ndarray, "N N"]) -> list[int]:
    """The players that player 0 reaches along edges, itself among them."""
    players, new = {0}, [0]
    while new:
        new = [int(j) for i in new for j in np.flatnonzero(edges[i]) if j not in players]
        players |= set(new)
    return sorted(players)


def fit(scores: Float[np.ndarray, "N N"], prior: float | int) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N N"]]:
    """Ratings in nats that maximise Σ s_ij log σ(r_i − r_j) + prior Σ (log σ(r_i) + log σ(−r_i)), and the information there; Newton."""
    games, rating = scores + scores.T, np.zeros(len(scores))

    def value(r):
        gaps = r[:, None] - r
        return np.sum(scores * -np.logaddexp(0, -gaps)) - prior * np.sum(np.logaddexp(0, -r) + np.logaddexp(0, r))

    for _ in range(STEPS):
        chance, alone = expit(rating[:, None] - rating), expit(rating)
        slope = np.sum(scores - games * chance, axis=1) + prior * (1 - 2 * alone)
        weight = games * chance * (1 - chance)
        information = np.diag(weight.sum(axis=1) + 2 * prior * alone * (1 - alone)) - weight
        step, scale = np.linalg.pinv(information) @ slope, 1.0
        while scale > 1e-6 and value(rating + scale * step) < value(rating):
            scale /= 2  # far from the maximum a whole step may go past it
        rating = rating + scale * step
        if np.max(np.abs(step)) < 1e-12:
            break
    return rating, information


def rating_against(
    scores: Sequence[float | int],
    plays: Sequence[float | int],
    opponents: Sequence[float | int],
    *,
    prior: float | int = 1.0,
    around: float | int = 0.0,
) -> float:
    """Elo points of one player from its results against opponents whose ratings are known, by maximum likelihood.

    Args:
      scores: in [0, 1], the mean result against each: 1 a win, 1/2 a draw.
      plays: how many, which may be fractions. opponents: their points.
      prior: virtual wins, and as many losses, against a player rated `around`. Without results the rating is `around`.

    Raises `ValueError` for lengths that differ and a prior that is not positive.
    """
    shares, counts, points = (np.asarray(x, np.float64) for x in (scores, plays, opponents))
    if not shares.shape == counts.shape == points.shape or prior <= 0:
        sizes = f"{len(shares)} scores, {len(counts)} plays, {len(points)} opponents"
        raise ValueError(f"{sizes} and prior={prior}: there must be as many of each, and the prior be positive")
    low, high = (float(f([around, *points])) - 400 * 20 for f in (min, max))
    high += 2 * 400 * 20
    for _ in range(STEPS):  # the slope falls with the rating: halving finds its root
        middle = (low + high) / 2
        slope = np.sum(counts * (shares - expit((middle - points) / POINTS))) + prior * (1 - 2 * expit((middle - around) / POINTS))
        low, high = (middle, high) if slope > 0 else (low, middle)
    return (low + high) / 2


def opponent_priorities(win_rates: Sequence[float | int], kind: str = "hard", exponent: float | int = 2.0) -> Float[np.ndarray, "N"]:
    """Chances of meeting each of N opponents, given how often each is beaten: prioritised fictitious self-play.

    "hard": (1 − x)^p, who is seldom beaten is met most. "even": x (1 − x), who is beaten half of the time. "uniform": all alike. After
    AlphaStar (Vinyals et al. 2019, doi 10.1038/s41586-019-1724-z, Methods, "Prioritized fictitious self-play"). A rate of NaN, an opponent
    that was never met, counts as 1/2. Where all weights are 0, because all are always beaten, all are met alike.

    Raises `ValueError` without opponents, for rates outside [0, 1], an unknown kind, and an exponent that is not positive.

    >>> opponent_priorities([0.5, 1.0, 0.0]).tolist()
    [0.2, 0.0, 0.8]
    """
    rates = np.asarray(win_rates, np.float64)
    rates = np.where(np.isnan(rates), 0.5, rates)
    if not rates.size or np.any((rates < 0) | (rates > 1)):
        raise ValueError(f"win_rates={list(win_rates)} must be one rate in [0, 1] or NaN for each opponent, and there must be one")
    if kind not in PRIORITIES or not 0 < exponent < math.inf:
        raise ValueError(f"priority {kind!r} with exponent={exponent}: must be one of {', '.join(PRIORITIES)}, the exponent positive")
    weights = {"hard": (1 - rates) ** exponent, "even": rates * (1 - rates), "uniform": np.ones_like(rates)}[kind]
    return weights / weights.sum() if weights.sum() > 0 else np.full(rates.size, 1 / rates.size)
