"""MathChat's team in a small world, `chain_maths`: chains of operations in words, which tiny models can read but not work out.

    problem    a twelve b plus seven c times three
    solver     well let a 12 b + 7 c * 3 value 5 1           filler, an expression, and if it likes a value
    executor   print ( a 12 b + 7 c * 3 )                    a program that runs in the sandbox, or `value 5 7`
               printed 5 7 code:  ─▶  value 5 7              and once more, with what it printed
    verifier   boxed printed                                 whose value stands; or `boxed 5 7`

The verifier points to what was printed, said or claimed: a tiny model learns whom to trust long before it copies digits.
Operations are applied from left to right. `a`, `b`, `c`, `d` number the places, so that every part of a text can be copied by its place; a
program is that text as statements, `a = 12`, `b = a + 7` ... Six operations give 252 orders of two or three; an order belongs to one split.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from marl_llm.games.kit.miniature import kinds_of_split, word_renderer
from marl_llm.games.maths.chat import INFORMATION, NO_PROGRAM, ChatTools
from marl_llm.games.maths.sums import SumAnswers, spaced
from marl_llm.hints import check_word
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.workflows import FormatError, PlainText, Role, ScriptTurn, Task, Trajectory

LIMIT = 999
LOWEST, HIGHEST = 2, 30  # numbers of a problem
PLACES = "abcd"
FILLER = ("well", "let", "me", "think")  # said in this order, so that how much is said is all that there is to it
_SMALL = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
WORDS = dict(zip((*_SMALL, "twenty", *(f"twenty{word}" for word in ("one", *_SMALL[:8])), "thirty"), range(LOWEST, HIGHEST + 1)))
WORD_OF = {number: word for word, number in WORDS.items()}
HIDDEN = ("target", "chain_gold")
POINTS = {"printed": "printed", "said": "executed", "claims": "claim"}  # what a verifier may point to, and the field that holds it


class Operation(NamedTuple):
    """One of the six."""

    sign: str  # in expressions
    code: str  # of the value before and the number
    apply: Callable[[int, int], int]


OPERATIONS = {
    "plus": Operation("+", "{x} + {n}", lambda x, n: x + n),
    "minus": Operation("-", "{x} - {n}", lambda x, n: x - n),
    "times": Operation("*", "{x} * {n}", lambda x, n: x * n),
    "from": Operation("~", "{n} - {x}", lambda x, n: n - x),
    "over": Operation("//", "{x} // {n}", lambda x, n: x // n),
    "rest": Operation("%", "{x} % {n}", lambda x, n: x % n),
}
BY_SIGN = {operation.sign: name for name, operation in OPERATIONS.items()}


@dataclasses.dataclass(frozen=True)
class Chain:
    """A first number and operations on it, from left to right."""

    first: int
    steps: tuple[tuple[str, int], ...]

    @property
    def values(self) -> list[int]:
        """After each operation."""
        values = [self.first]
        for name, n in self.steps:
            values.append(OPERATIONS[name].apply(values[-1], n))
        return values[1:]

    @property
    def value(self) -> int:
        """What it comes to."""
        return self.values[-1]

    @property
    def problem(self) -> str:
        """In words."""
        parts = [WORD_OF[self.first], *(f"{name} {WORD_OF[n]}" for name, n in self.steps)]
        return " ".join(f"{place} {part}" for place, part in zip(PLACES, parts))

    @property
    def expression(self) -> str:
        """In numbers and signs."""
        parts = [str(self.first), *(f"{OPERATIONS[name].sign} {n}" for name, n in self.steps)]
        return " ".join(f"{place} {part}" for place, part in zip(PLACES, parts))

    @property
    def code(self) -> str:
        """As a program that prints its value."""
        lines = [f"a = {self.first}"]
        for before, place, (name, n) in zip(PLACES, PLACES[1:], self.steps):
            lines.append(f"{place} = {OPERATIONS[name].code.format(x=before, n=n)}")
        return "\n".join([*lines, f"print({PLACES[len(self.steps)]})"])


def read_problem(problem: str) -> Chain:
    """The chain that a problem tells."""
    words = problem.split()
    return Chain(WORDS[words[1]], tuple((words[i + 1], WORDS[words[i + 2]]) for i in range(2, len(words), 3)))


# ---- tasks


@functools.cache
def orders(split: str, least: int, most: int) -> tuple[tuple[str, ...], ...]:
    """Orders of a split with `least` to `most` operations; problems of different orders have different texts.

    Raises `ValueError` for an unknown split, or one without orders.
    """
    all_orders = [order for length in range(least, most + 1) for order in itertools.product(OPERATIONS, repeat=length)]
    split_orders = kinds_of_split(split, all_orders, lambda order: f"chain_maths {' '.join(order)}")
    if not 1 <= least <= most < len(PLACES) or not split_orders:
        raise ValueError(f"chains of {least} to {most} operations: there are none in split {split!r}; {len(PLACES) - 1} is the most")
    return split_orders


def chain_task(split: str, seed: int, number: int, least: int = 2, most: int = 3) -> Task:
    """A problem; every order of the split is as likely as another. All values lie between 1 and 999, and the cluster is the order.

    Raises `ValueError` for an unknown split.
    """
    rng = random.Random(f"chain_maths {split} {seed} {number}")
    order = rng.choice(orders(split, least, most))
    while True:
        steps = tuple((name, rng.randint(LOWEST, 9 if name in ("over", "rest") else HIGHEST)) for name in order)
        chain = Chain(rng.randint(LOWEST, HIGHEST), steps)
        if all(1 <= value <= LIMIT for value in chain.values):
            hidden = {"target": str(chain.value), "chain_gold": chain.expression}
            return Task(number, {"problem": chain.problem}, hidden, split, cluster=" ".join(order))


# ---- what they say


@functools.cache
def chain_tokenizer() -> PieceTokenizer:
    """One token per word, per number of a problem and per digit."""
    signs = (*BY_SIGN, "value", "print", "(", ")", "printed", "said", "claims", "none", "boxed", "solve:", "code:", "check:", ".")
    numbers = (str(number) for number in range(10, HIGHEST + 1))
    return train_pieces((*PLACES, *OPERATIONS, *WORDS, *signs, *FILLER, *"0123456789", *numbers))


def chain_renderer() -> PlainText:
    """A response ends with `.`."""
    return word_renderer(chain_tokenizer(), between="")


def unfilled(text: str) -> list[str]:
    """The words behind the filler. Raises `FormatError` where that is not said in its order, from its start."""
    words = text.split()
    count = filler_of(text)
    if tuple(words[:count]) != FILLER[:count] or any(word in FILLER for word in words[count:]):
        raise FormatError("filler stands at the start, in its order")
    return words[count:]


def filler_of(text: str) -> int:
    """How many pieces of filler a text begins with."""
    return sum(1 for _ in itertools.takewhile(FILLER.__contains__, text.split()))


def read_chain(words: list[str]) -> Chain:
    """The chain of an expression. Raises `FormatError`."""
    count, rest = divmod(len(words) - 2, 3)
    numbers, signs, places = [*words[1:2], *words[4::3]], words[3::3], [*words[:1], *words[2::3]]
    if rest or not 1 <= count < len(PLACES) or places != list(PLACES[: count + 1]) or not set(signs) <= set(BY_SIGN):
        raise FormatError("an expression is like a 12 b + 7")
    if not all(n.isascii() and n.isdigit() and len(n) <= 4 and LOWEST <= int(n) <= HIGHEST for n in numbers):
        raise FormatError(f"numbers lie between {LOWEST} and {HIGHEST}")
    return Chain(int(numbers[0]), tuple((BY_SIGN[sign], int(n)) for sign, n in zip(signs, numbers[1:])))


def read_value(words: list[str], before: str) -> str:
    """The number in digits behind a word. Raises `FormatError`."""
    if len(words) < 2 or words[0] != before or len(words) > 5 or not all(word in set("0123456789") for word in words[1:]):
        raise FormatError(f"{before} and up to four digits are expected")
    return str(int("".join(words[1:])))


def read_solver(text: str) -> dict[str, Any]:
    """Filler, an expression, and maybe a value."""
    words = unfilled(text)
    at = words.index("value") if "value" in words else len(words)
    chain = read_chain(words[:at])
    claim = read_value(words[at:], "value") if at < len(words) else ""
    return {"solution": chain.expression, "solved": str(chain.value), "claim": claim}


def read_executor(text: str) -> dict[str, Any]:
    """Filler, and a program or a value."""
    words = unfilled(text)
    if words[:1] != ["print"]:
        value = read_value(words, "value")
        return {"code": "", "execution": f"said {spaced(value)}", "executed": value}
    if words[1:2] != ["("] or words[-1] != ")":
        raise FormatError("print ( and ) stand around an expression")
    return {"code": read_chain(words[2:-1]).code, "execution": "", "executed": ""}


def read_verifier(text: str) -> dict[str, Any]:
    """Filler, and the answer: in digits, or one of `POINTS`, which `chain_answer` resolves."""
    words = unfilled(text)
    return {"answer": words[1] if words[:1] == ["boxed"] and len(words) == 2 and words[1] in POINTS else read_value(words, "boxed")}


def chain_answer(answer: str, printed: str, executed: str, claim: str) -> str:
    """The number of an answer: itself, or what it points to; "" where that is nothing."""
    return {"printed": printed, "said": executed, "claims": claim}.get(answer, answer)


def chain_roles(information: str = "full", executor_turns: int = 2) -> dict[str, Role]:
    """The three roles. With partial information the executor reads the expression alone, the verifier what the executor handed over.

    Raises `ValueError` for an unknown `information`.
    """
    check_word("information", information, INFORMATION)
    sizes, executor_sizes = dict(max_prompt=32, max_tokens=24), dict(max_prompt=24 + 30 * (executor_turns - 1), max_tokens=24)
    known, claim = ("{problem} ", "claims {claim} ") if information == "full" else ("", "")
    shown = {"solution": lambda text: text or "none", "claim": spaced, "output": spaced}
    again = dict(continues=True, observation="printed {output} code:") if executor_turns > 1 else {}

    def pick(*names):
        return {name: shown[name] for name in names}

    return {
        "solver": Role("solver", "{problem} solve:", read_solver, {"solution": "", "solved": "", "claim": ""}, **sizes),
        "executor": Role(
            "executor", f"{known}{{solution}} code:", read_executor, {"code": "", "execution": "", "executed": ""},
            show=pick("solution", "output") if again else pick("solution"), **again, **executor_sizes,
        ),
        "verifier": Role(
            "verifier", f"{known}{claim}{{handed}} check:", read_verifier, {"answer": ""}, show=pick("claim") if claim else {}, **sizes
        ),
    }  # fmt: skip


def chain_hand_over(execution: str, output: str) -> str:
    """What the verifier reads of the executor."""
    return f"{execution or 'said none'} printed {spaced(output)}"


class ChainTools(ChatTools):
    """Numbers are compared here; programs run in the sandbox."""

    def __init__(self):
        super().__init__(10.0, SumAnswers())


def chain_metrics() -> dict[str, Callable[[Trajectory], float]]:
    """Beside those of `chat_metrics`: `filler`, the pieces of it that all roles said in a play; `expression`, the solver's is right."""
    return {
        "filler": lambda path: float(sum(filler_of(call.text) for call in path.calls)),
        "expression": lambda path: float(path.fields["solution"] == path.fields["chain_gold"]),
    }


# ---- who can play it


def chain_player(
    wrong: float | int = 0.0,
    program: float | int = 1.0,
    trust: float | int = 1.0,
    claims: float | int = 0.0,
    slip: float | int = 0.0,
    repeats: float | int = 0.0,
    filler: int = 0,
    points: bool = False,
) -> Callable[[ScriptTurn], str]:
    """A player of all roles, who by default is right and says nothing more than that.

    Args:
      wrong: how often the solver gets an operation or a number wrong.
      program: how often the executor writes a program at once; otherwise a value.
      trust: how often the verifier takes what was printed; otherwise what the solver claims, or else the executor's value.
      claims: how often the solver states a value.
      slip: how often a value that is worked out without a program is wrong.
      repeats: how often the executor runs its program again, instead of saying what it printed.
      filler: most pieces of filler before what is said; every number from 0 is as likely.
      points: whether the verifier points to the value that it takes, instead of copying its digits.
    """

    def play(turn: ScriptTurn) -> str:
        rng, fields = turn.random, turn.fields

        def gold():
            return read_chain(fields["chain_gold"].split())

        head = " ".join(FILLER[: rng.randint(0, filler)]) + " "
        if turn.role.name == "solver":
            chain = _other(gold(), rng) if rng.random() < wrong else gold()
            value = f" value {_by_head(chain.value, slip, rng)}" if rng.random() < claims else ""
            return f"{head}{chain.expression}{value}".strip()
        if turn.role.name == "verifier":
            printed = fields["output"] if spaced(fields["output"]) != "none" else ""
            known = {"printed": printed, "said": fields["executed"], "claims": fields["claim"]}
            order = ("printed", "said", "claims") if rng.random() < trust else ("claims", "said", "printed")
            chosen = next((name for name in order if known[name]), "printed")
            return f"{head}boxed {chosen if points else spaced(known[chosen] or '0')}".strip()
        chain = read_chain(fields["solution"].split()) if fields["solution"] else gold()
        code = f"print ( {chain.expression} )"
        spoken = fields["ran"] != NO_PROGRAM
        if (not spoken and rng.random() < program) or (spoken and rng.random() < repeats):
            return f"{head}{code}".strip()
        known = spoken and spaced(fields["output"]) != "none"
        return f"{head}value {spaced(fields['output']) if known else _by_head(chain.value, slip, rng)}".strip()

    return play


def _other(chain: Chain, rng: random.Random) -> Chain:
    """The chain with one operation or number changed."""
    at = rng.randrange(len(chain.steps))
    name, n = chain.steps[at]
    if rng.random() < 0.5:
        name = rng.choice([other for other in OPERATIONS if other != name])
    else:
        n = rng.choice([other for other in WORD_OF if other != n])
    return dataclasses.replace(chain, steps=(*chain.steps[:at], (name, n), *chain.steps[at + 1 :]))


def _by_head(value: int, slip: float | int, rng: random.Random) -> str:
    """A value in digits, now and then another one."""
    value = max(0, min(LIMIT, value))
    return spaced(max(0, min(LIMIT, value + rng.choice((-10, -2, -1, 1, 2, 10)))) if rng.random() < slip else value)
