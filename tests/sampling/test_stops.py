"""Stop strings end a response at the token that completes them, however the text was cut into tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from marl_llm.sampling import stop_rule, stops
from marl_llm.sampling.sampler import ends_with
from marl_llm.text import ByteTokenizer, HuggingFaceTokenizer, train_sentencepiece
from marl_llm.text.token_bytes import token_bytes
from marl_llm.text.tokenizer import train_pieces

BYTES = ByteTokenizer(("<end>",), ("<end>",))


def end_of(rule, ids):
    """How many tokens are drawn until the rule ends the response; None: never."""
    state = 0
    for n, i in enumerate(ids):
        state = rule.next(state, i)
        if rule.ends[state]:
            return n + 1
    return None


@given(st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab\u00e9", max_size=12))
@example(["abba", "bb"], "abb")  # a string inside another
@example(["aab", "ab"], "aaab")  # a failed match goes on with its own end
def test_the_automaton_finds_the_first_completion_of_any_string(strings, text):
    rule = stop_rule(BYTES.vocab_size, (), tuple(strings), BYTES)
    data = text.encode()
    want = [n for n in range(1, len(data) + 1) if any(data[:n].endswith(s.encode()) for s in strings)]
    assert end_of(rule, BYTES.encode(text)) == (want[0] if want else None)


def byte_level():
    """A byte-level BPE of its own, whose tokens are words with the space in front of them."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    words = ["the cat sat on the mat. the dog sat, too"] * 3
    made.train_from_iterator(words, tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<end>"])
    return HuggingFaceTokenizer({"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps({"eos_token": "<end>"})})


def test_a_string_may_begin_and_end_inside_tokens():
    tokenizer = byte_level()
    pieces = token_bytes(tokenizer)
    text = "the cat sat on the mat. the dog sat, too"
    ids = tokenizer.encode(text)
    assert b"".join(pieces[i] for i in ids).decode() == text
    assert len(ids) < len(text)
    for stop in ("cat sat", "t. t", "the dog", "e"):
        n = end_of(stop_rule(tokenizer.vocab_size, (), (stop,), tokenizer), ids)
        said = b"".join(pieces[i] for i in ids[:n])
        assert stop.encode() in said
        assert stop.encode() not in b"".join(pieces[i] for i in ids[: n - 1])


def test_a_byte_level_vocabulary_has_a_token_for_each_byte_and_every_text_is_its_tokens_bytes():
    tokenizer = byte_level()
    pieces = token_bytes(tokenizer)
    assert sorted(piece for piece in pieces if len(piece) == 1) == [bytes([b]) for b in range(256)]
    text = "".join(map(chr, range(0x20, 0x700))) + "中文 😀\n\t"
    assert b"".join(pieces[i] for i in tokenizer.encode(text)).decode() == text


@pytest.mark.parametrize("kind", ["sentencepiece", "pieces", "bytes"])
def test_the_bytes_of_tokens_spell_what_the_tokenizer_decodes(kind):
    text = "the cat sat on the mat \u00e9" if kind != "pieces" else "cat mat cat"
    made = {
        "sentencepiece": lambda: train_sentencepiece(["the cat sat on the mat", "the dog sat on the cat"] * 20, 300),
        "pieces": lambda: train_pieces(("cat", "mat")),
        "bytes": lambda: BYTES,
    }
    tokenizer = made[kind]()
    ids = tokenizer.encode(text)
    assert b"".join(token_bytes(tokenizer)[i] for i in ids).decode().strip() == tokenizer.decode(ids).strip() == text
    assert token_bytes(tokenizer)[tokenizer.pad_id] == b""
    for spelling, i in tokenizer.special_ids.items():
        assert token_bytes(tokenizer)[i] == spelling.encode()


def test_a_string_that_no_text_can_hold_stops_nothing():
    rule = stop_rule(BYTES.vocab_size, (), ("\ud800", "b"), BYTES)
    assert end_of(rule, BYTES.encode("aab")) == 3
    assert end_of(rule, BYTES.encode("aaa")) is None


def test_a_string_that_is_a_special_token_stops_at_that_token():
    rule = stop_rule(BYTES.vocab_size, (), ("<end>", "b<end>c"), BYTES)
    a, end = BYTES.encode("a")[0], BYTES.stop_ids[0]
    assert end_of(rule, [a, end, a]) == 2
    assert end_of(rule, BYTES.encode("a<end>a")) == 6
    rule = stop_rule(BYTES.vocab_size, (), ("b<end>c",), BYTES)
    b, c = BYTES.encode("bc")
    assert end_of(rule, [a, end, b, end, c]) == 5


def test_a_long_stop_string_is_refused_before_any_work_and_a_short_one_is_small():
    tokenizer = byte_level()
    size = 151_936
    for strings in (("a" * 5000,), ("\u4e2d" * 400,), tuple("ab" * n for n in range(1, 40)), ("a" * 1024,)):
        with pytest.raises(ValueError, match=r"stop strings have .* together; at most 1,023"):
            stop_rule(size, (), strings, tokenizer)
    rule = stop_rule(size, (5,), ("the cat sat on the mat. " * 40,), tokenizer)
    assert sum(part.nbytes for part in rule) < 8 << 20
    assert end_of(rule, tokenizer.encode("a dog. " + "the cat sat on the mat. " * 40)) is not None


def test_the_rules_that_are_kept_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(stops, "CACHED", 1 << 20)
    monkeypatch.setattr(stops, "_CACHE", stops._Cache())
    first = stop_rule(60_000, (0,))
    assert stop_rule(60_000, (0,)) is first
    for i in range(1, 12):
        stop_rule(60_000, (i,))
    assert sum(part.nbytes for rule in stops._CACHE._rules.values() for part in rule) <= 1 << 20
    assert stop_rule(60_000, (0,)) is not first


def test_stop_ids_end_in_any_state_and_padding_does_not_break_a_string():
    rule = stop_rule(BYTES.vocab_size, BYTES.stop_ids, ("ab",), BYTES)
    a, b, x, end = (*BYTES.encode("abx"), BYTES.stop_ids[0])
    assert end_of(rule, [a, end]) == 2
    assert end_of(rule, [x, x, end, a]) == 3
    assert end_of(rule, [a, 0, b]) == 3  # padding adds no text
    assert end_of(rule, [a, x, b]) is None


def test_the_compiled_form_agrees():
    rule = stop_rule(BYTES.vocab_size, (), ("aba", "bb"), BYTES)
    rows = [BYTES.encode(t) for t in ("abaabb", "aabbab", "aaaaaa")]

    @jax.jit
    def run(tokens):
        def step(carry, token):
            state, ended = ends_with(rule, token, carry)
            return state, ended

        return jax.lax.scan(step, jnp.zeros(len(rows), jnp.int32), tokens.T)[1]

    ended = np.asarray(run(jnp.asarray(rows)))
    for i, row in enumerate(rows):
        n = end_of(rule, row)
        assert (np.flatnonzero(ended[:, i])[0] + 1 if ended[:, i].any() else None) == n


def test_rules_that_cannot_be_are_told():
    with pytest.raises(ValueError, match="outside the vocabulary"):
        stop_rule(10, (10,))
    with pytest.raises(ValueError, match="empty stop string"):
        stop_rule(BYTES.vocab_size, (), ("",), BYTES)
    with pytest.raises(ValueError, match="need a tokenizer"):
        stop_rule(10, (), ("a",))
