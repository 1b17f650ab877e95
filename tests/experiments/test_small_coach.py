"""`marl_llm coach`: a small coach is trained, measured, and then scores in a run; teams that cannot play are refused."""

import json
import pathlib
import types

import pytest

from marl_llm.cli import coach
from marl_llm.coaching import small
from marl_llm.runs import building
from marl_llm.runs.base import base_config
from marl_llm.runs.coaching import cost_line, make_coaching
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.sections import CoachSection
from marl_llm.training import make_mesh
from marl_llm.workflows import Assignment, Controller, Scripted

OWN = pathlib.Path(__file__).parents[1] / "games" / "own" / "coached.py"


def config(**keys):
    found = base_config("t", f"{OWN}:echo", "mappa")
    found.update(devices=1)
    found.coach.update(keys)
    return found


@pytest.fixture
def options(tmp_path):
    given = ["c.py", "--out", str(tmp_path / "coach"), "--preset=nano", "--tasks=32", "--plays=1", "--held_out=16", "--epochs=6"]
    return coach.parser().parse_args([*given, "--batch=32", "--learning_rate=0.02", "--unseen=script:noise=0.5"])


def test_a_small_coach_learns_a_rubric_and_scores_in_a_run_through_the_path_of_every_coach(options, monkeypatch):
    asked = []
    monkeypatch.setattr(building, "start_jax", lambda *_, **__: make_mesh(1))
    monkeypatch.setattr(coach, "_lessons", lambda make, team, split, *rest: lessons(asked, team, split, *rest[:-1]))

    def lessons(asked, team, split, first, count, plays, seed):
        asked.append((team, split))
        with resolve(config()) as plan:
            found = played(plan.played, plan.played.tasks(split, first, count), noise={"train": 0.5}.get(split, 0.8))
            return coach._scored(small, found, plan.played.guide)

    told = []
    record = coach.train_coach(config, options, say=told.append)
    assert told[-1] == f"it may train a team: --config.coach.kind=small --config.coach.path={options.out}"
    assert asked == [(team, split) for team in coach.TEAMS for split in ("train", "validation")] + [("script:noise=0.5", "validation")]
    assert record["unseen"]["script:noise=0.5"]["all"]["mae"] == 0.0
    assert json.loads((options.out / small.RECORD).read_text()) == record
    own = config(kind="small", path=str(options.out), concurrency=4)
    with resolve(own) as plan:
        coaching = make_coaching(own, plan)
        workflow = coaching.attach(plan.played.workflow)
        environment = types.SimpleNamespace(workflow=workflow, renderer=plan.played.renderer)
        rollout = played(environment, plan.played.tasks("test", 0, 8), noise=0.5)
        said = {path.fields["said"]: score["coach"].value for path in rollout.trajectories for score in path.scores.values()}
        assert said == {"9": 10.0, "0": 4.0}
        assert coaching.metrics()["coach/calls"] == 8
        assert cost_line(own, plan).startswith("coach (small): at most 1 actions a play")
        coaching.close()


def test_a_coach_that_agrees_too_little_is_told_why_where_it_is_trained_and_refused_with_the_same_words(options, monkeypatch):
    monkeypatch.setattr(building, "start_jax", lambda *_, **__: make_mesh(1))
    monkeypatch.setattr(coach, "learned", lambda *_: (None, {}, None, 8))
    monkeypatch.setattr(coach, "_write", lambda folder, *_: None)
    monkeypatch.setattr(coach, "measured", lambda *_: {"all": {"mae": 0.7, "kappa": 0.79, "missing": 0, "actions": 9}, "roles": {}})
    monkeypatch.setattr("marl_llm.coaching.agreement.agreement_text", str)
    monkeypatch.setattr(coach, "_lessons", lambda *_: [types.SimpleNamespace(brief="a")])
    told = []
    coach.train_coach(config, options, say=told.append)
    assert told[-1].startswith("it may train nobody: the small coach of ")
    assert "on script:noise=0.5: mean absolute error 0.70 (at most 0.7), kappa 0.79 (at least 0.8)" in told[-1]
    with pytest.raises(ConfigError, match="agrees too little with its rubric on script:noise=0.5"):
        resolve(config(kind="small", path=str(options.out)))


def played(environment, tasks, noise):
    digits = "0123456789"

    def wrong(turn):
        return turn.seed[1] % 10 < 10 * noise

    def script(turn):
        return digits[(int(turn.fields["digit"]) + wrong(turn)) % 10]

    with Controller(environment.workflow, Assignment({"speaker": "s"}, {"s": Scripted(script)}), None, environment.renderer) as controller:
        return controller.play(tasks)


def test_teams_that_cannot_play_and_directories_that_are_taken_are_refused(tmp_path, capsys):
    refused = [
        ("script:loud=1", "'loud=1' is no option of the game .*echo"),
        ("script:noise", "'noise' is no option"),
        ("script:noise=much", "could not convert"),
        ("runs/a:last", "'last' is no step of a checkpoint"),
        (f"{tmp_path}/none", "none"),
    ]
    for team, message in refused:
        with pytest.raises((ConfigError, ValueError), match=message):
            coach._lessons(config, team, "train", 0, 2, 1, 0)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert coach.main(["chain_maths.py", "--out", str(tmp_path / "taken")]) == 2
    assert coach.main(["chain_maths.py", "--out", str(tmp_path / "new"), "--tasks=0"]) == 2
    said = capsys.readouterr().err
    assert "taken exists; choose a new directory" in said
    assert "--tasks=0 must be at least 1" in said


def test_a_garbled_player_changes_a_word_of_a_share_of_its_responses_and_numbers_to_numbers():
    turns = [types.SimpleNamespace(seed=(n,), role=types.SimpleNamespace(name="a")) for n in range(400)]
    words = {"a": ["7", "9", "b", "c"]}
    plain, half = (coach.garbled(lambda turn: "1 x 2 y", share, words) for share in (0.0, 0.5))
    assert {plain(turn) for turn in turns} == {"1 x 2 y"}
    said = [half(turn) for turn in turns]
    assert said == [half(turn) for turn in turns]
    assert 150 < sum(one != "1 x 2 y" for one in said) < 250
    kept = [one.split() for one in said if len(one.split()) == 4]
    assert {one[0] for one in kept} <= {"1", "7", "9"} | {"x", "2"}  # the latter where a word is left out and another said twice
    assert "7 x 2 y" in said


def test_a_small_coach_is_refused_without_its_record_and_for_options_that_it_does_not_read(tmp_path):
    for keys, message in (
        (dict(kind="small"), "needs path"),
        (dict(kind="small", path=str(tmp_path)), "is no small coach"),
        (dict(kind="small", path=str(tmp_path), max_tokens=3), "max_tokens would have no effect: a coach of kind 'small'"),
        (dict(kind="ensemble", members=f"rubric; small path={tmp_path}"), "member 2: config.coach: .* is no small coach"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(config(**keys))


def test_a_coach_can_be_made_for_a_config_that_names_one():
    """What the file says of its own coach would have no effect on the one that is made, and is not refused."""
    config = coach._config(str(pathlib.Path(__file__).parents[2] / "experiments/configs/tiny_pipeline.py"))
    assert config.coach.to_json() == CoachSection.config().to_json()
    assert config.coach.kind is None
    with resolve(config):
        pass


def test_a_stray_word_may_break_a_format_where_a_noisy_one_cannot(monkeypatch):
    monkeypatch.setattr(coach, "LISTENED", 1)
    for team, breaks in (("noise", False), ("stray", True)):
        lessons = coach._lessons(lambda: base_config("t", "tiny_pipeline", "mappa"), f"script:{team}=1.0", "train", 0, 3, 1, 0)
        broken = [one for one in lessons if one.brief.endswith("illegal")]
        assert bool(broken) == breaks
        assert {one.score for one in broken} <= {0.0}
