"""Equilibria of two-agent matrix games in float64: what learning can end in when each agent maximises its own pay (MAGRPO, App. A).

`first` and `second` are `[A, A]`: what agent 1 and agent 2 are paid where agent 1 plays the row and agent 2 the column.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def best_responses(first: Float[np.ndarray, "A A"], second: Float[np.ndarray, "A A"]) -> tuple[list[set[int]], list[set[int]]]:
    """(of agent 1 to each column, of agent 2 to each row): the actions that pay most; ties are all in the set."""
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    of_first = [set(np.flatnonzero(column == column.max()).tolist()) for column in first.T]
    of_second = [set(np.flatnonzero(row == row.max()).tolist()) for row in second]
    return of_first, of_second


def nash_equilibria(first: Float[np.ndarray, "A A"], second: Float[np.ndarray, "A A"]) -> list[tuple[int, int]]:
    """The cells, counted from 0, in which each action is a best response to the other."""
    of_first, of_second = best_responses(first, second)
    size = len(of_first)
    return [(i, j) for i in range(size) for j in range(size) if i in of_first[j] and j in of_second[i]]


def mixed_equilibrium(first: Float[np.ndarray, "A A"], second: Float[np.ndarray, "A A"]) -> tuple[float, float, float] | None:
    """(p, q, expected utility) of the equilibrium in which both agents mix; p and q are the chances of action 1. None if there is none.

    Agent 1 is indifferent at q, agent 2 at p. Raises `ValueError` for matrices that are not 2 x 2.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.shape != (2, 2) or second.shape != (2, 2):
        raise ValueError(f"matrices of shape {first.shape} and {second.shape}: the mixed equilibrium is computed for 2 x 2")
    q = _indifferent(first)
    p = _indifferent(second.T)
    if p is None or q is None:
        return None
    utility = np.array([p, 1 - p]) @ (first + second) @ np.array([q, 1 - q])
    return p, q, float(utility)


def _indifferent(pay: np.ndarray) -> float | None:
    """The chance of the other's action 1 at which both rows pay the same, if it lies strictly between 0 and 1."""
    slope = pay[0, 0] - pay[1, 0] - pay[0, 1] + pay[1, 1]
    if slope == 0:
        return None
    chance = (pay[1, 1] - pay[0, 1]) / slope
    return float(chance) if 0 < chance < 1 else None
