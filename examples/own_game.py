"""A game of your own as pure functions, compiled with the models: a keeper tells a digit, an opener must say the next one."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import marl_llm as ml
from marl_llm.games import GameRole, Prompt, Rewards, split_index
from marl_llm.text import train_pieces

WORDS = (*"0123456789", ";", "keeper", "opener")
TOKENIZER = train_pieces(WORDS)
IDS = np.asarray(TOKENIZER.ids_of(list(WORDS)), np.int32)  # a word's number -> its token id


class State(NamedTuple):
    """`told` and `tried` are -1 until somebody has spoken."""

    digit: jax.Array
    told: jax.Array
    tried: jax.Array


@dataclasses.dataclass(frozen=True)
class Lock:
    """Fields of the class are the game's options."""

    step: int = 1  # how far the lock's digit lies from the one that the keeper reads
    name: ClassVar[str] = "lock"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {"slip": 1.0}
    roles: ClassVar = (GameRole("keeper", 2, 1), GameRole("opener", 2, 1))
    stages: ClassVar = (("keeper",), ("opener",))
    max_turns: ClassVar[int] = 1
    tokenizer: ClassVar = TOKENIZER
    stop_id: ClassVar[int] = int(IDS[10])

    def instance(self, key, split):  # digits 0 to 7 train, 8 validates, 9 tests
        low, high = jnp.asarray([(8, 9), (9, 10), (0, 8)])[split_index(split)]
        return jax.random.randint(key, (), low, high)

    def valid(self, instance):
        return (instance >= 0) & (instance < 10)

    def reset(self, instance):
        return State(instance, jnp.int32(-1), jnp.int32(-1))

    def observe(self, state, role):
        seen = state.digit if role == "keeper" else jnp.maximum(state.told, 0)
        words = jnp.stack([jnp.int32(11 if role == "keeper" else 12), seen])
        return Prompt(jnp.asarray(IDS)[words], jnp.ones(2, bool))

    def act(self, state, role, tokens, where):
        same = (jnp.asarray(IDS[:10]) == tokens[0]) & where[0]
        said = jnp.where(same.any(), same.argmax(), -1).astype(jnp.int32)
        return state._replace(**{"told" if role == "keeper" else "tried": said})

    def rewards(self, before, after, role):
        local = 1.0 * (after.told == after.digit) if role == "keeper" else self.outcome(after)
        return Rewards(self.outcome(after), local, {}, (after.told if role == "keeper" else after.tried) >= 0)

    def done(self, state):
        return state.tried >= 0

    def outcome(self, state):
        return 1.0 * (state.tried == (state.digit + self.step) % 10)

    def task(self, instance):
        return {"digit": int(instance)}

    def picture(self, state):
        return None

    def script(self, state, role, key, *, slip: float = 0.3):
        right = state.digit if role == "keeper" else (state.told + self.step) % 10
        which, other = jax.random.split(key)
        said = jnp.where(jax.random.uniform(which) < slip, jax.random.randint(other, (), 0, 10), right)
        return jnp.asarray(IDS)[said][None], jnp.ones(1, bool)


def main(workdir: str = "runs/own_game", steps: int = 100, **options) -> None:
    """Its faults are found without a model by `marl check examples/own_game.py:Lock`."""
    options = {"sft": {"steps": 100}} | options
    print(ml.train(Lock(), "nano", {"name": "at_grpo", "rewards": "mixed"}, steps=steps, workdir=workdir, **options))


if __name__ == "__main__":
    main()
