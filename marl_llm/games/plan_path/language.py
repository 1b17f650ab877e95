"""The compact text protocol of Plan-Path: one fact, one word, one token.

Everything is egocentric: `U2R1` is the cell two up and one right of the agent, `O` its own cell.

    prompt    t1 x r2 c4 @D3R2 #U1 #D1L2 ... tool          turn, last status, own row and column, goal, walls, who speaks
              t1 x r2 c4 @D3R2 #U1 ... | R R D +g planner  the same, then the Tool's proposal as moves and its simulated status
    tool      R1 R2 D1R2 ;                                 a route, cell by cell
    planner   R R D ;                                      a list of moves (also the single agent's language)

Status words: `-` none yet, `o` all moves done, `x` stopped by a wall or the border, `g` goal reached, `f` unparsable.
A response ends with `;`. No word tells a distance or a direction to the goal's path: there is no solver in any prompt.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from marl_llm.games.kit.board import BoardLanguage
from marl_llm.games.kit.grids import MOVES, offset_name


@dataclasses.dataclass(frozen=True)
class PlanPathLanguage(BoardLanguage):
    """Ids of every word for maps of one size. Cells are indexed by offset: `(row + h - 1) * (2 w - 1) + column + w - 1`."""

    height: int
    width: int
    max_turns: int

    @functools.cached_property
    def offsets(self) -> list[str]:
        """Names of all offsets between two cells of the map, in index order."""
        rows, columns = range(1 - self.height, self.height), range(1 - self.width, self.width)
        return [offset_name(row, column) for row in rows for column in columns]

    def words(self) -> list[str]:
        """All words, in the order of their ids."""
        words = self.protocol(*MOVES)
        words += [f"r{r}" for r in range(self.height)] + [f"c{c}" for c in range(self.width)]
        for mark in ("", "#", "@"):
            words += [mark + name for name in self.offsets]
        return words

    def cells(self, mark: str) -> np.ndarray:
        """Ids of all offsets under a mark: '' route, '#' wall, '@' goal. int32 `[(2h-1)(2w-1)]`."""
        return self.tokenizer.ids_of([mark + name for name in self.offsets])

    @functools.cached_property
    def cells_by_name(self) -> dict[str, int]:
        """Ids of a route's words."""
        return dict(zip(self.offsets, self.cells("").tolist()))

    @functools.cached_property
    def moves_by_name(self) -> dict[str, int]:
        """Ids of the moves."""
        return dict(zip(MOVES, self.ids(*MOVES).tolist()))
