"""Plan-Path on the host: maps as rows of text, moves made one by one, in plain Python. Equal to the device game's simulator (a test).

A state is the map's rows with `A` where the agent stands, `*` when it stands on the goal: what `maps.rows_of` writes.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

from marl_llm.games.kit.grids import FAR, STEPS
from marl_llm.games.programs import Applied, status_of

Rows = tuple[str, ...]
Cell = tuple[int, int]


class Grid(NamedTuple):
    """A state read: where the agent and the goal are, and the moves to the goal from every free cell that it can be reached from."""

    agent: Cell
    goal: Cell
    distance: dict[Cell, int]


@functools.lru_cache(8192)
def grid_of(rows: Rows) -> Grid:
    """A state's parts. Raises `ValueError` for ragged rows, an unknown sign, or not exactly one agent and one goal."""
    if not rows or len(set(map(len, rows))) != 1 or not rows[0]:
        raise ValueError("a map needs rows of one length; use e.g. ('A.#', '..G')")
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    if unknown := sorted(set(cells.values()) - set("#.AG*")):
        raise ValueError(f"unknown signs {unknown} in the map; use '#', '.', 'A', 'G' and '*'")
    agents, goals = ([cell for cell, sign in cells.items() if sign in signs] for signs in ("A*", "G*"))
    if len(agents) != 1 or len(goals) != 1:
        raise ValueError(f"the map has {len(agents)} agents and {len(goals)} goals; it needs one of each")
    distance, frontier = {goals[0]: 0}, collections.deque(goals)
    while frontier:
        r, c = frontier.popleft()
        for dr, dc in STEPS.values():
            near = (r + dr, c + dc)
            if cells.get(near, "#") != "#" and near not in distance:
                distance[near] = distance[r, c] + 1
                frontier.append(near)
    return Grid(agents[0], goals[0], distance)


def left(rows: Rows, measure: str = "bfs") -> int:
    """Moves to the goal by breadth-first search (`FAR` where there is no way), or Manhattan distance."""
    grid = grid_of(tuple(rows))
    return grid.distance.get(grid.agent, FAR) if measure == "bfs" else _manhattan(grid.agent, grid.goal)


def _manhattan(cell: Cell, goal: Cell) -> int:
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


def moved(rows: Rows, agent: Cell) -> Rows:
    """The state with the agent on another cell."""
    grid = grid_of(tuple(rows))
    signs = [list(row) for row in rows]
    signs[grid.agent[0]][grid.agent[1]] = "G" if grid.agent == grid.goal else "."
    signs[agent[0]][agent[1]] = "*" if agent == grid.goal else "A"
    return tuple("".join(row) for row in signs)


def walker(measure: str = "bfs") -> Callable[[Rows, Rows, str], Applied]:
    """The puzzle's `apply`: makes moves until the list ends, a wall or the border stops it, or the goal is reached.

    Appendix B.4 with lists, as the device game reads it: SPNext is the share of listed moves that lie on a shortest path; the Tool's
    shaping term compares the distance at the end with that at the beginning of its list. `measure` is "bfs" or "manhattan" (as printed).
    """

    def apply(rows: Rows, start: Rows, letters: str) -> Applied:
        grid = grid_of(tuple(rows))
        cell, on_path, hit, trace = grid.agent, 0, False, []

        def away(at):
            return grid.distance.get(at, FAR) if measure == "bfs" else _manhattan(at, grid.goal)

        for letter in letters:
            if cell == grid.goal:
                break
            dr, dc = STEPS[letter]
            target = (cell[0] + dr, cell[1] + dc)
            if not (0 <= target[0] < len(rows) and 0 <= target[1] < len(rows[0])) or rows[target[0]][target[1]] == "#":
                hit = True
                trace.append((letter, f"stopped at {cell} by a wall or the border"))
                break
            on_path += grid.distance.get(target, FAR) < grid.distance.get(cell, FAR)
            cell = target
            trace.append((letter, str(cell)))
        solved = cell == grid.goal
        gain = away(grid.agent) - away(cell)
        team = 1.0 if solved else max(0.0, gain / max(1, left(start, measure)))
        return Applied(
            moved(rows, cell),
            status_of(solved, hit, letters),
            legal=bool(letters) and not hit,
            left=float(away(cell)),
            team=team,
            executes=on_path / max(1, len(letters)),
            proposes=float(gain >= 0),
            trace=tuple(trace),
        )

    return apply


def shortest(rows: Rows) -> str:
    """The moves of a shortest path; of several, the first in the order of `UDLR`."""
    letters, apply = "", walker()
    while left(rows):
        step = min("UDLR", key=lambda letter: apply(rows, rows, letter).left)
        rows, letters = apply(rows, rows, step).state, letters + step
    return letters
