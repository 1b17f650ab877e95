"""What every task offers: a game as a value.

A game describes roles, who speaks when, and five functions of state. It knows nothing of models, devices or algorithms.
States are values: `act` returns a new one and a branch is simply another state (law 4).

    reset(instance) -> state
    observe(state, role) -> prompt          what the role reads now
    act(state, role, response) -> state     parse the response; the role's micro-transition
    rewards(before, after, role) -> Rewards what the role earned between two states
    done(state) -> bool

**Stages.** A turn is a tuple of stages, each a tuple of role names. The roles of one stage observe the same state (they act at
once); their micro-transitions are then applied in the order written, and `rewards` compares the state before the stage with the
state after it. A stage of one role is a sequential step: the next stage observes what it did. Turns repeat until `done` or
`max_turns`, so a coder-tester loop with early stop is `stages=(("coder", "tester"),)`, a pipeline is
`(("planner",), ("coder",), ("verifier",))`, and a search team's parallel queries are one stage.

**Budgets.** Each role has its own prompt and response budget in tokens.

**Two kinds.** A *device* game's functions are `jnp` and are vmapped and compiled into the rollout; prompts are ids in fixed
buffers. A *host* game implements the same methods on Python values, prompts being lists of ids of any length up to the budget;
`act` may then call tools. `device` says which.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int

from marl_llm.text import Tokenizer

State = Any  # a pytree of arrays (device games) or an immutable Python value (host games)
Instance = Any


SPLITS = ("validation", "test", "train")


def split_index(split: str | Int[Array, ""]) -> int | Int[Array, ""]:
    """Number of a split in `SPLITS`; a number (which may be traced) is passed through. Raises `ValueError` listing the splits."""
    if not isinstance(split, str):
        return split
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; the splits are {', '.join(SPLITS)}")
    return SPLITS.index(split)


@dataclasses.dataclass(frozen=True)
class GameRole:
    """A logical player and its token budgets."""

    name: str
    prompt_tokens: int  # P: the longest prompt
    response_tokens: int  # R: the longest response, its stop token included


class Prompt(NamedTuple):
    """A prompt in a fixed buffer, padded on the left: the last token is always real."""

    ids: Int[Array, "*batch P"]
    where: Bool[Array, "*batch P"]


class Rewards(NamedTuple):
    """What one role earned by one macro-action.

    `team` and `local` are the terms of AT-GRPO Eq. 3; `components` are the named parts of `local` and `team`, each as paid, for
    the metrics. `well_formed` tells whether the response parsed.
    """

    team: Float[Array, "*batch"]
    local: Float[Array, "*batch"]
    components: dict[str, Float[Array, "*batch"]]
    well_formed: Bool[Array, "*batch"]


@runtime_checkable
class Game(Protocol):
    """See the module's text. `stop_id` ends a response; `outcome` is the team's final result in [0, 1], 1 being success."""

    name: ClassVar[str]
    device: ClassVar[bool]
    roles: tuple[GameRole, ...]
    stages: tuple[tuple[str, ...], ...]
    max_turns: int
    tokenizer: Tokenizer
    stop_id: int
    random_player: ClassVar[dict[str, float]]  # options that make `script` a uniformly random, well-formed player

    def instance(self, key: jax.Array, split: str | Int[Array, ""]) -> Instance:
        """One task instance of a split, by name or number (`split_index`); the splits are disjoint by construction."""

    def valid(self, instance: Instance) -> Bool[Array, ""]:
        """Whether the instance can be played; the episode of one that cannot is aborted as a whole (law 9)."""

    def reset(self, instance: Instance) -> State:
        """The initial state."""

    def observe(self, state: State, role: str) -> Prompt:
        """The prompt that `role` reads in `state`."""

    def act(self, state: State, role: str, tokens: Int[Array, "R"], where: Bool[Array, "R"]) -> State:
        """The state after `role` said `tokens`. Anything may be said: what does not parse has a documented outcome."""

    def rewards(self, before: State, after: State, role: str) -> Rewards:
        """What `role` earned between the state before its stage and the state after it."""

    def done(self, state: State) -> Bool[Array, ""]:
        """True when the episode is over before the horizon."""

    def outcome(self, state: State) -> Float[Array, ""]:
        """1.0 for success, otherwise less."""

    def task(self, instance: Instance) -> dict[str, Any]:
        """The instance as JSON, for transcripts (host values)."""

    def picture(self, state: State) -> list[str] | None:
        """The state as a list of lines, for transcripts (host values); None when there is nothing to draw."""

    def script(self, state: State, role: str, key: jax.Array) -> tuple[Int[Array, "R"], Bool[Array, "R"]]:
        """A scripted noisy player's response, for the supervised warm-up and, with `random_player`, a random one."""


@runtime_checkable
class Competitive(Protocol):
    """What a game has beside `Game` where its seats win and lose; without it all seats share the `outcome`."""

    def result(self, state: State, role: str) -> Float[Array, ""]:
        """Of the last state, for a seat: above 0 it won, 0 is a draw, below 0 it lost."""


def role_of(game: Game, name: str) -> GameRole:
    """The role of that name. Raises `KeyError` listing the game's roles."""
    for role in game.roles:
        if role.name == name:
            return role
    raise KeyError(f"{game.name} has no role {name!r}; its roles are {', '.join(r.name for r in game.roles)}")


def speaking_order(game: Game) -> tuple[str, ...]:
    """Names of the roles in the order in which they speak within a turn: the stages, one after the other.

    Raises `ValueError` naming a role that is not there, or that does not speak exactly once in every turn.
    """
    names, order = [role.name for role in game.roles], [name for stage in game.stages for name in stage]
    for name in dict.fromkeys([*order, *names]):
        if name not in names:
            raise ValueError(f"{game.name}: a stage names {name!r}, which is no role; the roles are {', '.join(names)}")
        if order.count(name) != 1 or names.count(name) != 1:
            raise ValueError(f"{game.name}: the role {name!r} stands in {order.count(name)} stages of a turn; it must be in exactly one")
    return tuple(order)
