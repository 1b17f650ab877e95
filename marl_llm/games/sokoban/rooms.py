"""Rooms of Sokoban: the moves as tables, the exact shortest solution, random rooms, and disjoint splits.

A room is a rectangle of cells inside a border of walls; cells are numbered row by row from 0. Where the player and the boxes stand is one
number, the *place*: with n cells and boxes b1, b2 it is `(player · n + b1) · n + b2`. The tables of moves between places depend on the
room's size alone; walls only forbid places. Solutions serve rewards, scripts and generation; no prompt shows one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from marl_llm.games.kit.grids import DELTAS, FAR, in_split, mixed

MAX_TRIES = 2048
MAX_PLACES = 50_000


class Size(NamedTuple):
    """A room's size in cells, its border left out, and its number of boxes."""

    rows: int
    columns: int
    boxes: int

    @property
    def cells(self) -> int:
        """n."""
        return self.rows * self.columns

    @property
    def places(self) -> int:
        """Places of player and boxes, impossible ones included."""
        return self.cells ** (self.boxes + 1)


class Room(NamedTuple):
    """One instance. `distance` is the number of moves of a shortest solution from each place, `FAR` where there is none."""

    walls: Bool[Array, "n"]
    goals: Int[Array, "boxes"]
    place: Int[Array, ""]
    distance: Int[Array, "places"]


class Tables(NamedTuple):
    """What depends on the size alone. Cells beyond the border have the number n, places that cannot be reached the number of places."""

    near: np.ndarray  # [n, 4]: the neighbours of a cell
    holders: np.ndarray  # [places, boxes + 1]: the cells of the player and of the boxes
    moved: np.ndarray  # [places, 4]: where a move leads if there are no walls
    distinct: np.ndarray  # [places]: no two things stand on one cell
    apart: np.ndarray  # [n, n]: Manhattan distances


@functools.lru_cache(maxsize=16)
def tables(size: Size) -> Tables:
    """The tables of a size."""
    n, count = size.cells, size.boxes + 1
    cells = np.stack(np.divmod(np.arange(n), size.columns), -1)
    near = np.full((n, 4), n, np.int32)
    for move, delta in enumerate(DELTAS):
        to = cells + delta
        inside = np.all((to >= 0) & (to < [size.rows, size.columns]), -1)
        near[inside, move] = to[inside] @ [size.columns, 1]
    beyond = np.vstack([near, np.full((1, 4), n, np.int32)])
    holders = np.stack(np.unravel_index(np.arange(size.places), (n,) * count), -1).astype(np.int32)
    distinct = np.asarray([len(set(row)) == count for row in holders.tolist()])
    moved = np.full((size.places, 4), size.places, np.int32)
    for move in range(4):
        to = holders.copy()
        to[:, 0] = beyond[holders[:, 0], move]
        pushed = to[:, :1] == holders[:, 1:]
        to[:, 1:] = np.where(pushed, beyond[holders[:, 1:], move], holders[:, 1:])
        inside = np.all(to < n, -1) & distinct
        index = np.ravel_multi_index(tuple(to[inside].T), (n,) * count)
        moved[inside, move] = np.where(distinct[index], index, size.places)
    apart = np.abs(cells[:, None] - cells[None]).sum(-1).astype(np.int32)
    return Tables(near, holders, moved, distinct, apart)


def possible(size: Size, walls: Bool[Array, "n"]) -> Bool[Array, "places"]:
    """Places at which all things stand on cells of their own that are no walls."""
    t = tables(size)
    return jnp.asarray(t.distinct) & ~jnp.any(walls[jnp.asarray(t.holders)], axis=-1)


def solve(size: Size, walls: Bool[Array, "n"], goals: Int[Array, "boxes"]) -> Int[Array, "places"]:
    """Moves of a shortest solution from every place, by relaxation until nothing changes; `FAR` where there is none."""
    t = tables(size)
    free = possible(size, walls)
    on_goal = jnp.zeros((size.cells,), bool).at[goals].set(True)
    first = jnp.where(free & jnp.all(on_goal[jnp.asarray(t.holders[:, 1:])], axis=-1), 0, FAR).astype(jnp.int32)
    moved = jnp.asarray(t.moved)

    def relax(carry):
        d, _ = carry
        near = jnp.min(jnp.append(d, FAR)[moved], axis=-1)
        new = jnp.where(free, jnp.minimum(d, near + 1), FAR)
        return new, jnp.any(new != d)

    return jax.lax.while_loop(lambda c: c[1], relax, (first, jnp.bool_(True)))[0]


def step(size: Size, walls: Bool[Array, "n"], place: Int[Array, ""], move: Int[Array, ""]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Where a move leads and whether it is legal: into no wall, a pushed box into no wall and no other box. Illegal ones lead nowhere."""
    t = tables(size)
    to = jnp.asarray(t.moved)[place, move]
    safe = jnp.minimum(to, size.places - 1)
    legal = (to < size.places) & ~jnp.any(walls[jnp.asarray(t.holders)[safe]])
    return jnp.where(legal, safe, place), legal


def cornered(size: Size, walls: Bool[Array, "n"]) -> Bool[Array, "n"]:
    """Cells in a static corner: a wall or the border above or below, and one at the left or right. A box there never moves again."""
    blocked = jnp.append(walls, True)[jnp.asarray(tables(size).near)]
    return (blocked[:, 0] | blocked[:, 1]) & (blocked[:, 2] | blocked[:, 3])


def potential(size: Size, goals: Int[Array, "boxes"], boxes: Int[Array, "boxes"]) -> Int[Array, ""]:
    """B.5's ψ: minus the sum, over boxes, of the Manhattan distance to the nearest goal. Two boxes may count the same goal."""
    return -jnp.sum(jnp.min(jnp.asarray(tables(size).apart)[boxes][:, goals], axis=-1))


def fingerprint(walls: Bool[Array, "n"], goals: Int[Array, "boxes"], holders: Int[Array, "things"]) -> UInt32[Array, ""]:
    """A 32-bit hash of a room's content: walls, goals, boxes in any order, player. `holders` are the cells of player and boxes."""
    n = walls.shape[0]
    odd = np.random.default_rng(20_250_604).integers(0, 2**32, size=(4, n), dtype=np.uint32) | 1
    odd = jnp.asarray(odd)
    x = jnp.sum(walls.astype(jnp.uint32) * odd[0]) + jnp.sum(odd[1][goals]) + odd[2][holders[0]] + jnp.sum(odd[3][holders[1:]])
    return mixed(x)


def random_room(
    key: jax.Array, size: Size, *, min_walls: int, max_walls: int, min_length: int, max_length: int, split: str | Int[Array, ""]
) -> tuple[Room, Bool[Array, ""]]:
    """Draws layouts of walls and goals until one has a place that is of the split, needs two pushes or more, and has a shortest solution
    within the bounds; of those places, one.

    All such places of a layout are equally likely. The split is a hash of the room, so it says nothing about how hard a room is: rooms of
    all splits are drawn from one distribution. Returns the room and whether `MAX_TRIES` layouts sufficed (they do unless the settings
    contradict each other). `key` is folded.
    """
    n = size.cells
    holders = jnp.asarray(tables(size).holders)

    def attempt(carry):
        _, _, number = carry
        wall_key, count_key, place_key = jax.random.split(jax.random.fold_in(key, number), 3)
        order = jnp.argsort(jax.random.uniform(wall_key, (n,))).astype(jnp.int32)
        walls = jnp.zeros((n,), bool).at[order].set(jnp.arange(n) < jax.random.randint(count_key, (), min_walls, max_walls + 1))
        goals = order[n - size.boxes :]
        distance = solve(size, walls, goals)
        usable = (distance >= min_length) & (distance <= max_length)
        usable &= jax.vmap(lambda cells: potential(size, goals, cells[1:]) <= -2)(holders)
        usable &= jax.vmap(lambda cells: in_split(fingerprint(walls, goals, cells), split))(holders)
        place = jnp.argmax(jnp.where(usable, jax.random.uniform(place_key, (size.places,)), -1.0)).astype(jnp.int32)
        return Room(walls, goals, place, distance), usable[place], number + 1

    zero = jnp.int32(0)
    empty = Room(jnp.zeros((n,), bool), jnp.zeros((size.boxes,), jnp.int32), zero, jnp.full((size.places,), FAR, jnp.int32))
    room, good, _ = jax.lax.while_loop(lambda c: ~c[1] & (c[2] < MAX_TRIES), attempt, (empty, jnp.bool_(False), zero))
    return room, good


def room_from_rows(rows: list[str]) -> Room:
    """A room from text, its border included: `#` wall, `.` free, `A` player, `B` box, `G` goal, `*` a box and `+` the player on a goal.

    Raises `ValueError` that names what is wrong: ragged rows, an unknown sign, an open border, no player or several, no box, no goal,
    unequal counts of boxes and goals, more places than the solver takes, a room that is solved already or cannot be solved.
    """
    if not rows or len({len(row) for row in rows}) != 1 or len(rows) < 3 or len(rows[0]) < 3:
        raise ValueError("a room needs rows of one length, at least three of three; use e.g. ['#####', '#ABG#', '#####']")
    grid = np.asarray([list(row) for row in rows])
    if unknown := sorted(set(grid.reshape(-1).tolist()) - set("#.ABG*+")):
        raise ValueError(f"unknown signs {unknown} in the room; use '#', '.', 'A', 'B', 'G', '*' and '+'")
    if not all(np.all(side == "#") for side in (grid[0], grid[-1], grid[:, 0], grid[:, -1])):
        raise ValueError("the room's border is open: its first and last rows and columns must be walls, '#'")
    inner = grid[1:-1, 1:-1]
    cells = {name: np.flatnonzero(np.isin(inner, list(signs))) for name, signs in (("player", "A+"), ("box", "B*"), ("goal", "G*+"))}
    if len(cells["player"]) != 1:
        raise ValueError(f"the room has {len(cells['player'])} players ('A' or '+'); it needs exactly one")
    boxes, goals = len(cells["box"]), len(cells["goal"])
    for name, count in (("box", boxes), ("goal", goals)):
        if not count:
            raise ValueError(f"the room has no {name}; it needs at least one")
    if boxes != goals:
        raise ValueError(f"the room has {boxes} boxes and {goals} goals; it needs as many of one as of the other")
    size = Size(*inner.shape, boxes)
    if size.places > MAX_PLACES:
        raise ValueError(f"{size.cells} cells with {boxes} boxes are {size.places} places; the solver takes at most {MAX_PLACES}")
    walls, targets = jnp.asarray(inner.reshape(-1) == "#"), jnp.asarray(cells["goal"], jnp.int32)
    distance = solve(size, walls, targets)
    place = np.ravel_multi_index((cells["player"][0], *cells["box"]), (size.cells,) * (boxes + 1))
    if (length := int(distance[place])) >= FAR:
        raise ValueError("the room is unsolvable: no moves bring its boxes to the goals")
    if not length:
        raise ValueError("the room is solved already: all boxes are on goals")
    return Room(walls, targets, jnp.int32(place), distance)


def rows_of(size: Size, walls, goals, place) -> list[str]:
    """A room as text rows, for people: the inverse of `room_from_rows`."""
    player, *boxes = tables(size).holders[int(place)]
    grid = np.where(np.asarray(walls), "#", ".")
    grid[np.asarray(goals)] = "G"
    for cell, free, on_goal in ((player, "A", "+"), *((box, "B", "*") for box in boxes)):
        grid[cell] = on_goal if grid[cell] == "G" else free
    edge = "#" * (size.columns + 2)
    return [edge, *("#" + "".join(row) + "#" for row in grid.reshape(size.rows, size.columns)), edge]
