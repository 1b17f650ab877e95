"""What Sokoban pays: Appendix B.5 as printed, a form that telescopes and cannot be gamed, and the outcome alone (B.6).

All three see the same `SokobanFacts` of one macro-action, in which the Tool's list is simulated and the Planner's is made. For lists, B.5's
scores of one action are read as: format and legality hold for the whole list, deadlocks and ψ for the state at its end. The team reward
is that of the state after the list, whether or not the list could be read (readings).

Known holes of B.5, kept in `paper` because the paper prints them, and closed in `safe`:

- *Vacuous truth.* Without a push there is no deadlock and ψ does not fall: walking about pays 1.0 each turn, an empty list .9.
- *Parking.* With two boxes, one of them on a goal pays the team .5 each turn, and finishing ends the payments.
- *The nearest goal.* Two boxes may count one goal in ψ.
- *On, off, on.* b/B is paid again for a box that was pushed off its goal and back.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marl_llm.games.kit.board_pay import LEGAL, MAIN, as_printed, telescoping
from marl_llm.games.protocol import Rewards

FORMS = ("safe", "paper", "outcome")


class SokobanFacts(NamedTuple):
    """One macro-action, measured. Worth is in [0, 1]: 1 of a solved room, 0 of one that cannot be solved any more."""

    well_formed: Bool[Array, ""]
    legal: Bool[Array, ""]  # parsed, not empty, and no move ran into a wall or pushed a box into something
    solved: Bool[Array, ""]
    on_goals: Float[Array, ""]  # b / B at its end
    deadlock: Bool[Array, ""]  # a box stands in a static corner, off the goals
    dead: Bool[Array, ""]  # the room cannot be solved from its end, by the exact solver
    before: Float[Array, ""]  # ψ where its moves start
    after: Float[Array, ""]  # ψ where its moves end
    previous_worth: Float[Array, ""]  # at the end of this role's previous macro-action, or where this one starts if that is more
    worth: Float[Array, ""]  # at its end
    initial_worth: Float[Array, ""]


def paper(facts: SokobanFacts, *, executes: bool) -> Rewards:
    """Stronger-MAS Appendix B.5. `executes`: the Planner's design (deadlocks), else the Tool's (ψ)."""
    team = jnp.where(facts.solved, 1.0, facts.on_goals)
    main = {"deadlock_free": MAIN * ~facts.deadlock} if executes else {"potential": MAIN * (facts.after >= facts.before)}
    return as_printed(facts.well_formed, team, {"legal": LEGAL * facts.legal, **main})


def safe(facts: SokobanFacts) -> Rewards:
    """Paid for what the room gained in worth, once: (w_t − max(w_{t−1}, w of the place before)) / (1 − w_0).

    w_t is the worth at the end of the role's list of turn t. The maximum keeps the Tool from being paid for what the Planner did. Signed,
    so undoing costs what doing paid. Summed over an episode this is at most (w_T − w_0) / (1 − w_0) ≤ 1 whatever is played, for the Planner
    exactly that; the other terms are never positive. `deadlock` is the part of it that is lost with the room.
    """
    gain = jnp.where(facts.well_formed, facts.worth - facts.previous_worth, 0.0) / (1.0 - facts.initial_worth)
    lost = facts.dead & (gain < 0)
    parts = {"progress": MAIN * jnp.where(lost, 0.0, gain), "deadlock": MAIN * jnp.where(lost, gain, 0.0)}
    return telescoping(facts.well_formed, facts.legal, gain, parts)
