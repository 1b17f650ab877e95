"""Whole runs whose tool fails or takes its time."""

import json
import pathlib

import pytest
from test_runs import OWN, SMALL, config_of, lines, read_metrics, run

from marl_llm.runs import building, measuring, train_run
from marl_llm.runs.command import TrainingError
from marl_llm.training import Checkpoints, make_mesh

TOOL = '''
import asyncio
import dataclasses
import itertools

from marl_llm.tools.results import FailureKind, failed
from marl_llm.workflows import tool

CALLS = itertools.count()


def asked(broken: bool = False) -> Environment:
    """`relay` with a look-up between its roles; every second fails if `broken`, and every fifth takes long if not."""
    environment = relay()

    async def look(hint):
        number = next(CALLS)
        if broken and number % 2:
            return failed(FailureKind.UNAVAILABLE, "the host is gone", 0.0)
        await asyncio.sleep(0.0 if broken or number % 5 else 0.4)
        return hint

    node = tool(look, "seen", name="look", timeout_s=20)
    body = sequence(*environment.workflow.body.parts[:1], node, *environment.workflow.body.parts[1:])
    return dataclasses.replace(environment, workflow=dataclasses.replace(environment.workflow, body=body))
'''


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Flags of small runs of that game, in this process."""
    monkeypatch.setattr(train_run, "start_jax", lambda *_, **__: make_mesh(1))
    monkeypatch.setattr(building, "start_jax", lambda *_, **__: make_mesh(1))
    (tmp_path / "own.py").write_text((OWN / "relay.py").read_text() + TOOL)
    small = [one for one in SMALL if not one.startswith(("checkpoint", "evaluation.every"))]
    small += ["rollout.tasks=4", "recipe.group_size=2", "evaluation.tasks=4", "evaluation.every=100", "evaluation.ablate_roles=False"]
    return f"game.py:{tmp_path}/own.py:asked", [*small, "optimizer.minibatch=8"]


def test_a_run_whose_tool_fails_too_often_is_stopped_with_the_tools_words_and_what_it_learned(tmp_path, monkeypatch, options):
    monkeypatch.setattr(measuring, "ABORTED_STEPS", 3)
    game, small = options
    config = config_of(game, *small, "steps=6", "game.broken=True", "rollout.attempts=1", "checkpoint.every=100")
    with pytest.raises(TrainingError, match=r"step 3: 50% of the plays of the last 3 .*unavailable, 12 tries.*node look.*host is gone"):
        run(config, tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints", 3).steps() == [0, 2]  # what two steps learned is kept
    found = [one for one in read_metrics(tmp_path / "run") if one["phase"] == "train"]
    assert [(one["aborted"], one["samples/aborted"] > 0) for one in found] == [(0.5, True)] * 2
    more = config_of(game, *small, "steps=6", "game.broken=True", "rollout.attempts=1", "checkpoint.every=100")
    with pytest.raises(TrainingError, match="step 5: 50%"):  # goes on where it was, and counts anew
        run(more, tmp_path / "run")


def test_a_run_with_over_start_plays_every_task_once_and_says_who_was_late(tmp_path, options, capsys):
    game, small = options
    given = ("steps=4", "checkpoint.every=3", "rollout.oversample=1", "recipe.rollout_correction=truncate")
    run(config_of(game, *small, *given), tmp_path / "run")
    found = [one for one in read_metrics(tmp_path / "run") if one["phase"] == "train"]
    assert [one["oversample/left"] for one in found] == [1.0, 1.0, 0.0, 0.0]
    assert [one["oversample/late"] for one in found] == [0.0, 1.0, 1.0, 0.0]
    late = [one["oversample/late_tasks"].split() for one in found]
    assert [len(one) for one in late] == [0, 1, 1, 0]
    assert int(late[1][0]) < 5
    assert [one["episodes"] for one in found] == [8.0] * 4
    assert "late plays, 1.0 tasks per step over 2 steps, per play: tokens" in capsys.readouterr().err
    state = json.loads(pathlib.Path(tmp_path / "run" / "checkpoints" / "3" / "state.json").read_text())["team"]
    assert state["behind"]["3"] == []  # a run that is killed loses no play
    assert lines(tmp_path / "run")[-1] == ("eval", 4)
