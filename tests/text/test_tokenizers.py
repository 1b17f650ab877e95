"""Tokenizers: lossless bytes, one piece per fact, and errors that say what is wrong."""

import io
import json

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from marl_llm.games.plan_path.language import PlanPathLanguage
from marl_llm.text import ByteTokenizer, PieceTokenizer, Tokenizer, train_pieces, train_sentencepiece
from marl_llm.text.word_files import save_words

FACTS = (";", "|", "U", "U1", "U1R1", "#U1", "#U1R1", "@U1", "+g", "-", "t0", "tool", "x")


@pytest.fixture(scope="module")
def pieces():
    return train_pieces(FACTS)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_bytes_are_lossless_on_any_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 < i < tokenizer.vocab_size for i in ids)
    assert tokenizer.pad_id not in ids


def test_byte_ids_are_the_bytes_shifted_by_one_and_padding_is_left_out():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [98, 0xC3 + 1, 0xA9 + 1]
    assert tokenizer.decode([0, 98, 0, 99, 0]) == "ab"


def test_bytes_that_are_no_text_become_the_replacement_sign():
    assert ByteTokenizer().decode([0xFF + 1, 98]) == "\ufffda"


@pytest.mark.parametrize("bad", [257, -1, 1000])
def test_an_id_outside_the_byte_vocabulary_is_named(bad):
    with pytest.raises(ValueError, match=rf"\[{bad}\].*257"):
        ByteTokenizer().decode([98, bad])


def test_both_tokenizers_follow_the_protocol(pieces):
    assert isinstance(pieces, Tokenizer)
    assert isinstance(ByteTokenizer(), Tokenizer)


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_is_one_token_alone_and_in_company(pieces, fact):
    (one,) = pieces.encode(fact)
    assert one == pieces.ids_of([fact])[0]
    assert pieces.encode(f"{fact} {fact}") == [one, one]
    assert pieces.encode(f"U1 {fact} tool") == [*pieces.ids_of(["U1"]), one, *pieces.ids_of(["tool"])]
    assert pieces.decode([one]) == fact


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FACTS), min_size=1, max_size=20), st.integers(0, 5))
def test_facts_survive_the_round_trip_through_text_in_both_directions(words, padding):
    tokenizer = train_pieces(FACTS)
    ids = tokenizer.ids_of(words)
    text = tokenizer.decode([tokenizer.pad_id] * padding + list(ids))
    assert text == " ".join(words)
    assert tokenizer.encode(text) == list(ids)


def test_every_word_of_plan_path_is_one_token_even_beside_its_longer_cousins():
    language = PlanPathLanguage(10, 10, 32, ("tool", "planner", "solo"))
    words = [m + n for m in ("", "#", "@") for n in language.offsets] + [f"t{t}" for t in range(32)]
    ids = language.ids(*words)
    assert len(set(ids.tolist())) == len(words)
    assert language.tokenizer.encode(" ".join(words)) == ids.tolist()


def test_text_that_no_piece_spells_is_unknown_and_padding_never_occurs(pieces):
    ids = pieces.encode("tool Ω U1")
    assert 1 in ids
    assert 0 not in ids
    assert pieces.ids_of(["tool"])[0] == ids[0]
    assert pieces.ids_of(["U1"])[0] == ids[-1]


def test_ids_are_padding_then_unknown_then_the_facts_in_order(pieces):
    np.testing.assert_array_equal(pieces.ids_of(FACTS), 2 + np.arange(len(FACTS)))
    assert pieces.pad_id == 0
    assert pieces.vocab_size >= 2 + len(FACTS)


def test_training_is_deterministic(pieces):
    assert train_pieces.__wrapped__(FACTS).model_proto == pieces.model_proto


def test_tokenizers_are_equal_when_their_models_are(pieces, tmp_path):
    pieces.save(tmp_path / "a.model")
    again = PieceTokenizer.load(tmp_path / "a.model")
    assert again == pieces
    assert hash(again) == hash(pieces)
    assert again != train_pieces(FACTS[:-1])
    assert again.encode("#U1R1 tool") == pieces.encode("#U1R1 tool")
    assert (again.vocab_size, again.pad_id) == (pieces.vocab_size, pieces.pad_id)
    learned = train_sentencepiece(["hello"], 300, ("<a>", "<b>"), ("<a>",))
    others = [PieceTokenizer(learned.model_proto, pad, stops) for pad in (None, "<unk>") for stops in ((), ("<a>",), ("<b>", "<a>"))]
    assert [other == learned for other in others] == [False, True, False, False, False, False]
    assert len(set(others)) == 6
    assert len({ByteTokenizer(("<a>", "<b>"), stops) for stops in ((), ("<a>",), ("<b>",), ("<a>", "<b>"))}) == 4


def test_a_missing_file_and_a_file_that_is_no_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        PieceTokenizer.load(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="11 bytes are not a sentencepiece model"):
        PieceTokenizer.load(tmp_path / "bad.model")


def test_a_model_without_padding_is_refused():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"]), model_writer=model, model_type="char", vocab_size=8, hard_vocab_limit=False,
        pad_id=-1, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no padding piece"):
        PieceTokenizer(model.getvalue())


def test_pieces_that_the_model_lacks_are_named(pieces):
    with pytest.raises(KeyError, match="@D9"):
        pieces.ids_of(["U1", "@D9"])


@pytest.mark.parametrize(("bad", "message"), [(("a", "b", "a"), "twice.*'a'"), (("a", ""), "non-empty"), (("a b",), "a b")])
def test_bad_pieces_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        train_pieces(bad)


def test_any_character_may_be_a_piece():
    for pieces in (("?", "a"), ("?", "@", "A", "?x")):
        tokenizer = train_pieces(pieces)
        assert tokenizer.ids_of(pieces).tolist() == list(range(2, 2 + len(pieces)))
        assert tokenizer.decode(tokenizer.encode(" ".join(pieces))) == " ".join(pieces)


def test_words_outside_a_vocabulary_of_words_are_named():
    tokenizer = train_pieces(("cat", "mat"))
    assert tokenizer.unknown_words("cat dog mat dog bird\ncat") == ["dog", "bird"]
    assert tokenizer.unknown_words("cat mat") == []


def test_a_vocabulary_of_words_is_saved_as_a_tokenizer_json_of_the_same_ids(tmp_path):
    tokenizer = train_pieces(("cat", "mat", "a-b", "."))
    assert save_words(tokenizer, tmp_path, (5, 2)) == ""
    saved = Library.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("cat mat .", "a-b", "cat cat"):
        assert saved.encode(text).ids == tokenizer.encode(text)
        assert saved.decode(tokenizer.encode("cat mat")) == "cat mat"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": tokenizer.piece(0)}
    assert config == names | {"eos_token": "\u2581."}  # the first of the stops
    assert save_words(tokenizer, tmp_path) == ""
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == names
    learned = train_sentencepiece(["the cat sat on the mat"] * 20, 300)
    assert "whole words" in save_words(learned, tmp_path / "none")
