"""The form of a coach's answer: written by rubrics, read from everybody.

    the reason, in as many lines as it takes
    CORRECT: yes
    SCORE: 7.5

The score is a line of its own, the label and a number from 0 to 10 (`7`, `7.5`, `7/10`). What stands in a quotation, in code or behind
other words is no such line. Two different scores, a sign, or a number beyond 10 make the whole reply unreadable: nobody guesses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from marl_llm.workflows.trajectory import Score

SCORE, CORRECT = "SCORE:", "CORRECT:"
LOWEST, HIGHEST = 0.0, 10.0
MAX_REASON = 2000  # characters that are kept
MARK = "\u200b"  # zero width space, which breaks a label's spelling
_NUMBER = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)(?: ?/ ?10)?")
_LABEL = re.compile(r"(?i)\b(s)(core)(?=[ \t]*:)|\b(c)(orrect)(?=[ \t]*:)")
_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})", re.MULTILINE)


class Unreadable(ValueError):
    """A reply that holds no score; the message tells the coach why."""


def break_labels(text: str) -> str:
    """The text with a zero width mark inside of every label, so that whoever quotes it says no score."""
    return _LABEL.sub(lambda match: "".join((match[1] or match[3], MARK, match[2] or match[4])), text)


def write_answer(value: Any, correct: bool | None, reason: str) -> str:
    """An answer in the form that `read_answer` reads.

    Raises:
      ValueError: a value outside of [0, 10].
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not LOWEST <= value <= HIGHEST:
        raise ValueError(f"a score of {value!r}; a rubric gives a number from 0 to 10")
    said = "" if correct is None else f"{CORRECT} {'yes' if correct else 'no'}\n"
    number = f"{value:.6f}".rstrip("0").rstrip(".")
    return f"{break_labels(_FENCE.sub(MARK, reason))}\n{said}{SCORE} {number}"


def read_answer(text: str) -> Score:
    """The score of a reply.

    Raises:
      Unreadable: no line is exactly the label and a number from 0 to 10, or lines contradict each other.
    """
    scores, verdicts, rest = set(), set(), []
    for line in _plain_lines(text):
        if line.startswith(SCORE):
            scores.add(_number(line.removeprefix(SCORE).strip(" \t")))
        elif line.startswith(CORRECT):
            verdicts.add(_verdict(line.removeprefix(CORRECT).strip(" \t")))
        else:
            rest.append(line)
    if not scores:
        raise Unreadable(f"no line of its own is '{SCORE}' and a number from 0 to 10, outside of quotations and code")
    if len(scores) > 1 or len(verdicts) > 1:
        raise Unreadable("two different scores" if len(scores) > 1 else "two different verdicts")
    return Score(scores.pop(), verdicts.pop() if verdicts else None, "\n".join(rest).strip()[:MAX_REASON])


def _plain_lines(text: str) -> Iterator[str]:
    """Lines outside of fenced code, without the white space at their ends.

    A fence that nobody closes is none: whoever quotes a member's unclosed fence has said a score all the same.
    """
    fence, inside = "", []
    for line in text.split("\n"):
        opening = _FENCE.match(line)
        if fence:
            inside.append(line.rstrip(" \t\r"))
            if opening and opening[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence, inside = "", []
        elif opening:
            fence = opening[1]
        else:
            yield line.rstrip(" \t\r")
    yield from inside


def _number(said: str) -> float:
    match = _NUMBER.fullmatch(said)
    value = math.nan if match is None else float(match[1])
    if not LOWEST <= value <= HIGHEST:
        raise Unreadable(f"{said[:40]!r} after '{SCORE}' is no number from 0 to 10")
    return value


def _verdict(said: str) -> bool:
    if said not in ("yes", "no"):
        raise Unreadable(f"{said[:40]!r} after '{CORRECT}' is neither yes nor no")
    return said == "yes"
