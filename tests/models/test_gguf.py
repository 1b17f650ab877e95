"""GGUF files: converted numbers, names, orders and tokenizers, against files that the library `gguf` writes; damaged and hostile ones."""

import json
import random
import shutil
import struct
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from marl_llm.models import CheckpointFileError, Decoder, init_params, load_pretrained, prompt_mask, prompt_positions, read_config
from marl_llm.models.checkpoint_names import weight_of
from marl_llm.models.config import ModelConfig
from marl_llm.models.gguf import LAYER_TENSORS, TOP_TENSORS, checkpoint_directory, convert_gguf, read_shape
from marl_llm.models.gguf_file import read_gguf
from marl_llm.models.gguf_tokenizer import CUTS
from marl_llm.models.sharding import path_name
from marl_llm.text.huggingface import load_tokenizer
from marl_llm.text.jinja import load_template

LETTERS = [*"abcdefgh", "\u0120", "1", "2"]  # \u0120 is how GPT-2's bytes spell a blank
MERGES = [("a", "b"), ("\u0120", "a"), ("ab", "c")]
TOKENS = ["<|end|>", "<|im_start|>", *LETTERS, *("".join(pair) for pair in MERGES)]
TYPES = [3, 3] + [1] * (len(TOKENS) - 2)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|end|>{% endfor %}"
WORDS = (TOKENS, TYPES, MERGES, TEMPLATE)
VOCABULARY = 32
SHAPES = {
    "llama": dict(qk_norm=False, query_heads=4, key_value_heads=2, head_dim=16, tie_embeddings=True),
    "qwen2": dict(qk_norm=False, query_heads=4, key_value_heads=2, head_dim=16, attention_bias=True, tie_embeddings=False),
    "qwen3": dict(query_heads=2, key_value_heads=1, head_dim=32, qk_norm=True, tie_embeddings=False),
}
THEIRS = {theirs: ours for ours, theirs in (TOP_TENSORS | LAYER_TENSORS).items()}


def random_model(kind, seed=0, **sizes):
    """A model's shape, its parameters, and its tensors as transformers names them."""
    sizes = dict(vocab_size=VOCABULARY, width=64, layers=2, feed_forward=96, max_position=64) | sizes
    config = ModelConfig(norm_epsilon=1e-5, **sizes, **SHAPES[kind])
    params = init_params(config, jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1), 200))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params)  # biases and norms too
    tensors = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        tensors |= {name: entry.make() for name, entry in weight_of(path_name(path), leaf.shape, config).entries(leaf).items()}
    return config, params, tensors


def in_gguf_order(name, values, heads):
    """Llama's query and key rows as llama.cpp stores them: row i of a head's first half beside row i of its second half."""
    per_head = values.reshape(heads, -1, *values.shape[1:])
    first, second = np.split(per_head, 2, axis=1)
    return np.stack([first, second], axis=2).reshape(values.shape)


def gguf_name(theirs):
    stem, leaf = theirs.rsplit(".", 1)
    if stem in THEIRS:
        return f"{THEIRS[stem]}.{leaf}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{THEIRS[inner]}.{leaf}"


def write(path, kind, config, tensors, quantised=None, fields=None, tokenizer=True, words=WORDS):
    """A GGUF file. `quantised`: the type of every matrix whose rows are whole blocks; `fields`: added ones, which go first; `words`:
    tokens, their types, merges and the chat template."""
    tokens, types, merges, template = words
    writer = gguf.GGUFWriter(path, kind)
    adders = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
    for name, value in (fields or {}).items():
        adders[type(value)](name, value)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.feed_forward)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope_theta)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        if "tokenizer.ggml.pre" not in (fields or {}):
            writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_chat_template(template)
    for theirs, values in tensors.items():
        name = gguf_name(theirs)
        if kind == "llama" and ".attn_q." in name:
            values = in_gguf_order(name, values, config.query_heads)
        if kind == "llama" and ".attn_k." in name:
            values = in_gguf_order(name, values, config.key_value_heads)
        if quantised is None or values.ndim == 1 or values.shape[1] % gguf.GGML_QUANT_SIZES[quantised][0]:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values, np.float32), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(config, params):
    ids = jnp.arange(20).reshape(2, 10) % VOCABULARY
    here = jnp.ones_like(ids, bool)
    out = Decoder(config).apply({"params": params}, ids, prompt_positions(here), prompt_mask(here))
    return np.asarray(out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_float32_file_holds_the_models_own_numbers(kind, tmp_path):
    config, params, tensors = random_model(kind)
    found, loaded = load_pretrained(convert_gguf(write(tmp_path / "m.gguf", kind, config, tensors), tmp_path / "m"))
    assert found == config
    for (path, leaf), same in zip(jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(loaded), strict=True):
        assert np.array_equal(leaf, same), path_name(path)


def test_a_file_loads_by_its_path_and_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, params, tensors = random_model("llama")
    path = write(tmp_path / "m.gguf", "llama", config, tensors)
    assert read_config(path) == config
    loaded = load_pretrained(path, stacked=True)[1]
    assert np.array_equal(loaded["embedding"], params["embedding"])
    converted = checkpoint_directory(path)
    written = (converted / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_directory(path) == converted
    assert (converted / "model.safetensors").stat().st_mtime_ns == written
    assert load_tokenizer(path).encode("ab c") == load_tokenizer(converted).encode("ab c")
    assert load_template(path).source == TEMPLATE
    assert [entry.name for entry in (tmp_path / "cache" / "marl_llm" / "gguf").iterdir()] == [converted.name]


def test_numbers_of_4_bits_are_scale_times_integer_plus_minimum(tmp_path):
    config, _, tensors = random_model("llama")
    path = write(tmp_path / "m.gguf", "llama", config, tensors, gguf.GGMLQuantizationType.Q4_1)
    header = read_gguf(path)
    about = header.tensors["blk.0.ffn_up.weight"]
    raw = path.read_bytes()[about.offset : about.offset + 20]
    scale, minimum = np.frombuffer(raw[:4], np.float16).astype(np.float32)
    packed = np.frombuffer(raw[4:], np.uint8)
    by_hand = np.concatenate([packed & 15, packed >> 4]).astype(np.float32) * scale + minimum
    assert np.array_equal(header.read("blk.0.ffn_up.weight")[0, :32], by_hand)


@pytest.mark.parametrize(("name", "error"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_0", 0.3), ("Q4_1", 0.2)])
def test_quantised_numbers_are_near_the_models_own(name, error, tmp_path):
    config, params, tensors = random_model("qwen3")
    path = write(tmp_path / "m.gguf", "qwen3", config, tensors, gguf.GGMLQuantizationType[name])
    _, loaded = load_pretrained(convert_gguf(path, tmp_path / "m"))
    apart = [float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True)]
    assert 0 < max(apart) < error


@pytest.mark.parametrize(("name", "block"), [("Q4_K", 144), ("Q6_K", 210)])
def test_blocks_of_256_numbers_are_read_a_row_after_the_other(name, block, tmp_path):
    kind, rows = gguf.GGMLQuantizationType[name], 6
    raw = np.random.default_rng(0).integers(0, 100, (rows, 2 * block), dtype=np.uint8)  # small bytes: finite scales
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("output.weight", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    values = read_gguf(tmp_path / "m.gguf").read("output.weight")
    assert values.shape == (rows, 512)
    assert np.array_equal(values, gguf.dequantize(raw, kind))


def test_llama3_positions_follow_from_the_factors_of_the_file(tmp_path):
    config, _, tensors = random_model("llama")
    wave = 2 * np.pi * config.rope_theta ** (np.arange(8) / 8)
    factors = np.where(wave < 8192 / 4, 1.0, np.where(wave > 8192, 32.0, 0.0))
    smooth = (8192 / wave - 1) / 3
    factors = np.where(factors == 0, 1 / ((1 - smooth) / 32 + smooth), factors).astype(np.float32)
    THEIRS["rope_freqs"] = "rope_freqs"
    try:
        path = write(tmp_path / "m.gguf", "llama", config, tensors | {"rope_freqs.weight": factors})
        other = write(tmp_path / "n.gguf", "llama", config, tensors | {"rope_freqs.weight": factors[::-1]})
    finally:
        del THEIRS["rope_freqs"]
    scaling = read_config(convert_gguf(path, tmp_path / "m")).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("llama3", 32.0, 8192)
    with pytest.raises(CheckpointFileError, match="other factors than Llama 3's"):
        convert_gguf(other, tmp_path / "n")


def test_texts_become_the_ids_that_the_merges_give(tmp_path):
    config, _, tensors = random_model("llama")
    tokenizer = load_tokenizer(convert_gguf(write(tmp_path / "m.gguf", "llama", config, tensors), tmp_path / "m"))
    ids = {token: i for i, token in enumerate(TOKENS)}
    assert tokenizer.encode("abc a12") == [ids["abc"], ids["\u0120a"], ids["1"], ids["2"]]
    assert tokenizer.decode(tokenizer.encode("abc a12")) == "abc a12"
    assert tokenizer.special_ids["<|im_start|>"] == 1
    assert tokenizer.stop_ids == (0,)
    assert tokenizer.vocab_size == VOCABULARY


def test_sentencepiece_scores_say_which_pieces_are_joined_first(tmp_path):
    config, _, tensors = random_model("llama")
    blank = "\u2581"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(4)), blank, "a", "b", "c", "ab", "bc", f"{blank}a", "abc"]
    scores = [0.0] * 7 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 4 + [1] * 8, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    path = write(tmp_path / "m.gguf", "llama", config, tensors, fields=fields, tokenizer=False)
    tokenizer = load_tokenizer(convert_gguf(path, tmp_path / "m"))
    at = pieces.index
    assert tokenizer.encode("abc") == [at(f"{blank}a"), at("bc")]  # bc has the highest score, then the blank with a
    assert tokenizer.encode("ab") == [at(blank), at("ab")]
    assert tokenizer.encode("\x01a") == [at(blank), at("<0x01>"), at("a")]
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert library.encode("ab").ids == [1, at(blank), at("ab")]  # transformers puts the beginning of a text before it


@pytest.mark.parametrize(("cut", "joined"), [("gpt-2", "12"), ("smollm", None), ("qwen2", None), ("llama-bpe", "12")])
def test_the_cut_of_the_file_says_whether_digits_are_joined(cut, joined, tmp_path):
    config, _, tensors = random_model("llama")
    merges, tokens = [("1", "2")], ["<|end|>", "1", "2", "12", "\u0120"]
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": cut, "tokenizer.ggml.tokens": tokens,
              "tokenizer.ggml.token_type": [3, 1, 1, 1, 1], "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
              "tokenizer.ggml.eos_token_id": 0}  # fmt: skip
    path = write(tmp_path / "m.gguf", "llama", config, tensors, fields=fields, tokenizer=False)
    found = load_tokenizer(convert_gguf(path, tmp_path / "m")).encode("12")
    assert found == ([tokens.index("12")] if joined else [1, 2])
    assert cut in CUTS


def test_a_tokenizer_that_is_not_read_can_be_given_as_a_directory(tmp_path):
    config, _, tensors = random_model("llama")
    good = convert_gguf(write(tmp_path / "m.gguf", "llama", config, tensors), tmp_path / "m")
    other = write(tmp_path / "n.gguf", "llama", config, tensors, fields={"tokenizer.ggml.pre": "tekken"})
    with pytest.raises(CheckpointFileError, match="tokenizer.ggml.pre='tekken' is not read.*--tokenizer"):
        convert_gguf(other, tmp_path / "n")
    assert not (tmp_path / "n").exists()
    assert load_tokenizer(convert_gguf(other, tmp_path / "n", tokenizer=good)) == load_tokenizer(good)


def header_with(fields=(), tensors=(), version=3, counts=None):
    """The bytes of a header; `fields`: (name, type, bytes); `tensors`: (name, shape, type, offset)."""

    def text(one):
        return struct.pack("<Q", len(one.encode())) + one.encode()

    numbers = counts or (len(tensors), len(fields))
    out = b"GGUF" + struct.pack("<IQQ", version, *numbers)
    out += b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in fields)
    for name, shape, kind, offset in tensors:
        out += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape) + struct.pack("<IQ", kind, offset)
    return out


HOSTILE = {
    "empty": (b"", "no GGUF file|truncated"),
    "another format": (b"PK\x03\x04" * 10, "no GGUF file"),
    "version 1": (header_with(version=1), "version 1; versions 2 and 3"),
    "high byte first": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "high byte first"),
    "10^15 tensors": (header_with(counts=(10**15, 0)), "1,000,000,000,000,000 tensors"),
    "10^12 fields": (header_with(counts=(0, 10**12)), "fields"),
    "endless text": (header_with([("a", 8, struct.pack("<Q", 1 << 62))]), "bytes in one text"),
    "endless list": (header_with([("a", 9, struct.pack("<IQ", 4, 1 << 60))]), "items in a"),
    "list of lists": (header_with([("a", 9, struct.pack("<IQ", 9, 3))]), "items of type 9"),
    "unknown type": (header_with([("a", 77, b"")]), "unknown type 77"),
    "no text": (header_with([("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "truncated or damaged"),
    "a field twice": (header_with([("a", 0, b"1"), ("a", 0, b"2")]), "field 'a' twice"),
    "200,000 axes": (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 200_000), "axes"),
    "a tensor of 2^80 numbers": (header_with(tensors=[("t", (1 << 40, 1 << 40), 0, 0)]), "ends behind the file's end"),
    "no numbers": (header_with(tensors=[("t", (0, 5), 0, 0)]), "does not consist of blocks"),
    "half a block": (header_with(tensors=[("t", (33,), 2, 0)]), "blocks of 32"),
    "unknown quantisation": (header_with(tensors=[("t", (32,), 999, 0)]), "quantisation 999"),
    "integers": (header_with(tensors=[("t", (32,), 26, 0)]), "quantisation 26"),
    "tensors that share bytes": (header_with(tensors=[("t", (8,), 0, 0), ("u", (8,), 0, 16)]) + bytes(200), "share bytes"),
    "alignment 0": (header_with([("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment"),
    "offset beyond 2^63": (header_with(tensors=[("t", (8,), 0, (1 << 64) - 8)]), "ends behind"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_by_name_within_50_mb(case, tmp_path):
    content, said = HOSTILE[case]
    (tmp_path / "bad.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFileError, match=said) as caught:
            convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert "bad.gguf" in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not (tmp_path / "out").exists()


FIELDS_AMISS = {
    "llama.block_count": ("many", "block_count is 'many'"),
    "llama.attention.head_count": (3, "heads"),
    "tokenizer.ggml.eos_token_id": (10_000, "eos_token_id=10000 is no token"),
    "tokenizer.ggml.tokens": (["a", "a"], "tokens must hold texts, each once"),
    "tokenizer.ggml.merges": (["a b", "a"], r"merges\[1\] does not join"),
    "tokenizer.ggml.model": ("t5", "'t5' is not read"),
    "general.architecture": ("mamba", "'mamba' is not read"),
    "llama.rope.dimension_count": (8, "a part of each head"),
    "llama.rope.scaling.type": ("longrope", "'longrope' is not supported"),
    "llama.rope.scaling.attn_factor": (2.0, "attn_factor=2.0 is not supported"),
    "llama.rope.scaling.yarn_beta_fast": (8.0, "yarn_beta_fast=8.0 is not supported"),
    "llama.attention.scale": (0.1, "attention.scale=0.1 is not supported"),
    "llama.attention.sliding_window": (8, "sliding_window=8 is not supported"),
}


@pytest.mark.parametrize("field", FIELDS_AMISS)
def test_a_field_that_is_amiss_is_named(field, tmp_path):
    config, _, tensors = random_model("llama")
    value, said = FIELDS_AMISS[field]
    path = write(tmp_path / "m.gguf", "llama", config, tensors)
    header = read_gguf(path)
    changed = header._replace(fields=header.fields | {field: value})
    from marl_llm.models import gguf as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_gguf", lambda _: changed)
        with pytest.raises(CheckpointFileError, match=said):
            convert_gguf(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]  # nothing is left behind


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, ("linear", 4.0)), ({"rope.scale_linear": 4.0}, ("linear", 4.0)),
        ({"rope.scaling.factor": 1.0}, None), ({"rope.scale_linear": 0.0, "rope.scaling.attn_factor": 1.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None), ({"attention.sliding_window": 0, "attention.scale": 0.0}, None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_slow": 1.0}, ("yarn", 4.0)),
    ],
)  # fmt: skip
def test_positions_are_stretched_as_the_fields_say(fields, scaling, tmp_path):
    config, _, tensors = random_model("llama")
    path = write(tmp_path / "m.gguf", "llama", config, tensors)
    header = read_gguf(path)
    changed = header._replace(fields=header.fields | {f"llama.{name}": value for name, value in fields.items()})
    found = read_shape(changed).get("rope_scaling")
    assert (None if found is None else (found["rope_type"], found["factor"])) == scaling


def test_cut_and_flipped_files_are_refused_or_read_and_never_raise_anything_else(tmp_path):
    config, _, tensors = random_model("llama")
    whole = write(tmp_path / "m.gguf", "llama", config, tensors).read_bytes()
    start = min(tensor.offset for tensor in read_gguf(tmp_path / "m.gguf").tensors.values())
    draw = random.Random(0)
    cuts = [whole[: draw.randrange(len(whole))] for _ in range(60)]
    flips = [bytearray(whole) for _ in range(120)]
    for flipped in flips:
        flipped[draw.randrange(start)] ^= 1 << draw.randrange(8)
    refusals = []
    for content in [*cuts, *flips]:
        (tmp_path / "bad.gguf").write_bytes(content)
        try:
            directory = convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
            load_pretrained(directory)
            load_tokenizer(directory).encode("abc")
        except ValueError as error:
            refusals.append(str(error))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert len(refusals) >= len(cuts) + 40
    assert all("bad.gguf" in said or "out" in said for said in refusals)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.gguf", "m.gguf"]


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    config, _, tensors = random_model("llama")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] = np.nan
    with pytest.raises(CheckpointFileError, match="output_norm.weight holds NaN"):
        convert_gguf(write(tmp_path / "m.gguf", "llama", config, tensors), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_existing_directory_is_left_alone(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m")
    assert (tmp_path / "m" / "notes").read_text() == "mine"


def test_the_converted_files_are_those_of_a_checkpoint_of_transformers(tmp_path):
    config, _, tensors = random_model("llama")
    directory = convert_gguf(write(tmp_path / "m.gguf", "llama", config, tensors), tmp_path / "m")
    shape = json.loads((directory / "config.json").read_text())
    assert shape["architectures"] == ["LlamaForCausalLM"]
    assert shape["rms_norm_eps"] == 1e-5
    about = json.loads((directory / "tokenizer_config.json").read_text())
    assert about["chat_template"] == TEMPLATE
    assert about["eos_token"] == "<|end|>"
    assert json.loads((directory / "generation_config.json").read_text()) == {"eos_token_id": [0]}
