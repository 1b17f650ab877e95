"""The door for what others say: every text becomes valid, every JSON is bounded, and nothing that is said raises."""

import collections
import json
import math
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.untrusted import (
    PROBLEMS,
    Bounds,
    Said,
    check_count,
    check_keys,
    check_number,
    json_lines,
    parse_json,
    read_file,
    read_json,
    read_json_file,
    read_text,
    read_value,
    valid_text,
)


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


@pytest.mark.parametrize(
    ("value", "bounds", "problem"),
    [
        ("ab", Bounds(size=2), ""), ("abc", Bounds(size=2), "too_long"), (["ab", "c"], Bounds(size=2), "too_long"),
        ({"ab": "c"}, Bounds(size=3), ""), ({"ab": "c"}, Bounds(size=2), "too_long"),
        (1, Bounds(depth=0), ""), ([], Bounds(depth=0), "too_deep"), ([{}], Bounds(depth=2), ""),
        (({"a": []},), Bounds(depth=2), "too_deep"),
        ({"a": {"b": {1}}}, Bounds(depth=3), ""), ({"a": {"b": {frozenset()}}}, Bounds(depth=3), "too_deep"),
        ([1, 2], Bounds(values=2), ""), ([1, 2, 3], Bounds(values=2), "too_many"), ([[1], (2,)], Bounds(values=4), ""),
        ([[1], (2,)], Bounds(values=3), "too_many"), ({"a": {1, 2}}, Bounds(values=3), ""), ({"a": {1, 2}}, Bounds(values=2), "too_many"),
        (999, Bounds(digits=3), ""), (1000, Bounds(digits=3), "number"), (-99, Bounds(digits=3), ""), (-100, Bounds(digits=3), "number"),
        ([1e308, True, None], Bounds(), ""), ([math.inf], Bounds(), "number"), ({"a": math.nan}, Bounds(), "number"),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_ends_at_each_bound_and_within_them_it_comes_back_itself(value, bounds, problem):
    said = read_value(value, bounds)
    assert (said.problem, said.replaced) == (problem, 0)
    assert said.value is (None if problem else value)


def test_a_values_texts_are_made_valid_in_every_container_whose_types_stay():
    pair = collections.namedtuple("pair", "left right")
    value = {"a\ud800": ["b\udc00", ("c\ud800", 1), {"d\ud800"}, frozenset(["e\ud800"]), pair("f", "g\ud800\ud800")], "h": (plain := ["i"])}
    wanted = {"a\ufffd": ["b\ufffd", ("c\ufffd", 1), {"d\ufffd"}, frozenset(["e\ufffd"]), pair("f", "g\ufffd\ufffd")], "h": ["i"]}
    said = read_value(value)
    assert said == Said(wanted, "", 7)
    assert [type(item) for item in said.value["a\ufffd"]] == [str, tuple, set, frozenset, pair]
    assert said.value["h"] is plain


def test_what_is_just_as_large_as_the_bounds_is_read(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'{"a": [1]}')
    assert read_file(path, 10) == b'{"a": [1]}'
    with pytest.raises(ValueError, match="10 bytes; at most 9 are read"):
        read_file(path, 9)
    assert read_json_file(path, bounds=Bounds(size=10, depth=2, values=2)) == {"a": [1]}
    for small in (Bounds(size=9), Bounds(depth=1), Bounds(values=1)):
        with pytest.raises(ValueError, match=r"rows\.json: "):
            read_json_file(path, bounds=small)
    assert read_json("-99", Bounds(digits=3)).value == -99
    assert read_json("[-999]", Bounds(digits=3)).problem == "number"
    rows = b'{"a": 1}\n{"ab": 1}\n{"abc": 1}\n' + b" " * 40 + b'{"a": 1}\n{"a": 2}'
    found = [(number, value) for number, value, _ in json_lines(rows, "rows.jsonl", Bounds(size=8))]
    assert found == [(1, {"a": 1}), (2, None), (3, None), (4, None), (5, {"a": 2})]


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


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 100_000, "nested deeper than 64 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper than 64 levels"),
        (b'{"a": NaN}', "a number that is not finite"),
        (b'{"a": 1e999}', "a number that is not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "more than 300 digits"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
        (b'{"a": 1,\n "b"}', "not JSON (line 2, column 5"),
        (b"", "not JSON"),
        (b"[1]", "an object is expected, not an array"),
        (b"3", "an object is expected, not a single value"),
        (b'"' + b"a" * 2000 + b'"', "2,002 bytes; at most 1,000 are read"),
    ],
)
def test_a_hostile_json_file_is_refused_in_one_line_that_names_it(tmp_path, data, reason):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    bounds = Bounds(size=1000) if "2,002" in reason else Bounds()
    with pytest.raises(LookupError) as refused:  # the caller's own type of error
        read_json_file(path, bounds=bounds, error=LookupError)
    message = refused.value.args[0]
    assert message.startswith(f"{path}: ")
    assert reason in message
    assert "\n" not in message


def test_a_pipe_a_directory_and_a_device_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match="not a regular file"):
            read_file(path, 1000)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing", 1000)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="cannot be opened"):
        read_file(tmp_path / "loop", 1000)


def test_a_byte_order_mark_is_left_out():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "rows.json") == {"a": 1}


def test_one_bad_line_takes_no_other_away():
    data = b'{"a": 1}\n\n[2]\n{"a": "\xe2\x80\xa8"}\n' + b"[" * 5000 + b'\n{"a": 3}'
    lines = list(json_lines(data, "rows.jsonl"))
    assert [(number, value) for number, value, _ in lines] == [
        (1, {"a": 1}), (3, None), (4, {"a": "\u2028"}), (5, None), (6, {"a": 3}),
    ]  # fmt: skip
    assert lines[1][2] == "rows.jsonl, line 3: an object is expected, not an array"
    assert lines[3][2] == "rows.jsonl, line 5: nested deeper than 64 levels"


@pytest.mark.parametrize("value", [None, "1", True, [], {}, [1.0], math.nan, math.inf, 1e300, -0.5, 3.5, 10**400])
def test_a_value_that_is_no_number_within_its_bounds_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^rate must be a number in \[0, 3\], not "):
        check_number(value, "rate", 0, 3)
    with pytest.raises(ValueError, match=r"^steps must be a whole number in \[0, 2147483647\], not "):
        check_count(value, "steps")


def test_numbers_counts_and_objects_of_a_state_come_back():
    assert [check_number(value, "x") for value in (0, -1e30, 3)] == [0.0, -1e30, 3.0]
    assert [check_count(value, "x", 2, 5) for value in (2, 5)] == [2, 5]
    assert check_keys({"b": 1, "a": None}, "x", ("a", "b")) == {"b": 1, "a": None}
    with pytest.raises(ValueError, match="whole number"):
        check_count(2.0, "x")
    for value in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, ["a", "b"], "ab", None):
        with pytest.raises(ValueError, match="^x must have a, b, and nothing else"):
            check_keys(value, "x", ("a", "b"))
