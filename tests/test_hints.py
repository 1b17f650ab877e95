"""Suggestions for unknown words."""

from marl_llm.hints import closest, suggestion


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
