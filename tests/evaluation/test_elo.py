"""Ratings against scipy's optimiser, closed forms and simulated players; priorities of opponents at their edges."""

import math

import numpy as np
import pytest
from scipy.optimize import root
from scipy.special import expit

from marl_llm.evaluation import elo_ratings, opponent_priorities, rating_against
from marl_llm.evaluation.elo import POINTS


def by_scipy(wins, draws, prior):
    """An independent solution: the equations of the maximum pair by pair, solved by MINPACK; without a prior the first player is 0."""
    size = len(wins)

    def slopes(r):
        found = []
        for i in range(size):
            total = prior * (1 - 2 / (1 + math.exp(-r[i])))
            for j in range(size):
                total += (wins[i, j] + draws[i, j] / 2) / (1 + math.exp(r[i] - r[j]))
                total -= (wins[j, i] + draws[j, i] / 2) / (1 + math.exp(r[j] - r[i]))
            found.append(total)
        return found if prior else [r[0], *found[1:]]

    found = root(slopes, np.zeros(size), tol=1e-14).x
    return (found - found.mean()) * 400 / math.log(10)


def counts(seed, size, most=12):
    rng = np.random.default_rng(seed)
    wins = rng.integers(0, most, (size, size)).astype(float)
    draws = np.triu(rng.integers(0, 5, (size, size)), 1).astype(float)
    np.fill_diagonal(wins, 0)
    return wins, draws + draws.T


@pytest.mark.parametrize(("size", "prior"), [(2, 1.0), (5, 1.0), (5, 0.0), (12, 0.25)])
def test_ratings_are_those_of_an_independent_optimiser(size, prior):
    wins, draws = counts(size, size)
    assert np.allclose(elo_ratings(wins, draws, prior=prior).rating, by_scipy(wins, draws, prior), rtol=0, atol=1e-6)


def test_two_players_have_the_closed_form_and_its_interval():
    """r_1 − r_2 = log(wins / losses), with the variance 1 / (n p (1 − p)); each lies half of that from the mean."""
    found = elo_ratings([[0, 30], [10, 0]], prior=0.0)
    gap, deviation = math.log(3), 1 / math.sqrt(40 * 0.75 * 0.25)
    assert np.allclose(found.rating, [POINTS * gap / 2, -POINTS * gap / 2], rtol=0, atol=1e-6)
    assert np.allclose(found.high - found.rating, POINTS * 1.959963984540054 * deviation / 2, rtol=0, atol=1e-6)
    assert elo_ratings([[0, 10], [1, 0]], prior=0.0).rating[0] * 2 == pytest.approx(400)  # ten to one


def test_a_draw_is_half_a_win_of_each():
    drawn = elo_ratings([[0, 3], [1, 0]], [[0, 4], [4, 0]])
    halves = elo_ratings([[0, 5], [3, 0]])
    assert np.allclose(drawn.rating, halves.rating)
    assert np.allclose(elo_ratings([[0, 0], [0, 0]], [[0, 9], [9, 0]]).rating, 0)


def test_a_player_that_never_lost_has_the_finite_rating_of_the_prior():
    """Of two players the ratings are r and −r: 20 (1 − σ(2 r)) pulls them apart, and the prior's 1 − 2 σ(r) together."""
    found = elo_ratings([[0, 20], [0, 0]])
    half = found.rating[0] / POINTS
    assert 20 * (1 - expit(2 * half)) + 1 - 2 * expit(half) == pytest.approx(0, abs=1e-9)
    assert found.high[0] - found.low[0] > 200  # and says how little is known
    with pytest.raises(ValueError, match=r"players \[1\] .* infinite"):
        elo_ratings([[0, 20], [0, 0]], prior=0.0)


def test_intervals_hold_the_truth_of_simulated_players():
    truth, rng, held = np.linspace(-1.0, 1.0, 6), np.random.default_rng(3), []
    chance = expit(truth[:, None] - truth)
    for _ in range(300):
        upper = np.triu(rng.binomial(20, chance), 1).astype(float)
        wins = upper + np.triu(20 - upper, 1).T
        found = elo_ratings(wins, prior=0.1)
        held.append((found.low <= POINTS * truth) & (POINTS * truth <= found.high))
    assert 0.93 <= np.mean(held) <= 0.97


@pytest.mark.parametrize(
    ("wins", "draws", "prior", "why"),
    [
        ([[0, 1, 0], [1, 0, 0], [0, 0, 0]], None, 1.0, "players 2 and 0 are connected by no chain"),
        ([[0, 1], [1, 0]], [[0, 1], [0, 0]], 1.0, "symmetric"),
        ([[1, 1], [1, 0]], None, 1.0, "diagonal"),
        ([[0, -1], [1, 0]], None, 1.0, "counts"),
        ([[0, math.nan], [1, 0]], None, 1.0, "counts"),
        ([[0, 1, 1], [1, 0, 1]], None, 1.0, "square"),
        (np.zeros((0, 0)), None, 1.0, "square"),
        ([[0, 1], [1, 0]], None, -1.0, "prior"),
        ([[0, 3, 3], [0, 0, 1], [0, 1, 0]], None, 0.0, "infinite"),
    ],
)
def test_tables_that_have_no_ratings_are_refused_in_one_line(wins, draws, prior, why):
    with pytest.raises(ValueError, match=why) as caught:
        elo_ratings(wins, draws, prior=prior)
    assert "\n" not in str(caught.value)


def test_a_rating_against_known_opponents():
    assert rating_against([0.75], [1e9], [100.0]) == pytest.approx(100 + 400 * math.log10(3), abs=1e-4)
    assert rating_against([], [], [], around=70.0) == pytest.approx(70)
    always = rating_against([1.0, 1.0], [50, 50], [0.0, 200.0])
    assert 200 < always < rating_against([1.0, 1.0], [500, 500], [0.0, 200.0]) < 5000
    mirrored = rating_against([0.8, 0.1], [30, 10], [0.0, 300.0])
    assert rating_against([0.2, 0.9], [30, 10], [0.0, -300.0]) == pytest.approx(-mirrored, abs=1e-6)
    with pytest.raises(ValueError, match="as many of each"):
        rating_against([0.5], [1, 2], [0.0])


def test_priorities_and_their_degenerate_cases():
    rates = [0.1, 0.5, 0.9]
    hard, even = opponent_priorities(rates), opponent_priorities(rates, "even")
    assert np.allclose(hard, np.array([0.81, 0.25, 0.01]) / 1.07)
    assert np.allclose(even, np.array([0.09, 0.25, 0.09]) / 0.43)
    assert np.allclose(opponent_priorities(rates, exponent=1.0), np.array([0.9, 0.5, 0.1]) / 1.5)
    for kind in ("hard", "even", "uniform"):
        assert np.allclose(opponent_priorities([1.0, 1.0], kind), 0.5)  # all are always beaten
        assert np.allclose(opponent_priorities([math.nan, 0.5], kind), 0.5)  # one was never met
        assert opponent_priorities([0.3], kind).tolist() == [1.0]
    for bad in (([],), ([1.2],), ([0.5], "easy"), ([0.5], "hard", 0.0)):
        with pytest.raises(ValueError, match="must be one"):
            opponent_priorities(*bad)
