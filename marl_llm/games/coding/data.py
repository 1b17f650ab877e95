"""Programming problems with tests, from the files of DeepCoder's mix (TACO, PrimeIntellect SYNTHETIC-1, LiveCodeBench).

Parquet or JSON lines. A row has `problem` (or `question`, `prompt`), `tests` (or `test_cases`, `input_output`, as a value or as JSON
text) and optionally `starter_code`. Tests come in three forms: a list of {"input", "output", "testtype"} (LiveCodeBench: "stdin" or
"functional"), an object {"inputs", "outputs"} (TACO and APPS; "fn_name" makes it functional), or a list of [input, output].
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.data_files import DataError
from marl_llm.games.coding.forms import UnreadableCalls, check_name, name_in_starter, parse_json, read_calls
from marl_llm.games.coding.team import VISIBLE_TESTS
from marl_llm.workflows import Task
from marl_llm.workflows.rows import RowRefused, log_dropped, read_tasks

PROBLEM = ("problem", "question", "prompt")
TESTS = ("tests", "test_cases", "input_output")
CALLED = ("functional", "function_call")  # kinds of tests that call a function


def load_problems(
    path: str | pathlib.Path, split: str, visible: int = VISIBLE_TESTS, limit: int | None = None, bad_rows: str = "refuse"
) -> list[Task]:
    """Tasks for workflow D, numbered by row.

    Args:
      visible: how many tests a prompt shows. They are the first, and are no part of the hidden ones; at least one test stays hidden.
      limit: read only so many rows.
      bad_rows: "refuse" rows that cannot be used, or "drop" them and say in the log how many for which reason.

    Raises:
      DataError: naming the row: no problem, fewer than two tests, tests of an unknown form, or calls without a function's name.
    """

    def read(number: int, row: Mapping[str, Any]) -> Task:
        problem = next((row[name] for name in PROBLEM if isinstance(row.get(name), str) and row[name].strip()), None)
        if problem is None:
            raise RowRefused("no problem", f"expected a text in one of {', '.join(PROBLEM)}; the row has {', '.join(row)}")
        try:
            function, tests = read_tests(row, "tests")
        except DataError as error:
            raise RowRefused("tests that cannot be read", str(error)) from error
        if len(tests) < 2:
            raise RowRefused("too few tests", f"{len(tests)} tests; one to show and one to hide are needed at least")
        shown = min(visible, len(tests) - 1)
        fields = {"problem": problem.strip(), "visible": show_tests(tests[:shown]), "interface": _interface(function, row)}
        return Task(number, fields, {"function": function, "tests": tests[shown:], "visible_tests": tests[:shown]}, split)

    return log_dropped(path, read_tasks(path, read, "", bad_rows, limit))


def read_tests(row: Mapping[str, Any], where: str) -> tuple[str, tuple[tuple[Any, Any], ...]]:
    """(function's name or "", pairs of input and expected output): arguments and a value for calls, otherwise two texts.

    Raises `DataError`.
    """
    tests = next((row[name] for name in TESTS if row.get(name) not in (None, "", [])), None)
    if tests is None:
        raise DataError(f"{where}: no tests; expected them in one of {', '.join(TESTS)}; the row has {', '.join(row)}")
    tests = _parsed(tests, where)
    function, functional = "", False
    if isinstance(tests, Mapping):
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise DataError(f"{where}: tests must have equally long lists 'inputs' and 'outputs'")
        function, pairs = shown(tests.get("fn_name") or "").strip(), list(zip(inputs, outputs))
        functional = bool(function)
    elif isinstance(tests, list) and all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in tests):
        pairs = [(test["input"], test["output"]) for test in tests]
        kinds = {shown(test.get("testtype") or test.get("type") or "stdin") in CALLED for test in tests}
        names = {shown(test["fn_name"]).strip() for test in tests if test.get("fn_name")}
        if len(kinds) == 2 or len(names) > 1:
            raise DataError(f"{where}: tests of several kinds or functions; all must read standard input, or all call one function")
        functional, function = kinds == {True}, "".join(names)
    elif isinstance(tests, list) and all(isinstance(test, Sequence) and not isinstance(test, str) and len(test) == 2 for test in tests):
        pairs = [(test[0], test[1]) for test in tests]
    else:
        raise DataError(f"{where}: tests of an unknown form; see the head of marl_llm/games/coding/data.py")
    if not functional:
        return "", tuple((stdio_text(test_input, where), stdio_text(wanted, where)) for test_input, wanted in pairs)
    starter = str(row.get("starter_code") or "")
    try:
        function = check_name(function or name_in_starter(starter), starter)
        return function, read_calls(pairs, starter, wrapped=isinstance(tests, Mapping))
    except UnreadableCalls as problem:
        raise DataError(f"{where}: {problem}") from problem


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: the tests are a text that is not JSON: {error}") from error


def stdio_text(value: Any, where: str) -> str:
    """Standard input or output; TACO writes some as lists of lines. Raises `DataError` for what is missing, or cannot be written."""
    lines = value if isinstance(value, list | tuple) else [value]
    if any(line is None for line in lines):
        raise DataError(f"{where}: the input or output of a test is missing (null)")
    try:
        return "\n".join(map(str, lines))
    except (ValueError, RecursionError) as error:  # Python writes no integer of more than 4,300 digits
        raise DataError(f"{where}: an input or output that cannot be written as text: {error}") from error


def _interface(function: str, row: Mapping[str, Any]) -> str:
    if not function:
        return "The program reads standard input and prints its answer."
    starter = str(row.get("starter_code") or "").strip()
    return f"The program defines {function}." + (f" Begin with:\n{starter}" if starter else "")


def show_tests(tests: Sequence[tuple[Any, Any]]) -> str:
    """Tests as a prompt shows them."""
    return "\n".join(f"input: {shown(test_input)}\noutput: {shown(wanted)}" for test_input, wanted in tests)


def shown(value: Any) -> str:
    """The text of a value; Python writes no integer of more than 4,300 digits."""
    try:
        return str(value)
    except ValueError:
        return f"({type(value).__name__} with a number too long to print)"
