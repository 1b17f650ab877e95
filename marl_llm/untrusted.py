"""The door for whatever a program, a policy, a tool, a server or somebody's file says: valid text and bounded JSON.

Text from outside may hold lone surrogates, which no file, socket or tokenizer takes; JSON from outside may be deep, endless or hold numbers
that no float holds. What is read here is safe to store, to print, to put into a prompt and to walk recursively. Texts and values are read
without an exception: a problem is part of the answer. Files are refused with one line that names the file and the reason.
"""

import dataclasses
import functools
import io
import itertools
import json
import math
import operator
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import IO, Any

LARGEST_REWARD = 1e15  # in size: float32 holds the sum of a million of its squares
REPLACEMENT = "\ufffd"
# Why JSON was not read.
PROBLEMS = ("too_long", "too_deep", "too_many", "number", "not_json")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # a string without an end reaches to the end of the text: linear
_NO_BRACKET = re.compile(r"[^\[{\]}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
LARGEST = 2.0**127  # a number that float32 holds
_PAIR, _HALF = re.compile("[\ud800-\udbff][\udc00-\udfff]"), re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How much JSON is read."""

    size: int = 8 << 20  # most bytes (of a text: characters)
    depth: int = 64  # most containers within each other
    values: int = 1_000_000  # most commas and opening brackets outside of strings; a text of v values has fewer than 2·v of them
    digits: int = 300  # most characters of one number; with at most 300 every integer is a finite float
    infinite: bool = False  # whether infinities, and what overflows to them, are read
    nan: bool = False  # whether NaN is read


@dataclasses.dataclass(frozen=True)
class Said:
    """What was read."""

    value: Any = None  # the value; None if there is a problem (and of the JSON text `null`)
    problem: str = ""  # the empty string, or one of `PROBLEMS`
    replaced: int = 0  # characters that were no valid text and became U+FFFD

    @property
    def ok(self) -> bool:
        """Whether it could be read."""
        return not self.problem


class _BadNumber(ValueError):
    """A number outside of the bounds."""


def valid_text(text: str | bytes) -> str:
    """The text with whatever is not valid UTF-8 replaced by U+FFFD; halves of a surrogate pair that belong together are joined."""
    return read_text(text).value


def read_text(text: str | bytes) -> Said:
    """`valid_text` with the count of replaced characters. It has no problem: every text can be read."""
    try:
        if isinstance(text, bytes):
            return Said(text.decode())
        text.encode()
        return Said(text)
    except UnicodeDecodeError:
        valid = text.decode("utf-8", "replace")
        return Said(valid, "", valid.count(REPLACEMENT) - text.count(REPLACEMENT.encode()))
    except UnicodeEncodeError:
        valid, replaced = _HALF.subn(REPLACEMENT, _PAIR.sub(_joined, text))
        return Said(valid, "", replaced)


def flatten_text(text: str | bytes, most: int) -> str:
    """Somebody's words as one line of at most so many characters, with nothing in it that a terminal obeys."""
    text = valid_text(text[: 100 * most])
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:most]


def read_value(value: Any, bounds: Bounds = Bounds()) -> Said:
    """A value that somebody's function gave: the same with valid texts, or the problem why it is not within the bounds.

    Texts, numbers, lists, tuples, sets and dictionaries are looked at, `bounds.size` counts characters and `bounds.values` items. Other
    objects pass as they are. Where nothing is replaced the very same object comes back.
    """
    walk = _Walk(bounds)
    try:
        return Said(walk.valid(value, 0), "", walk.replaced)
    except _Beyond as beyond:
        return Said(problem=str(beyond))


class _Beyond(Exception):
    """The value is not within the bounds; the text is the problem."""


class _Walk:
    """One look at a value."""

    def __init__(self, bounds: Bounds):
        self._bounds, self._size, self._values, self.replaced = bounds, 0, 0, 0
        self._most, self._least = 10**bounds.digits, -(10 ** (bounds.digits - 1))  # next to those that have no more characters

    def valid(self, value: Any, depth: int) -> Any:
        """The value with valid texts. Raises `_Beyond`."""
        if isinstance(value, str):
            self._size += len(value)
            if self._size > self._bounds.size:
                raise _Beyond("too_long")
            said = read_text(value)
            self.replaced += said.replaced
            return said.value
        if isinstance(value, int) and not self._least < value < self._most or isinstance(value, float) and not math.isfinite(value):
            raise _Beyond("number")
        if not isinstance(value, list | tuple | set | frozenset | dict):
            return value
        self._values += len(value)
        if depth == self._bounds.depth:
            raise _Beyond("too_deep")
        if self._values > self._bounds.values:
            raise _Beyond("too_many")
        old = [*value, *value.values()] if isinstance(value, dict) else list(value)
        new = [self.valid(item, depth + 1) for item in old]
        if all(map(operator.is_, old, new)):
            return value
        if isinstance(value, dict):
            return dict(zip(new[: len(value)], new[len(value) :]))
        if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple
            return value._make(new)
        kind = next(kind for kind in (list, tuple, frozenset, set) if isinstance(value, kind))
        return kind(new)


def _joined(pair: re.Match) -> str:
    return pair.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le")


def read_json(text: str | bytes, bounds: Bounds = Bounds()) -> Said:
    """The value of a JSON text, in time and memory linear in its length.

    All texts in it, keys included, are valid, and no container is deeper than the bounds say. Its integers can be made floats. Unless
    the bounds say otherwise all numbers are finite: `NaN`, `Infinity` and what does not fit a float are the problem `number`.
    """
    if len(text) > bounds.size:
        return Said(problem="too_long")
    clean = read_text(text)
    text = clean.value
    if problem := _shape_problem(text, bounds):
        return Said(problem=problem)

    def real(digits: str) -> float:
        value = float(digits)
        if not bounds.nan and math.isnan(value) or not bounds.infinite and math.isinf(value):
            raise _BadNumber
        return value

    try:
        value = json.loads(text, parse_float=real, parse_constant=real)
    except _BadNumber:
        return Said(problem="number")
    except RecursionError:  # the caller's own stack is nearly full
        return Said(problem="too_deep")
    except ValueError:
        return Said(problem="not_json")
    if not _SURROGATE.search(text):
        return Said(value, "", clean.replaced)
    value, replaced = _valid(value)
    return Said(value, "", clean.replaced + replaced)


@functools.cache
def _long_number(digits: int) -> re.Pattern:
    """Matches a number, or what looks like one, of more characters."""
    return re.compile(rf"(?<![0-9.eE+-])[0-9.eE+-]{{{digits + 1}}}")


def _shape_problem(text: str, bounds: Bounds) -> str:
    """Whether a text has too many values, is too deep or has too long a number; looks closely only where a quick look cannot tell."""
    brackets, long_number = text.count("[") + text.count("{"), _long_number(bounds.digits)
    if brackets <= bounds.depth and brackets + text.count(",") <= bounds.values and not long_number.search(text):
        return ""
    shape = _STRING.sub('""', text)
    brackets = shape.count("[") + shape.count("{")
    if brackets + shape.count(",") > bounds.values:
        return "too_many"
    if brackets > bounds.depth and max(itertools.accumulate(map(_STEPS.get, _NO_BRACKET.sub("", shape)))) > bounds.depth:
        return "too_deep"
    return "number" if long_number.search(shape) else ""


def _valid(value: Any) -> tuple[Any, int]:
    """A value of bounded depth with valid texts, and the count of replaced characters. Of keys that become equal the last one stays."""
    if isinstance(value, str):
        said = read_text(value)
        return said.value, said.replaced
    if isinstance(value, list):
        pairs = [_valid(item) for item in value]
        return [item for item, _ in pairs], sum(count for _, count in pairs)
    if isinstance(value, dict):
        pairs = [(_valid(key), _valid(item)) for key, item in value.items()]
        return {key: item for (key, _), (item, _) in pairs}, sum(a + b for (_, a), (_, b) in pairs)
    return value, 0


def open_file(path: str | os.PathLike, error: type[Exception] = ValueError) -> IO[bytes]:
    """A file that somebody else may have made, opened to read: a regular file (links are followed).

    Never waits, as opening a named pipe would. Raises `error` with the path and the reason; a missing file is `FileNotFoundError`.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as problem:  # ValueError: a path with a null character
        raise error(f"{os.fspath(path)}: cannot be opened ({getattr(problem, 'strerror', None) or problem})") from problem
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise error(f"{os.fspath(path)}: {'a directory, ' * stat.S_ISDIR(mode)}not a regular file")
    return open(handle, "rb")


def read_file(path: str | os.PathLike, most: int, error: type[Exception] = ValueError) -> bytes:
    """The bytes of a file as `open_file` opens it, of at most `most` bytes. Raises as `open_file`."""
    with open_file(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most + 1) if size <= most else b""
        if size > most or len(data) > most:
            raise error(f"{os.fspath(path)}: {max(size, len(data)):,} bytes; at most {most:,} are read")
        return data


def json_problem(problem: str, bounds: Bounds) -> str:
    """One of `PROBLEMS` as words for a person: `nested deeper than 64 levels`."""
    return {
        "too_long": f"longer than {bounds.size:,} bytes",
        "too_deep": f"nested deeper than {bounds.depth} levels",
        "too_many": f"more than {bounds.values:,} values",
        "number": f"a number that is not finite or has more than {bounds.digits} digits",
        "not_json": "not JSON",
    }[problem]


def parse_json(data: bytes, where: str, kind: type | None = dict, bounds: Bounds = Bounds(), error: type[Exception] = ValueError) -> Any:
    """The value of a JSON text from a file. `where` is the file, with a line number where it has several texts.

    A byte-order mark at the start is left out. Raises `error`, in one line that begins with `where`, if the text is not UTF-8, not JSON,
    beyond the bounds or not of the wanted kind (`dict`, `list`; None: any).
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 (byte {problem.start:,})") from None
    read = read_json(text, bounds)
    if not read.ok:
        raise error(f"{where}: {json_problem(read.problem, bounds)}{_place(text) if read.problem == 'not_json' else ''}")
    if kind is not None and not isinstance(read.value, kind):
        raise error(f"{where}: {_KINDS[kind]} is expected, not {_KINDS.get(type(read.value), 'a single value')}")
    return read.value


_KINDS = {dict: "an object", list: "an array", str: "a text"}


def _place(text: str) -> str:
    """Where a text of bounded depth stops being JSON, and why: ` (line 3, column 7: Expecting value)`."""
    try:
        json.loads(text)
    except json.JSONDecodeError as problem:
        return f" (line {problem.lineno}, column {problem.colno}: {problem.msg})"
    except (ValueError, RecursionError):
        pass  # an integer of too many digits, or a full stack: there is no place to name
    return ""


def read_json_file(
    path: str | os.PathLike, kind: type | None = dict, bounds: Bounds = Bounds(), error: type[Exception] = ValueError
) -> Any:
    """The value of a JSON file that somebody else may have made; see `read_file` and `parse_json` for what is refused, and how."""
    return parse_json(read_file(path, bounds.size, error), os.fspath(path), kind, bounds, error)


def is_bounded_number(value: Any) -> bool:
    """Whether somebody's value is a number, and small enough that float32 holds its square."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_REWARD


def check_number(value: Any, name: str, low: float | int = -LARGEST, high: float | int = LARGEST) -> float:
    """A number of a file as a float. Raises `ValueError` for another kind of value and outside of `[low, high]`; `name` says where it is.

    >>> check_number(2, "kl_coef", 0)
    2.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], not {ascii(value):.60}")
    return float(value)


def check_count(value: Any, name: str, low: int = 0, high: int = 2**31 - 1) -> int:
    """The same of a whole number, which by default int32 holds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number in [{low}, {high}], not {ascii(value):.60}")
    return value


def check_keys(value: Any, name: str, keys: Collection[str]) -> Mapping[str, Any]:
    """An object of a file that has these keys and no others; raises `ValueError`, as `check_number` does."""
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise ValueError(f"{name} must have {', '.join(keys)}, and nothing else; it is {ascii(value):.60}")
    return value


def json_lines(data: bytes | IO[bytes], where: str, bounds: Bounds = Bounds()) -> Iterator[tuple[int, dict | None, str]]:
    """Line numbers (from 1) and objects of a JSON Lines text or open file; for a line that cannot be read None and the reason, with file
    and line.

    Lines end at a line feed and at nothing else; empty ones are left out. One bad line never takes the others away, and of one that is
    longer than the bounds say no more is held than that.
    """
    file, number = io.BytesIO(data) if isinstance(data, bytes) else data, 0
    while line := file.readline(bounds.size + 2):
        number += 1
        rest = line
        while len(rest) == bounds.size + 2 and not rest.endswith(b"\n"):
            rest = file.readline(bounds.size + 2)
        if rest is line and not line.strip():
            continue
        try:
            yield number, parse_json(line.removesuffix(b"\n"), f"{where}, line {number}", dict, bounds), ""
        except ValueError as problem:
            yield number, None, str(problem)
