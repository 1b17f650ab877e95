"""The parameters in the layout that samples fastest: one subtree per layer, matrices transposed, q/k/v and gate/up fused.

A decode step multiplies a few rows with every matrix; fewer and larger products cost less, and on a CPU they run faster from the
transposed side (`columns_product`). Convert once per synchronisation, outside any loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marl_llm.models.config import ModelConfig
from marl_llm.models.sharding import SAMPLE, TRAIN, constrain_params, path_name, use_rules, ways
from marl_llm.models.transformer import unstack_layers

LARGE_BYTES = {"cpu": 2**27}  # of parameters in the compute dtype; 2**30 on an accelerator


def is_large(config: ModelConfig, platform: str) -> bool:
    """Whether a model's parameters are so many that a second copy of them on a device is one too many."""
    return config.parameters * jnp.dtype(config.compute_dtype).itemsize >= LARGE_BYTES.get(platform, 2**30)


def is_serving(params: dict) -> bool:
    """Whether parameters are in the serving layout."""
    return "gate_up" in params.get("block_0", {}) or "qkv" in params.get("block_0", {}).get("attention", {})


def serving_layout(params: dict) -> dict:
    """Parameters for sampling, from any layout.

    Adapters, and heads split over a tensor axis by the rules in force, keep projections apart: then the layers are only unstacked.
    """
    params = unstack_layers(params)
    if "lora" in params or is_serving(params) or ways("heads") > 1 or ways("feed_forward") > 1:
        return params
    out = {name: _block(part) if name.startswith("block_") else part for name, part in params.items()}
    if "output" in out:
        out["output"] = out["output"].T
    return out


def compute_copy(config: ModelConfig, params: dict) -> dict:
    """A copy of parameters as the model reads them: what it rounds to its compute dtype where it multiplies is rounded once and kept so.

    Norms, routers and value heads are read in their own dtype and stay as they are; all outputs of the model are the same bits.
    """
    dtype = jnp.dtype(config.compute_dtype)
    kept_as_they_are = ("norm/weight", "experts/router", "value_head/kernel", "value_head/bias")

    def of(path, x):
        same = path_name(path).endswith(kept_as_they_are) or not jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.copy(x) if same else x.astype(dtype) if x.dtype != dtype else jnp.copy(x)

    return jax.tree_util.tree_map_with_path(of, params)


@functools.lru_cache(32)
def serving_copy(config: ModelConfig, mesh: Mesh | None) -> Callable[[dict], dict]:
    """`params -> what is sampled from`, compiled once per shape of parameters: in the compute dtype, in the serving layout, and on a mesh
    placed as the rules for sampling say (rounded before they travel). Nothing of it is shared with `params`, which may be donated later.

    The mesh may split layers where the mesh of an update splits rows of weights ('fsdp' there is 'fsdp' x 'tensor' here): then weights go
    by way of the rules for training on this mesh. Without that step XLA makes whole arrays, of several layers at once.
    """
    def within(rules):
        return contextlib.nullcontext() if mesh is None else use_rules(mesh, rules)

    @jax.jit
    def copy(params: dict) -> dict:
        with within(TRAIN):
            params = constrain_params(compute_copy(config, params))
        with within(SAMPLE):
            served = serving_layout(constrain_params(params))
        if mesh is not None and mesh.shape["tensor"] == 1:  # every device has them whole
            served = jax.lax.with_sharding_constraint(served, NamedSharding(mesh, PartitionSpec()))
        return served

    return copy


def _matrix(kernel: jax.Array, inputs: int) -> jax.Array:
    """`[in..., out...]` as `[out, in]`."""
    size = 1
    for n in kernel.shape[:inputs]:
        size *= n
    return kernel.reshape(size, -1).T


def _fused(*parts: dict, inputs: int = 1) -> dict:
    out = {"kernel": jnp.concatenate([_matrix(p["kernel"], inputs) for p in parts])}
    if "bias" in parts[0]:
        out["bias"] = jnp.concatenate([p["bias"].reshape(-1) for p in parts])
    return out


def _block(block: dict) -> dict:
    attention, rest = dict(block["attention"]), {n: v for n, v in block.items() if n not in ("attention", "gate", "up", "down")}
    attention["qkv"] = _fused(*(attention.pop(n) for n in ("query", "key", "value")))
    attention["output"] = _fused(attention["output"], inputs=2)
    if "gate" in block:  # dense; a mixture's experts stay as they are
        rest |= {"gate_up": _fused(block["gate"], block["up"]), "down": _fused(block["down"])}
    return rest | {"attention": attention}
