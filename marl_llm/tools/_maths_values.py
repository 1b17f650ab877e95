r"""What a mathematical answer means, and when two answers mean the same.

`read` splits a cleaned text at its commas, relations and brackets, and sympy reads the single expressions that remain. Every answer has one
meaning:

* A number is exact. Only a decimal with digits behind its point may differ from the target, by δ of the target's size, and never from an
  integer. A numeral with a base equals the same numeral in the same base.
* Units behind a number, percent and degrees among them, are the problem's own: an answer or a target may leave them out; two that are
  given must be the same. 50% answers 50 and 50%, and not 0.5.
* `x = 5` answers 5, for its left side is a single name. Any other equation is an equation: it equals its own multiples only.
* `2, 1`, `2 or 1`, `\{2, 1\}` and `x=2 or x=1` are a set, in which order does not count. `(2, 1)` is a pair, in which it does, or an
  open interval where the target is one. `[1, 2]` is a closed interval, `3:4` a ratio that is compared part by part.
* What sympy cannot read is words, compared without case.
"""

import dataclasses
import functools
import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from math_verify.grader import sympy_symbolic_eq

from marl_llm.tools._maths_text import BRACKET, clean, closes_last, depths, read_numeral, split_unit, unwrap

MAX_DEPTH = 16  # of brackets within brackets
DIGITS = 60  # to which two numbers agree that are equal
SPELLING = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
LIST = re.compile(r"[,;]| (and|or) ")
RELATION = re.compile(r"(?<!:)=|<|>|\\(?:le|ge|ne|approx|in|equiv)(?![A-Za-z])")
CUP = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]]) ?U ?(?=[(\[])")
COLON, BAR = re.compile(":"), re.compile(r"\||:")
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])|\+/-")
GREEK = "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|Delta|Omega|ell"
_INDEX = r"(?:_\{?\w+\}?)?'*"
NAME = re.compile(
    rf"(?:[A-Za-z]|\\(?:{GREEK})){_INDEX} ?(?:\([\w, \\]+\))?"
    rf"|\((?:[A-Za-z]{_INDEX}, ?)+[A-Za-z]{_INDEX}\)"
    r"|\\(?:angle|overline|vec|hat|bar|triangle) ?\{?[A-Za-z ]+\}?|\|?[A-Z]{2,}\|?|(?:[A-Za-z]+ )*[A-Za-z]{3,}(?: [A-Za-z]+)*|\\text ?\{[^{}]*\}"
)
BASED = re.compile(r"\(?([0-9A-Za-z]+)\)? ?_ ?\{? ?(?:\\text ?\{)? ?(\d+|[a-z]+) ?\}*")
BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10", "twelve": "12",
         "sixteen": "16"}  # fmt: skip
FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|pi|infty|theta|infinity)(?![A-Za-z])")
COMMAND = re.compile(r"\\(?:begin|end) ?\{[a-zA-Z]+\*?\}|\\[A-Za-z]+")
WORDS = re.compile(r"[A-Za-z]{3,}")
AMBIGUOUS = re.compile(r"\d \d|\d\.\d*\.\d|!!|%|\\(?:text|boxed|begin\{cases\})(?![A-Za-z])")  # what the grammar below would read in its own way


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
    """`name = value`."""

    name: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Relation:
    """`difference sign 0`; the sign is "=", "<", "<=" or "!="."""

    sign: str
    difference: Any


@functools.lru_cache(4096)
def read(text: str) -> Any:
    """What an answer means: one of the classes above. `Words("")` for an answer that says nothing."""
    return _read(clean(text), 0)


def _read(text: str, depth: int) -> Any:
    text = unwrap(text)
    if depth > MAX_DEPTH:
        return Words(text)
    if numeral := read_numeral(text):
        return Quantity(_rational(numeral.value), numeral.rounded)
    parts, commas = _split(text, LIST)
    if len(parts) > 1:
        return _gather([_read(part, depth + 1) for part in parts if part.strip()], commas)
    if PLUS_MINUS.search(text):
        other = {"pm": "+-", "mp": "-+"}
        branches = [PLUS_MINUS.sub(lambda sign: other.get(sign[1], "+-")[branch], text) for branch in (0, 1)]
        return _gather([_read(branch, depth + 1) for branch in branches], [","])
    parts, signs = _split(text, RELATION)
    if len(parts) > 1:
        return _relation(text, [part.strip() for part in parts], signs, depth)
    parts, _ = _split(text, CUP)
    if len(parts) > 1:
        regions = [_as_region(_read(part, depth + 1)) for part in parts]
        return Region(sympy.Union(*(region.set for region in regions))) if all(regions) else Words(text)
    parts, _ = _split(text, COLON)
    if len(parts) > 1:
        members = tuple(_read(part, depth + 1) for part in parts)
        return Several("ratio", members) if all(isinstance(member, Quantity) for member in members) else Words(text)
    return _bracketed(text, depth) or _single(text)


def _split(text: str, separator: re.Pattern) -> tuple[list[str], list[str]]:
    """The parts between separators that stand in no bracket, and the separators."""
    ends = list(depths(text))
    parts, between, start, index, depth = [], [], 0, 0, 0
    for found in separator.finditer(text):
        while index < len(ends) and ends[index][0] <= found.start():
            depth = ends[index][1]
            index += 1
        if depth == 0:
            parts.append(text[start : found.start()])
            between.append(found.group().strip())
            start = found.end()
    return [*parts, text[start:]], between


def _gather(members: list, between: list[str]) -> Any:
    """A set of several answers; of inequalities their union or intersection."""
    members = [inner for member in members for inner in (member.members if _is(member, "set") else (member,))]
    if isinstance(members[0], Named) and not any(isinstance(member, Named) for member in members[1:]):
        members = [members[0], *(Named(members[0].name, member) for member in members[1:])]
    if len(members) == 1:
        return members[0]
    names = {member.name if isinstance(member, Named) else "" for member in members}
    regions = [member.value if isinstance(member, Named) else member for member in members]
    if len(names) == 1 and "" not in names and all(isinstance(region, Region) for region in regions):
        combined = sympy.Union if "or" in between else sympy.Intersection
        return Named(*names, Region(combined(*(region.set for region in regions))))
    return Several("set", tuple(members))


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Several) and value.kind == kind


def _relation(text: str, parts: list[str], signs: list[str], depth: int) -> Any:
    """An equation, an inequality or a membership."""
    if signs == ["\\in"]:
        return Named(parts[0], _read(parts[1], depth + 1)) if NAME.fullmatch(parts[0]) else Words(text)
    if set(signs) <= {"=", "\\approx"}:
        return _equation(text, parts, signs, depth)
    sides = [_single(part) for part in parts]
    if not all(isinstance(side, Quantity) and isinstance(side.expression, sympy.Expr) for side in sides):
        return Words(text)
    pairs = list(zip([side.expression for side in sides], signs, [side.expression for side in sides[1:]]))
    symbols = set().union(*(side.expression.free_symbols for side in sides))
    if len(symbols) == 1:
        (name,) = symbols
        regions = [_half_line(*pair, name) for pair in pairs]
        if all(region is not None for region in regions):
            return Named(str(name), Region(sympy.Intersection(*regions)))
    if len(pairs) > 1:
        return Words(text)
    ((left, sign, right),) = pairs
    if sign in (">", "\\ge"):
        left, right = right, left
    names = {"<": "<", ">": "<", "\\le": "<=", "\\ge": "<=", "\\ne": "!="}
    return Relation(names[sign], left - right) if sign in names else Words(text)


def _equation(text: str, parts: list[str], signs: list[str], depth: int) -> Any:
    about = signs.index("\\approx") if "\\approx" in signs else len(parts)
    if about > 0 or not NAME.fullmatch(parts[0]):  # in `x = 1/3 ≈ 0.33` the answer is what stands before the ≈
        parts = parts[: about + 1]
    if len(parts) == 1:
        return _read(parts[0], depth + 1)
    if len(parts) == 2 and NAME.fullmatch(parts[1]) and not NAME.fullmatch(parts[0]):
        parts = parts[::-1]
    if NAME.fullmatch(parts[0]):
        values = [_read(part, depth + 1) for part in parts[1:]]
        return Named(parts[0], values[-1]) if all(same(value, values[-1], 0) for value in values[:-1]) else Words(text)
    sides = [_single(part) for part in parts]
    if len(sides) == 2 and all(isinstance(side, Quantity) and isinstance(side.expression, sympy.Expr) for side in sides):
        return Relation("=", sides[0].expression - sides[1].expression)
    return Words(text)


def _half_line(left: Any, sign: str, right: Any, name: Any) -> Any:
    """Where an inequality between a name and a number holds; None for any other."""
    if right == name and not left.free_symbols:
        left, right = right, left
        sign = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}.get(sign, sign)
    if left != name or right.free_symbols:
        return None
    line = {
        "<": lambda: sympy.Interval.open(-sympy.oo, right),
        ">": lambda: sympy.Interval.open(right, sympy.oo),
        "\\le": lambda: sympy.Interval(-sympy.oo, right),
        "\\ge": lambda: sympy.Interval(right, sympy.oo),
        "\\ne": lambda: sympy.Union(sympy.Interval.open(-sympy.oo, right), sympy.Interval.open(right, sympy.oo)),
    }.get(sign)
    return line() if line else None


def _bracketed(text: str, depth: int) -> Any:
    """A pair, an interval or a set in brackets that stand around the whole text; None for any other text."""
    opening = BRACKET.match(text)
    if text.startswith("\\emptyset"):
        return Region(sympy.S.EmptySet)
    if opening is None or opening.group().startswith("\\begin") or not closes_last(text, 0):
        return None
    first, last = opening.group(), text[-2:] if text.endswith("\\}") else text[-1:]
    inner = text[opening.end() : -len("\\rangle") if text.endswith("\\rangle") else -len(last)]
    parts, _ = _split(inner, LIST)
    if first in ("\\{", "{"):
        condition, _ = _split(inner, BAR)
        if len(condition) == 2 and NAME.match(condition[0].strip()):
            return _read(condition[1], depth + 1)
        return Region(sympy.S.EmptySet) if not inner.strip() else _read(inner, depth + 1)
    if first == "(" and last == ")" and len(parts) == 1:
        return _read(inner, depth + 1) if inner.strip() else None
    members = tuple(_read(part, depth + 1) for part in parts)
    infinite = any(isinstance(member, Quantity) and member.expression in (sympy.oo, -sympy.oo) for member in members)
    if len(members) == 2 and (infinite or first == "[" or last == "]"):
        return _interval(members, first == "(", last == ")") or Several("tuple", members)
    return Several("tuple", members)


def _interval(ends: tuple, left_open: bool, right_open: bool) -> Region | None:
    if not all(isinstance(end, Quantity) and isinstance(end.expression, sympy.Expr) and not end.unit for end in ends):
        return None
    try:
        return Region(sympy.Interval(ends[0].expression, ends[1].expression, left_open, right_open))
    except (TypeError, ValueError):  # ends that are no real numbers
        return None


def _as_region(value: Any) -> Region | None:
    """A value as a part of the real line: `(1, 2)` as an open interval, numbers as points."""
    if isinstance(value, Region):
        return value
    if _is(value, "tuple") and len(value.members) == 2:
        return _interval(value.members, True, True)
    if _is(value, "set") and all(isinstance(member, Quantity) for member in value.members):
        return Region(sympy.FiniteSet(*(member.expression for member in value.members)))
    return Region(sympy.FiniteSet(value.expression)) if isinstance(value, Quantity) else None


def _single(text: str) -> Any:
    """A text without commas and relations: a numeral, words, or an expression that sympy reads."""
    text = unwrap(text)
    based = BASED.fullmatch(text)
    if based and (based[1][0].isdigit() or len(based[1]) > 1) and BASES.get(based[2], based[2]).isdigit():
        base = BASES.get(based[2], based[2])
        return Based(based[1].upper(), base) if base != "10" else _single(based[1])
    body, unit, factor = split_unit(text)
    body = unwrap(body)
    if numeral := read_numeral(body):
        return Quantity(_rational(numeral.value * factor), numeral.rounded, unit)
    if factor != 1 or WORDS.search(FUNCTIONS.sub("", COMMAND.sub("", body))):
        return Words(text)
    expression = _expression(body)
    if expression is None:
        return Words(text)
    return Quantity(_exact(expression), bool(expression.atoms(sympy.Float)), unit)


def _expression(latex: str) -> Any:
    """What sympy makes of one expression; None where it makes nothing of it."""
    if not latex or AMBIGUOUS.search(latex):
        return None
    latex = re.sub(r"(\d)[eE]([-+]?\d{1,3})(?!\d)", r"\1\\cdot 10^{\2}", latex).replace("**", "^").replace("*", "\\cdot ")
    latex = re.sub(r"(?<=[\d)}])(?<!_\d) ?\(|(?<=\))(?=\d)", lambda gap: "\\cdot " + gap.group(), latex)
    latex = FUNCTIONS.sub(lambda name: "\\" + ("infty" if name[1] == "infinity" else name[1]) + " ", latex)
    try:
        expression = latex2sympy(normalize_latex(latex, SPELLING), is_real=True, convert_degrees=False, normalization_config=None)
    except MemoryError:
        raise
    except Exception:  # the grammar raises plain Exceptions, and sympy all kinds, for what is no expression
        return None
    if not isinstance(expression, sympy.Expr | sympy.MatrixBase) or expression.has(sympy.nan, sympy.zoo):
        return None
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name in ("i", "\\imath")}
    return expression.xreplace(imaginary) if imaginary else expression


def _exact(expression: Any) -> Any:
    """The expression with its decimals as fractions."""
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def _rational(value: Fraction) -> sympy.Rational:
    return sympy.Rational(value.numerator, value.denominator)


# ---- when two answers mean the same


def same(answer: Any, target: Any, delta: float) -> bool:
    """Whether an answer means the target; decimals may differ by `delta` of the target's size."""
    if isinstance(target, Named):
        if isinstance(answer, Named):
            return _name(answer.name) == _name(target.name) and same(answer.value, target.value, delta)
        return same(answer, target.value, delta)
    if isinstance(answer, Named):
        return same(answer.value, target, delta)
    if isinstance(target, Region):
        region = _as_region(answer)
        return region is not None and bool(region.set == target.set or region.set.symmetric_difference(target.set) == sympy.S.EmptySet)
    if type(answer) is not type(target):
        return False
    if isinstance(target, Words):
        return _words(answer.text) == _words(target.text) != ""
    if isinstance(target, Based):
        return answer == target
    if isinstance(target, Several):
        return _same_members(answer, target, delta)
    if isinstance(target, Relation):
        return answer.sign == target.sign and _proportional(answer.difference, target.difference, target.sign)
    return _same_quantity(answer, target, delta)


def _name(name: str) -> str:
    return re.sub(r"[ {}]|\\text", "", name)


def _words(text: str) -> str:
    return " ".join(re.findall(r"[^\s.,;:\"'()]+", text.replace("\\text", "").replace("{", "").replace("}", "").casefold()))


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
        found = next((index for index, member in enumerate(left) if same(member, wanted, delta)), None)
        if found is None:
            return False
        left.pop(found)
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
