"""When does a team beat one agent at equal tokens? Plan-Path: size and view of the map by the tokens that training sampled.

    python -m benchmarks.phase_diagram --out=runs/phase [--sides=4,6] [--views=full,split] [--seeds=4] [--steps=60]

For each side and view of the map a team (Tool and Planner, AT-GRPO) and a single agent (GRPO) begin with equally much imitation; each is
trained as a sweep over seeds (`marl_llm.runs.sweep_run`) and evaluated greedily on the same validation maps. One model plays both roles of
the team, so both have equally many parameters; `--assignment=per_role` gives each role a model. With the view "split" only the Tool sees
walls, and a single agent sees none. At each budget of sampled tokens the two learning curves are read by a straight line between
evaluations. A cell is the mean over seeds of the team's success minus the single agent's, with a 95 % Student interval over seeds; one is
better where the whole interval says so. Tokens of the imitation are not counted. Writes OUT/table.csv and the picture; the same command
goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from marl_llm.cli.collect import curve
from marl_llm.evaluation import over_seeds
from marl_llm.reporting import read_metrics
from marl_llm.runs.base import base_config
from marl_llm.runs.figures import panels
from marl_llm.runs.sweep_configs import changed_config, sweep_configs
from marl_llm.runs.sweep_run import train_sweep
from marl_llm.runs.variants import GRPO, SINGLE, same_samples

PLAYERS = {"team": {}, "single": SINGLE | GRPO}
COLUMNS = ("view", "side", "tokens", "seeds", "team", "single", "difference", "low", "high", "better")


def config_of(player: str, view: str, side: int, steps: int, assignment: str) -> Any:
    """The config of a team or of a single agent on maps of one side and view."""
    c = base_config(f"{player}_{view}_{side}", game="plan_path", recipe="at_grpo")
    c.game.update(view=view, height=side, width=side, max_moves=4, min_distance=3, max_distance=2 * side)
    c.model.update(width=32, layers=2, query_heads=2, key_value_heads=2, head_dim=16, feed_forward=64)
    c.recipe.entropy_coef = 0.01
    c.sft.update(steps=100, tasks=8, fresh=50)
    c.rollout.tasks, c.steps, c.quick_compile = 16, steps, True
    c.evaluation.update(every=10, tasks=128, final_tasks=128, ablate_roles=False, transcripts=0)
    c.checkpoint.every = steps
    return changed_config(c, same_samples(c, {"assignment": assignment} | PLAYERS[player]))


def curves_of(config: Any, out: pathlib.Path, seeds: int) -> list[tuple[list[float], list[float]]]:
    """Per seed the sampled tokens and the success on the validation split, of a sweep that is run unless it was."""
    folders = train_sweep(sweep_configs(config, [f"seed={','.join(map(str, range(seeds)))}"]), out / config.name)
    return [curve({"metrics": read_metrics(folder)}, "sampled_tokens") for folder in folders.values()]


def cell_of(tokens: float, team: Sequence[tuple], single: Sequence[tuple]) -> dict[str, Any]:
    """One cell of the diagram, of the learning curves of both."""
    successes = {name: [float(np.interp(tokens, *seed)) for seed in curves] for name, curves in (("team", team), ("single", single))}
    mean, low, high = over_seeds([a - b for a, b in zip(successes["team"], successes["single"], strict=True)])
    better = "team" if low > 0 else "single" if high < 0 else "undecided"
    means = {name: float(np.mean(values)) for name, values in successes.items()}
    return dict(tokens=round(tokens), seeds=len(team), **means, difference=mean, low=low, high=high, better=better)


def draw(cells: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """The picture: a row per side and view of the map, a column per budget, coloured by the difference."""
    rows = list(dict.fromkeys(f"{cell['view']} {cell['side']}x{cell['side']}" for cell in cells))
    columns = len(cells) // len(rows)
    grid = np.asarray([cell["difference"] for cell in cells]).reshape(len(rows), columns)
    most = max(0.05, float(np.max(np.abs(grid))))
    with panels(path, 1.4 * columns + 2.0, 0.8 * len(rows) + 1.2) as (figure, (axes,)):
        image = axes.imshow(grid, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
        for number, cell in enumerate(cells):
            text = f"{cell['difference']:+.2f}\n[{cell['low']:+.2f}, {cell['high']:+.2f}]"
            weight = "normal" if cell["better"] == "undecided" else "bold"
            colour = "white" if abs(cell["difference"]) > 0.7 * most else "black"
            axes.text(number % columns, number // columns, text, ha="center", va="center", fontsize=8, weight=weight, color=colour)
        tokens = [f"{cell['tokens'] / 1000:.0f}k" for cell in cells[:columns]]
        axes.set(xticks=range(columns), xticklabels=tokens, yticks=range(len(rows)), yticklabels=rows)
        axes.set(xlabel="sampled tokens", title="success of the team minus success of one agent")
        figure.colorbar(image, ax=axes)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/phase"))
    parser.add_argument("--sides", default="4,6")
    parser.add_argument("--views", default="full,split")
    parser.add_argument("--assignment", default="shared", choices=("shared", "per_role"))
    parser.add_argument("--picture", type=pathlib.Path)
    for name, default in (("seeds", 4), ("steps", 60), ("budgets", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    curves = {}
    for view, side in itertools.product(arguments.views.split(","), map(int, arguments.sides.split(","))):
        configs = [config_of(player, view, side, arguments.steps, arguments.assignment) for player in PLAYERS]
        curves[view, side] = [curves_of(config, arguments.out, arguments.seeds) for config in configs]
    least = min(tokens[-1] for both in curves.values() for by_seed in both for tokens, _ in by_seed)
    budgets = np.linspace(0, least, arguments.budgets).tolist()
    rows = itertools.product(curves.items(), budgets)
    cells = [dict(view=view, side=side) | cell_of(tokens, *both) for ((view, side), both), tokens in rows]
    with (arguments.out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({key: f"{x:.3f}" if isinstance(x, float) else x for key, x in cell.items()} for cell in cells)
    draw(cells, arguments.picture or arguments.out / "phase_diagram.png")
    print((arguments.out / "table.csv").read_text())


if __name__ == "__main__":
    main()
