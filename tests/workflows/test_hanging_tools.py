"""A tool that hangs aborts the plays that asked it, and nobody else's: calls have a limit per tool, and lost threads are replaced (A7)."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from wordy import SPEECH, Says

from marl_llm.workflows import Role, Workflow, coroutines, plain, sequence, tool, when
from marl_llm.workflows.assignment import shared
from marl_llm.workflows.controller import Controller
from marl_llm.workflows.errors import RolloutError, WorkflowError
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.trajectory import Task

SPEAKS = Role("a", "{question}", parse=plain("a"), writes={"a": ""})


@pytest.fixture
def hang():
    """What a call waits for that hangs; let go when the test ends."""
    never = threading.Event()
    yield never
    never.set()


def play(body, count, question="q{}", **options):
    team = Workflow("w", body, inputs=("question",))
    with Controller(team, shared(team), Says(lambda prompt, request: "x"), SPEECH, **options) as controller:
        return controller.play([Task(i, {"question": question.format(i)}) for i in range(count)])


def number(question):
    return int(question[1:])


def aborts(rollout):
    return [episode.task.number for episode in rollout.episodes if episode.aborted]


def test_a7_forty_of_sixty_calls_that_hang_abort_forty_plays(hang):
    def page(question):
        return hang.wait() if number(question) % 3 else "found"

    start = time.monotonic()
    rollout = play(sequence(SPEAKS, tool(page, "page", timeout_s=0.5)), 60)
    assert aborts(rollout) == [n for n in range(60) if n % 3]
    assert {f.kind for e in rollout.episodes for f in e.failures} == {"deadline"}
    assert all(not e.failures for e in rollout.episodes if not e.aborted)  # nor did anyone have to try again
    assert time.monotonic() - start < 15
    assert rollout.hung == {"page": 80}
    assert rollout_metrics(rollout, sample_table(rollout))["tool/page/hung"] == 80


def test_a7_plays_that_ask_another_tool_do_not_wait():
    done, all_done = [], threading.Event()

    def stuck(question):
        return all_done.wait(20)  # for ever, if the other tool's calls had to wait for these

    def quick(question):
        done.append(question)
        if len(done) == 6:
            all_done.set()
        return True

    odd = when(lambda question: number(question) % 2 == 1, tool(stuck, "x"), tool(quick, "x"), name="which")
    rollout = play(sequence(SPEAKS, odd), 12, threads=2, attempts=1)
    assert [way.fields["x"] for way in rollout.trajectories] == [True] * 12


def test_a7_waiting_for_a_thread_is_not_failing():
    def nap(question):
        time.sleep(0.04)
        return "x"

    assert aborts(play(sequence(SPEAKS, tool(nap, "x", timeout_s=0.3)), 12, threads=1)) == []


def test_a7_no_tool_has_more_calls_at_once_than_its_limit():
    lock, now, most = threading.Lock(), [0], [0]

    def counted(question):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return "x"

    play(sequence(SPEAKS, tool(counted, "x")), 20, threads=3)
    assert 1 < most[0] <= 3


def test_a7_lost_threads_are_bounded_and_a_tool_that_lost_them_all_fails_at_once(hang):
    before, begun = threading.active_count(), []

    def stuck(question):
        begun.append(question)
        hang.wait()

    with pytest.raises(RolloutError, match="all 100 plays"):
        play(sequence(SPEAKS, tool(stuck, "x", name="stuck", timeout_s=0.2)), 100, threads=2)
    assert len(begun) == 2 + 4 * 2  # and not one for each of 100 plays and 2 attempts
    assert threading.active_count() - before <= 2 + 4 * 2


def test_a7_a_tool_that_comes_back_is_asked_again(hang):
    team = Workflow("w", sequence(SPEAKS, tool(lambda question: hang.wait() and "x", "x", name="t", timeout_s=0.2)), inputs=("question",))
    with Controller(team, shared(team), Says(lambda prompt, request: "x"), SPEECH, threads=1) as controller:
        with pytest.raises(RolloutError):
            controller.play([Task(i, {"question": "q"}) for i in range(8)])
        hang.set()
        time.sleep(0.2)
        assert aborts(controller.play([Task(i, {"question": "q"}) for i in range(8)])) == []


def test_a7_a_thread_that_hangs_does_not_keep_the_process_alive():
    code = """
import asyncio, threading
from marl_llm.workflows.threads import Late, Threads
async def job():
    try:
        await Threads(1).run(threading.Event().wait, 0.05)
    except Late:
        print("late")
asyncio.run(job())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "late\n"


# ---- async tools


def test_a7_no_async_tool_has_more_calls_at_once_than_its_limit_and_waiting_is_not_failing():
    now, most = [0], [0]

    async def counted(question):
        now[0] += 1
        most[0] = max(most[0], now[0])
        try:
            await asyncio.sleep(0.05)
        finally:
            now[0] -= 1
        return "x"

    assert aborts(play(sequence(SPEAKS, tool(counted, "x", timeout_s=1.0)), 80, calls=3)) == []
    assert most == [3]


def test_a7_an_async_call_that_swallows_its_cancellation_is_left_behind():
    async def page(question):
        while number(question) % 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
        return "found"

    start = time.monotonic()
    rollout = play(sequence(SPEAKS, tool(page, "page", timeout_s=0.2)), 12, attempts=1)
    assert aborts(rollout) == [n for n in range(12) if n % 3]
    assert {f.kind for e in rollout.episodes for f in e.failures} == {"deadline"}
    assert rollout.hung == {"page": 8}
    assert time.monotonic() - start < 10


def test_a7_async_calls_left_behind_are_bounded_and_then_fail_at_once(monkeypatch):
    monkeypatch.setattr(coroutines, "GRACE_S", 0.1)
    begun = []

    async def stuck(question):
        begun.append(question)
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    with pytest.raises(RolloutError, match="all 9 plays"):
        play(sequence(SPEAKS, tool(stuck, "x", name="stuck", timeout_s=0.05)), 9, attempts=1, calls=1)
    assert len(begun) == 4


@pytest.mark.parametrize("wait", [False, True])
def test_a7_a_tool_that_exits_is_named_and_does_not_end_the_process(wait):
    async def leaves(question):
        sys.exit(3)

    with pytest.raises(WorkflowError, match=r"tool 't' raised RuntimeError: it called sys.exit\(3\)"):
        play(sequence(SPEAKS, tool(leaves if wait else lambda question: sys.exit(3), "x", name="t")), 2)


def test_a7_a_tool_that_cancels_itself_aborts_its_play_alone():
    async def cancels(question):
        if number(question) == 1:
            raise asyncio.CancelledError
        return "x"

    assert aborts(play(sequence(SPEAKS, tool(cancels, "x")), 3, attempts=1)) == [1]
