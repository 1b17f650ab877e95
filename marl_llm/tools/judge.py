"""Judging a program by cases: only inputs go into the sandbox, only outputs come out, and the host compares.

An expected value is never in the same process as the candidate, so there is nothing there to read, to patch or to be equal to. A
candidate that exits early, patches `json`, forges result lines or returns an object that claims to equal everything can do no more than
return a value.
"""

import asyncio
import dataclasses
import decimal
import json
import math
import re
from collections.abc import Hashable, Sequence
from typing import Any

from marl_llm.tools.results import ToolResult, failed, success
from marl_llm.tools.sandbox import Execution, Limits, Program, Request, Sandbox, default_sandbox
from marl_llm.tools.sandbox.inside import values

# What can become of one case. Only "passed" is a pass.
CASE_STATES = ("passed", "wrong", "raised", "timeout", "memory", "output_limit", "not_reached", "missing", "malformed")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How close a floating-point number must come: |a − e| ≤ absolute + relative·|e|. Integers must be equal.

    APPS compares with numpy's allclose (1e-5 and 1e-8) and applies it to integers as well, so that 1000001 passes for 1000000; here the
    tolerance is only for numbers that the reference writes as non-integers. LiveCodeBench compares decimals exactly: `Tolerance(0, 0)`.
    """

    relative: float | int = 1e-5
    absolute: float | int = 1e-8

    def close(self, actual: float, expected: float) -> bool:
        """False for NaN on either side; infinities must be equal."""
        if math.isinf(actual) or math.isinf(expected):
            return actual == expected
        return abs(actual - expected) <= self.absolute + self.relative * abs(expected)


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a judgement.

    Attributes:
      state: one of `CASE_STATES`.
      value: what a called function returned.
      error: what it raised, as `Type: message`.
      mutated: whether it changed its arguments (which nobody but itself sees).
      seconds: as the candidate's own process measured, for people.
    """

    state: str
    value: Any = None
    error: str = ""
    mutated: bool = False
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What a program made of all cases. True in a condition iff there is a case and every case passed.

    Attributes:
      cases: in the order given.
      programs: what the executions did.
    """

    cases: tuple[Case, ...]
    programs: tuple[Program, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cases) and all(case.state == "passed" for case in self.cases)

    @property
    def pass_rate(self) -> float:
        """Share of cases that passed; 0 without cases."""
        return sum(case.state == "passed" for case in self.cases) / max(1, len(self.cases))

    @property
    def partial_output(self) -> bool:
        """Whether a program was ended after it had written something."""
        return any(program.outcome in ("timeout", "memory", "disk", "signal") and program.stdout_bytes for program in self.programs)

    def counts(self, prefix: str = "judge") -> dict[str, float]:
        """Figures for the metrics: a count per state (zeros included), mutated arguments and partial output."""
        states = {f"{prefix}/{state}": float(sum(case.state == state for case in self.cases)) for state in CASE_STATES}
        mutated = float(sum(case.mutated for case in self.cases))
        return states | {f"{prefix}/mutated": mutated, f"{prefix}/partial_output": float(self.partial_output)}


def same_value(actual: Any, expected: Any, tolerance: Tolerance = Tolerance(), tuples_as_lists: bool = False) -> bool:
    """Whether a returned value is the expected one, type by type.

    bool, int, float, str, bytes, None and the containers never equal each other, with two exceptions: an int may stand where a float is
    expected (PEP 484), and with `tuples_as_lists` a tuple where a list is (expected values that come from JSON cannot say tuple). NaN
    equals nothing. Keys of dictionaries and members of sets are compared exactly.
    """
    kind = type(expected)
    if kind is float:
        if type(actual) is int:
            return abs(actual) <= 1 << 1023 and tolerance.close(float(actual), expected)
        return type(actual) is float and tolerance.close(actual, expected)
    if kind is complex:
        return type(actual) is complex and tolerance.close(actual.real, expected.real) and tolerance.close(actual.imag, expected.imag)
    if kind in (list, tuple):
        fits = type(actual) is kind or (tuples_as_lists and kind is list and type(actual) is tuple)
        return fits and len(actual) == len(expected) and all(same_value(a, e, tolerance, tuples_as_lists) for a, e in zip(actual, expected))
    if kind is dict:
        if type(actual) is not dict or len(actual) != len(expected):
            return False
        keys = {(type(key), key): value for key, value in actual.items()}
        return all(
            (type(key), key) in keys and same_value(keys[type(key), key], value, tolerance, tuples_as_lists)
            for key, value in expected.items()
        )
    if kind in (set, frozenset):
        return type(actual) is kind and {(type(x), x) for x in actual} == {(type(x), x) for x in expected}
    if kind in (type(None), bool, int, str, bytes):
        return type(actual) is kind and actual == expected
    raise TypeError(f"an expected value of type {kind.__name__} cannot be compared; use built-in types")


def same_output(actual: str, expected: str, tolerance: Tolerance = Tolerance()) -> bool:
    """Whether printed text is the expected one.

    As APPS and LiveCodeBench: spaces at the ends of lines and blank lines at the end do not count; the rest is compared line by line, and a
    line that differs word by word, where two plain numbers are compared as numbers (exactly if the expected one is an integer).
    """
    got, want = ([line.strip() for line in text.strip().splitlines()] for text in (actual, expected))
    return len(got) == len(want) and all(a == e or _same_line(a, e, tolerance) for a, e in zip(got, want))


def _same_line(actual: str, expected: str, tolerance: Tolerance) -> bool:
    got, want = actual.split(), expected.split()
    return len(got) == len(want) and all(a == e or _same_word(a, e, tolerance) for a, e in zip(got, want))


def _same_word(actual: str, expected: str, tolerance: Tolerance) -> bool:
    if not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)) or max(len(actual), len(expected)) > 400:
        return False
    a, e = decimal.Decimal(actual), decimal.Decimal(expected)
    if a == e:
        return True
    if expected.lstrip("+-").isdecimal():
        return False
    return tolerance.close(float(a), float(e))


# ---- calls


def call_request(
    code: str,
    function: str,
    inputs: Sequence[Sequence[Any]],
    timeout_s: float | int,
    case_timeout_s: float | int | None = None,
    profile: str = "bare",
    environment: Hashable = None,
    limits: Limits | None = None,
) -> Request:
    """The request of one judgement by calls. It holds the arguments and nothing that was expected.

    Raises:
      ValueError: an argument of a type that does not cross the fence.
    """
    trees = [values.encode(list(arguments)) for arguments in inputs]
    for number, tree in enumerate(trees):
        if '{"o":' in json.dumps(tree, separators=(",", ":")) and any(isinstance(v, values.Opaque) for v in _flat(values.decode(tree))):
            raise ValueError(f"case {number} has an argument that is not of a built-in type: {inputs[number]!r:.200}")
    plan = {"function": function, "cases": trees, "case_timeout": case_timeout_s}
    limits = dataclasses.replace(limits or Limits(), timeout_s=timeout_s)
    return Request(code, "", profile, limits, environment, calls=json.dumps(plan).encode())


def _flat(value: Any) -> list[Any]:
    """All leaves."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, list | tuple | set | frozenset) else [value]


def read_calls(program: Program, expected: Sequence[Any], tolerance: Tolerance, tuples_as_lists: bool) -> Judgement:
    """Compares what came out. The first line of a case counts; a line that no harness writes makes its case malformed."""
    lines: dict[int, dict] = {}
    for text in program.channel.split(b"\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue  # cut off, or written by the candidate itself: the case stays without a line
        if isinstance(line, dict) and type(line.get("case")) is int:
            lines.setdefault(line["case"], line)
    cases = []
    missing = lines.get(0, {}).get("state") == "missing"
    for number, wanted in enumerate(expected):
        line = lines.get(number)
        if missing:
            cases.append(Case("missing"))
        elif line is None:
            first = number == next((n for n in range(len(expected)) if n not in lines), -1)
            ended = {"timeout": "timeout", "memory": "memory"}.get(program.outcome, "not_reached")
            cases.append(Case(ended if first else "not_reached"))
        else:
            cases.append(_case(line, wanted, tolerance, tuples_as_lists))
    return Judgement(tuple(cases), (program,))


def _case(line: dict, wanted: Any, tolerance: Tolerance, tuples_as_lists: bool) -> Case:
    state, seconds = line.get("state"), line.get("seconds")
    seconds = float(seconds) if type(seconds) in (int, float) else 0.0
    if state in ("raised", "timeout"):
        return Case(state, error=str(line.get("error", ""))[:500], seconds=seconds)
    try:
        value = values.decode(line["value"])
        passed = state == "returned" and same_value(value, wanted, tolerance, tuples_as_lists)
    except (KeyError, ValueError, TypeError, RecursionError, OverflowError) as error:
        if type(error) is TypeError and "cannot be compared" in str(error):
            raise
        return Case("malformed", seconds=seconds)
    return Case("passed" if passed else "wrong", value, mutated=bool(line.get("mutated")), seconds=seconds)


def judge_calls(
    code: str,
    function: str,
    cases: Sequence[tuple[Sequence[Any], Any]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Sandbox | None = None,
    tolerance: Tolerance = Tolerance(),
    tuples_as_lists: bool = False,
    case_timeout_s: float | int | None = None,
    profile: str = "bare",
    environment: Hashable = None,
) -> "CallsResult":
    """Calls `function` of a program once per case and compares what it returns.

    Args:
      code: defines `function`, or a class `Solution` with it as a method.
      cases: pairs of positional arguments and the expected value.
      timeout_s: of the whole program, definitions included.
      case_timeout_s: of one call; the cases after it still run, if the program lets itself be interrupted.

    Returns:
      A result whose outcome is a `Judgement`, and which is itself true iff all cases passed. When the infrastructure failed it raises
      InfrastructureError in a condition: that is neither a pass nor a miss.
    """
    request = call_request(code, function, [c[0] for c in cases], timeout_s, case_timeout_s, profile, environment)
    execution = (sandbox or default_sandbox()).run(request)
    return _calls_result(execution, [c[1] for c in cases], tolerance, tuples_as_lists)


async def ajudge_calls(
    code: str,
    function: str,
    cases: Sequence[tuple[Sequence[Any], Any]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Sandbox | None = None,
    tolerance: Tolerance = Tolerance(),
    tuples_as_lists: bool = False,
    case_timeout_s: float | int | None = None,
    profile: str = "bare",
    environment: Hashable = None,
) -> "CallsResult":
    """`judge_calls` from an event loop."""
    request = call_request(code, function, [c[0] for c in cases], timeout_s, case_timeout_s, profile, environment)
    execution = await (sandbox or default_sandbox()).arun(request)
    return _calls_result(execution, [c[1] for c in cases], tolerance, tuples_as_lists)


@dataclasses.dataclass(frozen=True)
class CallsResult(ToolResult[Judgement]):
    """A tool result that can stand in a condition."""

    def __bool__(self) -> bool:
        return bool(self.outcome())


def _result(value: ToolResult) -> CallsResult:
    return CallsResult(value.value, value.failure, value.seconds, value.attempts)


def _calls_result(execution: Execution, expected: list[Any], tolerance: Tolerance, tuples_as_lists: bool) -> CallsResult:
    if execution.failure is not None:
        return _result(failed(execution.failure.kind, execution.failure.message, execution.seconds, execution.attempts))
    judgement = read_calls(execution.outcome(), expected, tolerance, tuples_as_lists)
    return _result(success(judgement, execution.seconds, execution.attempts))


# ---- standard input and output


def stdio_requests(
    code: str,
    inputs: Sequence[str],
    timeout_s: float | int,
    profile: str = "bare",
    environment: Hashable = None,
    limits: Limits | None = None,
) -> list[Request]:
    """One request per case: a fresh process each, with nothing of the other cases in reach."""
    limits = dataclasses.replace(limits or Limits(), timeout_s=timeout_s)
    return [Request(code, text, profile, limits, environment) for text in inputs]


def read_stdio(executions: Sequence[Execution], expected: Sequence[str], tolerance: Tolerance) -> CallsResult:
    """Compares what was printed. One failure of the infrastructure voids the whole judgement."""
    seconds, attempts = max((e.seconds for e in executions), default=0.0), sum(e.attempts for e in executions)
    for execution in executions:
        if execution.failure is not None:
            return _result(failed(execution.failure.kind, execution.failure.message, seconds, attempts))
    cases, programs = [], []
    for execution, wanted in zip(executions, expected, strict=True):
        program = execution.outcome()
        programs.append(program)
        if program.stdout_truncated:
            state = "timeout" if program.timed_out else "output_limit"
        elif program.outcome != "ok":
            state = {"timeout": "timeout", "memory": "memory"}.get(program.outcome, "raised")
        else:
            state = "passed" if same_output(program.stdout, wanted, tolerance) else "wrong"
        last = program.stderr.strip().splitlines()[-1][:500] if program.stderr.strip() else ""
        cases.append(Case(state, error="" if state in ("passed", "wrong") else last, seconds=program.seconds))
    return _result(success(Judgement(tuple(cases), tuple(programs)), seconds, attempts))


def judge_stdio(
    code: str,
    cases: Sequence[tuple[str, str]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Sandbox | None = None,
    tolerance: Tolerance = Tolerance(),
    profile: str = "bare",
    environment: Hashable = None,
) -> CallsResult:
    """Runs a program once per case on its standard input and compares what it prints.

    Args:
      code: the program.
      cases: pairs of standard input and expected output.
      timeout_s: of one case.
    """
    requests = stdio_requests(code, [c[0] for c in cases], timeout_s, profile, environment)
    return read_stdio((sandbox or default_sandbox()).run_batch(requests), [c[1] for c in cases], tolerance)


async def ajudge_stdio(
    code: str,
    cases: Sequence[tuple[str, str]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Sandbox | None = None,
    tolerance: Tolerance = Tolerance(),
    profile: str = "bare",
    environment: Hashable = None,
) -> CallsResult:
    """`judge_stdio` from an event loop."""
    requests = stdio_requests(code, [c[0] for c in cases], timeout_s, profile, environment)
    results = await asyncio.gather(*((sandbox or default_sandbox()).arun(request) for request in requests))
    return read_stdio(list(results), [c[1] for c in cases], tolerance)
