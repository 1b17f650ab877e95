"""A checkpoint's tokenizer: its ids, its stops, its Unicode, and what a damaged directory is told."""

import json
import re

import pytest
from checkpoint_text import SPECIAL, TAGS, checkpoint_files, tokenizer_json, tokenizer_of, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from marl_llm.text import (
    CHATML,
    ByteTokenizer,
    Chat,
    HuggingFaceTokenizer,
    Message,
    PieceTokenizer,
    TextStream,
    Tokenizer,
    load_tokenizer,
    stream_text,
    train_sentencepiece,
)  # fmt: skip
from marl_llm.text.token_bytes import token_bytes

SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEXTS = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40)


@pytest.fixture(scope="module")
def qwen():
    return tokenizer_of("qwen3")


@pytest.fixture(scope="module")
def piece():
    return train_sentencepiece(["hello world, how are you\n  fine, thanks"] * 2, 400, SPECIALS, ("<|im_end|>",))


def tokenizers(piece):
    return [tokenizer_of("qwen3"), tokenizer_of("deepseek"), piece, ByteTokenizer(SPECIALS, ("<|im_end|>",))]


def test_a_directory_gives_stops_padding_specials_and_the_models_vocabulary(tmp_path, qwen):
    loaded = load_tokenizer(write_checkpoint(tmp_path, "qwen3"))
    assert isinstance(loaded, Tokenizer)
    assert set(loaded.special_ids) == {*SPECIAL, *TAGS["qwen3"]}
    assert loaded.stop_ids == (loaded.special_ids["<|im_end|>"], loaded.special_ids["<|endoftext|>"])
    assert (loaded.eos_id, loaded.pad_id) == loaded.stop_ids
    assert loaded.vocab_size == 512
    assert loaded == qwen
    assert hash(loaded) == hash(qwen)
    assert loaded != tokenizer_of("qwen2.5")


def test_a_base_checkpoint_without_generation_config_stops_at_the_configs_end(tmp_path):
    config = json.loads(checkpoint_files("qwen2.5")["tokenizer_config.json"])
    del config["eos_token"], config["pad_token"]
    write_checkpoint(tmp_path, "qwen2.5", tokenizer_config=json.dumps(config), generation_config=None)
    loaded = load_tokenizer(tmp_path)
    assert loaded.stop_ids == (loaded.special_ids["<|im_end|>"],)
    assert loaded.pad_id == loaded.eos_id


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_text_survives_up_to_nfc_and_ids_equal_the_librarys(text):
    import unicodedata

    qwen = tokenizer_of("qwen3")
    ids = qwen.encode(text)
    assert qwen.decode(ids) == unicodedata.normalize("NFC", text)
    if not any(s in text for s in qwen.special_ids):
        assert ids == Library.from_str(tokenizer_json("qwen3")).encode(text, add_special_tokens=False).ids


def test_composed_and_decomposed_letters_are_the_same_ids(qwen):
    assert qwen.encode("u\u0308ber") == qwen.encode("\u00fcber")
    assert qwen.encode("12") == [*qwen.encode("1"), *qwen.encode("2")]


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from([*SPECIAL, *TAGS["qwen3"], "<s>", "</s>"]), TEXTS), max_size=6))
def test_no_text_becomes_a_special_token(parts):
    text = "".join(parts)
    for tokenizer in (tokenizer_of("qwen3"), ByteTokenizer(SPECIALS, ("<|im_end|>",))):
        ids = tokenizer.encode(text)
        assert not set(ids) & {*tokenizer.special_ids.values(), tokenizer.pad_id}


def test_sentencepiece_is_lossless_and_keeps_special_spellings_as_text(piece):
    for text in ("hello  world\n\n", " <|im_start|>user\r\n\t中é\x00", "", "▂ <think>"):
        ids = piece.encode(text)
        assert piece.decode(ids) == text
        assert not set(ids) & {*piece.special_ids.values(), piece.pad_id}
    start, end = piece.special_ids["<|im_start|>"], piece.special_ids["<|im_end|>"]
    assert piece.decode([start, *piece.encode(" a"), end, 0]) == "<|im_start|> a<|im_end|>"
    assert (piece.eos_id, piece.stop_ids) == (end, (end,))


def test_a_sentencepiece_file_without_padding_takes_a_named_piece(tmp_path, piece):
    piece.save(tmp_path / "x.model")
    assert PieceTokenizer.load(tmp_path / "x.model", stops=("<|im_end|>",)) == piece
    assert PieceTokenizer.load(tmp_path / "x.model", pad="<unk>").pad_id == 1
    with pytest.raises(ValueError, match="no piece 'nix'"):
        PieceTokenizer.load(tmp_path / "x.model", pad="nix")
    with pytest.raises(ValueError, match="hello.*no control pieces"):
        PieceTokenizer.load(tmp_path / "x.model", stops=("hello",))
    with pytest.raises(ValueError, match="no text"):
        train_sentencepiece(["\n"], 400)
    with pytest.raises(ValueError, match="20 pieces"):
        train_sentencepiece(["hello"], 20)


def test_transformers_own_way_lets_content_forge_special_tokens(qwen):
    text = "<|im_end|>"
    assert qwen.encode_with_specials(text) == [qwen.special_ids[text]]
    assert qwen.special_ids[text] not in qwen.encode(text)


def test_a_vocabulary_that_spells_its_special_tokens_is_cut_rather_than_believed():
    words = Library(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<pad>", "<eos>"])
    files = {"tokenizer.json": words.to_str(), "tokenizer_config.json": '{"eos_token": "<eos>", "pad_token": "<pad>"}'}
    tokenizer = HuggingFaceTokenizer(files)
    ids = tokenizer.encode("a <eos> a <pad>")
    assert not set(ids) & {0, 1}
    assert (ids[0], ids[-1]) == (2, 3)


SIGNS = ("<unk>", "</s>", "\u2581a", "a", "\u2581", "<", "/", "s", ">", " ", "\u2581<")
SPACED = {
    **{scheme: {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)} for scheme in ("first", "always", "never")},
    "prepended": {"normalizer": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])},
}


def _spaced(name):
    made = Library(models.Unigram([(sign, -1.0 - 3 * (len(sign) == 1)) for sign in SIGNS], unk_id=0, byte_fallback=False))
    for part, value in SPACED[name].items():
        setattr(made, part, value)
    made.decoder = decoders.Metaspace(prepend_scheme="never")  # shows every space
    made.add_special_tokens(["<unk>", "</s>"])
    return HuggingFaceTokenizer({"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps({"eos_token": "</s>"})})


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize("text", ["a </s> a", "</s>", "</s></s> a</s", "a</s>a << </s>"])
def test_a_text_that_spells_special_tokens_of_the_vocabulary_stays_as_it_is(name, text):
    tokenizer = _spaced(name)
    ids, behind = tokenizer.encode(text), tokenizer.encode_between(text, "</s>", None)
    assert tokenizer.eos_id not in (*ids, *behind)
    assert tokenizer.decode(ids) == " " * (name != "never") + text
    assert tokenizer.decode(behind) == " " * (name in ("always", "prepended")) + text


def test_a_special_spelling_is_cut_however_often_it_is_written():
    tokenizer = _spaced("always")
    assert len(tokenizer.encode("</s>" * 2000)) == 8000
    spelling = "aa"
    words = Library(models.Unigram([("<unk>", 0.0), ("a", -9.0), (spelling, -1.0), ("aaa", -1.0)], unk_id=0, byte_fallback=False))
    words.add_special_tokens(["<unk>", spelling])
    tokenizer = HuggingFaceTokenizer({"tokenizer.json": words.to_str(), "tokenizer_config.json": json.dumps({"eos_token": spelling})})
    assert tokenizer.encode("aaaaa") == [1] * 5  # spellings within each other


def test_a_word_that_was_cut_gets_no_prefix_in_bytes():
    raw = _library(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False})
    raw["model"]["merges"] = [["<", "/"], ["</", ">"]]
    raw["model"]["vocab"] |= {"</": len(raw["model"]["vocab"]), "</>": len(raw["model"]["vocab"]) + 1}
    raw["added_tokens"] = [{**raw["added_tokens"][0], "id": raw["model"]["vocab"]["</>"], "content": "</>"}]
    tokenizer = _loaded(raw, tokenizer_config={"eos_token": "</>"})
    assert tokenizer.decode(tokenizer.encode("a </> b")) == " a </> b"


def test_truncation_and_padding_in_the_file_are_switched_off():
    cut = Library.from_str(tokenizer_json("qwen3"))
    cut.enable_truncation(4)
    cut.enable_padding(length=64)
    files = checkpoint_files("qwen3") | {"tokenizer.json": cut.to_str()}
    text = "The quick brown fox 1234567890"
    assert HuggingFaceTokenizer(files).encode(text) == tokenizer_of("qwen3").encode(text)
    assert HuggingFaceTokenizer(files).encode_with_specials(text) == tokenizer_of("qwen3").encode(text)


def test_ids_of_padded_rows_decode_to_the_replacement_sign_and_beyond_is_refused(qwen):
    assert qwen.decode([*qwen.encode("a"), 511, *qwen.encode("b")]) == "a\ufffdb"
    with pytest.raises(ValueError, match=r"\[512\].*512"):
        qwen.decode([512])


@pytest.mark.parametrize("at", range(4))
def test_a_lone_surrogate_is_named(at, piece):
    with pytest.raises(ValueError, match="character 2 is a lone surrogate"):
        tokenizers(piece)[at].encode("ab\ud800")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streamed_text_joins_to_the_whole_and_shows_no_half_characters(data):
    tokenizer = data.draw(st.sampled_from([tokenizer_of("qwen3"), ByteTokenizer(SPECIALS, ("<|im_end|>",)), _piece()]))
    text = data.draw(TEXTS)
    ids = tokenizer.encode(text) if data.draw(st.booleans()) else data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    stream, said = TextStream(), []
    for i, one in enumerate(ids):
        stream, new = stream_text(tokenizer, stream, [one], last=i + 1 == len(ids))
        said.append(new)
        assert len(stream.held) <= 60
    assert "".join(said) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in new for new in said)


def _piece():
    return train_sentencepiece(["hello world"], 400, SPECIALS, ("<|im_end|>",))


def test_a_character_in_three_tokens_appears_with_the_last(qwen):
    ids = ByteTokenizer().encode("a中")
    stream, said = TextStream(), []
    for one in ids:
        stream, new = stream_text(ByteTokenizer(), stream, [one])
        said.append(new)
    assert said == ["a", "", "", "中"]


def test_endless_broken_bytes_are_not_held_for_ever():
    stream, said = TextStream(), ""
    for _ in range(200):
        stream, new = stream_text(ByteTokenizer(), stream, [0xFF + 1])
        said += new
        assert len(stream.held) <= 33
    assert len(said) == 197


def test_saved_files_load_equal_and_leave_the_models_configs_alone(tmp_path, qwen):
    qwen.save_pretrained(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    again = load_tokenizer(tmp_path / "out")
    assert again.encode("The fox") == qwen.encode("The fox")
    assert again.special_ids == qwen.special_ids


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tokenizer": None}, FileNotFoundError, "no tokenizer.json"),
        ({"tokenizer": tokenizer_json("qwen3")[:2000]}, ValueError, r"tokenizer\.json: not JSON \(line .*"),
        ({"tokenizer": "{}"}, ValueError, r"tokenizer\.json is JSON, but no tokenizer"),
        ({"tokenizer_config": "[1]"}, ValueError, "tokenizer_config.json: an object is expected, not an array"),
        ({"generation_config": '{"eos_token_id": [9999]}'}, ValueError, r"generation_config.json: eos_token_id.*\n?.*512"),
        ({"tokenizer_config": '{"eos_token": "<nix>"}'}, ValueError, "eos_token is '<nix>'"),
        ({"tokenizer_config": '{"added_tokens_decoder": {"3": {"content": "<nix>"}}}'}, ValueError, "id 3 is '<nix>'"),
        ({"tokenizer_config": "{}", "generation_config": "{}", "config": "{}"}, ValueError, "no token that ends a text"),
    ],
)
def test_a_bad_directory_is_told_which_file_and_why(tmp_path, changed, error, message):
    write_checkpoint(tmp_path, "qwen3", **changed)
    with pytest.raises(error, match=message) as caught:
        load_tokenizer(tmp_path)
    assert re.search(re.escape(str(tmp_path)), str(caught.value))


def test_no_directory_and_binary_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no directory"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_bytes(b"{\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8 .byte 1"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"specials": ("a", "a")}, "distinct"), ({"stops": ("x",)}, r"\['x'\] are not among"), ({"pad_id": 3}, "pads with 0")],
)
def test_bad_byte_specials_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ByteTokenizer(**options)


def test_a_special_spelling_is_encoded_as_if_the_vocabulary_had_no_such_token(qwen):
    bare = json.loads(tokenizer_json("qwen3")) | {"added_tokens": []}
    text = "a<|im_end|>\n<think> b</think>"
    assert qwen.encode(text) == Library.from_str(json.dumps(bare)).encode(text, add_special_tokens=False).ids


def test_streamed_words_keep_the_space_that_their_left_neighbour_decides():
    """Sentencepiece's decoders drop the space in front of a text's first word, so that a word alone is not what it is behind another."""
    made = Library(models.WordLevel({"<end>": 0, "\u2581how": 1, "\u2581are": 2, "\u2581you": 3}, unk_token="<end>"))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<end>"])
    tokenizer = HuggingFaceTokenizer({"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps({"eos_token": "<end>"})})
    stream, said = TextStream(), []
    for i, one in enumerate((1, 2, 3, 2)):
        stream, new = stream_text(tokenizer, stream, [one], last=i == 3)
        said.append(new)
    assert said == ["how", " are", " you", " are"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_characters_spelled_in_bytes_are_streamed_whole_however_many_follow_each_other(data):
    tokenizer = _byte_fallback()
    text = data.draw(st.text("a \u20ac\U0001f600\xe9", max_size=12))
    ids, stream, said = tokenizer.encode(text), TextStream(), []
    whole = tokenizer.decode(ids)
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        now, ids = ids[:count], ids[count:]
        stream, new = stream_text(tokenizer, stream, now, last=not ids)
        said.append(new)
    assert "".join(said) == whole
    assert "\ufffd" not in whole


def test_a_broken_byte_behind_a_whole_character_is_one_broken_character():
    tokenizer = _byte_fallback()
    stream, said = stream_text(tokenizer, TextStream(), tokenizer.encode("\u20ac"))
    _, rest = stream_text(tokenizer, stream, tokenizer.encode("\u20ac")[:1], last=True)
    assert (said, rest) == ("\u20ac", "\ufffd")


def _byte_fallback():
    """Spells what it does not know in bytes, and shows a run of bytes as broken unless all of it is text: Llama 2, Mistral, Gemma."""
    spellings = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257, "\u2581": 258}
    made = Library(models.BPE(vocab=spellings, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<end>"])
    return HuggingFaceTokenizer({"tokenizer.json": made.to_str(), "tokenizer_config.json": json.dumps({"eos_token": "<end>"})})


def _library(**parts):
    made = Library(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(["a b"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made.add_special_tokens(["<|im_end|>"])
    return json.loads(made.to_str()) | parts


def _loaded(raw, **files):
    files = {"tokenizer_config": {"eos_token": "<|im_end|>"}} | files
    return HuggingFaceTokenizer({"tokenizer.json": json.dumps(raw)} | {f"{name}.json": json.dumps(value) for name, value in files.items()})


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"pad_token_id": 0}},
        {"config": {"pad_token_id": 0}},
        {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "!"}},
        {"generation_config": {"pad_token_id": -1}},
        {"config": {"pad_token_id": -1}},
    ],
)
def test_padding_that_is_ordinary_text_or_minus_one_is_the_end_of_text(files):
    tokenizer = _loaded(_library(), **files)
    assert tokenizer.pad_id == tokenizer.eos_id
    assert tokenizer.decode(tokenizer.encode("Hello! !")) == "Hello! !"


def test_an_end_of_text_that_is_ordinary_text_is_refused_when_it_is_loaded():
    with pytest.raises(ValueError, match="token that ends a text is '!', which ordinary text contains"):
        _loaded(_library(), tokenizer_config={}, generation_config={"eos_token_id": 0})


def test_added_tokens_that_are_ordinary_signs_stay_text():
    raw = _library()
    sign = {"id": 0, "content": "!", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    raw["added_tokens"].insert(0, sign)
    for special in (False, True):
        sign["special"] = special
        tokenizer = _loaded(raw)
        assert "!" not in tokenizer.special_ids
        assert tokenizer.decode(tokenizer.encode("Hello!")) == "Hello!"


INDENTED = ("def f(x):\n        return x", "a  b", "  lead", "tail  ", "\t\tif a:\n\t\t\tb", "   ", "hello", " a", "a <|im_end|>  b")


@pytest.mark.parametrize("before_specials", [False, True])
@pytest.mark.parametrize("config", [False, True])
def test_runs_of_blanks_that_were_added_are_text_with_the_ids_of_the_whole_tokenizer(before_specials, config):
    made = Library.from_str(json.dumps(_library(added_tokens=[])))
    blanks = [AddedToken(spelling, normalized=True, special=False) for spelling in (" " * 8, " " * 4, "  ", "\t\t")]
    kinds = [lambda: made.add_tokens(blanks), lambda: made.add_special_tokens(["<|im_end|>"]), lambda: made.add_tokens(["<tool>"])]
    for add in kinds if before_specials else reversed(kinds):  # their ids stand in the order in which they were added
        add()
    table = {str(i): {"content": t.content, "special": t.special} for i, t in made.get_added_tokens_decoder().items()} if config else {}
    tokenizer = _loaded(json.loads(made.to_str()), tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": table})
    assert set(tokenizer.special_ids) == {"<|im_end|>", "<tool>"}
    for text in INDENTED[:-1]:
        ids = tokenizer.encode(text)
        assert ids == made.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert b"".join(token_bytes(tokenizer)[i] for i in ids) == text.encode()
    assert tokenizer.encode_between("a\n    b", "<|im_end|>", None) == made.encode("a\n    b", add_special_tokens=False).ids
    assert set(tokenizer.special_ids.values()).isdisjoint(tokenizer.encode(INDENTED[-1] + "<tool>"))


def test_added_blanks_of_the_base_vocabulary_are_used_and_pad_no_text():
    raw = _library()
    raw["model"]["vocab"]["\n\n"] = blank = len(raw["model"]["vocab"])  # no merge makes it
    raw["added_tokens"][0]["id"] += 1
    sign = {"id": blank, "content": "\n\n", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    raw["added_tokens"].append(sign)
    tokenizer = _loaded(raw, tokenizer_config={"eos_token": "<|im_end|>", "pad_token": "\n\n"})
    assert blank in tokenizer.encode("a\n\nb")
    assert tokenizer.pad_id == tokenizer.eos_id
    assert tokenizer.decode(tokenizer.encode("a\n\nb")) == "a\n\nb"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("stripping", [(False, False), (False, True), (True, False)])
def test_a_chat_has_the_ids_that_the_tokenizer_gives_to_the_whole_text(scheme, stripping):
    full = Library(models.BPE(unk_token="<unk>"))
    full.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)])
    texts = ["user\nWhere is it?", "assistant\nIt is there.", "system\nBe brief."] * 20
    full.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    left, right = stripping
    full.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>", lstrip=left, rstrip=right)])
    full.decoder = decoders.Metaspace(prepend_scheme=scheme)
    config = json.dumps({"eos_token": "<|im_end|>", "pad_token": "<unk>"})
    chat = Chat(HuggingFaceTokenizer({"tokenizer.json": full.to_str(), "tokenizer_config.json": config}), CHATML)
    messages = [Message("system", "Be brief. "), Message("user", "Where is it?"), Message("assistant", "It is."), Message("user", " is it")]
    wanted = full.encode(CHATML.render(messages), add_special_tokens=False).ids
    assert list(chat.encode_messages(messages)) == wanted
    grown = chat.extend(chat.reply(chat.start(messages[:2]), [chat.tokenizer.eos_id]), messages[3:]).ids
    ends = [[n for n, i in enumerate(ids) if i == chat.tokenizer.eos_id] for ids in (grown, wanted)]
    assert list(grown[ends[0][-2] :]) == wanted[ends[1][-2] :]  # from the end of the reply on


def _replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _sequence(name, steps, levels=0):
    for _ in range(levels):
        steps = [{"type": "Sequence", name: steps}]
    return {"type": "Sequence", name: steps}


HOSTILE = {
    "doubling": ("normalizer", _sequence("normalizers", [_replace("a", "aa")] * 30)),
    "one large text": ("normalizer", _replace("a", "a" * 5000)),
    "growing by a pattern": ("normalizer", _sequence("normalizers", [_replace("", "bbbbb", "Regex")] * 9)),
    "hidden in sequences": ("normalizer", _sequence("normalizers", [_replace("a", "a" * 9)] * 3, 5)),
    "growing by a half": ("normalizer", _sequence("normalizers", [_replace("aa", "aaa")] * 40)),
    "65 times at once": ("normalizer", _replace("a", "a" * 65)),
    "a 65th step": ("normalizer", _sequence("normalizers", [{"type": "NFC"}] * 65)),
    "decoder": ("decoder", _sequence("decoders", [_replace("a", "aa")] * 30)),
    "prepended": ("normalizer", _sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 4000}] * 9)),
    "steps": ("normalizer", _sequence("normalizers", [{"type": "NFC"}] * 100_000)),
    "deep": ("pre_tokenizer", _sequence("pretokenizers", [], 100)),
    "a long pattern": ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "a" * 10_000}, "behavior": "Isolated", "invert": False}),
    "no type": ("normalizer", {"type": "Nonsense"}),
    "a panic": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_would_flood_the_process_is_refused_when_it_is_loaded(name):
    part, value = HOSTILE[name]
    with pytest.raises(ValueError, match=r"tokenizer\.json") as caught:
        _loaded(_library(**{part: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "normalizer",
    [
        _sequence("normalizers", [_replace("q", "q" * 8)] * 2), _sequence("normalizers", [_replace("qq", "q")] * 64),
        _sequence("normalizers", [_replace("q" * 4096, "q" * 4096)]), _replace("q", "q" * 63, "Regex"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_goes_as_far_as_the_bounds_is_read(normalizer):
    tokenizer = _loaded(_library(normalizer=normalizer))
    assert tokenizer.decode(tokenizer.encode("Hello!")) == "Hello!"


@pytest.mark.parametrize("i", [2**20, 2**31, 2**40, -1, 1.5, "3", None, True])
def test_ids_beyond_any_vocabulary_are_refused(i):
    raw = _library()
    raw["model"]["vocab"]["zz"] = i
    with pytest.raises(ValueError, match=r"tokenizer\.json: the token id"):
        _loaded(raw)
    raw = _library()
    raw["added_tokens"][0]["id"] = i
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        _loaded(raw)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config", {"vocab_size": 10**12}, "config.json: vocab_size="),
        ("config", {"vocab_size": "512"}, "config.json: vocab_size="),
        ("config", {"vocab_size": -5}, "config.json: vocab_size="),
        ("config", {"vocab_size": True}, "config.json: vocab_size="),
        ("generation_config", {"eos_token_id": [1, "2"]}, "generation_config.json: eos_token_id must be"),
        ("generation_config", {"eos_token_id": {"a": 1}}, "generation_config.json: eos_token_id must be"),
        ("generation_config", {"eos_token_id": [2**40]}, "generation_config.json: eos_token_id"),
        ("generation_config", {"pad_token_id": "x"}, "pad_token_id must be"),
        ("tokenizer_config", {"eos_token": 7}, "eos_token must be a text"),
        ("tokenizer_config", {"eos_token": {"content": 7}}, "eos_token must be a text"),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "y"}}}, "added_tokens_decoder has the entry 'x'"),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 400: {"content": "y"}}}, "added_tokens_decoder has the entry"),
        ("tokenizer_config", {"added_tokens_decoder": {"999999": {"content": "y"}}}, "id 999999 is 'y'"),
    ],
)
def test_fields_of_another_kind_are_named(name, value, message):
    with pytest.raises(ValueError, match=message):
        _loaded(_library(), **{name: value})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, '{"a": NaN}', '{"a": 1e999}', "", "[]", "\ufeff{"])
def test_json_that_no_reader_should_follow_is_refused_with_its_file(tmp_path, name, text):
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / name))) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_the_library_gives_up_is_a_named_error():
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = _loaded(_library(pre_tokenizer=split))
    with pytest.raises(ValueError, match="cannot encode this text"):
        tokenizer.encode("a" * 40 + "b")
