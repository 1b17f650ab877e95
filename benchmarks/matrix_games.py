"""Ten seeds of the three matrix games of MAGRPO's Appendix A: joint utility, and each agent paid for itself in POSG 1 and POSG 2.

    python -m benchmarks.matrix_games [--seeds=10] [--plays=2000] [--processes=2]

Each seed trains two models from SFT in which both actions are played alike, with the settings of `experiments/configs/matrix.py` (50 steps
of 40 plays), and then plays `--plays` times, sampled. Prints a line per seed and setting, and a table in Markdown beside the equilibria.
All seeds of a setting share their compiled programs; each setting has a process of its own.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import resource
import time

import jax
from absl import app, flags

from experiments.configs.matrix import get_config
from marl_llm.games.matrix import mixed_equilibrium, nash_equilibria
from marl_llm.models import init_params
from marl_llm.runs.building import build_team, start_jax
from marl_llm.runs.resolve import resolve

SEEDS = flags.DEFINE_integer("seeds", 10, "Seeds of each setting.", lower_bound=1)
PLAYS = flags.DEFINE_integer("plays", 2000, "Plays that measure each seed.", lower_bound=1)
PROCESSES = flags.DEFINE_integer("processes", 2, "Settings that are trained at a time.", lower_bound=1)
SETTINGS = {"joint": None, "posg_1": "posg_1", "posg_2": "posg_2"}
APART = 10_000  # steps between two seeds' draws


def measured(team, config, seed: int, plays: int) -> dict:
    """Mean utility and the share of plays in the best cell, after training from a seed's parameters."""
    for learner in team.learners.values():
        learner.start_rl(init_params(learner.config, jax.random.key(seed)))
    start = APART * seed
    for step in range(config.sft.steps):
        team.sft_step(start + step, config.sft.tasks, config.sft.learning_rate)
    team.start_rl()
    for step in range(start, start + config.steps):
        team.learn(team.play(step, first=step, count=config.rollout.tasks), config.optimizer.learning_rate)
    evaluation = team.evaluate({}, "test", 1, plays=plays, temperature=1.0)
    joint = team.game.tables[0]
    shares = [outcome.team["outcome"] for outcome in evaluation.outcomes]
    utility = float(joint.min() + (joint.max() - joint.min()) * sum(shares) / len(shares))
    return {"seed": seed, "utility": utility, "best_cell": evaluation.success}


def setting(name: str, seeds: int, plays: int) -> list[dict]:
    """One line per seed."""
    config = get_config(SETTINGS[name])
    config.quick_compile = True
    mesh = start_jax(config, None)
    with resolve(config) as plan, build_team(plan, config, mesh) as team:
        rows = []
        for seed in range(seeds):
            rows.append({"setting": name, **measured(team, config, seed, plays)})
            print(json.dumps(rows[-1]), flush=True)
        _, first, second = plan.game.tables
        cells = ", ".join(f"({i + 1},{j + 1})" for i, j in nash_equilibria(first, second))
        mixed = mixed_equilibrium(first, second)
    mixture = f"; mixed p={mixed[0]:g} q={mixed[1]:g}, utility {mixed[2]:g}" if mixed else ""
    equilibria = "joint reward" if name == "joint" else cells + mixture
    for row in rows:
        row["equilibria"] = equilibria
    return rows


def main(argv) -> None:
    """Prints the table."""
    began = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(PROCESSES.value, multiprocessing.get_context("spawn")) as pool:
        under_way = {name: pool.submit(setting, name, SEEDS.value, PLAYS.value) for name in SETTINGS}
        tables = {name: future.result() for name, future in under_way.items()}
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n| setting | equilibria | mean utility, lowest to highest seed | seeds >= 9.5 | seeds <= 7.2 | (1,1) in % of plays |")
    print("|---|---|---|---|---|---|")
    for name, rows in tables.items():
        values = sorted(row["utility"] for row in rows)
        best = 100 * sum(row["best_cell"] for row in rows) / len(rows)
        high, low = sum(v >= 9.5 for v in values), sum(v <= 7.2 for v in values)
        mean = sum(values) / len(values)
        print(f"| {name} | {rows[0]['equilibria']} | {mean:.2f}, {values[0]:.2f} to {values[-1]:.2f} | {high}/{len(rows)} | "
              f"{low}/{len(rows)} | {best:.1f} |")  # fmt: skip
    print(f"\n{spent.ru_utime + spent.ru_stime:.0f} CPU s, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    app.run(main)
