"""Plan-Path: what is read and understood, what B.4 and B.6 pay by hand, and that no reward is won by gaming (law 11)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_path_scripts import SCRIPTS, player

from marl_llm.games import Game, PlanPath, make_game, role_of
from marl_llm.games.kit.board_pay import by_outcome
from marl_llm.games.plan_path import map_from_rows, rewards
from marl_llm.games.plan_path.rewards import PlanPathFacts
from marl_llm.rollout import play, scripted_player

GAME = PlanPath(height=3, width=4, min_distance=1, max_distance=8, max_moves=4, max_turns=3, wall_density=0.2)
ROWS = ("A.#.", "#..G", "....")  # four moves to the goal: R D R R
INSTANCE = map_from_rows(list(ROWS))


def game_with(**options):
    return dataclasses.replace(GAME, **options)


@functools.cache
def compiled(game, role):
    """(observe, act and be paid) of a role, compiled once for all tests."""

    def act(state, tokens, where):
        after = game.act(state, role, tokens, where)
        return after, game.rewards(state, after, role)

    return jax.jit(lambda state: game.observe(state, role)), jax.jit(act)


def tokens_of(game, role, text):
    ids = game.tokenizer.encode(text) if text else []
    r = role_of(game, role).response_tokens
    ids, where = ids[:r], np.arange(r) < len(ids)
    return jnp.asarray(ids + [game.tokenizer.pad_id] * (r - len(ids)), jnp.int32), jnp.asarray(where)


def paid(state, role, text, game=GAME):
    after, rewards = compiled(game, role)[1](state, *tokens_of(game, role, text))
    return after, jax.tree.map(float, rewards)


def say(state, role, text, game=GAME):
    return paid(state, role, text, game)[0]


def read(state, role, game=GAME):
    return game.tokenizer.decode(compiled(game, role)[0](state).ids)


# --- what is read and understood ------------------------------------------------------------------------------------------


def test_prompts_read_as_the_protocol_says():
    state = GAME.reset(INSTANCE)
    assert read(state, "tool") == "t0 - r0 c0 @D1R3 #D1 #R2 tool"
    assert read(state, "planner") == "t0 - r0 c0 @D1R3 #D1 #R2 | +- planner"
    state = say(state, "tool", "R1 R2 ;")
    assert read(state, "planner") == "t0 - r0 c0 @D1R3 #D1 #R2 | R R +x planner"
    state = say(state, "planner", "R D ;")
    assert read(state, "tool") == "t1 o r1 c1 @R2 #L1 #U1R1 tool"
    state = say(state, "tool", "| ;")
    assert read(state, "planner") == "t1 o r1 c1 @R2 #L1 #U1R1 | +f planner"
    assert read(say(state, "planner", "R R ;"), "tool") == "t2 g r1 c3 @O #U1L1 #L3 tool"


def test_in_the_split_view_only_the_tool_sees_walls_and_place():
    game = game_with(view="split")
    state = say(game.reset(INSTANCE), "tool", "R1 D1R1 ;", game)
    assert read(state, "tool", game) == "t0 - r0 c0 @D1R3 #D1 #R2 tool"
    assert read(state, "planner", game) == "t0 - @D1R3 | R D +o planner"
    solo = game_with(view="split", agents="single")
    assert read(solo.reset(INSTANCE), "solo", solo) == "t0 - @D1R3 solo"
    assert read(game_with(agents="single").reset(INSTANCE), "solo", game_with(agents="single")).endswith("#D1 #R2 solo")


@functools.cache
def anywhere(game, count=150):
    """States of random maps with the agent on any free cell, at any turn, after anything was said."""
    rng = np.random.default_rng(3)
    maps = jax.jit(jax.vmap(lambda key: game.instance(key, "train")))(jax.random.split(jax.random.key(3), count))
    states = jax.jit(jax.vmap(game.reset))(maps)
    place = [rng.choice(np.argwhere(~walls)) for walls in np.asarray(maps.walls)]
    moves = rng.integers(0, 4, (count, game.max_moves))
    moves[np.arange(game.max_moves)[None] >= rng.integers(0, game.max_moves + 1, count)[:, None]] = -1
    proposal = states.proposal._replace(
        moves=jnp.asarray(moves, jnp.int32), status=jnp.asarray(rng.integers(0, 5, count), jnp.int32)
    )
    return states._replace(
        position=jnp.asarray(place, jnp.int32),
        turn=jnp.asarray(rng.integers(0, game.max_turns, count), jnp.int32),
        status=jnp.asarray(rng.integers(0, 5, count), jnp.int32),
        proposal=proposal,
    )


@pytest.mark.parametrize(
    "options", [dict(), dict(view="split"), dict(agents="single")], ids=["team", "split_view", "single"]
)
def test_law_1_the_text_of_every_prompt_encodes_to_the_very_same_ids(options):
    game = game_with(**options)
    states, texts = anywhere(game), set()
    for role in game.roles:
        prompts = jax.jit(jax.vmap(lambda s, role=role: game.observe(s, role.name)))(states)
        ids, where = np.asarray(prompts.ids), np.asarray(prompts.where)
        assert ids.shape[1] == role.prompt_tokens
        for row, real in zip(ids, where, strict=True):
            text = game.tokenizer.decode(row)
            assert game.tokenizer.encode(text) == row[real].tolist()
            assert real[-1]
            assert np.all(np.diff(real.astype(int)) >= 0)  # padding on the left only
            assert np.all(row[~real] == game.tokenizer.pad_id)
            assert text.endswith(role.name)
            texts.add(text)
    assert len(texts) > 60


def test_a_prompt_names_the_walls_nearest_first_and_all_of_them():
    states = anywhere(GAME)
    prompts = np.asarray(jax.jit(jax.vmap(lambda s: GAME.observe(s, "tool")))(states).ids)
    for i in range(0, len(prompts), 7):
        words = GAME.tokenizer.decode(prompts[i]).split()
        place = np.asarray(states.position[i])
        walls = []
        for word in (w for w in words if w.startswith("#")):
            offset = {"U": 0, "D": 0, "L": 0, "R": 0}
            for j in range(1, len(word), 2):
                offset[word[j]] = int(word[j + 1])
            walls.append((place[0] + offset["D"] - offset["U"], place[1] + offset["R"] - offset["L"]))
        assert set(walls) == {tuple(c) for c in np.argwhere(states.map.walls[i])}
        away = [abs(a - place[0]) + abs(b - place[1]) for a, b in walls]
        assert away == sorted(away)


@pytest.mark.parametrize("view", ["full", "split"])
def test_no_prompt_depends_on_a_solvers_distances(view):
    game = game_with(view=view)
    states = anywhere(game)
    blind = states._replace(map=states.map._replace(distance=states.map.distance * 0 + 5), claims=states.claims + 3)
    for role in game.roles:
        observe = jax.jit(jax.vmap(lambda s, role=role: game.observe(s, role.name)))
        np.testing.assert_array_equal(observe(states).ids, observe(blind).ids)


@pytest.mark.parametrize(
    ("role", "text", "moves", "parses"),
    [
        ("planner", "R R D ;", "RRD", True),
        ("planner", ";", "", True),  # an empty list is understood, and stands still
        ("planner", "R R D L ;", "RRDL", True),
        ("planner", "R R D L R", "", False),  # longer than the list may be: no stop word
        ("planner", "R R", "", False),  # cut off
        ("planner", "", "", False),
        ("planner", "R1 ;", "", False),  # the Tool's language
        ("planner", "R planner ;", "", False),
        ("planner", "R ; R R R", "R", True),  # what follows the stop word does not count
        ("tool", "R1 D1R1 D1R2 ;", "RDR", True),
        ("tool", "R1 O R1 ;", "RLR", True),
        ("tool", ";", "", True),
        ("tool", "R2 ;", "", False),  # a jump
        ("tool", "R1 D1R2 ;", "", False),
        ("tool", "O ;", "", False),  # no move at all
        ("tool", "R1 R1 ;", "", False),
        ("tool", "R D ;", "", False),  # the Planner's language
        ("tool", "R1 D1R1 D1R2 D1R3 R1", "", False),
    ],
)
def test_what_parses_and_to_which_moves(role, text, moves, parses):
    acted = say(GAME.reset(INSTANCE), role, text).acted
    assert bool(acted.well_formed) == parses
    assert "".join("UDLR"[m] for m in np.asarray(acted.moves) if m >= 0) == moves


@pytest.mark.parametrize("executes", [True, False])
def test_an_answer_without_form_earns_nothing_in_the_papers_form_whatever_else_holds(executes):
    good = PlanPathFacts(*map(jnp.asarray, (True, True, True, 3.0, 0.0, 3.0, 3.0, 1.0)))
    earned = rewards.paper(good, executes=executes, strict=False)
    assert (float(earned.team), float(earned.local)) == pytest.approx((1.0, 1.0))
    nothing = rewards.paper(good._replace(well_formed=jnp.asarray(False)), executes=executes, strict=False)
    assert (float(nothing.team), float(nothing.local)) == (0.0, 0.0)


def test_the_outcome_asks_for_form_too():
    for well_formed, at_goal in ((True, True), (True, False), (False, True), (False, False)):
        earned = by_outcome(jnp.asarray(well_formed), jnp.asarray(at_goal))
        assert (float(earned.team), float(earned.local)) == (float(well_formed and at_goal), float(well_formed))


@pytest.mark.parametrize(
    ("text", "end", "status", "legal"),
    [
        ("R D R R ;", (1, 3), "g", True),
        ("R D ;", (1, 1), "o", True),
        ("R R D ;", (0, 1), "x", False),  # a wall stops the list: the D is not made
        ("U R ;", (0, 0), "x", False),  # so does the border
        (";", (0, 0), "o", False),
        ("D R ;", (0, 0), "x", False),
        ("| ;", (0, 0), "f", False),
        ("R D R R R", (0, 0), "f", False),
    ],
)
def test_a_list_runs_until_it_ends_hits_or_arrives(text, end, status, legal):
    state = say(GAME.reset(INSTANCE), "planner", text)
    assert tuple(state.position.tolist()) == end
    assert "-oxgf"[int(state.status)] == status
    assert bool(state.acted.legal) == legal
    assert int(state.turn) == 1
    assert bool(GAME.done(state)) == (status == "g") == bool(GAME.outcome(state))


def test_moves_after_the_goal_are_not_made():
    near = map_from_rows(["AG..", "....", "...."])
    state = say(GAME.reset(near), "planner", "R R R ;")
    assert tuple(state.position.tolist()) == (0, 1)
    assert bool(GAME.done(state))


def test_law_4_acting_leaves_the_state_that_was_acted_on_untouched():
    state = GAME.reset(INSTANCE)
    copy = jax.tree.map(lambda x: np.array(x), state)
    proposed = say(state, "tool", "R1 ;")
    moved = say(proposed, "planner", "R D ;")
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(copy), strict=True):
        np.testing.assert_array_equal(a, b)
    assert tuple(proposed.position.tolist()) == (0, 0)  # the Tool only simulates
    assert tuple(proposed.proposal.end.tolist()) == (0, 1)
    assert tuple(moved.position.tolist()) == (1, 1)


# --- what is paid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "text", "team", "format_", "legal", "main"),
    [
        # Planner: SPNext is the share of listed moves on a shortest path
        ("planner", "R D R R ;", 1.0, 0.1, 0.1, 0.8),
        ("planner", "R D ;", 0.5, 0.1, 0.1, 0.8),
        ("planner", "R D D ;", 0.25, 0.1, 0.1, 0.8 * 2 / 3),  # the last move leads away: 4 -> 3 moves to go
        ("planner", "R L ;", 0.0, 0.1, 0.1, 0.8 / 2),
        ("planner", "R R ;", 0.25, 0.1, 0.0, 0.8 / 2),  # into a wall
        ("planner", ";", 0.0, 0.1, 0.0, 0.0),
        ("planner", "| ;", 0.0, 0.0, 0.0, 0.0),
        # Tool: the shape term is paid for not going away
        ("tool", "R1 D1R1 D1R2 D1R3 ;", 1.0, 0.1, 0.1, 0.8),
        ("tool", "R1 ;", 0.25, 0.1, 0.1, 0.8),
        ("tool", "R1 O ;", 0.0, 0.1, 0.1, 0.8),  # the printed >=: no progress, full pay
        ("tool", ";", 0.0, 0.1, 0.0, 0.8),
        ("tool", "D1 ;", 0.0, 0.1, 0.0, 0.8),
        ("tool", "R2 ;", 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_appendix_b4_by_hand(role, text, team, format_, legal, main):
    game = game_with(rewards_form="paper")
    _, got = paid(game.reset(INSTANCE), role, text, game)
    assert got.team == pytest.approx(team)
    assert got.local == pytest.approx(format_ + legal + main)
    assert got.components["format"] == pytest.approx(format_)
    assert got.components["legal"] == pytest.approx(legal)
    assert got.components["shape" if role == "tool" else "shortest_path"] == pytest.approx(main)


def test_b4_pays_no_shape_for_going_away_and_with_strict_none_for_standing_still():
    for strict, back_and_forth in ((None, 0.8), (True, 0.0)):
        game = game_with(rewards_form="paper", strict=strict)
        second = say(say(game.reset(INSTANCE), "tool", "R1 ;", game), "planner", "R D ;", game)
        assert paid(second, "tool", "U1 ;", game)[1].components["shape"] == 0
        assert paid(second, "tool", "R1 O ;", game)[1].components["shape"] == pytest.approx(back_and_forth)
        assert paid(second, "tool", "R1 ;", game)[1].components["shape"] == pytest.approx(0.8)


def test_b4_measures_by_manhattan_distance_when_asked():
    rows = ["A#G.", ".#..", "...."]  # 6 moves to go, but only 2 apart
    for distance, team in (("bfs", 1 / 6), ("manhattan", 0.0)):
        game = game_with(rewards_form="paper", distance=distance)
        assert paid(game.reset(map_from_rows(rows)), "planner", "D ;", game)[1].team == pytest.approx(team)


@pytest.mark.parametrize(
    ("role", "text", "team", "local"),
    [
        ("planner", "R D R R ;", 1, 1),
        ("planner", "R D R ;", 0, 1),
        ("planner", "| ;", 0, 0),
        ("tool", "R1 D1R1 D1R2 D1R3 ;", 1, 1),
        ("tool", ";", 0, 1),
        ("tool", "R1 D1R1 D1R2 D1R3 O", 0, 0),
    ],
)
def test_appendix_b6_by_hand(role, text, team, local):
    game = game_with(rewards_form="outcome")
    _, got = paid(game.reset(INSTANCE), role, text, game)
    assert (got.team, got.local) == (team, local)


def test_progress_pays_by_the_cell_and_takes_it_back():
    state, got = paid(GAME.reset(INSTANCE), "planner", "R D ;")
    assert (got.team, got.local) == pytest.approx((0.5, 0.4))
    state, got = paid(state, "planner", "U ;")
    assert (got.team, got.local) == pytest.approx((-0.25, -0.2))
    state, got = paid(state, "planner", "| ;")
    assert (got.team, got.local) == pytest.approx((0.0, -0.1))
    state, got = paid(state, "planner", "R ;")  # a wall
    assert (got.team, got.local) == pytest.approx((0.0, -0.1))
    state, got = paid(state, "planner", "D R R ;")
    assert (got.team, got.local) == pytest.approx((0.75, 0.6))


def test_progress_pays_the_tool_for_a_proposal_once_only():
    state, got = paid(GAME.reset(INSTANCE), "tool", "R1 D1R1 D1R2 D1R3 ;")
    assert (got.team, got.local) == pytest.approx((1.0, 0.8))
    state = say(state, "planner", ";")  # the Planner does not follow
    state, got = paid(state, "tool", "R1 D1R1 D1R2 D1R3 ;")
    assert (got.team, got.local) == pytest.approx((0.0, 0.0))


# --- law 11: no reward is won by gaming -----------------------------------------------------------------------------------

ALPHA = 1.0
ARENA = PlanPath(height=4, width=4, min_distance=2, max_distance=6, max_moves=3, max_turns=4, wall_density=0.2)
MAPS = 60


@functools.cache
def arena(game):
    """Random maps of a game."""
    return jax.jit(jax.vmap(lambda key: game.instance(key, "train")))(jax.random.split(jax.random.key(0), MAPS))


def episodes(game, names, teams):
    """Plays teams of scripts on every map. Leading axis of rows: teams, then maps."""
    def spread(x):
        return jnp.tile(x, (len(teams), *(1,) * (x.ndim - 1)))

    who = {r.name: jnp.repeat(jnp.asarray([names.index(t[r.name]) for t in teams]), MAPS) for r in game.roles}
    env = jnp.arange(len(teams) * MAPS)
    run = jax.jit(lambda i, who: play(game, player(game, who, names), i, env, jax.random.key(0)))
    return run(jax.tree.map(spread, arena(game)), who)


def returns(rollout):
    """Episode return of each role `{role: [teams, maps]}` (alpha team + local), success and turns."""
    earned = {}
    for role, table in rollout.tables.items():
        total = jnp.where(table.where, (ALPHA * table.rewards.team + table.rewards.local)[..., 0], 0.0)
        earned[role] = np.asarray(jnp.sum(total, axis=0)).reshape(-1, MAPS)
    return earned, *(np.asarray(x).reshape(-1, MAPS) for x in (rollout.episodes.outcome, rollout.episodes.turns))


@functools.cache
def contest(form="progress"):
    """Every script in both roles, and in one role beside an optimal partner: (teams, rollout)."""
    teams = [dict(tool=name, planner=name) for name in SCRIPTS]
    teams += [dict(tool=name, planner="optimal") for name in SCRIPTS[1:]]
    teams += [dict(tool="optimal", planner=name) for name in SCRIPTS[1:]]
    return teams, episodes(dataclasses.replace(ARENA, rewards_form=form), SCRIPTS, teams)


def test_an_optimal_team_earns_the_most_there_is():
    earned, success, turns = returns(contest()[1])
    assert success[0].all()
    assert turns[0].max() == 2
    for total in earned.values():
        np.testing.assert_allclose(total[0], ALPHA + 0.8, atol=1e-5)


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_law_11_no_adversary_earns_more_than_an_optimal_plan(name):
    """In either role or both, beside a partner of its kind or an optimal one."""
    teams, rollout = contest()
    earned, success, _ = returns(rollout)
    for i, team in enumerate(teams):
        if name not in team.values():
            continue
        for role, total in earned.items():
            assert total[i].max() <= ALPHA + 0.8 + 1e-5, (team, role)
        arrives = team["planner"] in ("optimal", "late")
        assert success[i].all() if arrives else not success[i].all(), team
        lost = success[i] == 0
        assert np.all(earned["planner"][i][lost] < ALPHA + 0.8 - 0.1), team  # no pay in full without arriving


@pytest.mark.parametrize("name", ["still", "loiter", "bump", "overlong", "unparsable"])
def test_law_11_going_nowhere_earns_nothing_or_less(name):
    earned, _, turns = returns(contest()[1])
    i = SCRIPTS.index(name)
    assert np.all(turns[i] == ARENA.max_turns)
    for total in earned.values():
        if name == "bump":  # on a cell without a wall beside it the script takes a step instead
            assert total[i].max() <= 0
            assert np.isclose(total[i], -0.1 * ARENA.max_turns).mean() > 0.5
        else:
            np.testing.assert_allclose(total[i], 0.0 if name == "loiter" else -0.1 * ARENA.max_turns, atol=1e-5)


def test_law_11_dawdling_and_arriving_late_earn_what_the_way_is_worth():
    """One cell per turn, or loitering first: at most the same 1.8, and exactly that when the goal is reached."""
    earned, success, turns = returns(contest()[1])
    for name in ("dawdle", "late"):
        i = SCRIPTS.index(name)
        arrived = success[i] == 1
        np.testing.assert_allclose(earned["planner"][i][arrived], ALPHA + 0.8, atol=1e-5)
        assert arrived.any()
        assert turns[i].mean() > turns[0].mean() + 1
    assert not success[SCRIPTS.index("dawdle")].all()


def test_law_11_under_safe_a_tool_is_not_paid_for_what_the_planner_did():
    """And the known hole of `progress`, which pays it."""
    for form, pay in (("progress", 0.5), ("safe", 0.0)):
        game = game_with(rewards_form=form)
        state = say(game.reset(INSTANCE), "tool", "| ;", game)  # cannot be read
        state = say(state, "planner", "R D ;", game)  # half of the way
        _, got = paid(state, "tool", ";", game)
        assert (got.team, got.local) == pytest.approx((pay, 0.8 * pay - 0.1)), form


def test_law_11_under_safe_no_adversary_earns_more_than_an_optimal_plan():
    teams, rollout = contest("safe")
    earned, _, _ = returns(rollout)
    (lucky, _, _), bound = returns(contest()[1]), ALPHA + 0.8
    for i, team in enumerate(teams):
        assert max(total[i].max() for total in earned.values()) <= bound + 1e-5, team
        np.testing.assert_allclose(earned["planner"][i], lucky["planner"][i], atol=1e-5)  # to the Planner the two forms are one
        if team["tool"] in ("still", "loiter", "overlong", "unparsable"):
            assert earned["tool"][i].max() <= 1e-5, team
    for total in earned.values():
        np.testing.assert_allclose(total[0], bound, atol=1e-5)  # both optimal
    assert max(lucky["tool"][i].max() for i, team in enumerate(teams) if team["tool"] == "still") > 0.5


def test_law_11_a_single_agent_earns_no_more_by_gaming():
    game = dataclasses.replace(ARENA, agents="single")
    names = ("optimal", "loiter", "late", "bump")
    earned = returns(episodes(game, names, [dict(solo=name) for name in names]))[0]["solo"]
    np.testing.assert_allclose(earned[0], ALPHA + 0.8, atol=1e-5)
    assert earned.max() <= ALPHA + 0.8 + 1e-5


@pytest.mark.parametrize("distance", ["bfs", "manhattan"])
def test_law_11_the_positive_terms_telescope_whatever_is_played(distance):
    """What progress paid is 0.8 (d_0 - e_T) / d_0 over every episode, and the other terms are never positive."""
    game = dataclasses.replace(ARENA, distance=distance)
    if distance == "bfs":
        rollout = contest()[1]
    else:
        script = scripted_player(game, noise=0.8)
        rollout = jax.jit(lambda i: play(game, script, i, jnp.arange(MAPS), jax.random.key(1)))(arena(game))
    for index, role in enumerate(("tool", "planner")):
        table = rollout.tables[role]

        def paid_out(x, table=table):
            return np.asarray(jnp.where(table.where, x[..., 0], 0.0))[..., 0]

        parts = {k: paid_out(v) for k, v in table.rewards.components.items()}
        assert max(parts["format"].max(), parts["legal"].max()) <= 0
        assert parts["legal"].min() < 0
        last = np.asarray(rollout.states.claims[-1, :, 0, index])
        start = np.asarray(jax.vmap(game.reset)(arena(game)).claims[:, index])
        start = np.tile(start, len(last) // MAPS)
        np.testing.assert_allclose(parts["progress"].sum(0), 0.8 * (start - last) / start, atol=1e-5)
        assert (paid_out(table.rewards.team) + parts["progress"]).sum(0).max() <= ALPHA + 0.8 + 1e-5


def test_the_documented_hole_of_b4_loitering_pays_the_tool_unless_strict():
    names = ("loiter", "optimal")
    teams = [dict(tool=name, planner=name) for name in names]
    paper = dataclasses.replace(ARENA, rewards_form="paper")
    loitering, optimal = returns(episodes(paper, names, teams))[0]["tool"]
    np.testing.assert_allclose(loitering, 1.0 * ARENA.max_turns, atol=1e-5)  # 0.1 + 0.1 + 0.8 each turn, for nothing
    one_turn = np.isclose(optimal, 2.0)
    assert one_turn.any()
    assert np.all(loitering[one_turn] > optimal[one_turn])
    loitering, optimal = returns(episodes(dataclasses.replace(paper, strict=True), names, teams))[0]["tool"]
    np.testing.assert_allclose(loitering, 0.2 * ARENA.max_turns, atol=1e-5)
    assert np.all(optimal > loitering)


# --- the scripted player, the protocol, and errors ------------------------------------------------------------------------


@pytest.mark.parametrize("agents", ["team", "single"])
def test_a_sighted_script_without_noise_solves_every_map(agents):
    game = dataclasses.replace(ARENA, agents=agents)
    script = scripted_player(game, noise=0.0, sighted=1.0)
    run = jax.jit(lambda i: play(game, script, i, jnp.arange(MAPS), jax.random.key(2), branches=3))
    rollout = run(arena(game))
    assert float(rollout.episodes.outcome.mean()) == 1.0
    for table in rollout.tables.values():
        where = table.where[..., None]
        assert bool(jnp.all(table.rewards.well_formed | ~where))


def test_the_scripts_options_do_what_they_say():
    """From one cell with three free neighbours: a sighted script takes the shortest way, noise and the floor stray from it."""
    state = GAME.reset(map_from_rows(["....", "A..G", "...."]))
    keys = jax.random.split(jax.random.key(0), 1500)

    def first_moves(**options):
        run = jax.jit(jax.vmap(lambda key: GAME.script(state, "planner", key, **options)))
        words = np.asarray(run(keys)[0])[:, 0]
        return np.bincount([GAME.language.ids(*"UDLR").tolist().index(w) for w in words], minlength=4) / len(keys)

    np.testing.assert_allclose(first_moves(noise=0.6, sighted=1.0), [0.2, 0.2, 0, 0.6], atol=0.05)
    np.testing.assert_allclose(first_moves(**GAME.random_player), [1 / 3, 1 / 3, 0, 1 / 3], atol=0.05)


def test_the_script_repeats_the_proposal_as_often_as_asked():
    state = say(GAME.reset(INSTANCE), "tool", "R1 O R1 ;")
    keys = jax.random.split(jax.random.key(0), 500)
    run = jax.jit(jax.vmap(lambda key: GAME.script(state, "planner", key, noise=0.0, sighted=1.0, repeat=0.4)))
    texts = [GAME.tokenizer.decode(row) for row in np.asarray(run(keys)[0])]
    assert set(texts) == {"R L R ;", "R D R R ;"}
    assert texts.count("R L R ;") / 500 == pytest.approx(0.4, abs=0.07)


def test_the_game_is_a_game_with_sequential_stages_and_budgets():
    assert isinstance(GAME, Game)
    assert GAME.stages == (("tool",), ("planner",))
    assert game_with(agents="single").stages == (("solo",),)
    assert [r.response_tokens for r in GAME.roles] == [5, 5]
    assert role_of(GAME, "planner").prompt_tokens == role_of(GAME, "tool").prompt_tokens + GAME.max_moves + 2
    assert GAME.task(INSTANCE) == {"map": list(ROWS), "distance": 4}
    assert GAME.picture(GAME.reset(INSTANCE)) == list(ROWS)
    assert game_with() == GAME
    assert hash(game_with()) == hash(GAME)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(height=1), r"height=1 is not in \[2, 32\]"),
        (dict(width=33), r"width=33 is not in \[2, 32\]"),
        (dict(max_moves=0), "max_moves=0"),
        (dict(max_turns=0), "max_turns=0"),
        (dict(min_distance=0), "min_distance=0"),
        (dict(min_distance=5, max_distance=4), "max_distance=4 is not in"),
        (dict(wall_density=0.6), "wall_density=0.6"),
        (dict(agents="trio"), "agents='trio' is not one of team, single"),
        (dict(view="half"), "view='half' is not one of full, split"),
        (dict(rewards_form="b4"), "rewards_form='b4' is not one of progress, paper, outcome"),
        (dict(distance="l2"), "distance='l2'"),
        (dict(strict=True), "strict has no effect unless rewards_form='paper'"),
        (dict(max_walls=-1), "max_walls=-1"),
        (dict(max_walls=36), "max_walls=36"),
    ],
)
def test_law_10_an_impossible_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"plan_path.{message}"):
        make_game("plan_path", **options)


def test_law_10_unknown_options_and_roles_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no option 'hight'; did you mean 'height'"):
        make_game("plan_path", hight=3)
    with pytest.raises(KeyError, match="no role 'solo'.*tool, planner"):
        role_of(GAME, "solo")
