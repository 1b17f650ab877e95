"""Divergences between student and teacher: float64 twins, numerical gradients, bins, and what is exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

SHAPE, V = (3, 4), 7


def softmax(x):
    """Log-probs `[*S V]`, float64."""
    x = np.asarray(x, np.float64)
    return x - np.log(np.sum(np.exp(x - x.max(-1, keepdims=True)), -1, keepdims=True)) - x.max(-1, keepdims=True)


def oracle(kind, p, q, beta=0.5):
    """One position at a time, from probabilities."""
    out = np.zeros(p.shape[:-1])
    for at in np.ndindex(out.shape):
        a, b = np.exp(p[at]), np.exp(q[at])
        m = beta * b + (1 - beta) * a
        out[at] = {
            "reverse_kl": sum(x * np.log(x / y) for x, y in zip(a, b)),
            "forward_kl": sum(y * np.log(y / x) for x, y in zip(a, b)),
            "jsd": sum(beta * y * np.log(y / z) + (1 - beta) * x * np.log(x / z) for x, y, z in zip(a, b, m)),
        }[kind]
    return out


def logits(seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    return spread * rng.normal(size=(2, *SHAPE, V))


KINDS = [("reverse_kl", 0.5), ("forward_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_divergence_is_that_of_a_float64_twin_and_so_is_its_gradient(kind, beta):
    student, teacher = logits()
    mask = np.ones(SHAPE, bool)
    mask[1], mask[0, 2] = False, False
    goal = softmax(teacher)

    def loss(x):
        given = jnp.where(mask[..., None], jax.nn.log_softmax(x), jnp.nan)
        return jnp.sum(rl.divergence(given, np.where(mask[..., None], goal, np.nan).astype(x.dtype), kind=kind, beta=beta, where=mask))

    expected = np.where(mask, oracle(kind, softmax(student), goal, beta), 0)
    found = rl.divergence(softmax(student).astype(np.float32), goal.astype(np.float32), kind=kind, beta=beta, where=mask)
    np.testing.assert_allclose(found, expected, atol=3e-6)
    with jax.enable_x64(True):
        found = rl.divergence(softmax(student), goal, kind=kind, beta=beta, where=mask)
        np.testing.assert_allclose(found, expected, atol=1e-12)
        slope = jax.grad(loss)(jnp.asarray(student))
    for at in ((0, 0, 1), (2, 3, 6), (1, 0, 0), (0, 2, 3)):
        step = np.zeros_like(student)
        step[at] = 1e-6
        up, down = (np.sum(np.where(mask, oracle(kind, softmax(student + s), goal, beta), 0)) for s in (step, -step))
        assert slope[at] == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient(kind, beta, top_k):
    x = jnp.asarray(logits()[0], jnp.float32)

    def loss(x):
        return jnp.sum(rl.divergence(jax.nn.log_softmax(x), jax.nn.log_softmax(x), kind=kind, beta=beta, top_k=top_k))

    value, slope = jax.value_and_grad(loss)(x)
    assert float(value) == 0
    assert not np.any(slope)


def test_an_empty_mask_has_loss_0_and_gradient_0_whatever_stands_there():
    nothing = np.zeros(SHAPE, bool)
    broken = jnp.full((*SHAPE, V), jnp.nan)
    for kind in rl.DIVERGENCES[:-1]:
        for top_k in (None, 2):
            def loss(x, kind=kind, top_k=top_k):
                return jnp.sum(rl.divergence(x, broken, kind=kind, top_k=top_k, where=nothing))

            value, slope = jax.value_and_grad(loss)(broken)
            assert float(value) == 0
            assert not np.any(slope)
    value, slope = jax.value_and_grad(lambda x: jnp.sum(rl.sampled_reverse_kl(x, x, where=nothing)))(broken[..., 0])
    assert float(value) == 0
    assert not np.any(slope)


def test_tokens_that_neither_would_say_weigh_nothing():
    student, teacher = (np.where(np.arange(V) == 3, -np.inf, x) for x in logits())
    without = [np.delete(x, 3, axis=-1) for x in (student, teacher)]
    for kind in rl.DIVERGENCES[:-1]:
        found = rl.divergence(*(jax.nn.log_softmax(x.astype(np.float32)) for x in (student, teacher)), kind=kind)
        np.testing.assert_allclose(found, oracle(kind, *map(softmax, without)), atol=3e-6)


def test_bins_hold_the_teachers_likeliest_tokens_and_the_mass_of_all_others():
    student, teacher = map(softmax, logits(1))
    with jax.enable_x64(True):
        of_student, of_teacher = map(np.asarray, rl.top_k_bins(student, teacher, k=3))
    for at in np.ndindex(SHAPE):
        ids = np.argsort(-teacher[at])[:3]
        for found, whole in ((of_student, student), (of_teacher, teacher)):
            kept = np.exp(whole[at][ids])
            np.testing.assert_allclose(np.exp(found[at]), [*kept, 1 - kept.sum()], atol=1e-12)
    for kind in rl.DIVERGENCES[:-1]:
        few, most, all_of_it = (np.asarray(rl.divergence(student, teacher, kind=kind, top_k=k)) for k in (1, V - 1, V))
        np.testing.assert_allclose(most, oracle(kind, student, teacher), atol=1e-5)  # the tail is one token: nothing is joined
        np.testing.assert_allclose(all_of_it, oracle(kind, student, teacher), atol=1e-5)
        assert np.all(few <= most + 1e-6)
        assert np.any(few < most - 1e-3)
    with pytest.raises(ValueError, match="k=7 must lie between 1 and 6"):
        rl.top_k_bins(student, teacher, k=V)


def test_one_token_estimates_the_exact_divergence_and_its_gradient():
    student, teacher = (x[0, 0] for x in logits(2))
    with jax.enable_x64(True):
        def expected(x):
            p = jax.lax.stop_gradient(jnp.exp(jax.nn.log_softmax(x)))
            return jnp.sum(p * rl.sampled_reverse_kl(jax.nn.log_softmax(x), softmax(teacher)))

        def exact(x):
            return rl.reverse_kl(jax.nn.log_softmax(x), softmax(teacher))

        (value, slope), (goal, along) = (jax.value_and_grad(f)(jnp.asarray(student)) for f in (expected, exact))
    assert float(value) == pytest.approx(float(goal), abs=1e-12)
    np.testing.assert_allclose(slope, along, atol=1e-12)
    same = jnp.asarray(student, jnp.float32)
    value, slope = jax.value_and_grad(lambda x: jnp.sum(rl.sampled_reverse_kl(x, same)))(same)
    assert float(value) == 0
    assert not np.any(slope)


def test_the_ends_of_the_mixture_are_the_two_kls():
    p, q = map(softmax, logits(3, 1.0))
    with jax.enable_x64(True):
        np.testing.assert_allclose(rl.generalized_jsd(p, q, beta=1e-7) / 1e-7, rl.forward_kl(p, q), rtol=1e-4)
        np.testing.assert_allclose(rl.generalized_jsd(p, q, beta=1 - 1e-7) / 1e-7, rl.reverse_kl(p, q), rtol=1e-4)
    for beta in (0.0, 1.0):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            rl.generalized_jsd(p, q, beta=beta)
    with pytest.raises(ValueError, match="kind"):
        rl.divergence(p, q, kind="sampled")


SPANS = np.asarray([[1, 1, 2, 0, 5, 5, 5], [7, 0, 0, 3, 3, 4, 4], [0] * 7])


def span_oracle(p, q, spans):
    """One span at a time, float64: (value, gradient)."""
    value, slope = np.zeros(p.shape), np.zeros(p.shape)
    for row, numbers in enumerate(spans):
        for number in set(numbers[numbers > 0]):
            gap = sum(p[row, t] - q[row, t] for t in np.flatnonzero(numbers == number))
            value[row, numbers == number], slope[row, numbers == number] = gap / np.sum(numbers == number), gap
    return value, slope


def test_spans_have_their_summed_gaps_in_equal_parts_and_whole_in_the_gradient():
    p, q = -np.random.default_rng(0).gamma(2.0, size=(2, *SPANS.shape))
    p[SPANS == 0], q[SPANS == 0] = np.nan, np.nan
    expected, goal = span_oracle(p, q, SPANS)
    value, slope = jax.vjp(lambda x: rl.span_reverse_kl(x, q.astype(np.float32), SPANS), p.astype(np.float32))
    np.testing.assert_allclose(value, expected, atol=1e-6)
    np.testing.assert_allclose(slope(jnp.ones_like(value))[0], goal, atol=3e-6)
    for row, numbers in enumerate(SPANS):
        assert float(value[row].sum()) == pytest.approx(np.sum(np.where(numbers > 0, p - q, 0)[row]), abs=3e-6)
    assert rl.span_reverse_kl(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0), int)).shape == (2, 0)


def test_spans_of_one_token_are_the_sampled_estimate_of_each_token():
    p, q = -np.random.default_rng(1).gamma(2.0, size=(2, 3, 7)).astype(np.float32)
    alone = np.broadcast_to(np.arange(1, 8), p.shape)
    for one, other in zip(
        jax.value_and_grad(lambda x: jnp.sum(rl.span_reverse_kl(x, q, alone)))(p),
        jax.value_and_grad(lambda x: jnp.sum(rl.sampled_reverse_kl(x, q)))(p),
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_mean_gradient_of_a_span_is_that_of_the_divergence_of_spans():
    """Two tokens of the student, one of the teacher, every draw in turn: the span is one draw from V² of them."""
    rng, teacher = np.random.default_rng(2), softmax(np.random.default_rng(3).normal(size=V * V))
    logits = rng.normal(size=V), rng.normal(size=(V, V))
    with jax.enable_x64(True):
        def draws(x):
            first, second = jax.nn.log_softmax(x[0]), jax.nn.log_softmax(x[1])
            return jnp.stack([jnp.broadcast_to(first[:, None], (V, V)), second], axis=-1).reshape(-1, 2)

        def expected(x):
            chance = jax.lax.stop_gradient(jnp.exp(draws(x).sum(-1)))
            told = jnp.stack([teacher, 0 * teacher], axis=-1)  # in any parts
            return jnp.sum(chance[:, None] * rl.span_reverse_kl(draws(x), told, np.ones((V * V, 2), int)))

        def exact(x):
            return rl.reverse_kl(draws(x).sum(-1), teacher)

        (value, slope), (goal, along) = (jax.value_and_grad(f)(tuple(map(jnp.asarray, logits))) for f in (expected, exact))
    assert float(value) == pytest.approx(float(goal), abs=1e-12)
    for one, other in zip(slope, along, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
