"""Words of a text as the index sees them, in any script and without a dictionary.

| text | its words |
|---|---|
| scripts that put spaces between words | runs of letters with their marks, digits and underscores |
| scripts that do not: Chinese, Japanese, Thai, Lao, Khmer, Burmese | each character with its marks, and each pair of neighbours |

Pairs are what Lucene's CJK analyzer indexes; the single characters find a query of one. Before, a text is normalised (NFKC, then case
folded), so that full and half width, composed and decomposed letters, upper and lower case are one.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata

ASCII_WORD = re.compile(r"\w+", re.ASCII)
# Blocks of the scripts without spaces, as ranges of a regular expression.
UNSPACED = (
    "\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "\u3040-\u30ff\u31f0-\u31ff\U0001b000-\U0001b16f"  # Hiragana, Katakana
    "\u3100-\u312f\u31a0-\u31bf"  # Bopomofo
    "\u0e00-\u0e7f\u0e80-\u0eff"  # Thai, Lao
    "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u1950-\u19df\u1a00-\u1aaf\uaa80-\uaadf"  # Tai scripts, Buginese
    "\u1b00-\u1b7f\ua980-\ua9df"  # Balinese, Javanese
)


def words(text: str, stopwords: frozenset[str] = frozenset()) -> list[str]:
    """The words of a text in its order, but for pairs of characters, which follow their run; without `stopwords`."""
    if text.isascii():
        return [word for word in ASCII_WORD.findall(text.lower()) if word not in stopwords]
    run_pattern, unit_pattern = _patterns()
    tokens = []
    for run in run_pattern.finditer(normalised(text)):
        if run["unspaced"]:
            units = unit_pattern.findall(run[0])
            tokens += units + ["".join(pair) for pair in itertools.pairwise(units)]
        else:
            tokens.append(run[0])
    return [word for word in tokens if word not in stopwords]


def normalised(text: str) -> str:
    """The text as words are compared: NFKC, and case folded."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


@functools.cache
def _patterns() -> tuple[re.Pattern, re.Pattern]:
    """A run of one kind of script, and a character with its marks."""
    marks = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.category(chr(code)) in ("Mn", "Mc"))
    unit = rf"(?=[{UNSPACED}])\w[{marks}]*"
    spaced = rf"(?:(?![{UNSPACED}])[\w{marks}])"
    return re.compile(rf"(?P<unspaced>(?:{unit})+)|(?=\w){spaced}+"), re.compile(unit)
