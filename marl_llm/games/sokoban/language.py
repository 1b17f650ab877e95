"""The compact text protocol of Sokoban: one fact, one word, one token.

With `frame="room"` cells have names of their own, `r1c2` for row 1 and column 2 counted from 0 inside the border; with `frame="player"`
they are named from the player: `U2R1` is the cell two up and one right, `O` its own.

    prompt    t1 o A:r0c0 $r1c2 @r3c3 #r1c1 #r2c0 ... tool      turn, last status, player, boxes, goals, walls, who speaks
              t1 o A:r0c0 $r1c2 @r3c3 ... | R R D +o planner    the same, then the Tool's proposal and its simulated status
    tool      R R D ;                                           a list of moves
    planner   R R D ;                                           a list of moves (also the single agent's language)

Status words: `-` none yet, `o` all moves done, `x` stopped by an illegal move, `g` all boxes on goals, `f` unparsable. A response ends with
`;`. No word tells a distance, a deadlock or a push of the solution: there is no solver in any prompt.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from marl_llm.games.kit.board import BoardLanguage
from marl_llm.games.kit.grids import MOVES, offset_name

PLAYER, BOX, GOAL, WALL = "A:", "$", "@", "#"


@dataclasses.dataclass(frozen=True)
class SokobanLanguage(BoardLanguage):
    """Ids of every word for rooms of `rows` by `columns` cells inside the border."""

    rows: int
    columns: int
    max_turns: int
    frame: str

    @functools.cached_property
    def names(self) -> np.ndarray:
        """`[n, n]`: the name of a cell (second axis) when the player stands on another (first axis)."""
        cells = [divmod(cell, self.columns) for cell in range(self.rows * self.columns)]
        if self.frame == "room":
            return np.asarray([[f"r{r}c{c}" for r, c in cells]] * len(cells))
        return np.asarray([[offset_name(r - pr, c - pc) for r, c in cells] for pr, pc in cells])

    def words(self) -> list[str]:
        """All words, in the order of their ids."""
        words = self.protocol(*MOVES)
        words += [f"{PLAYER}r{r}c{c}" for r in range(self.rows) for c in range(self.columns)]
        return words + [mark + name for mark in (BOX, GOAL, WALL) for name in dict.fromkeys(self.names.reshape(-1).tolist())]

    @functools.cached_property
    def players(self) -> np.ndarray:
        """Ids of the player's own cell, `[n]`."""
        return self.ids(*(f"{PLAYER}r{r}c{c}" for r in range(self.rows) for c in range(self.columns)))

    @functools.cached_property
    def cells(self) -> dict[str, np.ndarray]:
        """Mark -> ids of cells under it, `[n, n]`: the player's cell, the cell."""
        known, index = np.unique(self.names, return_inverse=True)
        return {mark: self.ids(*(mark + name for name in known))[index.reshape(self.names.shape)] for mark in (BOX, GOAL, WALL)}

    @functools.cached_property
    def moves(self) -> np.ndarray:
        """Ids of the moves, in the order of `MOVES`."""
        return self.ids(*MOVES)

    @functools.cached_property
    def meaning(self) -> np.ndarray:
        """`[V]`: the move that a word means, -1 for none."""
        return self.meanings(self.moves)
