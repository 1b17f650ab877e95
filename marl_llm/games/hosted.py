"""Plays a value-state game on the host: its states become a field of a workflow, and its functions the prompts, parsers and rewards.

    environment = hosted(PlanPath(), key)                                   # its own words: prompts are the ids of `game.observe`
    environment = hosted(PlanPath(), key, text=TextBudget(512, 128))        # ordinary text, for a chat model: `game.text` and `game.read`

Hosted and compiled play of one game give the same samples (law 13). Task `i` is the instance of (key, i), as in `training.make_rollout`; a
request's seed is the identity that `rollout.row_keys` folds, so the engine's root must be the one of compiled play,
`jax.random.split(key)[1]`; roles of one stage read the same state, their actions are applied in the order written, and they are paid for
what they did together. An instance that is not `valid` aborts its play.

The game's functions are compiled once per game and run on the CPU, one call per prompt and one per response.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Key

from marl_llm.games.protocol import Game, Instance, Rewards, State, role_of, speaking_order, split_index
from marl_llm.games.registry import picture_lines
from marl_llm.sampling import identity_key
from marl_llm.tools.results import Failure, FailureKind, InfrastructureError
from marl_llm.workflows import (
    Environment,
    FormatError,
    PlainText,
    Role,
    ScriptTurn,
    Task,
    Workflow,
    WorkflowError,
    compute,
    repeat,
    sequence,
    stop,
    together,
    when,
)
from marl_llm.workflows.graph import Node
from marl_llm.workflows.rewards import Paid
from marl_llm.workflows.roles import Reader, Response
from marl_llm.workflows.splits import Tasks
from marl_llm.workflows.trajectory import RoleCall, Trajectory


@runtime_checkable
class TextGame(Protocol):
    """A game that can also be played in ordinary text."""

    def text(self, state: State, role: str) -> str:
        """What the role reads, rules included. It tells what `observe` tells, and no more."""

    def read(self, state: State, role: str, text: str) -> Sequence[int]:
        """The ids of the response that says what the text says. A text that says nothing gives ids that do not parse. Never raises."""


@dataclasses.dataclass(frozen=True)
class TextBudget:
    """Tokens of a role that plays in text: its longest prompt and its longest response, as its model's tokenizer counts them."""

    prompt_tokens: int = 1024
    response_tokens: int = 256


class GameState:
    """A state as the value of a field: its leaves, in the pytree's order, as NumPy arrays. A transcript holds them as lists."""

    def __init__(self, arrays: Iterable[Any]):
        self.arrays = tuple(map(np.asarray, arrays))

    def to_json(self) -> list[Any]:
        """The leaves as numbers and lists."""
        return [x.tolist() for x in self.arrays]


class HostGame:
    """A game's functions, compiled for one call at a time.

    Args:
      key: of the training instances, as `training.make_rollout` takes it; `evaluation_key`: of those of the other splits.
      script: options of the scripted player.
    """

    def __init__(
        self, game: Game, key: Key[Array, ""], evaluation_key: Key[Array, ""] | None = None, script: Mapping[str, Any] | None = None
    ):
        self.game, self.speakers = game, speaking_order(game)
        evaluation = key if evaluation_key is None else evaluation_key
        self._data = {False: jax.random.split(key)[0], True: jax.random.split(evaluation)[0]}
        self._draws, self._options = jax.random.split(key)[1], dict(script or {})
        example = jax.eval_shape(lambda: game.reset(game.instance(key, "train")))
        leaves, self._tree = jax.tree.flatten(example)
        self._keys = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
        self._dtypes = [np.uint32 if is_key else x.dtype for x, is_key in zip(leaves, self._keys)]
        self._compiled: dict[Any, Callable] = {}
        self.deal = functools.lru_cache(4096)(self._deal)

    # --- between fields and arrays ---------------------------------------------------------------------------------------

    def _leaves(self, state: State) -> list[Array]:
        return [jax.random.key_data(x) if is_key else x for x, is_key in zip(jax.tree.leaves(state), self._keys)]

    def _state(self, leaves: Iterable[Any]) -> State:
        return jax.tree.unflatten(self._tree, [jax.random.wrap_key_data(x) if is_key else x for x, is_key in zip(leaves, self._keys)])

    def state(self, state: GameState | Sequence[Any]) -> State:
        """The game's state that a field holds, or a transcript in JSON, with NumPy leaves: for `game.picture` and its like."""
        if isinstance(state, GameState):
            return self._state(state.arrays)
        return self._state(np.asarray(x, dtype) for x, dtype in zip(state, self._dtypes, strict=True))

    def _call(self, name: Any, function: Callable, *arguments: Any) -> Any:
        """`function` of NumPy arguments, compiled under a name, on the CPU; NumPy comes back."""
        if name not in self._compiled:
            self._compiled[name] = jax.jit(function)
        with jax.default_device(_cpu()) if _cpu() is not None else contextlib.nullcontext():
            return jax.device_get(self._compiled[name](*arguments))

    # --- the game ---------------------------------------------------------------------------------------------------------

    def _deal(self, split: str, number: int) -> tuple[Instance, GameState, bool, bool]:
        game = self.game

        def deal(data_key, i, split):
            instance = game.instance(jax.random.fold_in(jax.random.wrap_key_data(data_key), i), split)
            state = game.reset(instance)
            return instance, self._leaves(state), game.done(state), game.valid(instance)

        data_key = np.asarray(jax.random.key_data(self._data[split != "train"]))
        instance, leaves, done, valid = self._call("deal", deal, data_key, np.int32(number), np.int32(split_index(split)))
        return instance, GameState(leaves), bool(done), bool(valid)

    def tasks(self, split: str, first: int, count: int) -> list[Task]:
        """Tasks `first ... first + count`; they show the instance to people, and hide it from roles."""
        split_index(split)

        def json(number):
            return self.game.task(self.deal(split, number)[0])

        return [Task(n, {"task": json(n)}, {"instance": (split, n)}, split) for n in range(first, first + count)]

    def begin(self, instance: tuple[str, int]) -> dict[str, Any]:
        """The fields at the start. Raises `InfrastructureError` for an instance that cannot be played, which aborts the play (law 9)."""
        split, number = instance
        _, state, over, valid = self.deal(split, number)
        if not valid:
            message = f"instance {number} of split {split!r} of {self.game.name} cannot be played"
            raise InfrastructureError(Failure(FailureKind.BAD_INPUT, message))
        return {"state": state, "over": over}

    def observe(self, role: str, state: GameState) -> tuple[int, ...]:
        """The prompt's ids, without padding."""
        prompt = self._call(("observe", role), lambda leaves: self.game.observe(self._state(leaves), role), state.arrays)
        return tuple(prompt.ids[prompt.where].tolist())

    def act(self, responses: Mapping[str, Sequence[int]], state: GameState, seen: GameState | None = None) -> dict[str, Any]:
        """The fields after roles acted one after the other, each paid for what they did together: `paid_<role>` holds its rewards.

        `seen` is the state that their stage began with, if others of it have acted since.
        """
        game, roles = self.game, tuple(responses)

        def act(seen, leaves, padded):
            before, after = self._state(seen), self._state(leaves)
            for role, (tokens, where) in zip(roles, padded):
                after = game.act(after, role, tokens, where)
            return self._leaves(after), game.done(after), [game.rewards(before, after, role) for role in roles]

        padded = [self._padded(role, responses[role]) for role in roles]
        arrays = state.arrays
        leaves, over, rewards = self._call(("act", roles), act, arrays if seen is None else seen.arrays, arrays, padded)
        return {"state": GameState(leaves), "over": bool(over), **{f"paid_{r}": _plain(x) for r, x in zip(roles, rewards)}}

    def _padded(self, role: str, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """A response as `act` takes it: padded after its end, and what is real."""
        size = role_of(self.game, role).response_tokens
        ids = np.asarray(ids[:size], np.int32)
        return np.pad(ids, (0, size - ids.size), constant_values=self.game.tokenizer.pad_id), np.arange(size) < ids.size

    def outcome(self, state: GameState) -> float:
        """The team's result in a state."""
        return float(self._call("outcome", lambda leaves: self.game.outcome(self._state(leaves)), state.arrays))

    def script(self, turn: ScriptTurn) -> tuple[int, ...]:
        """The ids that the game's scripted player says, drawn by the call's identity as in compiled play."""
        role, draws = turn.role.name, np.asarray(jax.random.key_data(self._draws))

        def script(leaves, draws, seed):
            key = identity_key(jax.random.wrap_key_data(draws), seed, seed.shape[0])
            return self.game.script(self._state(leaves), role, key, **self._options)

        tokens, where = self._call(("script", role), script, turn.fields["state"].arrays, draws, np.asarray(turn.seed, np.int32))
        return tuple(tokens[where].tolist())


@functools.cache
def _cpu() -> jax.Device | None:
    """Where the game's functions run; None, the default device, where JAX was started without a CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _plain(rewards: Rewards) -> dict[str, Any]:
    components = {name: float(value) for name, value in rewards.components.items()}
    return dict(team=float(rewards.team), local=float(rewards.local), components=components, well_formed=bool(rewards.well_formed))


def hosted(
    game: Game,
    key: Key[Array, ""],
    *,
    evaluation_key: Key[Array, ""] | None = None,
    script: Mapping[str, Any] | None = None,
    text: TextBudget | None = None,
    tree: bool = False,
) -> Environment:
    """The game as an environment: a workflow with its tasks, its scripted player and, unless it is played in text, its renderer.

    Args:
      game: a value-state game.
      key: of the training instances and of the scripted player's draws; what `training.make_rollout` takes.
      evaluation_key: of the instances of the other splits; by default `key`.
      script: options of the scripted player.
      text: play in ordinary text, with these budgets; the models then bring their own renderer. None: in the game's own words.
      tree: for tree sampling. Roles of one stage still read the same state, but are asked one after the other, so that the candidates of
        each can be scored by themselves: each role is paid for what it and those before it did.

    Raises:
      ValueError: a game whose roles do not each speak once in a turn, or that has no text.
    """
    if text is not None and not isinstance(game, TextGame):
        raise ValueError(f"{game.name} cannot be played in text: it lacks the methods `text` and `read` (games.hosted.TextGame)")
    host = HostGame(game, key, evaluation_key, script)

    def ended(over):
        return over

    parts: list[Node | Role] = []
    for number, stage in enumerate(game.stages):
        if number:
            parts.append(when(ended, stop(), name=f"over_before_{'_'.join(stage)}"))
        if len(stage) == 1:
            parts.append(_acting(host, stage[0], text))
        elif tree:
            parts += [_acting(host, role, text, "begins" if role == stage[0] else "follows") for role in stage]
        else:
            parts += [together(*(_speaking(host, role, text) for role in stage)), _together(host, stage)]
    deal = compute(host.begin, ("state", "over"), name="deal", reads=("instance",), reveals=("state", "over"))
    turns = repeat(*parts, at_most=game.max_turns, until=ended, name="turns")

    def outcome(trajectory):
        return host.outcome(trajectory.fields["state"])

    workflow = Workflow(
        game.name,
        sequence(deal, when(ended, stop(), name="over_at_once"), turns),
        inputs=("task",),
        hidden=("instance",),
        rewards=(paid,),
        metrics={"success": lambda trajectory: float(outcome(trajectory) >= 1.0), "outcome": outcome},
    )
    chance = HostGame(game, key, evaluation_key, game.random_player)

    def picture(fields):
        return picture_lines(game, host.state(fields["state"]))

    if text is None:
        renderer = PlainText(game.tokenizer, (game.stop_id,))
        return Environment(workflow, host.tasks, "success", renderer, host.script, chance.script, picture=picture)

    def written(of):
        return lambda turn: game.tokenizer.decode(i for i in of.script(turn) if i != game.stop_id)

    return Environment(workflow, host.tasks, "success", None, written(host), written(chance), picture=picture)


def rows_of_task(host: HostGame, split: str, number: int, field: str) -> tuple[str, ...]:
    """The rows that a game's `task` shows under `field`. Raises `WorkflowError` where the game's settings give no instance."""
    instance, _, _, valid = host.deal(split, number)
    if not valid:
        raise WorkflowError(f"{host.game.name}: no {field} {number} of split {split!r} was found with these settings; loosen them")
    return tuple(host.game.task(instance)[field])


def map_tasks(game: Game, seed: int, words: str, field: str) -> Tasks:
    """Tasks of a game in text: `words` say what to do, `instance` is the rows of a device game's task, with its splits (law 12)."""
    host = HostGame(game, jax.random.key(seed))

    def tasks(split: str, first: int, count: int) -> list[Task]:
        numbers = range(first, first + count)
        return [Task(n, {"task": words, "instance": rows_of_task(host, split, n, field)}, split=split) for n in numbers]

    return tasks


def paid(trajectory: Trajectory) -> list[Paid]:
    """The game's rewards, to each call what the game pays its role for the stage."""
    awards, waiting = [], []
    for event in trajectory.events:
        if isinstance(event, RoleCall):
            waiting.append(event)
        for call in [call for call in waiting if f"paid_{call.role}" in event.writes]:
            pay = event.writes[f"paid_{call.role}"]
            awards.append(Paid(call, pay["team"], pay["local"], pay["components"]))
            waiting.remove(call)
    return awards


def _role(host: HostGame, name: str, text: TextBudget | None, parse: Reader, writes: Mapping[str, Any], sees: str = "state") -> Role:
    """A role that reads the state in the field `sees`, as ids or as text."""
    game, budget = host.game, role_of(host.game, name)
    if text is not None:
        show = {sees: lambda state: game.text(host.state(state), name)}
        return Role(name, f"{{{sees}}}", parse, writes, show=show, max_tokens=text.response_tokens, max_prompt=text.prompt_tokens)
    prompt = (lambda state: host.observe(name, state)) if sees == "state" else (lambda seen: host.observe(name, seen))
    return Role(name, prompt, parse, writes, max_tokens=budget.response_tokens, max_prompt=budget.prompt_tokens)


def _ids(host: HostGame, name: str, text: TextBudget | None, spoken: Response, seen: GameState) -> tuple[int, ...]:
    """A response in the game's own ids."""
    return spoken.ids if text is None else tuple(host.game.read(host.state(seen), name, spoken.text))


def _checked(name: str, paid: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that a response leads to, if the game says that it is well formed. Raises `FormatError` with them if not."""
    if not paid["well_formed"]:
        raise FormatError(f"no response of {name}'s language", fields)
    return fields


def _acting(host: HostGame, name: str, text: TextBudget | None, stage: str = "") -> Role:
    """A role whose words act at once. It `begins` a stage of several, or `follows` those who began it, whose state it reads."""

    def parse(spoken: Response, state: GameState, seen: GameState | None = None) -> dict[str, Any]:
        fields = host.act({name: _ids(host, name, text, spoken, state if seen is None else seen)}, state, seen)
        return _checked(name, fields[f"paid_{name}"], fields | ({"seen": state} if stage == "begins" else {}))

    writes = {"state": None, "over": False, f"paid_{name}": None} | ({"seen": None} if stage == "begins" else {})
    follows = stage == "follows"
    return _role(host, name, text, Reader(parse, ("state", "seen") if follows else ("state",)), writes, "seen" if follows else "state")


def _speaking(host: HostGame, name: str, text: TextBudget | None) -> Role:
    """A role that speaks at the same time as others: what it said is left to `_together`."""

    def parse(spoken: Response, state: GameState) -> dict[str, Any]:
        ids = _ids(host, name, text, spoken, state)
        return _checked(name, host.act({name: ids}, state)[f"paid_{name}"], {f"said_{name}": ids})

    return _role(host, name, text, Reader(parse, ("state",)), {f"said_{name}": ()})


def _together(host: HostGame, stage: tuple[str, ...]) -> Node:
    """What the roles of a stage do, once all have spoken."""

    def act(state: GameState, *responses: Sequence[int]) -> dict[str, Any]:
        return host.act(dict(zip(stage, responses)), state)

    reads = ("state", *(f"said_{role}" for role in stage))
    return compute(act, ("state", "over", *(f"paid_{role}" for role in stage)), name="_".join((*stage, "act")), reads=reads)
