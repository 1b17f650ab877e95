"""What Sudoku pays: Appendix B.3 as printed, a form that telescopes and cannot be gamed, and the outcome alone (B.6).

All three see the same `SudokuFacts` of one macro-action, in which the Tool's fills are simulated and the Planner's are made. B.3 calls the
Planner the Reasoner. Its legality and progress are read of the grid with all listed fills written into it, though the game itself makes
no illegal fill: the formula says no more.

Known holes of B.3, kept in `paper` because the paper prints them, and closed in `safe`:

- *Garbage.* Ten blanks filled with any digits pay .1 + .8 · 10/16 = .60, five careful ones .45.
- *Nothing.* An empty list satisfies "all edits satisfy the constraints": the Tool is paid 1.0 for it.
- *Again.* Fills that were refused are paid again the next turn.

*Solved* includes that every clue is kept, which the printed check of rows, columns and boxes does not: fills go into blanks only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marl_llm.games.kit.board_pay import LEGAL, MAIN, as_printed, telescoping
from marl_llm.games.protocol import Rewards

FORMS = ("safe", "paper", "outcome")


class SudokuFacts(NamedTuple):
    """One macro-action, measured."""

    well_formed: Bool[Array, ""]
    into_blanks: Bool[Array, ""]  # every listed fill goes into a blank of its own
    consistent: Bool[Array, ""]  # with all listed fills written, no digit stands twice in a row, column or box
    filled: Float[Array, ""]  # share of the 16 cells that are blank before and that the list fills, whatever with
    legal: Bool[Array, ""]  # no fill was refused
    solved: Bool[Array, ""]  # at its end
    previous_solved: Bool[Array, ""]  # at the end of this role's previous macro-action
    # (correct - wrong) / blanks of the puzzle, at the end of this role's previous macro-action or where this one starts, if that is more
    previous_worth: Float[Array, ""]
    worth: Float[Array, ""]  # at its end


def paper(facts: SudokuFacts, *, executes: bool) -> Rewards:
    """Stronger-MAS Appendix B.3. `executes`: the Reasoner's design (legality, progress), else the Tool's (execution, sanity)."""
    if executes:
        parts = {"legal": LEGAL * facts.consistent, "progress": MAIN * facts.filled}
    else:
        parts = {"execution": LEGAL * facts.into_blanks, "sanity": MAIN * facts.consistent}
    return as_printed(facts.well_formed, facts.solved.astype(jnp.float32), parts)


def safe(facts: SudokuFacts) -> Rewards:
    """Correct fills minus wrong ones, as a share of the puzzle's blanks, paid once: v_t − max(v_{t−1}, v of the grid before).

    v_t is the share at the end of the role's list of turn t. The maximum keeps the Tool from being paid for what the Planner did. The team
    term is the step of *solved*, in the same way. Filled cells are not emptied again, so a wrong fill is for good. Summed over an episode a
    role's positive terms are at most α + 0.8, which a puzzle that the role solves earns in full; the other terms are never positive.
    """
    gain = jnp.where(facts.well_formed, facts.worth - facts.previous_worth, 0.0)
    team = facts.solved.astype(jnp.float32) - facts.previous_solved.astype(jnp.float32)
    team = jnp.where(facts.well_formed, team, 0.0)
    return telescoping(facts.well_formed, facts.legal, team, {"progress": MAIN * gain})
