"""Groups: keys that never collide, dense ids inside jit, statistics with stated conventions, and prompts that must agree."""

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

LIMITS = np.iinfo(np.int32)


def random_keys(kind, seed, size=40):
    rng = np.random.default_rng(seed)
    if kind == "dense":
        return np.stack([rng.integers(0, 3, size), rng.integers(0, 2, size), rng.integers(5, 8, size)], axis=1).astype(np.int32)
    if kind == "negative":
        return rng.integers(-2, 2, (size, 2)).astype(np.int32)
    if kind == "sparse":
        return rng.choice(rng.integers(LIMITS.min, LIMITS.max, 5), (size, 3)).astype(np.int32)
    return rng.choice(np.array([LIMITS.min, LIMITS.max, 0, -1]), (size, 2)).astype(np.int32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["dense", "negative", "sparse", "extreme"])
def test_ids_are_the_sorted_numbering(kind, masked):
    for seed in range(5):
        keys = random_keys(kind, seed)
        where = np.random.default_rng(seed).random(len(keys)) < (0.6 if masked else 2.0)
        np.testing.assert_array_equal(rl.group_ids(keys, where=where), oracle.group_ids(keys, where))


def test_masked_rows_do_not_widen_the_box():
    keys = np.array([[1, 0], [LIMITS.max, LIMITS.min], [0, 1], [1, 0]], np.int32)
    np.testing.assert_array_equal(rl.group_ids(keys, where=np.array([True, False, True, True])), [1, -1, 0, 1])


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_jit_equals_no_jit(kind):
    keys = random_keys(kind, 3)
    with jax.disable_jit():
        plain = rl.group_ids(keys)
    np.testing.assert_array_equal(jax.jit(rl.group_ids)(keys), plain)


def test_degenerate_tables():
    assert rl.group_ids(jnp.zeros((0, 3), jnp.int32)).shape == (0,)
    np.testing.assert_array_equal(rl.group_ids(np.array([[7, 7]], np.int32)), [0])
    np.testing.assert_array_equal(rl.group_ids(random_keys("dense", 0, 4), where=np.zeros(4, bool)), [rl.NO_GROUP] * 4)


def test_vmap_over_tables():
    keys = np.stack([random_keys("dense", 1), random_keys("sparse", 2)])
    ids = jax.vmap(rl.group_ids)(keys)
    for table, row in zip(keys, ids):
        np.testing.assert_array_equal(row, oracle.group_ids(table, np.ones(len(table), bool)))


@pytest.mark.parametrize("spread", [1, 2053])
def test_a_million_groups_without_a_collision(spread):
    # 100 x 100 x 100 triples, shuffled: dense (counted) and, times a prime, far apart (sorted).
    triples = np.stack(np.unravel_index(np.random.default_rng(0).permutation(10**6), (100, 100, 100)), axis=1).astype(np.int32)
    env, agent, turn = jnp.asarray(triples.T * spread)
    ids = rl.group_ids(rl.group_keys(env=env, agent=agent, turn=turn))
    np.testing.assert_array_equal(np.sort(ids), np.arange(10**6))


def test_keys_do_not_depend_on_the_order_of_arguments():
    env, turn = jnp.array([0, 1]), jnp.array([5, 6])
    np.testing.assert_array_equal(rl.group_keys(turn=turn, env=env), rl.group_keys(env=env, turn=turn))
    np.testing.assert_array_equal(rl.group_keys(env=env, turn=turn), [[0, 5], [1, 6]])
    with pytest.raises(ValueError, match="at least one axis"):
        rl.group_keys()


@pytest.mark.parametrize("ddof", [0, 1])
def test_statistics(ddof):
    values = np.array([1.0, 3.0, 0.1, 0.1, 0.1, 9.0, 5.0, 4.0])
    ids = np.array([0, 0, 2, 2, 2, 1, 0, -1])
    where = np.array([1, 1, 1, 1, 1, 1, 0, 1], bool)
    with jax.enable_x64(True):
        stats = rl.group_stats(values, ids, where=where, ddof=ddof)
        np.testing.assert_array_equal(stats.size, [2, 1, 3, 0, 0, 0, 0, 0])
        np.testing.assert_allclose(stats.mean[:3], [2.0, 9.0, 0.1], rtol=1e-15)
        np.testing.assert_array_equal(stats.variance[:3], [1.0 if ddof == 0 else 2.0, 0.0, 0.0])
        np.testing.assert_array_equal(stats.std[1:], np.zeros(7))
        np.testing.assert_array_equal(stats.minimum[:4], [1.0, 9.0, 0.1, 0.0])
        np.testing.assert_array_equal(stats.maximum[:4], [3.0, 9.0, 0.1, 0.0])
        np.testing.assert_array_equal(stats.is_tied, [0, 1, 1, 0, 0, 0, 0, 0])
        assert (int(stats.count), int(stats.singletons), int(stats.tied)) == (3, 1, 2)
        np.testing.assert_allclose(stats.zero_variance_share, 2 / 3)


def test_statistics_of_nothing():
    stats = rl.group_stats(np.full(4, np.nan, np.float32), np.zeros(4, np.int32), where=np.zeros(4, bool))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(stats))
    assert int(stats.count) == 0
    assert float(stats.zero_variance_share) == 0.0


class TestSamePrompt:
    prompts = np.array([[1, 2], [1, 2], [1, 3], [4, 4]])

    def test_agreeing_groups_pass(self):
        rl.check_same_prompt(self.prompts, np.array([0, 0, 1, 2]))
        assert float(rl.mixed_share(self.prompts, np.array([0, 0, 1, 2]))) == 0.0

    def test_a_mixed_group_is_named(self):
        with pytest.raises(ValueError, match=r"1 group\(s\) mix prompts. Group 0 has 3 samples; rows 0 and 2 saw"):
            rl.check_same_prompt(self.prompts, np.array([0, 0, 0, 1]))
        assert float(jax.jit(rl.mixed_share)(self.prompts, np.array([0, 0, 0, 1]))) == 0.5

    def test_masked_rows_do_not_count(self):
        where = np.array([True, True, False, True])
        rl.check_same_prompt(self.prompts, np.array([0, 0, 0, 1]), where=where)
        assert float(rl.mixed_share(self.prompts, np.array([0, 0, 0, 1]), where=where)) == 0.0
        assert float(rl.mixed_share(self.prompts, np.array([0, 0, 0, 1]), where=np.zeros(4, bool))) == 0.0
        rl.check_same_prompt(self.prompts[[2, 0, 1, 3]], np.array([0, 0, 0, 1]), where=np.array([False, True, True, True]))

    def test_fingerprints_do_too(self):
        with pytest.raises(ValueError, match="rows 0 and 1"):
            rl.check_same_prompt(np.array([10, 11, 12, 13]), np.array([0, 0, 1, 2]))

    def test_inside_jit_it_says_what_to_use(self):
        with pytest.raises(TypeError, match="mixed_share"):
            jax.jit(lambda ids: rl.check_same_prompt(self.prompts, ids))(np.array([0, 0, 1, 2]))
