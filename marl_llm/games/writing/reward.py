"""The reward of two agents who write two texts that belong together (MAGRPO, Appendix C): levels that end the evaluation when missed.

| level | reads | pays at most |
|---|---|---|
| 1 | each text's own length in words between white space | 0.5 |
| 2 | length of the second text over that of the first | 1.0 |
| 3 | different words of the second over those of the first | 0.5 |
| 4 | consistency: Jaccard similarity of the words, up to a cap; coherence: categories of transition phrases | 0.6 + 0.4 |

`PAPER` and `RELEASE` hold the constants of both tasks. Where the paper is silent (own lengths, weights) it has the release's. Neither reads
the post: word lists without meaning earn everything (`tests/games/test_writing.py`). `grounded` is this library's addition.
"""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

from marl_llm.games.writing.transitions import CATEGORIES, STOP_WORDS
from marl_llm.hints import check_word

COMPONENTS = ("own_length", "length_ratio", "unique_ratio", "consistency", "coherence")
MOST = {"own_length": 0.5, "length_ratio": 1.0, "unique_ratio": 0.5, "consistency": 0.6, "coherence": 0.4}
TOTAL = sum(MOST.values())
_WORD = re.compile(r"\w+")


@dataclasses.dataclass(frozen=True)
class Band:
    """Full pay from `full_low` to `full_high`, linear down to nothing at `low` and `high`, and beyond them the evaluation ends.

    Raises `ValueError` unless low <= full_low <= full_high <= high.
    """

    low: float
    full_low: float
    full_high: float
    high: float

    def __post_init__(self):
        if not self.low <= self.full_low <= self.full_high <= self.high:
            raise ValueError(f"band {dataclasses.astuple(self)} is none: low <= full_low <= full_high <= high is needed")

    def share(self, value: float | int) -> float | None:
        """In [0, 1]; None outside."""
        if not self.low <= value <= self.high:
            return None
        if value < self.full_low:
            return (value - self.low) / (self.full_low - self.low)
        if value > self.full_high:
            return (self.high - value) / (self.high - self.full_high)
        return 1.0


@dataclasses.dataclass(frozen=True)
class Constants:
    """What a task's reward is made of.

    Attributes:
      own: (fewest, most) words between white space of the first and of the second text.
      length, unique: bands of level 2 and 3; `length_in` is "characters" or "words".
      stop_words: whether level 3 counts words without content too.
      cap: Jaccard similarity that earns consistency in full.
      log_factor: coherence is min(log_factor ln(n + 1), 1) for n categories; 0: the release's min(1, 0.4 + 0.05 (n - 1)).
      where: texts in which transitions are looked for, "second" or "both".
      substrings: the release's search, which finds "so" in "also" and counts a phrase in every category.
      grounded: content words must occur in the post, `grounding` of them at least, and no more than `copied` of a text may be one run of
        the post's words; else the evaluation ends behind level 1.

    Raises `ValueError` naming the option.
    """

    own: tuple[tuple[int, int], tuple[int, int]]
    length: Band
    unique: Band
    cap: float
    log_factor: float
    length_in: str = "characters"
    stop_words: bool = False
    where: str = "second"
    substrings: bool = False
    grounded: bool = False
    grounding: float = 0.3
    copied: float = 0.5

    def __post_init__(self):
        if not 0 < self.cap <= 1:
            raise ValueError(f"cap={self.cap} is not in (0, 1]")
        if self.log_factor < 0:
            raise ValueError(f"log_factor={self.log_factor} is negative")
        for name, known in (("length_in", ("characters", "words")), ("where", ("second", "both"))):
            check_word(name, getattr(self, name), known)
        for name in ("grounding", "copied"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not in (0, 1]")
        if len(self.own) != 2 or any(not 1 <= low <= high for low, high in self.own):
            raise ValueError(f"own={self.own} must be two pairs (fewest, most) with 1 <= fewest <= most")

    @property
    def most(self) -> Mapping[str, float]:
        """Component -> what it pays at most."""
        return MOST

    def score(self, first: str, second: str, post: str) -> WritingScore:
        """See `writing_score`."""
        return writing_score(first, second, self, post)


_TLDR_OWN, _ARXIV_OWN = ((8, 256), (8, 256)), ((128, 256), (128, 256))
PAPER = {  # TLDR's "ratios below 2.0 earn nothing" contradicts its own band 1.3 to 2.0: read as 1.3
    "tldr": Constants(_TLDR_OWN, Band(1.1, 1.6, 3.2, 5.0), Band(1.3, 2.0, math.inf, math.inf), 0.03, 0.6),
    "arxiv": Constants(_ARXIV_OWN, Band(0.8, 1.0, 1.3, 1.5), Band(0.5, 0.7, 1.3, 1.7), 0.23, 0.4, where="both"),
}
RELEASE = {
    "tldr": dataclasses.replace(PAPER["tldr"], stop_words=True, log_factor=0.0, substrings=True),
    "arxiv": dataclasses.replace(PAPER["arxiv"], length=Band(0.8, 1.3, 1.6, 2.0), stop_words=True, log_factor=0.0, substrings=True),
}
for _of in (PAPER, RELEASE):
    _of["descriptions"] = _of["tldr"]
PRESETS = {"paper": PAPER, "release": RELEASE}


@dataclasses.dataclass(frozen=True)
class WritingScore:
    """What a pair of texts earned: the level that was evaluated last, and the points of each component."""

    level: int
    components: Mapping[str, float]
    grounding: float  # share of content words that occur in the post; 1 without any

    @property
    def total(self) -> float:
        """In [0, 3]."""
        return math.fsum(self.components.values())


def plain_text(text: str) -> str:
    """A text with look-alikes and ligatures in their usual form (NFKC), case-folded, without characters that have no shape."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = text.translate({ord(c): None for c in set(text) if unicodedata.category(c) == "Cf"})
    return text.casefold()


def words_of(text: str) -> list[str]:
    """Case-folded words of a text that `plain_text` gave."""
    return _WORD.findall(text)


def categories_in(words: Sequence[str]) -> set[str]:
    """Categories of transition phrases among words: the longest phrase at each place, each word in one phrase."""
    categories, place = set(), 0
    while place < len(words):
        for phrase, category in _STARTS.get(words[place], ()):
            if tuple(words[place : place + len(phrase)]) == phrase:
                categories.add(category)
                place += len(phrase) - 1
                break
        place += 1
    return categories


def substring_categories(text: str) -> set[str]:
    """As the release counts: a phrase anywhere, inside of words too."""
    return {category for category, phrases in CATEGORIES.items() if any(phrase in text for phrase in phrases)}


def _starts() -> dict[str, list[tuple[tuple[str, ...], str]]]:
    by_first_word: dict[str, list] = {}
    for category, phrases in CATEGORIES.items():
        for phrase in phrases:
            parts = tuple(phrase.split())
            by_first_word.setdefault(parts[0], []).append((parts, category))
    return {first: sorted(phrases, key=lambda entry: -len(entry[0])) for first, phrases in by_first_word.items()}


_STARTS = _starts()


def has_content(words: Sequence[str]) -> bool:
    """Whether any word is neither a stop word nor a transition."""
    return any(word not in STOP_WORDS and word not in _STARTS for word in words)


def grounding_of(words: Sequence[str], post: frozenset[str] | set[str]) -> float:
    """Share of the words with content that occur in the post. Stop words and transition phrases have none; 1 without any other."""
    content = [word for word in words if word not in STOP_WORDS and word not in _STARTS]
    return sum(word in post for word in content) / len(content) if content else 1.0


def copies(words: Sequence[str], post: Sequence[str], share: float | int) -> bool:
    """Whether more than this share of a text is one run of the post's words."""
    size = math.floor(share * len(words)) + 1
    if size > len(words):
        return False
    post_text = f" {' '.join(post)} "
    return any(f" {' '.join(words[i : i + size])} " in post_text for i in range(len(words) - size + 1))


def writing_score(first: str, second: str, constants: Constants, post: str = "") -> WritingScore:
    """What two texts earn. Any texts may be given; the time is linear in their length."""
    plain = [plain_text(text) for text in (first, second)]
    pays = dict.fromkeys(COMPONENTS, 0.0)
    if any(not low <= len(text.split(None, high + 1)) <= high for text, (low, high) in zip(plain, constants.own)):
        return WritingScore(1, pays, 0.0)
    words = [words_of(text) for text in plain]
    post_words = words_of(plain_text(post))
    grounding = min(grounding_of(part, set(post_words)) for part in words)

    def done(level):
        return WritingScore(level, pays, grounding)

    pays["own_length"] = MOST["own_length"]
    if constants.grounded and (grounding < constants.grounding or any(copies(part, post_words, constants.copied) for part in words)):
        return done(1)
    sizes = [len(text) for text in plain] if constants.length_in == "characters" else [len(part) for part in words]
    share = constants.length.share(sizes[1] / sizes[0]) if sizes[0] else None
    if share is None:
        return done(2)
    pays["length_ratio"] = MOST["length_ratio"] * share
    content = [set(part) - STOP_WORDS for part in words]
    counted = [set(part) for part in words] if constants.stop_words else content
    share = constants.unique.share(len(counted[1]) / len(counted[0])) if counted[0] else None
    if share is None:
        return done(3)
    pays["unique_ratio"] = MOST["unique_ratio"] * share
    union = content[0] | content[1]
    similarity = len(content[0] & content[1]) / len(union) if union else 0.0
    pays["consistency"] = MOST["consistency"] * min(similarity, constants.cap) / constants.cap
    texts = (1,) if constants.where == "second" else (0, 1)
    categories = set().union(*((substring_categories(plain[i]) if constants.substrings else categories_in(words[i])) for i in texts))
    pays["coherence"] = MOST["coherence"] * coherence(len(categories), constants.log_factor)
    return done(4)


def coherence(count: int, log_factor: float | int) -> float:
    """Of n categories, in [0, 1]: min(log_factor ln(n + 1), 1), or the release's line where `log_factor` is 0."""
    if log_factor:
        return min(log_factor * math.log(count + 1), 1.0)
    return min(1.0, 0.4 + 0.05 * (count - 1)) if count else 0.0
