"""The result vocabulary: a failure of the infrastructure can never be read as what the program did."""

import asyncio
import threading

import pytest

from marl_llm import tools
from marl_llm.tools import Failure, FailureKind, InfrastructureError, ToolResult, result_counts
from marl_llm.tools._calls import Calls
from marl_llm.tools.results import FINAL_KINDS, failed, success


def test_a_mapped_result_keeps_its_cost_and_a_failure_is_not_touched():
    assert success(3, 0.5, 2).map(str) == success("3", 0.5, 2)
    lost = failed(FailureKind.CRASH, "the worker died", 0.1, 2)
    assert lost.map(lambda value: 1 / 0) is lost


def test_a_result_is_an_outcome_or_a_failure():
    assert success(0, 0.1).outcome() == 0  # a falsy outcome is one
    assert success([], 0.1).ok
    lost = failed(FailureKind.CRASH, "the worker died", 0.1, 2)
    assert (lost.value, lost.ok, lost.attempts) == (None, False, 2)
    with pytest.raises(InfrastructureError, match="crash: the worker died.*abort the episode") as caught:
        lost.outcome()
    assert caught.value.failure is lost.failure
    for value, failure in ((None, None), (1, Failure(FailureKind.CRASH, "x"))):
        with pytest.raises(ValueError, match="a value or a failure"):
            ToolResult(value, failure, 0.0)


def test_which_failures_may_pass():
    assert {kind for kind in FailureKind if not Failure(kind, "").retriable} == FINAL_KINDS
    assert FINAL_KINDS == {FailureKind.REFUSED, FailureKind.BUDGET, FailureKind.BAD_INPUT}


def test_counts_for_the_metrics():
    results = [success(1, 0.0), failed(FailureKind.DEADLINE, "", 0.0), failed(FailureKind.DEADLINE, "", 0.0), success(0, 0.0)]
    counts = result_counts(results, "maths")
    assert (counts["maths/calls"], counts["maths/aborted_share"], counts["maths/failed_deadline"]) == (4.0, 0.5, 2.0)
    assert counts["maths/failed_crash"] == 0.0
    assert result_counts([])["tool/aborted_share"] == 0.0


def test_the_four_forms_of_a_call():
    most, now, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2, timeout=20)

    def double(number):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        if number < 2:
            both.wait()  # passes only if two calls are under way at a time
        with lock:
            now -= 1
        return success(2 * number, 0.0)

    calls = Calls(double, 2, "test")
    assert [result.outcome() for result in calls.batch(range(8))] == [2 * n for n in range(8)]
    assert [result.outcome() for result in asyncio.run(calls.abatch([5, 4]))] == [10, 8]
    assert calls.call(3).outcome() == asyncio.run(calls.acall(3)).outcome() == 6
    assert most == 2
    calls.close()
    with pytest.raises(RuntimeError, match="closed"):
        calls.call(1)


def test_every_exported_name_is_there():
    for name in tools.__all__:
        assert getattr(tools, name).__name__ == name
    with pytest.raises(AttributeError, match="it has .*ToolResult"):
        _ = tools.Toolresult
