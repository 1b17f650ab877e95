"""The compact text protocol of Sudoku 4x4: one fact, one word, one token. Rows and columns are counted from 1.

    peers     t0 - r1c2:134 r1c3:14 ... tool        turn, last status, every blank with the digits seen in its row, column and box
    split     t0 - r1c2:13 r1c3:1 ... planner       the same, but the Planner sees rows and columns only; the Tool sees `peers`
    raw       t0 - r1c1=2 r1c2=. ... tool           every cell with its digit
    planner   ... | r1c2=2 r2c3=4 +o planner        what the view shows, then the Tool's proposal and its simulated status
    response  r1c2=2 r2c3=4 ;                       fills, of every role

Status words: `-` none yet, `o` all fills made, `x` one of them was illegal, `g` solved, `f` unparsable. A response ends with `;`. No word
tells a digit of the solution: there is no solver in any prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from marl_llm.games.kit.board import BoardLanguage
from marl_llm.games.sudoku.puzzles import CELLS, SIDE

NAMES = tuple(f"r{cell // SIDE + 1}c{cell % SIDE + 1}" for cell in range(CELLS))
DIGITS = range(1, SIDE + 1)


def seen_name(digits: int) -> str:
    """Digits that are seen, given as a sum of `1 << (digit - 1)`: 13 is `134`, 0 is `-`."""
    return "".join(str(digit) for digit in DIGITS if digits >> (digit - 1) & 1) or "-"


@dataclasses.dataclass(frozen=True)
class SudokuLanguage(BoardLanguage):
    """Ids of every word, for games of one view."""

    max_turns: int
    view: str

    def words(self) -> list[str]:
        """All words, in the order of their ids."""
        words = self.protocol() + [f"{name}={digit}" for name, digit in itertools.product(NAMES, DIGITS)]
        if self.view == "raw":
            return words + [f"{name}=." for name in NAMES]
        return words + [f"{name}:{seen_name(digits)}" for name, digits in itertools.product(NAMES, range(1 << SIDE))]

    @functools.cached_property
    def fills(self) -> np.ndarray:
        """Ids of fills `[64]`; fill `4 · cell + digit − 1`."""
        return self.ids(*(f"{name}={digit}" for name, digit in itertools.product(NAMES, DIGITS)))

    @functools.cached_property
    def facts(self) -> np.ndarray:
        """Ids of what a prompt says of a cell: `[16, 16]` by cell and digits seen, or, of the view `raw`, `[16, 5]` by cell and digit."""
        if self.view == "raw":
            return self.ids(*(f"{name}={digit}" for name, digit in itertools.product(NAMES, ".1234"))).reshape(CELLS, SIDE + 1)
        names = (f"{name}:{seen_name(digits)}" for name, digits in itertools.product(NAMES, range(1 << SIDE)))
        return self.ids(*names).reshape(CELLS, 1 << SIDE)

    @functools.cached_property
    def meaning(self) -> np.ndarray:
        """`[V]`: the fill that a word means, -1 for none."""
        return self.meanings(self.fills)
