"""One table, and one picture, of many runs of workflows: what each group of runs gained, over seeds.

    python -m experiments.collect --group=A:runs/a0,runs/a1,runs/a2 --group=permuted:runs/ap0
    python -m experiments.collect --group=shared:runs/s0,runs/s1 --group=separate:runs/c0,runs/c1 --picture=curves.png --axis=sampled_tokens

Prints a Markdown table: the headline figure of the test split before and after, greedy and sampled, with the spread over seeds; what it is
with one role's untrained model put back; turns; sampled tokens and seconds; and the validation figure at the tokens that all runs sampled,
between its measurements by a straight line. The picture has a curve per group, validation figures over
steps or sampled tokens, with every seed as a thin line.
"""

from __future__ import annotations

import json
import pathlib
import statistics

import numpy as np
from absl import flags

from experiments import command

_GROUPS = flags.DEFINE_multi_string("group", [], "NAME:RUN,RUN,...; may be given many times.")
_PICTURE = flags.DEFINE_string("picture", None, "PNG of the learning curves.")
_AXIS = flags.DEFINE_enum("axis", "step", ["step", "sampled_tokens"], "What the curves go over.")


def read_groups(texts: list[str]) -> dict[str, list[dict]]:
    """Group -> its runs, each with `evaluation` and `metrics`. Raises `ConfigError` naming a run that is not finished."""
    from experiments.base import ConfigError

    groups: dict[str, list[dict]] = {}
    for text in texts:
        name, _, runs = text.partition(":")
        if not name or not runs:
            raise ConfigError(f"--group={text!r} is not like 'shared:runs/s0,runs/s1'")
        for run in map(pathlib.Path, runs.split(",")):
            try:
                evaluation = json.loads((run / "evaluation.json").read_text())
                lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            except (OSError, ValueError) as error:
                raise ConfigError(f"{run} is no finished run of a workflow: {error}") from error
            groups.setdefault(name, []).append({"evaluation": evaluation, "metrics": lines})
    return groups


def spread(values: list[float]) -> str:
    """Mean, and the smallest and largest where there are several."""
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.3f}, {max(values):.3f}]"


def table(groups: dict[str, list[dict]]) -> str:
    """The Markdown table."""
    head = "| runs | seeds | greedy before | greedy after | gain | sampled before | sampled after | gain | turns greedy | turns sampled | "
    budget = min(curve(run, "sampled_tokens")[0][-1] for runs in groups.values() for run in runs)
    head += f"one role untrained: greedy / sampled | sampled tokens | validation at {budget:,.0f} tokens | wall s |"
    rows = [head, "|" + "---|" * (head.count(" | ") + 1)]
    for name, runs in groups.items():
        cells = [name, str(len(runs))]
        kinds = [[run["evaluation"] for run in runs], [run["evaluation"]["sampled"] for run in runs]]
        for parts in kinds:
            before, after = ([part[when]["success"] for part in parts] for when in ("before", "after"))
            cells += [spread(before), spread(after), spread([b - a for a, b in zip(before, after)])]
        turns = lambda parts, when: f"{statistics.mean(part[when]['turns'] for part in parts):.2f}"  # noqa: E731
        cells += [f"{turns(parts, 'before')} → {turns(parts, 'after')}" for parts in kinds]
        pairs = runs[0]["evaluation"]["pairs"]
        mean = lambda parts, pair: statistics.mean(part["pairs"][pair]["success"] for part in parts)  # noqa: E731
        worth = [f"{pair.removesuffix(' untrained')} {mean(kinds[0], pair):.3f} / {mean(kinds[1], pair):.3f}" for pair in pairs]
        cells.append("; ".join(worth) or "–")
        tokens = [next((m["sampled_tokens"] for m in reversed(run["metrics"]) if "sampled_tokens" in m), 0) for run in runs]
        there = [float(np.interp(budget, *curve(run, "sampled_tokens"))) for run in runs]
        seconds = statistics.mean(run["evaluation"]["train_wall_s"] for run in runs)
        cells += [f"{statistics.mean(tokens):,.0f}", spread(there), f"{seconds:.0f}"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def curve(run: dict, axis: str) -> tuple[list[float], list[float]]:
    """Validation figures of a run over steps, or over the tokens that had been sampled by then."""
    tokens = {0: 0} | {m["step"]: m["sampled_tokens"] for m in run["metrics"] if m["phase"] == "train"}
    points = [(m["step"], m["success"]) for m in run["metrics"] if m["phase"] == "eval"]
    return [float(step if axis == "step" else tokens[step]) for step, _ in points], [y for _, y in points]


def draw(groups: dict[str, list[dict]], axis: str, path: pathlib.Path) -> None:
    """The picture: per group the mean over seeds where all seeds have a point, and every seed as a thin line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for number, (name, runs) in enumerate(groups.items()):
        colour, curves = f"C{number}", [curve(run, axis) for run in runs]
        for x, y in curves if len(curves) > 1 else ():
            axes.plot(x, y, color=colour, alpha=0.25, linewidth=1)
        points = list(zip(*(list(zip(*c)) for c in curves)))
        x, y = ([statistics.mean(p[i] for p in point) for point in points] for i in (0, 1))
        axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=3, label=f"{name}, {len(runs)} seed{'s' * (len(runs) > 1)}")
    headline = next(iter(groups.values()))[0]["evaluation"]["headline"]
    axes.set(xlabel=axis.replace("_", " "), ylabel=f"{headline}, validation, greedy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main(argv) -> None:
    """Flags to table and picture."""
    from experiments.base import ConfigError

    try:
        if not _GROUPS.value:
            raise ConfigError("--group is missing, e.g. --group=A:runs/a0,runs/a1")
        groups = read_groups(_GROUPS.value)
        print(table(groups))
        if _PICTURE.value:
            draw(groups, _AXIS.value, pathlib.Path(_PICTURE.value))
    except (ConfigError, OSError) as error:
        command.fail(error)


if __name__ == "__main__":
    command.run(main)
