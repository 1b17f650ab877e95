"""The cache of verdicts: who waits for how long, whose futures they are, and which keys are one."""

import asyncio
import threading
import time

import pytest

from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.tools.waiting import Clock, Expired, waiting, within

DONE = success("done", 0.0)


def test_a_deadline_ends_the_wait_for_a_judge_that_works_and_others_go_on():
    ended = []

    async def judge():
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return DONE

    async def ask():
        verdicts = Verdicts()
        patient = asyncio.ensure_future(within(30, verdicts.of("a", judge)))
        for limit_s in (0.05, 0.1):  # the first asker of "b", and a later one of "a"
            with pytest.raises(Expired):
                await within(limit_s, verdicts.of("b" if limit_s == 0.05 else "a", judge))
        assert (await patient) is DONE
        assert ended == ["cancelled"]  # b's: nobody was left who waited for it
        first = asyncio.ensure_future(within(0.05, verdicts.of("c", judge)))
        await asyncio.sleep(0)
        assert (await within(30, verdicts.of("c", judge))) is DONE  # goes on after the first asker was late
        with pytest.raises(Expired):
            await first
        assert ended == ["cancelled"]

    asyncio.run(ask())


def test_clocks_of_all_askers_stand_still_while_their_judge_waits_in_a_queue():
    async def judge():
        await asyncio.sleep(0.02)
        arrived = waiting()
        await asyncio.sleep(0.3)
        arrived()
        return DONE

    async def asker(verdicts, delay_s):
        await asyncio.sleep(delay_s)
        clock = Clock()
        with clock.use():
            assert (await verdicts.of("a", judge)) is DONE
        return clock.elapsed()

    async def ask():
        verdicts = Verdicts()
        begun = time.monotonic()
        elapsed = await asyncio.gather(*(asker(verdicts, delay_s) for delay_s in (0.0, 0.01, 0.1)))
        return elapsed, time.monotonic() - begun

    elapsed, whole = asyncio.run(ask())
    assert all(seconds < whole - 0.15 for seconds in elapsed)
    assert elapsed[0] > 0.015  # the judge's own work counts


@pytest.mark.parametrize("end", ["cancelled", "closed"])
def test_a_loop_that_ended_leaves_no_judge_to_the_next(end):
    verdicts, begun = Verdicts(), []

    async def judge():
        begun.append(1)
        await asyncio.sleep(0.05 if len(begun) > 1 else 60)
        return DONE

    loop = asyncio.new_event_loop()
    task = loop.create_task(verdicts.of("a", judge))
    loop.run_until_complete(asyncio.sleep(0.01))
    if end == "cancelled":
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    else:
        for one in asyncio.all_tasks(loop):
            one._log_destroy_pending = False
    loop.close()

    assert asyncio.run(verdicts.of("a", judge)) is DONE
    assert begun == [1, 1]
    asyncio.run(verdicts.of("b", judge))
    assert sum(map(len, verdicts._running.values())) == 0


def test_loops_of_two_threads_ask_for_one_key_at_once():
    verdicts, found = Verdicts(), []
    both = threading.Barrier(2)

    async def judge():
        both.wait(30)  # each loop has its own judge at work
        await asyncio.sleep(0.01)
        return DONE

    threads = [threading.Thread(target=lambda: found.append(asyncio.run(verdicts.of("a", judge)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DONE, DONE]


def test_whoever_asks_while_a_cancelled_judge_ends_gets_another():
    begun = []

    async def judge():
        begun.append(1)
        try:
            await asyncio.sleep(60 if len(begun) == 1 else 0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # takes its time to end
            raise
        return DONE

    async def ask():
        verdicts = Verdicts()
        with pytest.raises(Expired):
            await within(0.02, verdicts.of("a", judge))
        return await verdicts.of("a", judge)

    assert asyncio.run(ask()) is DONE


def test_as_many_results_are_held_as_asked_for_and_then_it_begins_anew():
    async def ask(keys):
        begun, verdicts = [], Verdicts(size=2)

        def judge(key):
            async def work():
                begun.append(key)
                return success(key, 0.0) if key != "lost" else failed(FailureKind.CRASH, "lost", 0.0)

            return work

        assert [(await verdicts.of(key, judge(key))).value or "lost" for key in keys] == list(keys)
        return begun

    assert asyncio.run(ask(["a", "b", "a", "b"])) == ["a", "b"]
    assert asyncio.run(ask(["a", "b", "c", "c", "b", "c", "a"])) == ["a", "b", "c", "b", "a"]  # the third empties it, and so does the fifth
    assert asyncio.run(ask(["lost", "a", "lost", "a", "b", "a"])) == ["lost", "a", "lost", "b"]  # a failure is asked for again


def test_keys_are_equal_for_equal_parts_and_for_no_others():
    different = [
        ("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc"), (("a", "b"), "c"), ("a", ("b", "c")), (["a"],), (("a",),), ("a",),
        ("1",), (1,), (1.0,), (True,), (None,), ("None",), (-1,), (10**6000,), (10**6000 + 1,), (0.0,), (-0.0,), (b"a",), ({1, 2},),
        (frozenset({1, 2}),), ([1, [2]],), ([[1], 2],), ([1, 2],), ({1: 2},), ([(1, 2)],), ({"a": {}},), ({"a": []},), ("a\ud800",),
        ("a\ud801",), ("str 1 a",), ("a str 2 bc",), ("a\nb", "c"), ("a", "b\nc"), (),
    ]  # fmt: skip
    assert len({content_key(*parts) for parts in different}) == len(different)
    text = "".join(["x", "yz"])  # equal, and another object
    assert content_key("xyz", ["xyz", "xyz"]) == content_key(text, [text, "xyz"])
