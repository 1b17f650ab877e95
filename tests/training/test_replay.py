"""Replay of rare successes: earlier groups take the places of tied tasks, keep their advantages, and are weighed against their sampler."""

import base64
import contextlib
import dataclasses
import functools
import json

import jax
import numpy as np
import optax
import pytest
from test_team import FIRST, SPEC, SPEECH, tasks
from test_update import CONFIG, SGD, params

from marl_llm.algorithms import Samples, make_recipe
from marl_llm.algorithms.ratios import importance_weights
from marl_llm.training import LearnerOptions, PlayOptions, TokenSample, Trained, Update, make_mesh, make_team, make_train_state, replay
from marl_llm.training.batch import Batch
from marl_llm.training.packing import Tokens
from marl_llm.training.replay import AGE, TIMES, KeptTask, Replay, replay_conflict, success_shares
from marl_llm.training.scoring import make_policy_scorer
from marl_llm.training.update import compute_advantages
from marl_llm.workflows import Environment, Workflow, WorkflowError, separate, sequence
from marl_llm.workflows.rewards import broadcast

CAP = 1.5
CORRECTED = dict(rollout_correction="truncate", rollout_correction_threshold=CAP)
RECIPE = make_recipe("grpo", group_size=4, loss_aggregation="token_mean", **CORRECTED)
RARELY, OFTEN, NEVER = (0, 0, 1, 0), (1, 0, 1, 0), (0, 0, 0, 0)
ALL = np.asarray([True])
VOCABULARY = 17  # ids of a batch are below it


def batch_of(step, pays, log_probs=None, **columns):
    """A batch of tasks with one agent: task -> what its plays are paid. Ids follow from step, task and play."""
    samples, rows = [], []
    for place, (task, plays) in enumerate(pays.items()):
        for number, pay in enumerate(plays):
            rng = np.random.default_rng((step, task, number))
            prompt = np.random.default_rng(task).integers(1, 17, 3)
            ids = rng.integers(1, 17, rng.integers(1, 5))
            samples.append(TokenSample(prompt, ids, rng.normal(-2.5, 0.4, len(ids)), f"{task}.{number}"))
            rows.append((task, place, 4 * place + number, pay))
    tokens = Tokens.of(samples)
    tokens = tokens if log_probs is None else dataclasses.replace(tokens, log_probs=log_probs(tokens))
    instance, env, trajectory, team = np.asarray(rows, np.int32).T
    zeros, ones = np.zeros(len(rows), np.int32), np.ones(len(rows), bool)
    table = Samples(
        instance=instance, env=env, trajectory=trajectory, agent=zeros, turn=zeros, order=zeros, team=team.astype(np.float32),
        local=zeros.astype(np.float32), where=ones, tokens=tokens.size, prompt_ids=tokens.prompt, **columns,
    )  # fmt: skip

    def episodes(count, when, advantages=None):
        return [] if advantages is None else [len(advantages)]

    return Batch(step, ("solver",), tokens, table, np.full(len(rows), step, np.int32), {"sampled_tokens": 7.0}, episodes)


def filler(limit=8, recipe=RECIPE):
    return Replay(PlayOptions(replay=limit), [recipe], [VOCABULARY])


def counts(batch):
    return tuple(batch.figures[f"replay/{name}"] for name in ("tied", "tasks", "kept", "age"))


def trained_on(batch):
    return sorted(set(batch.table.instance[batch.table.where].tolist()))


def kept_by(filling, step):
    return [(task.step, task.number, task.times) for task in filling.kept[step]]


def test_rare_successes_take_the_places_of_tasks_without_signal():
    filling = filler()
    first = batch_of(0, {0: RARELY, 1: OFTEN, 2: NEVER})
    assert success_shares(RECIPE, first.tokens, first.table) == {0: 0.25, 1: 0.5, 2: 0.0}
    same = filling.fill(first)
    assert (same.tokens, same.table, counts(same)) == (first.tokens, first.table, (1, 0, 1, 0))
    fresh = batch_of(3, {3: NEVER, 4: OFTEN, 5: (1, 1, 1, 1)})
    batch = filling.fill(fresh)
    assert counts(batch) == (2, 1, 1, 3)
    assert trained_on(batch) == [0, 4, 5]  # the first tied task makes room, and one that is tied stays where none is kept
    rows, samples = batch.table.instance == 0, batch.tokens.samples(range(len(batch.tokens)))
    assert batch.version[rows].tolist() == [0] * 4
    np.testing.assert_array_equal(batch.table.team[rows], RARELY)
    for number, original in zip(np.flatnonzero(rows), first.tokens.samples(range(4)), strict=True):
        for name in ("prompt", "response", "log_probs"):
            np.testing.assert_array_equal(getattr(samples[number], name), getattr(original, name))
    for name in ("env", "trajectory"):
        assert not set(getattr(batch.table, name)[rows]) & set(getattr(fresh.table, name))
    np.testing.assert_array_equal(batch.table.prompt_ids, batch.tokens.prompt)
    assert batch.figures["sampled_tokens"] == 7.0  # counted when they were sampled
    assert batch.episodes(1, "train", np.zeros(len(batch.tokens))) == [len(fresh.tokens)]
    assert fresh.table.where.all()


def test_advantages_of_replayed_and_of_fresh_groups_stay_as_they_were():
    filling = filler()
    first, fresh = batch_of(0, {0: RARELY, 1: OFTEN}), batch_of(1, {2: OFTEN, 3: NEVER})
    batch = [filling.fill(x) for x in (first, fresh)][1]
    now = compute_advantages(RECIPE, batch.tokens, batch.table).estimates
    for origin, task in ((first, 0), (fresh, 2)):
        then = compute_advantages(RECIPE, origin.tokens, origin.table).estimates
        np.testing.assert_allclose(now[batch.table.instance == task], then[origin.table.instance == task], atol=1e-7)
    assert not now[batch.table.instance == 3].any()


def test_tasks_are_kept_within_bounds_and_the_least_replayed_and_newest_come_first():
    filling = filler(limit=3)
    filling.fill(batch_of(0, {0: RARELY, 1: RARELY}))
    filling.fill(batch_of(1, {2: RARELY, 3: RARELY}))
    assert kept_by(filling, 2) == [(1, 2, 0), (1, 3, 0), (0, 0, 0)]  # the newest three
    assert trained_on(filling.fill(batch_of(2, {7: NEVER}))) == [2]
    assert trained_on(filling.fill(batch_of(3, {8: NEVER}))) == [3]
    assert trained_on(filling.fill(batch_of(4, {9: NEVER}))) == [0]
    assert TIMES == 2
    assert trained_on(filling.fill(batch_of(5, {10: NEVER, 11: NEVER}))) == [2, 3]
    assert kept_by(filling, 6) == [(0, 0, 1)]
    assert counts(filling.fill(batch_of(AGE, {0: NEVER})))[:2] == (1, 0)  # nothing is replayed beside a fresh play of its task
    assert filling.kept[AGE + 1] == ()  # too old

    filling = filler()
    filling.fill(batch_of(0, {0: RARELY, 1: RARELY, 2: RARELY}))
    filling.fill(batch_of(1, {0: OFTEN, 1: RARELY, 2: NEVER, 3: OFTEN}))
    assert kept_by(filling, 2) == [(1, 1, 0), (0, 2, 0)]  # a newer play with signal takes the place of the older one


def test_a_checkpoint_stays_within_its_bytes(monkeypatch):
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY, 1: RARELY, 2: RARELY}))
    sizes = [sum(x.nbytes for x in task.arrays.values()) for task in filling.kept[1]]
    monkeypatch.setattr(replay, "MOST_BYTES", sum(sizes[:2]))
    again = filler()
    again.fill(batch_of(0, {0: RARELY, 1: RARELY, 2: RARELY}))
    assert kept_by(again, 1) == [(0, 0, 0), (0, 1, 0)]


def test_a_restored_store_fills_the_same_batches_and_so_does_a_step_that_is_played_again():
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY, 1: RARELY}))
    filling.fill(batch_of(1, {2: NEVER, 3: RARELY}))
    text = json.dumps(filling.state())
    other = filler()
    other.restore(json.loads(text))
    assert json.dumps(other.state()) == text
    for step, pays in ((1, {2: NEVER, 3: RARELY}), (2, {4: NEVER, 5: NEVER, 6: OFTEN}), (2, {4: NEVER, 5: NEVER, 6: OFTEN})):
        want, got = (x.fill(batch_of(step, pays)) for x in (filling, other))
        assert want.figures == got.figures
        assert trained_on(got) == ([0, 3] if step == 1 else [1, 3, 6])
        for a, b in zip(jax.tree.leaves((want.tokens.ids, want.tokens.log_probs, want.table, want.version)),
                        jax.tree.leaves((got.tokens.ids, got.tokens.log_probs, got.table, got.version)), strict=True):  # fmt: skip
            assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())
    empty = filler(limit=0)
    batch = batch_of(0, {0: RARELY})
    assert empty.fill(batch) is batch
    assert empty.state() == {}
    empty.restore({})
    assert empty.kept == {}


def as_numbers(array, number):
    """An array of a checkpoint, each of its numbers replaced by this one."""
    return [array[0], array[1], base64.b64encode(np.full(array[1], number, array[0]).tobytes()).decode()]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("ids", lambda x: ["<f4", *x[1:]]),
        ("ids", lambda x: ["|O", *x[1:]]),
        ("ids", lambda x: [x[0], [10**9], x[2]]),
        ("log_probs", lambda x: [x[0], [0], ""]),
        ("size", lambda x: [x[0], x[1], base64.b64encode(np.full(4, 9, "<i4").tobytes()).decode()]),
        ("prompt_at", lambda x: [x[0], x[1], base64.b64encode(np.full(4, -1, "<i4").tobytes()).decode()]),
        ("team", lambda x: [x[0], [3], base64.b64encode(np.zeros(3, "<f4").tobytes()).decode()]),
        ("team", None),
        ("version", None),
        ("unknown", lambda x: ["<i4", [4], base64.b64encode(np.zeros(4, "<i4").tobytes()).decode()]),
        ("team", lambda x: "PK"),
        ("agent", lambda x: as_numbers(x, 1)),
        ("agent", lambda x: as_numbers(x, -1)),
        ("ids", lambda x: as_numbers(x, VOCABULARY)),
        ("ids", lambda x: as_numbers(x, -1)),
        ("team", lambda x: as_numbers(x, np.nan)),
        ("local", lambda x: as_numbers(x, np.inf)),
        ("log_probs", lambda x: as_numbers(x, np.nan)),
        ("log_probs", lambda x: as_numbers(x, -np.inf)),
        ("log_probs", lambda x: as_numbers(x, 0.02)),
        ("instance", lambda x: as_numbers(x, 1)),
        ("trajectory", lambda x: as_numbers(x, 4)),
        ("env", lambda x: as_numbers(x, -1)),
        ("version", lambda x: as_numbers(x, -1)),
        ("rank", lambda x: [x[0], [3], base64.b64encode(np.zeros(3, "<i4").tobytes()).decode()]),
        ("budget", lambda x: ["<i4", [4], base64.b64encode(np.zeros(4, "<i4").tobytes()).decode()]),
        ("names", lambda x: ["<i4", [4], base64.b64encode(np.zeros(4, "<i4").tobytes()).decode()]),
        ("kept_ids", lambda x: ["<i4", [2, 1], base64.b64encode(np.zeros(2, "<i4").tobytes()).decode()]),
    ],
)
def test_what_a_checkpoint_of_somebody_else_holds_is_refused_where_it_is_no_task(name, array):
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY}))
    state = json.loads(json.dumps(filling.state()))
    filler().restore(state)
    arrays = state["replay"]["arrays"]["0.0"]
    if array is None:
        del arrays[name]
    else:
        arrays[name] = array(arrays.get(name))
    with pytest.raises((LookupError, TypeError, ValueError)):  # `restored` names the file
        filler().restore(state)


def test_an_array_of_another_kind_or_shape_than_its_name_says_is_refused():
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY}))
    state = json.loads(json.dumps(filling.state()))
    arrays = state["replay"]["arrays"]["0.0"]
    for name, (dtype, shape, text) in dict(arrays).items():
        array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
        for other in (array[:, None], *(array.astype(kind) for kind in {"<f8", "<i8", "<u4", "<U4", "<c8", "|b1"} - {array.dtype.str})):
            arrays[name] = [other.dtype.str, list(other.shape), base64.b64encode(other.tobytes()).decode()]
            with pytest.raises(ValueError, match=rf"replay: {name} of task 0 is .*, but must be|do not fit"):
                filler().restore(state)
        arrays[name] = [dtype, shape, text]
    filler().restore(state)


@pytest.mark.parametrize("counts", [["0", 0, 0], [0, 0, -1], [0, 0, 0.0], [0, 0, True]])
def test_counts_of_a_kept_task_are_whole_numbers(counts):
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY}))
    state = json.loads(json.dumps(filling.state()))
    state["replay"]["kept"]["1"] = [counts]
    with pytest.raises(ValueError, match="of a task must be a whole number"):
        filler().restore(state)


@pytest.mark.parametrize("kept", [{"0": [[0, 0, 0]]}, {"1": [[0, 0, 0], [0, 0, 1]]}])
def test_kept_tasks_are_distinct_and_of_earlier_steps(kept):
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY}))
    state = json.loads(json.dumps(filling.state()))
    state["replay"]["kept"] = kept
    with pytest.raises(ValueError, match="must be distinct and of earlier steps"):
        filler().restore(state)


def test_a_role_that_the_team_lacks_is_refused_in_a_row_that_does_not_train_too():
    batch, filling = batch_of(0, {0: (*RARELY, 0)}), filler()
    trains = np.asarray([True, True, True, True, False])
    table = dataclasses.replace(batch.table, where=trains, played=np.ones(5, bool), agent=(~trains).astype(np.int32))
    filling.fill(dataclasses.replace(batch, table=table))
    with pytest.raises(ValueError, match="task 0 names a role that the team does not have"):
        filler().restore(filling.state())


@pytest.mark.parametrize(("largest", "refused"), [(VOCABULARY - 1, False), (VOCABULARY, True)])
def test_the_ids_that_a_token_was_drawn_from_are_within_the_vocabulary(largest, refused):
    batch, filling = batch_of(0, {0: RARELY}), filler()
    kept_ids = np.full((len(batch.tokens.log_probs), 3), -1, np.int32)
    kept_ids[-1, 0] = largest
    filling.fill(dataclasses.replace(batch, tokens=dataclasses.replace(batch.tokens, kept_ids=kept_ids)))
    with pytest.raises(ValueError, match="vocabulary of 17") if refused else contextlib.nullcontext():
        filler().restore(filling.state())


def test_masks_that_one_rollout_lacks_and_kept_ids_go_along():
    filling = filler()
    paid = np.asarray([True, True, True, False])

    def with_kept_ids(batch):
        ids = batch.step + np.arange(2 * len(batch.tokens.log_probs), dtype=np.int32).reshape(-1, 2)
        return dataclasses.replace(batch, tokens=dataclasses.replace(batch.tokens, kept_ids=ids)), ids

    first, kept_ids = with_kept_ids(batch_of(0, {0: RARELY}, team_where=paid))
    filling.fill(first)
    batch = filling.fill(with_kept_ids(batch_of(1, {1: NEVER}))[0])
    assert batch.table.team_where.tolist() == [True] * 4 + paid.tolist()
    np.testing.assert_array_equal(batch.tokens.kept_ids[-len(kept_ids) :], kept_ids)


@functools.cache
def update():
    return Update(LearnerOptions(RECIPE, SGD, row_tokens=32, minibatch=100), CONFIG, make_mesh(1))


def gradient_and_metrics(batch):
    """What one step of SGD at rate 1 takes off the parameters, and its metrics."""
    trained, metrics = update()(Trained(make_train_state(params(), SGD)), None, batch.tokens, batch.table, ALL, np.float32(1.0), 0)
    return jax.tree.map(lambda old, new: np.asarray(old - new), params(), trained.policy.params), metrics


def scored(tokens):
    """The present policy's log-probs of all response tokens, in the order of `tokens.log_probs`."""
    score = make_policy_scorer(RECIPE, CONFIG, make_mesh(1), None, row_tokens=32, minibatch=100, microbatch_tokens=0)
    table = np.asarray(score((params(), None), tokens, np.arange(len(tokens))))
    return np.concatenate([table[number, :size] for number, size in enumerate(tokens.size)])


def test_with_unchanged_parameters_replay_is_the_ordinary_update():
    first, fresh = {0: RARELY, 1: (0, 1, 0, 0)}, {2: NEVER, 3: NEVER}
    for log_probs in (scored, None):
        filling, want = filler(), batch_of(0, first, log_probs)
        filling.fill(want)
        batch = filling.fill(batch_of(1, fresh))
        assert trained_on(batch) == [0, 1]
        plain, _ = gradient_and_metrics(want)
        replayed, metrics = gradient_and_metrics(batch)
        assert metrics["ratio"] == 1
        assert (metrics["log_prob_gap"] < 1e-5) == (log_probs is scored)
        assert max(np.abs(x).max() for x in jax.tree.leaves(plain)) > 1e-3
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(replayed), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_every_token_is_weighed_against_the_policy_that_drew_it_as_numpy_does():
    filling = filler()
    filling.fill(batch_of(0, {0: RARELY}))
    batch = filling.fill(batch_of(1, {1: OFTEN, 2: NEVER}, scored))
    now, sampler = scored(batch.tokens).astype(np.float64), np.asarray(batch.tokens.log_probs, np.float64)
    weights = np.minimum(np.exp(now - sampler), CAP)
    got, cut = importance_weights(now[None].astype(np.float32), sampler[None].astype(np.float32), cap=CAP)
    np.testing.assert_allclose(got[0], weights, atol=1e-6)
    total = units = 0.0
    places = np.repeat(np.arange(len(batch.tokens)), batch.tokens.size)
    np.testing.assert_allclose(weights[batch.table.instance[places] == 1], 1.0, atol=1e-5)  # fresh
    replayed = weights[batch.table.instance[places] == 0]
    assert replayed.min() < 0.9 < 1.1 < replayed.max() == CAP
    for task, pays in ((0, RARELY), (1, OFTEN)):
        pay = np.asarray(pays, np.float64)
        advantages = (pay - pay.mean()) / (pay.std(ddof=RECIPE.ddof) + RECIPE.epsilon)
        for row, advantage in zip(np.flatnonzero(batch.table.instance == task), advantages, strict=True):
            total -= advantage * weights[places == row].sum()
            units += batch.tokens.size[row]
    assert gradient_and_metrics(batch)[1]["loss"] == pytest.approx(total / units, abs=1e-6)


def hit(path):
    return float(path.fields["one"] == path.fields["letter"])


WORKFLOW = Workflow(
    "once", sequence(FIRST), ("letter",), rewards=(broadcast(hit, name="hit"),), metrics={"hit": hit}, score="at_end"
)  # fmt: skip
HIT_OR_MISS = Environment(WORKFLOW, tasks, "hit", SPEECH)
PLAYED = make_recipe("grpo", group_size=8, rewards="team", rollout_correction="truncate")


def team(play, recipe=PLAYED, **options):
    learner = LearnerOptions(recipe, optax.sgd(1.0), row_tokens=64, minibatch=100)
    return make_team(HIT_OR_MISS, separate(WORKFLOW), {"first": SPEC}, learner, make_mesh(1), play=play, seed=3, **options)


def test_a_hosted_team_that_resumes_replays_the_same_tasks_and_ends_with_the_same_bytes():
    play = PlayOptions(max_num_seqs=16, decode_steps=2, batch_invariant=True, replay=4)

    def steps(one, numbers):
        batches, figures = [], []
        for step in numbers:
            batches.append(one.play(step, 6 * step, 6))
            figures.append(one.learn(batches[-1], 0.05)["first"])
        return batches, figures

    with team(play) as one:
        steps(one, range(2))
        state, policies = json.loads(json.dumps(one.state())), jax.tree.map(np.array, one.policies())
        batches, figures = steps(one, range(2, 4))
        want = jax.tree.map(np.array, one.policies()["first"].params)
    assert batches[0].figures["replay/tasks"] > 0
    assert batches[0].figures["samples"] == 48
    assert figures[0]["staleness"] > 0
    with team(play) as other:
        other.restore(policies, state)
        again, _ = steps(other, range(2, 4))
        got = other.policies()["first"].params
    assert [batch.figures["replay/age"] for batch in again] == [batch.figures["replay/age"] for batch in batches]
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.tobytes() == np.asarray(b).tobytes()


def test_what_refills_leave_tied_is_replayed():
    with team(PlayOptions(max_num_seqs=16, decode_steps=2, replay=4), refills=1) as played:
        for step in range(3):
            last = played.play(step, 6 * step, 6)
            played.learn(last, 0.05)
    assert last.figures["refills/rounds"] > 0
    assert last.figures["replay/tasks"] > 0
    assert len(trained_on(last)) == 6
    replayed = set(last.table.instance[last.version < 2].tolist())
    assert len(replayed) == last.figures["replay/tasks"]
    assert replayed < set(trained_on(last))


def test_what_replay_cannot_stand_beside_is_refused_by_name():
    def why(name="grpo", beside=None, **fields):
        corrected = {} if name == "ppo" else {"rollout_correction": "mask"}
        return replay_conflict(4, make_recipe(name, **corrected | fields), **(beside or {}))

    assert why() == ""
    assert replay_conflict(0, make_recipe("ppo"), max_staleness=1) == ""
    assert "makes no groups" in why("ppo")
    assert "set recipe.rollout_correction=truncate" in why(rollout_correction="none")
    assert "a tree is one play" in why("at_grpo")
    assert "scale_advantages='batch'" in why(scale_advantages="batch")
    assert "recipe.advantages" in why(advantages=lambda samples, returns: returns)
    assert "kl_where='reward'" in why(kl_coef=0.1, kl_where="reward")
    assert "distill_coef" in why(distill_coef=0.1)
    for name in ("max_staleness", "oversample"):
        assert f"{name} trains on samples of before an update" in why(beside={name: 1})
    for name, message in (("coached", "a coach"), ("permuted", "permute_rewards"), ("program", "program"), ("several", "processes")):
        assert message in why(beside={name: True})
    with pytest.raises(WorkflowError, match=r"replay=4: samples of earlier steps .* set recipe\.rollout_correction"):
        team(PlayOptions(replay=4), make_recipe("grpo", group_size=8))
    with pytest.raises(WorkflowError, match=r"replay=4: control\.permute_rewards"):
        team(PlayOptions(replay=4), permute_rewards=True)


def test_a_task_that_is_kept_is_read_back_by_name():
    task = KeptTask.of(batch_of(0, {5: RARELY, 6: OFTEN}), 6)
    assert (task.number, task.step, task.times, len(task.tokens)) == (6, 0, 0, 4)
    assert task.columns["env"].tolist() == [0] * 4
    assert task.columns["trajectory"].tolist() == [0, 1, 2, 3]
