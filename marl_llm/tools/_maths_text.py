r"""The text of a mathematical answer: one spelling for each sign, its numeral, and its unit. Imports nothing but the standard library.

`clean` is the only normalisation: every answer and every target goes through it. It writes LaTeX with `\frac`, `\text` and `\{`, plain
spaces and ASCII digits, and `°`, `%`, `$` for degrees, percent and dollars.
"""

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 2000  # of a numeral
MAX_EXPONENT = 300  # of a numeral that is written with a power of ten
SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒﹣", "-"), **dict.fromkeys("∕⁄÷", "/"), **dict.fromkeys("·⋅∙", r"\cdot "), **dict.fromkeys("º˚", "°"),
        **dict.fromkeys("“”„", '"'), "×": r"\times ", "√": "sqrt", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
        "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "∨": " or ", "∧": " and ", "。": ".", "、": ",", "θ": r"\theta ", "⟨": r"\langle ", "⟩": r"\rangle ",
    }
)  # fmt: skip
_END = r"(?![A-Za-z])"
COMMANDS = [  # (pattern, what is written in its place), in order
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)" + _END, ""),
    (r"\\!", ""),
    (r"\\(?=\s)|\\[,;:>]|~|\\(?:qquad|quad|thinspace)" + _END, " "),
    (r"\\[dtc]frac" + _END, r"\\frac"),
    (r"\\(?:textbf|textit|textrm|texttt|textsf|emph|mbox|hbox|operatorname\*?|mathrm)\s*(?=\{)", r"\\text"),
    (r"\\(?:boldsymbol|mathbf|mathit|mathsf|bm|pmb|mathbb)\s*(?:\{([^{}]*)\}|(?=\s*\S))", r"\1"),
    (r"\\text\s*\{\s*,?\s*(and|or)\s*\}", r" \1 "),
    (r"(?<=\d)\s*\\text\s*\{\s*e\s*\}\s*(?=[-+]?\d)", "e"),
    (r"\\([$%#&_])", r"\1"),
    (r"\s*\^\s*(?:\{\s*(?:\\circ|\\degree|°)\s*\}|\\circ|\\degree|°)|\s*\\degree" + _END, "°"),
    (r"\{,\}", ","),
    (r"\\leq?(?:slant)?" + _END + "|<=", r"\\le "),
    (r"\\geq?(?:slant)?" + _END + "|>=", r"\\ge "),
    (r"\\neq?" + _END + "|!=", r"\\ne "),
    (r"\\lt" + _END, "<"),
    (r"\\gt" + _END, ">"),
    (r"\\(?:simeq|doteq)" + _END, r"\\approx "),
    (r"\\varnothing" + _END, r"\\emptyset "),
    (r"\\lbrace" + _END, r"\\{"),
    (r"\\rbrace" + _END, r"\\}"),
    (r"\\mid" + _END, "|"),
    (r"\\colon" + _END, ":"),
    (r"\\div" + _END, "/"),
    (r"\\lor" + _END, " or "),
    (r"\\land" + _END, " and "),
    (r"\\[lcd]?dots" + _END + r"|\.\.\.+|…", ""),
    (r"(?<![A-Za-z\\])\\?sqrt(?![A-Za-z])|(?<=[A-Za-z])(?<!\\)sqrt(?=\d)", r"\\sqrt"),
    (r"\\sqrt ?\(([^()]*)\)|\\sqrt ?(\d+(?:\.\d+)?)", r"\\sqrt{\1\2}"),
    (r"\s+", " "),
]
COMMANDS = [(re.compile(pattern), written) for pattern, written in COMMANDS]
ANSWER_IS = re.compile(r"(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my|final|correct) )*answer(?: is)? ?[:=]? ?", re.IGNORECASE)
PAIRS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ('"', '"'))
WRAPPER = re.compile(r"\\(?:text|boxed|fbox) ?\{")

_SIGN = r"(?P<sign>[-+]?) ?"
_WHOLE = r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+"
_PLAIN = rf"(?P<whole>{_WHOLE})?(?:\.(?P<part>\d*)(?:(?:\\overline|\\bar) ?\{{(?P<period>\d+)\}}|\((?P<round>\d+)\))?)?"
_POWER = r"(?:[eE](?P<e>[-+]?\d{1,3})| ?(?:\\times|\\cdot|\*|x) ?10 ?(?:\^|\*\*) ?(?:\{ ?(?P<p1>[-+]?\d{1,3}) ?\}|\(?(?P<p2>[-+]?\d{1,3})\)?))?"
DECIMAL = re.compile(_SIGN + _PLAIN + _POWER)
_TOP = r"(?:\{ ?(?P<a>[-+]?\d+) ?\}|(?P<a1>\d)) ?(?:\{ ?(?P<b>\d+) ?\}|(?P<b1>\d))"
FRACTION = re.compile(rf"{_SIGN}(?:(?P<whole>\d+)(?P<gap> |(?=\\)))?(?:\\frac ?{_TOP}|(?P<a2>\d+) ?/ ?(?P<b2>\d+))")

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SHORT_UNITS = frozenset("cm mm km nm kg mg lb lbs oz ft yd mi hr hrs hz kj kw ml cl dl ms mph kph pm am ha px kb mb gb rad".split())
ALIASES = {
    "percent": "%", "percentage": "%", "pct": "%", "degree": "°", "deg": "°", "dollar": "$", "usd": "$", "euro": "€", "cent": "¢",
    "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "kilometre": "km",
    "gram": "g", "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "inche": "in", "inch": "in",
    "feet": "ft", "foot": "ft", "pound": "lb", "liter": "l", "litre": "l", "per": "/", "square": "sq", "lb": "lb",
}  # fmt: skip
NO_UNITS = frozenset(
    "and or nor not but than plus minus times over mod squared cubed half quarter third pi sin cos tan log exp sqrt infty theta alpha "
    "beta gamma phi sigma omega delta lambda abc gcd lcm max min one two three four five six seven eight nine ten is was if base".split()
)
_MARK = r"(?:k?m|cm|mi|ft|k?g|mg|[lL])/(?:s|h|hr|min|[lL]|m?[lL]|cm)(?![A-Za-z])|\\text ?\{[^{}\d]*[A-Za-z][^{}]*\}|° ?[CFK]?|[%€£¥¢₹$]"
_WORD = r"(?<![A-Za-z\\{_^])[A-Za-z][A-Za-z'.-]*"
UNIT_TAIL = re.compile(rf"(?:[ /(]|\\cdot )*(?:(?P<mark>{_MARK})|(?P<word>{_WORD}))(?:\^ ?\{{?-?\d\}}?)?[ )]*$")
CURRENCY = re.compile(r"([-+]?) ?(?:(US ?\$|\$|€|£|¥|₹)|(?:USD|EUR|Rs\.?) )\s*(?=[-+.\d])")
MAX_UNIT_WORDS = 6


class Numeral(NamedTuple):
    """A number in digits.

    Attributes:
      value: the number that is written.
      rounded: whether it is a decimal with digits behind the point, which may stand for a number near it.
    """

    value: Fraction
    rounded: bool


def clean(text: str) -> str:
    """The text in one spelling, without what stands around it: boxes, dollars, bold, quotes, a full stop, "the answer is"."""
    text = "".join(map(_plain_letter, _scripts(text)))
    text = unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS)
    for pattern, written in COMMANDS:
        text = pattern.sub(written, text)
    return unwrap(text)


def unwrap(text: str) -> str:
    """The text without what stands around the whole of it."""
    for _ in range(32):  # deeper wrappings are no answer
        before = text
        text = text.strip().rstrip(".,; ").removesuffix("\\\\").strip()
        for start, end in PAIRS:
            inner = text[len(start) : len(text) - len(end)]
            if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end) and end not in inner:
                text = inner
        wrapper = WRAPPER.match(text)
        if wrapper and closes_last(text, wrapper.end() - 1):
            text = text[wrapper.end() : -1]
        answer_is = ANSWER_IS.match(text)
        text = text[answer_is.end() :] if answer_is else text
        text = text.removeprefix("=").removeprefix("\\approx ")
        if text == before:
            break
    return text


def closes_last(text: str, start: int) -> bool:
    """Whether the bracket at `start` closes with the last character."""
    return next((end == len(text) for end, depth in depths(text[start:], start) if depth == 0), False)


def depths(text: str, offset: int = 0):
    """(end, depth behind it) of each bracket. An interval may open with one kind and close with another, so all kinds count alike."""
    depth = 0
    for found in BRACKET.finditer(text):
        bracket = found.group()
        if bracket != "\\\\":
            depth += 1 if bracket in OPENING or bracket.startswith("\\begin") else -1
            yield offset + found.end(), depth


OPENING = ("(", "[", "{", "\\{", "\\langle")
BRACKET = re.compile(r"\\\\|\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\langle|\\rangle|\\[{}]|[(){}\[\]]")


def _scripts(text: str) -> str:
    """Superscripts and subscripts as powers and indices, and fractions that are one character as `\\frac`."""
    written, kind = [], ""
    for char in text.replace("º", "°"):
        form, _, rest = unicodedata.decomposition(char).partition("> ")
        now = {"<super": "^{", "<sub": "_{"}.get(form, "")
        if now != kind:
            written.append(("}" if kind else "") + now)
            kind = now
        if form == "<fraction":
            above, _, below = "".join(chr(int(code, 16)) for code in rest.split()).partition("⁄")
            char = rf"\frac{{{above}}}{{{below}}}" if below else char
        written.append("".join(chr(int(code, 16)) for code in rest.split()) if now else char)
    return "".join([*written, "}" if kind else ""])


def _plain_letter(char: str) -> str:
    """Digits of all scripts in ASCII; characters that nobody sees are left out."""
    if char.isascii():
        return char
    digit = unicodedata.decimal(char, None)
    return "" if unicodedata.category(char) == "Cf" else char if digit is None else str(digit)


def read_numeral(text: str) -> Numeral | None:
    """The number that a cleaned text writes in digits; None for any other text.

    `12,345` and `12 345` are thousands, `1.5e3` and `1.5\\times 10^3` powers of ten, `3 1/2` is a mixed number and `0.\\overline{3}` a third.
    """
    if len(text) > MAX_DIGITS or not any(char.isdigit() for char in text):
        return None
    if found := FRACTION.fullmatch(text):
        return _read_fraction(found)
    found = DECIMAL.fullmatch(text)
    if found is None or not (found["whole"] or found["part"] or found["period"] or found["round"]):
        return None
    whole, part = (found["whole"] or "0").replace(",", "").replace(" ", ""), found["part"] or ""
    value = Fraction(int(whole + part), 10 ** len(part))
    if period := found["period"] or found["round"]:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(part))
    exponent = int(found["e"] or found["p1"] or found["p2"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value *= Fraction(10) ** exponent
    return Numeral(-value if found["sign"] == "-" else value, bool(part) and not period)


def _read_fraction(found: re.Match) -> Numeral | None:
    above, below = int(found["a"] or found["a1"] or found["a2"]), int(found["b"] or found["b1"] or found["b2"])
    if below == 0 or (found["whole"] and above < 0):
        return None
    value = Fraction(above, below) + int(found["whole"] or 0)
    return Numeral(-value if found["sign"] == "-" else value, False)


def split_unit(text: str) -> tuple[str, tuple[str, ...], int]:
    """(what stands before the unit, the unit, factor) of a cleaned text.

    A unit is a currency, percent or degree sign, what stands in `\\text{}`, or, behind a numeral, words. One letter that is not in `\\text{}`
    is a variable. The factor is what a word like "million" is worth.
    """
    names: list[str] = []
    body, factor = text, 1
    if currency := CURRENCY.match(body):
        body = currency[1] + body[currency.end() :]
        names.append({"U": "$", "": "?"}.get((currency[2] or "")[:1], currency[2] or "?"))
    shortest = None
    words = False
    for _ in range(MAX_UNIT_WORDS):
        tail = UNIT_TAIL.search(body)
        if tail is None or tail.start() == 0 or (tail["word"] and not _is_unit_word(tail["word"])):
            break
        words = words or tail["word"] is not None
        names.insert(0, body[tail.start() :])
        body = body[: tail.start()].rstrip()
        if not words or _is_number_text(body):
            shortest = body, tuple(names)
    if shortest is None:
        return (body, tuple(_canonical(names)), 1) if currency and not words else (text, (), 1)
    body, names = shortest[0], list(shortest[1])
    unit = _canonical(names)
    if unit and unit[0] in SCALES:
        factor = SCALES[unit[0]]
        unit = unit[1:]
    return body, tuple(unit), factor


def _is_unit_word(word: str) -> bool:
    word = word.strip(".'-").lower()
    if word in NO_UNITS:
        return False
    return word in SHORT_UNITS or word in ALIASES or word in SCALES or (len(word) >= 3 and any(letter in "aeiou" for letter in word)) or word in ("of", "in")


def _is_number_text(text: str) -> bool:
    return read_numeral(text) is not None or not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) and text[-1:].isdigit()


def _canonical(names: list[str]) -> list[str]:
    """A unit's parts: lower case, singular, short names."""
    parts = re.findall(r"[A-Za-z]+|[%°€£¥¢₹$/?]|\^ ?\{?-?\d", " ".join(name.replace("\\text", "").replace("\\cdot", "") for name in names))
    singular = (part.lower() if part.lower() in ALIASES else part.lower().removesuffix("s") if len(part) > 3 else part for part in parts)
    return [ALIASES.get(part, part.replace("{", "").replace(" ", "")) for part in singular]


def is_number(text: str) -> bool:
    """Whether a text is a plain number with or without a unit: an integer, a decimal, a fraction of integers or a mixed number."""
    return len(text) <= MAX_DIGITS and read_numeral(split_unit(clean(text))[0]) is not None
