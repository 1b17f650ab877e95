"""Inputs that once gave a wrong number without a word: now the right one, a NaN that says where, or an error."""

import contextlib

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import marl_llm.algorithms as rl

HALVES = [jnp.bfloat16, jnp.float16]


@contextlib.contextmanager
def unchecked():
    """Without jaxtyping, as users run the package."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_b2_whiten_without_shift_keeps_the_mean():
    out = np.asarray(rl.whiten(jnp.array([10.0, 11.0, 12.0]), shift_mean=False))
    np.testing.assert_allclose(out, [11 - 1.5**0.5, 11, 11 + 1.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(out.mean(), 11, rtol=1e-6)
    # TRL's and verl's formula, with a mask and votes.
    rng = np.random.default_rng(0)
    values, where, votes = rng.normal(5, 2, 20), rng.random(20) < 0.7, rng.random(20) + 0.1
    mean = np.average(values[where], weights=votes[where])
    variance = np.average((values[where] - mean) ** 2, weights=votes[where])
    desired = np.where(where, (values - mean) / np.sqrt(variance + 1e-8) + mean, 0)
    with jax.enable_x64(True):
        np.testing.assert_allclose(rl.whiten(values, where=where, weights=votes, shift_mean=False), desired, rtol=1e-12)


RAW_IDS = [np.array([1001, 1001, 1002, 1002]), np.array([-7, -7, -5, -5]), np.array([0, 0, 4, 4]), np.array([2**31 - 1] * 2 + [0] * 2)]


@pytest.mark.parametrize("ids", RAW_IDS, ids=str)
def test_b3_any_integers_name_a_group(ids):
    returns, dense = jnp.array([0.0, 1.0, 2.0, 4.0]), jnp.array([0, 0, 1, 1])
    for estimate in (rl.group_relative, rl.leave_one_out, jax.jit(rl.group_relative)):
        np.testing.assert_array_equal(estimate(returns, ids), estimate(returns, dense))
    columns = jnp.stack([returns, returns**2], axis=1)
    np.testing.assert_array_equal(rl.decoupled(columns, ids, jnp.ones(2)), rl.decoupled(columns, dense, jnp.ones(2)))
    numbers = np.unique(ids, return_inverse=True)[1]
    for raw, numbered in zip(jax.tree.leaves(rl.group_stats(returns, ids)), jax.tree.leaves(rl.group_stats(returns, numbers))):
        np.testing.assert_array_equal(raw, numbered)
    prompts = np.array([1, 2, 3, 3])
    assert float(rl.mixed_share(prompts, ids)) == 0.5
    with pytest.raises(ValueError, match="mix prompts"):
        rl.check_same_prompt(prompts, ids)


def test_b3_no_group_and_masks_beside_raw_ids():
    returns, ids = jnp.array([0.0, 1.0, 9.0, 2.0, 4.0]), np.array([50, 50, -1, 7, 7])
    np.testing.assert_array_equal(np.sign(rl.group_relative(returns, ids)), [-1, 1, 0, -1, 1])
    where = np.array([True, True, True, False, True])
    np.testing.assert_array_equal(np.sign(rl.group_relative(returns, ids, where=where)), [-1, 1, 0, 0, 0])
    np.testing.assert_array_equal(rl.trajectory_weights(ids, np.zeros(5, int)), [0.5, 0.5, 0, 0.5, 0.5])


FAR_APART = np.array([1, 2**32 + 1, 2**40 + 1])


@pytest.mark.parametrize("call", [
    lambda x: rl.group_keys(env=x), lambda x: rl.group_ids(x[:, None]), lambda x: rl.group_relative(jnp.zeros(3), x),
    lambda x: rl.rewards_to_go(jnp.zeros(3), np.arange(3), x), lambda x: rl.rewards_to_go(jnp.zeros(3), x, np.arange(3)),
    lambda x: rl.broadcast_outcome(jnp.zeros(3), x), lambda x: rl.score_deltas(jnp.zeros(3), np.arange(3), trajectory=x),
    lambda x: rl.agent_wise(jnp.zeros(3), x, np.arange(3)), lambda x: rl.group_stats(jnp.zeros(3), ids=x),
])  # fmt: skip
@pytest.mark.parametrize("values", [FAR_APART, FAR_APART.astype(np.uint64), np.array([2**32 - 1, 0, 0], np.uint32), -FAR_APART], ids=str)
def test_b4_integers_that_do_not_fit_are_refused_by_name(call, values):
    with unchecked(), pytest.raises(ValueError, match=r"(env|keys|ids|turn|trajectory|instance) holds -?\d+, which does not fit int32"):
        call(values)


def test_b4_integers_that_fit_do_not_wrap():
    pairs = np.stack([np.repeat(np.arange(256), 2), np.tile(np.arange(2), 256)]).astype(np.uint8)
    for dtype in (np.uint8, np.uint16, np.uint32, np.int64, np.uint64):
        a, b = pairs.astype(dtype)
        np.testing.assert_array_equal(rl.group_ids(rl.group_keys(a=a, b=b)), np.arange(512))
        np.testing.assert_array_equal(rl.group_ids(pairs.T.astype(dtype)), np.arange(512))
    np.testing.assert_array_equal(rl.group_ids(np.array([[-128], [127], [-128]], np.int8)), [0, 1, 0])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(rl.group_ids(rl.group_keys(env=FAR_APART)), [0, 1, 2])
    with pytest.raises(TypeError, match="env is uint32, which may not fit int32: cast it before jit"):
        jax.jit(lambda x: rl.group_keys(env=x))(np.zeros(3, np.uint32))
    with unchecked(), pytest.raises(TypeError, match="env must hold integers"):
        rl.group_keys(env=np.zeros(3))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64])
def test_b4_fingerprints_of_64_bits_that_differ_are_seen(dtype):
    prints = np.array([2**52, 2**52 + 2**33], dtype) if dtype != np.float64 else np.array([1.0, 1.0 + 2**-50])
    ids = np.array([0, 0])
    assert float(rl.mixed_share(prints, ids)) == 1
    with pytest.raises(ValueError, match="rows 0 and 1"):
        rl.check_same_prompt(prints, ids)
    rl.check_same_prompt(prints[[0, 0]], ids)
    with pytest.raises(ValueError, match="rows 0 and 1"):
        rl.check_same_prompt(np.stack([prints[[0, 0]], prints], axis=1), ids)


@pytest.mark.parametrize("dtype", HALVES)
def test_b5_statistics_of_half_precision_rewards(dtype):
    size = 600
    rewards, ids = jnp.asarray(np.arange(size) % 2, dtype), jnp.zeros(size, int)

    def exact(f, *args, **kw):
        return np.testing.assert_allclose(f(rewards, *args, **kw), f(rewards.astype(jnp.float32), *args, **kw))

    for scale in ("std", "none", "range", "batch"):
        exact(rl.group_relative, ids, scale=scale)
    exact(rl.leave_one_out, ids)
    exact(rl.whiten)
    exact(rl.normalise_globally, jnp.ones(size, dtype))
    exact(rl.rewards_to_go, ids, ids, scope="joint")
    exact(rl.rewards_to_go, jnp.arange(size), ids)
    exact(rl.broadcast_outcome, ids)
    exact(rl.reduce)
    stats = rl.group_stats(rewards, ids)
    assert float(stats.mean[0]) == 0.5
    assert stats.mean.dtype == jnp.float32


@pytest.mark.parametrize("bad", [[np.inf, 0, 0, 1], [-np.inf, 0, 0, 1], [np.inf, -np.inf, 0, 1], [np.inf] * 4, [np.nan, 0, 0, 1]], ids=str)
def test_b6_an_infinite_reward_makes_its_group_nan(bad):
    returns, ids = jnp.array([*bad, 2.0, 3.0]), jnp.array([0, 0, 0, 0, 1, 1])
    for scale in ("std", "none", "range"):
        out = rl.group_relative(returns, ids, scale=scale)
        np.testing.assert_array_equal(jnp.isnan(out), [True] * 4 + [False] * 2)
    np.testing.assert_array_equal(jnp.isnan(rl.leave_one_out(returns, ids)), [True] * 4 + [False] * 2)
    assert bool(jnp.all(jnp.isnan(rl.group_relative(returns, ids, scale="batch")[:4])))
    assert not rl.group_stats(returns, ids).is_tied.any()
    assert bool(jnp.all(jnp.isnan(rl.group_stats(returns, ids).mean[:1])))
    for shift_mean in (True, False):
        assert bool(jnp.all(jnp.isnan(rl.whiten(returns, shift_mean=shift_mean))))


def test_b6_one_play_s_infinite_reward_does_not_reach_another_play():
    rewards, turn, trajectory = jnp.array([1.0, 2.0, jnp.inf, jnp.nan, 5.0]), jnp.array([0, 1, 0, 1, 0]), jnp.array([0, 0, 1, 1, 2])
    np.testing.assert_array_equal(jnp.isfinite(rl.rewards_to_go(rewards, turn, trajectory)), [True, True, False, False, True])
    np.testing.assert_array_equal(rl.rewards_to_go(rewards, turn, trajectory, gamma=0.0), rewards)


LEVELS = ["token", "sequence", "sequence_token", "product"]


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_b7_gradients_are_finite_behind_any_mask(level, junk):
    rng = np.random.default_rng(0)
    where = jnp.array([[True, True, False, False], [True, False, False, True], [False] * 4])
    new, old = rng.normal(size=(2, 3, 4)).astype(np.float32)
    per_token = rng.normal(size=(3, 4)).astype(np.float32)

    def hide(x, mask):
        return jnp.where(mask, x, junk)

    losses = {
        "clip": lambda x, a: rl.clipped_ratio(x, old, a, level=level, where=where),
        "capped": lambda x, a: rl.clipped_ratio(x, old, a, level=level, where=where, ratio_cap=1.1, dual_clip=2.0),
        "sapo": lambda x, a: rl.sapo(x, old, a, level=level, where=where),
    }
    for loss in ("clip", "sapo"):
        recipe = rl.make_recipe("grpo", loss=loss, importance_level=level)
        losses[f"recipe {loss}"] = lambda x, a, recipe=recipe: rl.loss_for(recipe, x, old, a, where=where)[0]
    if level == "token":
        losses |= {"cispo": lambda x, a: rl.cispo(x, old, a, where=where), "vespo": lambda x, a: rl.vespo(x, old, a, where=where),
                   "reinforce": lambda x, a: rl.reinforce(x, a, where=where)}  # fmt: skip
    for name, loss in losses.items():
        for a, mask in ((per_token, where), (per_token[:, 0], where.any(axis=1)), (per_token[:, :1], where.any(axis=1)[:, None])):
            value = lambda x, y: jnp.sum(loss(x, y))  # noqa: B023, E731
            dirty = jax.grad(value)(hide(new, where), hide(a, mask))
            np.testing.assert_array_equal(dirty, jax.grad(value)(jnp.where(where, new, 0), jnp.where(mask, a, 0)), err_msg=name)


def test_b8_a_mask_of_the_wrong_rank_is_refused():
    square, row = jnp.zeros((3, 3)), jnp.array([True, True, False])
    ids = jnp.zeros(3, int)
    calls = [
        lambda: rl.clipped_ratio(square, square, row, where=row), lambda: rl.reinforce(square, row, where=row),
        lambda: rl.kl(square, square, where=row), lambda: rl.whiten(square, where=row), lambda: rl.reduce(square, where=row),
        lambda: rl.value_loss(square, None, square, where=row), lambda: rl.gae(square, square, where=row),
        lambda: rl.token_rewards(jnp.zeros(3), where=row), lambda: rl.high_entropy(square, 0.5, where=row),
        lambda: rl.decoupled(square, ids, jnp.ones(3), where=row), lambda: rl.group_relative(jnp.zeros(3), ids, where=square > 0),
        lambda: rl.loss_for(rl.make_recipe("grpo"), square, square, jnp.zeros(3), where=row), lambda: rl.reduce(square[0], where=True),
    ]  # fmt: skip
    for call in calls:
        with unchecked(), pytest.raises(ValueError, match="where has shape"):
            call()
    with unchecked():
        np.testing.assert_array_equal(rl.reinforce(square - 1, jnp.ones(3), where=row[:, None]), [[1, 1, 1], [1, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize("dtype", HALVES)
def test_b14_half_precision_ratios_do_not_overflow(dtype):
    new, old = jnp.array([[30.0, -30.0, 0.5]], dtype), jnp.zeros((1, 3), dtype)
    assert bool(jnp.all(jnp.isfinite(rl.importance_ratio(new, old))))
    for loss in (rl.clipped_ratio, rl.sapo, rl.cispo, rl.vespo):
        value, grad = jax.value_and_grad(lambda x, loss=loss: loss(x, old, jnp.array([-1.0])).sum())(new)
        assert bool(jnp.isfinite(value))
        assert bool(jnp.all(jnp.isfinite(grad)))
    assert bool(jnp.all(jnp.isfinite(rl.kl(new, old))))
    assert bool(jnp.all(jnp.isfinite(rl.importance_weights(new, old)[0])))


def empty_calls(s, r):
    """Every function of a table of `s` samples with `r` tokens."""
    x, ids, tokens = jnp.zeros(s), jnp.zeros(s, int), jnp.zeros((s, r))
    return {
        "group_stats": lambda: rl.group_stats(x, ids), "group_relative": lambda: rl.group_relative(x, ids),
        "batch": lambda: rl.group_relative(x, ids, scale="batch", singleton="raw"), "leave_one_out": lambda: rl.leave_one_out(x, ids),
        "decoupled": lambda: rl.decoupled(jnp.zeros((s, 2)), ids, jnp.ones(2)),
        "agent_wise": lambda: rl.agent_wise(x, ids, ids, trajectory=ids),
        "whiten": lambda: rl.whiten(tokens), "normalise_globally": lambda: rl.normalise_globally(x, ids),
        "mixed_share": lambda: rl.mixed_share(tokens, ids), "fingerprints": lambda: rl.mixed_share(ids, ids),
        "check_same_prompt": lambda: rl.check_same_prompt(tokens, ids), "rewards_to_go": lambda: rl.rewards_to_go(x, ids, ids),
        "joint": lambda: rl.rewards_to_go(x, ids, ids, scope="joint"),
        "outcome": lambda: rl.broadcast_outcome(x, ids, turn=ids, how="last"),
        "episode_return": lambda: rl.episode_return(x, ids, ids), "score_deltas": lambda: rl.score_deltas(x, ids, ids),
        "token_rewards": lambda: rl.token_rewards(x, where=tokens > 0, kl=tokens), "to_go": lambda: rl.token_rewards_to_go(tokens),
        "gae": lambda: rl.gae(tokens, tokens), "high_entropy": lambda: rl.high_entropy(tokens, 0.2),
        "on_policy_rows": lambda: rl.on_policy_rows(tokens, tokens, x, max_kl=0.1), "clip": lambda: rl.clipped_ratio(tokens, tokens, x),
        "product": lambda: rl.clipped_ratio(tokens, tokens, x, level="product"), "vespo": lambda: rl.vespo(tokens, tokens, x),
        "value_loss": lambda: rl.value_loss(tokens, None, tokens), "reduce": lambda: rl.reduce(tokens),
        "weights": lambda: rl.importance_weights(tokens, tokens, level="sequence"),
    }  # fmt: skip


@pytest.mark.parametrize(("s", "r"), [(0, 3), (3, 0), (0, 0)])
def test_b14_empty_tables_have_defined_results(s, r):
    for name, call in empty_calls(s, r).items():
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(call())), name
