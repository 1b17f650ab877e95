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
    """One paragraph per verdict, and the count of those that failed. An error that several checks share is printed once."""
    lines, shown = [], set()
    for finding in verdicts:
        failure = finding.status, finding.evidence
        same = [other.name for other in verdicts if finding.status == "fail" and (other.status, other.evidence) == failure]
        if finding.status == "fail" and finding.evidence in shown:
            continue
        shown.add(finding.evidence)
        head = f"{_MARKS[finding.status]}  law {finding.law:<2}  {finding.name:<10} "
        also = f" (the same in {len(same) - 1} more: {', '.join(same[1:])})" if len(same) > 1 else ""
        lines += textwrap.wrap(visible(finding.evidence + also), width, initial_indent=head, subsequent_indent=" " * len(head)) or [head]
    failing = [finding for finding in verdicts if finding.status == "fail"]
    laws = ", ".join(f"law {law}" for law in sorted({finding.law for finding in failing}))
    warned = ", ".join(finding.name for finding in verdicts if finding.status == "warn")
    end = f"{len(failing)} of {len(verdicts)} checks failed: {laws}" if failing else f"all {len(verdicts)} checks passed"
    lines.append(f"{end}; look at the warning of {warned}" if warned else end)
    return "\n".join(lines)


def first_prompts(environment: Environment) -> dict[str, str]:
    """Role -> the first prompt that it reads, on the first training task."""
    subject, heard = Subject(environment), list[tuple[ScriptTurn, str]]()
    tasks = subject.draw(2)[:1]
    subject.play(tasks, heard_by(again(subject.play(tasks, subject.says)), heard))
    prompts: dict[str, str] = {}
    for turn, text in heard:
        prompts.setdefault(turn.role.name, visible(text))
    return prompts
