"""The sampler: draws follow the distribution, log-probs are the scorer's (law 2), samples depend on identity alone (law 6)."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from marl_llm.algorithms import kept_tokens, token_log_probs
from marl_llm.models import Decoder, ModelConfig, init_params, prompt_mask, prompt_positions, score_responses
from marl_llm.sampling import SamplingParams, StopRule, inverse_cdf, sample, sample_token
from marl_llm.sampling.sampler import checked_stop, ends_with
from marl_llm.sampling.token_sampling import BLOCK, MOST_BLOCKS

CONFIG = ModelConfig(vocab_size=7, width=16, layers=1, query_heads=4, key_value_heads=2, head_dim=4, feed_forward=24)
STOP, PAD, R, K = 3, 0, 5, 24
SIZES = (1, 2, 31, 32, 33, 100)
ALMOST_ONE = np.float32(1) - np.float32(2.0**-24)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


@functools.partial(jax.jit, static_argnames=("temperature", "max_tokens"))
def run(params, prompt, where, keys, temperature=1.0, max_tokens=R):
    return sample(
        CONFIG, params, prompt, where, keys, max_tokens=max_tokens, stop=STOP, pad_id=PAD, settings=SamplingParams(temperature)
    )


def keys_of(rows, branches):
    fold = jax.vmap(lambda e: jax.vmap(lambda k: jax.random.fold_in(jax.random.fold_in(jax.random.key(5), e), k))(branches))
    return fold(rows)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    where = np.arange(6)[None] >= np.asarray([0, 1, 2, 3, 4, 0])[:, None]
    return jnp.asarray(rng.integers(1, CONFIG.vocab_size, (6, 6)), jnp.int32), jnp.asarray(where)


search = jax.jit(inverse_cdf)


@pytest.mark.parametrize("v", SIZES)
def test_the_search_agrees_with_a_float64_cumulative_sum(v):
    rng = np.random.default_rng(v)
    p = rng.gamma(0.5, size=(64, v)).astype(np.float32)
    p = p / p.sum(-1, keepdims=True)
    uniform = rng.random(64).astype(np.float32)
    got = np.asarray(search(jnp.asarray(p), jnp.asarray(uniform)))
    cumulative = np.cumsum(p.astype(np.float64), axis=-1)
    threshold = uniform * cumulative[:, -1]
    rows = np.arange(64)
    below = np.where(got > 0, cumulative[rows, got - 1], 0.0)
    assert np.all(below <= threshold + 1e-6)
    assert np.all(cumulative[rows, got] >= threshold - 1e-6)


@pytest.mark.parametrize("v", SIZES)
@pytest.mark.parametrize("uniform", [0.0, 1e-30, 0.5, ALMOST_ONE, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(v, uniform):
    rng = np.random.default_rng(1)
    p = rng.random((200, v)) * (rng.random((200, v)) < 0.3)
    p[np.arange(200), rng.integers(0, v, 200)] += 0.1  # at least one token can be drawn
    p[:50, : v // 2] = 0  # nothing in the first blocks, then nothing in the last ones
    p[50:100, (v + 1) // 2 :] = 0
    p = p[p.sum(-1) > 0].astype(np.float32)
    token = np.asarray(search(jnp.asarray(p), jnp.full(len(p), uniform, jnp.float32)))
    assert np.all((0 <= token) & (token < v))
    assert np.all(p[np.arange(len(p)), token] > 0)
    if uniform == 0.0:
        np.testing.assert_array_equal(token, np.argmax(p > 0, axis=-1))
    if uniform == 1.0:
        np.testing.assert_array_equal(token, v - 1 - np.argmax(p[:, ::-1] > 0, axis=-1))


@pytest.mark.parametrize("v", SIZES)
def test_a_one_hot_distribution_always_yields_its_token(v):
    for uniform in (0.0, 0.3, ALMOST_ONE):
        np.testing.assert_array_equal(search(jnp.eye(v), jnp.full(v, uniform, jnp.float32)), np.arange(v))


@pytest.mark.parametrize("v", [BLOCK * MOST_BLOCKS + 1, 9_001, 300_000])
def test_the_search_of_a_large_vocabulary_goes_through_blocks_of_blocks(v):
    rng = np.random.default_rng(v)
    p = rng.gamma(0.1, size=(24, v)).astype(np.float32)
    p[:8] = (0.1 + rng.random((8, v))) * (rng.random((8, v)) < 3 / v)  # a few tokens alone
    p[np.arange(24), rng.integers(0, v, 24)] += 0.1
    p[4], p[5] = np.eye(1, v, v - 1), np.eye(1, v, v // 2)
    uniform = np.concatenate([[0.0, ALMOST_ONE, 0.0, ALMOST_ONE], rng.random(20)]).astype(np.float32)
    got = np.asarray(search(jnp.asarray(p), jnp.asarray(uniform)))
    cumulative, rows = np.cumsum(p.astype(np.float64), axis=-1), np.arange(24)
    assert np.all(p[rows, got] > 0)
    np.testing.assert_array_equal(got[4:6], [v - 1, v // 2])
    assert [got[0], got[1]] == [np.argmax(p[0] > 0), v - 1 - np.argmax(p[1, ::-1] > 0)]

    def share(x):
        return x / cumulative[:, -1]

    assert np.all(share(np.where(got > 0, cumulative[rows, got - 1], 0.0)) <= uniform + 1e-6)
    assert np.all(share(cumulative[rows, got]) >= uniform - 1e-6)


def test_the_scale_of_the_probabilities_does_not_matter():
    p = jnp.asarray(np.random.default_rng(2).random((50, 40)), jnp.float32)
    uniform = jnp.linspace(0, 0.99, 50)
    np.testing.assert_array_equal(search(p, uniform), search(p * 1024.0, uniform))


drawn = jax.jit(lambda logits, keys, t: sample_token(logits, keys, SamplingParams(t)), static_argnums=2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_tempered_distribution_and_report_both_log_probs(temperature):
    n, v = 40_000, 45
    logits = np.random.default_rng(3).normal(size=v).astype(np.float32)
    logits[7] = -np.inf  # can never be drawn
    token, raw, sampled, *_ = drawn(jnp.tile(logits, (n, 1)), jax.random.split(jax.random.key(1), n), temperature)
    wide = logits.astype(np.float64)
    p = np.exp(wide / temperature) / np.exp(wide / temperature).sum()
    counts = np.bincount(token, minlength=v)
    assert counts[7] == 0
    kept = p > 0
    assert scipy.stats.chisquare(counts[kept], n * p[kept]).pvalue > 1e-3
    np.testing.assert_allclose(sampled, np.log(p[token]), atol=1e-5)
    np.testing.assert_allclose(raw, wide[token] - np.log(np.exp(wide).sum()), atol=1e-5)


def test_the_entropy_is_that_of_the_raw_policy():
    logits = np.random.default_rng(3).normal(size=(4, 45)).astype(np.float32)
    p = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    for temperature in (0.5, 1.0):
        entropy = drawn(jnp.asarray(logits), jax.random.split(jax.random.key(1), 4), temperature)[3]
        np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=1e-5)


def test_temperature_zero_takes_the_likeliest_and_of_equals_the_first():
    logits = jnp.asarray([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0], [0.0, 5.0, 5.0]])
    token, raw, sampled, *_ = drawn(logits, jax.random.split(jax.random.key(0), 3), 0.0)
    np.testing.assert_array_equal(token, [1, 0, 1])
    np.testing.assert_array_equal(sampled, 0.0)
    np.testing.assert_allclose(raw, jax.nn.log_softmax(logits)[np.arange(3), token], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_law_2_the_scorer_reproduces_the_samplers_log_probs(params, prompts, temperature):
    out = run(params, *prompts, keys_of(jnp.arange(6), jnp.arange(K)), temperature)
    score = jax.jit(score_responses, static_argnums=(0, 5))
    where = np.asarray(out.where)
    raw = score(CONFIG, params, *prompts, out.tokens, 1.0)
    tempered = score(CONFIG, params, *prompts, out.tokens, temperature)
    assert where.sum() > 100
    np.testing.assert_allclose(out.log_probs, np.where(where, raw.log_probs, 0), atol=2e-5)
    np.testing.assert_allclose(out.sampled_log_probs, np.where(where, tempered.log_probs, 0), atol=2e-5)
    np.testing.assert_allclose(out.entropy, np.where(where, raw.entropy, 0), atol=1e-5)
    if temperature != 1:
        assert np.abs(out.log_probs - out.sampled_log_probs).max() > 0.1


def test_a_response_ends_with_its_stop_token_or_is_truncated(params, prompts):
    out = jax.tree.map(np.asarray, run(params, *prompts, keys_of(jnp.arange(6), jnp.arange(K))))
    tokens, where = out.tokens.reshape(-1, R), out.where.reshape(-1, R)
    kinds = set()
    for row, real, truncated in zip(tokens, where, out.truncated.reshape(-1), strict=True):
        length = real.sum()
        assert real[:length].all()
        assert np.all(row[length:] == PAD)
        assert STOP not in row[: length - 1]
        assert truncated == (STOP not in row[:length])
        assert length == R or row[length - 1] == STOP
        kinds.add((int(length), bool(truncated)))
    assert kinds == {(n, False) for n in range(1, R + 1)} | {(R, True)}  # every length occurs
    for field in (out.log_probs, out.sampled_log_probs, out.entropy):
        assert np.all(field[~out.where] == 0)


def test_two_tokens_in_a_row_follow_the_models_joint_distribution(params, prompts):
    """Chi-square over pairs: fails when positions or branches share their random numbers."""
    k, v = 4000, CONFIG.vocab_size
    prompt, where = prompts[0][:1], prompts[1][:1]
    out = run(params, prompt, where, keys_of(jnp.arange(1), jnp.arange(k)), max_tokens=2)
    first, second = np.asarray(out.tokens[0, :, 0]), np.asarray(out.tokens[0, :, 1])
    pairs = jnp.asarray([[a, b] for a in range(v) for b in range(v)], jnp.int32)[None]
    joint = np.asarray(score_responses(CONFIG, params, prompt, where, pairs).log_probs[0]).astype(np.float64)
    p = np.exp(joint.sum(-1)).reshape(v, v)
    p_stop = np.exp(joint[STOP * v, 0])
    counts = np.zeros((v, v))
    np.add.at(counts, (first, second), 1)
    alive = np.arange(v) != STOP
    observed = np.append(counts[alive].ravel(), counts[STOP].sum())
    expected = k * np.append(p[alive].ravel(), p_stop)
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert len(expected) > 15
    assert scipy.stats.chisquare(observed, expected * k / expected.sum()).pvalue > 1e-3


def test_law_6_a_sample_does_not_depend_on_batch_slot_or_branch_count(params, prompts):
    prompt, where = prompts
    base = run(params, prompt, where, keys_of(jnp.arange(6), jnp.arange(K)))
    order = np.asarray([4, 0, 5, 2, 1, 3])
    moved = run(params, prompt[order], where[order], keys_of(jnp.asarray(order), jnp.arange(K)))
    np.testing.assert_array_equal(moved.tokens, base.tokens[order])
    np.testing.assert_array_equal(moved.where, base.where[order])
    alone = run(params, prompt[2:3], where[2:3], keys_of(jnp.asarray([2]), jnp.asarray([6])))
    np.testing.assert_array_equal(alone.tokens[0, 0], base.tokens[2, 6])
    np.testing.assert_allclose(alone.log_probs[0, 0], base.log_probs[2, 6], atol=1e-5)
    assert len({tuple(row) for row in np.asarray(base.tokens).reshape(-1, R)}) > 10  # not all the same response


def test_law_6_a_sample_does_not_depend_on_the_width_of_its_buffers(params, prompts):
    prompt, where = prompts
    keys = keys_of(jnp.arange(6), jnp.arange(K))
    base = run(params, prompt, where, keys)
    wide = run(
        params,
        jnp.pad(prompt, ((0, 0), (3, 0)), constant_values=5),
        jnp.pad(where, ((0, 0), (3, 0))),
        keys,
        max_tokens=R + 2,
    )
    ended = ~np.asarray(base.truncated)
    np.testing.assert_array_equal(wide.tokens[..., :R][ended], base.tokens[ended])
    np.testing.assert_array_equal(wide.tokens[..., :R], base.tokens)
    np.testing.assert_allclose(wide.log_probs[..., :R], base.log_probs, atol=1e-5)


def test_greedy_responses_need_no_luck(params, prompts):
    one = run(params, *prompts, keys_of(jnp.arange(6), jnp.arange(K)), 0.0)
    other = run(params, *prompts, keys_of(jnp.arange(6) + 50, jnp.arange(K)), 0.0)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.tokens[:, 0], one.tokens[:, 1])


def test_budgets_cut_responses_one_by_one(params, prompts):
    keys = keys_of(jnp.arange(6), jnp.arange(K))
    budgets = jnp.asarray(np.random.default_rng(0).integers(1, R + 3, (6, K)), jnp.int32)
    free = run(params, *prompts, keys)
    cut = jax.jit(lambda b: sample(CONFIG, params, *prompts, keys, max_tokens=R, stop=STOP, pad_id=PAD, budgets=b))(budgets)
    kept = np.asarray(free.where) & (np.arange(R) < np.asarray(budgets)[..., None])
    np.testing.assert_array_equal(cut.where, kept)
    np.testing.assert_array_equal(cut.tokens, np.where(kept, free.tokens, PAD))
    ended = (np.asarray(free.tokens) == STOP) & kept
    np.testing.assert_array_equal(cut.truncated, ~ended.any(-1))


def test_a_stop_rule_ends_responses_as_its_automaton_says(params, prompts):
    """A response ends with the stop token, or with token `b` right behind token `a`."""
    keys = keys_of(jnp.arange(6), jnp.arange(K))
    free = run(params, *prompts, keys)
    said = [row[real] for row, real in zip(np.asarray(free.tokens).reshape(-1, R), np.asarray(free.where).reshape(-1, R), strict=True)]
    found = collections.Counter((int(x), int(y)) for row in said for x, y in itertools.pairwise(row) if STOP not in (x, y) and x != y)
    (a, b), _ = found.most_common(1)[0]
    table = np.zeros((3, CONFIG.vocab_size), np.int32)
    table[:, a], table[1, b], table[:, STOP], table[2] = 1, 2, 2, 2
    out = jax.jit(
        lambda: sample(
            CONFIG, params, *prompts, keys, max_tokens=R, stop=StopRule(table, np.arange(3) == 2, np.arange(CONFIG.vocab_size)), pad_id=PAD
        )
    )()
    by_string = 0
    for said, where, plain, real in zip(
        *(np.asarray(x).reshape(-1, R) for x in (out.tokens, out.where, free.tokens, free.where)), strict=True
    ):
        pairs = [n + 2 for n in range(R - 1) if plain[n] == a and plain[n + 1] == b]
        length = min([real.sum(), *pairs])
        assert where.sum() == length
        np.testing.assert_array_equal(said[:length], plain[:length])
        by_string += length < real.sum()
    assert by_string > 3


@pytest.mark.parametrize("settings", [SamplingParams(0.8, top_k=3), SamplingParams(1.2, top_p=0.7)])
def test_law_2_under_truncation_both_log_probs_are_the_scorers(params, prompts, settings):
    keys = keys_of(jnp.arange(6), jnp.arange(K))
    out = jax.jit(lambda: sample(CONFIG, params, *prompts, keys, max_tokens=R, stop=STOP, pad_id=PAD, settings=settings))()
    where = np.asarray(out.where)

    @jax.jit
    def logits_of(tokens):
        variables, model = {"params": params}, Decoder(CONFIG)
        row = jnp.concatenate([jnp.repeat(prompts[0], K, 0), tokens.reshape(-1, R)], axis=1)
        real = jnp.concatenate([jnp.repeat(prompts[1], K, 0), jnp.ones((6 * K, R), bool)], axis=1)
        hidden, _ = model.apply(variables, row, prompt_positions(real), prompt_mask(real))
        return model.apply(variables, hidden[:, -R - 1 : -1], method="head").reshape(6, K, R, -1)

    logits = logits_of(out.tokens)
    keep = kept_tokens(logits, temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
    raw, under = token_log_probs(logits, out.tokens), token_log_probs(logits, out.tokens, temperature=settings.temperature, kept=keep)
    np.testing.assert_allclose(out.log_probs, np.where(where, raw, 0), atol=2e-5)
    np.testing.assert_allclose(out.sampled_log_probs, np.where(where, under, 0), atol=2e-5)
    assert np.abs(out.log_probs - out.sampled_log_probs).max() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        SamplingParams.to_train(0.6, top_k=3),
        SamplingParams.to_train(1.7, top_p=0.8),
        SamplingParams.to_train(0.9, top_k=5, top_p=0.7, min_p=0.05),
        SamplingParams(1.2, top_p=0.95, max_kept=2),  # the limit cuts the nucleus
    ],
)
def test_law_2_the_scorer_reproduces_truncated_draws_from_the_kept_ids(params, prompts, settings):
    """And an update that has moved the policy is compared over the same tokens, with a finite gradient."""
    keys = keys_of(jnp.arange(6), jnp.arange(K))
    out = jax.jit(lambda: sample(CONFIG, params, *prompts, keys, max_tokens=R, stop=STOP, pad_id=PAD, settings=settings))()
    where = np.asarray(out.where)
    assert out.kept_ids.shape == (6, K, R, settings.max_kept)
    np.testing.assert_array_equal(np.asarray(out.kept_ids)[~where], -1)
    np.testing.assert_array_equal(np.asarray(out.kept_log_mass)[~where], 0)

    def score(p):
        return score_responses(CONFIG, p, *prompts, out.tokens, settings.temperature, kept_ids=out.kept_ids)

    scored, gradient = jax.jit(lambda p: (score(p), jax.grad(lambda p: jnp.sum(score(p).log_probs) + jnp.sum(score(p).entropy))(p)))(params)
    assert where.sum() > 100
    np.testing.assert_allclose(out.sampled_log_probs, np.where(where, scored.log_probs, 0), atol=1e-4)
    whole = jax.jit(lambda p: score_responses(CONFIG, p, *prompts, out.tokens, settings.temperature))(params)
    np.testing.assert_allclose(out.sampled_log_probs + out.kept_log_mass, np.where(where, whole.log_probs, 0), atol=1e-4)
    assert np.abs(np.where(where, whole.log_probs - scored.log_probs, 0)).max() > 0.05  # without the kept set the ratio would be biased
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((scored, gradient)))
    moved = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(9), x.shape), params)
    after = jax.jit(score)(moved)
    np.testing.assert_array_less(np.where(where, after.log_probs, -1), 1e-6)
    assert np.isfinite(after.log_probs).all()


@pytest.mark.parametrize(
    ("stop", "want"),
    [(None, ()), ((), ()), (np.int64(3), (3,)), (3, (3,)), ([3, np.int32(5)], (3, 5)), (np.asarray([1, 2]), (1, 2))],
)
def test_b14_stops_are_integers_of_any_kind_or_none(stop, want):
    assert checked_stop(stop, 7) == want


def test_every_one_of_several_stop_ids_ends_a_response():
    state, ended = ends_with((3, 5), jnp.asarray([3, 4, 5, 0]), jnp.asarray([2, 2, 2, 2]))
    assert ended.tolist() == [True, False, True, False]
    assert state.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("stop", "error", "says"),
    [
        (7, ValueError, r"stop ids \[7\] are outside the vocabulary of 7"),
        ((-1, 2), ValueError, r"\[-1\]"),
        ("end", TypeError, "stop='end' must be a token id"),
        (3.5, TypeError, "stop=3.5"),
        (StopRule(np.zeros((1, 6), np.int32), np.zeros(1, bool), np.arange(6)), ValueError, "a rule over 6 token ids"),
    ],
)
def test_b14_a_stop_that_cannot_be_is_told(stop, error, says):
    with pytest.raises(error, match=says):
        checked_stop(stop, 7)


def test_b14_without_a_stop_responses_end_at_their_budget_and_unknown_ids_are_told(params, prompts):
    keys = keys_of(jnp.arange(2), jnp.arange(1))
    prompt, where = (x[:2] for x in prompts)
    bad = prompt.at[1, -1].set(7)
    run = jax.jit(lambda prompt: sample(CONFIG, params, prompt, where, keys, max_tokens=2, stop=None, pad_id=PAD))
    out = run(bad)
    assert np.asarray(out.where).all()
    assert np.isfinite(out.log_probs[0]).all()  # the other row is what it would be
    assert np.isnan(out.log_probs[1]).all()
    assert np.isnan(out.sampled_log_probs[1]).all()
    with pytest.raises(ValueError, match="prompt holds ids from 7 to 7; the vocabulary is 0 to 6"):
        sample(CONFIG, params, bad, where, keys, max_tokens=2, stop=None, pad_id=PAD)
    for options in (dict(max_tokens=0, pad_id=PAD), dict(max_tokens=2, pad_id=-1), dict(max_tokens=2, pad_id=7)):
        with pytest.raises(ValueError, match="pad_id"):
            sample(CONFIG, params, prompt, where, keys, stop=None, **options)
