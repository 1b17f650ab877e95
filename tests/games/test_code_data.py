"""Problems in the public schemas of APPS, CodeContests, LiveCodeBench and the release: read exactly, refused by name, references run."""

import base64
import json
import pickle
import zlib

import pytest
from debates import played, scores

from marl_llm.games import make_game
from marl_llm.games.coding import check_references, load_contests
from marl_llm.games.coding.contests import MAX_TEST
from marl_llm.workflows.rows import DataError

STATEMENT = "Print the number plus {n}.\n\nInput\n2\n\nOutput\n{shown}\n"


def program(n):
    return f"print(int(input()) + {n})"


def apps(n, **more):
    tests = {"inputs": ["2\n", "5\n", "9\r\n"], "outputs": [f"{2 + n}\n", f"{5 + n}\n", f"{9 + n}\n"]}
    row = {
        "problem_id": n, "question": STATEMENT.format(n=n, shown=2 + n), "solutions": json.dumps([program(n)]),
        "input_output": json.dumps(tests), "difficulty": "introductory" if n % 2 == 0 else "interview", "url": "", "starter_code": "",
    }  # fmt: skip
    return row | more


def code_contests(n, **more):
    row = {
        "name": f"{n}_A", "description": STATEMENT.format(n=n, shown=2 + n), "source": 2, "difficulty": 7,
        "public_tests": {"input": ["2\n"], "output": [f"{2 + n}\n"]}, "private_tests": {"input": ["5\n"], "output": [f"{5 + n}\n"]},
        "generated_tests": {"input": ["9\n"], "output": [f"{9 + n}\n"]},
        "solutions": {"language": [2, 1, 3], "solution": ["int main(){}", "print int(raw_input())", program(n)]},
        "incorrect_solutions": {"language": [3, 4], "solution": [program(n + 1), "class A {}"]},
        "time_limit": {"seconds": 1, "nanos": 0}, "is_description_translated": False,
    }  # fmt: skip
    return row | more


def packed(text):
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


def livecodebench(n, **more):
    private = [{"input": f"{x}\n", "output": f"{x + n}\n", "testtype": "stdin"} for x in (5, 9)]
    row = {
        "question_title": "add", "question_content": STATEMENT.format(n=n, shown=2 + n), "platform": "atcoder", "question_id": f"abc{n}",
        "contest_id": "abc", "contest_date": "2025-01-04T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "2\n", "output": f"{2 + n}\n", "testtype": "stdin"}]),
        "private_test_cases": packed(json.dumps(private)), "metadata": "{}",
    }  # fmt: skip
    return row | more


def release(n, **more):
    row = {"question": STATEMENT.format(n=n, shown=2 + n), "solution": program(n), "test_input": ["2\n", "5\n", "9\n"],
           "test_output": [f"{2 + n}\n", f"{5 + n}\n", f"{9 + n}\n"]}  # fmt: skip
    return row | more


CALLED = livecodebench(
    3,
    starter_code="class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    metadata=json.dumps({"func_name": "add"}),
    public_test_cases=json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    private_test_cases=json.dumps([{"input": "[4]\n5", "output": "[4, 5]", "testtype": "functional"}]),
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("make", [apps, code_contests, livecodebench, release])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_a_row_of_each_schema_becomes_a_task_whose_shown_tests_are_no_golden_ones(tmp_path, make, kind):
    path, rows = tmp_path / f"x.{kind}", [make(4), make(6)]
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        write(path, rows)
    tasks, dropped = load_contests(path, "train")
    assert dropped == {}
    assert [task.number for task in tasks] == [0, 1]
    assert tasks[1].hidden["tests"] == (("5\n", "11\n"), ("9\n", "15\n"))
    assert tasks[1].hidden["shown"] == ("2\n",)
    assert tasks[1].hidden["references"] == (() if make is livecodebench else (program(6),))
    assert tasks[1].hidden["mutants"] == ((program(7),) if make is code_contests else ())
    assert tasks[1].fields["problem"].startswith("Print the number plus 6.")
    assert load_contests(path, "train", tests=1).tasks[0].hidden["tests"] == (("5\n", "9\n"),)
    assert len(load_contests(path, "train", limit=1).tasks) == 1


def test_called_functions_are_read_with_their_name_and_arguments(tmp_path):
    (task,), _ = load_contests(write(tmp_path / "x.jsonl", [CALLED]), "test")
    assert (task.hidden["function"], task.hidden["tests"]) == ("add", ((([4], 5), [4, 5]),))
    assert task.hidden["shown"] == ("1\n2",)
    assert "Begin with:\nclass Solution" in task.fields["interface"]
    one = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
    (task,), _ = load_contests(write(tmp_path / "y.jsonl", [apps(1, input_output=json.dumps(one))]), "test")
    assert task.hidden["tests"] == (((1, 2), 3), ((3, 4), 7))


def test_difficulties_are_chosen_and_the_others_counted(tmp_path):
    tasks, dropped = load_contests(write(tmp_path / "x.jsonl", map(apps, range(5))), "train", difficulty="introductory")
    assert [task.number for task in tasks] == [0, 2, 4]
    assert dropped == {"another difficulty": 2}


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/should-never-be-made", "w"))


LONG = "9" * 5000
CALL = {"inputs": [[1]], "outputs": [2]}
HOSTILE = {
    "no problem": apps(1, question="  "),
    "no tests: input_output is empty": apps(1, input_output=""),
    "not JSON: input_output": apps(1, input_output="{'inputs': ["),
    "not JSON: input_output: RecursionError": apps(1, input_output="[" * 100_000),
    "tests of an unknown form: .*equally long": apps(1, input_output={"inputs": ["1"], "outputs": []}),
    "an empty output: test 0": apps(1, input_output={"inputs": ["7"], "outputs": [" \n"]}),
    "a test that is too large": apps(1, input_output={"inputs": ["7"], "outputs": ["9" * (MAX_TEST + 1)]}),
    "no hidden tests: every test stands in the statement": apps(1, input_output={"inputs": ["2\n"], "outputs": ["3\n"]}),
    "tests of an unknown form: .*'os.system', which is no name": apps(1, input_output={**CALL, "fn_name": "os.system"}),
    "tests of an unknown form: .*'3', which is no name": apps(1, input_output={**CALL, "fn_name": 3}),
    "tests of an unknown form: .*too long to print.*, which is no name": apps(
        1, input_output=f'{{"inputs": [[1]], "outputs": [2], "fn_name": {LONG}}}'),
    "solutions of an unknown form": apps(1, solutions="[1, 2]"),
    "no hidden tests: private_tests and generated_tests are empty": code_contests(1, private_tests=None, generated_tests=None),
    "tests of an unknown form: tests: an input or output that cannot": apps(
        1, input_output=f'{{"inputs": ["1"], "outputs": [{LONG}]}}'),
    "tests of an unknown form: tests: the input or output .* is missing": apps(1, input_output={"inputs": [None], "outputs": ["1"]}),
    "tests of an unknown form: private_tests: an input or output that cannot": code_contests(
        1, private_tests=f'{{"input": ["1"], "output": [{LONG}]}}'),
    "tests of an unknown form: generated_tests: the input or output .* is missing": code_contests(
        1, generated_tests={"input": ["1"], "output": [None]}),
    "tests of an unknown form: private_tests must": code_contests(1, private_tests={"input": ["1"], "output": []}),
    "solutions of an unknown form: solutions": code_contests(1, solutions={"language": [3], "solution": []}),
    "no tests: private_test_cases is empty": livecodebench(1, private_test_cases=""),
    "packed tests that cannot be read: private_test_cases": livecodebench(1, private_test_cases="@@@"),
    "packed tests that cannot be read: .*zlib|Error": livecodebench(1, private_test_cases=base64.b64encode(b"abc").decode()),
    "packed tests that cannot be read: .*it names": livecodebench(1, private_test_cases=packed(Evil())),
    "packed tests that cannot be read: .*a pickled list": livecodebench(1, private_test_cases=packed(["x"])),
    "tests of an unknown form: test_input must be a list": release(1, test_input="1"),
    "unknown columns: the row has prompt": {"prompt": "p"},
}  # fmt: skip


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_hostile_row_is_refused_by_file_row_and_reason_or_left_out_and_counted(tmp_path, reason):
    path = write(tmp_path / "x.jsonl", [apps(3), HOSTILE[reason], apps(5)])
    with pytest.raises(DataError, match=rf"x\.jsonl, row 1: {reason}.*or leave such rows out with bad_rows=drop"):
        load_contests(path, "train")
    tasks, dropped = load_contests(path, "train", bad_rows="drop")
    assert [task.number for task in tasks] == [0, 2]
    assert list(dropped.values()) == [1]


def test_what_unpacks_without_end_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("marl_llm.games.coding.contests.MAX_PACKED", 10_000)
    path = write(tmp_path / "x.jsonl", [livecodebench(1, private_test_cases=packed("0" * 10**6))])
    with pytest.raises(DataError, match="too large: private_test_cases unpacks to over 10000 bytes"):
        load_contests(path, "test")


def test_files_that_are_no_text_or_no_json_are_named(tmp_path):
    for name, content, message in (
        ("a.jsonl", b'{}\n{"question": "\xff"}\n', "line 2: not UTF-8"),
        ("b.jsonl", b"[" * 10**5, "line 1: nested deeper than 64 levels"),
        ("c.json", b"[" * 10**5, "nested deeper than 64 levels"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_contests(tmp_path / name, "train", bad_rows="drop")
    with pytest.raises(DataError, match="bad_rows='skip' is unknown; choose one of refuse, drop"):
        load_contests(tmp_path / "a.jsonl", "train", bad_rows="skip")


def test_references_are_run_and_those_that_fail_or_disagree_are_left_out(tmp_path):
    odd = apps(7, solutions=json.dumps([program(7), "print(8)"]))
    wrong, python2 = apps(9, solutions=json.dumps(["print(1)"])), apps(11, solutions=json.dumps(["print input() + 11"]))
    tasks, _ = load_contests(write(tmp_path / "x.jsonl", [apps(3), odd, wrong, python2, livecodebench(5)]), "train")
    kept, dropped = check_references(tasks, tests=1)
    assert [task.number for task in kept] == [0, 4]
    assert dropped == {"its solutions disagree": 1, "the reference fails its own tests": 2}


def test_a_world_of_files_is_played_and_its_splits_share_no_problem(tmp_path, caplog):
    train = write(tmp_path / "train.jsonl", [*map(apps, range(0, 16, 2)), apps(90, solutions='["print(1)"]')])
    test = write(tmp_path / "test.jsonl", [code_contests(4), code_contests(40)])
    with make_game("code_debate", train=str(train), test=str(test), difficulty="introductory", turns=2) as environment:
        texts = {split: {task.fields["problem"] for task in environment.tasks(split, 0, 20)} for split in ("train", "validation", "test")}
        assert {split: len(found) for split, found in texts.items()} == {"train": 6, "validation": 1, "test": 2}
        assert not texts["train"] & texts["validation"]
        assert not (texts["train"] | texts["validation"]) & texts["test"]

        def script(turn):
            n = int(turn.fields["problem"].split()[4].rstrip("."))
            if turn.role.name == "tester":
                return f"**Test Input:**\n7\n**Test Output:**\n{7 + n}"
            return f"```python\n{program(n + (turn.turn == 0))}\n```"

        rollout = played(environment.workflow, environment.tasks("test", 1, 1), script)
    assert (scores(rollout, "solved"), scores(rollout, "turns_taken"), scores(rollout, "test_right")) == ([1.0], [2.0], [1.0])
    assert "1 rows are left out: a problem of the test file" in caplog.text
    assert "1 rows are left out: the reference fails its own tests" in caplog.text
