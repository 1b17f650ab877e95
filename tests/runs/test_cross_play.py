"""Every pair in every seat: tables and ratings of players whose results are known, and what the command refuses."""

import itertools

import numpy as np
import pytest

from experiments.configs import matrix
from marl_llm.evaluation import Evaluation, Outcome, elo_ratings
from marl_llm.evaluation.intervals import clustered
from marl_llm.runs.command import ConfigError
from marl_llm.runs.cross_play import cross_play, csv_rows, spread_steps, table_rows
from marl_llm.runs.resolve import resolve

TASKS = 6


class FixedTeam:
    """A team whose evaluation follows from the numbers that its seats name; it notes what was asked."""

    def __init__(self, roles, result):
        self.roles, self.result, self.asked = roles, result, []

    def evaluate(self, seats, split, tasks, temperature):
        self.asked.append(tuple(seats[role] for role in self.roles))
        values = [self.result({role: int(seats[role]) for role in self.roles}, task) for task in range(tasks)]
        outcomes = tuple(
            Outcome(task, 0, value.pop("score", 0.0), 1, value.pop("aborted", False), value) for task, value in enumerate(values)
        )
        return Evaluation(split, seats, temperature, "success", outcomes, {})


def duel(seats, task):
    """The higher number wins; equal ones, and every third task, are drawn; the first seat wins task 0; task 5 is aborted."""
    gap = seats["first"] - seats["second"]
    first = 1.0 if task == 0 else 0.0 if task == 3 else float(np.sign(gap))
    return {"result_first": first, "result_second": -first, "aborted": task == 5}


def test_every_pair_plays_in_both_seats_and_the_table_counts_who_won():
    team = FixedTeam(("first", "second"), duel)
    found = cross_play(team, {"a": "1", "b": "2", "c": "3"}, "test", TASKS)
    assert found.competitive
    assert {pair for pair in team.asked if pair[0] != pair[1]} == set(itertools.permutations("123", 2))
    # of 5 episodes in each seat: the seat of "first" wins one, one is drawn, the higher number wins three
    assert found.wins.tolist() == [[0, 1, 1], [7, 0, 1], [7, 7, 0]]
    assert found.draws.tolist() == [[0, 2, 2], [2, 0, 2], [2, 2, 0]]
    assert found.plays[0, 1] == found.plays[1, 0] == 10
    assert found.score[1, 0] == pytest.approx(0.8)
    assert found.score[0, 1] == pytest.approx(0.2)
    assert np.isnan(found.score[0, 0])
    assert np.array_equal(found.ratings().rating, elo_ratings(found.wins, found.draws).rating)
    assert np.all(np.diff(found.ratings().rating) > 0)
    head, *rows = csv_rows(found)
    assert dict(zip(head, rows[0])) | {"elo": 0, "elo_low": 0, "elo_high": 0} == {
        "player": "a", "other": "b", "plays": 10, "wins": 1, "draws": 2, "losses": 7, "score": "0.200000",
        "elo": 0, "elo_low": 0, "elo_high": 0,
    }  # fmt: skip
    assert len(rows) == 6
    assert table_rows(found)[0] == ["player", "Elo", "95 %", "a", "b", "c"]
    assert table_rows(found)[1][3:] == ["", "0.200", "0.200"]


def test_a_shared_outcome_gives_self_play_and_cross_play_without_ratings():
    team = FixedTeam(("left", "right"), lambda seats, task: {"score": float(seats["left"] == seats["right"] or task == 0)})
    found = cross_play(team, {"a": "1", "b": "2", "c": "3"}, "test", 4)
    assert not found.competitive
    assert found.ratings() is None
    assert found.score.tolist() == [[1.0, 0.25, 0.25], [0.25, 1.0, 0.25], [0.25, 0.25, 1.0]]
    means = found.means()
    assert (means["self_play"][0], means["cross_play"][0]) == (1.0, 0.25)
    assert means["cross_play"][1:] == clustered([[1.0] * 6, *[[0.0] * 6] * 3])  # a task's six episodes belong together
    assert table_rows(found)[1] == ["a", "1.000", "0.250", "0.250"]
    assert len(csv_rows(found)) == 10


def test_a_graded_outcome_counts_in_place_of_success():
    team = FixedTeam(("left", "right"), lambda seats, task: {"score": 0.0, "outcome": 0.5 if seats["left"] == seats["right"] else 0.25})
    found = cross_play(team, {"a": "1", "b": "2"}, "test", 2)
    assert found.score.tolist() == [[0.5, 0.25], [0.25, 0.5]]


def test_with_three_roles_each_player_is_alone_in_every_seat_once():
    team = FixedTeam(("x", "y", "z"), lambda seats, task: {"score": 1.0})
    cross_play(team, {"a": "1", "b": "2"}, "test", 1)
    alone = [tuple(one if number == seat else other for number in range(3)) for one, other in ("12", "21") for seat in range(3)]
    assert sorted(team.asked) == sorted([("1", "1", "1"), ("2", "2", "2"), *alone])


def test_what_cannot_be_played_is_refused():
    with pytest.raises(ConfigError, match="two players"):
        cross_play(FixedTeam(("x", "y"), duel), {"a": "1"}, "test", 1)
    with pytest.raises(ConfigError, match="two roles"):
        cross_play(FixedTeam(("x",), duel), {"a": "1", "b": "2"}, "test", 1)
    assert spread_steps([0, 5], 12) == [0, 5]


def test_the_command_names_checkpoints_and_refuses_those_that_are_not_there(tmp_path):
    from marl_llm.cli.league import players_of

    for run, steps in (("a", (0, 5, 10)), ("b", (0, 20))):
        for step in steps:
            folder = tmp_path / run / "checkpoints" / str(step)
            folder.mkdir(parents=True)
            (folder / "state.json").write_text("{}")
    a, b = f"{tmp_path}/a", f"{tmp_path}/b"
    assert players_of([a], 12) == {step: f"run:{a}@{step}" for step in ("0", "5", "10")}
    assert players_of([a], 2) == {"0": f"run:{a}@0", "10": f"run:{a}@10"}
    assert players_of([f"{a}@5", b], 12) == {"a@5": f"run:{a}@5", "b@20": f"run:{b}@20"}
    for wrong, why in (([f"{a}@7", b], "no checkpoint 7"), ([a, a], "twice"), ([f"{a}@5"], "two are needed"), ([f"{a}/x"], "none")):
        with pytest.raises(ConfigError, match=why):
            players_of(wrong, 12)


def test_the_config_of_a_league_resolves():
    with resolve(matrix.get_config("league")) as plan:
        assert plan.assignment.roles == {"first": "shared", "second": "shared"}
        assert plan.recipe.returns == "immediate"
