"""Plan-Path in ordinary text, for models that know no words of its own: the map as rows of signs, and moves as a list.

A prompt tells what the compact protocol tells (`language.py`), and no more: with `view="split"` the Planner sees neither walls nor its own
cell. A response is read so:

- The list stands behind the last `Moves:` (any case; `Move:` and `Answer:` too) up to the end of that line; without one, between the last
  pair of square brackets; without these, the whole response is the list.
- A move is `U`, `D`, `L`, `R`, one of the words up, down, left, right, or an arrow ↑ ↓ ← →, in any case. Single letters may stand together:
  `RRD`. Between moves stand blanks, commas, semicolons, full stops, hyphens, `->`, quotes, `*` or backquotes.
- The Tool may also write its route cell by cell, in the protocol's words: `R1 R2 D1R2`.
- Anything else in the list, or more than `max_moves` moves, does not parse; no more does a route that leaves the map by more than its
  cells can name. `Moves:` with nothing behind it is the empty list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from marl_llm.games.kit.grids import MOVES, STEPS, offset_name
from marl_llm.games.plan_path.maps import rows_of

LONGEST = 10_000  # characters that are read, from the end: a list of moves is short
RESULTS = ("", "all its moves were made", "it was stopped by a wall or the border", "it reached the goal", "it could not be read")
_MARK = re.compile(r"\b(?:moves?|answer)[ \t*]*:", re.IGNORECASE)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_WORDS = {"UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R", "↑": "U", "↓": "D", "←": "L", "→": "R"}
_BETWEEN = re.compile(r"[\s,;.\-\"'`*>]+")
_CELL = re.compile(r"(?:[UD]\d+)?(?:[LR]\d+)?|O")


def listed(text: str) -> list[str]:
    """The words of the list that a response holds, in capitals; see the module's text."""
    text = text[-LONGEST:]
    if marks := list(_MARK.finditer(text)):
        text = text[marks[-1].end() :].lstrip(" \t").split("\n", 1)[0]
    if brackets := _BRACKETS.findall(text):
        text = brackets[-1]
    return [word for word in _BETWEEN.split(text.upper()) if word]


def moves_in(words: Sequence[str]) -> str | None:
    """The moves as letters of `UDLR`; None if one of the words is no move."""
    letters = ""
    for word in words:
        letter = _WORDS.get(word, word)
        if letter.strip(MOVES + "↑↓←→"):
            return None
        letters += "".join(_WORDS.get(sign, sign) for sign in letter)
    return letters


def cells_of(letters: str) -> list[str]:
    """The cells that moves lead through, as words of the protocol."""
    row = column = 0
    cells = []
    for letter in letters:
        down, right = STEPS[letter]
        row, column = row + down, column + right
        cells.append(offset_name(row, column))
    return cells


def spoken(words: Sequence[str], role: str) -> list[str] | None:
    """The response in the protocol's words, its stop word left out; None if it says nothing."""
    if role == "tool" and words and all(_CELL.fullmatch(word) for word in words):
        return list(words)
    letters = moves_in(words)
    if letters is None:
        return None
    return cells_of(letters) if role == "tool" else list(letters)


def prompt(game, state, role: str) -> str:
    """What a role of a `PlanPath` reads in a state."""
    sees = game.view == "full" or role == "tool"
    doing = {
        "tool": "You propose a route to the goal. The Planner reads your proposal, with what came of it in a simulation, and then moves.",
        "planner": "You move on the grid, towards the goal. The Tool has proposed a route, which you may follow or not.",
        "solo": "You move on the grid, towards the goal.",
    }
    lines = [
        f"A grid of {game.height} rows and {game.width} columns; the goal is to be reached within {game.max_turns} turns. {doing[role]}",
        f"A move goes one cell up, down, left or right; at a wall or the border the list of moves stops. At most {game.max_moves} moves.",
        f"This is turn {min(int(state.turn), game.max_turns - 1) + 1} of {game.max_turns}.",
    ]
    if result := RESULTS[int(state.status)]:
        lines.append(f"The last list of moves: {result}.")
    down, right = (int(g) - int(p) for g, p in zip(state.map.goal, state.position))
    if sees:
        row, column = (int(x) + 1 for x in state.position)
        lines += ["The map, with A for you, G for the goal and # for walls:", *rows_of(state.map.walls, state.position, state.map.goal)]
        lines.append(f"You are in row {row}, column {column}.")
    vertical = f"{abs(down)} {'down' if down > 0 else 'up'}"
    horizontal = f"{abs(right)} {'right' if right > 0 else 'left'}"
    lines.append(f"The goal is {vertical} and {horizontal} of you.")
    if role == "planner":
        moves = [MOVES[int(move)] for move in state.proposal.moves if move >= 0]
        result = RESULTS[int(state.proposal.status)] or "there is none"
        lines.append(f"The Tool's proposal: {', '.join(moves) or 'no moves'}; in the simulation {result}.")
    lines.append("End your answer with one line such as\nMoves: R, R, D")
    return "\n".join(lines)
