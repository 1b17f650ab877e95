"""What Plan-Path pays: Appendix B.4 as printed, a telescoping form that cannot be gamed, and the outcome alone (B.6).

All three see the same facts of one macro-action (`PlanPathFacts`). With several moves in a list, B.4's per-action scores are read as
follows: format and legality hold for the whole list, SPNext is the share of listed moves that lie on a shortest path, and the
Tool is scored on the simulation of its proposal, the Planner on the moves made.

Known hole of B.4, kept in `paper` because the paper prints it: the Tool's shaping term is `phi_t >= phi_{t-1}`, so a safe move
without progress earns its full local reward, every turn; and since an arrival ends the payments, loitering beats a short optimal
plan over an episode. `strict=True` turns `>=` into `>`. `progress` removes the hole altogether: its positive terms telescope to
at most `alpha + 0.8` over an episode, which an optimal plan earns in full, and its other terms are never positive.

Known hole of `progress`: a Tool's proposal is compared with its own former one, not with where the Planner has gone since. A Tool that
proposed little, or was unparsable, is paid in its next readable list for the cells that the Planner came closer in between, even for an
empty list. The sum is bounded as said, but a part of it is luck. `safe` compares with whichever is nearer to the goal, the former proposal
or the place where the Tool answers, as the text environment's `safe` does (`games.programs`). For the Planner both are the same place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marl_llm.games.kit.board_pay import FORMAT, LEGAL, MAIN, as_printed, telescoping
from marl_llm.games.protocol import Rewards

FORMS = ("progress", "paper", "outcome", "safe")


class PlanPathFacts(NamedTuple):
    """One macro-action, measured. Distances are in moves, by breadth-first search or Manhattan as the game says."""

    well_formed: Bool[Array, ""]
    legal: Bool[Array, ""]  # parsed, not empty, and no move ran into a wall or the border
    at_goal: Bool[Array, ""]  # where its moves end (the Tool's: in simulation)
    before: Float[Array, ""]  # distance where its moves start
    after: Float[Array, ""]  # distance where its moves end
    previous_claim: Float[Array, ""]  # distance at the end of this role's previous macro-action; the first time, d_0
    initial: Float[Array, ""]  # d_0, at least 1
    on_path: Float[Array, ""]  # share of listed moves that lie on a shortest path; 0 for an empty list


def paper(facts: PlanPathFacts, *, executes: bool, strict: bool) -> Rewards:
    """Stronger-MAS Appendix B.4. `executes`: the Planner's design (legality, SPNext), else the Tool's (execution, shaping)."""
    gain = facts.before - facts.after
    team = jnp.where(facts.at_goal, 1.0, jnp.maximum(0.0, gain / facts.initial))
    team = jnp.where(facts.well_formed, team, 0.0)
    if executes:
        main = {"shortest_path": MAIN * facts.on_path}
    else:
        improved = gain > 0 if strict else gain >= 0
        main = {"shape": MAIN * improved}
    return as_printed(facts.well_formed, team, {"legal": LEGAL * facts.legal, **main})


def progress(facts: PlanPathFacts) -> Rewards:
    """Paid by the cell, once: `(e_{t-1} - e_t) / d_0` with `e` the distance at the end of the role's latest macro-action.

    Signed, so going back costs what coming closer paid. Unparsable and illegal lists lose 0.1 each. A role's positive terms sum
    to `(d_0 - e_T) / d_0 <= 1` over an episode whatever it does, and to exactly 1 when its last list ends at the goal.
    """
    gain = jnp.where(facts.well_formed, facts.previous_claim - facts.after, 0.0) / facts.initial
    return telescoping(facts.well_formed, facts.legal, gain, {"progress": MAIN * gain}, unread=FORMAT)


def safe(facts: PlanPathFacts) -> Rewards:
    """`progress` measured from min(e_{t-1}, distance where the role answers): a Tool is not paid for what the Planner did after it.

    Its gains add up to at most those of `progress`, so the bound of 1 holds.
    """
    return progress(facts._replace(previous_claim=jnp.minimum(facts.previous_claim, facts.before)))
