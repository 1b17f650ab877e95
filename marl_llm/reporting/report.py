"""`report.html`: one page that tells what a run did, self-contained, from the files of its work directory.

    python -m marl_llm.reporting.report runs/first

The run may still be going on, or have been interrupted: only the page and its charts are written. It reads whatever is there, and says
what is missing and why:

- `config.json`: `name` (or `config_name`, `config_file`), `commit`, `command`, `date`, `hardware`, `seed`, `assignment`
  (role → model), at the top or inside one of its objects; the rest is shown as it is.
- `graph.svg`: the picture of a workflow, if one was trained.
- `metrics.jsonl`: see marl_llm/reporting/metrics.py; in its train lines `wall_s`, `cpu_s` (seconds) and `sampled_tokens`
  count from the start of the training, and `model/<model>/log_prob_gap_bound` is the bound of a healthy `log_prob_gap`; eval
  lines may hold the interval's ends as `success_low` and `success_high`. `evaluation.json`: `headline` (the metric that
  `success` is), `steps`, `gain`, and `before`, `after`, `swapped`, `random` and the mixed `pairs`, each with `success`,
  `interval`, `episodes`, `aborted`, `turns` and `roles`; `episodes.jsonl`: see episodes.py.

The charts are also saved as PNGs under `plots/`.
"""

import argparse
import base64
import dataclasses
import datetime
import functools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.old_names import convert_evaluation, convert_line
from marl_llm.reporting import charts, episodes, files, metrics, page, transcripts, turns
from marl_llm.untrusted import read_file, read_json_file

_TRANSCRIPTS = 3
_PICTURE = 8 << 20  # bytes of graph.svg
_FACTS = (
    ("Command", ("command", "argv")),
    ("Commit", ("commit", "git_commit")),
    ("Date", ("date", "started", "start_time")),
    ("Hardware", ("hardware", "devices", "device")),
    ("Seed", ("seed",)),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a work directory holds, as far as it can be read."""

    workdir: pathlib.Path
    config: Mapping[str, Any]
    warm: list[dict[str, Any]]  # records of the phase warm_start
    train: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]  # records of the phase eval
    evaluation: Mapping[str, Any]
    plays: list[dict[str, Any]]
    absent: Mapping[str, str]  # file name → why it is not there or not whole


def write_report(workdir: files.Path, pngs: bool = True) -> pathlib.Path:
    """Writes `report.html` and, if asked for, the PNGs under `plots/`; missing or damaged inputs become a sentence on the page.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: when there is no such work directory.
      files.WriteError: when the page or a PNG cannot be written.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise FileNotFoundError(f"{workdir} is not a directory: pass the work directory of a run (its --workdir)")
    run = _load(workdir)
    name = _name(run)
    drawn = functools.partial(_charts, plots=workdir / "plots" if pngs else None)
    sections = (_alarms, _headline, _graph, _evaluation, drawn, _who, _by_turns, _plays, _config)
    body = "\n".join([_header(run, name), *(section(run) for section in sections)])
    path = workdir / "report.html"
    files.replace_file(path, page.document(f"{name}: run report", body).encode("utf-8"))
    return path


def _load(workdir: pathlib.Path) -> Run:
    absent: dict[str, str] = {}

    def whole(name: str) -> Mapping[str, Any]:
        try:
            return read_json_file(workdir / name)
        except FileNotFoundError:
            absent[name] = "there is no such file in the work directory."
        except (OSError, ValueError) as error:
            absent[name] = f"it cannot be read ({error})."
        return {}

    def lines(name: str) -> list[dict[str, Any]]:
        try:
            objects, faults = files.read_lines(workdir / name)
        except FileNotFoundError:
            absent[name] = "there is no such file in the work directory."
            return []
        except (OSError, files.LineError) as error:
            absent[name] = f"it cannot be read ({error})."
            return []
        if faults:
            absent[name] = f"{len(faults)} of its lines were left out: {faults[0]}."
        elif not objects:
            absent[name] = "it is empty so far."
        return objects

    records = [convert_line(record) for record in lines(metrics.FILE_NAME)]
    warm, train, evaluated = ([r for r in records if r.get("phase") == phase] for phase in metrics.PHASES)
    plays = []
    for episode in {str(e.get("episode")): convert_line(e) for e in lines(episodes.FILE_NAME)}.values():
        try:
            episodes.validate_episode(episode)
            plays.append(episode)
        except episodes.EpisodeError as error:
            absent[episodes.FILE_NAME] = f"an episode was left out, it does not follow the schema: {error}."
    return Run(workdir, whole("config.json"), warm, train, evaluated, convert_evaluation(whole("evaluation.json")), plays, absent)


def _find(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of `names` at the top of the config, else inside one of its objects; None if there is none."""
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    for level in (config, *inner):
        for name in names:
            if level.get(name) not in (None, "", [], {}):
                return level[name]
    return None


def _name(run: Run) -> str:
    tops = [run.config.get(key) for key in ("name", "config_name", "config_file", "config")]
    value = next((v for v in (*tops, _find(run.config, ("config_name", "config_file"))) if isinstance(v, str) and v), "")
    return pathlib.PurePath(value.split(":")[0]).stem if value else run.workdir.resolve().name


def _plain(value: Any) -> str:
    """A config value as one line of text."""
    if isinstance(value, Mapping):
        return " · ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_plain(v) for v in value)
    return str(value)


def _header(run: Run, name: str) -> str:
    rows = []
    for label, names in _FACTS:
        value = _find(run.config, names)
        if value is not None:
            text = page.escape(_plain(value))
            rows.append((label, f"<code>{text}</code>" if label in ("Command", "Commit") else text))
    last = run.train[-1] if run.train else {}
    length = [f"step {page.number(last['step'])}"] if page.is_number(last.get("step")) else []
    if page.is_number(last.get("wall_s")):
        length.append(page.duration(last["wall_s"]))
    if page.is_number(last.get("cpu_s")):
        length.append(f"{page.duration(last['cpu_s'])} of CPU")
    if page.is_number(last.get("sampled_tokens")):
        length.append(f"{page.number(int(last['sampled_tokens']))} sampled tokens")
    if length:
        rows.append(("Training", page.escape(" · ".join(length))))
    rows.append(("Directory", f"<code>{page.escape(run.workdir)}</code>"))
    facts = "<dl>" + "".join(f"<dt>{label}</dt><dd>{value}</dd>" for label, value in rows) + "</dl>"
    lost = "" if run.config else page.missing("config.json:", run.absent.get("config.json", "it is empty."))
    summary = _summary(run)
    lead = f'<p class="summary">{page.escape(summary)}</p>' if summary else ""
    return f'<header><div class="kicker">marl_llm · run report</div><h1>{page.escape(name)}</h1>{lead}{facts}{lost}</header>'


def _part(run: Run, name: str) -> Mapping[str, Any]:
    """One part of evaluation.json ("before", "after", …); before and after fall back on the evaluation curve."""
    part = run.evaluation.get(name)
    if isinstance(part, Mapping):
        return part
    if name in ("before", "after") and len(run.evaluated) > 1:
        record = run.evaluated[0 if name == "before" else -1]
        ends = [record.get("success_low"), record.get("success_high")]
        return {key: record[key] for key in ("success", "turns", "step") if key in record} | {"interval": ends}
    return {}


def _metric(run: Run) -> str:
    """The name of the metric that `success` is: of the evaluation, else of the config or the plays recorded so far."""
    played = next((play["headline"] for play in run.plays if play.get("headline")), None)
    found = (run.evaluation.get("headline"), _find(run.config, ("headline",)), played)
    return next((name for name in found if isinstance(name, str) and name), "success")


def _roles(run: Run) -> list[str]:
    """All roles of the run by name: the order of their colours, in charts and plays alike."""
    return sorted({*charts.roles_of([*run.train, *run.evaluated]), *(role for play in run.plays for role in play["roles"])})


def _interval(part: Mapping[str, Any]) -> tuple[float, float] | None:
    ends = part.get("interval")
    if isinstance(ends, list) and len(ends) == 2 and all(page.is_number(end) for end in ends):
        return float(ends[0]), float(ends[1])
    return None


def _summary(run: Run) -> str:
    before, after = _part(run, "before"), _part(run, "after")
    if not (page.is_number(before.get("success")) and page.is_number(after.get("success"))):
        return ""
    first, last = page.percent(before["success"]), page.percent(after["success"])
    text = f"{page.title(_metric(run))} on evaluation instances: {first} before training, {last} after"
    if "step" in after:  # of the curve: the run has not ended
        text += f" {page.number(after['step'])} steps so far"
    ends = _interval(after)
    if ends is not None:
        text += f" (interval {100 * ends[0]:.1f}–{100 * ends[1]:.1f}\u00a0%"
        text += f", {page.number(after['episodes'])} episodes)" if page.is_number(after.get("episodes")) else ")"
    gain = run.evaluation.get("gain")
    if isinstance(gain, Mapping) and page.is_number(gain.get("difference")):
        ends = _interval(gain)
        span = "" if ends is None or not np.isfinite(ends).all() else f" (interval {100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})"
        text += f"; task by task {100 * gain['difference']:+.1f} points{span}"
    return text + "."


def _alarms(run: Run) -> str:
    found = []
    for model, bound in charts.gap_bounds(run.train).items():
        steps, gaps = charts.column(run.train, f"model/{model}/log_prob_gap")
        over = gaps > bound
        if over.any():
            found.append(
                f"The log-probs of {model} differ between sampler and scorer by up to {np.nanmax(gaps):.2g} nats (alarm: "
                f"{bound:g}), first at step {steps[over][0]}."
            )
        _, norms = charts.column(run.train, f"model/{model}/grad_norm")
        if norms.size and not (norms > 0).any():
            found.append(f"{model} never got a gradient: its gradient norm is zero at every step.")
    broken = [r for r in (*run.warm, *run.train, *run.evaluated) if isinstance(r.get("non_finite"), list)]
    if broken:
        keys = ", ".join(map(str, broken[0]["non_finite"]))
        where = f"first at step {broken[0].get('step', '?')}"
        found.append(f"Lines of metrics.jsonl with NaN or infinity: {len(broken)}, {where}: {keys}.")
    for name in (metrics.FILE_NAME, episodes.FILE_NAME):
        if name in run.absent and "left out" in run.absent[name]:
            found.append(f"{name}: {run.absent[name]}")
    ended, now = run.evaluation.get("steps"), run.train[-1].get("step") if run.train else None
    if page.is_number(ended) and page.is_number(now) and now > ended:
        found.append(f"evaluation.json tells of the run as it was at step {ended}; it has gone on to step {now} since.")
    if not found:
        return ""
    items = "".join(f"<li>{page.escape(sentence)}</li>" for sentence in found)
    return f'<div class="alarms"><b>Look at this first</b><ul>{items}</ul></div>'


def _headline(run: Run) -> str:
    before, after = _part(run, "before"), _part(run, "after")

    def tile(label: str, value: str, note: str) -> str:
        head = f'<div class="label">{label}</div><div class="value">{value}</div>'
        return f'<div class="card">{head}<div class="note">{note}</div></div>'

    def formed(part: Mapping[str, Any]) -> str:
        shares = _well_formed(part)
        return f"well-formed: {page.escape(shares)}" if shares else ""

    tiles = []
    if "success" in before or "success" in after:
        source = "" if "after" in run.evaluation else "from the evaluation curve: the run has not ended, evaluation.json is not there"
        value = f"<small>{page.percent(before.get('success'))} →</small> {page.percent(after.get('success'))}"
        ends = _interval(after)
        notes = ["" if ends is None else f"after: {_span(ends)}", source or formed(after)]
        name = page.escape(page.title(_metric(run)))
        tiles.append(tile(f"{name}, before → after", value, "; ".join(note for note in notes if note)))
    if "turns" in before or "turns" in after:
        value = f"<small>{_turns(before)} →</small> {_turns(after)}"
        tiles.append(tile("Turns, before → after", value, "mean per episode"))
    floor = f"{page.escape(_metric(run).replace('_', ' '))} of random play"
    for name, label, note in (("random", "Random floor", floor), ("swapped", "Roles swapped", "")):
        part = _part(run, name)
        if part:
            tiles.append(tile(label, page.percent(part.get("success")), note or formed(part) or "each model in the other's role"))
    body = f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""
    if not tiles:
        why = f"evaluation.json: {run.absent.get('evaluation.json', 'it holds no success.')} "
        body = page.missing("No headline figures.", why + "metrics.jsonl has fewer than two eval lines to stand in for it.")
    pay = run.evaluation.get("pay")
    return page.section("In short", body, pay if isinstance(pay, str) else "")


def _span(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:.1f}–{100 * ends[1]:.1f}"


def _well_formed(part: Mapping[str, Any]) -> str:
    roles = part.get("roles")
    if not isinstance(roles, Mapping):
        return ""
    shares = {r: v.get("well_formed") for r, v in roles.items() if isinstance(v, Mapping)}
    return ", ".join(f"{role} {page.percent(share, 0)}" for role, share in shares.items() if page.is_number(share))


def _turns(part: Mapping[str, Any]) -> str:
    return f"{part['turns']:.2f}" if page.is_number(part.get("turns")) else "–"


def _graph(run: Run) -> str:
    """The picture of a workflow, which its run leaves in graph.svg; nothing where there is none."""
    try:
        picture = base64.b64encode(read_file(run.workdir / "graph.svg", _PICTURE)).decode()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return page.section("Who speaks when", page.missing("graph.svg:", f"it cannot be read ({error})."))
    image = f'<img alt="graph of the workflow" src="data:image/svg+xml;base64,{picture}">'  # inside <img> nothing of it can run
    return page.section("Who speaks when", f"<p>{image}</p>", "The workflow's graph; behind each role, its model.")


def _evaluation(run: Run) -> str:
    title, metric = "Who plays with whom", _metric(run).replace("_", " ")
    names = {"before": "before training", "after": "after training", "swapped": "roles swapped"}
    rows = [(label, run.evaluation[name]) for name, label in names.items() if isinstance(run.evaluation.get(name), Mapping)]
    mixed = run.evaluation.get("pairs")
    rows += [(pair, part) for pair, part in mixed.items() if isinstance(part, Mapping)] if isinstance(mixed, Mapping) else []
    rows += [("random play", run.evaluation["random"])] if isinstance(run.evaluation.get("random"), Mapping) else []
    if not rows:
        why = run.absent.get("evaluation.json", "it holds none of before, after, swapped, pairs, random.")
        return page.section(title, page.missing("evaluation.json:", f"{why} It is written when the final evaluation is done."))
    cells = []
    for label, part in rows:
        ends = _interval(part)
        success = f"<b>{page.percent(part.get('success'))}</b>"
        if ends is not None:
            success += f' <span class="note">{_span(ends)}</span>'
        cells.append(
            [page.escape(label), success, _bar(part.get("success"), ends), _turns(part),
             _episode_count(part), page.escape(_well_formed(part) or "–")]
        )  # fmt: skip
    intro = (
        f"{page.title(metric)} of teams made of trained and untrained models, with 95 % intervals. The share of well-formed responses "
        "tells a lost output format from a lost skill: a swapped model that cannot write the other role's language proves no "
        "specialisation."
    )
    return page.section(title, page.table(["team", metric, "", "turns", "episodes", "well-formed by role"], cells), intro)


def _episode_count(part: Mapping[str, Any]) -> str:
    aborted = part.get("aborted")
    note = f' <span class="note">{page.number(aborted)} aborted</span>' if page.is_number(aborted) and aborted else ""
    return page.number(part.get("episodes")) + note


def _bar(success: object, ends: tuple[float, float] | None) -> str:
    if not page.is_number(success):
        return ""
    low, high = (min(max(end, 0.0), 1.0) for end in (ends or (success, success)))
    span = f'<i style="left:{100 * low:.1f}%;width:{100 * max(high - low, 0):.1f}%"></i>'
    return f'<span class="bar">{span}<b style="left:{100 * min(max(float(success), 0.0), 1.0):.1f}%"></b></span>'


def _charts(run: Run, plots: pathlib.Path | None) -> str:
    floor = _part(run, "random").get("success")
    learning = charts.learning_charts(run.train, run.evaluated, run.warm, float(floor) if page.is_number(floor) else None, _metric(run))
    health = charts.health_charts(run.train, run.evaluated, run.warm, _roles(run))
    if not (run.train or run.evaluated or run.warm):
        why = run.absent.get(metrics.FILE_NAME, "it has no line of a known phase.")
        return page.section("Learning", page.missing("metrics.jsonl:", f"{why} A run writes a line after each step."))
    parts = []
    for title, group in (("Learning", learning), ("Health of the training", health)):
        body = "".join(chart.figure_html(plots) for chart in group if chart.lines)
        absent = "".join(page.missing(f"{chart.title}:", chart.absent) for chart in group if not chart.lines)
        parts.append(page.section(title, (f'<div class="charts">{body}</div>' if body else "") + absent))
    return "".join(parts)


def _who(run: Run) -> str:
    title = "Roles and models"
    assignment = _find(run.config, ("assignment",))
    if not isinstance(assignment, Mapping):
        assignment = run.plays[-1]["roles"] if run.plays else {}
    if not assignment:
        return page.section(title, page.missing("Unknown.", "config.json has no `assignment`, and no episode names its roles."))
    last = run.train[-1] if run.train else {}
    rows = []
    for role, model in assignment.items():
        rows.append([page.escape(role), f"<code>{page.escape(model)}</code>", page.number(last.get(f"model/{model}/updates")),
                     page.number(last.get(f"role/{role}/reward")), page.number(last.get(f"role/{role}/entropy")),
                     page.percent(last.get(f"role/{role}/well_formed"))])  # fmt: skip
    head = ["role", "model", "updates", "reward", "entropy, nats", "well-formed"]
    intro = "Roles that name the same model share its parameters. The figures are those of the last training line."
    return page.section(title, page.table(head, rows), intro)


def _by_turns(run: Run) -> str:
    return turns.table_html(run.plays, _metric(run))


def _plays(run: Run) -> str:
    title = "How the team plays"
    shown = transcripts.pairs(run.plays, _TRANSCRIPTS)
    if not shown:
        why = run.absent.get(episodes.FILE_NAME, "it holds no episode.")
        return page.section(title, page.missing("episodes.jsonl:", why))
    whens = {when for plays in shown for when in plays}
    intro = "The first instances recorded, not picked for their outcome. Turns are numbered from 0, as in the files."
    if any("map" in play["task"] for plays in shown for play in plays.values()):
        intro += " Blue disc: agent; green frame: goal; small dots: where the agent was before."
    note = ""
    if not {"before", "after"} <= whens:
        lacking = " and ".join(when for when in ("before", "after") if when not in whens)
        note = page.missing(f"No plays {lacking} training of these instances.", _why_no_plays(run, lacking))
    body = "".join(transcripts.play_html(f"Instance {i}", plays, _roles(run)) for i, plays in enumerate(shown, start=1))
    return page.section(title, note + body, intro)


def _why_no_plays(run: Run, lacking: str) -> str:
    if "after" not in run.evaluation:
        return "The final evaluation, which is still to come, records plays of the same instances before and after training."
    recorded = {str(play["when"]) for play in run.plays}
    others = set(lacking.split(" and ")) <= recorded
    return "episodes.jsonl holds plays of other instances only." if others else "episodes.jsonl holds none."


def _config(run: Run) -> str:
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = ""
    if run.config:
        text = json.dumps(run.config, indent=2, ensure_ascii=False)
        body = page.section("Configuration", page.details("the whole config.json", f"<pre>{page.escape(text)}</pre>"))
    return f"{body}<footer>Made {made} from the files in {page.escape(run.workdir)}; the charts are also in plots/.</footer>"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m marl_llm.reporting.report", description="Write report.html of a run.")
    parser.add_argument("workdir", help="the run's work directory, for instance runs/first")
    try:
        path = write_report(parser.parse_args(argv).workdir)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
