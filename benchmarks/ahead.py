"""Asynchronous play: what `rollout.ahead=1` or `rollout.over_start` saves where tools are slow, and what it costs in learning.

    python -m benchmarks.ahead --seeds=0,1,2 --steps=40 [--tasks=32] [--low=0.5 --high=3]
    python -m benchmarks.ahead --option=over_start --value=8 --seeds=0

Workflow A of UnityMAS-O in the small world of facts, whose search answers after `low` to `high` seconds, drawn from the query. Of each seed
one team is taught by imitation; from there one run plays on policy (the option at 0) and one with the option, with the same recipe and
correction. Prints one JSON line: seconds per step (medians over the steps behind the first five), their ratio, the success of every
training step, and F1 on held-out tasks with 95 % intervals, of both; with `over_start` what early and late plays were like, means over the
steps.
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

from benchmarks.processes import finish, launch

GAME = '''
import asyncio
import random

from marl_llm.games import search
from marl_llm.workflows import World


def slow(low: float = 0.5, high: float = 3.0) -> World:
    """`fact_parallel` with a search that takes its time, the same for the same query."""
    facts = search.FactBase(64, 0, 1)

    async def retrieve(query: str, world: str):
        await asyncio.sleep(random.Random(query + world).uniform(low, high))
        return await facts.retrieve(query, world)

    team, script = search.mini_parallel_retrieval(retrieve), search.fact_player(0.1, True)
    return World(team, facts.tasks, "f1", search.fact_speech(), script, close=facts.close)
'''
CONFIG = '''
import pathlib

from experiments.configs.sizes import small_workflow


def get_config(arg=None):
    c = small_workflow("ahead", f"{pathlib.Path(__file__).parent / 'slow_search.py'}:slow", "ppo")
    c.recipe.update(branches=4, correction="truncate")
    c.optimizer.epochs = 4
    c.warm_start.steps = 700
    c.evaluation.update(every=10_000, tasks=40, final_tasks=200, ablate_roles=False)
    c.checkpoint.every = 10_000
    return c
'''
LEARNED = 5  # steps left out of the medians: they compile


def lines(workdir: pathlib.Path) -> list[dict]:
    """The training lines of metrics.jsonl."""
    return [line for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()) if line["phase"] == "train"]


def measured(workdir: pathlib.Path) -> dict:
    """Figures of one run."""
    steps, final = lines(workdir), json.loads((workdir / "evaluation.json").read_text())
    behind = steps[LEARNED:]
    late = {name: [line[name] for line in behind] for name in behind[0] if name.startswith("over_start/")}
    stale = [value for line in behind for name, value in line.items() if name.endswith("/staleness")]
    return {
        "step_s": round(statistics.median(line["time/sample"] + line["time/update"] for line in behind), 3),
        "play_s": round(statistics.median(line["seconds"] for line in behind), 3),
        "update_s": round(statistics.median(line["time/update"] for line in behind), 3),
        "staleness": round(statistics.mean(stale), 3),
        **{name: round(statistics.mean(values), 3) for name, values in late.items() if isinstance(values[0], float | int)},
        "success": [round(line["success"], 3) for line in steps],
        "greedy": [round(final["after"]["success"], 3), *(round(x, 3) for x in final["after"]["interval"])],
        "sampled": [round(final["sampled"]["after"]["success"], 3), *(round(x, 3) for x in final["sampled"]["after"]["interval"])],
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--option", default="ahead", choices=["ahead", "over_start"])
    parser.add_argument("--value", type=int, default=1, help="of the option, beside 0")
    parser.add_argument("--low", type=float, default=0.5)
    parser.add_argument("--high", type=float, default=3.0)
    parser.add_argument("--workdir", default="", help="where the runs stay; empty: a directory that is removed")
    options = parser.parse_args()
    found, began = [], time.time()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(options.workdir or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "slow_search.py").write_text(GAME)
        (folder / "config.py").write_text(CONFIG)
        flags = [f"--config={folder / 'config.py'}", f"--compilation_cache={folder / 'cache'}", f"--config.rollout.tasks={options.tasks}"]
        tool = lambda low, high: [f"--config.game.low={low}", f"--config.game.high={high}"]  # noqa: E731
        for seed in map(int, options.seeds.split(",")):
            taught = folder / f"taught_{seed}"
            finish(launch(1, *flags, *tool(0, 0), f"--config.seed={seed}", "--config.steps=0", f"--workdir={taught}"), 3600)
            start = [*flags, *tool(options.low, options.high), f"--config.seed={seed}", f"--config.steps={options.steps}"]
            start += [f"--config.warm_start.run={taught}", "--config.warm_start.steps=0"]
            for value in (0, options.value):
                place = folder / f"{options.option}_{value}_{seed}"
                finish(launch(1, *start, f"--config.rollout.{options.option}={value}", f"--workdir={place}"), 3600)
                found.append({"seed": seed, options.option: value, **measured(place)})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    seconds = lambda value: statistics.mean(one["step_s"] for one in found if one[options.option] == value)  # noqa: E731
    page = {"ratio": round(seconds(0) / seconds(options.value), 3), "tasks": options.tasks, "runs": found}
    print(json.dumps(page | {"seconds": round(time.time() - began), "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})"}))


if __name__ == "__main__":
    main()
