"""Matrix games: cells as printed, parts that sum to the joint utility, equilibria against brute force, bad matrices by their cell."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.games import Game, MatrixGame, make_game
from marl_llm.games.matrix import POSG_1, POSG_2, best_responses, mixed_equilibrium, nash_equilibria, read_matrix

GAMES = {"posg_1": MatrixGame(first=POSG_1[0], second=POSG_1[1]), "posg_2": MatrixGame(first=POSG_2[0], second=POSG_2[1])}
PRINTED = {  # Table 5: (agent 1, agent 2) of each cell
    "posg_1": {(1, 1): (5, 5), (1, 2): (3, 4), (2, 1): (4, 3), (2, 2): (0, 0)},
    "posg_2": {(1, 1): (5, 5), (1, 2): (1, 6), (2, 1): (6, 1), (2, 2): (0, 0)},
}


def say(game, state, role, word):
    return game.act(state, role, jnp.asarray(game.tokenizer.ids_of([word]), jnp.int32), jnp.ones((1,), bool))


def paid(game, *words):
    before = game.reset(jnp.int32(0))
    after = before
    for role, word in zip(("first", "second"), words):
        after = say(game, after, role, word)
    return after, [game.rewards(before, after, role) for role in ("first", "second")]


@pytest.mark.parametrize("name", GAMES)
def test_every_cell_pays_as_printed_and_local_sums_to_team(name):
    for cell, parts in PRINTED[name].items():
        after, rewards = paid(GAMES[name], *map(str, cell))
        assert [float(one.local) for one in rewards] == list(parts)
        assert [float(one.team) for one in rewards] == [sum(parts)] * 2
        assert float(GAMES[name].outcome(after)) == pytest.approx(sum(parts) / 10)
        assert all(bool(one.well_formed) for one in rewards)


def test_a_word_that_is_no_action_earns_what_the_worst_cell_pays_and_only_its_speaker_is_ill_formed():
    for words in (("first", "1"), (";", "1"), ("1", "second")):
        after, rewards = paid(GAMES["posg_1"], *words)
        assert [(float(one.team), float(one.local)) for one in rewards] == [(0, 0)] * 2
        assert [bool(one.well_formed) for one in rewards] == [word == "1" for word in words]
        assert float(GAMES["posg_1"].outcome(after)) == 0


def test_the_equilibria_are_those_of_the_paper():
    first, second = GAMES["posg_1"].tables[1:]
    assert nash_equilibria(first, second) == [(0, 0)]
    assert mixed_equilibrium(first, second) is None
    first, second = GAMES["posg_2"].tables[1:]
    assert nash_equilibria(first, second) == [(0, 1), (1, 0)]
    assert mixed_equilibrium(first, second) == (0.5, 0.5, 6.0)
    assert best_responses(first, second) == ([{1}, {0}], [{1}, {0}])


def test_equilibria_agree_with_brute_force_on_random_matrices():
    rng = np.random.default_rng(0)
    for size in (2, 3, 2, 4, 2):
        for _ in range(20):
            first, second = rng.integers(0, 5, (2, size, size)).astype(float)
            want = [(i, j) for i, j in itertools.product(range(size), repeat=2)
                    if all(first[i, j] >= first[k, j] and second[i, j] >= second[i, k] for k in range(size))]  # fmt: skip
            assert nash_equilibria(first, second) == want
            if size == 2 and (mixed := mixed_equilibrium(first, second)):
                p, q, utility = np.array([mixed[0], 1 - mixed[0]]), np.array([mixed[1], 1 - mixed[1]]), mixed[2]
                assert np.ptp(first @ q) < 1e-12
                assert np.ptp(p @ second) < 1e-12
                assert utility == pytest.approx(p @ (first + second) @ q)
    with pytest.raises(ValueError, match="computed for 2 x 2"):
        mixed_equilibrium(np.eye(3), np.eye(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"utility": "10 7; 7"}, "matrix.utility: row 2 has 1 entries, but there are 2 rows; the matrix must be square"),
        ({"utility": "10 7; nan 0"}, "matrix.utility: cell (2, 1) is nan; a finite number is needed"),
        ({"first": "5 x; 4 0"}, "matrix.first: cell (1, 2) is 'x', which is no number"),
        ({"second": "5 4; 3 1"}, "in cell (2, 2) the parts 0 + 1 do not sum to the utility 0"),
        ({"first": "5 3 1; 4 0 1; 1 1 1"}, "matrix.first has 3 actions and matrix.utility 2"),
        ({"utility": "1"}, "1 actions are not in [2, 9]"),
        ({"utility": "2 2; 2 2", "first": "1 1; 1 1", "second": "1 1; 1 1"}, "all cells are equal"),
    ],
)
def test_a_bad_matrix_is_named_with_its_cell(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_game("matrix", **options)


def test_the_game_has_one_task_two_speakers_at_once_and_a_uniform_script():
    game = MatrixGame()
    assert isinstance(game, Game)
    assert game.stages == (("first", "second"),)
    assert game.task(0)["utility"] == read_matrix("10 7; 7 0", "x").tolist()
    state = game.reset(game.instance(jax.random.key(0), "test"))
    assert bool(game.valid(jnp.int32(0)))
    assert not bool(game.done(state))
    assert [game.tokenizer.decode(game.observe(state, role).ids) for role in ("first", "second")] == ["first", "second"]
    ids = jax.vmap(lambda key: game.script(state, "first", key)[0])(jax.random.split(jax.random.key(0), 400))
    said = [game.tokenizer.decode(row) for row in np.asarray(ids)]
    assert set(said) == {"1", "2"}
    assert 150 < said.count("1") < 250
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        game.instance(jax.random.key(0), "dev")
