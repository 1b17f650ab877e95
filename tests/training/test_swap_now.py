"""`weight_update="in_flight"`: plays that go on beside an update get its parameters in the middle of a response, and each sample has its
version."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from test_oversample import GRPO, slow
from test_team import ECHO, ENVIRONMENT, SPEC, gated, team

from marl_llm.algorithms import make_recipe
from marl_llm.training import HostedTeam, PlayOptions, make_mesh
from marl_llm.training.play_options import weight_update_conflict
from marl_llm.workflows import WorkflowError, separate, shared, with_roles
from marl_llm.workflows.storage import from_json, to_json


def longer(environment):
    """The second role says up to eight tokens: the first comes with the prompt, then chunks of two."""
    def roles(role):
        return dataclasses.replace(role, max_tokens=8 if role.name == "second" else 2)

    return dataclasses.replace(environment, workflow=with_roles(environment.workflow, roles))


def hold(one, count):
    """Holds the engine where `count` responses of the second role decode, until new parameters have arrived, and says so by an event.

    They enter together, so that all of them have as many tokens of the old version.
    """
    (scheduler,), engine, held = one._current.engine._all, one._current.engine, threading.Event()
    real, enter = scheduler.step, scheduler.admit

    def admit():
        seconds = sum(sequence.request.max_tokens == 8 for sequence in scheduler.waiting)
        if 0 < seconds < count:
            time.sleep(0.001)
            return 0, False  # until the others have come
        if seconds:
            scheduler.admit = enter
        return enter()

    def step(now):
        seconds = [sequence for sequence in scheduler.running if sequence.request.max_tokens == 8]
        if seconds:
            assert len(seconds) == count
            held.set()
            end = time.monotonic() + 30
            while not engine._updates and time.monotonic() < end:
                time.sleep(0.001)
            scheduler.step = real
        real(now)

    scheduler.step, scheduler.admit = step, admit
    return scheduler, held


def calls(batch, role):
    return [call for one in batch.rollout.episodes for path in one.trajectories for call in path.by(role)]


def check(batch, before, after):
    """The responses under way have tokens of both versions, the first of the old one; all samples have their first token's version."""
    mixed = [call for call in calls(batch, "second") if call.versions is not None]
    assert mixed
    for call in mixed:
        np.testing.assert_array_equal(call.versions, call.version + (np.arange(call.tokens.size) >= 3))
    assert all(call.tokens.size <= 3 for call in calls(batch, "second") if call.versions is None and call.version == mixed[0].version)
    want = [(before, after)[call.version > mixed[0].version] for role in ("first", "second") for call in calls(batch, role)]
    assert sorted(batch.version.tolist()) == sorted(want)
    assert batch.figures["mixed_share"] == pytest.approx(len(mixed) / len(batch.version))
    return mixed


def test_a_step_that_is_played_ahead_goes_on_with_what_the_update_made():
    environment, gate = gated()
    with team(GRPO, shared(ECHO), environment=longer(environment), max_staleness=1, weight_update="in_flight") as one:
        first = one.play(0, 0, 6)
        assert first.figures["mixed_share"] == 0.0
        scheduler, held = hold(one, 16)  # all slots
        gate.clear()
        one.prepare(1, 6, 6)
        while scheduler.stats["requests"] < 48 + 24 or scheduler.sequences:  # second roles of six tasks with four plays wait for the tool
            time.sleep(0.001)
        gate.set()
        assert held.wait(60)
        one.learn(first, 1e-2)
        second = one.play(1, 6, 6)
        mixed = check(second, 0, 1)
        assert {0, 1} == set(second.version.tolist())  # first roles and those under way; those that had no slot by then
        rollout = second.rollout
        line = json.loads(json.dumps(to_json(rollout, next(e for e in rollout.episodes if mixed[0] in e.trajectories[0].calls))))
        read = next(call for call in from_json(line).trajectories[0].calls if call.id == mixed[0].id)
        np.testing.assert_array_equal(read.versions, mixed[0].versions)
        stale = one.learn(second, 1e-2)["policy"]
        assert stale["staleness"] == pytest.approx(1 - second.version.mean())
        third = one.play(2, 12, 6)
        np.testing.assert_array_equal(third.version, 2)
        assert one.learn(third, 1e-2)["policy"]["log_prob_gap"] < 1e-4 < stale["log_prob_gap"]


def test_late_plays_go_on_with_the_parameters_of_the_next_step():
    environment, free = slow({1: 1_000})
    with team(GRPO, shared(ECHO), environment=longer(environment), oversample=1, weight_update="in_flight") as one:
        first = one.play(0, 0, 4, 1)
        one.learn(first, 1e-2)
        _, held = hold(one, 4)
        free()
        assert held.wait(60)
        second = one.play(1, 4, 4, 0)
        mixed = check(second, 0, 1)
        assert {call.seed[1] for call in mixed} == {1}  # the late task's
        late = second.table.instance == 1
        np.testing.assert_array_equal(second.version, np.where(late, 0, 1))


def test_what_it_cannot_be_had_with_is_refused():
    def refusal(recipe=GRPO, served=(), several=False, **options):
        play = PlayOptions(**dict(weight_update="in_flight", oversample=2) | options)
        return weight_update_conflict(play, recipe, served=served, several=several)

    assert not refusal()
    assert not refusal(make_recipe("grpo"), ["a"], True, weight_update="blocking", oversample=0, batch_invariant=True)
    for change, why in (
        ({"weight_update": "soon"}, "weight_update='soon' is unknown; the ways are blocking, in_flight"),
        ({"oversample": 0}, "weight_update=in_flight: it would have no effect: nothing is under way"),
        ({"batch_invariant": True}, "weight_update=in_flight: batch_invariant promises equal bytes"),
        ({"recipe": make_recipe("grpo")}, "set recipe.rollout_correction=truncate"),
        ({"served": ["tool"]}, "model tool is drawn by a server"),
        ({"several": True}, "several processes"),
    ):
        assert why in refusal(**change)
    with team(GRPO) as one:
        options = one.options
    models = dict.fromkeys(("first", "second"), SPEC)
    with pytest.raises(WorkflowError, match="weight_update=in_flight: it would have no effect"):
        HostedTeam(ENVIRONMENT, separate(ECHO), models, options, make_mesh(1), play=PlayOptions(weight_update="in_flight"))
