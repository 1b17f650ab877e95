"""One look at a value-state game before anything is compiled: whether its functions give what `games.protocol` says, by shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from marl_llm.games.protocol import Game, GameRole, Prompt, Rewards, speaking_order

KINDS = {"bool": jnp.bool_, "an integer": jnp.integer, "a number": jnp.number}


def check_shapes(game: Game) -> None:
    """Calls every function of a game once with shapes in place of arrays.

    Raises `ValueError` in one line that names the method, what it gave and what is expected, or what it raised.
    """
    speaking_order(game)
    if not _is_count(game.max_turns):
        raise ValueError(f"max_turns={game.max_turns!r} must be an integer of at least 1")
    key = jax.eval_shape(lambda: jax.random.key(0))
    instance = _called("instance", game.instance, key, jax.ShapeDtypeStruct((), jnp.int32))
    _expect("valid", _called("valid", game.valid, instance), (), "bool")
    state = _called("reset", game.reset, instance)
    for role in game.roles:
        _check_role(game, role, state, key)
    _expect("done", _called("done", game.done, state), (), "bool")
    _expect("outcome", _called("outcome", game.outcome, state), (), "a number")


def _check_role(game: Game, role: GameRole, state: Any, key: Any) -> None:
    """What one role reads, does and earns, and what its scripted player says."""
    for budget in ("prompt_tokens", "response_tokens"):
        if not _is_count(getattr(role, budget)):
            raise ValueError(f"role {role.name}: {budget}={getattr(role, budget)!r} must be an integer of at least 1")
    call = f"observe(state, {role.name!r})"
    prompt = _called(call, lambda state: game.observe(state, role.name), state)
    if not isinstance(prompt, Prompt):
        raise ValueError(f"{call} gives a {type(prompt).__name__}; a Prompt is expected")
    length = (getattr(prompt.ids, "shape", ()) or (role.prompt_tokens,))[0]
    if length > role.prompt_tokens:
        raise ValueError(f"{call} gives a prompt of {length} tokens; the role's prompt_tokens are {role.prompt_tokens}")
    _expect(f"{call}: ids", prompt.ids, (length,), "an integer")
    _expect(f"{call}: where", prompt.where, (length,), "bool")
    tokens, where = (jax.ShapeDtypeStruct((role.response_tokens,), dtype) for dtype in (jnp.int32, bool))
    call = f"act(state, {role.name!r}, tokens, where)"
    after = _called(call, lambda state, *response: game.act(state, role.name, *response), state, tokens, where)
    if (difference := _difference(state, after)) is not None:
        raise ValueError(f"{call} gives another kind of state than reset: {difference}")
    call = f"rewards(before, after, {role.name!r})"
    rewards = _called(call, lambda before, after: game.rewards(before, after, role.name), state, after)
    if not isinstance(rewards, Rewards) or not isinstance(rewards.components, dict):
        raise ValueError(f"{call} gives a {type(rewards).__name__}; Rewards with a dictionary of components is expected")
    for name, value in {"team": rewards.team, "local": rewards.local, **rewards.components}.items():
        _expect(f"{call}: {name}", value, (), "a number")
    _expect(f"{call}: well_formed", rewards.well_formed, (), "bool")
    if game.script is not None:
        call = f"script(state, {role.name!r}, key)"
        response = _called(call, lambda state, key: game.script(state, role.name, key), state, key)
        if not isinstance(response, tuple) or len(response) != 2:
            raise ValueError(f"{call} gives a {type(response).__name__}; a pair of tokens and where is expected")
        _expect(f"{call}: tokens", response[0], (role.response_tokens,), "an integer")
        _expect(f"{call}: where", response[1], (role.response_tokens,), "bool")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _called(call: str, function: Callable, *shapes: Any) -> Any:
    """What the function gives, as shapes. Raises `ValueError` with what it raised."""
    try:
        return jax.eval_shape(function, *shapes)
    except Exception as error:  # whatever a function of a game raises
        lines = str(error).strip().splitlines() or ["no reason given"]
        raise ValueError(f"{call} raised {type(error).__name__}: {lines[0]:.300}") from error


def _expect(source: str, value: Any, shape: tuple[int, ...], kind: str) -> None:
    """Raises `ValueError` unless a shape and its kind of number are these; a Python number or bool counts as a scalar."""
    array = jax.eval_shape(lambda: jnp.asarray(value)) if isinstance(value, bool | int | float) else value
    if not hasattr(array, "dtype"):
        raise ValueError(f"{source} gives a {type(value).__name__}; an array of the shape {list(shape)} is expected")
    number = KINDS[kind] is jnp.number and array.dtype == jnp.bool_
    if array.shape != shape or not (jnp.issubdtype(array.dtype, KINDS[kind]) or number):
        raise ValueError(f"{source} gives {array.dtype} of the shape {list(array.shape)}; {kind} of the shape {list(shape)} is expected")


def _difference(before: Any, after: Any) -> str | None:
    """The first leaf in which two states differ in shape or kind of number; None if there is none."""
    trees = [jax.tree_util.tree_flatten_with_path(tree) for tree in (before, after)]
    if trees[0][1] != trees[1][1]:
        return f"its structure is {str(trees[1][1])[:150]}, not {str(trees[0][1])[:150]}"
    for (path, old), (_, new) in zip(trees[0][0], trees[1][0], strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            name = jax.tree_util.keystr(path) or "the state"
            return f"{name} is {new.dtype} of the shape {list(new.shape)}, it was {old.dtype} of the shape {list(old.shape)}"
    return None
