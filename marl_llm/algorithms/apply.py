"""Carry a recipe out on arrays: samples in, advantages out; log-probs and advantages in, loss out.

`advantages_for` and `loss_for` are all that a trainer needs, and they serve anyone who has nothing but arrays. Both run inside
jit (the recipe is static). The loss comes back as (sum, count), so that micro-batches and devices add up exactly.
"""

import dataclasses
import functools
import typing

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Real, Shaped

from marl_llm.algorithms import advantages as adv
from marl_llm.algorithms import losses, returns
from marl_llm.algorithms._arrays import Scalar, as_float, as_mask, is_traced, psum
from marl_llm.algorithms.credit import counterfactual_returns
from marl_llm.algorithms.functions import own_advantages
from marl_llm.algorithms.groups import group_ids, group_keys, group_stats, mixed_share
from marl_llm.algorithms.policy_terms import correct, policy_term, tokens_kept
from marl_llm.algorithms.recipe_rules import CENTER, TO_GO
from marl_llm.algorithms.recipes import Recipe
from marl_llm.untrusted import LARGEST_REWARD


@typing.no_type_check  # as a pytree it may hold tracers, shapes or None; advantages_for checks what it reads
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """A table of S samples, one row per macro-action, as the core needs it: who, when, and what it earned. A pytree."""

    instance: Array  # [S] int, which problem
    env: Array  # [S] int, which environment; in a tree one play, in parallel sampling one per problem or per play
    agent: Array  # [S] int, who acted
    turn: Array  # [S] int, in which turn
    trajectory: Array  # [S] int, which play of which problem; any integers
    team: Array  # [S] float, team reward
    local: Array  # [S] float, the agent's own reward; in MAPPA the coach's score
    where: Array | None = None  # [S] bool, False rows are padding, aborted or not trained on; None: all count
    played: Array | None = None  # [S] bool, rows of whole plays, trained on or not: returns are made of their rewards; None: `where`
    team_where: Array | None = None  # [S] bool, rows that a team reward was paid to: where `outcome` is read; None: all
    credit: Array | None = None  # [S] float, what a replay without the response took off the team's reward; for counterfactual
    order: Array | None = None  # [S] int, place of the action in its trajectory, for to_go and outcome; None: `turn`
    tokens: Array | None = None  # [S] int, response tokens; needed where tokens vote (MAPPA)
    kl: Array | None = None  # [S] float, KL to the reference summed over the response; needed by kl_where="reward"
    budget: Array | None = None  # [S] int, most tokens that its role may say; needed by overlong_buffer
    truncated: Array | None = None  # [S] bool, its budget ended it; needed by mask_truncated
    prompt_ids: Array | None = None  # [S, P] int or [S] fingerprint; adds the share of groups with mixed prompts to the metrics
    running: Array | None = (
        None  # [S] float, its role's running mean before the step, for advantage_estimator="ema"; None: 0, as at the start
    )
    values: Array | None = None  # [S, R] float, critic's values; needed by advantage_estimator="critic"
    token_where: Array | None = None  # [S, R] bool, response tokens; needed by advantage_estimator="critic"
    token_kl: Array | None = None  # [S, R] float, per-token KL to the reference; needed by kl_where="reward" with a critic


def _need(samples: Samples, recipe: Recipe, field: str, why: str) -> Array:
    """Return an optional column, or say who needs it."""
    value = getattr(samples, field)
    if value is None:
        raise ValueError(f"Recipe {recipe.name!r} needs Samples.{field}: {why}.")
    return jnp.asarray(value)


def _rewards(recipe: Recipe, samples: Samples) -> Array:
    """Reward of each sample before any KL penalty `[S]`."""
    return recipe.reward_of(as_float(samples.team), as_float(samples.local)) - (CENTER if recipe.center == "score" else 0.0)


def _returns(recipe: Recipe, samples: Samples, rewards: Array, where: Array) -> Array:
    """Return of each sample `[S]`."""
    order = samples.turn if samples.order is None else samples.order
    if recipe.returns in TO_GO and recipe.scope == "joint":
        order = samples.turn
    if recipe.returns == "to_go":
        return returns.rewards_to_go(
            rewards, order, samples.trajectory, gamma=recipe.gamma, where=where, agent=samples.agent, scope=recipe.scope
        )
    if recipe.returns == "to_go_mean":
        return returns.mean_to_go(rewards, order, samples.trajectory, samples.agent, where=where, scope=recipe.scope)
    if recipe.returns == "outcome":
        paid = None if recipe.rewards == "local" else samples.team_where
        return returns.broadcast_outcome(rewards, samples.trajectory, where=where, turn=order, how="last", paid=paid)
    if recipe.returns == "outcome_plus_local":
        own = jnp.where(where, recipe.reward_weights[1] * as_float(samples.local), 0)
        outcome = returns.broadcast_outcome(
            rewards - own, samples.trajectory, where=where, turn=order, how="last", paid=samples.team_where
        )
        return outcome + own
    if recipe.returns == "counterfactual":
        return counterfactual_returns(recipe, samples)
    if recipe.returns == "trajectory":
        return returns.episode_return(rewards, samples.turn, samples.trajectory, where=where)
    return rewards


def _played(samples: Samples, where: Array) -> Array:
    """Rows whose rewards count in the returns of others `[S]` bool: whether a role trains changes no return of its team mates."""
    return where if samples.played is None else where | as_mask(samples.played, where.shape)


def _charged_returns(recipe: Recipe, samples: Samples, rewards: Array, where: Array, kl_coef) -> Array:
    """Return of each sample `[S]` less what it is charged: its KL with `kl_where="reward"`, and its length with `overlong_buffer`.

    A sum of rewards holds the penalty of each of its terms. An outcome is the last turn's reward, which all samples share: spread with it,
    the last turn's penalty would be everybody's and the others would be lost, so each sample pays its own after the outcome is spread.
    """
    penalty = _overlong(recipe, samples, where)
    if recipe.kl_coef and recipe.kl_where == "reward":
        penalty = penalty + kl_coef * jnp.where(where, _need(samples, recipe, "kl", "kl_where='reward' charges it"), 0)
    played = _played(samples, where)
    if recipe.returns in ("outcome", "outcome_plus_local", "counterfactual"):
        return jnp.where(where, _returns(recipe, samples, rewards, played) - penalty, 0)
    return jnp.where(where, _returns(recipe, samples, rewards - penalty, played), 0)


def _overlong(recipe: Recipe, samples: Samples, where: Array) -> Array | float:
    """What the length of each response costs it `[S]`."""
    if recipe.overlong_buffer is None:
        return 0.0
    tokens = _need(samples, recipe, "tokens", "overlong_buffer punishes their number")
    budget = _need(samples, recipe, "budget", "overlong_buffer is a share of it")
    punished = returns.overlong_penalty(tokens, jnp.maximum(budget, 1), buffer=recipe.overlong_buffer, penalty=recipe.overlong_penalty)
    return jnp.where(where, punished, 0)


def _places(samples: Samples, where: Array) -> Array:
    """Which of its agent's actions in the play each sample is `[S]`."""
    order = samples.turn if samples.order is None else samples.order
    return returns.place_in_play(order, samples.trajectory, samples.agent, where=where)


def _critic_returns(recipe: Recipe, samples: Samples, rewards: Array, where: Array, kl_coef) -> tuple[Array, Array, Array]:
    """Return (GAE advantages, value targets, token mask), all `[S, R]`."""
    token_where = _need(samples, recipe, "token_where", "GAE runs over response tokens").astype(bool) & where[:, None]
    values = _need(samples, recipe, "values", "GAE bootstraps from the critic")
    token_kl = None
    if recipe.kl_coef and recipe.kl_where == "reward":
        token_kl = _need(samples, recipe, "token_kl", "kl_where='reward' charges each token")
    rewards = rewards - _overlong(recipe, samples, where)
    earned = returns.token_rewards(rewards, where=token_where, kl=token_kl, kl_coef=kl_coef)
    advantages, targets = returns.gae(earned, values, gamma=recipe.gamma, gae_lambda=recipe.gae_lambda, where=token_where)
    return advantages, targets, token_where


def _votes(recipe: Recipe, samples: Samples, ids: Array, where: Array) -> Array | None:
    """Weight of each sample `[S]` in the statistics of its group; None: one each."""
    if recipe.statistics_weight == "trajectory":
        return adv.trajectory_weights(ids, samples.trajectory, where=where)
    if recipe.statistics_weight == "token":
        return _need(samples, recipe, "tokens", "statistics_weight='token' gives each response token one vote")
    return None


def _group_advantages(recipe: Recipe, samples: Samples, earned: Array, where: Array) -> tuple[Array, dict, Array]:
    """Compare within groups: (advantages [S], metrics, tied [S])."""
    keys = group_keys(**{axis: getattr(samples, axis) for axis in recipe.group_by})
    ids = group_ids(keys, where=where)
    if recipe.advantage_estimator == "leave_one_out":
        advantages = adv.leave_one_out(earned, ids, where=where, singleton=recipe.singleton)
    elif recipe.advantage_estimator == "preference":
        advantages = adv.preference(earned, ids, where=where)
    else:
        spread = dict(scale=recipe.scale_advantages, ddof=recipe.ddof, epsilon=recipe.epsilon)
        weights = _votes(recipe, samples, ids, where)
        advantages = adv.group_relative(earned, ids, where=where, weights=weights, singleton=recipe.singleton, **spread)
    stats = group_stats(earned, ids, where=where)
    metrics = {
        "groups": stats.count,
        "groups_of_one": stats.singletons,
        "tied_groups": stats.tied,
        "tied_share": stats.zero_variance_share,
    }
    if samples.prompt_ids is not None:
        metrics["mixed_prompt_share"] = mixed_share(samples.prompt_ids, ids, where=where)
    tied = where & stats.is_tied.at[jnp.where(where, ids, ids.shape[0])].get(mode="fill", fill_value=False)
    if recipe.singleton == "raw":
        alone = stats.size.at[jnp.where(where, ids, ids.shape[0])].get(mode="fill", fill_value=0) == 1
        tied = tied & ~alone
    return advantages, metrics, tied


def check_rewards(samples: Samples) -> None:
    """Raise unless every reward that counts is finite and below `LARGEST_REWARD`: else the advantages of its whole group are NaN or 0.

    Raises:
      ValueError: a reward is not finite; the message names the first such sample.
      TypeError: called inside jit, where nothing can be raised.
    """
    if is_traced(samples.team, samples.local, samples.where):
        raise TypeError("check_rewards raises, so it needs concrete arrays: call it before jit.")
    where = _played(samples, as_mask(samples.where, jnp.shape(samples.team)))
    for column in ("team", "local"):
        rewards = as_float(getattr(samples, column))
        bad = jnp.flatnonzero(where & ~(jnp.abs(rewards) < LARGEST_REWARD))
        if bad.size:
            row = int(bad[0])
            who = ", ".join(f"{name} {int(getattr(samples, name)[row])}" for name in ("instance", "agent", "turn", "trajectory"))
            raise ValueError(
                f"The {column} reward of sample {row} ({who}) is {float(rewards[row])}; {bad.size} are not finite, or "
                f"too large for float32 to square ({LARGEST_REWARD:g})."
            )


@jax.named_scope("advantages")
def advantages_for(
    recipe: Recipe, samples: Samples, *, axis_name=None, kl_coef: Scalar | None = None
) -> tuple[Float[Array, "S"] | Float[Array, "S R"], dict[str, Array], Bool[Array, "S"]]:
    """Turn a step's table of samples into advantages, as the recipe says. Call it once per step, on the whole table.

    Args:
      recipe: from `make_recipe`; static under jit.
      samples: the table. Rows with `where` False get 0 and are compared with nothing; see `Samples.played`.
      axis_name: mesh axis over which the "global" and "critic" statistics are added inside `shard_map`. Groups are never added
        over devices: keep the rows of a group on one device, or use jit with sharded arrays, where nothing needs to be said.
      kl_coef: β of this step where `next_kl_coef` steers it; by default `recipe.kl_coef`.

    Returns:
      (advantages `[S]`, or `[S, R]` with a critic; a dict of scalar metrics; tied `[S]`: rows whose group has equal returns and
      therefore exactly zero advantage, which a trainer may leave out of the forward pass when `recipe.filter_zero_variance`).

    Raises:
      ValueError: the recipe needs a column that the table does not have.
      AssertionError: columns of different lengths.
    """
    columns = [samples.instance, samples.env, samples.agent, samples.turn, samples.trajectory, samples.team, samples.local]
    chex.assert_rank(columns, 1)
    chex.assert_equal_shape(columns)
    where = as_mask(samples.where, jnp.shape(samples.team))
    kl_coef = recipe.kl_coef if kl_coef is None else kl_coef
    rewards = jnp.where(_played(samples, where), _rewards(recipe, samples), 0)
    metrics, tied = {}, jnp.zeros(where.shape, bool)
    if recipe.advantage_estimator == "critic":
        earned, _, token_where = _critic_returns(recipe, samples, rewards, where, kl_coef)
        advantages = adv.whiten(
            earned, where=token_where, weights=None, ddof=recipe.ddof, epsilon=recipe.epsilon, shift_mean=True, axis_name=axis_name
        )
        earned, counted = rewards, where
    else:
        earned, counted = _charged_returns(recipe, samples, rewards, where, kl_coef), where
        if recipe.advantage_estimator == "global":
            weights = _votes(recipe, samples, jnp.zeros_like(samples.trajectory), where)
            compared = earned
            if recipe.baseline != "none":
                place = _places(samples, where) if recipe.baseline == "place" else jnp.zeros_like(samples.agent)
                ids = group_ids(group_keys(agent=samples.agent, place=place), where=where)
                compared = adv.group_relative(earned, ids, where=where, scale="none", weights=weights)
            advantages = adv.whiten(
                compared, where=where, weights=weights, ddof=recipe.ddof, epsilon=recipe.epsilon, shift_mean=True, axis_name=axis_name
            )
        elif recipe.advantage_estimator == "ema":
            running = jnp.zeros_like(earned) if samples.running is None else as_float(samples.running)
            advantages = jnp.where(where, adv.above_running(earned, running), 0)
        else:
            advantages, metrics, tied = _group_advantages(recipe, samples, earned, where)
        if recipe.advantages is not None:
            advantages = own_advantages(recipe, samples, earned, where)
    count = psum(jnp.sum(counted), axis_name)
    mean = psum(jnp.sum(jnp.where(counted, earned, 0)), axis_name) / jnp.maximum(count, 1)
    square = psum(jnp.sum(jnp.where(counted, (earned - mean) ** 2, 0)), axis_name) / jnp.maximum(count, 1)
    metrics = {"samples": count, "return_mean": mean, "return_std": jnp.sqrt(square), **metrics}
    return advantages, metrics, tied


def value_targets_for(recipe: Recipe, samples: Samples, *, kl_coef: Scalar | None = None) -> Float[Array, "S R"]:
    """Targets for the critic, un-whitened advantage plus old value, 0 where masked; only for recipes with a critic.

    `kl_coef` as in `advantages_for`.
    """
    where = as_mask(samples.where, jnp.shape(samples.team))
    kl_coef = recipe.kl_coef if kl_coef is None else kl_coef
    return _critic_returns(recipe, samples, jnp.where(where, _rewards(recipe, samples), 0), where, kl_coef)[1]


def needs(recipe: Recipe) -> frozenset[str]:
    """Names of the optional inputs that a recipe cannot do without: arguments of `loss_for` and columns of `Samples`.

    A trainer that cannot give one of them can refuse the recipe before its first step.
    """
    critic, charged = recipe.advantage_estimator == "critic", bool(recipe.kl_coef)
    conditions = {
        "reference_log_probs": charged and recipe.kl_where == "loss",
        "kl": charged and recipe.kl_where == "reward" and not critic,
        "token_kl": charged and recipe.kl_where == "reward" and critic,
        "sampler_log_probs": recipe.rollout_correction != "none" or recipe.off_policy_kl is not None,
        "entropy": bool(recipe.entropy_coef) or recipe.entropy_quantile < 1,
        "entropy_threshold": recipe.entropy_quantile < 1,
        "tokens": (recipe.statistics_weight == "token" and recipe.advantage_estimator not in ("leave_one_out", "preference"))
            or recipe.overlong_buffer is not None,
        "budget": recipe.overlong_buffer is not None,
        "truncated": recipe.mask_truncated,
        "values": critic,
        "credit": recipe.returns == "counterfactual",
        "token_where": critic,
    }
    return frozenset(name for name, needed in conditions.items() if needed)


def _check_given(recipe: Recipe, **given) -> None:
    """Raise a ValueError that names the inputs of `loss_for` that the recipe needs and that are None."""
    if missing := [name for name, value in given.items() if value is None and name in needs(recipe)]:
        fields = ("entropy_coef", "entropy_quantile", "kl_coef", "rollout_correction", "off_policy_kl")
        settings = ", ".join(f"{field}={getattr(recipe, field)!r}" for field in fields)
        raise ValueError(f"Recipe {recipe.name!r} ({settings}): pass {' and '.join(missing)}.")


@jax.named_scope("loss")
def loss_for(
    recipe: Recipe,
    log_probs: Float[ArrayLike, "S R"],
    old_log_probs: Float[ArrayLike, "S R"],
    advantages: Real[ArrayLike, "S"] | Real[ArrayLike, "S #R"],
    *,
    where: Shaped[ArrayLike, "S R"],
    entropy: Float[ArrayLike, "S R"] | None = None,
    entropy_threshold: Scalar | None = None,
    reference_log_probs: Float[ArrayLike, "S R"] | None = None,
    sampler_log_probs: Float[ArrayLike, "S R"] | None = None,
    kl_coef: Scalar | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, tuple[Array, Array]]]:
    """Loss of one micro-batch, to be minimised, as a sum and a count.

    Add the sums and the counts of all micro-batches and devices and divide once: loss = Σ sum / Σ count. The gradient of the
    sum divided by the total count is then the gradient of the whole batch, however it was cut. `needs` lists what a recipe needs.

    Args:
      recipe: from `make_recipe`; static under jit.
      log_probs: log π of the sampled tokens, the only input with a gradient (besides `entropy`).
      old_log_probs: the same under the old policy, the model before the update, as the trainer scores it.
      advantages: from `advantages_for`.
      where: response tokens that are trained on; rows of padding are all False. NaN is harmless where False.
      entropy: per-token entropy of π, needed when `recipe.entropy_coef` is not 0; otherwise only a metric.
      entropy_threshold: scalar, from the function of this name over the tokens of the whole step; needed, with `entropy`, when
        `recipe.entropy_quantile` is below 1. Tokens below it leave the policy term and still count.
      reference_log_probs: log π_ref, needed when `recipe.kl_coef` is not 0 and `kl_where="loss"`; otherwise only a metric.
      sampler_log_probs: what the sampler itself reported for these tokens, needed when `recipe.rollout_correction` is not "none" or
        `recipe.off_policy_kl` is set; otherwise only a metric, the gap between sampler and scorer. Where `old_log_probs` are the
        sampler's too there is no gap to correct: score the samples once before the step.
      kl_coef: β of this step where `next_kl_coef` steers it; by default `recipe.kl_coef`.

    Returns:
      (sum, count, metrics), each metric again a (sum, count) pair. "policy_loss" is reduced like the loss; the others are means
      over tokens: "approx_kl" (log π_old − log π), "ratio", "clip_low" and "clip_high" (under loss="clip"), "kl", "entropy",
      "sampler_gap" (|log π_old − log π_sampler|), "corrected" (share of tokens whose weight was cut), "left_out" (share of tokens
      outside the policy term).

    Raises:
      ValueError: the recipe needs an input that was not given.
      AssertionError: shapes differ.
    """
    chex.assert_equal_shape([log_probs, old_log_probs])
    where = as_mask(where, jnp.shape(log_probs))
    kl_coef = recipe.kl_coef if kl_coef is None else kl_coef
    _check_given(recipe, entropy=entropy, entropy_threshold=entropy_threshold, reference_log_probs=reference_log_probs,
                 sampler_log_probs=sampler_log_probs)  # fmt: skip
    parts = functools.partial(losses.reduce_parts, where=where, how=recipe.loss_aggregation, max_length=recipe.max_length)

    def tokens(x):
        return losses.reduce_parts(jax.lax.stop_gradient(x), where=where)

    new, old = (losses.masked(x, where) for x in (log_probs, old_log_probs))
    policy, measured = policy_term(recipe, new, old, advantages, where)
    metrics = {"approx_kl": tokens(old - new)} | {name: tokens(x) for name, x in measured.items()}
    sampler = None if sampler_log_probs is None else losses.masked(sampler_log_probs, where)
    if sampler is not None:
        metrics["sampler_gap"] = tokens(jnp.abs(old - sampler))
        policy, cut = correct(recipe, policy, old, sampler, where)
        metrics["corrected"] = tokens(as_float(cut))
    if recipe.off_policy_kl is not None or recipe.entropy_quantile < 1:
        kept = tokens_kept(recipe, new, sampler, advantages, where, entropy, entropy_threshold)
        policy = jnp.where(kept, policy.reshape(len(policy), -1), 0)  # [S R] or [S 1]
        metrics["left_out"] = tokens(as_float(~kept))
    total, count = parts(policy)
    metrics["policy_loss"] = (jax.lax.stop_gradient(total), count)
    total = recipe.policy_coef * total
    if reference_log_probs is not None:
        divergence = losses.kl(new, jax.lax.stop_gradient(as_float(reference_log_probs)), kind=recipe.kl_kind, where=where)
        metrics["kl"] = tokens(divergence)
        if recipe.kl_coef and recipe.kl_where == "loss":
            total = total + kl_coef * parts(divergence)[0]
    if entropy is not None:
        metrics["entropy"] = tokens(as_float(entropy))
        if recipe.entropy_coef:
            total = total - recipe.entropy_coef * parts(entropy)[0]
    return total, count, metrics


def next_kl_coef(recipe: Recipe, kl_coef: Scalar, kl: Scalar, *, samples: Scalar) -> Scalar:
    """β of the next step: steered by `adapt_kl_coef` to `recipe.kl_target`, or as it is where the recipe has no target.

    Args:
      recipe: from `make_recipe`.
      kl_coef: β of this step; of the first, `recipe.kl_coef`. A loop keeps it in its checkpoint.
      kl: measured KL of this step, in nats per token: the metric "kl".
      samples: how many samples the step had.
    """
    if recipe.kl_target is None:
        return kl_coef
    return losses.adapt_kl_coef(kl_coef, kl, target=recipe.kl_target, samples=samples, horizon=recipe.kl_horizon)


def count_for(recipe: Recipe, *, where: Shaped[ArrayLike, "S R"]) -> Float[Array, ""]:
    """Count that `loss_for` would return for this mask: the exact denominator of rows that are left out of the forward pass.

    With `filter_zero_variance` and `zero_variance_in_denominator`, divide the sums of the rows that were scored by the count of all of
    them.
    """
    where = jnp.asarray(where).astype(bool)
    return losses.reduce_parts(jnp.zeros(where.shape), where=where, how=recipe.loss_aggregation, max_length=recipe.max_length)[1]


@jax.named_scope("value_loss")
def value_loss_for(
    recipe: Recipe,
    values: Float[ArrayLike, "S R"],
    old_values: Float[ArrayLike, "S R"],
    targets: Float[ArrayLike, "S R"],
    *,
    where: Shaped[ArrayLike, "S R"],
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, tuple[Array, Array]]]:
    """Critic's loss of one micro-batch, weighted by `recipe.value_coef`, as a sum and a count over tokens.

    Args:
      recipe: one with a critic.
      values: V of the present critic, with gradient.
      old_values: V when the advantages were computed.
      targets: from `value_targets_for`.
      where: response tokens.

    Returns:
      (sum, count, metrics), each metric a (sum, count) pair over tokens: "value_error", the unclipped ½ (V − G)².
    """
    where = as_mask(where, jnp.shape(values))
    old = None if recipe.value_clip is None else old_values
    loss = losses.value_loss(values, old, targets, where=where, value_clip=recipe.value_clip)
    total, count = losses.reduce_parts(recipe.value_coef * loss, where=where)
    plain = losses.value_loss(jax.lax.stop_gradient(as_float(values)), None, targets, where=where)
    return total, count, {"value_error": losses.reduce_parts(plain, where=where)}
