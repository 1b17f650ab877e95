"""GMPO, DPPO, covariance masks, turn-level GAE, step groups and joint preferences, each against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

S, R = 7, 5
RNG = np.random.default_rng(5)
NEW, OLD = -RNG.exponential(size=(2, S, R))
ADVANTAGES = RNG.normal(size=S)
WHERE = (np.arange(R) < RNG.integers(1, R + 1, S)[:, None]) & (np.arange(S) < S - 1)[:, None]


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def dirty(x):
    """NaN where masked: it must reach neither the result nor the gradient."""
    return np.where(WHERE, x, np.nan)


def same(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-9)


def test_gmpo_is_the_mean_of_clipped_log_ratios():
    want = np.zeros(S)
    for s in range(S):
        change = (NEW - OLD)[s][WHERE[s]]
        if change.size:
            kept = np.minimum(change, 0.4) if ADVANTAGES[s] > 0 else np.maximum(change, -0.3)
            want[s] = -ADVANTAGES[s] * np.exp(kept.mean())
    same(rl.gmpo(dirty(NEW), dirty(OLD), ADVANTAGES, where=WHERE, clip_low=0.3, clip_high=0.4), want)
    same(rl.gmpo(dirty(OLD), dirty(OLD), ADVANTAGES, where=WHERE), -ADVANTAGES * WHERE.any(1))
    gradient = jax.grad(lambda x: rl.gmpo(x, dirty(OLD), ADVANTAGES, where=WHERE, clip_high=0.4).sum())(dirty(NEW))
    beyond = WHERE & ((NEW - OLD) > 0.4) & (ADVANTAGES > 0)[:, None]
    assert beyond.any()
    assert not np.asarray(gradient)[beyond].any()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_leaves_out_what_moved_too_far_in_its_advantages_direction(kind):
    p, mu = np.exp(NEW), np.exp(OLD)
    moved = np.abs(p - mu) if kind == "tv" else mu * np.log(mu / p) + (1 - mu) * np.log((1 - mu) / (1 - p))
    same(rl.binary_divergence(NEW, OLD, kind=kind), moved)
    good = (ADVANTAGES > 0)[:, None]
    left = (good & (p > mu) & (moved > 0.1)) | (~good & (p < mu) & (moved > 0.05))
    assert 0 < (left & WHERE).sum() < WHERE.sum()
    want = np.where(WHERE & ~left, -p / mu * ADVANTAGES[:, None], 0)
    given = dict(where=WHERE, kind=kind, clip_low=0.05, clip_high=0.1)
    same(rl.dppo(dirty(NEW), dirty(OLD), ADVANTAGES, **given), want)
    gradient = jax.grad(lambda x: rl.dppo(x, dirty(OLD), ADVANTAGES, **given).sum())(dirty(NEW))
    same(gradient, want)  # the gradient of a ratio is the ratio


def test_a_certain_token_has_a_divergence():
    same(rl.binary_divergence(np.log([1.0, 1.0]), np.log([1.0, 0.5]), kind="tv"), [0, 0.5])
    found = np.asarray(rl.binary_divergence(np.log([1.0, 0.5, 1.0]), np.log([1.0, 1.0, 0.5]), kind="kl"))
    same(found[:2], [0, np.log(2)])
    assert found[2] == np.inf
    with pytest.raises(ValueError, match="kind"):
        rl.binary_divergence(np.zeros(2), np.zeros(2), kind="js")


def covariance():
    x, a = NEW - NEW[WHERE].mean(), np.broadcast_to(ADVANTAGES[:, None], (S, R))
    return np.where(WHERE, x * (a - a[WHERE].mean()), 0)


def test_covariances_choose_tokens():
    want = covariance()
    same(rl.token_covariance(dirty(NEW), ADVANTAGES, where=WHERE), want)
    low, high = np.quantile(want[WHERE], [0.3, 0.9])
    eligible = WHERE & (want > low) & (want < high)
    left = np.asarray(rl.clip_cov_tokens(want, jax.random.key(0), where=WHERE, share=0.2, low=low, high=high))
    assert left.sum() == max(1, int(0.2 * WHERE.sum())) < eligible.sum()
    assert not (left & ~eligible).any()
    other = np.asarray(rl.clip_cov_tokens(want, jax.random.key(1), where=WHERE, share=0.2, low=low, high=high))
    assert (left != other).any()
    assert not np.asarray(rl.clip_cov_tokens(want, jax.random.key(0), where=WHERE, low=99.0, high=100.0)).any()


def test_kl_cov_penalises_the_tokens_of_the_highest_covariance():
    count = max(1, int(0.25 * WHERE.sum()))
    ranked = np.where(WHERE, covariance(), -np.inf).reshape(-1)
    chosen = np.zeros(S * R, bool)
    chosen[np.argsort(-ranked)[:count]] = True
    want = -np.exp(NEW - OLD) * ADVANTAGES[:, None] + 0.7 * np.abs(NEW - OLD) * chosen.reshape(S, R)
    same(rl.kl_cov(dirty(NEW), dirty(OLD), ADVANTAGES, where=WHERE, share=0.25, coefficient=0.7), np.where(WHERE, want, 0))
    assert not np.asarray(rl.kl_cov(NEW, OLD, ADVANTAGES, where=np.zeros((S, R), bool))).any()


def test_maxrl_divides_by_the_mean_and_a_group_without_success_gets_nothing():
    returns, ids = np.array([1.0, 0, 0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 0, 1, 1, 2, 2])
    found = rl.group_relative(returns, ids, scale="mean", epsilon=0.0)
    same(found, [3, -1, -1, -1, 0, 0, 0, 0])
    samples = rl.Samples(instance=ids, env=ids, agent=0 * ids, turn=0 * ids, trajectory=np.arange(8), team=returns, local=0 * returns)
    advantages, _, tied = rl.advantages_for(rl.make_recipe("grpo", scale_advantages="mean", epsilon=0.0), samples)
    same(advantages, found)
    np.testing.assert_array_equal(tied, [False] * 4 + [True] * 4)


def test_turn_gae_is_a_discounted_sum_of_the_agents_own_turns_less_its_mean():
    rewards, turn = RNG.normal(size=8), np.array([0, 1, 2, 3, 0, 1, 2, 3])
    trajectory, agent = np.repeat([0, 1], 4), np.array([0, 1] * 4)
    sums = np.array([sum(0.81 ** ((turn[j] - turn[i]) // 2) * rewards[j] for j in range(8)
                         if (trajectory[j], agent[j]) == (trajectory[i], agent[i]) and turn[j] >= turn[i]) for i in range(8)])  # fmt: skip
    want = sums - np.array([sums[agent == a].mean() for a in agent])
    same(rl.turn_gae(rewards, turn, trajectory, agent, gamma=0.9, gae_lambda=0.9), want)
    plain = rl.turn_gae(rewards, turn, trajectory, agent)
    fields = dict(
        rewards="local", returns="to_go", scope="agent", advantage_estimator="group", group_by=("agent",), scale_advantages="none"
    )
    columns = dict(instance=trajectory, env=trajectory, agent=agent, turn=turn, trajectory=trajectory, team=0 * rewards, local=rewards)
    same(rl.advantages_for(rl.make_recipe("grpo", **fields), rl.Samples(**columns))[0], plain)


def test_gigpo_adds_the_advantage_among_steps_of_one_state():
    outcome, to_go = RNG.normal(size=(2, 8))
    instance, state = np.repeat([0, 1], 4), np.array([3, 3, 4, 5, 3, 3, 3, 6])
    where = np.array([True] * 7 + [False])

    def relative(values, keys):
        out = np.zeros(8)
        for key in set(keys):
            rows = np.array([k == key for k in keys]) & where
            if rows.sum() > 1:
                out[rows] = (values[rows] - values[rows].mean()) / (values[rows].std(ddof=1) + 1e-6)
        return out

    want = relative(outcome, instance.tolist()) + 0.5 * relative(to_go, list(zip(instance.tolist(), state.tolist())))
    same(rl.gigpo(outcome, to_go, instance, state, where=where, weight=0.5), want)


def test_one_vote_per_trajectory_is_a_recipe_field():
    """M-GRPO: a play that called an agent three times counts as much as one that called it once."""
    returns, trajectory = np.array([1.0, 1, 1, 0, 0.5]), np.array([0, 0, 0, 1, 2])
    samples = rl.Samples(instance=0 * trajectory, env=trajectory, agent=0 * trajectory, turn=np.arange(5), trajectory=trajectory,
                         team=0 * returns, local=returns)  # fmt: skip
    recipe = rl.make_recipe("grpo", rewards="local", returns="immediate", statistics_weight="trajectory", scale_advantages="none")
    same(rl.advantages_for(recipe, samples)[0], returns - 0.5)


def test_preferences_are_between_plays_of_one_task():
    returns = np.array([1.0, 0.0, 0.25, 0.25, 0.9, 0.4])
    instance, trajectory = np.array([0, 0, 0, 0, 1, 1]), np.array([5, 5, 2, 7, 8, 9])
    pairs = rl.joint_preferences(returns, instance, trajectory)
    assert pairs.tolist() == [[5, 2], [5, 7], [8, 9]]  # a play's return is the mean of its responses; ties give none
    assert rl.joint_preferences(returns, instance, trajectory, margin=0.3).tolist() == [[8, 9]]
    assert rl.joint_preferences(returns, instance, trajectory, where=np.zeros(6, bool)).shape == (0, 2)


def test_dpo_between_joint_actions_is_the_papers_and_preference_advantages_are_its_slope():
    rng = np.random.default_rng(8)
    trajectory, agent = np.repeat(np.arange(8), 3), np.tile(np.arange(3), 8)
    instance, outcome = trajectory // 4, rng.normal(size=8)
    outcome[1] = outcome[0]  # a tie
    returns, where, ratios, beta = outcome[trajectory], trajectory != 7, rng.normal(size=24), 0.3
    pairs = rl.joint_preferences(returns, instance, trajectory, where=where)
    assert len(pairs) == 5 + 3
    plays = np.asarray([ratios[(trajectory == play) & where].sum() for play in range(8)])
    with jax.enable_x64(True):
        losses = rl.joint_dpo(np.where(where, ratios, np.nan), trajectory, pairs, beta=beta, where=where)
        np.testing.assert_allclose(losses, np.log1p(np.exp(-beta * (plays[pairs[:, 0]] - plays[pairs[:, 1]]))), atol=1e-12)
        slope = jax.grad(lambda x: jnp.sum(rl.joint_dpo(x, trajectory, pairs, beta=beta, where=where)))(np.zeros(24))
        advantages = rl.preference(returns, rl.group_ids(rl.group_keys(instance=instance, agent=agent), where=where), where=where)
    size = np.where(instance == 0, 4, 3)
    np.testing.assert_allclose(advantages, -2 / beta * slope / (size - 1), atol=1e-12)


def test_preference_advantages_count_whom_a_sample_beats():
    rng = np.random.default_rng(9)
    returns, ids = rng.integers(0, 5, 60).astype(np.float32), rng.integers(-1, 9, 60)
    where = rng.random(60) < 0.8
    wanted, counts = np.zeros(60), where & (ids >= 0)
    for i in np.flatnonzero(counts):
        group = counts & (ids == ids[i])
        wanted[i] = np.sign(returns[i] - returns[group]).sum() / max(group.sum() - 1, 1)
    np.testing.assert_allclose(rl.preference(returns, ids, where=where), wanted, atol=1e-6)
    recipe = rl.make_recipe("grpo", advantage_estimator="preference")
    columns = dict(env=0 * ids, agent=0 * ids, turn=0 * ids, trajectory=np.arange(60), team=returns, local=0 * returns)
    ids = np.abs(ids)
    same(rl.advantages_for(recipe, rl.Samples(instance=ids, where=where, **columns))[0], rl.preference(returns, ids, where=where))
    for fields, why in (({"epsilon": 0.1}, "divides by no deviation"), ({"singleton": "raw"}, "between two")):
        with pytest.raises(ValueError, match=why):
            rl.make_recipe("grpo", advantage_estimator="preference", **fields)


@pytest.mark.parametrize("loss", ["gmpo", "dppo_tv", "dppo_kl"])
def test_a_recipe_carries_the_loss_out_with_its_own_bounds(loss):
    recipe = rl.make_recipe("grpo", loss=loss)
    total, count, _ = rl.loss_for(recipe, NEW, OLD, ADVANTAGES, where=WHERE)
    plain = rl.gmpo(NEW, OLD, ADVANTAGES, where=WHERE) if loss == "gmpo" else rl.dppo(NEW, OLD, ADVANTAGES, where=WHERE, kind=loss[-2:])
    same([total, count], rl.reduce_parts(plain, where=WHERE, how=recipe.loss_aggregation))
    wider = rl.make_recipe("grpo", loss=loss, clip_low=0.9, clip_high=0.9)
    assert float(rl.loss_for(wider, NEW, OLD, ADVANTAGES, where=WHERE)[0]) != float(total)
    with pytest.raises(ValueError, match="would have no effect"):
        rl.make_recipe("grpo", loss=loss, importance_level="sequence")
