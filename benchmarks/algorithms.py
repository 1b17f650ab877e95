"""Time of the algorithm core against NumPy, at 10^4, 10^5 and 10^6 samples, and its growth from size to size.

    python -m benchmarks.algorithms

Three pipelines, each jit-compiled here and written twice over in NumPy, on the same data in the same run:

    advantages   AT-GRPO from identities and rewards to advantages: keys, dense ids, α mix, group mean and standard deviation
    to_go        MAGRPO: joint reward-to-go over turns, then the group's advantage
    loss         clipped ratio with dual clip on [S, 16] tokens, reduced to the token mean

Two NumPy baselines. "numpy" is what one writes: np.unique over the rows of the keys, np.bincount for the sums. "numpy packed"
first packs the key into one integer by hand, knowing its ranges, which is the fastest that np.unique can be. The goal (5 times
NumPy at 10^6, growth at most 1.2 times linear) is judged against the first, and the second is printed beside it.

Results go to stdout as one JSON line per measurement. Times are the least of several runs, in milliseconds, on however many cores
the process may use (NumPy uses one; run under `taskset -c 0` for one against one).
"""

import argparse
import json
import os
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

import marl_llm.algorithms as rl

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


@jax.jit
def jax_advantages(t):
    ids = rl.group_ids(rl.group_keys(env=t["env"], agent=t["agent"], turn=t["turn"]))
    return rl.group_relative(rl.mix_rewards(t["team"], t["local"], 1.0), ids)


@jax.jit
def jax_to_go(t):
    to_go = rl.rewards_to_go(t["team"], t["turn"], t["trajectory"], scope="joint")
    return rl.group_relative(to_go, rl.group_ids(rl.group_keys(env=t["env"], turn=t["turn"])))


@jax.jit
def jax_loss(new, old, advantages, where):
    return rl.reduce(rl.clipped_ratio(new, old, advantages, dual_clip=3.0, where=where), where)


def least(function, *args, runs: int) -> float:
    """Least wall time of `function(*args)` in ms, after one call to warm up."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure(size: int, runs: int) -> dict[str, dict[str, float]]:
    """Check that both sides agree at `size`, then time them: {pipeline: {"jax": ms, "numpy": ms, "numpy packed": ms}}."""
    table = make_table(size)
    on_device = {name: jnp.asarray(value) for name, value in table.items()}
    rng = np.random.default_rng(1)
    old = -rng.exponential(size=(size, TOKENS)).astype(np.float32)
    new = old + rng.normal(size=old.shape).astype(np.float32) / 4
    where = np.arange(TOKENS) < rng.integers(1, TOKENS + 1, size)[:, None]
    batch = (new, old, rng.normal(size=size).astype(np.float32), where)
    batch_on_device = tuple(map(jnp.asarray, batch))
    few = max(2, runs // 4)

    np.testing.assert_allclose(jax_advantages(on_device), numpy_advantages(table, ids_packed), atol=2e-3)
    np.testing.assert_allclose(jax_to_go(on_device), numpy_to_go(table, ids_packed), atol=2e-3)
    np.testing.assert_allclose(jax_loss(*batch_on_device), numpy_loss(*batch), rtol=1e-3)
    return {
        "advantages": {
            "jax": least(jax_advantages, on_device, runs=runs),
            "numpy": least(numpy_advantages, table, ids_of_rows, runs=few),
            "numpy packed": least(numpy_advantages, table, ids_packed, runs=few),
        },
        "to_go": {
            "jax": least(jax_to_go, on_device, runs=runs),
            "numpy": least(numpy_to_go, table, ids_of_rows, runs=few),
            "numpy packed": least(numpy_to_go, table, ids_packed, runs=few),
        },
        "loss": {
            "jax": least(jax_loss, *batch_on_device, runs=runs),
            "numpy": least(numpy_loss, *batch, runs=few),
        },
    }


def main():
    """Print one JSON line per pipeline and size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--runs", type=int, default=12)
    args = parser.parse_args()
    before = {}
    print(json.dumps(dict(jax=jax.__version__, numpy=np.__version__, device=jax.devices()[0].device_kind,
                          cores=len(os.sched_getaffinity(0)), load=os.getloadavg()[0], machine=platform.machine())))  # fmt: skip
    for size in args.sizes:
        for name, times in measure(size, args.runs).items():
            row = dict(pipeline=name, samples=size) | {f"{who} [ms]": round(ms, 3) for who, ms in times.items()}
            row |= {f"speed-up over {who}": round(ms / times["jax"], 2) for who, ms in times.items() if who != "jax"}
            if name in before:
                previous_size, previous = before[name]
                row["growth over linear"] = round(times["jax"] / previous / (size / previous_size), 2)
            before[name] = (size, times["jax"])
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
