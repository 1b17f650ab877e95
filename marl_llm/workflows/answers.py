"""Scores of short answers: SQuAD's normalisation, exact match and F1 over words, with any number of accepted answers.

Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", EMNLP 2016, and its official script: lower case, no
punctuation, no articles, single spaces; F1 over bags of words; the best over the accepted answers.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)
YES_NO = frozenset({"yes", "no", "noanswer"})


def normalise_answer(text: str) -> str:
    """SQuAD's normalisation."""
    text = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1.0 if the normalised answer is one of the normalised accepted ones, else 0.0. Raises `ValueError` without any."""
    return float(normalise_answer(answer) in {normalise_answer(text) for text in _checked(accepted)})


def answer_f1(answer: str, accepted: Sequence[str], yes_no_exact: bool = False) -> float:
    """The best F1 of the answer's words against one accepted answer, in [0, 1].

    Args:
      answer: any text. One without a word scores 0, unless an accepted answer has none either.
      accepted: at least one. Raises `ValueError` without any, or for a bare string, whose letters would be taken for answers.
      yes_no_exact: score answers that are yes or no by exact match, on either side (HotpotQA's official script; M-ASK's released reward).
    """
    return max(_f1(normalise_answer(answer), normalise_answer(text), yes_no_exact) for text in _checked(accepted))


def _checked(accepted: Sequence[str]) -> Sequence[str]:
    if isinstance(accepted, str) or not accepted:
        raise ValueError(f"accepted answers must be a list with at least one text, not {accepted!r}")
    return accepted


def _f1(answer: str, gold: str, yes_no_exact: bool) -> float:
    if yes_no_exact and (answer in YES_NO or gold in YES_NO):
        return float(answer == gold)
    words, gold_words = answer.split(), gold.split()
    if not words or not gold_words:
        return float(words == gold_words)
    common = sum((collections.Counter(words) & collections.Counter(gold_words)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)
