r"""What a mathematical answer means.

`read` splits a cleaned text at its commas, relations and brackets, and sympy reads the single expressions that remain. Every answer has one
meaning:

* A number is exact. Only a decimal with digits behind its point may differ from the target, by δ of the target's size, and never from an
  integer. A numeral with a base equals the same numeral in the same base.
* Units behind a number, percent and degrees among them, are the problem's own: an answer or a target may leave them out; two that are
  given must be the same. 50% answers 50 and 50%, and not 0.5.
* `x = 5` answers 5, for its left side is a single name. Any other equation equals its own multiples only, and answers no equation that is
  solved for a name.
* `2, 1`, `2 or 1`, `\{2, 1\}` and `x=2 or x=1` are a set, in which order does not count. `(2, 1)` is a pair, in which it does, or an
  open interval where the target is one, or the answer is. `[1, 2]` is a closed interval, `]1, 2[` an open one, `3:4` a ratio that is
  compared part by part. "No solution" is the empty set.
* A choice may be given with its content: `(C) 12` answers C, and not 12.
* A power tower or factorial with more digits than can be written equals only what is written the same.
* What sympy cannot read is words, compared without case.
"""

import functools
import math
import re
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex

from marl_llm.tools._maths_text import BRACKET, OPENING, clean, closes_last, depths, read_numeral, split_unit, unwrap
from marl_llm.tools._maths_values import (
    Based,
    Named,
    Quantity,
    Region,
    Relation,
    Several,
    Words,
    as_region,
    interval,
    is_several,
    region_in_words,
    same,
)  # fmt: skip

MAX_DEPTH = 16  # of brackets within brackets
SPELLING = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
MEMBERS = re.compile(r"[,;]| (and|or) ")
LIST = re.compile(r"(?<!\d),|,(?!\d{3}(?!\d))|;| (and|or) ")  # outside of brackets 1,234 is one number
RELATION = re.compile(r"(?<!:)=|<|>|\\(?:le|ge|ne|approx|in|equiv)(?![A-Za-z])")
CUP = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]]) ?U ?(?=[(\[])")
MINUS_SET = re.compile(r"\\backslash(?![A-Za-z])")
COLON, BAR = re.compile(":"), re.compile(r"\||:")
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])|\+/-")
GREEK = "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi|chi|psi|omega|Delta|Omega|ell"
_INDEX = r"(?:_\{?\w+\}?)?'*"
NAME = re.compile(
    rf"(?:[A-Za-z]|\\(?:{GREEK})){_INDEX} ?(?:\([\w, \\]+\))?"
    rf"|\((?:[A-Za-z]{_INDEX}, ?)+[A-Za-z]{_INDEX}\)"
    r"|\\(?:angle|overline|vec|hat|bar|triangle) ?\{?[A-Za-z ]+\}?"
    r"|\|?[A-Z]{2,}\|?|(?:[A-Za-z]+ )*[A-Za-z]{3,}(?: [A-Za-z]+)*|\\text ?\{[^{}]*\}"
)
BASED = re.compile(r"\(?(?:\\text ?\{)?([0-9A-Za-z]+)\}?\)? ?_ ?\{? ?(?:\\text ?\{)? ?\(?(\d+|[a-z]+)\)? ?\}*")
BASES = dict(two="2", three="3", four="4", five="5", six="6", seven="7", eight="8", nine="9", ten="10", twelve="12", sixteen="16")
FUNCTIONS = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|pi|infty|theta|infinity|inf)(?![A-Za-z])"
)
ANGLE_OF = re.compile(r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
DEGREES = re.compile(r"(\d+(?:\.\d+)?) ?°")
HUGE_DIGITS = 6  # of an exponent
TOWER = re.compile(r"\^ ?\{? ?\(?(\d{1,300}) ?\^ ?\{? ?\(?(\d{1,300})")
HIGH_POWER = re.compile(rf"(?:\^|\*\*) ?\{{? ?\(?\d{{{HUGE_DIGITS + 1}}}|\d{{{HUGE_DIGITS}}} ?!|(?:9|\d\d) ?!\)* ?!")
COMMAND = re.compile(r"\\(?:begin|end) ?\{[a-zA-Z]+\*?\}|\\[A-Za-z]+")
WORDS = re.compile(r"[A-Za-z]{3,}")
# What the grammar of latex2sympy reads in its own way: `1 2` as 3, `5!!` as (5!)!
AMBIGUOUS = re.compile(r"(?<![_\d])\d+ \d|\d\.\d*\.\d|!!|\d'|%|\\(?:text|boxed|begin\{cases\})(?![A-Za-z])")


@functools.lru_cache(4096)
def read(text: str) -> Any:
    """What an answer means: one of the classes of `_maths_values`. `Words("")` for an answer that says nothing."""
    return _read(clean(text), 0)


def _read(text: str, depth: int) -> Any:
    text = unwrap(text)
    if depth > MAX_DEPTH:
        return Words(text)
    parts, commas = _split(text, LIST)
    if len(parts) > 1:
        return _gather([_read(part, depth + 1) for part in parts if part.strip()], commas)
    if PLUS_MINUS.search(text):
        upper = PLUS_MINUS.sub(lambda sign: "-" if sign[1] == "mp" else "+", text)
        lower = PLUS_MINUS.sub(lambda sign: "+" if sign[1] == "mp" else "-", text)
        return _gather([_read(upper, depth + 1), _read(lower, depth + 1)], [","])
    parts, signs = _split(text, RELATION)
    if len(parts) > 1:
        return _relation(text, [part.strip() for part in parts], signs, depth)
    parts, _ = _split(text, CUP)
    if len(parts) > 1:
        regions = [as_region(_read(part, depth + 1)) for part in parts]
        return Region(sympy.Union(*(region.set for region in regions))) if all(regions) else Words(text)
    parts, _ = _split(text, MINUS_SET)
    if len(parts) == 2:
        regions = [as_region(_read(part, depth + 1)) for part in parts]
        return Region(sympy.Complement(*(region.set for region in regions))) if all(regions) else Words(text)
    parts, _ = _split(text, COLON)
    if len(parts) > 1:
        members = tuple(_read(part, depth + 1) for part in parts)
        return Several("ratio", members) if all(isinstance(member, Quantity) for member in members) else Words(text)
    return _bracketed(text, depth) or _single(text)


def _split(text: str, separator: re.Pattern) -> tuple[list[str], list[str]]:
    """The parts between separators that stand in no bracket, and the separators."""
    ends = list(depths(text))
    parts, between, start, index, depth = [], [], 0, 0, 0
    for match in separator.finditer(text):
        while index < len(ends) and ends[index][0] <= match.start():
            depth = ends[index][1]
            index += 1
        if depth == 0:
            parts.append(text[start : match.start()])
            between.append(match.group().strip())
            start = match.end()
    return [*parts, text[start:]], between


def _gather(members: list, between: list[str]) -> Any:
    """A set of several answers; of inequalities their union or intersection."""
    members = [inner for member in members for inner in (member.members if is_several(member, "set") else (member,))]
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
        consistent = all(same(value, values[-1], 0) for value in values[:-1])
        return Named(parts[0], values[-1], _expression(parts[0])) if consistent else Words(text)
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
    right = right.doit()
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
    if text == "\\emptyset":
        return Region(sympy.S.EmptySet)
    if opening is None or opening.group() not in OPENING or not closes_last(text, 0):
        return None
    first, last = opening.group(), text[-2:] if text.endswith("\\}") else text[-1:]
    inner = text[opening.end() : -len("\\rangle") if text.endswith("\\rangle") else -len(last)]
    parts, commas = _split(inner, MEMBERS)
    if first in ("\\{", "{"):
        condition, _ = _split(inner, BAR)
        if len(condition) == 2 and NAME.match(condition[0].strip()):
            return _read(condition[1], depth + 1)
        members = [_read(part, depth + 1) for part in parts if part.strip()]
        return _gather(members, commas) if members else Region(sympy.S.EmptySet)
    if first == "(" and last == ")" and len(parts) == 1:
        return _read(inner, depth + 1) if inner.strip() else None
    members = tuple(_read(part, depth + 1) for part in parts)
    infinite = any(isinstance(member, Quantity) and member.expression in (sympy.oo, -sympy.oo) for member in members)
    if len(members) == 2 and (infinite or first == "[" or last == "]"):
        return interval(members, first == "(", last == ")") or Several("tuple", members)
    return Several("tuple", members)


def _single(text: str) -> Any:
    """A text without commas and relations: a numeral, words, or an expression that sympy reads."""
    text = unwrap(text)
    based = BASED.fullmatch(text)
    if based and (based[1][0].isdigit() or len(based[1]) > 1) and BASES.get(based[2], based[2]).isdigit():
        base = BASES.get(based[2], based[2])
        return Based(based[1].upper().lstrip("0") or "0", base) if base != "10" else _single(based[1])
    if region := region_in_words(text):
        return region
    if ANGLE_OF.search(text):
        text = DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
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
    """An expression as sympy reads it; None where it cannot."""
    if not latex or AMBIGUOUS.search(latex) or _is_huge(latex):
        return None
    # The grammar takes a number and a bracket behind it for a mixed number, so that 2(3) would be 5.
    latex = re.sub(r"(\d)[eE]([-+]?\d{1,3})(?!\d)", r"\1\\cdot 10^{\2}", latex).replace("**", "^").replace("*", "\\cdot ")
    latex = re.sub(r"(?<=[\d)}])(?<!_\d) ?\(|(?<=\))(?=\d)", lambda gap: "\\cdot " + gap.group(), latex)
    latex = FUNCTIONS.sub(lambda name: "\\" + ("infty" if name[1].startswith("inf") else name[1]) + " ", latex)
    try:
        expression = latex2sympy(normalize_latex(latex, SPELLING), is_real=True, convert_degrees=False, normalization_config=None)
    except MemoryError:
        raise
    except Exception:  # the grammar raises plain Exceptions, and sympy all kinds, for what is no expression
        return None
    if not isinstance(expression, sympy.Expr | sympy.MatrixBase) or expression.has(sympy.nan, sympy.zoo):
        return None
    if isinstance(expression, sympy.MatrixBase):
        expression = sympy.ImmutableMatrix(expression)
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name in ("i", "\\imath")}
    return expression.xreplace(imaginary) if imaginary else expression


def _is_huge(latex: str) -> bool:
    """Whether a power tower or a factorial of digits has more digits than sympy can write; such a number is compared as it is written."""
    towers = any(int(match[2]) * math.log10(int(match[1]) or 1) > HUGE_DIGITS for match in TOWER.finditer(latex))
    return towers or HIGH_POWER.search(latex) is not None


def _exact(expression: Any) -> Any:
    """The expression with its decimals as fractions."""
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def _rational(value: Fraction) -> sympy.Rational:
    return sympy.Rational(value.numerator, value.denominator)
