r"""The text of a mathematical answer: one spelling for each sign, its numeral, and its unit. Imports nothing but the standard library.

`clean` is the only normalisation: every answer and every target goes through it. It writes LaTeX with `\frac`, `\text` and `\{`, plain
spaces and ASCII digits, and `°`, `%`, `$` for degrees, percent and dollars.
"""

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 2000  # of a numeral
MAX_NUMBER = 500  # characters of a plain number with its unit
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


def _as_interval(match: re.Match) -> str:
    """An interval whose open ends are written with brackets that point outwards: `]1,2]` is `(1,2]`."""
    left, ends, right = match.groups()
    return ("(" if left == "]" else "[") + ends + (")" if right == "[" else "]")


COMMANDS = [  # (pattern, what is written in its place), in order
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)" + _END, ""),
    (r"\\!", ""),
    (r"\\(?:text)?color ?\{[^{}]*\}|\\[hv]space\*? ?\{[^{}]*\}|\\(?:large|Large|huge|Huge|bf|rm)" + _END, ""),
    (r"(?<!\\)\\(?:(?=\s)|[,;:>])|~|\\(?:qquad|quad|thinspace)" + _END, " "),
    (r"\\[dtc]frac" + _END, r"\\frac"),
    (r"\\(?:textbf|textit|textrm|texttt|textsf|emph|mbox|hbox|operatorname\*?|mathrm)\s*(?=\{)", r"\\text"),
    (r"\\mathbb ?(?:\{ ?R ?\}|R" + _END + r")(?! ?[\^_])", r"(-\\infty,\\infty)"),
    (r"[(\[] ?\\begin ?\{(?:matrix|array)\}(?: ?\{[^{}]*\})?", r"\\begin{pmatrix}"),
    (r"\\end ?\{(?:matrix|array)\} ?[)\]]", r"\\end{pmatrix}"),
    (r"\\(sin|cos|tan) ?\^ ?\{ ?-1 ?\}", r"\\arc\1 "),
    (r"\\(?:boldsymbol|underline|mathbf|mathit|mathsf|bm|pmb|mathbb)\s*(?:\{([^{}]*)\}|(?=\s*\S))", r"\1"),
    (r"\\text\s*\{\s*,?\s*(and|or)\s*\}", r" \1 "),
    (r"(?<=\d)\s*\\text\s*\{\s*e\s*\}\s*(?=[-+]?\d)", "e"),
    (r"\\([$%#&_])", r"\1"),
    (r"\s*\^\s*(?:\{\s*(?:\\circ|\\degree|°)\s*\}|\\circ|\\degree|°)|\s*\\degree" + _END, "°"),
    (r"\{([,:])\}", r"\1"),
    (r"\\(?:bar|dot|overline) ?(?:\{(\d+)\}|(\d))", r"\\overline{\1\2}"),
    (r"\\overline\{(\d)\}(\d*)\\overline\{(\d)\}", r"\\overline{\1\2\3}"),
    (r"\\leq?(?:slant)?" + _END + "|<=", r"\\le "),
    (r"\\geq?(?:slant)?" + _END + "|>=", r"\\ge "),
    (r"\\neq?" + _END + "|!=", r"\\ne "),
    (r"\\lt" + _END, "<"),
    (r"\\gt" + _END, ">"),
    (r"\\(?:simeq|doteq)" + _END, r"\\approx "),
    (r"\\setminus" + _END, r"\\backslash "),
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
    (r"\\[dt]?binom ?(\d) ?(\d)", r"\\binom{\1}{\2}"),
    (r"\\[dt]binom" + _END, r"\\binom"),
    (r"\{([^{}]*)\\choose" + _END + r"([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\frac ?(\\[A-Za-z]+) ?(\d|\\[A-Za-z]+|[A-Za-z])(?![A-Za-z{])", r"\\frac{\1}{\2}"),
    (r"\s+", " "),
    (r"\bper cent\b", "percent"),
    (r"([\[\]])([^()\[\],;]+[,;][^()\[\],;]+)([\[\]])", _as_interval),
]
COMMANDS = [(re.compile(pattern), written) for pattern, written in COMMANDS]
_ANSWER = r"(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my|final|correct) )*(?:answer|(?:option|choice) is)(?: is)? ?[:=]? ?"
ANSWER_IS = re.compile(rf"{_ANSWER}|\\text ?\{{ ?{_ANSWER}\}}", re.IGNORECASE)
PAIRS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ('"', '"'))
CHOICE = re.compile(r"(?:option|choice) [(\[]?([A-Za-z])[)\]]?|[(\[]?([A-Za-z])[)\]]", re.IGNORECASE)
LABELLED = re.compile(r"(?:\\text ?\{ ?)?(?:\(([A-Z])\)|([A-Z])[).:]) ?\}? ?(.+)")
LETTER = re.compile(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])")
WRAPPER = re.compile(r"\\(?:text|boxed|fbox) ?\{")

_SIGN = r"(?P<sign>[-+]?) ?"
_WHOLE = r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+"
_PLAIN = rf"(?P<whole>{_WHOLE})?(?:\.(?P<part>\d*)(?:\\overline\{{(?P<period>\d+)\}}|\((?P<round>\d+)\))?)?"
_POWER = (
    r"(?:[eE](?P<e>[-+]?\d{1,3})| ?(?:\\times|\\cdot|\*|x) ?10 ?(?:\^|\*\*) ?(?:\{ ?(?P<p1>[-+]?\d{1,3}) ?\}|\(?(?P<p2>[-+]?\d{1,3})\)?))?"
)
DECIMAL = re.compile(_SIGN + _PLAIN + _POWER)
_TOP = r"(?:\{ ?(?P<a>[-+]?\d+) ?\}|(?P<a1>\d)) ?(?:\{ ?(?P<b>\d+) ?\}|(?P<b1>\d))"
FRACTION = re.compile(rf"{_SIGN}(?:(?P<whole>\d+)(?P<gap> |(?=\\)))?(?:\\frac ?{_TOP}|(?P<a2>\d+) ?/ ?(?P<b2>\d+))")

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SHORT_UNITS = frozenset("sq cu cm mm km nm kg mg lb lbs oz ft yd mi hr hrs hz kj kw ml cl dl ms mph kph pm am ha px kb mb gb rad".split())
ALIASES = {
    "percent": "%", "percentage": "%", "pct": "%", "degree": "°", "deg": "°", "dollar": "$", "usd": "$", "euro": "€", "eur": "€", "rs": "₹",
    "cent": "¢", "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km",
    "kilometre": "km",
    "gram": "g", "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "inche": "in", "inch": "in",
    "feet": "ft", "foot": "ft", "pound": "lb", "lbs": "lb", "hrs": "h", "liter": "l", "litre": "l", "per": "/", "square": "sq",
    "cubic": "cu",
}  # fmt: skip
POWERS = {"sq": "^2", "cu": "^3"}
NO_UNITS = frozenset(
    "and or nor not but than plus minus over mod squared cubed half quarter third pi sin cos tan log exp sqrt infty theta alpha "
    "beta gamma phi sigma omega delta lambda abc gcd lcm max one two three four five six seven eight nine ten is was if base "
    "factorial halves thirds fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths "
    "thousandth thousandths maybe perhaps possibly probably unless except without more less least most".split()
)
_TEXT = r"\\text ?\{(?P<text>[^{}]*)\}"
_MARK = r"(?:k?m|cm|mi|ft|k?g|mg|[lL])/(?:s|h|hr|min|[lL]|m?[lL]|cm)(?![A-Za-z])|° ?[CFK]?|[%€£¥¢₹$]"
_WORD = r"(?<![A-Za-z\\{_^])[A-Za-z][A-Za-z'.-]*"
UNIT_TAIL = re.compile(rf"(?:[ /(]|\\cdot )*(?:{_MARK}|{_TEXT}|(?P<word>{_WORD}))(?:\^ ?\{{?-?\d\}}?)?[ )]*$")
CURRENCY = re.compile(r"([-+]?) ?(?:(?:US ?)?([$€£¥₹])|(USD|EUR|Rs)\.? ) *(?=[-+.\d])")
MAX_UNIT_WORDS = 6


class Numeral(NamedTuple):
    """A number in digits."""

    value: Fraction  # the number that is written
    rounded: bool  # whether it is a decimal with digits behind the point, which may stand for a number near it


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
        choice = CHOICE.fullmatch(text)
        text = (choice[1] or choice[2]) if choice else text
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
    for match in BRACKET.finditer(text):
        bracket = match.group()
        if bracket != "\\\\":
            depth += 1 if bracket in OPENING or bracket.startswith("\\begin") else -1
            yield offset + match.end(), depth


OPENING = ("(", "[", "{", "\\{", "\\langle")
BRACKET = re.compile(r"\\\\|\\begin\{\w+\*?\}|\\end\{\w+\*?\}|\\langle|\\rangle|\\[{}]|[(){}\[\]]")


def choice_letter(text: str) -> tuple[str, str] | None:
    """The letter and the content of a choice that is given with both: `(C) 12`, `C. 12`; None for any other text, and for two letters."""
    match = LABELLED.fullmatch(clean(text))
    return None if match is None or LETTER.search(match[3]) else (match[1] or match[2], match[3])


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

    `12,345` and `12 345` are thousands, `1.5e3` and `1.5\\times 10^3` powers of ten, `3 1/2` is a mixed number, `0.\\overline{3}` a third.
    """
    if len(text) > MAX_DIGITS or not any(char.isdigit() for char in text):
        return None
    if match := FRACTION.fullmatch(text):
        return _read_fraction(match)
    match = DECIMAL.fullmatch(text)
    if match is None or not (match["whole"] or match["part"] or match["period"] or match["round"]):
        return None
    whole, part = (match["whole"] or "0").replace(",", "").replace(" ", ""), match["part"] or ""
    value = Fraction(int(whole + part), 10 ** len(part))
    if period := match["period"] or match["round"]:
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(part))
    exponent = int(match["e"] or match["p1"] or match["p2"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value *= Fraction(10) ** exponent
    return Numeral(-value if match["sign"] == "-" else value, bool(part) and not period)


def _read_fraction(match: re.Match) -> Numeral | None:
    above, below = int(match["a"] or match["a1"] or match["a2"]), int(match["b"] or match["b1"] or match["b2"])
    if below == 0 or (match["whole"] and above < 0):
        return None
    value = Fraction(above, below) + int(match["whole"] or 0)
    return Numeral(-value if match["sign"] == "-" else value, False)


def split_unit(text: str) -> tuple[str, tuple[str, ...], int]:
    """(what stands before the unit, the unit, factor) of a cleaned text.

    A unit is a currency, percent or degree sign, what stands in `\\text{}`, or, behind a numeral, words. One letter alone that is not in
    `\\text{}` is a variable. The factor is what words like "million" are worth.
    """
    currency = CURRENCY.match(text)
    body = currency[1] + text[currency.end() :] if currency else text
    front = [currency[2] or currency[3]] if currency else []
    best, best_names = body, []
    names, words = [], False
    for _ in range(MAX_UNIT_WORDS):
        tail = UNIT_TAIL.search(body)
        if tail is None or tail.start() == 0 or not (_is_unit_word(tail["word"]) if tail["word"] else _is_unit_text(tail["text"])):
            break
        words = words or tail["word"] is not None
        names = [body[tail.start() :], *names]
        body = body[: tail.start()].rstrip()
        if not words or _is_number_text(body):
            best, best_names = body, names
    unit, factor = _canonical([*best_names, *front]), 1
    while unit and unit[0] in SCALES:
        factor *= SCALES[unit.pop(0)]
    return best, tuple(unit), factor


def _is_unit_text(text: str | None) -> bool:
    """Whether what stands in `\\text{}` may be a unit: no number, and no word that changes the number."""
    if text is None:
        return True
    words = [word.lower() for word in re.findall(r"[A-Za-z]+", text)]
    return bool(words or "%" in text) and NO_UNITS.isdisjoint(words) and re.search(r"(?<![A-Za-z^])\d", text) is None


def _is_unit_word(word: str) -> bool:
    word = word.strip(".'-").lower()
    if word in NO_UNITS:
        return False
    return (
        word in SHORT_UNITS
        or word in ALIASES
        or word in SCALES
        or (len(word) >= 3 and any(letter in "aeiou" for letter in word))
        or word in ("of", "in")
    )


def _is_number_text(text: str) -> bool:
    return (
        read_numeral(text) is not None
        or not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text))
        and (text[-1:].isdigit() or text.endswith(("}", ")", "\\pi")))
    )


def _canonical(names: list[str]) -> list[str]:
    """A unit's parts: lower case, singular, short names."""
    parts = re.findall(
        r"[A-Za-z]+|[%°€£¥¢₹$/?]|\^ ?\{?-?\d", " ".join(name.replace("\\text", "").replace("\\cdot", "").replace(".", "") for name in names)
    )
    singular = (
        part.lower()
        if part.lower() in ALIASES
        else part.lower().removesuffix("s")
        if len(part) > 3
        else part.lower()
        if len(part) > 1
        else part
        for part in parts
    )
    parts = [ALIASES.get(part, part.replace("{", "").replace(" ", "")) for part in singular]
    for index, part in enumerate(parts[:-1]):
        if part in POWERS:  # "square meters" as m^2
            parts[index : index + 2] = [parts[index + 1], POWERS[part]]
    return parts


def is_number(text: str) -> bool:
    """Whether a text is a plain number with or without a unit: an integer, a decimal, a fraction of integers or a mixed number."""
    return len(text) <= MAX_NUMBER and read_numeral(split_unit(clean(text))[0]) is not None
