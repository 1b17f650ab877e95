"""Coder and unit tester in a small world of number functions, with tests of one line and programs that really run.

    problem   plus 3 then gap 2        coder   x = x + 3 ; x = x - 2        tester   f ( 4 ) = 7 = 5

The words of a problem are those of `functions`; `gap` has two readings, of which one is meant more often. The tester writes an input and
the values after each step (or the last alone), which it has to work out by itself; the last one is the expected output. The sandbox is
asked once per program what it makes of all inputs. Mutants are the other readings of the words and plans with one other number.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.coding.debate import NO_TEST
from marl_llm.games.coding.functions import AMBIGUOUS, BY_NAME, NUMBERS, OTHER, RARE, run_plan, templates
from marl_llm.games.coding.runs import NO_QUALITY, NOT_RUN, SMOKE_TESTS
from marl_llm.games.kit.miniature import word_renderer
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.tools.judge import ajudge_calls
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.verdicts import Verdicts
from marl_llm.workflows import FormatError, PlainText, Role, ScriptTurn, Task

USED = ("add", "negate", "less", "from", "size", "rest")
READINGS = {word: name for name in USED for word in BY_NAME[name].words}
VALUES = range(-24, 25)  # what inputs and values after steps may be
SHOWN = frozenset(map(str, VALUES))
INPUTS = range(-9, 10)
GOLDEN_TESTS = 6
HEAD, TAIL = "def f ( x ) : ", " ; return x"
_TEST = re.compile(r"f \( (-?[0-9]{1,9}) \) = (?:-?[0-9]{1,9} = ){0,2}(-?[0-9]{1,9})")
Plan = tuple[tuple[str, int], ...]


@functools.cache
def debate_tokenizer() -> PieceTokenizer:
    """One token per word and per number."""
    words = [word for name in USED for op in (BY_NAME[name],) for word in (*op.words, *op.code.replace("{n}", "").split())]
    protocol = ("f", "(", ")", "=", ";", ".", "then", "gap", "was", "got", "none", "error", "code:", "test:")
    return train_pieces(tuple(dict.fromkeys((*protocol, *words, *map(str, VALUES)))))


def debate_renderer() -> PlainText:
    """A response ends with `.`."""
    return word_renderer(debate_tokenizer())


def debate_task(split: str, seed: int, number: int, rare: float | int = 0.25) -> Task:
    """A problem; `less` and `from` are told by `gap`, `from` more seldom by the factor `rare`. Splits share no set of operations.

    Raises `ValueError` for an unknown split.
    """
    rng = random.Random(f"debate {split} {seed} {number}")
    while True:
        plan = tuple((name, int(rng.choice(NUMBERS))) for name in rng.choice(_templates(split)))
        unclear = [i for i, (name, _) in enumerate(plan) if name in AMBIGUOUS and rng.random() < (rare if name in RARE else 1)]
        inputs = rng.sample(INPUTS, GOLDEN_TESTS)
        golden = tuple(((x,), run_plan(plan, x)) for x in inputs)
        readings = [tuple((OTHER[name], n) if i in other else (name, n) for i, (name, n) in enumerate(plan))
                    for size in range(1, len(unclear) + 1) for other in itertools.combinations(unclear, size)]  # fmt: skip
        if all(any(run_plan(reading, *arguments) != wanted for arguments, wanted in golden) for reading in readings):
            break
    words = [AMBIGUOUS[name] if i in unclear else rng.choice(BY_NAME[name].words) for i, (name, _) in enumerate(plan)]
    text = " then ".join(f"{word} {n}" if BY_NAME[name].takes_number else word for word, (name, n) in zip(words, plan))
    secret = {"function": "f", "tests": golden, "references": (plan,), "mutants": (*readings, *_neighbours(plan)), "shown": ()}
    return Task(number, {"problem": text}, secret, split)


@functools.cache
def _templates(split: str) -> tuple[tuple[str, ...], ...]:
    """Those of `functions.templates` that this environment uses."""
    return tuple(names for names in templates(split) if set(names) <= set(USED))


def _neighbours(plan: Plan) -> tuple[Plan, ...]:
    """Plans in which one number is another by one."""
    return tuple(
        tuple((name, n + step) if i == j else (name, n) for j, (name, n) in enumerate(plan))
        for i, (at, n) in enumerate(plan) if BY_NAME[at].takes_number
        for step in (-1, 1) if str(n + step) in NUMBERS
    )  # fmt: skip


# ---- roles


def read_statements(text: str) -> dict[str, Any]:
    """One to three statements. Raises `FormatError` for anything else."""
    parts = [part.strip() for part in text.split(";")]
    if not 1 <= len(parts) <= 3 or not all(part.startswith("x = ") for part in parts):
        raise FormatError("one to three statements that begin with x = are expected")
    return {"code": f"{HEAD}{' ; '.join(parts)}{TAIL}"}


def read_line_test(text: str) -> dict[str, Any]:
    """`f ( 4 ) = 7 = 5`: an input and the values after each step, the last of which is the output. Raises `FormatError`."""
    match = _TEST.fullmatch(text.strip())
    if match is None or int(match[1]) not in INPUTS:
        raise FormatError("a test is like f ( 4 ) = 7 = 5")
    return {"test": {"input": int(match[1]), "output": int(match[2]), "problem": ""}}


def _last(entries: Sequence[Mapping[str, Any]]) -> str:
    """The latest turn of the history in words: the program, the test, and what came out."""
    if not entries:
        return "was none"
    entry = entries[-1]
    code = entry["code"].removeprefix(HEAD).removesuffix(TAIL) if entry["code"] else "none"
    if "input" not in entry:  # a single agent's
        return f"was {code}"
    test = "none" if entry["input"] is None else f"f ( {entry['input']} ) = {entry['output']}"
    got = entry["actual"] if entry["status"] == "ok" and entry["actual"] in SHOWN else "error"
    return f"was {code} then {test} got {got}"


def function_debate_roles() -> dict[str, Role]:
    """Coder and tester who speak in a few dozen words."""
    show, sizes = {"history": _last}, dict(max_prompt=48, trim="history", trim_from="start")
    return {
        "coder": Role("coder", "{problem} {history} code:", read_statements, {"code": ""}, show=show, max_tokens=22, **sizes),
        "tester": Role("tester", "{problem} {history} test:", read_line_test, {"test": NO_TEST}, show=show, max_tokens=12, **sizes),
    }


class FunctionRuns:
    """As `runs.Runs`, in the small world: a program is run once, on all inputs, and everything else is looked up.

    Args:
      timeout_s: of a program on all inputs together.
      sandbox: as in `runs.Runs`.
    """

    def __init__(self, timeout_s: float | int = 10.0, sandbox: Any = None):
        self._timeout_s, self._sandbox, self._verdicts = timeout_s, sandbox, Verdicts()

    async def table(self, code: str) -> ToolResult:
        """Input -> the integer that the program makes of it; inputs on which it fails or gives something else are left out."""

        async def judge() -> ToolResult:
            judged = await ajudge_calls(code, "f", [((x,), None) for x in INPUTS], self._timeout_s, sandbox=self._sandbox)
            return judged.map(lambda judgement: {x: case.value for x, case in zip(INPUTS, judgement.cases) if type(case.value) is int})

        return await self._verdicts.of(code, judge)

    async def golden(self, code: str, function: str, tests: Sequence[Any]) -> ToolResult:
        """As `runs.Runs.golden`. `builds`: it gives a number for some input."""
        if not code:
            return success(NOT_RUN, 0.0)

        def figures(table: Mapping[int, int]) -> dict[str, float]:
            ran = [arguments[0] in table for arguments, _ in tests]
            passed = [table.get(arguments[0]) == wanted for arguments, wanted in tests]
            smoke, clean = float(all(ran[:SMOKE_TESTS])), float(all(ran))
            return {"golden": sum(passed) / len(tests), "builds": float(bool(table)), "smoke": smoke, "clean": clean}

        return (await self.table(code)).map(figures)

    async def on_test(self, code: str, test: Mapping[str, Any], function: str) -> ToolResult:
        """As `runs.Runs.on_test`."""
        if not code or test["input"] is None:
            return success({"aligned": False, "actual": "", "status": "there is no program" if not code else "there is no test"}, 0.0)

        def outcome(table: Mapping[int, int]) -> dict[str, Any]:
            actual = table.get(test["input"])
            return {"aligned": actual == test["output"], "actual": str(actual), "status": "error" if actual is None else "ok"}

        return (await self.table(code)).map(outcome)

    async def test_quality(
        self, test: Mapping[str, Any], function: str, references: Sequence[Plan], mutants: Sequence[Plan], shown: Sequence[str]
    ) -> ToolResult:
        """As `runs.Runs.test_quality`; reference and mutants are plans of this environment, so that no process is needed."""
        if test["input"] is None:
            return success(NO_QUALITY, 0.0)
        value = {**NO_QUALITY, "test_valid": 1.0}
        if run_plan(references[0], test["input"]) == test["output"]:
            value["test_right"] = 1.0
            value["test_kills"] = sum(run_plan(mutant, test["input"]) != test["output"] for mutant in mutants) / max(1, len(mutants))
        return success(value, 0.0)


# ---- who can play it


def function_debate_player(
    noise: float | int = 0.0,
    misreading: float | int = 0.0,
    slip: float | int = 0.0,
    trivial: float | int = 0.0,
    keep: float | int = 0.0,
) -> Callable[[ScriptTurn], str]:
    """A player of both roles; with all at 0 it reads `gap` as it is meant and makes no mistake.

    Args:
      noise: how often a statement's number is another.
      misreading: how often `gap` is read at random.
      slip: how often the tester's output is another number.
      trivial: how often the tester takes the input 0.
      keep: how often, in a later turn, the coder writes its last program again; otherwise it reads the problem anew.
    """

    def play(turn: ScriptTurn) -> str:
        rng, (gold,) = turn.random, turn.fields["references"]
        entries = turn.fields["history"]
        if turn.role.name == "coder" and entries and entries[-1]["code"] and rng.random() < keep:
            return entries[-1]["code"].removeprefix(HEAD).removesuffix(TAIL)
        plan = []
        for name, n in gold:
            if name in OTHER and "gap" in turn.fields["problem"] and rng.random() < misreading:
                name = rng.choice((name, OTHER[name]))
            plan.append((name, int(rng.choice(NUMBERS)) if turn.role.name == "coder" and rng.random() < noise else n))
        if turn.role.name == "coder":
            return " ; ".join(BY_NAME[name].code.format(n=n) for name, n in plan)
        x = 0 if rng.random() < trivial else rng.choice([x for x in INPUTS if x != 0])
        steps = [run_plan(tuple(plan[:count]), x) for count in range(1, len(plan) + 1)]
        if rng.random() < slip:
            steps[-1] = max(-24, min(24, steps[-1] + rng.choice((-2, -1, 1, 2))))
        return f"f ( {x} ) = {' = '.join(map(str, steps))}"

    return play

