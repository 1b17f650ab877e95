"""What a step of GRPO costs as it grows: seconds and bytes by model size, tasks, prompts, responses and roles, with fitted exponents.

    python -m benchmarks.growth --out=runs/growth [--repeats=3] [--axes=model,tasks,prompt,response,roles]

Each point is a whole step of `benchmarks.adapters`: roles with an adapter of rank 16 each on one frozen base of random weights, sampled by
the engine and updated. One axis varies at a time; the others stay at `BASE`. The model axis has the shapes of `SHAPES`, 1M to 360M
parameters; the other axes are measured on the one of 29M. Writes OUT/growth.csv, a line per point, and growth.png; a point that is in the
file is not measured again. Prints one JSON line per axis: the exponents e of cost ~ size^e, by least squares of logarithms over all points,
and over the two largest. Seconds are those of one core (`time.process_time`), so that other work beside it counts little.
"""

from __future__ import annotations

import argparse
import csv
import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from benchmarks import adapters
from marl_llm.models import init_params, make_model_config, save_pretrained
from marl_llm.runs.figures import panels

BASE = {"prompts": 4, "samples": 4, "prompt": 200, "response": 48, "roles": 1}
AXES = {"tasks": ("prompts", (2, 4, 8, 16)), "prompt": ("prompt", (100, 200, 400, 800)), "response": ("response", (24, 48, 96, 192)),
        "roles": ("roles", (1, 2, 3, 4))}  # fmt: skip
SHAPES = {
    "1M": dict(preset="small", vocab_size=8192, width=64, layers=8, query_heads=4, key_value_heads=2, head_dim=16, feed_forward=192),
    "10M": dict(preset="small", vocab_size=8192, width=256, layers=9, query_heads=8, key_value_heads=4, head_dim=32, feed_forward=768),
    "29M": dict(preset="small", vocab_size=8192, width=512, layers=8, query_heads=8, key_value_heads=4, head_dim=64, feed_forward=1536),
    "135M": dict(preset="smollm2-135m"),
    "360M": dict(preset="smollm2-360m"),
}
COSTS = {"sample": "sampling", "seconds": "update", "whole": "whole step", "gib": "memory"}
COLUMNS = ("axis", "size", *COSTS, "low", "high")


def model_at(name: str, folder: pathlib.Path) -> int:
    """Writes a checkpoint of a shape of `SHAPES` with random weights, unless it is there; how many parameters it has."""
    import jax

    config = make_model_config(**SHAPES[name])
    if not (folder / name).exists():
        save_pretrained(folder / name, config, init_params(config, jax.random.key(0)), dtype="bfloat16")
    return config.parameters


def measured(axis: str, size: int, model: pathlib.Path, sizes: dict[str, int], given: argparse.Namespace) -> dict[str, float | str]:
    """One point: medians over the repetitions, and the least and the most seconds of a whole step."""
    figures = adapters.measure(adapters.options(model=str(model), threads=1, clock="cpu", repeats=given.repeats, **sizes))["ours"]
    low, high = figures["spread"]
    return {"axis": axis, "size": size} | {cost: figures[cost] for cost in COSTS} | {"low": low, "high": high}


def read_points(path: pathlib.Path) -> list[dict[str, float | str]]:
    """The points of a file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{key: value if key == "axis" else float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def add_point(path: pathlib.Path, point: dict[str, float | str]) -> None:
    """Appends a point to a file."""
    begins = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if begins:
            writer.writeheader()
        writer.writerow(point)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """e of cost ~ size^e, by least squares of logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def exponents(points: Sequence[dict[str, float | str]]) -> dict[str, list[float]]:
    """Per cost the exponent over all points of an axis, and over its two largest."""
    points = sorted(points, key=lambda point: point["size"])
    sizes = [point["size"] for point in points]
    fitted = {}
    for cost, name in COSTS.items():
        costs = [point[cost] for point in points]
        fitted[name] = [round(exponent(sizes, costs), 2), round(exponent(sizes[-2:], costs[-2:]), 2)]
    return fitted


def draw(points: Sequence[dict[str, float | str]], axes: Sequence[str], path: pathlib.Path) -> None:
    """The picture: per axis the costs over the size, both logarithmic."""
    values = [point[cost] for point in points for cost in COSTS]
    with panels(path, 3.0 * len(axes), 3.2, len(axes)) as (_, drawn):
        for panel, axis in zip(drawn, axes, strict=True):
            shown = sorted((point for point in points if point["axis"] == axis), key=lambda point: point["size"])
            for cost, name in COSTS.items():
                panel.loglog([point["size"] for point in shown], [point[cost] for point in shown], marker="o", label=name)
            sizes = [point["size"] for point in shown]
            panel.set_xticks(sizes, labels=[f"{size / 1e6:.0f}M" if axis == "model" else f"{size:g}" for size in sizes], fontsize=8)
            panel.xaxis.set_minor_formatter("")
            panel.yaxis.set_minor_formatter("")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.set(xlabel="parameters" if axis == "model" else axis if axis in ("tasks", "roles") else f"tokens of a {axis}")
            panel.set_ylim(0.8 * min(values), 1.3 * max(values))
        drawn[0].set_ylabel("seconds; memory in GiB")
        drawn[0].legend(fontsize=8)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/growth"))
    parser.add_argument("--axes", default="model,tasks,prompt,response,roles")
    parser.add_argument("--models", default=",".join(SHAPES), help="of the axis of model sizes")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    table, axes = given.out / "growth.csv", given.axes.split(",")
    measured_before = {(point["axis"], point["size"]) for point in read_points(table)}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for axis in axes:
            flag, values = AXES.get(axis, ("", given.models.split(",")))
            for value in values:
                name = "29M" if flag else value
                parameters = model_at(name, folder)
                size = value if flag else parameters
                if (axis, size) not in measured_before:
                    sizes = BASE | ({flag: value} if flag else {})
                    add_point(table, measured(axis, size, folder / name, sizes, given))
    points = read_points(table)
    for axis in axes:
        print(json.dumps({"benchmark": "growth", "axis": axis} | exponents([point for point in points if point["axis"] == axis])))
    draw(points, axes, given.out / "growth.png")


if __name__ == "__main__":
    main()
