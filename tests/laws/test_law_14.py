"""Law 14: nothing that a program, a policy, a tool or a server says raises, aborts a play at will, or is paid.

The doors and the long form are in `benchmarks/fuzz.py`.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import fuzz
from marl_llm.workflows import Role, WorkflowError

TEXTS = st.one_of(
    st.text(st.characters(), max_size=200),  # lone surrogates too
    st.text('[]{},:"\\u0d8e1.-NaInf<>/`\n ', max_size=200),
    st.lists(st.sampled_from((*fuzz.SEEDS, *fuzz.PIECES)), max_size=6).map("".join),
    st.builds(str.replace, st.sampled_from(fuzz.SEEDS), st.just("a"), st.sampled_from(fuzz.PIECES)),
    st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)
SAID = st.builds(fuzz.Input, TEXTS, st.lists(st.integers(0, 1 << 17), max_size=40).map(tuple))
SHORT = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def doors():
    return fuzz.doors(state_games=False)


@SHORT
@given(SAID)
def test_law_14_no_door_raises_aborts_or_pays(doors, said):
    for name, door in doors.items():
        if not name.startswith("play"):
            assert door(said) == fuzz.Heard(), name


@settings(SHORT, max_examples=3)
@given(SAID)
def test_law_14_no_play_raises_and_none_is_aborted_or_won_by_what_is_said(doors, said):
    for name, door in doors.items():
        if name.startswith("play"):
            assert door(said) == fuzz.Heard(), name


def test_law_14_the_seeds_and_their_mutations_pass_every_door(doors):
    for (name, door), said in zip(doors.items(), fuzz.inputs(1), strict=False):
        assert door(said) == fuzz.Heard(), name
    for said in map(fuzz.Input, fuzz.SEEDS):
        for name, door in doors.items():
            if not name.startswith("play"):
                assert door(said) == fuzz.Heard(), name


def test_law_14_the_check_sees_a_parser_that_raises_and_a_aborted():
    broken = Role("r", "{x}", parse=lambda text: {"r": text.encode()[0]}, writes={"r": ""})
    with pytest.raises(WorkflowError, match="raised IndexError"):
        fuzz.role_door(broken)(fuzz.Input(""))
