"""Sudoku 4x4: puzzles and solutions against brute force, what B.3 and B.6 pay by hand, and that no reward is won by gaming (law 11)."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boards import compiled, episode, law_1_holds, read, say, say_ids

from marl_llm.games import SPLITS, Game, Sudoku, make_game, role_of
from marl_llm.games.hosted import TextGame
from marl_llm.games.sudoku import GRIDS, puzzle_from_rows, puzzles_from_rows, rows_of
from marl_llm.games.sudoku.puzzles import OF_SPLIT, PARTS, SPLIT_OF, seen
from marl_llm.rollout import play, scripted_player

GAME = Sudoku(max_fills=10, max_turns=3)
ROWS = ["1.3.", "...1", "...3", ".4.."]
PUZZLE = puzzle_from_rows(ROWS)
SOLUTION = ["1234", "4321", "2143", "3412"]
CLUES = "".join(ROWS)


def game_with(**options):
    return dataclasses.replace(GAME, **options)


def start(game=GAME):
    return jax.jit(game.reset)(PUZZLE)


START = start()
COUNT = 128


@functools.cache
def drawn(game):
    return jax.jit(jax.vmap(game.instance, (0, None)))


@functools.cache
def instances(split):
    return drawn(GAME)(jax.random.split(jax.random.key(0), COUNT), jnp.int32(SPLITS.index(split)))


# --- an independent solver and simulator --------------------------------------------------------------------------------------


def units():
    lines = [[(r, c) for c in range(4)] for r in range(4)] + [[(r, c) for r in range(4)] for c in range(4)]
    return lines + [[(r + i, c + j) for i in range(2) for j in range(2)] for r in (0, 2) for c in (0, 2)]


def fits(grid):
    """No digit stands twice in a row, column or box of `{(row, column): digit}`."""
    return all(len(held) == len(set(held)) for held in ([grid[x] for x in unit if x in grid] for unit in units()))


def python_solutions(grid):
    """How many ways there are to fill a grid, by backtracking."""
    blank = next((x for x in itertools.product(range(4), range(4)) if x not in grid), None)
    if blank is None:
        return 1
    return sum(python_solutions(grid | {blank: digit}) for digit in range(1, 5) if fits(grid | {blank: digit}))


def as_dict(digits):
    return {divmod(i, 4): int(digit) for i, digit in enumerate(digits) if digit}


def test_there_are_288_solved_grids_and_all_are_different_and_right():
    assert len(GRIDS) == 288 == len({grid.tobytes() for grid in GRIDS}) == python_solutions({})
    assert all(fits(as_dict(grid)) for grid in GRIDS)


def test_law_12_the_splits_share_no_solved_grid():
    assert tuple(map(len, OF_SPLIT)) == PARTS == (36, 36, 216)
    assert sorted(np.concatenate(OF_SPLIT).tolist()) == list(range(288))
    names = [grid.tobytes() for grid in GRIDS]
    for number, split in enumerate(SPLITS):
        puzzles = instances(split)
        where = [names.index(np.asarray(grid).tobytes()) for grid in puzzles.solution]
        assert set(SPLIT_OF[where]) == {number}
        assert len(set(where)) > 30


def test_puzzles_are_minimal_and_have_one_solution():
    puzzles = instances("train")
    assert bool(jnp.all(jax.vmap(GAME.valid)(puzzles)))
    blanks = np.sum(np.asarray(puzzles.clues) == 0, -1)
    assert blanks.min() >= 9
    assert blanks.max() == 12
    for i in range(0, COUNT, 20):
        clues = as_dict(np.asarray(puzzles.clues[i]))
        assert python_solutions(clues) == 1
        assert as_dict(np.asarray(puzzles.solution[i])) | clues == as_dict(np.asarray(puzzles.solution[i]))
        assert all(python_solutions({x: d for x, d in clues.items() if x != gone}) > 1 for gone in clues)


@pytest.mark.parametrize("illegal", ["drop", "stop"])
def test_random_lists_of_fills_do_what_the_independent_simulator_says(illegal):
    game, rng = game_with(illegal=illegal, max_fills=4), np.random.default_rng(0)
    puzzles, statuses = instances("train"), collections.Counter()
    for i in range(25):
        puzzle = jax.tree.map(lambda x, i=i: x[i], puzzles)
        state, solution = jax.jit(game.reset)(puzzle), as_dict(np.asarray(puzzle.solution))
        for _ in range(3):
            grid = before = as_dict(np.asarray(state.grid))
            right = [(*x, d) for x, d in solution.items() if x not in grid]
            anything = [tuple(rng.integers((0, 0, 1), (4, 4, 5))) for _ in range(3)]
            fills = [right[rng.integers(len(right))] if rng.random() < 0.8 and right else other for other in anything]
            status = "o"
            for r, c, digit in fills:
                if (r, c) in grid or not fits(grid | {(r, c): digit}):
                    status, grid = "x", before if illegal == "drop" else grid
                    break
                grid = grid | {(r, c): int(digit)}
            status = "g" if grid == solution else status
            state, _, done = say(game, state, "planner", " ".join([*(f"r{r + 1}c{c + 1}={d}" for r, c, d in fills), ";"]))
            assert as_dict(np.asarray(state.grid)) == grid
            assert "-oxgf"[int(state.status)] == status
            assert done == (status == "g")
            statuses[status] += 1
            if done:
                break
    assert statuses["o"] > 5 < statuses["x"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1.3.", "..1.", ".1.."], "3 rows of 4, 4, 4 signs"),
        (["1.3.", "..1.", ".1..", "4...."], "four rows of four"),
        (["." * 9] * 9, "9 rows of 9"),
        (["1.5.", "..1.", ".1..", "4..."], r"unknown signs \['5'\]"),
        (["11..", "....", "....", "...."], "clue 1 twice .* row 1, column 1 and at row 1, column 2"),
        (["1...", ".1..", "....", "...."], "clue 1 twice"),
        (["1...", "....", "1...", "...."], "clue 1 twice"),
        (["12..", "..3.", "...4", "...."], "no solution"),
        (["1...", "....", "....", "...4"], "2[0-9] solutions|[0-9]+ solutions; it needs exactly one"),
        (["....", "....", "....", "...."], "288 solutions"),
        (SOLUTION, "no blank"),
    ],
)
def test_a_bad_puzzle_is_refused_by_name(rows, message):
    with pytest.raises(ValueError, match=message):
        puzzle_from_rows(rows)
    with pytest.raises(ValueError, match="puzzle 2: "):
        puzzles_from_rows([ROWS, rows])


def test_rows_are_read_and_written_back():
    assert rows_of(PUZZLE.clues) == ROWS
    assert rows_of(PUZZLE.solution) == SOLUTION
    assert GAME.task(PUZZLE) == {"puzzle": ROWS, "solution": SOLUTION}
    assert len(puzzles_from_rows([ROWS, ROWS])) == 2


# --- what is read and said ----------------------------------------------------------------------------------------------------


def correct(state, count=None, first=0):
    """Correct fills of blanks, as words."""
    grid, solution = np.asarray(state.grid), np.asarray(state.puzzle.solution)
    blanks = np.flatnonzero(grid == 0)[first:]
    return " ".join(f"r{cell // 4 + 1}c{cell % 4 + 1}={solution[cell]}" for cell in blanks[:count])


def test_prompts_read_as_the_protocol_says():
    facts = "r1c2:134 r1c4:13 r2c1:1 r2c2:14 r2c3:13 r3c1:134 r3c2:34 r3c3:3 r4c1:14 r4c3:34 r4c4:134"
    assert read(GAME, START, "tool") == f"t0 - {facts} tool"
    state = say(GAME, START, "tool", "r4c3=1 r1c2=2 ;")[0]
    assert read(GAME, state, "planner") == f"t0 - {facts} | r4c3=1 r1c2=2 +o planner"
    state = say(GAME, state, "planner", "r4c3=1 r4c3=1 ;")[0]
    assert read(GAME, state, "tool") == f"t1 x {facts} tool"
    split = game_with(view="split")
    assert read(split, start(split), "tool") == f"t0 - {facts} tool"
    rows = facts.replace("r3c1:134", "r3c1:13")
    assert read(split, start(split), "planner") == f"t0 - {rows} | +- planner"
    raw = game_with(view="raw")
    cells = " ".join(f"r{i // 4 + 1}c{i % 4 + 1}={sign}" for i, sign in enumerate(CLUES))
    assert read(raw, start(raw), "tool") == f"t0 - {cells} tool"


def test_the_digits_that_are_seen_are_those_of_the_row_column_and_box():
    for i in range(0, COUNT, 16):
        grid = as_dict(np.asarray(instances("train").clues[i]))
        for cell, digits in enumerate(np.asarray(seen(instances("train").clues[i]))):
            held = {grid[x] for unit in units() if divmod(cell, 4) in unit for x in unit if x in grid and x != divmod(cell, 4)}
            assert {d for d in range(1, 5) if digits >> (d - 1) & 1} == held


@pytest.mark.parametrize("options", [dict(), dict(view="split"), dict(view="raw"), dict(agents="single")], ids=str)
def test_law_1_every_prompt_encodes_to_its_very_ids(options):
    game = game_with(**options)
    assert len(law_1_holds(game, jax.jit(jax.vmap(game.reset))(instances("train")))) > 60


@pytest.mark.parametrize("view", ["peers", "split", "raw"])
def test_no_prompt_depends_on_the_solution(view):
    game = game_with(view=view)
    state = start(game)
    other = state._replace(puzzle=state.puzzle._replace(solution=state.puzzle.solution[::-1]))
    for role in game.roles:
        observe = compiled(game, role.name)[0]
        np.testing.assert_array_equal(observe(state).ids, observe(other).ids)
        assert game.text(state, role.name) == game.text(other, role.name)


PLANNER_PROMPT = """\
A Sudoku of 4 rows and 4 columns: every row, column and 2x2 box holds each of the digits 1 to 4 once. It is to be solved within 3 turns. \
You fill the grid. The Tool has proposed fills; adopt them if they are right, correct or extend them if they are not.
A fill writes a digit into a blank; filled cells stay as they are. At most 10 fills. If one of them is illegal, none is made.
This is turn 2 of 3.
The last list of fills: it was refused, one of its fills being illegal.
The grid, with dots for blanks:
1.3.
...1
...3
.4..
The Tool's proposal: [[4, 3, 1], [1, 2, 2]]; in the simulation all its fills were made.
Give the answer on a last line that begins with ####: a JSON list of fills [row, column, digit], counted from 1, or the completed grid as \
four rows, for example
#### [[1, 3, 4], [2, 1, 3]]"""


def test_the_natural_language_prompt_is_pinned():
    assert isinstance(GAME, TextGame)
    raw = game_with(view="raw")
    state = say(raw, say(raw, start(raw), "planner", "r1c1=1 ;")[0], "tool", "r4c3=1 r1c2=2 ;")[0]
    assert raw.text(state, "planner") == PLANNER_PROMPT
    split = game_with(view="split")
    assert "row and column:\nrow 1, column 2: 1, 3, 4\n" in split.text(START, "planner")
    assert "row, column and box:\nrow 1, column 2: 1, 3, 4\n" in GAME.text(START, "planner")
    assert "row 3, column 1: 1, 3, 4\n" in split.text(START, "tool")
    assert "row 3, column 1: 1, 3\n" in split.text(START, "planner")


@pytest.mark.parametrize(
    ("text", "fills"),
    [
        ("#### [[4, 3, 1], [1, 2, 2]]", "r4c3=1 r1c2=2"),
        ("so\n#### [[1,1,1]]\nor\n####[[4,3,1]]", "r4c3=1"),
        ("#### []", ""),
        ("#### [[4, 3, 1, 1]]", None),
        ("#### [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]", None),  # eleven fills are more than max_fills
        ("#### [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 9]]", None),
        ("#### [[0, 3, 2]]", None),
        ("#### [[4, 3, 5]]", None),
        ("#### [[4, 3, 1.0]]", None),
        ("#### [[4, 3, true]]", None),
        ("#### " + str([[1] * 9] * 9), None),
        ("#### [4, 3, 1]", None),
        ("#### {}", None),
        ("####", None),
        ("r4c3=1 r1c2=2", "r4c3=1 r1c2=2"),  # the protocol's own words
        ("[[4, 3, 1]]", None),
        ("\ud800", None),
        ("#### " + "[" * 100_000, None),
        ("#### [[4, 3, " + "9" * 5000 + "]]", None),
    ],
)
def test_an_answer_is_read_as_the_grammar_says(text, fills):
    ids = GAME.read(START, "planner", text)
    acted = say_ids(GAME, START, "planner", ids)[0].acted
    assert bool(acted.well_formed) == (fills is not None)
    listed = [f"r{f // 16 + 1}c{f // 4 % 4 + 1}={f % 4 + 1}" for f in acted.fills.tolist() if f >= 0]
    assert " ".join(listed) == (fills or "")


def test_a_whole_grid_stands_for_its_fills_and_one_that_changes_a_clue_is_refused():
    game = game_with(max_fills=16)
    grid = [[int(digit) for digit in row] for row in SOLUTION]
    state, got, done = say_ids(game, start(game), "planner", game.read(START, "planner", f"#### {grid}"))
    assert done
    assert got.team == 1
    other = GRIDS[100].reshape(4, 4).tolist()  # a valid grid with other clues: the example that solves every puzzle elsewhere
    state, got, done = say_ids(game, start(game), "planner", game.read(START, "planner", f"#### {other}"))
    assert not done
    assert (rows_of(state.grid), "-oxgf"[int(state.status)]) == (ROWS, "x")
    assert got.local == pytest.approx(-0.1)


# --- what is paid -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "text", "first", "second", "third"),
    [
        ("planner", "r4c3=1 r1c2=2 ;", 0.1, 0.1, 0.8 * 2 / 16),
        ("planner", "r4c3=3 r1c2=2 ;", 0.1, 0.0, 0.8 * 2 / 16),  # the 3 stands in the column already, and is paid as progress
        ("planner", "r1c1=1 ;", 0.1, 0.1, 0.0),
        ("planner", "r4c3=4 ;", 0.1, 0.0, 0.8 / 16),
        ("planner", ";", 0.1, 0.1, 0.0),
        ("planner", "t0 ;", 0.0, 0.0, 0.0),
        ("tool", "r4c3=1 ;", 0.1, 0.1, 0.8),
        ("tool", "r4c3=4 ;", 0.1, 0.1, 0.0),
        ("tool", "r1c1=1 ;", 0.1, 0.0, 0.8),
        ("tool", "r4c3=1 r4c3=1 ;", 0.1, 0.0, 0.8),
        ("tool", ";", 0.1, 0.1, 0.8),
        ("tool", "r4c3=1", 0.0, 0.0, 0.0),
    ],
)
def test_appendix_b3_by_hand(role, text, first, second, third):
    game = game_with(rewards_form="paper")
    _, got, _ = say(game, start(game), role, text)
    names = ("format", "legal", "progress") if role == "planner" else ("format", "execution", "sanity")
    assert [got.components[name] for name in names] == pytest.approx([first, second, third])
    assert got.local == pytest.approx(first + second + third)
    assert got.team == 0


def test_the_team_is_paid_when_the_puzzle_is_solved():
    for form, local in (("paper", 0.1 + 0.1 + 0.8 / 16), ("outcome", 1.0), ("safe", 0.8 / 11)):
        game = game_with(rewards_form=form)
        state = say(game, start(game), "planner", correct(START, 10) + " ;")[0]
        _, got, done = say(game, state, "planner", correct(state) + " ;")
        assert done
        assert (got.team, got.local) == pytest.approx((1.0, local))


@pytest.mark.parametrize(("text", "team", "local"), [("r4c3=1 ;", 0, 1), (";", 0, 1), ("r4c3=4 ;", 0, 1), ("r4c3=1", 0, 0)])
def test_appendix_b6_by_hand(text, team, local):
    game = game_with(rewards_form="outcome")
    for role in ("tool", "planner"):
        _, got, _ = say(game, start(game), role, text)
        assert (got.team, got.local) == (team, local)


def test_safe_pays_correct_fills_once_and_charges_wrong_illegal_and_unreadable_ones():
    state, got, _ = say(GAME, START, "planner", "r4c3=1 r1c2=2 ;")
    assert (got.team, got.local) == pytest.approx((0.0, 0.8 * 2 / 11))
    assert say(GAME, state, "planner", "r4c3=1 ;")[1].local == pytest.approx(-0.1)  # filled already
    assert say(GAME, state, "planner", ";")[1].local == 0
    assert say(GAME, state, "planner", "r2c1=3 ;")[1].local == pytest.approx(-0.8 / 11)  # legal, and wrong
    assert say(GAME, state, "planner", "r3c3=4 r1c1=1 ;")[1].local == pytest.approx(-0.1)  # illegal lists change nothing
    assert say(game_with(illegal="stop"), state, "planner", "r3c3=4 r1c1=1 ;")[1].local == pytest.approx(0.8 / 11 - 0.1)
    assert say(GAME, state, "planner", "planner ;")[1].local == pytest.approx(-0.5)
    state, got, _ = say(GAME, START, "tool", "r4c3=1 ;")
    assert got.local == pytest.approx(0.8 / 11)
    assert say(GAME, say(GAME, state, "planner", ";")[0], "tool", "r4c3=1 ;")[1].local == 0  # the same proposal again


# --- law 11: no reward is won by gaming -----------------------------------------------------------------------------------------


def garbage(state, count=10):
    """Fills of blanks with the digit 1, whatever stands there."""
    blanks = np.flatnonzero(np.asarray(state.grid) == 0)[:count]
    return " ".join(f"r{cell // 4 + 1}c{cell % 4 + 1}=1" for cell in blanks) + " ;"


def wrong_legal(state):
    """A legal fill with a wrong digit if there is one, else nothing."""
    grid, solution = as_dict(np.asarray(state.grid)), as_dict(np.asarray(state.puzzle.solution))
    for x, digit in itertools.product(solution, range(1, 5)):
        if x not in grid and digit != solution[x] and fits(grid | {x: digit}):
            return f"r{x[0] + 1}c{x[1] + 1}={digit} ;"
    return ";"


ADVERSARIES = {
    "empty_output": lambda state: "",
    "empty_list": lambda state: ";",
    "copied_prompt": lambda state: read(GAME, state, "tool"),
    "longest_noise": lambda state: "| r1c2:13 " * 11,
    "the_formats_example": lambda state: "r1c3=4 r2c1=3 ;",
    "right_fills_wrong_form": lambda state: correct(state, 5) + " |",
    "right_form_wrong_fills": wrong_legal,
    "answer_twice": lambda state: correct(state, 3) + " " + correct(state, 3) + " ;",
    "garbage": garbage,
    "dawdle": lambda state: correct(state, 1) + " ;",
    "late": lambda state: ";" if int(state.turn) < 1 else correct(state, 10) + " ;",
    "undo": lambda state: correct(state, 5) + " ;" if int(state.turn) % 2 == 0 else "r1c2=1 ;",
    "prompts_words": lambda state: "r1c2:13 r1c4:13 ;",
}
HONEST = dict.fromkeys(("tool", "planner"), lambda state: correct(state, 10) + " ;")


@pytest.mark.parametrize("name", ADVERSARIES)
def test_law_11_no_adversary_earns_more_than_honest_play(name):
    best, solved, turns = honest_play("safe")
    assert (solved, turns) == (True, 2)
    np.testing.assert_allclose(list(best.values()), [1.8, 1.8], atol=1e-5)
    for roles in (("tool", "planner"), ("tool",), ("planner",)):
        earned, _, _ = episode(GAME, PUZZLE, HONEST | dict.fromkeys(roles, ADVERSARIES[name]))
        for role in roles:
            assert earned[role] <= best[role] + 1e-5, (roles, role)
            if name not in ("dawdle", "late", "undo", "right_fills_wrong_form"):
                assert earned[role] <= 0.0, (roles, role)


@functools.cache
def honest_play(form):
    return episode(game_with(rewards_form=form), PUZZLE, HONEST)


def test_law_11_under_the_outcome_form_what_does_not_parse_earns_least():
    best, _, _ = honest_play("outcome")
    for name in ("empty_output", "copied_prompt", "longest_noise", "prompts_words", "right_fills_wrong_form"):
        earned, solved, _ = episode(game_with(rewards_form="outcome"), PUZZLE, dict.fromkeys(("tool", "planner"), ADVERSARIES[name]))
        assert not solved
        assert set(earned.values()) == {0.0}
    assert min(best.values()) == 3.0  # two turns: 1 + 1 for the form, and 1 for the solved puzzle; the Tool too in its second turn


@functools.cache
def script_program():
    def how(noise, chain):
        return dict(noise=noise, noisy=1.0, chain=chain, repeat=0.0)

    return jax.jit(lambda i, *options: play(GAME, scripted_player(GAME, **how(*options)), i, jnp.arange(COUNT), jax.random.key(2)))


def scripted(noise, chain):
    """The scripted player's rollout on train puzzles."""
    return script_program()(instances("train"), jnp.float32(noise), jnp.float32(chain))


def test_law_11_what_safe_pays_telescopes_whatever_is_played():
    rollout = scripted(0.5, 0.5)
    for index, role in enumerate(("tool", "planner")):
        table = rollout.tables[role]

        def paid(x, table=table):
            return np.asarray(jnp.where(table.where, x[..., 0], 0.0))[..., 0].sum(0)

        parts = {name: paid(x) for name, x in table.rewards.components.items()}
        claim, solution, clues = np.asarray(rollout.states.claims[-1, :, 0, index]), *map(np.asarray, instances("train")[::-1])
        blank = clues == 0
        right = ((claim == solution) & blank).sum(-1) - ((claim != solution) & (claim > 0)).sum(-1)
        if role == "planner":
            np.testing.assert_allclose(parts["progress"], 0.8 * right / blank.sum(-1), atol=1e-5)
        assert np.all(parts["progress"] <= 0.8 * right / blank.sum(-1) + 1e-5)  # the Tool is not paid for what the Planner did
        np.testing.assert_allclose(paid(table.rewards.team), (claim == solution).all(-1), atol=1e-5)
        assert max(parts["format"].max(), parts["legal"].max()) <= 0


def test_the_documented_holes_of_b3():
    game = game_with(rewards_form="paper")
    _, ten, _ = say(game, start(game), "planner", garbage(START))
    _, five, _ = say(game, start(game), "planner", correct(START, 5) + " ;")
    assert (ten.local, five.local) == pytest.approx((0.60, 0.45))
    state, first, _ = say(game, start(game), "planner", garbage(START))
    assert say(game, state, "planner", garbage(state))[1].local == pytest.approx(first.local)  # paid again: nothing was filled
    assert say(game, start(game), "tool", ";")[1].local == pytest.approx(1.0)  # no edit breaks no constraint
    best, _, _ = honest_play("paper")
    earned, solved, _ = episode(game, PUZZLE, dict.fromkeys(("tool", "planner"), lambda state: ";"))
    assert not solved
    assert earned["tool"] == pytest.approx(3.0)
    loitering = episode(game_with(rewards_form="paper", max_turns=9), PUZZLE, dict.fromkeys(("tool", "planner"), lambda state: ";"))[0]
    assert loitering["tool"] > best["tool"]


# --- the scripted player, the protocol, and errors ------------------------------------------------------------------------------


def test_a_script_without_noise_solves_every_puzzle_if_it_chains_and_the_floor_few():
    def rate(*options):
        return float(scripted(*options).episodes.outcome.mean())

    assert rate(0.0, 1.0) == 1.0
    assert 0.3 < rate(0.0, 0.0) < 1.0  # one wave of visible singles a turn does not always reach the end in three turns
    assert rate(1.0, 0.5) < 0.2
    for table in scripted(1.0, 0.5).tables.values():
        assert bool(jnp.all(table.rewards.well_formed | ~table.where[..., None]))


def test_the_game_is_a_game_with_sequential_stages_and_budgets():
    assert isinstance(GAME, Game)
    assert make_game("sudoku", view="raw") == Sudoku(view="raw")
    assert GAME.stages == (("tool",), ("planner",))
    assert game_with(agents="single").stages == (("solo",),)
    assert role_of(GAME, "planner").prompt_tokens == role_of(GAME, "tool").prompt_tokens + GAME.max_fills + 2
    assert GAME.picture(START) == ROWS
    assert hash(game_with()) == hash(GAME)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_fills=0), r"max_fills=0 is not in \[1, 16\]"),
        (dict(max_fills=17), "max_fills=17"),
        (dict(max_turns=0), "max_turns=0"),
        (dict(agents="trio"), "agents='trio' is not one of team, single"),
        (dict(view="half"), "view='half' is not one of peers, split, raw"),
        (dict(illegal="skip"), "illegal='skip' is not one of drop, stop"),
        (dict(rewards_form="b3"), "rewards_form='b3' is not one of safe, paper, outcome"),
    ],
)
def test_law_10_an_impossible_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"sudoku.{message}"):
        make_game("sudoku", **options)
