"""The one device mesh that all models share, and how many host devices a CPU run uses.

Axes are ('data', 'fsdp', 'tensor'). Rollouts and updates of device games are per-device programs over 'data' (`jax.shard_map`).
On a CPU each core is made a device of its own: tiny matrix products do not split over threads, but environments do.
"""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


def use_cpu_devices(count: int | None = None) -> None:
    """Makes `count` CPU devices (default: one per core, at most 8). Must run before JAX starts; no effect on GPU or TPU."""
    count = count or min(os.cpu_count() or 1, 8)
    jax.config.update("jax_num_cpu_devices", count)


def compile_quickly() -> None:
    """XLA flags that compile for a CPU in a quarter of the time and run slower: for smoke runs and tests. Must run before JAX starts."""
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick_flags()]).strip()


def quick_flags() -> list[str]:
    """The flags of `compile_quickly`. XLA aborts on a flag that it does not know, so one is given only where it was seen to exist."""
    emitters = tuple(int(n) for n in jax.__version__.split(".")[:2]) == (0, 10)
    return ["--xla_backend_optimization_level=0", *(["--xla_cpu_use_fusion_emitters=false"] if emitters else [])]


def make_mesh(data: int | None = None) -> Mesh:
    """A mesh of `data` devices along 'data' (default: all). Raises `ValueError` when there are not that many devices."""
    devices = jax.devices()
    data = len(devices) if data is None else data
    if not 1 <= data <= len(devices):
        raise ValueError(f"mesh: data={data} devices asked for, {len(devices)} are there ({devices[0].platform})")
    # Auto axes: the per-device programs below are written with shard_map, the rest is left to the compiler
    return Mesh(np.asarray(devices[:data]).reshape(data, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
