"""Memory and minutes that a run takes on the CPUs of this machine, estimated before anything is loaded, for `--dry_run` and `plan`.

Both are counted from shapes, with prompts and responses at their longest. What the machine can do is measured within a second
(`marl_llm.training.speed`); how much of it a run reaches was measured once, with SmolLM2-135M on two cores.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from marl_llm.models.frozen_head import CPU_BLOCK
from marl_llm.planning.programs import moment_bytes
from marl_llm.runs.measuring import tables
from marl_llm.runs.own_options import optimizer_of
from marl_llm.runs.resolve import Plan, resolve
from marl_llm.runs.sections import MICROBATCH
from marl_llm.runs.teachers import teacher_shapes

GIB = 2**30
PROGRAM = 1.15 * GIB  # Python, JAX, libraries, and the machine code of a run's programs
PLAYING, UPDATING = 0.2, 0.4  # shares of the roofline
COMPILING_S, COMPILING_LAYER_S = 30.0, 10.0  # seconds of all programs of stacked layers, and for each layer more where they are apart
PAGE = 16  # tokens of a page of the engine


def adapter_parameters(shape: Any, rank: int) -> int:
    """Size of one model's adapters, which are on every matrix; in a mixture of experts on the attention alone."""
    d, heads, key_heads = shape.width, shape.query_heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    attention = 2 * (d + heads) + 2 * (d + key_heads)
    return rank * shape.layers * (attention + (0 if shape.experts else 3 * (d + shape.feed_forward)))


def activations(shape: Any, tokens: int, row: int, adapters: bool = False) -> float | int:
    """Bytes that an update of so many tokens, in rows of `row`, keeps for its backward pass, and those of one layer and of the head.

    `adapters`: they alone train, so the head's logits are there for one block of targets (`marl_llm.models.frozen_head`).
    """
    d, f, scores = shape.width, shape.feed_forward, 3 * shape.query_heads * row
    layer = {"none": 12 * d + 5 * f + scores, "dots": 5 * d + 2 * f, "full": d}[shape.remat]
    live = 12 * d + 5 * f + scores if shape.remat != "none" else 0
    whole_head = shape.vocab_size * d + 2 * min(2**24, tokens // 2 * shape.vocab_size)  # its transpose, and logits of a chunk
    head = 2 * CPU_BLOCK * shape.vocab_size if adapters else whole_head
    return 4 * (tokens * (shape.layers * layer + live) + head)


def memory(config: Any, plan: Plan, copies: int = 1) -> dict[str, float | int]:
    """Name of a use -> its bytes. `copies`: CPU devices that hold all parameters."""
    import jax.numpy as jnp

    from marl_llm.models import LoraConfig
    from marl_llm.models.serving import is_large
    from marl_llm.training.roofline import cache_bytes

    bases, usage = set(), {"program": PROGRAM, "parameters": 0, "optimizer": 0, "served": 0, "as they began": 0, "pages": 0, "update": 0}
    usage["teachers"] = sum(jnp.dtype(shape.compute_dtype).itemsize * shape.parameters for shape in teacher_shapes(config, plan))
    critic = config.optimizer.critic != "head" and plan.recipe.advantage_estimator == "critic"
    longest = [max(sizes) for sizes in zip(*plan.budgets.values(), strict=True)]
    for name, shape in plan.shapes.items():
        options, size = plan.options[name], jnp.dtype(shape.compute_dtype).itemsize
        trains, rank, whole = name in plan.assignment.trained, options.get("lora_rank"), size * shape.parameters
        learned = adapter_parameters(shape, rank) if rank else shape.parameters
        base = options.get("path"), options.get("preset")
        usage["parameters"] += 4 * learned + (whole if rank and base not in bases else 0)
        if trains:
            optimizer = optimizer_of(config, name)["name"]
            usage["optimizer"] += moment_bytes(optimizer, shape, LoraConfig(rank) if rank else None)
            usage["optimizer"] += (4 * shape.parameters + moment_bytes(optimizer, shape)) * critic
        usage["as they began"] += 4 * learned if rank else whole
        adapters_alone = bool(rank) and copies == 1 and is_large(shape, "cpu") and config.rollout.lora_serving in ("auto", "multi")
        usage["served"] += 4 * learned if adapters_alone else whole
        bases.add(base)
        if plan.hosted:
            pages = config.rollout.max_num_seqs * -(-sum(longest) // PAGE) * PAGE
            usage["pages"] += cache_bytes(shape, pages, size)
        if trains:
            row = config.optimizer.row_tokens or plan.row_tokens
            tokens = config.optimizer.microbatch_tokens or max(MICROBATCH, row)
            usage["update"] = max(usage["update"], activations(shape, tokens, row, bool(rank)) + 4 * learned)
    if config.rollout.cache_gib is not None:
        usage["pages"] = min(usage["pages"], config.rollout.cache_gib * GIB)
    shared = ("program", "as they began", "pages")
    return {name: size if name in shared else size * copies for name, size in usage.items() if size}


def seconds(config: Any, plan: Plan, limits: Any) -> dict[str, float]:
    """Name of a phase -> its seconds: compiling, a step's playing and updating, a validation and a measurement, all at full length."""
    requests = plan.played.workflow.body.request_count if plan.hosted else plan.game.max_turns * len(plan.game.roles)
    recipe = plan.recipe
    branches = recipe.group_size if recipe.sampling == "tree" else recipe.plays
    at_once = config.rollout.max_num_seqs * len(plan.shapes) if plan.hosted else config.rollout.tasks * branches
    e = config.evaluation
    deepest = max((shape.layers for shape in plan.shapes.values()), default=0)
    return {
        "compiling": COMPILING_S + (0 if config.stacked_layers else COMPILING_LAYER_S * deepest),
        "playing": _playing(plan, limits, config.rollout.tasks, requests, branches, at_once),
        "updating": _updating(plan, limits, config.rollout.tasks * requests, branches) * config.optimizer.epochs,
        "a validation": _playing(plan, limits, e.tasks, requests, 1, at_once),
        "a measurement": _playing(plan, limits, e.final_tasks, requests, 1, at_once),
    }


def _playing(plan: Plan, limits: Any, tasks: int, requests: int, branches: int, at_once: int) -> float:
    """Seconds of so many tasks with so many requests each, `group_size` times each; the roles' models share them evenly."""
    from marl_llm.training import roofline

    total = 0.0
    for model, shape in plan.shapes.items():
        prompt, response = _longest(plan, model)
        prompts = tasks * requests / len(plan.shapes)
        rows = min(at_once / len(plan.shapes), prompts * branches)
        waves = prompts * branches / rows
        step = roofline.decode_step(shape, rows / branches, branches, prompt, response, 1, itemsize=4)
        read = roofline.prefill(shape, prompts, prompt, 1, itemsize=4)
        total += (waves * response * limits.seconds(step) + limits.seconds(read)) / PLAYING
    return total


def _updating(plan: Plan, limits: Any, groups: int, branches: int) -> float:
    from marl_llm.training import roofline

    total = 0.0
    for model in plan.assignment.trained:
        shape, rank = plan.shapes[model], plan.options[model].get("lora_rank")
        share = groups / len(plan.assignment.trained)
        adapters = adapter_parameters(shape, rank) if rank else 0
        total += limits.seconds(roofline.update(shape, share, branches, *_longest(plan, model), 1, 1, adapters)) / UPDATING
    return total


def _longest(plan: Plan, model: str) -> tuple[int, int]:
    """Tokens of a prompt and of a response of a model's roles."""
    prompts, responses = zip(*(plan.budgets[role] for role, name in plan.assignment.roles.items() if name == model), strict=True)
    return max(prompts), max(responses)


def memory_limit() -> int:
    """Bytes that this process may have: the machine's, or its control group's."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdecimal() else physical


def lines(config: Any, plan: Plan, mesh: Any) -> list[str]:
    """Lines of text on what a run takes here; none on devices other than CPUs, for which there is `marl_llm plan`."""
    from marl_llm.models.serving import is_large
    from marl_llm.training.speed import machine_limits

    if mesh.devices.flat[0].platform != "cpu":
        return []
    limits, limit = machine_limits(mesh), memory_limit()
    usage = memory(config, plan, mesh.shape["data"])
    total = sum(usage.values())

    def gib(size):
        return f"{size / GIB:.2f}"

    verdict = (
        "" if total <= 0.9 * limit else "; THIS IS TOO MUCH: fewer rollout.max_num_seqs, optimizer.microbatch_tokens, or model.lora_rank"
    )
    report = [
        f"this machine: {mesh.size} x CPU, {os.cpu_count()} cores, {gib(limit)} GiB, {limits.flops / 1e9:.0f} GFLOP/s, "
        f"{limits.bandwidth / 1e9:.0f} GB/s (measured)",
        f"  memory       about {gib(total)} GiB: {', '.join(f'{name} {gib(size)}' for name, size in usage.items())}{verdict}",
    ]
    if not any(options.get("path") or is_large(plan.shapes[name], "cpu") for name, options in plan.options.items() if name in plan.shapes):
        return report  # of small models a step's time is that of the game, and of a thousand small operations
    s = seconds(config, plan, limits)
    validations = config.steps // config.evaluation.every + 1
    measurements = len(tables(plan, config.evaluation.ablate_roles))
    step = s["playing"] + s["updating"]
    whole = s["compiling"] + config.steps * step + validations * s["a validation"] + measurements * s["a measurement"]
    report += [
        f"  a step       at the longest prompts and responses about {step:.0f} s: playing {s['playing']:.0f}, updating "
        f"{s['updating']:.0f}; the first one {s['compiling'] + s['a validation'] + step:.0f} s after the start",
        f"  the run      about {whole / 60:.0f} minutes: {config.steps} steps, {validations} validations of {s['a validation']:.0f} s, "
        f"{measurements} measurements of {s['a measurement']:.0f} s",
    ]
    return report


def planned(config: Any) -> list[str]:
    """`lines` of a config whose checkpoints need not be there: their sections may name a published preset."""
    from marl_llm.runs.building import start_jax

    with resolve(config, sizes_only=True) as plan:
        return lines(config, plan, start_jax(config, None))
