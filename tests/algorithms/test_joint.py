"""Joint actions: who meets whom, and what each candidate is paid for its meetings."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl


def test_aligned_and_cross():
    np.testing.assert_array_equal(rl.aligned(2, 3), [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(rl.cross(3, 2), list(itertools.product(range(2), repeat=3)))
    np.testing.assert_array_equal(rl.cross(1, 4), [[0], [1], [2], [3]])


@pytest.mark.parametrize(("agents", "group_size", "subset"), [(3, 3, 9), (2, 4, 4), (2, 4, 16), (1, 3, 3)])
def test_a_sampled_subset_is_distinct_and_balanced(agents, group_size, subset):
    draws = {tuple(map(tuple, np.asarray(rl.cross(agents, group_size, subset=subset, key=jax.random.key(seed))))) for seed in range(4)}
    for joints in draws:
        assert len(set(joints)) == subset
        for agent in range(agents):
            np.testing.assert_array_equal(np.bincount([joint[agent] for joint in joints]), [subset // group_size] * group_size)
    assert agents == 1 or len(draws) > 1


def test_every_joint_is_as_likely_as_any_other():
    joints = jax.vmap(lambda key: rl.cross(2, 3, subset=3, key=key))(jax.random.split(jax.random.key(0), 900)).reshape(-1, 2)
    counts = np.bincount(joints[:, 0] * 3 + joints[:, 1], minlength=9)
    assert np.all(np.abs(counts - 300) < 5 * np.sqrt(300)), counts


@pytest.mark.parametrize(("kwargs", "message"), [
    (dict(subset=4), "belong together"), (dict(key=0), "belong together"), (dict(subset=4, key=0), "multiple of group_size=3"),
    (dict(subset=12, key=0), "between 3 and 9"),
])  # fmt: skip
def test_refusals(kwargs, message):
    if "key" in kwargs:
        kwargs = {**kwargs, "key": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        rl.cross(2, 3, **kwargs)
    with pytest.raises(ValueError, match="too many"):
        rl.cross(9, 16)


def test_aligned_margins_are_the_joint_returns():
    returns, counts = rl.marginal_returns(jnp.array([1.0, 2.0, 4.0]), rl.aligned(2, 3), 3)
    np.testing.assert_array_equal(returns, [[1, 2, 4], [1, 2, 4]])
    np.testing.assert_array_equal(counts, np.ones((2, 3)))


def test_cross_margins_are_means_over_partners():
    reward = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    returns, counts = rl.marginal_returns(reward.reshape(-1), rl.cross(2, 3), 3)
    np.testing.assert_allclose(returns, [reward.mean(axis=1), reward.mean(axis=0)], rtol=1e-6)
    np.testing.assert_array_equal(counts, np.full((2, 3), 3))


def test_a_joint_without_reward_counts_for_nobody():
    reward = jnp.array([1.0, 3.0, jnp.nan, jnp.nan])
    returns, counts = rl.marginal_returns(reward, rl.cross(2, 2), 2, where=jnp.array([True, True, False, False]))
    np.testing.assert_array_equal(returns, [[2, 0], [1, 3]])
    np.testing.assert_array_equal(counts, [[2, 0], [1, 1]])
