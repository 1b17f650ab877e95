"""Calls in files of problems are read so that a right program can pass, and refused where none can."""

import json

import pytest

from marl_llm.games.coding.contests import check_references, load_contests
from marl_llm.games.coding.data import load_problems, show_tests
from marl_llm.games.coding.forms import UnreadableCalls, check_name, name_in_starter, read_calls
from marl_llm.tools import judge_calls

SOLUTION = "class Solution:\n    def {}(self, a: int) -> int:\n        "
LONG = "9" * 5000


@pytest.mark.parametrize(
    ("starter", "name"),
    [
        ("def solve(a):\n    ...", "solve"),
        (SOLUTION.format("solve"), "solve"),
        (SOLUTION.format("solve") + "def helper(x):\n            return x\n        ", "solve"),
        (SOLUTION.format("__init__") + "pass\n\n    def solve(self, a):\n        ", "solve"),
        ("class ListNode:\n    def __init__(self, x): ...\n    def next(self): ...\n\n" + SOLUTION.format("solve"), "solve"),
        (SOLUTION.format("solve") + "\n\nclass Node:\n    def show(self): ...\n\ndef main(): ...\n", "solve"),
        ("# class ListNode:\n#     def old(self): ...\n" + SOLUTION.format("solve"), "solve"),
        ("def gcd(a, b):\n    return a\n\ndef solve(a):\n    return gcd(a, 1)\n", "solve"),
        ("def solve(a):\n    return gcd(a, 1)\n\ndef gcd(a, b):\n    return a\n", "solve"),
        (SOLUTION.format("solve") + "return self.step(a)\n    def step(self, a):\n        return a\n", "solve"),
        ('def solve(a):\n    """Like\n    def other(a):\n    """\n', "solve"),
        ("async def solve(a): ...", "solve"),
        ("def fact(n):\n    return n * fact(n - 1)\n", "fact"),
        ("class Solution:\r\n\tdef solve(self, a):\r\n\t\tdef in_it(x): ...\r\n\t\t", "solve"),
        ("class Solution(object):\n  def solve(self, a):\n    pass", "solve"),
    ],
)
def test_the_tests_call_the_function_that_the_starter_code_asks_for(starter, name):
    assert name_in_starter(starter) == name
    assert check_name(name, starter) == name


def test_a_name_that_no_answer_can_define_is_refused():
    assert check_name("Solution().solve", SOLUTION.format("solve")) == "solve"
    for function, starter, said in (
        ("a b", "", "no name of a function"), ("class", "", "no name"), ("plus", "def add(a): ...", "starter code defines add"),
    ):  # fmt: skip
        with pytest.raises(UnreadableCalls, match=said):
            check_name(function, starter)
    for starter in ("", "x = 1", "class Stack:\n    def __init__(self): ...\n", "class Solution:\n    pass\n"):
        with pytest.raises(UnreadableCalls, match="neither"):
            name_in_starter(starter)


@pytest.mark.parametrize(
    ("pairs", "wrapped", "calls"),
    [
        ([([1], [2]), ([6], [7])], True, (((1,), 2), ((6,), 7))),
        ([([1], [2]), ([6], [7])], False, (((1,), [2]), ((6,), [7]))),
        ([([1], [2]), ([6], [7, 8])], True, (((1,), [2]), ((6,), [7, 8]))),
        ([([1], [[2]]), ([6], [[7, 8]])], True, (((1,), [2]), ((6,), [7, 8]))),
        ([([1, "a"], ["12"])], True, (((1, "a"), "12"),)),
        ([([1], "12")], False, (((1,), "12"),)),  # a value, no JSON
        ([("1\n\"a\"", "12")], False, (((1, "a"), 12),)),
        ([("1", "12"), ("2", "0a")], False, (((1,), "12"), ((2,), "0a"))),
        ([("1", "True"), ("2", "False")], False, (((1,), True), ((2,), False))),
        ([("(1, 2)", "{1: 2}")], False, ((((1, 2),), {1: 2}),)),
        ([("[1,\n 2]", "3")], False, ((([1, 2],), 3),)),
        ([('"a\u2028b"', '"c"')], False, ((("a\u2028b",), "c"),)),
        ([([{"1": "a", "-2": "b"}], {"1": {"2": 3}})], False, ((({1: "a", -2: "b"},), {1: {2: 3}}),)),
        ([([{"1": 1, "x": 2}], {"01": 3})], False, ((({"1": 1, "x": 2},), {"01": 3}),)),
        ([("1", LONG)], False, (((1,), 10**5000 - 1),)),
        ([("", "1")], False, (((), 1),)),
        ([([], [None])], True, (((), None),)),
    ],
)  # fmt: skip
def test_arguments_and_values_are_read_as_the_file_means_them(pairs, wrapped, calls):
    assert read_calls(pairs, "", wrapped) == calls


def test_a_list_of_one_is_kept_where_the_starter_code_returns_a_list():
    pairs = [([1], [2]), ([6], [7])]
    assert read_calls(pairs, "class Solution:\n    def f(self, a) -> List[int]:\n", True) == (((1,), [2]), ((6,), [7]))
    assert read_calls(pairs, "class Solution:\n    def f(self, a: List[int]) -> int:\n", True) == (((1,), 2), ((6,), 7))


def test_what_no_program_can_return_is_refused():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    for pairs, said in (
        ([([1], float("nan"))], "NaN"), ([("1", "[NaN]")], "NaN"), ([([1], deep)], "too deeply"), ([([deep], 1)], "too deeply"),
        ([([1], "x" * (5 << 20))], "at most"), ([("1 2", "3")], "one JSON value per line"),
    ):  # fmt: skip
        with pytest.raises(UnreadableCalls, match=said):
            read_calls(pairs, "", False)


def test_tests_of_several_kinds_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    one = {"input": "1", "output": "1", "testtype": "functional", "fn_name": "f"}
    for tests in ([one, {**one, "testtype": "stdin"}], [one, {**one, "fn_name": "g"}]):
        path.write_text(json.dumps({"problem": "p", "tests": tests}))
        with pytest.raises(ValueError, match="row 0.*several kinds"):
            load_problems(path, "train")


def test_long_integers_are_shown_without_their_digits(tmp_path):
    assert "too long to print" in show_tests([((10**5000,), 1)])
    path = tmp_path / "rows.jsonl"
    tests = json.dumps([{"input": LONG, "output": LONG, "testtype": "functional"}])
    row = {"question_content": "p", "starter_code": SOLUTION.format("f"), "public_test_cases": tests, "private_test_cases": tests}
    path.write_text(json.dumps({**row, "metadata": "{}"}))
    (task,) = load_contests(path, "train").tasks
    assert judge_calls("def f(a):\n    return a\n", "f", task.hidden["tests"], 20)


def test_a_row_whose_own_reference_fails_is_found_for_called_functions_too(tmp_path):
    path = tmp_path / "rows.jsonl"
    calls = {"fn_name": "plus", "inputs": [[1], [6]], "outputs": [[2], [7]]}
    codes = ["def plus(a):\n    return a + 1\n", "def plus(a):\n    return [a + 1]\n", "def other(a):\n    return a + 1\n"]
    path.write_text("\n".join(json.dumps({"question": "p", "input_output": calls, "solutions": [code]}) for code in codes))
    loaded = check_references(load_contests(path, "train").tasks)
    assert [task.number for task in loaded.tasks] == [0]
    assert loaded.dropped == {"the reference fails its own tests": 2}
