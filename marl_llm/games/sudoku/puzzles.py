"""Puzzles of Sudoku 4x4: all 288 solved grids, minimal puzzles with one solution, and splits by solved grid.

Cells are numbered 0 to 15 row by row; 0 is a blank, digits are 1 to 4. With all solved grids in a table the exact solver is a comparison:
the solutions of a puzzle are the grids that agree with its clues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from marl_llm.games.protocol import split_index

SIDE, BOX = 4, 2
CELLS = SIDE * SIDE
FEWEST_CLUES = 4  # of a 4x4 puzzle with one solution
_WHERE = np.stack(np.divmod(np.arange(CELLS), SIDE), -1)
_BOX = _WHERE[:, 0] // BOX * BOX + _WHERE[:, 1] // BOX
_SAME = np.stack([_WHERE[:, None, 0] == _WHERE[None, :, 0], _WHERE[:, None, 1] == _WHERE[None, :, 1], _BOX[:, None] == _BOX[None]])
# [16, 16]: cells of one row, column or box, the cell itself left out; and those of one row or column alone
PEERS = _SAME.any(0) & ~np.eye(CELLS, dtype=bool)
LINE_PEERS = _SAME[:2].any(0) & ~np.eye(CELLS, dtype=bool)


def _solved_grids() -> np.ndarray:
    """All solved grids `[288, 16]`, in the order of their digits."""
    grids = [np.zeros(CELLS, np.int32)]
    for cell in range(CELLS):
        grids = [
            np.where(np.arange(CELLS) == cell, digit, grid).astype(np.int32)
            for grid in grids
            for digit in range(1, SIDE + 1)
            if digit not in grid[PEERS[cell]]
        ]
    return np.stack(grids)


GRIDS = _solved_grids()
PARTS = (36, 36, 216)  # grids of validation, test and train: the order of `games.SPLITS`
# [288]: the split of each grid, dealt once and for all
SPLIT_OF = np.repeat(np.arange(3), PARTS)[np.random.default_rng(4).permutation(len(GRIDS))]
OF_SPLIT = tuple(np.flatnonzero(SPLIT_OF == split) for split in range(3))


class Puzzle(NamedTuple):
    """One instance: the clues, 0 where blank, and the only solved grid that has them."""

    clues: Int[Array, "16"]
    solution: Int[Array, "16"]


def solutions(clues: Int[Array, "16"]) -> Bool[Array, "288"]:
    """Which of `GRIDS` have all the clues."""
    return jnp.all((clues == 0) | (jnp.asarray(GRIDS) == clues), axis=-1)


def random_puzzle(key: jax.Array, split: str | Int[Array, ""]) -> Puzzle:
    """A minimal puzzle: a solved grid of the split, its digits taken away in random order as long as it stays the only solution.

    Without any of its clues it has several solutions. It has 10 to 12 blanks. `key` is consumed.
    """
    grid_key, order_key = jax.random.split(key)
    size = jnp.asarray(PARTS)[split_index(split)]
    table = np.zeros((3, max(PARTS)), np.int32)
    for row, grids in zip(table, OF_SPLIT):
        row[: len(grids)] = grids
    solution = jnp.asarray(GRIDS)[jnp.asarray(table)[split_index(split), jax.random.randint(grid_key, (), 0, size)]]

    def dig(clues, cell):
        less = clues.at[cell].set(0)
        return jnp.where(jnp.sum(solutions(less)) == 1, less, clues), None

    clues, _ = jax.lax.scan(dig, solution, jax.random.permutation(order_key, CELLS))
    return Puzzle(clues, solution)


def puzzle_from_rows(rows: Sequence[str]) -> Puzzle:
    """A puzzle from text: four rows of four signs, `1` to `4` for clues and `.` for blanks.

    Raises `ValueError` that names what is wrong: another size, an unknown sign, equal clues in a row, column or box, no blank, no
    solution or several.
    """
    rows = [str(row) for row in rows]
    if len(rows) != SIDE or any(len(row) != SIDE for row in rows):
        shape = f"{len(rows)} rows of {', '.join(str(len(row)) for row in rows) or 'no'} signs"
        raise ValueError(f"the puzzle has {shape}; it needs four rows of four, e.g. ['1...', '..2.', '.3..', '...4']")
    signs = "".join(rows)
    if unknown := sorted(set(signs) - set(".1234")):
        raise ValueError(f"unknown signs {unknown} in the puzzle; use '1' to '4' and '.' for a blank")
    clues = np.asarray([".1234".index(sign) for sign in signs], np.int32)
    twice = [(a, b) for a in range(CELLS) for b in range(a) if clues[a] and clues[a] == clues[b] and PEERS[a, b]]
    if twice:
        a, b = (f"row {cell // SIDE + 1}, column {cell % SIDE + 1}" for cell in twice[0])
        raise ValueError(f"the puzzle has the clue {clues[twice[0][0]]} twice in one row, column or box: at {b} and at {a}")
    if clues.all():
        raise ValueError("the puzzle has no blank: there is nothing to fill")
    solutions = np.flatnonzero(np.all((clues == 0) | (GRIDS == clues), axis=-1))
    if len(solutions) != 1:
        raise ValueError(f"the puzzle has {len(solutions) or 'no'} solution{'s' * (len(solutions) != 1)}; it needs exactly one")
    return Puzzle(jnp.asarray(clues), jnp.asarray(GRIDS[solutions[0]]))


def puzzles_from_rows(puzzles: Sequence[Sequence[str]]) -> list[Puzzle]:
    """Many puzzles, each as `puzzle_from_rows` takes it. Raises `ValueError` with the number, from 1, of the first that will not do."""
    parsed = []
    for number, rows in enumerate(puzzles, start=1):
        try:
            parsed.append(puzzle_from_rows(rows))
        except ValueError as error:
            raise ValueError(f"puzzle {number}: {error}") from error
    return parsed


def rows_of(grid) -> list[str]:
    """A grid as four rows of text, `.` for a blank: the inverse of `puzzle_from_rows`."""
    text = "".join(".1234"[int(digit)] for digit in np.asarray(grid))
    return [text[i : i + SIDE] for i in range(0, CELLS, SIDE)]


def seen(grid: Int[Array, "16"], peers: np.ndarray = PEERS) -> Int[Array, "16"]:
    """The digits that the peers of each cell hold, as a sum of `1 << (digit - 1)`."""
    held = jnp.stack([jnp.any((grid == digit)[None] & jnp.asarray(peers), axis=-1) for digit in range(1, SIDE + 1)])
    return jnp.asarray([1, 2, 4, 8]) @ held.astype(jnp.int32)
