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
from marl_llm.text import ByteTokenizer, PieceTokenizer, Tokenizer, pieces_of, train_pieces, train_sentencepiece, unknown_words
from marl_llm.text.tokenizer_files import check_tokenizer, read_added_tokens, read_ids, read_size, token_spelling
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
    language = PlanPathLanguage(10, 10, 32)
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


def test_a_piece_that_text_becomes_pads_nothing():
    learned = train_sentencepiece(["hello hello hello"], 300, ("<a>",))
    hello = learned.piece(learned.encode("hello")[0])
    assert PieceTokenizer(learned.model_proto, "<a>").decode(learned.encode("hello \u4e2d")) == "hello \u4e2d"
    words = train_pieces(("north",))
    for model, pad in ((learned, hello), (learned, "<0x41>"), (words, "<unk>"), (words, "\u2581north")):
        with pytest.raises(ValueError, match=f"pad='{pad}': text becomes this piece"):
            PieceTokenizer(model.model_proto, pad)


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
    assert unknown_words(tokenizer, "cat dog mat dog bird\ncat") == ["dog", "bird"]
    assert unknown_words(tokenizer, "cat mat") == []


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


# ---- each field and bound


def test_specials_of_bytes_are_numbered_in_order_spelled_in_place_and_stop_in_the_order_of_the_stops():
    tokenizer = ByteTokenizer(("<a>", "<b>", "<c>"), ("<c>", "<a>"))
    assert (tokenizer.vocab_size, dict(tokenizer.special_ids)) == (260, {"<a>": 257, "<b>": 258, "<c>": 259})
    assert (tokenizer.stop_ids, tokenizer.eos_id) == ((259, 257), 259)
    assert (ByteTokenizer(("<a>",)).stop_ids, ByteTokenizer(("<a>",)).eos_id) == ((), None)
    ids = [*tokenizer.encode("é"), 258, 0, 257, 257, *tokenizer.encode("<a>")]
    assert tokenizer.decode(ids) == "é<b><a><a><a>"
    assert tokenizer.decode([0xC3 + 1, 258, 0xA9 + 1]) == "\ufffd<b>\ufffd"  # no character reaches across a special
    assert pieces_of(tokenizer, [259, 98, 98, 0, 0xC3 + 1]) == {"0": "", "98": "a", "196": "\ufffd", "259": "<c>"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((("<a>", "<a>"),), "distinct"), ((("<a>", ""),), "not empty"), ((("<a>",), ("<b>",)), r"stops \['<b>'\] are not among"),
        (((), (), 1), "pad_id=1"),
    ],
)  # fmt: skip
def test_specials_and_stops_that_cannot_be_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        ByteTokenizer(*given)


def test_half_a_character_is_named_with_its_place_and_what_stands_around_it(pieces):
    text = "0123456789abcdef\ud800ghijklmnopqrst"
    for tokenizer in (ByteTokenizer(), pieces):
        with pytest.raises(ValueError, match=r"character 16 is a lone surrogate, near '6789abcdef\\ud800ghijklmno'"):
            tokenizer.encode(text)


def test_ids_at_both_ends_of_a_vocabulary_are_read_and_those_beyond_are_named(pieces):
    for tokenizer, size in ((ByteTokenizer(), 257), (pieces, pieces.vocab_size)):
        tokenizer.decode([0, size - 1])
        with pytest.raises(ValueError, match=rf"ids \[-1, {size}\] are outside"):
            tokenizer.decode([-1, 0, size])


def test_stops_of_pieces_come_first_and_the_models_own_end_behind_them():
    plain = train_sentencepiece(["hello there"], 300, ("<a>", "<b>"))
    assert (plain.stop_ids, plain.eos_id, plain.pad_id) == ((), None, 0)
    a, b = (plain.special_ids[name] for name in ("<a>", "<b>"))
    both = PieceTokenizer(plain.model_proto, stops=("<b>", "<a>"))
    assert (both.stop_ids, both.eos_id) == ((b, a), b)
    assert both.decode([*both.encode("hello"), b, 0, *both.encode(" there"), a]) == "hello<b> there<a>"
    assert PieceTokenizer(plain.model_proto, "<unk>").pad_id == 1
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"]), model_writer=model, model_type="char", vocab_size=12, hard_vocab_limit=False,
        control_symbols=["<x>"], pad_id=0, unk_id=1, bos_id=2, eos_id=3, minloglevel=2,
    )  # fmt: skip
    own = PieceTokenizer(model.getvalue(), stops=("<x>",))
    assert own.stop_ids == (own.special_ids["<x>"], 3)
    assert PieceTokenizer(model.getvalue(), stops=("</s>",)).stop_ids == (3,)
    for pad, stops, message in ((None, ("<z>",), r"stops \['<z>'\] are no control pieces"), ("<z>", (), "has no piece '<z>'")):
        with pytest.raises(ValueError, match=message):
            PieceTokenizer(model.getvalue(), pad, stops)


def test_a_model_that_sees_images_has_the_vocabulary_of_its_language_model():
    assert read_size({"model_type": "gemma3", "text_config": {}}, "") == 262_208  # as its published files, which name none
    assert read_size({"model_type": "gemma3", "text_config": {"vocab_size": 7}}, "") == 7
    assert read_size({"model_type": "qwen3", "text_config": None}, "") == 0


@pytest.mark.parametrize(
    ("read", "value", "found"),
    [
        (read_size, None, 0), (read_size, 0, 0), (read_size, 1 << 20, 1 << 20), (read_size, (1 << 20) + 1, ValueError),
        (read_size, -1, ValueError), (read_size, True, ValueError), (read_size, "7", ValueError), (read_ids, None, []),
        (read_ids, 0, [0]), (read_ids, [3, 1], [3, 1]), (read_ids, [True], ValueError), (read_ids, "3", ValueError),
        (read_ids, [1, None], ValueError), (token_spelling, None, None), (token_spelling, "x", "x"),
        (token_spelling, {"content": "x"}, "x"),
        (token_spelling, {}, None), (token_spelling, 3, ValueError), (token_spelling, {"content": 3}, ValueError),
        (read_added_tokens, None, []), (read_added_tokens, {"7": {"content": "x"}}, [(7, "x")]),
        (read_added_tokens, {"999999999": {"content": ""}}, [(999999999, "")]),
        (read_added_tokens, {"1000000000": {"content": "x"}}, ValueError),
        (read_added_tokens, {"٣": {"content": "x"}}, ValueError), (read_added_tokens, {"-1": {"content": "x"}}, ValueError),
        (read_added_tokens, {"7": "x"}, ValueError), (read_added_tokens, {"7": {"content": 3}}, ValueError),
        (read_added_tokens, [1], ValueError),
    ],
)  # fmt: skip
def test_a_field_of_a_tokenizers_files_is_read_up_to_its_bound_or_named(read, value, found):
    names = {read_size: "vocab_size", read_added_tokens: "added_tokens_decoder"}
    name = names.get(read, "the_field")
    given = ({name: value}, "the_file") if read in names else ({name: value}, name, "the_file")
    take = (lambda: list(read(*given))) if read is read_added_tokens else lambda: read(*given)
    if found is ValueError:
        with pytest.raises(ValueError, match=f"the_file: {name}"):
            take()
    else:
        assert take() == found


def replace(content, pattern="a", kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model": {"vocab": {"a": 0, "b": (1 << 20) - 1}}}, None),
        ({"model": {"vocab": {"b": 1 << 20}}}, "token id 1048576 is not from 0"),
        ({"model": {"vocab": {"b": -1}}}, "token id -1"), ({"model": {"vocab": {"b": True}}}, "token id True"),
        ({"added_tokens": [{"id": 1 << 20}]}, "token id 1048576"), ({"added_tokens": [{}]}, "token id None"),
        ({"model": {"dropout": 0.1}}, "model.dropout=0.1"), ({"model": {"dropout": 0.0}}, None),
        ({"decoder": {"decoders": [{"type": "Fuse"}] * 64}}, None),
        ({"decoder": {"decoders": [{"type": "Fuse"}] * 65}}, "decoder has 65 steps"),
        (
            {"normalizer": {"normalizers": [{"normalizers": [{"type": "NFC"}] * 60}, {"normalizers": [{"type": "NFC"}] * 5}]}},
            "normalizer has 65 steps",
        ),
        ({"pre_tokenizer": {"pretokenizers": [{"type": "Digits"}] * 65}}, "pre_tokenizer has 65 steps"),
        ({"normalizer": replace("x" * 64)}, None), ({"normalizer": replace("x" * 65)}, "normalizer can make a text 65 times"),
        ({"normalizer": replace("x" * 65, "ab")}, None), ({"normalizer": replace("x" * 129, "ab")}, "65 times"),
        ({"normalizer": replace("x" * 63, "a*", "Regex")}, None), ({"normalizer": replace("x" * 64, "a*", "Regex")}, "65 times"),
        ({"decoder": {"decoders": [replace("x" * 8)] * 2}}, None),
        ({"decoder": {"decoders": [replace("x" * 8)] * 3}}, "decoder can make a text 512"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 511}}, None),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 512}}, "65 times"),
        ({"normalizer": replace("", "a" * 4096)}, None),
        ({"normalizer": replace("", "a" * 4097)}, "a pattern must be a text of at most 4,096"),
        ({"normalizer": replace("", "a" * 4096, "Regex")}, None),
        ({"normalizer": replace("", "a" * 4097, "Regex")}, "a pattern must be"),
        ({"normalizer": replace("", 3, "Regex")}, "a pattern must be"),
        ({"normalizer": replace("", 3)}, "a pattern must be"), ({"decoder": {"type": "x", "prefix": "a" * 4096}}, None),
        ({"decoder": {"type": "x", "prefix": "a" * 4097}}, "a text of more than 4,096 characters is written"),
    ],
)  # fmt: skip
def test_a_tokenizers_steps_are_read_up_to_their_bounds_and_refused_by_the_name_of_their_part(raw, message):
    if message is None:
        check_tokenizer(raw, "the_file")
    else:
        with pytest.raises(ValueError, match=f"the_file: .*{message}"):
            check_tokenizer(raw, "the_file")
