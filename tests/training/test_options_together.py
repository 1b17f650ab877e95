"""Options that are set together: epochs with minibatches, corrections with critics, steered KL with roles that are not trained."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_critic_update import ppo_step
from test_oversample import GRPO as OVER
from test_oversample import instances, slow
from test_packed_update import make_samples, unrolled
from test_team import ECHO, ENVIRONMENT, by_tokens, own, team
from test_update import RECIPE, assert_close, make_rows, params, step

from marl_llm.algorithms import make_recipe
from marl_llm.training import TokenSample
from marl_llm.training.packing import Tokens
from marl_llm.workflows import Assignment, Inside, alternate, shared
from marl_llm.workflows.rewards import absolute, broadcast


@pytest.fixture
def packed(monkeypatch):
    """The samples of every minibatch that is packed, in order."""
    seen, pack = [], Tokens.pack

    def noting(self, chosen, *rest, **options):
        seen.append(frozenset(int(i) for i in chosen))
        return pack(self, chosen, *rest, **options)

    monkeypatch.setattr(Tokens, "pack", noting)
    return seen


# ---------------------------------------------------------------------------------------------------- epochs and minibatches
def test_every_epoch_cuts_the_prompts_anew_and_visits_each_once(packed):
    _, metrics = step(make_rows(), minibatch=4, epochs=3)
    made = list(dict.fromkeys(packed))
    assert (metrics["updates"], len(made)) == (12, 12)  # no minibatch of one epoch is one of another
    visits = np.bincount([i for part in made for i in part])
    assert set(visits[visits > 0]) == {3}
    prompts = [len({i // 3 for i in part}) for part in made]  # three candidates of a prompt stay together
    assert sum(prompts) == 3 * 14
    assert all(len(part) == 3 * count for part, count in zip(made, prompts, strict=True))
    assert max(prompts) - min(prompts) == 1


@pytest.mark.parametrize("minibatch", [4, 16])
def test_law_2_the_gap_is_read_before_the_first_step_whatever_epochs_and_minibatches_follow(minibatch):
    """What the steps change must not show: the sampler's parameters are those before them."""
    still = step(make_rows(), minibatch=minibatch, epochs=2, rate=jnp.float32(0))[1]
    moved = step(make_rows(), minibatch=minibatch, epochs=2, rate=jnp.float32(1))[1]
    assert moved["log_prob_gap"] == pytest.approx(still["log_prob_gap"], abs=1e-5)
    if minibatch == 16:
        assert moved["log_prob_gap"] == pytest.approx(step(make_rows())[1]["log_prob_gap"], abs=1e-5)


def test_a_second_epoch_steps_from_where_the_first_one_ended():
    """With a tiny rate both epochs have the same gradient, so that two of them move twice as far as one."""
    rows, rate = make_rows(drift=0.0, full=True), jnp.float32(1e-3)
    once, twice = (step(rows, epochs=epochs, rate=rate)[0] for epochs in (1, 2))
    for start, a, b in zip(*map(jax.tree.leaves, (params(), once, twice)), strict=True):
        np.testing.assert_allclose((b - start) / 2, a - start, atol=0.05 * np.abs(a - start).max() + 1e-7)


def test_a_correction_weighs_by_the_policy_before_the_first_epoch_in_every_epoch():
    """A sampler that is the policy itself needs no correction, in the second epoch neither: the policy has moved, the sample has not."""
    rows = make_rows(drift=0.0)
    plain = dataclasses.replace(RECIPE, clip_low=0.02, clip_high=0.02)
    steps = dict(epochs=3, rate=jnp.float32(0.3))
    wanted, figures = step(rows, recipe=plain, **steps)
    assert figures["clip_low"] + figures["clip_high"] > 0.01  # the policy has moved out of the clip
    for how in ("truncate", "mask"):
        assert_close(step(rows, recipe=dataclasses.replace(plain, rollout_correction=how), **steps)[0], wanted, atol=2e-5)


@pytest.mark.parametrize("counted", [True, False])
def test_tied_samples_that_are_skipped_stay_in_the_denominator_of_every_epoch_where_they_count(counted):
    """One of fifteen groups is tied. Skipped, it changes the step by its share of the tokens, or not at all."""
    rows, rate = make_rows(drift=0.0), jnp.float32(1e-3)
    recipe = dataclasses.replace(RECIPE, entropy_coef=0.0, zero_variance_in_denominator=counted)
    skipped, kept = (
        step(rows, recipe=dataclasses.replace(recipe, filter_zero_variance=skip), epochs=2, rate=rate)[0] for skip in (True, False)
    )
    mine = np.asarray(rows.token_where & rows.where[:, None, None]).sum((1, 2))
    factor = 1.0 if counted else mine.sum() / (mine.sum() - mine[7])  # group 7 is tied
    for start, a, b in zip(*map(jax.tree.leaves, (params(), skipped, kept)), strict=True):
        np.testing.assert_allclose(a - start, factor * (b - start), atol=0.01 * np.abs(b - start).max() + 1e-7)


# ---------------------------------------------------------------------------------------------------- a critic and corrections
@pytest.mark.parametrize(("how", "weight"), [("truncate", np.exp(-0.3)), ("mask", np.exp(-0.3))])
def test_a_correction_weighs_a_critics_policy_step_and_leaves_the_critic_alone(how, weight):
    """A sampler that says exp(0.3) too much of every token: each token of the policy's first step weighs exp(-0.3)."""
    samples, table = make_samples()
    width = max(one.prompt.size for one in samples), max(one.response.size for one in samples)
    prompt = np.stack([np.pad(one.prompt, (width[0] - one.prompt.size, 0)) for one in samples])
    there = np.stack([np.arange(width[0]) >= width[0] - one.prompt.size for one in samples])
    response = np.stack([np.pad(one.response, (0, width[1] - one.response.size)) for one in samples])
    scored = np.asarray(unrolled(params(), prompt, there, response, 1.2)[0])

    def says(more):
        return [
            TokenSample(one.prompt, one.response, scored[i, : one.response.size] + more, one.name) for i, one in enumerate(samples)
        ]

    plain = make_recipe("ppo", temperature=1.2)
    honest, critic, _ = ppo_step(plain, says(0.0), table)
    weighed, again, figures = ppo_step(dataclasses.replace(plain, rollout_correction=how), says(0.3), table)
    for start, a, b in zip(*map(jax.tree.leaves, (params(), honest, weighed)), strict=True):
        np.testing.assert_allclose(b - start, weight * (a - start), atol=2e-6)
    for a, b in zip(jax.tree.leaves(critic), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert figures["log_prob_gap"] == pytest.approx(0.3, abs=1e-4)


# ---------------------------------------------------------------------------------------------------- running means
def test_a_roles_running_mean_follows_its_returns_over_several_steps():
    """Each step: b becomes d^n b + (1 - d^n) times the mean pay of the role's n plays, whatever was taken off before."""
    rewards = (absolute(lambda call, way: 1.0 + own(call, way), ("first",), name="own"), by_tokens(0.7))
    environment = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=rewards))
    wanted, seen = np.zeros(2), []
    with team(make_recipe("spiral"), shared(ECHO), environment) as one:
        for number in range(3):
            batch = one.play(number, 6 * number, 6)
            found = one.learn(batch, 1e-3)["policy"]
            for agent in range(2):
                pay = batch.table.local[batch.table.where & (batch.table.agent == agent)]
                np.testing.assert_allclose(one.advantages[batch.table.agent == agent], pay - wanted[agent], atol=1e-5)
                kept = 0.95 ** len(pay)
                wanted[agent] = kept * wanted[agent] + (1 - kept) * pay.mean()
            seen.append([found["running_mean/first"], found["running_mean/second"]])
            np.testing.assert_allclose(seen[-1], wanted, atol=1e-6)
    assert np.ptp(np.asarray(seen), axis=0).min() > 1e-3


def test_running_means_leave_out_rows_that_do_not_count():
    rewards = (broadcast(lambda way: 1.0), absolute(lambda call, way: 3.0, ("second",), name="more"))
    environment = dataclasses.replace(ENVIRONMENT, workflow=dataclasses.replace(ECHO, rewards=rewards))
    with team(make_recipe("spiral", rewards="mixed"), shared(ECHO), environment) as one:
        batch = one.play(0, 0, 6)
        batch.table.where[(batch.table.agent == 1) | (batch.table.instance == 5)] = False
        found = one.learn(batch, 1e-3)["policy"]
    assert found["running_mean/first"] == pytest.approx(1 - 0.95**5)
    assert found["running_mean/second"] == 0


def test_permuted_rewards_stay_with_their_role_and_among_the_rows_that_count():
    """The control deals team pay, local pay and whether the team was paid together, each role's own, and leaves aborted rows alone."""
    with team(permute_rewards=True) as one:
        table = one.play(0, 0, 6).table
        size = len(table.agent)
        number = np.arange(size, dtype=np.float32)
        where = np.arange(size) % 5 > 0
        table = dataclasses.replace(table, team=number, local=-number, where=where, team_where=number % 3 > 0)
        dealt, again, later = (one._permuted(table, step) for step in (0, 0, 1))
    for agent in (0, 1):
        mine = where & (table.agent == agent)
        assert sorted(dealt.team[mine]) == sorted(number[mine])
    np.testing.assert_array_equal(dealt.team[~where], number[~where])
    np.testing.assert_array_equal(dealt.local, -dealt.team)
    np.testing.assert_array_equal(dealt.team_where, dealt.team % 3 > 0)
    np.testing.assert_array_equal(again.team, dealt.team)
    assert np.mean(dealt.team[where] != number[where]) > 0.8
    assert np.any(later.team != dealt.team)


def test_each_models_staleness_counts_its_own_updates():
    turns = Assignment({"first": "x", "second": "y"}, schedule=alternate(("x", 1), ("y", 2)))
    with team(assignment=turns) as one:
        one.learn(one.play(0, 0, 6), 1e-3)
        batch = one.play(1, 6, 6)  # x has one update, y none
        found, again = one.learn(batch, 1e-3), one.learn(dataclasses.replace(batch, step=2), 1e-3)
    assert (found["y"]["staleness"], again["y"]["staleness"]) == (0.0, 1.0)


# ---------------------------------------------------------------------------------------------------- a steered KL
def test_a_steered_kl_counts_the_samples_that_train_and_no_others():
    """Three of four rows of the table do not count, so that β moves a quarter as far as with all of them."""
    steered = dict(kl_coef=0.1, kl_target=1.0, kl_horizon=100.0)
    recipe = make_recipe("grpo", group_size=4, rewards="mixed", returns="immediate", scale_advantages="none", **steered)
    moved = []
    for part in (1, 4):
        with team(recipe, shared(ECHO)) as one:
            batch = one.play(0, 0, 6)
            assert len(batch.table.where) == 48  # 6 tasks, 4 plays, 2 calls
            batch.table.where[np.arange(48) % part > 0] = False
            assert one.learn(batch, 0.0)["policy"]["kl_coef"] == pytest.approx(0.1)
            moved.append(one.learn(one.play(1, 6, 6), 0.0)["policy"]["kl_coef"])
    assert moved == [pytest.approx(0.1 * (1 - 0.2 * n / 100), rel=1e-5) for n in (48, 12)]


# ---------------------------------------------------------------------------------------------------- over-started steps and resume
def test_a_run_that_goes_on_from_before_the_last_step_plays_what_that_step_had_been_left():
    """The state after step 1 is restored to play step 1 once more: it still begins with the tasks that step 0 had left."""
    environment, free = slow({1: 1_000, 2: 1_000})
    with team(OVER, environment=environment, oversample=2) as one:
        assert instances(one.play(0, 0, 4, 2)) == [0, 3, 4, 5]
        free()
        played = instances(one.play(1, 4, 4, 2))
        assert {1, 2} <= set(played)
        state = json.loads(json.dumps(one.state()))
    with team(OVER, environment=slow({})[0], oversample=2) as one:
        one.restore(one.policies(), state)
        again, rest = one.play(1, 4, 4, 2), one.play(2, 8, 4, 0)
        assert sorted([*instances(again), *instances(rest)]) == [1, 2, 6, 7, 8, 9, 10, 11]
        assert (again.figures["oversample/left"], rest.figures["oversample/left"]) == (2.0, 0.0)


def test_late_plays_weigh_in_their_own_step_alone_and_pay_by_the_recipe():
    """Over-start beside a frozen role: the late plays' rows of the frozen role stay out, and the counts add up."""
    frozen = Assignment({"first": "first", "second": "second"}, {"second": Inside(trained=False)})
    environment, free = slow({1: 1_000})
    with team(OVER, frozen, environment, oversample=1) as one:
        first = one.play(0, 0, 4, 1)
        free()
        second = one.play(1, 4, 4, 0)
    for batch in (first, second):
        assert set(batch.table.agent[batch.table.where]) == {0}
        assert int(batch.table.where.sum()) == 16
    assert instances(second) == [1, 5, 6, 7]
