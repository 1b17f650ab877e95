"""Sudoku 4x4 in ordinary text, for models that know no words of its own: what the view shows, and fills or a whole grid behind `####`.

A prompt tells what the compact protocol tells (`language.py`), and no more: `raw` shows the grid, `peers` and `split` the blanks with the
digits that are taken. A response is read so: the last line that begins with `####` holds a JSON list, either of fills
`[row, column, digit]` counted from 1, or the completed grid as four rows of four digits, which stands for a fill of every blank, and of
every clue that it changes. Where there is no such line the whole response is read as fills in the protocol's words, `r1c2=3 r2c1=4`. Other
sizes, numbers out of range and more than `max_fills` fills do not parse.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from marl_llm.games.kit.lists import LONGEST, answer_in
from marl_llm.games.sudoku.language import DIGITS, NAMES, seen_name
from marl_llm.games.sudoku.puzzles import CELLS, SIDE, rows_of, seen
from marl_llm.untrusted import Bounds, read_json

RESULTS = ("", "all its fills were made", "it was refused, one of its fills being illegal", "it solved the puzzle", "it could not be read")
_BOUNDS = Bounds(size=2_000, depth=3, values=200, digits=8)
_FILLS = {f"{name}={digit}": (cell, digit) for cell, name in enumerate(NAMES) for digit in DIGITS}
_DOING = {
    "tool": "You propose fills. The Planner reads your proposal, with what came of it in a simulation, and then fills the grid.",
    "planner": "You fill the grid. The Tool has proposed fills; adopt them if they are right, correct or extend them if they are not.",
    "solo": "You fill the grid.",
}


def fills_in(text: str, grid: Any) -> list[tuple[int, int]] | None:
    """The fills (cell, digit) of a response, in order, for a grid of 16 digits; None if it does not parse."""
    answer = answer_in(text)
    if answer is None:
        words = text[-LONGEST:].split()
        return [_FILLS[word] for word in words] if all(word in _FILLS for word in words) else None
    parsed = read_json(answer, _BOUNDS)
    if not parsed.ok or not isinstance(parsed.value, list):
        return None
    rows = parsed.value
    if not all(isinstance(row, list) and all(type(x) is int for x in row) for row in rows):
        return None
    if [len(row) for row in rows] == [SIDE] * SIDE:
        digits = [digit for row in rows for digit in row]
        if not all(digit in DIGITS for digit in digits):
            return None
        return [(cell, digit) for cell, digit in enumerate(digits) if int(grid[cell]) != digit]
    if not all(len(row) == 3 and all(x in DIGITS for x in row) for row in rows):
        return None
    return [((row - 1) * SIDE + column - 1, digit) for row, column, digit in rows]


def prompt(game, state, role: str) -> str:
    """What a role of a `Sudoku` reads in a state."""
    lines = [
        f"A Sudoku of 4 rows and 4 columns: every row, column and 2x2 box holds each of the digits 1 to 4 once. It is to be solved within "
        f"{game.max_turns} turns. {_DOING[role]}",
        f"A fill writes a digit into a blank; filled cells stay as they are. At most {game.max_fills} fills. {_refusal(game)}",
        f"This is turn {min(int(state.turn), game.max_turns - 1) + 1} of {game.max_turns}.",
    ]
    if result := RESULTS[int(state.status)]:
        lines.append(f"The last list of fills: {result}.")
    grid = np.asarray(state.grid)
    if game.view == "raw":
        lines += ["The grid, with dots for blanks:", *rows_of(grid)]
    else:
        held = np.asarray(seen(jnp.asarray(grid), game.peers_of(role)))
        taken = "row, column and box" if game.shows_boxes(role) else "row and column"
        lines.append(f"The blanks, with the digits that stand in the same {taken}:")
        lines += [
            f"row {cell // SIDE + 1}, column {cell % SIDE + 1}: {', '.join(seen_name(int(held[cell]))).replace('-', 'none')}"
            for cell in range(CELLS)
            if not grid[cell]
        ]
    if role == "planner":
        fills = [[int(f) // SIDE // SIDE + 1, int(f) // SIDE % SIDE + 1, int(f) % SIDE + 1] for f in state.proposal.fills if f >= 0]
        result = RESULTS[int(state.proposal.status)] or "there is none"
        lines.append(f"The Tool's proposal: {fills}; in the simulation {result}.")
    lines.append(
        "Give the answer on a last line that begins with ####: a JSON list of fills [row, column, digit], counted from 1, or the completed "
        "grid as four rows, for example\n#### [[1, 3, 4], [2, 1, 3]]"
    )
    return "\n".join(lines)


def _refusal(game) -> str:
    """What becomes of a list with an illegal fill."""
    if game.illegal == "drop":
        return "If one of them is illegal, none is made."
    return "The first illegal one ends the list."
