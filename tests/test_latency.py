"""What `benchmarks.latency` counts: the critical path of a play in tokens, and the waves of Appendix G."""

from types import SimpleNamespace

import pytest

from benchmarks.critical_path import critical_tokens, waves


def call(name, tokens, *parents, choice=0):
    return SimpleNamespace(id=f"{name}:{choice}", group=name, tokens=[0] * tokens, parents=tuple(f"{parent}:0" for parent in parents))


def test_the_critical_path_waits_for_the_slowest_candidate_and_the_slowest_agent_of_each_turn():
    way = SimpleNamespace(calls=(call("a", 3), call("b", 5), call("a2", 4, "a", "b"), call("b2", 1, "a", "b")))
    assert critical_tokens(SimpleNamespace(trajectories=(way,), candidates=())) == 5 + 4
    others = SimpleNamespace(calls=(call("a", 7, choice=1),)), SimpleNamespace(calls=(call("a", 2, choice=2),))
    assert critical_tokens(SimpleNamespace(trajectories=(way,), candidates=others)) == 7 + 4
    row = SimpleNamespace(calls=(call("a", 3), call("b", 5, "a"), call("a2", 4, "b"), call("b2", 1, "a2")))
    assert critical_tokens(SimpleNamespace(trajectories=(row,), candidates=())) == 3 + 5 + 4 + 1


@pytest.mark.parametrize(("agents", "sequential", "parallel"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (7, 7, 4)])
def test_waves_are_n_one_after_another_and_n_over_n_max_in_parallel(agents, sequential, parallel):
    assert waves(agents, False, slots=64, requests=32) == sequential
    assert waves(agents, True, slots=64, requests=32) == parallel
    assert waves(agents, True, slots=64, requests=8) == 1
    assert waves(agents, True, slots=16, requests=32) == 2 * agents  # not even one agent fits
