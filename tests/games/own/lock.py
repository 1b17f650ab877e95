"""A game as a user writes it, in a file of its own: the keeper reads a digit and says it to the opener, who must say the next one."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from digits import DIGITS

from marl_llm.games import SPLITS, GameRole, Prompt, Rewards, split_index
from marl_llm.text import train_pieces


class LockState(NamedTuple):
    """The digit, what was told and what was tried; -1: nothing yet."""

    digit: jax.Array
    told: jax.Array
    tried: jax.Array


@dataclasses.dataclass(frozen=True)
class Lock:
    """`step` is how far the lock's digit lies from the one that the keeper reads."""

    name: ClassVar[str] = "lock"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {"slip": 1.0}
    max_turns: ClassVar[int] = 1
    stages: ClassVar = (("keeper",), ("opener",))
    roles: ClassVar = (GameRole("keeper", 2, 1), GameRole("opener", 2, 1))

    step: int = 1

    def __post_init__(self):
        if not 0 <= self.step < 10:
            raise ValueError(f"lock.step={self.step} is not in [0, 9]")

    @functools.cached_property
    def tokenizer(self):
        return train_pieces((";", "keeper", "opener", *DIGITS))

    @functools.cached_property
    def stop_id(self) -> int:
        return int(self.tokenizer.ids_of([";"])[0])

    @functools.cached_property
    def _ids(self):
        return tuple(int(i) for i in self.tokenizer.ids_of(list(DIGITS)))

    def instance(self, key, split):
        low, high = jnp.asarray([{"train": (0, 8), "validation": (8, 9), "test": (9, 10)}[name] for name in SPLITS])[split_index(split)]
        return jax.random.randint(key, (), low, high)

    def valid(self, instance):
        return (instance >= 0) & (instance < 10)

    def reset(self, instance):
        return LockState(instance, jnp.int32(-1), jnp.int32(-1))

    def observe(self, state, role):
        seen = state.digit if role == "keeper" else jnp.maximum(state.told, 0)
        name = jnp.asarray(self.tokenizer.ids_of([role]), jnp.int32)
        return Prompt(jnp.concatenate([name, jnp.asarray(self._ids, jnp.int32)[seen][None]]), jnp.ones((2,), bool))

    def act(self, state, role, tokens, where):
        same = (jnp.asarray(self._ids) == tokens[0]) & where[0]
        said = jnp.where(jnp.any(same), jnp.argmax(same), -1).astype(jnp.int32)
        return state._replace(told=said) if role == "keeper" else state._replace(tried=said)

    def rewards(self, before, after, role):
        right = (after.told == after.digit) if role == "keeper" else self.outcome(after) == 1.0
        well = (after.told if role == "keeper" else after.tried) >= 0
        local = jnp.where(right, 1.0, 0.0)
        return Rewards(self.outcome(after), local, {"right": local}, well)

    def done(self, state):
        return state.tried >= 0

    def outcome(self, state):
        return jnp.where(state.tried == (state.digit + self.step) % 10, 1.0, 0.0)

    def task(self, instance):
        return {"digit": int(instance)}

    def picture(self, state):
        return None

    def script(self, state, role, key, *, slip: float = 0.3):
        which, other = jax.random.split(key)
        right = state.digit if role == "keeper" else (state.told + self.step) % 10
        said = jnp.where(jax.random.uniform(which) < slip, jax.random.randint(other, (), 0, 10), right)
        return jnp.asarray(self._ids, jnp.int32)[said][None], jnp.ones((1,), bool)
