"""Scores of short answers, against the rules of SQuAD's and HotpotQA's official scripts, and against gaming."""

import collections
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_llm.workflows.answers import answer_f1, exact_match, normalise_answer


def official_normalise(s):
    """SQuAD's evaluate-v2.0.py, written out."""

    def remove_articles(text):
        return re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", text)

    return " ".join(remove_articles("".join(ch for ch in s.lower() if ch not in set(string.punctuation))).split())


def official_f1(prediction, truth):
    got, gold = official_normalise(prediction).split(), official_normalise(truth).split()
    same = sum((collections.Counter(gold) & collections.Counter(got)).values())
    if not gold or not got:
        return int(gold == got)
    if same == 0:
        return 0
    precision, recall = same / len(got), same / len(gold)
    return 2 * precision * recall / (precision + recall)


TEXT = st.text(st.sampled_from("ab the. an-A,é'1 \n"), max_size=24)


@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_scores_are_the_official_ones(answer, accepted):
    assert normalise_answer(answer) == official_normalise(answer)
    assert answer_f1(answer, accepted) == pytest.approx(max(official_f1(answer, one) for one in accepted))
    assert exact_match(answer, accepted) == float(any(official_normalise(answer) == official_normalise(one) for one in accepted))


@pytest.mark.parametrize(
    ("answer", "accepted", "f1", "em"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),
        ("Tower", ["Eiffel Tower", "La tour Eiffel"], 2 / 3, 0.0),
        ("in Paris, France", ["Paris", "Lyon"], 0.5, 0.0),
        ("", ["Paris"], 0.0, 0.0),
        ("the", ["Paris"], 0.0, 0.0),
        ("Pariss", ["Paris"], 0.0, 0.0),
    ],
)
def test_examples(answer, accepted, f1, em):
    assert answer_f1(answer, accepted) == pytest.approx(f1)
    assert exact_match(answer, accepted) == em


@given(st.integers(2, 30))
def test_saying_more_than_was_asked_costs(n):
    gold = ["Grace Hopper"]
    assert answer_f1("Grace Hopper " * n, gold) == pytest.approx(2 / (n + 1))  # repetition
    assert answer_f1("Grace Hopper " + " ".join(f"name{i}" for i in range(n)), gold) < 1  # a dump of everything found


def test_yes_and_no_are_scored_whole_where_asked():
    assert answer_f1("yes no", ["yes"]) == pytest.approx(2 / 3)  # hedging is paid under plain F1
    assert answer_f1("yes no", ["yes"], yes_no_exact=True) == 0.0
    assert answer_f1("no", ["no man"], yes_no_exact=True) == 0.0
    assert answer_f1("Yes.", ["yes"], yes_no_exact=True) == 1.0


def test_a_bare_string_is_no_list_of_answers():
    for scorer in (answer_f1, exact_match):
        for accepted in ("Paris", []):
            with pytest.raises(ValueError, match="must be a list"):
                scorer("P", accepted)
