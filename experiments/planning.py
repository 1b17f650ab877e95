"""What a run needs per device: the real sampler and update of a config, compiled for a TPU that need not be there, or counted for a GPU.

The command is `experiments/plan.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from typing import Any

from experiments.command import ConfigError


class PlanError(ConfigError):
    """The plan cannot be made; the message says why and what to do."""


def mesh_axes(devices: int, text: str) -> tuple[int, int, int]:
    """(data, fsdp, tensor) for a number of devices. Raises `PlanError` when they do not divide."""
    if text:
        try:
            fsdp, tensor = map(int, text.split(","))
        except ValueError as e:
            raise PlanError(f"--mesh={text!r} is not 'fsdp,tensor', two numbers") from e
    else:
        tensor = 4 if devices >= 16 else 1
        fsdp = devices // tensor
    if fsdp < 1 or tensor < 1 or devices % (fsdp * tensor):
        raise PlanError(f"--mesh: fsdp={fsdp} x tensor={tensor} does not divide {devices} devices")
    return devices // (fsdp * tensor), fsdp, tensor


def devices_of(topology: str, compile_: bool = True):
    """(chip, number of devices, TPU devices or None, which are there to compile for). Raises `PlanError` on an unknown chip or shape."""
    from marl_llm.training.roofline import CHIPS

    name, _, shape = topology.partition(":")
    if name not in CHIPS or not shape:
        raise PlanError(f"--topology={topology!r}: write chip:shape; the chips are {', '.join(CHIPS)}")
    if name.startswith("h"):
        if not shape.isdigit() or int(shape) < 1:
            raise PlanError(f"--topology={topology!r}: write the number of GPUs, e.g. {name}:8")
        return CHIPS[name], int(shape), None
    if not compile_:  # which needs no TPU library
        sizes = shape.split("x")
        if not all(n.isdigit() and int(n) for n in sizes) or not 2 <= len(sizes) <= 3:
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


def programs(config, recipe, mesh, minibatch: int, environments: int, prompt: int, response: int, lora=None):
    """`(update, sampler, bytes of parameters, of optimizer, of the sampling copy)`: two lowered programs, and bytes per device.

    A minibatch is that many rows, each with a prompt and the K responses that were sampled from it. With `lora` the parameters are
    adapters, and their base is an argument of the update.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from marl_llm.algorithms import needs
    from marl_llm.models import SAMPLE, TRAIN, init_adapters, init_params, param_shardings, use_rules
    from marl_llm.sampling import Settings, sample
    from marl_llm.training import LearnerOptions, make_optimizer, make_policy
    from marl_llm.training.packing import PackedRows
    from marl_llm.training.update import policy_step

    def abstract(tree, rules):
        placed = param_shardings(tree, mesh, rules)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, placed)

    def per_device(tree):
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    everywhere = NamedSharding(mesh, PartitionSpec())
    whole = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)  # noqa: E731
    k = recipe.branches
    length, answers = prompt + k * response, k * response
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=length, minibatch=minibatch)
    apart = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=config.uniform))
    make = lambda p: make_policy(p, options.optimizer)  # noqa: E731
    base = abstract(params, TRAIN) if lora else None
    if lora:  # adapters are small: every device has them whole
        policy = jax.eval_shape(lambda key: make(init_adapters(config, key, lora)), jax.random.key(0))
        policy = jax.tree.map(lambda x: whole(x.shape, x.dtype), policy)
    else:
        policy = abstract(jax.eval_shape(make, params), TRAIN)
    real, ids = jnp.float32, jnp.int32
    widths = dict(tokens=length, positions=length, segments=length, branches=length, predict=answers, targets=answers)
    widths |= dict(log_probs=answers, sample=k, first=k, length=k)
    rows = PackedRows(**{name: whole((minibatch, width), real if name == "log_probs" else ids) for name, width in widths.items()})
    required = needs(recipe)
    beside = {"advantages": k} | ({"old": answers} if "sampler_log_probs" in required else {})
    arrays = {name: whole((minibatch, width), real) for name, width in beside.items()}
    reference = abstract(params, TRAIN) if recipe.kl_coef else None
    update = policy_step(options, config, mesh, lora)
    scalars = {name: whole((), real) for name in ("kl_coef", "entropy_threshold") if name == "kl_coef" or name in required}
    lowered_update = update.lower(policy, base, reference, rows, arrays, scalars, whole((), real), whole((), real))

    rows_of = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (environments, k)))
    split = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows_of)  # noqa: E731

    def sampler(params, tokens, where, keys):
        with use_rules(mesh, SAMPLE):
            return sample(
                config, params, tokens, where, keys, max_tokens=response, stop=1, pad_id=0, settings=Settings(float(recipe.temperature))
            )

    low = abstract(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.compute_dtype)), apart), SAMPLE)
    lowered_sampler = jax.jit(sampler).lower(
        low, split((environments, prompt), ids), split((environments, prompt), bool), split(keys.shape, keys.dtype)
    )
    return lowered_update, lowered_sampler, per_device(policy.params), per_device(policy.optimizer), per_device(low)


def memory(compiled) -> dict:
    """Bytes per device of a compiled program."""
    m = compiled.memory_analysis()
    peak = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return {"arguments": m.argument_size_in_bytes, "temporary": m.temp_size_in_bytes, "peak": peak}


def estimate(config, k: int, prompt: int, response: int, per: float | int, tensor: int) -> float:
    """Temporary bytes of the update where no compiler answers: each layer's input kept, one layer and one block of logits live."""
    tokens = per * (prompt + k * response)
    kept = tokens * config.width * 2 * config.layers
    one = tokens * (6 * config.width + (2 * config.query_heads * config.head_dim + 3 * config.feed_forward) / tensor) * 2
    return kept + one + 3 * 2**25


@dataclasses.dataclass(frozen=True)
class PlanSizes:
    """What a plan needs to know of a config.

    Attributes:
      recipe, shape: of the trained models, which have one shape. models: how many they are.
      prompt, response: the longest, in tokens.
      hosted: play has an engine, whose copies stay through the update. lora: of the adapters that are trained, or None.
      bases: frozen bases under the adapters. critics: critics that are networks of their own.
    """

    recipe: Any
    shape: Any
    models: int
    prompt: int
    response: int
    hosted: bool = False
    lora: Any = None
    bases: int = 0
    critics: int = 0


def sizes_of(config) -> PlanSizes:
    """The sizes of any config. Raises `PlanError` for trained models of several shapes or ranks."""
    from experiments.base import resolve
    from marl_llm.models import PRESETS, LoraConfig

    config = config.copy_and_resolve_references()
    if config.model.preset:
        config.model.thinking = None  # of a checkpoint's chat, which a plan does not need
    with resolve(config, sizes_only=True) as resolved:
        trained = resolved.assignment.trained
        shapes = {resolved.shapes[name] for name in trained}
        longest = [max(sizes) for sizes in zip(*resolved.budgets.values())]
        options = [resolved.options[name] for name in trained]
    ranks = {one.get("lora_rank") for one in options}
    if len(ranks) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several lora_ranks; plan them one by one, with assignment=shared")
    lora = LoraConfig(options[0]["lora_rank"], options[0]["lora_alpha"]) if ranks != {None} else None
    bases = len({json.dumps([one.get("path"), one.get("preset")]) for one in options}) if lora else 0
    critics = len(trained) if resolved.recipe.normaliser == "critic" and config.optimizer.critic == "own" else 0
    if len(shapes) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several shapes; plan them one by one, with assignment=shared")
    presets = {resolved.options[name].get("preset") for name in trained} - {None}
    real = [PRESETS[name].get("vocab_size", 0) for name in presets]  # a published model keeps its vocabulary, whatever the game's is
    shape = dataclasses.replace(next(iter(shapes)), vocab_size=max([next(iter(shapes)).vocab_size, *real]))
    return PlanSizes(resolved.recipe, shape, len(trained), *longest, resolved.hosted, lora, bases, critics)


def beside(sizes: PlanSizes, adapters: int, copy: float, split: int) -> dict[str, float]:
    """Bytes per device of what stays through the update beside policies and moments.

    Args:
      adapters: parameters of one model's adapters. copy: bytes of one sampling copy. split: over how many devices parameters are split.
    """
    whole = sizes.shape.parameters / split
    found = {"bases": sizes.bases * whole * 4, "critics": sizes.critics * whole * 12}
    found["references"] = sizes.models * whole * 2 if sizes.recipe.kl_coef else 0.0
    if sizes.hosted:  # the engine's; models with adapters are served together on their base
        found["serving"] = sizes.bases * copy + sizes.models * adapters * 2.0 if sizes.lora else sizes.models * copy
    return found


def _placement(shape, chip, models: int, data: int, work: dict) -> dict:
    """Seconds of a step with `config.placement` shared and, where the devices divide, split; `work`: `roofline.placements`' sizes."""
    from marl_llm.training import roofline

    part = split_mesh(data, work["fsdp"], models)
    found = roofline.placements(shape, chip, models, data * work["fsdp"], **work, split_fsdp=part[1] if part else 1)
    return {"part": part, "shared": found["shared"]} | ({"split": found["split"]} if part else {})


def plan(config, topology: str, axes_text: str, prompt: int, response: int, minibatch: int, compile_: bool) -> dict:
    """Everything that the table shows, for all models of a config. Raises `PlanError`."""
    import jax

    from marl_llm.models import for_platform, init_adapters
    from marl_llm.training import make_mesh, roofline

    sizes = sizes_of(config)
    recipe, shape, models, lora = sizes.recipe, sizes.shape, sizes.models, sizes.lora
    chip, count, devices = devices_of(topology, compile_)
    data, fsdp, tensor = mesh_axes(count, axes_text)
    prompt, response = prompt or sizes.prompt, response or sizes.response
    tree = jax.eval_shape(lambda key: init_adapters(shape, key, lora), jax.random.key(0)) if lora else {}
    adapters = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
    shape = dataclasses.replace(shape, compute_dtype="bfloat16", remat="full" if shape.remat == "none" else shape.remat)
    if shape.attention == "auto" and devices is not None and (prompt % 128 or (prompt + recipe.branches * response) % 128):
        raise PlanError(f"--prompt={prompt} --response={response}: on a TPU, use multiples of 128, so that flash attention applies")
    along, k = data * fsdp, recipe.branches
    minibatch = minibatch or along
    environments = max(along, -(-config.rollout.tasks // along) * along)
    if minibatch % along:
        raise PlanError(f"--groups={minibatch} does not divide over data={data} x fsdp={fsdp}; choose a multiple of {along}")
    cache = roofline.cache_bytes(shape, environments / along * (prompt + k * response)) / (
        tensor if shape.key_value_heads % tensor == 0 else 1
    )
    out = {
        "topology": topology, "mesh": {"data": data, "fsdp": fsdp, "tensor": tensor}, "models": models, "parameters": shape.parameters,
        "prompt": prompt, "response": response, "branches": k, "environments": environments, "groups_per_step": minibatch,
        "kv_cache": cache, "device_memory": chip.memory,
    }  # fmt: skip
    if devices is not None and compile_:
        mesh = make_mesh(data, fsdp, tensor, devices=devices)
        started = time.time()
        with for_platform("tpu"):
            low_update, low_sampler, params, state, copy = programs(
                shape, recipe, mesh, minibatch, environments, prompt, response, lora
            )
            figures = {"update": _compile(low_update), "sampler": _compile(low_sampler)}
        out |= {"compiled": True, "compile_seconds": time.time() - started}
    else:
        trained = adapters if lora else shape.parameters / (fsdp * tensor)
        params, state, copy = trained * 4, trained * 8, shape.parameters * 2 / tensor
        temporary = estimate(shape, k, prompt, response, minibatch / along, tensor) + trained * 4  # and the gradient
        figures = {"update": {"arguments": params + state, "temporary": temporary, "peak": params + state + temporary}}
        figures["sampler"] = {"arguments": copy, "temporary": cache, "peak": copy + cache}
        out |= {"compiled": False}
    more = beside(sizes, adapters, copy, fsdp * tensor)
    resident = models * (params + state) + sum(more.values())
    figures = {name: f if "error" not in f else f | {"peak": f["needs"]} for name, f in figures.items()}
    known = params + state  # of what the compiled update has as arguments
    if out["compiled"]:
        known += more["bases"] / max(sizes.bases, 1) + more["references"] / max(models, 1)
    peak_update = resident - known + figures["update"]["peak"]
    peak_sampler = resident + figures["sampler"]["peak"] + (-copy if sizes.hosted else (models - 1) * copy)
    if sizes.hosted:  # the engine takes its pages once, from half of what is free, and keeps them; who finds none waits
        room = (config.rollout.cache_gib or 0) * 2**30 or min(cache, max(0.0, (0.95 * chip.memory - resident) / 2))
        longest = roofline.cache_bytes(shape, prompt + response) / (tensor if shape.key_value_heads % tensor == 0 else 1)
        out |= {"kv_pool": room, "requests_at_their_longest": int(room // longest) * along}
        peak_update += room
        peak_sampler = resident + room if not out["compiled"] else peak_sampler
    out |= {
        "parameters_bytes": params * models, "optimizer_bytes": state * models, "beside": more, "update": figures["update"],
        "sampler": figures["sampler"], "peak_update": peak_update, "peak_sampler": peak_sampler, "peak": max(peak_update, peak_sampler),
    }  # fmt: skip
    share = minibatch / along
    work = {
        "decode_step": roofline.decode_step(shape, environments / along, k, prompt, response, tensor),
        "prefill": roofline.prefill(shape, environments / along, prompt, tensor),
        "update_step": roofline.update(shape, share, k, prompt, response, tensor, fsdp),
    }
    out["work"] = {n: {"flops": w.flops, "bytes": w.bytes, "seconds": w.seconds(chip)} for n, w in work.items()}
    if models > 1:
        work = dict(environments=environments, groups=minibatch, branches=k, prompt=prompt, response=response, tensor=tensor, fsdp=fsdp)
        out["placement"] = _placement(shape, chip, models, data, work)
    out["fits"] = out["peak"] <= 0.95 * chip.memory and not any("error" in f for f in figures.values())
    out["fits"] &= out.get("requests_at_their_longest", 1) > 0
    out["suggestion"] = "" if out["fits"] else _suggest(out, fsdp, tensor)
    return out


def split_mesh(data: int, fsdp: int, models: int) -> tuple[int, int] | None:
    """(data, fsdp) of the part of each model where each has its own; None where the mesh does not divide."""
    if data % models == 0:
        return data // models, fsdp
    return (data, fsdp // models) if fsdp % models == 0 else None


def placement_lines(out: dict) -> list[str]:
    """The times of `config.placement`, for a team that speaks in one order or the other."""
    found, mesh = out["placement"], out["mesh"]
    lines = ["  placement    roles in sequence     in parallel      optimizer step of all models   (seconds at least; decoding one turn)"]
    for name in ("shared", "split"):
        if name in found:
            x = found[name]
            lines.append(f"    {name:<10} {x['sequence']:16.3f} {x['parallel']:15.3f} {x['update']:21.3f}")
    if not found["part"]:
        lines.append(f"    split: {out['models']} models divide neither data={mesh['data']} nor fsdp={mesh['fsdp']}")
    elif found["part"][1] != mesh["fsdp"]:
        part = f"fsdp={found['part'][1]}, tensor={mesh['tensor']}"
        lines.append(f"    split: with mesh {part} and config.devices={mesh['data'] * out['models']}, for parts are cut along data")
    return lines


def _compile(lowered) -> dict:
    """Memory of the compiled program, or what the compiler said when it does not fit."""
    try:
        return memory(lowered.compile())
    except Exception as e:  # XLA reports exhausted memory as a runtime error whose text holds the figures
        text = str(e)
        used = re.search(r"Used ([\d.]+)([GM]) of", text)
        if not used:
            raise
        needs = float(used.group(1)) * (2**30 if used.group(2) == "G" else 2**20)
        return {"error": text.splitlines()[0][:200], "needs": needs, "arguments": 0.0, "temporary": needs}


def _suggest(out: dict, fsdp: int, tensor: int) -> str:
    wider = f"--mesh={fsdp // 2},{tensor * 2}, or more devices" if fsdp > 1 else "more devices"
    if "kv_pool" in out and out["requests_at_their_longest"]:
        along = out["mesh"]["data"] * fsdp
        spare = out["kv_pool"] - (out["peak_update"] - 0.95 * out["device_memory"])
        if spare > out["kv_pool"] / (out["requests_at_their_longest"] / along):
            gib = int(spare / 2**30 * 10) / 10
            return f"the engine keeps its pages through the update: rollout.cache_gib={gib}, so that more requests wait"
    if out["peak_update"] >= out["peak_sampler"]:
        if out["groups_per_step"] > out["mesh"]["data"] * fsdp:
            return "the update is the peak: fewer --groups per step"
        return f"the update is the peak: shorter prompts or responses, fewer branches, {wider}"
    return f"the sampler is the peak: fewer tasks (rollout.tasks) or branches, {wider}"


def table(out: dict) -> str:
    """The plan in words."""
    gib = lambda x: f"{x / 2**30:8.2f} GiB"  # noqa: E731
    m, w = out["mesh"], out["work"]
    how = f"compiled in {out['compile_seconds']:.0f} s" if out["compiled"] else "by arithmetic, nothing compiled"
    pool = []
    if "kv_pool" in out:
        pool = [f"  of which the engine holds   {gib(out['kv_pool'])}, {out['requests_at_their_longest']} requests at their longest"]
    lines = [
        f"{out['topology']}: data {m['data']} x fsdp {m['fsdp']} x tensor {m['tensor']}; {out['models']} models of "
        f"{out['parameters'] / 1e9:.2f}e9 parameters; P={out['prompt']} R={out['response']} K={out['branches']} "
        f"E={out['environments']}, {out['groups_per_step']} groups per optimizer step ({how})",
        f"  parameters, all models      {gib(out['parameters_bytes'])}",
        f"  optimizer, all models       {gib(out['optimizer_bytes'])}",
        *(f"  {name:<28}{gib(size)}" for name, size in out["beside"].items() if size),
        f"  activations of the update   {gib(out['update']['temporary'])}",
        f"  KV cache                    {gib(out['kv_cache'])}",
        *pool,
        f"  peak in the update          {gib(out['peak_update'])}",
        f"  peak in the sampler         {gib(out['peak_sampler'])}",
        f"  of                          {gib(out['device_memory'])}",
    ]
    for name, x in w.items():
        lines.append(f"  {name:<12} {x['flops'] / 1e12:10.3f} TFLOP  {x['bytes'] / 1e9:8.2f} GB   at least {x['seconds'] * 1e3:10.2f} ms")
    lines += placement_lines(out) if "placement" in out else []
    lines += [f"  {out[p]['error']}" for p in ("update", "sampler") if "error" in out[p]]
    lines.append("  fits" if out["fits"] else f"  DOES NOT FIT: {out['suggestion']}")
    return "\n".join(lines)
