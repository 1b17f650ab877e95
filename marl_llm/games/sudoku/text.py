"""Sudoku 4x4 in text (Stronger-MAS, Appendix C.2): a Tool's Python program prints a grid or a list of fills as JSON; a Planner decides.

The prompts are the paper's, which prints one phase; later turns have the history behind them (a reading). Puzzles are those of the
device game: minimal, one solution, split by solved grid. An answer is the whole grid, `[[1,2,3,4], ...]`, or fills `[[r, c, v], ...]`
counted from 1.

A fill must go into a blank, and clues and earlier fills stay: an answer that would change one is illegal as a whole, and so is one after
which a digit stands twice in a row, column or box. Illegal answers change nothing. B.3's terms are read of the grid with all fills
written into it. *Solved* therefore includes that every clue is kept, which the printed check does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from marl_llm.games.hosted import map_tasks
from marl_llm.games.programs import Applied, PuzzleRules
from marl_llm.games.sudoku.game import Sudoku
from marl_llm.games.sudoku.puzzles import CELLS, GRIDS, PEERS, SIDE
from marl_llm.games.text_team import PROMPT_TOKENS, RESPONSE_TOKENS, Prompts, TextOptions, text_environment
from marl_llm.untrusted import Bounds, read_json
from marl_llm.workflows import Environment, FormatError, ScriptTurn, WorkflowError

Rows = tuple[str, ...]
Fills = tuple[tuple[int, int, int], ...]  # (row, column, digit), from 1
LONGEST = 4 * CELLS  # fills of a list
TASK = "Solve the 4x4 Sudoku. Fill digits 1..4; rows, columns, and sub-grids (2x2) must have unique digits. Keep the digits that are there."
TOOL = """You are an AI assistant designed to be helpful. Utilize your programming expertise to address the task. Propose Python code \
(within a single python code block) for the user to run. Ensure each response contains only ONE code block. Use the 'print' function to \
output EITHER:
(A) the completed grid as a JSON array of arrays, OR
(B) a JSON list of fill steps (r,c,v) using 1-based indices.
Formatting requirements:
* The program's output is the Sudoku solution.
* Print ONLY the JSON (no extra text, no comments).

Task: """
PLANNER = """You are a planning and reasoning agent. You will receive:
* The original task description
* The Tool Agent's code
* The code execution output (a JSON grid or JSON steps)
Your job is to reason carefully, decide the final Sudoku solution, and format your response EXACTLY as specified.
Instructions:
* Read the task, inspect the code, and verify the execution output against the Sudoku rules: rows, columns, and sub-grids must contain \
unique digits in 1..n.
* If the tool's output is a complete, valid solution, adopt it.
* If it is incomplete or violates constraints, correct it or provide your own.
* Keep reasoning concise but explicit: explain why the final result is valid.

FORMATTING IS MANDATORY. Give the final answer AFTER the line that begins with ####. You may return EITHER:
- a completed grid as JSON, OR
- a JSON list of fill steps (r,c,v), 1-based indices.
Example: #### [[1,3,4],[2,1,3]]

Task Description: """
SOLO = """

You are a planning and reasoning agent. Decide the fills of this turn. Keep reasoning concise but explicit.

FORMATTING IS MANDATORY. Give the final answer AFTER the line that begins with ####. You may return EITHER a completed grid as JSON, OR a \
JSON list of fill steps (r,c,v), 1-based indices. Example: #### [[1,3,4],[2,1,3]]"""
RESULTS = {
    "done": "all fills were made.", "solved": "the puzzle is solved.", "illegal": "the answer breaks a rule or a clue; nothing was filled.",
    "empty": "the list was empty.", "unread": "the answer could not be read.",
}  # fmt: skip
PROMPTS = Prompts(TOOL, TOOL, "", PLANNER, PLANNER, "", SOLO, "Proposed solution", RESULTS)


def read_fills(text: str) -> Fills:
    """Fills, or a grid as fills of all its cells, from JSON. Raises `FormatError` with a word of `programs.ANSWER_STATES`."""
    parsed = read_json(text.strip(), Bounds(size=65_536, depth=8))
    if not parsed.ok or not isinstance(parsed.value, list):
        raise FormatError("no_list")
    rows = parsed.value
    if any(not isinstance(row, list) for row in rows):
        raise FormatError("other_words")
    if any(type(item) is list for row in rows for item in row):
        raise FormatError("nested")
    if any(type(item) is not int or not 1 <= item <= SIDE for row in rows for item in row):
        raise FormatError("other_words")
    if len(rows) == SIDE and all(len(row) == SIDE for row in rows):
        return tuple((r, c, digit) for r, row in enumerate(rows, 1) for c, digit in enumerate(row, 1))
    if any(len(row) != 3 for row in rows):
        raise FormatError("other_words")
    if len(rows) > LONGEST:
        raise FormatError("too_long")
    return tuple(tuple(row) for row in rows)


def write_fills(fills: Fills) -> str:
    """`[[1,3,4],[2,1,3]]`."""
    return f"[{','.join(f'[{r},{c},{digit}]' for r, c, digit in fills)}]"


@functools.lru_cache(4096)
def solution(rows: Rows) -> Rows:
    """The only solved grid with these clues. Raises `WorkflowError` for a puzzle with none or several."""
    clues = np.asarray([".1234".index(sign) for sign in "".join(rows)])
    solutions = GRIDS[np.all((clues == 0) | (clues == GRIDS), axis=-1)]
    if len(solutions) != 1:
        raise WorkflowError(f"the puzzle {rows} has {len(solutions)} solutions; it needs exactly one")
    digits = "".join(map(str, solutions[0]))
    return tuple(digits[i : i + SIDE] for i in range(0, CELLS, SIDE))


def unsolved(rows: Rows, start: Rows) -> float:
    """The share of the puzzle's blanks that are not filled correctly; wrong fills, which stay for good, count twice."""
    signs, clues, right = "".join(rows), "".join(start), "".join(solution(tuple(start)))
    blanks = [i for i in range(CELLS) if clues[i] == "."]
    return sum((signs[i] == ".") + 2 * (signs[i] not in (".", right[i])) for i in blanks) / len(blanks)


def fill(rows: Rows, start: Rows, fills: Fills) -> Applied:
    """The puzzle's `apply`: all fills or, if one is illegal, none. Cells of a grid that hold the digit already are no fills."""
    grid = [list(row) for row in rows]
    new_fills = [(r, c, digit) for r, c, digit in fills if not (len(fills) == CELLS and rows[r - 1][c - 1] == str(digit))]
    into_blanks = len({(r, c) for r, c, _ in new_fills}) == len(new_fills)
    for r, c, digit in new_fills:
        into_blanks &= rows[r - 1][c - 1] == "."
        grid[r - 1][c - 1] = str(digit)
    signs = [sign for row in grid for sign in row]
    consistent = all(signs[a] != signs[b] or signs[a] == "." for a in range(CELLS) for b in range(a) if PEERS[a, b])
    legal = bool(new_fills) and into_blanks and consistent
    after = tuple("".join(row) for row in grid) if legal else tuple(rows)
    remaining = unsolved(after, start)
    filled = len({(r, c) for r, c, _ in new_fills if rows[r - 1][c - 1] == "."})
    status = "solved" if remaining == 0 else "done" if legal else "illegal" if new_fills else "empty"
    trace = tuple((f"({r},{c},{digit})", "filled") for r, c, digit in new_fills) if legal else ()
    terms = (consistent, into_blanks)
    return Applied(after, status, legal, remaining, float(remaining == 0), filled / CELLS, float(consistent), trace, terms)


def sudoku_text(
    turns: int = 4,
    agents: str = "team",
    rewards_form: str = "safe",
    last_line: bool = False,
    puzzles_seed: int = 0,
    noise: float = 0.0,
    max_prompt: int = PROMPT_TOKENS,
    max_tokens: int = RESPONSE_TOKENS,
) -> Environment:
    """Sudoku 4x4 in text, on the puzzles of the device game.

    Args:
      turns: T. agents: "team" (tool, planner) or "single" (solo).
      rewards_form: "safe", "paper" (B.3) or "outcome" (B.6); see `marl_llm.games.programs`.
      last_line: reads the last line of what the program printed; otherwise the whole must be the answer.

    Raises `ValueError` for a value out of its range.
    """
    puzzle = PuzzleRules("sudoku_text", fill, unsolved, read_fills, write_fills, _describe)
    options = TextOptions(agents, turns, rewards_form, last_line, noise, max_prompt, max_tokens)
    tasks = map_tasks(Sudoku(max_turns=turns), puzzles_seed, TASK, "puzzle")
    return text_environment(puzzle, PROMPTS, options, tasks, fill_player, unread=0.5)


def _describe(rows: Rows) -> str:
    return "\n".join(["Current puzzle (dots denote blanks):", *rows, "size: 4", "subgrid_size: 2"])


def fill_player(noise: float = 0.0) -> Callable[[ScriptTurn], str]:
    """Plays all roles with the solution; with probability `noise` an answer is one random fill of a blank."""

    def play(turn: ScriptTurn) -> str:
        rng, rows = turn.random, tuple(turn.fields["state"])
        right = solution(tuple(turn.fields["instance"]))
        blanks = [(r, c) for r in range(SIDE) for c in range(SIDE) if rows[r][c] == "."]
        fills = tuple((r + 1, c + 1, int(right[r][c])) for r, c in blanks)
        if blanks and rng.random() < noise:
            r, c = rng.choice(blanks)
            fills = ((r + 1, c + 1, rng.randint(1, SIDE)),)
        return f"```python\nprint({write_fills(fills)!r})\n```" if turn.role.name == "tool" else f"#### {write_fills(fills)}"

    return play
