"""The charts of a run, from the records of `metrics.jsonl`: as data that the page's script draws, and as pictures under `plots/`."""

import dataclasses
import io
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.reporting import files
from marl_llm.reporting.formats import is_number, percent, title, visible

FLOAT32_GAP_BOUND = 1e-4  # nats; for records without `log_prob_gap_bound`: law 2's bound in float32
_MOST = 2.0**53  # of a step and a value: beyond, the arithmetic of axes overflows
_POINTS = 300  # more points than pixels only make the page heavy
_LABEL = 28  # characters of a name in a legend
COLORS = ("#2a6fbb", "#d0661c", "#2f8f57", "#8457b8", "#c2403a", "#1b8a99", "#9a6b1f", "#b0478c")  # as view.css has them

Records = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Line:
    """One series of a chart."""

    label: str
    steps: np.ndarray  # [points] int
    values: np.ndarray  # [points] float, NaN where the record has none
    color: int = 0  # index into the palette
    kind: str = "smooth"  # "smooth": raw line, faint, and its moving mean; "mean": the mean alone; "plain"; "marks"
    dashed: bool = False
    band: tuple[np.ndarray, np.ndarray] | None = None  # [points] each: the ends of an interval about the values


@dataclasses.dataclass(frozen=True)
class Chart:
    """What to draw, or why there is nothing to draw."""

    name: str  # file name under plots/, without ending
    title: str
    caption: str
    lines: tuple[Line, ...]
    unit: str = ""  # label of the vertical axis
    share: bool = False  # values in [0, 1], shown in percent
    whole: bool = True  # a share's axis spans 0 to 100 %, however small the values
    log: bool = False
    stacked: bool = False
    levels: tuple[tuple[float, str], ...] = ()  # dotted horizontal lines and their names
    absent: str = ""  # why there is no line, if there is none

    def to_json(self) -> dict[str, Any]:
        """The chart as the page draws it. Lines are thinned, smoothed and stacked here; a point is [step, value]."""
        log = self.log and bool(self.lines) and _decades(self)
        lines, top = [stroke for line in self.lines for stroke in _strokes(line, self.log)], None
        if self.stacked and self.lines:
            lines, top = _stacked(self.lines)
        drawn = {"name": self.name, "title": self.title, "caption": self.caption, "unit": self.unit, "absent": self.absent}
        kind = {"share": self.share, "whole": self.share and self.whole, "log": log, "top": top}
        return drawn | kind | {"levels": [list(level) for level in self.levels], "lines": lines}


def roles_of(records: Records) -> list[str]:
    """The roles that the records speak of, in the order of their names: each keeps its colour from chart to chart."""
    return _names(records, r"role/([^/]+)/")


def models_of(records: Records) -> list[str]:
    """The models that the records speak of, in the order of their names."""
    return _names(records, r"model/([^/]+)/")


def _names(records: Records, pattern: str) -> list[str]:
    keys = dict.fromkeys(key for record in records for key in record)
    return sorted({match[1] for key in keys if (match := re.match(pattern, key))})


def column(records: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of `key`, NaN where a record has a null or what no chart can hold; records without the key are left out."""
    rows = [r for r in records if key in r and is_number(r.get("step")) and abs(r["step"]) < _MOST]
    return np.array([r["step"] for r in rows], int), np.array([_drawable(r[key]) for r in rows], float)


def _drawable(value: Any) -> float:
    """A figure; NaN for what no chart can hold."""
    return float(value) if is_number(value) and abs(value) < _MOST else np.nan


def _line(records: Records, key: str, label: str, color: int, kind: str = "smooth", dashed: bool = False) -> list[Line]:
    steps, values = column(records, key)
    label = visible(label).strip().lstrip("_") or "?"  # matplotlib hides labels that begin with an underscore
    label = label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"
    return [Line(label, steps, values, color, kind, dashed)] if np.isfinite(values).any() else []


def gap_bounds(train: Records) -> dict[str, float]:
    """Model → largest difference between sampler and scorer of a healthy run, in nats; it depends on the model's dtype."""
    by_model = {}
    for model in models_of(train):
        bounds = column(train, f"model/{model}/log_prob_gap_bound")[1]
        by_model[model] = float(np.nanmax(bounds)) if np.isfinite(bounds).any() else FLOAT32_GAP_BOUND
    return by_model


def _evaluated(evaluated: Records) -> list[Line]:
    """The evaluation curve with its intervals."""
    whole = [r for r in evaluated if "success" in r]
    low, high = ([_drawable(r.get(key)) for r in whole] for key in ("success_low", "success_high"))
    lines = _line(whole, "success", "evaluation, fresh instances", 0, "marks")
    if lines and len(lines[0].steps) == len(whole) and np.isfinite(low).any():
        lines = [dataclasses.replace(lines[0], band=(np.array(low, float), np.array(high, float)))]
    return lines


def learning_charts(
    train: Records, evaluated: Records, warm: Records, floor: Any, headline: str = "success"
) -> list[Chart]:
    """The headline, turns, supervised warm-up, and the rewards of each role; `floor` is the success of random play, if it is a number."""
    success = _line(train, "success", "sampled, while training", 1) + _evaluated(evaluated)
    caption = "Share of episodes that reach the goal." if headline == "success" else f"Mean {title(headline)} over episodes."
    caption += " Thick: training episodes, moving mean." + (" Band: 95 % interval." if any(line.band for line in success) else "")
    turns = _line(train, "turns", "sampled, while training", 1) + _line(evaluated, "turns", "evaluation", 0, "marks")
    charts = [
        Chart("success", title(headline), caption,
              tuple(success), share=True, levels=() if np.isnan(_drawable(floor)) else ((float(floor), "random play"),),
              absent="metrics.jsonl holds no number under `success` in its train or eval lines."),
        Chart("turns", "Turns used", "Mean number of turns in an episode; fewer is better once success is high.", tuple(turns),
              unit="turns", absent="metrics.jsonl holds no number under `turns` in its train or eval lines."),
    ]  # fmt: skip
    for role in roles_of(train):
        keys = dict.fromkeys(key for record in train for key in record)
        parts = [key for key in keys if key.startswith(f"role/{role}/component/")]
        lines = _line(train, f"role/{role}/team", "team", 0) + _line(train, f"role/{role}/local", "local", 1)
        lines += _line(train, f"role/{role}/reward", "paid in all", 4, "mean")
        for i, key in enumerate(parts):
            lines += _line(train, key, key.rsplit("/", 1)[1], (2, 3, 5, 6, 7)[i % 5], "mean", dashed=True)
        charts.append(
            Chart(f"rewards_{_file(role)}", f"Rewards of {role}", "Mean per response, moving means. Dashed: the components.",
                  tuple(lines), unit="reward", absent=f"metrics.jsonl has no rewards for the role {role}.")
        )  # fmt: skip
    if not roles_of(train):
        why = "metrics.jsonl holds no number under `role/<role>/team` or `role/<role>/local` in its train lines."
        charts.append(Chart("rewards", "Rewards by role", "Mean per response.", (), absent=why))
    models = models_of([*train, *warm])
    losses = _line(warm, "loss", "loss", len(models))
    for i, model in enumerate(models):
        losses += _line(warm, f"model/{model}/loss", model, i)
    if warm:
        charts.append(Chart("sft", "Supervised warm-up", "Imitation loss before training, per token.", tuple(losses), unit="nats",
                            absent="metrics.jsonl holds no number under `loss` in its sft lines."))  # fmt: skip
    return charts


def health_charts(train: Records, evaluated: Records, warm: Records = (), roles: Sequence[str] = ()) -> list[Chart]:
    """What tells whether the training itself is sound: by role, by model, and the clock.

    Args:
      roles: in the order of their colours; empty: those of the records.
    """
    roles = roles or roles_of([*train, *evaluated])
    models = models_of([*train, *warm])

    def by_role(records: Records, figure: str, kind: str = "smooth", suffix: str = "") -> list[Line]:
        return [
            line for i, r in enumerate(roles) for line in _line(records, f"role/{r}/{figure}", f"{r}{suffix}", i, kind)
        ]

    def by_model(figure: str, kind: str = "smooth") -> list[Line]:
        return [line for i, m in enumerate(models) for line in _line(train, f"model/{m}/{figure}", m, i, kind)]

    def without(key: str) -> str:
        return f"metrics.jsonl holds no number under `{key}` in its train lines."

    formed = by_role(train, "well_formed")
    formed += [
        dataclasses.replace(line, dashed=True) for line in by_role(evaluated, "well_formed", "marks", ", evaluation")
    ]
    bounds = gap_bounds(train)
    same_bound = len(set(bounds.values())) == 1
    alarms = tuple({bound: (bound, "alarm" if same_bound else f"alarm of {model}") for model, bound in bounds.items()}.values())
    charts = [
        Chart("entropy", "Entropy", "Of the next token, mean over the sampled tokens. A fall to zero ends exploration.",
              tuple(by_role(train, "entropy")), unit="nats per token", absent=without("role/<role>/entropy")),
        Chart("zero_variance", "Groups that teach nothing", "Share of groups whose rewards are all equal: zero advantage.",
              tuple(by_role(train, "zero_variance")), share=True, absent=without("role/<role>/zero_variance")),
        Chart("well_formed", "Well-formed responses", "Share of responses that the role's grammar can read.",
              tuple(formed), share=True, absent=without("role/<role>/well_formed")),
        Chart("log_prob_gap", "Sampler against scorer", "Largest |Δ log-prob| between what was drawn and what is trained on.",
              tuple(by_model("log_prob_gap", "plain")), unit="nats", log=True, levels=alarms,
              absent=without("model/<model>/log_prob_gap")),
        Chart("grad_norm", "Gradient norm", "Per model. A model whose norm stays at zero learns nothing.",
              tuple(by_model("grad_norm")), log=True, absent=without("model/<model>/grad_norm")),
        Chart("clip_fraction", "Clipped tokens", "Share of response tokens whose ratio left the clip range.",
              tuple(by_model("clip_fraction")), share=True, whole=False, absent=without("model/<model>/clip_fraction")),
    ]  # fmt: skip
    for figure, name, caption in (
        ("mixed_groups", "Mixed groups", "Share of groups that compare answers to different prompts."),
        ("truncated", "Truncated responses", "Share of responses that hit their token budget."),
        ("unfinished_think", "Unfinished thinking", "Share of responses that ended within a think block."),
    ):
        lines = by_role(train, figure)
        if any(np.nanmax(line.values) > 0 for line in lines):  # these are shown when there is something to see
            charts.append(Chart(figure, name, caption, tuple(lines), share=True, whole=False))
    clock = []
    for i, part in enumerate(("sample", "update", "other")):
        clock += _line(train, f"time/{part}", part, i, "plain")
    total = sum(float(np.nansum(line.values)) for line in clock)
    split = ", ".join(f"{line.label} {percent(np.nansum(line.values) / total, 0)}" for line in clock) if total > 0 else ""
    charts.append(
        Chart("time", "Where the time goes", f"Seconds per step. Whole run: {split}." if split else "Seconds per step.",
              tuple(clock), unit="s per step", stacked=True, absent=without("time/{sample,update,other}"))
    )  # fmt: skip
    return charts


def _file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _thin(line: Line, reduce: Any) -> tuple[np.ndarray, np.ndarray]:
    """At most `_POINTS` points; each is `reduce` of its neighbours, NaN apart."""
    steps, values = line.steps, line.values
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if steps.size <= _POINTS:
        return steps, values
    width = -(-steps.size // _POINTS)  # bins of one width: uneven ones would look like a change of the noise
    bins = np.split(np.arange(steps.size), np.arange(width, steps.size, width))
    return np.array([steps[b[-1]] for b in bins]), np.array([reduce(values[b]) for b in bins])


def _moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred; at the ends, over the part of the window that exists."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")


def _decades(chart: Chart) -> bool:
    """Do the positive values span enough for a logarithmic axis? Zeros alone have no logarithm."""
    positive = np.concatenate([line.values[line.values > 0] for line in chart.lines])
    return positive.size > 0 and bool(positive.max() > 5 * positive.min() or chart.levels)


def _points(*columns: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in zip(*columns)]


def _strokes(line: Line, log: bool) -> list[dict[str, Any]]:
    """A line as it is drawn: where it is smoothed, the raw values stand faint behind their moving mean."""
    steps, values = _thin(line, np.max if log else np.mean)
    stroke = {"name": line.label, "color": line.color % len(COLORS), "dashed": line.dashed, "points": _points(steps, values)}
    if line.kind == "marks":
        known = line.band is not None and np.isfinite(line.values) & np.isfinite(line.band).all(axis=0)
        band = [] if line.band is None else _points(line.steps[known], line.band[0][known], line.band[1][known])
        return [stroke | {"marks": True, "band": band}]
    if line.kind == "plain" or steps.size < 10:
        return [stroke]
    raw = [stroke | {"name": "", "faint": True}] if line.kind == "smooth" else []
    return [*raw, stroke | {"points": _points(steps, _moving_mean(values, max(3, steps.size // 20)))}]


def _stacked(lines: Sequence[Line]) -> tuple[list[dict[str, Any]], float]:
    """Lines upon each other, and the height of the chart: the first step compiles, and would flatten the rest."""
    grid, _ = _thin(max(lines, key=lambda line: line.steps.size), np.mean)
    strokes, total = [], np.zeros(grid.size)
    for line in lines:
        below, total = total, total + np.interp(grid, *_thin(line, np.mean))
        stroke = {"name": line.label, "color": line.color % len(COLORS), "points": _points(grid, total)}
        strokes.append(stroke | {"band": _points(grid, below, total)})
    return strokes, max(1e-9, 1.3 * float(np.percentile(total, 98) if total.size > 20 else total.max()))


def save_picture(chart: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Saves `<name>.png` of what `to_json` gave, on white. Raises `files.WriteError` when it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(4.5, 3), dpi=150, layout="constrained")
        axes = figure.add_subplot(title=chart["title"], xlabel="step", ylabel=chart["unit"], yscale="log" if chart["log"] else "linear")
        for line in chart["lines"]:
            color = COLORS[line["color"]]
            look = {"alpha": 0.3 if line.get("faint") else 1, "linestyle": "--" if line.get("dashed") else "-"}
            single = "o" if line.get("marks") or len(line["points"]) == 1 else ""
            axes.plot(*zip(*line["points"]), color=color, label=line["name"] or None, marker=single, markersize=3, **look)
            if line.get("band"):
                axes.fill_between(*zip(*line["band"]), color=color, alpha=0.18, linewidth=0)
        for height, name in chart["levels"]:
            axes.axhline(height, color=COLORS[4], linestyle=":", label=name)
        if chart["whole"] or chart["top"]:
            axes.set_ylim(0, chart["top"] or 1.02)
        axes.legend(fontsize=7, frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture)
    files.replace_file(folder / f"{chart['name']}.png", picture.getvalue())
