"""Who draws for a hosted team's models: what has no room is refused."""

import asyncio
import types

import jax
import numpy as np
import pytest

from marl_llm.models import make_model_config
from marl_llm.sampling.requests import Completion, Request
from marl_llm.training import Learner, make_mesh
from marl_llm.training.served import Bursts, check_pool, engines
from marl_llm.workflows import WorkflowError


def model(preset):
    learner = object.__new__(Learner)  # its shape and place alone: no parameters are made
    learner.config, learner.mesh = make_model_config(preset, compute_dtype="bfloat16"), make_mesh(1)
    return learner, {}


@pytest.mark.parametrize(("gib", "several", "fits"), [(16, True, False), (16, False, True), (32, True, True), (None, True, True)])
def test_whole_copies_that_no_device_of_a_process_can_hold_are_refused_with_their_sizes(gib, several, fits, monkeypatch):
    """One process may split a model over its devices; where nothing is known of the memory, nothing is refused."""
    models, made = {"coder": model("qwen3-8b"), "tester": model("qwen3-1.7b")}, []
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": gib * 2**30} if gib else None)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr("marl_llm.training.processes.spans", lambda mesh: several)

    def make(mesh, models):
        made.append(models)
        raise InterruptedError

    why = r"has 16\.00 GiB, .* whole copy .*: 'coder' 15\.26 GiB, 'tester' 3\.\d\d GiB\. Use a smaller"
    with pytest.raises(InterruptedError if fits else WorkflowError, match=None if fits else why):
        engines(models, make)
    assert len(made) == fits


class Recorder:
    """Answers at once; `log` has the numbers of the requests in the order in which they were submitted."""

    def __init__(self):
        self.log, self.bursts = [], Bursts()

    async def generate(self, request):
        (number,) = request.seed
        self.log.append(number)
        real = np.zeros(1, np.float32)
        return Completion(np.full(1, number, np.int32), real, real, real, "stop", 0, 0)

    async def ask(self, number):
        return int((await self.bursts.generate(self, Request((1,), (number,), 1))).tokens[0])


def test_requests_of_one_moment_are_submitted_together():
    """Plays that get to their requests a few turns of the loop apart, as long as none of the turns passes without one."""
    engine = Recorder()

    async def play(number):
        for _ in range(number):
            await asyncio.sleep(0)
        engine.log.append("made")
        return await engine.ask(number)

    async def rounds():
        for _ in range(2):
            assert await asyncio.gather(*map(play, range(20))) == [*range(20)]

    asyncio.run(rounds())
    assert engine.log == 2 * (["made"] * 20 + [*range(20)])
    asyncio.run(rounds())  # on another loop


def test_a_burst_ends_without_those_who_come_late_or_were_cancelled():
    engine = Recorder()

    async def play():
        first, second = (asyncio.ensure_future(engine.ask(number)) for number in (1, 2))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == 2
        assert await asyncio.wait_for(engine.ask(3), 5) == 3
        assert first.cancelled()

    asyncio.run(play())
    assert engine.log == [2, 3]


def test_a_burst_without_an_end_is_cut():
    engine = Recorder()

    async def play():
        asked = []
        for number in range(3 * Bursts.MOST):
            asked.append(asyncio.ensure_future(engine.ask(number)))
            await asyncio.sleep(0)
        assert 0 < len(engine.log) < 3 * Bursts.MOST  # the first ones have their answers while others still come
        await asyncio.gather(*asked)

    asyncio.run(play())


def test_a_common_pool_needs_two_models_of_one_shape_that_an_engine_draws_for():
    def learner(preset="qwen3-1.7b", sampler=None, base=None):
        made = model(preset)[0]
        made.spec, made.base = types.SimpleNamespace(sampler=sampler), base
        return made

    base = {}
    check_pool({"a": learner(), "b": learner(), "c": learner("qwen3-8b")}, "shared", ())
    for learners, together in (
        ({"a": learner(), "b": learner("qwen3-8b")}, ()),
        ({"a": learner(), "b": learner(sampler="server")}, ()),
        ({"a": learner(base=base), "b": learner(base=base)}, ("a", "b")),  # one lane
    ):
        check_pool(learners, "own", together)
        with pytest.raises(WorkflowError, match="play.pool='shared' would have no effect: no two models on the same devices"):
            check_pool(learners, "shared", together)
    with pytest.raises(WorkflowError, match="play.pool='common' is unknown; the ways are own, shared"):
        check_pool({}, "common", ())
