"""Teachers in the update: the loss is that of unpacked rows (law 5), two teachers pull two roles, and what is exactly 0."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_update import BOTH, in_one_shape, make_samples, padded, reference, unrolled
from test_update import CONFIG, SGD, assert_close, params

from marl_llm.algorithms import divergence, make_recipe, reduce_parts
from marl_llm.models import Decoder, prompt_mask, prompt_positions
from marl_llm.training import LearnerOptions, Trained, Update, make_mesh, make_train_state
from marl_llm.training.distillation import Teacher, Teaching, cut_vocabulary, teaching_of

ALONE = dict(group_size=2, policy_coef=0.0, distill_coef=1.0)
TWO = Teaching((CONFIG, CONFIG), (0, 1))


@functools.cache
def second():
    return jax.tree.map(lambda x: x * 1.2 - 0.02, params())


@jax.jit
def distributions(params, prompt, prompt_where, response):
    """Log-probs `[S, R, V]` from plain causal rows."""
    full = jnp.concatenate([prompt, response], axis=1)
    real = jnp.concatenate([prompt_where, jnp.ones(response.shape, bool)], axis=1)
    hidden, _ = Decoder(CONFIG).apply({"params": params}, full, prompt_positions(real), prompt_mask(real))
    return jax.nn.log_softmax((hidden @ params["embedding"].T)[:, -response.shape[1] - 1 : -1])


@functools.cache
def made(recipe, teaching, devices=1, **options):
    return Update(LearnerOptions(recipe, SGD, **dict(row_tokens=32, minibatch=100) | options), CONFIG, make_mesh(devices), None, teaching)


def step(recipe, teaching=TWO, teachers=None, start=None, order=None, rate=1.0, **options):
    samples, table = make_samples()
    if order is not None:
        samples, table = [samples[i] for i in order], jax.tree.map(lambda x: x[order], table)
    begun = Trained(make_train_state(params() if start is None else start, SGD))
    teachers = (reference(), second()) if teachers is None else teachers
    samples = in_one_shape(samples, options.get("minibatch"))
    trained, metrics = made(recipe, teaching, **options)(begun, None, samples, table, BOTH, jnp.float32(rate), 0, teachers=teachers)
    return jax.tree.map(np.asarray, trained.policy.params), metrics


def plain(recipe, teachers):
    """Loss, gradient and divergence by agent on plain rows: the definition."""
    samples, table = make_samples()
    *rows, where, _ = padded(samples)
    goal = jnp.where((table.agent == 0)[:, None, None], *(distributions(one, *rows) for one in teachers))

    def loss(p):
        far = divergence(
            distributions(p, *rows), goal, kind=recipe.distill_divergence, beta=recipe.distill_beta, top_k=recipe.distill_top_k, where=where
        )
        total, count = reduce_parts(far, where=where, how=recipe.loss_aggregation)
        return total / count, far

    (value, far), gradient = jax.value_and_grad(loss, has_aux=True)(params())
    by_agent = [float(far[table.agent == n].sum() / where[table.agent == n].sum()) for n in (0, 1)]
    return float(value), gradient, by_agent


@pytest.mark.parametrize("fields", [{}, dict(distill_divergence="forward_kl", distill_top_k=3), dict(distill_divergence="jsd")], ids=str)
def test_law_5_teachers_on_packed_rows_give_the_step_of_unrolled_rows(fields):
    recipe = make_recipe("grpo", **ALONE, **fields)
    value, gradient, by_agent = plain(recipe, (reference(), second()))
    moved, metrics = step(recipe, microbatch_tokens=64)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-3
    assert_close(jax.tree.map(lambda a, b: a - b, params(), moved), gradient, atol=1e-5)
    assert metrics["loss"] == pytest.approx(value, rel=1e-5)
    assert [metrics["distill_kl/0"], metrics["distill_kl/1"]] == pytest.approx(by_agent, rel=1e-5)


def test_law_5_neither_order_nor_micro_batches_nor_devices_change_the_step():
    recipe = make_recipe("grpo", **ALONE | dict(policy_coef=1.0))
    moved, metrics = step(recipe, microbatch_tokens=64)
    order = np.random.default_rng(0).permutation(len(make_samples()[0]))
    for other, figures in (step(recipe, order=order, microbatch_tokens=64), step(recipe), step(recipe, devices=2)):
        assert_close(other, moved, atol=5e-6)
        for name in ("loss", "distill_kl/0", "distill_kl/1", "teacher_gap/0", "teacher_gap/1"):
            assert figures[name] == pytest.approx(metrics[name], abs=2e-6), name


def test_a_student_that_equals_its_teachers_has_no_loss_beyond_rounding_and_stays_as_it_is():
    """The functions give exactly 0 for equal distributions; the two forward passes of an update may round differently."""
    for kind in ("reverse_kl", "sampled"):
        recipe = make_recipe("grpo", **ALONE, distill_divergence=kind)
        moved, metrics = step(recipe, teachers=(params(), params()))
        assert_close(moved, params(), atol=1e-5)
        assert abs(metrics["loss"]) < 1e-6
        assert max(abs(metrics[name]) for name in ("distill_kl/0", "distill_kl/1", "teacher_gap/1")) < 1e-6


def test_a_role_without_a_teacher_adds_nothing_but_its_tokens():
    recipe = make_recipe("grpo", **ALONE)
    _, both = step(recipe)
    _, one = step(recipe, Teaching((CONFIG,), (0, -1)), (reference(),))
    assert one["distill_kl/0"] == pytest.approx(both["distill_kl/0"], rel=1e-6)
    assert "distill_kl/1" not in one
    assert 0 < one["loss"] < both["loss"]
    _, same = step(recipe, Teaching((CONFIG,), (0, 0)), (second(),))  # one teacher of both roles
    assert same["distill_kl/1"] == pytest.approx(both["distill_kl/1"], rel=1e-6)
    assert same["distill_kl/0"] > 0.01


def test_the_sampled_estimate_is_the_mean_gap_of_log_probs():
    samples, table = make_samples()
    *rows, where, _ = padded(samples)
    _, metrics = step(make_recipe("grpo", **ALONE, distill_divergence="sampled"))
    gap = unrolled(params(), *rows, 1.0)[0] - unrolled(reference(), *rows, 1.0)[0]
    mine = where & (table.agent == 0)[:, None]
    assert metrics["distill_kl/0"] == pytest.approx(float(gap[mine].mean()), rel=1e-4)
    assert metrics["teacher_gap/0"] == pytest.approx(metrics["distill_kl/0"], rel=1e-6)


def test_a_student_of_two_teachers_halves_its_distance_to_both_within_forty_steps():
    recipe, now = make_recipe("grpo", **ALONE), params()
    distances = []
    for _ in range(40):
        now, metrics = step(recipe, start=now, rate=0.03)
        distances.append([metrics["distill_kl/0"], metrics["distill_kl/1"]])
    assert np.all(np.asarray(distances[-1]) < 0.5 * np.asarray(distances[0])), distances[:: len(distances) - 1]


def test_rows_that_pad_a_teachers_vocabulary_are_cut():
    padded = params() | {"embedding": jnp.pad(params()["embedding"], ((0, 3), (0, 0)))}
    assert_close(cut_vocabulary(padded, CONFIG.vocab_size), params(), atol=0)
    untied = cut_vocabulary({"embedding": jnp.ones((6, 4)), "output": jnp.ones((4, 6))}, 5)
    assert (untied["embedding"].shape, untied["output"].shape) == ((5, 4), (4, 5))


def test_what_contradicts_is_refused():
    with pytest.raises(ValueError, match="policy_coef=0 leaves nothing to learn from"):
        make_recipe("grpo", policy_coef=0.0)
    with pytest.raises(ValueError, match="compares whole distributions"):
        make_recipe("grpo", distill_coef=1.0, top_p=0.9)
    with pytest.raises(ValueError, match="filter_zero_variance leaves out samples"):
        make_recipe("dapo", distill_coef=1.0)
    with pytest.raises(ValueError, match="distill_coef=0 reads no teacher"):
        make_recipe("grpo", distill_top_k=4)
    with pytest.raises(ValueError, match="only distill_divergence='jsd' mixes"):
        make_recipe("grpo", distill_coef=1.0, distill_beta=0.3)
    with pytest.raises(ValueError, match="use critic='own'"):
        Update(LearnerOptions(make_recipe("ppo", distill_coef=1.0), SGD, 32, 4, critic="head"), CONFIG, make_mesh(1), None, TWO)
    other = Teacher(dataclasses.replace(CONFIG, vocab_size=CONFIG.vocab_size + 1), {})
    with pytest.raises(ValueError, match="they need one tokenizer"):
        teaching_of(CONFIG, ("a", "b"), {"b": other})
