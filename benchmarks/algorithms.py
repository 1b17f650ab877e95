"""Time of the algorithm core against NumPy, at 10^4, 10^5 and 10^6 samples, and its growth from size to size.

    python -m benchmarks.algorithms

Pipelines, each jit-compiled here and written in NumPy, on the same data in the same run:

    advantages   AT-GRPO from identities and rewards to advantages: keys, dense ids, α mix, group mean and standard deviation
    to_go        MAGRPO: joint reward-to-go over turns, then the group's advantage
    loss         clipped ratio with dual clip on [S, 16] tokens, reduced to the token mean, summed over blocks of rows
    loss whole   the same without blocks: the loss per token is written to memory and read back

NumPy baselines: "numpy" is what one writes: np.unique over the rows of the keys, np.bincount for the sums, whole arrays for the
loss. Beside it the fastest that NumPy was made to be: "numpy packed" packs the key into one integer by hand, knowing its ranges;
"numpy blocks" takes the loss in blocks of rows, in place. The goal (5 times NumPy at 10^6, growth at most 1.2 times linear) is
judged against the first.

Results go to stdout as one JSON line per pipeline and size. Times are medians of interleaved repetitions, in milliseconds, on
however many cores the process may use (NumPy uses one; run under `taskset -c 0` for one against one). Page faults per call are
those of the JAX side. By default glibc gives temporaries above 32 MiB back to the kernel and gets fresh pages for every call, which
costs more than the arithmetic (growth 1.35 for to_go, 1.26 for loss); this command starts itself again with an allocator that
keeps them (MALLOC_* below), for NumPy too. `--allocator=default` shows the other.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import marl_llm.algorithms as rl

KEEP = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
BRANCHES, AGENTS, TURNS, TOKENS = 4, 2, 5, 16


def make_table(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a shuffled tree-sampling table: envs x turns x agents x branches; `size` must be a multiple of 40."""
    rng = np.random.default_rng(seed)
    row = rng.permutation(size)
    row, branch = np.divmod(row, BRANCHES)
    row, agent = np.divmod(row, AGENTS)
    env, turn = np.divmod(row, TURNS)
    table = dict(env=env, agent=agent, turn=turn, trajectory=env * BRANCHES + branch)
    table = {name: value.astype(np.int32) for name, value in table.items()}
    return table | {name: rng.integers(0, 9, size).astype(np.float32) / 8 for name in ("team", "local")}


def ids_of_rows(*columns):
    """Dense ids as one writes them: unique rows."""
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def ids_packed(*columns):
    """Dense ids of keys packed by hand into one integer."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        code = code * (int(column.max()) + 1) + column
    return np.unique(code, return_inverse=True)[1]


def numpy_group_relative(returns, ids):
    """Group mean and standard deviation (ddof 1) by bincount; equal returns give 0."""
    size = np.bincount(ids)
    centred = returns - (np.bincount(ids, returns) / size)[ids]
    std = np.sqrt(np.bincount(ids, centred**2) / np.maximum(size - 1, 1))
    return np.where(std[ids] > 1e-12, centred / (std[ids] + 1e-6), 0)


def numpy_advantages(t, number):
    return numpy_group_relative(1.0 * t["team"] + t["local"], number(t["env"], t["agent"], t["turn"]))


def numpy_to_go(t, number):
    slots = number(t["trajectory"], t["turn"])
    joint = np.bincount(slots, t["team"]) / np.bincount(slots)
    # Every trajectory has all its turns here, so the sum over later turns is one over columns.
    to_go = np.cumsum(joint.reshape(-1, TURNS)[:, ::-1], axis=1)[:, ::-1].reshape(-1)[slots]
    return numpy_group_relative(to_go, number(t["env"], t["turn"]))


def numpy_loss(new, old, advantages, where):
    ratio = np.exp(np.clip(new - old, -20, 20))
    a = advantages[:, None]
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2))
    loss = np.where(a < 0, np.minimum(loss, -3.0 * a), loss)
    return np.sum(loss, where=where) / np.sum(where)


def numpy_loss_in_blocks(new, old, advantages, where, rows=2048):
    """The same, block by block and in place, so that its intermediates stay in the cache too."""
    total, count = 0.0, 0
    for start in range(0, len(advantages), rows):
        block = slice(start, start + rows)
        a, inside = advantages[block, None], where[block]
        ratio = new[block] - old[block]
        np.clip(ratio, -20, 20, out=ratio)
        np.exp(ratio, out=ratio)
        clipped = np.clip(ratio, 0.8, 1.2)
        clipped *= -a
        ratio *= -a
        np.maximum(ratio, clipped, out=ratio)
        np.minimum(ratio, np.where(a < 0, -3.0 * a, np.inf), out=ratio)
        total += float(np.sum(ratio, where=inside))
        count += np.count_nonzero(inside)
    return total / count


@jax.jit
def jax_advantages(t):
    ids = rl.group_ids(rl.group_keys(env=t["env"], agent=t["agent"], turn=t["turn"]))
    return rl.group_relative(rl.mix_rewards(t["team"], t["local"], alpha=1.0), ids)


@jax.jit
def jax_to_go(t):
    to_go = rl.rewards_to_go(t["team"], t["turn"], t["trajectory"], scope="joint")
    return rl.group_relative(to_go, rl.group_ids(rl.group_keys(env=t["env"], turn=t["turn"])))


@jax.jit
def jax_loss_whole(new, old, advantages, where):
    return rl.reduce(rl.clipped_ratio(new, old, advantages, dual_clip=3.0, where=where), where=where)


@jax.jit
def jax_loss(*table):
    def parts(new, old, a, where):
        return rl.reduce_parts(rl.clipped_ratio(new, old, a, dual_clip=3.0, where=where), where=where)

    total, count = rl.sum_blocks(parts, *table)
    return total / count


def medians(rivals: dict, runs: int) -> tuple[dict[str, float], int]:
    """Median wall time in ms of each of {name: (function, args)}, in turns; and page faults of one call of "jax"."""
    times, faults = {name: [] for name in rivals}, []
    for _ in range(runs + 1):
        for name, (function, args) in rivals.items():
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            jax.block_until_ready(function(*args))
            times[name].append(time.perf_counter() - start)
            if name == "jax":
                faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    # The first turn compiles and warms up.
    return {name: 1e3 * statistics.median(seconds[1:]) for name, seconds in times.items()}, int(statistics.median(faults[1:]))


def measure(size: int, runs: int) -> dict[str, tuple[dict[str, float], int]]:
    """Check that all sides agree at `size`, then time them: {pipeline: ({who: ms}, page faults)}."""
    table = make_table(size)
    on_device = {name: jnp.asarray(value) for name, value in table.items()}
    rng = np.random.default_rng(1)
    old = -rng.exponential(size=(size, TOKENS)).astype(np.float32)
    new = old + rng.normal(size=old.shape).astype(np.float32) / 4
    where = np.arange(TOKENS) < rng.integers(1, TOKENS + 1, size)[:, None]
    batch = (new, old, rng.normal(size=size).astype(np.float32), where)
    on_device_batch = tuple(map(jnp.asarray, batch))

    np.testing.assert_allclose(jax_advantages(on_device), numpy_advantages(table, ids_packed), atol=2e-3)
    np.testing.assert_allclose(jax_to_go(on_device), numpy_to_go(table, ids_packed), atol=2e-3)
    for loss in (jax_loss(*on_device_batch), jax_loss_whole(*on_device_batch), numpy_loss_in_blocks(*batch)):
        np.testing.assert_allclose(loss, numpy_loss(*batch), rtol=1e-3)
    rivals = {
        "advantages": {
            "jax": (jax_advantages, (on_device,)),
            "numpy": (numpy_advantages, (table, ids_of_rows)),
            "numpy packed": (numpy_advantages, (table, ids_packed)),
        },
        "to_go": {
            "jax": (jax_to_go, (on_device,)),
            "numpy": (numpy_to_go, (table, ids_of_rows)),
            "numpy packed": (numpy_to_go, (table, ids_packed)),
        },
    }
    numpy_losses = {"numpy": (numpy_loss, batch), "numpy blocks": (numpy_loss_in_blocks, batch)}
    rivals["loss"] = {"jax": (jax_loss, on_device_batch)} | numpy_losses
    rivals["loss whole"] = {"jax": (jax_loss_whole, on_device_batch)} | numpy_losses
    return {name: medians(them, runs) for name, them in rivals.items()}


def main():
    """Print one JSON line per pipeline and size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--allocator", choices=("keep", "default"), default="keep")
    args = parser.parse_args()
    if args.allocator == "keep" and any(os.environ.get(name) != value for name, value in KEEP.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.algorithms", *sys.argv[1:]], os.environ | KEEP)
    before = {}
    print(json.dumps(dict(jax=jax.__version__, numpy=np.__version__, device=jax.devices()[0].device_kind,
                          cores=len(os.sched_getaffinity(0)), load=os.getloadavg()[0], machine=platform.machine())))  # fmt: skip
    for size in args.sizes:
        for name, (times, faults) in measure(size, args.runs if size >= 10**6 else 3 * args.runs).items():
            row = dict(pipeline=name, samples=size) | {f"{who} [ms]": round(ms, 3) for who, ms in times.items()}
            row |= {f"speed-up over {who}": round(ms / times["jax"], 2) for who, ms in times.items() if who != "jax"}
            if name in before:
                previous_size, previous = before[name]
                row["growth over linear"] = round(times["jax"] / previous / (size / previous_size), 2)
            before[name] = (size, times["jax"])
            print(json.dumps(row | {"page faults": faults}), flush=True)


if __name__ == "__main__":
    main()
