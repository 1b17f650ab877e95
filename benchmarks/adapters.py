"""One GRPO step of a checkpoint with an adapter, sampling included: this library against TRL with PEFT, in turns in one run.

    python -m benchmarks.adapters --model=models/smollm2 --peers_python=PATH [--prompts=4] [--samples=4] [--prompt=200] [--response=48]

Both train an adapter of one rank on all matrices, in float32, from random prompts of exactly `--prompt` tokens and answers of exactly
`--response`. Prints one JSON line: medians and spreads of the whole step, of sampling and of training, their ratios, the most memory that
each worker held, and our shares of the roofline (a prompt counted once, no gradient of frozen weights, the best product measured here).
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import resource
import statistics
import sys
import tempfile
import time

from benchmarks.peers.lines import Worker, pin, serve

PARTS = ("whole", "sample", "seconds")  # of a step; `seconds` are those of training


def prepare(args) -> dict:
    """The tasks of our own worker."""
    import jax
    import numpy as np

    from marl_llm.algorithms import Samples, make_recipe
    from marl_llm.models import LoraConfig, attach, load_pretrained
    from marl_llm.sampling import Engine, LaneConfig, Request
    from marl_llm.training import LearnerOptions, ModelSpec, TokenSample, make_mesh, make_optimizer, roofline, use_cpu_devices
    from marl_llm.training.learner import Learner
    from marl_llm.training.packing import Tokens
    from marl_llm.training.speed import machine_limits

    use_cpu_devices(1)
    config, params = load_pretrained(args.model, stacked=True, remat=args.remat)
    row, lora, mesh = args.prompt + args.samples * args.response, LoraConfig(args.rank), make_mesh(1)
    recipe = make_recipe("grpo", branches=args.samples, kl_coef=0.0)
    options = LearnerOptions(recipe, make_optimizer(), row, args.prompts, microbatch_tokens=args.microbatch_tokens or row)
    learner = Learner(ModelSpec(config, params, lora=lora), options, mesh, jax.random.key(1))
    count = args.prompts * args.samples
    sizes = LaneConfig(slots=count, prompt_tokens=args.prompt, response_tokens=args.response, chunk=16, admit=args.prompts)
    on_base = lambda: attach(learner.base, learner.policy.params, lora)  # noqa: E731
    engine = Engine({"policy": (config, on_base())}, jax.random.key(2), sizes=sizes)
    rng, zeros, order = np.random.default_rng(0), np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    instance = np.repeat(np.arange(args.prompts, dtype=np.int32), args.samples)

    numbers = itertools.count()

    def step() -> dict:
        number = next(numbers)
        ids = [tuple(int(t) for t in rng.integers(3, config.vocab_size, args.prompt)) for _ in range(args.prompts)]
        asked = [Request(ids[i], (number, i, k), args.response) for i in range(args.prompts) for k in range(args.samples)]
        tick = time.perf_counter()
        engine.set_params("policy", on_base())
        drawn = engine.generate_all(asked)
        tock = time.perf_counter()
        tokens = Tokens.of([TokenSample(r.prompt, c.tokens, c.log_probs) for r, c in zip(asked, drawn, strict=True)])
        pay = np.asarray([np.mean(c.tokens % 2) for c in drawn], np.float32)
        table = Samples(instance=instance, env=instance, agent=zeros, turn=zeros, order=zeros, trajectory=order, team=pay, local=pay)
        learner.learn(tokens, table, np.ones(1, bool), 1e-4, None, 0, None, 0.0)
        jax.block_until_ready(learner.policy)
        done = time.perf_counter()
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"seconds": done - tock, "sample": tock - tick, "whole": done - tick, "gib": held}

    def work() -> dict:
        """Seconds that no program here can go below."""
        limits, sized = machine_limits(mesh), (args.samples, args.prompt, args.response)
        adapters = sum(x.size for x in jax.tree.leaves(learner.policy.params))
        decode = args.response * limits.seconds(roofline.decode_step(config, args.prompts, *sized, 1, itemsize=4))
        sampled = decode + limits.seconds(roofline.prefill(config, args.prompts, args.prompt, 1, itemsize=4))
        return {"sample": sampled, "seconds": limits.seconds(roofline.update(config, args.prompts, *sized, 1, 1, adapters))}

    step()
    return {"train": step, "work": work}


def measure(args) -> None:
    """Starts the workers, interleaves the repetitions, prints the line."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("model", "prompts", "samples", "prompt", "response", "rank", "threads")]
    here = pathlib.Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        more = [f"--remat={args.remat}", f"--microbatch_tokens={args.microbatch_tokens}", "--worker"]
        workers = {"ours": Worker([sys.executable, "-m", "benchmarks.adapters", *sizes, *more], f"{folder}/ours", JAX_PLATFORMS="cpu")}
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
    of = lambda name, part: [one[part] for one in figures[name]]  # noqa: E731
    out = {"benchmark": "adapters", "model": pathlib.Path(args.model).name, "threads": args.threads, "repeats": args.repeats}
    out |= {name: getattr(args, name) for name in ("prompts", "samples", "prompt", "response", "rank", "remat")}
    for name in workers:
        middle = {part: round(statistics.median(of(name, part)), 2) for part in PARTS}
        spread = [round(min(of(name, "whole")), 2), round(max(of(name, "whole")), 2)]
        out[name] = middle | {"spread": spread, "gib": round(max(of(name, "gib")), 2)}
    for part in ("sample", "seconds"):
        shares = [w[part] / x for w, x in zip(work, of("ours", part), strict=True)]
        out["ours"][f"{part}_roofline"] = round(statistics.median(shares), 3)
    if "trl" in workers:
        out["ratios"] = {part: round(statistics.median(of("trl", part)) / statistics.median(of("ours", part)), 2) for part in PARTS}
    print(json.dumps(out), flush=True)


def main() -> None:
    """The command, and the helper that it starts itself as."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint's directory, e.g. of `python -m marl_llm model smollm2 --out=DIR`")
    parser.add_argument("--peers_python", default="", help="interpreter with TRL, PEFT, PyTorch and datasets; empty: this library alone")
    for name, default in (("prompts", 4), ("samples", 4), ("prompt", 200), ("response", 48), ("rank", 16), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--remat", default="none", choices=("none", "dots", "full"))
    parser.add_argument("--microbatch_tokens", type=int, default=0, help="0: a packed row")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        pin(args.threads)
        serve(lambda: prepare(args))
    else:
        measure(args)


if __name__ == "__main__":
    main()
