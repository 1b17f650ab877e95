"""What pays two roles, or two things: each half by itself, so that none is paid for the other's."""

import dataclasses
import functools

import pytest
import test_plan_path as plan
import test_sokoban as boxes
import test_sudoku as digits
from boards import say

PUSH = "D D R U ;"  # half of the eight moves that solve the room
HALF = (0.9**4 - 0.9**8) / (1 - 0.9**8)


def pays(game, state, role, text):
    """(team, local) of what a role says, and the state after it."""
    state, got, _ = say(game, state, role, text)
    return pytest.approx((got.team, got.local), abs=1e-5), state


# ---- Sokoban


def test_sokoban_safe_pays_the_tool_for_its_own_proposals_once_and_never_for_the_planners_pushes():
    game, nothing = boxes.GAME, boxes.START
    paid, proposed = pays(game, nothing, "tool", PUSH)
    assert paid == (HALF, 0.8 * HALF)
    paid, idle = pays(game, proposed, "planner", "D U ;")  # pushes nothing
    assert paid == (0.0, 0.0)
    paid, _ = pays(game, idle, "tool", PUSH)
    assert paid == (0.0, 0.0)  # the same proposal again
    _, silent = pays(game, nothing, "tool", "D U ;")
    _, pushed = pays(game, silent, "planner", PUSH)
    paid, _ = pays(game, pushed, "tool", "D U ;")
    assert paid == (0.0, 0.0)  # the room is worth more, by the Planner's hand


def test_sokoban_safe_pays_the_planner_whatever_the_tool_has_claimed():
    paid = {}
    for proposal in (PUSH, "D U ;"):
        _, state = pays(boxes.GAME, boxes.START, "tool", proposal)
        paid[proposal], _ = pays(boxes.GAME, state, "planner", PUSH)
        assert paid[proposal] == (HALF, 0.8 * HALF)


def test_sokoban_safe_charges_an_unreadable_list_its_form_alone():
    for role in ("tool", "planner"):
        assert pays(boxes.GAME, boxes.START, role, "R")[0] == (0.0, -0.5)
        assert pays(boxes.GAME, boxes.START, role, "U ;")[0] == (0.0, -0.1)


def test_sokoban_printed_pays_the_tool_by_potential_and_the_planner_by_deadlocks():
    parts = {}
    for role in ("tool", "planner"):
        _, got, _ = say(boxes.PAPER, boxes.START, role, "D R R ;")
        parts[role] = {name: round(float(value), 6) for name, value in got.components.items()}
    assert parts == {
        "tool": {"format": 0.1, "legal": 0.1, "potential": 0.8},
        "planner": {"format": 0.1, "legal": 0.1, "deadlock_free": 0.0},
    }


def test_sokoban_printed_pays_the_share_of_boxes_and_loses_the_play_by_one_of_them():
    near = boxes.start(boxes.PAIR, ["######", "#A..*#", "#.B..#", "##.G.#", "######"])
    _, got, _ = say(boxes.PAIR_PAPER, near, "planner", "R D ;")
    assert (got.team, float(got.components["deadlock_free"])) == (0.5, 0.0)


def test_sokoban_outcome_pays_a_readable_solution_alone():
    game = boxes.game_with(rewards_form="outcome")
    last = boxes.start(game, ["######", "#....#", "#ABG.#", "#....#", "######"])
    for role in ("tool", "planner"):
        assert pays(game, last, role, "R ;")[0] == (1.0, 1.0)
        assert pays(game, last, role, "R")[0] == (0.0, 0.0)
    solved = last._replace(place=say(game, last, "planner", "R ;")[0].place)
    assert pays(game, solved, "tool", "R")[0] == (0.0, 0.0)  # solved already, and nothing that can be read


# ---- Sudoku

FILLS = "r4c3=1 r1c2=2 ;"  # two of eleven blanks, right


def test_sudoku_safe_pays_the_tool_for_its_own_fills_once_and_never_for_the_planners():
    game, nothing = digits.GAME, digits.START
    share = 0.8 * 2 / 11
    paid, proposed = pays(game, nothing, "tool", FILLS)
    assert paid == (0.0, share)
    _, idle = pays(game, proposed, "planner", ";")
    assert pays(game, idle, "tool", FILLS)[0] == (0.0, 0.0)
    _, silent = pays(game, nothing, "tool", ";")
    paid, filled = pays(game, silent, "planner", FILLS)
    assert paid == (0.0, share)
    assert pays(game, filled, "tool", ";")[0] == (0.0, 0.0)


def test_sudoku_safe_pays_each_role_once_for_solving_whatever_the_other_does():
    game = dataclasses.replace(digits.GAME, max_fills=16)
    start = digits.start(game)
    whole = digits.correct(start) + " ;"
    paid, proposed = pays(game, start, "tool", whole)
    assert paid == (1.0, 0.8)
    _, idle = pays(game, proposed, "planner", ";")
    assert pays(game, idle, "tool", whole)[0] == (0.0, 0.0)
    paid, _ = pays(game, proposed, "planner", whole)
    assert paid == (1.0, 0.8)  # the Tool's claim is not the Planner's


def test_sudoku_printed_pays_the_tool_by_sanity_and_the_reasoner_by_what_it_fills():
    game = digits.game_with(rewards_form="paper")
    start, parts = digits.start(game), {}
    for role in ("tool", "planner"):
        _, got, _ = say(game, start, role, FILLS)
        parts[role] = {name: round(float(value), 6) for name, value in got.components.items()}
    assert parts == {
        "tool": {"format": 0.1, "execution": 0.1, "sanity": 0.8},
        "planner": {"format": 0.1, "legal": 0.1, "progress": 0.1},
    }


# ---- Plan-Path


@functools.cache
def path_game(form):
    return plan.game_with(rewards_form=form)


def path_pay(form, *said):
    """(team, local) of the last of (role, words)."""
    game = path_game(form)
    state = game.reset(plan.INSTANCE)
    for role, text in said[:-1]:
        state = plan.say(state, role, text, game)
    _, got = plan.paid(state, *said[-1], game)
    return pytest.approx((float(got.team), float(got.local)), abs=1e-5)


@pytest.mark.parametrize("form", ["progress", "safe"])
def test_plan_path_pays_each_role_for_its_own_claims_once(form):
    """Half of the way, said by the Tool as cells and made by the Planner as moves."""
    assert path_pay(form, ("planner", "R D ;")) == (0.5, 0.4)
    assert path_pay(form, ("tool", "R1 D1R1 ;")) == (0.5, 0.4)
    assert path_pay(form, ("tool", "R1 D1R1 ;"), ("planner", "R D ;")) == (0.5, 0.4)
    assert path_pay(form, ("tool", "R1 D1R1 ;"), ("planner", ";"), ("tool", "R1 D1R1 ;")) == (0.0, 0.0)
    assert path_pay(form, ("tool", "R1 D1R1 ;"), ("planner", "R ;"), ("tool", ";"), ("planner", "D ;")) == (0.25, 0.2)


def test_plan_path_printed_pays_the_tool_by_shape_and_the_planner_by_the_path():
    game = path_game("paper")
    parts = {}
    for role in ("tool", "planner"):
        _, got = plan.paid(game.reset(plan.INSTANCE), role, "R1 D1R1 ;" if role == "tool" else "R D ;", game)
        parts[role] = set(got.components)
    assert parts == {"tool": {"format", "legal", "shape"}, "planner": {"format", "legal", "shortest_path"}}
