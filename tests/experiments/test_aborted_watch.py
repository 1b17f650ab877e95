"""The rule that ends a run with too many aborted plays."""

import pathlib
import types

import pytest

from marl_llm.runs.coaching import first_failure
from marl_llm.runs.command import TrainingError
from marl_llm.runs.continuing import Stopwatch
from marl_llm.runs.loop import TrainingRun, Watches, play_step
from marl_llm.runs.measuring import ABORTED_STEPS, AbortedWatch, Alarms, LeagueWatch, SignalWatch, failure_of
from marl_llm.runs.stopping import Stopping

BAD = {"episodes": 10.0, "aborted": 0.3, "failed_tool": 1.0, "failed_deadline": 5.0}
GOOD = {"episodes": 10.0, "aborted": 0.0, "failed_tool": 0.0, "failed_deadline": 0.0}
FAILURE = types.SimpleNamespace(kind="deadline", node="search", message="2 s are over")
ROLLOUT = types.SimpleNamespace(episodes=[types.SimpleNamespace(failures=[FAILURE])])


def test_a_run_ends_only_after_twenty_steps_with_too_many_aborted_plays_and_names_the_reason():
    watch = AbortedWatch(0.2)
    for step in range(ABORTED_STEPS - 1):
        watch.look(step, BAD)
    with pytest.raises(TrainingError, match=r"30% of the plays.*deadline, 100 tries; the last: node search: 2 s are over.*--resume"):
        watch.look(ABORTED_STEPS, BAD, lambda kind: failure_of(ROLLOUT, kind))


def test_old_aborted_plays_leave_the_window_and_neither_the_limit_itself_nor_a_limit_of_one_stops_a_run():
    watch, never, compiled = AbortedWatch(0.2), AbortedWatch(1.0), AbortedWatch(0.0)
    for _ in range(ABORTED_STEPS // 2):
        watch.look(1, BAD)  # over ten steps 30 %, over twenty 15 %
    for _ in range(ABORTED_STEPS):
        watch.look(2, GOOD)
    for _ in range(2 * ABORTED_STEPS):
        watch.look(3, BAD | {"aborted": 0.2})
        never.look(3, BAD | {"aborted": 1.0})
        compiled.look(3, {"aborted": 1.0})


def test_many_good_steps_long_ago_do_not_hide_twenty_bad_ones():
    watch = AbortedWatch(0.2)
    for _ in range(10 * ABORTED_STEPS):
        watch.look(1, GOOD | {"failed_tool": 9.0})
    for _ in range(13):  # 0.3 x 13 of 20 steps: a share of 0.195
        watch.look(2, BAD | {"failed_deadline": 90.0})
    with pytest.raises(TrainingError, match="reason: deadline"):
        watch.look(2, BAD | {"failed_deadline": 90.0})


def test_the_steps_before_the_one_that_stops_a_run_are_kept():
    batch = types.SimpleNamespace(figures=BAD, rollout=ROLLOUT)
    team = types.SimpleNamespace(play=lambda step, first, count: batch)
    rollout = types.SimpleNamespace(tasks=5, max_staleness=0, oversample=0)
    config = types.SimpleNamespace(steps=99, rollout=rollout, checkpoint=types.SimpleNamespace(every=9))
    nothing = types.SimpleNamespace(look=lambda *given: None)
    told = (SignalWatch(print, max, False), LeagueWatch(print), Alarms({}, print))
    watches = Watches(nothing, AbortedWatch(0.2), *told, nothing, nothing)
    kept = []
    checkpoints = types.SimpleNamespace(steps=lambda: [0], save=None)
    stop = Stopping(checkpoints, "")
    stop.whole = lambda save, step, *_: kept.append(step)
    team.policies = team.state = dict
    run = TrainingRun(None, config, pathlib.Path(), team, checkpoints, Stopwatch(), stop)
    for step in range(ABORTED_STEPS - 1):
        play_step(run, watches, step)
    assert not kept
    run.state["step"] = ABORTED_STEPS - 1
    with pytest.raises(TrainingError, match="node search: 2 s are over"):
        play_step(run, watches, ABORTED_STEPS - 1)
    assert kept == [ABORTED_STEPS - 1]


def test_compiled_play_has_no_whole_plays_to_name_a_failure_from():
    assert failure_of(None, "deadline") == first_failure(None) == ""
