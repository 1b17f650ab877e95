"""Figure 6 of Stronger-MAS of any runs: (a) each role's standardised reward over the steps, (b) the turns per task; drawn by `collect`."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from marl_llm.reporting import formats
from marl_llm.runs.command import ConfigError


def role_rewards(run: dict) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Role -> (steps, z-scored mean reward per step), standardised over the run's own steps (ddof 0); 0 where all are equal."""
    lines = [line for line in run["metrics"] if line["phase"] == "train"]
    roles = sorted({key.split("/")[1] for line in lines for key in line if key.startswith("role/") and key.endswith("/reward")})
    rewards_by_role = {}
    for role in roles:
        points = [(line["step"], line[f"role/{role}/reward"]) for line in lines if formats.is_number(line.get(f"role/{role}/reward"))]
        if points:
            steps, rewards = (np.asarray(part, float) for part in zip(*points))
            rewards_by_role[role] = steps, (rewards - rewards.mean()) / (rewards.std() or 1.0)
    return rewards_by_role


def turns(run: dict) -> tuple[np.ndarray, np.ndarray]:
    """(steps, turns per play), of the training plays. Raises `ConfigError` for a run that did not train."""
    points = [(line["step"], line["turns"]) for line in run["metrics"] if line["phase"] == "train" and formats.is_number(line.get("turns"))]
    if not points:
        raise ConfigError("a run without training steps has no turns to draw")
    steps, values = zip(*points)
    return np.asarray(steps, float), np.asarray(values, float)


def band(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(steps, mean, lowest, highest) over seeds, at the steps that all of them have."""
    steps = sorted(set.intersection(*(set(x.tolist()) for x, _ in curves)))
    rows = np.asarray([[dict(zip(x.tolist(), y.tolist()))[step] for step in steps] for x, y in curves])
    return np.asarray(steps), rows.mean(0), rows.min(0), rows.max(0)


@contextlib.contextmanager
def panels(path: pathlib.Path, width: float, height: float, count: int = 1) -> Iterator[tuple[Any, Any]]:
    """(figure, axes of `count` panels side by side), in inches, which are then written as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, height), layout="constrained", squeeze=False)
    yield figure, axes[0]
    figure.savefig(path, dpi=130)
    plt.close(figure)


@contextlib.contextmanager
def picture(path: pathlib.Path, x: str, y: str) -> Iterator[Any]:
    """Axes to draw lines into, which are then written as a PNG."""
    with panels(path, 6.4, 3.8) as (_, (axes,)):
        yield axes
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        axes.legend()


def draw_figure(groups: dict[str, list[dict]], figure: str, path: pathlib.Path) -> None:
    """Writes the picture: a line per role or group, and a band over the seeds. Raises `ConfigError` for runs that logged no rewards."""
    lines: dict[str, list] = {}
    for name, runs in groups.items():
        if figure == "turns":
            lines[name] = [turns(run) for run in runs]
            continue
        of_runs = [role_rewards(run) for run in runs]
        for role in (role for role in of_runs[0] if all(role in of_run for of_run in of_runs)):
            lines[f"{name}: {role}" if len(groups) > 1 else role] = [of_run[role] for of_run in of_runs]
    if not lines:
        raise ConfigError("--figure=roles: these runs logged no reward per role, or none of a role that all runs of a group have")
    with picture(path, "step", "turns per task" if figure == "turns" else "reward, standardised") as axes:
        for number, (name, curves) in enumerate(lines.items()):
            steps, mean, low, high = band(curves)
            axes.plot(steps, mean, color=f"C{number}", label=name)
            if len(curves) > 1:
                axes.fill_between(steps, low, high, color=f"C{number}", alpha=0.2)
