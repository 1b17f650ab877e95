"""The decoder against a NumPy float64 oracle, its parameter count, its cache, its head and its blindness to padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_oracle import forward

from marl_llm.models import (
    PRESETS,
    BranchCache,
    DecodeMask,
    Decoder,
    ModelConfig,
    Pages,
    PrefixMask,
    init_params,
    is_serving,
    make_model_config,
    prompt_mask,
    prompt_positions,
    serving_layout,
    to_cache,
)
from marl_llm.models.config import RopeScaling
from marl_llm.models.pages import written
from marl_llm.models.rotary import frequencies, rotary_angles

TINY = ModelConfig(vocab_size=19, width=12, layers=2, query_heads=4, key_value_heads=2, head_dim=6, feed_forward=20)
WINDOWED = dataclasses.replace(TINY, window_pattern=(3, 0))  # shorter than one prompt, as long as the other; ends within pages of two
CONFIGS = {
    "grouped": TINY,
    "one_key_head": dataclasses.replace(TINY, key_value_heads=1, tie_embeddings=False),
    "all_key_heads": dataclasses.replace(TINY, key_value_heads=4, rope_theta=50.0, norm_epsilon=1e-2),
}


@functools.cache
def random_params(config):
    """Parameters with nothing left at one or zero, so that a forgotten weight shows."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0.3, 0.4, leaf.shape), jnp.float32) for leaf in leaves])


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens, where):
    model = Decoder(config)
    hidden, _ = model.apply({"params": params}, tokens, prompt_positions(where), prompt_mask(where))
    return model.apply({"params": params}, hidden, method="head")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_float64_oracle(name):
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (2, 7))
    got = logits_of(config, params, jnp.asarray(tokens, jnp.int32), jnp.ones((2, 7), bool))
    want = np.stack([forward(config, params, row) for row in tokens])
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_left_padding_changes_nothing():
    tokens = np.random.default_rng(3).integers(1, TINY.vocab_size, (1, 5))
    padded = np.concatenate([[[7, 0, 3]], tokens], axis=1)  # whatever stands in the padding
    where = np.arange(8)[None] >= 3
    alone = logits_of(TINY, random_params(TINY), jnp.asarray(tokens, jnp.int32), jnp.ones((1, 5), bool))
    beside = logits_of(TINY, random_params(TINY), jnp.asarray(padded, jnp.int32), jnp.asarray(where))
    np.testing.assert_allclose(beside[:, 3:], alone, atol=2e-5)
    assert np.all(np.isfinite(beside))


def test_a_row_that_is_all_padding_is_finite():
    tokens, where = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4), bool)
    assert np.all(np.isfinite(logits_of(TINY, random_params(TINY), tokens, where)))


def test_only_relative_positions_matter():
    params, model = random_params(TINY), Decoder(TINY)
    tokens, mask = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32), prompt_mask(jnp.ones((1, 5), bool))
    run = jax.jit(lambda at: model.apply({"params": params}, tokens, at, mask)[0])
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    np.testing.assert_allclose(run(positions + 11), run(positions), atol=2e-5)
    assert np.abs(run(positions * 2) - run(positions)).max() > 1e-3


@pytest.mark.parametrize(
    ("config", "layout", "shift"),
    [(TINY, "apart", 0), (TINY, "apart", 3), (TINY, "serving", 0), (TINY, "serving", 3), (WINDOWED, "serving", 3)],
)
def test_decoding_step_by_step_with_the_cache_equals_the_full_forward(config, layout, shift):
    """Two prompts, one of them padded, six branches each, four steps: the cached path sees what a plain causal row sees, wherever in the
    ring its columns begin."""
    params = random_params(config)
    held = serving_layout(params) if layout == "serving" else params
    model = Decoder(config, serving=is_serving(held))
    e, k, p, r = 2, 6, 4, 4
    rng = np.random.default_rng(4)
    prompt, responses = rng.integers(1, TINY.vocab_size, (e, p)), rng.integers(1, TINY.vocab_size, (e, k, r))
    where = np.asarray([[True] * 4, [False, True, True, True]])

    @jax.jit
    def cached(prompt, where, responses):
        _, layers = model.apply({"params": held}, prompt, prompt_positions(where), prompt_mask(where))
        j, d = TINY.key_value_heads, TINY.head_dim
        keys, values = jnp.full((e, k, j, d, r), 7.0), jnp.full((e, k, j, r, d), 7.0)  # left-overs of another request
        cache, out = [BranchCache(*to_cache(*kv), keys, values) for kv in layers], []
        for step in range(r):
            at = jnp.broadcast_to(jnp.sum(where, -1, dtype=jnp.int32)[:, None] + step, (e, k))
            own = jnp.broadcast_to((jnp.arange(r) - shift) % r <= step, (e, k, r))
            mask = DecodeMask(where, own, jnp.int32((step + shift) % r))
            hidden, cache = model.apply({"params": held}, responses[:, :, step], at, mask, cache=cache)
            out.append(model.apply({"params": held}, hidden, method="head"))
        return jnp.stack(out, axis=2)

    got = cached(jnp.asarray(prompt, jnp.int32), jnp.asarray(where), jnp.asarray(responses, jnp.int32))
    for i in range(e):
        for b in range(k):
            row = np.concatenate([prompt[i][where[i]], responses[i, b]])
            want = forward(config, params, row)[where[i].sum() :]
            np.testing.assert_allclose(got[i, b], want, atol=1e-4 * np.abs(want).max())


def test_in_bfloat16_queries_are_scaled_by_no_rounded_number():
    """A factor of 1.003 is 1 in bfloat16; the root of a head of 128 over 168, as Gemma 3 27B has it, is 0.2 % too small."""
    low = dataclasses.replace(TINY, compute_dtype="bfloat16", layers=1)
    ids, params = jnp.arange(12)[None], random_params(low)
    plain, scaled = (
        logits_of(dataclasses.replace(low, query_scalar=low.head_dim / x), params, ids, ids >= 0) for x in (1, 1.006)
    )
    assert float(jnp.abs(plain - scaled).max()) > 0


@pytest.mark.parametrize("config", [TINY, WINDOWED])
def test_tokens_behind_a_cached_prefix_equal_the_full_forward(config):
    """New tokens see the valid columns of the cache and each other, and their keys and values extend it."""
    params, model = serving_layout(random_params(config)), Decoder(config, serving=True)
    rng = np.random.default_rng(5)
    row = rng.integers(1, TINY.vocab_size, (1, 9)).astype(np.int32)
    count, page, table = 5, 2, jnp.asarray([[[3, 0, 2]]])  # five tokens lie in three pages of two, among others

    @jax.jit
    def extend(row):
        real = jnp.ones((1, count), bool)
        _, layers = model.apply({"params": params}, row[:, :count], prompt_positions(real), prompt_mask(real))
        cache = []
        for layer in layers:
            keys, values = to_cache(*layer)
            shape = 1, 4, TINY.key_value_heads
            pages = Pages(jnp.full((*shape, TINY.head_dim, page), 3.0), jnp.full((*shape, page, TINY.head_dim), 3.0))
            cache.append(written(pages, jnp.zeros((1, 1), int), table, jnp.zeros((1, 1), int), keys, values))
        mask = PrefixMask(prompt_mask(jnp.ones((1, 4), bool)), table, jnp.asarray([[count]]))
        hidden, new = model.apply({"params": params}, row[:, count:], count + jnp.arange(4)[None], mask, cache=cache)
        return model.apply({"params": params}, hidden, method="head"), new

    got, new = extend(jnp.asarray(row))
    want = forward(config, random_params(config), row[0])
    np.testing.assert_allclose(got[0], want[count:], atol=1e-4 * np.abs(want).max())
    whole = jnp.ones((1, 9), bool)
    _, layers = jax.jit(lambda t: model.apply({"params": params}, t, prompt_positions(whole), prompt_mask(whole)))(jnp.asarray(row))
    for (keys, values), (all_keys, all_values) in zip(new, layers, strict=True):
        np.testing.assert_allclose(keys, all_keys[:, count:], atol=1e-4)
        np.testing.assert_allclose(values, all_values[:, count:], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("preset", ["nano", "micro", "mini", "small"])
def test_the_parameter_count_is_that_of_the_pytree(preset, tied):
    config = make_model_config(preset, 77, tie_embeddings=tied)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes)) == config.parameters
    assert ("output" in shapes) == (not tied)


def test_the_published_sizes_have_the_published_parameter_counts():
    assert make_model_config("qwen3-0.6b", 151_936).parameters == 596_049_920
    assert make_model_config("qwen3-1.7b", 151_936).parameters == 1_720_574_976
    assert make_model_config("mistral-7b-v0.1").parameters == 7_241_732_096
    assert make_model_config("mistral-7b-v0.3").parameters == 7_248_023_552
    assert make_model_config("smollm3-3b").parameters == 3_075_098_624
    assert make_model_config("gemma-3-270m").parameters == 268_098_176
    assert make_model_config("gemma-3-1b").parameters == 999_885_952
    assert make_model_config("gemma-3-4b").parameters == 3_880_263_168


def test_a_tied_head_reads_the_embedding_and_an_untied_one_does_not():
    hidden = jnp.ones((1, TINY.width))
    for config in (TINY, CONFIGS["one_key_head"]):
        params = random_params(config)
        other = params | {"embedding": params["embedding"] + 1.0}

        def head(p, c=config):
            return Decoder(c).apply({"params": p}, hidden, method="head")

        assert bool(jnp.all(head(params) == head(other))) == (not config.tie_embeddings)


def test_the_gradient_is_finite_and_reaches_every_parameter():
    config = CONFIGS["one_key_head"]
    where = jnp.asarray([[True] * 5, [False, False, True, True, True], [False] * 5])
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, config.vocab_size, (3, 5)), jnp.int32)

    def loss(p):
        return jnp.sum(jnp.where(where[..., None], logits_of(config, p, tokens, where), 0.0) ** 2)

    gradient = jax.jit(jax.grad(loss))(random_params(config))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)), path
        assert np.any(leaf != 0), path


def test_initial_parameters_depend_on_the_key_alone():
    init = jax.jit(lambda key: init_params(TINY, key))
    one, again, other = init(jax.random.key(1)), init(jax.random.key(1)), init(jax.random.key(2))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), one, again))
    assert not bool(jnp.all(one["embedding"] == other["embedding"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(vocab_size=0), "vocab_size is 0"),
        (dict(layers=0), "layers is 0"),
        (dict(width=-3), "width is -3"),
        (dict(query_heads=3), "query_heads=3 is not a multiple of key_value_heads=2"),
        (dict(head_dim=5), "head_dim=5 is odd"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_unknown_presets_and_fields_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'huge'.*nano"):
        make_model_config("huge", 10)
    with pytest.raises(ValueError, match=r"\['widht'\].*width"):
        make_model_config("nano", 10, widht=3)
    assert make_model_config("nano", 10, width=48).width == 48
    assert PRESETS["nano"]["width"] == 32  # the preset itself is untouched


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between():
    """Qwen2.5's published setting: head dimension 128, theta 1e6, factor 4 over 32,768 positions. Section 3.2 by hand: pair i turns
    32768 / (2 pi theta^(2i/128)) times in the original context; 32 times and more is fast, once and less is slow."""
    config = dataclasses.replace(TINY, head_dim=128, rope_theta=1e6, rope_scaling=RopeScaling("yarn", 4.0, 32_768))
    share = frequencies(config) / frequencies(dataclasses.replace(config, rope_scaling=None))
    turns = 32_768 / (2 * np.pi * 1e6 ** (np.arange(64) / 64))
    np.testing.assert_allclose(share[turns > 40], 1.0, rtol=1e-6)
    np.testing.assert_allclose(share[turns < 0.8], 0.25, rtol=1e-6)
    between = share[(turns < 28) & (turns > 1.2)]
    assert len(between) > 5
    assert np.all(np.diff(between) < 0)
    assert np.all((between > 0.25) & (between < 1))


def test_linear_scaling_divides_every_frequency():
    plain = dataclasses.replace(TINY, rope_scaling=None)
    scaled = dataclasses.replace(TINY, rope_scaling=RopeScaling("linear", 4.0, 64))
    np.testing.assert_allclose(frequencies(scaled), frequencies(plain) / 4, rtol=1e-6)


def test_llama3_keeps_fast_pairs_divides_slow_ones_and_blends_between():
    """Llama 3.1's published setting: head dimension 128, theta 5e5, factor 8 over 8,192 positions. A pair that turns more than 4 times in
    them stays, one that turns less than once is slowed by 8, and between the two the share kept rises in a straight line with the turns."""
    config = dataclasses.replace(TINY, head_dim=128, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 8192, 1.0, 4.0))
    kept = frequencies(config) / frequencies(dataclasses.replace(config, rope_scaling=None))
    turns = 8192 / (2 * np.pi) * 5e5 ** -(np.arange(64) / 64)
    assert np.sum((turns > 1) & (turns < 4)) > 3
    expected = [1.0 if t > 4 else 1 / 8 if t < 1 else 1 / 8 + (t - 1) / 3 * 7 / 8 for t in turns]
    np.testing.assert_allclose(kept, expected, rtol=1e-5)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_blends_by_rotations_and_rounds_its_borders_only_where_it_truncates(truncate):
    """YaRN, section 3.2: a pair's share of the stretched frequency is linear in the logarithm of its rotations in the original context."""
    scaling = RopeScaling("yarn", 4.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=truncate)
    config = dataclasses.replace(TINY, head_dim=32, rope_theta=1e4, rope_scaling=scaling)
    plain = 1e4 ** (-np.arange(16) / 16)
    fast, slow = 16.0, 2.0
    if truncate:  # the borders lie at the pairs 6.44 and 10.05, and are rounded outwards
        fast, slow = (4096 * plain[pair] / (2 * np.pi) for pair in (6, 11))
    share = np.clip(np.log(fast / (4096 * plain / (2 * np.pi))) / np.log(fast / slow), 0, 1)
    assert 3 < np.sum((share > 0) & (share < 1)) < 6
    np.testing.assert_allclose(frequencies(config), plain / 4 * share + plain * (1 - share), rtol=1e-4)


@pytest.mark.parametrize(("scaling", "scale"), [(RopeScaling("yarn", 4.0, 64), 1.1386294), (RopeScaling("linear", 4.0, 64), 1.0)])
def test_yarn_alone_lengthens_queries_and_keys(scaling, scale):
    """YaRN, section 3.4: both are multiplied with 0.1 ln s + 1, so that attention's logits grow by its square."""
    sin, cos = rotary_angles(dataclasses.replace(TINY, rope_scaling=scaling), jnp.arange(5)[None])
    np.testing.assert_allclose(np.hypot(sin, cos), scale, rtol=1e-6)
