"""Teachers of another tokenizer in the update: the step of one in process where both read alike, sums of spans where they do not."""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest
from test_outside_teachers import LOCAL, OUTSIDE, step
from test_packed_update import make_samples, padded, reference, unrolled
from test_privileged import scorer_of
from test_teachers import ALONE
from test_update import CONFIG, assert_close, params

from marl_llm.algorithms import make_recipe
from marl_llm.text import ByteTokenizer, Message
from marl_llm.text.spans import SpanReader
from marl_llm.tools.teacher_endpoint import StudentSample, TaughtSample
from marl_llm.training.outside_teachers import ask_teachers
from marl_llm.training.packing import Tokens
from marl_llm.training.span_teachers import SpanScores, alignment_figures, translated_prompt
from marl_llm.workflows import PlainText

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "text"))

from checkpoint_text import chat_of, tokenizer_of

RECIPE = make_recipe("grpo", **ALONE, distill_divergence="sampled")
BYTES, QWEN = ByteTokenizer(("<eos>",), ("<eos>",)), tokenizer_of("qwen3")
METRICS = ("loss", "distill_kl/0", "distill_kl/1", "teacher_gap/0", "teacher_gap/1")


def told(teacher, privileged=None):
    samples, table = make_samples()
    return ask_teachers(RECIPE, dict.fromkeys((0, 1), teacher), Tokens.of(samples), table, privileged)


def test_with_equal_tokenizers_the_step_is_that_of_the_teacher_in_process():
    """The samples' ids are those of control characters: text that both read as one token each."""
    alike = SpanScores(SpanReader(BYTES, BYTES, (), None), scorer_of(reference()), CONFIG.vocab_size)
    taught = told(alike)
    moved, metrics = step(RECIPE, LOCAL, (reference(),), microbatch_tokens=64)
    other, figures = step(RECIPE, OUTSIDE, taught=taught, microbatch_tokens=64)
    assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(params()))) > 1e-3
    assert_close(other, moved, atol=1e-6)
    for name in METRICS:
        assert figures[name] == pytest.approx(metrics[name], abs=1e-6), name
    samples, table = make_samples()
    agents = {n: np.flatnonzero(table.agent == n) for n in (0, 1)}
    assert alignment_figures(taught, Tokens.of(samples), agents) == dict.fromkeys(
        ("span_tokens/0", "unread_tokens/0", "span_tokens/1", "unread_tokens/1"), 0.0
    )


def taught_sample(log_probs, spans=None):
    none = np.zeros((len(log_probs), 0), np.float32)
    return TaughtSample(log_probs.astype(np.float32), none.astype(np.int32), none, spans)


class Pairs:
    """A teacher that reads two tokens as one, and no token with the id 3."""

    vocab_size = CONFIG.vocab_size

    def score(self, samples, top_k=0):
        every = [np.where(one.response == 3, 0, 1 + np.arange(len(one.response)) // 2).astype(np.int32) for one in samples]
        return [taught_sample(np.where(spans, -1.0 - one.response / 8, 0), spans) for one, spans in zip(samples, every, strict=True)]


def test_law_5_spans_add_up_alike_in_any_rows_and_on_any_devices():
    samples, table = make_samples()
    taught = told(Pairs())
    *rows, where, _ = padded(samples)
    log_probs = np.asarray(unrolled(params(), *rows, 1.0)[0], np.float64)
    gaps = {0: [], 1: []}
    for number, one in enumerate(samples):
        read = np.flatnonzero(one.response != 3)
        gaps[int(table.agent[number])] += [log_probs[number, t] + 1 + one.response[t] / 8 for t in read]
    moved, metrics = step(RECIPE, OUTSIDE, taught=taught, microbatch_tokens=64)
    for agent, values in gaps.items():
        assert metrics[f"distill_kl/{agent}"] == pytest.approx(np.mean(values), abs=1e-5)
    other, figures = step(RECIPE, OUTSIDE, taught=taught, devices=2)
    assert_close(other, moved, atol=5e-6)
    for name in METRICS:
        assert figures[name] == pytest.approx(metrics[name], abs=2e-6), name
    found = alignment_figures(taught, Tokens.of(samples), {0: np.flatnonzero(table.agent == 0)})
    own = np.concatenate([one.response for one, agent in zip(samples, table.agent) if agent == 0])
    assert 0 < found["unread_tokens/0"] < found["span_tokens/0"] < 1
    assert found["unread_tokens/0"] == pytest.approx(np.mean(own == 3))


def test_law_11_what_a_teacher_cannot_read_has_the_mean_gap_of_what_it_reads():
    """Weighted as gradients are: each token of a span has the whole span's gap."""
    samples, _ = make_samples()
    taught, drawn = told(Pairs()), np.concatenate([one.log_probs for one in samples])
    gap, weights, first = drawn - taught.log_probs, [], 0
    for one in samples:
        spans = taught.spans[first : first + len(one.response)]
        weights += [gap[first : first + len(spans)][spans == number].sum() for number in spans[spans > 0]]
        first += len(spans)
    np.testing.assert_allclose(gap[taught.spans == 0], np.mean(weights), atol=1e-5)
    silent = told(Pairs(), [()] * len(samples))  # prompts that it cannot read: nobody is asked, and nothing changes
    assert not silent.spans.any()
    np.testing.assert_allclose(silent.log_probs, drawn, atol=1e-6)


class Counted:
    """Gives the n-th token of each response the log-prob -n."""

    vocab_size = QWEN.vocab_size

    def score(self, samples, top_k=0):
        self.asked = samples
        return [taught_sample(-1.0 - np.arange(len(one.response))) for one in samples]


def test_a_span_has_the_sum_of_its_teachers_log_probs():
    counted = Counted()
    scores = SpanScores(SpanReader(BYTES, QWEN, BYTES.stop_ids, QWEN.eos_id), counted, BYTES.vocab_size)
    texts = [[*BYTES.encode("The quick brown"), BYTES.eos_id], [256], [*BYTES.encode(" brown"), 256]]
    taught = scores.score([StudentSample(np.asarray([1]), np.asarray(ids)) for ids in texts])
    assert [one.response.tolist() for one in counted.asked] == [[*QWEN.encode("The quick brown"), QWEN.eos_id], QWEN.encode(" brown")]
    count = len(counted.asked[0].response)
    assert taught[0].log_probs.sum() == pytest.approx(-count * (count + 1) / 2)
    assert taught[0].log_probs[-1] == -count
    assert (taught[1].spans.tolist(), taught[1].log_probs.tolist()) == ([0], [0])  # half a character alone: the teacher is not asked
    np.testing.assert_allclose(taught[2].log_probs, [-1 / 6] * 6 + [0])
    with pytest.raises(ValueError, match="set distill_divergence='sampled'"):
        scores.score([], 3)


class Deaf(ByteTokenizer):
    """Cannot read a text, as a tokenizer whose normaliser makes special tokens of it."""

    def encode(self, text):
        raise ValueError(text)


def test_a_teacher_reads_the_messages_by_its_own_template_or_else_the_same_text():
    student, teacher = chat_of("llama3.2"), chat_of("qwen3", QWEN)
    messages = (Message("system", "Be brief."), Message("user", "3 + 4?"))
    prompt = student.start(messages).ids
    assert translated_prompt(teacher, student, messages, prompt) == teacher.start(messages).ids
    plain, text = PlainText(QWEN, QWEN.stop_ids), tuple(QWEN.encode(student.tokenizer.decode(prompt)))
    assert translated_prompt(plain, student, messages, prompt) == text
    asked = (*messages, Message("assistant", ""), Message("tool", "7"))  # how a call is written differs
    assert translated_prompt(teacher, student, asked, prompt) == text
    assert translated_prompt(dataclasses.replace(plain, tokenizer=Deaf()), student, messages, prompt) == ()
