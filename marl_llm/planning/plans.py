"""What a run needs per device and for how long: compiled (`planning.programs`) for devices that need not be there, or counted.

The command is `marl_llm/cli/plan.py`; `plan_table` says it in words.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time

from marl_llm.planning.plan_devices import GPUS, PlanError, devices_of, mesh_axes, split_mesh
from marl_llm.planning.programs import PlanSizes, compile_engine, compile_programs, estimate, moment_bytes


def sizes_of(config) -> PlanSizes:
    """The sizes of any config. Raises `PlanError` for trained models of several shapes, ranks or optimizers."""
    from marl_llm.models import PRESETS, LoraConfig
    from marl_llm.runs.own_options import optimizer_of
    from marl_llm.runs.resolve import resolve
    from marl_llm.runs.teachers import teacher_shapes

    config = config.copy_and_resolve_references()
    if config.model.preset:
        config.model.thinking = config.model.template = None  # of a checkpoint's chat, which a plan does not need
    with resolve(config, sizes_only=True) as resolved:
        trained = resolved.assignment.trained
        shapes = {resolved.shapes[name] for name in trained}
        longest = [max(sizes) for sizes in zip(*resolved.budgets.values())]
        options = [resolved.options[name] for name in trained]
        teachers = sum(shape.parameters for shape in teacher_shapes(config, resolved))
    optimizers = {optimizer_of(config, name)["name"] for name in trained}
    if len(optimizers) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several optimizers; plan them one by one, with assignment=shared")
    ranks = {of_model.get("lora_rank") for of_model in options}
    if len(ranks) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several lora_ranks; plan them one by one, with assignment=shared")
    lora = LoraConfig(options[0]["lora_rank"], options[0]["lora_alpha"]) if ranks != {None} else None
    sources = len({json.dumps([of_model.get("path"), of_model.get("preset")]) for of_model in options})
    rollout, optimizer = config.rollout, config.optimizer
    critic = optimizer.critic if resolved.recipe.advantage_estimator == "critic" else None
    if len(shapes) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several shapes; plan them one by one, with assignment=shared")
    presets = {resolved.options[name].get("preset") for name in trained} - {None}
    real = [PRESETS[name].get("vocab_size", 0) for name in presets]  # a published model keeps its vocabulary, whatever the game's is
    shape = dataclasses.replace(next(iter(shapes)), vocab_size=max([next(iter(shapes)).vocab_size, *real]))
    return PlanSizes(
        resolved.recipe, shape, len(trained), *longest, hosted=resolved.hosted, lora=lora, sources=sources, teachers=teachers,
        bases=sources if lora else 0, critics=0 if critic in (None, "head") else len(trained), critic=critic, optimizer=optimizers.pop(),
        critic_tokens=(optimizer.row_tokens or resolved.row_tokens) if critic == "centralised" else 0, max_num_seqs=rollout.max_num_seqs,
        decode_steps=rollout.decode_steps, draft_tokens=rollout.draft_tokens, served=rollout.tensor or 0,
        sft=config.sft.steps > 0 and not config.sft.run,
    )  # fmt: skip


def beside(sizes: PlanSizes, adapters: int, copy: float | int, split: int) -> dict[str, float]:
    """Bytes per device of what stays through the update beside policies and moments.

    Args:
      adapters: parameters of one model's adapters. copy: bytes of one sampling copy. split: over how many devices parameters are split.
    """
    whole = sizes.shape.parameters / split
    moments = moment_bytes(sizes.optimizer, sizes.shape) / split if sizes.critics else 0.0
    kept = {"bases": sizes.bases * whole * 2, "critics": sizes.critics * (whole * 4 + moments)}
    kept["references"] = sizes.models * whole * 2 if sizes.recipe.kl_coef else 0.0
    kept["teachers"] = sizes.teachers / split * 2.0
    if sizes.hosted:  # the engine's; models with adapters are served together on their base
        kept["serving"] = sizes.bases * copy + sizes.models * adapters * 2.0 if sizes.lora else sizes.models * copy
    return kept


def phases(sizes: PlanSizes, resident: float | int, params: float | int, split: int) -> dict[str, float | int]:
    """Bytes per device of the arrays that are alive in each phase of a run, without activations and an engine's pages.

    Args:
      resident: what stays between steps: policies, moments, and what `beside` names. params: of what one model trains. split: over how many
        devices parameters are split.
    """
    whole = sizes.shape.parameters * 4 / split
    step = resident + params  # the gradient, of one model at a time
    warm_up = {"sft": step} if sizes.sft else {}
    merged = whole if sizes.lora else 0.0  # adapters, when a model is written
    return {"start": resident + sizes.sources * whole} | warm_up | {"training": step, "resume": resident, "export": resident + merged}


def _placement(shape, chip, models: int, data: int, work: dict) -> dict:
    """Seconds of a step with `config.placement` shared and, where the devices divide, split; `work`: `roofline.placements`' sizes."""
    from marl_llm.training import roofline

    part = split_mesh(data, work["fsdp"], models)
    gathered = roofline.placements(shape, chip, models, data * work["fsdp"], **work, split_fsdp=part[1] if part else 1)
    return {"part": part, "shared": gathered["shared"]} | ({"split": gathered["split"]} if part else {})


def plan(config, topology: str, axes_text: str, prompt: int, response: int, minibatch: int, compile_: bool, whole: bool = False) -> dict:
    """Everything that the table shows, for all models of a config; `whole`: see `engine_figures`. Raises `PlanError`."""
    import jax

    from marl_llm.models import init_adapters
    from marl_llm.training import make_mesh, roofline

    sizes = sizes_of(config)
    sizes = dataclasses.replace(sizes, prompt=prompt or sizes.prompt, response=response or sizes.response)
    recipe, shape, models, lora = sizes.recipe, sizes.shape, sizes.models, sizes.lora
    chip, count, devices = devices_of(topology, compile_)
    data, fsdp, tensor = mesh_axes(count, axes_text, (config.mesh.fsdp, config.mesh.tensor))
    served = sizes.served or tensor
    if served != tensor and (fsdp % served or tensor > 1):
        raise PlanError(f"config.rollout.tensor={served} must divide fsdp={fsdp}, and needs tensor=1 in the update's mesh")
    prompt, response = sizes.prompt, sizes.response
    tree = jax.eval_shape(lambda key: init_adapters(shape, key, lora), jax.random.key(0)) if lora else {}
    adapters = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
    shape = dataclasses.replace(shape, compute_dtype="bfloat16", remat="full" if shape.remat == "none" else shape.remat)
    sizes = dataclasses.replace(sizes, shape=shape)
    on_tpus = devices is not None and chip.name not in GPUS
    if shape.attention == "auto" and on_tpus and (prompt % 128 or (prompt + recipe.group_size * response) % 128):
        raise PlanError(f"--prompt={prompt} --response={response}: on a TPU, use multiples of 128, so that flash attention applies")
    along, k = data * fsdp, recipe.group_size
    minibatch = minibatch or along
    environments = max(along, -(-config.rollout.tasks // along) * along)
    if minibatch % along:
        raise PlanError(f"--groups={minibatch} does not divide over data={data} x fsdp={fsdp}; choose a multiple of {along}")
    playing = environments / (count // served)  # per position that rows are split over in play
    cache = roofline.cache_bytes(shape, playing * (prompt + k * response)) / (served if shape.key_value_heads % served == 0 else 1)
    out = {
        "topology": topology, "mesh": {"data": data, "fsdp": fsdp, "tensor": tensor}, "served": served, "models": models,
        "parameters": shape.parameters, "prompt": prompt, "response": response, "branches": k, "environments": environments,
        "groups_per_step": minibatch, "kv_cache": cache, "device_memory": chip.memory, "compiled": devices is not None and compile_,
    }  # fmt: skip
    trained, mesh, started = adapters if lora else shape.parameters / (fsdp * tensor), None, time.time()
    state = moment_bytes(sizes.optimizer, shape, lora) / (1 if lora else fsdp * tensor)
    params, copy = trained * 4, shape.parameters * 2 / served
    if out["compiled"]:
        mesh = make_mesh(data, fsdp, tensor, devices=devices)
        figures, flops, params, state, copy = compile_programs(sizes, mesh, minibatch, 0 if sizes.hosted else environments)
    else:
        read, gradient = max(prompt, sizes.critic_tokens - k * response), trained * 4
        temporary = estimate(shape, k, read, response, minibatch / along, tensor) + gradient
        figures = {"update": {"arguments": params + state, "temporary": temporary, "peak": params + state + temporary}}
        figures["sampler"] = {"arguments": copy, "temporary": cache, "peak": copy + cache}
    more = beside(sizes, adapters, copy, fsdp * tensor)
    resident = models * (params + state) + sum(more.values())
    figures = {name: f if "error" not in f else f | {"peak": f["needs"]} for name, f in figures.items()}
    state_of_one = params + state
    out["phases"] = phases(sizes, resident, params, fsdp * tensor)
    moments = _moments(out, config, sizes, chip.memory, mesh, figures, more, (resident, state_of_one, copy), whole)
    out |= {
        "parameters_bytes": params * models, "optimizer_bytes": state * models, "beside": more, "update": figures["update"],
        "sampler": figures.get("sampler", {}), "moments": moments, "peak_sampler": moments["sampler"],
        "peak": max(*moments.values(), *out["phases"].values()),
        "peak_update": max(moments.get(name, 0) for name in ("update", "critic", "sft")),
    }  # fmt: skip
    share = minibatch / along
    work = {
        "decode_step": roofline.decode_step(shape, playing, k, prompt, response, served),
        "prefill": roofline.prefill(shape, playing, prompt, served),
        "update_step": roofline.update(shape, share, k, prompt, response, tensor, fsdp, adapters),
    }
    out["work"] = {n: {"flops": w.flops, "bytes": w.bytes, "seconds": w.seconds(chip)} for n, w in work.items()}
    spent = {name: out["work"][name]["seconds"] * count for name in out["work"]}  # of all chips together
    together = response * spent["decode_step"] + spent["prefill"], spent["update_step"]
    out["chip_hours"] = (together[0] / (environments * k) + together[1] / (minibatch * k)) * 1000 / 3600
    if out["compiled"]:
        out["update_flops"] = _update_flops(shape, *flops, (share, k, prompt, response), tensor, fsdp, adapters)
        out["compile_seconds"] = time.time() - started
    if models > 1:
        work = dict(environments=environments, groups=minibatch, branches=k, prompt=prompt, response=response, tensor=tensor, fsdp=fsdp)
        out["placement"] = _placement(shape, chip, models, data, work | {"served": served})
    out["fits"] = out["peak"] <= 0.95 * chip.memory and not any("error" in f for f in figures.values())
    out["fits"] &= out.get("requests_at_their_longest", 1) > 0
    fixed = config.rollout.cache_gib is not None
    out["suggestion"] = "" if out["fits"] else _suggest(out, fsdp, tensor, shape.key_value_heads, fixed)
    return out


def _moments(out: dict, config, sizes: PlanSizes, total: float | int, mesh, figures: dict, more: dict, bytes_, whole: bool) -> dict:
    """Bytes per device at each moment of a step; what an engine needs is noted in `out`. `bytes_`: resident, one model's state and copy."""
    from marl_llm.training import roofline

    (resident, known, copy), models, shape = bytes_, sizes.models, sizes.shape
    served, along = out["served"], math.prod(out["mesh"].values()) // out["served"]
    if out["compiled"]:  # what its arguments are
        known += more["bases"] / max(sizes.bases, 1) + more["references"] / max(models, 1)
    moments = {"update": resident - known + figures["update"]["peak"]}
    if "sft" in figures:  # which reads no reference
        moments["sft"] = moments["update"] - figures["update"]["peak"] + more["references"] / models + figures["sft"]["peak"]
    if "critic" in figures:
        moments["critic"] = resident - more["critics"] / sizes.critics + figures["critic"]["peak"]
    if not sizes.hosted:
        return moments | {"sampler": resident + figures["sampler"]["peak"] + (models - 1) * copy}
    # the engine takes its pages once, from half of what is free, and keeps them; who finds none waits
    lanes = 1 if sizes.together else models
    longest = roofline.cache_bytes(shape, sizes.prompt + sizes.response) / (served if shape.key_value_heads % served == 0 else 1)
    room = (config.rollout.cache_gib or 0) * 2**30 or min(out["kv_cache"], max(0.0, (0.95 * total - resident) / 2))
    out |= {"kv_pool": room, "request_bytes": longest, "requests_at_their_longest": int(room // longest) * along}
    moments = {name: peak + room for name, peak in moments.items()} | {"sampler": resident + room}
    if out["compiled"] and room:
        engine = out["engine"] = compile_engine(sizes, mesh, room / lanes, whole)
        names = [name for name in ("decode", "admit", "verify") if name in engine]
        moments |= {name: resident + room + engine[name] for name in names}
        moments["swap"] = resident + room - more["serving"] / lanes + engine["swap"]  # the old copy is gone before
        moments["sampler"] = max(moments[n] for n in (*names, "swap"))
    return moments


def _update_flops(shape, compiled: float | int, in_kernel: bool, rows, tensor: int, fsdp: int, adapters: int) -> dict:
    """FLOPs of an update: compiled, needed, and what of the former is computed again: by full remat the forward pass without a layer's last
    product, by a kernel's backward pass the scores. rows: groups, branches, prompt, response."""
    from marl_llm.training import roofline

    needed, whole = (
        roofline.update(dataclasses.replace(shape, remat=remat), *rows, tensor, fsdp, adapters).flops for remat in ("none", shape.remat)
    )
    groups, branches, prompt, response = rows
    again = whole - needed
    again -= roofline.left_out(shape, groups * (prompt + branches * response)) / tensor if again else 0
    again += roofline.scores(shape, *rows) / tensor if in_kernel else 0
    return {"compiled": compiled, "needed": needed, "again": again}


def _engine_suggestion(out: dict, heads: int, fixed: bool) -> str:
    """Fewer pages, or more devices that share what is sampled from, where all fits then; "" where neither helps. A pool that is not `fixed`
    takes half of what is free."""
    served, fsdp, free_gib = out["served"], out["mesh"]["fsdp"], {}  # devices that share a copy -> None: all fits; GiB left for pages
    alone = out["mesh"]["tensor"] == 1  # or an engine cannot have another split
    for ways in (served, *(n for n in range(served + 1, fsdp + 1) if alone and n % served == fsdp % n == heads % n == 0)):
        saved = out["beside"].get("serving", 0) * (1 - served / ways)
        spare = 0.95 * out["device_memory"] - (out["peak"] - out["kv_pool"] - saved)
        wanted = out["kv_pool"] if fixed else min(out["kv_cache"], out["kv_pool"] + saved / 2)
        fewer = spare > out["request_bytes"] * served / ways
        free_gib[ways] = None if spare > wanted else int(spare / 2**30 * 10) / 10 if fewer else 0.0
    keeps = "the engine keeps its pages through the update: rollout.cache_gib={}, so that more requests wait"
    if free_gib[served]:
        return keeps.format(free_gib[served])
    shares = "what is sampled from has no room: rollout.tensor={0}, so that {0} devices share each copy"
    if ways := next((n for n, gib in free_gib.items() if gib is None), 0):
        return shares.format(ways)
    ways = next((n for n, gib in free_gib.items() if gib), 0)
    return f"{shares.format(ways)}, and rollout.cache_gib={free_gib[ways]}" if ways else ""


def _suggest(out: dict, fsdp: int, tensor: int, heads: int, fixed: bool) -> str:
    wider = f"--mesh={fsdp // 2},{tensor * 2}, or more devices" if fsdp > 1 else "more devices"
    if suggestion := _engine_suggestion(out, heads, fixed) if "kv_pool" in out else "":
        return suggestion
    if out["peak_update"] >= out["peak_sampler"]:
        if out["groups_per_step"] > out["mesh"]["data"] * fsdp:
            return "the update is the peak: fewer --groups per step"
        return f"the update is the peak: shorter prompts or responses, fewer branches, {wider}"
    return f"the sampler is the peak: fewer tasks (rollout.tasks) or branches, {wider}"
