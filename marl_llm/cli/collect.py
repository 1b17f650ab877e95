"""One table, and one picture, of many runs: what each group of runs gained, over seeds.

    python -m marl_llm collect runs/a0 runs/a1 runs/b0                     runs of one config are seeds of one group
    python -m marl_llm collect --group=A:runs/a0,runs/a1,runs/a2 --group=permuted:runs/ap0
    python -m marl_llm collect --group=shared:runs/s0,runs/s1 --group=separate:runs/c0,runs/c1 --picture=curves.png --axis=sampled_tokens

Prints a Markdown table: the headline figure of the test split before and after, greedy and, where the runs measured it, sampled, with the
smallest and largest over seeds, of a single run its 95 % interval over tasks; what it is with one role's untrained model put back; turns;
sampled tokens and seconds; and the validation figure at the tokens that all runs sampled, between its measurements by a straight line. The
picture has a curve per group, validation figures over steps or sampled tokens, with every seed as a thin line. `--figure=roles` draws each
role's standardised reward over the training steps in its place, `--figure=turns` the turns per task, both with a band over the seeds.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics

from absl import flags

from marl_llm import reporting
from marl_llm.reporting import formats
from marl_llm.runs.command import ConfigError, check_writable, given_flags, refuse_idle
from marl_llm.untrusted import read_json_file

LEGEND = "Brackets: of one seed its 95 % interval over tasks; of several the smallest and the largest seed, which is no interval."
FLAGS = flags.FlagValues()
_GROUPS = flags.DEFINE_multi_string("group", [], "NAME:RUN,RUN,...; may be given many times.", flag_values=FLAGS)
_PICTURE = flags.DEFINE_string("picture", None, "PNG of the learning curves.", flag_values=FLAGS)
_FIGURE = flags.DEFINE_enum("figure", "curves", ["curves", "roles", "turns"], "What the picture shows.", flag_values=FLAGS)
_AXIS = flags.DEFINE_enum("axis", "step", ["step", "sampled_tokens"], "What the curves go over.", flag_values=FLAGS)


def read_run(run: pathlib.Path) -> dict:
    """A finished run's `evaluation` and `metrics`. Raises `ConfigError` naming one that is not finished, or the field that is wrong."""
    try:
        evaluation, metrics = read_json_file(run / "evaluation.json"), reporting.read_metrics(run)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run} is no finished run: {error}") from error
    parts = [("", evaluation), *([("sampled.", evaluation["sampled"])] if "sampled" in evaluation else [])]
    for prefix, part in parts:
        _check_part(run, prefix, part)
    random = evaluation.get("random", {"success": 0.0})
    if not isinstance(random, dict) or not formats.is_number(random.get("success")):
        raise ConfigError(f"{run}/evaluation.json: random.success is not a number")
    for name in ("train_cpu_s", "train_wall_s"):
        if evaluation.get(name) is not None and not formats.is_number(evaluation[name]):
            raise ConfigError(f"{run}/evaluation.json: {name} is not a number")
    return {"evaluation": evaluation, "metrics": [line for line in metrics if _usable(line)]}


def _check_part(run: pathlib.Path, prefix: str, part: object) -> None:
    """Raises `ConfigError` for a part of an evaluation that lacks what the table shows."""
    pairs = part.get("pairs", {}) if isinstance(part, dict) else None
    if not isinstance(pairs, dict):
        raise ConfigError(f"{run}/evaluation.json: {prefix or 'it'} and its pairs must be objects")
    seats = {name: part.get(name) for name in ("before", "after")} | {f"pairs.{name}": figures for name, figures in pairs.items()}
    for name, figures in seats.items():
        for field in ("success",) if name.startswith("pairs.") else ("success", "turns"):
            if not isinstance(figures, dict) or not formats.is_number(figures.get(field)):
                raise ConfigError(f"{run}/evaluation.json: {prefix}{name}.{field} is missing, or not a number")
        ends = figures.get("interval")
        if ends is not None and not (isinstance(ends, list) and len(ends) == 2 and all(map(formats.is_number, ends))):
            raise ConfigError(f"{run}/evaluation.json: {prefix}{name}.interval is not a pair of numbers")


def _usable(line: dict) -> bool:
    """Whether a line of metrics has a phase, a step and, where it needs them, figures."""
    figures = [line[name] for name in ("success", "sampled_tokens") if name in line]
    complete = isinstance(line.get("phase"), str) and all(map(formats.is_number, [line.get("step"), *figures]))
    return complete and (line["phase"] != "eval" or "success" in line) and (line["phase"] != "train" or "sampled_tokens" in line)


def read_groups(texts: list[str]) -> dict[str, list[dict]]:
    """Group -> its runs. Raises `ConfigError` naming a run that is not finished."""
    groups: dict[str, list[dict]] = {}
    for text in texts:
        name, _, runs = text.partition(":")
        if not name or not runs:
            raise ConfigError(f"--group={text!r} is not like 'shared:runs/s0,runs/s1'")
        groups.setdefault(name, []).extend(read_run(pathlib.Path(run)) for run in runs.split(","))
    return groups


def group_runs(runs: list[str]) -> list[str]:
    """Runs that were named one by one, as groups: those whose configs differ in the seed alone are one, called as the first of them.

    Raises `ConfigError` for a run without a config that can be read.
    """
    groups: dict[str, list[str]] = {}
    for run in runs:
        try:
            config = read_json_file(pathlib.Path(run) / "config.json").get("config", {})
        except FileNotFoundError as error:
            raise ConfigError(f"{run} is no run directory: it has no config.json; `python -m marl_llm runs` lists runs") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{run} is no run directory: {error}") from error
        config = {key: value for key, value in config.items() if key != "seed"} if isinstance(config, dict) else {}
        groups.setdefault(json.dumps(config, sort_keys=True), []).append(run)
    return [f"{pathlib.Path(members[0]).name}:{','.join(members)}" for members in groups.values()]


def headline(groups: dict[str, list[dict]]) -> str:
    """What the tables' figures are, as the runs recorded it."""
    names = {name: run["evaluation"].get("headline", "success") for name, runs in groups.items() for run in runs}
    if len(set(names.values())) == 1:
        return f"headline figure: {next(iter(names.values()))}"
    return "headline figures: " + ", ".join(f"{name}: {figure}" for name, figure in names.items())


def spread(values: list[float], interval: list[float] | None = None) -> str:
    """Mean, and the smallest and largest where there are several; of a single one its `interval`."""
    ends = interval if len(values) == 1 else [min(values), max(values)]
    return f"{statistics.mean(values):.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def table(groups: dict[str, list[dict]], beside: dict[str, dict[str, str]] | None = None) -> str:
    """The Markdown table; `beside` are further columns, each with a text per group, which is left out where no group has one."""
    from numpy import interp  # here, so that --help needs no NumPy

    everyone = [run for runs in groups.values() for run in runs]
    modes = ["greedy", *(["sampled"] if all("sampled" in run["evaluation"] for run in everyone) else [])]
    budget = min((curve(run, "sampled_tokens")[0][-1] for run in everyone if _measured(run)), default=0)
    head = ["runs", "seeds", *(title for mode in modes for title in (f"{mode} before", f"{mode} after", "gain"))]
    head += [f"turns {mode}" for mode in modes] + [f"one role untrained: {' / '.join(modes)}", "sampled tokens"]
    beside = {title: texts for title, texts in (beside or {}).items() if any(texts.values())}
    head += [f"validation at {budget:,.0f} tokens", "random", "CPU s", "wall s", *beside]
    rows = [head, ["---"] * len(head)]
    for name, runs in groups.items():
        parts = [[run["evaluation"] if mode == "greedy" else run["evaluation"]["sampled"] for run in runs] for mode in modes]
        cells = [name, str(len(runs))]
        for evaluations in parts:
            before, after = ([part[when]["success"] for part in evaluations] for when in ("before", "after"))
            low_high = [evaluations[0][when].get("interval") for when in ("before", "after")]
            cells += [spread(before, low_high[0]), spread(after, low_high[1]), spread([b - a for a, b in zip(before, after)])]

        def turns(evaluations, when):
            return f"{statistics.mean(part[when]['turns'] for part in evaluations):.2f}"

        cells += [f"{turns(evaluations, 'before')} → {turns(evaluations, 'after')}" for evaluations in parts]

        def mean(evaluations, pair):
            return f"{statistics.mean(part['pairs'][pair]['success'] for part in evaluations):.3f}"

        pairs = [pair for pair in parts[0][0].get("pairs", {}) if all(pair in part.get("pairs", {}) for part in itertools.chain(*parts))]
        untrained = [f"{pair.removesuffix(' untrained')} {' / '.join(mean(evaluations, pair) for evaluations in parts)}" for pair in pairs]
        cells += ["; ".join(untrained) or "–", f"{statistics.mean(map(_tokens, runs)):,.0f}"]
        at_budget = [float(interp(budget, *curve(run, "sampled_tokens"))) for run in runs if _measured(run)]
        cells.append(spread(at_budget) if at_budget else "–")
        floor = [run["evaluation"]["random"]["success"] for run in runs if "random" in run["evaluation"]]
        cells.append(f"{statistics.mean(floor):.3f}" if floor else "–")

        def seconds(kind, runs=runs):
            return [run["evaluation"].get(f"train_{kind}_s") for run in runs]

        cells += ["–" if None in seconds(kind) else f"{statistics.mean(seconds(kind)):.0f}" for kind in ("cpu", "wall")]
        cells += [texts.get(name) or "–" for texts in beside.values()]
        rows.append(cells)
    return "\n".join("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows)


def _tokens(run: dict) -> int:
    return next((m["sampled_tokens"] for m in reversed(run["metrics"]) if "sampled_tokens" in m), 0)


def _measured(run: dict) -> bool:
    """Whether a run has a validation figure behind tokens that it sampled."""
    return any(curve(run, "sampled_tokens")[0])


def points(run: dict, axis: str) -> dict[int, tuple[float, float]]:
    """Step -> (x, validation figure) of a run over steps, or over the tokens that had been sampled by then; without steps whose tokens are
    in no line that can be read."""
    tokens = {0: 0} | {m["step"]: m["sampled_tokens"] for m in run["metrics"] if m["phase"] == "train"}
    figures = {m["step"]: m["success"] for m in run["metrics"] if m["phase"] == "eval"}
    return {step: (float(step if axis == "step" else tokens[step]), y) for step, y in figures.items() if axis == "step" or step in tokens}


def curve(run: dict, axis: str) -> tuple[list[float], list[float]]:
    """`points`, as two lists."""
    x_and_y = points(run, axis).values()
    return [x for x, _ in x_and_y], [y for _, y in x_and_y]


def draw(groups: dict[str, list[dict]], axis: str, path: pathlib.Path) -> None:
    """The picture: per group the mean over seeds where all seeds have a point, and every seed as a thin line."""
    from marl_llm.runs.figures import picture

    with picture(path, axis.replace("_", " "), f"{headline(groups)}, validation, greedy") as axes:
        for number, (name, runs) in enumerate(groups.items()):
            colour, curves = f"C{number}", [curve(run, axis) for run in runs]
            for x, y in curves if len(curves) > 1 else ():
                axes.plot(x, y, color=colour, alpha=0.25, linewidth=1)
            seeds = [points(run, axis) for run in runs]
            shared = [[seed[step] for seed in seeds] for step in seeds[0] if all(step in seed for seed in seeds)]
            x, y = ([statistics.mean(point[i] for point in at_step) for at_step in shared] for i in (0, 1))
            axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=3, label=f"{name}, {len(runs)} seed{'s' * (len(runs) > 1)}")


def main(argv) -> None:
    """Flags to table and picture."""
    named = [*_GROUPS.value, *group_runs(argv[1:])]
    if not named:
        example = "`collect runs/a0 runs/a1`, or --group=A:runs/a0,runs/a1"
        raise ConfigError(f"no run is named, e.g. {example}; `python -m marl_llm runs` lists runs")
    if _PICTURE.value:
        check_picture(_PICTURE.value)
    if not _PICTURE.value or _FIGURE.value != "curves":
        refuse_idle(given_flags(FLAGS, ("axis",)), "it is of the curves of --picture=FILE.png")
    if not _PICTURE.value:
        refuse_idle(given_flags(FLAGS, ("figure",)), "it is for --picture=FILE.png")
    groups = read_groups(named)
    print(f"{headline(groups)}\n\n{table(groups)}\n\n{LEGEND}")
    if _PICTURE.value:
        path = pathlib.Path(_PICTURE.value)
        if _FIGURE.value == "curves":
            draw(groups, _AXIS.value, path)
        else:
            from marl_llm.runs.figures import draw_figure

            draw_figure(groups, _FIGURE.value, path)


def check_picture(path: str) -> None:
    """Raises `ConfigError` for a file that cannot be written, or whose name ends in no form of pictures."""
    from matplotlib.backend_bases import FigureCanvasBase

    check_writable("picture", path)
    if pathlib.Path(path).suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise ConfigError(f"--picture={path} must end in .png, or in another of {', '.join(sorted(FigureCanvasBase.filetypes))}")
