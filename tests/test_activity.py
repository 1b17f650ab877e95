"""Whoever waits is told what is being done, when nothing else was said for a while."""

import gc
import io
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from marl_llm import activity
from marl_llm.activity import Heartbeat, doing
from marl_llm.reporting import Progress


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Without what other tests of this process left behind: plays in threads, progress lines that nobody closed."""
    monkeypatch.setattr(activity, "_works", [])
    monkeypatch.setattr(activity, "_writers", [])
    monkeypatch.setattr(activity, "_compiling", {})


@pytest.fixture
def beat(monkeypatch):
    lines = []
    made = Heartbeat(lines.append, every_s=5)
    monkeypatch.setattr(activity, "_said_at", 100.0)
    return made, lines


def test_the_latest_work_is_told_with_its_count_and_seconds(beat):
    made, lines = beat
    with doing("loading the models") as first:
        first.since = 90.0
        made.look(105.0)
        with doing("playing: episode", 32) as second:
            second.since, second.done = 103.5, 7
            activity._said_at = 100.0
            made.look(106.0)
        activity._said_at = 100.0
        made.look(107.0)
    assert lines == ["loading the models (15 s)", "playing: episode 7 of 32 (2 s)", "loading the models (17 s)"]


def test_nothing_is_told_before_its_time_nor_where_nothing_is_done(beat):
    made, lines = beat
    assert made.look(200.0) == 1.0
    with doing("loading"):
        assert made.look(104.0) == 1.0
        assert made.look(101.5) == 3.5
        assert lines == []
        assert made.look(105.0) == 5
    assert len(lines) == 1


def test_what_others_say_puts_it_off(beat, monkeypatch):
    made, lines = beat
    monkeypatch.setattr(activity.time, "monotonic", lambda: 104.0)
    with doing("loading"):
        activity.said()
        assert made.look(105.0) == 4.0
    assert lines == []


def test_a_progress_line_writes_for_it_until_it_is_closed(beat):
    made, lines = beat
    stream = io.StringIO()
    with doing("updating"):
        with Progress(3, "train", stream) as progress:
            activity._said_at = 100.0
            made.look(105.0)
            assert stream.getvalue().startswith("updating (")
            activity._said_at = 100.0
            progress.note("hello")
            assert activity._said_at > 100.0
            activity._said_at = 100.0
            progress.update(1)
            assert activity._said_at > 100.0
        activity._said_at = 100.0
        made.look(105.0)
    assert len(lines) == 1


def test_a_progress_line_that_nobody_closed_is_forgotten_with_its_object(beat):
    made, lines = beat
    progress = Progress(3, "train", io.StringIO())
    del progress
    gc.collect()
    with doing("loading"):
        made.look(105.0)
    assert len(lines) == 1


def test_work_ends_when_it_fails_and_a_function_can_be_work():
    @doing("adding")
    def add(a, b):
        assert activity.told(time.monotonic()) == "adding (0 s)"
        return a + b

    assert add(1, 2) == add(2, 1) == 3
    with pytest.raises(KeyError), doing("failing"):
        raise KeyError
    assert activity.told(0.0) is None


def test_the_program_that_is_compiled_is_named(monkeypatch):
    seen, told = [], activity.told
    started = threading.Event()

    def look():
        started.set()
        for _ in range(2000):
            seen.append(told(time.monotonic()))
            time.sleep(0.001)
            if not activity._works:
                return

    def a_program_of_its_own(x):
        for _ in range(60):
            x = jnp.sin(x) @ jnp.cos(x).T
        return x

    with Heartbeat(lambda line: None):
        with doing("updating"):
            thread = threading.Thread(target=look)
            thread.start()
            started.wait()
            jax.jit(a_program_of_its_own)(jnp.ones((3, 3))).block_until_ready()
        thread.join()
    assert any("updating, compiling a_program_of_its_own (" in one for one in seen if one)
    assert activity._compiling == {}


def test_the_heartbeat_beats_by_itself_and_ends_with_its_context():
    lines = []
    with Heartbeat(lines.append, every_s=0.02) as beat:
        with doing("waiting"):
            deadline = time.monotonic() + 20
            while len(lines) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
    assert lines[:3] == ["waiting (0 s)"] * 3
    assert not beat._thread.is_alive()
