"""Judging: what is equal, what is not, and that no program can talk its way to a pass."""

import asyncio
import concurrent.futures
import json
import math
import threading
import time

import pytest

from marl_llm.tools import InfrastructureError, _compare, judge
from marl_llm.tools.judge import (
    Judgement,
    Tolerance,
    ajudge_calls,
    ajudge_stdio,
    call_request,
    judge_calls,
    judge_stdio,
    read_calls,
    read_stdio,
    same_output,
    same_value,
    stdio_requests,
)
from marl_llm.tools.results import Failure, FailureKind
from marl_llm.tools.sandbox import Execution, Executor, Limits, Program, Sandbox

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
        ({"a": 1, "b": 2}, {"a": 1}, False), ({"a": 1}, {"a": 1, "b": 2}, False), ({1, 2}, {1}, False), ({1}, {1, 2}, False),
        ({1}, frozenset({1}), False), ({(1,)}, {(True,)}, False), ({frozenset({1, (2,)})}, {frozenset({(2,), 1})}, True),
        ({(1, 2): "x"}, {(1.0, 2): "x"}, False), ({float("nan")}, {float("nan")}, False), ({-0.0: 1}, {0.0: 1}, True),
        ({"a,b", "c"}, {"a", "b,c"}, False), ({b"a": {1: {2}}}, {b"a": {1: {2}}}, True), ("a\ud800", "a\ud800", True),
        ("a\ud800", "a\ud801", False), ("a" + chr(0xD800), "a\ufffd", False), (1 + 1e-12j, 1 + 0j, True), ([True], [1], False),
        (1 + 2j, 1 + 3j, False), (1 + 2j, 2 + 2j, False), (1 + 2j, 1 + 2j, True), (1.0, 1 + 0j, False), (1 + 0j, 1.0, False),
        (complex(1, math.nan), complex(1, math.nan), False), ({1 + 2j}, {1 + 2j}, True), ({1 + 2j}, {1 + 3j}, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, False), ({"a": 1, "b": 2}, {"a": 1, "c": 2}, False), ([1, 2, 3], [1, 2, 4], False),
        ((1, 2), (1, 3), False), ({1, 2}, {1, 3}, False), (b"ab", b"ac", False), (b"ab", "ab", False),
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
        ("12", "1 2", False), ("1 2", "12", False), ("a b", "ab", False), ("1.5 2", "1.52", False), ("- 1", "-1", False),
        ("1e99999999999999999999", "1.5", False), ("1.5", "1e99999999999999999999", False), ("1e99999999999999999999",) * 2 + (True,),
        ("-1e-99999999999999999999", "0.0", False), ("2e400", "1.0e400", False), ("1e400", "1.0e400", True), ("1e99999", "1e-99999", False),
        ("9" * 500, "9" * 500 + ".0", False), ("1e400", "inf", False), ("1e", "1", False), ("1" * 401, "1" * 400 + "2", False),
    ],
)  # fmt: skip
def test_d7_same_output(actual, expected, same):
    assert same_output(actual, expected) is same


def test_a1_no_printed_number_raises():
    """Every pair of words of extreme size, exponent and form is compared, in both directions, against a tolerant expectation."""
    signs, bodies = (
        ("", "-", "+"),
        ("0", "1", "1.5", ".5", "5.", "9" * 399, "0." + "3" * 390, "nan", "inf", "Infinity", "sNaN", "1_0", "٣.٣"),
    )
    ends = (
        "",
        "e0",
        "e5",
        "e-5",
        "e308",
        "e309",
        "e-400",
        "E99999",
        "e999999",
        "e-999999",
        "e+9999999999",
        "e99999999999999999999",
        "e",
        "e+",
    )
    words = [sign + body + end for sign in signs for body in bodies for end in ends]
    for word in words:
        assert same_output(word, word)
        for expected in ("1.5", "1.0e308", "-2.5e-300", "7", "1e99999999999999999999"):
            same_output(word, expected)
            same_output(expected, word)


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


def judged(lines: bytes, expected=6):
    """What is made of the lines that a program of one case wrote on the channel."""
    judgement = read_calls(Program(b"", b"", 0, channel=lines), [expected], Tolerance(), False)
    assert len(judgement.cases) == 1
    return judgement.cases[0]


def returned(value: bytes, seconds: bytes = b"0.1", mutated: bytes = b"false") -> bytes:
    """The line of a harness, with any bytes in place of what it writes."""
    return b'{"case": 0, "state": "returned", "value": %s, "mutated": %s, "seconds": %s}\n' % (value, mutated, seconds)


def test_a_harness_s_line_passes():
    assert judged(returned(b"6")).state == "passed"
    assert judged(returned(b"6").rstrip()).state == "passed"
    assert judged(returned(b"7")).state == "wrong"


@pytest.mark.parametrize("end", [b"", b"\n"])
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
def test_forged_lines_are_no_pass(line, end):
    assert judged(line + end).state != "passed"


@pytest.mark.parametrize(
    "line",
    [
        *(returned(value) for value in (
            b'{"o":[]}', b'{"o":["a"]}', b'{"o":"ab"}', b'{"o":[1,2]}', b'{"c":[1]}', b'{"c":[]}', b'{"c":[1,2,3]}', b'{"c":["a","b"]}',
            b'{"c":[6,0]}', b'{"i":6}', b'{"i":"6"}', b'{"i":"0x_6"}', b'{"i":" 0x6 "}', b'{"f":"6"}', b'{"f":6}', b'{"b":"6"}',
            b'{"u":"00d"}', b'{"u":"3"}', b'{"d":[6]}', b'{"d":[[6]]}', b'{"d":{"6":6}}', b'{"t":6}', b'{"t":"6"}', b'{"s":{}}',
            b'{"z":null}', b'{"i":"0x6","f":"6"}', b"{}", b'{"case":6}', b'{"":6}',
        )),
        *(returned(b"6", seconds) for seconds in (b"1" * 401, b"-1", b"1e400", b"NaN", b"true", b'"1"', b"[]", b"null")),
        returned(b"6", mutated=b"1"), returned(b"6", mutated=b"null"), b'{"case":0,"state":"returned","value":6}',
        b'{"case":0,"state":["returned"],"value":6,"mutated":false,"seconds":0.1}', b'{"case":0,"state":"raised","error":[],"seconds":1}',
        returned(b"[" * 300 + b"]" * 300), returned(b"1" * 5000),
    ],
)  # fmt: skip
def test_a2_a_malformed_record_is_the_program_s_failure(line):
    case = judged(line)
    assert case.state == "malformed"
    assert Judgement((case,)).counts()["judge/malformed"] == 1
    assert read_calls(Program(b"", b"", 0, channel=line), ["6"], Tolerance(), True).pass_rate == 0


def test_a_line_that_was_cut_off_is_no_line():
    program = Program(b"", b"", None, signal=9, timed_out=True, channel=returned(b"6") + b'{"case": 1, "state": "returned", "val')
    assert [case.state for case in read_calls(program, [6, 6, 6], Tolerance(), False).cases] == ["passed", "timeout", "not_reached"]


def test_the_first_line_of_a_case_counts():
    program = Program(b"", b"", 0, channel=returned(b"7") + returned(b"6"))
    assert [case.state for case in read_calls(program, [6, 6], Tolerance(), False).cases] == ["wrong", "not_reached"]


def test_a3_texts_of_programs_are_made_valid_and_counted(sandbox):
    code = (
        "class Odd:\n    def __repr__(self): return chr(0xd800)\n"
        "def solve(x):\n    if x == 3: raise ValueError(chr(0xd800))\n    return [chr(0xdfff), 'a' + chr(0xd801)] if x == 5 else Odd()"
    )
    judgement = judge_calls(code, "solve", [((3,), ""), ((5,), ["?", "a\ufffd"]), ((8,), "")], 20, sandbox=sandbox).outcome()
    assert [case.state for case in judgement.cases] == ["raised", "wrong", "wrong"]
    assert judgement.cases[0].error == "ValueError: \ufffd"
    assert judgement.cases[1].value == ["\ufffd", "a\ufffd"]
    assert judgement.counts()["judge/replaced"] == 2  # the list crossed as it was, and is compared as it was
    for case in judgement.cases:
        f"{case.error}{case.value!r}".encode()
    printed = judge_stdio("import sys\nsys.stdout.buffer.write(b'\\xff')\nsys.exit(chr(0xd800))", [("", "")], 20, sandbox=sandbox).outcome()
    assert printed.counts()["judge/replaced"] == 1
    printed.cases[0].error.encode()


PRIME = (1 << 61) - 1  # integers hash modulo this


@pytest.mark.parametrize("kind", ["s", "z", "d"])
def test_a6_no_object_is_made_of_many_members(kind, monkeypatch):
    """A set of 20,000 members with one hash took seconds. Here it is compared as text; only a small one is made, to be shown."""

    def line(numbers):
        keys = [b'{"i": "%s"}' % hex(number).encode() for number in numbers]
        body = b", ".join(b"[%s, 0]" % key for key in keys) if kind == "d" else b", ".join(keys)
        return returned(b'{"%s": [%s]}' % (kind.encode(), body))

    make = {"s": set, "z": frozenset, "d": lambda keys: dict.fromkeys(keys, 0)}[kind]
    small, large = [PRIME * n for n in range(3)], [PRIME * n for n in range(2000)]
    assert judged(line(small), make([0, 1, 2])).value == make(small)
    monkeypatch.setattr(_compare, "_made", None)  # nothing may be made from here on
    assert judged(line(large), make(range(2000))).state == "wrong"
    assert judged(line(large), make(large)).state == "passed"
    assert repr(judged(line(large), 6).value).endswith("too large to show>")


@pytest.mark.parametrize(
    "channel",
    [b"\n" * (1 << 20), b'{"case": 0}\n' * 90_000, returned(b"[" + b"[]," * 300_000 + b"[]]"), returned(b'"' + b"\\ud800" * 100_000 + b'"'),
     returned(b'{"i": "0x' + b"f" * 1_000_000 + b'"}'), returned(b"[" + b"1.5," * 200_000 + b"1]"), b'"' * (1 << 20)],
)  # fmt: skip
def test_a6_a_long_result_is_read_in_linear_time(channel):
    tick = time.process_time()
    case = judged(channel)
    assert case.state != "passed"
    repr(case.value).encode()  # an integer of 4,301 digits and more has no repr in Python 3.11
    assert time.process_time() - tick < 2


def test_a6_a_value_with_too_many_parts_is_wrong_and_a_long_expected_one_is_read():
    many = list(range(15_000))
    text = json.dumps(many).encode()
    assert judged(returned(text)).state == "wrong"
    assert judged(returned(text), many).state == "passed"
    assert repr(judged(returned(text), many).value) == "<list: too large to show>"


def test_a6_results_are_read_off_the_event_loop(monkeypatch, sandbox):
    threads = []
    real = judge.read_calls
    monkeypatch.setattr(judge, "read_calls", lambda *arguments: threads.append(threading.current_thread()) or real(*arguments))
    real_output = judge.same_output
    monkeypatch.setattr(judge, "same_output", lambda *arguments: threads.append(threading.current_thread()) or real_output(*arguments))
    assert asyncio.run(ajudge_calls("def solve(x): return 2 * x", "solve", CASES, 20, sandbox=sandbox))
    assert asyncio.run(ajudge_stdio("print(input())", [("a", "a")], 20, sandbox=sandbox))
    assert len(threads) == 2
    assert threading.main_thread() not in threads


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


class Heard(Executor):
    """Runs nothing: keeps what it is asked, and every program gives the same."""

    def __init__(self, program):
        self.requests, self.program = [], program

    def submit(self, request):
        self.requests.append(request)
        future = concurrent.futures.Future()
        future.set_result(Execution(self.program, None, 0.1))
        return future

    def metrics(self):
        return {}

    def close(self):
        """There is nothing to end."""


def test_every_option_of_a_judgement_counts_from_a_loop_as_without_one():
    near = Program(b"0.31\n", b"", 0, channel=returned(b'{"t": [0.31]}'))
    where = dict(profile="numpy", environment="coder")
    loose = dict(tolerance=Tolerance(0.1, 0.0))
    calls, stdio = ("code", "solve", [((3,), [0.3])], 7.0), ("code", [("3", "0.3")], 7.0)
    for options, passes in (({}, False), (loose, False), (loose | dict(tuples_as_lists=True), True)):
        heard = Heard(near)
        own = options | where | dict(case_timeout_s=0.5)
        found = judge_calls(*calls, sandbox=heard, **own), asyncio.run(ajudge_calls(*calls, sandbox=heard, **own))
        assert [bool(one) for one in found] == [passes, passes]
        wanted = call_request("code", "solve", [(3,)], 7.0, 0.5, "numpy", "coder")
        assert heard.requests == [wanted, wanted]
        assert (wanted.profile, wanted.environment, wanted.limits.timeout_s) == ("numpy", "coder", 7.0)
        assert json.loads(wanted.calls)["case_timeout"] == 0.5
    for options, passes in (({}, False), (loose, True)):
        heard = Heard(near)
        own = options | where
        found = judge_stdio(*stdio, sandbox=heard, **own), asyncio.run(ajudge_stdio(*stdio, sandbox=heard, **own))
        assert [bool(one) for one in found] == [passes, passes]
        asked = [(one.stdin, one.profile, one.environment, one.limits.timeout_s) for one in heard.requests]
        assert asked == [("3", "numpy", "coder", 7.0)] * 2


ENDS = [  # how a program ended -> the state of its case by output, and by calls where it left no line
    (dict(exit_code=0), "passed", "not_reached"), (dict(exit_code=1), "raised", "not_reached"),
    (dict(exit_code=None, signal=11), "raised", "not_reached"), (dict(exit_code=None, timed_out=True), "timeout", "timeout"),
    (dict(exit_code=None, memory_exceeded=True), "memory", "memory"), (dict(exit_code=None, disk_exceeded=True), "raised", "not_reached"),
    (dict(exit_code=0, stdout_truncated=True), "output_limit", "not_reached"),
    (dict(exit_code=None, timed_out=True, stdout_truncated=True), "timeout", "timeout"),
    (dict(exit_code=None, memory_exceeded=True, stdout_truncated=True), "output_limit", "memory"),
]  # fmt: skip


@pytest.mark.parametrize(("ended", "by_output", "by_calls"), ENDS, ids=str)
def test_how_a_program_ended_is_told_of_its_case_with_the_last_line_of_its_complaint(ended, by_output, by_calls):
    program = Program(b"6\n", b"first\n\xff" + b"y" * 600 + b"\n\n", **ended, seconds=0.5)
    (case,) = read_stdio([Execution(program, None, 0.1)], ["6"], Tolerance()).outcome().cases
    assert (case.state, case.seconds, case.replaced) == (by_output, 0.5, 1)
    assert case.error == ("" if by_output == "passed" else "\ufffd" + "y" * 499)
    (wrong,) = read_stdio([Execution(program, None, 0.1)], ["7"], Tolerance()).outcome().cases
    assert (wrong.state, wrong.error) == (("wrong", "") if by_output == "passed" else (by_output, case.error))
    judgement = read_calls(program, [6, 6], Tolerance(), False)
    assert [one.state for one in judgement.cases] == [by_calls, "not_reached"]
    ended_it = by_output not in ("passed", "output_limit") and ended["exit_code"] is None or "memory_exceeded" in ended
    assert judgement.counts()["judge/partial_output"] == judgement.partial_output == ended_it
    silent = Program(b"", b"", **ended)
    assert not Judgement((), (silent,)).partial_output


def test_a_case_tells_how_long_it_took_what_it_changed_and_the_beginning_of_what_it_raised():
    case = judged(returned(b"6", b"0.25", b"true"))
    assert (case.state, case.seconds, case.mutated, case.error) == ("passed", 0.25, True, "")
    for state in ("raised", "timeout"):
        line = json.dumps({"case": 0, "state": state, "error": "E: " + "x" * 600, "seconds": 2}).encode()
        case = judged(line)
        assert (case.state, case.seconds, case.error) == (state, 2.0, "E: " + "x" * 497)
        assert judged(json.dumps({"case": 0, "state": state, "error": None, "seconds": 0}).encode()).error == ""


def test_the_rate_and_the_counts_are_of_all_cases():
    lines = returned(b"6") + b'{"case": 1, "state": "raised", "error": "E", "seconds": 1}\n'
    judgement = read_calls(Program(b"", b"", 0, channel=lines), [6, 6], Tolerance(), False)
    assert (judgement.pass_rate, bool(judgement)) == (0.5, False)
    counts = judgement.counts("own")
    assert (counts["own/passed"], counts["own/raised"], counts["own/not_reached"], counts["own/mutated"]) == (1, 1, 0, 0)
    assert read_calls(Program(b"", b"", 0, channel=returned(b"6")), [6], Tolerance(), False).pass_rate == 1
    assert Judgement(()).pass_rate == 0


def test_an_expected_output_has_room_for_twice_its_bytes_and_at_least_the_usual():
    usual = Limits().stdout_bytes
    for wanted, room in (("x", usual), ("x" * (usual // 2), usual), ("x" * usual, 2 * usual), ("é" * usual, 4 * usual)):
        (request,) = stdio_requests("code", [("in", wanted)], 3.0, "numpy", "coder")
        assert request.limits == Limits(timeout_s=3.0, stdout_bytes=room)
        assert (request.code, request.stdin, request.profile, request.environment) == ("code", "in", "numpy", "coder")


def test_a_judgement_by_calls_keeps_the_limits_that_it_is_given_but_for_the_time():
    own = Limits(timeout_s=9.0, memory_mb=77)
    assert call_request("code", "solve", [(3,)], 2.0, limits=own).limits == Limits(timeout_s=2.0, memory_mb=77)
    assert call_request("code", "solve", [(3,)], 2.0).limits == Limits(timeout_s=2.0)


@pytest.mark.parametrize("failure", [None, Failure(FailureKind.CRASH, "a worker died")], ids=["outcome", "failure"])
def test_a_judgement_tells_the_seconds_and_attempts_of_its_executions(failure):
    class Answers(Heard):
        def submit(self, request):
            self.requests.append(request)
            number, future = len(self.requests), concurrent.futures.Future()
            future.set_result(Execution(None if failure else self.program, failure, 4.0 - number, attempts=number + 1))
            return future

    program = Program(b"1", b"", 0, channel=returned(b"1"))
    cases, texts = [((3,), 1)], [("3", "1"), ("4", "1")]
    for found, seconds, attempts in (
        (judge_calls("code", "solve", cases, sandbox=Answers(program)), 3.0, 2),
        (asyncio.run(ajudge_calls("code", "solve", cases, sandbox=Answers(program))), 3.0, 2),
        (judge_stdio("code", texts, sandbox=Answers(program)), 3.0, 5),
        (asyncio.run(ajudge_stdio("code", texts, sandbox=Answers(program))), 3.0, 5),
    ):
        assert (found.failure, found.seconds, found.attempts) == (failure, seconds, attempts)
        assert failure or found


def test_one_failed_execution_makes_a_judgement_by_output_a_failure():
    failed_one = Execution(None, Failure(FailureKind.CRASH, "a worker died"), 0.1)
    judged = read_stdio([failed_one, failed_one], ["1", "2"], Tolerance())
    assert judged.failure == failed_one.failure
    assert judged.attempts == 2


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
