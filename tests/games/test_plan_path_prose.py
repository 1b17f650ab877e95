"""Plan-Path in ordinary text: what a chat model reads, and how what it writes is read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.games import PlanPath, role_of
from marl_llm.games.hosted import TextGame
from marl_llm.games.plan_path import map_from_rows

GAME = PlanPath(height=3, width=4, min_distance=1, max_distance=8, max_moves=4, max_turns=3, wall_density=0.2)
STATE = GAME.reset(map_from_rows(["A.#.", "#..G", "...."]))


@functools.cache
def acts(role):
    return jax.jit(lambda state, tokens, where: GAME.act(state, role, tokens, where))


def after(role, text):
    """The state after a role wrote a text."""
    ids = GAME.read(STATE, role, text)
    size = role_of(GAME, role).response_tokens
    assert len(ids) <= size
    assert all(0 <= i < GAME.tokenizer.vocab_size for i in ids)
    padded = jnp.asarray([*ids, *[GAME.tokenizer.pad_id] * (size - len(ids))], jnp.int32)
    return acts(role)(STATE, padded, jnp.arange(size) < len(ids))


def moves(role, text):
    """The moves that a text is understood as; None if it does not parse."""
    acted = after(role, text).acted
    return "".join("UDLR"[m] for m in acted.moves if m >= 0) if acted.well_formed else None


def test_plan_path_has_a_text():
    assert isinstance(GAME, TextGame)


@pytest.mark.parametrize("role", ["tool", "planner"])
@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("R, D, R, R", "RDRR"),
        ("rdrr", "RDRR"),
        ("First right, then down.\nMoves: right down", "RD"),
        ("Moves: U\nNo, wait.\n**Moves:** `R -> D`", "RD"),
        ("answer: [R, D]", "RD"),
        ('I would say ["R", "D"].', "RD"),
        ("→ ↓", "RD"),
        ("→↓", "RD"),
        ("Moves:", ""),
        ("", ""),
        ("Moves: R D R R R", None),  # more than max_moves
        ("Moves: R and D", None),
        ("go right", None),
        ("Moves: R1x", None),
        ("[[R]", "R"),
        ("\ud800", None),
        ("R" * 1_000_000, None),
        ("[" * 200_000, None),
        ("moves:" * 100_000, ""),
    ],
)
def test_a_list_of_moves_is_read_as_the_grammar_says(role, text, read):
    assert moves(role, text) == read


def test_the_tool_may_write_cells_and_the_planner_may_not():
    assert moves("tool", "R1 D1R1") == "RD"
    assert moves("tool", "Moves: R1, D1R1;") == "RD"
    assert moves("tool", "R1 D2R2") is None  # no neighbours
    assert moves("planner", "R1 D1R1") is None
    assert moves("tool", "Moves: D9") is None
    assert moves("tool", "D D D D") is None  # four down: no cell of the language


def test_the_same_moves_lead_to_the_same_state_from_text_as_from_words():
    for role, words in (("planner", "R D"), ("tool", "R1 D1R1")):
        ids = GAME.tokenizer.encode(words + " ;")
        size = role_of(GAME, role).response_tokens
        own = acts(role)(STATE, jnp.asarray([*ids, *[0] * (size - len(ids))], jnp.int32), jnp.arange(size) < len(ids))
        jax.tree.map(np.testing.assert_array_equal, own, after(role, "Moves: right, down"))


def test_a_prompt_tells_what_the_compact_one_tells():
    text = GAME.text(STATE, "tool")
    assert "A.#.\n#..G\n....\n" in text
    assert "This is turn 1 of 3." in text
    assert "1 down and 3 right of you" in text
    proposed = after("tool", "R D R R")
    text = GAME.text(proposed, "planner")
    assert "The Tool's proposal: R, D, R, R; in the simulation it reached the goal." in text
    assert "stopped by a wall" in GAME.text(after("planner", "D"), "tool")
    assert "could not be read" in GAME.text(after("planner", "what?"), "tool")


def test_no_prompt_tells_a_distance_and_a_split_view_hides_the_map():
    split = PlanPath(height=3, width=4, min_distance=1, max_distance=8, max_moves=4, max_turns=3, wall_density=0.2, view="split")
    text = split.text(STATE, "planner")
    assert "#" not in text
    assert "row 1" not in text
    assert "A.#." in split.text(STATE, "tool")
    far = STATE._replace(map=STATE.map._replace(distance=STATE.map.distance + 7))
    for role in ("tool", "planner"):
        assert GAME.text(far, role) == GAME.text(STATE, role)
