"""The forms in which published files write the calls of a function: its name, its arguments and its value.

Values are read so that a right program can pass. LiveCodeBench writes JSON texts, one line per argument; APPS and TACO write values, and
most of their rows wrap the expected one in a list of one; JSON has made texts of the integer keys of dictionaries. What no program could
return (NaN, a value that does not cross the fence, one that is too large) is refused.
"""

from __future__ import annotations

import ast
import decimal
import json
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.tools.judge import crosses
from marl_llm.tools.sandbox.inside import values

MAX_VALUES = 4 << 20  # characters of all expected values of a row, as they cross the fence
_TRIPLE = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'')
_LINE = re.compile(r"^([ \t]*)(?:(?:async[ \t]+)?(def)|(class))[ \t]+(\w+)", re.MULTILINE)
_INTEGER = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_RETURNS_LIST = re.compile(r"->\s*[\"']?(?:typing\.)?(?:Optional\[)?(?:List|list|Sequence|Iterable)\b")


class UnreadableCalls(ValueError):
    """The tests of a row call a function in a way that no program can pass, or that cannot be read."""


def parse_json(text: str) -> Any:
    """The value of a JSON text, with integers of any number of digits. Raises `ValueError` or `RecursionError`."""
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    """Python's own reader refuses more than 4,300 digits."""
    return int(digits) if len(digits) < 4000 else int(decimal.Decimal(digits))


# ---- the name


def name_in_starter(starter: str) -> str:
    """The function that a starter code asks for: a method of its `Solution`, or else a function at the top.

    Of several the last one that no other calls; functions within functions and names with two underscores do not count. Raises
    `UnreadableCalls` if there is none.
    """
    code = _TRIPLE.sub('""', starter.expandtabs(8))
    names = _names(code)
    called = {name for name in names if len(re.findall(rf"\b{name}\s*\(", code)) > names.count(name)}
    outer = [name for name in names if name not in called] or names
    if not outer:
        raise UnreadableCalls("the tests call a function, but neither fn_name nor starter_code names one")
    return outer[-1]


def check_name(function: str, starter: str) -> str:
    """The name of the called function, without a `Solution().` in front. Raises `UnreadableCalls` if no answer can define it."""
    function = re.sub(r"^Solution(\(\))?\.", "", function)
    if not function.isidentifier() or keyword.iskeyword(function):
        raise UnreadableCalls(f"the tests call {function!r:.80}, which is no name of a function")
    names = _names(_TRIPLE.sub('""', starter.expandtabs(8)))
    if names and function not in names:
        raise UnreadableCalls(f"the tests call {function!r:.80}, but the starter code defines {', '.join(names):.200}")
    return function


def _names(code: str) -> list[str]:
    """Methods of the class `Solution`; without that class the functions at the top."""
    lines = [(len(indent), bool(is_class), name) for indent, _, is_class, name in _LINE.findall(code)]
    solution = next((place for place, (_, is_class, name) in enumerate(lines) if is_class and name == "Solution"), None)
    if solution is not None:
        indent = lines[solution][0]
        lines = lines[solution + 1 :]
        after = next((place for place, (depth, *_) in enumerate(lines) if depth <= indent), len(lines))
        lines = lines[:after]
    inner = min((depth for depth, *_ in lines), default=0)
    return [name for depth, is_class, name in lines if depth == inner and not is_class and not name.startswith("__")]


# ---- arguments and values


def read_calls(pairs: Sequence[tuple[Any, Any]], starter: str, wrapped: bool) -> tuple[tuple[tuple[Any, ...], Any], ...]:
    """Arguments and expected value of each test. Raises `UnreadableCalls`.

    Args:
      pairs: input and output as the file has them. An output is the text of a value only if its input is a text too.
      wrapped: the file is of the form of APPS. If each output is a list of one, the expected value is what it holds, unless the starter
        code says that a list is returned.
    """
    inputs = [_arguments(test_input) for test_input, _ in pairs]
    outputs = [wanted for _, wanted in pairs]
    texts = [place for place, (test_input, wanted) in enumerate(pairs) if isinstance(test_input, str) and isinstance(wanted, str)]
    for place, value in zip(texts, _values([outputs[place] for place in texts])):
        outputs[place] = value
    if wrapped and all(isinstance(output, list) and len(output) == 1 for output in outputs):
        if not _RETURNS_LIST.search(starter) or all(isinstance(output[0], list) for output in outputs):
            outputs = [output[0] for output in outputs]
    calls = tuple((tuple(map(_with_integer_keys, arguments)), _with_integer_keys(wanted)) for arguments, wanted in zip(inputs, outputs))
    _check(calls)
    return calls


def _arguments(value: Any) -> tuple[Any, ...]:
    """Arguments of a call: a list, or LiveCodeBench's text with one value per line."""
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    lines = [line for line in value.split("\n") if line.strip()]
    for parts in (lines, [value]):  # one value per line, or one over several lines
        for read in (parse_json, ast.literal_eval):
            if (parsed := _all_read(read, parts)) is not None:
                return tuple(parsed)
    raise UnreadableCalls(f"the arguments {value!r:.80} are not one JSON value per line")


def _values(texts: list[str]) -> list[Any]:
    """The values of the outputs of a row: all of them JSON, or all of them Python, or else plain texts."""
    for read in (parse_json, ast.literal_eval):
        if (parsed := _all_read(read, texts)) is not None:
            return parsed
    return texts


def _all_read(read: Callable[[str], Any], texts: Sequence[str]) -> list[Any] | None:
    """The values of all texts; None if one cannot be read."""
    try:
        return [read(text.strip()) for text in texts]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _with_integer_keys(value: Any) -> Any:
    """The value with integers for the keys of each dictionary all of whose keys are texts of integers."""
    if isinstance(value, list | tuple):
        return type(value)(map(_with_integer_keys, value))
    if not isinstance(value, dict):
        return value
    integers = value and all(isinstance(key, str) and _INTEGER.fullmatch(key) for key in value)
    return {_integer(key) if integers else key: _with_integer_keys(item) for key, item in value.items()}


def _check(calls: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
    """Raises `UnreadableCalls` for what no program can be given, or can return."""
    size = 0
    for number, (arguments, wanted) in enumerate(calls):
        if not all(map(crosses, arguments)) or not crosses(wanted):
            raise UnreadableCalls(f"test {number} has a value that is nested too deeply, or of a type that is not compared")
        text = json.dumps(values.encode(wanted))
        size += len(text)
        if '{"f": "nan"}' in text:
            raise UnreadableCalls(f"test {number} expects NaN, which equals nothing")
    if size > MAX_VALUES:
        raise UnreadableCalls(f"the expected values have {size:,} characters; at most {MAX_VALUES:,} can be returned")
