"""The devices that a plan is made for: TPUs and GPUs that need not be there, with a compiler for them or only their data sheets."""

from __future__ import annotations

import dataclasses
import math
import os

from marl_llm.runs.command import ConfigError


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA's compiler asks of a GPU beside its data sheet in `roofline.CHIPS`; from NVIDIA's white papers and its table of compute
    capabilities.

    Attributes:
      name: as the driver says it. capability: of its architecture. cores: multiprocessors. shared, shared_of_block: bytes of shared memory
        of one, and of one block of threads at most. cache: bytes of L2. threads: on a multiprocessor. lanes: float32 units of one.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared: int
    shared_of_block: int
    cache: int
    clock_ghz: float
    threads: int = 2048
    lanes: int = 128

    def text(self, memory: float, bandwidth: float) -> str:
        """The description that JAX's CUDA plugin takes for a GPU that is not there."""
        most = 2**31 - 1
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared} shared_memory_per_block_optin: {self.shared_of_block}
              core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock_ghz} l2_cache_size: {self.cache}
              block_dim_limit_x: {most} block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {int(bandwidth)} device_memory_size: {int(memory)}
              cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 }}
            device_description_str: "{self.name}"
        """


GPUS = {
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167_936, 166_912, 40 * 2**20, 1.41, lanes=64),
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 233_472, 232_448, 50 * 2**20, 1.98),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 233_472, 232_448, 50 * 2**20, 1.98),
    "rtx4090": GpuTarget("NVIDIA GeForce RTX 4090", (8, 9), 128, 102_400, 101_376, 72 * 2**20, 2.52, threads=1536),
}


class PlanError(ConfigError):
    """The plan cannot be made; the message says why and what to do."""


def mesh_axes(devices: int, text: str, configured: tuple[int, int] = (1, 1)) -> tuple[int, int, int]:
    """(data, fsdp, tensor) for a number of devices: as the text has them, else as `said`, a config's `mesh.fsdp` (0: all that are left) and
    `mesh.tensor`, unless those are 1 and 1. Raises `PlanError` when they do not divide."""
    if configured != (1, 1) and not text:
        fsdp, tensor = configured[0] or max(1, devices // configured[1]), configured[1]
    elif text:
        try:
            fsdp, tensor = map(int, text.split(","))
        except ValueError as e:
            raise PlanError(f"--mesh={text!r} is not 'fsdp,tensor', two numbers") from e
    else:
        tensor = 4 if devices >= 16 else 1
        fsdp = devices // tensor
    if fsdp < 1 or tensor < 1 or devices % (fsdp * tensor):
        raise PlanError(f"{'--mesh' if text else 'config.mesh'}: fsdp={fsdp} x tensor={tensor} does not divide {devices} devices")
    return devices // (fsdp * tensor), fsdp, tensor


def devices_of(topology: str, compile_: bool = True):
    """(chip, number of devices, devices to compile for, or None: count instead). A GPU's are None where JAX's CUDA plugin (extra `cuda`) is
    not installed. Raises `PlanError` on an unknown chip or shape, and where a compiler does not answer."""
    from marl_llm.training.roofline import CHIPS

    name, _, shape = topology.partition(":")
    if name not in CHIPS or not shape:
        raise PlanError(f"--topology={topology!r}: write chip:shape; the chips are {', '.join(CHIPS)}")
    if name in GPUS:
        if not shape.isdecimal() or int(shape) < 1:
            raise PlanError(f"--topology={topology!r}: write the number of GPUs, e.g. {name}:8")
        return CHIPS[name], int(shape), _gpus(name, int(shape)) if compile_ else None
    if not compile_:  # which needs no TPU library
        sizes = shape.split("x")
        if not all(n.isdecimal() and int(n) for n in sizes) or not 2 <= len(sizes) <= 3:
            raise PlanError(f"--topology={topology!r}: write the shape of the slice, e.g. {name}:4x4")
        return CHIPS[name], math.prod(map(int, sizes)) * (2 if name == "tpu7x" else 1), None
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")  # nothing runs on a TPU here, so several plans may be made at once
    try:
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as e:  # the plugin raises whatever its C library says
        raise PlanError(f"--topology={topology}: the TPU compiler did not answer ({e}); is libtpu installed (extra `plan`)?") from e
    return CHIPS[name], len(devices), devices


def _gpus(name: str, count: int):
    """So many GPUs of one host to compile for; None without JAX's CUDA plugin."""
    from jax.experimental import topologies

    from marl_llm.training.roofline import CHIPS

    target = GPUS[name].text(CHIPS[name].memory, CHIPS[name].bandwidth)
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}").devices
    except NotImplementedError:
        return None
    except Exception as e:  # the plugin raises whatever its C library says
        raise PlanError(f"--topology={name}:{count}: the GPU compiler did not answer ({e}); --compile=False counts instead") from e


def split_mesh(data: int, fsdp: int, models: int) -> tuple[int, int] | None:
    """(data, fsdp) of the part of each model where each has its own; None where the mesh does not divide."""
    if data % models == 0:
        return data // models, fsdp
    return (data, fsdp // models) if fsdp % models == 0 else None
