"""A run whose checkpoints are written in the background: it trains on meanwhile, and no end of it comes before the write's."""

import errno
import json
import os
import pathlib
import signal
import sys
import threading
import time

import pytest
from test_train import letters as at_once
from test_train import lines, run  # noqa: F401

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from marl_llm.runs import loop, run_files, stopping
from marl_llm.runs.command import TrainingError
from marl_llm.runs.stopping import Stopped, Stopping
from marl_llm.training import CheckpointError, Checkpoints, checkpoints


@pytest.fixture
def held(monkeypatch):
    """`held[step]` is called by the thread when that checkpoint is complete but for its name."""
    to_disk, found = checkpoints._to_disk, {}

    def write(partial):
        found.get(int(partial.name.removesuffix(".partial")), lambda: None)()
        to_disk(partial)

    monkeypatch.setattr(checkpoints, "_to_disk", write)
    return found


def letters():
    """As of those tests, with this option."""
    c = at_once()
    c.checkpoint.background = True
    return c


def slow():
    time.sleep(0.5)


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


def steps(path):
    """The whole ones, as they lie there now."""
    return Checkpoints(path / "checkpoints").steps()


def test_it_trains_on_during_the_write_and_evaluates_after_the_last(tmp_path, monkeypatch, held, run):  # noqa: F811
    at_step_3, seen = threading.Event(), []
    held[2], held[6] = lambda: seen.append(at_step_3.wait(30)), slow
    measured = loop.final_evaluation
    monkeypatch.setattr(loop, "final_evaluation", lambda run: seen.append(steps(tmp_path / "run")) or measured(run))
    monkeypatch.setattr(run_files.RunFiles, "report_now_and_then", lambda files: seen.append(steps(tmp_path / "run")))

    def figures(model, call):
        if call == 3:
            at_step_3.set()
        return {}

    results, _ = run(letters(), tmp_path / "run", figures)
    assert seen[0] == [0], "the checkpoint was there before training went on"
    assert seen[1] is True
    assert seen[-1] == [0, 4, 6]
    whole = letters()
    whole.checkpoint.background = False
    theirs, _ = run(whole, tmp_path / "whole")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert results["after"] == theirs["after"]


@pytest.mark.parametrize(("step", "left"), [(2, [0]), (6, [0, 2, 4])])
def test_a_write_that_fails_ends_the_run_before_more_is_lost(tmp_path, held, run, step, left):  # noqa: F811
    """The one in the middle after the next step, the last before the final evaluation; then the same command goes on."""
    path, held[step] = tmp_path / "run", full

    def until(model, call):
        return call == 3 and step == 2 and time.sleep(1.5) or {}

    with pytest.raises(CheckpointError, match=rf"could not write checkpoint .*/{step}: .*No space left on device\. Free space"):
        run(letters(), path, until)
    assert run.teams[-1].log[-1] == "closed"
    assert steps(path) == left
    assert not (path / "evaluation.json").exists()
    assert len([call for call in run.teams[-1].log if call[0] == "learn"]) == min(step + 1, 6)
    del held[step]
    run(letters(), path)
    run(letters(), tmp_path / "whole")
    assert lines(path) == lines(tmp_path / "whole")
    assert steps(path) == [0, 4, 6]


def test_an_error_and_sigterm_leave_the_checkpoint_that_was_under_way_whole(tmp_path, held, run, capfd):  # noqa: F811
    held[2] = held[3] = slow
    with pytest.raises(TrainingError, match="model first: loss not finite"):
        run(letters(), tmp_path / "error", lambda model, call: {"loss": float("nan")} if call == 3 else {})
    assert steps(tmp_path / "error") == [0, 2]

    def stops(model, call):
        return call == 3 and model == "first" and os.kill(os.getpid(), signal.SIGTERM) or {}

    with pytest.raises(Stopped):
        run(letters(), tmp_path / "stopped", stops)
    assert steps(tmp_path / "stopped") == [0, 2, 3]
    assert "stopped after step 3, with a checkpoint" in capfd.readouterr().err
    held[3] = full
    with pytest.raises(CheckpointError, match="/3: "):
        run(letters(), tmp_path / "full", stops)
    assert "stopped after step 3, with a checkpoint" not in capfd.readouterr().err


def test_a_run_goes_on_with_the_other_way_of_writing(tmp_path, held, run):  # noqa: F811
    """Also one of a time when there was no choice."""
    held[4] = full
    with pytest.raises(CheckpointError):
        run(letters(), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["config"]["checkpoint"].pop("background") is True
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    other = letters()
    other.checkpoint.background = False
    del held[4]
    run(other, tmp_path / "run")
    assert steps(tmp_path / "run") == [0, 4, 6]


class Shelf:
    """Checkpoints of which one is being written until `whole` is set."""

    def __init__(self, failure=None):
        self.whole, self.failure = threading.Event(), failure

    def wait(self, only_if_done=False):
        assert only_if_done or self.whole.wait(30)

    def steps(self):
        self.wait()
        if self.failure:
            raise self.failure
        return [0, 2]


@pytest.mark.parametrize("failure", [None, CheckpointError("could not write checkpoint runs/2: full.")])
def test_the_end_of_the_grace_time_waits_for_the_write(monkeypatch, capfd, failure):
    ended = threading.Event()
    monkeypatch.setattr(stopping.os, "_exit", lambda code: ended.set())
    shelf = Shelf(failure)
    with Stopping(shelf, "the command", grace_s=0.02) as stop:
        for _ in stop.steps(range(1)):
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ended.wait(0.3), "ended in the middle of a checkpoint"
            shelf.whole.set()
            assert ended.wait(10)
            break  # the process would be gone
    stands = str(failure) if failure else "the last whole checkpoint is that of step 2"
    assert f"took longer than --grace_s=0.02; {stands}. To continue:\n  the command" in capfd.readouterr().err
