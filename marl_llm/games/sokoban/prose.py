"""Sokoban in ordinary text, for models that know no words of its own: the room as rows of signs, and moves as a list behind `####`.

A prompt tells what the compact protocol tells (`language.py`), and no more: with `view="split"` the Planner sees no inner walls. A response
is read so: the last line that begins with `####` holds the list; without one the whole response is the list. With or without brackets,
quotes and commas, its moves are `U`, `D`, `L`, `R` or the words up, down, left, right in any case. As in Plan-Path, single letters may
stand together: `RRD`. Anything else in the list, or more than `max_moves` moves, does not parse.
"""

from __future__ import annotations

import re

from marl_llm.games.kit.grids import MOVES
from marl_llm.games.kit.lists import LONGEST, answer_in
from marl_llm.games.sokoban.rooms import rows_of

RESULTS = ("", "all its moves were made", "it was stopped by an illegal move", "it brought all boxes to goals", "it could not be read")
_LIST = re.compile(r"\[?[A-Z\s,;\"']*\]?")
_WORDS = {"UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R"}
_DOING = {
    "tool": "You propose moves. The Planner reads your proposal, with what came of it in a simulation, and then moves the player.",
    "planner": "You move the player. The Tool has proposed a list of moves; adopt it if it is right, correct or extend it if it is not.",
    "solo": "You move the player.",
}


def moves_in(text: str) -> str | None:
    """The moves of a response as letters of `UDLR`; None if it does not parse."""
    answer = answer_in(text)
    answer = (text[-LONGEST:] if answer is None else answer).upper().strip()
    if not _LIST.fullmatch(answer):
        return None
    letters = "".join(_WORDS.get(word, word) for word in re.findall("[A-Z]+", answer))
    return letters if set(letters) <= set(MOVES) else None


def prompt(game, state, role: str) -> str:
    """What a role of a `Sokoban` reads in a state."""
    sees = game.view == "full" or role == "tool"
    lines = [
        f"Sokoban in a room of {game.height} rows and {game.width} columns, its border of walls included. Every box must come to stand "
        f"on a goal within {game.max_turns} turns. {_DOING[role]}",
        "A move goes one cell up (U), down (D), left (L) or right (R). A move into a box pushes it one cell on, if that cell has no "
        f"wall and no box. The list stops at the first move that cannot be made. At most {game.max_moves} moves.",
        f"This is turn {min(int(state.turn), game.max_turns - 1) + 1} of {game.max_turns}.",
    ]
    if result := RESULTS[int(state.status)]:
        lines.append(f"The last list of moves: {result}.")
    signs = "# wall, . free, A player, B box, G goal, * box on a goal, + player on a goal"
    walls = state.room.walls if sees else state.room.walls & False
    lines.append(f"The room ({signs}):" if sees else f"The room; walls inside the border are not shown ({signs}):")
    lines += rows_of(game.size, walls, state.room.goals, state.place)
    if role == "planner":
        moves = [MOVES[int(move)] for move in state.proposal.moves if move >= 0]
        result = RESULTS[int(state.proposal.status)] or "there is none"
        lines.append(f"The Tool's proposal: [{', '.join(moves)}]; in the simulation {result}.")
    lines.append("Give the final list of moves on a last line that begins with ####, for example\n#### [U, R, D, L]")
    return "\n".join(lines)
