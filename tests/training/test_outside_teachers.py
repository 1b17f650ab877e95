"""Teachers behind an endpoint: what they say of the student's samples, and the update, are those of the same teacher in process."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_update import BOTH, in_one_shape, make_samples, reference
from test_teachers import ALONE, made
from test_update import CONFIG, SGD, assert_close, params

from marl_llm.algorithms import divergence, make_recipe
from marl_llm.algorithms.distillation import bins_of, top_k_bins
from marl_llm.models import log_probs
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.serving import ChatServer, policy_answers
from marl_llm.text import ByteTokenizer
from marl_llm.tools.teacher_endpoint import TaughtSample, TeacherEndpoint, TeacherServer
from marl_llm.training import Trained, make_train_state
from marl_llm.training.distillation import Teacher, Teaching, teaching_of
from marl_llm.training.outside_teachers import ask_teachers, top_k_of
from marl_llm.training.packing import Tokens
from marl_llm.workflows import PlainText

LOCAL, OUTSIDE = Teaching((CONFIG,), (0, 0)), Teaching((), (-1, -1), (0, 1))
MIXED = Teaching((CONFIG,), (0, -1), (1,))
KINDS = [dict(distill_divergence="sampled"), dict(distill_top_k=5)]


@pytest.fixture(scope="module")
def endpoint():
    """The teacher `reference()`, served by the library's own endpoint."""
    sizes = EngineConfig(max_num_seqs=4, prompt_tokens=8, response_tokens=8, decode_steps=2)
    with Engine({"teacher": (CONFIG, reference())}, jax.random.key(0), sizes=sizes) as engine:
        answers = policy_answers(engine, "teacher", PlainText(ByteTokenizer(), (1,)), max_prompt=8, max_tokens=8)
        with ChatServer({"teacher": answers}) as server:
            yield TeacherEndpoint(TeacherServer(server.url, "teacher"), CONFIG.vocab_size)


def told(endpoint, recipe, agents=(0, 1)):
    samples, table = make_samples()
    return ask_teachers(recipe, dict.fromkeys(agents, endpoint), Tokens.of(samples), table)


def step(recipe, teaching, teachers=(), taught=None, **options):
    samples, table = make_samples()
    begun = Trained(make_train_state(params(), SGD))
    update = made(recipe, teaching, **options)
    trained, metrics = update(begun, None, in_one_shape(samples, None), table, BOTH, jnp.float32(1.0), 0, teachers=teachers, taught=taught)
    return jax.tree.map(np.asarray, trained.policy.params), metrics


def test_it_says_of_every_response_token_what_the_teacher_gives_it_in_process(endpoint):
    samples, _ = make_samples()
    found, tokens = told(endpoint, make_recipe("grpo", **ALONE, distill_top_k=5)), Tokens.of(samples)
    rows = [np.concatenate([sample.prompt, sample.response]) for sample in samples]
    ids, sizes = np.stack([np.pad(row, (0, 16 - len(row))) for row in rows]), np.asarray(list(map(len, rows)))
    table_of = jax.jit(log_probs, static_argnums=0)
    table = np.asarray(table_of(CONFIG, reference(), jnp.asarray(ids), jnp.arange(16) < sizes[:, None]).log_probs)
    for number, sample in enumerate(samples):
        size, at = sample.response.size, tokens.response_at[number]
        own = table[number, sizes[number] - size : sizes[number]]
        np.testing.assert_allclose(found.log_probs[at : at + size], own, atol=1e-4, rtol=0)
        bins = found.bins[at : at + size]
        np.testing.assert_allclose(np.exp(bins).sum(axis=1), 1, atol=1e-5)
        assert np.all(np.diff(bins[:, :5]) <= 0)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_the_update_is_that_of_the_same_teacher_in_process(endpoint, fields):
    recipe = make_recipe("grpo", **ALONE, **fields)
    moved, metrics = step(recipe, LOCAL, (reference(),), microbatch_tokens=64)
    other, figures = step(recipe, OUTSIDE, taught=told(endpoint, recipe), microbatch_tokens=64)
    assert max(np.abs(one - two).max() for one, two in zip(jax.tree.leaves(moved), jax.tree.leaves(params()))) > 1e-3
    assert_close(other, moved, atol=1e-5)
    for name in ("loss", "distill_kl/0", "distill_kl/1", "teacher_gap/0", "teacher_gap/1"):
        assert figures[name] == pytest.approx(metrics[name], abs=1e-5), name


def test_one_role_may_have_its_teacher_here_and_another_elsewhere_on_any_devices(endpoint):
    recipe = make_recipe("grpo", **ALONE, **KINDS[1])
    moved, _ = step(recipe, LOCAL, (reference(),), microbatch_tokens=64)
    other, _ = step(recipe, MIXED, (reference(),), taught=told(endpoint, recipe, (1,)), devices=2)
    assert_close(other, moved, atol=1e-5)


class Counting:
    """A teacher that counts what it is asked, and gives each token the log-prob -1."""

    vocab_size = CONFIG.vocab_size

    def __init__(self):
        self.asked = []

    def score(self, samples, top_k=0):
        self.asked += samples
        return [
            TaughtSample(np.full(len(one.response), -1, np.float32), np.zeros((len(one.response), 0), np.int32),
                         np.zeros((len(one.response), 0), np.float32))
            for one in samples
        ]  # fmt: skip


def test_each_teacher_is_asked_once_about_the_samples_of_its_agents_that_count():
    samples, table = make_samples()
    recipe, teacher = make_recipe("grpo", **ALONE, **KINDS[0]), Counting()
    where = np.arange(len(samples)) % 3 > 0
    table, tokens = dataclasses.replace(table, where=where), Tokens.of(samples)
    found = ask_teachers(recipe, {0: teacher}, tokens, table)
    chosen = [number for number in range(len(samples)) if where[number] and table.agent[number] == 0]
    assert [list(one.prompt) for one in teacher.asked] == [samples[number].prompt.tolist() for number in chosen]
    assert [list(one.response) for one in teacher.asked] == [samples[number].response.tolist() for number in chosen]
    assert found.log_probs.sum() == -sum(samples[number].response.size for number in chosen)
    assert ask_teachers(recipe, {}, tokens, table) is None
    with pytest.raises(ValueError, match="which no endpoint tells: set distill_top_k"):
        top_k_of(make_recipe("grpo", **ALONE))


def test_who_teaches_whom_holds_the_local_teachers_alone():
    local, other = Teacher(CONFIG, {}), Counting()
    teaching, distinct = teaching_of(CONFIG, ("a", "b", "c"), {"a": other, "c": local})
    assert (teaching, distinct) == (Teaching((CONFIG,), (-1, -1, 0), (0,)), [local])
    assert teaching.agents == (0, 2)
    other.vocab_size += 1
    with pytest.raises(ValueError, match="the teacher of a has"):
        teaching_of(CONFIG, ("a",), {"a": other})


def test_bins_of_told_tokens_are_those_of_the_whole_distribution():
    rng = np.random.default_rng(0)
    student, teacher = (jax.nn.log_softmax(3 * rng.normal(size=(4, 12)).astype(np.float32)) for _ in range(2))
    top, ids = jax.lax.top_k(teacher, 3)
    bins = bins_of(student, ids), bins_of(teacher, ids)
    for one, other in zip(bins, top_k_bins(student, teacher, k=3), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(bins[1][:, :3], top)
    np.testing.assert_allclose(
        divergence(*bins, kind="reverse_kl"), divergence(student, teacher, kind="reverse_kl", top_k=3), atol=1e-6
    )  # fmt: skip
