"""Sudoku 4x4 (Stronger-MAS, Appendix B.3): a Tool proposes fills, a Planner makes them; or a single agent does both jobs.

A board game, see `kit.board`. A fill is legal if it goes into a blank and its digit stands nowhere else in the row, column and box,
fills before it in the list included. A list with an illegal fill changes nothing (`illegal="drop"`) or ends there (`"stop"`). Clues and
filled cells cannot be changed, so a grid is never worse than before but by legal fills that are wrong.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.kit import lists
from marl_llm.games.kit.board import BoardGame, check_options, repeat_now_and_then
from marl_llm.games.kit.board_pay import by_outcome
from marl_llm.games.protocol import Prompt, Rewards
from marl_llm.games.sudoku import language as words
from marl_llm.games.sudoku import prose
from marl_llm.games.sudoku import rewards as pay
from marl_llm.games.sudoku.puzzles import CELLS, FEWEST_CLUES, LINE_PEERS, PEERS, SIDE, Puzzle, random_puzzle, rows_of, seen, solutions


class SudokuAction(NamedTuple):
    """The latest macro-action of the turn: what `rewards` needs."""

    fills: Int[Array, "M"]  # 4 · cell + digit − 1, -1 past the end
    well_formed: Bool[Array, ""]
    legal: Bool[Array, ""]
    grid: Int[Array, "16"]  # after its fills (the Tool's: in simulation)
    status: Int[Array, ""]


class SudokuState(NamedTuple):
    """One state, a value. `claims` holds, per role, the grid that its latest macro-action ended with."""

    puzzle: Puzzle
    grid: Int[Array, "16"]  # 0 where blank
    turn: Int[Array, ""]
    status: Int[Array, ""]  # of the last list that was made
    proposal: SudokuAction
    acted: SudokuAction
    claims: Int[Array, "N 16"]


@dataclasses.dataclass(frozen=True)
class Sudoku(BoardGame):
    """The game's options. All are static; two games with equal options are equal.

    Raises `ValueError` with the field's name on an impossible value.
    """

    name: ClassVar[str] = "sudoku"
    prose: ClassVar[ModuleType] = prose
    random_player: ClassVar[dict[str, float]] = {"noise": 1.0, "noisy": 1.0, "repeat": 0.0}

    max_fills: int = 6  # M, per list
    max_turns: int = 4  # T
    agents: str = "team"  # 'team' (tool, planner) or 'single' (solo)
    view: str = "peers"  # 'peers', 'split' (the Planner and the single agent see rows and columns, not boxes) or 'raw'
    illegal: str = "drop"  # a list with an illegal fill changes nothing ('drop') or ends there ('stop')
    rewards_form: str = "safe"  # 'safe', 'paper' (B.3) or 'outcome' (B.6)

    def __post_init__(self):
        words = dict(agents=("team", "single"), view=("peers", "split", "raw"), illegal=("drop", "stop"), rewards_form=pay.FORMS)
        check_options(self, words, dict(max_fills=(1, CELLS), max_turns=(1, 32)))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """As `BoardGame`."""
        facts = 2 + (CELLS if self.view == "raw" else CELLS - FEWEST_CLUES)  # turn, status; cells
        return self.max_fills, facts, facts

    @functools.cached_property
    def language(self) -> words.SudokuLanguage:
        """All roles' words, the same vocabulary for team and single agent."""
        return words.SudokuLanguage(self.max_turns, self.view)

    def shows_boxes(self, role: str) -> bool:
        """Whether the role sees the digits of a blank's box."""
        return self.view != "split" or role == "tool"

    def peers_of(self, role: str) -> np.ndarray:
        """The cells whose digits the role sees of a blank, `[16, 16]`."""
        return PEERS if self.shows_boxes(role) else LINE_PEERS

    # --- instances and states --------------------------------------------------------------------------------------------

    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Puzzle:
        """A random minimal puzzle whose solved grid is of the split. `key` is consumed."""
        return random_puzzle(key, split)

    def valid(self, instance: Puzzle) -> Bool[Array, ""]:
        """The puzzle has blanks and exactly one solution."""
        return jnp.any(instance.clues == 0) & (jnp.sum(solutions(instance.clues)) == 1)

    def task(self, instance: Puzzle) -> dict:
        """The puzzle and its solution as text rows."""
        return {"puzzle": rows_of(instance.clues), "solution": rows_of(instance.solution)}

    def picture(self, state: SudokuState) -> list[str]:
        """The grid as it stands."""
        return rows_of(state.grid)

    def reset(self, instance: Puzzle) -> SudokuState:
        """Nothing has been said."""
        none, true = jnp.full((self.max_fills,), -1, jnp.int32), jnp.bool_(True)
        nothing = SudokuAction(none, true, true, instance.clues, jnp.int32(lists.NONE))
        claims = jnp.tile(instance.clues, (len(self.roles), 1))
        return SudokuState(instance, instance.clues, jnp.int32(0), jnp.int32(lists.NONE), nothing, nothing, claims)

    def done(self, state: SudokuState) -> Bool[Array, ""]:
        """The grid is the solution."""
        return jnp.all(state.grid == state.puzzle.solution)

    # --- prompts ---------------------------------------------------------------------------------------------------------

    def observe(self, state: SudokuState, role: str) -> Prompt:
        """The role's prompt; the language is described in `language.py`."""
        lang, pad = self.language, self.tokenizer.pad_id
        cells = jnp.arange(CELLS)
        if self.view == "raw":
            facts = jnp.asarray(lang.facts)[cells, state.grid]
        else:
            named = jnp.where(state.grid == 0, jnp.asarray(lang.facts)[cells, seen(state.grid, self.peers_of(role))], pad)
            facts = named[jnp.argsort(state.grid != 0, stable=True)[: CELLS - FEWEST_CLUES]]  # blanks first, and some padding
        parts = [*self.turn_and_status(state), facts]
        if role == "planner":
            parts += self.proposed(state.proposal.fills, lang.fills, state.proposal.status)
        return lists.left_padded([*parts, lang.ids(role)], pad)

    def read(self, state: SudokuState, role: str, text: str) -> tuple[int, ...]:
        """The response in the protocol's ids that says what a text says, by the grammar of `prose.py`."""
        fills = prose.fills_in(text, state.grid)
        if fills is None or len(fills) > self.max_fills:
            return lists.unreadable(self.max_fills, self.tokenizer.pad_id)
        return (*(int(self.language.fills[cell * SIDE + digit - 1]) for cell, digit in fills), self.stop_id)

    # --- actions ---------------------------------------------------------------------------------------------------------

    def simulate(self, state: SudokuState, fills: Int[Array, "M"], well_formed: Bool[Array, ""]) -> SudokuAction:
        """Makes the fills in order, as far as `illegal` lets them."""
        peers = jnp.asarray(PEERS)

        def make(carry, fill):
            grid, stopped = carry
            active = (fill >= 0) & ~stopped
            cell, digit = jnp.maximum(fill, 0) // SIDE, fill % SIDE + 1
            legal = (grid[cell] == 0) & ~jnp.any(peers[cell] & (grid == digit))
            return (jnp.where(active & legal, grid.at[cell].set(digit), grid), stopped | (active & ~legal)), None

        (grid, stopped), _ = jax.lax.scan(make, (state.grid, jnp.bool_(False)), fills)
        if self.illegal == "drop":
            grid = jnp.where(stopped, state.grid, grid)
        solved = jnp.all(grid == state.puzzle.solution)
        return SudokuAction(fills, well_formed, well_formed & ~stopped, grid, self.status_of(solved, stopped, well_formed))

    def claim(self, state: SudokuState, acted: SudokuAction) -> Int[Array, "16"]:
        """The grid at the end of a list."""
        return acted.grid

    def carried_out(self, state: SudokuState, acted: SudokuAction) -> SudokuState:
        """The fills are made."""
        return state._replace(grid=acted.grid)

    def rewards(self, before: SudokuState, after: SudokuState, role: str) -> Rewards:
        """What the role's macro-action earned, by `rewards_form`."""
        acted, puzzle = after.acted, before.puzzle
        listed, cells = acted.fills >= 0, jnp.maximum(acted.fills, 0) // SIDE
        counts = jnp.zeros((CELLS,), jnp.int32).at[cells].add(listed)
        written = before.grid.at[jnp.where(listed, cells, CELLS)].set(acted.fills % SIDE + 1, mode="drop")  # all listed fills, legal or not
        twice = (written[:, None] == written[None]) & (written[:, None] > 0) & jnp.asarray(PEERS)
        claim = before.claims[self.index(role)]
        facts = pay.SudokuFacts(
            well_formed=acted.well_formed,
            into_blanks=jnp.all((counts == 0) | ((counts == 1) & (before.grid == 0))),
            consistent=~jnp.any(twice),
            filled=jnp.mean((counts > 0) & (before.grid == 0), dtype=jnp.float32),
            legal=acted.legal,
            solved=jnp.all(acted.grid == puzzle.solution),
            previous_solved=jnp.all(claim == puzzle.solution),
            previous_worth=jnp.maximum(_worth(puzzle, claim), _worth(puzzle, before.grid)),
            worth=_worth(puzzle, acted.grid),
        )
        if self.rewards_form == "paper":
            return pay.paper(facts, executes=role != "tool")
        return pay.safe(facts) if self.rewards_form == "safe" else by_outcome(facts.well_formed, facts.solved)

    # --- the scripted player ---------------------------------------------------------------------------------------------

    def script(
        self, state: SudokuState, role: str, key: jax.Array, *,
        noise: float | Float[Array, ""] = 0.4, noisy: float | Float[Array, ""] = 0.25,
        chain: float | Float[Array, ""] = 0.5, repeat: float | Float[Array, ""] = 0.3,
    ) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A noisy player of naked singles: the supervised warm-up's teacher. `key` is consumed.

        Its list fills, in the order of the cells, the blanks for which one digit is left in row, column and box. With probability `chain`
        it goes on with blanks that its own fills made such. With probability `noisy` the list is one in which each fill is a random legal
        one with probability `noise`. The Planner repeats the proposal with probability `repeat`. Without a single it fills nothing.
        """
        chains, kinds, fill_key, copies = jax.random.split(key, 4)
        goes_on, errs, peers = jax.random.uniform(chains) < chain, jax.random.uniform(kinds) < noisy, jnp.asarray(PEERS)
        at_first = _left(state.grid, peers)

        def choose(grid, step_key):
            noise_key, random_key = jax.random.split(step_key)
            left = _left(grid, peers)
            known = jnp.where(goes_on, left, at_first & (grid == 0)[:, None])
            single = jnp.sum(known, axis=-1) == 1
            sure = jnp.argmax(single) * SIDE + jnp.argmax(known[jnp.argmax(single)])
            dice = jnp.where(left.reshape(-1), jax.random.uniform(random_key, (CELLS * SIDE,)), -1.0)
            wanders = errs & (jax.random.uniform(noise_key) < noise)
            has_fill = jnp.where(wanders, jnp.any(left), jnp.any(single))
            fill = jnp.where(wanders, jnp.argmax(dice), sure)
            return jnp.where(has_fill, grid.at[fill // SIDE].set(fill % SIDE + 1), grid), jnp.where(has_fill, fill, -1)

        _, fills = jax.lax.scan(choose, state.grid, jax.random.split(fill_key, self.max_fills))
        fills = fills[jnp.argsort(fills < 0, stable=True)]  # a step without a fill leaves no gap
        if role == "planner":
            fills = repeat_now_and_then(fills, state.proposal.fills, copies, repeat)
        return lists.write_list(fills.astype(jnp.int32), self.language.fills, self.stop_id, self.tokenizer.pad_id)


def _worth(puzzle: Puzzle, grid: Int[Array, "16"]) -> Float[Array, ""]:
    """(correct − wrong) / blanks of the puzzle, in [-1, 1]."""
    blank = puzzle.clues == 0
    right = jnp.where(grid == puzzle.solution, 1, -1) * (blank & (grid > 0))
    return (jnp.sum(right) / jnp.maximum(jnp.sum(blank), 1)).astype(jnp.float32)


def _left(grid: Int[Array, "16"], peers: Bool[Array, "16 16"]) -> Bool[Array, "16 4"]:
    """The digits that are left for each blank in its row, column and box; none for a filled cell."""
    digits = jnp.arange(1, SIDE + 1)
    taken = jnp.any(peers[:, :, None] & (grid[None, :, None] == digits), axis=1)
    return ~taken & (grid == 0)[:, None]
