"""Sokoban: moves and solutions against brute force, what B.5 and B.6 pay by hand, and that no reward is won by gaming (law 11)."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boards import compiled, episode, law_1_holds, read, say, say_ids

from marl_llm.games import SPLITS, Game, Sokoban, make_game, role_of
from marl_llm.games.hosted import TextGame
from marl_llm.games.kit.grids import FAR, MOVES
from marl_llm.games.sokoban import Size, room_from_rows, rows_of, solve
from marl_llm.games.sokoban.rooms import cornered, fingerprint, in_split, potential, tables
from marl_llm.rollout import play, scripted_player

GAME = Sokoban(height=5, width=6, min_walls=0, max_walls=2, min_length=3, max_moves=4, max_turns=3)
ROWS = ("######", "#A..G#", "#.B..#", "#...##", "######")  # eight moves: D D R U L U R R
ROOM = room_from_rows(list(ROWS))
PAIR = dataclasses.replace(GAME, boxes=2, max_turns=8)
PAPER, PAIR_PAPER = (dataclasses.replace(GAME, rewards_form="paper", max_turns=4), dataclasses.replace(PAIR, rewards_form="paper"))
SMALL_PAIR = dataclasses.replace(PAIR, width=5, max_walls=1)
PAIR_ROWS = ["######", "#A.BG#", "#.B..#", "#..G.#", "######"]
STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def game_with(game=GAME, **options):
    return dataclasses.replace(game, **options)


def start(game=GAME, rows=ROWS):
    return jax.jit(game.reset)(room_from_rows(list(rows)))


START = start()
COUNT = 64


@functools.cache
def drawn(game):
    return jax.jit(jax.vmap(game.instance, (0, None)))


@functools.cache
def instances(game, split):
    return drawn(game)(jax.random.split(jax.random.key(0), COUNT), jnp.int32(SPLITS.index(split)))


# --- an independent simulator, on rows of signs -----------------------------------------------------------------------------


def python_move(rows, move):
    """The rows after a move, or None if it is illegal."""
    grid = [list(row) for row in rows]
    (r, c), (dr, dc) = next((r, c) for r, row in enumerate(grid) for c, sign in enumerate(row) if sign in "A+"), STEPS[move]
    to, beyond = (r + dr, c + dc), (r + 2 * dr, c + 2 * dc)
    target = grid[to[0]][to[1]]
    if target == "#":
        return None
    if target in "B*":
        if grid[beyond[0]][beyond[1]] in "#B*":
            return None
        grid[beyond[0]][beyond[1]] = "*" if grid[beyond[0]][beyond[1]] == "G" else "B"
        target = "G" if target == "*" else "."
    grid[to[0]][to[1]] = "+" if target == "G" else "A"
    grid[r][c] = "G" if grid[r][c] == "+" else "."
    return tuple("".join(row) for row in grid)


def python_length(rows):
    """Moves of a shortest solution, by breadth-first search; FAR if there is none."""
    rows = tuple(rows)
    queue, seen = collections.deque([(rows, 0)]), {rows}
    while queue:
        here, length = queue.popleft()
        if not any("B" in row for row in here):
            return length
        for move in MOVES:
            there = python_move(here, move)
            if there is not None and there not in seen:
                seen.add(there)
                queue.append((there, length + 1))
    return FAR


@pytest.mark.parametrize("game", [GAME, SMALL_PAIR], ids=["one_box", "two_boxes"])
def test_the_solver_agrees_with_breadth_first_search_from_every_kind_of_place(game):
    rng = np.random.default_rng(1)
    rooms = instances(game, "train")
    lengths = set()
    for i in range(4):
        room = jax.tree.map(lambda x, i=i: np.asarray(x[i]), rooms)
        free = np.flatnonzero(tables(game.size).distinct & ~room.walls[tables(game.size).holders].any(-1))
        for place in (*rng.choice(free, 5), *rng.choice(free[room.distance[free] < FAR], 5)):
            rows = rows_of(game.size, room.walls, room.goals, place)
            assert room.distance[place] == python_length(rows), rows
            lengths.add(int(room.distance[place]))
        assert not (room.distance[np.setdiff1d(np.arange(game.size.places), free)] < FAR).any()
    assert FAR in lengths
    assert len(lengths) > 4


@pytest.mark.parametrize("game", [GAME, SMALL_PAIR], ids=["one_box", "two_boxes"])
def test_random_lists_lead_where_the_independent_simulator_says(game):
    rng = np.random.default_rng(2)
    rooms, role = instances(game, "train"), game.roles[-1].name
    statuses = collections.Counter()
    for i in range(20):
        state = jax.jit(game.reset)(jax.tree.map(lambda x, i=i: x[i], rooms))
        for _ in range(3):
            rows, moves = tuple(game.picture(state)), rng.choice(list(MOVES), rng.integers(0, 5))
            status = "o"
            for move in moves:
                there = python_move(rows, move)
                if there is None:
                    status = "x"
                    break
                rows = there
                if not any("B" in row for row in rows):
                    status = "g"
                    break
            state, _, done = say(game, state, role, " ".join([*moves, ";"]))
            assert tuple(game.picture(state)) == rows
            assert "-oxgf"[int(state.status)] == status
            assert done == (status == "g")
            statuses[status] += 1
            if done:
                break
    assert statuses["o"] > 5 < statuses["x"]


# --- rooms ------------------------------------------------------------------------------------------------------------------


def test_law_12_every_room_is_of_one_split_by_its_content_and_within_the_bounds():
    game, content = GAME, {}
    for split in SPLITS:
        rooms = instances(game, split)
        assert bool(jnp.all(jax.vmap(game.valid)(rooms)))
        holders = jnp.asarray(tables(game.size).holders)[rooms.place]
        prints = jax.vmap(fingerprint)(rooms.walls, rooms.goals, holders)
        for other in SPLITS:
            assert bool(jnp.all(jax.vmap(in_split, (0, None))(prints, other) == (other == split)))
        lengths = np.asarray(jax.vmap(lambda room: room.distance[room.place])(rooms))
        assert game.min_length <= lengths.min() <= lengths.max() <= game.max_length
        assert len(set(lengths.tolist())) > 3
        assert np.asarray(rooms.walls).sum(-1).max() <= game.max_walls
        boxes = np.sort(np.asarray(holders)[:, 1:], -1)
        keys = (np.asarray(rooms.walls), np.sort(np.asarray(rooms.goals), -1), np.asarray(holders)[:, :1], boxes)
        content[split] = {b"".join(np.asarray(part[i]).astype(np.int32).tobytes() for part in keys) for i in range(len(lengths))}
        assert len(content[split]) > 20
    assert not content["train"] & content["test"]
    assert not content["train"] & content["validation"]
    assert not content["test"] & content["validation"]


def test_law_12_rooms_of_all_splits_are_equally_hard():
    """A generator that went on until a room of the split came by gave training rooms that were two moves shorter than those of the test."""
    draw = jax.jit(jax.vmap(Sokoban().instance, (0, None)))
    for split, other in (("train", "test"), ("validation", "test")):
        ours, theirs = (draw(jax.random.split(jax.random.key(3), 400), jnp.int32(SPLITS.index(one))) for one in (split, other))
        lengths = [np.asarray(jnp.take_along_axis(rooms.distance, rooms.place[:, None], 1))[:, 0] for rooms in (ours, theirs)]
        error = math.sqrt(sum(one.var() / len(one) for one in lengths))
        assert abs(lengths[0].mean() - lengths[1].mean()) < 4 * error, split


def test_the_hash_does_not_care_for_the_order_of_boxes():
    walls, goals = jnp.zeros(12, bool).at[3].set(True), jnp.asarray([1, 2])
    assert fingerprint(walls, goals, jnp.asarray([0, 5, 6])) == fingerprint(walls, goals[::-1], jnp.asarray([0, 6, 5]))
    assert fingerprint(walls, goals, jnp.asarray([0, 5, 6])) != fingerprint(walls, goals, jnp.asarray([5, 0, 6]))


def test_rows_are_read_and_written_back():
    for rows in (list(ROWS), PAIR_ROWS, ["#####", "#+..#", "#.B.#", "#..*#", "#####"]):
        room = room_from_rows(rows)
        assert rows_of(Size(len(rows) - 2, len(rows[0]) - 2, room.goals.shape[0]), room.walls, room.goals, room.place) == rows
    assert GAME.task(ROOM) == {"room": list(ROWS), "length": 8}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows of one length"),
        (["#####", "#ABG#", "####"], "rows of one length"),
        (["#####", "#ABX#", "#####"], r"unknown signs \['X'\]"),
        (["#####", "#AB.G", "#####"], "border is open"),
        (["#####", "#.BG#", "#####"], "has 0 players"),
        (["######", "#AABG#", "######"], "has 2 players"),
        (["#####", "#A.G#", "#####"], "has no box"),
        (["#####", "#AB.#", "#####"], "has no goal"),
        (["######", "#ABBG#", "######"], "2 boxes and 1 goals"),
        (["#####", "#A.*#", "#####"], "solved already"),
        (["#####", "#A.B#", "#G..#", "#####"], "unsolvable"),
        (["#" * 12, *["#" + "." * 10 + "#"] * 8, "#ABG.BG....#", "#" * 12], "more|at most 50000"),
    ],
)
def test_a_bad_room_is_refused_by_name(rows, message):
    with pytest.raises(ValueError, match=message):
        room_from_rows(rows)


# --- what is read and said --------------------------------------------------------------------------------------------------


def test_prompts_read_as_the_protocol_says():
    state = start()
    assert read(GAME, state, "tool") == "t0 - A:r0c0 $r1c1 @r0c3 #r2c3 tool"
    state = say(GAME, state, "tool", "D R ;")[0]
    assert read(GAME, state, "planner") == "t0 - A:r0c0 $r1c1 @r0c3 #r2c3 | D R +o planner"
    state = say(GAME, state, "planner", "D D L ;")[0]
    assert read(GAME, state, "tool") == "t1 x A:r2c0 $r1c1 @r0c3 #r2c3 tool"
    assert read(GAME, say(GAME, state, "tool", "D")[0], "planner").endswith("| +f planner")
    near = game_with(frame="player")
    assert read(near, start(near), "tool") == "t0 - A:r0c0 $D1R1 @R3 #D2R3 tool"


def test_in_the_split_view_only_the_tool_sees_the_inner_walls():
    game = game_with(view="split")
    assert read(game, start(game), "tool") == "t0 - A:r0c0 $r1c1 @r0c3 #r2c3 tool"
    assert read(game, start(game), "planner") == "t0 - A:r0c0 $r1c1 @r0c3 | +- planner"
    assert "#...##" in game.text(start(game), "tool")
    assert "#...##" not in game.text(start(game), "planner")
    assert "#....#" in game.text(start(game), "planner")
    solo = game_with(view="split", agents="single")
    assert read(solo, start(solo), "solo") == "t0 - A:r0c0 $r1c1 @r0c3 solo"


@pytest.mark.parametrize("options", [dict(), dict(view="split", frame="player"), dict(agents="single")], ids=str)
def test_law_1_every_prompt_encodes_to_its_very_ids(options):
    game = game_with(**options)
    assert len(law_1_holds(game, jax.jit(jax.vmap(game.reset))(instances(GAME, "train")))) > 40


@pytest.mark.parametrize("view", ["full", "split"])
def test_no_prompt_depends_on_the_solver(view):
    game = game_with(view=view)
    state = start(game)
    other = state._replace(room=state.room._replace(distance=state.room.distance + 5), claims=state.claims / 2)
    for role in game.roles:
        observe = compiled(game, role.name)[0]
        np.testing.assert_array_equal(observe(state).ids, observe(other).ids)
        assert game.text(state, role.name) == game.text(other, role.name)


PLANNER_PROMPT = """\
Sokoban in a room of 5 rows and 6 columns, its border of walls included. Every box must come to stand on a goal within 3 turns. You move \
the player. The Tool has proposed a list of moves; adopt it if it is right, correct or extend it if it is not.
A move goes one cell up (U), down (D), left (L) or right (R). A move into a box pushes it one cell on, if that cell has no wall and no \
box. The list stops at the first move that cannot be made. At most 4 moves.
This is turn 2 of 3.
The last list of moves: it was stopped by an illegal move.
The room (# wall, . free, A player, B box, G goal, * box on a goal, + player on a goal):
######
#...G#
#.B..#
#A..##
######
The Tool's proposal: [R, U]; in the simulation all its moves were made.
Give the final list of moves on a last line that begins with ####, for example
#### [U, R, D, L]"""


def test_the_natural_language_prompt_is_pinned():
    assert isinstance(GAME, TextGame)
    state = say(GAME, say(GAME, start(), "planner", "D D D ;")[0], "tool", "R U ;")[0]
    assert GAME.text(state, "planner") == PLANNER_PROMPT


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("#### [U, R, D]", "URD"),
        ("I go round it.\n#### [D, D]\n", "DD"),
        ("#### [U]\nno, rather\n  #### down, Right", "DR"),
        ('#### ["U", "D"]', "UD"),
        ("#### []", ""),
        ("####", None),
        ("#### [UD]", "UD"),
        ("#### [DU]", "DU"),
        ("#### RRD, up", "RRDU"),
        ("#### [DUE]", None),
        ("R D", "RD"),  # the protocol's own words
        ("####[U,R,D,L,U]", None),  # more than max_moves
        ("#### go up", None),
        ("#### U2", None),
        ("the answer is [U, R]", None),
        ("#### [U, R] because", None),
        ("\ud800", None),
        ("#### " + "[" * 100_000, None),
        ("U " * 100_000, None),
    ],
)
def test_an_answer_is_read_as_the_grammar_says(text, moves):
    ids = GAME.read(START, "planner", text)
    acted = say_ids(GAME, START, "planner", ids)[0].acted
    assert bool(acted.well_formed) == (moves is not None)
    assert "".join(MOVES[int(m)] for m in acted.moves if m >= 0) == (moves or "")


# --- what is paid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "text", "team", "format_", "legal", "main"),
    [
        ("planner", "D D R U ;", 0, 0.1, 0.1, 0.8),
        ("planner", "D R R ;", 0, 0.1, 0.1, 0.0),  # into a static corner, off the goal
        ("planner", "U ;", 0, 0.1, 0.0, 0.8),
        ("planner", ";", 0, 0.1, 0.0, 0.8),
        ("planner", "D", 0, 0.0, 0.0, 0.0),
        ("tool", "D D R U ;", 0, 0.1, 0.1, 0.8),
        ("tool", "D R R ;", 0, 0.1, 0.1, 0.8),  # nearer by Manhattan distance, and lost
        ("tool", "R D ;", 0, 0.1, 0.1, 0.0),  # the box goes down, away from the goal
        ("tool", "U ;", 0, 0.1, 0.0, 0.8),
        ("tool", "D", 0, 0.0, 0.0, 0.0),
    ],
)
def test_appendix_b5_by_hand(role, text, team, format_, legal, main):
    _, got, _ = say(PAPER, START, role, text)
    assert got.team == team
    assert got.local == pytest.approx(format_ + legal + main)
    assert got.components["format"] == pytest.approx(format_)
    assert got.components["potential" if role == "tool" else "deadlock_free"] == pytest.approx(main)


def test_b5_pays_the_share_of_boxes_on_goals_and_one_when_all_are():
    game = PAIR_PAPER
    state, got, done = say(game, start(game, PAIR_ROWS), "planner", "R R ;")
    assert (got.team, done) == (0.5, False)
    assert got.components["deadlock_free"] == pytest.approx(0.8)  # the goal is a corner, and legal
    state, got, done = say(game, state, "planner", "L D ;")
    assert got.team == 0.5
    assert not done
    near = start(game, ["######", "#A..*#", "#.B..#", "##.G.#", "######"])
    lost = say(game, near, "planner", "R D ;")[1]
    assert lost.components["deadlock_free"] == 0  # the second box is pushed into a corner
    assert lost.team == 0.5
    last = start(game, ["######", "#...*#", "#ABG.#", "#....#", "######"])
    assert say(game, last, "planner", "R ;")[1].team == 1.0


@pytest.mark.parametrize(("text", "team", "local"), [("R ;", 1, 1), ("U ;", 0, 1), ("R", 0, 0), (";", 0, 1)])
def test_appendix_b6_by_hand(text, team, local):
    game = game_with(rewards_form="outcome")
    state = start(game, ["######", "#....#", "#ABG.#", "#....#", "######"])
    for role in ("tool", "planner"):
        _, got, _ = say(game, state, role, text)
        assert (got.team, got.local) == (team, local)


def test_safe_pays_for_worth_gained_takes_it_back_and_charges_the_form_most():
    def worth(length):
        return 0.9**length

    def share(now, before):
        return (worth(now) - worth(before)) / (1 - worth(8))

    state, got, _ = say(GAME, start(), "planner", "D D R U ;")
    assert (got.team, got.local) == pytest.approx((share(4, 8), 0.8 * share(4, 8)))
    back, got, _ = say(GAME, state, "planner", "D ;")
    assert got.team == pytest.approx(share(5, 4))
    assert say(GAME, state, "planner", "R")[1].local == pytest.approx(-0.5)
    assert say(GAME, state, "planner", "D D ;")[1].local == pytest.approx(0.8 * share(5, 4) - 0.1)
    assert say(GAME, state, "planner", ";")[1].local == pytest.approx(-0.1)
    assert say(GAME, state, "planner", "L U R R ;")[1].team == pytest.approx(share(0, 4))
    lost = say(GAME, start(), "planner", "D R R ;")[1]
    assert lost.components["deadlock"] == pytest.approx(-0.8 * worth(8) / (1 - worth(8)))
    assert lost.components["progress"] == 0


def test_the_potential_can_be_the_exact_length():
    game = game_with(potential="length")
    _, got, _ = say(game, start(game), "planner", "D D R U ;")
    assert got.team == pytest.approx(0.5)  # four of eight moves
    assert say(game, start(game), "planner", "D R R ;")[1].team == pytest.approx(-(40 - 8) / 8)


def test_two_boxes_may_count_the_same_goal_in_psi():
    size, goals = Size(3, 4, 2), jnp.asarray([0, 11])
    assert int(potential(size, goals, jnp.asarray([1, 4]))) == -2  # both beside the goal in cell 0
    assert int(potential(size, goals, jnp.asarray([1, 10]))) == -2


def test_static_corners_are_a_wall_above_or_below_and_one_at_a_side():
    corners = np.asarray(cornered(Size(3, 4, 1), ROOM.walls)).reshape(3, 4)
    assert corners.tolist() == [[True, False, False, True], [False, False, False, True], [True, False, True, True]]


# --- law 11: no reward is won by gaming ---------------------------------------------------------------------------------------


def solution(game, state, most=None):
    """The first moves of a shortest solution, as words."""
    moves, place, room = [], int(state.place), state.room
    distance, walls = np.asarray(room.distance), np.asarray(room.walls)
    t = tables(game.size)
    while distance[place] > 0 and len(moves) < (most or game.max_moves) and distance[place] < FAR:
        options = {m: t.moved[place, m] for m in range(4) if t.moved[place, m] < game.size.places}
        options = {m: to for m, to in options.items() if not walls[t.holders[to]].any()}
        move = min(options, key=lambda m: distance[options[m]])
        moves.append(MOVES[move])
        place = int(options[move])
    return " ".join([*moves, ";"])


def pace(game, state):
    """A step that pushes nothing and back, else an empty list."""
    rows = tuple(game.picture(state))
    for move, back in ("UD", "DU", "LR", "RL"):
        there = python_move(rows, move)
        if there is not None and sum(row.count("B") for row in there) == sum(row.count("B") for row in rows):
            if python_move(there, back) == rows:
                return f"{move} {back} ;"
    return ";"


ADVERSARIES = {
    "empty_output": lambda game, state: "",
    "empty_list": lambda game, state: ";",
    "copied_prompt": lambda game, state: read(game, state, game.roles[0].name),
    "longest_noise": lambda game, state: "| @r0c0 t0 " * 9,
    "the_formats_example": lambda game, state: "U R D L ;",
    "right_moves_wrong_form": lambda game, state: solution(game, state)[:-2] + " |",
    "right_form_wrong_moves": lambda game, state: "U U U U ;",
    "answer_twice": lambda game, state: solution(game, state, 1) + " " + solution(game, state, 1),
    "loiter": pace,
    "dawdle": lambda game, state: solution(game, state, 1),
    "late": lambda game, state: pace(game, state) if int(state.turn) < 1 else solution(game, state),
    "undo": lambda game, state: "D D R U ;" if int(state.turn) % 2 == 0 else "D L U R ;",
    "prompts_words": lambda game, state: "A:r0c0 $r1c1 ;",
}


def honest(game):
    return {role.name: lambda state: solution(game, state) for role in game.roles}


@pytest.mark.parametrize("rewards", [dict(), dict(potential="length"), dict(rewards_form="outcome")], ids=["safe", "length", "outcome"])
def test_law_11_no_adversary_earns_more_than_an_honest_solution(rewards):
    for game, rows in [(game_with(**rewards), ROWS), (PAIR, PAIR_ROWS)][: 1 if rewards else 2]:
        room = room_from_rows(list(rows))
        best, solved, _ = episode(game, room, honest(game))
        assert solved
        for name, says in ADVERSARIES.items():
            if rewards.get("rewards_form") == "outcome" and name not in ("empty_output", "copied_prompt", "longest_noise", "prompts_words"):
                continue  # the outcome form pays for the form of each turn, as printed
            for roles in (("tool", "planner"), ("tool",), ("planner",)):
                scripts = honest(game) | {role: functools.partial(says, game) for role in roles}
                earned, _, _ = episode(game, room, scripts)
                for role in roles:
                    assert earned[role] <= best[role] + 1e-5, (name, roles, role)


def test_law_11_going_nowhere_earns_nothing_and_the_form_costs_most():
    for name, most in (("loiter", 0.0), ("empty_list", -0.3), ("copied_prompt", -1.5), ("empty_output", -1.5), ("longest_noise", -1.5)):
        says = functools.partial(ADVERSARIES[name], GAME)
        earned, solved, turns = episode(GAME, ROOM, dict(tool=says, planner=says))
        assert (solved, turns) == (False, 3)
        np.testing.assert_allclose(list(earned.values()), most, atol=1e-5)


@functools.cache
def scripted(agents):
    """(noise -> rollout) of the scripted player on train rooms."""
    game = game_with(agents=agents)

    def how(noise):
        return dict(noise=noise, noisy=1.0, repeat=0.0)

    assert game.random_player == how(1.0)
    run = jax.jit(lambda i, noise: play(game, scripted_player(game, **how(noise)), i, jnp.arange(COUNT), jax.random.key(2)))
    return lambda noise: run(instances(GAME, "train"), jnp.float32(noise))


def test_law_11_what_safe_pays_telescopes_whatever_is_played():
    rollout, rooms = scripted("team")(0.9), instances(GAME, "train")
    first = np.asarray(jax.vmap(GAME.reset)(rooms).claims)
    for index, role in enumerate(("tool", "planner")):
        table = rollout.tables[role]

        def paid(x, table=table):
            return np.asarray(jnp.where(table.where, x[..., 0], 0.0))[..., 0].sum(0)

        parts = {name: paid(x) for name, x in table.rewards.components.items()}
        last = np.asarray(rollout.states.claims[-1, :, 0, index])
        gained = (last - first[:, index]) / (1 - first[:, index])
        if role == "planner":
            np.testing.assert_allclose(paid(table.rewards.team), gained, atol=1e-5)
        assert np.all(paid(table.rewards.team) <= gained + 1e-5)  # the Tool is not paid for what the Planner did
        np.testing.assert_allclose(parts["progress"] + parts["deadlock"], 0.8 * paid(table.rewards.team), atol=1e-5)
        assert max(parts["format"].max(), parts["legal"].max(), parts["deadlock"].max()) <= 0
        assert parts["deadlock"].min() < 0


def test_the_documented_holes_of_b5():
    game = PAPER
    best, _, turns = episode(game, ROOM, honest(game))
    assert turns == 2
    loitering, solved, _ = episode(game, ROOM, dict.fromkeys(("tool", "planner"), functools.partial(pace, game)))
    assert not solved
    for role in ("tool", "planner"):  # vacuous truth: walking about pays 1.0 a turn, more than solving
        assert loitering[role] == pytest.approx(4.0)
        assert loitering[role] > best[role]
    nothing, _, _ = episode(game, ROOM, dict.fromkeys(("tool", "planner"), lambda state: ";"))
    assert nothing["planner"] == pytest.approx(4 * 0.9)
    pair = PAIR_PAPER
    room = room_from_rows(PAIR_ROWS)

    def parks(state):
        return "R R ;" if int(state.turn) == 0 else pace(pair, state)

    parking, solved, _ = episode(pair, room, dict(tool=honest(pair)["tool"], planner=parks))
    finishing, done, _ = episode(pair, room, honest(pair))
    assert (solved, done) == (False, True)
    assert parking["planner"] > finishing["planner"]  # one box on its goal pays .5 a turn, and finishing ends the pay
    assert episode(PAIR, room, dict(tool=honest(PAIR)["tool"], planner=parks))[0]["planner"] < 1.0
    assert episode(PAIR, room, honest(PAIR))[0]["planner"] == pytest.approx(1.8)
    unread = start(pair, ["######", "#...*#", "#ABG.#", "#....#", "######"])
    assert say(pair, unread, "planner", "|")[1].team == 0.5  # the printed team reward does not ask for a readable answer


# --- the scripted player, the protocol, and errors ----------------------------------------------------------------------------


@pytest.mark.parametrize("agents", ["team", "single"])
def test_a_script_without_noise_solves_every_room_and_the_floor_few(agents):
    rollout, floor = scripted(agents)(0.0), scripted(agents)(1.0)
    lengths = jax.vmap(lambda room: room.distance[room.place])(instances(GAME, "train"))
    assert bool(jnp.all((rollout.episodes.outcome[:, 0] == 1) == (lengths <= 12)))
    assert float(floor.episodes.outcome.mean()) < 0.5
    for table in (*rollout.tables.values(), *floor.tables.values()):
        assert bool(jnp.all(table.rewards.well_formed | ~table.where[..., None]))


def test_the_game_is_a_game_with_sequential_stages_and_budgets():
    assert isinstance(GAME, Game)
    assert make_game("sokoban", boxes=2) == Sokoban(boxes=2)
    assert GAME.stages == (("tool",), ("planner",))
    assert game_with(agents="single").stages == (("solo",),)
    assert role_of(GAME, "planner").prompt_tokens == role_of(GAME, "tool").prompt_tokens + GAME.max_moves + 2
    assert GAME.picture(start()) == list(ROWS)
    assert hash(game_with()) == hash(GAME)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(height=3), r"height=3 is not in \[4, 10\]"),
        (dict(boxes=3), "boxes=3"),
        (dict(min_walls=4), "max_walls=3 is not in"),
        (dict(min_length=1), "min_length=1"),
        (dict(min_length=9, max_length=8), "max_length=8"),
        (dict(max_moves=0), "max_moves=0"),
        (dict(agents="trio"), "agents='trio' is not one of team, single"),
        (dict(view="half"), "view='half'"),
        (dict(frame="box"), "frame='box'"),
        (dict(rewards_form="b5"), "rewards_form='b5' is not one of safe, paper, outcome"),
        (dict(potential="squared"), "potential='squared'"),
        (dict(potential="power", rewards_form="paper"), "potential has no effect"),
        (dict(height=10, width=10, boxes=2), "boxes=2: a room of this size has"),
    ],
)
def test_law_10_an_impossible_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"sokoban.{message}"):
        make_game("sokoban", **options)


def test_settings_that_contradict_each_other_give_an_instance_that_is_not_valid():
    game = game_with(min_length=FAR - 1, max_length=FAR - 1)
    assert not bool(jax.jit(lambda key: game.valid(game.instance(key, "train")))(jax.random.key(0)))


def test_a_shortest_solution_of_the_example_has_eight_moves():
    assert int(solve(GAME.size, ROOM.walls, ROOM.goals)[ROOM.place]) == 8 == python_length(ROWS)
