"""A small world of programming: one-line Python functions on numbers and lists, described in words, tested by cases that nobody sees.

A problem is a list of two or three operations; its *template* is their names in order. A template belongs to one split by its content (a
hash of the set of its operations), so that no seed, parameter or order makes a test problem a training problem (law 12). Many problems
hold a word with two readings (`gap 3`: x − 3 or 3 − x); which one is meant only the tests tell, so that without feedback not all can be
solved, and a reflection has something to say.

    problem   number plus 3 then gap 2        plan   add 3 | less 2        code   def f ( x ) : x = x + 3 ; x = x - 2 ; return x
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

from marl_llm.games.kit.miniature import SHARES, word_renderer
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.workflows import PlainText, Task
from marl_llm.workflows.splits import check_split, split_of

NUMBERS = tuple(str(n) for n in range(1, 6))
HIDDEN_CASES, VISIBLE_CASES = 9, 3


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: its name in plans, its words in problems, its statement, and what it does. `{n}` is its parameter."""

    name: str
    kind: str  # "number" or "list"
    words: tuple[str, ...]
    code: str
    apply: Callable[[Any, int], Any]

    @property
    def takes_number(self) -> bool:
        """Whether it has a parameter."""
        return "{n}" in self.code


OPS = (
    Op("add", "number", ("plus", "raise"), "x = x + {n}", lambda x, n: x + n),
    Op("times", "number", ("multiply", "scale"), "x = x * {n}", lambda x, n: x * n),
    Op("negate", "number", ("opposite", "mirror"), "x = - x", lambda x, n: -x),
    Op("square", "number", ("squared", "itself"), "x = x * x", lambda x, n: x * x),
    Op("size", "number", ("magnitude", "distance"), "x = abs ( x )", lambda x, n: abs(x)),
    Op("rest", "number", ("modulo", "remainder"), "x = x % {n}", lambda x, n: x % n),
    Op("less", "number", ("minus", "lower"), "x = x - {n}", lambda x, n: x - n),
    Op("from", "number", ("until", "lacking"), "x = {n} - x", lambda x, n: n - x),
    Op("reverse", "list", ("backwards", "flipped"), "x = x [ : : - 1 ]", lambda x, n: x[::-1]),
    Op("sort", "list", ("ordered", "ascending"), "x = sorted ( x )", lambda x, n: sorted(x)),
    Op("twice", "list", ("repeated", "again"), "x = x + x", lambda x, n: x + x),
    Op("append", "list", ("ending", "appended"), "x = x + [ {n} ]", lambda x, n: x + [n]),
    Op("prepend", "list", ("starting", "prefixed"), "x = [ {n} ] + x", lambda x, n: [n] + x),
    Op("unique", "list", ("distinct", "single"), "x = sorted ( set ( x ) )", lambda x, n: sorted(set(x))),
    Op("head", "list", ("first", "front"), "x = x [ : {n} ]", lambda x, n: x[:n]),
    Op("tail", "list", ("dropping", "skipping"), "x = x [ {n} : ]", lambda x, n: x[n:]),
)
BY_NAME = {op.name: op for op in OPS}
AMBIGUOUS = {"less": "gap", "from": "gap", "head": "cut", "tail": "cut"}
RARE = ("from", "tail")
OTHER = {"less": "from", "from": "less", "head": "tail", "tail": "head"}
PROTOCOL = tuple("def f return ; | then none at try . plan: code: advice: was says passed of wrong".split())


@functools.cache
def function_tokenizer() -> PieceTokenizer:
    """One token per word of problems, plans, programs, reports and advice."""
    words = [word for op in OPS for word in (op.name, *op.words, *op.code.replace("{n}", "").split())]
    kinds = ("number", "list", "gap", "cut", "0", "6", "7", "8", "9", "(", ")", ":")
    return train_pieces(tuple(dict.fromkeys((*PROTOCOL, *kinds, *NUMBERS, *words))))


def function_renderer() -> PlainText:
    """How tiny models of this environment read and write: a response ends with `.`."""
    return word_renderer(function_tokenizer())


def template_split(names: tuple[str, ...]) -> str:
    """The split of a template, by the set of its operations: orders of the same operations stay together."""
    return split_of(" ".join(sorted(names)), SHARES)


@functools.cache
def templates(split: str) -> tuple[tuple[str, ...], ...]:
    """All templates of a split: two or three different operations of one kind, in any order. Raises `ValueError` for an unknown split."""
    check_split(split, SHARES)
    names = {kind: [op.name for op in OPS if op.kind == kind] for kind in ("number", "list")}
    all_templates = [template for kind, size in itertools.product(names, (2, 3)) for template in itertools.permutations(names[kind], size)]
    return tuple(template for template in all_templates if template_split(template) == split)


def program(plan: tuple[tuple[str, int], ...]) -> str:
    """The program of a plan, as one line of pieces."""
    statements = [BY_NAME[name].code.format(n=n) for name, n in plan]
    return f"def f ( x ) : {' ; '.join([*statements, 'return x'])}"


def plan_text(plan: tuple[tuple[str, int], ...]) -> str:
    """A plan in words."""
    return " | ".join(f"{name} {n}" if BY_NAME[name].takes_number else name for name, n in plan)


def run_plan(plan: tuple[tuple[str, int], ...], value: Any) -> Any:
    """What a plan makes of an input."""
    for name, n in plan:
        value = BY_NAME[name].apply(value, n)
    return value


def function_task(split: str, seed: int, number: int, ambiguous_share: float = 0.6, rare: float = 1.0) -> Task:
    """A problem. Hidden: `function`, `tests`, `visible_tests`, and the `plan_gold` that scripts know.

    `ambiguous_share` is how often an operation that has a word with two readings is told by it; `rare` weighs it down for those in `RARE`,
    so that below 1 an unclear word has a usual reading, which no dictionary tells.

    Its cases tell the two readings of every ambiguous word apart, so that a program that passes all of them has read the words as meant.
    """
    rng = random.Random(f"function {split} {seed} {number}")
    while True:
        names = rng.choice(templates(split))
        plan = tuple((name, int(rng.choice(NUMBERS))) for name in names)
        share = [ambiguous_share * (rare if name in RARE else 1) for name in names]
        unclear = [i for i, name in enumerate(names) if name in AMBIGUOUS and rng.random() < share[i]]
        cases = _cases(rng, BY_NAME[names[0]].kind, plan)
        others = [tuple((OTHER[name], n) if i == j else (name, n) for j, (name, n) in enumerate(plan)) for i in unclear]
        hidden = cases[VISIBLE_CASES:]
        if all(any(run_plan(other, *arguments) != wanted for arguments, wanted in hidden) for other in others):
            break
    words = [AMBIGUOUS[name] if i in unclear else rng.choice(BY_NAME[name].words) for i, name in enumerate(names)]
    parts = [f"{word} {n}" if BY_NAME[name].takes_number else word for word, (name, n) in zip(words, plan)]
    problem = f"{BY_NAME[names[0]].kind} {' then '.join(parts)}"
    secret = {"function": "f", "tests": cases[VISIBLE_CASES:], "visible_tests": cases[:VISIBLE_CASES], "plan_gold": plan}
    return Task(number, {"problem": problem}, secret, split)


def unclear_places(problem: str) -> tuple[int, ...]:
    """The places of a problem's operations that are told by a word with two readings."""
    words = [part.split()[0] for part in problem.split(" ", 1)[1].split(" then ")]
    return tuple(i for i, word in enumerate(words) if word in AMBIGUOUS.values())


def _cases(rng: random.Random, kind: str, plan: tuple[tuple[str, int], ...]) -> tuple[tuple[tuple[Any], Any], ...]:
    """Inputs, each once, with what the plan makes of them."""
    inputs: list[Any] = []
    while len(inputs) < HIDDEN_CASES + VISIBLE_CASES:
        value = rng.randint(-9, 9) if kind == "number" else [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
        if value not in inputs:
            inputs.append(value)
    return tuple(((value,), run_plan(plan, value)) for value in inputs)


HIDDEN = ("function", "tests", "visible_tests", "plan_gold")
