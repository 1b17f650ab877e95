"""The form of a coach's answer: written by rubrics, read from everybody.

    the reason, in as many lines as it takes
    ```better
    what the action should have been, where that was asked for
    ```
    CORRECT: yes
    SCORE: 7.5

The score is a line of its own, the label and a number from 0 to 10 (`7`, `7.5`, `7/10`). Quotations, code and text behind
other words do not count. Two different scores, a sign, or a number beyond 10 make the whole reply unreadable: nobody guesses.
"""

from __future__ import annotations

import math
import re
from typing import Any

from marl_llm.workflows.trajectory import Score

SCORE, CORRECT = "SCORE:", "CORRECT:"
LOWEST, HIGHEST = 0.0, 10.0
BETTER = "better"  # what opens the block of a corrected action
MAX_REASON = 2000  # characters that are kept
MAX_BETTER = 16_000  # characters of a corrected action; a longer one is unreadable
MARK = "\u200b"  # zero width space, which breaks a label's spelling
_NUMBER = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)(?: ?/ ?10)?")
_LABEL = re.compile(r"(?i)\b(s)(core)(?=[ \t]*:)|\b(c)(orrect)(?=[ \t]*:)|(?<=[`~])([ \t]*b)(etter)\b")
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})", re.MULTILINE)


class Unreadable(ValueError):
    """A reply that holds no score; the message tells the coach why."""


def break_labels(text: str) -> str:
    """The text with a zero width mark inside of every label, so that no quotation of it is read as a score."""
    return _LABEL.sub(lambda match: MARK.join(part for part in match.groups() if part), text)


def write_answer(value: Any, correct: bool | None, reason: str, better: str = "") -> str:
    """An answer in the form that `read_answer` reads.

    Raises:
      ValueError: a value outside of [0, 10].
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST <= value <= HIGHEST:
        raise ValueError(f"a score of {value!r}; a rubric gives a number from 0 to 10")
    verdict = "" if correct is None else f"{CORRECT} {'yes' if correct else 'no'}\n"
    number = f"{value:.6f}".rstrip("0").rstrip(".")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", better)), default=0))
    block = f"{fence}{BETTER}\n{better}\n{fence}\n" if better else ""
    return f"{break_labels(_FENCE.sub(MARK, reason))}\n{block}{verdict}{SCORE} {number}"


def read_answer(text: str) -> Score:
    """The score of a reply, and the corrected action if there is one.

    Raises:
      Unreadable: no line is exactly the label and a number from 0 to 10, lines or corrected actions contradict each other, or a corrected
        action is too long.
    """
    scores, verdicts, rest = set(), set(), []
    lines, corrections = _parts(text)
    for line in lines:
        if line.startswith(SCORE):
            scores.add(_number(line.removeprefix(SCORE).strip(" \t")))
        elif line.startswith(CORRECT):
            verdicts.add(_verdict(line.removeprefix(CORRECT).strip(" \t")))
        else:
            rest.append(line)
    if not scores:
        raise Unreadable(f"no line of its own is '{SCORE}' and a number from 0 to 10, outside of quotations and code")
    for kind, values in (("scores", scores), ("verdicts", verdicts), ("corrected actions", set(corrections))):
        if len(values) > 1:
            raise Unreadable(f"two different {kind}")
    better = corrections[0] if corrections else ""
    if len(better) > MAX_BETTER:
        raise Unreadable(f"a corrected action of {len(better):,} characters; at most {MAX_BETTER:,}")
    return Score(scores.pop(), verdicts.pop() if verdicts else None, "\n".join(rest).strip()[:MAX_REASON], better=better)


def _parts(text: str) -> tuple[list[str], list[str]]:
    """(lines outside of fenced code, without the white space at their ends; what stands in fences that are called "better").

    A fence that nobody closes is none: a score behind it counts, and its text corrects nothing.
    """
    fence, name, inside, lines, corrections = "", "", [], [], []
    for line in text.split("\n"):
        opening = _FENCE.match(line)
        if fence:
            inside.append(line)
            if opening and opening[1].startswith(fence) and not line.strip().strip(fence[0]):
                corrections += ["\n".join(inside[:-1])] if name == BETTER else []
                fence, inside = "", []
        elif opening:
            fence, name = opening[1], line[opening.end() :].strip()
        else:
            lines.append(line.rstrip(" \t\r"))
    return [*lines, *(line.rstrip(" \t\r") for line in inside)], corrections


def _number(text: str) -> float:
    match = _NUMBER.fullmatch(text)
    value = math.nan if match is None else float(match[1])
    if not LOWEST <= value <= HIGHEST:
        raise Unreadable(f"{text[:40]!r} after '{SCORE}' is no number from 0 to 10")
    return value


def _verdict(text: str) -> bool:
    if text not in ("yes", "no"):
        raise Unreadable(f"{text[:40]!r} after '{CORRECT}' is neither yes nor no")
    return text == "yes"
