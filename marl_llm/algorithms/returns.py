"""Returns: what a sample is paid for.

Rewards arrive as flat arrays over S samples (one row per macro-action): `team` shared by everyone, `local` the agent's own.
The four papers turn them into returns in four ways: at once (AT-GRPO), summed over the turns to come (MAGRPO, MAPPA), by the
outcome of the whole trajectory (GRPO, Dr. MAS), or as differences of a score (UnityMAS-O). The token-level returns of
REINFORCE++ and of PPO's GAE live here too.

`trajectory` identifies one play of one instance (any integers); `turn` orders its samples, and rows of one trajectory with the
same turn happened together. Where agents act one after another within a turn, pass the index of the action in its trajectory
as `turn`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real, Shaped

from marl_llm.algorithms._arrays import (
    Scalar,
    as_float,
    as_mask,
    check_choice,
    gather,
    integer_arguments,
    masked_ids,
    per_group_max,
    per_group_mean,
    per_group_sum,
)
from marl_llm.algorithms.groups import group_ids, group_keys

SCOPES = ("token", "agent", "trajectory", "joint")
OUTCOMES = ("sum", "mean", "last")


def mix_rewards(team: Real[ArrayLike, "*S"], local: Real[ArrayLike, "*S"], *, alpha: Scalar = 1.0) -> Float[Array, "*S"]:
    """Mix the team's reward with the agent's own (AT-GRPO: Stronger-MAS Eq. 3).

    r_{t,i} = α · r_t^team + r_{t,i}^loc

    Args:
      team: team reward of each sample.
      local: the acting agent's own reward, same shape.
      alpha: weight of the team's reward; the paper uses 1.
    """
    return alpha * as_float(team) + as_float(local)


def overlong_penalty(
    tokens: Int[ArrayLike, "S"], budget: Int[ArrayLike, "S"], *, buffer: Scalar, penalty: Scalar = 1.0
) -> Float[Array, "S"]:
    """Soft punishment of responses that come near their token budget (DAPO, Yu et al. 2025, arXiv:2503.14476, Eq. 13).

    p_s = penalty · clip((n_s − (1 − buffer) L_s) / (buffer L_s), 0, 1), to be taken off the reward

    The paper's L_max is the budget L and its L_cache the last part of it: buffer = 0.2 for 4,096 of 20,480 tokens.

    Args:
      tokens: n, tokens of each response.
      budget: L, the most that its role may say; at least 1.
      buffer: share of the budget over which the punishment grows, in (0, 1].
      penalty: what a response that uses up its budget loses.
    """
    tokens, budget = (jnp.asarray(x).astype(jnp.result_type(float)) for x in (tokens, budget))
    width = buffer * budget
    return penalty * jnp.clip((tokens - (budget - width)) / width, 0, 1)


def _turn_slots(turn, trajectory, where) -> tuple[Array, Array, Array]:
    """Number the (trajectory, turn) pairs in order: (slot per row [S], trajectory per slot [S], turn per slot [S])."""
    # group_ids numbers keys lexicographically, so consecutive slots are consecutive turns of one trajectory.
    slots = masked_ids(group_ids(group_keys(a_trajectory=trajectory, b_turn=turn), where=where), where)
    size = slots.shape[0]
    slot_trajectory = jnp.zeros(size, trajectory.dtype).at[slots].set(trajectory, mode="drop")
    slot_turn = jnp.zeros(size, turn.dtype).at[slots].set(turn, mode="drop")
    return slots, slot_trajectory, slot_turn


@integer_arguments("turn", "trajectory", "agent")
@functools.partial(jax.jit, static_argnames="scope")
def rewards_to_go(
    rewards: Real[ArrayLike, "S"],
    turn: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    gamma: Scalar = 1.0,
    agent: Int[ArrayLike, "S"] | None = None,
    scope: str = "trajectory",
) -> Float[Array, "S"]:
    """Sum what is still to be earned from this turn on (MAGRPO Alg. 1 line 11; MAPPA Eq. 3).

    R_t = Σ_{τ≥t} γ^{τ−t} r_τ

    Args:
      rewards: reward of each sample.
      turn: order of the sample within its trajectory; γ is raised to differences of it. Gaps are allowed.
      trajectory: id of the play the sample belongs to.
      gamma: discount; both papers use 1.
      where: optional; False samples earn nothing and get 0.
      agent: acting agent of each sample, needed by `scope="agent"`.
      scope: which later rewards count.
        "trajectory": those of every sample of the trajectory, simultaneous ones included (MAPPA Eq. 3 as printed).
        "agent": those of the same agent in the same trajectory (MAPPA's "within each agent's trajectory").
        "joint": one reward per turn of the trajectory, the mean over its rows; right when every agent's row repeats the
          team's joint reward (MAGRPO), which must not be counted once per agent.
        "token": those of the sample itself (MAPPA as released): returns the rewards unchanged.

    Returns:
      Returns `[S]`, in the order of the rows.

    Raises:
      ValueError: unknown scope, or `scope="agent"` without `agent`.
    """
    check_choice("scope", scope, SCOPES)
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)
    rewards = jnp.where(where, rewards, 0)
    if scope == "token":
        return rewards
    if scope == "agent":
        if agent is None:
            raise ValueError("rewards_to_go(scope='agent') needs the acting agent of each sample: pass agent=.")
        trajectory = group_ids(group_keys(agent=agent, trajectory=trajectory))
    slots, slot_trajectory, slot_turn = _turn_slots(turn, trajectory, where)
    rows = per_group_sum(jnp.ones_like(slots), slots)
    earned = per_group_mean(rewards, slots, rows) if scope == "joint" else per_group_sum(rewards, slots)
    follows = (slot_trajectory[1:] == slot_trajectory[:-1]) & (rows[1:] > 0)
    gap = jnp.where(follows, slot_turn[1:] - slot_turn[:-1], 0)
    decay = jnp.where(follows, jnp.asarray(gamma, rewards.dtype) ** gap, 0)
    decay = jnp.concatenate([decay, jnp.zeros(min(1, rewards.shape[0]), rewards.dtype)])

    def then(later, earlier):
        # Where nothing is passed on, nothing is: 0 times the NaN of one play must not reach the play before it.
        return later[0] * earlier[0], earlier[1] + jnp.where(earlier[0] == 0, 0, earlier[0] * later[1])

    to_go = jax.lax.associative_scan(then, (decay, earned), reverse=True)[1]
    return gather(to_go, slots)


@integer_arguments("turn", "trajectory", "agent")
@functools.partial(jax.jit, static_argnames="scope")
def mean_to_go(
    rewards: Real[ArrayLike, "S"],
    turn: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    agent: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    scope: str = "trajectory",
) -> Float[Array, "S"]:
    """Average what is still to be earned from this turn on, with one vote per agent that still acts: the score of its last action.

    R_t = mean over agents i with an action at τ ≥ t of v_i,   v_i = r_{last,i},  and of the acting agent itself v = (r_t + r_last) / 2

    A sum of positive scores (`rewards_to_go`, MAPPA Eq. 3) pays for acting more often, and a mean over actions would still let an agent
    repeat a good one to outweigh the others. Here a repeated action of an equal score changes no return at all. A reading of this library:
    the paper has the sum.

    Args:
      rewards, turn, trajectory, where: as in `rewards_to_go`.
      agent: who acted. Where several rows are an agent's last, its vote is their mean.
      scope: "trajectory": all agents; "agent": the acting one alone; "token": the reward itself; "joint": one vote per turn, the mean
        over its rows, in place of one per agent.

    Returns:
      Returns `[S]`, 0 where masked.

    Raises:
      ValueError: unknown scope.
    """
    check_choice("scope", scope, SCOPES)
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)
    rewards = jnp.where(where, rewards, 0)
    if scope == "token":
        return rewards
    ones = where.astype(rewards.dtype)
    if scope == "joint":
        total = rewards_to_go(rewards, turn, trajectory, where=where, scope="joint")
        return total / jnp.maximum(rewards_to_go(ones, turn, trajectory, where=where, scope="joint"), 1)
    play_of_agent = group_ids(group_keys(agent=agent, trajectory=trajectory))
    last = broadcast_outcome(rewards, play_of_agent, where=where, turn=turn, how="last")
    vote = (rewards + last) / 2
    if scope == "agent":
        return jnp.where(where, vote, 0)
    slots = masked_ids(group_ids(group_keys(own=play_of_agent, turn=turn), where=where), where)
    later = rewards_to_go(ones, turn, play_of_agent, where=where)
    ending = later == gather(per_group_sum(ones, slots), slots)  # no later action of this agent
    share = jnp.where(where & ending, 1 / jnp.maximum(gather(per_group_sum(ones, slots), slots), 1), 0)
    votes, agents = (rewards_to_go(x, turn, trajectory, where=where) for x in (share * last, share))
    return jnp.where(where, (votes - last + vote) / jnp.maximum(agents, 1), 0)


@integer_arguments("turn", "trajectory", "agent")
@jax.jit
def place_in_play(
    turn: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    agent: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
) -> Int[Array, "S"]:
    """How many actions the same agent took before in the same play; actions of one turn share their place. 0 where masked."""
    where = as_mask(where, jnp.shape(turn))
    ones = where.astype(jnp.result_type(float))
    still = rewards_to_go(ones, turn, trajectory, where=where, agent=agent, scope="agent")
    slots = masked_ids(group_ids(group_keys(agent=agent, trajectory=trajectory), where=where), where)
    return jnp.where(where, jnp.rint(gather(per_group_sum(ones, slots), slots) - still), 0).astype(jnp.int32)


@integer_arguments("trajectory", "turn")
@functools.partial(jax.jit, static_argnames="how")
def broadcast_outcome(
    rewards: Real[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    turn: Int[ArrayLike, "S"] | None = None,
    how: str = "sum",
    paid: Shaped[ArrayLike, "S"] | None = None,
) -> Float[Array, "S"]:
    """Give every sample of a trajectory the outcome of that trajectory (GRPO and Dr. MAS on a team).

    Args:
      rewards: reward of each sample.
      trajectory: id of the play the sample belongs to, any integers.
      where: optional; False samples count nowhere and get 0.
      turn: order of the sample within its trajectory, needed by `how="last"`.
      how: "sum" adds the rows (right when the outcome sits on one row and the others hold 0), "mean" averages them (right when
        each row repeats it), "last" averages the rows of the last turn (right when each row holds the state of affairs after it).
      paid: optional; the outcome is read from these samples only, and all get it. A trajectory without one has the outcome 0.

    Returns:
      Outcomes `[S]`.

    Raises:
      ValueError: unknown `how`, or `how="last"` without `turn`.
    """
    check_choice("how", how, OUTCOMES)
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)
    slots = masked_ids(group_ids(group_keys(trajectory=trajectory), where=where), where)
    counted = where if paid is None else where & as_mask(paid, rewards.shape)
    if how == "last":
        if turn is None:
            raise ValueError("broadcast_outcome(how='last') needs the order of the samples: pass turn=.")
        last = per_group_max(turn, jnp.where(counted, slots, slots.shape[0]), jnp.iinfo(turn.dtype).min)
        counted = counted & (turn == gather(last, slots))
    slots_counted = jnp.where(counted, slots, slots.shape[0])
    if how == "sum":
        outcome = per_group_sum(rewards, slots_counted)
    else:
        outcome = per_group_mean(rewards, slots_counted, per_group_sum(counted.astype(jnp.int32), slots_counted))
    return gather(outcome, slots)


@integer_arguments("turn", "trajectory")
@jax.jit
def episode_return(
    rewards: Real[ArrayLike, "S"],
    turn: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
) -> Float[Array, "S"]:
    """Give every sample the undiscounted sum of its trajectory's joint rewards, each turn counted once.

    The reward of a turn is the mean over its rows, so the number of agents does not change the scale.
    """
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)
    slots, slot_trajectory, _ = _turn_slots(turn, trajectory, where)
    rows = per_group_sum(jnp.ones_like(slots), slots)
    total = broadcast_outcome(per_group_mean(rewards, slots, rows), slot_trajectory, where=rows > 0)
    return gather(total, slots)


@integer_arguments("turn", "trajectory")
@jax.jit
def score_deltas(
    scores: Real[ArrayLike, "S"],
    turn: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    marginal: Shaped[ArrayLike, "S"] | None = None,
    stopped: Shaped[ArrayLike, "S"] | None = None,
) -> Float[Array, "S"]:
    """Pay the first score, then what each turn adds to it (UnityMAS-O §6: Workflow D's tests, Workflow C's F1 from M-ASK).

    r_t = q_0 at the first turn of a trajectory, q_t − q_{t−1} after it

    Args:
      scores: q_t `[S]`, the score after the sample's turn (share of tests passed, F1 of the interim answer). All samples of
        one turn of a trajectory carry the same one; were they to differ, the largest is the turn's.
      turn: order of the sample within its trajectory; q_{t−1} is the score of the turn before it that has any unmasked sample. A
        reflector is paid for the attempt after it: give it that attempt's turn.
      trajectory: id of the play.
      where: optional; False samples are not part of the play and get 0.
      marginal: which samples are paid the difference; the others are paid q_t itself. M-ASK: search, summary and update are paid
        the difference, planner and answerer the absolute score. Default: all.
      stopped: samples paid exactly 0 whatever the score (M-ASK: the search agent wrote `<end>`; a reflector without a next
        attempt). Their score still counts for the turn.

    Returns:
      Rewards `[S]`. Over one trajectory with one sample per turn they add up to the last score.
    """
    scores = as_float(scores)
    where = as_mask(where, scores.shape)
    slots, slot_trajectory, _ = _turn_slots(turn, trajectory, where)
    score = per_group_max(scores, slots, -jnp.inf)
    follows = slot_trajectory[1:] == slot_trajectory[:-1]
    before = jnp.concatenate([jnp.zeros(min(1, scores.shape[0]), scores.dtype), jnp.where(follows, score[:-1], 0)])
    paid = gather(score, slots) - jnp.where(as_mask(marginal, scores.shape), gather(before, slots), 0)
    if stopped is not None:
        paid = jnp.where(as_mask(stopped, scores.shape), 0, paid)
    return jnp.where(where, paid, 0)


def token_rewards(
    rewards: Real[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S R"],
    kl: Float[ArrayLike, "S R"] | None = None,
    kl_coef: Scalar = 0.0,
) -> Float[Array, "S R"]:
    """Lay a sample's reward on its last token and charge every token for leaving the reference (MAPPA Eq. 2).

    r_{s,r} = [r is the last token of s] · R_s − β · KL_{s,r}

    Args:
      rewards: reward of each sample.
      where: response tokens; a sample without any gets zeros, its reward is lost.
      kl: per-token KL estimates, see `losses.kl`; no gradient flows into them.
      kl_coef: β. MAPPA 0.01.
    """
    rewards = as_float(rewards)
    where = as_mask(where, (*rewards.shape, jnp.shape(where)[-1]))
    last = where & (jnp.cumsum(where[:, ::-1], axis=1)[:, ::-1] == 1)
    out = jnp.where(last, rewards[:, None], 0)
    if kl is not None:
        out = out - jnp.where(where, kl_coef * jax.lax.stop_gradient(as_float(kl)), 0)
    return out


@jax.jit
def token_rewards_to_go(
    rewards: Real[ArrayLike, "S R"], *, where: Shaped[ArrayLike, "S R"] | None = None, gamma: Scalar = 1.0
) -> Float[Array, "S R"]:
    """Discounted return at each token of a response (REINFORCE++; scope "token" of MAPPA as released).

    G_r = r_r + γ G_{next(r)}, where next(r) skips masked tokens, so a hole (tool output) costs no discount.

    Args:
      rewards: per-token rewards; what lies on masked tokens is ignored.
      gamma: discount per unmasked token.
      where: response tokens; 0 elsewhere.
    """
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)

    def step(carried, token):
        reward, valid = token
        carried = jnp.where(valid, reward + gamma * carried, carried)
        return carried, carried

    tokens = (jnp.where(where, rewards, 0).T, where.T)
    _, returns = jax.lax.scan(step, jnp.zeros(rewards.shape[0], rewards.dtype), tokens, reverse=True)
    return jnp.where(where, returns.T, 0)


@jax.jit
def gae(
    rewards: Real[ArrayLike, "S R"],
    values: Float[ArrayLike, "S R"],
    *,
    where: Shaped[ArrayLike, "S R"] | None = None,
    gamma: Scalar = 1.0,
    gae_lambda: Scalar = 1.0,
) -> tuple[Float[Array, "S R"], Float[Array, "S R"]]:
    """Generalised advantage estimation over the tokens of one response (Schulman et al. 2016; UnityMAS-O §5.4).

    δ_r = r_r + γ V_{next(r)} − V_r,   A_r = δ_r + γ λ A_{next(r)},   target_r = A_r + V_r

    next(r) is the next unmasked token of the row: a hole in the mask (tool output inside the response) is skipped, its reward
    and value are ignored, and it costs neither γ nor λ. After the last unmasked token the episode is over and V = 0.

    Args:
      rewards: per-token rewards, see `token_rewards`.
      values: critic's values V_r; no gradient flows into them.
      gamma: discount per unmasked token.
      gae_lambda: λ; 1 gives return minus value, 0 one-step differences.
      where: response tokens, holes allowed.

    Returns:
      (advantages, value targets), both 0 where masked. Not whitened.
    """
    rewards = as_float(rewards)
    where = as_mask(where, rewards.shape)
    rewards = jnp.where(where, rewards, 0)
    values = jnp.where(where, jax.lax.stop_gradient(as_float(values)), 0)

    def step(carried, token):
        next_value, next_advantage = carried
        reward, value, valid = token
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * next_advantage
        carried = (jnp.where(valid, value, next_value), jnp.where(valid, advantage, next_advantage))
        return carried, advantage

    nothing = jnp.zeros(rewards.shape[0], rewards.dtype)
    _, advantages = jax.lax.scan(step, (nothing, nothing), (rewards.T, values.T, where.T), reverse=True)
    advantages = jnp.where(where, advantages.T, 0)
    return advantages, jnp.where(where, advantages + values, 0)
