"""One GRPO step of a checkpoint with an adapter, sampling included: this library against TRL with PEFT, in turns in one run.

    python -m benchmarks.adapters --model=models/smollm2 --peers_python=PATH [--prompts=4] [--samples=4] [--prompt=200] [--response=48]

Both train an adapter of one rank on all matrices from random prompts of exactly `--prompt` tokens and answers of exactly `--response`, in
float32 on a CPU and in bfloat16 on an accelerator. `--model` is a checkpoint's directory, or a preset's name: its shape, random weights.
Prints one JSON line: medians and spreads of the whole step, of sampling and of training, their ratios, the most memory that each worker (on
an accelerator: the device for it) held, and our shares of the roofline (a prompt counted once, no gradient of frozen weights, the best
product measured here).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.host_memory import resident
from benchmarks.peers.lines import Worker, pin, serve

DTYPES = {"cpu": "float32", "gpu": "bfloat16", "tpu": "bfloat16"}  # of products, by platform
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PARTS = ("whole", "sample", "seconds")  # of a step; `seconds` are those of training


def prepare(args) -> dict:
    """The tasks of our own worker."""
    import jax
    import numpy as np

    from marl_llm.algorithms import Samples, make_recipe
    from marl_llm.models import LoraConfig, attach, load_pretrained
    from marl_llm.sampling import Engine, EngineConfig, Request
    from marl_llm.training import LearnerOptions, ModelSpec, TokenSample, make_mesh, make_optimizer, roofline, use_cpu_devices
    from marl_llm.training.learner import Learner
    from marl_llm.training.packing import Tokens
    from marl_llm.training.speed import machine_limits

    use_cpu_devices(1)
    dtype = DTYPES[args.platform]
    config, params = load_pretrained(args.model, stacked=True, remat=args.remat, compute_dtype=dtype)
    row, lora, mesh = args.prompt + args.samples * args.response, LoraConfig(args.rank), make_mesh(1)
    recipe = make_recipe("grpo", group_size=args.samples, kl_coef=0.0)
    options = LearnerOptions(recipe, make_optimizer(), row, args.prompts, microbatch_tokens=args.microbatch_tokens or row)
    learners = {f"role{i}": Learner(ModelSpec(config, params, lora=lora), options, mesh, jax.random.key(1 + i)) for i in range(args.roles)}
    count = args.prompts * args.samples
    sizes = EngineConfig(max_num_seqs=count, prompt_tokens=args.prompt, response_tokens=args.response, decode_steps=16, admit=args.prompts)

    def on_base(learner):
        return attach(learner.base, learner.policy.params, lora)

    engine = Engine({role: (config, on_base(learner)) for role, learner in learners.items()}, jax.random.key(2), sizes=sizes)
    rng, zeros, order = np.random.default_rng(0), np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    instance = np.repeat(np.arange(args.prompts, dtype=np.int32), args.samples)

    numbers, clock = itertools.count(), CLOCKS[args.clock]

    def step() -> dict:
        number = next(numbers)
        asked = []
        for role in learners:
            ids = [tuple(int(t) for t in rng.integers(3, config.vocab_size, args.prompt)) for _ in range(args.prompts)]
            asked += [Request(ids[i], (number, i, k), args.response, role) for i in range(args.prompts) for k in range(args.samples)]
        tick = clock()
        for role, learner in learners.items():
            engine.set_params(role, on_base(learner))
        drawn = engine.generate_all(asked)
        tock = clock()
        for first, learner in zip(range(0, len(asked), count), learners.values(), strict=True):
            answered = list(zip(asked, drawn, strict=True))[first : first + count]
            tokens = Tokens.of([TokenSample(r.prompt, c.tokens, c.log_probs) for r, c in answered])
            pay = np.asarray([np.mean(c.tokens % 2) for _, c in answered], np.float32)
            table = Samples(instance=instance, env=instance, agent=zeros, turn=zeros, order=zeros, trajectory=order, team=pay, local=pay)
            learner.learn(tokens, table, np.ones(1, bool), 1e-4, None, 0, None, 0.0)
        jax.block_until_ready([learner.policy for learner in learners.values()])
        done = clock()
        of_device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        held = (of_device or resident("VmHWM")) / 2**30
        return {"seconds": done - tock, "sample": tock - tick, "whole": done - tick, "gib": held}

    def work() -> dict:
        """Seconds that no program here can go below."""
        limits, sized = machine_limits(mesh, dtype), (args.samples, args.prompt, args.response)
        adapters = sum(x.size for x in jax.tree.leaves(learners["role0"].policy.params))
        size = jax.numpy.dtype(dtype).itemsize
        decode = args.response * limits.seconds(roofline.decode_step(config, args.prompts, *sized, 1, itemsize=size))
        sampled = decode + limits.seconds(roofline.prefill(config, args.prompts, args.prompt, 1, itemsize=size))
        updated = limits.seconds(roofline.update(config, args.prompts, *sized, 1, 1, adapters))
        return {"sample": args.roles * sampled, "seconds": args.roles * updated}

    for _ in range(2):  # an empty cache and a used one are admitted by two programs
        step()
    return {"train": step, "work": work}


def random_checkpoint(preset: str, directory: str) -> str:
    """Writes a checkpoint of a preset's shape with random weights, on the CPU: a worker needs the device."""
    code = (
        "import sys, jax\nfrom benchmarks.update import VOCABULARY\n"
        "from marl_llm.models import PRESETS, init_params, make_model_config, save_pretrained\n"
        "own = None if 'vocab_size' in PRESETS[sys.argv[1]] else VOCABULARY\nconfig = make_model_config(sys.argv[1], vocab_size=own)\n"
        "save_pretrained(sys.argv[2], config, init_params(config, jax.random.key(0)), dtype='bfloat16')"
    )
    subprocess.run([sys.executable, "-c", code, preset, directory], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return directory


def measure(args) -> dict:
    """Starts the workers and interleaves the repetitions; returns the figures. Raises `RuntimeError` if a worker ends."""
    here = pathlib.Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        given = {name: getattr(args, name) for name in ("prompts", "samples", "prompt", "response", "rank", "threads", "platform")}
        given["model"] = args.model if pathlib.Path(args.model).exists() else random_checkpoint(args.model, f"{folder}/model")
        sizes = [f"--{name}={value}" for name, value in given.items()]
        own = [f"--{name}={getattr(args, name)}" for name in ("roles", "remat", "microbatch_tokens", "clock")]
        here_only = {"JAX_PLATFORMS": "cpu"} if args.platform == "cpu" else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        workers = {"ours": Worker([sys.executable, "-m", "benchmarks.adapters", *sizes, *own, "--worker"], f"{folder}/ours", **here_only)}
        if args.peers_python:
            workers["trl"] = Worker([args.peers_python, str(here / "peers" / "trl_update.py"), *sizes], f"{folder}/trl")
        figures: dict[str, list[dict]] = {name: [] for name in workers}
        work = []
        for _ in range(args.repeats):
            work.append(workers["ours"].run("work"))
            for name, worker in workers.items():
                figures[name].append(worker.run("train"))
        for worker in workers.values():
            worker.close()

    def of(name, part):
        return [repeat[part] for repeat in figures[name]]

    out = {"benchmark": "adapters", "model": pathlib.Path(args.model).name, "threads": args.threads, "repeats": args.repeats}
    out |= {name: getattr(args, name) for name in ("prompts", "samples", "prompt", "response", "rank", "roles", "remat", "platform")}
    out["dtype"] = DTYPES[args.platform]
    for name in workers:
        middle = {part: round(statistics.median(of(name, part)), 2) for part in PARTS}
        spread = [round(min(of(name, "whole")), 2), round(max(of(name, "whole")), 2)]
        out[name] = middle | {"spread": spread, "gib": round(max(of(name, "gib")), 2)}
    for part in ("sample", "seconds"):
        shares = [w[part] / x for w, x in zip(work, of("ours", part), strict=True)]
        out["ours"][f"{part}_roofline"] = round(statistics.median(shares), 3)
    if "trl" in workers:
        out["ratios"] = {part: round(statistics.median(of("trl", part)) / statistics.median(of("ours", part)), 2) for part in PARTS}
    return out


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of `python -m marl_llm model smollm2 --out=DIR`, or a preset's name")
    parser.add_argument("--peers_python", default="", help="interpreter with TRL, PEFT, PyTorch and datasets; empty: this library alone")
    for name, default in (("prompts", 4), ("samples", 4), ("prompt", 200), ("response", 48), ("rank", 16), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--roles", type=int, default=1, help="adapters on the one base, each with as many samples; ours alone")
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--microbatch_tokens", type=int, default=0, help="0: a packed row")
    parser.add_argument("--platform", default="cpu", choices=tuple(DTYPES))
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS), help="cpu: seconds of all threads of ours, on a shared machine")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def options(**given) -> argparse.Namespace:
    """The flags as they stand, but for those given. Raises `SystemExit` for one that is not there."""
    return parser().parse_args([f"--{name}={value}" for name, value in given.items()])


def beside_peer(model: str, **sizes) -> dict:
    """The figures as a flat row, on this machine's device, beside TRL where this interpreter has it. `sizes`: flags, e.g. `prompts`."""
    there = all(importlib.util.find_spec(name) for name in ("trl", "peft", "datasets"))
    # a process that ends says which device there is: while this one held it, the workers could not have it
    seen = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend())"], capture_output=True, text=True, check=True)
    platform = seen.stdout.split()[-1]
    given = options(model=model, platform=platform, peers_python=sys.executable if there and platform != "tpu" else "", **sizes)
    if platform != "cpu":
        given.microbatch_tokens = given.prompts * (given.prompt + given.samples * given.response)
    both = measure(given)
    out = {"dtype": both["dtype"], "sample_share": both["ours"]["sample_roofline"], "train_share": both["ours"]["seconds_roofline"]}
    for name in ("ours", "trl"):
        out |= {f"{name}_{part}": value for part, value in both.get(name, {}).items() if part in (*PARTS, "gib")}
    return out | {f"ratio_{part}": value for part, value in both.get("ratios", {}).items()}


def main() -> None:
    """The command, and the helper that it starts itself as."""
    args = parser().parse_args()
    if args.roles > 1 and args.peers_python:
        raise SystemExit("--roles: TRL trains one adapter; leave --peers_python out")
    if args.worker:
        pin(args.threads)
        serve(lambda: prepare(args))
    else:
        print(json.dumps(measure(args)), flush=True)


if __name__ == "__main__":
    main()
