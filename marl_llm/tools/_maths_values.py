"""The kinds of answers, and when two of them mean the same; `marl_llm.tools._maths_read` states the rules and makes them from texts."""

import dataclasses
import functools
import re
from typing import Any

import sympy
from math_verify.grader import sympy_symbolic_eq

NOTHING = ("no solution", "no solutions", "there is no solution", "there are no solutions", "empty set", "the empty set")
EVERYTHING = ("all real numbers", "all reals", "all real values", "the set of all real numbers")
DIGITS = 60  # to which two numbers agree that are equal


@dataclasses.dataclass(frozen=True)
class Words:
    """A text that is no expression."""

    text: str


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An expression or a matrix, with a unit; `rounded`: a decimal stands in it."""

    expression: Any
    rounded: bool = False
    unit: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Based:
    """A numeral with its base."""

    digits: str
    base: str


@dataclasses.dataclass(frozen=True)
class Several:
    """Some answers; `kind` is "set", "tuple" or "ratio"."""

    kind: str
    members: tuple


@dataclasses.dataclass(frozen=True)
class Region:
    """Intervals of the real line."""

    set: Any


@dataclasses.dataclass(frozen=True)
class Named:
    """`name = value`; `symbol`: the name as an expression, if it is one."""

    name: str
    value: Any
    symbol: Any = None


@dataclasses.dataclass(frozen=True)
class Relation:
    """`difference sign 0`; the sign is "=", "<", "<=" or "!="."""

    sign: str
    difference: Any


def is_several(value: Any, kind: str) -> bool:
    """Whether a value is several answers of this kind."""
    return isinstance(value, Several) and value.kind == kind


def interval(ends: tuple, left_open: bool, right_open: bool) -> Region | None:
    """The interval between two ends; None if they are no real numbers, or if nothing lies between them."""
    if not all(isinstance(end, Quantity) and isinstance(end.expression, sympy.Expr) and not end.unit for end in ends):
        return None
    try:
        points = sympy.Interval(ends[0].expression.doit(), ends[1].expression.doit(), left_open, right_open)
    except (TypeError, ValueError):  # ends that are no real numbers
        return None
    return None if points == sympy.S.EmptySet else Region(points)


def as_region(value: Any) -> Region | None:
    """A value as a part of the real line: `(1, 2)` as an open interval, numbers as points."""
    if isinstance(value, Region):
        return value
    if is_several(value, "tuple") and len(value.members) == 2:
        return interval(value.members, True, True)
    if is_several(value, "set") and all(isinstance(member, Quantity) for member in value.members):
        return Region(sympy.FiniteSet(*(member.expression for member in value.members)))
    return Region(sympy.FiniteSet(value.expression)) if isinstance(value, Quantity) else None


def same(answer: Any, target: Any, delta: float) -> bool:
    """Whether an answer means the target; decimals may differ by `delta` of the target's size."""
    if isinstance(target, Named):
        if isinstance(answer, Named):
            return _name(answer.name) == _name(target.name) and same(answer.value, target.value, delta)
        return same(answer, target.value, delta)
    if isinstance(target, Relation):
        return _same_relation(answer, target)
    if isinstance(answer, Named):
        return same(answer.value, target, delta)
    if isinstance(answer, Region) and is_several(target, "tuple"):
        target = as_region(target) or target
    if isinstance(target, Region):
        region = as_region(answer)
        return region is not None and bool(region.set == target.set or region.set.symmetric_difference(target.set) == sympy.S.EmptySet)
    if type(answer) is not type(target):
        return False
    if isinstance(target, Words):
        return _words(answer.text) == _words(target.text) != ""
    if isinstance(target, Based):
        return answer == target
    if isinstance(target, Several):
        return _same_members(answer, target, delta)
    return _same_quantity(answer, target, delta)


def _same_relation(answer: Any, target: Relation) -> bool:
    """Whether an answer is a multiple of a target relation; `y = 2x + 1` answers `2x - y = -1` too, which it solves."""
    if isinstance(answer, Named) and isinstance(answer.value, Quantity) and answer.symbol is not None:
        answer = Relation("=", answer.symbol - answer.value.expression)
    return isinstance(answer, Relation) and answer.sign == target.sign and _proportional(answer.difference, target.difference, target.sign)


def _name(name: str) -> str:
    return re.sub(r"[ {}]|\\text", "", name)


def region_in_words(text: str) -> Region | None:
    """The empty set, or all real numbers, where a text says so in words; None for any other."""
    words = _words(text)
    return Region(sympy.S.EmptySet) if words in NOTHING else Region(sympy.S.Reals) if words in EVERYTHING else None


def _words(text: str) -> str:
    words = re.findall(r"[^\s.,;:!?\"'()]+", text.replace("\\text", "").replace("{", "").replace("}", "").casefold())
    joined = ("" if "\\" in text else " ").join(words)
    return "does not exist" if joined == "dne" else joined


def _same_members(answer: Several, target: Several, delta: float) -> bool:
    if answer.kind != target.kind or len(answer.members) != len(target.members):
        return False
    if target.kind != "set":
        return all(same(a, b, delta) for a, b in zip(answer.members, target.members))
    names = {member.name for member in target.members if isinstance(member, Named)}
    if len(names) > 1 and not all(isinstance(member, Named) for member in answer.members):
        return False
    left = list(answer.members)
    for wanted in target.members:
        position = next((index for index, member in enumerate(left) if same(member, wanted, delta)), None)
        if position is None:
            return False
        left.pop(position)
    return True


def _proportional(a: Any, b: Any, sign: str) -> bool:
    """Whether one difference is a multiple of the other, by a positive number where the sign has a direction."""
    if not a.free_symbols or a.free_symbols != b.free_symbols:
        return a == b
    factor = sympy.simplify(a / b)
    return bool(factor.is_number and factor.is_finite and factor != 0 and (sign in ("=", "!=") or factor > 0))


def _same_quantity(answer: Quantity, target: Quantity, delta: float) -> bool:
    if not _same_unit(answer.unit, target.unit):
        return False
    a, b = answer.expression, target.expression
    if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
        if not (isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase) and a.shape == b.shape):
            return False
        return all(_same_quantity(Quantity(x, answer.rounded), Quantity(y, target.rounded), delta) for x, y in zip(a.flat(), b.flat()))
    if a == b:
        return True
    if a.free_symbols or b.free_symbols:
        return sympy_symbolic_eq(a, b)
    a, b = number(a), number(b)
    if a is None or b is None:
        return False
    if a.is_Rational and b.is_Rational:
        equal = a == b
    else:
        equal = abs(a - b) <= abs(b) * sympy.Float(10) ** (10 - DIGITS)
    if equal or b.is_Integer or not (answer.rounded or target.rounded):
        return bool(equal)
    return bool(abs(a - b) <= sympy.Rational(str(delta)) * abs(b))


def _same_unit(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Whether units agree: one is missing, they are equal, or what is counted is the same ("clips" and "hair clips")."""
    plain = all(part.isalpha() and len(part) > 2 for part in a + b)
    return not a or not b or a == b or (plain and a[-1] == b[-1])


@functools.lru_cache(4096)
def single_number(value: Any) -> Any:
    """The number that an answer is, or None."""
    while isinstance(value, Named):
        value = value.value
    return number(value.expression) if isinstance(value, Quantity) and not isinstance(value.expression, sympy.MatrixBase) else None


def number(expression: Any) -> Any:
    """The finite number that an expression is, rational ones exactly and others to 60 digits; None for any other."""
    try:
        value = expression.doit()
        if not value.is_Rational:
            value = sympy.nsimplify(value) if value.is_integer else sympy.N(value, DIGITS)
        return value if value.is_number and value.is_finite else None
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return None  # sympy cannot say which number it is
