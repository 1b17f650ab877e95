"""The public functions' signatures: arrays that must be given stand in one order, every option is passed by name."""

import inspect

import jax.numpy as jnp
import pytest

import marl_llm.algorithms as rl

FUNCTIONS = [name for name in rl.__all__ if inspect.isroutine(getattr(rl, name)) or hasattr(getattr(rl, name), "lower")]


def parameters(name):
    return inspect.signature(getattr(rl, name)).parameters


@pytest.mark.parametrize("name", FUNCTIONS)
def test_b9_options_are_passed_by_name(name):
    # The one exception is `make_recipe(name, preset)`: two strings that cannot be mistaken for each other.
    by_place = [p.name for p in parameters(name).values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = [p for p in by_place if parameters(name)[p].default is not inspect.Parameter.empty]
    assert optional == (["preset"] if name == "make_recipe" else [])
    assert "where" not in by_place


@pytest.mark.parametrize("order", [("log_probs", "old_log_probs", "advantages"), ("values", "old_values", "targets")])
def test_b9_one_order_everywhere(order):
    seen = 0
    for name in FUNCTIONS:
        present = [p for p in parameters(name) if p in order]
        seen += len(present) == 3
        assert present == [p for p in order if p in present], name
    assert seen >= 2


def test_b9_a_mask_by_place_is_refused():
    zeros = jnp.zeros((2, 2))
    with pytest.raises(TypeError, match="positional"):
        rl.clipped_ratio(zeros, zeros, jnp.zeros(2), jnp.ones((2, 2), bool))
