"""Returns: whom a reward reaches, and over which turns and tokens."""

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl


def plays(seed, size=30):
    """Return a shuffled table: trajectories with gaps in their turns, several agents a turn, some rows masked."""
    rng = np.random.default_rng(seed)
    return dict(
        rewards=rng.normal(size=size),
        turn=rng.integers(0, 5, size) * 2,
        trajectory=rng.choice([-3, 7, 1000000], size),
        agent=rng.integers(0, 2, size),
        where=rng.random(size) < 0.8,
    )


@pytest.mark.parametrize("scope", ["trajectory", "agent", "joint", "token"])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_rewards_to_go(gamma, scope):
    with jax.enable_x64(True):
        for seed in range(3):
            p = plays(seed)
            chain = p["trajectory"] * 2 + (p["agent"] if scope == "agent" else 0)
            if scope == "token":
                desired = np.where(p["where"], p["rewards"], 0)
            else:
                desired = oracle.rewards_to_go(p["rewards"], p["turn"], chain, gamma, p["where"], scope == "joint")
            actual = rl.rewards_to_go(
                p["rewards"], p["turn"], p["trajectory"], gamma=gamma, where=p["where"], agent=p["agent"], scope=scope
            )
            oracle.close(actual, desired, 1e-12)


def test_rewards_to_go_by_hand():
    # One play, two agents a turn, the joint reward 1 then 10 repeated on each agent's row.
    args = (jnp.array([1.0, 1.0, 10.0, 10.0]), jnp.array([0, 0, 1, 1]), jnp.zeros(4, int))

    def to_go(scope):
        return rl.rewards_to_go(*args, agent=jnp.array([0, 1, 0, 1]), scope=scope)

    np.testing.assert_array_equal(to_go("joint"), [11, 11, 10, 10])
    np.testing.assert_array_equal(to_go("agent"), [11, 11, 10, 10])
    np.testing.assert_array_equal(to_go("trajectory"), [22, 22, 20, 20])


def test_to_go_needs_what_it_needs():
    zeros = jnp.zeros(3, int)
    with pytest.raises(ValueError, match="pass agent="):
        rl.rewards_to_go(jnp.zeros(3), zeros, zeros, scope="agent")
    with pytest.raises(ValueError, match="'joint'"):
        rl.rewards_to_go(jnp.zeros(3), zeros, zeros, scope="team")


def test_to_go_of_masked_nan_is_finite():
    rewards = jnp.array([1.0, jnp.nan])
    out = rl.rewards_to_go(rewards, jnp.array([0, 1]), jnp.zeros(2, int), where=jnp.array([True, False]))
    np.testing.assert_array_equal(out, [1.0, 0.0])


@pytest.mark.parametrize("how", ["sum", "mean", "last"])
def test_outcome(how):
    p = plays(4)
    desired = np.zeros(30)
    for s in range(30):
        rows = [o for o in range(30) if p["where"][o] and p["trajectory"][o] == p["trajectory"][s]]
        if how == "last":
            rows = [o for o in rows if p["turn"][o] == max(p["turn"][r] for r in rows)]
        total = sum(p["rewards"][o] for o in rows)
        desired[s] = (total if how == "sum" else total / len(rows)) if p["where"][s] else 0
    with jax.enable_x64(True):
        oracle.close(rl.broadcast_outcome(p["rewards"], p["trajectory"], where=p["where"], turn=p["turn"], how=how), desired, 1e-12)


def test_an_outcome_is_read_where_it_was_paid():
    """Two plays: a team reward to the first and third row of one, to none of the other; the rows in between earned something else."""
    rewards, trajectory, order = jnp.array([5.0, 9.0, 3.0, 7.0, 8.0]), jnp.array([0, 0, 0, 0, 1]), jnp.array([0, 1, 2, 3, 0])
    paid = jnp.array([True, False, True, False, False])

    def read(how, where=None):
        return rl.broadcast_outcome(rewards, trajectory, where=where, turn=order, how=how, paid=paid)

    np.testing.assert_array_equal(read("last"), [3, 3, 3, 3, 0])
    np.testing.assert_array_equal(read("mean"), [4, 4, 4, 4, 0])
    np.testing.assert_array_equal(read("sum"), [8, 8, 8, 8, 0])
    np.testing.assert_array_equal(read("last", jnp.array([True, True, False, True, True])), [5, 5, 0, 5, 0])


def test_outcome_needs_the_order_for_the_last():
    with pytest.raises(ValueError, match="pass turn="):
        rl.broadcast_outcome(jnp.zeros(2), jnp.zeros(2, int), how="last")


def test_episode_return_counts_a_turn_once():
    rewards, turn = jnp.array([1.0, 1.0, 3.0, 5.0]), jnp.array([0, 0, 1, 0])
    trajectory = jnp.array([0, 0, 0, 1])
    np.testing.assert_array_equal(rl.episode_return(rewards, turn, trajectory), [4, 4, 4, 5])


class TestScoreDeltas:
    def test_first_score_then_differences(self):
        # Workflow D of UnityMAS-O: share of tests passed after each of three attempts, two agents an attempt, rows shuffled.
        scores, turn = jnp.array([0.75, 0.25, 1.0, 0.25, 0.75]), jnp.array([1, 0, 2, 0, 1])
        paid = rl.score_deltas(scores, turn, jnp.zeros(5, int))
        np.testing.assert_array_equal(paid, [0.5, 0.25, 0.25, 0.25, 0.5])

    def test_trajectories_do_not_mix(self):
        paid = rl.score_deltas(jnp.array([0.5, 0.75]), jnp.array([0, 1]), jnp.array([0, 1]))
        np.testing.assert_array_equal(paid, [0.5, 0.75])

    def test_marginal_f1_for_a_set_of_agents(self):
        # M-ASK: plan (F1 .25), then search, summary, update share the gain of the interim answer, the answerer gets F1 itself.
        agents = ["plan", "search", "summary", "update", "answer", "search", "update", "answer"]
        turn = jnp.array([0, 1, 1, 1, 1, 2, 2, 2])
        f1 = jnp.array([0.25] + [0.5] * 4 + [0.375] * 3)
        marginal = jnp.array([name in ("search", "summary", "update") for name in agents])
        paid = rl.score_deltas(f1, turn, jnp.zeros(8, int), marginal=marginal)
        np.testing.assert_array_equal(paid, [0.25, 0.25, 0.25, 0.25, 0.5, -0.125, -0.125, 0.375])

    def test_who_stops_is_paid_nothing_and_the_score_still_counts(self):
        stopped = jnp.array([False, True, False])
        paid = rl.score_deltas(jnp.array([0.25, 0.5, 1.0]), jnp.arange(3), jnp.zeros(3, int), stopped=stopped)
        np.testing.assert_array_equal(paid, [0.25, 0.0, 0.5])

    def test_masked_turn_is_skipped(self):
        where = jnp.array([True, False, True])
        paid = rl.score_deltas(jnp.array([0.25, jnp.nan, 1.0]), jnp.arange(3), jnp.zeros(3, int), where=where)
        np.testing.assert_array_equal(paid, [0.25, 0.0, 0.75])


class TestTokens:
    where = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], bool)

    def test_reward_lies_on_the_last_token_and_kl_on_each(self):
        kl = np.array([[0.5, 1.0, np.nan, 2.0], [9.0, 1.0, 1.0, 9.0], [1.0] * 4])
        paid = rl.token_rewards(np.array([10.0, 20.0, 30.0]), where=self.where, kl=kl, kl_coef=0.5)
        np.testing.assert_allclose(paid, [[-0.25, -0.5, 0, 9.0], [0, -0.5, 19.5, 0], [0, 0, 0, 0]])

    @pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.5, 0.0)])
    def test_gae_with_holes(self, gamma, lam):
        rng = np.random.default_rng(0)
        rewards, values = rng.normal(size=(2, 6, 9))
        where = rng.random((6, 9)) < 0.6
        where[2] = False
        with jax.enable_x64(True):
            actuals = rl.gae(rewards, values, gamma=gamma, gae_lambda=lam, where=where)
            for actual, desired in zip(actuals, oracle.gae(rewards, values, gamma, lam, where)):
                oracle.close(actual, desired, 1e-12)

    def test_gae_with_lambda_one_is_return_minus_value(self):
        rng = np.random.default_rng(1)
        rewards, values = rng.normal(size=(2, 3, 4))
        with jax.enable_x64(True):
            advantages, targets = rl.gae(rewards, values, gamma=0.9, gae_lambda=1.0, where=self.where)
            to_go = rl.token_rewards_to_go(rewards, gamma=0.9, where=self.where)
            oracle.close(targets, to_go, 1e-12)
            oracle.close(advantages, np.where(self.where, to_go - values, 0), 1e-12)

    def test_no_gradient_into_the_critic(self):
        grad = jax.grad(lambda v: rl.gae(jnp.ones((3, 4)), v, where=self.where)[0].sum())(jnp.ones((3, 4)))
        np.testing.assert_array_equal(grad, 0)


def test_mixing():
    np.testing.assert_allclose(rl.mix_rewards(np.array([1.0, 0.0]), np.array([0.5, 0.25]), alpha=2.0), [2.5, 0.25])
