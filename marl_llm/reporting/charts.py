"""The charts of the report, drawn by matplotlib from the records of `metrics.jsonl`.

A chart is drawn once and used twice: as a PNG on white under `plots/`, if asked for, and as SVG inside the page, where its colours
become the variables of the style sheet so that it follows the light or dark mode of the reader.
"""

import dataclasses
import io
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.reporting import files, page

FLOAT32_GAP_BOUND = 1e-4  # nats; for records without `log_prob_gap_bound`: law 2's bound in float32
_MOST = 2.0**53  # of a step and a value: beyond, the arithmetic of axes overflows
_POINTS = 300  # more points than pixels only make the page heavy
_LABEL = 28  # characters of a name in a legend
_SIZE = (4.5, 2.7)  # inches: text keeps a readable size when the chart fills a phone's width

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
    """What to draw, or why there is nothing to draw: `figure_html` asks for at least one line."""

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

    def figure_html(self, plots: pathlib.Path | None) -> str:
        """Draws a chart that has lines, saves `plots/<name>.png` if there is such a folder, and returns the figure as HTML.

        Raises:
          files.WriteError: when the PNG cannot be written.
        """
        head = f"<figcaption><h3>{page.escape(self.title)}</h3><p>{page.escape(self.caption)}</p></figcaption>"
        png, svg = _draw(self, plots is not None)
        if plots is not None:
            files.replace_file(plots / f"{self.name}.png", png)
        return f'<figure class="card">{head}{svg}</figure>'


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
    rows = [r for r in records if key in r and page.is_number(r.get("step")) and abs(r["step"]) < _MOST]
    values = [float(r[key]) if page.is_number(r[key]) and abs(r[key]) < _MOST else np.nan for r in rows]
    return np.array([r["step"] for r in rows], int), np.array(values, float)


def _line(records: Records, key: str, label: str, color: int, kind: str = "smooth", dashed: bool = False) -> list[Line]:
    steps, values = column(records, key)
    label = page.visible(label).strip().lstrip("_") or "?"  # matplotlib hides labels that begin with an underscore
    label = label if len(label) <= _LABEL else label[: _LABEL - 1] + "…"
    return [Line(label, steps, values, color, kind, dashed)] if np.isfinite(values).any() else []


def gap_bounds(train: Records) -> dict[str, float]:
    """Model → largest difference between sampler and scorer of a healthy run, in nats; it depends on the model's dtype."""
    found = {}
    for model in models_of(train):
        bounds = column(train, f"model/{model}/log_prob_gap_bound")[1]
        found[model] = float(np.nanmax(bounds)) if np.isfinite(bounds).any() else FLOAT32_GAP_BOUND
    return found


def _evaluated(evaluated: Records) -> list[Line]:
    """The evaluation curve with its intervals."""
    whole = [r for r in evaluated if "success" in r]
    low, high = ([r[key] if page.is_number(r.get(key)) else np.nan for r in whole] for key in ("success_low", "success_high"))
    lines = _line(whole, "success", "evaluation, fresh instances", 0, "marks")
    if lines and len(lines[0].steps) == len(whole) and np.isfinite(low).any():
        lines = [dataclasses.replace(lines[0], band=(np.array(low, float), np.array(high, float)))]
    return lines


def learning_charts(
    train: Records, evaluated: Records, warm: Records, floor: float | None, headline: str = "success"
) -> list[Chart]:
    """The headline, turns, warm start, and the rewards of each role."""
    success = _line(train, "success", "sampled, while training", 1) + _evaluated(evaluated)
    what = "Share of episodes that reach the goal." if headline == "success" else f"Mean {page.title(headline)} over episodes."
    what += " Thick: training episodes, moving mean." + (" Band: 95 % interval." if any(line.band for line in success) else "")
    turns = _line(train, "turns", "sampled, while training", 1) + _line(evaluated, "turns", "evaluation", 0, "marks")
    charts = [
        Chart("success", page.title(headline), what,
              tuple(success), share=True, levels=() if floor is None else ((floor, "random play"),),
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
        charts.append(Chart("warm_start", "Warm start", "Imitation loss before training, per token.", tuple(losses), unit="nats",
                            absent="metrics.jsonl holds no number under `loss` in its warm_start lines."))  # fmt: skip
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
    one = len(set(bounds.values())) == 1
    alarms = tuple({bound: (bound, "alarm" if one else f"alarm of {model}") for model, bound in bounds.items()}.values())
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
    split = ", ".join(f"{line.label} {page.percent(np.nansum(line.values) / total, 0)}" for line in clock) if total > 0 else ""
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


def _draw(chart: Chart, with_png: bool) -> tuple[bytes, str]:
    """The chart as PNG bytes (none unless asked for: they take half of the time) and as inline SVG."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

    style = {
        "svg.fonttype": "none", "svg.hashsalt": chart.name, "text.parse_math": False, "font.size": 9.5,
        "axes.edgecolor": page.GRID,
        "text.color": page.MUTED, "axes.labelcolor": page.MUTED, "xtick.color": page.MUTED, "ytick.color": page.MUTED,
        "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
        "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "grid.color": page.GRID,
    }  # fmt: skip
    log = chart.log and _decades(chart)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZE, dpi=150, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", linewidth=0.7)
        axes.set_axisbelow(True)
        if log:
            axes.set_yscale("log")
        (_stack if chart.stacked else _plot)(axes, chart)
        for height, name in chart.levels:
            color = page.MUTED if chart.share else page.LIGHT[4]
            axes.axhline(height, color=color, linestyle=":", linewidth=1.3, label=name)
        if log:
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        elif chart.log:
            top = max([np.nanmax(line.values) for line in chart.lines] + [height for height, _ in chart.levels])
            axes.set_ylim(0, 1.2 * top or None)
        if chart.share:
            axes.set_ylim(*((-0.02, 1.02) if chart.whole else (0, None)))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, 0 if chart.whole else None, " %"))
        axes.set_xlabel("step")
        axes.set_ylabel(chart.unit)
        axes.margins(x=0.01)
        handles, labels = axes.get_legend_handles_labels()
        rows = 1 if sum(len(label) + 6 for label in labels) < 56 else 2
        if labels:
            figure.legend(handles, labels, loc="outside upper left", ncols=-(-len(labels) // rows), frameon=False, fontsize=9,
                          handlelength=1.4, columnspacing=1.2, borderaxespad=0.1)  # fmt: skip
        png, svg = io.BytesIO(), io.StringIO()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, for both; `savefig` would draw each twice
        if with_png:
            FigureCanvasAgg(figure).print_png(png)
        for patch in (figure.patch, axes.patch):
            patch.set_facecolor("none")
        FigureCanvasSVG(figure).print_svg(svg)
    return png.getvalue(), _inline(svg.getvalue(), chart)


def _decades(chart: Chart) -> bool:
    """Do the positive values span enough for a logarithmic axis? Zeros alone have no logarithm."""
    positive = np.concatenate([line.values[line.values > 0] for line in chart.lines])
    return positive.size > 0 and bool(positive.max() > 5 * positive.min() or chart.levels)


def _plot(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        color = page.LIGHT[line.color % len(page.LIGHT)]
        steps, values = _thin(line, np.max if chart.log else np.mean)
        look = {"color": color, "label": line.label, "linestyle": "--" if line.dashed else "-"}
        if line.kind == "marks":
            if line.band is not None and steps.size == line.steps.size:
                axes.fill_between(line.steps, *line.band, color=color, alpha=0.18, linewidth=0)
            axes.plot(steps, values, linewidth=1.8, marker="o", markersize=4, zorder=3, **look)
        elif line.kind == "plain" or steps.size < 10:
            axes.plot(steps, values, linewidth=1.4, marker="o" if steps.size == 1 else "", **look)
        else:
            if line.kind == "smooth":
                axes.plot(steps, values, linewidth=0.8, alpha=0.3, color=color)
            width = 1.3 if line.dashed else 1.8
            axes.plot(steps, _moving_mean(values, max(3, steps.size // 20)), linewidth=width, **look)


def _stack(axes: Any, chart: Chart) -> None:
    longest = max(chart.lines, key=lambda line: line.steps.size)
    grid, _ = _thin(longest, np.mean)
    layers = []
    for line in chart.lines:
        steps, values = _thin(line, np.mean)
        layers.append(np.interp(grid, steps, values))
    colors = [page.LIGHT[line.color % len(page.LIGHT)] for line in chart.lines]
    axes.stackplot(grid, layers, labels=[line.label for line in chart.lines], colors=colors, alpha=0.75, linewidth=0)
    # The first step compiles and may last a hundred others: it would flatten the rest.
    total = np.sum(layers, axis=0)
    axes.set_ylim(0, max(1e-9, 1.3 * float(np.percentile(total, 98) if total.size > 20 else total.max())))


def _inline(svg: str, chart: Chart) -> str:
    """SVG for the page: ids made unique to the chart, colours made variables, no metadata, no fixed size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{chart.name}-', svg)
    svg = svg.replace("url(#", f"url(#{chart.name}-").replace('href="#', f'href="#{chart.name}-')
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    for i, color in enumerate(page.LIGHT):
        svg = svg.replace(color, f"var(--s{i})")
    svg = svg.replace(page.GRID, "var(--grid)").replace(page.MUTED, "var(--muted)")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{page.escape(chart.title)}"', 1)
