"""Who draws for a hosted team's own models: a vLLM server where `ModelSpec.sampler` names one, and an engine for the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Key

from marl_llm.algorithms import Recipe
from marl_llm.models.serving import is_large
from marl_llm.sampling import Engine, EngineConfig, Samplers, SamplingParams, VllmSampler
from marl_llm.sampling.requests import Completion, Request
from marl_llm.sampling.sequences import BLOCK_POOLS
from marl_llm.sampling.store import shape_of
from marl_llm.sampling.vllm import check_settings
from marl_llm.training import processes
from marl_llm.training.learner import Learner
from marl_llm.training.mesh import own_mesh, serving_mesh
from marl_llm.workflows import WorkflowError

LORA_SERVING = ("auto", "multi", "merged")
Models = Mapping[str, tuple[Learner, dict]]  # name -> learner, whole parameters


class CurrentEngine:
    """The one engine that there is at a time; `models` says whose."""

    def __init__(self):
        self.engine: Engine | Samplers | None = None
        self.models = ()
        self._drafts: Mapping[str, float | int] = {}

    def serve(self, models: tuple, make: Callable[[], Engine | Samplers]) -> None:
        """Another engine, once the one before has given up its memory."""
        self.close()
        self.engine, self.models, self._drafts = make(), models, {}

    async def generate(self, request: Request) -> Completion:
        """See `marl_llm.sampling.Generator`."""
        return await self.engine.generate(request)

    def draft_figures(self) -> dict[str, float]:
        """Metrics of the drafts since this was asked before, or since the engine began."""
        counts = self.engine.draft_counts()
        figures, self._drafts = draft_figures(counts, self._drafts), counts
        return figures

    def close(self) -> None:
        """Stops the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()
        self.engine, self.models = None, ()


def check_served(name: str, recipe: Recipe, trains: bool = True, processes: int = 1) -> None:
    """Raises `WorkflowError` where a vLLM server cannot draw for a model under this recipe."""
    if processes > 1:
        raise WorkflowError(f"model {name!r}: sampler='vllm' needs one process, and here are {processes}: all would push their parameters")
    if trains and recipe.rollout_correction == "none":
        raise WorkflowError(
            f"model {name!r}: sampler='vllm' draws in another program, whose rounding the loss must weigh: set "
            f"recipe.rollout_correction=truncate "
            "(or mask)"
        )
    try:
        check_settings(SamplingParams.to_train(recipe.temperature, recipe.top_k, recipe.top_p))
    except ValueError as error:
        raise WorkflowError(f"model {name!r}: recipe {recipe.name!r} has {error}") from error


def check_room(copies: Mapping[str, int], limit: int | None) -> None:
    """Raises `WorkflowError` where copies (model -> bytes) alone are more than a device has, `limit`; None: not known."""
    if limit and sum(copies.values()) > limit:
        sizes = ", ".join(f"{name!r} {copy / 2**30:.2f} GiB" for name, copy in copies.items())
        raise WorkflowError(
            f"a device of this process has {limit / 2**30:.2f} GiB, and hosted play over several processes needs a whole copy of every "
            f"model on each: {sizes}. Use a smaller model or compute_dtype, devices with more memory, or one host"
        )


def engines(models: Models, on: Callable[[Mesh, Models], Engine]) -> Engine | Samplers:
    """An engine for the models of each part of the devices, made by `on`; without parts the one engine.

    Raises what `check_room` raises where a run has several processes: each samples from whole copies on each of its devices.
    """
    def size(config):
        return config.parameters * jnp.dtype(config.compute_dtype).itemsize

    copies = {name: size(learner.config) for name, (learner, _) in models.items() if processes.spans(learner.mesh)}
    check_room(copies, (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
    groups: dict[Mesh, dict[str, tuple[Learner, dict]]] = {}
    for name, (learner, params) in models.items():
        groups.setdefault(learner.mesh, {})[name] = learner, params
    engine_of: dict[str, Engine | VllmSampler] = {}
    for mesh, group in groups.items():
        engine_of |= dict.fromkeys(group, on(mesh, group))
    return engine_of.popitem()[1] if len(groups) == 1 else Samplers(engine_of)


def on_one_base(learners: Mapping[str, Learner], how: str, mesh: Mesh) -> frozenset[str]:
    """Names of the models that are sampled with their adapters on one copy of the base that they share.

    With "auto" those whose base `is_large`: a merged copy each samples faster, and costs the base once more; on a CPU, which reads the base
    where it lies, also one alone. Where a run has many processes all are merged. Raises `WorkflowError` on another word than
    `LORA_SERVING`, and where "multi" has no effect.
    """
    if how not in LORA_SERVING:
        raise WorkflowError(f"play.lora_serving={how!r} is unknown; the ways are {', '.join(LORA_SERVING)}")
    on_base: dict[tuple, list[str]] = {}
    for name, learner in learners.items():
        if learner.base is not None and learner.spec.sampler is None:
            key = (id(learner.base), learner.mesh, learner.config, learner.spec.lora, id(learner.spec.renderer.tokenizer))
            on_base.setdefault(key, []).append(name)
    bases = [names for names in on_base.values() if not processes.spans(mesh)]
    if how == "multi" and all(len(names) == 1 for names in bases):
        raise WorkflowError("play.lora_serving='multi' would have no effect: no two models of this process have adapters on one base")
    platform = mesh.devices.flat[0].platform
    large = [names for names in bases if is_large(learners[names[0]].config, platform) and (len(names) > 1 or platform == "cpu")]
    wanted = {"auto": large, "multi": [names for names in bases if len(names) > 1], "merged": []}[how]
    return frozenset(name for names in wanted for name in names)


def check_pool(learners: Mapping[str, Learner], how: str, together: Collection[str]) -> None:
    """Raises `WorkflowError` on another word than `BLOCK_POOLS`, and where "shared" has no effect: no two models, of those that an engine
    draws for on the same devices, have pages of one shape. `together`: names whose adapters lie on one base, which have one pool anyway."""
    if how not in BLOCK_POOLS:
        raise WorkflowError(f"play.block_pool={how!r} is unknown; the ways are {', '.join(BLOCK_POOLS)}")
    schedulers = {
        (id(learner.base) if name in together else name, learner.mesh, *shape_of(learner.config, EngineConfig()))
        for name, learner in learners.items() if learner.spec.sampler is None
    }  # fmt: skip
    if how == "shared" and len({scheduler[1:] for scheduler in schedulers}) == len(schedulers):
        raise WorkflowError(
            "play.block_pool='shared' would have no effect: no two models on the same devices have as many layers, key/value heads and "
            "dimensions of a head in one compute dtype; leave it out"
        )


def check_tensor(learners: Mapping[str, Learner], tensor: int | None) -> None:
    """Raises `WorkflowError` where `tensor` devices cannot share the layers of a model that an engine draws for."""
    if tensor is None:
        return
    meshes = {name: own_mesh(learner.mesh) for name, learner in learners.items() if learner.spec.sampler is None}
    if not meshes:
        raise WorkflowError(f"play.tensor={tensor} would have no effect: servers of their own draw for all models")
    for name, mesh in meshes.items():
        try:
            serving_mesh(mesh, tensor)
        except ValueError as error:
            raise WorkflowError(f"play.{error} (model {name!r})") from error


def check_drafts(learners: Mapping[str, Learner], draft_tokens: int, batch_invariant: bool) -> None:
    """Raises `WorkflowError` where no engine can verify drafts of so many tokens, or it promises bytes that drafts round otherwise."""
    if draft_tokens and batch_invariant:
        raise WorkflowError(
            f"play.draft_tokens={draft_tokens}: batch_invariant promises equal bytes, and log-probs of a step with drafts are rounded "
            "otherwise; use draft_tokens=0"
        )
    if draft_tokens and all(learner.spec.sampler is not None for learner in learners.values()):
        raise WorkflowError(f"play.draft_tokens={draft_tokens} would have no effect: servers of their own draw for all models")


def draft_figures(counts: Mapping[str, float | int], before: Mapping[str, float | int]) -> dict[str, float]:
    """Metrics of drafts from an engine's counts, and from those of before."""
    drafts = {name: float(value - before.get(name, 0)) for name, value in counts.items()}
    share = drafts["accepted_tokens"] / max(drafts["drafted_tokens"], 1.0)
    return {
        "draft/drafted": drafts["drafted_tokens"], "draft/accepted": drafts["accepted_tokens"], "draft/accepted_share": share,
        "draft/steps": drafts["draft_steps"], "draft/saved_steps": drafts["saved_steps"],
    }  # fmt: skip


def cache_bytes(gib: float | None, models: int, mesh: Mesh) -> int:
    """Of keys and values of each of `models` on a mesh, on all its devices together, `gib` per device; 0: no limit is known."""
    stats = mesh.devices.flat[0].memory_stats() or {}
    if gib is None and "bytes_limit" not in stats:  # a CPU
        return 0
    device_bytes = gib * 2**30 if gib is not None else (stats["bytes_limit"] - stats["bytes_in_use"]) / 2
    return max(1, int(device_bytes * mesh.size / models))


def samplers(models: Models, engine: Callable[[Models], Engine | Samplers], key: Key[Array, ""], sizes: EngineConfig) -> Engine | Samplers:
    """Whoever draws for these models; `engine` makes one for those without a server. Raises `EngineError` if a server cannot be used."""
    local = {name: model for name, model in models.items() if model[0].spec.sampler is None}
    if len(local) == len(models):
        return engine(local)
    sampler_of: dict[str, Engine | VllmSampler] = dict.fromkeys(local, engine(local)) if local else {}
    try:
        for name in [name for name in models if name not in local]:
            learner, params = models[name]
            spec = learner.spec
            sampler_of[name] = VllmSampler(name, learner.config, params, spec.sampler, key, sizes=sizes, tokenizer=spec.renderer.tokenizer)
    except BaseException:
        Samplers(sampler_of).close()
        raise
    return Samplers(sampler_of)
