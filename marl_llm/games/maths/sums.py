"""Reasoner and Python user in a small world of word problems, with numbers of one to three digits and programs that really run.

    problem    ann has 1 2 pens then bob brings 7 then eats 4 how many
    reasoner   1 2 + 7 = 1 9 ; 1 9 - 4 = 1 5 #### 1 5          user   x = 1 2 ; x = x + 7 ; x = x - 4 ; print ( x )

Reading the words is common to both; working out digits is the reasoner's own task, while Python does it for the other. `grows 3` has two
readings, x + 3 and the rarer x * 3. A problem's *template* is its operations in order; it belongs to one split by its content.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.kit.miniature import kinds_of_split, word_renderer
from marl_llm.games.maths.debate import Answers
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.tools.maths import is_number, numeq
from marl_llm.tools.results import ToolResult, success
from marl_llm.workflows import FormatError, PlainText, Role, ScriptTurn, Task

OPERATIONS = {
    "add": ("+", ("brings", "finds")),
    "less": ("-", ("eats", "loses")),
    "times": ("*", ("multiplies", "scales")),
    "grow": ("+", ("grows",)),
    "fold": ("*", ("grows",)),
}
OTHER = {"grow": "fold", "fold": "grow"}
PEOPLE, THINGS = ("ann", "bob", "cid", "dee"), ("pens", "cups", "nuts")
LIMIT = 999
_NUMBER, _INTEGER = re.compile("[0-9]{1,4}"), re.compile("-?[0-9]+")
_STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
_STATEMENT = re.compile(r"x = (?:\d+|x(?: [-+*] \d+)?)")
Plan = tuple[tuple[str, int], ...]  # the first number, then operations


@functools.cache
def sums_tokenizer() -> PieceTokenizer:
    """One token per word and per digit."""
    words = [word for _, words in OPERATIONS.values() for word in words]
    protocol = ("has", "then", "how", "many", "+", "-", "*", "=", ";", "####", ".", "x", "print", "(", ")", "|",
                "said", "printed", "none", "solve:", "code:", "judge:", *"abcdefg")  # fmt: skip
    return train_pieces(tuple(dict.fromkeys((*protocol, *words, *PEOPLE, *THINGS, *"0123456789"))))


def sums_renderer() -> PlainText:
    """A response ends with `.`."""
    return word_renderer(sums_tokenizer())


def spaced(number: Any) -> str:
    """A number as digit tokens; `none` for what is no number of this environment."""
    text = str(number)
    return " ".join(text) if _NUMBER.fullmatch(text) else "none"


def joined(text: str) -> str:
    """Digit tokens as numbers: `1 2 + 7` becomes `12 + 7`."""
    return re.sub(r"(?<=\d) (?=\d)", "", text)


@functools.cache
def templates(split: str, least: int, most: int) -> tuple[tuple[str, ...], ...]:
    """Templates of a split with `least` to `most` operations; those that differ in a word's reading are one, so no text lies in two splits.

    Raises `ValueError` for an unknown split, or one without templates.
    """
    all_templates = [names for length in range(least, most + 1) for names in itertools.product(OPERATIONS, repeat=length)]
    split_templates = kinds_of_split(split, all_templates, lambda names: " ".join(names).replace("fold", "grow"))
    if not 1 <= least <= most or not split_templates:
        raise ValueError(f"problems of {least} to {most} operations: there are none in split {split!r}")
    return split_templates


def work_out(first: int, plan: Plan) -> list[int]:
    """The values after each operation."""
    values, value = [], first
    for name, n in plan:
        sign = OPERATIONS[name][0]
        value = value + n if sign == "+" else value - n if sign == "-" else value * n
        values.append(value)
    return values


def sums_task(split: str, seed: int, number: int, least: int = 2, most: int = 3, rare: float | int = 0.25) -> Task:
    """A problem; `grows` is meant as `fold` more seldom by the factor `rare`. All values lie between 0 and 999.

    Raises `ValueError` for an unknown split.
    """
    rng = random.Random(f"sums {split} {seed} {number}")
    while True:
        names = rng.choice(templates(split, least, most))
        if any(name == "fold" and rng.random() >= rare for name in names):
            continue
        first = rng.randint(2, 60)
        plan = tuple((name, rng.randint(2, 5) if name in ("times", *OTHER) else rng.randint(2, 99)) for name in names)
        if all(0 <= value <= LIMIT for value in work_out(first, plan)):
            break
    thing, who = rng.choice(THINGS), rng.sample(PEOPLE, 2)
    words = [f"{rng.choice(OPERATIONS[name][1])} {spaced(n)}" for name, n in plan]
    text = f"{who[0]} has {spaced(first)} {thing} then {who[1]} {' then '.join(words)} how many"
    return Task(number, {"problem": text}, {"target": str(work_out(first, plan)[-1]), "plan_gold": (first, plan)}, split)


HIDDEN = ("target", "plan_gold")

# ---- roles


def read_sum(text: str) -> dict[str, Any]:
    """Optional steps, then `#### 1 5`. Raises `FormatError` for anything else, also for steps that are not of the form."""
    steps, hashes, answer = joined(text.strip()).partition("####")
    answer = answer.strip()
    if not hashes or not _NUMBER.fullmatch(answer):
        raise FormatError("#### and one number are expected at the end")
    if steps.strip() and not all(_STEP.fullmatch(step.strip()) for step in steps.split(";")):
        raise FormatError("a step is like 1 2 + 7 = 1 9")
    return {"answer": answer, "solution": steps.strip()}


def read_program(text: str) -> dict[str, Any]:
    """Statements and a print, one after the other. Raises `FormatError` for anything else."""
    parts = [part.strip() for part in joined(text.strip()).split(";")]
    if not 2 <= len(parts) <= 6 or parts[-1] != "print ( x )" or not all(_STATEMENT.fullmatch(part) for part in parts[:-1]):
        raise FormatError("statements like x = x + 7 and then print ( x ) are expected")
    return {"code": "\n".join(parts)}


def _last(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return "said none"
    entry = entries[-1]
    return f"said {spaced(entry['answer'])}" + (f" printed {spaced(entry['printed'])}" if "printed" in entry else "")


def sums_roles() -> dict[str, Role]:
    """Reasoner, Python user and (for ensembles) judge who speak in a few dozen words."""
    show, sizes = {"history": _last}, dict(max_prompt=48, trim="history", trim_from="start")
    answer = {"answer": "", "solution": ""}
    return {
        "reasoner": Role("reasoner", "{problem} {history} solve:", read_sum, answer, show=show, max_tokens=46, **sizes),
        "user": Role("user", "{problem} {history} code:", read_program, {"code": ""}, show=show, max_tokens=36, **sizes),
    }


def sums_judge() -> Role:
    """Reads the problem and the numbered answers, and writes the final one."""
    return Role("judge", "{problem} {ballot} judge:", _verdict, {"verdict": ""}, show={"ballot": sums_ballot}, max_prompt=80, max_tokens=7)


def _verdict(text: str) -> dict[str, Any]:
    fields = read_sum(text)
    if fields["solution"]:
        raise FormatError("#### and one number are expected, and nothing else")
    return {"verdict": fields["answer"]}


def sums_ballot(answers: Sequence[str]) -> str:
    """`a 1 5 b 1 9`: answers under letters, in the order given."""
    return " ".join(f"{letter} {spaced(answer)}" for letter, answer in zip("abcdefg", answers))


class SumAnswers(Answers):
    """As `Answers`, for whole numbers in digits: compared here, programs run in the sandbox."""

    def __init__(self, strict: bool = True, timeout_s: float | int = 10.0, sandbox: Any = None):
        super().__init__(strict, timeout_s, _NoChecker(), sandbox)

    async def correct(self, answer: str, target: str) -> ToolResult:
        """Whether an answer is the target."""
        return success(float(_same(answer, target, self._strict)), 0.0)

    async def equal(self, a: str, b: str) -> ToolResult:
        """Whether two answers are one number."""
        return success(_same(a, b, self._strict), 0.0)


@dataclasses.dataclass(frozen=True)
class _NoChecker:
    """In place of math-verify's processes, which whole numbers do not need."""

    def close(self) -> None:
        """Nothing is held."""


def _same(a: str, b: str, strict: bool) -> bool:
    if not is_number(a) or not is_number(b) or not _INTEGER.fullmatch(a) or not _INTEGER.fullmatch(b):
        return False
    return int(a) == int(b) if strict else numeq(int(a), int(b))


# ---- who can play it


def sums_player(
    slip: float | int = 0.0, misreading: float | int = 0.0, adopt: float | int = 1.0, noise: float | int = 0.0
) -> Callable[[ScriptTurn], str]:
    """A player of all roles; by default it is right in the first turn, and its judge names the most frequent answer.

    Args:
      slip: how often a step of the reasoner ends in another number.
      misreading: how often `grows` is read at random.
      adopt: how often, in a later turn, the reasoner gives what the program printed; otherwise it works it out anew.
      noise: how often the judge names any of the answers.
    """

    def play(turn: ScriptTurn) -> str:
        rng, fields, role = turn.random, turn.fields, turn.role.name
        if role == "judge":
            votes = [vote for vote in fields["ballot"] if spaced(vote) != "none"]
            if not votes:
                return "#### 0"
            return f"#### {spaced(rng.choice(votes) if rng.random() < noise else max(votes, key=votes.count))}"
        first, gold = fields["plan_gold"]
        entries = fields.get("history", ())
        if role == "reasoner" and entries and entries[-1].get("printed", "").isdecimal() and rng.random() < adopt:
            return f"#### {spaced(entries[-1]['printed'])}"

        def flip(name):
            return rng.choice((name, OTHER[name])) if name in OTHER and rng.random() < misreading else name

        plan = tuple((flip(name), n) for name, n in gold)
        if role == "user":
            steps = "".join(f"x = x {OPERATIONS[name][0]} {spaced(n)} ; " for name, n in plan)
            return f"x = {spaced(first)} ; {steps}print ( x )"
        parts, value = [], first
        for name, n in plan:
            (after,) = work_out(value, ((name, n),))
            if rng.random() < slip:
                after = after + rng.choice((-10, -1, 1, 10))
            after = max(0, min(LIMIT, after))
            parts.append(f"{spaced(value)} {OPERATIONS[name][0]} {spaced(n)} = {spaced(after)}")
            value = after
        return f"{' ; '.join(parts)} #### {spaced(value)}"

    return play
