"""The one device mesh that all models share, and how many host devices a CPU run uses.

Axes are ('data', 'fsdp', 'tensor'). Rollouts and updates of device games are per-device programs over 'data' (`jax.shard_map`).
On a CPU each core is made a device of its own: tiny matrix products do not split over threads, but environments do.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


def use_cpu_devices(count: int | None = None) -> None:
    """Makes `count` CPU devices (default: one per core, at most 8). Must run before JAX starts; no effect on GPU or TPU."""
    count = count or min(os.cpu_count() or 1, 8)
    jax.config.update("jax_num_cpu_devices", count)


def make_mesh(data: int | None = None) -> Mesh:
    """A mesh of `data` devices along 'data' (default: all). Raises `ValueError` when there are not that many devices."""
    devices = jax.devices()
    data = len(devices) if data is None else data
    if not 1 <= data <= len(devices):
        raise ValueError(f"mesh: data={data} devices asked for, {len(devices)} are there ({devices[0].platform})")
    # Auto axes: the per-device programs below are written with shard_map, the rest is left to the compiler
    return Mesh(np.asarray(devices[:data]).reshape(data, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)


def compile_ahead(jobs: Sequence[tuple]) -> concurrent.futures.Future:
    """Compiles jit-compiled functions for given arguments in one background thread, beside whatever runs meanwhile.

    Each job is `(function, arguments)`. A later call with arguments of the same shapes and shardings finds the program compiled. The future
    holds None, or the error of the first job that failed.
    """

    def work():
        for function, arguments in jobs:
            function.lower(*arguments).compile()

    pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future
