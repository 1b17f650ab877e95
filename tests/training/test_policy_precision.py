"""Parameters and Adam's moments are float32 whatever the model computes in (b12)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marl_llm.models import LoraConfig, ModelConfig, init_params
from marl_llm.models.lora import init_adapters
from marl_llm.models.transformer import stack_layers
from marl_llm.training import decayed, make_optimizer, make_train_state
from marl_llm.training.train_state import apply_gradient, fresh_train_state


@pytest.mark.parametrize("fresh", [False, True])
def test_b12_small_steps_are_not_lost_in_a_bfloat16_model(fresh):
    config = ModelConfig(
        vocab_size=8, width=8, layers=1, query_heads=1, key_value_heads=1, head_dim=4, feed_forward=8,
        param_dtype="bfloat16", compute_dtype="bfloat16",
    )  # fmt: skip
    optimizer = make_optimizer()
    key = jax.random.key(0)
    policy = fresh_train_state(config, key, optimizer) if fresh else make_train_state(init_params(config, key), optimizer)

    def floats(tree):
        return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]

    gradient = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), policy.params)
    step = jax.jit(lambda p: apply_gradient(p, gradient, jnp.float32(1e-6), optimizer)[0])
    after = policy
    for _ in range(3):
        after = step(after)
    assert {x.dtype for x in floats(after)} == {jnp.dtype("float32")}
    for old, new in zip(jax.tree.leaves(policy.params), jax.tree.leaves(after.params), strict=True):
        assert (np.asarray(old) != np.asarray(new)).mean() > 0.99


def leaves(tree):
    """Path -> leaf."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


WHOLE = ModelConfig(
    vocab_size=8, width=8, layers=2, query_heads=2, key_value_heads=1, head_dim=4, feed_forward=8, tie_embeddings=False,
    attention_bias=True, output_bias=True, feed_forward_bias=True, qk_norm=True, value_head=True,
)  # fmt: skip


@pytest.mark.parametrize("optimizer", [make_optimizer(weight_decay=0.1), optax.adamw(1.0, weight_decay=0.1, mask=decayed)])
@pytest.mark.parametrize("layout", ["apart", "stacked"])
def test_weight_decay_leaves_norms_biases_and_embeddings_as_they_are(optimizer, layout):
    params = jax.tree.map(lambda x: x + 0.5, init_params(WHOLE, jax.random.key(0)))
    params = stack_layers(params) if layout == "stacked" else params
    policy = make_train_state(params, optimizer)
    moved, _ = apply_gradient(policy, jax.tree.map(jnp.zeros_like, policy.params), 0.1, optimizer)
    before, after = leaves(policy.params), leaves(moved.params)
    still = {name for name in before if np.array_equal(before[name], after[name])}
    assert still == {name for name in before if any(part in name for part in ("norm", "bias", "embedding"))}
    assert len(still) > 8
    for name in before.keys() - still:
        np.testing.assert_allclose(after[name], 0.99 * before[name], rtol=1e-6)


def test_the_matrices_of_adapters_are_decayed():
    adapters = init_adapters(WHOLE, jax.random.key(1), LoraConfig(rank=2, alpha=4.0))
    assert all(leaves(decayed(adapters)).values())
