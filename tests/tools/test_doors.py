"""Whatever comes out of a program: no exception in the host, and no reward that was not earned."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.doors import DOORS, EXPECTED, printed, random_input, result_channel
from marl_llm.tools.sandbox.inside import values

KEYS = st.sampled_from(
    ["case", "state", "value", "error", "seconds", "mutated", "i", "f", "b", "u", "c", "d", "t", "s", "z", "o", "status"]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**400), 10**400), st.floats(), st.text(st.characters(), max_size=5), KEYS,
    st.sampled_from(["returned", "raised", "timeout", "missing", "0x1", "-0xff", "nan", "00d8", "1e99999999999999999999"]),
)  # fmt: skip
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)
LINES = st.lists(
    st.one_of(
        st.binary(max_size=30),
        TREES.map(lambda tree: json.dumps(tree).encode()),
        st.builds(
            lambda case, state, value, seconds: json.dumps(
                {"case": case, "state": state, "value": value, "mutated": False, "seconds": seconds}
            ).encode(),
            st.integers(0, 3), st.just("returned") | LEAVES, TREES, st.just(0.1) | LEAVES,
        ),
    ),
    max_size=4,
).map(b"\n".join)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        LINES, LINES.map(lambda lines: lines + b"\n"), st.binary(max_size=200), st.integers().map(lambda n: random_input(random.Random(n)))
    )
)
def test_nothing_that_a_program_says_raises_or_is_paid(data):
    for door in DOORS:
        assert not door(data)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_random_input_raises_or_is_paid(door):
    draw = random.Random(7)
    for _ in range(80):
        assert not door(random_input(draw))


def test_the_doors_can_pay():
    """Else the tests above would prove nothing."""
    lines = [
        json.dumps({"case": n, "state": "returned", "value": values.encode(value), "mutated": False, "seconds": 0.1}).encode()
        for n, value in enumerate(EXPECTED)
    ]
    assert result_channel(lines[0])
    assert result_channel(b"\n".join([*lines, b""]))
    assert printed(b"829348951.50000001 \nx104729 y7919")
