"""The published recipes, as `Recipe` values: what their texts say, and what their authors' code is known to do instead."""

from marl_llm.algorithms._arrays import check_choice
from marl_llm.algorithms.recipe_rules import CLIPS, check_known
from marl_llm.algorithms.recipes import FIELDS, Recipe, refuse_idle
from marl_llm.old_names import convert_recipe_fields

_PAPER = {
    "grpo": dict(sampling="parallel", rewards="team", returns="outcome", group_by=("instance", "agent")),
    "at_grpo": dict(sampling="tree", pick="greedy", rewards="mixed", returns="immediate", group_by=("env", "agent", "turn")),
    "magrpo": dict(
        sampling="parallel", rewards="team", returns="to_go", scope="joint", group_by=("instance", "turn"), ddof=0,
        importance_level="product", kl_coef=0.02,
    ),
    "dr_mas": dict(sampling="parallel", rewards="team", returns="outcome", group_by=("instance", "agent"), loss_aggregation="token_mean"),
    "mappa": dict(
        sampling="chain", group_size=2, rewards="local", returns="to_go", scope="trajectory", advantage_estimator="global", group_by=(),
        ddof=0, epsilon=1e-8, statistics_weight="token", kl_coef=0.01, kl_kind="k1", kl_where="reward", loss_aggregation="token_mean",
    ),
    "ppo": dict(
        sampling="chain", group_size=1, rewards="mixed", returns="gae", advantage_estimator="critic", group_by=(), epsilon=1e-8,
        dual_clip=3.0, loss_aggregation="token_mean",
    ),
    # DeepSeekMath's group baseline without its two biases: no division by the deviation, and by a constant instead of the response's
    # length (Liu et al. 2025). The constant is the paper's generation budget: set max_length to yours.
    "dr_grpo": dict(sampling="parallel", rewards="team", returns="outcome", scale_advantages="none", loss_aggregation="constant",
                    max_length=3000),
    # Clip-higher, token mean and no groups without a difference (Yu et al. 2025). `rollout.refills` samples left-out groups anew. Set
    # overlong_buffer=0.2 for the penalty of long responses: budgets of a few tokens would have no room for it.
    "dapo": dict(
        sampling="parallel", group_size=16, rewards="team", returns="outcome", clip_high=0.28, loss_aggregation="token_mean",
        filter_zero_variance=True,
        zero_variance_in_denominator=False,
    ),
    # The mean of the others as the baseline, REINFORCE on whole responses (Ahmadian et al. 2024). Its KL is kl_where="reward", "k1".
    "rloo": dict(
        sampling="parallel", rewards="team", returns="outcome", advantage_estimator="leave_one_out", loss="reinforce",
        loss_aggregation="sequence_mean_token_sum",
    ),
    # No groups: the outcome, normalised over the tokens of the whole batch, in PPO's clip (Hu et al. 2025). Its KL per token is
    # `token_rewards` and `token_rewards_to_go`.
    "reinforce_pp": dict(
        sampling="chain", group_size=1, rewards="team", returns="outcome", advantage_estimator="global", group_by=(), ddof=0, epsilon=1e-8,
        statistics_weight="token", loss_aggregation="token_mean",
    ),
    # Self-play in a zero-sum game: each role's own return less its running mean, kept over the whole run (SPIRAL, Liu et al. 2025). One
    # model plays all roles (assignment "shared"). Readings: the mean of before the step is taken off; the loss is averaged over tokens.
    "spiral": dict(
        sampling="chain", group_size=1, rewards="local", returns="to_go", scope="agent", advantage_estimator="ema", group_by=(),
        loss_aggregation="token_mean",
    ),
    # One ratio per response, the geometric mean of its tokens', and a clip to match (Zheng et al. 2025).
    "gspo": dict(sampling="parallel", rewards="team", returns="outcome", importance_level="sequence", clip_low=3e-4, clip_high=4e-4),
}  # fmt: skip

_RELEASED = {
    # verl's vanilla actor loss under PettingLLMs: sampled with top-k and top-p, dual clip, mean over tokens.
    "at_grpo": dict(group_size=8, top_k=20, top_p=0.9, dual_clip=3.0, loss_aggregation="token_mean", singleton="raw"),
    # CoMLRL: no ratio, no clip, no KL; sums over tokens; discounted.
    "magrpo": dict(
        loss="reinforce", kl_coef=0.0, gamma=0.9, epsilon=0.0, temperature=0.6, top_p=0.6, top_k=50,
        loss_aggregation="sequence_mean_token_sum"
    ),
    # verl-agent.
    "dr_mas": dict(group_size=8, singleton="raw", dual_clip=3.0),
    # MARTI: rewards do not reach earlier actions, statistics per agent.
    "mappa": dict(scope="token", advantage_estimator="group", group_by=("agent",)),
}  # fmt: skip

RECIPES = tuple(_PAPER)


def make_recipe(name: str, preset: str = "paper", **overrides) -> Recipe:
    """Build a published recipe, with any of its fields changed.

    Args:
      name: one of `RECIPES`, in any case; "reinforce++" is "reinforce_pp".
      preset: "paper", or "released" for at_grpo, magrpo, dr_mas and mappa.
      **overrides: fields of `Recipe`; names of before (`marl_llm.old_names`) are taken with a `FutureWarning`.
        `group_by` may be a tuple or a comma-separated string.

    Returns:
      A frozen `Recipe`.

    Raises:
      ValueError: an unknown name, preset, field or value (the message lists the valid ones), a contradiction, or a field that
        was set on purpose but would have no effect in the resulting recipe (the message says why).
    """
    name = str(name).lower().replace("-", "_").replace("++", "_pp")
    check_known("recipe", name, RECIPES)
    check_choice(f"preset of {name}", preset, ("paper", "released") if name in _RELEASED else ("paper",))
    overrides = convert_recipe_fields(overrides)
    for field in overrides:
        check_known("recipe field", field, FIELDS)
    settings = _PAPER[name] | (_RELEASED[name] if preset == "released" else {})
    if "loss" in overrides and overrides["loss"] != settings.get("loss", Recipe.loss):
        settings = {field: value for field, value in settings.items() if field not in CLIPS}  # they were chosen for the recipe's own loss
    settings |= overrides
    recipe = Recipe(name=name, preset=preset, **settings)
    refuse_idle(recipe, overrides)
    return recipe
