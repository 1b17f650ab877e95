"""Those who await an engine in an event loop: they are served together, told while programs run, and never forgotten."""

import asyncio
import time

import jax
import numpy as np
import pytest

from marl_llm.models import ModelConfig, init_params
from marl_llm.sampling import Engine, EngineConfig, EngineError, Request, scheduler

CONFIG = ModelConfig(vocab_size=64, width=16, layers=1, query_heads=2, key_value_heads=2, head_dim=8, feed_forward=24)
SIZES = EngineConfig(max_num_seqs=4, prompt_tokens=64, response_tokens=64, decode_steps=2)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def start(params, **options):
    return Engine({"policy": (CONFIG, params)}, jax.random.key(1), **{"sizes": SIZES} | options)


def ask(number, tokens=4, prompt=8):
    return Request(tuple(range(1, 1 + prompt)), (number,), tokens)


def same(got, want):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert got.finish == want.finish


def test_prompts_of_one_moment_are_few_programs_whatever_their_lengths(params):
    """As many as there are slots, and no two alike: one program, as long as the longest needs it."""
    requests = [Request(tuple(range(i + 1, i + 1 + n)), (i,), 3) for i, n in enumerate((40, 3, 20, 60))]
    with start(params) as engine:
        alone = [engine.generate_all([request])[0] for request in requests]
    with start(params) as engine:

        async def all_of_them():
            return await asyncio.gather(*map(engine.generate, requests))

        for got, want in zip(asyncio.run(all_of_them()), alone, strict=True):
            same(got, want)
        assert engine.stats()["policy"]["admit_programs"] == 1


def test_an_answer_is_told_while_others_go_on(params):
    with start(params, sizes=EngineConfig(max_num_seqs=4, prompt_tokens=64, response_tokens=16384, decode_steps=2)) as engine:

        async def short_and_long():
            long = asyncio.ensure_future(engine.generate(ask(0, 16384)))
            await engine.generate(ask(1, 3))
            assert not long.done()
            assert engine.stats()["policy"]["steps"] < 8000
            long.cancel()
            await asyncio.wait([long])

        asyncio.run(short_and_long())


def test_answers_are_told_once_the_next_program_runs_and_before_its_result_is_read(params, monkeypatch):
    """The order in which the engine's thread works: whoever makes requests of the answers works while the program runs."""
    log, real, tell = [], scheduler.decode, Engine._flush

    class Out:
        def __init__(self, out):
            self.out = out

        def __array__(self, *how, **more):
            log.append("read")
            return np.asarray(self.out)

    def decode(*args, **how):
        pages, out = real(*args, **how)
        log.append("started")
        return pages, Out(out)

    def told(engine):
        log.append("told" if engine._pending else "nothing to tell")
        tell(engine)

    monkeypatch.setattr(scheduler, "decode", decode)
    monkeypatch.setattr(Engine, "_flush", told)
    with start(params) as engine:

        async def both():
            await asyncio.gather(*(engine.generate(ask(i, tokens)) for i, tokens in enumerate((3, 9))))

        asyncio.run(both())
    first = log.index("told")
    assert log[first - 1 : first + 2] == ["started", "told", "read"]


def test_the_cancelled_and_the_late_of_a_burst_leave_the_others_alone(params):
    with start(params, queue=2) as engine:

        async def play():
            first, second = (asyncio.ensure_future(engine.generate(ask(number))) for number in (1, 2))
            await asyncio.sleep(0)
            first.cancel()  # before its burst is over
            same(await second, engine.generate_all([ask(2)])[0])
            assert first.cancelled()
            same(await asyncio.wait_for(engine.generate(ask(3)), 60), engine.generate_all([ask(3)])[0])
            assert engine.stats()["engine"]["waiting"] == 0

        asyncio.run(play())
        assert engine.stats()["policy"]["requests"] == 4  # the one that was cancelled is none


def test_a_loop_that_dies_in_the_middle_of_a_burst_takes_no_place(params):
    with start(params, queue=1) as engine:
        loop = asyncio.new_event_loop()
        task = loop.create_task(engine.generate(ask(1)))
        loop.call_soon(loop.stop)
        loop.run_forever()  # one turn: it is handed in, and the loop runs no further
        loop.close()
        assert engine.stats()["engine"]["waiting"] == 0
        assert len(engine.submit(ask(2)).result(60).tokens) == 4
        task._log_destroy_pending = False


def test_those_for_whom_the_queue_has_no_room_stand_in_line(params):
    """Without holding up the loop; who is cancelled in line is not served."""
    with start(params, queue=2, sizes=EngineConfig(max_num_seqs=1, prompt_tokens=64, response_tokens=64, decode_steps=2)) as engine:

        async def play():
            tasks = [asyncio.ensure_future(engine.generate(ask(i, 20))) for i in range(9)]
            while not engine._overflow:
                await asyncio.sleep(0)
            assert engine.stats()["engine"]["waiting"] == 2
            tasks[8].cancel()
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            assert isinstance(done[8], asyncio.CancelledError)
            return done[:8]

        answers = asyncio.run(play())
        assert engine.stats()["policy"]["requests"] == 8
        for got, want in zip(answers, engine.generate_all([ask(i, 20) for i in range(8)]), strict=True):
            same(got, want)


@pytest.mark.parametrize("how", ["close", "fail"])
def test_who_is_handed_in_when_the_engine_stops_hears_of_it(params, monkeypatch, how):
    engine = start(params)

    async def play():
        task = asyncio.ensure_future(engine.generate(ask(1)))
        await asyncio.sleep(0)  # its burst is not over
        if how == "close":
            engine.close()
        else:
            monkeypatch.setattr("marl_llm.sampling.scheduler.admit", lambda *_, **__: 1 / 0)
            engine.submit(ask(2))
            while engine._thread.is_alive():
                time.sleep(0.001)
        with pytest.raises(EngineError, match="stopped before it answered"):
            await asyncio.wait_for(task, 60)
        with pytest.raises(EngineError, match="has stopped"):
            await engine.generate(ask(3))

    asyncio.run(play())
    engine.close()
