"""Programs on tests for coder and tester: golden tests, the tester's own test, the reference and mutants, each in the sandbox.

A program reads standard input and prints, or defines a function, which is called. Results are kept by content, so that candidates that
write the same program, and turns that keep it, cost one execution. A failure of the infrastructure is returned as such and aborts the play.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.games.coding.mutants import mutants_of
from marl_llm.tools.judge import Case, Judgement, ajudge_calls, ajudge_stdio, crosses
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.untrusted import read_text

RAN = ("passed", "wrong")  # states of a case whose program ended by itself without an error
SMOKE_TESTS = 2  # the first golden tests (reading: Appendix B.2 names no size)
MAX_MUTANTS = 4
KEPT_CHARACTERS = 2000  # of what a program printed
NOT_RUN = {"golden": 0.0, "builds": 0.0, "smoke": 0.0, "clean": 0.0}
NO_QUALITY = {"test_valid": 0.0, "test_right": 0.0, "test_kills": 0.0, "test_copied": 0.0}


class Ran(NamedTuple):
    """What is kept of one case: its state, the start of what the program said, and its error."""

    state: str
    said: str
    error: str


class Runs:
    """Runs programs on tests.

    Args:
      timeout_s: of one program on one test (of a called function: on all tests together).
      sandbox: `marl_llm.tools.Sandbox`; by default the process's own.
    """

    def __init__(self, timeout_s: float | int = 10.0, sandbox: Any = None):
        self._timeout_s, self._sandbox, self._verdicts = timeout_s, sandbox, Verdicts()

    async def cases(self, code: str, function: str, tests: Sequence[tuple[Any, Any]]) -> ToolResult:
        """A `Ran` for each test, as a tuple."""

        async def judge() -> ToolResult:
            if function:
                judged = await ajudge_calls(code, function, tests, self._timeout_s, sandbox=self._sandbox, tuples_as_lists=True)
            else:
                judged = await ajudge_stdio(code, tests, self._timeout_s, sandbox=self._sandbox)
            return judged.map(summaries)

        def summaries(judgement: Judgement) -> tuple[Ran, ...]:
            printed = [""] * len(tests) if function else [_text(program.stdout_bytes) for program in judgement.programs]
            return tuple(_ran(case, output, function) for case, output in zip(judgement.cases, printed))

        return await self._verdicts.of(content_key(code, function, tuple(tests)), judge)

    async def golden(self, code: str, function: str, tests: Sequence[tuple[Any, Any]]) -> ToolResult:
        """`golden`: share of golden tests passed; `builds`: no syntax error; `smoke`, `clean`: the first two, all of them, ran without
        error. Each in [0, 1]."""
        if not code.strip():
            return success(NOT_RUN, 0.0)
        return (await self.cases(code, function, tests)).map(golden_figures)

    async def on_test(self, code: str, test: Mapping[str, Any], function: str) -> ToolResult:
        """The tester's test on the coder's program: `aligned`, `actual` (what it printed or returned), `status` ("ok", or why not)."""
        case = as_case(test, function)
        if case is None or not code.strip():
            missing = "there is no program" if not code.strip() else "there is no test that can be run"
            return success({"aligned": False, "actual": "", "status": missing}, 0.0)

        def outcome(cases: tuple[Ran, ...]) -> dict[str, Any]:
            status = "ok" if cases[0].state in RAN else f"{cases[0].state} {cases[0].error}".strip()
            return {"aligned": cases[0].state == "passed", "actual": cases[0].said, "status": status}

        return (await self.cases(code, function, (case,))).map(outcome)

    async def test_quality(
        self, test: Mapping[str, Any], function: str, references: Sequence[str], mutants: Sequence[str], shown: Sequence[str]
    ) -> ToolResult:
        """`test_valid`: the reference runs on its input; `test_right`: and gives its output; `test_kills`: share of mutants that a right
        test tells from the reference; `test_copied`: its input is one that the statement shows. All 0 where there is no reference."""
        case = as_case(test, function)
        if case is None or not references:
            return success(NO_QUALITY, 0.0)
        reference = references[0]
        copied = float(_squeezed(test["input"]) in {_squeezed(text) for text in shown})
        ran = await self.cases(reference, function, (case,))
        if not ran.ok:
            return ran
        value = {**NO_QUALITY, "test_valid": float(ran.value[0].state in RAN), "test_copied": copied}
        if ran.value[0].state != "passed":
            return ran.map(lambda _: value)
        wrong = tuple(mutants)[:MAX_MUTANTS] or mutants_of(reference, MAX_MUTANTS)
        others = await asyncio.gather(*(self.cases(code, function, (case,)) for code in wrong))
        for other in others:
            if not other.ok:
                return other
        kills = sum(other.value[0].state != "passed" for other in others) / max(1, len(others))
        return ran.map(lambda _: {**value, "test_right": 1.0, "test_kills": kills})


def golden_figures(cases: Sequence[Ran]) -> dict[str, float]:
    """What `Runs.golden` gives of a program's cases."""
    states = [case.state for case in cases]
    errors = ("SyntaxError", "IndentationError", "TabError")
    broken = all(case.state in ("raised", "missing") and case.error.startswith(errors) for case in cases) or states[0] == "missing"
    return {
        "golden": sum(state == "passed" for state in states) / len(states),
        "builds": float(not broken),
        "smoke": float(all(state in RAN for state in states[:SMOKE_TESTS])),
        "clean": float(all(state in RAN for state in states)),
    }


def as_case(test: Mapping[str, Any], function: str) -> tuple[Any, Any] | None:
    """A tester's test as the judge takes it: two texts, or for a function its arguments (one JSON value per line) and a JSON value.

    None where there is no test, where it is no call of the function, or where a value is nested too deeply for the sandbox.
    """
    if test["input"] is None:
        return None
    if not function:
        return test["input"], test["output"]
    try:
        arguments = tuple(json.loads(line) for line in test["input"].splitlines() if line.strip())
        wanted = json.loads(test["output"])
    except (ValueError, RecursionError):
        return None
    return (arguments, wanted) if all(map(crosses, (*arguments, wanted))) else None


def _ran(case: Case, printed: str, function: str) -> Ran:
    if not function:
        return Ran(case.state, printed, case.error)
    try:
        text = repr(case.value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = "(a number too long to print)"
    return Ran(case.state, text[:KEPT_CHARACTERS] if case.state in RAN else "", case.error)


def _text(printed: bytes) -> str:
    return read_text(printed[: 4 * KEPT_CHARACTERS]).value[:KEPT_CHARACTERS]


def _squeezed(text: Any) -> str:
    return " ".join(str(text).split())
