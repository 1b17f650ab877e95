"""A table of answers: which are paid for which target. Its rules stand in the docstring of `marl_llm.tools._maths_read`."""

import json
import pathlib

import pytest

from marl_llm.tools import MathsChecker

TABLE = json.loads((pathlib.Path(__file__).parents[1] / "data" / "maths_answers.json").read_text())
MARKED = ("####", "\\boxed", "\\fbox", "##", "> ")


@pytest.fixture(scope="module")
def checker():
    with MathsChecker(workers=1) as made:
        yield made


def response(answer):
    """An answer of the table as a response: in a box, unless the pair is about how an answer is marked."""
    return answer if any(mark in answer for mark in MARKED) else f"Hence \\boxed{{{answer}}}"


@pytest.mark.parametrize("kind", TABLE)
def test_answers_are_paid_if_they_mean_the_target(checker, kind):
    pairs = TABLE[kind]
    found = checker.check_batch([response(answer) for answer, _, _ in pairs], [target for _, target, _ in pairs])
    wrong = [
        (answer, target, "should be paid" if paid else "should not be paid", result.failure or result.value.reason)
        for (answer, target, paid), result in zip(pairs, found)
        if not result.ok or result.value.correct != paid
    ]
    assert not wrong


def test_every_target_is_paid_for_itself_in_its_usual_spellings(checker):
    targets = sorted({target for pairs in TABLE.values() for _, target, _ in pairs if "####" not in target and "\\boxed" not in target})
    spellings = ("\\fbox{ %s. }", "$\\boxed{\\displaystyle %s}$", "#### **%s**")
    pairs = [(spelling % target, target) for target in targets for spelling in spellings]
    found = checker.check_batch(*zip(*pairs))
    assert [pair for pair, result in zip(pairs, found) if not result.ok or not result.value.correct] == []


def test_the_table_holds_enough_of_both():
    paid = [pair[2] for pairs in TABLE.values() for pair in pairs]
    assert (len(paid) >= 250, paid.count(False) >= 100) == (True, True)
