"""Waiting for a worker is nobody's failure: the deadline of a call stands still while what it asked for waits in a queue."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from marl_llm.games.coding import coding_roles, mini_verifier, plan_code_verify_reflect, verifier
from marl_llm.tools._calls import Calls
from marl_llm.tools.judge import judge_calls
from marl_llm.tools.results import success
from marl_llm.tools.sandbox import Sandbox
from marl_llm.tools.waiting import LOOK_S, Clock, Expired, _clock, waiting, within
from marl_llm.workflows import Assignment, Controller, Scripted
from marl_llm.workflows.trajectory import Task

HANGING, HONEST = 8, 4
LIMIT_S = 0.7  # of a program; all that hang take four times that of two workers


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2) as made:
        made.warm()
        yield made


def blocking_verifier(sandbox):
    """A plain function for the controller's threads."""

    def verify(code: str, function: str, tests):
        judged = judge_calls(code, function, tests, LIMIT_S, sandbox=sandbox)
        return success({"pass_rate": judged.outcome().pass_rate, "report": ""}, 0.0) if judged.ok else judged

    return verify


def play(verify, names, timeout_s=2 * LIMIT_S, play_s=None, copies=1):
    """Twelve programs at once, each played once: its pass rate, None where the play is aborted."""
    hangs = "def f(x):\n    import time\n    time.sleep({} + 99)"
    tasks = []
    for number in range(copies * HANGING + HONEST):
        code = hangs.format(number % HANGING) if number < copies * HANGING else f"def f(x): return x + 1 + 0 * {number}"
        hidden = {"function": "f", "tests": (((1,), 2),), "visible_tests": ()}
        tasks.append(Task(number, {"problem": code, "visible": "", "interface": ""}, {name: hidden[name] for name in names}))
    team = plan_code_verify_reflect(verify, coding_roles(), rounds=1, hidden=names, timeout_s=timeout_s)
    player = Scripted(lambda turn: f"```python\n{turn.fields['problem']}\n```" if turn.role.name == "coder" else "go")
    assignment = Assignment(dict.fromkeys(team.roles, "s"), {"s": player})
    with Controller(team, assignment, None, {}, attempts=1, timeout_s=play_s) as controller:
        rollout = controller.play(tasks)
    return [None if e.aborted else e.trajectories[0].fields["pass_rate"] for e in rollout.episodes]


@pytest.mark.parametrize("kind", ["asyncio", "threads", "shared verdicts", "whole plays"])
def test_a4_hanging_programs_score_0_and_abort_nobody(kind, sandbox):
    """Four times as many hanging programs as workers; the last one waits for longer than its node may take."""
    names = ("function", "tests", "visible_tests")
    copies = 2 if kind == "shared verdicts" else 1
    if kind == "threads":
        found = play(blocking_verifier(sandbox), names[:2])
    elif kind == "shared verdicts":
        found = play(mini_verifier(sandbox, LIMIT_S), names[:2], copies=copies)
    elif kind == "asyncio":
        found = play(verifier(LIMIT_S, sandbox=sandbox), names)
    else:
        found = play(mini_verifier(sandbox, LIMIT_S), names[:2], timeout_s=30, play_s=2 * LIMIT_S)
    assert found == [0.0] * HANGING * copies + [1.0] * HONEST


def test_a4_calls_of_a_tool_that_wait_for_its_thread_are_not_late():
    calls = Calls(lambda seconds: time.sleep(seconds) or success(seconds, 0.0), 1, "slow")

    async def job():
        return await asyncio.gather(*(within(0.3, calls.acall(0.1)) for _ in range(8)))

    assert [result.value for result in asyncio.run(job())] == [0.1] * 8
    calls.close()


def test_a_call_that_does_not_wait_is_late_and_says_so():
    async def late(work):
        with pytest.raises(Expired, match="no answer within 0.05 s"):
            await within(0.05, work)

    async def own():
        raise TimeoutError("its own")

    async def job():
        await late(asyncio.sleep(20))
        with pytest.raises(TimeoutError, match="its own"):
            await within(5, own())
        task = asyncio.ensure_future(within(None, asyncio.sleep(20)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    tick = time.monotonic()
    asyncio.run(job())
    assert time.monotonic() - tick < 10


def test_a_clock_stands_still_while_anything_waits_and_so_does_the_one_around_it():
    outer = Clock()
    with outer.use():
        inner = Clock()
    with inner.use():
        first, second = waiting(), waiting()
    before = inner.elapsed(), outer.elapsed()
    time.sleep(0.02)
    first()
    first()
    threading.Thread(target=time.sleep, args=(0,)).start()
    assert (inner.elapsed(), outer.elapsed()) == before
    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    time.sleep(0.01)
    assert inner.elapsed() > before[0]
    assert outer.elapsed() < before[1] + 0.02 + time.monotonic() - outer._start - outer._waited
    waiting()()  # without a clock


def runs(clock):
    """Whether time counts by a clock."""
    before = clock.elapsed()
    time.sleep(0.002)
    return clock.elapsed() > before


def begin_waiting(clock):
    with clock.use():
        return waiting()


@pytest.mark.parametrize("comes", ["before the wait", "in it"])
@pytest.mark.parametrize("leaves", ["in the wait", "after it"])
def test_whoever_shares_a_clock_stands_still_with_it_and_goes_on_when_it_leaves(comes, leaves):
    work, around = Clock(apart=True), Clock()
    with around.use():
        own = Clock()
    arrived = begin_waiting(work) if comes == "in it" else None
    with own.use(), work.shared():
        if arrived is None:
            assert runs(own)
            arrived = begin_waiting(work)
        assert not runs(work)
        assert not runs(own)
        assert not runs(around)
        if leaves == "after it":
            arrived()
            assert runs(own)
    assert runs(own)
    assert runs(around)
    arrived()
    assert runs(work)
    assert runs(own)
    again = begin_waiting(work)  # shared no more
    assert not runs(work)
    assert runs(own)
    again()
    with work.shared():  # without a clock of one's own
        assert runs(work)


def test_a_call_that_is_dropped_before_it_began_stands_nobody_still():
    entered, gate = threading.Event(), threading.Event()
    calls = Calls(lambda _: success(entered.set() or gate.wait(20), 0.0), 1, "one")
    clock = Clock()
    with clock.use():
        under_way = calls.submit(None)
        assert entered.wait(20)
        assert runs(clock)
        dropped, closed = calls.submit(None), calls.submit(None)
        assert not runs(clock)
        assert dropped.cancel()
        assert not runs(clock)
    gate.set()
    calls.close()
    assert under_way.result().ok
    assert closed.cancelled() or closed.result().ok
    assert runs(clock)
    with pytest.raises(RuntimeError, match="this tool is closed"):
        calls.submit(None)


def test_a_call_leaves_nothing_that_waits_for_a_collection():
    """Whatever became of it. A collection holds up every thread, and takes the longer the more there is."""
    ends, clocks = [], []

    async def work(seconds, fails):
        clocks.append(weakref.ref(_clock.get()))
        await asyncio.sleep(seconds)
        if fails:
            raise KeyError("of its own")

    async def job():
        for limit_s, seconds, fails in ((60, 0, False), (None, 0, False), (60, 0, True), (2 * LOOK_S, 5 * LOOK_S, False)):
            try:
                await within(limit_s, work(seconds, fails))
            except (Expired, KeyError) as error:
                ends.append(type(error).__name__)
            else:
                ends.append("answered")
        await within(60, within(60, work(0, False)))

    gc.collect()
    gc.disable()
    try:
        asyncio.run(job())
        left = [clock() for clock in clocks]
    finally:
        gc.enable()
    assert ends == ["answered", "answered", "KeyError", "Expired"]
    assert left == [None] * 5
