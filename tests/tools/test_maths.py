"""The maths checker: extraction, NumEq, verdicts, and hostile answers. An answer's doing is an outcome, the machine's is a failure."""

import asyncio
import os
import signal
import time

import pytest

from marl_llm.tools import FailureKind, InfrastructureError, MathsChecker, Verdict, extract_answer, numeq
from marl_llm.tools.maths import _after_death


@pytest.fixture(scope="module")
def checker():
    with MathsChecker(workers=1, cpu_s=1.0, deadline_s=30.0) as made:
        yield made


@pytest.mark.parametrize(
    ("response", "form", "answer"),
    [
        (r"so \boxed{5}.", "any", "5"),
        (r"first \boxed{4}, no: \boxed{\frac{1}{2}} done", "any", r"\frac{1}{2}"),
        (r"\boxed{a \boxed{5} b}", "any", r"a \boxed{5} b"),
        (r"\boxed{never closed, then \boxed{5}", "any", "5"),
        (r"a stray { and \boxed{5}", "any", "5"),
        (r"\boxed{\{1, 2\}}", "any", r"\{1, 2\}"),
        (r"\boxed {7}", "any", "7"),
        (r"\boxed{}", "any", None),
        (r"\boxed{5", "any", None),
        ("72 apples\n#### 72", "any", "72"),
        ("#### 1\n#### 2\n", "any", "2"),
        (r"#### \boxed{9}", "hashes", "9"),
        ("#### Step 1\n" + r"\boxed{3}" + "\n#### Notes", "any", "3"),
        (r"\boxed{3}", "hashes", None),
        ("#### 3", "boxed", None),
        ("x #### 3", "any", None),
        ("####\n", "any", None),
        ("#### 42\n\n##### Check\n6 * 7 = 42", "any", "42"),
        ("#### 42\n##### 43", "hashes", "42"),
        ("**#### 42**", "hashes", "42"),
        (r"\fbox{5}", "boxed", "5"),
        ("\\boxed\n {5}", "boxed", "5"),
        (r"\boxed 5.", "boxed", "5."),
        (r"\boxed{4} is what stands in the \boxed braces", "boxed", "4"),
        (r"\boxed{4}</think> so \boxed{5}", "boxed", "5"),
        (r"<think>\boxed{4}", "boxed", None),
        ("", "any", None),
    ],
)
def test_extraction(response, form, answer):
    assert extract_answer(response, form) == answer


def test_extraction_of_long_hostile_text():
    """Unfinished boxes and nested ones, each of which a backtracking pattern needs hours for."""
    nested = r"\boxed{" * 20_000 + "5" + "}" * 20_000
    assert extract_answer(r"\boxed{" * 50_000) is None
    assert extract_answer(nested) == nested[len(r"\boxed{") : -1]
    assert extract_answer("#### \t" * 50_000).startswith("####")
    assert extract_answer("{" * 100_000 + r"\boxed{1}") == "1"
    assert extract_answer(r"\boxed{" * 100_000 + "1" + "}" * 99_999) == r"\boxed{" * 99_998 + "1" + "}" * 99_998
    assert extract_answer("\\" * 100_001 + "{}" + r"\boxed{2}") == "2"


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form must be one of"):
        extract_answer("x", "box")


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1.0, 1.0 + 0.9e-6, True),
        (1.0, 1.0 + 2.1e-6, False),
        (0.0, 1e-6, True),
        (0.0, 1.1e-6, False),
        (5e-7, -5e-7, True),
        (1e9, 1e9 + 999.0, True),
        (1e9, 1e9 + 1001.0, False),
        (-2.0, 2.0, False),
        (3 + 4j, 3 + 4j + 1e-7, True),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), False),
        (1.0, float("inf"), False),
    ],
)
def test_numeq_is_the_papers(a, b, equal):
    assert numeq(a, b) is equal


def test_numeq_normalises_by_the_reference_alone():
    """1 / 1001 <= 0.0009995 < 1 / 1000."""
    assert numeq(1000.0, 1001.0, delta=0.0009995)
    assert not numeq(1001.0, 1000.0, delta=0.0009995)


@pytest.mark.parametrize(
    ("response", "target", "correct", "reason"),
    [
        (r"\boxed{5}", "5", True, "same_text"),
        (r"\boxed{\frac{1}{2}}", "0.5", True, "math_verify"),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", True, "math_verify"),
        (r"\boxed{1/3, 0.5}", r"\{\frac12, \frac13\}", True, "math_verify"),
        (r"\boxed{x = 5}", "5", True, "math_verify"),
        ("so it is\n#### 72", "Natalia sold 72 clips.\n#### 72", True, "same_text"),
        ("#### 1,000", r"the solution is \boxed{1000}", True, "math_verify"),
        (r"\boxed{2.718281}", "e", True, "numeq"),
        (r"\boxed{2.71827}", "e", False, "different"),
        (r"\boxed{5.00001}", "5", False, "different"),
        (r"\boxed{-5}", "5", False, "different"),
        (r"\boxed{1 2}", "12", False, "different"),  # d7: spaces between digits count
        (r"\boxed{3 1/2}", "31/2", False, "different"),
        (r"\boxed{12}", "1 2", False, "different"),
        (r"\boxed{ 1  2 }", "1 2", True, "same_text"),
        (r"\boxed{4, 5, 6}", "5", False, "different"),
        (r"\boxed{4 \text{ or } 5}", "5", False, "different"),
        (r"5 and 5 and 5, so \boxed{6}", "5", False, "different"),
        ("the answer is 5", "5", False, "no_answer"),
        (r"\boxed{1+((((}", "5", False, "different"),
        (r"\boxed{" + "1" * 3000 + "}", "5", False, "too_long"),
    ],
)
def test_d7_verdicts(checker, response, target, correct, reason):
    verdict = checker.check(response, target).outcome()
    assert (verdict.correct, verdict.reason) == (correct, reason)


def test_integers_are_compared_as_integers_and_decimals_by_delta(checker):
    """The paper's NumEq, which equates neighbours above 1/δ and all numbers below δ, is `exact_integers=False`."""
    pairs = [("10000001", "10000000"), ("10000000.5", "10000000"), ("2.99999999", "3"), ("10^{-9}", "10^{-10}"), ("0", "10^{-9}")]
    with MathsChecker(workers=1, exact_integers=False) as paper:
        for answer, target in pairs:
            assert checker.check(rf"\boxed{{{answer}}}", target).outcome().reason == "different"
            assert paper.check(rf"\boxed{{{answer}}}", target).outcome().reason == "numeq"
    assert checker.check(r"\boxed{10000000}", "10^7").outcome().correct
    assert checker.check(r"\boxed{0.333333}", "1/3").outcome().reason == "numeq"


def test_delta_0_is_exact():
    with MathsChecker(workers=1, delta=0) as exact:
        assert not exact.check(r"\boxed{0.333333}", "1/3").outcome().correct
        assert not exact.check(r"\boxed{6.63\times10^{-34}}", r"9.11\times10^{-31}").outcome().correct
        assert exact.check(r"\boxed{0.25}", "1/4").outcome().correct


@pytest.mark.parametrize("answer", [r"\binom{10^8}{5\cdot 10^7}", r"\binom{10^9}{5\cdot 10^8}"])
def test_an_answer_that_eats_the_cpu_is_wrong_and_the_checker_goes_on(checker, answer):
    verdict = checker.check(rf"\boxed{{{answer}}}", "5").outcome()
    assert (verdict.correct, verdict.reason) == (False, "cpu_limit")
    assert checker.check(r"\boxed{5.0}", "5").outcome().correct


def test_a_bad_target_is_nobodys_fault(checker):
    for target in ("", r"\binom{10^9}{5\cdot 10^8}"):
        result = checker.check(r"\boxed{4}", target)
        assert result.failure.kind == FailureKind.BAD_INPUT
        assert not result.failure.retriable
        with pytest.raises(InfrastructureError, match="may become a reward"):
            result.outcome()


def test_batches_and_asyncio_agree_with_single_calls(checker):
    responses = [rf"\boxed{{{n}/{n + 1}}}" for n in range(1, 9)]
    targets = [f"{2 * n}/{2 * n + 2}" if n % 2 else "1/7" for n in range(1, 9)]
    single = [checker.check(*pair).outcome() for pair in zip(responses, targets)]
    assert [verdict.correct for verdict in single] == [bool(n % 2) for n in range(1, 9)]
    assert [result.outcome() for result in checker.check_batch(responses, targets)] == single
    assert [result.outcome() for result in asyncio.run(checker.acheck_batch(responses, targets))] == single
    assert asyncio.run(checker.acheck(responses[0], targets[0])).outcome() == single[0]
    with pytest.raises(ValueError, match="zip"):
        checker.check_batch(responses, targets[:-1])


@pytest.mark.parametrize("form", ["any", "boxed", "hashes"])
def test_the_form_that_is_asked_for_counts_in_all_four_ways_of_asking(checker, form):
    responses = ["so \\boxed{1}\n#### 2", "#### 1", "\\boxed{1}", "1"]
    reasons = {
        "any": ["same_text", "same_text", "same_text", "no_answer"], "boxed": ["same_text", "no_answer", "same_text", "no_answer"],
        "hashes": ["different", "same_text", "no_answer", "no_answer"],
    }  # fmt: skip
    targets = ["1"] * 4
    ways = [
        [checker.check(*pair, form) for pair in zip(responses, targets)], checker.check_batch(responses, targets, form),
        [asyncio.run(checker.acheck(*pair, form)) for pair in zip(responses, targets)],
        asyncio.run(checker.acheck_batch(responses, targets, form)),
    ]  # fmt: skip
    assert [[result.outcome().reason for result in found] for found in ways] == [reasons[form]] * 4


def test_a_killed_worker_is_replaced_and_the_check_done_again():
    with MathsChecker(workers=1, cpu_s=5.0) as checker:
        assert checker.check(r"\boxed{5.0}", "5").outcome().correct
        os.killpg(checker._workers[0]._process.pid, signal.SIGKILL)
        result = checker.check(r"\boxed{6.0}", "6")
        assert result.outcome().correct
        assert result.attempts == 2


def test_a_starved_worker_is_a_failure_and_no_verdict():
    with MathsChecker(workers=1, cpu_s=2.0, deadline_s=2.5, attempts=1) as checker:
        assert checker.check(r"\boxed{5.0}", "5").ok
        os.killpg(checker._workers[0]._process.pid, signal.SIGSTOP)
        result = checker.check(r"\boxed{6.0}", "6")
        assert result.failure.kind == FailureKind.DEADLINE
        assert checker.check(r"\boxed{7.0}", "7").outcome().correct


def test_a3_an_answer_that_is_no_valid_text_is_wrong_and_its_verdict_can_be_written(checker):
    verdict = checker.check("\\boxed{5" + chr(0xD83D) + "}", "5").outcome()
    assert (verdict.correct, verdict.answer) == (False, "5\ufffd")


def test_an_answer_whose_parsing_raises_is_wrong_and_a_target_s_is_bad_input():
    """Whichever exception ends the fork: it is no failure that aborts the play."""
    assert _after_death(0, True, "a", "t") == Verdict(False, "crashed", "a")
    assert _after_death(0, False, "a", "t")[0] is FailureKind.BAD_INPUT
    assert _after_death(signal.SIGKILL, True, "a", "t")[0] is FailureKind.CRASH


def gone(group: int) -> bool:
    """Whether no process of a group is left; a killed fork stays in the table until its new parent takes note."""
    for _ in range(2000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_workers_see_no_secrets_and_leave_with_the_checker(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    checker = MathsChecker(workers=1)
    assert checker.check(r"\boxed{5.0}", "5").ok
    pid = checker._workers[0]._process.pid
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"sk-secret" not in file.read()
    checker.close()
    assert gone(pid)
    with pytest.raises(RuntimeError, match="closed"):
        checker.check(r"\boxed{5}", "5")


def test_settings_that_blame_answers_wrongly_are_refused():
    with pytest.raises(ValueError, match="below deadline_s"):
        MathsChecker(cpu_s=5.0, deadline_s=5.0)
