"""A value-state game of a user's own is looked at by shapes when it is loaded: each fault is one line that names the method."""

import pathlib
import re
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest

from marl_llm.games import GameError, GameRole, Prompt, Rewards, find_game
from marl_llm.games.shapes import check_shapes

OWN = pathlib.Path(__file__).parent / "own"


@pytest.fixture
def lock_class():
    """A fresh class of the sound game, to be spoilt."""
    sound = find_game(f"{OWN / 'lock.py'}:Lock").thing
    return type("Spoilt", (sound,), {})


def good_rewards(game, before, after, role):
    return Rewards(jnp.float32(0), jnp.float32(0), {"right": jnp.float32(0)}, jnp.bool_(True))


def raising(*_):
    raise KeyError("the digit of nobody")


def tokens_and_where(tokens, where):
    return lambda game, state, role, key: (jnp.zeros(tokens, jnp.int32), jnp.ones(where, bool))


FAULTS = {
    "valid is a number": ("valid", lambda game, instance: jnp.float32(1), "valid gives float32 of the shape []; bool"),
    "reset raises": ("reset", raising, "reset raised KeyError: 'the digit of nobody'"),
    "instance needs another key": ("instance", lambda game, key: key, "instance raised TypeError"),
    "observe gives a list": ("observe", lambda game, state, role: [1, 2], "observe(state, 'keeper') gives a list; a Prompt"),
    "a prompt beyond its budget": (
        "observe", lambda game, state, role: Prompt(jnp.zeros(3, jnp.int32), jnp.ones(3, bool)),
        "a prompt of 3 tokens; the role's prompt_tokens are 2",
    ),
    "a prompt of numbers": (
        "observe", lambda game, state, role: Prompt(jnp.zeros(2), jnp.ones(2, bool)), "ids gives float32 of the shape [2]; an integer"
    ),
    "a mask of another length": (
        "observe", lambda game, state, role: Prompt(jnp.zeros(2, jnp.int32), jnp.ones(1, bool)), "where gives bool of the shape [1]"
    ),
    "act changes a shape": (
        "act", lambda game, state, role, tokens, where: state._replace(told=tokens),
        ".told is int32 of the shape [1], it was int32 of the shape []",
    ),
    "act changes a type": (
        "act", lambda game, state, role, tokens, where: state._replace(told=jnp.float32(0)), ".told is float32 of the shape []"
    ),
    "act gives another structure": ("act", lambda game, state, role, tokens, where: (state.digit,), "its structure is"),
    "act raises": ("act", raising, "act(state, 'keeper', tokens, where) raised KeyError"),
    "a reward of two numbers": (
        "rewards", lambda game, before, after, role: good_rewards(game, before, after, role)._replace(team=jnp.zeros(2)),
        "rewards(before, after, 'keeper'): team gives float32 of the shape [2]",
    ),
    "a component of two numbers": (
        "rewards", lambda game, before, after, role: good_rewards(game, before, after, role)._replace(components={"half": jnp.zeros(2)}),
        "half gives float32 of the shape [2]",
    ),
    "a form that is a number": (
        "rewards", lambda game, before, after, role: good_rewards(game, before, after, role)._replace(well_formed=jnp.float32(1)),
        "well_formed gives float32",
    ),
    "a pair of rewards": ("rewards", lambda game, before, after, role: (0.0, 0.0), "gives a tuple; Rewards"),
    "done is a number": ("done", lambda game, state: state.tried, "done gives int32 of the shape []; bool"),
    "done looks at a value": ("done", lambda game, state: bool(state.tried >= 0), "done raised TracerBoolConversionError"),
    "an outcome per digit": ("outcome", lambda game, state: jnp.zeros(10), "gives float32 of the shape [10]; a number"),
    "a script that says too much": ("script", tokens_and_where(2, 1), "script(state, 'keeper', key): tokens gives int32 of the shape [2]"),
    "a script that says no mask": ("script", lambda game, state, role, key: jnp.zeros(1, jnp.int32), "a pair of tokens and where"),
    "no turns": ("max_turns", 0, "max_turns=0 must be an integer of at least 1"),
    "a negative budget": ("roles", (GameRole("keeper", -2, 1), GameRole("opener", 2, 1)), "role keeper: prompt_tokens=-2"),
    "a stage of nobody": ("stages", (("keeper",), ("thief",)), "a stage names 'thief'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_line_that_names_the_method(fault, lock_class):
    name, value, said = FAULTS[fault]
    setattr(lock_class, name, value)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        check_shapes(lock_class())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_sound_game_and_every_game_on_the_device_pass(lock_class):
    games = [lock_class(), *(find_game(name).make() for name in ("plan_path", "joint_letter", "matrix", "hints", "sokoban", "sudoku"))]
    for game in games:
        check_shapes(game)


def test_python_numbers_and_prompts_shorter_than_the_budget_are_taken(lock_class):
    lock_class.rewards = lambda game, before, after, role: Rewards(0, 1.0, {}, True)
    lock_class.done = lambda game, state: False
    lock_class.observe = lambda game, state, role: Prompt(jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
    check_shapes(lock_class())


def test_a_users_file_is_looked_at_when_its_game_is_made(tmp_path, monkeypatch):
    shutil.copytree(OWN, tmp_path / "own")
    path = tmp_path / "own" / "lock.py"
    path.write_text(path.read_text().replace("return state.tried >= 0", "return state.tried"))
    with pytest.raises(GameError, match=r"lock.py:Lock: done gives int32 of the shape \[\]; bool"):
        find_game(f"{path}:Lock").make()
    assert jax.devices()  # nothing was compiled or left traced
    assert "lock" not in sys.modules
