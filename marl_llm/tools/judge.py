"""Judging a program by cases: only inputs go into the sandbox, only outputs come out, and the host compares.

An expected value is never in the same process as the candidate, so there is nothing there to read, to patch or to be equal to. A
candidate that exits early, patches `json`, forges result lines or returns an object that claims to equal everything can do no more than
return a value.
"""

import asyncio
import dataclasses
import json
import math
import re
from collections.abc import Hashable, Sequence
from typing import Any

from marl_llm.tools._compare import USUAL, Tolerance, opened, same_output, same_tree, same_value, shown
from marl_llm.tools.results import ToolResult, failed, success
from marl_llm.tools.sandbox import Execution, Executor, Limits, Program, Submission, default_sandbox
from marl_llm.tools.sandbox.inside import values
from marl_llm.untrusted import Bounds, read_json, read_text

__all__ = [
    "CASE_STATES", "Case", "CallsResult", "Judgement", "Tolerance", "ajudge_calls", "ajudge_stdio", "call_request", "crosses",
    "judge_calls", "judge_stdio", "read_calls", "read_stdio", "same_output", "same_value", "stdio_requests",
]  # fmt: skip

# What can become of one case. Only "passed" is a pass.
CASE_STATES = ("passed", "wrong", "raised", "timeout", "memory", "output_limit", "not_reached", "missing", "malformed")
SPARE_VALUES = 10_000  # a returned value may have this many parts more than twice the expected one's; a larger one is wrong unread
LINE_DEPTH = 4 * values.MAX_DEPTH  # an encoded value nests up to three containers per level
_NUMBERED = re.compile(rb'\{\s*+"case"\s*+:\s*+(\d{1,9})\s*+,')


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a judgement.

    Attributes:
      state: one of `CASE_STATES`.
      value: what a called function returned; an `Opaque` in its place where it is large (over 1000 parts, or an integer of over 4096 bits).
      error: what it raised, as `Type: message`.
      mutated: whether it changed its arguments (which nobody but itself sees).
      seconds: as the candidate's own process measured, for people.
      replaced: characters of its texts that were no valid UTF-8 and became U+FFFD.
    """

    state: str
    value: Any = None
    error: str = ""
    mutated: bool = False
    seconds: float = 0.0
    replaced: int = 0


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
        """Figures for the metrics: a count per state (zeros included), mutated arguments, cases with replaced text, partial output."""
        states = {f"{prefix}/{state}": float(sum(case.state == state for case in self.cases)) for state in CASE_STATES}
        mutated = float(sum(case.mutated for case in self.cases))
        replaced = float(sum(case.replaced > 0 for case in self.cases))
        others = {"mutated": mutated, "replaced": replaced, "partial_output": float(self.partial_output)}
        return states | {f"{prefix}/{name}": value for name, value in others.items()}


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
) -> Submission:
    """The request of one judgement by calls. It holds the arguments and nothing that was expected.

    Raises:
      ValueError: an argument of a type that does not cross the fence.
    """
    trees = [values.encode(list(arguments)) for arguments in inputs]
    for number, tree in enumerate(trees):
        if _has_opaque(tree):
            raise ValueError(f"case {number} has an argument that is not of a built-in type: {inputs[number]!r:.200}")
    plan = {"function": function, "cases": trees, "case_timeout": case_timeout_s}
    limits = dataclasses.replace(limits or Limits(), timeout_s=timeout_s)
    return Submission(code, "", profile, limits, environment, calls=json.dumps(plan).encode())


def crosses(value: Any) -> bool:
    """Whether a value can be an argument or an expected value: built-in types only, at most `values.MAX_DEPTH` containers deep."""
    return not _has_opaque(values.encode([value]))


def _has_opaque(tree: Any) -> bool:
    """Whether an encoded value holds something of a type that does not cross the fence."""
    if type(tree) is list:
        return any(map(_has_opaque, tree))
    return type(tree) is dict and ("o" in tree or any(map(_has_opaque, tree.values())))


def read_calls(program: Program, expected: Sequence[Any], tolerance: Tolerance, tuples_as_lists: bool) -> Judgement:
    """Compares what came out. The first line of a case counts; a line that no harness writes makes its case malformed.

    Whatever the lines are, this ends in time linear in their length, give or take a logarithm.

    Raises:
      TypeError: an expected value that is not of built-in types.
    """
    trees = [values.encode(wanted) for wanted in expected]
    for wanted, tree in zip(expected, trees):
        if _has_opaque(tree):
            raise TypeError(f"an expected value that is not of built-in types cannot be compared: {wanted!r:.200}")
    lines = _lines(program.channel, trees)
    first_without = next((number for number in range(len(expected)) if number not in lines), -1)
    missing = lines.get(0, ({}, 0))[0].get("state") == "missing"
    cases = []
    for number, wanted in enumerate(expected):
        if missing:
            cases.append(Case("missing"))
        elif number in lines:
            cases.append(_case(*lines[number], wanted, tolerance, tuples_as_lists))
        else:
            ended = {"timeout": "timeout", "memory": "memory"}.get(program.outcome, "not_reached")
            cases.append(Case(ended if number == first_without else "not_reached"))
    return Judgement(tuple(cases), (program,))


def _lines(channel: bytes, trees: Sequence[Any]) -> dict[int, tuple[dict, int]]:
    """Case -> (its line, how many of its characters were replaced), where it has one. No more lines are read than a harness writes.

    A line that cannot be read stands for its case (if it begins as a harness's line does) with its problem as the only field.
    """
    lines: dict[int, tuple[dict, int]] = {}
    pieces = channel.split(b"\n", len(trees))
    for place, text in enumerate(pieces[: len(trees)]):
        head = _NUMBERED.match(text)
        wanted = json.dumps(trees[int(head[1])]) if head and int(head[1]) < len(trees) else ""
        room = SPARE_VALUES + 2 * sum(map(wanted.count, ",[{"))
        parsed = read_json(text, Bounds(depth=LINE_DEPTH, values=room))
        if parsed.ok and isinstance(parsed.value, dict) and type(parsed.value.get("case")) is int:
            lines.setdefault(parsed.value["case"], (parsed.value, parsed.replaced))
        elif head and (place < len(pieces) - 1 or parsed.problem != "not_json"):  # else it was cut off: the case has no line
            lines.setdefault(int(head[1]), ({"problem": parsed.problem}, 0))
    return lines


def _case(line: dict, replaced: int, wanted: Any, tolerance: Tolerance, tuples_as_lists: bool) -> Case:
    """A case as its line reports it; `line` may be any object of valid JSON."""
    if "problem" in line:
        return Case("wrong" if line["problem"] == "too_many" else "malformed")
    state, seconds, error, mutated = (line.get(name) for name in ("state", "seconds", "error", "mutated"))
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        return Case("malformed", replaced=replaced)
    measured = dict(seconds=float(seconds), replaced=replaced)
    if state in ("raised", "timeout") and type(error) in (str, type(None)):
        return Case(state, error=(error or "")[:500], **measured)
    if state != "returned" or "value" not in line or type(mutated) is not bool:
        return Case("malformed", **measured)
    passed = same_tree(line["value"], wanted, tolerance, tuples_as_lists)
    if not passed and opened(line["value"])[0] is None:
        return Case("malformed", **measured)
    return Case("passed" if passed else "wrong", shown(line["value"]), mutated=mutated, **measured)


def judge_calls(
    code: str,
    function: str,
    cases: Sequence[tuple[Sequence[Any], Any]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Executor | None = None,
    tolerance: Tolerance = USUAL,
    tuples_as_lists: bool = False,
    case_timeout_s: float | int | None = None,
    profile: str = "bare",
    environment: Hashable = None,
) -> "CallsResult":
    """Calls `function` of a program once per case and compares what it returns.

    Args:
      code: defines `function`, or a class `Solution` with it as a method, of which each case gets a new one. It is imported, so what stands
        under `if __name__ == "__main__"` does not run, and finds the names that judges of contests import in front of it (`List`, `heapq`).
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
    sandbox: Executor | None = None,
    tolerance: Tolerance = USUAL,
    tuples_as_lists: bool = False,
    case_timeout_s: float | int | None = None,
    profile: str = "bare",
    environment: Hashable = None,
) -> "CallsResult":
    """`judge_calls` from an event loop."""
    request = call_request(code, function, [c[0] for c in cases], timeout_s, case_timeout_s, profile, environment)
    execution = await (sandbox or default_sandbox()).arun(request)
    # in a thread: what a program says may take a while to read, and the loop serves others
    return await asyncio.to_thread(_calls_result, execution, [c[1] for c in cases], tolerance, tuples_as_lists)


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
    code: str, cases: Sequence[tuple[str, str]], timeout_s: float | int, profile: str = "bare", environment: Hashable = None
) -> list[Submission]:
    """One request per case: a fresh process each, with nothing of the other cases in reach.

    Of an expected output only the length is used, and only by the host: at least twice as many bytes of what is printed are kept.
    """
    usual = Limits(timeout_s=timeout_s)
    rooms = [max(usual.stdout_bytes, 2 * len(wanted.encode("utf-8", "surrogatepass"))) for _, wanted in cases]
    limits = [dataclasses.replace(usual, stdout_bytes=room) for room in rooms]
    return [Submission(code, text, profile, limit, environment) for (text, _), limit in zip(cases, limits)]


def read_stdio(executions: Sequence[Execution], expected: Sequence[str], tolerance: Tolerance) -> CallsResult:
    """Compares what was printed. One failure of the infrastructure aborts the whole judgement."""
    seconds, attempts = max((e.seconds for e in executions), default=0.0), sum(e.attempts for e in executions)
    for execution in executions:
        if execution.failure is not None:
            return _result(failed(execution.failure.kind, execution.failure.message, seconds, attempts))
    cases, programs = [], []
    for execution, wanted in zip(executions, expected, strict=True):
        program = execution.outcome()
        programs.append(program)
        printed, complained = read_text(program.stdout_bytes), read_text(program.stderr_bytes)
        if program.stdout_truncated:
            state = "timeout" if program.timed_out else "output_limit"
        elif program.outcome != "ok":
            state = {"timeout": "timeout", "memory": "memory"}.get(program.outcome, "raised")
        else:
            state = "passed" if same_output(printed.value, wanted, tolerance) else "wrong"
        last = complained.value.strip().splitlines()[-1][:500] if complained.value.strip() else ""
        replaced = printed.replaced + complained.replaced
        cases.append(Case(state, error="" if state in ("passed", "wrong") else last, seconds=program.seconds, replaced=replaced))
    return _result(success(Judgement(tuple(cases), tuple(programs)), seconds, attempts))


def judge_stdio(
    code: str,
    cases: Sequence[tuple[str, str]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Executor | None = None,
    tolerance: Tolerance = USUAL,
    profile: str = "bare",
    environment: Hashable = None,
) -> CallsResult:
    """Runs a program once per case on its standard input and compares what it prints.

    Args:
      code: the program.
      cases: pairs of standard input and expected output.
      timeout_s: of one case.
    """
    requests = stdio_requests(code, cases, timeout_s, profile, environment)
    return read_stdio((sandbox or default_sandbox()).run_batch(requests), [c[1] for c in cases], tolerance)


async def ajudge_stdio(
    code: str,
    cases: Sequence[tuple[str, str]],
    timeout_s: float | int = 10.0,
    *,
    sandbox: Executor | None = None,
    tolerance: Tolerance = USUAL,
    profile: str = "bare",
    environment: Hashable = None,
) -> CallsResult:
    """`judge_stdio` from an event loop."""
    requests = stdio_requests(code, cases, timeout_s, profile, environment)
    results = await asyncio.gather(*((sandbox or default_sandbox()).arun(request) for request in requests))
    return await asyncio.to_thread(read_stdio, list(results), [c[1] for c in cases], tolerance)
