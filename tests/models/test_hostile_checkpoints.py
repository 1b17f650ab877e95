"""A checkpoint that somebody else made cannot flood or hang the process that opens it: each is refused in one line that says where."""

import json
import os
import struct
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import (
    LoraConfig,
    ModelConfig,
    init_adapters,
    init_params,
    load_adapters,
    load_pretrained,
    save_adapters,
    save_pretrained,
)
from marl_llm.models.huggingface import read_config
from marl_llm.models.tensor_files import CheckpointFileError, find_tensors, read_header

CONFIG = ModelConfig(vocab_size=16, width=8, layers=1, query_heads=2, key_value_heads=1, head_dim=4, feed_forward=16)
LORA = LoraConfig(rank=2, alpha=4.0)


def refused(function, *arguments):
    """The one line with which a checkpoint is refused, after little work."""
    started = time.process_time()
    with pytest.raises(CheckpointFileError) as caught:
        function(*arguments)
    assert time.process_time() - started < 5
    assert len(str(caught.value)) < 1500
    return str(caught.value)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


def written(folder, params):
    save_pretrained(folder, CONFIG, params)
    return json.loads((folder / "config.json").read_text())


DIMENSIONS = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
BAD = [10**7, 10**30, -1, 1.5, "8", True, [8], {"a": 1}]


@pytest.mark.parametrize("value", BAD, ids=[str(value) for value in BAD])
def test_dimensions_beyond_any_model_or_of_another_kind_are_refused(tmp_path, params, value):
    raw = written(tmp_path, params)
    for name in DIMENSIONS:
        (tmp_path / "config.json").write_text(json.dumps(raw | {name: value}))
        said = refused(read_config, tmp_path)
        assert name in said
        assert "\n" not in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 1e299}, "rope_theta"),
        ({"rope_theta": 1e25}, "rope_theta"),
        ({"rope_theta": -5.0}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rms_norm_eps": 1e29}, "norm_epsilon"),
        ({"rms_norm_eps": 1e40}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e20}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": -7}}, "mscale_all_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 1e25}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 4, "high_freq_factor": 1}}, "low_frequency_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 9}, "no multiple of num_attention_heads"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "not a multiple"),
    ],
)
def test_numbers_that_make_no_model_are_refused(tmp_path, params, change, says):
    raw = written(tmp_path, params)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "rope_parameters"} | change))
    assert says in refused(read_config, tmp_path)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1024}, {"vocab_size": 1 << 20}, {"hidden_size": 1 << 16}, {"vocab_size": 17}])
def test_a_config_that_promises_more_than_the_tensors_is_refused_before_work(tmp_path, params, change):
    raw = written(tmp_path, params)
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    assert "do not fit its config.json" in refused(load_pretrained, tmp_path)


TEXTS = ["[" * 10**6, '{"a":' * 10**5 + "1" + "}" * 10**5, '{"a": ' + "9" * 10**5 + "}", "\x00", '{"a": 1e400}', ""]


@pytest.mark.parametrize("text", TEXTS, ids=["arrays", "objects", "digits", "null", "large", "empty"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "adapter_config.json"])
def test_json_that_no_reader_should_follow_is_refused_with_its_file(tmp_path, params, name, text):
    written(tmp_path, params)
    (tmp_path / name).write_text(text)
    said = refused(load_adapters, tmp_path, CONFIG) if name.startswith("adapter") else refused(load_pretrained, tmp_path)
    assert str(tmp_path / name) in said
    assert "\n" not in said


def test_a_named_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    for name in ("config.json", "model.safetensors"):
        os.mkfifo(tmp_path / name)
    assert "not a regular file" in refused(read_config, tmp_path)
    assert "not a regular file" in refused(read_header, tmp_path / "model.safetensors")


def file_of(path, header, data=b"", length=None):
    """A safetensors file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = {
    "200,000 axes": {"w": entry([1] * 200_000, (0, 4))},
    "a product beyond all numbers": {"w": entry([10**200] * 8)},
    "a negative size": {"w": entry([-1, -2])},
    "a fraction": {"w": entry([2.0])},
    "true as a size": {"w": entry([True, 2])},
    "offsets beyond the file": {"w": entry([2**60], (0, 2**62))},
    "negative offsets": {"w": entry([2], (-8, 0))},
    "reversed offsets": {"w": entry([0], (8, 0))},
    "three offsets": {"w": entry([2], (0, 4, 8))},
    "no such dtype": {"w": entry(dtype="F33")},
    "a list as dtype": {"w": entry(dtype=["F32"])},
    "overlap": {"v": entry(), "w": entry()},
    "a hole": {"w": entry([1], (4, 8))},
    "bytes of no tensor": {"w": entry([1], (0, 4))},
    "an entry that is a list": {"w": [1, 2]},
    "a name of a megabyte": {"w" * 10**6: entry()},
    "a name with control signs": {"w\n\x1b[2J": entry()},
    "a list": [1, 2],
    "deep": b'{"w":' * 10**5,
    "duplicate keys": b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "not UTF-8": b'{"\xff": 1}',
    "a million entries": b"{" + b'"w":1,' * 1_100_000 + b'"w":1}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path, name):
    path = file_of(tmp_path / "model.safetensors", HEADERS[name], bytes(8))
    said = refused(find_tensors, tmp_path)
    assert str(path) in said
    assert said.isprintable()


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 0, 1])
def test_a_header_length_that_lies_is_refused(tmp_path, length):
    file_of(tmp_path / "model.safetensors", {"w": entry()}, bytes(8), length)
    refused(find_tensors, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 5)
    assert "truncated" in refused(find_tensors, tmp_path)


def test_a_header_of_spaces_is_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100 << 20))
        file.truncate((100 << 20) + 8)  # sparse: takes no room
    assert "at most 8,388,608 are read" in refused(find_tensors, tmp_path)


def test_a_header_of_very_many_tensors_is_not_taken(tmp_path):
    header = {f"w{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(60_000)}
    file_of(tmp_path / "model.safetensors", header, bytes(4 * 60_000))
    assert "its header: more than 400,000 values" in refused(find_tensors, tmp_path)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "a\x00b", "x" * 10**5])
def test_an_index_that_points_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    refused(find_tensors, tmp_path)


def test_an_index_of_thousands_of_files_is_refused(tmp_path):
    placed = {f"w{i}": f"model-{i}.safetensors" for i in range(3000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert "names 3,000 files" in refused(find_tensors, tmp_path)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("stacked", [False, True])
def test_weights_that_are_no_numbers_are_refused_with_the_tensors_name(tmp_path, params, value, stacked):
    broken = jax.tree.map(lambda x: x, params)
    broken["block_0"]["up"]["kernel"] = broken["block_0"]["up"]["kernel"].at[1, 2].set(value)
    save_pretrained(tmp_path, CONFIG, broken)
    with pytest.raises(CheckpointFileError, match=r"model.safetensors: model.layers.0.mlp.up_proj.weight holds NaN, infinity"):
        load_pretrained(tmp_path, stacked=stacked)


def test_weights_beyond_the_wanted_dtype_are_refused(tmp_path, params):
    broken = jax.tree.map(lambda x: x, params)
    broken["embedding"] = broken["embedding"].at[0, 0].set(3.4e38)
    save_pretrained(tmp_path, CONFIG, broken)
    load_pretrained(tmp_path)
    with pytest.raises(CheckpointFileError, match=r"model.embed_tokens.weight holds .* beyond bfloat16"):
        load_pretrained(tmp_path, param_dtype="bfloat16")


LORA_SERVING = [
    {"r": 0}, {"r": -1}, {"r": 10**9}, {"r": "2"}, {"r": 2.0}, {"r": None}, {"lora_alpha": "4"}, {"lora_alpha": None}, {"lora_alpha": 0},
    {"lora_alpha": 1e200}, {"target_modules": "(a+)+$"}, {"target_modules": [1]}, {"target_modules": [["q_proj"]]}, {"target_modules": []},
    {"target_modules": ["q_proj", "(a+)+$"]}, {"rank_pattern": {"q_proj": 4}}, {"alpha_pattern": {"q_proj": 4}},
    {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "olora"}, {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_16"}, {"init_lora_weights": "loftq"}, {"init_lora_weights": ["a"]},
    {"alora_invocation_tokens": [1, 2]}, {"layer_replication": [[0, 1], [0, 1]]}, {"layers_to_transform": [0]}, {"use_dora": True},
    {"use_rslora": True}, {"lora_bias": True}, {"bias": "all"}, {"trainable_token_indices": [1]}, {"target_parameters": ["x"]},
    {"exclude_modules": "x"}, {"peft_type": "IA3"}, {"peft_type": None}, {"fan_in_fan_out": True}, {"a_field_of_tomorrow": True},
]  # fmt: skip


@pytest.mark.parametrize("change", LORA_SERVING, ids=[str(change) for change in LORA_SERVING])
def test_adapters_that_mean_another_model_are_refused_by_field(tmp_path, change):
    save_adapters(tmp_path, init_adapters(CONFIG, jax.random.key(0), LORA), LORA)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | change))
    said = refused(load_adapters, tmp_path, CONFIG)
    assert "adapter_config.json" in said
    assert {"r": "rank"}.get(next(iter(change)), next(iter(change))).split("_")[-1] in said or next(iter(change)) in said


def test_the_fields_that_peft_writes_for_plain_lora_are_accepted(tmp_path):
    adapters = init_adapters(CONFIG, jax.random.key(0), LORA)
    save_adapters(tmp_path, adapters, LORA)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    plain = {
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "corda_config": None,
        "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "init_lora_weights": True, "layer_replication": None,
        "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.18.0", "qalora_group_size": 16, "rank_pattern": {},
        "revision": None, "target_parameters": None, "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
        "use_rslora": False,
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | plain))
    loaded, lora = load_adapters(tmp_path, CONFIG)
    assert lora == LORA
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(adapters), strict=True))
