"""Parameters and Adam's moments are float32 whatever the model computes in (b12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import ModelConfig, init_params
from marl_llm.training import make_optimizer, make_policy
from marl_llm.training.policy import fresh_policy, step_policy


@pytest.mark.parametrize("fresh", [False, True])
def test_b12_small_steps_are_not_lost_in_a_bfloat16_model(fresh):
    config = ModelConfig(
        vocab_size=8, width=8, layers=1, query_heads=1, key_value_heads=1, head_dim=4, feed_forward=8,
        param_dtype="bfloat16", compute_dtype="bfloat16",
    )  # fmt: skip
    optimizer = make_optimizer()
    policy = fresh_policy(config, jax.random.key(0), optimizer) if fresh else make_policy(init_params(config, jax.random.key(0)), optimizer)
    floats = lambda tree: [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]  # noqa: E731
    gradient = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), policy.params)
    step = jax.jit(lambda p: step_policy(p, gradient, jnp.float32(1e-6), optimizer)[0])
    after = policy
    for _ in range(3):
        after = step(after)
    assert {x.dtype for x in floats(after)} == {jnp.dtype("float32")}
    for old, new in zip(jax.tree.leaves(policy.params), jax.tree.leaves(after.params), strict=True):
        assert (np.asarray(old) != np.asarray(new)).mean() > 0.99
