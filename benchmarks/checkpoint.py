"""How long a checkpoint holds a run up: written before `save` returns, and in the background from a copy in host memory.

    python -m benchmarks.checkpoint [--mb=100] [--policies=2] [--saves=5]

A policy has random float32 parameters and Adam's two moments, `--mb` in all. The two ways save the same arrays in turn, in one process
on one disk. After each save comes the training: updates that donate their buffers, until the checkpoint has its name, at least five.
Prints one JSON line with, for each way, median, smallest and largest of `save_s`, how long `save` blocks, `whole_s`, from its begin until
the checkpoint has its name, and `update_s`, an update after it; the first save of a way, in which orbax starts, is not counted. `update_s`
beside it is an update with nothing else under way. Exit code 1 when the two ways leave different bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time

from benchmarks.resume import arrays, equal


def main() -> None:
    """Both ways, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=100.0, help="of one policy: parameters and both moments")
    parser.add_argument("--policies", type=int, default=2)
    parser.add_argument("--saves", type=int, default=5, help="of each way, after the first")
    options = parser.parse_args()
    import jax
    import numpy as np

    from marl_llm.training import Checkpoints, make_optimizer, make_train_state

    dice, leaves = np.random.default_rng(0), 24
    rows = max(1, int(options.mb * 1e6 / 3 / 4 / leaves) // 512)

    def draw():
        return {str(i): dice.normal(size=(rows, 512)).astype(np.float32) for i in range(leaves)}

    policies = {f"model{i}": make_train_state(draw(), make_optimizer()) for i in range(options.policies)}
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.001, tree), donate_argnums=0)

    def train(until: pathlib.Path) -> float:
        nonlocal policies
        began, count = time.perf_counter(), 0
        while count < 5 or not until.exists():
            policies, count = jax.block_until_ready(update(policies)), count + 1
        return (time.perf_counter() - began) / count

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        train(folder)  # compiles
        alone = train(folder)
        ways = {way: Checkpoints(folder / way / "checkpoints", 1, way == "background") for way in ("at_once", "background")}
        times = {way: {"save_s": [], "whole_s": [], "update_s": []} for way in ways}
        for number in range(options.saves + 1):
            same = jax.tree.map(np.array, jax.device_get(policies))
            for way, checkpoints in ways.items():
                policies = jax.block_until_ready(jax.device_put(same, may_alias=False))
                began = time.perf_counter()
                checkpoints.save(number, policies, {})
                saved = time.perf_counter() - began
                after = train(checkpoints.directory / str(number))
                whole = saved if way == "at_once" else time.perf_counter() - began
                checkpoints.wait()
                for seconds, value in zip(times[way].values(), (saved, whole, after)):
                    seconds.append(value)
        first, second = (arrays(folder / way) for way in ways)

    def spread(seconds):
        return [round(of(seconds[1:]), 4) for of in (statistics.median, min, max)]

    outcome = {way: {name: spread(seconds) for name, seconds in figures.items()} for way, figures in times.items()}
    outcome |= {
        "update_s": round(alone, 4),
        "checkpoint_mb": round(sum(x.nbytes for x in jax.tree.leaves(policies)) / 1e6),
        "saves": options.saves,
        "arrays_compared": len(first),
        "equal": first.keys() == second.keys() and all(equal(first[name], second[name], 0.0) for name in first),
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "jax": jax.__version__,
    }
    print(json.dumps(outcome))
    sys.exit(not outcome["equal"])


if __name__ == "__main__":
    main()
