"""The viewer in a terminal: the list of plays, or one play as a conversation."""

from __future__ import annotations

from typing import Any

from marl_llm.reporting.formats import visible
from marl_llm.viewing.runs import StoredRun

_COLORS, _PLAIN = (34, 33, 32, 35, 31, 36), "\033[0m"


def list_text(run: StoredRun, text: str = "") -> str:
    """One line per play; only those in whose texts `text` occurs."""
    rows, head = run.rows(), f"{'play':<24} {'when':<7} {'step':>5} {'status':<9} {'score':>6} {'turns':>5}  paid"
    if text:
        matches = set(run.search(text))
        rows = [row for row in rows if row["id"] in matches]
    lines = [f"{run.path}: {len(rows)} plays", head]
    for row in rows:
        paid = ", ".join(f"{role} {value:+.2f}" for role, value in row["paid"].items())
        score, step = ("" if row[name] is None else row[name] for name in ("score", "step"))
        score = f"{score:.2f}" if score != "" else ""
        lines.append(visible(f"{row['id']:<24} {row['when']:<7} {step:>5} {row['status']:<9} {score:>6} {row['turns']:>5}  {paid}"))
    lines += [visible(f"left out: {fault}") for fault in run.faults()]
    return "\n".join(lines)


def play_text(run: StoredRun, name: str, color: bool = False) -> str:
    """A play: what each role read and said, what tools gave, and what was paid."""
    run.refresh()
    play = run.play(name)
    roles = list(play["roles"])
    lines = [visible(f"{name}: {play['status']}, {play['turns']} turns"), visible(f"task {play['task']}")]
    tools: dict[int, list[dict[str, Any]]] = {}
    for use in play.get("tools", ()):
        tools.setdefault(use["after"], []).append(use)
    lines += [line for use in tools.get(0, ()) for line in _tool(use)]
    for number, step in enumerate(play["steps"]):
        call = run.call(name, number)
        paint = f"\033[{_COLORS[roles.index(step['role']) % len(_COLORS)]}m" if color else ""
        read = visible(f"[{number}] turn {step['turn']} {step['role']} read")
        lines += ["", f"{paint}{read}{_PLAIN * color}", _indented(call["prompt"])]
        for response, text in zip(step["responses"], call["texts"]):
            parts = visible(" ".join(f"{part}={value:+.2f}" for part, value in response["components"].items()))
            marks = "" if response["well_formed"] else ", malformed"
            chosen = "said" if response["chosen"] else "could have said"
            pay = f"team {response['team']:+.2f}, local {response['local']:+.2f}{marks}; {parts}"
            lines.append(f"{paint}    {chosen}{_PLAIN * color} ({pay})")
            lines.append(_indented(text))
        lines += [line for use in tools.get(number + 1, ()) for line in _tool(use)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join("      " + line for line in visible(text).splitlines()) or "      (empty)"


def _tool(use: dict[str, Any]) -> list[str]:
    lines = ["", f"    tool {visible(use['node'])} ({use['seconds']:.2f} s)"]
    for word, fields in (("read", use.get("reads", {})), ("wrote", use["writes"])):
        lines += [f"      {word} {visible(key)}: {visible(value)}" for key, value in fields.items()]
    return lines
