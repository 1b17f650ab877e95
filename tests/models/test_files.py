"""Checkpoints on disk: round trips, shards, shardings, the host's memory, and every fault that a file can have."""

import dataclasses
import functools
import json
import pathlib
import shutil
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from marl_llm.models import (
    SAMPLE,
    TRAIN,
    CheckpointFileError,
    ModelConfig,
    RopeScaling,
    init_params,
    load_pretrained,
    log_probs,
    make_model_config,
    read_config,
    save_pretrained,
    stack_layers,
    unstack_layers,
)
from marl_llm.models.tensor_files import Entry, read_header, write_tensors

PARITY = pathlib.Path(__file__).parents[1] / "data" / "parity"
BASE = ModelConfig(vocab_size=24, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=8, feed_forward=32)
SHAPES = {
    "qwen3": BASE,
    "qwen3_bias_yarn": dataclasses.replace(
        BASE, attention_bias=True, output_bias=True, tie_embeddings=False, rope_scaling=RopeScaling("yarn", 4.0, 64)
    ),
    "qwen2": dataclasses.replace(BASE, head_dim=4, qk_norm=False, attention_bias=True, tie_embeddings=False),
    "llama_mqa": dataclasses.replace(
        BASE, head_dim=4, key_value_heads=1, qk_norm=False, feed_forward_bias=True,
        rope_scaling=RopeScaling("llama3", 8.0, 64, low_frequency_factor=1.0, high_frequency_factor=4.0),
    ),
    "mistral": dataclasses.replace(BASE, qk_norm=False, tie_embeddings=False, window_pattern=(8,)),
    "gemma3": dataclasses.replace(
        BASE, post_norms=True, unit_offset=True, scale_embeddings=True, activation="gelu_tanh", query_scalar=24.0, rope_theta=1e6,
        local_rope_theta=1e4, window_pattern=(4, 0), rope_scaling=RopeScaling("linear", 8.0, 64),
    ),
    "smollm3": dataclasses.replace(BASE, head_dim=4, qk_norm=False, rope_pattern=(1, 0), window_pattern=(0, 8)),
    "qwen3_windows": dataclasses.replace(BASE, window_pattern=(0, 8)),
    "moe": dataclasses.replace(BASE, experts=4, experts_per_token=2, expert_feed_forward=8),
    "moe_mixed": dataclasses.replace(BASE, experts=4, experts_per_token=2, expert_feed_forward=8, dense_layers=(1,)),
}  # fmt: skip


@functools.cache
def params_of(config, dtype=jnp.float32):
    """Random parameters without a compilation."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    rng = np.random.default_rng(1)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0.1, 0.3, x.shape), dtype) for x in leaves])


def same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_saved_loads_bit_equal_in_every_layout_and_cut(name, tmp_path):
    config, params = SHAPES[name], params_of(SHAPES[name])
    save_pretrained(tmp_path / "one", config, params)
    loaded, got = load_pretrained(tmp_path / "one")
    assert loaded == config
    same(got, params)
    if config.uniform:
        files = save_pretrained(tmp_path / "cut", config, stack_layers(params), shard_bytes=4000)
        assert len(files) > 2
        assert all("-of-" in f.name for f in files)
        loaded, got = load_pretrained(tmp_path / "cut", stacked=True)
        same(unstack_layers(got), params)


def test_loading_a_file_of_another_and_saving_it_again_changes_no_bit(tmp_path):
    for source in sorted(p for p in PARITY.iterdir() if p.is_dir()):
        config, params = load_pretrained(source)
        save_pretrained(tmp_path / source.name, config, params, like=source)
        assert (tmp_path / source.name / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
        theirs, ours = read_header(source / "model.safetensors"), read_header(tmp_path / source.name / "model.safetensors")
        assert {n: i.shape for n, i in theirs.items()} == {n: i.shape for n, i in ours.items()}
        same(load_pretrained(tmp_path / source.name)[1], params)


def test_bfloat16_files_are_read_as_they_are_or_widened(tmp_path):
    low = params_of(BASE, jnp.bfloat16)
    config = dataclasses.replace(BASE, param_dtype="bfloat16")
    save_pretrained(tmp_path, config, low)
    assert {i.dtype for i in read_header(tmp_path / "model.safetensors").values()} == {np.dtype(ml_dtypes.bfloat16)}
    same(load_pretrained(tmp_path, param_dtype="bfloat16")[1], low)
    same(load_pretrained(tmp_path)[1], jax.tree.map(lambda x: x.astype(jnp.float32), low))


def test_a_file_may_mix_dtypes(tmp_path):
    params = params_of(BASE)
    save_pretrained(tmp_path, BASE, params)
    header = read_header(tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    norms = {n: np.frombuffer(raw, np.float32, int(np.prod(i.shape)), i.offset).reshape(i.shape) for n, i in header.items()}
    cut = {n: Entry(x.shape, lambda x=x: x) for n, x in norms.items() if "norm" in n}
    rest = {n: Entry(x.shape, lambda x=x: x) for n, x in norms.items() if "norm" not in n}
    (tmp_path / "model.safetensors").unlink()
    write_tensors(tmp_path / "a.safetensors", cut.items(), np.float32)
    write_tensors(tmp_path / "b.safetensors", rest.items(), np.dtype(ml_dtypes.bfloat16))
    placed = {n: "a.safetensors" for n in cut} | {n: "b.safetensors" for n in rest}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    got = load_pretrained(tmp_path)[1]
    same(got["final_norm"], params["final_norm"])
    same(got["embedding"], params["embedding"].astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("rules", [TRAIN, SAMPLE])
@pytest.mark.parametrize("name", ["qwen3_bias_yarn", "moe"])
def test_sharded_loading_gives_every_device_its_part(name, rules, tmp_path):
    config, params = SHAPES[name], params_of(SHAPES[name])
    save_pretrained(tmp_path, config, params)
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    for stacked in (False, True):
        _, got = load_pretrained(tmp_path, mesh=mesh, rules=rules, stacked=stacked)
        same(unstack_layers(jax.device_get(got)), params)
        query = got["blocks"]["block"]["attention"]["query"]["kernel"] if stacked else got["block_0"]["attention"]["query"]["kernel"]
        part = query.addressable_shards[0].data.shape
        assert part[-3:] == (8 if rules is TRAIN else 16, 2, 8)


def test_the_host_holds_little_more_than_the_part_being_placed(tmp_path):
    config = dataclasses.replace(BASE, vocab_size=50_000, width=64, feed_forward=1000)
    save_pretrained(tmp_path, config, params_of(config))
    largest = 50_000 * 64 * 4
    tracemalloc.start()
    load_pretrained(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.3 * largest


def test_a_value_head_is_saved_beside_the_model_and_starts_at_zero(tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE))
    config, params = load_pretrained(tmp_path, value_head=True)
    assert float(jnp.abs(params["value_head"]["kernel"]).max()) == 0
    params["value_head"]["kernel"] += 2.0
    params["value_head"]["bias"] += 3.0
    save_pretrained(tmp_path / "again", config, params)
    same(load_pretrained(tmp_path / "again", value_head=True)[1], params)
    assert "value_head" not in load_pretrained(tmp_path / "again")[1]


def write_header(path, header):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


FAULTS = {
    "truncated": (lambda f: f.write_bytes(f.read_bytes()[:-10]), "truncated: .* ends at byte"),
    "truncated header": (lambda f: f.write_bytes(f.read_bytes()[:20]), "truncated in its header"),
    "empty": (lambda f: f.write_bytes(b""), "not a safetensors file"),
    "text": (lambda f: f.write_text("<html>not found</html>"), "not a safetensors file"),
    "no json": (lambda f: f.write_bytes(struct.pack("<Q", 12) + b"{not json...}" + b"\0" * 9), "not JSON"),
    "dtype": (lambda f: write_header(f, {"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}), "w has dtype F8_E4M3"),
    "size": (lambda f: write_header(f, {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}), "does not fill"),
    "entry": (lambda f: write_header(f, {"w": {"dtype": "F32"}}), "malformed"),
    "string offsets": (lambda f: write_header(f, {"w": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}), "'w' is malformed"),
    "string shape": (lambda f: write_header(f, {"w": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}), "'w' is malformed"),
    "no offsets": (lambda f: write_header(f, {"w": {"dtype": "F32", "shape": [1], "data_offsets": None}}), "'w' is malformed"),
    "a list": (lambda f: write_header(f, {"w": [1]}), "'w' is malformed"),
    "dtype list": (lambda f: write_header(f, {"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}), "'w' is malformed"),
    "shared": (
        lambda f: write_header(f, {n: {"dtype": "F32", "shape": [2], "data_offsets": [s, s + 8]} for n, s in (("a", 0), ("b", 4))}),
        "a and b share bytes",
    ),
    "gone": (lambda f: f.unlink(), "has neither model.safetensors nor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_file_is_told(fault, tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE))
    spoil, says = FAULTS[fault]
    spoil(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFileError, match=says):
        load_pretrained(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3, "intermediate_size": 40, "model_type": "llama"}))
    with pytest.raises(CheckpointFileError) as e:
        load_pretrained(tmp_path)
    text = str(e.value)
    assert "missing: model.layers.2.self_attn.q_proj.weight, [32, 16]" in text
    assert "misshapen: model.layers.0.mlp.gate_proj.weight is [32, 16], the config wants [40, 16]" in text
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    with pytest.raises(CheckpointFileError, match=r"extra: model.layers.0.self_attn.k_norm.weight, \[8\]"):
        load_pretrained(tmp_path)


def test_a_tied_head_that_was_written_out_is_accepted_only_if_it_is_the_embedding(tmp_path):
    params = params_of(BASE)
    save_pretrained(tmp_path, BASE, params)
    table = np.asarray(params["embedding"])
    for head, fine in ((table, True), (table + 1, False)):
        write_tensors(tmp_path / "head.safetensors", [("lm_head.weight", Entry(head.shape, lambda x=head: x))], np.float32)
        names = dict.fromkeys(read_header(tmp_path / "model.safetensors"), "model.safetensors") | {"lm_head.weight": "head.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        if fine:
            same(load_pretrained(tmp_path)[1], params)
        else:
            with pytest.raises(CheckpointFileError, match="lm_head.weight differs"):
                load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "has sliding_attention layers, but the config gives qwen3 no"),
        ({"layer_types": ["chunked_attention", "full_attention"]}, r"\['chunked_attention'\] are not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, for num_hidden_layers=2"),
        ({"use_sliding_window": True, "sliding_window": -1, "layer_types": None}, "sliding_window=-1 must be an integer"),
        ({"use_sliding_window": True, "sliding_window": 1 << 30, "max_window_layers": 0, "layer_types": None}, "window_pattern"),
        ({"model_type": "llama", "use_sliding_window": True, "sliding_window": 128}, "not supported for llama"),
        ({"model_type": "mistral", "sliding_window": 8}, "mistral has its sliding_window in all of them"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "without a factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        # b16: what is malformed is named, whatever the kind of its field
        ({"rope_parameters": {"rope_type": "yarn", "factor": None}}, "without a factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor='4' must be a number"),
        ({"rope_parameters": [1.0]}, r"rope_parameters: must be an object with named fields, not \[1.0\]"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention: must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling: must be an object"),
        ({"rope_parameters": None, "rope_theta": [1]}, r"rope_theta=\[1\] must be a number"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"num_attention_heads": [4]}, "num_attention_heads"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
        ({"layer_types": [3]}, "layer_types"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"rms_norm_eps": float("nan")}, "config.json: a number that is not finite"),
        ({"rms_norm_eps": -1.0}, "norm_epsilon=-1.0"),
        ({"model_type": ["qwen3"]}, "model_type"),
        ({"num_key_value_heads": None}, "has no 'num_key_value_heads'"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(change, says, tmp_path):
    raw = json.loads((PARITY / "tiny-qwen3-tied" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointFileError, match=says):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gemma3"}, "text_config: has no 'hidden_size'"),
        ({"model_type": "gemma3", "text_config": [3]}, "text_config: must be an object"),
        ({"quantization_config": {"bits": 4}}, "quantised weights are not read"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar='256' must be a number"),
        ({"query_pre_attn_scalar": -1}, "query_scalar=-1.0 must be from 0"),
        ({"sliding_window": None}, "has sliding_attention layers, but the config gives gemma3_text no sliding window"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type='linear' is not supported"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 0.5}}}, "local_rope_theta=0.5"),
    ],
)
def test_a_gemma_that_cannot_be_honoured_is_refused(change, says, tmp_path):
    raw = json.loads((PARITY / "tiny-gemma3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointFileError, match=says):
        read_config(tmp_path)


STRETCHED = dict(model_type="gemma3_text", rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024)
GEMMA = dict(model_type="gemma3_text", max_position_embeddings=32_768, num_attention_heads=4, num_key_value_heads=1, vocab_size=262_144)
LOCAL = dict(sliding_window=512, rope_local_base_freq=10_000, rope_scaling=None, rope_theta=1_000_000)
MISTRAL = dict(
    model_type="mistral", hidden_size=4096, intermediate_size=14_336, max_position_embeddings=32_768, num_attention_heads=32,
    num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
)  # fmt: skip
PUBLISHED = {  # what the files say, as far as it is read
    "gemma-3-270m": GEMMA | LOCAL | dict(
        hidden_size=640, intermediate_size=2048, num_hidden_layers=18, layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        _sliding_window_pattern=6, use_bidirectional_attention=False,
    ),
    "gemma-3-1b": GEMMA | LOCAL | dict(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, sliding_window_pattern=6),
    "gemma-3-4b": dict(model_type="gemma3", text_config=STRETCHED | dict(hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34)),
    "gemma-3-12b": dict(model_type="gemma3", text_config=STRETCHED | dict(
        hidden_size=3840, intermediate_size=15_360, num_attention_heads=16, num_hidden_layers=48, num_key_value_heads=8,
    )),
    "gemma-3-27b": dict(model_type="gemma3", text_config=STRETCHED | dict(
        hidden_size=5376, intermediate_size=21_504, num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=168,
    )),
    "smollm3-3b": dict(
        model_type="smollm3", hidden_size=2048, intermediate_size=11_008, layer_types=["full_attention"] * 36, vocab_size=128_256,
        max_position_embeddings=65_536, max_window_layers=28, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
        num_attention_heads=16, num_hidden_layers=36, num_key_value_heads=4, rope_scaling=None, rope_theta=5e6, sliding_window=None,
        use_sliding_window=False,
    ),
    "mistral-7b-v0.1": MISTRAL | dict(rope_theta=10_000.0, sliding_window=4096, vocab_size=32_000),
    "mistral-7b-v0.3": MISTRAL | dict(rope_theta=1e6, sliding_window=None, vocab_size=32_768),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_file_has_the_presets_shape(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert read_config(tmp_path) == make_model_config(name)


def test_a_gemma_that_says_little_has_the_numbers_of_transformers(tmp_path):
    few = dict(model_type="gemma3_text", hidden_size=16, intermediate_size=32, num_hidden_layers=7, head_dim=None)
    (tmp_path / "config.json").write_text(json.dumps(few))
    config = read_config(tmp_path)
    assert (config.head_dim, config.query_scalar, config.rope_theta, config.local_rope_theta) == (256, 256.0, 1e6, 1e4)
    assert (config.window_pattern, config.tie_embeddings, config.max_position) == ((4096,) * 5 + (0,), True, 131_072)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_images_the_language_model_is_read(prefix, tmp_path):
    config = dataclasses.replace(SHAPES["gemma3"], tie_embeddings=False)
    save_pretrained(tmp_path, config, params_of(config))
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    header, raw = read_header(tmp_path / "model.safetensors"), (tmp_path / "model.safetensors").read_bytes()
    entries = {}
    for name, info in header.items():
        x = np.frombuffer(raw, np.float32, int(np.prod(info.shape)), info.offset).reshape(info.shape)
        name = f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else f"language_model.{name}"
        entries[name] = Entry(x.shape, lambda x=x: x)
    eye = Entry((3,), lambda: np.zeros(3, np.float32))
    eyes = {f"{before}{name}": eye for before in ("", "model.") for name in ("vision_tower.a.weight", "multi_modal_projector.b")}
    write_tensors(tmp_path / "model.safetensors", (entries | eyes).items(), np.float32)
    loaded, got = load_pretrained(tmp_path)
    assert loaded == config
    same(got, params_of(config))
    write_tensors(tmp_path / "model.safetensors", (entries | {"my_vision_tower.a": eye}).items(), np.float32)
    with pytest.raises(CheckpointFileError, match="extra: my_vision_tower.a"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "kind", "theta"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn", 5e5),  # as Qwen's model cards say, in a file of transformers 5
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 2e6}}, "yarn", 2e6),
        ({"rope_scaling": {}}, None, 5e5),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "original_max_position_embeddings": 7}, "linear", 5e5),
    ],
)
def test_of_two_fields_of_rotary_positions_the_older_counts_as_in_transformers(change, kind, theta, tmp_path):
    raw = json.loads((PARITY / "tiny-qwen3-tied" / "config.json").read_text())
    raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    config = read_config(tmp_path)
    assert (config.rope_scaling and config.rope_scaling.kind, config.rope_theta) == (kind, theta)
    if "original_max_position_embeddings" in change:
        assert config.rope_scaling.original_max_position == 7


@pytest.mark.parametrize(
    ("change", "turns"),
    [
        ({}, (1, 1, 1, 0)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, (1, 0)),
        ({"no_rope_layers": [1] * 9}, ()),
        ({"no_rope_layers": [0] * 5}, (0,)),
        ({"no_rope_layers": [1, 0, 1]}, "no_rope_layers has 3 entries, for num_hidden_layers=5"),
        ({"no_rope_layers": [1, 0, 1, 2, 1]}, r"rope_pattern=\(1, 0, 1, 2\) must be of 0 and 1"),
        ({"no_rope_layers": "1"}, "no_rope_layers='1' must be a list"),
    ],
)
def test_layers_without_positions_are_read_as_transformers_reads_them(change, turns, tmp_path):
    raw = json.loads((PARITY / "tiny-smollm3" / "config.json").read_text()) | dict(num_hidden_layers=5, layer_types=None)
    del raw["no_rope_layers"], raw["no_rope_layer_interval"]
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    if isinstance(turns, tuple):
        assert read_config(tmp_path).rope_pattern == turns
    else:
        with pytest.raises(CheckpointFileError, match=turns):
            read_config(tmp_path)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "layer_types": None}, ()),
        ({"use_sliding_window": True, "sliding_window": None}, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [FULL, SLIDING]}, (0, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}, (0, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 0}, (8,)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": None}, ()),  # it is 28
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 8, "num_experts": 0, "num_experts_per_tok": 1,
          "moe_intermediate_size": 8}, (8,)),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": None}, (8,)),
        ({"model_type": "mistral", "sliding_window": None}, ()),
    ],
)  # fmt: skip
def test_windows_are_read_as_transformers_reads_them(change, windows, tmp_path):
    raw = json.loads((PARITY / "tiny-qwen3-tied" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    assert read_config(tmp_path).window_pattern == windows


@pytest.mark.parametrize(("kind", "windows"), [("mistral", (4096,)), ("qwen3", (0, 4096)), ("smollm3", ())])
def test_a_file_without_the_field_has_the_window_of_transformers(kind, windows, tmp_path):
    raw = json.loads((PARITY / "tiny-qwen3-tied" / "config.json").read_text())
    raw |= dict(model_type=kind, use_sliding_window=True, max_window_layers=1, no_rope_layer_interval=2)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in ("sliding_window", "layer_types")}))
    assert read_config(tmp_path).window_pattern == windows


def test_a_directory_that_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointFileError, match=r"config.json: cannot be read"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointFileError, match="not JSON"):
        load_pretrained(tmp_path)


def test_a_smaller_checkpoint_leaves_no_old_shard_behind(tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE), shard_bytes=4000)
    save_pretrained(tmp_path, BASE, params_of(BASE))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_shape_that_no_architecture_has_is_not_saved(tmp_path):
    for change, says in (
        (dict(output_bias=True), "output_bias"),
        (dict(rope_pattern=(1, 0)), "smollm3 with qk_norm=True"),
        (dict(unit_offset=True), "qwen3 with unit_offset=True"),
        (dict(post_norms=True), "gemma3_text with unit_offset=False"),
        (dict(window_pattern=(4, 8)), r"qwen3 with window_pattern=\(4, 8\)"),
        (dict(window_pattern=(0, 8), qk_norm=False), r"mistral with window_pattern=\(0, 8\)"),
    ):
        with pytest.raises(ValueError, match=says):
            save_pretrained(tmp_path, dataclasses.replace(BASE, **change), {})


def test_an_index_that_promises_too_much_is_told(tmp_path):
    shutil.copytree(PARITY / "tiny-qwen3-tied", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weights": "model.safetensors"}}))
    with pytest.raises(CheckpointFileError, match="model.norm.weights"):
        load_pretrained(tmp_path / "m")


def test_scaled_rotations_reach_the_numbers():
    """The rope scaling of a file is not decoration: log-probs change with it."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (1, 12)), jnp.int32)
    plain = dataclasses.replace(SHAPES["qwen3_bias_yarn"], rope_scaling=None)
    a, b = (log_probs(c, params_of(plain), tokens).log_probs for c in (plain, SHAPES["qwen3_bias_yarn"]))
    assert float(jnp.abs(a - b).max()) > 1e-3


def test_b15_two_sets_of_weights_are_refused(tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE), shard_bytes=4000)
    shutil.copy(next(iter(sorted(tmp_path.glob("model-*")))), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFileError, match="two sets of weights, model.safetensors and the shards of"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": ["model.safetensors"]}, "not a safetensors index"),
        ({"weight_map": {"a": 3}}, "not a safetensors index"),
        ([], "index.json: an object is expected"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is no file name"),
        ({"weight_map": {"a": "missing.safetensors", "b": "model.safetensors"}}, "missing.safetensors: cannot be read"),
    ],
)
def test_b16_a_malformed_index_is_told(index, says, tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointFileError, match=says):
        load_pretrained(tmp_path)


def test_b16_a_tensor_in_two_shards_is_told(tmp_path):
    save_pretrained(tmp_path, BASE, params_of(BASE))
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "again.safetensors")
    placed = dict.fromkeys(read_header(tmp_path / "model.safetensors"), "model.safetensors") | {"model.norm.weight": "again.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(CheckpointFileError, match="which is meant"):
        load_pretrained(tmp_path)


def test_b16_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    params = params_of(BASE)
    save_pretrained(tmp_path, BASE, params, shard_bytes=4000)
    for config, wrong, says in (
        (dataclasses.replace(BASE, width=8), params, "do not fit the config"),
        (dataclasses.replace(BASE, layers=3), params, "block_2/.*missing instead of"),
        (dataclasses.replace(BASE, layers=1), stack_layers(params), "do not fit the config"),
        (dataclasses.replace(BASE, output_bias=True), params, "no Hugging Face architecture"),
        (BASE, {k: v for k, v in params.items() if k != "embedding"}, "embedding: missing"),
    ):
        with pytest.raises(ValueError, match=says):
            save_pretrained(tmp_path, config, wrong)
        same(load_pretrained(tmp_path)[1], params)
    with pytest.raises(ValueError, match="dtype='float16'"):
        save_pretrained(tmp_path, BASE, params, dtype="float16")
    monkeypatch.setattr("marl_llm.models.huggingface.write_tensors", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tmp_path, BASE, jax.tree.map(lambda x: x + 1, params))
    same(load_pretrained(tmp_path)[1], params)


def test_b16_a_llama_without_key_heads_has_one_per_query_head(tmp_path):
    config = SHAPES["llama_mqa"]
    save_pretrained(tmp_path, config, params_of(config))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_config(tmp_path).key_value_heads == config.query_heads


def test_c13_a_name_on_a_hub_is_told_how_to_fetch_it():
    with pytest.raises(CheckpointFileError, match=r"Only local checkpoints are read.*hf download Qwen/Qwen3-0.6B --local-dir"):
        load_pretrained("Qwen/Qwen3-0.6B")
