"""Asynchronous play: what `rollout.max_staleness=1` or `rollout.oversample` saves where tools are slow, and what it costs in learning.

    python -m benchmarks.ahead --seeds=0,1,2 --steps=40 [--tasks=32] [--low=0.5 --high=3] [--config.optimizer.epochs=8]
    python -m benchmarks.ahead --option=oversample --value=8 --seeds=0 [--rare=0.02 --rare_s=12]

Workflow A of UnityMAS-O in the small world of facts, whose search answers after `low` to `high` seconds, or a share `rare` of them after
`rare_s`, drawn from the query. Of each seed one team is taught by imitation; from there one run plays on policy (the option at 0) and one
with the option, with the same recipe and correction. Both run at the same time, each on a core of its own, so that both meet the same other
load; `--in_turn` runs one behind the other.

Prints one JSON line: seconds per step (medians over the steps behind the first five), their ratio, and the most that this ratio could be:
play and update of the first arm, over the longer of both. The success of every training step, its mean over the last ten steps per seed
and with a 95 % interval over the seeds, and F1 on held-out tasks with 95 % intervals, of both; with `oversample` what early and late plays
were like, means over the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from scipy import stats

from benchmarks.processes import finish, launch

GAME = '''
import asyncio
import random

from marl_llm.games import search
from marl_llm.workflows import Environment


def slow(low: float = 0.5, high: float = 3.0, rare: float = 0.0, rare_s: float = 0.0) -> Environment:
    """`fact_parallel` with a search that takes its time, the same for the same query."""
    facts = search.FactBase(64, 0, 1)

    async def retrieve(query: str, environment: str):
        dice = random.Random(query + environment)
        await asyncio.sleep(rare_s if dice.random() < rare else dice.uniform(low, high))
        return await facts.retrieve(query, environment)

    team, script = search.mini_parallel_retrieval(retrieve), search.fact_player(0.1, True)
    return Environment(team, facts.tasks, "f1", search.fact_renderer(), script, close=facts.close)
'''
CONFIG = '''
import pathlib

from experiments.configs.sizes import small_workflow


def get_config(arg=None):
    c = small_workflow("ahead", f"{pathlib.Path(__file__).parent / 'slow_search.py'}:slow", "ppo")
    c.recipe.update(group_size=4, rollout_correction="truncate")
    c.optimizer.epochs = 4
    c.sft.steps = 700
    c.evaluation.update(every=10_000, tasks=40, final_tasks=200, ablate_roles=False)
    c.checkpoint.every = 10_000
    return c
'''
LEARNED = 5  # steps left out of the medians: they compile
LAST = 10  # steps whose success is compared


def lines(workdir: pathlib.Path) -> list[dict]:
    """The training lines of metrics.jsonl."""
    return [line for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if line["phase"] == "train"]


def measured(workdir: pathlib.Path) -> dict:
    """Figures of one run."""
    steps, final = lines(workdir), json.loads((workdir / "evaluation.json").read_text())
    behind = steps[LEARNED:]
    late = {name: [line[name] for line in behind] for name in behind[0] if name.startswith("oversample/")}
    stale = [value for line in behind for name, value in line.items() if name.endswith("/staleness")]
    return {
        "step_s": round(statistics.median(line["time/sample"] + line["time/update"] for line in behind), 3),
        "play_s": round(statistics.median(line["seconds"] for line in behind), 3),
        "update_s": round(statistics.median(line["time/update"] for line in behind), 3),
        "staleness": round(statistics.mean(stale), 3),
        **{name: round(statistics.mean(values), 3) for name, values in late.items() if isinstance(values[0], float | int)},
        "success": [round(line["success"], 3) for line in steps],
        "last": round(statistics.mean(line["success"] for line in steps[-LAST:]), 3),
        "greedy": [round(final["after"]["success"], 3), *(round(x, 3) for x in final["after"]["interval"])],
        "sampled": [round(final["sampled"]["after"]["success"], 3), *(round(x, 3) for x in final["sampled"]["after"]["interval"])],
    }


def interval(values: list[float]) -> list[float] | None:
    """Mean and 95 % t interval over seeds; None of fewer than two."""
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.mean(values)
    return [round(x, 3) for x in (mean, mean - half, mean + half)]


def begun(cores: list[int], *flags: str) -> list[subprocess.Popen]:
    """A run on these cores alone."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return launch(1, *flags)
    finally:
        os.sched_setaffinity(0, mine)


def both_arms(runs: list[dict], option: str, value: int) -> dict:
    """Figures over the seeds."""
    def arm(at, name):
        return [run[name] for run in runs if run[option] == at]

    seconds = {at: statistics.mean(arm(at, "step_s")) for at in (0, value)}
    most = [(run["play_s"] + run["update_s"]) / max(run["play_s"], run["update_s"]) for run in runs if run[option] == 0]
    return {
        "ratio": round(seconds[0] / seconds[value], 3),
        "ratios": [round(a / b, 3) for a, b in zip(arm(0, "step_s"), arm(value, "step_s"))],
        "most": round(statistics.mean(most), 3),
        "last": {at: interval(arm(at, "last")) for at in (0, value)},
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--option", default="max_staleness", choices=["max_staleness", "oversample"])
    parser.add_argument("--value", type=int, default=1, help="of the option, beside 0")
    parser.add_argument("--low", type=float, default=0.5)
    parser.add_argument("--high", type=float, default=3.0)
    parser.add_argument("--rare", type=float, default=0.0, help="share of searches that take --rare_s")
    parser.add_argument("--rare_s", type=float, default=0.0)
    parser.add_argument("--in_turn", action="store_true", help="one arm behind the other, on all cores")
    parser.add_argument("--workdir", default="", help="where the runs stay; empty: a directory that is removed")
    options, given = parser.parse_known_args()
    if unknown := [flag for flag in given if not flag.startswith("--config.")]:
        parser.error(f"{unknown[0]} is unknown; flags of the runs begin with --config.")
    runs, began, cores = [], time.time(), sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(options.workdir or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "slow_search.py").write_text(GAME)
        (folder / "config.py").write_text(CONFIG)
        flags = [f"--config={folder / 'config.py'}", f"--compilation_cache={folder / 'cache'}", f"--config.rollout.tasks={options.tasks}"]
        flags += given

        def tool(**keys):
            return [f"--config.game.{name}={value}" for name, value in keys.items()]

        slow = tool(low=options.low, high=options.high, rare=options.rare, rare_s=options.rare_s)
        for seed in map(int, options.seeds.split(",")):
            taught = folder / f"taught_{seed}"
            finish(launch(1, *flags, *tool(low=0.0, high=0.0), f"--config.seed={seed}", "--config.steps=0", f"--workdir={taught}"), 3600)
            start = [*flags, *slow, f"--config.seed={seed}", f"--config.steps={options.steps}"]
            start += [f"--config.sft.run={taught}", "--config.sft.steps=0"]
            place = lambda value: folder / f"{options.option}_{value}_{seed}"  # noqa: B023, E731
            ask = lambda value: [*start, f"--config.rollout.{options.option}={value}", f"--workdir={place(value)}"]  # noqa: B023, E731
            if options.in_turn or len(cores) < 2:
                for value in (0, options.value):
                    finish(launch(1, *ask(value)), 3600)
            else:
                finish([*begun(cores[:1], *ask(0)), *begun(cores[1:2], *ask(options.value))], 3600)
            for value in (0, options.value):
                runs.append({"seed": seed, options.option: value, **measured(place(value))})
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    page = {**both_arms(runs, options.option, options.value), **vars(options), "given": given, "runs": runs}
    print(json.dumps(page | {"spent_s": round(time.time() - began), "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})"}))


if __name__ == "__main__":
    main()
