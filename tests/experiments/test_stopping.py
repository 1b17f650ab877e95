"""A run that is told to stop: a checkpoint at the end of the step, the command that continues, exit code 143."""

import os
import pathlib
import signal
import sys
import threading
import time

import pytest
from absl import flags
from test_resume import FLAGS
from test_train import letters, lines, run  # noqa: F401

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import resume
from marl_llm.reporting import read_metrics
from marl_llm.runs import command, stopping
from marl_llm.runs.stopping import Stopped, Stopping
from marl_llm.runs.train_run import Launch
from marl_llm.training import Checkpoints


class Shelf:
    """Checkpoints of which only the steps are kept."""

    def __init__(self, *there):
        self.there = list(there)

    def steps(self):
        return self.there

    def wait(self, only_if_done=False):
        """Nothing is ever under way."""


@pytest.fixture(autouse=True)
def handlers():
    """The suite may have been started where Ctrl-C is ignored. None of a test's handlers stays."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    known = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is known
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ended(monkeypatch):
    """What would end the process sets this in its place; `.code` is the exit code."""
    event = threading.Event()
    monkeypatch.setattr(stopping.os, "_exit", lambda code: setattr(event, "code", code) or event.set())
    return event


def send(number):
    os.kill(os.getpid(), number)


def test_sigterm_in_a_step_keeps_a_checkpoint_at_its_end_and_names_the_command(capfd):
    shelf, closed = Shelf(0), []

    def loop(stop):
        for step in stop.steps(range(5)):
            if step == 2:
                send(signal.SIGTERM)
                assert stop.asked
            stop.boundary(step + 1, shelf.there.append, lambda: closed.append(True))

    with Stopping(shelf, "python -m run --resume=here") as stop, pytest.raises(Stopped) as end:
        loop(stop)
    assert (end.value.code, shelf.there, closed) == (143, [0, 3], [True])
    said = capfd.readouterr().err
    assert "a checkpoint follows at the end of this step, if that comes within 25 s" in said
    assert said.endswith("stopped after step 3, with a checkpoint. To continue:\n  python -m run --resume=here\n")


def test_sigterm_while_the_processes_tell_each_other_is_for_the_next_boundary(capfd):
    shelf = Shelf(0)

    def loop(stop):
        for step in stop.steps(range(5)):
            agreed = stop.asked
            if step == 2:
                send(signal.SIGTERM)
            stop.boundary(step + 1, shelf.there.append, lambda: None, agreed)

    with Stopping(shelf, "") as stop, pytest.raises(Stopped):
        loop(stop)
    assert shelf.there == [0, 4]


def test_what_others_were_asked_stops_this_process_too():
    shelf = Shelf(0)
    with Stopping(shelf, "") as stop, pytest.raises(Stopped):
        stop.boundary(3, shelf.there.append, lambda: None, True)
    assert shelf.there == [0, 3]


def test_sigterm_behind_the_last_boundary_ends_the_run_at_once(capfd):
    def loop(stop):
        for _ in stop.steps(range(1)):
            stop.boundary(1, lambda step: None, lambda: None, False)
            send(signal.SIGTERM)

    with Stopping(Shelf(0, 1), "again") as stop, pytest.raises(Stopped):
        loop(stop)
    assert "stopped outside of the steps; the last whole checkpoint is that of step 1. To continue:\n  again" in capfd.readouterr().err


def test_a_checkpoint_that_the_step_wrote_anyway_is_not_written_again():
    with Stopping(Shelf(0, 1), "") as stop:
        for step in stop.steps(range(1)):
            send(signal.SIGTERM)
            with pytest.raises(Stopped):
                stop.boundary(step + 1, lambda step: pytest.fail("written twice"), lambda: None)
            break


def test_a_step_longer_than_the_grace_time_ends_the_process_and_says_what_stands(ended, capfd):
    with Stopping(Shelf(0, 2), "the command", grace_s=0.05) as stop:
        for _ in stop.steps(range(1)):
            send(signal.SIGTERM)
            assert ended.wait(10)
            break
    assert ended.code == 143
    said = capfd.readouterr().err
    assert "took longer than --grace_s=0.05; the last whole checkpoint is that of step 2. To continue:\n  the command" in said


def test_the_grace_time_is_counted_while_the_interpreter_cannot_run_a_handler(ended, monkeypatch):
    """As in a long compilation: the handler of Python never runs, and the process ends all the same."""
    monkeypatch.setattr(Stopping, "_terminated", lambda self, *_: None)
    with Stopping(Shelf(), "", grace_s=0.05):
        send(signal.SIGTERM)
        assert ended.wait(10)


def test_a_checkpoint_that_is_being_written_is_finished_before_the_end(ended):
    with Stopping(Shelf(0), "", grace_s=0.02) as stop:
        for _ in stop.steps(range(1)):
            send(signal.SIGTERM)
            stop.whole(lambda: ended.wait(0.3) and pytest.fail("ended in the middle of a checkpoint"))
            assert ended.wait(10)
            break


def test_sigterm_outside_of_the_steps_ends_at_once(capfd):
    with Stopping(Shelf(), "again") as stop:
        with pytest.raises(Stopped):
            send(signal.SIGTERM)
        with pytest.raises(Stopped):  # a library may have kept the first one to itself, as all that is raised in a destructor is
            list(stop.steps(range(2)))
    assert "there is no checkpoint yet: the run begins again. To continue:\n  again" in capfd.readouterr().err


def test_ctrl_c_once_says_what_a_second_does_and_a_third_ends_at_once(ended, capfd):
    with Stopping(Shelf(0), "", grace_s=0.05) as stop:
        for _ in stop.steps(range(1)):
            send(signal.SIGINT)
            assert not stop.asked
            assert "the run goes on. A second Ctrl-C stops it with a checkpoint" in capfd.readouterr().err
            send(signal.SIGINT)
            assert stop.asked
            assert not ended.wait(0.3), "Ctrl-C has no grace time"
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
            break
    with Stopping(Shelf(0), ""), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_ctrl_c_that_was_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stopping(Shelf(0), "") as stop:
        for _ in stop.steps(range(1)):
            send(signal.SIGINT)
            send(signal.SIGINT)
            assert not stop.asked
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_in_another_thread_it_listens_to_nothing():
    seen, before = [], signal.getsignal(signal.SIGTERM)

    def inside():
        with Stopping(Shelf(0), "") as stop:
            seen.append(signal.getsignal(signal.SIGTERM) is before and list(stop.steps(range(2))) == [0, 1])

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [True]


def test_the_command_that_continues_has_the_flags_of_this_run():
    path = pathlib.Path("runs/a b")
    assert Launch().resume_command(path) == "python -m experiments.train '--resume=runs/a b'"
    assert Launch(cache="", grace_s=90.0).resume_command(path).endswith(" --compilation_cache= --grace_s=90")


def test_the_code_of_a_command_that_was_told_to_stop_is_143(ended, monkeypatch):
    def told(argv):
        raise Stopped

    monkeypatch.setattr(command.app, "run", lambda main, flags_parser: main(["train"]))
    with pytest.raises(Stopped):
        command.run(told, flags.FlagValues())
    assert ended.code == 143


def test_a_stopped_run_that_goes_on_leaves_the_lines_of_one_that_was_not_stopped(tmp_path, run):  # noqa: F811
    """The signal comes in step 3, which is no step of a checkpoint, and the validation after it is not lost."""
    def stops(model, call):
        return call == 3 and model == "first" and send(signal.SIGTERM) or {}

    with pytest.raises(Stopped):
        run(letters(), tmp_path / "run", stops)
    assert run.teams[-1].log[-1] == "closed"
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [0, 2, 3]
    assert lines(tmp_path / "run")[-2:] == [("train", 3), ("eval", 3)]
    results, team = run(letters(), tmp_path / "run")
    assert [call[1] for call in team.log if call[0] == "play"] == [3, 4, 5]
    whole, _ = run(letters(), tmp_path / "whole")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert results["after"] == whole["after"]


def test_a_real_run_stops_on_a_real_sigterm(tmp_path):
    """As a scheduler does it. No checkpoint was due: the one that is there is that of the step in which the signal came."""
    settings = ("sft.steps=2", "steps=1000", "checkpoint.every=1000", "evaluation.every=1000")
    path = tmp_path / "run"
    (process,) = resume.launch(1, *FLAGS, *(f"--config.{one}" for one in settings), f"--workdir={path}")
    metrics = path / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143, said
    steps = [record["step"] for record in read_metrics(path) if record["phase"] == "train"]
    checkpoints = Checkpoints(path / "checkpoints")
    assert checkpoints.steps() == [0, steps[-1]]
    assert checkpoints.state(steps[-1])["step"] == steps[-1] < 1000
    assert {policy.name for policy in (path / "checkpoints" / str(steps[-1]) / "policies").iterdir()} == {"tool", "planner"}
    assert "Traceback" not in said
    cache = next(flag for flag in FLAGS if flag.startswith("--compilation_cache"))
    last_words = f"stopped after step {steps[-1]}, with a checkpoint. To continue:\n  python -m experiments.train --resume={path} {cache}\n"
    assert said.endswith(last_words)
