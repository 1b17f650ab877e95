"""Judging: what is equal, what is not, and that no program can talk its way to a pass."""

import asyncio

import pytest

from marl_llm.tools import InfrastructureError
from marl_llm.tools.judge import (
    Judgement,
    Tolerance,
    ajudge_calls,
    ajudge_stdio,
    call_request,
    judge_calls,
    judge_stdio,
    read_calls,
    same_output,
    same_value,
)
from marl_llm.tools.results import FailureKind
from marl_llm.tools.sandbox import Limits, Program, Sandbox

CASES = [((3,), 6), ((5,), 10), ((8,), 16)]


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(timeout_s=20)) as made:
        yield made


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (1, 1, True), (1, True, False), (True, 1, False), (1.0, 1, False), (1, 1.0, True), ("1", 1, False), (None, None, True),
        (None, False, False), (0.1 + 0.2, 0.3, True), (0.3001, 0.3, False), (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), True), (float("-inf"), float("inf"), False), (1e300, float("inf"), False), (10**400, 1.0, False),
        ([1, 2], [1, 2], True), ([1, 2], [2, 1], False), ((1, 2), [1, 2], False), ([1, 2], (1, 2), False), ([1], [1, 2], False),
        ({"a": 1.0}, {"a": 1}, False), ({"a": 1}, {"a": 1.0}, True), ({1: "x"}, {True: "x"}, False), ({1, 2}, {2, 1}, True),
        ({1}, frozenset({1}), False), (b"a", "a", False), (1 + 1e-12j, 1 + 0j, True), ([True], [1], False),
    ],
)  # fmt: skip
def test_same_value(actual, expected, same):
    assert same_value(actual, expected) is same


def test_tuples_as_lists_only_one_way():
    assert same_value((1, (2,)), [1, [2]], tuples_as_lists=True)
    assert not same_value([1], (1,), tuples_as_lists=True)


def test_expected_values_of_other_types_are_an_error():
    with pytest.raises(TypeError, match="object cannot be compared"):
        same_value(1, object())


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1 2\n", "1 2", True), ("1 2  \n\n", "1 2\n", True), ("1  2", "1 2", True), ("1\n2", "1 2", False), ("1\n\n2", "1\n2", False),
        ("3.0", "3", True), ("1000001", "1000000", False), ("1000000.4", "1000000.0", True), ("0.3333333", "0.33333333333", True),
        ("0.34", "0.3333", False), ("nan", "1.0", False), ("inf", "1.0", False), ("YES", "yes", False), ("", "", True), ("", "0", False),
        ("1e3", "1000.0", True), ("1_000", "1000", False), ("0x10", "16", False), ("٣", "3", False),
    ],
)  # fmt: skip
def test_same_output(actual, expected, same):
    assert same_output(actual, expected) is same


def test_exact_tolerance():
    assert not same_output("0.3333333", "0.33333333", Tolerance(0, 0))
    assert same_output("0.50", "0.5", Tolerance(0, 0))


def test_calls(sandbox):
    right = judge_calls("def solve(x): return 2 * x", "solve", CASES, 20, sandbox=sandbox)
    assert right
    assert right.outcome().pass_rate == 1
    method = judge_calls("class Solution:\n    def solve(self, x): return 2 * x", "solve", CASES, 20, sandbox=sandbox)
    assert method
    partly = judge_calls("def solve(x): return 2 * x if x < 6 else 1 / 0", "solve", CASES, 20, sandbox=sandbox)
    assert not partly
    assert [c.state for c in partly.outcome().cases] == ["passed", "passed", "raised"]
    assert partly.outcome().cases[2].error == "ZeroDivisionError: division by zero"
    absent = judge_calls("x = 1", "solve", CASES, 20, sandbox=sandbox).outcome()
    assert absent.pass_rate == 0
    assert absent.counts()["judge/missing"] == 3


def test_arguments_are_mutated_in_vain(sandbox):
    code = "def solve(a):\n    a.append(4)\n    return sum(a)"
    shared = [1, 2, 3]
    done = judge_calls(code, "solve", [((shared,), 10), ((shared,), 10)], 20, sandbox=sandbox)
    assert done
    assert done.outcome().counts()["judge/mutated"] == 2
    assert shared == [1, 2, 3]


def test_one_slow_case_costs_only_itself(sandbox):
    code = "def solve(x):\n    while x == 5: pass\n    return 2 * x"
    done = judge_calls(code, "solve", CASES, 30, case_timeout_s=0.3, sandbox=sandbox).outcome()
    assert [c.state for c in done.cases] == ["passed", "timeout", "passed"]
    whole = judge_calls("import sys\nprint('so far', flush=True)\n" + code, "solve", CASES, 1.5, sandbox=sandbox).outcome()
    assert [c.state for c in whole.cases] == ["passed", "timeout", "not_reached"]
    assert whole.partial_output


def test_early_exit_after_right_answers_is_no_pass(sandbox):
    code = "import os\nn = 0\ndef solve(x):\n    global n\n    n += 1\n    if n == 3: os._exit(0)\n    return 2 * x"
    assert [c.state for c in judge_calls(code, "solve", CASES, 20, sandbox=sandbox).outcome().cases] == ["passed", "passed", "not_reached"]


def test_expected_values_never_enter():
    request = call_request("def solve(x): ...", "solve", [(3,)], 5)
    assert b"1234577" not in request.calls
    with pytest.raises(ValueError, match="built-in type"):
        call_request("", "solve", [(object(),)], 5)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 5000, b'{"case": 0}', b'{"case": 0, "state": "passed", "value": 6}', b'{"case": true, "state": "returned", "value": 6}',
        b'{"case": 0, "state": "returned", "value": {"i": []}}', b'{"case": 0, "state": "returned", "value": {"q": 1}}',
        b'{"case": 0, "state": "returned", "value": {"s": [[1]]}}', b'{"case": 0, "state": "returned", "value": 7}\n'
        b'{"case": 0, "state": "returned", "value": 6}',
        b'{"case": 0, "state": "returned", "value": ' + b'{"t":[' * 900 + b"]}" * 900 + b"}", b"\xff\xfe",
    ],
)  # fmt: skip
def test_forged_lines_are_no_pass(line):
    judgement = read_calls(Program(b"", b"", 0, channel=line), [6], Tolerance(), False)
    assert not judgement
    assert len(judgement.cases) == 1


def test_no_cases_is_no_pass():
    assert not Judgement(())


def test_stdio(sandbox):
    cases = [("1 2\n", "3\n"), ("4 5\n", "9")]
    assert judge_stdio("print(sum(map(int, input().split())))", cases, 20, sandbox=sandbox)
    wrong = judge_stdio("print(3)", cases, 20, sandbox=sandbox).outcome()
    assert [c.state for c in wrong.cases] == ["passed", "wrong"]
    assert wrong.pass_rate == 0.5
    broken = judge_stdio("print(sum(map(int, input().split())))\n1/0", cases, 20, sandbox=sandbox).outcome()
    assert [c.state for c in broken.cases] == ["raised", "raised"]
    assert broken.cases[0].error.startswith("ZeroDivisionError")
    slow = judge_stdio("print(3, flush=True)\nwhile 1: pass", cases[:1], 0.4, sandbox=sandbox).outcome()
    assert slow.cases[0].state == "timeout"
    assert slow.partial_output


def test_async(sandbox):
    async def both():
        return await asyncio.gather(
            ajudge_calls("def solve(x): return 2 * x", "solve", CASES, 20, sandbox=sandbox),
            ajudge_stdio("print(input())", [("a", "a"), ("b", "c")], 20, sandbox=sandbox),
        )

    calls, stdio = asyncio.run(both())
    assert calls
    assert not stdio


def test_a_failure_is_neither_pass_nor_miss():
    made = Sandbox(workers=1)
    future_result = []
    import threading

    thread = threading.Thread(target=lambda: future_result.append(judge_calls("while 1: pass", "solve", CASES, 60, sandbox=made)))
    thread.start()
    while made.metrics()["sandbox/running"] == 0:
        pass
    made.close()
    thread.join()
    assert future_result[0].failure.kind is FailureKind.UNAVAILABLE
    with pytest.raises(InfrastructureError):
        bool(future_result[0])
