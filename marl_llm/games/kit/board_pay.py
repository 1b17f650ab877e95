"""What board games pay for a list that has been measured: the three forms of Stronger-MAS's Appendix B that they share."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marl_llm.games.protocol import Rewards

FORMAT, LEGAL, MAIN = 0.1, 0.1, 0.8  # the coefficients of B.3, B.4 and B.5, for both roles
UNPARSABLE = 0.5  # what an unparsable answer costs under `safe`: more than an illegal one, else the form is lost while training


def as_printed(well_formed: Bool[Array, ""], team: Float[Array, ""], parts: Mapping[str, Float[Array, ""]]) -> Rewards:
    """The format and the other `parts`, all of them 0 for a list that cannot be read (the mask m)."""
    local = {name: jnp.where(well_formed, part, 0.0) for name, part in {"format": FORMAT * jnp.ones(()), **parts}.items()}
    return Rewards(team, sum(local.values()), local, well_formed)


def telescoping(
    well_formed: Bool[Array, ""],
    legal: Bool[Array, ""],
    team: Float[Array, ""],
    parts: Mapping[str, Float[Array, ""]],
    unread: float = UNPARSABLE,
) -> Rewards:
    """Shares of a gain as `parts`, whose sum over an episode is bounded, and two terms that are never positive."""
    local = {"format": -unread * ~well_formed, "legal": -LEGAL * (well_formed & ~legal), **parts}
    return Rewards(team, sum(local.values()), local, well_formed)


def by_outcome(well_formed: Bool[Array, ""], solved: Bool[Array, ""]) -> Rewards:
    """B.6: the team's success, and whether the output parses.

    Inside a tree the episode's end is not known yet, so a branch's success is whether its own list solves the task.
    """
    local = well_formed.astype(jnp.float32)
    return Rewards((well_formed & solved).astype(jnp.float32), local, {"format": local}, well_formed)
