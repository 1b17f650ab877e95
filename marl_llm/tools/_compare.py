"""When what a program returned or printed is what was expected.

A returned value is compared as it crossed the fence (`inside.values`), and no Python object is made of it: a set or a dictionary made of a
candidate's numbers takes quadratic time when their hashes collide, and an object of its choosing could be anything. Any JSON tree may be
given; one that no harness writes equals nothing.
"""

import dataclasses
import decimal
import itertools
import math
import re
from typing import Any

from marl_llm.tools.sandbox.inside import values
from marl_llm.tools.sandbox.inside.values import Opaque
from marl_llm.untrusted import valid_text

MAX_SHOWN = 1000  # parts of a returned value that is kept for people; keeps a set of colliding members harmless
BLANKS = " \t\r\n"  # what separates words and ends lines; no other character does
MAX_WORD = 400  # characters of a printed word that is compared as a number
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,5})?", re.ASCII)
_BLANKS = re.compile(r"[ \t\r]+")
_HEX = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_CONTAINERS = {"t": tuple, "s": set, "z": frozenset}
_nan = itertools.count()


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


USUAL = Tolerance()


def same_value(actual: Any, expected: Any, tolerance: Tolerance = USUAL, tuples_as_lists: bool = False) -> bool:
    """Whether a returned value is the expected one, type by type.

    bool, int, float, str, bytes, None and the containers never equal each other, with two exceptions: an int may stand where a float is
    expected (PEP 484), and with `tuples_as_lists` a tuple where a list is (expected values that come from JSON cannot say tuple). NaN
    equals nothing. Keys of dictionaries and members of sets are compared exactly, types included at every depth.

    Raises:
      TypeError: an expected value that is not of built-in types.
    """
    return same_tree(values.encode(actual), expected, tolerance, tuples_as_lists)


def same_tree(tree: Any, expected: Any, tolerance: Tolerance, tuples_as_lists: bool) -> bool:
    """`same_value` for a value that is still encoded; the tree may be any JSON whose texts are valid. n·log n in its size."""
    wanted = type(expected)
    kind, body = opened(tree)
    if wanted is float:
        if kind is int:
            return abs(body) <= 1 << 1023 and tolerance.close(float(body), expected)
        return kind is float and tolerance.close(body, expected)
    if wanted is complex:
        return kind is complex and tolerance.close(body.real, expected.real) and tolerance.close(body.imag, expected.imag)
    if wanted in (list, tuple):
        fits = kind is wanted or (tuples_as_lists and wanted is list and kind is tuple)
        return fits and len(body) == len(expected) and all(same_tree(b, e, tolerance, tuples_as_lists) for b, e in zip(body, expected))
    if wanted is dict:
        if kind is not dict or len(body) != len(expected):
            return False
        got = sorted(((_exact(key), item) for key, item in body), key=lambda pair: pair[0])
        want = sorted(((_exact(values.encode(key)), item) for key, item in expected.items()), key=lambda pair: pair[0])
        return all(a[0] == e[0] and same_tree(a[1], e[1], tolerance, tuples_as_lists) for a, e in zip(got, want))
    if wanted in (set, frozenset):
        if kind is not wanted or len(body) != len(expected):
            return False
        return sorted(map(_exact, body)) == sorted(_exact(values.encode(item)) for item in expected)
    if wanted in (type(None), bool, int, str, bytes):
        return kind is wanted and body == expected
    raise TypeError(f"an expected value of type {wanted.__name__} cannot be compared; use built-in types")


def opened(tree: Any) -> tuple[type | None, Any]:
    """Type and content of an encoded value: of containers the list of encoded members (of a dictionary: of pairs).

    (None, None) for a tree that `values.encode` does not make.
    """
    nothing = (None, None)
    if tree is None or type(tree) in (bool, str, int, float, list):
        return type(tree), tree
    if type(tree) is not dict or len(tree) != 1:
        return nothing
    ((tag, body),) = tree.items()
    if tag in ("i", "f", "b", "u") and type(body) is not str:
        return nothing
    if tag == "i":
        return (int, int(body, 16)) if _HEX.fullmatch(body) else nothing
    if tag == "f":
        return (float, _FLOATS[body]) if body in _FLOATS else nothing
    if tag in ("b", "u"):
        try:
            data = bytes.fromhex(body)
            return (bytes, data) if tag == "b" else (str, data.decode("utf-16-le", "surrogatepass"))
        except ValueError:  # not what a harness writes
            return nothing
    if type(body) is not list:
        return nothing
    if tag in _CONTAINERS:
        return _CONTAINERS[tag], body
    if tag == "d":
        return (dict, body) if all(type(pair) is list and len(pair) == 2 for pair in body) else nothing
    if len(body) != 2:
        return nothing
    if tag == "c":
        (real_type, real), (imag_type, imag) = map(opened, body)
        return (complex, complex(real, imag)) if real_type is imag_type is float else nothing
    if tag == "o" and all(type(text) is str for text in body):
        return Opaque, Opaque(valid_text(body[0][:200]), valid_text(body[1][:200]))
    return nothing


def _exact(tree: Any) -> str:
    """A text that two encoded values share iff they are equal, types included. Texts sort without hashing."""
    kind, body = opened(tree)
    if kind in (list, tuple):
        return f"{kind.__name__}[{','.join(map(_exact, body))}]"
    if kind in (set, frozenset):
        return f"{kind.__name__}[{','.join(sorted(map(_exact, body)))}]"
    if kind is dict:
        return f"dict[{','.join(sorted(f'{_exact(key)}:{_exact(item)}' for key, item in body))}]"
    if kind in (float, complex):
        body = f"nan {next(_nan)}" if body != body else repr(body + 0)  # NaN equals nothing; -0.0 equals 0.0
    text = hex(body) if kind is int else str(body)
    return f"{'' if kind is None else kind.__name__} {len(text)} {text}"


def shown(tree: Any) -> Any:
    """The value for people: safe to print and to put into a prompt, and an `Opaque` where it is large or of a kind that is not compared."""
    parts, waiting = 0, [tree]
    while waiting and parts <= MAX_SHOWN:
        part = waiting.pop()
        parts += 1
        waiting += part if type(part) is list else part.values() if type(part) is dict else ()
    kind = opened(tree)[0]
    if parts > MAX_SHOWN:
        return Opaque("object" if kind is None else kind.__name__, "too large to show")
    return _made(tree)


def _made(tree: Any) -> Any:
    """The value of a small tree."""
    kind, body = opened(tree)
    if kind is None:
        return Opaque("object", "malformed")
    if kind is int and body.bit_length() > 4096:  # Python refuses to print integers of more than 4300 digits
        return Opaque("int", f"of {body.bit_length()} bits")
    if kind is str:
        return valid_text(body)
    try:
        if kind in (list, tuple, set, frozenset):
            return kind(map(_made, body))
        return {_made(key): _made(item) for key, item in body} if kind is dict else body
    except TypeError:  # a member that has no hash, which no real set holds
        return Opaque("object", "malformed")


def same_output(actual: str, expected: str, tolerance: Tolerance = USUAL) -> bool:
    """Whether printed text is the expected one.

    As APPS and LiveCodeBench: spaces at the ends of lines and blank lines at the end do not count; the rest is compared line by line, and a
    line that differs word by word, where two plain numbers are compared as numbers (exactly if the expected one is an integer). A line ends
    at a line feed, with or without a carriage return before it, and at nothing else. A word of more than 400 characters, or with an
    exponent of more than five digits, is no plain number: it equals its own text only.
    """
    got, want = ([line.strip(BLANKS) for line in text.strip(BLANKS).split("\n")] for text in (actual, expected))
    return len(got) == len(want) and all(a == e or _same_line(a, e, tolerance) for a, e in zip(got, want))


def _same_line(actual: str, expected: str, tolerance: Tolerance) -> bool:
    got, want = (_BLANKS.sub(" ", line).split(" ") for line in (actual, expected))
    return len(got) == len(want) and all(a == e or _same_word(a, e, tolerance) for a, e in zip(got, want))


def _same_word(actual: str, expected: str, tolerance: Tolerance) -> bool:
    if max(len(actual), len(expected)) > MAX_WORD or not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    a, e = decimal.Decimal(actual), decimal.Decimal(expected)
    if a == e:
        return True
    if expected.lstrip("+-").isdecimal():
        return False
    # beyond a float's range both would be the same infinity
    return math.isfinite(float(a)) and math.isfinite(float(e)) and tolerance.close(float(a), float(e))
