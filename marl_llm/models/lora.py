"""Low-rank adapters (LoRA, arXiv 2106.09685): one small pytree per agent on a base that is shared and frozen.

    adapters = init_adapters(config, key, rank=8, alpha=16)            # one agent's; starts as no change
    params = attach(base, adapters)                                    # goes wherever parameters go: sampler, scorer, log_probs
    params, agents = attach_many(base, [a, b]), one_hot                # one forward serves rows of both agents
    merged = merge(base, adapters)                                     # plain parameters again

`y = x W + s x A B` with `s = alpha / rank`. The scale is folded into `b` when adapters are attached, so a model never asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from marl_llm.models.checkpoint_names import LAYER
from marl_llm.models.config import ModelConfig
from marl_llm.models.config_files import COUNT, Fields
from marl_llm.models.sharding import path_name
from marl_llm.models.tensor_files import CheckpointFileError, Entry, read_header, read_into, write_tensors
from marl_llm.models.transformer import init_params, is_stacked, stack_layers, unstack_layers
from marl_llm.untrusted import read_json_file

TARGETS = ("query", "key", "value", "output", "gate", "up", "down")
_PEFT = {"query": "q", "key": "k", "value": "v", "output": "o", "gate": "gate", "up": "up", "down": "down"}
_PEFT = {ours: f"{theirs}_proj" for ours, theirs in _PEFT.items()}

# Of adapter_config.json: what is read, what says nothing of the numbers, and the values of others that mean plain LoRA on the plain base.
_READ = frozenset({"r", "lora_alpha", "target_modules"})
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "task_type",
})  # fmt: skip
_NEUTRAL = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank, scale and targets of adapters. Raises `ValueError` naming the field."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"LoraConfig.rank={self.rank} must be at least 1")
        if not 0 < abs(self.alpha) < 1e9:
            raise ValueError(f"LoraConfig.alpha={self.alpha} must be a number other than 0, below 1e9")
        unknown = [t for t in self.targets if t not in TARGETS]
        if unknown or not self.targets:
            raise ValueError(f"LoraConfig.targets={self.targets}; choose among {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def _kernels(tree: dict) -> dict[str, tuple[int, ...]]:
    """Path and shape of every projection's kernel, in one-subtree-per-layer layout, without the 'kernel' at the end."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {path_name(path): leaf.shape for path, leaf in leaves}
    return {n.removesuffix("/kernel"): s for n, s in named.items() if n.startswith("block_") and n.endswith("/kernel")}


def _inputs(path: str) -> int:
    """How many leading axes of a kernel are its input."""
    return 2 if path.endswith("attention/output") else 1


def _nest(flat: dict) -> dict:
    out: dict = {}
    for path, value in flat.items():
        at = out
        *folders, last = path.split("/")
        for name in folders:
            at = at.setdefault(name, {})
        at[last] = value
    return out


def _flat(tree: dict) -> dict:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def init_adapters(config: ModelConfig, key: jax.Array, lora: LoraConfig, stacked: bool = False) -> dict:
    """One agent's adapters: `a [in, r]` random (Kaiming uniform, as PEFT), `b [r, out]` zero, so nothing changes at first.

    A pytree with one subtree per layer, or with all layers `stacked`, the same numbers in both layouts. Mixtures of experts get adapters on
    their attention only. `key` is consumed.
    """
    shapes = _kernels(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    out, dtype = {}, jnp.dtype(config.param_dtype)
    for number, (path, shape) in enumerate(shapes.items()):
        if path.rsplit("/", 1)[-1] not in lora.targets:
            continue
        n = _inputs(path)
        size, features = int(np.prod(shape[:n])), int(np.prod(shape[n:]))
        bound = (3.0 / size) ** 0.5 / 3.0**0.5  # kaiming_uniform with a=sqrt(5)
        a = jax.random.uniform(jax.random.fold_in(key, number), (size, lora.rank), jnp.float32, -bound, bound)
        out[f"{path}/a"], out[f"{path}/b"] = a.astype(dtype), jnp.zeros((lora.rank, features), dtype)
    return stack_layers(_nest(out)) if stacked else _nest(out)


def attach(base: dict, adapters: dict, lora: LoraConfig) -> dict:
    """Parameters that carry one agent's adapters; gradients with respect to `adapters` flow through."""
    return attach_many(base, [adapters], lora)


def attach_many(base: dict, adapters: list[dict], lora: LoraConfig) -> dict:
    """Parameters that carry several agents' adapters; rows choose with `agents [B, N]` (one-hot, or any mixture).

    `base` and `adapters` may have either layout; what comes out has the base's. All agents need the same targets and rank.
    """
    in_layout_of_base = stack_layers if is_stacked(base) else unstack_layers
    adapters = [adapter if is_stacked(adapter) == is_stacked(base) else in_layout_of_base(adapter) for adapter in adapters]
    if len({jax.tree.structure(adapter) for adapter in adapters}) != 1:
        raise ValueError("adapters of agents on one base need the same targets")
    together = jax.tree.map(lambda *x: jnp.stack(x, axis=-3), *adapters)
    return {"base": base, "lora": _nest({path: x * lora.scale if path.endswith("/b") else x for path, x in _flat(together).items()})}


def merge(base: dict, adapters: dict, lora: LoraConfig) -> dict:
    """Plain parameters with the adapters added in, in float32, in the layout and dtype of `base`."""
    apart, flat = _flat(unstack_layers(base)), _flat(unstack_layers(adapters))
    for path in {p.rsplit("/", 1)[0] for p in flat}:
        kernel = apart[f"{path}/kernel"]
        delta = lora.scale * (flat[f"{path}/a"].astype(jnp.float32) @ flat[f"{path}/b"].astype(jnp.float32))
        apart[f"{path}/kernel"] = (kernel.astype(jnp.float32) + delta.reshape(kernel.shape)).astype(kernel.dtype)
    out = _nest(apart)
    return stack_layers(out) if is_stacked(base) else out


def _peft_name(path: str) -> str:
    layer, end = re.fullmatch(r"block_(\d+)/(.+)", path).groups()
    name, _ = LAYER[f"{end}/kernel"]
    return f"base_model.model.model.layers.{layer}.{name.removesuffix('.weight')}"


def save_adapters(directory: str | os.PathLike, adapters: dict, lora: LoraConfig, base_name: str = "") -> None:
    """Writes PEFT's format: `adapter_config.json` and `adapter_model.safetensors`. `base_name` is the base checkpoint's name or path.

    Raises `ValueError` on a base that sees images, on which PEFT would find none of these adapters and leave them out.
    """
    base, directory = pathlib.Path(base_name) / "config.json", pathlib.Path(directory)
    if base_name and base.is_file() and read_json_file(base).get("model_type") == "gemma3":
        raise ValueError(f"{base_name} sees images, and PEFT calls its layers otherwise; merge the adapters (marl_llm.models.merge)")
    directory.mkdir(parents=True, exist_ok=True)
    flat, entries = _flat(unstack_layers(adapters)), {}
    for path in sorted({p.rsplit("/", 1)[0] for p in flat}):
        for ours, theirs in (("a", "lora_A"), ("b", "lora_B")):
            x = flat[f"{path}/{ours}"]
            entries[f"{_peft_name(path)}.{theirs}.weight"] = Entry(x.shape[::-1], lambda x=x: np.asarray(x).T)
    dtype = np.dtype(next(iter(flat.values())).dtype)
    write_tensors(directory / "adapter_model.safetensors", entries.items(), dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "target_modules": [_PEFT[t] for t in lora.targets],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_adapters(directory: str | os.PathLike, config: ModelConfig) -> tuple[dict, LoraConfig]:
    """`(adapters, lora)` from PEFT's format. Raises `CheckpointFileError` on tensors or options that do not fit the model, naming them."""
    directory = pathlib.Path(directory)
    path = directory / "adapter_config.json"
    try:
        raw = read_json_file(path, error=CheckpointFileError)
    except FileNotFoundError as e:
        raise CheckpointFileError(f"{path}: cannot be read ({e.strerror}); is this a PEFT adapter?") from e
    wrong = [f"{k}={repr(v)[:60]}" for k, v in raw.items() if k not in _READ | _WITHOUT_EFFECT and v and v not in _NEUTRAL.get(k, ())]
    if wrong:
        raise CheckpointFileError(f"{path}: {', '.join(wrong[:8])} not supported: the adapters would mean another model")
    ours, targets, file = {v: k for k, v in _PEFT.items()}, raw.get("target_modules"), Fields(raw, str(path))
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) and t in ours for t in targets):
        raise CheckpointFileError(f"{path}: target_modules={str(targets)[:200]!r}; a list among {', '.join(ours)} is supported")
    file.need("peft_type", "a string")
    rank, alpha = file.need("r", COUNT), file.need("lora_alpha", "a number")
    try:
        lora = LoraConfig(rank, float(alpha), tuple(t for t in TARGETS if _PEFT[t] in targets))
    except ValueError as e:
        raise CheckpointFileError(f"{path}: {e}") from e
    tensors = read_header(directory / "adapter_model.safetensors")
    shapes = jax.eval_shape(lambda: init_adapters(config, jax.random.key(0), lora))
    out, names, faults = {}, set(), []
    for leaf_path, leaf in _flat(shapes).items():
        where, kind = leaf_path.rsplit("/", 1)
        name = f"{_peft_name(where)}.{'lora_A' if kind == 'a' else 'lora_B'}.weight"
        names.add(name)
        if name not in tensors or tensors[name].shape != leaf.shape[::-1]:
            stored_shape = list(tensors[name].shape) if name in tensors else "missing"
            faults.append(f"{name}: {stored_shape}, the model wants {list(leaf.shape[::-1])}")
            continue
        host = np.empty(leaf.shape, leaf.dtype)
        read_into(host, tensors[name], slice(None), slice(None), transpose=True)
        out[leaf_path] = jnp.asarray(host)
    faults += [f"{name}: not part of the model's adapters" for name in sorted(set(tensors) - names)]
    if faults:
        raise CheckpointFileError(f"{directory}: its adapters do not fit:\n  " + "\n  ".join(faults[:20]))
    return _nest(out), lora
