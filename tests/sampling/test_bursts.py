"""What is handed in at the same moment is given on together."""

import asyncio

import pytest

from marl_llm.sampling.bursts import Bursts


@pytest.fixture
def log():
    return []


def test_what_comes_in_one_moment_is_given_on_together(log):
    """From tasks that get there a few turns of the loop apart, as long as none of the turns passes without one."""
    bursts = Bursts(log.append, 100)

    async def hand_in(number):
        for _ in range(number):
            await asyncio.sleep(0)
        bursts.add(number)

    async def rounds():
        for _ in range(2):
            await asyncio.gather(*map(hand_in, range(20)))
            await asyncio.sleep(0.01)

    asyncio.run(rounds())
    assert log == 2 * [[*range(20)]]
    asyncio.run(rounds())  # on another loop
    assert log == 4 * [[*range(20)]]


def test_a_full_burst_is_given_on_at_once(log):
    bursts = Bursts(log.append, 3)

    async def hand_in():
        for number in range(7):
            bursts.add(number)
        assert log == [[0, 1, 2], [3, 4, 5]]
        await asyncio.sleep(0.01)

    asyncio.run(hand_in())
    assert log == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_burst_without_an_end_is_cut(log):
    bursts = Bursts(log.append, 10 * Bursts.MOST)

    async def hand_in():
        for number in range(3 * Bursts.MOST):
            bursts.add(number)
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)

    asyncio.run(hand_in())
    assert len(log) >= 3
    assert [number for burst in log for number in burst] == [*range(3 * Bursts.MOST)]


def test_loops_have_bursts_of_their_own(log):
    bursts = Bursts(log.append, 100)

    async def hand_in(number):
        bursts.add(number)

    asyncio.run(hand_in(1))  # over before its burst is
    asyncio.run(hand_in(2))

    async def waits():
        bursts.add(3)
        await asyncio.sleep(0.01)

    asyncio.run(waits())
    assert [3] in log
    assert [1, 2] not in log
