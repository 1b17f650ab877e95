"""Credit within a play, without a critic: turns with a discount, groups of equal states, and preferences between joint actions."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real, Shaped

from marl_llm.algorithms._arrays import Scalar, as_float, as_mask
from marl_llm.algorithms.advantages import group_relative
from marl_llm.algorithms.groups import group_ids, group_keys
from marl_llm.algorithms.returns import place_in_play, rewards_to_go


def turn_gae(
    rewards: Real[ArrayLike, "S"],
    turn: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    agent: Int[ArrayLike, "S"],
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    where: Shaped[ArrayLike, "S"] | None = None,
) -> Float[Array, "S"]:
    """GAE over the turns of each agent with a value of 0, then the mean of the agent taken off (MARSHAL, 2025, arXiv:2510.15414).

    A_t = Σ_l (γ λ)^l r_{t+l} over the agent's own later turns, less the mean of A over all of the agent's samples

    Without a critic every δ is the reward, so GAE is a sum that is discounted by γ λ: summed first, normalised then, per agent.
    As a recipe, undiscounted: returns="to_go", scope="agent", advantage_estimator="group", group_by=("agent",), scale_advantages="none".

    Args:
      rewards: of each turn. turn, trajectory, agent: when, in which play, and who.
      gamma, gae_lambda: γ and λ, per turn of the agent's own.
      where: optional; False samples take no part and get 0.
    """
    turn = place_in_play(turn, trajectory, agent, where=where)
    sums = rewards_to_go(rewards, turn, trajectory, gamma=gamma * gae_lambda, where=where, agent=agent, scope="agent")
    return group_relative(sums, group_ids(group_keys(agent=agent), where=where), where=where, scale="none")


def gigpo(
    outcome: Real[ArrayLike, "S"],
    to_go: Real[ArrayLike, "S"],
    instance: Int[ArrayLike, "S"],
    state: Int[ArrayLike, "S"],
    *,
    where: Shaped[ArrayLike, "S"] | None = None,
    weight: Scalar = 1.0,
    scale: str = "std",
    epsilon: Scalar = 1e-6,
) -> Float[Array, "S"]:
    """Advantage over the plays of a task, and over the steps that began in the same state (GiGPO, Feng et al. 2025, arXiv:2505.10978).

    A = A_task(outcome of the play) + ω A_step(discounted return from the step on, among the steps of one task in one state)

    States are values here, so that a group of steps is exact: `state` is the number of a prompt, `Samples.prompt_ids`, or any hash of a
    state without collisions. A state that was met once gives A_step = 0.

    Args:
      outcome: return of the whole play, on each of its samples.
      to_go: return from the sample on, `rewards_to_go`.
      instance: which task. state: which state of it was acted in.
      where: optional; False samples take no part and get 0.
      weight: ω; the paper has 1.
      scale, epsilon: see `group_relative`; the paper has "std" and "none".
    """
    options = dict(where=where, scale=scale, epsilon=epsilon)
    tasks = group_relative(outcome, group_ids(group_keys(instance=instance), where=where), **options)
    steps = group_relative(to_go, group_ids(group_keys(instance=instance, state=state), where=where), **options)
    return tasks + weight * steps


def joint_preferences(
    returns: Real[ArrayLike, "S"],
    instance: Int[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    *,
    margin: float = 0.0,
    where: Shaped[ArrayLike, "S"] | None = None,
) -> Int[np.ndarray, "C 2"]:
    """Pairs of plays of one task, the better one first: preferences between the joint actions of a team, for a loss like DPO's.

    All responses of a play are one joint action: its return is the mean of its samples' returns. Each pair of one task whose returns
    differ by more than `margin` is given once; ties give none. NumPy, between two steps.

    Args:
      returns: of each sample. instance, trajectory: its task and its play.
      margin: at least 0.
      where: optional; a play without a sample that counts is in no pair.

    Returns:
      `[C, 2]` trajectory numbers (chosen, rejected), in the order of task, chosen and rejected.
    """
    returns, instance, trajectory = (np.asarray(x) for x in (returns, instance, trajectory))
    used = np.ones(returns.shape, bool) if where is None else np.asarray(where).astype(bool)
    plays: dict[int, dict[int, float]] = {}
    for play in np.unique(trajectory[used]).tolist():
        rows = used & (trajectory == play)
        plays.setdefault(int(instance[rows][0]), {})[play] = float(np.mean(returns[rows].astype(np.float64)))
    pairs = [
        (chosen, rejected)
        for _, returns_of_responses in sorted(plays.items())
        for chosen, high in returns_of_responses.items()
        for rejected, low in returns_of_responses.items()
        if high - low > margin
    ]
    return np.asarray(pairs, np.int64).reshape(-1, 2)



@jax.jit
def joint_dpo(
    log_ratios: Float[ArrayLike, "S"],
    trajectory: Int[ArrayLike, "S"],
    pairs: Int[ArrayLike, "C 2"],
    *,
    beta: Scalar = 0.1,
    where: Shaped[ArrayLike, "S"] | None = None,
) -> Float[Array, "C"]:
    """DPO between joint actions (Rafailov et al. 2023, arXiv:2305.18290, Eq. 7): a play's log-prob is the sum of all its responses'.

    ℓ = −log σ(β (z_chosen − z_rejected)),    z = Σ_s log π(response_s) − log π_ref(response_s) over the play, whoever gave them

    Args:
      log_ratios: log π − log π_ref of each whole response. trajectory: its play.
      pairs: (chosen, rejected) trajectory numbers, from `joint_preferences`. As a recipe, against the policy that sampled:
        advantage_estimator="preference", loss="reinforce".
      beta: β.
      where: optional; False samples take no part.
    """
    log_ratios = as_float(log_ratios)
    where = as_mask(where, log_ratios.shape)
    member = where & (jnp.asarray(trajectory) == jnp.asarray(pairs)[..., None])  # C 2 S
    chosen, rejected = jnp.moveaxis(jnp.sum(jnp.where(member, jnp.where(where, log_ratios, 0), 0), axis=-1), -1, 0)
    return -jax.nn.log_sigmoid(beta * (chosen - rejected))
