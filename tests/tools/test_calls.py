"""One blocking function as four forms of a call: all at once up to the bound, in order, and nothing after the end."""

import asyncio
import threading

import pytest

from marl_llm.tools._calls import Calls
from marl_llm.tools.mailbox import Mailbox
from marl_llm.tools.results import success

LIMIT_S = 20  # for what must happen


def meeting(parties):
    """Calls that answer only once so many are under way."""
    barrier = threading.Barrier(parties)

    def meet(number):
        barrier.wait(LIMIT_S)
        return success(number, 0.0)

    return Calls(meet, parties, "meeting")


@pytest.mark.parametrize("form", ["batch", "abatch", "acall"])
def test_many_calls_are_under_way_at_once_and_come_back_in_order(form):
    calls = meeting(3)

    async def from_a_loop():
        if form == "abatch":
            return await calls.abatch(range(6))
        return await asyncio.gather(*(calls.acall(number) for number in range(6)))  # blocks for ever if a call holds the loop

    found = calls.batch(range(6)) if form == "batch" else asyncio.run(from_a_loop())
    calls.close()
    assert [one.value for one in found] == list(range(6))


def test_one_call_at_a_time_is_a_bound_and_none_is_refused():
    calls = Calls(lambda number: success(number, 0.0), 1, "one")
    assert [one.value for one in calls.batch([3, 1])] == [3, 1]
    assert calls.call(7).value == asyncio.run(calls.acall(7)).value == 7
    calls.close()
    with pytest.raises(ValueError, match="concurrency must be at least 1, not 0"):
        Calls(lambda number: number, 0, "none")


def test_a_tool_that_is_closed_finishes_what_is_under_way_drops_its_queue_and_takes_nothing():
    began, gate, done = threading.Event(), threading.Event(), []

    def slow(number):
        began.set()
        assert gate.wait(LIMIT_S)
        done.append(number)
        return success(number, 0.0)

    calls = Calls(slow, 1, "slow")
    first, queued = calls.submit(1), calls.submit(2)
    assert began.wait(LIMIT_S)
    closing = threading.Thread(target=calls.close)
    closing.start()
    while not queued.cancelled() and closing.is_alive():
        assert not queued.done()
    gate.set()
    closing.join(LIMIT_S)
    assert (first.result(LIMIT_S).value, queued.cancelled(), done) == (1, True, [1])
    for ask in (lambda: calls.call(3), lambda: calls.batch([3]), lambda: asyncio.run(calls.acall(3))):
        with pytest.raises(RuntimeError, match="this tool is closed: make a new one"):
            ask()


def test_a_mailbox_wakes_its_loop_once_for_what_lies_there_and_again_for_what_comes_later():
    async def job():
        loop, told = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given: told.append(1) or wake(*given)
        mailbox = Mailbox(loop)
        mailbox.tell()
        assert told == []  # nothing lies there
        for later in (1, 2):
            first, second = loop.create_future(), loop.create_future()
            mailbox.lay(first, "first", None)
            assert len(told) == later - 1
            mailbox.put(second, None, KeyError("second"))
            mailbox.tell()
            assert len(told) == later
            async with asyncio.timeout(LIMIT_S):
                assert await first == "first"
                with pytest.raises(KeyError, match="second"):
                    await second

    asyncio.run(job())
