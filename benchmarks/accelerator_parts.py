"""The parts of `benchmarks.accelerator`. Each yields rows, dicts that are printed as JSON lines.

A row that failed has the key `failed`: what was raised, or which bound was passed. A row that this platform cannot have says why in
`left_out`. JAX is imported only within the parts that compute, so that the mini runs find the devices free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
KINDS = ("causal", "tree", "packed")
# largest |difference| over the largest |value| of the reference, on the same inputs
BOUNDS = {"float32": 2e-5, "float32, default precision": 4e-2, "bfloat16": 4e-2}
RUNS = {"Plan-Path, compiled": "quickstart", "workflow A, engine": "search_parallel"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured at which size; as flags, lists are written with commas between. The defaults are for one CPU core."""

    presets: str = "micro"  # shapes of models, with random parameters; small ones get the vocabulary of benchmarks.update
    compute_dtype: str = "float32"  # of the engine's and the update's model
    remat: str = "none"  # of the update
    attention_lengths: str = "384"  # of rows; multiples of 128
    batches: str = "4,16"  # of the engine: slots, all of which decode
    lengths: str = "32+32,128+32"  # of the engine: prompt + response
    updates: str = "4x4x32+32"  # groups x branches x prompt + response
    adapters: str = "micro"  # models whose adapters train for a whole step, random parameters; or a checkpoint's directory
    adapter_step: str = "4x4x64+32"  # prompts x samples x prompt + response
    steps: int = 3  # of reinforcement in a mini run
    repeats: int = 3  # of each time; medians are given


LARGE = Sizes(
    "qwen3-0.6b,qwen3-1.7b", "bfloat16", "full", "1024", "64", "256+256", "8x8x256+256", "smollm2-135m,qwen3-0.6b", "8x8x256+128", steps=20
)


def median_of(runs: list[dict], key: str) -> float:
    """Of one figure of several runs."""
    return statistics.median(run[key] for run in runs)


def numbers(text: str, separators: str = "x+") -> tuple[int, ...]:
    """The whole numbers of `4x4x32+32`. Raises `ValueError` on anything else."""
    for separator in separators:
        text = text.replace(separator, " ")
    return tuple(map(int, text.split()))


def row(part: str, name: dict, measure: Callable[[], dict]) -> dict:
    """The row `name` with what `measure` returns, or with what it raised under `failed`."""
    try:
        figures = measure()
    except Exception as error:  # whatever a kernel, a compiler or a device raises: it must not cost the other rows
        lines = str(error).strip().splitlines() or [""]
        figures = {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
    return {"part": part, **name, **figures}


def within(value: float, bound: float, quantity: str) -> dict:
    """`failed` if a value is above its bound or not a number."""
    return {} if value <= bound else {"failed": f"{quantity} {value:.2g} is above {bound:.2g}"}


def model_of(sizes: Sizes, preset: str = "", **changed):
    """The config of a model, of the first preset where none is named."""
    from benchmarks.update import VOCABULARY
    from marl_llm.models import PRESETS, make_model_config

    preset = preset or sizes.presets.split(",")[0]
    own = "vocab_size" in PRESETS.get(preset, {})
    options = {"compute_dtype": sizes.compute_dtype} | changed
    return make_model_config(preset, vocab_size=None if own else VOCABULARY, **options)


def chip():
    """The data sheet of this device, or None."""
    import jax

    from marl_llm.training.roofline import chip_of

    return chip_of(jax.devices()[0].device_kind)


@functools.cache
def limits(dtype: str):
    """What one device was measured to do in this process."""
    from marl_llm.training import make_mesh
    from marl_llm.training.speed import machine_limits

    return machine_limits(make_mesh(1), dtype)


@contextlib.contextmanager
def precision(name: str | None):
    """Within it float32 products have this precision in all threads, the engine's too; None: as JAX likes it."""
    import jax

    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", name)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


# ---------------------------------------------------------------------------------------------------- the machine
def device_rows(sizes: Sizes) -> Iterator[dict]:
    """What there is: one row, and one per dtype with what one device was measured to do."""
    import importlib.metadata
    import platform

    import jax

    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    yield {
        "part": "device", "platform": device.platform, "kind": device.device_kind, "devices": jax.device_count(), "memory_bytes": memory,
        "host": f"{os.cpu_count()} CPU cores ({platform.machine()})", "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: versions[name] for name in packages if name in versions},
    }  # fmt: skip
    sheet = chip()
    for dtype in dict.fromkeys(("float32", sizes.compute_dtype)):

        def measure(dtype=dtype):
            limit = limits(dtype)
            out = {"gflops": limit.flops / 1e9, "gb_per_s": limit.bandwidth / 1e9}
            return out | ({"sheet_gflops": sheet.flops / 1e9, "sheet_gb_per_s": sheet.bandwidth / 1e9} if sheet else {})

        yield row("device", {"dtype": dtype}, measure)


# ---------------------------------------------------------------------------------------------------- attention
def masks(length: int):
    """A causal row with padding on the left, a tree of two responses, and rows that pack trees and plain sequences."""
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.models import packed_mask, prompt_mask, tree_mask

    where, half = np.ones((2, length), bool), length // 2
    where[1, : length // 4] = False
    part = np.arange(length) * 8 // length
    segments, branches = np.asarray([1, 1, 1, 2, 2, 3, 3, 0])[part], np.asarray([0, 1, 2, 0, 3, 0, 0, 0])[part]

    def twice(x, y):
        return jnp.asarray(np.stack([x, y]), jnp.int32)

    return {
        "causal": prompt_mask(jnp.asarray(where)),
        "tree": tree_mask(jnp.asarray(where[:, :half]), 2, half // 2),
        "packed": packed_mask(twice(segments, segments[::-1]), twice(branches, 0 * branches)),
    }


def unavailable(path: str, kind: str, dtype: str, platform: str) -> str:
    """Why a path cannot run here, or nothing."""
    if path == "cudnn" and platform != "gpu":
        return "needs a GPU"
    if path in ("cudnn", "flash") and platform == "gpu" and dtype != "bfloat16":
        return "takes 16-bit numbers only"
    for needs, name in (("gpu", "flash"), ("tpu", "splash")):
        if path == name and platform not in (needs, "cpu"):
            return f"needs a {needs.upper()}, or a CPU, which interprets it"
    return ""


def difference(values, reference) -> float:
    """Largest |difference| over the largest |value| of the other."""
    import numpy as np

    values, reference = np.asarray(values, np.float64), np.asarray(reference, np.float64)
    return float(np.max(np.abs(values - reference)) / np.max(np.abs(reference)))


def attend(path: str, queries, keys, values, mask, weight) -> tuple:
    """The output of a path as float32, padding 0, and the gradients of its product with `weight`."""
    import jax
    import jax.numpy as jnp

    from marl_llm.models import self_attention

    def loss(queries, keys, values):
        out = self_attention(path, queries, keys, values, mask).astype(jnp.float32) * (mask.segments > 0)[:, :, None, None]
        return jnp.sum(out * weight), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(queries, keys, values)
    return out, *gradients


def attention_rows(
    sizes: Sizes, kinds=KINDS, paths=("xla", "chunked", "tree", "cudnn", "flash", "splash"), dtypes=("float32", "bfloat16")
) -> Iterator[dict]:
    """Every path in every dtype: output and gradients against float32 products of XLA on the same inputs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    config, here = model_of(sizes), jax.default_backend()
    heads = (config.query_heads, config.key_value_heads, config.key_value_heads, config.query_heads)
    rng, run = np.random.default_rng(0), jax.jit(attend, static_argnums=0)
    for length in numbers(sizes.attention_lengths, ","):
        *drawn, weight = (jnp.asarray(rng.normal(size=(2, length, n, config.head_dim)), jnp.float32) for n in heads)
        every = masks(length)
        for kind, dtype in itertools.product(kinds, dtypes):
            given = (*(x.astype(dtype) for x in drawn), every[kind], weight)
            with precision("highest"):
                want = run("xla", *(x.astype(jnp.float32) for x in given[:3]), *given[3:])
            both = [dtype] if here == "cpu" or dtype != "float32" else [dtype, "float32, default precision"]
            for path, how in itertools.product(paths, both):
                name = {"path": path, "mask": kind, "dtype": how, "length": length}
                if why := unavailable(path, kind, dtype, here):
                    yield {"part": "attention", **name, "left_out": why}
                else:
                    yield row("attention", name, functools.partial(attention_row, run, path, how, given, want))


def attention_row(run: Callable, path: str, how: str, given: tuple, want: tuple) -> dict:
    """One path beside `want`, its reference."""
    from marl_llm.models.attention import choose

    with precision("highest" if how == "float32" else None):
        output, *gradients = run(path, *given)
    forward, backward = difference(output, want[0]), max(map(difference, gradients, want[1:]))
    auto = choose("auto", given[0].shape[1], given[0].dtype, given[3]) == path
    figures = {"output": forward, "gradient": backward, "bound": BOUNDS[how], "auto": auto}
    worst = next((x for x in (forward, backward) if not x <= BOUNDS[how]), 0.0)
    return figures | within(worst, BOUNDS[how], "a difference of")


# ---------------------------------------------------------------------------------------------------- log-probs of whole models
def log_prob_rows(sizes: Sizes, dtypes=("float32", "bfloat16")) -> Iterator[dict]:
    """Decoding with cached keys, by the sampler and by the engine, and scoring, each against scores of float32 products of XLA."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.models import init_params, log_prob_gap_bound, score_responses
    from marl_llm.sampling import Engine, EngineConfig, Request, sample

    prompts, longest, new = 4, 232, 24  # rows of 256 tokens, which splash attention takes
    config = model_of(sizes, compute_dtype="float32", attention="xla")
    params = init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    where = np.arange(longest)[::-1] < np.asarray([longest, 131, 16, 3])[:, None]
    ids = np.where(where, rng.integers(3, config.vocab_size, where.shape), 0).astype(np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def score(config, responses):
        return score_responses(config, params, jnp.asarray(ids), jnp.asarray(where), responses[:, None]).log_probs[:, 0]

    def sampled(config):
        keys = jax.random.split(jax.random.key(1), (prompts, 1))
        out = jax.jit(lambda p: sample(config, p, jnp.asarray(ids), jnp.asarray(where), keys, max_tokens=new, stop=(), pad_id=0))(params)
        return out.tokens[:, 0], out.log_probs[:, 0]

    def served(config):
        engine_config = EngineConfig(max_num_seqs=prompts, prompt_tokens=longest, response_tokens=new, decode_steps=8)
        requests = [Request(tuple(map(int, ids[i][where[i]])), (i,), new) for i in range(prompts)]
        with Engine({"policy": (config, params)}, jax.random.key(1), sizes=engine_config) as engine:
            done = engine.generate_all(requests)
        return np.stack([c.tokens for c in done]), np.stack([c.log_probs for c in done])

    def scored(config):
        responses = rng.integers(3, config.vocab_size, (prompts, new)).astype(np.int32)
        return responses, score(config, jnp.asarray(responses))

    def measure(source, dtype: str) -> dict:
        with precision("highest" if dtype == "float32" else None):
            tokens, log_probs = source(dataclasses.replace(config, compute_dtype=dtype, attention="auto"))
        with precision("highest"):
            want = score(config, jnp.asarray(tokens))
        gap, bound = np.abs(np.asarray(log_probs, np.float64) - np.asarray(want, np.float64)), log_prob_gap_bound(dtype)
        figures = {"largest_nats": float(gap.max()), "mean_nats": float(gap.mean()), "bound": bound}
        return figures | within(float(gap.max()), bound, "a gap in nats of")

    for dtype, (name, source) in itertools.product(dtypes, {"sampler": sampled, "engine": served, "scorer": scored}.items()):
        yield row("log_probs", {"source": name, "dtype": dtype}, functools.partial(measure, source, dtype))


# ---------------------------------------------------------------------------------------------------- the engine
def engine_rows(sizes: Sizes) -> Iterator[dict]:
    """Tokens per second, and what decoding reads over what memory can deliver."""
    import jax

    from marl_llm.models import init_params

    for preset in sizes.presets.split(","):
        config = model_of(sizes, preset)
        params = init_params(config, jax.random.key(0))  # as one program it compiles for a minute and a half on a GPU
        for lengths, batch in itertools.product(sizes.lengths.split(","), numbers(sizes.batches, ",")):
            name = dict(zip(("batch", "prompt", "response"), (batch, *numbers(lengths)), strict=True))
            measured = functools.partial(engine_row, config, params, *name.values(), sizes.repeats)
            yield row("engine", {"model": preset} | name, measured)


def engine_row(config, params, batch: int, prompt: int, response: int, repeats: int) -> dict:
    """`batch` distinct prompts, as many slots; no response ends early. `share` is the bytes that decode steps must read at this machine's
    measured bandwidth over the time that they took, `share_of_sheet` the same at the data sheet's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.sampling import Engine, EngineConfig, Request
    from marl_llm.training.roofline import decode_step

    rng, runs = np.random.default_rng(0), []
    engine_config = EngineConfig(max_num_seqs=batch, prompt_tokens=prompt, response_tokens=response, admit=min(batch, 8))
    with Engine({"policy": (config, params)}, jax.random.key(0), sizes=engine_config) as engine:
        for repeat in range(repeats + 1):  # the first one compiles
            prompts = rng.integers(3, config.vocab_size, (batch, prompt))
            requests = [Request(tuple(map(int, p)), (repeat, i), response) for i, p in enumerate(prompts)]
            before, tick = engine.stats()["policy"], time.perf_counter()
            done = engine.generate_all(requests)
            seconds, after = time.perf_counter() - tick, engine.stats()["policy"]
            if sum(len(c.tokens) for c in done) != batch * response:
                raise RuntimeError("a response ended early")
            grown = {key: after.get(key, 0) - before.get(key, 0) for key in ("steps", "decode_s", "admit_s", "compile_s")}
            runs.append({"seconds": seconds, "step_s": grown["decode_s"] / max(grown["steps"], 1), **grown})
        cache = engine.stats()["policy"]["cache_bytes"]
    median = functools.partial(median_of, runs[1:])
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    work, sheet = decode_step(config, batch, 1, prompt, response, 1, itemsize), chip()
    out = {
        "tokens_per_s": batch * response / median("seconds"), "step_ms": 1e3 * median("step_s"), "prefill_s": median("admit_s"),
        "compile_s": runs[0]["compile_s"], "compiled_later_s": sum(run["compile_s"] for run in runs[1:]), "cache_bytes": cache,
        "share": work.bytes / limits(config.compute_dtype).bandwidth / median("step_s"),
    }  # fmt: skip
    return out | ({"share_of_sheet": work.bytes / sheet.bandwidth / median("step_s")} if sheet else {})


# ---------------------------------------------------------------------------------------------------- the update
def update_rows(sizes: Sizes) -> Iterator[dict]:
    """One optimizer step on packed rows."""
    for preset, shape in itertools.product(sizes.presets.split(","), sizes.updates.split(",")):
        config = model_of(sizes, preset, remat=sizes.remat)
        name = dict(zip(("groups", "branches", "prompt", "response"), numbers(shape), strict=True))
        measured = functools.partial(update_row, config, *name.values(), sizes.repeats)
        yield row("update", {"model": preset} | name | {"remat": sizes.remat}, measured)


def update_row(config, groups: int, branches: int, prompt: int, response: int, repeats: int) -> dict:
    """Time beside the least that `plan` gives, `mfu` (needed FLOP/s, nothing counted twice, over what the device can do), and memory:
    counted by `plan` (for bfloat16 and remat "full"), of `plan`'s program compiled here, and the most that the device held."""
    import jax

    from benchmarks.update import stepper
    from marl_llm.algorithms import make_recipe
    from marl_llm.models import TRAIN, init_params, param_shardings
    from marl_llm.planning import programs as planning
    from marl_llm.training import make_mesh, make_optimizer, make_train_state, roofline

    mesh, optimizer = make_mesh(1), make_optimizer()
    params = init_params(config, jax.random.key(0), stacked=config.uniform)
    held = {"policy": make_train_state(params, optimizer)}
    held["policy"] = jax.device_put(held["policy"], param_shardings(held["policy"], mesh, TRAIN))
    del params
    step = stepper(config, mesh, optimizer, held, (groups, branches, prompt, response, False), 0)
    step()
    runs = [step() for _ in range(repeats)]
    seen = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    recipe = make_recipe("grpo", group_size=branches)
    lowered, *_ = planning.programs(planning.PlanSizes(recipe, config, 1, prompt, response), mesh, groups, 0)
    seconds, sheet, limit = statistics.median(run["seconds"] for run in runs), chip(), limits(config.compute_dtype)
    counted = roofline.update(config, groups, branches, prompt, response, 1, 1)
    needed = roofline.update(dataclasses.replace(config, remat="none"), groups, branches, prompt, response, 1, 1).flops
    out = {
        "seconds": seconds, "least_s": limit.seconds(counted), "tokens_per_s": groups * (prompt + branches * response) / seconds,
        "mfu": needed / limit.flops / seconds, "state_bytes": 12 * config.parameters,
        "counted_bytes": 12 * config.parameters + planning.estimate(config, branches, prompt, response, groups, 1),
        "compiled_bytes": planning.memory(lowered["update"].compile())["peak"], "seen_bytes": seen,
    }  # fmt: skip
    if sheet:
        out |= {"mfu_of_sheet": needed / sheet.flops / seconds, "least_s_of_sheet": counted.seconds(sheet)}
    return out | within(max(abs(run["loss"]) for run in runs), 1e6, "a loss of")


# ---------------------------------------------------------------------------------------------------- a whole step of adapters
def adapter_rows(sizes: Sizes) -> Iterator[dict]:
    """By `benchmarks.adapters`, beside TRL with PEFT where this interpreter has them."""
    from benchmarks.adapters import beside_peer

    sized = dict(zip(("prompts", "samples", "prompt", "response"), numbers(sizes.adapter_step), strict=True))
    for model in sizes.adapters.split(","):
        measured = functools.partial(beside_peer, model, repeats=sizes.repeats, **sized)
        yield row("adapters", {"model": pathlib.Path(model).name} | sized, measured)


# ---------------------------------------------------------------------------------------------------- mini runs
def run_rows(sizes: Sizes) -> Iterator[dict]:
    """Each by `experiments.train`, in a process of its own."""
    for name, config in RUNS.items():
        yield row("runs", {"run": name, "config": f"{config}.py:smoke"}, functools.partial(run_row, config, sizes.steps))


def run_row(config: str, steps: int) -> dict:
    """Success before and after, speed, and the gap between sampler and scorer beside its bound."""
    small = ("evaluation.every=1000", "evaluation.tasks=8", "evaluation.final_tasks=16", "evaluation.ablate_roles=False", "devices=1",
             "sft.steps=60")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "experiments.train", f"--config=experiments/configs/{config}.py:smoke", f"--workdir={workdir}"]
        command += [f"--config.steps={steps}", *(f"--config.{option}" for option in small)]
        tick = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"experiments.train ended with {done.returncode}: {' / '.join(done.stdout.splitlines()[-3:])}")
        return run_figures(workdir, steps) | {"seconds": time.perf_counter() - tick}


def run_figures(workdir: pathlib.Path, steps: int) -> dict:
    """What a run directory says of the run. Raises `RuntimeError` where it is not whole."""
    trained = [line for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if line["phase"] == "train"]
    if len(trained) != steps or not (workdir / "report.html").exists():
        raise RuntimeError(f"{len(trained)} of {steps} steps, report.html {'is' if (workdir / 'report.html').exists() else 'is not'} there")
    measured = json.loads((workdir / "evaluation.json").read_text())
    models = sorted(key.split("/")[1] for key in trained[-1] if key.startswith("model/") and key.endswith("/log_prob_gap"))
    gap = max(line[f"model/{model}/log_prob_gap"] for line in trained for model in models)
    bound = min(line[f"model/{model}/log_prob_gap_bound"] for line in trained for model in models)
    median = functools.partial(median_of, trained[1:] or trained)
    if not (updates := sum(line[f"model/{model}/updates"] for line in trained for model in models)):
        raise RuntimeError("no model was updated: all rewards of a group were equal, in every step")
    return {
        "steps": steps, "before": measured["before"]["success"], "after": measured["after"]["success"], "log_prob_gap": gap, "bound": bound,
        "updates": int(updates),
        "sampled_tokens_per_s": median("speed/sampled_tokens_per_s"), "trained_tokens_per_s": median("speed/trained_tokens_per_s"),
    } | within(gap, bound, "a gap between sampler and scorer of")  # fmt: skip


PARTS: dict[str, Callable[[Sizes], Iterator[dict]]] = {
    "device": device_rows, "attention": attention_rows, "log_probs": log_prob_rows, "engine": engine_rows, "update": update_rows,
    "adapters": adapter_rows, "runs": run_rows,
}  # fmt: skip
