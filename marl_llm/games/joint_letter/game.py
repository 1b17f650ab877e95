"""The joint-letter game: the smallest test of joint credit, for MAGRPO.

Two agents act at once. Each sees its own digit only and writes two characters, a letter and a digit: `c7`. The team succeeds when
both wrote the same letter, on which they must agree without a word, and each repeated its own digit. One joint scalar pays both:
1 for success, 0.25 for each of the three parts (same letter, echo, echo) and 0.1 for each letter that is one.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games.protocol import SPLITS, GameRole, Prompt, Rewards, split_index
from marl_llm.text import train_pieces

PART, LETTER = 0.25, 0.1
BOUNDS = {"validation": (80, 90), "test": (90, 100), "train": (0, 80)}  # of the 100 digit pairs, shuffled once


class JointLetterState(NamedTuple):
    """Digits shown, and what each agent wrote: a letter and a digit index, -1 for neither."""

    digits: Int[Array, "2"]
    letters: Int[Array, "2"]
    echoes: Int[Array, "2"]
    spoken: Bool[Array, "2"]


@dataclasses.dataclass(frozen=True)
class JointLetter:
    """Options of the game. Raises `ValueError` on an impossible number of letters."""

    name: ClassVar[str] = "joint_letter"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {}

    letters: int = 8
    max_turns: ClassVar[int] = 1

    def __post_init__(self):
        if not 2 <= self.letters <= 26:
            raise ValueError(f"joint_letter.letters={self.letters} is not in [2, 26]")

    @functools.cached_property
    def roles(self) -> tuple[GameRole, ...]:
        """Two equal agents."""
        return (GameRole("first", 2, 2), GameRole("second", 2, 2))

    @functools.cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Both at once."""
        return (("first", "second"),)

    @functools.cached_property
    def tokenizer(self):
        """Letters, digits, the two names and a stop word that ends a response early."""
        return train_pieces(
            (";", "first", "second", *("=" + d for d in string.digits), *string.digits, *string.ascii_lowercase[: self.letters])
        )

    @functools.cached_property
    def stop_id(self) -> int:
        """Ends a response before its two characters; such a response is not well formed."""
        return int(self.tokenizer.ids_of([";"])[0])

    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Int[Array, "2"]:
        """A pair of digits of the split; the 100 pairs are dealt to the splits once and for all. `key` is consumed."""
        low, high = jnp.asarray([BOUNDS[name] for name in SPLITS])[split_index(split)]
        pairs = jnp.asarray(np.random.default_rng(100).permutation(100), jnp.int32)
        pair = pairs[jax.random.randint(key, (), low, high)]
        return jnp.stack([pair // 10, pair % 10])

    def valid(self, instance: Int[Array, "2"]) -> Bool[Array, ""]:
        """Every pair of digits can be played."""
        return jnp.all((instance >= 0) & (instance < 10))

    def task(self, instance) -> dict:
        """The two digits."""
        return {"digits": [int(d) for d in instance]}

    def picture(self, state: JointLetterState) -> None:
        """Nothing to draw."""
        return None

    def reset(self, instance: Int[Array, "2"]) -> JointLetterState:
        """Nobody has spoken."""
        nothing = jnp.full((2,), -1, jnp.int32)
        return JointLetterState(instance, nothing, nothing, jnp.zeros((2,), bool))

    def _index(self, role: str) -> int:
        return [r.name for r in self.roles].index(role)

    def observe(self, state: JointLetterState, role: str) -> Prompt:
        """The agent's name and its own digit."""
        digits = jnp.asarray(self.tokenizer.ids_of(["=" + d for d in string.digits]))
        name = jnp.asarray(self.tokenizer.ids_of([role]))
        ids = jnp.concatenate([name, digits[state.digits[self._index(role)]][None]]).astype(jnp.int32)
        return Prompt(ids, jnp.ones((2,), bool))

    def act(self, state: JointLetterState, role: str, tokens: Int[Array, "R"], where: Bool[Array, "R"]) -> JointLetterState:
        """Notes the letter and the digit. Anything else is noted as -1 and earns nothing."""
        size = self.tokenizer.vocab_size
        letter, digit = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        letter[self.tokenizer.ids_of(list(string.ascii_lowercase[: self.letters]))] = np.arange(self.letters)
        digit[self.tokenizer.ids_of(list(string.digits))] = np.arange(10)
        ids = jnp.where(where, tokens, self.tokenizer.pad_id)
        i = self._index(role)
        return JointLetterState(
            state.digits,
            state.letters.at[i].set(jnp.asarray(letter)[ids[0]]),
            state.echoes.at[i].set(jnp.asarray(digit)[ids[1]]),
            state.spoken.at[i].set(True),
        )

    def _parts(self, state: JointLetterState):
        echo = (state.echoes == state.digits) & state.spoken
        same = (state.letters[0] == state.letters[1]) & (state.letters[0] >= 0) & jnp.all(state.spoken)
        return echo, same

    def rewards(self, before: JointLetterState, after: JointLetterState, role: str) -> Rewards:
        """One joint scalar for both, all of it `team`."""
        echo, same = self._parts(after)
        well = (after.letters >= 0) & (after.echoes >= 0)
        parts = {
            "success": (same & jnp.all(echo)).astype(jnp.float32),
            "echo": PART * jnp.sum(echo),
            "same_letter": PART * same,
            "letter": LETTER * jnp.sum((after.letters >= 0) & after.spoken),
        }
        return Rewards(sum(parts.values()), jnp.float32(0), parts, well[self._index(role)])

    def done(self, state: JointLetterState) -> Bool[Array, ""]:
        """One turn, both have spoken."""
        return jnp.all(state.spoken)

    def outcome(self, state: JointLetterState) -> Float[Array, ""]:
        """1 when the letters agree and both digits are repeated."""
        echo, same = self._parts(state)
        return (same & jnp.all(echo)).astype(jnp.float32)

    def script(self, state: JointLetterState, role: str, key: jax.Array) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A random letter and a random digit: well formed and aimless. `key` is consumed."""
        letters = jnp.asarray(self.tokenizer.ids_of(list(string.ascii_lowercase[: self.letters])))
        digits = jnp.asarray(self.tokenizer.ids_of(list(string.digits)))
        letter_key, digit_key = jax.random.split(key)
        ids = jnp.stack([letters[jax.random.randint(letter_key, (), 0, self.letters)], digits[jax.random.randint(digit_key, (), 0, 10)]])
        return ids.astype(jnp.int32), jnp.ones((2,), bool)
