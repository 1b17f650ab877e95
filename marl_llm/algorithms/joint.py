"""Joint actions of a team whose agents answered in parallel (MAGRPO): which candidates meet, and what each is paid.

With N agents and K candidates each, a joint action names one candidate per agent: a row of candidate indices `[N]`. `aligned`
pairs the j-th with the j-th (K joints, K reward calls), `cross` pairs everything (K^N), or a balanced sample of it. The
rewards of the joints are brought back to the candidates by `marginal_returns`. Joint actions are counted by B (batch rows of
joints).
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real, Shaped

from marl_llm.algorithms._arrays import as_float, as_mask, check_choice

# Beyond this many combinations nobody evaluates a reward; the table itself would take gigabytes.
MAX_JOINTS = 2**24


def aligned(agents: int, group_size: int) -> Int[Array, "B N"]:
    """Pair the j-th candidate of every agent: joints (0, 0, ..), (1, 1, ..), ... (MAGRPO Alg. 1, g in 𝒢).

    Args:
      agents: N.
      branches: K.

    Returns:
      Joint actions `[K, N]`.
    """
    return jnp.broadcast_to(jnp.arange(group_size)[:, None], (group_size, agents))


@functools.partial(jax.jit, static_argnames=("agents", "group_size", "subset"))
def cross(agents: int, group_size: int, *, subset: int | None = None, key: Array | None = None) -> Int[Array, "B N"]:
    """Pair every candidate of every agent with all those of the others, or a balanced sample of these pairs.

    The sample splits all K^N joints into K^(N−1) blocks of K, in each of which every candidate occurs once (shifts of random
    orders), and draws blocks without replacement: no joint twice, and every candidate exactly subset / K times, so that the
    mean over partners stays an unbiased one and no candidate goes unpaid.

    Args:
      agents: N.
      branches: K.
      subset: how many joints to draw, a multiple of K; None for all of them.
      key: `jax.random.key`, consumed; needed with `subset` and only then.

    Returns:
      Joint actions `[K^N, N]` in lexicographic order, or `[subset, N]`.

    Raises:
      ValueError: `subset` not a multiple of K between K and K^N, key missing or without use, or more than 2^24 joints.
    """
    if group_size**agents > MAX_JOINTS:
        raise ValueError(f"{group_size}^{agents} joint actions are too many to list (limit {MAX_JOINTS}): use fewer branches.")
    if (subset is None) != (key is None):
        raise ValueError("subset and key belong together: only a sampled subset is random.")
    if subset is None:
        index = jnp.arange(group_size**agents)[:, None]
        return index // group_size ** jnp.arange(agents - 1, -1, -1) % group_size
    if subset % group_size or not group_size <= subset <= group_size**agents:
        raise ValueError(f"subset={subset} must be a multiple of group_size={group_size} between {group_size} and {group_size**agents}.")
    key_order, key_blocks = jax.random.split(key)
    orders = jax.vmap(lambda k: jax.random.permutation(k, group_size))(jax.random.split(key_order, agents))
    blocks = jax.random.choice(key_blocks, group_size ** (agents - 1), (subset // group_size,), replace=False)
    # Digits of the block's number in base K; the first is always 0, so the first agent is never shifted.
    shifts = blocks[:, None] // group_size ** jnp.arange(agents - 1, -1, -1) % group_size
    places = (jnp.arange(group_size)[None, :, None] + shifts[:, None, :]) % group_size
    return orders[jnp.arange(agents), places].reshape(subset, agents)


@functools.partial(jax.jit, static_argnames=("group_size", "how"))
def marginal_returns(
    joint_returns: Real[ArrayLike, "B"],
    joints: Int[ArrayLike, "B N"],
    group_size: int,
    *,
    where: Shaped[ArrayLike, "B"] | None = None,
    how: str = "mean",
) -> tuple[Float[Array, "N K"], Int[Array, "N K"]]:
    """Bring the returns of joint actions back to the candidates that took part in them.

    R_i^(k) = mean of R(b) over the joints b in which agent i plays its k-th candidate

    For `aligned` this is the joint return itself. For `cross`, the mean and the sum give the same advantages after division by
    the group's standard deviation; without it the sum grows with K^(N−1), which is why the mean is the default.

    Args:
      joint_returns: return of each joint action.
      joints: from `aligned` or `cross`.
      branches: K.
      where: optional; joints whose reward could not be had are False and count for nobody.
      how: "mean", or "sum" (MAGRPO as released).

    Returns:
      (returns `[N, K]`, number of joints behind each `[N, K]`); a candidate in no joint has return 0 and number 0, mask it out.

    Raises:
      ValueError: unknown `how`.
    """
    check_choice("how", how, ("mean", "sum"))
    joint_returns, joints = as_float(joint_returns), jnp.asarray(joints)
    where = as_mask(where, joint_returns.shape)
    agents = joints.shape[1]
    places = (jnp.broadcast_to(jnp.arange(agents), joints.shape), joints)
    counts = jnp.zeros((agents, group_size), jnp.int32).at[places].add(where[:, None].astype(jnp.int32))
    totals = jnp.zeros((agents, group_size), joint_returns.dtype).at[places].add(jnp.where(where, joint_returns, 0)[:, None])
    return (totals / jnp.maximum(counts, 1) if how == "mean" else totals), counts
