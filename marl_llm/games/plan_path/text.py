"""Plan-Path in text (Stronger-MAS, Appendix D): a Tool writes a Python program whose output is a list of moves; a Planner decides.

The program is really run, in the sandbox. The prompts are the paper's (`text_team`). `env_context` is the grid of this turn with A for the
agent, the start, the goal, the obstacles as (row, column) from (0, 0), and the bounds (a reading).

    with make_game("plan_path_text") as environment: ...         # 10x10; models are chat models
"""

from __future__ import annotations

from collections.abc import Callable

from marl_llm.games.hosted import map_tasks
from marl_llm.games.plan_path.game import PlanPath
from marl_llm.games.plan_path.grid import Rows, grid_of, left, shortest, walker
from marl_llm.games.programs import PuzzleRules, read_moves, write_moves
from marl_llm.games.text_team import ACTIONS, PROMPT_TOKENS, RESPONSE_TOKENS, TextOptions, text_environment
from marl_llm.hints import check_word
from marl_llm.workflows import Environment, ScriptTurn, WorkflowError

MAP_IN = ("prompt", "stdin")
TASK = (
    "Find a path for the agent on a grid of {height} rows and {width} columns, from the start to the goal. A move goes one cell: U up "
    "(row - 1), D down (row + 1), L left (column - 1), R right (column + 1). Cells with # are walls. At a wall or the border of the grid a "
    "list of moves stops. There are {turns} turns; each goes on from where the last one ended."
)
STDIN_TASK = " The program can read the grid from standard input: its rows, one per line, with A (agent), G (goal) and # (walls)."

RESULTS = {
    "done": "all moves were made.", "solved": "the goal was reached.", "illegal": "a wall or the border stopped the list.",
    "empty": "the list was empty.", "unread": "the action list could not be read.",
}  # fmt: skip
PROMPTS = ACTIONS._replace(results=RESULTS)


def describe(rows: Rows) -> str:
    """`env_context`: the grid of this turn."""
    grid = grid_of(tuple(rows))
    walls = [(r, c) for r, row in enumerate(rows) for c, sign in enumerate(row) if sign == "#"]
    lines = ["grid (A agent, G goal, # wall, . free):", *rows, f"start: {grid.agent}", f"goal: {grid.goal}"]
    lines += [f"obstacles: {walls}", f"constraints: 0 <= row < {len(rows)}, 0 <= column < {len(rows[0])}; obstacles cannot be entered"]
    return "\n".join(lines)


def plan_path_text(
    height: int = 10,
    width: int = 10,
    wall_density: float = 0.22,
    min_distance: int = 6,
    max_distance: int = 60,
    turns: int = 4,
    agents: str = "team",
    rewards_form: str = "safe",
    distance: str = "bfs",
    map_in: str = "prompt",
    last_line: bool = False,
    maps_seed: int = 0,
    noise: float = 0.0,
    max_prompt: int = PROMPT_TOKENS,
    max_tokens: int = RESPONSE_TOKENS,
) -> Environment:
    """Plan-Path in text, on the maps of the device game of the same sizes.

    Args:
      wall_density: 0.22 as released; the paper states none.
      turns: T. agents: "team" (tool, planner) or "single" (solo).
      rewards_form: "safe", "paper" (B.4) or "outcome" (B.6); see `marl_llm.games.programs`.
      distance: what rewards measure, "bfs", or "manhattan" as B.4 prints.
      map_in: "prompt", as printed; "stdin" also gives the rows to the program.
      last_line: reads the last line of what the program printed; otherwise the whole must be the list.

    Raises `ValueError` for a value out of its range.
    """
    check_word("plan_path_text.distance", distance, ("bfs", "manhattan"), WorkflowError)
    check_word("plan_path_text.map_in", map_in, MAP_IN, WorkflowError)
    if agents == "single" and (map_in != "prompt" or last_line):
        raise WorkflowError("plan_path_text: map_in and last_line have no effect with agents='single', which runs no program")
    game = PlanPath(height, width, wall_density, min_distance, min(max_distance, height * width), max_turns=turns)
    at_most = 4 * height * width
    puzzle = PuzzleRules(
        "plan_path_text",
        walker(distance),
        lambda rows, start: left(rows, distance),
        lambda text: read_moves(text, at_most),
        write_moves,
        describe,
        (lambda rows: "\n".join(rows) + "\n") if map_in == "stdin" else lambda rows: "",
    )
    words = TASK.format(height=height, width=width, turns=turns) + (STDIN_TASK if map_in == "stdin" else "")
    options = TextOptions(agents, turns, rewards_form, last_line, noise, max_prompt, max_tokens)
    return text_environment(puzzle, PROMPTS, options, map_tasks(game, maps_seed, words, "map"), text_player)


# --- a player that knows how -------------------------------------------------------------------------------------------------------------

SEARCH = """from collections import deque

rows = {rows}
find = lambda signs: next((r, c) for r, row in enumerate(rows) for c, sign in enumerate(row) if sign in signs)
start, goal = find("A*"), find("G*")
steps = {{"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}}
paths, queue = {{start: []}}, deque([start])
while queue:
    r, c = queue.popleft()
    for name, (dr, dc) in steps.items():
        cell = (r + dr, c + dc)
        if 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0]) and rows[cell[0]][cell[1]] != "#" and cell not in paths:
            paths[cell] = [*paths[(r, c)], name]
            queue.append(cell)
print("[" + ",".join(paths.get(goal, [])) + "]")
"""


def text_player(noise: float = 0.0) -> Callable[[ScriptTurn], str]:
    """Plays all roles: the Tool writes a search, the Planner adopts the proposal. With probability `noise` an answer is one random move."""

    def play(turn: ScriptTurn) -> str:
        rng, rows = turn.random, turn.fields["state"]
        wild = rng.random() < noise
        if turn.role.name == "tool":
            code = f"print('[{rng.choice('UDLR')}]')\n" if wild else SEARCH.format(rows=list(rows))
            return f"```python\n{code}```"
        if wild or (turn.role.name == "planner" and not turn.fields["proposal"]):
            return f"I try one move.\n#### [{rng.choice('UDLR')}]"
        return f"#### {turn.fields['proposal'] if turn.role.name == 'planner' else write_moves(shortest(rows))}"

    return play
