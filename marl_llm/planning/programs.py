"""What a run needs per device: the real sampler and update of a config, compiled for TPUs or GPUs that need not be there, or counted.

The command is `marl_llm/cli/plan.py`; `plan_table` says it in words.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import time
from typing import Any

from marl_llm.planning.plan_devices import GPUS, PlanError, devices_of, mesh_axes, split_mesh


def programs(sizes: PlanSizes, mesh, minibatch: int, environments: int):
    """`(lowered, bytes of parameters, of optimizer, of the sampling copy)`: programs by name, and bytes per device.

    The programs are `update`, `sampler` (of compiled play; none without `environments`), with `critic="own"` `critic` and, of a run
    with a supervised warm-up, `sft`. A minibatch is that many rows, each with a prompt and the K responses that were sampled from it. With
    `lora` the parameters are adapters, and their base is an argument of the update.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from marl_llm.algorithms import needs
    from marl_llm.models import SAMPLE, TRAIN, compute_copy, init_adapters, init_params, param_shardings, use_rules
    from marl_llm.planning.engine_programs import per_device
    from marl_llm.sampling import SamplingParams, sample
    from marl_llm.training import LearnerOptions, make_optimizer, make_train_state
    from marl_llm.training.mesh import serving_mesh
    from marl_llm.training.packing import PackedRows
    from marl_llm.training.sft import sft_program
    from marl_llm.training.update import Frozen, policy_step, value_step

    def abstract(tree, rules, on=mesh):
        placed = param_shardings(tree, on, rules)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, placed)

    def whole(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    recipe, prompt, response, lora, critic = sizes.recipe, sizes.prompt, sizes.response, sizes.lora, sizes.critic
    k = recipe.group_size
    length, answers = prompt + k * response, k * response
    options = LearnerOptions(recipe, make_optimizer(name=sizes.optimizer), row_tokens=length, minibatch=minibatch, critic=critic or "own")
    judging = dataclasses.replace(sizes.shape, value_head=critic is not None)
    config = judging if critic == "head" else sizes.shape
    apart = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=config.uniform))
    make = functools.partial(make_train_state, optimizer=options.optimizer)
    base = abstract(jax.eval_shape(lambda x: compute_copy(config, x), params), TRAIN) if lora else None
    if lora:  # adapters are small: every device has them whole
        policy = jax.eval_shape(lambda key: make(init_adapters(config, key, lora, config.uniform)), jax.random.key(0))
        policy = jax.tree.map(lambda x: whole(x.shape, x.dtype), policy)
    else:
        policy = abstract(jax.eval_shape(make, params), TRAIN)
    real, ids = jnp.float32, jnp.int32
    widths = dict(tokens=length, positions=length, segments=length, branches=length, predict=answers, targets=answers)
    widths |= dict(log_probs=answers, sample=k, first=k, length=k)
    rows = PackedRows(**{name: whole((minibatch, width), real if name == "log_probs" else ids) for name, width in widths.items()})
    beside = {"advantages": answers if critic else k, "old": answers}
    judged = {name: whole((minibatch, answers), real) for name in ("values", "targets") if critic}
    arrays = {name: whole((minibatch, width), real) for name, width in beside.items()} | judged
    reference = abstract(jax.eval_shape(lambda x: compute_copy(config, x), params), TRAIN) if recipe.kl_coef else None
    update = policy_step(options, config, mesh, lora, critic == "head")
    numbers = ("kl_coef", "entropy_threshold") if "entropy_threshold" in needs(recipe) else ("kl_coef",)
    scalars = dict.fromkeys(numbers, whole((), real)) | {"first_step": whole((), bool)}
    lowered = {"update": update.lower(policy, base, Frozen(reference), rows, arrays, scalars, whole((), real), whole((), real))}
    if sizes.sft:
        lowered["sft"] = sft_program(options, config, mesh, lora).lower(policy, base, rows, whole((), real))
    if critic == "own":
        judge = abstract(jax.eval_shape(lambda: make(init_params(judging, jax.random.key(0), stacked=config.uniform))), TRAIN)
        lowered["critic"] = value_step(options, judging, mesh).lower(judge, rows, arrays, whole((), real))

    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.compute_dtype)), apart)
    low = abstract(low, SAMPLE, serving_mesh(mesh, sizes.served or None))
    arrays_bytes = per_device(policy.params), per_device(policy.opt_state), per_device(low)
    if not environments:  # the engine plays
        return lowered, *arrays_bytes
    rows_of, sampling_params = ("data", "fsdp"), SamplingParams(float(recipe.temperature))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (environments, k)))
    prompts = (environments, prompt)

    def sampler(params, tokens, where, keys):
        with use_rules(mesh, SAMPLE):
            return sample(config, params, tokens, where, keys, max_tokens=response, stop=1, pad_id=0, settings=sampling_params)

    given = whole(prompts, ids, rows_of), whole(prompts, bool, rows_of), whole(keys.shape, keys.dtype, rows_of)
    lowered["sampler"] = jax.jit(sampler).lower(low, *given)
    return lowered, *arrays_bytes


def moment_bytes(optimizer: str, shape, lora=None) -> int:
    """Bytes of an optimizer's state beside a model's parameters, or beside its adapters."""
    import jax

    from marl_llm.models import init_adapters, init_params
    from marl_llm.training import make_optimizer, state_bytes

    make = functools.partial(init_adapters, lora=lora) if lora else init_params
    return state_bytes(make_optimizer(name=optimizer), jax.eval_shape(lambda: make(shape, jax.random.key(0), stacked=shape.uniform)))


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
      bases: frozen bases under the adapters. critics: critics that are networks of their own. critic: "own", "head", or None.
      max_num_seqs, decode_steps, draft_tokens: of an engine's lane. sft: a run begins with a supervised warm-up. served: devices that
        share a layer's products in an engine; 0: as in the update. sources: checkpoints or random parameters that the models begin from,
        each read once. teachers: parameters of all teachers together. optimizer: its name.
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
    critic: str | None = None
    max_num_seqs: int = 64
    decode_steps: int = 8
    sft: bool = False
    served: int = 0
    sources: int = 1
    teachers: int = 0
    draft_tokens: int = 0
    optimizer: str = "adamw"

    @property
    def together(self) -> bool:
        """Whether models are sampled with their adapters on one copy of a base."""
        return self.lora is not None and self.models > 1


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
    ranks = {one.get("lora_rank") for one in options}
    if len(ranks) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several lora_ranks; plan them one by one, with assignment=shared")
    lora = LoraConfig(options[0]["lora_rank"], options[0]["lora_alpha"]) if ranks != {None} else None
    sources = len({json.dumps([one.get("path"), one.get("preset")]) for one in options})
    bases = sources if lora else 0
    critic = config.optimizer.critic if resolved.recipe.advantage_estimator == "critic" else None
    critics = len(trained) if critic == "own" else 0
    lane = config.rollout.max_num_seqs, config.rollout.decode_steps
    if len(shapes) > 1:
        raise PlanError(f"the trained models {', '.join(trained)} have several shapes; plan them one by one, with assignment=shared")
    presets = {resolved.options[name].get("preset") for name in trained} - {None}
    real = [PRESETS[name].get("vocab_size", 0) for name in presets]  # a published model keeps its vocabulary, whatever the game's is
    shape = dataclasses.replace(next(iter(shapes)), vocab_size=max([next(iter(shapes)).vocab_size, *real]))
    sft = config.sft.steps > 0 and not config.sft.run
    more = bases, critics, critic, *lane, sft, config.rollout.tensor or 0, sources, teachers, config.rollout.draft_tokens, *optimizers
    return PlanSizes(resolved.recipe, shape, len(trained), *longest, resolved.hosted, lora, *more)


def beside(sizes: PlanSizes, adapters: int, copy: float | int, split: int) -> dict[str, float]:
    """Bytes per device of what stays through the update beside policies and moments.

    Args:
      adapters: parameters of one model's adapters. copy: bytes of one sampling copy. split: over how many devices parameters are split.
    """
    whole = sizes.shape.parameters / split
    moments = moment_bytes(sizes.optimizer, sizes.shape) / split if sizes.critics else 0.0
    found = {"bases": sizes.bases * whole * 2, "critics": sizes.critics * (whole * 4 + moments)}
    found["references"] = sizes.models * whole * 2 if sizes.recipe.kl_coef else 0.0
    found["teachers"] = sizes.teachers / split * 2.0
    if sizes.hosted:  # the engine's; models with adapters are served together on their base
        found["serving"] = sizes.bases * copy + sizes.models * adapters * 2.0 if sizes.lora else sizes.models * copy
    return found


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
    found = roofline.placements(shape, chip, models, data * work["fsdp"], **work, split_fsdp=part[1] if part else 1)
    return {"part": part, "shared": found["shared"]} | ({"split": found["split"]} if part else {})


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
        figures, flops, params, state, copy = _compiled(sizes, mesh, minibatch, 0 if sizes.hosted else environments)
    else:
        temporary = estimate(shape, k, prompt, response, minibatch / along, tensor) + trained * 4  # and the gradient
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
        engine = out["engine"] = _engine(sizes, mesh, room / lanes, whole)
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


def _compiled(sizes: PlanSizes, mesh, minibatch: int, environments: int):
    """`(memory by program, (FLOPs of the update, whether kernels attend in it), bytes of parameters, of optimizer, of the sampling copy)`,
    as the compiler says."""
    from marl_llm.models import for_platform, tree_kernel, tree_kernel_gpu
    from marl_llm.planning.program_costs import ProgramText, text_of

    where = mesh.devices.flat[0].platform
    with for_platform(where):
        lowered, *bytes_ = programs(sizes, mesh, minibatch, environments)
        compiled = {name: _compile(program) for name, program in lowered.items()}
    figures = {name: program if isinstance(program, dict) else memory(program) for name, program in compiled.items()}
    tree = sizes.prompt, sizes.recipe.group_size, sizes.response
    if where == "gpu":
        kernels = tree_kernel_gpu.kernel_flops(*tree, sizes.shape.query_heads // sizes.shape.key_value_heads)
    else:
        kernels = tree_kernel.kernel_flops(*tree)
    update = compiled["update"]
    text = "" if isinstance(update, dict) else text_of(lowered["update"], update)
    flops = ProgramText(text, kernels).flops() if text else 0.0, any(name in text for name in kernels)
    return figures, flops, *bytes_


def _engine(sizes: PlanSizes, mesh, budget: float | int, whole: bool) -> dict:
    """`engine_figures` of a lane."""
    from marl_llm.models import for_platform
    from marl_llm.planning.engine_programs import engine_figures
    from marl_llm.sampling import EngineConfig
    from marl_llm.training.mesh import serving_mesh

    models = sizes.models if sizes.together else 1
    lane = EngineConfig(
        sizes.max_num_seqs * models, sizes.prompt, sizes.response, sizes.decode_steps, admit=min(sizes.max_num_seqs, 16),
        draft_tokens=sizes.draft_tokens,
    )  # fmt: skip
    with for_platform(mesh.devices.flat[0].platform):
        on = serving_mesh(mesh, sizes.served or None)
        return engine_figures(sizes.shape, on, lane, budget, sizes.recipe.group_size, sizes.lora, models, whole, mesh)


def _compile(lowered):
    """The compiled program, or what the compiler said when it does not fit."""
    try:
        return lowered.compile()
    except Exception as e:  # XLA reports exhausted memory as a runtime error whose text holds the figures
        text = str(e)
        used = re.search(r"Used ([\d.]+)([GM]) of", text)
        if not used:
            raise
        needs = float(used.group(1)) * (2**30 if used.group(2) == "G" else 2**20)
        return {"error": text.splitlines()[0][:200], "needs": needs, "arguments": 0.0, "temporary": needs}


def _engine_suggestion(out: dict, heads: int, fixed: bool) -> str:
    """Fewer pages, or more devices that share what is sampled from, where all fits then; "" where neither helps. A pool that is not `fixed`
    takes half of what is free."""
    served, fsdp, found = out["served"], out["mesh"]["fsdp"], {}  # devices that share a copy -> None: all fits; GiB left for pages
    alone = out["mesh"]["tensor"] == 1  # or an engine cannot have another split
    for ways in (served, *(n for n in range(served + 1, fsdp + 1) if alone and n % served == fsdp % n == heads % n == 0)):
        saved = out["beside"].get("serving", 0) * (1 - served / ways)
        spare = 0.95 * out["device_memory"] - (out["peak"] - out["kv_pool"] - saved)
        wanted = out["kv_pool"] if fixed else min(out["kv_cache"], out["kv_pool"] + saved / 2)
        fewer = spare > out["request_bytes"] * served / ways
        found[ways] = None if spare > wanted else int(spare / 2**30 * 10) / 10 if fewer else 0.0
    keeps = "the engine keeps its pages through the update: rollout.cache_gib={}, so that more requests wait"
    if found[served]:
        return keeps.format(found[served])
    shares = "what is sampled from has no room: rollout.tensor={0}, so that {0} devices share each copy"
    if ways := next((n for n, gib in found.items() if gib is None), 0):
        return shares.format(ways)
    ways = next((n for n, gib in found.items() if gib), 0)
    return f"{shares.format(ways)}, and rollout.cache_gib={found[ways]}" if ways else ""


def _suggest(out: dict, fsdp: int, tensor: int, heads: int, fixed: bool) -> str:
    wider = f"--mesh={fsdp // 2},{tensor * 2}, or more devices" if fsdp > 1 else "more devices"
    if said := _engine_suggestion(out, heads, fixed) if "kv_pool" in out else "":
        return said
    if out["peak_update"] >= out["peak_sampler"]:
        if out["groups_per_step"] > out["mesh"]["data"] * fsdp:
            return "the update is the peak: fewer --groups per step"
        return f"the update is the peak: shorter prompts or responses, fewer branches, {wider}"
    return f"the sampler is the peak: fewer tasks (rollout.tasks) or branches, {wider}"
