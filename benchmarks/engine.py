"""The engine with pages beside an older engine: what the cache holds, how fast it is, what sharing saves.

    python -m benchmarks.engine --against=PATH [--repeats=3] [--requests=128] [--rows=uneven,tree,turns,gap,pauses,draw]

PATH is a work tree of another commit (`git worktree add PATH COMMIT`); its engine runs in a process of its own, repetitions interleave.
Seconds are CPU seconds of a process that is bound to one core. The model is that of `benchmarks.sampling`. One JSON line per row:

    uneven   requests of 64 prompt tokens and geometric lengths (mean 64, at most 256): at 32 slots each, and at as many bytes as the
             older engine takes for 32 slots. `over_live`: bytes of held pages over those of the tokens in them, at the fullest moment
    tree     8 prompts of 512 tokens x 8 branches, 64 new tokens: against the plain sampler, which shares prompts by construction
    turns    a conversation of eight turns: tokens computed over tokens there are
    gap      32 requests decode while a prompt of 4,096 tokens enters: longest gap between two chunks over the median without one
    pauses   2,000 requests to a small model with room for all and with a tenth of it: same ids
    draw     one draw of 1, 8 and 64 rows from the 151,936 logits of Qwen3's vocabulary, which lie as a decode step leaves them
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time

from benchmarks.peers.lines import Worker, pin, serve

PROMPT, MOST, MEAN, SLOTS = 64, 256, 64, 32
TREE = (8, 8, 512, 64)
DRAWS, QWEN3_VOCABULARY = (1, 8, 64), 151_936
PARTS = ("uneven", "tree", "turns", "gap", "pauses", "draw")
BESIDE = ("uneven", "gap", "draw")  # an older engine's too
ONCE = ("turns", "pauses", "gap")  # one repetition is enough


def small_model():
    """A model whose programs cost next to nothing."""
    from marl_llm.models import ModelConfig

    return ModelConfig(64, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=4, feed_forward=24)


def prepare(row: str, who: str, count: int) -> dict:
    """A worker's tasks for a row. `who`: "old", where `marl_llm` is the other tree's; "new", or "bytes" for `uneven` in as many bytes."""
    import pathlib

    import jax
    import numpy as np

    from benchmarks.update import VOCABULARY, bench_config
    from marl_llm.models import init_params
    from marl_llm.sampling import Engine, EngineConfig, Request

    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/marl_llm/xla").expanduser()))
    config = bench_config()
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(0))
    rng = np.random.default_rng(0)

    def engine(slots, prompt, response, **more):
        model = more.pop("model", (config, params))
        return Engine({"policy": model}, jax.random.key(0), sizes=EngineConfig(slots, prompt, response, 8, 4, **more))

    def timed(e, requests):
        def task():
            while True:  # what is in a program depends on when requests arrive: again where one was compiled meanwhile
                before, tick = compiled(e), time.process_time()
                done = e.generate_all(requests)
                seconds = time.process_time() - tick
                if compiled(e) == before:
                    return {"seconds": seconds, "tokens": sum(len(c.tokens) for c in done)} | stats(e)

        task()
        return task

    def stats(e):
        prepared = e.stats()["policy"]
        return {name: prepared[name] for name in ("cache_bytes", "most_pages", "tokens_then", "computed_tokens") if name in prepared}

    def ids(n):
        return tuple(int(t) for t in rng.integers(3, VOCABULARY, n))

    if row == "uneven":
        lengths = np.minimum(rng.geometric(1 / MEAN, count), MOST)
        requests = [Request(ids(PROMPT), (i,), int(n)) for i, n in enumerate(lengths)]
        if who == "bytes":
            room = SLOTS * (PROMPT + MOST) * 2 * config.layers * config.key_value_heads * config.head_dim * 4
            return {"uneven bytes": timed(engine(2 * SLOTS, PROMPT, MOST, cache_bytes=room), requests)}
        return {"uneven": timed(engine(SLOTS, PROMPT, MOST), requests)}
    if row == "gap":
        return {"gap": lambda: gap(engine(SLOTS, 4096, 256), ids)}
    if row == "tree":
        return tree(engine, timed, ids, config, params)
    if row == "draw":
        return draws()
    if row == "turns":
        return {"turns": lambda: turns(engine(1, 1024, 32, reuse=1), ids)}
    return {"pauses": lambda: pauses(engine, rng)}


def compiled(e) -> int:
    """How many programs an engine has compiled."""
    return e.stats()["policy"].get("compilations", 0)


def tree(engine, timed, ids, config, params) -> dict:
    """The tree through the engine and through the plain sampler."""
    import functools

    import jax
    import jax.numpy as jnp

    from marl_llm.models import serving_layout
    from marl_llm.sampling import Request, sample

    prompts, branches, length, new = TREE
    texts = [ids(length) for _ in range(prompts)]
    e = engine(prompts * branches, length, new)
    number = iter(range(1_000_000))

    def fresh():  # other prompts each time, or the second run would find the first one's pages
        some = [ids(length) for _ in range(prompts)]
        before = compiled(e)
        run = timed_once(e, [Request(p, (next(number),), new) for p in some for _ in range(branches)])
        return run if compiled(e) == before else fresh()

    def timed_once(e, requests):
        tick = time.process_time()
        done = e.generate_all(requests)
        counts = e.stats()["policy"]
        bytes_each = counts["cache_bytes"] / e._schedulers["policy"].pools[0].pages
        return {
            "seconds": time.process_time() - tick, "tokens": sum(len(c.tokens) for c in done),
            "bytes": counts["most_pages"] * bytes_each,
        }  # fmt: skip

    run = jax.jit(functools.partial(sample, config, max_tokens=new, stop=(), pad_id=0))
    served, keys = jax.jit(serving_layout)(params), jax.random.split(jax.random.key(0), (prompts, branches))

    def plain():
        tick = time.process_time()
        jax.block_until_ready(run(served, jnp.asarray(texts, jnp.int32), jnp.ones((prompts, length), bool), keys))
        return {"seconds": time.process_time() - tick}

    fresh(), plain()
    return {"tree": fresh, "tree plain": plain}


def draws() -> dict:
    """Draws from a large vocabulary, medians of ten."""
    import jax

    from marl_llm.sampling import SamplingParams, sample_token
    from marl_llm.sampling.token_sampling import rows_of

    def of(rows):
        logits = jax.random.normal(jax.random.key(0), (QWEN3_VOCABULARY, rows))
        keys, settings = jax.random.split(jax.random.key(1), rows), rows_of(SamplingParams(), (rows,))
        run = jax.jit(lambda logits, keys, settings: sample_token(logits.T, keys, settings, False))

        def once():
            tick = time.process_time()
            jax.block_until_ready(run(logits, keys, settings))
            return time.process_time() - tick

        once()
        return lambda: {"seconds": statistics.median(once() for _ in range(10))}

    return {f"draw {rows}": of(rows) for rows in DRAWS}


def turns(e, ids) -> dict:
    """Eight turns of one conversation."""
    from marl_llm.sampling import Request

    history = ids(100)
    with e:
        for turn in range(8):
            answer = e.generate_all([Request(history, (turn,), 32)])[0]
            history += (*(int(t) for t in answer.tokens), *ids(20))
        return {"computed": int(e.stats()["policy"]["computed_tokens"]), "tokens": len(history) - 20 - 1}


def gap(e, ids) -> dict:
    """CPU seconds between two chunks of those that decode, while a long prompt enters, and the median of those without a
    prompt in between; of a run that compiled nothing."""
    from marl_llm.sampling import Request

    with e:
        scheduler = e._schedulers["policy"]
        before = -1
        while compiled(e) != before:
            ends, step, before = [], scheduler.step, compiled(e)

            def watched(now, step=step, ends=ends):
                step(now)
                admitted = e.stats()["policy"].get("admit_s", 0.0)  # none while all that ran compiled
                ends.append((time.process_time(), admitted, len(scheduler.running)))

            scheduler.step = watched
            handles = [e.submit(Request(ids(PROMPT), (i,), 200)) for i in range(SLOTS - 1)]
            while scheduler.stats["steps"] < 80 and e._failure is None:
                time.sleep(0.01)
            at = len(ends)
            handles.append(e.submit(Request(ids(4096), (99,), 8)))
            for handle in handles:
                handle.result()
            scheduler.step, scheduler.stats["steps"] = step, 0
    # once nobody decodes, nobody waits, and the rest of the prompt is computed in one go
    gaps = [(b - a, entered == before, waiting) for (a, before, waiting), (b, entered, _) in zip(ends[1:], ends[2:], strict=False)]
    median = statistics.median(seconds for seconds, alone, _ in gaps if alone)
    longest = max(seconds for seconds, _, waiting in gaps[at - 2 :] if waiting)
    return {"longest": longest, "median": median, "ratio": round(longest / median, 2)}


def pauses(engine, rng) -> dict:
    """Two thousand requests with much and with little room."""
    import jax
    import numpy as np

    from marl_llm.models import init_params
    from marl_llm.sampling import Request

    config = small_model()
    model = config, jax.jit(lambda key: jax.tree.map(lambda x: 2 * x, init_params(config, key)))(jax.random.key(0))
    requests = [
        Request(tuple(int(t) for t in rng.integers(1, 64, rng.integers(1, 65))), (i,), int(rng.integers(1, 65)), stop_ids=(1,))
        for i in range(2000)
    ]
    with engine(32, 64, 64, model=model) as large:
        want, whole = large.generate_all(requests), large.stats()["policy"]["cache_bytes"]
    with engine(32, 64, 64, model=model, cache_bytes=whole // 10) as small:
        got, paused = small.generate_all(requests), small.stats()["policy"].get("paused", 0)
        owned = small._schedulers["policy"].pools[0].owned
    differ = sum(not np.array_equal(a.tokens, b.tokens) for a, b in zip(got, want, strict=True))
    largest = max(float(np.abs(a.log_probs - b.log_probs).max()) for a, b in zip(got, want, strict=True) if len(a.tokens) == len(b.tokens))
    return {"requests": len(requests), "paused": int(paused), "differ": differ, "log_prob_gap": largest, "pages_left": owned}


def run_row(row: str, args, folder: str) -> dict[tuple[str, str], list[dict]]:
    """(who, task) -> what each repetition found. Each worker holds the engine of one task: what else lies in a process slows it down."""
    me = [sys.executable, __file__, f"--rows={row}", f"--requests={args.requests}"]
    trees = {"new": "."} | ({"bytes": "."} if row == "uneven" else {}) | ({"old": args.against} if args.against and row in BESIDE else {})

    def start(who, tree):
        return Worker([*me, f"--worker={who}"], f"{folder}/{row}_{who}", PYTHONPATH=tree, JAX_PLATFORMS="cpu")

    workers = {who: start(who, tree) for who, tree in trees.items()}
    runs: dict[tuple[str, str], list[dict]] = {}
    for repeat in range(args.repeats):
        for task in sorted({t for w in workers.values() for t in w.tasks}):
            for who, worker in workers.items():
                if task in worker.tasks and not (repeat and task in ONCE):
                    runs.setdefault((who, task), []).append(worker.run(task))
    for worker in workers.values():
        worker.close()
    return runs


def measure(args) -> None:
    """Row by row: starts the workers, interleaves the repetitions, prints the lines."""
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in args.rows.split(","):
            runs |= run_row(row, args, folder)

    def seconds(*key):
        return [x["seconds"] for x in runs[key]]

    def ratio(old, new) -> dict:
        each = [a / b for a, b in zip(seconds(*old), seconds(*new), strict=True)]
        return {
            "old_s": round(statistics.median(seconds(*old)), 4), "new_s": round(statistics.median(seconds(*new)), 4),
            "ratio": round(statistics.median(each), 3), "spread": [round(min(each), 3), round(max(each), 3)],
        }  # fmt: skip

    def line(row: str, **values) -> None:
        print(json.dumps({"benchmark": "engine", "row": row, "repeats": args.repeats} | values), flush=True)

    for who, task in (("new", "uneven"), ("bytes", "uneven bytes")):
        if (who, task) in runs:
            last = runs[who, task][-1]
            page = last["cache_bytes"] and 16
            more = {"over_live": round(last["most_pages"] * page / last["tokens_then"], 3), "live": last["tokens_then"]}
            if ("old", "uneven") in runs:
                old = runs["old", "uneven"][-1]["cache_bytes"]
                more |= ratio(("old", "uneven"), (who, task)) | {"old_bytes": old, "new_bytes": last["cache_bytes"]}
            line(task, **more)
    if ("new", "tree") in runs:
        prompts, branches, length, new = TREE
        one_copy = (prompts * length + prompts * branches * new) * 2 * 8 * 4 * 64 * 4
        line("tree", **ratio(("new", "tree plain"), ("new", "tree")), over_one_copy=round(runs["new", "tree"][-1]["bytes"] / one_copy, 3))
    for task in (f"draw {rows}" for rows in DRAWS):
        if ("old", task) in runs:
            line(task, **ratio(("old", task), ("new", task)))
        elif ("new", task) in runs:
            line(task, new_s=round(statistics.median(seconds("new", task)), 4))
    for task in ONCE:
        for who in ("new", "old"):
            for figures in runs.get((who, task), []):
                line(f"{task}, {who}", **figures)


def main() -> None:
    """The command, and the worker that it starts itself as."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="", help="work tree of an older commit")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions")
    parser.add_argument("--requests", type=int, default=128, help="of the row uneven")
    parser.add_argument("--rows", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if set(args.rows.split(",")) - set(PARTS) or args.repeats < 1:
        parser.error(f"--rows={args.rows} --repeats={args.repeats}; the rows are {', '.join(PARTS)}")
    if args.worker:
        pin(1)
        serve(lambda: prepare(args.rows, args.worker, args.requests))
    else:
        measure(args)


if __name__ == "__main__":
    main()
