"""Kept sets are the library's, draws follow them, and both log-probs are those of their distributions (law 2)."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from marl_llm.algorithms import kept_log_mass, kept_tokens, token_log_probs
from marl_llm.sampling import RowSamplingParams, SamplingParams, kept, sample_token
from marl_llm.sampling.requests import MAX_KEPT
from marl_llm.sampling.token_sampling import rows_of

search = jax.jit(kept)


def settings_rows(rows):
    """Rows of (temperature, top_k, top_p, min_p, max_kept) as arrays."""
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.int32)
    return RowSamplingParams(*(jnp.asarray(x, kind) for x, kind in zip(zip(*rows, strict=True), kinds, strict=True)))


@pytest.mark.parametrize("top_k", [None, 1, 2, 7, 300])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.35, 1e-6])
def test_kept_sets_are_those_of_the_algorithms_room(top_k, top_p):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(64, 45)).astype(np.float32) * rng.choice([0.1, 1, 8], (64, 1)).astype(np.float32)
    z[::7, 3] = -np.inf
    got = np.asarray(search(jnp.asarray(z), rows_of(SamplingParams(top_k=top_k, top_p=top_p), (64,))))
    want = np.asarray(kept_tokens(z, top_k=top_k, top_p=top_p))
    np.testing.assert_array_equal(got, want)
    assert got.any(-1).all()


def test_of_equal_logits_the_lower_ids_are_kept():
    z = jnp.asarray([[1.0, 2.0, 1.0, 1.0, 0.0], [0.0, -0.0, 0.0, -0.0, 0.0]])
    np.testing.assert_array_equal(search(z, rows_of(SamplingParams(top_k=3), (2,))), [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(search(z, rows_of(SamplingParams(top_p=0.5), (2,))), [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    p = np.asarray([[0.5, 0.3, 0.1, 0.06, 0.04]])
    z = jnp.asarray(np.log(p), jnp.float32)
    np.testing.assert_array_equal(search(z, rows_of(SamplingParams(min_p=0.15), (1,))), [[1, 1, 1, 0, 0]])
    # after top-p: 0.5 and 0.3 are left
    np.testing.assert_array_equal(search(z, rows_of(SamplingParams(top_p=0.7, min_p=0.15), (1,))), [[1, 1, 0, 0, 0]])


@functools.partial(jax.jit, static_argnums=2)
def drawn(logits, keys, settings):
    return sample_token(logits, keys, settings)


@pytest.mark.parametrize(
    "settings", [SamplingParams(0.7, top_k=5), SamplingParams(1.0, top_p=0.96), SamplingParams(1.4, top_k=9, top_p=0.9, min_p=0.05)]
)
def test_draws_follow_the_truncated_distribution_and_report_it(settings):
    n, v = 20_000, 33
    logits = np.random.default_rng(3).normal(size=v).astype(np.float32) * 2
    out = drawn(jnp.tile(logits, (n, 1)), jax.random.split(jax.random.key(1), n), settings)
    keep = np.asarray(kept_tokens(logits, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p))
    p = np.where(keep, np.exp(logits.astype(np.float64) / settings.temperature), 0)
    p = np.where(p >= settings.min_p * p.max(), p, 0)
    p /= p.sum()
    counts = np.bincount(out.token, minlength=v)
    assert counts[p == 0].sum() == 0
    assert scipy.stats.chisquare(counts[p > 0], n * p[p > 0]).pvalue > 1e-3
    np.testing.assert_allclose(out.sampled_log_prob, np.log(p[np.asarray(out.token)]), atol=1e-5)
    np.testing.assert_allclose(out.log_prob, token_log_probs(jnp.tile(logits, (n, 1)), out.token), atol=1e-5)
    if not settings.min_p:  # what truncation took away is the library's log Z
        mass = kept_log_mass(logits, keep, temperature=settings.temperature)
        np.testing.assert_allclose(
            out.sampled_log_prob + mass, token_log_probs(jnp.tile(logits, (n, 1)), out.token, temperature=settings.temperature), atol=1e-5
        )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_entropy_is_that_of_the_model_whatever_the_temperature_of_the_draw(temperature):
    z = np.random.default_rng(1).normal(size=(6, 17)).astype(np.float32) * 2
    drawn = sample_token(jnp.asarray(z), jax.random.split(jax.random.key(0), 6), SamplingParams(temperature=temperature))
    want = scipy.stats.entropy(np.exp(z.astype(np.float64)), axis=-1)
    np.testing.assert_allclose(drawn.entropy, want, rtol=1e-5)


def test_rows_may_have_settings_of_their_own():
    rows = [(1.0, 0, 1.0, 0.0, 0), (0.0, 0, 1.0, 0.0, 3), (0.7, 4, 1.0, 0.0, 4), (1.3, 0, 0.6, 0.0, 0), (1.0, 5, 0.9, 0.1, 2)]
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(5, 40)), jnp.float32)
    keys = jax.random.split(jax.random.key(2), 5)
    together = jax.jit(sample_token, static_argnames="width")(logits, keys, settings_rows(rows), width=6)
    for i, (t, k, p, m, most) in enumerate(rows):
        alone = drawn(logits[i : i + 1], keys[i : i + 1], SamplingParams(t, k or None, p, m, most or None))
        for name in together._fields[:4] if not most else together._fields:
            got = getattr(together, name)[i]
            got = got[:most] if name == "kept_ids" else got
            np.testing.assert_allclose(got, getattr(alone, name)[0], atol=1e-6, err_msg=f"{name} of row {i}")
        if not most:
            np.testing.assert_array_equal(together.kept_ids[i], -1)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}])
def test_settings_that_cannot_be_are_told(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    "settings", [SamplingParams(0.7, top_k=5), SamplingParams(1.4, top_p=0.9), SamplingParams(1.0, top_k=9, top_p=0.8, min_p=0.02)]
)
def test_kept_ids_are_the_kept_set_likeliest_first_with_its_log_mass(settings):
    n, v, most = 32, 33, 12
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(n, v)) * 3, jnp.float32)
    keys = jax.random.split(jax.random.key(1), n)
    out = drawn(logits, keys, dataclasses.replace(settings, max_kept=most))
    keep = np.asarray(search(logits / settings.temperature, rows_of(settings, (n,))))
    assert keep.sum(-1).max() > 3
    for row in range(n):
        ids = np.asarray(out.kept_ids[row])
        real = ids[ids >= 0]
        assert (ids[len(real) :] == -1).all()
        by_rank = np.argsort(-np.where(keep[row], logits[row], -np.inf), kind="stable")[: min(most, keep[row].sum())]
        np.testing.assert_array_equal(real, by_rank)
        assert int(out.token[row]) in real
    inside = np.zeros((n, v), bool)
    for row in range(n):
        inside[row, np.asarray(out.kept_ids[row])[np.asarray(out.kept_ids[row]) >= 0]] = True
    np.testing.assert_allclose(out.kept_log_mass, kept_log_mass(logits, inside, temperature=settings.temperature), atol=1e-5)
    under = token_log_probs(logits, out.token, temperature=settings.temperature, kept=inside)
    np.testing.assert_allclose(out.sampled_log_prob, under, atol=1e-5)
    exact = keep.sum(-1) <= most  # a set that fits is the set without a limit, and so is the draw
    free = drawn(logits, keys, settings)
    assert free.kept_ids is None
    np.testing.assert_array_equal(out.token[exact], free.token[exact])


def test_a_limit_on_kept_tokens_shows_in_the_log_mass_and_ties_go_to_lower_ids():
    flat = jnp.zeros((4, 100))
    out = drawn(flat, jax.random.split(jax.random.key(0), 4), SamplingParams(top_p=0.9, max_kept=8))
    np.testing.assert_array_equal(out.kept_ids, np.tile(np.arange(8), (4, 1)))
    np.testing.assert_allclose(out.kept_log_mass, np.log(0.08), atol=1e-5)
    np.testing.assert_allclose(out.sampled_log_prob, -np.log(8), atol=1e-5)
    wide = drawn(flat[:, :5], jax.random.split(jax.random.key(0), 4), SamplingParams(max_kept=8))  # wider than the vocabulary
    np.testing.assert_array_equal(wide.kept_ids, np.tile([0, 1, 2, 3, 4, -1, -1, -1], (4, 1)))


def test_a_greedy_draw_has_kept_the_likeliest():
    logits = jnp.asarray([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    rows = RowSamplingParams(*(jnp.asarray([x, x]) for x in (0.0, 0, 0.9, 0.0, 2)))
    by_rows = jax.jit(sample_token, static_argnames="width")(logits, keys, rows, width=2)
    for out in (drawn(logits, keys, SamplingParams(0.0, top_p=0.9, max_kept=2)), by_rows):
        np.testing.assert_array_equal(out.kept_ids, [[1, -1], [0, -1]])
        np.testing.assert_allclose(out.kept_log_mass, out.log_prob, atol=1e-6)
        np.testing.assert_array_equal(out.sampled_log_prob, 0)


def test_settings_to_train_ask_for_kept_ids_only_where_tokens_are_left_out():
    assert SamplingParams.to_train(0.7) == SamplingParams(0.7)
    assert SamplingParams.to_train(0.7, top_k=20, top_p=0.9) == SamplingParams(0.7, 20, 0.9, max_kept=20)
    assert SamplingParams.to_train(top_p=0.9).max_kept == MAX_KEPT
    with pytest.raises(ValueError, match="max_kept"):
        SamplingParams(max_kept=0)


def test_a_greedy_draw_takes_the_first_of_equals():
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, (50, 300)).astype(np.float32)
    logits[0], logits[1] = -np.inf, -5.0
    logits[0, 7] = 0.0
    for settings in (SamplingParams(0.0), rows_of(SamplingParams(0.0), (50,))):
        drawn = sample_token(jnp.asarray(logits), jax.random.split(jax.random.key(0), 50), settings)
        np.testing.assert_array_equal(drawn.token, logits.argmax(axis=-1))


def test_a_draw_holds_little_beside_the_logits_of_a_large_vocabulary():
    v, rows = 151_936, 4
    shapes = jax.ShapeDtypeStruct((rows, v), jnp.float32), jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    settings = jax.eval_shape(lambda: rows_of(SamplingParams(), (rows,)))
    program = jax.jit(lambda logits, keys, settings: sample_token(logits, keys, settings, False)).lower(*shapes, settings).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * rows * v * 4


@pytest.mark.parametrize("settings", [SamplingParams(), SamplingParams(0.7, top_k=5, top_p=0.9)])
def test_no_product_of_a_draw_rounds_its_weights(settings):
    program = jax.jit(lambda logits, keys: sample_token(logits, keys, settings))
    program = program.lower(jnp.zeros((2, 9000)), jax.random.split(jax.random.key(0), 2))
    products = re.findall(r"stablehlo.dot_general.*", program.as_text())
    assert len(products) >= 3  # blocks of blocks, blocks, tokens
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)
