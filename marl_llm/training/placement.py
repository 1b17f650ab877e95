"""Which devices each model of a team has: all of them, by turns ("shared"), or a part of its own.

Parts are cut along 'data' of the mesh, so a part keeps the splits over 'fsdp' and 'tensor'. Two models have the same part, or parts without
a common device; models of one part go by turns, and parts go at the same time.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from marl_llm.training import processes
from marl_llm.training.mesh import make_mesh


class PlacementError(ValueError):
    """These models cannot be placed so on these devices; the message says why and what to do."""


def split_evenly(names: Iterable[str], positions: int) -> dict[str, tuple[int, ...]]:
    """A part of equal size for each model, in their order: name -> positions along 'data'. Raises `PlacementError`."""
    names = tuple(names)
    if len(names) < 2:
        raise PlacementError(f"placement='split' needs two models at least, here is {', '.join(names)} alone: use 'shared'")
    if positions % len(names):
        sizes = f"{len(names)} models ({', '.join(names)}) do not divide {positions} devices along 'data'"
        raise PlacementError(f"placement='split': {sizes}: set config.devices to a multiple, or say who has which, e.g. {names[0]}:0")
    size = positions // len(names)
    return {name: tuple(range(n * size, (n + 1) * size)) for n, name in enumerate(names)}


def parts_of(table: Mapping[str, tuple[int, ...]], models: Iterable[str], mesh: Mesh) -> dict[str, Mesh]:
    """Model -> its part of the mesh. `table` names the positions along 'data' of each model.

    Raises `PlacementError` for models that are missing or unknown, positions that are not there or given to nobody, parts that overlap
    without being equal, and a mesh of several processes.
    """
    positions, models = mesh.shape["data"], tuple(models)
    if processes.spans(mesh):
        raise PlacementError("placement: parts of the devices need one process, and this run has several: use placement='shared'")
    if wrong := sorted(set(table) ^ set(models)):
        why = "is no model of this run" if wrong[0] not in models else "has no devices"
        raise PlacementError(f"placement: {wrong[0]!r} {why}; name each of {', '.join(models)} once")
    for name, part in table.items():
        if not part or len(set(part)) != len(part) or not set(part) <= set(range(positions)):
            raise PlacementError(f"placement: {name} has the positions {part}; along 'data' there are 0 to {positions - 1}, each once")
    parts = {name: frozenset(part) for name, part in table.items()}
    for model in parts:
        if mixed := [other for other in parts if parts[model] != parts[other] and parts[model] & parts[other]]:
            raise PlacementError(f"placement: {model} and {mixed[0]} share some devices but not all; give them the same, or none alike")
    if idle := sorted(set(range(positions)) - frozenset().union(*parts.values())):
        raise PlacementError(f"placement: nobody has the devices {', '.join(map(str, idle))}; name them, or lower config.devices")
    meshes: dict[frozenset, Mesh] = {}
    for part in parts.values():
        if part not in meshes:
            devices = mesh.devices[sorted(part)]
            meshes[part] = make_mesh(len(part), mesh.shape["fsdp"], mesh.shape["tensor"], devices=devices)
    return {name: meshes[part] for name, part in parts.items()}


def at_once(parts: Mapping[str, Mesh], names: Iterable[str], work: Callable[[str], Any]) -> dict[str, Any]:
    """`work` of each model: those of one part one after the other, in their order, the parts at the same time, each in a thread.

    Raises what the first part in order raised, when all have ended.
    """
    groups, names = {}, tuple(names)
    for name in names:
        groups.setdefault(parts[name], []).append(name)

    def by_turns(group):
        return {name: work(name) for name in group}

    if len(groups) < 2:
        return {name: results for group in groups.values() for name, results in by_turns(group).items()}
    with concurrent.futures.ThreadPoolExecutor(len(groups), "part of the devices") as threads:
        running = [threads.submit(contextvars.copy_context().run, by_turns, group) for group in groups.values()]
    results = {name: value for future in running for name, value in future.result().items()}
    return {name: results[name] for name in names}
