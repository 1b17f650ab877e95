"""Edges where a sign of equality, a stopped gradient, an empty slot or a published constant decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

OUT_OF_RANGE = dict(
    group_size=0, temperature=0.0, top_k=0, top_p=0.0, gamma=1.5, gae_lambda=1.1, ddof=2, epsilon=-1.0, clip_low=1.1, clip_high=-0.1,
    dual_clip=1.0, gate_positive=0.0, gate_negative=0.0, max_length=0, kl_coef=-1.0, entropy_coef=-1.0, value_coef=-1.0,
    value_clip=-0.1, rollout_correction_threshold=0.5, kl_target=0.0, kl_horizon=0.5, entropy_quantile=0.0, off_policy_kl=-0.1,
)  # fmt: skip

SETTINGS = {
    ("grpo", "paper"): dict(rewards="team", returns="outcome"),
    ("at_grpo", "paper"): dict(sampling="tree", group_by=("env", "agent", "turn")),
    ("at_grpo", "released"): dict(
        sampling="tree", group_by=("env", "agent", "turn"), group_size=8, top_k=20, top_p=0.9, dual_clip=3.0, loss_aggregation="token_mean",
        singleton="raw",
    ),
    ("magrpo", "paper"): dict(
        rewards="team", returns="to_go", scope="joint", group_by=("instance", "turn"), ddof=0, importance_level="product", kl_coef=0.02
    ),
    ("magrpo", "released"): dict(
        rewards="team", returns="to_go", scope="joint", group_by=("instance", "turn"), ddof=0, importance_level="product", loss="reinforce",
        gamma=0.9, epsilon=0.0, temperature=0.6, top_p=0.6, top_k=50, loss_aggregation="sequence_mean_token_sum",
    ),
    ("dr_mas", "paper"): dict(rewards="team", returns="outcome", loss_aggregation="token_mean"),
    ("dr_mas", "released"): dict(
        rewards="team", returns="outcome", loss_aggregation="token_mean", group_size=8, singleton="raw", dual_clip=3.0
    ),
    ("mappa", "paper"): dict(
        sampling="chain", group_size=2, rewards="local", returns="to_go", advantage_estimator="global", group_by=(), ddof=0, epsilon=1e-8,
        statistics_weight="token", kl_coef=0.01, kl_kind="k1", kl_where="reward", loss_aggregation="token_mean",
    ),
    ("mappa", "released"): dict(
        sampling="chain", group_size=2, rewards="local", returns="to_go", scope="token", group_by=("agent",), ddof=0, epsilon=1e-8,
        statistics_weight="token", kl_coef=0.01, kl_kind="k1", kl_where="reward", loss_aggregation="token_mean",
    ),
    ("ppo", "paper"): dict(
        sampling="chain", group_size=1, returns="gae", advantage_estimator="critic", group_by=(), epsilon=1e-8, dual_clip=3.0,
        loss_aggregation="token_mean",
    ),
    ("dr_grpo", "paper"): dict(rewards="team", returns="outcome", scale_advantages="none", loss_aggregation="constant", max_length=3000),
    ("dapo", "paper"): dict(
        group_size=16, rewards="team", returns="outcome", clip_high=0.28, loss_aggregation="token_mean", filter_zero_variance=True,
        zero_variance_in_denominator=False,
    ),
    ("rloo", "paper"): dict(
        rewards="team", returns="outcome", advantage_estimator="leave_one_out", loss="reinforce",
        loss_aggregation="sequence_mean_token_sum",
    ),
    ("reinforce_pp", "paper"): dict(
        sampling="chain", group_size=1, rewards="team", returns="outcome", advantage_estimator="global", group_by=(), ddof=0, epsilon=1e-8,
        statistics_weight="token", loss_aggregation="token_mean",
    ),
    ("spiral", "paper"): dict(
        sampling="chain", group_size=1, rewards="local", returns="to_go", scope="agent", advantage_estimator="ema", group_by=(),
        loss_aggregation="token_mean",
    ),
    ("gspo", "paper"): dict(rewards="team", returns="outcome", importance_level="sequence", clip_low=3e-4, clip_high=4e-4),
}  # fmt: skip


@pytest.mark.parametrize(("name", "preset"), SETTINGS)
def test_every_published_setting(name, preset):
    recipe = rl.make_recipe(name, preset)
    plain = {field.name: field.default for field in dataclasses.fields(rl.Recipe)}
    changed = {field: getattr(recipe, field) for field in rl.FIELDS if getattr(recipe, field) != plain[field]}
    assert changed == SETTINGS[name, preset]


def test_no_published_preset_is_forgotten():
    assert {name for name, _ in SETTINGS} == set(rl.RECIPES)


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_numbers_out_of_range(field):
    with pytest.raises(ValueError, match=rf"{field}=.* must be a number in \["):
        rl.make_recipe("grpo", **{field: OUT_OF_RANGE[field]})


def test_a_ratio_on_the_edge_is_not_clipped():
    ratio, signs = jnp.array([0.75, 1.25, 0.75, 1.25]), jnp.array([-1.0, 1, 1, -1])
    low, high = rl.clip_masks(ratio, signs, 0.25, 0.25)
    assert not low.any()
    assert not high.any()
    low, high = rl.clip_masks(jnp.array([0.5, 0.5, 1.5, 1.5]), signs, 0.25, 0.25)
    np.testing.assert_array_equal(low, [True, False, False, False])
    np.testing.assert_array_equal(high, [False, False, True, False])


def test_a_weight_on_the_cap_or_the_floor_is_kept():
    scorer, sampler = jnp.log(jnp.array([[2.0, 0.5, 4.0, 0.25]])), jnp.zeros((1, 4))
    exact = rl.importance_ratio(scorer, sampler)[0]
    weights, touched = rl.importance_weights(scorer, sampler, how="mask", cap=exact[0], floor=exact[1])
    np.testing.assert_array_equal(touched, [[False, False, True, True]])
    np.testing.assert_allclose(weights, [[2, 0.5, 0, 0]], rtol=1e-6)
    weights, touched = rl.importance_weights(scorer, sampler, how="truncate", cap=exact[0], floor=exact[1])
    np.testing.assert_array_equal(touched, [[False, False, True, False]])
    np.testing.assert_allclose(weights, [[2, 0.5, 2, 0.25]], rtol=1e-6)


@pytest.mark.parametrize("loss", [
    lambda a: rl.sapo(jnp.full((2, 2), -0.5), jnp.full((2, 2), -1.0), a), lambda a: rl.reinforce(jnp.full((2, 2), -0.5), a),
    lambda a: rl.vespo(jnp.full((2, 2), -0.5), jnp.full((2, 2), -1.0), a),
    lambda a: rl.cispo(jnp.full((2, 2), -0.5), jnp.full((2, 2), -1.0), a),
], ids=["sapo", "reinforce", "vespo", "cispo"])  # fmt: skip
def test_no_gradient_into_advantages(loss):
    assert float(jnp.abs(loss(jnp.ones(2))).sum()) > 0
    np.testing.assert_array_equal(jax.grad(lambda a: loss(a).sum())(jnp.ones(2)), 0)


def test_no_gradient_into_targets_old_values_or_the_reference():
    zeros, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    for place in (1, 2):
        grad = jax.grad(lambda *x: rl.value_loss(*x, value_clip=0.1).sum(), place)(zeros, ones, 3 * ones)
        np.testing.assert_array_equal(grad, 0)
    recipe = rl.make_recipe("grpo", kl_coef=1.0)

    def loss(reference):
        return rl.loss_for(recipe, zeros, zeros, jnp.ones(1), where=ones, reference_log_probs=reference)[0]

    np.testing.assert_array_equal(jax.grad(loss)(ones), 0)


def test_a_soft_gate_per_response():
    new = jnp.array([[0.5, -0.1, jnp.nan], [jnp.nan] * 3])
    where = jnp.array([[True, True, False], [False] * 3])
    loss = rl.sapo(new, jnp.zeros((2, 3)), jnp.array([2.0, 2.0]), level="sequence", where=where)
    gate = 4 / (1 + np.exp(-(np.exp(0.2) - 1)))
    np.testing.assert_allclose(loss, [-2 * gate, 0], rtol=1e-6)


def test_one_play_with_two_calls_has_one_vote_and_a_defined_scale():
    # The votes of the group are 1, and 1 - ddof is nothing to divide by: the sum of squares itself is the variance.
    out = rl.agent_wise(jnp.array([0.0, 2.0]), jnp.zeros(2, int), jnp.zeros(2, int), epsilon=0.0, trajectory=jnp.zeros(2, int))
    np.testing.assert_allclose(out, [-1, 1], rtol=1e-6)


def test_rows_without_a_vote_do_not_make_a_difference():
    out = rl.whiten(jnp.array([0.1, 0.1, 0.1, 7.0]), weights=jnp.array([1, 1, 1, 0]))
    np.testing.assert_array_equal(out, np.zeros(4))


def test_rows_without_a_group_take_no_part_when_rewards_are_decoupled():
    rewards = jnp.array([[0.0], [1.0], [50.0]])
    out = rl.decoupled(rewards, jnp.array([0, 0, -1]), jnp.ones(1))
    np.testing.assert_allclose(out, [-(0.5**0.5), 0.5**0.5, 0], atol=1e-3)


def test_trajectory_votes_in_a_recipe():
    returns, trajectory = jnp.array([0.0, 0.0, 0.0, 1.0, 3.0]), jnp.array([0, 0, 0, 1, 2])
    zeros = jnp.zeros(5, int)
    table = rl.Samples(instance=zeros, env=zeros, agent=zeros, turn=zeros, trajectory=trajectory, team=returns, local=jnp.zeros(5))
    recipe = rl.make_recipe("grpo", returns="immediate", statistics_weight="trajectory")
    desired = rl.agent_wise(returns, zeros, zeros, trajectory=trajectory)
    np.testing.assert_allclose(rl.advantages_for(recipe, table)[0], desired, rtol=1e-6)
    assert abs(float(desired[0] - rl.agent_wise(returns, zeros, zeros)[0])) > 0.1


def test_small_weights_are_kept_when_large_ones_are_masked():
    recipe = rl.make_recipe("grpo", loss_aggregation="token_mean", rollout_correction="mask", rollout_correction_threshold=2.0)
    old = jnp.log(jnp.array([[0.25, 3.0]]))
    total, _, metrics = rl.loss_for(recipe, old, old, jnp.ones(1), where=jnp.ones((1, 2)), sampler_log_probs=jnp.zeros((1, 2)))
    np.testing.assert_allclose(total, -0.25, rtol=1e-6)
    assert float(metrics["corrected"][0]) == 1


class TestEmptySlots:
    """Masked rows leave slots that read as turn 0 of trajectory 0, which real plays may be as well."""

    zeros = jnp.zeros(4, int)
    where = jnp.array([True, True, False, False])

    def test_to_go_of_play_zero(self):
        out = rl.rewards_to_go(jnp.array([1.0, 2.0, 9.0, 9.0]), jnp.array([1, 3, 0, 5]), self.zeros, gamma=0.0, where=self.where)
        np.testing.assert_array_equal(out, [1, 2, 0, 0])

    def test_turns_and_scores_below_zero(self):
        rewards, turn = jnp.array([1.0, 2.0, 9.0, 9.0]), jnp.array([-3, -1, 5, 5])
        np.testing.assert_array_equal(rl.broadcast_outcome(rewards, self.zeros, where=self.where, turn=turn, how="last"), [2, 2, 0, 0])
        paid = rl.score_deltas(jnp.array([-2.0, -0.5, 9.0, 9.0]), turn, self.zeros, where=self.where)
        np.testing.assert_array_equal(paid, [-2, 1.5, 0, 0])


def test_vespo_limits_each_token_before_it_multiplies():
    """One token at a log-ratio of 30 counts as 20, so that 30 - 19.5 weighs as 0.5 and not as 10.5."""
    new, zeros = jnp.array([[30.0, -19.5]]), jnp.zeros((1, 2))
    got = rl.vespo(new, zeros, jnp.ones(1))
    weight = np.exp(2.0 * 0.5 + 3.0 * (1 - np.exp(0.5)))
    np.testing.assert_allclose(got, -weight * np.asarray(new), rtol=1e-5)


def test_a_masked_token_is_never_among_the_uncertain_ones():
    entropy, where = jnp.array([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]]), jnp.array([[True, True, False], [True, False, False]])
    np.testing.assert_array_equal(rl.high_entropy(entropy, 0.5, where=where), [[False, True, False], [True, False, False]])
