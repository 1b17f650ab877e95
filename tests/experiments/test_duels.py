"""Every seat against fixed opponents: who sits where, what is counted, and how sure it is."""

import contextlib
import json
import pathlib
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from marl_llm.evaluation import Evaluation, Outcome, clustered
from marl_llm.runs.command import ConfigError
from marl_llm.runs.duels import BOTH, duel_seats, duel_table, duel_text, ends
from marl_llm.workflows import Assignment, Inside, Scripted

ROLES = ("player_0", "player_1")


def plan_of(metrics=("result_player_0", "result_player_1"), roles=ROLES, scripted=()):
    models = {role: Scripted(lambda turn: "") if role in scripted else Inside() for role in roles}
    workflow = types.SimpleNamespace(metrics=dict.fromkeys(metrics))
    assignment = Assignment({role: role for role in roles}, models)
    return types.SimpleNamespace(assignment=assignment, played=types.SimpleNamespace(workflow=workflow))


def play(task, result, invalid=0, over=True, aborted=False, number=0):
    team = {"result_player_0": result, "result_player_1": -result, "invalid_player_0": invalid, "invalid_player_1": 7.0}
    return Outcome(task, number, (result + 1) / 2, 3, aborted, {} if aborted else team | {"unfinished": float(not over)})


def record(*outcomes):
    return Evaluation("test", dict.fromkeys(ROLES, "trained"), 1.0, "score", outcomes, dict.fromkeys(ROLES, 1.0))


def test_every_role_meets_every_opponent_in_its_seat_trained_and_as_its_start():
    tables = duel_seats(plan_of(), ["random", "start"])
    assert {key: [str(seats[role]) for role in ROLES] for key, seats in tables.items()} == {
        ("random", "start", "player_0"): ["start", "random"],
        ("random", "start", "player_1"): ["random", "start"],
        ("random", "trained", "player_0"): ["trained", "random"],
        ("random", "trained", "player_1"): ["random", "trained"],
        ("start", "start", "player_0"): ["start", "start"],
        ("start", "start", "player_1"): ["start", "start"],
        ("start", "trained", "player_0"): ["trained", "start"],
        ("start", "trained", "player_1"): ["start", "trained"],
    }
    assert {role for _, _, role in duel_seats(plan_of(scripted=("player_1",)), ["random"])} == {"player_0"}


def test_a_game_without_results_and_an_unknown_seat_are_refused():
    compiled = types.SimpleNamespace(**vars(plan_of()) | {"played": 1})
    for plan in (plan_of(metrics=("result_player_0",)), plan_of(roles=("player_0",)), compiled):
        with pytest.raises(ConfigError, match="--opponents: this game has no two seats with a figure result_<role> each"):
            duel_seats(plan, ["random"])
    with pytest.raises(ConfigError, match="--opponents: seat 'rndom' is unknown"):
        duel_seats(plan_of(), ["rndom"])


def test_plays_are_counted_from_the_roles_own_side():
    plays = [play(0, 1.0, invalid=2), play(1, 1.0), play(2, 0.0), play(3, -1.0), play(4, 0.0, over=False), play(5, 1.0, aborted=True)]
    first, second = (ends((one, role) for one in plays) for role in ROLES)
    assert (first["plays"], first["invalid"], second["invalid"]) == (5, 0.4, 7.0)
    assert {name: first[name]["share"] for name in ("won", "drawn", "lost", "unfinished")} == {
        "won": 0.4, "drawn": 0.2, "lost": 0.2, "unfinished": 0.2
    }  # fmt: skip
    assert (second["won"]["share"], second["lost"]["share"]) == (0.2, 0.4)
    assert first["won"]["interval"] == pytest.approx(clustered([[1.0]] * 2 + [[0.0]] * 3))


def test_the_intervals_of_a_task_played_often_are_wider_than_those_of_as_many_tasks():
    alone = ends((play(task, 1.0 if task % 2 else -1.0), "player_0") for task in range(40))
    alike = ends((play(task, 1.0 if task % 2 else -1.0, number=n), "player_0") for task in range(4) for n in range(10))

    def width(found):
        return found["won"]["interval"][1] - found["won"]["interval"][0]

    assert alone["won"]["share"] == alike["won"]["share"] == 0.5
    assert width(alike) > 2 * width(alone)


def test_both_seats_are_added_up_by_task():
    table = duel_table({
        ("random", "trained", "player_0"): record(play(0, 1.0), play(1, 1.0)),
        ("random", "trained", "player_1"): record(play(0, -1.0), play(1, 1.0)),
    })  # fmt: skip
    seats = table["random"]["trained"]
    assert [seats[name]["won"]["share"] for name in (*ROLES, BOTH)] == [1.0, 0.5, 0.75]
    assert (seats[BOTH]["plays"], seats[BOTH]["lost"]["share"]) == (4, 0.25)
    assert seats[BOTH]["won"]["interval"] == list(clustered([[1.0], [0.5]]))  # two tasks, one at 1 and one at a half
    said = duel_text(table).splitlines()
    assert said[0] == "against random"
    assert said[1].split()[:4] == ["player_0", "trained", "won", "100.0"]
    assert said[-1].startswith(f"  {BOTH}")
    assert said[-1].endswith("invalid moves 3.50")


def test_evaluate_prints_and_writes_the_table(monkeypatch, tmp_path, capsys):
    from marl_llm.cli import evaluate
    from marl_llm.runs import evaluate_run

    class Team:
        headline, roles = "score", ROLES

        def evaluate(self, seats, split, tasks, *, plays, temperature):
            won = 1.0 if str(seats["player_0"]) == "trained" else -1.0
            return record(*(play(task, won) for task in range(tasks)))

    given = dict(RUN="runs/x", STEP=None, SEED=None, SEATS=[], TASKS=3, PLAYS=1, K=[], SPLIT="test", TEMPERATURE=1.0, OPPONENTS=["random"])
    given |= {"OUTPUT": str(tmp_path / "found.json"), "OUTCOMES": str(tmp_path / "plays.jsonl")}
    for name, value in given.items():
        monkeypatch.setattr(evaluate, f"_{name}", types.SimpleNamespace(value=value))
    monkeypatch.setattr(evaluate_run, "opened", lambda *_, **__: contextlib.nullcontext((None, plan_of(), Team(), 30)))
    evaluate.main([])
    printed = capsys.readouterr().out
    assert "step 30 of runs/x, 3 tasks of the test split:\nagainst random\n  player_0     start    won   0.0 %" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["duels"]["random"]["trained"]["player_0"]["won"]["share"] == 1.0
    assert "pairs" not in found
    first = json.loads((tmp_path / "plays.jsonl").read_text().splitlines()[0])
    assert first["seats"] == "random start player_0"
    monkeypatch.setattr(evaluate, "_SEATS", types.SimpleNamespace(value=["player_0=start"]))
    with pytest.raises(ConfigError, match="--opponents makes tables of its own: leave --seats and --k out"):
        evaluate.main([])
