"""The value head: zero at first, a linear map of the hidden state, trained through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_files import BASE, params_of

from marl_llm.models import Decoder, init_params, prompt_mask, prompt_positions


def test_a_fresh_critic_says_zero_and_learns():
    config = dataclasses.replace(BASE, value_head=True)
    made = init_params(config, jax.random.key(0))
    params = params_of(BASE) | {"value_head": made["value_head"]}
    assert jax.tree.structure(params) == jax.tree.structure(made)
    tokens, where = jnp.arange(10, dtype=jnp.int32).reshape(2, 5), jnp.ones((2, 5), bool)
    model = Decoder(config)

    @jax.jit
    def values(p):
        hidden, _ = model.apply({"params": p}, tokens, prompt_positions(where), prompt_mask(where))
        return model.apply({"params": p}, hidden, method="value"), hidden

    out, hidden = values(params)
    assert out.shape == (2, 5)
    assert float(jnp.abs(out).max()) == 0
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(values(p)[0])))(params)["value_head"]
    np.testing.assert_allclose(gradient["kernel"], np.asarray(hidden).sum((0, 1)), rtol=1e-5)
    assert float(gradient["bias"]) == 10
    params["value_head"] = {"kernel": jnp.ones(16), "bias": jnp.float32(0.5)}
    np.testing.assert_allclose(values(params)[0], np.asarray(hidden).sum(-1) + 0.5, rtol=1e-5)


def test_a_model_without_one_says_so():
    with pytest.raises(ValueError, match="no value head"):
        Decoder(BASE).apply({"params": params_of(BASE)}, jnp.zeros((1, 16)), method="value")
