"""Packed rows score like unrolled ones: values, gradients, temperatures, whatever the padding and the order (law 5)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_oracle import response_log_probs

from marl_llm.models import Decoder, ModelConfig, init_params, prompt_mask, prompt_positions, score_responses, tree_mask

CONFIG = ModelConfig(vocab_size=23, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=4, feed_forward=24)
B, P, K, R = 3, 5, 3, 4
LENGTHS = (5, 3, 1)  # real prompt tokens of each row

score = jax.jit(score_responses, static_argnums=(0, 5))


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 1.5, init_params(CONFIG, key)))(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    prompt, responses = rng.integers(1, CONFIG.vocab_size, (B, P)), rng.integers(1, CONFIG.vocab_size, (B, K, R))
    where = np.arange(P)[None] >= P - np.asarray(LENGTHS)[:, None]
    return jnp.asarray(prompt, jnp.int32), jnp.asarray(where), jnp.asarray(responses, jnp.int32)


def test_the_tree_mask_is_the_picture_in_its_docstring():
    want = """
        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 1 1 . .
        1 1 . . 1 .
        1 1 . . 1 1
    """
    want = np.asarray([[c == "1" for c in line.split()] for line in want.strip().splitlines()])
    np.testing.assert_array_equal(tree_mask(jnp.ones((1, 2), bool), 2, 2).dense()[0], want)
    hidden = want.copy()
    hidden[1:, 0] = False  # nothing real sees the padding
    padded = tree_mask(jnp.asarray([[False, True]]), 2, 2)
    np.testing.assert_array_equal(padded.dense()[0], hidden)
    np.testing.assert_array_equal(padded.rows(3, 2)[0], hidden[3:5])


def test_positions_count_real_tokens():
    where = jnp.asarray([[False, False, True, True], [True, True, True, True]])
    np.testing.assert_array_equal(prompt_positions(where), [[0, 0, 0, 1], [0, 1, 2, 3]])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_and_entropies_equal_the_float64_oracle(params, rows, temperature):
    scores = score(CONFIG, params, *rows, temperature)
    prompt, where, responses = map(np.asarray, rows)
    for b in range(B):
        for k in range(K):
            log_probs, entropy = response_log_probs(CONFIG, params, prompt[b][where[b]], responses[b, k], temperature)
            np.testing.assert_allclose(scores.log_probs[b, k], log_probs, rtol=1e-6, atol=1e-5)
            np.testing.assert_allclose(scores.entropy[b, k], entropy, atol=1e-5)


def unrolled(params, prompt, where, responses):
    """The same scores from K plain causal rows per prompt, written without the packed code."""
    model, r = Decoder(CONFIG), responses.shape[-1]
    b, k, _ = responses.shape
    full = jnp.concatenate([jnp.repeat(prompt, k, axis=0), responses.reshape(b * k, r)], axis=1)
    real = jnp.concatenate([jnp.repeat(where, k, axis=0), jnp.ones((b * k, r), bool)], axis=1)
    hidden, _ = model.apply({"params": params}, full, prompt_positions(real), prompt_mask(real))
    logits = model.apply({"params": params}, hidden, method="head")[:, -r - 1 : -1]
    log_softmax = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_softmax, full[:, -r:, None], axis=-1)[..., 0].reshape(b, k, r)


def test_gradients_of_packed_and_unrolled_rows_agree(params, rows):
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, K, R)), jnp.float32)
    packed = jax.jit(jax.value_and_grad(lambda p: jnp.sum(weights * score_responses(CONFIG, p, *rows).log_probs)))
    plain = jax.jit(jax.value_and_grad(lambda p: jnp.sum(weights * unrolled(p, *rows))))
    (value, gradient), (want, wanted) = packed(params), plain(params)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        other = functools.reduce(lambda tree, key: tree[key.key], path, wanted)
        np.testing.assert_allclose(leaf, other, atol=1e-5 * scale, err_msg=str(path))
        assert np.any(np.asarray(leaf) != 0)


def test_wider_buffers_change_neither_scores_nor_gradient(params, rows):
    """Prompts widened on the left and responses on the right, with any ids in the padding."""
    prompt, where, responses = rows

    def junk(shape):
        return jnp.full(shape, 9, jnp.int32)

    wide = (
        jnp.concatenate([junk((B, 4)), prompt], axis=1),
        jnp.concatenate([jnp.zeros((B, 4), bool), where], axis=1),
        jnp.concatenate([responses, junk((B, K, 3))], axis=2),
    )

    @jax.jit
    def run(params, rows):
        def loss(p):
            return jnp.sum(score_responses(CONFIG, p, *rows).log_probs[:, :, :R] ** 2)

        return score_responses(CONFIG, params, *rows), jax.grad(loss)(params)

    (narrow, gradient), (broad, wide_gradient) = run(params, rows), run(params, wide)
    np.testing.assert_allclose(broad.log_probs[:, :, :R], narrow.log_probs, atol=1e-5)
    np.testing.assert_allclose(broad.entropy[:, :, :R], narrow.entropy, atol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(wide_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(a).max())))


def test_rows_and_branches_do_not_see_each_other(params, rows):
    prompt, where, responses = rows
    base = score(CONFIG, params, *rows, 1.0).log_probs
    turned = score(CONFIG, params, prompt[::-1], where[::-1], responses[::-1, ::-1], 1.0).log_probs
    np.testing.assert_allclose(turned[::-1, ::-1], base, atol=1e-5)
    other = score(CONFIG, params, prompt, where, responses.at[:, 1].set(2), 1.0).log_probs
    np.testing.assert_array_equal(other[:, [0, 2]], base[:, [0, 2]])
    assert np.abs(other[:, 1] - base[:, 1]).max() > 0.1


def test_what_comes_after_a_token_does_not_change_its_score(params, rows):
    prompt, where, responses = rows
    base = score(CONFIG, params, *rows, 1.0)
    later = score(CONFIG, params, prompt, where, responses.at[:, :, -1].set(1), 1.0)
    np.testing.assert_array_equal(later.log_probs[:, :, :-1], base.log_probs[:, :, :-1])
    np.testing.assert_array_equal(later.entropy, base.entropy)  # the last entropy is that of the place, not of the token


@pytest.mark.parametrize("bad", [-1, CONFIG.vocab_size, 10**6])
def test_b14_ids_outside_the_vocabulary_have_no_score(params, rows, bad):
    """A look-up clamps them, so that they would score like the last token; what they and those behind them get is NaN, or an error."""
    prompt, where, responses = rows
    good = score(CONFIG, params, *rows, 1.0).log_probs
    got = np.asarray(score(CONFIG, params, prompt, where, responses.at[0, 1, 2].set(bad), 1.0).log_probs)
    unknown = np.zeros((B, K, R), bool)
    unknown[0, 1, 2:] = True
    np.testing.assert_array_equal(np.isnan(got), unknown)
    np.testing.assert_allclose(got[~unknown], np.asarray(good)[~unknown], atol=1e-6)
    whole = np.asarray(score(CONFIG, params, prompt.at[0, -1].set(bad), where, responses, 1.0).log_probs)
    np.testing.assert_array_equal(np.isnan(whole).all((1, 2)), np.arange(B) == 0)
    padded = prompt.at[2, 0].set(bad)  # padding is free
    assert np.isfinite(score(CONFIG, params, padded, where, responses, 1.0).log_probs).all()
    with pytest.raises(ValueError, match=f"responses holds ids from {bad} to {bad}; the vocabulary is 0 to {CONFIG.vocab_size - 1}"):
        score_responses(CONFIG, params, prompt, where, responses.at[0, 1, 2].set(bad))
