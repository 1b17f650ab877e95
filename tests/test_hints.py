"""Suggestions for unknown words."""

import pytest

from marl_llm.hints import check_word, closest, suggestion
from marl_llm.workflows import WorkflowError


def test_the_nearest_known_word_is_suggested_whatever_the_case():
    assert closest("broadcst", ["delta", "broadcast"]) == "broadcast"
    assert closest("GRPO", ["grpo", "magrpo"]) == "grpo"
    assert closest("grpo", ["GRPO", "grpo"]) in ("GRPO", "grpo")
    assert closest("zzz", ["delta"]) is None
    assert closest("x", []) is None


def test_without_a_near_word_all_are_listed():
    assert suggestion("delt", ("delta", "x")) == "did you mean 'delta'?"
    assert suggestion("zzz", ("delta", "x", "delta")) == "there are delta, x"
    assert suggestion("zzz", ()) == "there are none"


def test_a_word_that_is_not_known_is_refused_with_all_that_are_and_the_nearest():
    check_word("game.view", "full", ("full", "split"))
    with pytest.raises(ValueError, match="^game.view='ful' is not one of full, split; did you mean 'full'\\?$"):
        check_word("game.view", "ful", ("full", "split"))
    with pytest.raises(WorkflowError, match="is not one of None, 3"):
        check_word("x", "zzz", (None, 3), WorkflowError)
