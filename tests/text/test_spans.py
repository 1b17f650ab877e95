"""A response and its reading by another tokenizer are cut at the same places, and what cannot be read is in no span."""

import doctest

import numpy as np
import pytest
from checkpoint_text import tokenizer_of

from marl_llm.text import ByteTokenizer, spans, train_pieces
from marl_llm.text.spans import SpanReader, align_spans
from marl_llm.text.token_bytes import token_bytes

BYTES, QWEN, DEEPSEEK = ByteTokenizer(("<eos>", "<think>"), ("<eos>",)), tokenizer_of("qwen3"), tokenizer_of("deepseek")
TEXTS = ["The quick brown fox üñí 中文 don't 1234\n\n  indented = [0, 1]", "user assistant think", " tool_call 😀"]


def reader(student=BYTES, teacher=QWEN):
    return SpanReader(student, teacher, student.stop_ids, teacher.eos_id)


def walk(pieces, others):
    """(spans, other spans) by two pointers: whichever side has read less reads on, and a span ends where both have read as much."""
    numbers, sides, read, number = ([], []), (list(pieces), list(others)), [0, 0], 1
    while any(sides):
        side = int(read[0] > read[1] or not sides[0])
        read[side] += len(sides[side].pop(0))
        numbers[side].append(number)
        number += read[0] == read[1]
    return numbers


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("teacher", [QWEN, DEEPSEEK, BYTES], ids=["qwen", "deepseek", "bytes"])
def test_spans_end_where_both_tokenizers_have_a_boundary(text, teacher):
    """Against a walk with two pointers; the student's tokens are cut at random, as a policy may."""
    data, rng = text.encode(), np.random.default_rng(0)
    for share in (0.0, 0.2, 0.7, 1.0):
        cuts = [0, *(1 + np.flatnonzero(rng.random(len(data) - 1) < share)), len(data)]
        pieces = [data[a:b] for a, b in zip(cuts, cuts[1:])]
        reading = align_spans(pieces, teacher)
        assert teacher.decode(reading.ids) == text
        assert [reading.spans.tolist(), reading.id_spans.tolist()] == list(walk(pieces, [token_bytes(teacher)[i] for i in reading.ids]))
        if share == 0:
            assert set(reading.spans) == set(reading.id_spans) == {1}  # the response is one span


def test_equal_tokenizers_have_spans_of_one_token():
    ids = [*QWEN.encode(TEXTS[0]), QWEN.special_ids["<think>"], *QWEN.encode("a fox"), QWEN.eos_id]
    reading = SpanReader(QWEN, QWEN, QWEN.stop_ids, QWEN.eos_id).read(ids)
    assert reading.ids.tolist() == ids
    assert reading.spans.tolist() == reading.id_spans.tolist() == list(range(1, len(ids) + 1))


@pytest.mark.parametrize(
    ("pieces", "numbers"),
    [
        ([], []),
        ([b" \xc3", b"\xbc", "ñí".encode(), b" brown"], [1, 1, 1, 2]),  # the halves of a character that the teacher reads in one
        ([b" brown", b"\xc3"], [1, 0]),  # a half that the budget cut off
        ([b" brown", b"\xff", b" tool"], [1, 0, 2]),  # no text between two spans
        ([b" br", b"\xff", b"own"], [0, 0, 0]),  # ... and within one
        ([b" br", b"", b"own", b" tool"], [0, 0, 0, 2]),  # an id without a token
        ([b" brown\xff", b" tool"], [0, 2]),
        ([b"\xff\xfe"], [0]),
    ],
    ids=str,
)
def test_what_is_no_text_is_in_no_span(pieces, numbers):
    reading = align_spans(pieces, QWEN)
    assert reading.spans.tolist() == numbers
    assert QWEN.decode(reading.ids) == b"".join(pieces).decode(errors="ignore")


def test_a_teacher_is_compared_up_to_what_it_cannot_spell():
    pieces, text = train_pieces(("north", "east")), [b"north", b" east", b" west", b" north"]
    assert align_spans(text[:2], pieces).spans.tolist() == [1, 2]  # the space that it writes first is not counted
    assert align_spans(text, pieces).spans.tolist() == [1, 2, 0, 0]
    accent = [b" brown", " e\u0301".encode(), b" brow", b"n"]  # which it normalises: both end a token behind 15 bytes, of other texts
    assert align_spans(accent, QWEN).spans.tolist() == [1, 0, 0, 0]


def test_the_end_is_the_teachers_end_and_other_special_tokens_are_those_of_the_same_spelling():
    end, think = (BYTES.special_ids[name] for name in ("<eos>", "<think>"))
    word, one = BYTES.encode(" brown"), QWEN.encode(" brown")
    reading = reader().read([*word, think, *word, BYTES.pad_id, end])
    assert reading.ids.tolist() == [*one, QWEN.special_ids["<think>"], *one, QWEN.eos_id]
    assert reading.spans.tolist() == [1, 1, 1, 1, 1, 1, 7, 8, 8, 8, 8, 8, 8, 0, 15]
    assert reading.id_spans.tolist() == [1, 7, 8, 15]
    assert reader().read(word).ids.tolist() == one  # the budget cut it off: it has no end
    other = ByteTokenizer(("<stop>",))
    assert SpanReader(BYTES, other, BYTES.stop_ids, None).read([think, end]).spans.tolist() == [0, 0]
    assert [len(part) for part in reader().read([])] == [0, 0, 0]


def test_the_examples_of_the_docstring_are_true():
    assert doctest.testmod(spans).failed == 0
