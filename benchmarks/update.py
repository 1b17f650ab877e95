"""The update: what sharing prompts saves, the train part of a GRPO step beside other libraries, and its cost as work grows.

    python -m benchmarks.update [--threads=1] [--repeats=5] [--peers_python=PATH] [--rows=shared,grpo,growth]

Prints one JSON line per row: medians over interleaved repetitions, in seconds, and the ratio of the medians (peer over ours, or more over
less work) with the smallest and largest ratio of a repetition. `roofline` is the time of the work that is needed, a shared prompt counted
once, at the best rate of a float32 matrix product of several shapes (GEMMS) in the same worker, over the time it took.

The model is a Qwen3 of 29.4e6 parameters with random weights, float32, layers apart, AdamW, clipping by global norm; every row is one
optimizer step of `marl_llm.training.Update` with micro-batches of --microbatch_tokens. Rows:

    shared   4 groups of K = 4 responses of R = 64 tokens behind one prompt of P = 4 R and 10 R, against rows that repeat the prompt
    grpo     8 prompts x 4 samples, 64 + 64 tokens: the train part, and the whole step with its sampling, against google-tunix and TRL, run
             by --peers_python (left out without it)
    growth   that step with twice the prompts (E), and with responses twice as long (R)

Each library runs in a worker process that is bound to --threads cores; peers get the very same weights as a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.peers.lines import Worker, pin, serve

VOCABULARY, PROMPTS, SAMPLES, TOKENS = 8192, 8, 4, 64
GEMMS = ((256, 512, 512), (1024, 512, 1536), (1024, 1024, 1024), (1024, 1024, 4096))
# name -> (groups G, branches K, prompt P, response R, whether the prompt is repeated per response)
STEPS = {
    "grpo": (PROMPTS, SAMPLES, TOKENS, TOKENS, False),
    "P=4R": (4, 4, 4 * TOKENS, TOKENS, False),
    "P=4R unrolled": (4, 4, 4 * TOKENS, TOKENS, True),
    "P=10R": (4, 4, 10 * TOKENS, TOKENS, False),
    "P=10R unrolled": (4, 4, 10 * TOKENS, TOKENS, True),
    "Ex2": (2 * PROMPTS, SAMPLES, TOKENS, TOKENS, False),
    "Rx2": (PROMPTS, SAMPLES, TOKENS, 2 * TOKENS, False),
}
PARTS = {"shared": ["P=4R", "P=4R unrolled", "P=10R", "P=10R unrolled"], "grpo": ["grpo"], "growth": ["grpo", "Ex2", "Rx2"]}
PEERS = ("tunix", "trl")
HERE = pathlib.Path(__file__).parent


def bench_config():
    """The shape of the benchmark's model."""
    from marl_llm.models import ModelConfig

    return ModelConfig(
        VOCABULARY, width=512, layers=8, query_heads=8, key_value_heads=4, head_dim=64, feed_forward=1536, rope_theta=1e6, norm_epsilon=1e-6
    )


def needed_flops(groups: int, branches: int, prompt: int, response: int) -> float:
    """FLOPs of one step, forward and backward: a prompt once, the head on response tokens, attention over the keys that are seen."""
    from marl_llm.training.roofline import update

    return update(bench_config(), groups, branches, prompt, response, 1, 1).flops


def make_rows(groups: int, branches: int, prompt: int, response: int, unrolled: bool):
    """Random rows; `unrolled` gives every response a row with a copy of its prompt."""
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.training.batch import Rows

    rng = np.random.default_rng(0)
    ids, answers = rng.integers(3, VOCABULARY, (groups, prompt)), rng.integers(3, VOCABULARY, (groups, branches, response))
    reward, env = (answers % 2).mean(-1), np.arange(groups)
    drawn = np.full(answers.shape, -np.log(VOCABULARY))
    if unrolled:
        ids, env = np.repeat(ids, branches, axis=0), np.repeat(env, branches)
        answers, drawn, reward = (x.reshape(groups * branches, 1, *x.shape[2:]) for x in (answers, drawn, reward))
    whole, real = lambda x: jnp.asarray(x, jnp.int32), lambda x: jnp.asarray(x, jnp.float32)
    none = np.zeros_like(env)
    return Rows(
        whole(ids), jnp.ones(ids.shape, bool), whole(answers), jnp.ones(answers.shape, bool), real(drawn), real(reward),
        real(np.zeros_like(reward)), whole(env), whole(none), whole(none), whole(np.arange(env.size)), jnp.ones(env.shape, bool),
    )  # fmt: skip


def stepper(config, mesh, optimizer, held: dict, shape: tuple, microbatch_tokens: int):
    """A function that takes one step of GRPO on random rows of a shape as in STEPS and returns its seconds and loss.

    It trains `held["policy"]`, which several such functions may share.
    """
    import jax
    import jax.numpy as jnp

    from marl_llm.algorithms import make_recipe
    from marl_llm.training import LearnerOptions, Trained, Update
    from marl_llm.training.batch import from_pool, pooled

    rows, pool = make_rows(*shape), jax.jit(pooled)
    row = rows.prompt.shape[1] + rows.tokens.shape[1] * rows.tokens.shape[2]
    recipe = make_recipe("grpo", group_size=shape[1])
    update = Update(LearnerOptions(recipe, optimizer, row, len(rows.where), 1, microbatch_tokens), config, mesh)

    def step():
        tick = time.perf_counter()
        tokens, table = from_pool(pool(rows), len(rows.where))
        (held["policy"], _), figures = update(Trained(held["policy"]), None, tokens, table, [True], jnp.float32(1e-6), 0)
        loss = figures["loss"]
        jax.block_until_ready(held["policy"])
        return {"seconds": time.perf_counter() - tick, "loss": loss}

    return step


def prepare(names: list[str], model: str, microbatch_tokens: int) -> dict:
    """The tasks of our own worker: steps, which all train one policy, and the matrix products."""
    import jax
    import jax.numpy as jnp

    from marl_llm.models import TRAIN, load_pretrained, param_shardings, serving_layout
    from marl_llm.sampling import sample
    from marl_llm.training import make_mesh, make_optimizer, make_train_state

    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/marl_llm/xla").expanduser()))
    mesh, optimizer = make_mesh(1), make_optimizer(max_grad_norm=1.0, b2=0.999, weight_decay=0.01)
    config, params = load_pretrained(model)
    held = {"policy": make_train_state(params, optimizer)}
    held["policy"] = jax.device_put(held["policy"], param_shardings(held["policy"], mesh, TRAIN))
    tasks = {}
    for name in names:
        tasks[name] = stepper(config, mesh, optimizer, held, STEPS[name], microbatch_tokens)
        tasks[name]()

    if "grpo" in names:
        prompt = make_rows(*STEPS["grpo"]).prompt

        @jax.jit
        def draw(params, key):
            where, keys = jnp.ones(prompt.shape, bool), jax.random.split(key, (PROMPTS, SAMPLES))
            return sample(config, serving_layout(params), prompt, where, keys, max_tokens=TOKENS, stop=(), pad_id=0)

        def whole():
            tick = time.perf_counter()
            jax.block_until_ready(draw(held["policy"].params, jax.random.key(0)))
            sampling = time.perf_counter() - tick
            return {"seconds": sampling + tasks["grpo"]()["seconds"]}

        whole()
        tasks["grpo whole"] = whole
    return tasks | {"gemm": lambda: {"rate": best_gemm()}}


def best_gemm() -> float:
    """FLOP/s of XLA's best float32 matrix product here, of several shapes."""
    import jax
    import jax.numpy as jnp

    rates = []
    for m, k, n in GEMMS:
        a, b, product = jnp.ones((m, k)), jnp.ones((k, n)), jax.jit(jnp.matmul)
        product(a, b).block_until_ready()
        times = []
        for _ in range(7):
            tick = time.perf_counter()
            product(a, b).block_until_ready()
            times.append(time.perf_counter() - tick)
        rates.append(2 * m * k * n / statistics.median(times))
    return max(rates)


def write_model(directory: str) -> None:
    """The checkpoint that all workers load."""
    import jax

    from marl_llm.models import init_params, save_pretrained

    save_pretrained(directory, bench_config(), init_params(bench_config(), jax.random.key(0)))


def measure(args) -> None:
    """Starts the workers, interleaves the repetitions, prints the lines."""
    parts = args.rows.split(",")
    names = list(dict.fromkeys(name for part in parts for name in PARTS[part]))
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        me = [sys.executable, "-m", "benchmarks.update", f"--threads={args.threads}", f"--microbatch_tokens={args.microbatch_tokens}"]
        subprocess.run([*me, f"--write={model}"], check=True)
        workers = {"ours": Worker([*me, f"--worker={model}", f"--rows={args.rows}"], f"{folder}/ours", JAX_PLATFORMS="cpu")}
        if "grpo" in parts and args.peers_python:
            for peer in PEERS:
                command = [args.peers_python, str(HERE / "peers" / f"{peer}_update.py"), f"--model={model}", f"--threads={args.threads}"]
                workers[peer] = Worker(command, f"{folder}/{peer}")
        seconds: dict[str, list[float]] = {name: [] for name in [*names, *(w for w in workers if w != "ours")]}
        if "grpo" in parts:
            names.append("grpo whole")
            seconds["grpo whole"] = []
        rates = []
        for peer in PEERS:
            seconds[f"{peer} whole"] = []
        for _ in range(args.repeats):
            rates.append(workers["ours"].run("gemm")["rate"])
            for name in names:
                seconds[name].append(workers["ours"].run(name)["seconds"])
            for peer in PEERS:
                if peer in workers:
                    figures = workers[peer].run("train")
                    seconds[peer].append(figures["seconds"])
                    seconds[f"{peer} whole"].append(figures["whole"])
        for worker in workers.values():
            worker.close()

    def line(row: str, ours: str, peer: str = "", needed: str = "", **more) -> None:
        """One row; `needed` names the step whose work is counted."""
        a, rate = seconds[ours], statistics.median(rates)

        def spread(x):
            return [round(min(x), 3), round(max(x), 3)]

        out = {"benchmark": "update", "row": row, "ours_s": round(statistics.median(a), 3), "spread_s": spread(a)}
        if peer:
            b = seconds[peer]
            each = [y / x for x, y in zip(a, b, strict=True)]
            out |= {"peer_s": round(statistics.median(b), 3), "peer_spread_s": spread(b)}
            out |= {"ratio": round(statistics.median(b) / statistics.median(a), 3), "ratio_spread": spread(each)}
        if needed or ours in STEPS:
            share = needed_flops(*STEPS[needed or ours][:4]) / rate / statistics.median(a)
            out["roofline"] = round(share, 3)
        out |= {"gemm_gflops": round(rate / 1e9, 1), "threads": args.threads}
        print(json.dumps(out | {"microbatch_tokens": args.microbatch_tokens, "repeats": args.repeats} | more), flush=True)

    if "shared" in parts:
        for name, bound in (("P=4R", 2.5), ("P=10R", 44 / 14)):
            line(f"shared prompt against unrolled, K=4, {name}", name, f"{name} unrolled", bound=round(bound, 2))
    if "grpo" in parts:
        line("GRPO train part", "grpo")
        for peer in PEERS:
            if peer in workers:
                line(f"GRPO train part against {peer}", "grpo", peer)
                line(f"GRPO whole step against {peer}", "grpo whole", f"{peer} whole")
            else:
                print(json.dumps({"benchmark": "update", "row": f"GRPO train part against {peer}", "left_out": "no --peers_python"}))
    if "growth" in parts:
        for name in ("Ex2", "Rx2"):
            line(f"cost of {name}", "grpo", name, goal="at most 2.1")


def main() -> None:
    """The command, and the two helpers that it starts itself as."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="cores of each worker")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--microbatch_tokens", type=int, default=768)
    parser.add_argument("--rows", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--peers_python", default="", help="interpreter with google-tunix 0.1.7, TRL, PyTorch and datasets")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--write", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.rows.split(",")) - set(PARTS)
    if unknown or args.threads < 1 or args.repeats < 1:
        parser.error(f"--rows={args.rows} --threads={args.threads} --repeats={args.repeats}; the rows are {', '.join(PARTS)}")
    if args.write:
        write_model(args.write)
    elif args.worker:
        pin(args.threads)
        names = dict.fromkeys(name for part in args.rows.split(",") for name in PARTS[part])
        serve(lambda: prepare(list(names), args.worker, args.microbatch_tokens))
    else:
        measure(args)


if __name__ == "__main__":
    main()
