"""Sokoban in text: a Tool writes a Python program whose output is a list of moves, or the way of the box; a Planner moves the robot.

The paper prints no prompt for Sokoban. These are Plan-Path's (`games.text_team`) around a task of its own (a reading). Rooms are those of
the device game, with its splits. B.5 is read as there: format and legality hold for the whole list, deadlocks and ψ for the state at its
end. `tool_answer="box_path"` is the split of labour of the case study (Appendix H.1): the Tool's list is the way of the one box, which is
checked as such, and the Planner has to find the robot's moves.

    state     ("######", "#A...#", "#.B..#", "#..G.#", "#....#", "######")        # `*` a box on a goal, `+` the robot on one
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

from marl_llm.games.hosted import map_tasks
from marl_llm.games.kit.grids import STEPS
from marl_llm.games.programs import Applied, PuzzleRules, read_moves, status_of, write_moves
from marl_llm.games.sokoban.game import DISCOUNT, Sokoban
from marl_llm.games.text_team import ACTIONS, PROMPT_TOKENS, RESPONSE_TOKENS, TextOptions, text_environment
from marl_llm.hints import check_word
from marl_llm.workflows import Environment, ScriptTurn, WorkflowError

Rows = tuple[str, ...]
Cell = tuple[int, int]
AT_MOST = 200  # moves of a list
TASK = (
    "Push {boxes} in a room of {height} rows and {width} columns onto {goals}. The robot (A) moves one cell: U up (row - 1), D down "
    "(row + 1), L left (column - 1), R right (column + 1). Moving into a box (B) pushes it one cell further, if the cell behind it is free."
    " A robot on a goal is +, a box on a goal is *. A list of moves stops at a wall, or where a box cannot be pushed. There are {turns} "
    "turns; each goes on from where the last one ended."
)
BOX_PATH = " The Tool Agent's list is the path of the BOX, not of the robot; the Planner's list is the robot's moves."
RESULTS = {
    "done": "all moves were made.", "solved": "all boxes are on goals.", "empty": "the list was empty.",
    "illegal": "a wall, or a box that cannot be pushed, stopped the list.", "unread": "the action list could not be read.",
}  # fmt: skip


class RoomState(NamedTuple):
    """A state read: the robot, the boxes, the goals and the walls."""

    robot: Cell
    boxes: frozenset[Cell]
    goals: frozenset[Cell]
    walls: frozenset[Cell]


@functools.lru_cache(8192)
def room_of(rows: Rows) -> RoomState:
    """A state's parts."""
    cells = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}

    def of(signs):
        return frozenset(cell for cell, sign in cells.items() if sign in signs)

    return RoomState(next(iter(of("A+"))), of("B*"), of("G*+"), of("#"))


def drawn(rows: Rows, robot: Cell, boxes: frozenset[Cell]) -> Rows:
    """The state with robot and boxes elsewhere."""
    room = room_of(rows)

    def sign(cell: Cell) -> str:
        if cell in room.walls:
            return "#"
        free, on_goal = ("A", "+") if cell == robot else ("B", "*") if cell in boxes else (".", "G")
        return on_goal if cell in room.goals else free

    return tuple("".join(sign((r, c)) for c in range(len(row))) for r, row in enumerate(rows))


def moved(room: RoomState, robot: Cell, boxes: frozenset[Cell], letter: str) -> tuple[Cell, frozenset[Cell]] | None:
    """Robot and boxes after a move; None if it is illegal."""
    dr, dc = STEPS[letter]
    to, beyond = (robot[0] + dr, robot[1] + dc), (robot[0] + 2 * dr, robot[1] + 2 * dc)
    if to in room.walls or (to in boxes and (beyond in room.walls or beyond in boxes)):
        return None
    return to, (boxes - {to}) | {beyond} if to in boxes else boxes


@functools.lru_cache(8192)
def solution(rows: Rows) -> str | None:
    """The moves of a shortest solution; None where there is none."""
    room = room_of(rows)
    first = (room.robot, room.boxes)
    paths, frontier = {first: ""}, collections.deque([first])
    while frontier:
        state = frontier.popleft()
        if state[1] <= room.goals:
            return paths[state]
        for letter in STEPS:
            after = moved(room, *state, letter)
            if after is not None and after not in paths:
                paths[after] = paths[state] + letter
                frontier.append(after)
    return None


def left(rows: Rows) -> float:
    """1 − DISCOUNT^e for the e moves of a shortest solution: 0 of a solved room, 1 of one that cannot be solved any more."""
    moves = solution(tuple(rows))
    return 1.0 if moves is None else 1.0 - DISCOUNT ** len(moves)


def potential(room: RoomState, boxes: frozenset[Cell]) -> int:
    """B.5's ψ."""
    return -sum(min(abs(r - y) + abs(c - x) for y, x in room.goals) for r, c in boxes)


def cornered(room: RoomState, box: Cell) -> bool:
    """Whether a box off the goals stands in a static corner."""
    wall = {letter: (box[0] + dr, box[1] + dc) in room.walls for letter, (dr, dc) in STEPS.items()}
    return box not in room.goals and (wall["U"] or wall["D"]) and (wall["L"] or wall["R"])


def push(rows: Rows, start: Rows, letters: str) -> Applied:
    """The puzzle's `apply`: makes moves until the list ends, one is illegal, or all boxes are on goals."""
    room = room_of(tuple(rows))
    robot, boxes, hit, trace = room.robot, room.boxes, False, []
    for letter in letters:
        if boxes <= room.goals:
            break
        after = moved(room, robot, boxes, letter)
        if after is None:
            hit = True
            trace.append((letter, f"stopped at {robot} by a wall or a box"))
            break
        robot, boxes = after
        trace.append((letter, f"robot {robot}, boxes {sorted(boxes)}"))
    return _applied(tuple(rows), room, robot, boxes, hit, letters, tuple(trace))


def carry(rows: Rows, start: Rows, letters: str) -> Applied:
    """`apply` of a list that is the path of the only box: each step needs a free cell, and a free cell behind the box for the robot."""
    room = room_of(tuple(rows))
    robot, hit, trace = room.robot, False, []
    (box,) = room.boxes
    for letter in letters:
        if box in room.goals:
            break
        dr, dc = STEPS[letter]
        to, behind = (box[0] + dr, box[1] + dc), (box[0] - dr, box[1] - dc)
        if to in room.walls or behind in room.walls:
            hit = True
            trace.append((letter, f"the box cannot be pushed from {box}"))
            break
        robot, box = box, to
        trace.append((letter, f"box {box}"))
    return _applied(tuple(rows), room, robot, frozenset([box]), hit, letters, tuple(trace))


def _applied(rows: Rows, room: RoomState, robot: Cell, boxes: frozenset[Cell], hit: bool, letters: str, trace: tuple) -> Applied:
    solved = boxes <= room.goals
    after = drawn(rows, robot, boxes)
    return Applied(
        after,
        status_of(solved, hit, letters),
        legal=bool(letters) and not hit,
        left=left(after),
        team=1.0 if solved else len(boxes & room.goals) / len(boxes),
        executes=float(not any(cornered(room, box) for box in boxes)),
        proposes=float(potential(room, boxes) >= potential(room, room.boxes)),
        trace=trace,
    )


def describe(rows: Rows) -> str:
    """What roles read of a room."""
    room = room_of(tuple(rows))
    lines = ["room (A robot, B box, G goal, # wall, . free, * box on goal, + robot on goal):", *rows, f"robot: {room.robot}"]
    return "\n".join([*lines, f"boxes: {sorted(room.boxes)}", f"goals: {sorted(room.goals)}"])


def sokoban_text(
    height: int = 6,
    width: int = 6,
    boxes: int = 1,
    turns: int = 4,
    agents: str = "team",
    rewards_form: str = "safe",
    tool_answer: str = "moves",
    last_line: bool = False,
    rooms_seed: int = 0,
    noise: float = 0.0,
    max_prompt: int = PROMPT_TOKENS,
    max_tokens: int = RESPONSE_TOKENS,
) -> Environment:
    """Sokoban in text, on the rooms of the device game of the same sizes.

    Args:
      turns: T. agents: "team" (tool, planner) or "single" (solo).
      rewards_form: "safe", "paper" (B.5) or "outcome" (B.6); see `marl_llm.games.programs`.
      tool_answer: "moves" of the robot, or "box_path", the path of the one box (Appendix H.1).
      last_line: reads the last line of what the program printed; otherwise the whole must be the list.

    Raises `ValueError` for a value out of its range.
    """
    check_word("sokoban_text.tool_answer", tool_answer, ("moves", "box_path"), WorkflowError)
    by_box = tool_answer == "box_path"
    if by_box and (boxes != 1 or agents == "single"):
        raise WorkflowError("sokoban_text.tool_answer='box_path' is for a team and one box: with several it would not say which one moves")
    game = Sokoban(height, width, boxes, max_turns=turns)
    read = functools.partial(read_moves, at_most=AT_MOST)
    puzzle = PuzzleRules("sokoban_text", push, lambda rows, start: left(rows), read, write_moves, describe)
    boxes_and_goals = ("the box", "the goal") if boxes == 1 else ("all boxes", "the goals")
    words = TASK.format(height=height, width=width, turns=turns, boxes=boxes_and_goals[0], goals=boxes_and_goals[1])
    prompts = ACTIONS._replace(results=RESULTS, proposal="Proposed path of the box" if by_box else ACTIONS.proposal)
    options = TextOptions(agents, turns, rewards_form, last_line, noise, max_prompt, max_tokens)
    tasks = map_tasks(game, rooms_seed, words + (BOX_PATH if by_box else ""), "room")
    player = functools.partial(room_player, by_box)
    return text_environment(puzzle, prompts, options, tasks, player, propose=carry if by_box else None, unread=0.5)


def room_player(by_box: bool, noise: float = 0.0) -> Callable[[ScriptTurn], str]:
    """Plays all roles with the solver's moves; with probability `noise` an answer is one random move."""

    def play(turn: ScriptTurn) -> str:
        rng, rows = turn.random, tuple(turn.fields["state"])
        moves = solution(rows) or ""
        letters = rng.choice("UDLR") if rng.random() < noise or not moves else moves
        if turn.role.name != "tool":
            return f"#### {write_moves(letters)}"
        if by_box:
            room, pushes, robot, boxes = room_of(rows), "", room_of(rows).robot, room_of(rows).boxes
            for letter in moves:
                robot, after = moved(room, robot, boxes, letter)
                pushes, boxes = pushes + (letter if after != boxes else ""), after
            letters = pushes or letters
        return f"```python\nprint({write_moves(letters)!r})\n```"

    return play
