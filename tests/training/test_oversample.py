"""Over-started steps: late groups belong to the next step, none is lost, and each sample has the version that its request met."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from test_team import ECHO, ENVIRONMENT, FIRST, LETTERS, SECOND, SPEC, team

from marl_llm.algorithms import make_recipe
from marl_llm.training import HostedTeam, PlayOptions, make_mesh
from marl_llm.training.play_options import oversample_conflict
from marl_llm.workflows import Task, WorkflowError, separate, sequence, tool

GRPO = make_recipe("grpo", group_size=4, rewards="mixed", returns="immediate", scale_advantages="none", rollout_correction="truncate")


def slow(until):
    """`ENVIRONMENT` with a tool between the roles: task n answers once the tool was asked about a task of `until[n]` or above."""
    asked, changed = [-1], threading.Condition()

    def wait(number):
        with changed:
            asked[0] = max(asked[0], number)
            changed.notify_all()
            assert changed.wait_for(lambda: asked[0] >= until.get(number, -1), 60)
        return number

    def tasks(split, first, count):
        return [Task(n, {"letter": LETTERS[n % 3], "number": n}, split=split) for n in range(first, first + count)]

    node = tool(wait, "heard", name="wait", timeout_s=60)
    workflow = dataclasses.replace(ECHO, inputs=("letter", "number"), body=sequence(FIRST, node, SECOND))
    return dataclasses.replace(ENVIRONMENT, workflow=workflow, tasks=tasks), lambda: wait(1_000)


def instances(batch):
    return sorted(set(batch.table.instance.tolist()))


def drawn(batch, tasks, role):
    """(task, play, ids) of a role's calls in these tasks."""
    episodes = [one for one in batch.rollout.episodes if one.task.number in tasks]
    calls = [(one, call) for one in episodes for path in one.trajectories for call in path.by(role)]
    return [(one.task.number, one.play, call.tokens.tolist()) for one, call in calls]


def test_late_groups_belong_to_the_next_step_and_no_task_is_lost_or_trained_twice():
    environment, _ = slow({1: 6, 4: 6, 6: 10, 7: 10})
    with team(GRPO, environment=slow({})[0]) as still:
        want = still.play(0, 0, 6)
    with team(GRPO, environment=environment, oversample=2) as one:
        first = one.play(0, 0, 4, 2)
        assert instances(first) == [0, 2, 3, 5]
        np.testing.assert_array_equal(first.version, 0)
        assert (first.figures["oversample/left"], first.figures["oversample/late"]) == (2.0, 0.0)
        assert "oversample/late_score" not in first.figures
        one.learn(first, 1e-1)
        second = one.play(1, 4, 4, 2)
        assert instances(second) == [1, 4, 8, 9]
        late, agent = np.isin(second.table.instance, [1, 4]), second.table.agent
        assert agent.max() == 1
        np.testing.assert_array_equal(second.version, np.where(late & (agent == 0), 0, 1))  # late plays' second calls came after the update
        assert drawn(second, [1, 4], "first") == drawn(want, [1, 4], "first")  # by identity: of the step that began them
        figures = second.figures
        assert (figures["oversample/late"], figures["episodes"]) == (2.0, 16.0)
        assert figures["oversample/late_seconds"] > figures["oversample/early_seconds"]
        both = 0.5 * (figures["oversample/late_score"] + figures["oversample/early_score"])
        assert both == pytest.approx(figures["success"])
        tokens = 8 * (figures["oversample/late_tokens"] + figures["oversample/early_tokens"])
        assert tokens == pytest.approx(figures["sampled_tokens"])
        found = one.learn(second, 1e-1)
        assert [found[name]["staleness"] for name in ("first", "second")] == [0.5, 0.0]
        third = one.play(2, 8, 4, 0)
        assert instances(third) == [6, 7, 10, 11]
        fourth = one.play(3, 12, 4, 0)  # nothing was left
        assert instances(fourth) == [12, 13, 14, 15]
        np.testing.assert_array_equal(fourth.version, 2)


def test_an_evaluation_waits_for_late_plays_and_another_engine_mixes_up_no_version():
    environment, free = slow({1: 1_000})
    with team(GRPO, environment=environment, oversample=1) as one:
        for step in range(2):  # so that the engine was given parameters more than once
            one.learn(one.play(100 + step, 400 + 4 * step, 4, 0), 1e-3)
        first = one.play(0, 0, 4, 1)
        one.learn(first, 1e-3)
        threading.Timer(0.3, free).start()
        one.evaluate({"first": "start"}, "test", 2)
        second = one.play(1, 4, 4, 0)
        assert instances(second) == [1, 5, 6, 7]
        np.testing.assert_array_equal(first.version, 2)
        np.testing.assert_array_equal(second.version, np.where(second.table.instance == 1, 2, 3))


def test_a_run_that_was_stopped_plays_what_was_late_from_its_start():
    environment, free = slow({1: 1_000, 2: 1_000})
    with team(GRPO, environment=environment, oversample=2) as one:
        assert instances(one.play(0, 0, 4, 2)) == [0, 3, 4, 5]
        state = json.loads(json.dumps(one.state()))
        free()
    with team(GRPO, environment=slow({})[0], oversample=2) as one:
        one.restore(one.policies(), state)
        second, third = one.play(1, 4, 4, 2), one.play(2, 8, 4, 0)
        assert sorted([*instances(second), *instances(third)]) == [1, 2, 6, 7, 8, 9, 10, 11]
        for places, why in ((["1"], "whole number"), ([-1], "whole number"), ("1", "whole number"), ([1, 1], "a task twice")):
            with pytest.raises(ValueError, match=f"behind.1 .*{why}"):
                one.restore(one.policies(), state | {"behind": {"1": places}})


def test_what_fails_in_a_late_play_is_told_to_the_next_step():
    calls = threading.Event()

    def fault(number):
        if number == 1:
            calls.wait(60)
            raise KeyError("broken")
        return number

    environment, _ = slow({})
    workflow = dataclasses.replace(environment.workflow, body=sequence(FIRST, tool(fault, "heard", name="look", timeout_s=60), SECOND))
    with team(GRPO, environment=dataclasses.replace(environment, workflow=workflow), oversample=1) as one:
        one.play(0, 0, 4, 1)
        calls.set()
        with pytest.raises(WorkflowError, match="look.*broken"):
            one.play(1, 4, 4, 1)
        with pytest.raises(WorkflowError, match="oversample=4 must be below the 4 tasks of a step"):
            one.play(2, 8, 4, 4)


def test_what_over_start_cannot_be_had_with_is_refused():
    beside = dict(coached=False, served=[])
    assert not oversample_conflict(PlayOptions(oversample=2), GRPO, **beside)
    assert not oversample_conflict(PlayOptions(max_staleness=1, batch_invariant=True), make_recipe("grpo"), coached=True, served=["a"])
    for change, options, recipe, why in (
        ({}, {"max_staleness": 1}, GRPO, "max_staleness=1"),
        ({}, {}, make_recipe("grpo"), "set recipe.rollout_correction=truncate"),
        ({"coached": True}, {}, GRPO, "coach"),
        ({}, {"batch_invariant": True}, GRPO, "batch_invariant"),
        ({"served": ["tool"]}, {}, GRPO, "model tool is drawn by a server"),
    ):
        assert why in oversample_conflict(PlayOptions(oversample=2, **options), recipe, **beside | change)
    with team(GRPO) as one:
        options = one.options
    models = dict.fromkeys(("first", "second"), SPEC)
    with pytest.raises(WorkflowError, match="oversample=1 needs one device in each process and found 2"):
        HostedTeam(ENVIRONMENT, separate(ECHO), models, options, make_mesh(2), play=PlayOptions(oversample=1))
    with pytest.raises(WorkflowError, match="oversample=1: batch_invariant"):
        HostedTeam(ENVIRONMENT, separate(ECHO), models, options, make_mesh(1), play=PlayOptions(oversample=1, batch_invariant=True))
