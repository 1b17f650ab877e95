"""A GGUF file as a checkpoint directory of Hugging Face's form, which the rest of the library and `transformers` load.

    convert_gguf("SmolLM2-135M-Instruct.Q4_1.gguf", "models/smollm2")
    load_pretrained(checkpoint_directory("SmolLM2-135M-Instruct.Q4_1.gguf"))      # converted once, kept in the user's cache

Quantised tensors become the float32 numbers that they stand for. Llama's query and key rows, which GGUF stores in another order for its
rotary positions, return to the order of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile

import numpy as np

from marl_llm.models.config_files import ARCHITECTURES
from marl_llm.models.gguf_file import GgufFile, read_gguf
from marl_llm.models.gguf_tokenizer import tokenizer_files
from marl_llm.models.tensor_files import CheckpointFileError, Entry, write_tensors

READ = ("llama", "qwen2", "qwen3")  # architectures
SUFFIX = ".gguf"
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later: what each rotary frequency is divided by
SCALING_READ = ("type", "factor", "original_context_length", "finetuned")  # of a file's `rope.scaling`
SCALING_NEUTRAL = {  # other fields, with the values that say nothing
    "attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_log_multiplier": 0.0,
}  # fmt: skip
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def checkpoint_directory(path: str | os.PathLike) -> pathlib.Path:
    """The directory of a checkpoint: the path itself, or for a `.gguf` file its conversion in the user's cache, made when it is missing.

    The cache is `$XDG_CACHE_HOME/marl_llm/gguf` (`~/.cache` without the variable), by the SHA-256 of the file. Raises what `convert_gguf`
    raises.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return path
    if not path.is_file():
        raise CheckpointFileError(f"{path}: there is no such file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "marl_llm" / "gguf"
    return cache / digest if (cache / digest).is_dir() else convert_gguf(path, cache / digest)


def convert_gguf(path: str | os.PathLike, directory: str | os.PathLike, *, tokenizer: str | os.PathLike | None = None) -> pathlib.Path:
    """Writes a GGUF file as a checkpoint directory; it appears when it is whole.

    Args:
      directory: must not exist yet.
      tokenizer: a directory whose tokenizer files are copied, for a file with a tokenizer that is not read.
    Returns:
      the directory, with `config.json`, `model.safetensors` in float32, `tokenizer.json`, `tokenizer_config.json` and
      `generation_config.json`.
    Raises:
      CheckpointFileError: a damaged file, an architecture, quantisation or tokenizer that is not read; nothing is left behind.
      FileExistsError: the directory exists.
      ImportError: without the extra `gguf`.
    """
    directory = pathlib.Path(directory)
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; choose another directory, or delete it")
    gguf = read_gguf(path)
    files = {"config.json": read_shape(gguf)} | ({} if tokenizer else tokenizer_files(gguf))
    tensors = _tensors(gguf, files["config.json"])
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = pathlib.Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        for name, content in files.items():
            (unfinished / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in _tokenizer_files_in(pathlib.Path(tokenizer)) if tokenizer else ():
            shutil.copyfile(file, unfinished / file.name)
        write_tensors(unfinished / "model.safetensors", tensors.items(), np.float32)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster, and wrote the same
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def _tokenizer_files_in(directory: pathlib.Path) -> list[pathlib.Path]:
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json")
    files = [directory / name for name in names if (directory / name).is_file()]
    if directory / "tokenizer.json" not in files:
        raise CheckpointFileError(f"{directory}: has no tokenizer.json")
    return files


def read_shape(gguf: GgufFile) -> dict:
    """The `config.json` of a file, from its fields. Raises `CheckpointFileError`, naming the field."""
    kind = gguf.need("general.architecture", str)
    if kind not in READ:
        raise CheckpointFileError(f"{gguf.path}: the architecture {kind[:40]!r} is not read; {', '.join(READ)} are")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointFileError(f"{gguf.path}: has no matrix token_embd.weight")
    heads = gguf.need(f"{kind}.attention.head_count", int)
    width = gguf.need(f"{kind}.embedding_length", int)
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "num_hidden_layers": gguf.need(f"{kind}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get(f"{kind}.attention.head_count_kv", int, heads),
        "head_dim": gguf.get(f"{kind}.attention.key_length", int, width // max(heads, 1)),
        "intermediate_size": gguf.need(f"{kind}.feed_forward_length", int),
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(gguf.need(f"{kind}.attention.layer_norm_rms_epsilon", float)),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "max_position_embeddings": gguf.need(f"{kind}.context_length", int),
        "rope_theta": _decimal(gguf.get(f"{kind}.rope.freq_base", float, 10_000.0)),
        "torch_dtype": "float32",
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id", int),
    }
    if kind == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in gguf.tensors, "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors}
    if gguf.get(f"{kind}.rope.dimension_count", int, config["head_dim"]) != config["head_dim"]:
        raise CheckpointFileError(f"{gguf.path}: rotary positions of a part of each head ({kind}.rope.dimension_count) are not supported")
    for field in (f"{kind}.attention.scale", f"{kind}.attention.sliding_window"):
        if gguf.fields.get(field):
            raise CheckpointFileError(f"{gguf.path}: {field}={str(gguf.fields[field])[:40]} is not supported")
    scaling = _rope_scaling(gguf, kind, config)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _decimal(value: float) -> float:
    """The shortest decimal number that the float32 stands for: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile, kind: str, config: dict) -> dict | None:
    """How positions are scaled; None if they are not. A factor without a type is linear, as in llama.cpp. Raises `CheckpointFileError`."""
    own = f"{kind}.rope.scaling."
    for field, value in gguf.fields.items():
        name = field.removeprefix(own)
        if name != field and name not in SCALING_READ and value != SCALING_NEUTRAL.get(name):
            raise CheckpointFileError(f"{gguf.path}: {field}={str(value)[:40]} is not supported")
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_rope(gguf, config)
    factor = gguf.get(f"{own}factor", float, 0.0) or gguf.get(f"{kind}.rope.scale_linear", float, 0.0)
    scaling = gguf.get(f"{own}type", str, "linear" if factor not in (0.0, 1.0) else "none")
    if scaling == "none":
        return None
    if scaling not in ("linear", "yarn"):
        raise CheckpointFileError(f"{gguf.path}: {kind}.rope.scaling.type={scaling[:40]!r} is not supported; none, linear and yarn are")
    original = gguf.get(f"{own}original_context_length", int, config["max_position_embeddings"])
    factor = factor or gguf.need(f"{own}factor", float)
    return {"rope_type": scaling, "factor": _decimal(factor), "original_max_position_embeddings": original}


def _llama3_rope(gguf: GgufFile, config: dict) -> dict:
    """Llama 3's scaling, whose factor is the largest number that a frequency is divided by. Raises `CheckpointFileError` on other ones."""
    factors = gguf.read(ROPE_FACTORS).reshape(-1)
    scaling = LLAMA3_ROPE | {"factor": _decimal(float(factors.max()))}
    half = config["head_dim"] // 2
    wave_lengths = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wave_lengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointFileError(f"{gguf.path}: {ROPE_FACTORS} holds other factors than Llama 3's, which are not supported")
    return scaling


def _tensors(gguf: GgufFile, config: dict) -> dict[str, Entry]:
    """The tensors under the names that transformers gives them. Raises `CheckpointFileError` on one that has none."""
    entries = {}
    for name, tensor in gguf.tensors.items():
        if name == ROPE_FACTORS:
            continue
        heads = None
        if config["model_type"] == "llama" and (projection := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)):
            heads = config["num_attention_heads" if projection.group(1) == "q" else "num_key_value_heads"]
            if heads < 1 or tensor.shape[0] % (2 * heads):
                raise CheckpointFileError(f"{gguf.path}: {name} {list(tensor.shape)} does not consist of {heads} heads")
        entries[_transformers_name(gguf, name)] = Entry(tensor.shape, lambda name=name, heads=heads: _rows_in_order(gguf.read(name), heads))
    return entries


def _transformers_name(gguf: GgufFile, name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)", name)
    if layer and layer.group(2) in LAYER_TENSORS:
        return f"model.layers.{layer.group(1)}.{LAYER_TENSORS[layer.group(2)]}.{layer.group(3)}"
    stem, _, leaf = name.rpartition(".")
    if stem in TOP_TENSORS and leaf == "weight":
        return f"{TOP_TENSORS[stem]}.weight"
    raise CheckpointFileError(f"{gguf.path}: the tensor {name!r} has no place in a model of the architectures {', '.join(READ)}")


def _rows_in_order(values: np.ndarray, heads: int | None) -> np.ndarray:
    """Query or key rows of Llama in the order of transformers: GGUF holds the two halves of each head's rows by turns."""
    if heads is None:
        return values
    by_turns = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return by_turns.swapaxes(1, 2).reshape(values.shape)
