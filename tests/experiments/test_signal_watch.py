"""A start of which every sample earns the same is told before the first update, and ends a run of checkpoints."""

import contextlib
import json
import pathlib
import types

import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.runs.building import restored
from marl_llm.runs.command import TrainingError
from marl_llm.runs.measuring import NO_SIGNAL, UNPAID, SignalWatch, signal_watch
from marl_llm.training import CheckpointError

RECIPE = make_recipe("grpo")


def batch(pays, where=None, rollout=None):
    team = np.asarray(pays, np.float32)
    where = np.ones(team.size, bool) if where is None else np.asarray(where)
    return types.SimpleNamespace(table=types.SimpleNamespace(team=team, local=np.zeros_like(team), where=where), rollout=rollout)


def rollout(*calls):
    made = [types.SimpleNamespace(role=role, text=text, legal=legal) for role, text, legal in calls]
    return types.SimpleNamespace(episodes=[types.SimpleNamespace(trajectories=[types.SimpleNamespace(calls=made)])])


def test_what_the_roles_said_is_told_once():
    lines = []
    watch = SignalWatch(lines.append, RECIPE.reward_of, stops=False)
    for step in (1, 2, 3):
        watch.look(step, batch([0.0] * NO_SIGNAL, rollout=rollout(("a", "x" * 200, False), ("b", "fine", True), ("a", "y", True))))
    assert lines == [
        f"step 1: all {NO_SIGNAL} samples so far earned 0, so there is nothing to learn from them; a could not be read 1 of 2 times, and "
        f"said first {'x' * 160!r}; b could not be read 0 of 1 times, and said first 'fine'. Make the task easier, the prompt clearer, or "
        "the pay graded"
    ]


def test_a_run_of_checkpoints_ends_when_enough_samples_earned_the_same():
    lines = []
    watch = SignalWatch(lines.append, RECIPE.reward_of, stops=True)
    watch.look(1, batch([0.5] * (NO_SIGNAL - 1)))
    assert len(lines) == 1
    with pytest.raises(TrainingError, match=rf"step 2: all {NO_SIGNAL} samples so far earned 0\.5.*profile"):
        watch.look(2, batch([0.5]))


@pytest.mark.parametrize(
    ("loss", "lines", "ends"),
    [({}, 1, True), ({"distill_coef": 0.5}, 1, False), ({"distill_coef": 0.5, "policy_coef": 0.0}, 0, False)],
    ids=["rewards", "rewards and a teacher", "a teacher alone"],
)
def test_equal_rewards_do_not_end_a_run_that_learns_from_a_teacher(loss, lines, ends):
    recipe, said = make_recipe("grpo", **loss), []
    watch = signal_watch(types.SimpleNamespace(recipe=recipe, recipes={"a": recipe}, options={"a": {"path": "x"}}), said.append)
    watch.look(1, batch([0.0]))
    assert len(said) == lines
    with pytest.raises(TrainingError) if ends else contextlib.nullcontext():
        watch.look(2, batch([0.0] * NO_SIGNAL))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (batch([0.0, 1.0]), batch([0.0] * NO_SIGNAL)),
        (batch([0.0] * 8), batch([1.0] * NO_SIGNAL)),  # other samples than before, which a group of theirs may hold too
        (batch([]), batch([0.0, 0.5] * NO_SIGNAL)),
    ],
)
def test_one_other_reward_is_enough(first, second):
    watch = SignalWatch(lambda line: None, RECIPE.reward_of, stops=True)
    watch.look(1, first)
    watch.look(2, second)
    watch.look(3, batch([0.0] * NO_SIGNAL))


@pytest.mark.parametrize(
    ("kept", "fits", "ends"),
    [(["pays", "paid_samples"], [0.0, 1.0], False), ([], [0.0], False), (["pays", "paid_samples"], [1.0], True)],
    ids=["signal before", "an earlier version's checkpoint", "none before"],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(kept, fits, ends):
    plan = types.SimpleNamespace(recipe=RECIPE, recipes={"a": RECIPE}, options={"a": {"path": "x"}})
    before = signal_watch(plan, print)
    before.look(1, batch(fits * 4))
    state = json.loads(json.dumps({key: before.seen[key] for key in kept}))
    after = signal_watch(plan, print, state)
    with pytest.raises(TrainingError, match=f"all {NO_SIGNAL} samples") if ends else contextlib.nullcontext():
        after.look(2, batch([1.0] * (NO_SIGNAL - 4)))
        after.look(3, batch([1.0] * NO_SIGNAL))


@pytest.mark.parametrize("pays", [{"pays": "01"}, {"pays": 1}, {"pays": [1e300]}, {"paid_samples": -1}, {"paid_samples": None}])
def test_rewards_of_a_strangers_checkpoint_are_told_by_their_file(pays):
    counts = dict.fromkeys(("seed", "samples", "sampled_tokens", "wall_s", "cpu_s"), 0)
    state = counts | {"step": 2, "silent": {}, "team": {}} | UNPAID | pays
    stored = types.SimpleNamespace(directory=pathlib.Path("run"), state=lambda step: state, check=lambda step, like: None)
    with pytest.raises(CheckpointError, match=r"run/2/state\.json: it cannot be taken over \(\w+: (pay|paid|.int. object is not iterable)"):
        restored(types.SimpleNamespace(policies=dict), stored, 2)


def test_samples_that_do_not_train_are_no_signal():
    watch = SignalWatch(lambda line: None, RECIPE.reward_of, stops=True)
    with pytest.raises(TrainingError):
        watch.look(1, batch([0.0] * NO_SIGNAL + [1.0], [True] * NO_SIGNAL + [False]))
