"""What a run did, on one page: texts, tables and charts as data, which the page's script draws.

Everything is read from the run directory, whether the run has ended or not: `config.json` (`name`, `commit`, `command`, `date`,
`hardware`, `seed`, `assignment`, at the top or inside one of its objects), `metrics.jsonl` (see marl_llm/reporting/metrics.py; `wall_s`,
`cpu_s` and `sampled_tokens` count from the start of the training; lines of the phase eval may hold `success_low` and `success_high`),
`evaluation.json` (`headline`, `steps`, `gain`, and `before`, `after`, `swapped`, `random` and the mixed `pairs`), `graph.svg`, the plays.
"""

import base64
import collections
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.reporting.formats import duration, is_number, number, percent, title
from marl_llm.untrusted import read_file
from marl_llm.viewing import charts
from marl_llm.viewing.runs import StoredRun, find_key

_FILES = ("config.json", "metrics.jsonl", "evaluation.json", "episodes.jsonl")
_PAIRS = 3  # task instances whose plays are shown side by side
_FAULTS = 20
_PICTURE = 8 << 20  # bytes of graph.svg
_LENGTHS = 12  # numbers of turns with a row of their own; longer plays share the last
_FACTS = (
    ("Command", ("command", "argv")),
    ("Commit", ("commit", "git_commit")),
    ("Date", ("date", "started", "start_time")),
    ("Hardware", ("hardware", "devices", "device")),
    ("Seed", ("seed",)),
)

Record = Mapping[str, Any]


def summary(run: StoredRun, rows: Sequence[Record]) -> dict[str, Any]:
    """The summary of a run.

    Args:
      rows: its plays that are at hand, as `run.rows()` gives them.
    """
    records, config, evaluation = run.records(), run.read("config.json"), run.evaluation()
    warm, train, evaluated = ([r for r in records if r.get("phase") == phase] for phase in ("sft", "train", "eval"))
    metric = run.headline()
    parts = {name: part for name, part in evaluation.items() if isinstance(part, Mapping)}
    before, after = (_part(parts, evaluated, name) for name in ("before", "after"))
    roles = sorted({*charts.roles_of([*train, *evaluated]), *(role for row in rows for role in row["paid"])})
    floor = parts.get("random", {}).get("success")
    learning = charts.learning_charts(train, evaluated, warm, floor, metric)
    health = charts.health_charts(train, evaluated, warm, roles)
    graph, fault = _graph(run.path)
    pay = evaluation.get("pay")
    return {
        "name": _name(config, run),
        "lead": _lead(before, after, evaluation.get("gain"), metric),
        "facts": _facts(run, config, train),
        "alarms": [*_alarms(train, [*warm, *train, *evaluated], evaluation.get("steps")), *run.faults()[:_FAULTS], *fault],
        "absent": [name for name in _FILES if not (run.path / name).exists()],
        "tiles": _tiles(before, after, parts, metric),
        "pay": pay if isinstance(pay, str) else "",
        "graph": graph,
        "tables": [table for table in (_who(parts, metric), _models(run, config, train, rows), _by_turns(rows, metric)) if table["rows"]],
        "pairs": pairs(rows),
        "charts": [["Learning", [c.to_json() for c in learning]], ["Health of the training", [c.to_json() for c in health]]],
        "config": json.dumps(config, indent=2, ensure_ascii=False),
    }


def _plain(value: Any) -> str:
    """A config value as one line of text."""
    if isinstance(value, Mapping):
        return " · ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return " ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _name(config: Record, run: StoredRun) -> str:
    tops = [config.get(key) for key in ("name", "config_name", "config_file", "config")]
    value = next((v for v in (*tops, find_key(config, "config_name", "config_file")) if isinstance(v, str) and v), "")
    return pathlib.PurePath(value.split(":")[0]).stem if value else run.name


def _facts(run: StoredRun, config: Record, train: Sequence[Record]) -> list[list[str]]:
    facts = [[label, _plain(value)] for label, names in _FACTS if (value := find_key(config, *names)) is not None]
    last = train[-1] if train else {}
    length = [
        ("step {}", "step", number),
        ("{}", "wall_s", duration),
        ("{} of CPU", "cpu_s", duration),
        ("{} sampled tokens", "sampled_tokens", lambda x: number(int(x))),
    ]
    figures = [text.format(form(last[key])) for text, key, form in length if is_number(last.get(key))]
    return [*facts, *([["Training", " · ".join(figures)]] if figures else []), ["Directory", str(run.path)]]


def _part(parts: Mapping[str, Record], evaluated: Sequence[Record], name: str) -> Record:
    """"before" or "after" of evaluation.json; until there is one, of the evaluation curve."""
    if name in parts:
        return parts[name]
    if len(evaluated) < 2:
        return {}
    record = evaluated[0 if name == "before" else -1]
    ends = [record.get("success_low"), record.get("success_high")]
    return {key: record[key] for key in ("success", "turns", "step") if key in record} | {"interval": ends, "curve": True}


def _interval(part: Record) -> tuple[float, float] | None:
    ends = part.get("interval")
    if isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends)):
        return float(ends[0]), float(ends[1])
    return None


def _span(part: Record) -> str:
    ends = _interval(part)
    return "" if ends is None else f"{100 * ends[0]:.1f}–{100 * ends[1]:.1f}"


def _lead(before: Record, after: Record, gain: Any, metric: str) -> str:
    if not (is_number(before.get("success")) and is_number(after.get("success"))):
        return ""
    first, last = percent(before["success"]), percent(after["success"])
    text = f"{title(metric)} on evaluation instances: {first} before training, {last} after"
    if "step" in after:  # of the curve: the run has not ended
        text += f" {number(after['step'])} steps so far"
    if span := _span(after):
        text += f" (interval {span}\u00a0%" + (f", {number(after['episodes'])} episodes)" if is_number(after.get("episodes")) else ")")
    if isinstance(gain, Mapping) and is_number(gain.get("difference")):
        ends = _interval(gain)
        text += f"; task by task {100 * gain['difference']:+.1f} points"
        text += "" if ends is None else f" (interval {100 * ends[0]:+.1f} to {100 * ends[1]:+.1f})"
    return text + "."


def _alarms(train: Sequence[Record], records: Sequence[Record], ended: Any) -> list[str]:
    """What to look at first."""
    alarms = []
    for model, bound in charts.gap_bounds(train).items():
        steps, gaps = charts.column(train, f"model/{model}/log_prob_gap")
        over = gaps > bound
        if over.any():
            alarms.append(
                f"The log-probs of {model} differ between sampler and scorer by up to {np.nanmax(gaps):.2g} nats (alarm: "
                f"{bound:g}), first at step {steps[over][0]}."
            )
        _, norms = charts.column(train, f"model/{model}/grad_norm")
        if norms.size and not (norms > 0).any():
            alarms.append(f"{model} never got a gradient: its gradient norm is zero at every step.")
    broken = [record for record in records if isinstance(record.get("non_finite"), list)]
    if broken:
        keys, step = ", ".join(map(str, broken[0]["non_finite"])), broken[0].get("step", "?")
        alarms.append(f"Lines of metrics.jsonl with NaN or infinity: {len(broken)}, first at step {step}: {keys}.")
    now = train[-1].get("step") if train else None
    if is_number(ended) and is_number(now) and now > ended:  # earlier versions left it there
        alarms.append(f"evaluation.json tells of the run as it was at step {ended}; it has gone on to step {now} since.")
    return alarms


def _tiles(before: Record, after: Record, parts: Mapping[str, Record], metric: str) -> list[list[str]]:
    """[label, value, note] of each headline figure."""
    tiles, span = [], _span(after)
    if "success" in before or "success" in after:
        source = "from the evaluation curve: the run has not ended" if "curve" in after else _well_formed(after)
        note = "; ".join(filter(None, [f"after: {span}" if span else "", source]))
        tiles.append([f"{title(metric)}, before → after", f"{percent(before.get('success'))} → {percent(after.get('success'))}", note])
    if "turns" in before or "turns" in after:
        tiles.append(["Turns, before → after", f"{_turns(before)} → {_turns(after)}", "mean per episode"])
    if "random" in parts:
        tiles.append(["Random play", percent(parts["random"].get("success")), f"{metric.replace('_', ' ')} of random play"])
    if swapped := parts.get("swapped"):
        tiles.append(["Roles swapped", percent(swapped.get("success")), _well_formed(swapped) or "each model in the other's role"])
    return tiles


def _well_formed(part: Record) -> str:
    roles = part.get("roles")
    shares = {role: x.get("well_formed") for role, x in roles.items() if isinstance(x, Mapping)} if isinstance(roles, Mapping) else {}
    known = [f"{role} {percent(share, 0)}" for role, share in shares.items() if is_number(share)]
    return f"well-formed: {', '.join(known)}" if known else ""


def _turns(part: Record) -> str:
    return f"{part['turns']:.2f}" if is_number(part.get("turns")) else "–"


def _graph(path: pathlib.Path) -> tuple[str, list[str]]:
    """The picture of a workflow as the source of an <img>, inside which nothing can run; and why it cannot be read."""
    try:
        picture = read_file(path / "graph.svg", _PICTURE)
    except FileNotFoundError:
        return "", []
    except (OSError, ValueError) as error:
        return "", [f"graph.svg cannot be read ({error})."]
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}", []


def _who(parts: Mapping[str, Record], metric: str) -> dict[str, Any]:
    names = {"before": "before training", "after": "after training", "swapped": "roles swapped"}
    teams = [(label, parts[name]) for name, label in names.items() if name in parts]
    teams += [(pair, part) for pair, part in parts.get("pairs", {}).items() if isinstance(part, Mapping)]
    teams += [("random play", parts["random"])] if "random" in parts else []
    rows = []
    for label, part in teams:
        success, ends = part.get("success"), _interval(part)
        bar = {"share": success, "ends": ends or [success, success]} if is_number(success) else ""
        aborted = f" {number(part['aborted'])} aborted" if is_number(part.get("aborted")) and part["aborted"] else ""
        formed = _well_formed(part).removeprefix("well-formed: ") or "–"
        rows.append([label, percent(success), _span(part), bar, _turns(part), number(part.get("episodes")) + aborted, formed])
    intro = (
        f"{title(metric)} of teams made of trained and untrained models, with 95 % intervals. The share of well-formed responses "
        "tells a lost output format from a lost skill: a swapped model that cannot write the other role's language proves no "
        "specialisation."
    )
    head = ["team", metric.replace("_", " "), "interval", "", "turns", "episodes", "well-formed by role"]
    return {"title": "Who plays with whom", "intro": intro, "head": head, "rows": rows}


def _models(run: StoredRun, config: Record, train: Sequence[Record], plays: Sequence[Record]) -> dict[str, Any]:
    assignment = find_key(config, "assignment")
    if not isinstance(assignment, Mapping):
        assignment = run.play(plays[-1]["id"])["roles"] if plays else {}
    last, rows = train[-1] if train else {}, []
    for role, model in assignment.items():
        figures = [last.get(key) for key in (f"model/{model}/updates", f"role/{role}/reward", f"role/{role}/entropy")]
        rows.append([role, str(model), *map(number, figures), percent(last.get(f"role/{role}/well_formed"))])
    intro = "Roles that name the same model share its parameters. The figures are those of the last training line."
    head = ["role", "model", "updates", "reward", "entropy, nats", "well-formed"]
    return {"title": "Roles and models", "intro": intro, "head": head, "rows": rows}


def _by_turns(rows: Sequence[Record], metric: str) -> dict[str, Any]:
    """What plays score and are paid by the number of their turns; no rows where all have the same. Aborted plays are left out."""
    played = sorted((row for row in rows if row["status"] != "aborted"), key=lambda row: row["turns"])
    lengths = sorted({row["turns"] for row in played})
    groups: dict[str, list[Record]] = collections.defaultdict(list)
    for row in played if len(lengths) > 1 else ():
        shared = len(lengths) > _LENGTHS and row["turns"] >= lengths[_LENGTHS - 1]
        groups[f"{lengths[_LENGTHS - 1]} and more" if shared else str(row["turns"])].append(row)
    cells = []
    for turns, group in groups.items():
        score, pay = (statistics.fmean(values) for values in ([r["score"] or 0.0 for r in group], [sum(r["paid"].values()) for r in group]))
        cells.append([turns, number(len(group)), number(score), number(pay)])
    intro = (
        "Means over the recorded plays. The pay of a play is the sum of the team's and the roles' own rewards of its responses, which "
        "returns that add up turns (to_go, trajectory) train on. If it grows with the turns while the score does not, prolonging pays: "
        "see python -m marl_llm check."
    )
    head = ["turns", "plays", metric.replace("_", " "), "pay of a play"]
    return {"title": "Pay by turns", "intro": intro, "head": head, "rows": cells}


def pairs(rows: Sequence[Record]) -> list[dict[str, str]]:
    """Plays of the first task instances before and after training, else of those that were played at all: when → id.

    The order is that of the file and not a choice of good plays.
    """
    by_task: dict[str, dict[str, str]] = {}
    for row in rows:
        by_task.setdefault(row["key"], {}).setdefault(str(row["when"]), row["id"])
    both = [plays for plays in by_task.values() if {"before", "after"} <= plays.keys()]
    rest = sorted(by_task.values(), key=lambda plays: min(["after", "train", "before"].index(when) for when in plays))
    return [{when: plays[when] for when in ("before", "train", "after") if when in plays} for plays in (both or rest)[:_PAIRS]]
