"""Plays the tasks of a config before training: which of them would give a gradient, and which are too easy or too hard.

    python -m marl_llm profile experiments/configs/notes.py --tasks 200 --plays 8
    python -m marl_llm profile experiments/configs/smol_writing.py --path models/smollm2      with a checkpoint
    python -m marl_llm profile experiments/configs/notes.py --run runs/first --step 100      with the models of a checkpoint
    python -m marl_llm profile experiments/configs/notes.py --output tasks.json              and train on those that teach:
    python -m experiments.train --config=experiments/configs/notes.py --workdir=runs/kept --config.rollout.task_list=tasks.json

The team plays as it would in the first step of reinforcement, after SFT, as the recipe samples. A task teaches if
one of its groups has unequal returns. Of a workflow, `--output` lists the numbers of those that do. With a critic every task teaches
something, and the list holds those whose returns differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

CHUNK = 32  # tasks that are played at a time


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("marl_llm profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("config", help="a config, FILE.py[:variant] or a name such as quickstart:smoke")
    p.add_argument("--tasks", type=int, default=200, help="training tasks, the first ones (%(default)s)")
    p.add_argument("--plays", type=int, default=8, help="plays, or candidates of a tree, of each (%(default)s)")
    p.add_argument("--path", help="checkpoint of the models that the config leaves open: config.model.path")
    p.add_argument("--run", help="begin with the models of this run, in place of the supervised warm-up")
    p.add_argument("--step", type=int, help="with --run: of this checkpoint (0)")
    p.add_argument("--output", type=pathlib.Path, help="file for the list of tasks that teach, with the figures of each")
    return p


def main(argv: list[str] | None = None) -> int:
    """Prints the table. 2: the config cannot be played."""
    from marl_llm.cli.check import named_config
    from marl_llm.runs.command import check_writable, code_of, given_options, refuse_idle

    asked = parser().parse_args(argv)
    try:
        if not asked.run:
            refuse_idle(given_options(parser(), asked, ("step",)), "it is a checkpoint of --run")
        check_writable("output", asked.output)
        config = named_config(asked.config)
        config.recipe.group_size = asked.plays
        config.model.path = asked.path or config.model.path
        if asked.run:
            config.sft.update(run=asked.run, step=asked.step or 0, steps=0)
        rows = profile(config, asked.tasks)
    except Exception as error:
        return code_of(error)
    print(table(rows))
    if asked.output:
        kept = [row["task"] for row in rows if row["teaches"]]
        record = {"config": asked.config, "plays": asked.plays, "tasks": kept, "profile": rows}
        asked.output.write_text(json.dumps(record, indent=1))
        print(f"{asked.output}: {len(kept)} tasks")
    return 0


def profile(config, tasks: int) -> list[dict[str, Any]]:
    """Per task: `task`, `samples`, `mean` and `spread` (standard deviation) of its samples' rewards, `tied` (share of samples whose group
    has equal returns), and whether it `teaches`. Raises `ConfigError`."""
    from marl_llm.runs.building import build_team, start_jax
    from marl_llm.runs.resolve import resolve

    mesh = start_jax(config, None)
    with resolve(config) as plan, build_team(plan, config, mesh) as team:
        _warm(team, config)
        rows = []
        for first in range(0, tasks, CHUNK):
            rows += _rows(plan.recipe, team.play(0, first, min(CHUNK, tasks - first)))
    return rows


def _warm(team, config) -> None:
    """The config's supervised warm-up, without files."""
    from marl_llm.runs.building import begins_elsewhere, params_of
    from marl_llm.training import linear_decay

    w = config.sft
    if begins_elsewhere(w):
        team.start_from(params_of(w, team.models()))
        return
    for step in range(w.steps):
        team.sft_step(step % (w.fresh or w.steps), w.tasks, float(linear_decay(step, w.steps, w.learning_rate, warmup=20, floor=0.1)))
    team.start_rl()


def _rows(recipe, batch) -> list[dict[str, Any]]:
    import numpy as np

    from marl_llm.training.update import compute_advantages

    table = batch.table
    if recipe.advantage_estimator == "critic":  # every sample has a group of its own
        tied = np.zeros(len(table.team), bool)
    else:
        tied = np.asarray(compute_advantages(dataclasses.replace(recipe, kl_coef=0.0), batch.tokens, table).zero_variance)
    pay = recipe.reward_of(np.asarray(table.team, np.float64), np.asarray(table.local, np.float64))
    rows = []
    for task in np.unique(table.instance).tolist():
        mask = (np.asarray(table.instance) == task) & np.asarray(table.where)
        if not mask.any():
            continue
        spread = float(pay[mask].std())
        teaches = bool((~tied[mask]).any()) if recipe.advantage_estimator != "critic" else spread > 0
        mean = float(pay[mask].mean())
        rows.append(dict(task=task, samples=int(mask.sum()), mean=mean, spread=spread, tied=float(tied[mask].mean()), teaches=teaches))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The counts, and tasks by their mean return."""
    teaching = [row for row in rows if row["teaches"]]
    head = f"{len(rows)} tasks: {len(teaching)} give a gradient, {len(rows) - len(teaching)} do not (all their groups have equal returns)"
    lines = [head, f"{'mean return':<22} {'tasks':>6} {'teach':>6} {'spread':>8}"]
    means = [row["mean"] for row in rows]
    low, high = min(means, default=0.0), max(means, default=0.0)
    width = (high - low) / 5 or 1.0
    for number in range(5):
        a, b = low + number * width, low + (number + 1) * width
        part = [row for row in rows if min(int((row["mean"] - low) / width), 4) == number]
        spread = sum(row["spread"] for row in part) / max(len(part), 1)
        lines.append(f"{a:>+9.3f} to {b:>+9.3f} {len(part):>6} {sum(row['teaches'] for row in part):>6} {spread:>8.3f}")
    silent = [str(row["task"]) for row in rows if not row["teaches"]]
    return "\n".join([*lines, f"no gradient: {', '.join(silent[:40]) or 'none'}{' ...' if len(silent) > 40 else ''}"])
