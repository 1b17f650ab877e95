"""Plan-Path for tiny models: the Tool's words are lines of Python, so that a program of ten words is really run and really searches.

The program reads the map from standard input, in a *dialect* that its prompt states and that the program has to match: the sign of a wall,
whether U lowers or raises the row's number, whose cell is given first, and from which number cells are counted.

    prompt    wall:x up:+ goal:first from:1 t0 none tool
    tool      read goal_first from_1 up_plus wall_x frontier loop pop_first found expand_free ;
    planner   D3 R2 | R R D done planner      ─▶      = ;          adopts the proposal; or   R R D ;

A dialect's combination belongs to one split, and so does a map: test tasks are new in both. The Planner sees where the goal lies, the
proposal and what its simulation came to, but no wall; the Tool sees no map at all, only its program does.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.games.hosted import HostGame, rows_of_task
from marl_llm.games.kit.grids import STEPS, offset_name
from marl_llm.games.kit.miniature import word_renderer
from marl_llm.games.plan_path.game import PlanPath
from marl_llm.games.plan_path.grid import grid_of, left, shortest, walker
from marl_llm.games.programs import ANSWER_STATES, Applied, PuzzleRules, program_team, read_moves, write_moves
from marl_llm.games.protocol import SPLITS
from marl_llm.hints import check_word
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.workflows import Environment, FormatError, Role, ScriptTurn, Task, Trajectory, WorkflowError
from marl_llm.workflows.splits import Tasks, drawn_tasks

State = dict[str, Any]  # "rows" of the map, and the "dialect", a word for each of `DIALECT`

DIALECT = {  # what the prompt states -> the line of a program that matches it
    "wall": {"wall:#": "wall_#", "wall:x": "wall_x", "wall:o": "wall_o"},
    "up": {"up:-": "up_minus", "up:+": "up_plus"},
    "first": {"agent:first": "agent_first", "goal:first": "goal_first"},
    "from": {"from:0": "from_0", "from:1": "from_1"},
}
ASPECTS = tuple(DIALECT)
LINES = {
    "read": "import sys\nnumbers, *rows = sys.stdin.read().split('\\n')\na, b, c, d = map(int, numbers.split())",
    "agent_first": "start, goal = (a, b), (c, d)",
    "goal_first": "goal, start = (a, b), (c, d)",
    "from_0": "base = 0",
    "from_1": "base = 1",
    "up_minus": "moves = {'U': (-1, 0), 'D': (1, 0), 'L': (0, -1), 'R': (0, 1)}",
    "up_plus": "moves = {'U': (1, 0), 'D': (-1, 0), 'L': (0, -1), 'R': (0, 1)}",
    "wall_#": "wall = '#'",
    "wall_x": "wall = 'x'",
    "wall_o": "wall = 'o'",
    "walk": (
        "far = lambda cell: abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])\npath = ''\nwhile far(start) and len(path) < 99:\n"
        "    near = {name: (start[0] + r, start[1] + c) for name, (r, c) in moves.items()}\n"
        "    path += min(near, key=lambda name: far(near[name]))\n    start = near[path[-1]]\nprint(list(path))"
    ),
    "frontier": "todo, seen = [(start, '')], {start}",
    "loop": "while todo:",
    "pop_first": "    cell, path = todo.pop(0)",
    "pop_last": "    cell, path = todo.pop()",
    "found": "    if cell == goal:\n        print(list(path))\n        break",
    "expand_free": (
        "    for name, (r, c) in moves.items():\n        near = (cell[0] + r, cell[1] + c)\n        y, x = near[0] - base, near[1] - base\n"
        "        if near not in seen and 0 <= y < len(rows) and 0 <= x < len(rows[0]) and rows[y][x] != wall:\n"
        "            seen.add(near)\n            todo.append((near, path + name))"
    ),
    "expand_inside": (
        "    for name, (r, c) in moves.items():\n        near = (cell[0] + r, cell[1] + c)\n        y, x = near[0] - base, near[1] - base\n"
        "        if near not in seen and 0 <= y < len(rows) and 0 <= x < len(rows[0]):\n"
        "            seen.add(near)\n            todo.append((near, path + name))"
    ),
}
SEARCH = ("read", "agent_first", "from_0", "up_minus", "wall_#", "frontier", "loop", "pop_first", "found", "expand_free")
PROGRAM_WORDS, STOP, ADOPT, BAR = 12, ";", "=", "|"
FARTHEST = 9  # offsets beyond are told as this
STATUS = ("none", *ANSWER_STATES)


def combinations(split: str) -> list[tuple[str, ...]]:
    """The dialects of a split. Each word of a dialect stands in some training dialect, no combination in two splits."""
    dialects = list(itertools.product(*(tuple(words) for words in DIALECT.values())))
    places = {"validation": (5, 10, 15), "test": (2, 7, 12, 17, 19, 22)}
    if split == "train":
        held_out = sum(places.values(), ())
        return [words for place, words in enumerate(dialects) if place not in held_out]
    return [dialects[place] for place in places[split]]


# --- words -------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def program_tokenizer() -> PieceTokenizer:
    """One token per word: dialects, lines of programs, offsets, moves, walls."""
    words = [STOP, ADOPT, BAR, *"UDLR", *STATUS, "tool", "planner", "solo", *(f"t{n}" for n in range(32)), *LINES]
    words += [word for known in DIALECT.values() for word in known]
    words += [f"{sign}{n}" for sign in "UDLR" for n in range(1, FARTHEST + 1)] + ["here", "level"]
    reach = range(-FARTHEST, FARTHEST + 1)
    return train_pieces((*words, *(f"#{offset_name(r, c)}" for r in reach for c in reach if r or c)))


def offset_words(state: State) -> str:
    """Where the goal lies, as two words: `D3 R2`."""
    grid = grid_of(tuple(state["rows"]))
    down, right = (g - a for g, a in zip(grid.goal, grid.agent))
    vertical = f"{'U' if down < 0 else 'D'}{min(abs(down), FARTHEST)}" if down else "here"
    return f"{vertical} " + (f"{'L' if right < 0 else 'R'}{min(abs(right), FARTHEST)}" if right else "level")


def wall_words(state: State) -> str:
    """Where the goal and the walls lie, nearest first: what the single agent sees."""
    grid = grid_of(tuple(state["rows"]))
    cells = [(r - grid.agent[0], c - grid.agent[1]) for r, row in enumerate(state["rows"]) for c, sign in enumerate(row) if sign == "#"]
    near = sorted((abs(r) + abs(c), r, c) for r, c in cells if max(abs(r), abs(c)) <= FARTHEST)
    return " ".join([offset_words(state), *(f"#{offset_name(r, c)}" for _, r, c in near)])


def given(state: State) -> str:
    """What the program reads: two cells, then the rows, in the state's dialect."""
    wall, up, first, base = state["dialect"]
    grid, rows = grid_of(tuple(state["rows"])), list(state["rows"])
    turned = up == "up:+"
    cells = []
    for r, c in (grid.agent, grid.goal) if first == "agent:first" else (grid.goal, grid.agent):
        cells += [(len(rows) - 1 - r if turned else r) + int(base[-1]), c + int(base[-1])]
    shown = ["".join(wall[-1] if sign == "#" else "." for sign in row) for row in (rows[::-1] if turned else rows)]
    return "\n".join([" ".join(map(str, cells)), *shown])


def program_of(words: tuple[str, ...]) -> str:
    """The Python of a program's words."""
    return "\n".join(LINES[word] for word in words) + "\n"


def read_program(text: str) -> dict[str, Any]:
    """The Tool's parser. Raises `FormatError` for a word that is no line, no line, or too many of them."""
    words = tuple(text.split())
    if unknown := [word for word in words if word not in LINES]:
        raise FormatError(f"{unknown[0]!r} is no line of a program")
    if not 1 <= len(words) <= PROGRAM_WORDS:
        raise FormatError(f"{len(words)} lines; 1 to {PROGRAM_WORDS} are expected")
    return {"code": program_of(words)}


def read_answer(max_moves: int, adopt: bool) -> Callable[[str], dict[str, Any]]:
    """The Planner's parser: moves, or `=`. Moves as letters, `=` as itself, because the proposal is not known here."""

    def parse(text: str) -> dict[str, Any]:
        words = text.split()
        if adopt and words == [ADOPT]:
            return {"steps": ADOPT, "remark": ""}
        if any(word not in STEPS for word in words) or len(words) > max_moves:
            raise FormatError("neither moves nor =")
        return {"steps": "".join(words), "remark": ""}

    return parse


# --- the environment ----------------------------------------------------------------------------------------------------------------------


def line_roles(puzzle_moves: int, walls: int, agents: str, adopt: bool) -> tuple[Role, ...]:
    """Tool and Planner, or the single agent, with one word per fact."""
    number = {"turn_number": lambda n: f"t{n}"}
    parse = read_answer(puzzle_moves, adopt and agents == "team")
    answer = dict(parse=parse, writes={"steps": None, "remark": ""}, max_tokens=puzzle_moves + 1)
    if agents == "single":
        show = {**number, "view": wall_words}
        return (Role("solo", "{turn_number} {status} {view} solo", show=show, max_prompt=walls + 5, **answer),)
    word = {"tool_status": lambda status: status or "none"}
    dialect = {**number, **word, "view": lambda state: " ".join(state["dialect"])}
    tool_prompt, longest = "{view} {turn_number} {tool_status} tool", PROGRAM_WORDS + 1
    tool = Role("tool", tool_prompt, read_program, {"code": ""}, show=dialect, max_prompt=8, max_tokens=longest)
    shown = {**number, **word, "view": offset_words, "proposal": lambda text: " ".join(read_moves(text, puzzle_moves)) if text else ""}
    prompt = "{turn_number} {view} | {proposal} {tool_status} planner"
    return tool, Role("planner", prompt, show=shown, max_prompt=puzzle_moves + 6, **answer)


def plan_path_programs(
    height: int = 6,
    width: int = 6,
    wall_density: float = 0.28,
    min_distance: int = 6,
    max_distance: int = 24,
    max_moves: int = 8,
    turns: int = 4,
    agents: str = "team",
    rewards_form: str = "safe",
    adopt: bool = True,
    maps_seed: int = 0,
    wrong: float = 0.35,
    walks: float = 0.6,
    drops: float = 0.1,
    copies: float = 0.5,
) -> Environment:
    """Plan-Path with programs of ten words.

    Args:
      max_moves: of a list; the Tool's proposal is cut to it, so that the Planner can repeat it.
      turns: T. agents: "team" (tool, planner) or "single" (solo, who sees the walls and moves by hand).
      rewards_form: see `marl_llm.games.programs`.
      adopt: whether the Planner may answer `=`; the paper's writes the list again.
      wrong, walks, drops, copies: habits of the scripted player, see `line_player`.

    Raises `ValueError` for a value out of its range.
    """
    check_word("plan_path_programs.agents", agents, ("team", "single"), WorkflowError)
    game = PlanPath(height, width, wall_density, min_distance, min(max_distance, height * width), max_moves=max_moves, max_turns=turns)
    moves = walker()

    def apply(state: State, start: State, letters: str) -> Applied:
        done = moves(state["rows"], start["rows"], letters)
        return dataclasses.replace(done, state={**state, "rows": done.state})

    def read(text: str) -> str:
        return read_moves(text, 4 * height * width)

    def remaining(state: State, start: State) -> float:
        return left(state["rows"])

    puzzle = PuzzleRules("plan_path_programs", apply, remaining, read, write_moves, lambda state: state, given)
    roles = line_roles(max_moves, game.wall_cap, agents, adopt)
    options = dict(turns=turns, rewards_form=rewards_form, fit=lambda letters: letters[:max_moves], adopted=ADOPT)
    workflow = program_team(puzzle, roles, **options)
    if agents == "team":
        workflow = dataclasses.replace(workflow, metrics={**workflow.metrics, **program_metrics()})
    script, chance = line_player(max_moves, wrong, walks, drops, copies), line_player(max_moves, 1.0, 0.5, 0.5, 0.0)
    return Environment(workflow, dialect_tasks(game, maps_seed), "solved", word_renderer(program_tokenizer(), STOP), script, chance)


def dialect_tasks(game: PlanPath, seed: int) -> Tasks:
    """Tasks: the device game's maps, each in a dialect of its split (law 12, twice)."""
    import jax

    host = HostGame(game, jax.random.key(seed))

    def task(split: str, number: int) -> Task:
        dialects = combinations(split)
        instance = {"rows": rows_of_task(host, split, number, "map"), "dialect": dialects[number % len(dialects)]}
        return Task(number, {"task": "plan", "instance": instance}, split=split)

    return drawn_tasks(task, SPLITS)


def program_metrics() -> Mapping[str, Callable[[Trajectory], float]]:
    """How often the Tool writes a search that looks at walls, and how often each aspect of the dialect is matched."""

    def share(path: Trajectory, right: Callable[[set[str], State], bool]) -> float:
        programs = [set(call.text.split()) for call in path.by("tool")]
        return sum(right(words, path.fields["instance"]) for words in programs) / max(1, len(programs))

    def searches(words, _):
        return {"frontier", "loop", "found", "expand_free"} <= words

    metrics = {"program_is_search": lambda path: share(path, searches)}
    for place, aspect in enumerate(ASPECTS):
        def matches(words: set[str], state: State, place: int = place, aspect: str = aspect) -> bool:
            return DIALECT[aspect][state["dialect"][place]] in words

        metrics[f"dialect_{aspect}"] = lambda path, matches=matches: share(path, matches)
    return metrics


def line_player(max_moves: int, wrong: float, walks: float, drops: float, copies: float) -> Callable[[ScriptTurn], str]:
    """A player that knows the words and errs: the supervised warm-up's teacher.

    Its programs match each word of the dialect but with probability `wrong`; with probability `walks` they walk straight, otherwise they
    search, with a queue or a stack and a test for walls or none, half of the time each; with probability `drops` a line is missing. Its
    Planner adopts or repeats the proposal with probability `copies` and otherwise walks straight towards the goal.
    """

    def play(turn: ScriptTurn) -> str:
        rng, state = turn.random, turn.fields["state"]
        if turn.role.name == "tool":
            words = ["read"]
            matched = {}
            for aspect, stated in zip(ASPECTS, state["dialect"]):
                known = DIALECT[aspect]
                matched[aspect] = rng.choice([w for w in known.values() if w != known[stated]]) if rng.random() < wrong else known[stated]
            words += [matched["first"], matched["from"], matched["up"]]
            if rng.random() < walks:
                words.append("walk")
            else:
                words += [matched["wall"], "frontier", "loop", rng.choice(("pop_first", "pop_last")), "found"]
                words.append(rng.choice(("expand_free", "expand_inside")))
            if rng.random() < drops:
                words.pop(rng.randrange(len(words)))
            return " ".join(words)
        if turn.role.name == "planner" and turn.fields["proposal"] and rng.random() < copies:
            return ADOPT if rng.random() < 0.5 else " ".join(read_moves(turn.fields["proposal"], max_moves))
        if turn.role.name == "solo" and rng.random() < copies:
            return " ".join(shortest(tuple(state["rows"]))[:max_moves])
        return " ".join(straight(state, rng)[:max_moves])

    return play


def straight(state: State, rng: Any) -> str:
    """Moves towards the goal that ignore walls, in random order."""
    grid = grid_of(tuple(state["rows"]))
    down, right = (g - a for g, a in zip(grid.goal, grid.agent))
    letters = list(("U" if down < 0 else "D") * abs(down) + ("L" if right < 0 else "R") * abs(right))
    rng.shuffle(letters)
    return "".join(letters)
