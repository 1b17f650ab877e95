"""The door for what others say: every text becomes valid, every JSON is bounded, and nothing that is said raises."""

import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.tools.said import PROBLEMS, Bounds, Said, read_json, read_text, valid_text


@pytest.mark.parametrize(
    ("text", "valid", "replaced"),
    [
        ("plain é 😀", "plain é 😀", 0), ("a\ud800", "a\ufffd", 1), ("\udc00a\ud800b", "\ufffda\ufffdb", 2), ("\ud83d\ude00", "😀", 0),
        ("\ufffd\ud83d", "\ufffd\ufffd", 1), (b"a\xffb", "a\ufffdb", 1), (b"\xef\xbf\xbd\xed\xa0\x80", "\ufffd\ufffd\ufffd\ufffd", 3),
        ("", "", 0), (b"", "", 0), ("\0\ud800", "\0\ufffd", 1),
    ],
)  # fmt: skip
def test_a3_text_is_made_valid_and_what_was_replaced_is_counted(text, valid, replaced):
    assert read_text(text) == Said(valid, "", replaced)
    assert valid_text(valid_text(text)) == valid
    valid_text(text).encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "too_deep"), ("[" * 65 + "]" * 65, "too_deep"), ('{"a":' * 65 + "1" + "}" * 65, "too_deep"),
        ("[" * 1_000_001 + "]" * 1_000_001, "too_many"), ("[" + "1," * 1_000_000 + "1]", "too_many"), (b" " * (9 << 20), "too_long"),
        ("1" * 301, "number"), ("-" + "9" * 5000, "number"), ("1e400", "number"), ("[NaN]", "number"), ("-Infinity", "number"),
        ("0." + "1" * 400, "number"), ("", "not_json"), ("{", "not_json"), ("[1,]", "not_json"), (b"\xff\xfe", "not_json"),
        ('"' + '\\"' * 100_000, "not_json"), ("'a'", "not_json"), ("\ufeff1", "not_json"), ("1 2", "not_json"),
    ],
)  # fmt: skip
def test_json_outside_of_the_bounds_has_a_problem_and_no_value(text, problem):
    assert read_json(text) == Said(problem=problem)
    assert problem in PROBLEMS


def test_json_within_the_bounds_is_what_the_library_reads():
    value = {"a": [1, -2.5, None, True, 'x,[{\\"' * 5000], "deep": json.loads("[" * 62 + "]" * 62)}
    assert read_json(json.dumps(value)) == Said(value)
    assert read_json(json.dumps(["9" * 5000])).ok
    assert read_json("9" * 300).value == int("9" * 300)
    assert math.isfinite(float(read_json("9" * 300).value))
    assert read_json("[1,2,3,4]", Bounds(values=4)).ok
    assert read_json("[1,2,3,4,5]", Bounds(values=4)).problem == "too_many"


def test_a3_surrogates_that_json_spells_out_are_replaced_in_values_and_keys():
    said = read_json(r'{"q": ["rivers \ud83d", "\ud83d\ude00"], "\udc00k": {"\ud800": 1, "\ud801": 2}}')
    assert said == Said({"q": ["rivers \ufffd", "😀"], "\ufffdk": {"\ufffd": 2}}, "", 4)


@pytest.mark.parametrize("unit", ["\n", '"', '\\"', '"\\', "[[", ",", "{}", '"a":', "1", "9" * 300 + ",", "\\u", "[1],", '"\ud800"'])
def test_reading_takes_linear_time(unit):
    text = unit * ((1 << 18) // len(unit))
    for start in ("", "[", '"'):
        tick = time.process_time()
        assert not read_json(start + text).ok
        assert time.process_time() - tick < 4  # quadratic would be minutes


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(st.characters(), max_size=200), st.text('[]{},:"\\u0d8e1.-NaInf \n', max_size=200)))
def test_nothing_that_is_said_raises_and_what_is_read_is_safe(text):
    valid_text(text).encode()
    said = read_json(text, Bounds(depth=8, values=50))
    assert said.ok or said.value is None
    json.dumps(said.value, allow_nan=False, ensure_ascii=False).encode()
