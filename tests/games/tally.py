"""A device game of one's own, as a user would write it: two count at once, a third may add; done at the instance's number."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from marl_llm.games import GameRole, Prompt, Rewards, split_index
from marl_llm.text import train_pieces

DIGITS = 5


class Count(NamedTuple):
    """`said`: the latest digit of each role, -1 where it said none."""

    total: jax.Array
    goal: jax.Array
    said: jax.Array
    dice: jax.Array  # a typed key: states may hold one


@dataclasses.dataclass(frozen=True)
class Tally:
    """Reach the goal exactly. A goal of 0 is reached at once; a negative one cannot be played."""

    name: ClassVar[str] = "tally"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {}
    roles = (GameRole("cy", 5, 2), GameRole("bob", 5, 3), GameRole("ann", 5, 1))  # on purpose not in the order of speaking
    stages = (("ann", "bob"), ("cy",))
    max_turns = 3

    @functools.cached_property
    def tokenizer(self):
        return train_pieces((";", "cy", "bob", "ann", *map(str, range(DIGITS)), *(f"={n}" for n in range(40))))

    @functools.cached_property
    def stop_id(self):
        return int(self.tokenizer.ids_of([";"])[0])

    @functools.cached_property
    def values(self):
        """Per id, the digit that it is, or -1."""
        values = np.full(self.tokenizer.vocab_size, -1, np.int32)
        values[self.tokenizer.ids_of(list(map(str, range(DIGITS))))] = np.arange(DIGITS)
        return values

    def instance(self, key, split):
        return {"goal": jax.random.randint(jax.random.fold_in(key, split_index(split)), (), -2, 9), "key": jax.random.key_data(key)}

    def valid(self, instance):
        return instance["goal"] >= 0

    def reset(self, instance):
        return Count(jnp.int32(0), instance["goal"], jnp.full(3, -1), jax.random.wrap_key_data(instance["key"]))

    def _index(self, role):
        return [r.name for r in self.roles].index(role)

    def observe(self, state, role):
        """Total, goal, what cy and bob said last; words that nobody has said are padding."""
        count = jnp.asarray(self.tokenizer.ids_of([f"={n}" for n in range(40)]))
        digit = jnp.asarray(self.tokenizer.ids_of(list(map(str, range(DIGITS)))))
        heard = jnp.where(state.said[:2] >= 0, digit[state.said[:2]], self.tokenizer.pad_id)
        name = jnp.asarray(self.tokenizer.ids_of([role]))
        ids = jnp.concatenate([heard, count[state.total][None], count[jnp.maximum(state.goal, 0)][None], name]).astype(jnp.int32)
        real = ids != self.tokenizer.pad_id
        order = jnp.argsort(real, stable=True)
        return Prompt(ids[order], real[order])

    def act(self, state, role, tokens, where):
        """The first token counts, if it is a digit; luck may add one."""
        digit = jnp.where(where[0], jnp.asarray(self.values)[tokens[0]], -1)
        dice, luck = jax.random.split(state.dice)
        total = state.total + jnp.maximum(digit, 0) + ((digit > 0) & (jax.random.uniform(luck) < 0.25))
        return Count(jnp.minimum(total, 39), state.goal, state.said.at[self._index(role)].set(digit), dice)

    def rewards(self, before, after, role):
        gain = (after.total - before.total).astype(jnp.float32)
        digit = after.said[self._index(role)]
        parts = {"gain": gain / 3, "digit": 0.1 * digit.astype(jnp.float32)}
        return Rewards(parts["gain"], parts["digit"], parts, digit >= 0)

    def done(self, state):
        return state.total >= state.goal

    def outcome(self, state):
        return jnp.where(state.total == state.goal, 1.0, 0.5)

    def task(self, instance):
        return {"goal": int(instance["goal"])}

    def picture(self, state):
        return None

    def script(self, state, role, key):
        size = next(r.response_tokens for r in self.roles if r.name == role)
        digit = jnp.asarray(self.tokenizer.ids_of(list(map(str, range(DIGITS)))))[jax.random.randint(key, (), 0, DIGITS)]
        ids = jnp.full(size, self.stop_id).at[0].set(digit)
        return ids.astype(jnp.int32), jnp.arange(size) < 2
