"""Plays as HTML: the same task instances before and after training, side by side, turn by turn.

Everything here comes from models and tasks, so every text goes through `page.escape`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.reporting import page

_LONGEST = 6000  # characters of one prompt or response on the page; the file keeps all of them
_CHIP = 60  # characters of one field of the task above its plays
_OPEN_STEPS = 16  # a longer play is folded after that many
_CELLS = 10_000  # of a map that is drawn
_CELL = 10  # units of the map picture's coordinates

_TONES = {"success": "good", "failed": "bad", "horizon": "bad", "aborted": "bad"}  # a game's own words are neither

Episode = Mapping[str, Any]


def pairs(episodes: Sequence[Episode], count: int) -> list[dict[str, Episode]]:
    """The first `count` task instances that were played most completely: before and after if any were, else one of them.

    Returns:
      One dict per instance with the keys "before" and "after", or whichever of "before", "after", "train" there is. The
      order is that of the file and not a choice of good plays.
    """
    by_task: dict[str, dict[str, Episode]] = {}
    for episode in episodes:
        key = json.dumps(episode.get("task"), sort_keys=True)
        by_task.setdefault(key, {}).setdefault(str(episode.get("when")), episode)
    both = [p for p in by_task.values() if "before" in p and "after" in p]
    rest = [p for when in ("after", "train", "before") for p in by_task.values() if when in p and p not in both]
    chosen = both or list({id(p): p for p in rest}.values())
    return [{when: p[when] for when in ("before", "train", "after") if when in p} for p in chosen[:count]]


def play_html(title: str, plays: Mapping[str, Episode], roles: Sequence[str]) -> str:
    """One task instance with its plays side by side. `roles`: in the order of their colours."""
    names = {"before": "Before training", "train": "While training", "after": "After training"}
    task = next(iter(plays.values())).get("task", {})
    facts = {k: v for k, v in task.items() if k != "map"} if isinstance(task, Mapping) else {"task": task}
    chips = "".join(f'<span class="chip">{page.escape(k)} {page.escape(_short(v))}</span>' for k, v in facts.items())
    if any(len(_flat(value)) > _CHIP for value in facts.values()):
        whole = json.dumps(facts, indent=2, ensure_ascii=False)
        chips += page.details("the whole task", f"<pre>{_clip(whole)}</pre>")
    hidden = next((play["hidden"] for play in plays.values() if play.get("hidden")), None)
    if hidden is not None:
        whole = json.dumps(hidden, indent=2, ensure_ascii=False)
        chips += page.details("hidden from the roles: gold answers, tests", f"<pre>{_clip(whole)}</pre>")
    sides = "".join(_side(names.get(when, when), episode, roles) for when, episode in plays.items())
    return f'<div class="play"><h3>{page.escape(title)}</h3><div>{chips}</div><div class="sides">{sides}</div></div>'


def _side(name: str, episode: Episode, roles: Sequence[str]) -> str:
    status = str(episode.get("status", "unknown"))
    turns, score = episode.get("turns"), episode.get("score")
    head = f'<h4>{page.escape(name)}</h4><span class="chip {_TONES.get(status, "")}">{page.escape(status)}</span>'
    if page.is_number(score):
        head += f'<span class="chip">{page.escape(episode.get("headline", "score"))} {page.number(score)}</span>'
    if page.is_number(turns):
        head += f'<span class="chip">{turns} turn{"" if turns == 1 else "s"}</span>'
    if page.is_number(episode.get("step")):
        head += f'<span class="chip">step {episode["step"]}</span>'
    task = episode.get("task")
    rows = task.get("map") if isinstance(task, Mapping) else None
    blocks = [f'<div class="turn">{map_svg(rows)}<div class="note">Start</div></div>'] if _is_map(rows) else []
    trail: list[tuple[int, int]] = _agents(rows) if _is_map(rows) else []
    blocks += [page.missing("Failed:", str(failure)) for failure in episode.get("failures", ())]
    tools: dict[int, list[str]] = {}
    for use in episode.get("tools", ()):
        tools.setdefault(use["after"], []).append(_tool(use))
    blocks += tools.get(0, [])
    for number, step in enumerate(episode.get("steps", ()), start=1):
        blocks += [_step(step, roles, trail), *tools.get(number, [])]
        if _is_map(step.get("state_after")):
            trail = trail + _agents(step["state_after"])
    if not episode.get("steps"):
        blocks.append(page.missing("No steps.", "The episode was recorded without any response."))
    shown, folded = blocks[:_OPEN_STEPS], blocks[_OPEN_STEPS:]
    body = "".join(shown) + (page.details(f"{len(folded)} more", "".join(folded)) if folded else "")
    return f'<article class="side card"><header>{head}</header>{body}</article>'


def _step(step: Mapping[str, Any], roles: Sequence[str], trail: Sequence[tuple[int, int]]) -> str:
    responses = step.get("responses", [])
    chosen = next((r for r in responses if r.get("chosen")), None)
    role = str(step.get("role", "?"))
    color = roles.index(role) % len(page.LIGHT) if role in roles else 0
    when = f"turn {page.escape(step.get('turn', '?'))}"  # numbered from 0, as in the files and in rewards
    text = f'<div class="who"><i style="background:var(--s{color})"></i>{page.escape(role)} '
    text += f'<span class="chip">{when}</span></div>'
    if chosen is None:
        text += page.missing("Nothing chosen.", "No branch of this step took effect.")
    else:
        text += f"<pre>{_clip(chosen.get('text', ''))}</pre><div>{_rewards(chosen)}{_flags(chosen)}</div>"
    text += page.details("prompt", f"<pre>{_clip(step.get('prompt', ''))}</pre>")
    if len(responses) > 1:
        group = f'<div class="note">group {page.escape(step.get("group", "?"))}</div>'
        text += page.details(f"all {len(responses)} branches", group + _branches(responses))
    elif responses and responses[0].get("components"):
        text += page.details("reward components", _branches(responses))
    if _is_map(step.get("state_after")):
        return f'<div class="turn">{map_svg(step["state_after"], trail)}<div>{text}</div></div>'
    return f'<div class="turn plain"><div>{text}</div></div>'


def _tool(use: Mapping[str, Any]) -> str:
    """A tool call: what it wrote."""
    refused = f'<span class="chip bad">refused: {page.escape(use["refused"])}</span>' if use.get("refused") else ""
    head = f'<div class="who">{page.escape(use["node"])} <span class="chip">tool</span>'
    head += f'<span class="chip">turn {page.escape(use["turn"])}</span>{refused}</div>'
    writes = "\n".join(f"{field}: {_flat(value)}" for field, value in use["writes"].items())
    return f'<div class="turn plain"><div>{head}<pre>{_clip(writes)}</pre></div></div>'


def _rewards(response: Mapping[str, Any]) -> str:
    return "".join(
        f'<span class="chip">{name} {page.number(response.get(name))}</span>' for name in ("team", "local") if name in response
    )


def _flags(response: Mapping[str, Any]) -> str:
    flags = "" if response.get("well_formed", True) else '<span class="chip bad">malformed</span>'
    return flags + ('<span class="chip bad">truncated</span>' if response.get("truncated") else "")


def _branches(responses: Sequence[Mapping[str, Any]]) -> str:
    parts = list(dict.fromkeys(name for r in responses for name in r.get("components", {})))
    rows = []
    for response in responses:
        mark = ' <span class="chip good">chosen</span>' if response.get("chosen") else " "
        cells = [_clip(response.get("text", "")) + mark + _flags(response)]
        cells += [page.number(response.get(name)) for name in ("team", "local")]
        cells += [page.number(response.get("components", {}).get(part)) for part in parts]
        style = ' class="chosen"' if response.get("chosen") else ""
        rows.append(f"<tr{style}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{page.escape(name)}</th>" for name in ["response", "team", "local", *parts])
    return f'<div class="scroll branches"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _clip(text: object) -> str:
    text = str(text)
    if not text:
        return '<span class="missing">(empty)</span>'
    if len(text) <= _LONGEST:
        return page.escape(text)
    return f"{page.escape(text[:_LONGEST])}<i> … {len(text) - _LONGEST:,} more characters in episodes.jsonl</i>"


def _flat(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value: object) -> str:
    text = _flat(value)
    return text if len(text) <= _CHIP else text[: _CHIP - 1] + "…"


def _is_map(rows: object) -> bool:
    return isinstance(rows, list) and 0 < sum(map(len, rows)) <= _CELLS and all(isinstance(row, str) and row for row in rows)


def _agents(rows: Sequence[str]) -> list[tuple[int, int]]:
    return [(y, x) for y, row in enumerate(rows) for x, c in enumerate(row) if c in "A*"]


def map_svg(rows: Sequence[str], trail: Sequence[tuple[int, int]] = ()) -> str:
    """A grid as a small picture.

    Args:
      rows: one string per row: `#` wall, `.` or space free, `A` agent, `G` goal, `*` agent on the goal; any other
        character is written into its cell.
      trail: cells (row, column) where the agent stood before, drawn as faint dots.
    """
    height, width = len(rows) * _CELL, max(len(row) for row in rows) * _CELL
    cells = [(y * _CELL, x * _CELL, c) for y, row in enumerate(rows) for x, c in enumerate(row)]
    walls = "".join(f"M{x} {y}h{_CELL}v{_CELL}h-{_CELL}z" for y, x, c in cells if c == "#")
    lines = "".join(f"M0 {y}h{width}" for y in range(_CELL, height, _CELL))
    lines += "".join(f"M{x} 0v{height}" for x in range(_CELL, width, _CELL))
    half = _CELL / 2
    marks = [
        f'<circle cx="{x * _CELL + half:g}" cy="{y * _CELL + half:g}" r="1.5" fill="var(--s0)" opacity=".5"/>' for y, x in trail
    ]
    for y, x, c in cells:
        if c in "G*":
            marks.append(
                f'<rect x="{x + 1.5:g}" y="{y + 1.5:g}" width="{_CELL - 3}" height="{_CELL - 3}" rx="1.5" fill="none" '
                'stroke="var(--s2)" stroke-width="1.8"/>'
            )
        if c in "A*":
            marks.append(f'<circle cx="{x + half:g}" cy="{y + half:g}" r="{2.2 if c == "*" else 2.9}" fill="var(--s0)"/>')
        elif c not in "#. G":
            marks.append(
                f'<text x="{x + half:g}" y="{y + 7.6:g}" font-size="7.5" text-anchor="middle" fill="var(--ink)">'
                f"{page.escape(c)}</text>"
            )
    return (
        f'<svg class="map" viewBox="-.5 -.5 {width + 1} {height + 1}" role="img" aria-label="map">'
        f'<rect width="{width}" height="{height}" fill="var(--soft)" stroke="var(--wall)" stroke-width="1"/>'
        f'<path d="{lines}" stroke="var(--grid)" stroke-width=".5"/><path d="{walls}" fill="var(--wall)"/>{"".join(marks)}</svg>'
    )
