"""Long responses: a soft punishment near the budget, which each response pays for itself."""

import jax
import numpy as np
import pytest

import marl_llm.algorithms as rl


def dapo(size, longest, cache):
    """Yu et al. 2025, Eq. 13, as printed: the reward for the length."""
    if size <= longest - cache:
        return 0.0
    if size <= longest:
        return ((longest - cache) - size) / cache
    return -1.0


def test_the_punishment_is_that_of_the_paper():
    sizes = np.arange(0, 130)
    with jax.enable_x64(True):
        found = rl.overlong_penalty(sizes, np.full(130, 100), buffer=0.2)
        np.testing.assert_allclose(-found, [dapo(size, 100, 20) for size in sizes], atol=1e-12)
        whole = rl.overlong_penalty(np.array([0, 1, 3]), np.array([3, 3, 3]), buffer=1.0, penalty=0.5)
        np.testing.assert_allclose(whole, [0, 0.5 / 3, 0.5], atol=1e-12)


def table(**columns):
    four = np.arange(4, dtype=np.int32)
    given = dict(
        instance=four // 2, env=four, agent=np.zeros(4, np.int32), turn=np.zeros(4, np.int32), trajectory=four,
        team=np.ones(4, np.float32), local=np.zeros(4, np.float32), tokens=np.array([10, 8, 5, 9]), budget=np.array([10, 10, 20, 20]),
    )  # fmt: skip
    return rl.Samples(**given | columns)


def test_each_response_pays_for_its_own_length_by_the_budget_of_its_role():
    recipe = rl.make_recipe("grpo", overlong_buffer=0.5, scale_advantages="none")
    advantages, metrics, tied = rl.advantages_for(recipe, table())
    np.testing.assert_allclose(advantages, [-0.2, 0.2, 0, 0], atol=1e-6)  # 1 - 1 against 1 - 0.6; 5 and 9 of 20 tokens cost nothing
    np.testing.assert_array_equal(tied, [False, False, True, True])
    assert float(metrics["tied_share"]) == 0.5
    one_play = table(trajectory=np.zeros(4, np.int32), turn=np.arange(4, dtype=np.int32), instance=np.zeros(4, np.int32))
    returns = rl.make_recipe("grpo", overlong_buffer=0.5, scale_advantages="none", group_by="instance")
    advantages, _, _ = rl.advantages_for(returns, one_play)
    np.testing.assert_allclose(advantages, np.array([0, 0.4, 1, 1]) - 0.6, atol=1e-6)  # the outcome is shared, its length is not


def test_a_critic_finds_the_punishment_on_the_last_token_and_padding_pays_nothing():
    recipe = rl.make_recipe("ppo", overlong_buffer=0.5, rewards="team")
    masks = dict(token_where=np.ones((4, 2), bool), values=np.zeros((4, 2), np.float32), where=np.array([True, True, True, False]))
    targets = rl.value_targets_for(recipe, table(**masks))
    np.testing.assert_allclose(targets[:, -1], [0, 0.4, 1, 0], atol=1e-6)


@pytest.mark.parametrize(("fields", "message"), [
    (dict(overlong_buffer=0.0), r"overlong_buffer=0.0 must be a number in \[1e-06, 1\]"), (dict(overlong_buffer=2), "overlong_buffer=2"),
    (dict(overlong_penalty=2.0), "overlong_penalty=2.0 would have no effect: overlong_buffer=None"),
    (dict(mask_truncated=1), "mask_truncated=1 must be True or False"),
])  # fmt: skip
def test_what_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        rl.make_recipe("grpo", **fields)


def test_columns_that_are_missing_are_named():
    with pytest.raises(ValueError, match=r"needs Samples\.budget"):
        rl.advantages_for(rl.make_recipe("grpo", overlong_buffer=0.5), table(budget=None))
