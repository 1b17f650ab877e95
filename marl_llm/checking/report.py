"""The report of a check as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from marl_llm.checking.plays import Subject, again, heard_by
from marl_llm.checking.verdict import Finding
from marl_llm.reporting.formats import visible
from marl_llm.workflows import Environment, ScriptTurn

_MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL", "note": "note"}


def report_text(verdicts: Sequence[Finding], width: int = 140) -> str:
    """One paragraph per verdict, and the count of those that failed. What several checks failed by stands in the first one's paragraph."""
    lines, told = [], set()
    for one in verdicts:
        same = [other.name for other in verdicts if one.status == "fail" and (other.status, other.evidence) == ("fail", one.evidence)]
        if one.status == "fail" and one.evidence in told:
            continue
        told.add(one.evidence)
        head = f"{_MARKS[one.status]}  law {one.law:<2}  {one.name:<10} "
        also = f" (the same in {len(same) - 1} more: {', '.join(same[1:])})" if len(same) > 1 else ""
        lines += textwrap.wrap(visible(one.evidence + also), width, initial_indent=head, subsequent_indent=" " * len(head)) or [head]
    failing = [one for one in verdicts if one.status == "fail"]
    laws = ", ".join(f"law {law}" for law in sorted({one.law for one in failing}))
    warned = ", ".join(one.name for one in verdicts if one.status == "warn")
    end = f"{len(failing)} of {len(verdicts)} checks failed: {laws}" if failing else f"all {len(verdicts)} checks passed"
    lines.append(f"{end}; look at the warning of {warned}" if warned else end)
    return "\n".join(lines)


def first_prompts(environment: Environment) -> dict[str, str]:
    """Role -> the first prompt that it reads, on the first training task."""
    subject, heard = Subject(environment), list[tuple[ScriptTurn, str]]()
    tasks = subject.draw(2)[:1]
    subject.play(tasks, heard_by(again(subject.play(tasks, subject.says)), heard))
    found: dict[str, str] = {}
    for turn, text in heard:
        found.setdefault(turn.role.name, visible(text))
    return found
