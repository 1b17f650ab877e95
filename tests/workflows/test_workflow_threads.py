"""Functions in threads come back to the loop that asked: all of them, as they ended, whoever else has stopped listening."""

import asyncio
import concurrent.futures
import threading
import time

import pytest

from marl_llm.tools.mailbox import Mailbox
from marl_llm.workflows.threads import Threads


@pytest.fixture
def threads():
    threads = Threads(8)
    yield threads
    threads.close()


def within(job, seconds=20):
    """The job's result; a hand-over that was missed would wait for ever."""

    async def bounded():
        async with asyncio.timeout(seconds):
            return await job()

    return asyncio.run(bounded())


def test_every_result_comes_back_to_its_own_caller(threads):
    async def job():
        return await asyncio.gather(*(threads.run(lambda i=i: (i, threading.current_thread())) for i in range(3000)))

    for _ in range(3):  # each with a loop of its own
        found = within(job)
        assert [number for number, _ in found] == list(range(3000))
        assert threading.main_thread() not in {thread for _, thread in found}


def test_two_loops_at_once_do_not_take_each_others_results(threads):
    async def job():
        loop = asyncio.get_running_loop()
        futures = [threads.run(lambda i=i: i) for i in range(500)]
        assert all(future.get_loop() is loop for future in futures)
        return await asyncio.gather(*futures)

    with concurrent.futures.ThreadPoolExecutor(4) as runs:
        for found in runs.map(within, [job] * 8):
            assert found == list(range(500))


def test_whoever_ends_first_is_served_first(threads):
    gate = threading.Event()

    async def job():
        slow = threads.run(gate.wait)
        assert await threads.run(lambda: "quick") == "quick"
        assert not slow.done()
        gate.set()
        return await slow

    assert within(job) is True


@pytest.mark.parametrize("error", [KeyError("k"), OSError("disk"), concurrent.futures.CancelledError()], ids=lambda e: type(e).__name__)
def test_what_a_function_raises_is_raised_where_it_is_awaited(threads, error):
    def fails():
        raise error

    async def job():
        await threads.run(fails)

    with pytest.raises(type(error)):
        within(job)


def test_a_stop_iteration_is_named_and_does_not_hang(threads):
    async def job():
        await threads.run(lambda: next(iter(())))

    with pytest.raises(RuntimeError, match="StopIteration"):
        within(job)


def test_what_ends_after_its_deadline_is_left_unheard_and_disturbs_nobody(threads):
    gate = threading.Event()

    async def job():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await threads.run(gate.wait)
        gate.set()
        return await asyncio.gather(*(threads.run(lambda i=i: i) for i in range(50)))

    assert within(job) == list(range(50))


def test_what_comes_beside_a_cancelled_result_is_delivered():
    async def job():
        loop = asyncio.get_running_loop()
        mailbox, cancelled, awaited = Mailbox(loop), loop.create_future(), loop.create_future()
        cancelled.cancel()
        mailbox.put(cancelled, 1, None)
        mailbox.put(awaited, 2, None)  # both before the loop comes round
        return await awaited

    assert within(job) == 2


def test_a_function_that_outlives_its_loop_leaves_the_next_loop_alone(threads):
    gate, ended = threading.Event(), threading.Event()

    def late():
        gate.wait()
        ended.set()

    async def leaves():
        threads.run(late)

    within(leaves)
    gate.set()
    assert ended.wait(10)
    time.sleep(0.01)

    async def job():
        return await threads.run(lambda: "heard")

    assert within(job) == "heard"
