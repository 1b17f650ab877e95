"""Hugging Face checkpoints of `config_files.ARCHITECTURES`: read straight into device arrays, and written back.

    config, params = load_pretrained("Qwen3-0.6B", mesh=mesh, rules=TRAIN, stacked=True)
    save_pretrained("out", config, params, like="Qwen3-0.6B")

Loading reads by byte range only what each device holds, one device's part of one leaf at a time, so the host never holds more than the
largest part. Numbers are the file's, converted to `param_dtype`.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from marl_llm.models.checkpoint_names import Weight, ignored, weight_of, without_images
from marl_llm.models.config import DTYPES, ModelConfig
from marl_llm.models.config_files import config_from_dict, config_to_dict
from marl_llm.models.gguf import checkpoint_directory
from marl_llm.models.sharding import TRAIN, Rules, param_shardings, path_name
from marl_llm.models.tensor_files import (
    CheckpointFileError,
    Entry,
    TensorInfo,
    find_tensors,
    read_header,
    read_into,
    write_tensors,
)
from marl_llm.models.transformer import init_params, is_stacked
from marl_llm.untrusted import read_json_file

VALUE_HEAD = "value_head.safetensors"  # beside the model's files; other tools ignore it
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
          "special_tokens_map.json", "added_tokens.json")  # fmt: skip


def read_config(directory: str | os.PathLike, **overrides) -> ModelConfig:
    """The shape of a checkpoint (a directory or a `.gguf` file) from its `config.json`, of either generation, with single fields replaced.

    Raises `CheckpointFileError` on a missing or malformed file and on a feature that is not supported, naming it. Only local directories
    are read: a name on a hub has to be fetched first.
    """
    directory = checkpoint_directory(directory)
    if not directory.is_dir():
        raise CheckpointFileError(
            f"{directory}: there is no such directory. Only local checkpoints are read; if this is a model's name on the Hugging Face hub, "
            f"fetch it first: `pip install huggingface_hub`, then `hf download {directory} --local-dir DIR`, and give DIR"
        )
    path = directory / "config.json"
    try:
        raw = read_json_file(path, error=CheckpointFileError)
    except FileNotFoundError as e:
        raise CheckpointFileError(f"{path}: cannot be read ({e.strerror or e}); is this a Hugging Face checkpoint?") from e
    return config_from_dict(raw, str(path), **overrides)


def load_pretrained(
    directory: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    rules: Rules = TRAIN,
    stacked: bool = False,
    param_dtype: str = "float32",
    **overrides,
) -> tuple[ModelConfig, dict]:
    """`(config, params)` of a checkpoint: a directory, or a `.gguf` file.

    Args:
      mesh, rules: where the parameters go; without a mesh, to the default device.
      stacked: the layout of the layers. param_dtype: 'float32' or 'bfloat16'.
      overrides: fields of `ModelConfig` (`compute_dtype`, `remat`, `attention`, `value_head`, ...); a value head without a file of its own
        starts at zero.
    Raises:
      CheckpointFileError: missing, extra or misshapen tensors, all named; corrupt or truncated files; unsupported configs.
    """
    directory = checkpoint_directory(directory)
    config = read_config(directory, param_dtype=param_dtype, **overrides)
    tensors = {without_images(name): info for name, info in find_tensors(directory).items()}
    if config.value_head and (directory / VALUE_HEAD).exists():
        tensors |= read_header(directory / VALUE_HEAD)
    if config.layers * max(1, config.experts) > len(tensors):  # a shape of thousands of layers takes long to look at
        raise CheckpointFileError(
            f"{directory}: its tensors do not fit its config.json: {len(tensors):,} tensors for {config.layers:,} layers"
            + (f" of {config.experts:,} experts" if config.experts else "")
        )
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=stacked))
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    weights = [weight_of(path_name(path), leaf.shape, config) for path, leaf in leaves]
    _check(directory, config, tensors, weights)
    alone = SingleDeviceSharding(jax.devices()[0])
    places = [alone] * len(leaves) if mesh is None else jax.tree.leaves(param_shardings(shapes, mesh, rules))
    out = [_place(leaf, weight, tensors, at) for (_, leaf), weight, at in zip(leaves, weights, places, strict=True)]
    return config, jax.tree_util.tree_unflatten(tree, out)


def _check(directory, config: ModelConfig, tensors: dict[str, TensorInfo], weights: list[Weight]) -> None:
    """Raises one error that names everything that is missing, extra or misshapen."""
    wanted = {name: w.file_shape for w in weights for name in w.names if not w.optional}
    faults = [f"missing: {name}, {list(shape)}" for name, shape in wanted.items() if name not in tensors]
    faults += [
        f"misshapen: {name} is {list(tensors[name].shape)}, the config wants {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    known = {name for w in weights for name in w.names}
    extra = [name for name in tensors if name not in known and not ignored(name)]
    if config.tie_embeddings and "lm_head.weight" in extra:
        # some exporters write the tied head out; that is fine as long as it is the embedding
        if _same_bytes(tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")):
            extra.remove("lm_head.weight")
        else:
            faults.append("extra: lm_head.weight differs from the embedding although config.json says tie_word_embeddings")
            extra.remove("lm_head.weight")
    faults += [f"extra: {name}, {list(tensors[name].shape)}" for name in extra]
    if faults:
        more = f"\n  ... and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise CheckpointFileError(
            f"{directory}: its tensors do not fit its config.json:\n  " + "\n  ".join(faults[:20]) + more
        )


def _same_bytes(a: TensorInfo, b: TensorInfo | None) -> bool:
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    rows = a.shape[0]
    for start in range(0, rows, max(1, rows // 64)):
        part = slice(start, min(start + max(1, rows // 64), rows))
        x, y = (np.empty((part.stop - part.start, a.shape[1]), a.dtype) for _ in range(2))
        read_into(x, a, part, slice(None))
        read_into(y, b, part, slice(None))
        if x.tobytes() != y.tobytes():
            return False
    return True


def _place(leaf: jax.ShapeDtypeStruct, weight: Weight, tensors: dict[str, TensorInfo], sharding):
    """One leaf on its devices; parts that several devices hold are read once."""
    where = sharding.addressable_devices_indices_map(leaf.shape)
    parts: dict[tuple, list] = {}
    for device, index in where.items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
        parts.setdefault(bounds, []).append(device)
    pieces = {}
    for bounds, devices in parts.items():
        host = np.zeros([stop - start for start, stop in bounds], leaf.dtype)
        if not (weight.optional and weight.names[0] not in tensors):
            weight.fill(host, bounds, tensors)
        for device in devices:
            pieces[device] = jax.block_until_ready(jax.device_put(host, device))
        del host
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [pieces[d] for d in where])


def save_pretrained(
    directory: str | os.PathLike,
    config: ModelConfig,
    params: dict,
    *,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    like: str | os.PathLike | None = None,
) -> list[pathlib.Path]:
    """Writes a checkpoint that Hugging Face transformers loads: `config.json`, safetensors in one file or in shards with an index.

    Args:
      params: of either layout, on any devices; merge adapters first (`marl_llm.models.lora.merge`).
      dtype: 'float32' or 'bfloat16' on disk; None keeps `config.param_dtype`.
      shard_bytes: largest file. like: a checkpoint (directory or `.gguf` file) whose tokenizer and generation
        files are copied along.
    Returns:
      the tensor files written.
    Raises:
      ValueError: parameters with adapters or of another shape than the config's, and a shape that no known architecture has; before
        anything is written. An older checkpoint in the directory is replaced once the new files are whole.
    """
    if "lora" in params:
        raise ValueError("these parameters carry adapters; merge them (marl_llm.models.merge) or save them apart (save_adapters)")
    directory = pathlib.Path(directory)
    dtype = dtype or config.param_dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; choose one of {', '.join(DTYPES)}")
    kind = np.dtype(jnp.dtype(dtype))
    text = json.dumps(config_to_dict(config, dtype), indent=2, sort_keys=True)
    _check_params(config, params)
    entries: dict[str, Entry] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        entries |= weight_of(path_name(path), leaf.shape, config).entries(leaf)
    heads = {name: e for name, e in entries.items() if name.startswith("value_head.")}
    entries = {name: entries[name] for name in sorted(entries, key=_natural) if name not in heads}
    shards: list[dict[str, Entry]] = [{}]
    room = shard_bytes
    for name, entry in entries.items():
        size = int(np.prod(entry.shape)) * kind.itemsize
        if shards[-1] and size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = entry
        room -= size
    directory.mkdir(parents=True, exist_ok=True)
    single = len(shards) == 1
    names = ["model.safetensors"] if single else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]

    def fresh(name):
        return directory / f"{name}.new"

    total = sum(write_tensors(fresh(name), shard.items(), kind) for name, shard in zip(names, shards, strict=True))
    if heads:
        write_tensors(fresh(VALUE_HEAD), heads.items(), np.dtype(np.float32))
    for old in (*directory.glob("model*.safetensors"), directory / "model.safetensors.index.json", directory / VALUE_HEAD):
        old.unlink(missing_ok=True)  # an older checkpoint's shards must not mix with these
    for name in (*names, *((VALUE_HEAD,) if heads else ())):
        fresh(name).replace(directory / name)
    if not single:
        placed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    source = directory if like is None else checkpoint_directory(like)
    for name in COPIED:
        if (source / name).exists() and (source / name).resolve() != (directory / name).resolve():
            shutil.copyfile(source / name, directory / name)
    (directory / "config.json").write_text(text + "\n")
    return [directory / name for name in names]


def _check_params(config: ModelConfig, params: dict) -> None:
    """Raises `ValueError` naming the leaves that are not the config's."""
    wanted = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=is_stacked(params)))

    def shapes(tree):
        return {path_name(p): tuple(x.shape) for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}

    wanted, got = shapes(wanted), shapes(params)
    wrong = [f"{n}: {got.get(n, 'missing')} instead of {wanted.get(n, 'nothing')}" for n in sorted(wanted.keys() | got.keys())
             if wanted.get(n) != got.get(n)]  # fmt: skip
    if wrong:
        raise ValueError(f"{len(wrong)} of the parameters do not fit the config; nothing was written: {'; '.join(wrong[:4])}")


def _natural(name: str) -> list:
    return [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)]
