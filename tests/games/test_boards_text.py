"""Sokoban and Sudoku in text: the device games' rules in Python, programs that are run, pay that cannot be gamed."""

import functools
import importlib
import itertools
import pathlib
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from test_plan_path_text import golden, program  # noqa: E402

from marl_llm.games import make_game  # noqa: E402
from marl_llm.games.sokoban import rooms  # noqa: E402
from marl_llm.games.sokoban.text import carry, push, sokoban_text, solution  # noqa: E402
from marl_llm.games.sudoku.puzzles import (  # noqa: E402
    GRIDS,
    SPLIT_OF,
    puzzle_from_rows,
)
from marl_llm.games.sudoku.text import fill, read_fills, unsolved, write_fills  # noqa: E402
from marl_llm.games.sudoku.text import solution as solved_grid  # noqa: E402
from marl_llm.planning.plans import plan as plan_of  # noqa: E402
from marl_llm.runs import base  # noqa: E402
from marl_llm.runs.resolve import resolve  # noqa: E402
from marl_llm.workflows import Assignment, Controller, FormatError, RoleCall, Scripted, Task, WorkflowError  # noqa: E402

ROOM = ("######", "#A...#", "#.B..#", "#..G.#", "#....#", "######")  # U: the box goes right and down
PUZZLE = ("1...", "..2.", ".3..", "...4")


@functools.cache
def environment(name, **options):
    return make_game(name, **options)


def play(name, tool, planner, start, **options):
    made = environment(name, **options)
    words = {"tool": tool, "planner": planner, "solo": planner}

    def say(turn):
        return words[turn.role.name](turn) if callable(words[turn.role.name]) else words[turn.role.name]

    roles = Assignment(dict.fromkeys(made.workflow.roles, "s"), {"s": Scripted(say)})
    with Controller(made.workflow, roles, None, {}) as controller:
        return controller.play([Task(0, {"task": "do it", "instance": start})]).episodes[0]


def earned(episode, role):
    (path,) = episode.trajectories
    return sum(path.earned[call.id].team + path.earned[call.id].local for call in path.by(role))


# --- Sokoban -----------------------------------------------------------------------------------------------------------------------------


def test_sokobans_moves_and_solutions_are_the_devices():
    room, size = rooms.room_from_rows(list(ROOM)), rooms.Size(4, 4, 1)
    step = jax.jit(lambda place, move: rooms.step(size, room.walls, place, move))
    dice = random.Random(0)
    for _ in range(60):
        letters = "".join(dice.choice("UDLR") for _ in range(8))
        place, done = room.place, ""
        for letter in letters:
            if int(room.distance[int(place)]) == 0:
                break
            after, legal = step(place, jnp.int32("UDLR".index(letter)))
            if not legal:
                break
            place, done = after, done + letter
        applied = push(ROOM, ROOM, letters)
        assert list(applied.state) == rooms.rows_of(size, room.walls, room.goals, place)
        length = int(room.distance[int(place)])
        assert applied.left == pytest.approx(1.0 if length >= rooms.FAR else 1 - 0.9**length)
        assert (applied.status == "solved") == (length == 0)
    assert len(solution(ROOM)) == int(room.distance[int(room.place)])


def test_sokobans_team_solves_and_its_reward_is_b_5():
    best = solution(ROOM)
    listed = f"[{', '.join(best)}]"
    honest = play("sokoban_text", program(listed), f"#### {listed}", ROOM)
    assert (honest.trajectories[0].fields["status"], honest.trajectories[0].turns) == ("solved", 1)
    assert [earned(honest, role) for role in ("tool", "planner")] == pytest.approx([1.8, 1.8])
    for tool, planner in ((program("[]"), "#### []"), (program("[R, L]"), "#### [R, L]"), ("", ""), (program("[U]"), "#### [U]")):
        wasted = play("sokoban_text", tool, planner, ROOM)
        assert max(earned(wasted, role) for role in ("tool", "planner")) <= 1e-9
    # vacuous truth, as printed: walking about pays 1.0 in every turn, without a push
    walking = play("sokoban_text", program("[R, L]"), "#### [R, L]", ROOM, rewards_form="paper")
    assert [earned(walking, role) for role in ("tool", "planner")] == pytest.approx([4.0, 4.0])
    # a box in a corner is dead: it costs all that was left, and B.5's deadlock term
    assert push(ROOM, ROOM, "").status == "empty"
    cornered = push(("####", "#A.#", "#B.#", "#..#", "#.G#", "####"), (), "DD")
    assert (cornered.executes, cornered.left) == (0.0, 1.0)


def test_the_tool_may_say_the_way_of_the_box():
    way = carry(ROOM, ROOM, "RD")
    assert (way.status, way.legal) == ("solved", True)
    assert carry(ROOM, ROOM, "LL").status == "illegal"  # into the border
    episode = play("sokoban_text", program("[R, D]"), "#### [R, D]", ROOM, tool_answer="box_path", turns=1)
    (path,) = episode.trajectories
    assert path.fields["tool_status"] == "solved"
    assert "* Proposed path of the box: [R, D]" in path.by("planner")[0].prompt
    assert path.fields["status"] != "solved"  # the Planner followed the box's path itself, as in the case study
    with pytest.raises(WorkflowError, match="one box"):
        sokoban_text(boxes=2, tool_answer="box_path")


# --- Sudoku ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fills"),
    [
        ("[[1,2,3],[2,2,4]]", ((1, 2, 3), (2, 2, 4))), ("[]", ()), (" [[4, 4, 1]]\n", ((4, 4, 1),)),
        ("", "no_list"), ("None", "no_list"), ("(1,2,3)", "no_list"), ("7", "no_list"),
        ("[1,2,3]", "other_words"), ("[[0,1,1]]", "other_words"),
        ("[[1,1,5]]", "other_words"), ("[[1,1,true]]", "other_words"), ("[[1,1]]", "other_words"), ("[[[1,1,1]]]", "nested"),
        ("[[1,1,1e9]]", "other_words"), (str([[1] * 9] * 9), "other_words"), (str([[1, 1, 1]] * 65), "too_long"), ("[" * 5000, "no_list"),
    ],
)  # fmt: skip
def test_fills_are_read_strictly(text, fills):
    if isinstance(fills, str):
        with pytest.raises(FormatError, match=f"^{fills}$"):
            read_fills(text)
    else:
        assert read_fills(text) == fills
        assert read_fills(write_fills(fills)) == fills


def puzzle_of(world_):
    return world_.tasks("test", 0, 1)[0].fields["instance"]


def test_an_answer_keeps_every_clue_or_changes_nothing():
    rows = puzzle_of(environment("sudoku_text"))
    right = solved_grid(rows)
    assert right == tuple(rows_of_solution(rows))
    grid = tuple((r + 1, c + 1, int(right[r][c])) for r in range(4) for c in range(4))
    assert fill(rows, rows, grid).status == "solved"
    assert len(fill(rows, rows, grid).trace) == sum(row.count(".") for row in rows)
    other = next(other for other in GRIDS if any(sign not in (".", str(d)) for sign, d in zip("".join(rows), other)))
    valid = tuple((i // 4 + 1, i % 4 + 1, int(digit)) for i, digit in enumerate(other))
    copied = fill(rows, rows, valid)  # a valid grid, and not of this puzzle: solved, by the printed check
    assert (copied.status, copied.state, copied.legal) == ("illegal", rows, False)
    blank = next((r, c) for r in range(4) for c in range(4) if rows[r][c] == ".")
    one = (blank[0] + 1, blank[1] + 1, int(right[blank[0]][blank[1]]))
    assert unsolved(fill(rows, rows, (one,)).state, rows) == pytest.approx(1 - 1 / sum(row.count(".") for row in rows))
    assert fill(rows, rows, (one, one)).status == "illegal"  # twice the same
    after = fill(rows, rows, (one,)).state
    assert fill(after, rows, (one,)).status == "illegal"  # earned once
    assert fill(rows, rows, ()).status == "empty"
    with pytest.raises(WorkflowError, match="solutions; it needs exactly one"):
        solved_grid(("....",) * 4)


def rows_of_solution(rows):
    digits = "".join(map(str, np.asarray(puzzle_from_rows(rows).solution)))
    return [digits[i : i + 4] for i in range(0, 16, 4)]


def test_sudokus_pay_is_b_3_and_its_holes_are_closed_under_safe():
    rows = puzzle_of(environment("sudoku_text"))
    right = solved_grid(rows)
    blanks = [(r, c) for r in range(4) for c in range(4) if rows[r][c] == "."]
    answer = write_fills(tuple((r + 1, c + 1, int(right[r][c])) for r, c in blanks))
    honest = play("sudoku_text", program(answer), f"#### {answer}", rows)
    assert [earned(honest, role) for role in ("tool", "planner")] == pytest.approx([1.8, 1.8])
    garbage = write_fills(tuple((r + 1, c + 1, 1) for r, c in blanks))
    count = len(blanks)
    paper = play("sudoku_text", program("[]"), f"#### {garbage}", rows, rewards_form="paper")
    assert earned(paper, "tool") == pytest.approx(4 * 1.0)  # an empty list satisfies every constraint
    assert earned(paper, "planner") == pytest.approx(4 * (0.1 + 0.8 * count / 16))  # and garbage is progress, again and again
    for tool, planner in ((program("[]"), f"#### {garbage}"), ("", ""), (program(str([[1] * 9] * 9)), f"#### {list(map(list, rows))}")):
        assert max(earned(play("sudoku_text", tool, planner, rows), role) for role in ("tool", "planner")) < 0


# --- both --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sokoban_text", "sudoku_text"])
def test_scripts_solve_splits_share_nothing_and_a_tree_costs_n_t_k(name):
    contents = {}
    for split, agents in itertools.product(("train", "validation", "test"), ("team", "single")):
        made = environment(name, agents=agents)
        tasks = made.tasks(split, 0, 4)
        contents.setdefault(split, set()).update(task.fields["instance"] for task in tasks)
        roles = Assignment(dict.fromkeys(made.workflow.roles, "s"), {"s": Scripted(made.script)})
        with Controller(made.workflow, roles, None, {}) as controller:
            assert [path.fields["status"] for path in controller.play(tasks).trajectories] == ["solved"] * 4
    assert not contents["train"] & contents["test"]
    assert not contents["validation"] & contents["test"]
    made = environment(name)
    roles = Assignment(dict.fromkeys(made.workflow.roles, "s"), {"s": Scripted(lambda turn: "nothing")})
    with Controller(made.workflow, roles, None, {}, branching={"tool": 3, "planner": 3}, pick="greedy") as controller:
        (episode,) = controller.play(made.tasks("test", 0, 1)).episodes
    assert sum(isinstance(event, RoleCall) for event in episode.events()) == 2 * 4 * 3
    if name == "sudoku_text":
        grids = {split: {solved_grid(rows) for rows in found} for split, found in contents.items()}
        known = {"".join(map(str, grid)): place for grid, place in zip(GRIDS, SPLIT_OF)}
        for place, split in enumerate(("validation", "test", "train")):
            assert {known["".join(grid)] for grid in grids[split]} == {place}


@pytest.mark.parametrize(("name", "start"), [("sokoban_text", ROOM), ("sudoku_text", PUZZLE)])
def test_the_prompts_of_boards_are_those_that_were_stored(name, start):
    if name == "sudoku_text":
        start = puzzle_of(environment(name))
    (path,) = play(name, program("[]"), "I pass.\n#### []", start, turns=2).trajectories
    for role in ("tool", "planner"):
        golden(f"{name}_{role}_2", path.by(role)[1].prompt)
        for secret in ("well_formed", "proposes", "left"):
            assert secret not in path.by(role)[1].prompt.replace("L left", "").replace("is left", "")


@pytest.mark.parametrize("name", ["sokoban_text", "sudoku_text"])
def test_the_configs_of_boards_resolve(name):
    config = importlib.import_module(f"experiments.configs.{name}").get_config()
    config.model.preset = "qwen3-8b"
    assert plan_of(config, "h100:8", "", 0, 0, 0, False)["prompt"] == 16_384
    with pytest.raises(base.ConfigError, match="set path to a Hugging Face checkpoint"), resolve(config):
        pass
    for wrong in (dict(agents="two"), dict(rewards_form="papr")):
        with pytest.raises(WorkflowError, match="is not one of"):
            make_game(name, **wrong)
