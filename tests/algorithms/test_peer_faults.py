"""Faults of released systems, one test each: where their code departs from their paper, or their users complain.

Each test states the fault, shows on numbers that it would matter, and that this package does not have it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl


def test_groups_that_mix_prompts():
    # Keyed by (env, turn, agent), but the second agent's candidates saw different first moves.
    env = agent = turn = jnp.zeros(4, int)
    ids = rl.group_ids(rl.group_keys(env=env, agent=agent, turn=turn))
    prompts = np.array([[5, 1], [5, 2], [5, 1], [5, 1]])
    with pytest.raises(ValueError, match="mix prompts"):
        rl.check_same_prompt(prompts, ids)
    rl.check_same_prompt(prompts[[0, 2, 3, 0]], ids)


def test_a_group_of_one_trained_on_its_raw_reward():
    # Keyed by a fresh id per trajectory, every group is a singleton; the raw reward then passes for an advantage.
    rewards = jnp.array([5.0, 6.0, 7.0])
    advantages = rl.group_relative(rewards, jnp.arange(3))
    np.testing.assert_array_equal(advantages, np.zeros(3))
    assert int(rl.group_stats(rewards, jnp.arange(3)).singletons) == 3
    assert all(rl.make_recipe(name).singleton == "zero" for name in rl.RECIPES)


def test_rewards_mixed_by_hand_on_a_different_scale_in_each_game():
    team, local = jnp.array([1.0, 0.0]), jnp.array([0.25, 0.5])
    np.testing.assert_allclose(rl.mix_rewards(team, local, alpha=0.5), [0.75, 0.5])
    # Doubling α doubles the team's part and nothing else.
    np.testing.assert_allclose(rl.mix_rewards(team, local, alpha=1.0) - rl.mix_rewards(team, local, alpha=0.5), 0.5 * team)


def test_ratio_biased_by_top_k_and_top_p():
    # Sampler and scorer disagree about the distribution: an unchanged policy looks as if it had moved, and is clipped.
    logits = jnp.array([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5]])
    settings = dict(temperature=1.25, top_k=4, top_p=0.8)
    kept = rl.kept_tokens(logits, **settings)
    tokens = jnp.array([0])
    sampled = rl.token_log_probs(logits, tokens, temperature=1.25, kept=kept)
    careless = jnp.exp(rl.token_log_probs(logits, tokens, temperature=1.25) - sampled)
    np.testing.assert_array_less(careless, 0.8)
    np.testing.assert_allclose(jnp.exp(rl.token_log_probs(logits, tokens, temperature=1.25, kept=kept) - sampled), 1.0)
    mass = rl.kept_log_mass(logits, kept, temperature=1.25)
    np.testing.assert_allclose(jnp.exp(rl.token_log_probs(logits, tokens, temperature=1.25) - rl.untruncate(sampled, mass)), 1.0, rtol=1e-6)
    # The paper samples everything at temperature 1; the released settings are named, not silent.
    assert (rl.make_recipe("at_grpo").top_k, rl.make_recipe("at_grpo").top_p) == (None, 1.0)
    assert (rl.make_recipe("at_grpo", "released").top_k, rl.make_recipe("at_grpo", "released").top_p) == (20, 0.9)


def test_a_standard_deviation_nobody_states():
    returns, ids = jnp.array([0.0, 1.0]), jnp.zeros(2, int)
    sample = rl.group_relative(returns, ids, ddof=1, epsilon=0.0)
    population = rl.group_relative(returns, ids, ddof=0, epsilon=0.0)
    np.testing.assert_allclose(sample, [-(0.5**0.5), 0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(population, [-1, 1], rtol=1e-6)
    assert (rl.make_recipe("magrpo").ddof, rl.make_recipe("magrpo").scale_advantages) == (0, "std")


def test_magrpo_without_ratio_clip_or_kl():
    paper, released = rl.make_recipe("magrpo"), rl.make_recipe("magrpo", "released")
    assert (paper.loss, paper.importance_level, paper.kl_coef) == ("clip", "product", 0.02)
    assert (released.loss, released.kl_coef) == ("reinforce", 0.0)
    # After a large step with positive advantage the paper's objective stops pushing; the released one never does.
    new, old = jnp.array([[-0.1, -0.1]]), jnp.array([[-1.0, -1.0]])
    rest = dict(where=jnp.ones((1, 2), bool), reference_log_probs=new)

    def pushed(recipe):
        return jax.grad(lambda x: rl.loss_for(recipe, x, old, jnp.ones(1), **rest)[0])(new)

    np.testing.assert_array_equal(pushed(paper), [[0, 0]])
    np.testing.assert_array_equal(pushed(released), [[-1, -1]])


def test_padding_that_is_trained_on():
    # Completions cut at the longest of the group with a mask of ones: 3 pads of the short answer enter the sum.
    log_probs = jnp.array([[-1.0, -1.0, -1.0, -1.0], [-1.0, -7.0, -7.0, -7.0]])
    where = jnp.array([[True] * 4, [True, False, False, False]])

    def loss(x):
        return rl.reduce(rl.reinforce(x, jnp.ones(2), where=where), where=where, how="sequence_mean_token_sum")

    assert float(loss(log_probs)) == 2.5
    np.testing.assert_array_equal(jax.grad(loss)(log_probs)[1], [-0.5, 0, 0, 0])


def test_cross_joints_summed_over_partners():
    reward = jnp.array([[1.0, 2.0, 6.0], [0.0, 1.0, 2.0], [3.0, 3.0, 3.0]]).reshape(-1)
    joints, ids = rl.cross(2, 3), jnp.zeros(3, int)
    mean, _ = rl.marginal_returns(reward, joints, 3)
    total, _ = rl.marginal_returns(reward, joints, 3, how="sum")
    np.testing.assert_allclose(total, 3 * mean)  # K^(N-1) times as large: without σ the step would be too
    for agent in range(2):
        alike = [rl.group_relative(x[agent], ids, epsilon=0.0) for x in (mean, total)]
        np.testing.assert_allclose(*alike, rtol=1e-5)


def test_returns_to_go_that_do_not_reach_earlier_actions():
    # Solver, coder, verifier act once each; only the verifier's action is scored. MAPPA Eq. 3 pays all three for it.
    args = (jnp.array([0.0, 0.0, 1.0]), jnp.arange(3), jnp.zeros(3, int))
    np.testing.assert_array_equal(rl.rewards_to_go(*args), [1, 1, 1])
    np.testing.assert_array_equal(rl.rewards_to_go(*args, scope="token"), [0, 0, 1])
    np.testing.assert_array_equal(rl.rewards_to_go(*args, scope="agent", agent=jnp.array([0, 1, 0])), [1, 0, 1])
    assert rl.make_recipe("mappa").scope == "trajectory"
    assert rl.make_recipe("mappa", "released").scope == "token"


def test_global_statistics_that_are_local():
    # Agent 0 earns little everywhere, agent 1 much: normalised alone both look average, normalised globally they do not.
    returns, agent = jnp.array([0.0, 0.2, 0.8, 1.0]), jnp.array([0, 0, 1, 1])
    tokens = jnp.ones(4, int)
    together = rl.normalise_globally(returns, tokens)
    apart = rl.group_relative(returns, agent, ddof=0, epsilon=0.0)
    assert bool(jnp.all(together[:2] < 0))
    assert bool(jnp.all(together[2:] > 0))
    np.testing.assert_allclose(apart, [-1, 1, -1, 1], rtol=1e-4)


def test_a_turn_paid_for_the_score_of_earlier_turns():
    # Levels paid every turn reward staying; differences add up to the last score.
    scores, turn = jnp.array([0.5, 0.5, 0.5]), jnp.arange(3)
    paid = rl.score_deltas(scores, turn, jnp.zeros(3, int))
    np.testing.assert_array_equal(paid, [0.5, 0, 0])


@pytest.mark.parametrize("estimate",
                         [dict(advantage_estimator="leave_one_out"), dict(scale_advantages="none"), dict(advantage_estimator="global")])
def test_rewards_tied_to_a_critic(estimate):
    # UnityMAS-O's role rewards need no second network here: the same columns serve groups, leave-one-out and global statistics.
    recipe = rl.make_recipe("grpo", rewards="mixed", returns="immediate", **estimate)
    zeros = jnp.zeros(4, int)
    table = rl.Samples(instance=zeros, env=zeros, agent=zeros, turn=zeros, trajectory=jnp.arange(4),
                       team=jnp.array([0.0, 1, 0, 1]), local=jnp.zeros(4))  # fmt: skip
    advantages, _, _ = rl.advantages_for(recipe, table)
    assert bool(jnp.all(jnp.sign(advantages) == jnp.array([-1, 1, -1, 1])))


def test_long_plays_that_dominate_the_baseline():
    # One play called the agent nine times and failed, three called it once and won.
    trajectory = jnp.array([0] * 9 + [1, 2, 3])
    outcome = jnp.where(trajectory == 0, 0.0, 1.0)
    zeros = jnp.zeros(12, int)
    by_call = rl.agent_wise(outcome, zeros, zeros, ddof=0, epsilon=0.0)
    by_play = rl.agent_wise(outcome, zeros, zeros, ddof=0, epsilon=0.0, trajectory=trajectory)
    assert float(by_call[-1]) > 1.7  # baseline 1/4: winning looks rare
    np.testing.assert_allclose(by_play[-1], (1 - 0.75) / (0.75 * 0.25) ** 0.5, rtol=1e-5)


def test_copied_rows_that_shift_the_statistics():
    # Rows added to reach a multiple of the devices are masked, not copied: the group's mean stays what it was.
    returns, ids = jnp.array([0.0, 1.0, 1.0]), jnp.zeros(3, int)
    padded = rl.group_relative(jnp.append(returns, returns[0]), jnp.zeros(4, int), where=jnp.array([True] * 3 + [False]))
    np.testing.assert_allclose(padded, [*rl.group_relative(returns, ids), 0.0])
    copied = rl.group_relative(jnp.append(returns, returns[0]), jnp.zeros(4, int))
    assert abs(float(copied[0] - padded[0])) > 0.2


def test_a_mean_over_each_micro_batch():
    # Token means of unequal micro-batches, averaged, are not the token mean: sum and count stay apart until the end.
    x = jnp.array([[1.0, 1.0, 1.0, 1.0], [9.0, 0.0, 0.0, 0.0]])
    where = jnp.array([[True] * 4, [True, False, False, False]])
    parts = [rl.reduce_parts(x[i : i + 1], where=where[i : i + 1]) for i in range(2)]
    whole = sum(p[0] for p in parts) / sum(p[1] for p in parts)
    np.testing.assert_allclose(whole, 13 / 5, rtol=1e-6)
    np.testing.assert_allclose(rl.reduce(x, where=where), 13 / 5, rtol=1e-6)
    assert float(sum(p[0] / p[1] for p in parts) / 2) == 5.0


def test_the_return_of_zero_that_was_taken_for_missing():
    # A popular advantage estimator skips exact zeros as missing; here only the mask says what is missing.
    values = jnp.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(rl.whiten(values), [-(1.5**0.5), 0, 1.5**0.5], rtol=1e-5, atol=1e-6)


def test_an_end_that_is_paid_for_the_turn_it_ended():
    # The agent that writes <end> is paid exactly nothing, neither the gain of its turn nor a format penalty of that turn.
    f1, turn = jnp.array([0.25, 0.75, 0.75]), jnp.array([0, 1, 1])
    stopped = jnp.array([False, False, True])
    penalty = jnp.array([0.0, -1.0, -1.0])
    paid = rl.score_deltas(f1, turn, jnp.zeros(3, int), stopped=stopped)
    np.testing.assert_array_equal(paid, [0.25, 0.5, 0.0])
    np.testing.assert_array_equal(rl.mix_rewards(paid, jnp.where(stopped, 0, penalty)), [0.25, -0.5, 0.0])


def test_settings_of_the_code_passed_off_as_those_of_the_paper():
    paper, released = rl.make_recipe("at_grpo"), rl.make_recipe("at_grpo", "released")
    assert (paper.group_size, paper.temperature, paper.dual_clip, paper.singleton) == (4, 1.0, None, "zero")
    assert (released.group_size, released.dual_clip, released.singleton) == (8, 3.0, "raw")
    assert rl.make_recipe("magrpo").gamma == 1.0
    assert rl.make_recipe("magrpo", "released").gamma == 0.9
    assert all(rl.make_recipe(name).preset == "paper" for name in rl.RECIPES)


def test_skipped_rows_that_change_the_scale_of_the_loss():
    # A tied group is left out of the forward pass: divided by the rows that were scored, the others count twice.
    recipe = rl.make_recipe("grpo", loss_aggregation="token_mean", filter_zero_variance=True)
    where = jnp.array([[True, True], [True, True], [True, False], [True, True]])
    advantages, new = jnp.array([1.0, -1.0, 0.0, 0.0]), jnp.full((4, 2), -0.5)
    whole, count, _ = rl.loss_for(recipe, new, new - 0.1, advantages, where=where)
    scored, few, _ = rl.loss_for(recipe, new[:2], new[:2] - 0.1, advantages[:2], where=where[:2])
    assert float(rl.count_for(recipe, where=where)) == float(count) == 7
    np.testing.assert_allclose(scored / rl.count_for(recipe, where=where), whole / count, rtol=1e-6)
    assert float(few) == 4
