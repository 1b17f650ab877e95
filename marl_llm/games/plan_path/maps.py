"""Maps of Plan-Path: random walls, a start and a goal that can be reached, and disjoint splits.

Distances count moves between four-neighbours (breadth-first search) and serve rewards and generation only; no prompt shows one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from marl_llm.games.kit.grids import FAR, in_split, mixed
from marl_llm.games.protocol import SPLITS

__all__ = ["SPLITS", "Map", "distances", "fingerprint", "in_split", "map_from_rows", "random_map", "rows_of"]

MAX_TRIES = 4096


class Map(NamedTuple):
    """One instance. `distance` is the number of moves to the goal from each cell, `FAR` where there is no way."""

    walls: Bool[Array, "h w"]
    start: Int[Array, "2"]
    goal: Int[Array, "2"]
    distance: Int[Array, "h w"]


def distances(walls: Bool[Array, "h w"], goal: Int[Array, "2"]) -> Int[Array, "h w"]:
    """Moves to the goal from every cell, by relaxation until nothing changes; `FAR` for walls and cut-off cells."""
    h, w = walls.shape
    first = jnp.full((h, w), FAR, jnp.int32).at[goal[0], goal[1]].set(0)

    def relax(carry):
        d, _ = carry
        padded = jnp.pad(d, 1, constant_values=FAR)
        vertical, horizontal = jnp.minimum(padded[:-2, 1:-1], padded[2:, 1:-1]), jnp.minimum(padded[1:-1, :-2], padded[1:-1, 2:])
        near = jnp.minimum(vertical, horizontal)
        new = jnp.where(walls, FAR, jnp.minimum(d, near + 1))
        return new, jnp.any(new != d)

    return jnp.minimum(jax.lax.while_loop(lambda c: c[1], relax, (first, jnp.bool_(True)))[0], FAR)


def fingerprint(walls: Bool[Array, "h w"], start: Int[Array, "2"], goal: Int[Array, "2"]) -> UInt32[Array, ""]:
    """A 32-bit hash of an instance's content; equal maps have equal fingerprints, whoever made them."""
    h, w = walls.shape
    odd = np.random.default_rng(20_240_229).integers(0, 2**32, size=h * w + 2, dtype=np.uint32) | 1
    odd = jnp.asarray(odd)

    def place(c):
        return (c[0] * w + c[1] + 1).astype(jnp.uint32)

    x = jnp.sum(walls.reshape(-1).astype(jnp.uint32) * odd[:-2]) + place(start) * odd[-2] + (place(goal) << 8) * odd[-1]
    return mixed(x)


def random_map(
    key: jax.Array,
    *,
    height: int,
    width: int,
    wall_density: float,
    min_distance: int,
    max_distance: int,
    max_walls: int,
    split: str | Int[Array, ""],
) -> tuple[Map, Bool[Array, ""]]:
    """Draws maps until one is solvable within the distance bounds, has at most `max_walls` walls and is of the split.

    Returns the map and whether `MAX_TRIES` sufficed (it does unless the settings contradict each other). `key` is folded.
    """

    def attempt(carry):
        _, _, n = carry
        wall_key, goal_key, start_key = jax.random.split(jax.random.fold_in(key, n), 3)
        walls = jax.random.bernoulli(wall_key, wall_density, (height, width))
        cell = jax.random.randint(goal_key, (), 0, height * width)
        goal = jnp.stack([cell // width, cell % width]).astype(jnp.int32)
        walls = walls.at[goal[0], goal[1]].set(False)
        d = distances(walls, goal)
        candidates = ((d >= min_distance) & (d <= max_distance)).reshape(-1)
        pick = jnp.argmax(jax.random.uniform(start_key, (height * width,)) * candidates)
        start = jnp.stack([pick // width, pick % width]).astype(jnp.int32)
        good = jnp.any(candidates) & (jnp.sum(walls) <= max_walls) & in_split(fingerprint(walls, start, goal), split)
        return Map(walls, start, goal, d), good, n + 1

    zero = jnp.zeros((2,), jnp.int32)
    empty = Map(jnp.zeros((height, width), bool), zero, zero, jnp.zeros((height, width), jnp.int32))
    map_, good, _ = jax.lax.while_loop(lambda c: ~c[1] & (c[2] < MAX_TRIES), attempt, (empty, jnp.bool_(False), jnp.int32(0)))
    return map_, good


def map_from_rows(rows: list[str]) -> Map:
    """A map from text: `#` wall, `.` free, `A` the agent, `G` the goal.

    Raises `ValueError` when the rows are ragged, a sign is unknown, `A` or `G` is not there once, or the goal cannot be reached.
    """
    if not rows or len({len(r) for r in rows}) != 1:
        raise ValueError("a map needs rows of one length; use e.g. ['A.#', '..G']")
    grid = np.asarray([list(r) for r in rows])
    unknown = sorted(set(grid.reshape(-1)) - set("#.AG"))
    if unknown:
        raise ValueError(f"unknown signs {unknown} in the map; use '#', '.', 'A' and 'G'")
    places = {sign: np.argwhere(grid == sign) for sign in "AG"}
    for sign, cells in places.items():
        if len(cells) != 1:
            raise ValueError(f"the map has {len(cells)} cells {sign!r}; it needs exactly one")
    start, goal = (jnp.asarray(places[s][0], jnp.int32) for s in "AG")
    walls = jnp.asarray(grid == "#")
    distance = distances(walls, goal)
    if int(distance[tuple(places["A"][0])]) >= FAR:
        raise ValueError("the map is unsolvable: walls cut the goal off from the agent")
    return Map(walls, start, goal, distance)


def rows_of(walls, position, goal) -> list[str]:
    """A map as text rows, for people: the inverse of `map_from_rows`; `*` is the agent on the goal."""
    grid = np.where(np.asarray(walls), "#", ".")
    grid[tuple(np.asarray(goal))] = "G"
    grid[tuple(np.asarray(position))] = "*" if np.array_equal(position, goal) else "A"
    return ["".join(r) for r in grid]
