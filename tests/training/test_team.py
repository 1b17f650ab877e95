"""A team on the host over the real engine: it learns, by identity, and each model from the rows of its own roles alone."""

import dataclasses
import json
import threading
import types
import warnings

import jax
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.models import LoraConfig, ModelConfig, init_params
from marl_llm.rollout.table import CompiledRollout, Episodes
from marl_llm.text import train_pieces
from marl_llm.training import Checkpoints, HostedTeam, Learner, LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer, make_team
from marl_llm.training.compiled import CompiledTeam
from marl_llm.training.rollouts import Played
from marl_llm.workflows import (
    Assignment,
    Environment,
    FormatError,
    Inside,
    PlainText,
    Role,
    Scripted,
    Task,
    Workflow,
    WorkflowError,
    alternate,
    separate,
    sequence,
    shared,
    together,
    tool,
)
from marl_llm.workflows.rewards import absolute, broadcast, format_penalty

LETTERS = ("a", "b", "c")
TOKENIZER = train_pieces((*LETTERS, "say", "again", "."))
SPEECH = PlainText(TOKENIZER, (int(TOKENIZER.ids_of(["."])[0]),))
SHAPE = ModelConfig(vocab_size=TOKENIZER.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)


def letter(field):
    def parse(text):
        if text not in LETTERS:
            raise FormatError("no letter")
        return {field: text}

    return parse


SIZES = dict(max_tokens=2, max_prompt=4)
FIRST = Role("first", "say {letter}", letter("one"), {"one": "?"}, **SIZES)
SECOND = Role("second", "again {one}", letter("two"), {"two": "?"}, **SIZES)


def right(way):
    return float(way.fields["one"] == way.fields["letter"]) / 2 + float(way.fields["two"] == way.fields["letter"]) / 2


def by_tokens(weight):
    return absolute(lambda call, way: weight * (call.tokens.sum() % 3), ("second",), name="other")


def own(call, way):
    return float(call.text == way.fields["letter"])


ECHO = Workflow(
    "echo", sequence(FIRST, SECOND), ("letter",), rewards=(broadcast(right, name="right"), format_penalty(0.5)), metrics={"right": right},
    score="at_end",
)  # fmt: skip


def tasks(split, first, count):
    return [Task(n, {"letter": LETTERS[n % 3]}, split=split) for n in range(first, first + count)]


def teacher(turn):
    return turn.fields["letter"] if turn.random.random() < 0.5 else turn.random.choice(LETTERS)


ENVIRONMENT = Environment(ECHO, tasks, "right", SPEECH, teacher)
PARAMS = init_params(SHAPE, jax.random.key(0))
SPEC = ModelSpec(SHAPE, PARAMS, SPEECH)
GRPO = make_recipe("grpo", group_size=4, rewards="mixed", returns="immediate", scale_advantages="none")


def team(
    recipe=GRPO, assignment=None, environment=ENVIRONMENT, specs=None, max_staleness=0, oversample=0, weight_update="blocking",
    block_pool="own", **options
):  # fmt: skip
    assignment = assignment or separate(environment.workflow)
    learner = LearnerOptions(recipe, make_optimizer(), row_tokens=64, minibatch=8)
    specs = specs or dict.fromkeys(assignment.policies, SPEC)
    play = PlayOptions(max_num_seqs=16, decode_steps=2, max_staleness=max_staleness, oversample=oversample, weight_update=weight_update,
                       block_pool=block_pool)
    return make_team(environment, assignment, specs, learner, make_mesh(1), play=play, **options)


def run(one, steps=1, rate=1e-2, first=0):
    figures = []
    for step in range(first, first + steps):
        figures.append(one.learn(one.play(step, 6 * step, 6), rate))
    return figures


def same(a, b, atol=2e-4):
    """Up to rounding, which depends on who decodes beside whom; Adam makes more of it where a gradient is close to zero."""
    return all(np.allclose(x, y, atol=atol) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_team_learns_and_the_control_with_permuted_rewards_does_not():
    found = {}
    for permute in (False, True):
        with team(permute_rewards=permute) as one:
            for step in range(12):
                one.sft_step(step % 6, 12, 1e-2)
            one.start_rl()
            before = one.evaluate({}, "test", 60, temperature=1.0)
            run(one, steps=20, rate=1e-2)
            found[permute] = before.success, one.evaluate({}, "test", 60, temperature=1.0).success
    assert found[False][0] == found[True][0] < 0.7
    assert found[False][1] > found[False][0] + 0.25
    assert found[True][1] < found[True][0] + 0.1


def test_pay_that_the_recipe_leaves_out_is_told_once():
    for kind, left_out, message in (("team", "local", "of second"), ("local", "team", "of first, second")):
        rewards = (broadcast(lambda way: 1.0), by_tokens(1.0)) if left_out == "team" else (broadcast(right), by_tokens(1.0))
        environment = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=rewards))
        with team(make_recipe("grpo", group_size=4, rewards=kind), environment=environment) as one:
            batch = one.play(0, 0, 6)
            told = rf"reads {kind} rewards only; the {left_out} rewards {message} train nothing.*rewards='mixed'"
            with pytest.warns(UserWarning, match=told):
                one.learn(batch, 1e-3)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                one.learn(batch, 1e-3)
    with team() as one, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(one)


def test_the_same_run_comes_out_again_and_another_seed_is_another():
    ends = []
    for seed in (0, 0, 1):
        with team(seed=seed) as one:
            run(one, steps=2)
            ends.append(one.learners["second"].params)
    assert same(ends[0], ends[1])
    assert not same(ends[0], ends[2])


def test_a_model_learns_from_the_rows_of_its_own_roles_alone():
    """Whatever the second role is paid, the first one's update is the same."""
    ends = []
    for weight in (0.0, 5.0):
        rewards = (absolute(own, ("first",), name="own"), by_tokens(weight))
        environment = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=rewards))
        with team(environment=environment) as one:
            (figures,) = run(one)
            ends.append({name: learner.params for name, learner in one.learners.items()})
            assert figures["first"]["grad_norm"] > 0
            assert (figures["second"]["grad_norm"] > 0) == (weight > 0)
    assert same(ends[0]["first"], ends[1]["first"])
    assert not same(ends[0]["second"], ends[1]["second"])


def test_frozen_models_stay_and_schedules_take_turns():
    models = {"second": Inside(trained=False)}
    with team(assignment=Assignment({"first": "first", "second": "second"}, models)) as one:
        (figures,) = run(one)
        assert set(figures) == {"first"}
        assert same(one.learners["second"].params, one.learners["second"].start)
    turns = Assignment({"first": "x", "second": "y"}, schedule=alternate(("x", 1), ("y", 2)))
    with team(assignment=turns) as one:
        assert [set(figures) for figures in run(one, steps=4)] == [{"x"}, {"y"}, {"y"}, {"x"}]


def test_roles_that_share_a_model_share_its_update():
    with team(assignment=shared(ECHO)) as one:
        (figures,) = run(one)
        assert set(figures) == {"policy"}
        assert list(one.learners) == ["policy"]
        batch = one.play(1, 6, 6)
        assert set(batch.table.agent[batch.table.where]) == {0, 1}
        np.testing.assert_array_equal(batch.version, 1)  # sampled after one update


def test_models_of_other_shapes_and_adapters_on_a_base_train_side_by_side():
    wide = dataclasses.replace(SHAPE, width=32)
    first, second = ModelSpec(wide, init_params(wide, jax.random.key(1)), SPEECH), ModelSpec(SHAPE, PARAMS, SPEECH, LoraConfig(2))
    specs = {"first": first, "second": second}
    with team(specs=specs) as one:
        one.sft_step(0, 6, 1e-2)
        one.start_rl()
        (figures,) = run(one)
        assert figures["first"]["grad_norm"] > 0 < figures["second"]["grad_norm"]
        assert figures["second"]["log_prob_gap"] < figures["second"]["log_prob_gap_bound"] == 1e-4  # what is served is what is scored (b13)
        assert same(one.learners["second"].base, PARAMS)
        assert not same(one.learners["second"].params, one.learners["second"].start)


@pytest.mark.parametrize(
    ("recipe", "critic"), [("ppo", "own"), ("ppo", "head"), ("ppo", "centralised"), ("mappa", "own"), ("at_grpo", "own")]
)
def test_every_recipe_steps(recipe, critic):
    options = {"ppo": dict(group_size=2), "mappa": dict(group_size=2, rewards="mixed"), "at_grpo": dict(group_size=3)}[recipe]
    made = make_recipe(recipe, **options)
    learner = LearnerOptions(made, make_optimizer(), row_tokens=64, minibatch=8, critic=critic)
    specs = dict.fromkeys(("first", "second"), SPEC)
    with HostedTeam(ENVIRONMENT, separate(ECHO), specs, learner, make_mesh(1), play=PlayOptions(16, 2)) as one:
        steps = run(one, steps=2)
        for figures in steps:
            assert set(figures) == {"first", "second"}
            assert all(f["log_prob_gap"] < 1e-4 for f in figures.values())
            assert ("value_error" in figures["first"]) == (recipe == "ppo")
        assert all(any(figures[name]["grad_norm"] > 0 for figures in steps) for name in ("first", "second"))
        critics = {name for name in one.policies() if name.endswith(".critic")}
        assert critics == ({"first.critic", "second.critic"} if recipe == "ppo" and critic != "head" else set())


def test_seats_say_who_plays_and_a_role_that_is_put_back_plays_as_it_began():
    with team(assignment=Assignment({"first": "a", "second": "b"})) as one:
        for step in range(10):
            one.sft_step(step, 12, 1e-2)
        one.start_rl()

        def page(**seats):
            return one.evaluate(seats, "test", 12)

        before = page()
        run(one, steps=3)
        after = page()

        def same_as(a, b):
            return [x.team for x in a.outcomes] == [x.team for x in b.outcomes]

        assert same_as(page(first="start", second="start"), before)
        assert same_as(page(first="trained:a", second="trained"), after)
        swapped = page(first="trained:b", second="trained:a")
        assert swapped.seats == {"first": "trained:b", "second": "trained:a"}
        assert same_as(page(first="trained:b", second="trained:a"), swapped)
        taught = page(first="scripted", second="scripted").summary()
        assert taught["roles"] == {"first": {"well_formed": 1.0}, "second": {"well_formed": 1.0}}
        assert taught["episodes"] == taught["tasks"] == 12
        twice = one.evaluate({}, "test", 4, plays=2, temperature=1.0)
        assert [(x.task, x.play) for x in twice.outcomes] == [(t, p) for t in range(4) for p in range(2)]
        for seats, message in (
            ({"third": "start"}, "no role 'third'; the roles are first, second"),
            ({"first": "start:c"}, "no model 'c'; the models are a, b"),
            ({"first": "asleep"}, "seat 'asleep' is unknown"),
        ):
            with pytest.raises(ValueError, match=message):
                one.evaluate(seats, "test", 12)
        with pytest.raises(WorkflowError, match="has no random player"):
            one.evaluate({"first": "random"}, "test", 12)


def test_what_is_restored_goes_on_as_if_nothing_had_happened(tmp_path):
    recipe = make_recipe("ppo", group_size=2)

    def warmed(one):
        one.sft_step(0, 12, 1e-2)
        one.start_rl()

    with team(recipe) as whole:
        warmed(whole)
        run(whole, steps=4)
    checkpoints = Checkpoints(tmp_path)
    with team(recipe) as half:
        warmed(half)
        checkpoints.save(0, half.policies(), {})
        run(half, steps=2)
        checkpoints.save(2, half.policies(), half.state())
    with team(recipe) as again:
        like = again.policies()
        again.restore_start(checkpoints.restore_params(0, like))
        again.restore(checkpoints.restore(2, like), checkpoints.state(2))
        run(again, steps=2, first=2)
        assert same(again.policies(), whole.policies())
        assert same(again.learners["first"].start, whole.learners["first"].start)


def test_what_cannot_be_is_refused():
    with pytest.raises(WorkflowError, match="model 'second' plays a role, but models holds only first"):
        team(specs={"first": SPEC})
    with pytest.raises(ValueError, match="critic='both' is unknown; the kinds are own, head, centralised"):
        LearnerOptions(GRPO, make_optimizer(), 64, 8, critic="both")
    options = LearnerOptions(make_recipe("ppo"), make_optimizer(), 64, 8, critic="head")
    adapted = dict.fromkeys(("first", "second"), ModelSpec(SHAPE, PARAMS, SPEECH, LoraConfig(2)))
    with pytest.raises(ValueError, match="adapters are trained: use critic='own'"):
        HostedTeam(ENVIRONMENT, separate(ECHO), adapted, options, make_mesh(1))
    unscripted = dataclasses.replace(ENVIRONMENT, script=None)
    with pytest.raises(WorkflowError, match="no scripted player to imitate"), team(environment=unscripted) as one:
        one.sft_step(0, 4, 1e-2)
    with pytest.raises(WorkflowError, match="its headline 'score' is no metric of the workflow \\(right\\)"):
        dataclasses.replace(ENVIRONMENT, headline="score")


def test_a_tree_that_cannot_be_is_refused_and_leaves_no_engine_behind():
    beside = dataclasses.replace(ECHO, body=together(FIRST, dataclasses.replace(SECOND, prompt="again")), rewards=(format_penalty(0.5),))
    before = threading.active_count()
    with pytest.raises(WorkflowError, match="node 'first' runs beside others, where a play cannot fork"):
        team(make_recipe("at_grpo"), environment=dataclasses.replace(ENVIRONMENT, workflow=beside))
    assert threading.active_count() == before


def test_a_scripted_role_speaks_beside_a_policy_and_is_no_sample():
    models = {"script": Scripted(lambda turn: turn.fields["letter"])}
    with team(assignment=Assignment({"first": "script", "second": "b"}, models)) as one:
        batch = one.play(0, 0, 6)
        assert set(one.learn(batch, 1e-2)) == {"b"}
        assert set(batch.table.agent[batch.table.where]) == {1}
        assert batch.figures["samples/not_trained"] == 24


def test_self_play_takes_off_each_roles_running_mean_and_keeps_it_in_checkpoints(monkeypatch):
    zero_sum = (absolute(lambda call, way: 1.0, ("first",), name="won"), absolute(lambda call, way: -1.0, ("second",), name="lost"))
    environment = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=zero_sum))
    figures = {"kl": 0.0, "tied_share/0": 0.0, "tied_share/1": 0.0}
    monkeypatch.setattr(Learner, "learn", lambda self, *_: dict(figures))  # advantages come before it
    with team(make_recipe("spiral"), shared(ECHO), environment) as one:
        batch = one.play(0, 0, 6)
        found = one.learn(batch, 1e-3)["policy"]
        moved = 1 - 0.95**6
        np.testing.assert_array_equal(one.advantages, np.where(batch.table.agent == 0, 1.0, -1.0))
        assert found["running_mean/first"] == pytest.approx(moved) == pytest.approx(-found["running_mean/second"])
        one.learn(batch, 1e-3)
        np.testing.assert_allclose(one.advantages, np.where(batch.table.agent == 0, 1 - moved, moved - 1), atol=1e-6)
        start, state, running = one.policies(), json.loads(json.dumps(one.state())), one.running
    with team(make_recipe("spiral"), shared(ECHO), environment) as again:
        again.restore_start({name: policy.params for name, policy in start.items()})
        again.restore(start, state)
        np.testing.assert_array_equal(again.running, running)


def test_opponents_that_would_share_one_outcome_are_warned_of_once():
    zero_sum = (broadcast(lambda way: 1.0, ("first",)), broadcast(lambda way: -1.0, ("second",)))
    rival = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=zero_sum))
    told = "returns='outcome' gives all roles of a play one return, but first was paid for winning and second for losing. Use returns='imm"
    with team(make_recipe("grpo"), shared(ECHO), rival) as one:
        with pytest.warns(UserWarning, match=told):
            one.learn(one.play(0, 0, 2), 1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one.learn(one.play(1, 0, 2), 1e-3)
    for recipe, environment in ((make_recipe("grpo", returns="immediate"), rival), (make_recipe("grpo"), ENVIRONMENT)):
        with team(recipe, shared(ECHO), environment) as one, warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*for losing")
            one.learn(one.play(0, 0, 2), 1e-3)


def test_models_that_draw_pages_from_one_pool_play_and_learn_the_same():
    drawn = []
    for block_pool in ("own", "shared"):
        with team(block_pool=block_pool) as one:
            stores = {id(scheduler.store) for scheduler in one._current.engine._all}
            batches = [one.play(0, 0, 6)]
            one.learn(batches[0], 1e-2)
            batches.append(one.play(1, 6, 6))
            drawn.append((len(stores), *(np.asarray(batch.tokens.ids) for batch in batches)))
    assert [stores for stores, *_ in drawn] == [2, 1]
    for own, common in zip(drawn[0][1:], drawn[1][1:], strict=True):
        np.testing.assert_array_equal(own, common)


# ---------------------------------------------------------------------------------------------------- played ahead
def gated():
    """`ENVIRONMENT` with a tool between the roles that answers while the gate is open, and the gate."""
    gate = threading.Event()
    gate.set()
    wait = tool(lambda one: one if gate.wait(60) else None, "heard", name="wait", timeout_s=60)
    return dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, body=sequence(FIRST, wait, SECOND))), gate


def test_a_step_is_played_beside_the_update_with_the_parameters_of_before():
    environment, gate = gated()
    with team(environment=environment) as still:
        want = still.play(1, 6, 6)  # nothing was learned
    with team(environment=environment, max_staleness=1) as one:
        first = one.play(0, 0, 6)
        gate.clear()
        one.prepare(1, 6, 6)
        fresh = one.learn(first, 1e-2)  # ends while the play waits for its tool
        gate.set()
        second = one.play(1, 6, 6)
        assert one.learners["first"].version == 1
        np.testing.assert_array_equal(second.version, 0)
        np.testing.assert_array_equal(second.tokens.ids, want.tokens.ids)
        stale = one.learn(second, 1e-2)
        third = one.play(2, 12, 6)
        np.testing.assert_array_equal(third.version, 2)
        again = one.learn(third, 1e-2)
    assert [found["second"]["staleness"] for found in (fresh, stale, again)] == [0.0, 1.0, 0.0]
    assert again["second"]["log_prob_gap"] < 1e-4 < stale["second"]["log_prob_gap"]  # what is served is again what is scored


def test_an_evaluation_waits_for_what_is_played_ahead_and_sees_what_was_learned():
    environment, gate = gated()
    with team(environment=environment) as one:
        want = one.play(1, 6, 6)  # nothing was learned
        one.learn(one.play(0, 0, 6), 1e-1)
        learned = [x.team for x in one.evaluate({}, "test", 12).outcomes]
    with team(environment=environment, max_staleness=1) as one:
        first = one.play(0, 0, 6)
        gate.clear()
        one.prepare(1, 6, 6)
        one.learn(first, 1e-1)
        threading.Timer(0.5, gate.set).start()  # while the evaluation waits
        assert [x.team for x in one.evaluate({}, "test", 12).outcomes] == learned
        assert one.evaluate({"first": "start"}, "test", 12).seats["first"] == "start"  # another engine
        second = one.play(1, 6, 6)
        np.testing.assert_array_equal(second.version, 0)
        np.testing.assert_array_equal(second.tokens.ids, want.tokens.ids)


def test_what_fails_ahead_is_told_to_whoever_fetches_it_and_a_team_closes_over_a_play_that_hangs():
    def fault(one):
        raise KeyError("broken")

    broken = dataclasses.replace(ECHO, body=sequence(FIRST, tool(fault, "seen", name="look", timeout_s=5), SECOND))
    with team(environment=dataclasses.replace(ENVIRONMENT, workflow=broken), max_staleness=1) as one:
        one.prepare(0, 0, 6)
        with pytest.raises(WorkflowError, match="look.*broken"):
            one.play(0, 0, 6)
    environment, gate = gated()
    gate.clear()
    with team(environment=environment, max_staleness=1) as one:
        one.prepare(0, 0, 6)
        with pytest.raises(RuntimeError, match="still to be fetched"):
            one.prepare(1, 6, 6)
        threading.Timer(0.2, gate.set).start()
    with pytest.raises(WorkflowError, match="max_staleness=1 needs one device in each process and found 2"):
        HostedTeam(
            ENVIRONMENT, separate(ECHO), dict.fromkeys(("first", "second"), SPEC), one.options, make_mesh(2),
            play=PlayOptions(max_staleness=1)
        )


def test_a_compiled_play_is_a_success_only_with_the_whole_outcome():
    ended = Episodes(np.asarray([[1.0, 0.5], [0.0, 1.0]], np.float32), np.full((2, 2), 3), np.ones((2, 2), bool), np.zeros((2, 2), bool))
    played = Played(None, {}, CompiledRollout({}, ended, ()), None)
    outcomes, _ = CompiledTeam._outcomes(types.SimpleNamespace(mesh=make_mesh(1), roles=[]), [played], 2, 10)
    assert [(one.task, one.play, one.score) for one in outcomes] == [(10, 0, 1.0), (10, 1, 0.0), (11, 0, 0.0), (11, 1, 1.0)]
    assert [one.team["outcome"] for one in outcomes] == [1.0, 0.5, 0.0, 1.0]
