"""The one device mesh that all models share, and how many host devices a CPU run uses.

Axes are ('data', 'fsdp', 'tensor'). Rollouts and updates of device games are per-device programs over 'data' (`jax.shard_map`).
On a CPU each core is made a device of its own: tiny matrix products do not split over threads, but environments do.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from marl_llm.models.config import ModelConfig
from marl_llm.models.serving import is_large
from marl_llm.models.sharding import AXES, TRAIN, Rules, use_rules

TEAMS = "teams"  # the axis of a mesh whose devices hold different teams (`teams_mesh`)
_PRODUCTS = "xla_cpu_experimental_ynn_fusion_type"  # which products YNNPACK takes
_LEVEL = "--xla_backend_optimization_level"


def use_cpu_devices(count: int | None = None) -> None:
    """Makes `count` CPU devices (default: one per core, at most 8). No effect on GPU or TPU. Once JAX has started, what it has is kept.

    Where there is nothing but CPUs, XLA compiles at LLVM's second level, unless XLA_FLAGS say otherwise: its third takes up to ten
    times as long over kernels that draw random numbers, and training steps are no quicker for it.

    Raises `ValueError` where JAX has started with fewer CPU devices than `count`.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count or min(os.cpu_count() or 1, 8))
    except RuntimeError as error:  # JAX has started
        if jax.default_backend() == "cpu" and (count or 1) > jax.device_count():
            raise ValueError(
                f"{count} devices are asked for, and JAX has started with {jax.device_count()} in this process: ask before its first "
                "operation, or take a new process"
            ) from error
        return
    if _LEVEL not in os.environ.get("XLA_FLAGS", "") and _cpu_alone():
        _add_flags(f"{_LEVEL}=2")


def _cpu_alone() -> bool:
    """Is there no accelerator that JAX could start? Asked without starting it."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None


def _add_flags(*flags: str) -> None:
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()


def compile_quickly() -> None:
    """XLA flags that compile for a CPU in a quarter of the time and run slower: for smoke runs and tests. Must run before JAX starts."""
    _add_flags(*quick_flags())


def quick_flags() -> list[str]:
    """The flags of `compile_quickly`. XLA aborts on a flag that it does not know, so one is given only where it was seen to exist."""
    emitters = tuple(int(n) for n in jax.__version__.split(".")[:2]) == (0, 10)
    once = [f"{_LEVEL}=0", "--xla_cpu_parallel_codegen_split_count=1"]
    return [*once, *(["--xla_cpu_use_fusion_emitters=false"] if emitters else [])]


def update_options(config: ModelConfig) -> dict[str, str]:
    """`compiler_options` for programs that score or train many rows of a model.

    On a CPU XLA gives products to YNNPACK, which decodes faster but keeps 1.6 of two cores busy in an update of SmolLM2-135M; without it
    1.9 are, and the update takes 10.0 in place of 11.3 s. Small models do not notice.
    """
    return accepted(_PRODUCTS, "") if jax.default_backend() == "cpu" and is_large(config, "cpu") else {}


@functools.cache
def accepted(option: str, value: str) -> dict[str, str]:
    """A compiler's option, or nothing where this XLA does not know it."""
    try:
        jax.jit(lambda: 0, compiler_options={option: value}).lower().compile()
    except (RuntimeError, ValueError):
        return {}
    return {option: value}


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh of `data * fsdp * tensor` of the given devices (default: all of JAX's, and as many along 'data' as there are).

    Raises `ValueError` when there are not that many devices.
    """
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    data = len(devices) // (fsdp * tensor) if data is None else data
    size = data * fsdp * tensor
    if min(data, fsdp, tensor) < 1 or size > len(devices):
        sizes = f"data={data} x fsdp={fsdp} x tensor={tensor}"
        raise ValueError(f"mesh: {sizes} devices asked for, {len(devices)} are there ({devices[0].platform})")
    # Auto axes: what is not a per-device program of `over_data` is left to the compiler
    return Mesh(devices[:size].reshape(data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def own_mesh(mesh: Mesh) -> Mesh:
    """This process's part of a mesh, for what it does without the others; the mesh itself where there are no others.

    Splits over 'fsdp' and 'tensor' stay where they lie within the process, else the devices all go along 'data'.
    """
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if len(devices) == mesh.size:
        return mesh
    inner = (mesh.shape["fsdp"], mesh.shape["tensor"])
    inner = inner if len(devices) % (inner[0] * inner[1]) == 0 else (1, 1)
    return make_mesh(None, *inner, devices=devices)


def serving_mesh(mesh: Mesh, tensor: int | None) -> Mesh:
    """The devices of a mesh for an engine: `tensor` in a row share each layer's products, which in an update are whole along 'fsdp'.

    With None, or as many as share them already, the mesh itself. Raises `ValueError` when those along 'fsdp' do not divide, or when
    products are shared otherwise in the update: between two such splits XLA makes whole arrays, of all layers at once.
    """
    if tensor is None or tensor == mesh.shape["tensor"]:
        return mesh
    if mesh.shape["tensor"] != 1:
        raise ValueError(f"tensor={tensor} needs an update without mesh.tensor, which is {mesh.shape['tensor']}; leave one of them out")
    if tensor < 1 or mesh.shape["fsdp"] % tensor:
        raise ValueError(f"tensor={tensor} does not divide the {mesh.shape['fsdp']} devices along 'fsdp'; choose a divisor")
    return make_mesh(mesh.shape["data"], mesh.shape["fsdp"] // tensor, tensor, devices=mesh.devices)


def teams_mesh(teams: int, devices=None) -> Mesh:
    """A mesh for `teams` teams that train side by side: each of its devices holds an equal share of them (`marl_llm.training.sweep`).

    Programs that `over_data` makes on it take arrays of all teams, stacked along a first axis, and each team's own arithmetic.
    """
    devices = jax.devices() if devices is None else devices
    count = max(n for n in range(1, min(teams, len(devices)) + 1) if teams % n == 0)
    return Mesh(np.asarray(devices[:count]), (TEAMS,), axis_types=(AxisType.Auto,))


def holds_teams(mesh: Mesh) -> bool:
    """Whether this is a mesh of `teams_mesh`."""
    return TEAMS in mesh.axis_names


def data_axis(mesh: Mesh) -> str | None:
    """'data' where programs run once per position along it (`over_data`); None where one program spans the whole mesh."""
    return "data" if not holds_teams(mesh) and mesh.size == mesh.shape["data"] else None


def over_data(f, mesh: Mesh, rules: Rules, in_specs, out_specs):
    """`f` as a program per device along 'data' (`jax.shard_map`), or, with split parameters, as one that the compiler splits by `rules`.

    `f` adds and gathers with `summed`, `largest`, `gathered` and `position`, which do nothing in the second case, where arrays are whole.
    On a mesh of teams it is `f` for each of them: every argument and result has a first axis of teams, and the specs are not read.
    """
    if holds_teams(mesh):
        return jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=P(TEAMS), out_specs=P(TEAMS), check_vma=False)
    if data_axis(mesh) is not None:
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def program(*arguments):
        with use_rules(mesh, rules):
            return f(*arguments)

    return program


def compiled_step(step: Callable, config: ModelConfig, mesh: Mesh, in_specs: tuple, results: int) -> Callable:
    """An optimizer step over the mesh, compiled. Its state, the first argument, is donated; its results lie on all devices."""
    mapped = over_data(step, mesh, TRAIN, in_specs=in_specs, out_specs=(P(),) * results)
    return jax.jit(mapped, donate_argnums=(0,), compiler_options=update_options(config))


def summed(tree, axis: str | None):
    """Sums over the devices of a per-device program.

    CPUs of several processes are added in the order of the devices, as those of one process are: then a run's parameters do not depend on
    how its devices are divided. Gloo's own sum begins with another device for each piece of an array (docs/pods.md).
    """
    if axis is None or jax.lax.axis_size(axis) == 1:
        return tree
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return jax.lax.psum(tree, axis)
    leaves, form = jax.tree.flatten(tree)
    for dtype in {leaf.dtype for leaf in leaves}:
        places = [n for n, leaf in enumerate(leaves) if leaf.dtype == dtype]
        flat = _summed_in_order(jnp.concatenate([leaves[n].reshape(-1) for n in places]), axis)
        ends = np.cumsum([leaves[n].size for n in places])[:-1]
        for n, part in zip(places, jnp.split(flat, ends), strict=True):
            leaves[n] = part.reshape(leaves[n].shape)
    return jax.tree.unflatten(form, leaves)


def _summed_in_order(x: Shaped[Array, "X"], axis: str) -> Shaped[Array, "X"]:
    """Each device adds one piece of all devices' arrays, then all pieces go to all: what an all-reduce sends, in one order of summation."""
    devices = jax.lax.axis_size(axis)
    pieces = jnp.pad(x, (0, -x.size % devices)).reshape(devices, -1)
    piece = jnp.sum(jax.lax.all_to_all(pieces, axis, 0, 0), axis=0)
    return jax.lax.all_gather(piece, axis, tiled=True)[: x.size]


def largest(tree, axis: str | None):
    """Maxima over the devices of a per-device program."""
    return tree if axis is None else jax.lax.pmax(tree, axis)


def gathered(tree, axis: str | None):
    """The rows of all devices, one after the other."""
    return tree if axis is None else jax.tree.map(lambda x: jax.lax.all_gather(x, axis, tiled=True), tree)


def position(axis: str | None):
    """This device's number along the axis."""
    return 0 if axis is None else jax.lax.axis_index(axis)
