"""The two layouts of layers, remat, dtypes and the structural checks of a config."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import (
    Decoder,
    ModelConfig,
    init_params,
    is_serving,
    is_stacked,
    log_probs,
    prompt_mask,
    prompt_positions,
    serving_layout,
    stack_layers,
    unstack_layers,
)

TINY = ModelConfig(vocab_size=19, width=12, layers=3, query_heads=4, key_value_heads=2, head_dim=6, feed_forward=20)
TOKENS = np.random.default_rng(0).integers(0, 19, (2, 7)).astype(np.int32)


def numpy_params(config, dtype=jnp.float32):
    """Random parameters without a compilation."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0.1, 0.3, x.shape), dtype) for x in leaves])


def loss_and_gradient(config, params, tokens=TOKENS):
    def loss(p):
        return jnp.sum(log_probs(config, p, jnp.asarray(tokens)).log_probs)

    return jax.jit(jax.value_and_grad(loss))(params)


def test_stacking_and_unstacking_are_bit_exact_and_compute_the_same():
    params = numpy_params(TINY)
    stacked = stack_layers(params)
    assert is_stacked(stacked)
    assert not is_stacked(params)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)
    one, g_one = loss_and_gradient(TINY, params)
    two, g_two = loss_and_gradient(TINY, stacked)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), g_one, unstack_layers(g_two))


def test_both_layouts_start_from_the_same_numbers():
    config = dataclasses.replace(TINY, layers=2)
    stacked, apart = (init_params(config, jax.random.key(0), stacked=s) for s in (True, False))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), apart)


def test_the_fourth_layer_stays_the_fourth_even_past_ten():
    config = dataclasses.replace(TINY, layers=12)
    stacked = stack_layers({f"block_{y}": {"w": jnp.full((2,), y)} for y in range(config.layers)})
    np.testing.assert_array_equal(stacked["blocks"]["block"]["w"][:, 0], np.arange(12))


def test_what_cannot_be_stacked_is_told():
    with pytest.raises(ValueError, match="no layers to stack"):
        stack_layers(stack_layers(numpy_params(TINY)))
    mixed = dataclasses.replace(TINY, experts=4, experts_per_token=2, expert_feed_forward=8, dense_layers=(1,))
    with pytest.raises(ValueError, match="dense and mixture"):
        stack_layers(numpy_params(mixed))


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("stacked", [False, True])
def test_remat_changes_no_gradient_but_computes_again(remat, stacked):
    params = stack_layers(numpy_params(TINY)) if stacked else numpy_params(TINY)
    config = dataclasses.replace(TINY, remat=remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *(loss_and_gradient(c, params) for c in (TINY, config)))
    text = str(jax.make_jaxpr(jax.grad(lambda p: jnp.sum(log_probs(config, p, jnp.asarray(TOKENS)).log_probs)))(params))
    assert "checkpoint" in text or "remat" in text


def test_bfloat16_is_near_and_its_norms_and_logits_are_float32():
    params = numpy_params(TINY)
    low = dataclasses.replace(TINY, param_dtype="bfloat16", compute_dtype="bfloat16")
    low_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    shapes = jax.eval_shape(lambda: init_params(low, jax.random.key(0)))
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}
    full, got = (jax.jit(log_probs, static_argnums=0)(*given, jnp.asarray(TOKENS)) for given in ((TINY, params), (low, low_params)))
    assert got.log_probs.dtype == jnp.float32
    np.testing.assert_allclose(got.log_probs, full.log_probs, atol=0.15)
    text = str(jax.make_jaxpr(lambda p: log_probs(low, p, jnp.asarray(TOKENS)))(low_params))
    exact = [line.split("=")[0] for line in text.splitlines() if any(op in line for op in ("rsqrt", " sin ", "exp "))]
    assert exact
    assert not [out for out in exact if "bf16" in out]


def test_a_mixture_of_experts_equals_its_definition():
    """Every token's chosen experts, one by one in NumPy."""
    config = dataclasses.replace(TINY, experts=5, experts_per_token=2, expert_feed_forward=8)
    from marl_llm.models.experts import mixture

    rng = np.random.default_rng(1)
    router, gate, up, down = (rng.normal(size=s) for s in ((12, 5), (5, 12, 8), (5, 12, 8), (5, 8, 12)))
    x = rng.normal(size=(3, 4, 12))
    for normalize in (True, False):
        want = np.zeros_like(x)
        for at in np.ndindex(3, 4):
            p = np.exp(x[at] @ router)
            p /= p.sum()
            best = np.argsort(-p)[: config.experts_per_token]
            for e in best:
                g = x[at] @ gate[e]
                weight = p[e] / p[best].sum() if normalize else p[e]
                want[at] += weight * ((g / (1 + np.exp(-g)) * (x[at] @ up[e])) @ down[e])
        arrays = (jnp.asarray(a, jnp.float32) for a in (x, router, gate, up, down))
        np.testing.assert_allclose(mixture(*arrays, 2, normalize), want, atol=1e-4)


def test_active_parameters_leave_out_idle_experts():
    config = dataclasses.replace(TINY, experts=5, experts_per_token=2, expert_feed_forward=8)
    count = sum(x.size for x in jax.tree.leaves(numpy_params(config)))
    assert config.parameters == count
    assert config.active_parameters == count - TINY.layers * 3 * (3 * 12 * 8)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("remat", "some", "none, dots, full"),
        ("attention", "flesh", "flash"),
        ("param_dtype", "float16", "bfloat16"),
        ("experts", 4, "expert_feed_forward"),
        ("dense_layers", (7,), "dense_layers"),
        ("head_dim", 5, "odd"),
    ],
)
def test_a_value_that_makes_no_model_is_told(field, value, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(TINY, **{field: value})


SERVED = {
    "qwen3": TINY,
    "qwen2": dataclasses.replace(TINY, attention_bias=True, qk_norm=False, tie_embeddings=False),
    "llama with every bias": dataclasses.replace(TINY, attention_bias=True, output_bias=True, feed_forward_bias=True, qk_norm=False),
    "mixture": dataclasses.replace(TINY, experts=4, experts_per_token=2, expert_feed_forward=8, dense_layers=(1,)),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_serving_layout_computes_the_same_logits(name):
    config, tokens = SERVED[name], jnp.asarray(TOKENS)
    params = numpy_params(config)
    where = jnp.ones(TOKENS.shape, bool)

    def logits(held, serving):
        model = Decoder(config, serving=serving)
        hidden, _ = model.apply({"params": held}, tokens, prompt_positions(where), prompt_mask(where))
        return model.apply({"params": held}, hidden, method="head")

    served = serving_layout(params)
    assert is_serving(served)
    assert not is_serving(params)
    assert serving_layout(served) is served
    want = jax.jit(logits, static_argnums=1)(params, False)
    np.testing.assert_allclose(jax.jit(logits, static_argnums=1)(served, True), want, atol=1e-5 * np.abs(want).max())
    assert sum(x.size for x in jax.tree.leaves(served)) == config.parameters
