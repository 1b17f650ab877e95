"""A matrix game: two agents say one word each at once, and the pair of words names a cell (MAGRPO, Appendix A, Tables 4 and 5).

`team` is the cell's joint utility for both agents, `local` each agent's own part of it. A recipe with `rewards=team` so plays the
cooperative game, one with `rewards=local` the game of two agents that maximise their own pay. Both are computed, none is estimated.

There is one task, the same in every split: nothing is held out, for there is nothing to generalise to.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.protocol import GameRole, Prompt, Rewards, split_index
from marl_llm.text import PieceTokenizer, train_pieces

JOINT = "10 7; 7 0"  # Table 4
POSG_1 = ("5 3; 4 0", "5 4; 3 0")  # Table 5 (a): its equilibrium is the joint optimum
POSG_2 = ("5 1; 6 0", "5 6; 1 0")  # Table 5 (b): its equilibria are not
LARGEST = 9  # actions
TOLERANCE = 1e-9  # of the sum of the parts, relative to the largest entry


def read_matrix(text: str, name: str) -> Float[np.ndarray, "A A"]:
    """A square matrix from rows with `;` between. Raises `ValueError` naming `name` and the cell or row."""
    rows = [row.split() for row in text.split(";")]
    for i, row in enumerate(rows, 1):
        if len(row) != len(rows):
            raise ValueError(f"{name}: row {i} has {len(row)} entries, but there are {len(rows)} rows; the matrix must be square")
    matrix = np.empty((len(rows), len(rows)))
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            try:
                matrix[i, j] = float(entry)
            except ValueError as error:
                raise ValueError(f"{name}: cell ({i + 1}, {j + 1}) is {entry!r}, which is no number") from error
            if not np.isfinite(matrix[i, j]):
                raise ValueError(f"{name}: cell ({i + 1}, {j + 1}) is {entry}; a finite number is needed")
    if not 2 <= len(rows) <= LARGEST:
        raise ValueError(f"{name}: {len(rows)} actions are not in [2, {LARGEST}]")
    return matrix


class MatrixState(NamedTuple):
    """What each agent chose, -1 for a word that is no action, and whether it has spoken."""

    actions: Int[Array, "2"]
    spoken: Bool[Array, "2"]


@dataclasses.dataclass(frozen=True)
class MatrixGame:
    """Options of the game.

    Attributes:
      utility: joint utility of each cell, rows (agent 1) with `;` between.
      first, second: the parts of agent 1 and agent 2, which sum to the utility.

    A word that is no action earns what the worst cell pays. Raises `ValueError` naming the matrix and the cell.
    """

    name: ClassVar[str] = "matrix"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {}
    roles: ClassVar = (GameRole("first", 1, 1), GameRole("second", 1, 1))
    stages: ClassVar = (("first", "second"),)
    max_turns: ClassVar[int] = 1

    utility: str = JOINT
    first: str = POSG_1[0]
    second: str = POSG_1[1]

    def __post_init__(self):
        joint, *parts = (read_matrix(getattr(self, name), f"matrix.{name}") for name in ("utility", "first", "second"))
        for name, part in zip(("first", "second"), parts):
            if part.shape != joint.shape:
                raise ValueError(f"matrix.{name} has {len(part)} actions and matrix.utility {len(joint)}")
        off = np.abs(sum(parts) - joint) > TOLERANCE * max(1.0, np.abs(joint).max())
        if off.any():
            i, j = np.argwhere(off)[0]
            paid = f"{parts[0][i, j]:g} + {parts[1][i, j]:g}"
            raise ValueError(f"matrix: in cell ({i + 1}, {j + 1}) the parts {paid} do not sum to the utility {joint[i, j]:g}")
        if all(table.max() == table.min() for table in (joint, *parts)):
            raise ValueError(f"matrix.utility={self.utility!r}: all cells are equal, so that there is nothing to learn")

    @functools.cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(utility, part of the first, part of the second), each `[A, A]`, float64."""
        return tuple(read_matrix(getattr(self, name), f"matrix.{name}") for name in ("utility", "first", "second"))

    @functools.cached_property
    def tokenizer(self) -> PieceTokenizer:
        """The actions, the agents' names, and a stop word, which is no action."""
        return train_pieces((";", "first", "second", *map(str, range(1, len(self.tables[0]) + 1))))

    @functools.cached_property
    def stop_id(self) -> int:
        """No action; a response is one token anyway."""
        return int(self.tokenizer.ids_of([";"])[0])

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        return np.asarray(self.tokenizer.ids_of(list(map(str, range(1, len(self.tables[0]) + 1)))), np.int32)

    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Int[Array, ""]:
        """The one task. `key` is not used."""
        split_index(split)
        return jnp.zeros((), jnp.int32)

    def valid(self, instance: Int[Array, ""]) -> Bool[Array, ""]:
        """It can always be played."""
        return instance == 0

    def task(self, instance) -> dict:
        """The three matrices."""
        return dict(zip(("utility", "first", "second"), (table.tolist() for table in self.tables)))

    def picture(self, state: MatrixState) -> None:
        """Nothing to draw."""
        return None

    def reset(self, instance: Int[Array, ""]) -> MatrixState:
        """Nobody has spoken."""
        return MatrixState(jnp.full((2,), -1, jnp.int32), jnp.zeros((2,), bool))

    def observe(self, state: MatrixState, role: str) -> Prompt:
        """The agent's own name."""
        return Prompt(jnp.asarray(self.tokenizer.ids_of([role]), jnp.int32), jnp.ones((1,), bool))

    def act(self, state: MatrixState, role: str, tokens: Int[Array, "R"], where: Bool[Array, "R"]) -> MatrixState:
        """Notes the action; -1 for any other word."""
        meaning = np.full(self.tokenizer.vocab_size, -1, np.int32)
        meaning[self._ids] = np.arange(len(self._ids))
        i = ("first", "second").index(role)
        action = jnp.where(where[0], jnp.asarray(meaning)[tokens[0]], -1)
        return MatrixState(state.actions.at[i].set(action), state.spoken.at[i].set(True))

    def _paid(self, state: MatrixState, table: np.ndarray) -> Float[Array, ""]:
        i, j = jnp.maximum(state.actions, 0)
        legal = jnp.all(state.actions >= 0)
        return jnp.where(legal, jnp.asarray(table, jnp.float32)[i, j], jnp.float32(table.min()))

    def rewards(self, before: MatrixState, after: MatrixState, role: str) -> Rewards:
        """Team: the cell's utility. Local: the role's part of it."""
        joint, *parts = self.tables
        i = ("first", "second").index(role)
        team, local = self._paid(after, joint), self._paid(after, parts[i])
        return Rewards(team, local, {"utility": team, "own": local}, after.actions[i] >= 0)

    def done(self, state: MatrixState) -> Bool[Array, ""]:
        """Both have spoken."""
        return jnp.all(state.spoken)

    def outcome(self, state: MatrixState) -> Float[Array, ""]:
        """The utility on the scale from the worst cell (0) to the best (1); 0 where all cells have one utility, as in a zero-sum game."""
        joint = self.tables[0]
        scaled = (self._paid(state, joint) - joint.min()) / max(joint.max() - joint.min(), TOLERANCE)
        return jnp.where(self.done(state), scaled, 0.0).astype(jnp.float32)

    def result(self, state: MatrixState, role: str) -> Float[Array, ""]:
        """The role's part less the other's. Who said no action loses to who did."""
        i = ("first", "second").index(role)
        own, other = (self._paid(state, self.tables[1 + j]) for j in (i, 1 - i))
        legal = (state.actions >= 0).astype(jnp.float32)
        return jnp.where(jnp.all(state.actions >= 0), own - other, legal[i] - legal[1 - i])

    def script(self, state: MatrixState, role: str, key: jax.Array) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A uniformly random action. `key` is consumed."""
        return jnp.asarray(self._ids)[jax.random.randint(key, (1,), 0, len(self._ids))], jnp.ones((1,), bool)
