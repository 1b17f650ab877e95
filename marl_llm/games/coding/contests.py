"""Problems for coder and tester, from files in the public schemas of APPS, CodeContests, LiveCodeBench and Stronger-MAS's release.

| schema | known by | golden tests | shown tests | references |
|---|---|---|---|---|
| APPS (`codeparrot/apps`) | `question`, `input_output` | of `input_output`, but those that stand in the statement | those | `solutions` |
| CodeContests (`deepmind/code_contests`) | `description` | `private_tests`, `generated_tests` | `public_tests` | `solutions` in Python 3 |
| LiveCodeBench (`code_generation_lite`) | `question_content` | `private_test_cases` | `public_test_cases` | none |
| the release's parquet | `question`, `test_input` | as APPS | as APPS | `solution` |

Parquet (needs pyarrow, of the extra `tools`), JSON lines or JSON. A row that cannot be used is refused by file, row and reason; with
`bad_rows="drop"` it is left out and counted under its reason, because the published files hold some. References are not believed:
`check_references` runs them against their own tests.
"""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import io
import json
import pathlib
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marl_llm.games.coding.data import read_tests, stdio_text
from marl_llm.games.coding.data import shown as shown_text
from marl_llm.games.coding.forms import parse_json
from marl_llm.tools.judge import Tolerance, judge_calls, read_stdio, stdio_requests
from marl_llm.tools.sandbox import default_sandbox
from marl_llm.workflows import Task
from marl_llm.workflows.rows import DataError, Loaded, RowRefused, read_tasks

PYTHON3 = 3  # of CodeContests' `language`
MAX_TEST = 1 << 24  # characters of one input or output
MAX_PACKED = 1 << 28  # bytes of LiveCodeBench's private tests, unpacked
MAX_REFERENCES, MAX_MUTANTS = 2, 4


@dataclasses.dataclass(frozen=True)
class Problem:
    """A row as it was read. Tests are (input, output): texts, or with a `function` its arguments and a value."""

    text: str
    function: str
    golden: tuple[tuple[Any, Any], ...]
    shown: tuple[str, ...]
    references: tuple[str, ...] = ()
    mutants: tuple[str, ...] = ()
    starter: str = ""


def load_contests(
    path: str | pathlib.Path, split: str, difficulty: str = "", tests: int = 0, bad_rows: str = "refuse", limit: int | None = None
) -> Loaded:
    """Tasks of a file, numbered by row.

    Args:
      difficulty: only rows with this `difficulty`; empty: all.
      tests: most golden tests per problem, from the first; 0: all.
      bad_rows: "refuse" or "drop" those that cannot be used.
      limit: read only so many rows.

    Raises:
      DataError: naming file, row and reason; or a schema that none of the above is.
    """

    def read(number: int, row: Mapping[str, Any]) -> Task:
        problem = read_problem(row)
        hidden = {
            "function": problem.function,
            "tests": problem.golden[:tests] if tests else problem.golden,
            "references": problem.references,
            "mutants": problem.mutants,
            "shown": problem.shown,
        }
        return Task(number, {"problem": problem.text, "interface": interface(problem)}, hidden, split)

    return read_tasks(path, read, difficulty, bad_rows, limit)


def read_problem(row: Mapping[str, Any]) -> Problem:
    """A row of any of the schemas."""
    if "question_content" in row:
        return _livecodebench(row)
    if "description" in row:
        return _code_contests(row)
    if "question" in row and "test_input" in row:
        return _release(row)
    if "question" in row:
        return _apps(row)
    columns = ", ".join(map(str, row)) or "none"
    raise RowRefused("unknown columns", f"the row has {columns}; see the head of marl_llm/games/coding/contests.py")


def interface(problem: Problem) -> str:
    """What a prompt says of how the program is used."""
    if not problem.function:
        return "The program reads its input with input() and prints its answer with print()."
    text = (
        f"The program defines {problem.function}. In a test, the input is one JSON value per line for each argument, and the output is "
        "the JSON of what it returns."
    )
    return text + (f"\nBegin with:\n{problem.starter}" if problem.starter else "")


# ---- the schemas


def _apps(row: Mapping[str, Any]) -> Problem:
    text = _statement(row, "question")
    if not row.get("input_output"):
        raise RowRefused("no tests", "input_output is empty")
    function, tests = _tests(row, {"input_output": row["input_output"], "starter_code": row.get("starter_code")})
    golden, shown = _hidden_tests(text, function, tests)
    codes = _list_of_code(row.get("solutions"), "solutions")
    return Problem(text, function, golden, shown, codes, (), _starter(row))


def _release(row: Mapping[str, Any]) -> Problem:
    text = _statement(row, "question")
    function, tests = _tests(row, {"input_output": {"inputs": _column(row, "test_input"), "outputs": _column(row, "test_output")}})
    golden, shown = _hidden_tests(text, function, tests)
    return Problem(text, function, golden, shown, _list_of_code(row.get("solution"), "solution"))


def _code_contests(row: Mapping[str, Any]) -> Problem:
    text = _statement(row, "description")
    parts = {name: _pairs(row.get(name), name) for name in ("public_tests", "private_tests", "generated_tests")}
    golden = parts["private_tests"] + parts["generated_tests"]
    if not golden:
        raise RowRefused("no hidden tests", "private_tests and generated_tests are empty, and public ones stand in the statement")
    codes = {name: _in_python3(row.get(name), name) for name in ("solutions", "incorrect_solutions")}
    shown = tuple(test_input for test_input, _ in parts["public_tests"])
    right, wrong = codes["solutions"][:MAX_REFERENCES], codes["incorrect_solutions"][:MAX_MUTANTS]
    return Problem(text, "", _checked(golden), shown, right, wrong)


def _livecodebench(row: Mapping[str, Any]) -> Problem:
    text = _statement(row, "question_content")
    metadata = _json(row.get("metadata") or "{}", "metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    more = {"starter_code": row.get("starter_code")}
    groups = []
    for column in ("public_test_cases", "private_test_cases"):
        value = row.get(column)
        if not value:
            raise RowRefused("no tests", f"{column} is empty")
        cases = _unpacked(value, column)
        if name and isinstance(cases, list):
            cases = [{**case, "fn_name": name} if isinstance(case, Mapping) else case for case in cases]
        groups.append(_tests(row, {"tests": cases, **more}))
    (function, public), (_, private) = groups
    shown = tuple("\n".join(map(_json_line, test_input)) if function else test_input for test_input, _ in public)
    return Problem(text, function, _checked(private), shown, (), (), _starter(row))


def _statement(row: Mapping[str, Any], column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise RowRefused("no problem", f"{column} must be a text")
    return text.replace("\r\n", "\n").strip()


def _json_line(value: Any) -> str:
    """An argument as a test of a prompt writes it."""
    try:
        return json.dumps(value)
    except (ValueError, TypeError):  # an integer of more than 4,300 digits; a value that was written as Python
        return shown_text(value)


def _starter(row: Mapping[str, Any]) -> str:
    return str(row.get("starter_code") or "").strip()


def _column(row: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(row.get(name), Sequence) or isinstance(row[name], str):
        raise RowRefused("tests of an unknown form", f"{name} must be a list")
    return list(row[name])


def _json(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        raise RowRefused("not JSON", f"{field}: {type(error).__name__}: {str(error)[:100]}") from error


def _tests(row: Mapping[str, Any], columns: Mapping[str, Any]) -> tuple[str, tuple[tuple[Any, Any], ...]]:
    """(function's name or "", tests) of columns as `data.read_tests` knows them."""
    columns = {name: _json(value, name) if name != "starter_code" else value for name, value in columns.items()}
    try:
        function, tests = read_tests({**columns, "starter_code": columns.get("starter_code") or row.get("starter_code")}, "tests")
    except (DataError, RecursionError) as error:
        raise RowRefused("tests of an unknown form", str(error)[:200]) from error
    if function:
        return function, _checked(tests)
    return "", _checked(tuple((_lines(test_input), _lines(wanted)) for test_input, wanted in tests))


def _pairs(tests: Any, field: str) -> tuple[tuple[str, str], ...]:
    tests = _json(tests or {"input": [], "output": []}, field)
    inputs, outputs = (tests.get(name) for name in ("input", "output")) if isinstance(tests, Mapping) else (None, None)
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise RowRefused("tests of an unknown form", f"{field} must have equally long lists input and output")
    try:
        return tuple((_lines(stdio_text(a, field)), _lines(stdio_text(b, field))) for a, b in zip(inputs, outputs))
    except DataError as error:
        raise RowRefused("tests of an unknown form", str(error)[:200]) from error


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n")


def _checked(tests: tuple[tuple[Any, Any], ...]) -> tuple[tuple[Any, Any], ...]:
    """The tests. Refuses none, one without an expected output, one that is too large."""
    if not tests:
        raise RowRefused("no tests")
    for number, (test_input, wanted) in enumerate(tests):
        if isinstance(wanted, str) and isinstance(test_input, str):
            if not wanted.strip():
                raise RowRefused("an empty output", f"test {number}")
            if max(len(test_input), len(wanted)) > MAX_TEST:
                raise RowRefused("a test that is too large", f"test {number} has over {MAX_TEST} characters")
    return tests


def _hidden_tests(text: str, function: str, tests: tuple[tuple[Any, Any], ...]) -> tuple[tuple[tuple[Any, Any], ...], tuple[str, ...]]:
    """(tests that do not stand in the statement, inputs of those that do). Refuses a problem all of whose tests stand there."""
    body = f"\n{_stripped(text)}\n"

    def stands(part):
        return f"\n{_stripped(str(part))}\n" in body

    shown = [not function and stands(test_input) and stands(wanted) for test_input, wanted in tests]
    if all(shown):
        raise RowRefused("no hidden tests", "every test stands in the statement")
    return tuple(t for t, known in zip(tests, shown) if not known), tuple(t[0] for t, known in zip(tests, shown) if known)


def _stripped(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _list_of_code(value: Any, field: str) -> tuple[str, ...]:
    if not value:
        return ()
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return (value,)
    codes = _json(value, field)
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
        raise RowRefused("solutions of an unknown form", f"{field} must be a list of texts")
    return tuple(codes[:MAX_REFERENCES])


def _in_python3(value: Any, field: str) -> tuple[str, ...]:
    value = _json(value or {"language": [], "solution": []}, field)
    languages, codes = (value.get(name) for name in ("language", "solution")) if isinstance(value, Mapping) else (None, None)
    if not isinstance(languages, list) or not isinstance(codes, list) or len(languages) != len(codes):
        raise RowRefused("solutions of an unknown form", f"{field} must have equally long lists language and solution")
    return tuple(str(code) for language, code in zip(languages, codes) if language in (PYTHON3, "PYTHON3"))


# ---- LiveCodeBench's packed tests


class _TextsOnly(pickle.Unpickler):
    """Reads built-in values: a pickle that names a class or function is refused before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(value: Any, field: str) -> Any:
    """Test cases: a list, its JSON, or base64 of zlib of a pickled JSON text."""
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("[", "{"):
        return _json(value, field)
    try:
        packed = zlib.decompressobj()
        raw = packed.decompress(base64.b64decode(value, validate=True), MAX_PACKED)
        if packed.unconsumed_tail:
            raise RowRefused("a test that is too large", f"{field} unpacks to over {MAX_PACKED} bytes")
        text = _TextsOnly(io.BytesIO(raw)).load()
    except (binascii.Error, zlib.error) as error:
        raise RowRefused("packed tests that cannot be read", f"{field}: {error}") from error
    except RowRefused:
        raise
    except Exception as error:  # a broken pickle may raise nearly anything
        raise RowRefused("packed tests that cannot be read", f"{field}: {type(error).__name__}: {str(error)[:100]}") from error
    if not isinstance(text, str):
        raise RowRefused("packed tests that cannot be read", f"{field}: a pickled {type(text).__name__}, not a text")
    return _json(text, field)


# ---- references


def check_references(tasks: Iterable[Task], tests: int = 3, timeout_s: float | int = 6.0) -> Loaded:
    """Tasks whose references pass their own first golden tests, and how many were left out for which reason.

    A second solution that runs and prints something else than the first shows that there are several right answers, which equality with
    one output cannot judge; such problems are left out too. Problems without a reference are kept: they can test, and pay no tester.
    Raises `InfrastructureError` where the sandbox gives no outcome.
    """
    kept, dropped = [], collections.Counter()
    for task in tasks:
        why = _reference_fault(task, tests, timeout_s)
        if why:
            dropped[why] += 1
        else:
            kept.append(task)
    return Loaded(kept, dict(dropped))


def _reference_fault(task: Task, tests: int, timeout_s: float | int) -> str:
    cases, function = task.hidden["tests"][:tests], task.hidden["function"]
    for number, code in enumerate(task.hidden["references"]):
        if function:
            judged = judge_calls(code, function, cases, timeout_s, tuples_as_lists=True)
        else:
            executions = default_sandbox().run_batch(stdio_requests(code, cases, timeout_s))
            judged = read_stdio(executions, [wanted for _, wanted in cases], Tolerance())
        states = [case.state for case in judged.outcome().cases]
        if number == 0 and set(states) != {"passed"}:
            return "the reference fails its own tests"
        if number and "wrong" in states and set(states) <= {"passed", "wrong"}:
            return "its solutions disagree"
    return ""
