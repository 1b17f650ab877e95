"""The reinforcement-learning core: pure functions of arrays, in the order in which data passes through them.

    groups      which samples are compared with each other
    returns     what a sample is paid for
    advantages  what its return is compared with, and on which scale
    losses      the equations that are stepped, unreduced, and their reductions
    gated       losses and masks that fade out or leave out instead of clipping
    trust_regions  losses and masks that bound a step by other measures than the clip
    step_groups credit within a play: turns, groups of equal states, preferences
    ratios      ratios between distributions that are not quite the policy
    joint       joint actions of a team that answered in parallel
    recipes     the five choices of a method, as data
    published   AT-GRPO, MAGRPO, MAPPA, ... as such data
    distillation  how far a student is from its teacher
    functions   advantages and a loss of the user's own
    policy_terms  the policy term of a recipe's loss
    apply       a recipe carried out: samples in, advantages out; log-probs in, loss out

    groups = group_ids(group_keys(env=env, agent=agent, turn=turn))                  # [S]
    advantages = group_relative(mix_rewards(team, local, alpha=1.0), groups)         # [S]
    loss = reduce(clipped_ratio(log_probs, old_log_probs, advantages[:, None]), where=mask, how="token_mean")

Dimension letters: S samples (macro-actions), R response tokens, P prompt tokens, N agents, T turns, K branches, C columns of a
key.
"""

from marl_llm.algorithms.advantages import (
    agent_wise,
    decoupled,
    group_relative,
    leave_one_out,
    normalise_globally,
    preference,
    running_means,
    trajectory_weights,
    whiten,
)
from marl_llm.algorithms.apply import (
    Samples,
    advantages_for,
    check_rewards,
    count_for,
    loss_for,
    needs,
    next_kl_coef,
    value_loss_for,
    value_targets_for,
)
from marl_llm.algorithms.distillation import (
    DIVERGENCES,
    bins_of,
    divergence,
    forward_kl,
    generalized_jsd,
    reverse_kl,
    sampled_reverse_kl,
    span_reverse_kl,
    top_k_bins,
)
from marl_llm.algorithms.gated import entropy_threshold, high_entropy, on_policy_rows, sapo, vespo
from marl_llm.algorithms.groups import (
    NO_GROUP,
    GroupStats,
    check_same_prompt,
    group_ids,
    group_keys,
    group_stats,
    mixed_share,
)
from marl_llm.algorithms.joint import aligned, cross, marginal_returns
from marl_llm.algorithms.losses import (
    adapt_kl_coef,
    cispo,
    clip_masks,
    clipped_ratio,
    entropy,
    importance_ratio,
    kl,
    reduce,
    reduce_parts,
    reinforce,
    sum_blocks,
    value_loss,
)
from marl_llm.algorithms.paid import returns_for
from marl_llm.algorithms.published import RECIPES, make_recipe
from marl_llm.algorithms.ratios import importance_weights, kept_log_mass, kept_tokens, token_log_probs, untruncate
from marl_llm.algorithms.recipe_rules import FUNCTIONS
from marl_llm.algorithms.recipes import (
    FIELDS,
    LOSS_FIELDS,
    SAMPLER_FIELDS,
    TRAINER_FIELDS,
    Recipe,
    pay_reach,
    with_loss,
)
from marl_llm.algorithms.returns import (
    broadcast_outcome,
    episode_return,
    gae,
    mean_to_go,
    mix_rewards,
    overlong_penalty,
    place_in_play,
    rewards_to_go,
    score_deltas,
    token_rewards,
    token_rewards_to_go,
)
from marl_llm.algorithms.step_groups import gigpo, joint_dpo, joint_preferences, turn_gae
from marl_llm.algorithms.trust_regions import binary_divergence, clip_cov_tokens, dppo, gmpo, kl_cov, token_covariance

__all__ = [
    "DIVERGENCES",
    "FIELDS",
    "FUNCTIONS",
    "LOSS_FIELDS",
    "NO_GROUP",
    "RECIPES",
    "SAMPLER_FIELDS",
    "TRAINER_FIELDS",
    "GroupStats",
    "Recipe",
    "Samples",
    "adapt_kl_coef",
    "advantages_for",
    "agent_wise",
    "aligned",
    "broadcast_outcome",
    "binary_divergence",
    "check_rewards",
    "check_same_prompt",
    "cispo",
    "clip_cov_tokens",
    "clip_masks",
    "clipped_ratio",
    "count_for",
    "cross",
    "decoupled",
    "bins_of",
    "divergence",
    "dppo",
    "entropy",
    "entropy_threshold",
    "episode_return",
    "gae",
    "forward_kl",
    "generalized_jsd",
    "gigpo",
    "gmpo",
    "group_ids",
    "group_keys",
    "group_relative",
    "group_stats",
    "high_entropy",
    "importance_ratio",
    "importance_weights",
    "joint_dpo",
    "joint_preferences",
    "kept_log_mass",
    "kept_tokens",
    "kl",
    "kl_cov",
    "leave_one_out",
    "loss_for",
    "make_recipe",
    "marginal_returns",
    "mean_to_go",
    "mix_rewards",
    "mixed_share",
    "needs",
    "next_kl_coef",
    "normalise_globally",
    "on_policy_rows",
    "overlong_penalty",
    "pay_reach",
    "preference",
    "reduce",
    "reduce_parts",
    "reinforce",
    "place_in_play",
    "returns_for",
    "reverse_kl",
    "rewards_to_go",
    "sapo",
    "running_means",
    "sampled_reverse_kl",
    "span_reverse_kl",
    "score_deltas",
    "sum_blocks",
    "token_covariance",
    "token_log_probs",
    "token_rewards",
    "token_rewards_to_go",
    "top_k_bins",
    "trajectory_weights",
    "turn_gae",
    "untruncate",
    "value_loss",
    "value_loss_for",
    "value_targets_for",
    "vespo",
    "whiten",
    "with_loss",
]
