"""Who draws for a hosted team's own models: a vLLM server where `ModelSpec.sampler` names one, and an engine for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jax.sharding import Mesh
from jaxtyping import Array, Key

from marl_llm.algorithms import Recipe
from marl_llm.sampling import Engine, LaneConfig, Samplers, Settings, VllmSampler
from marl_llm.sampling.vllm import check_settings
from marl_llm.training.learner import Learner
from marl_llm.workflows import WorkflowError

Models = Mapping[str, tuple[Learner, dict]]  # name -> learner, whole parameters


def check_served(name: str, recipe: Recipe, trains: bool = True, processes: int = 1) -> None:
    """Raises `WorkflowError` where a vLLM server cannot draw for a model under this recipe."""
    if processes > 1:
        raise WorkflowError(f"model {name!r}: sampler='vllm' needs one process, and here are {processes}: all would push their parameters")
    if trains and recipe.correction == "none":
        raise WorkflowError(
            f"model {name!r}: sampler='vllm' draws in another program, whose rounding the loss must weigh: set recipe.correction=truncate "
            "(or mask)"
        )
    try:
        check_settings(Settings.to_train(recipe.temperature, recipe.top_k, recipe.top_p))
    except ValueError as error:
        raise WorkflowError(f"model {name!r}: recipe {recipe.name!r} has {error}") from error


def engines(models: Models, on: Callable[[Mesh, Models], Engine]) -> Engine | Samplers:
    """An engine for the models of each part of the devices, made by `on`; without parts the one engine."""
    groups: dict[Mesh, dict[str, tuple[Learner, dict]]] = {}
    for name, (learner, params) in models.items():
        groups.setdefault(learner.mesh, {})[name] = learner, params
    found: dict[str, Engine | VllmSampler] = {}
    for mesh, group in groups.items():
        found |= dict.fromkeys(group, on(mesh, group))
    return found.popitem()[1] if len(groups) == 1 else Samplers(found)


def cache_bytes(gib: float | None, models: int, mesh: Mesh) -> int:
    """Of keys and values of each of `models` on a mesh, on all its devices together, `gib` per device; 0: no limit is known."""
    there = mesh.devices.flat[0].memory_stats() or {}
    if gib is None and "bytes_limit" not in there:  # a CPU
        return 0
    each = gib * 2**30 if gib is not None else (there["bytes_limit"] - there["bytes_in_use"]) / 2
    return max(1, int(each * mesh.size / models))


def samplers(models: Models, engine: Callable[[Models], Engine | Samplers], key: Key[Array, ""], sizes: LaneConfig) -> Engine | Samplers:
    """Whoever draws for these models; `engine` makes one for those without a server. Raises `EngineError` if a server cannot be used."""
    here = {name: found for name, found in models.items() if found[0].spec.sampler is None}
    if len(here) == len(models):
        return engine(here)
    found: dict[str, Engine | VllmSampler] = dict.fromkeys(here, engine(here)) if here else {}
    try:
        for name in [name for name in models if name not in here]:
            learner, params = models[name]
            spec = learner.spec
            found[name] = VllmSampler(name, learner.config, params, spec.sampler, key, sizes=sizes, tokenizer=spec.speech.tokenizer)
    except BaseException:
        Samplers(found).close()
        raise
    return Samplers(found)
