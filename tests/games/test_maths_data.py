"""Problems in the public schemas of Polaris, AIME24, AIME25, OlympiadBench and GSM8K: read exactly, refused by name."""

import json

import pytest
from debates import played, scores

from marl_llm.games import make_game
from marl_llm.games.maths import load_maths, understood_by
from marl_llm.games.maths.debate import is_number
from marl_llm.tools.maths import MathsChecker
from marl_llm.workflows.rows import DataError, without

POLARIS = {"problem": "What is $2+2$?", "answer": "4", "difficulty": "5/8"}
AIME24 = {"ID": "2024-I-1", "Problem": "Find x.", "Solution": "So it is \\boxed{203}, or 204.", "Answer": 204}
AIME25 = {"problem": "Find y.", "answer": "70"}
OLYMPIAD = {
    "id": 1606, "question": "Find z.", "solution": ["z is 2"], "final_answer": ["$\\frac{1}{2}$"], "context": None, "image_1": None,
    "is_multiple_answer": False, "unit": None, "answer_type": "Numerical", "error": None, "question_type": "Open-ended",
    "subfield": "Algebra", "subject": "Math", "language": "English",
}  # fmt: skip
GSM8K = {"question": "Ann has 3 pens.", "answer": "She has 3 * 1,000 = 3,000.\n#### 3,000"}
SOLVED = {"problem": "Find w.", "solution": "It is $\\boxed{\\sqrt{2}}$."}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_of_each_schema_becomes_a_task_and_an_answer_goes_before_a_solution(tmp_path):
    tasks, dropped = load_maths(write(tmp_path / "x.jsonl", [POLARIS, AIME24, AIME25, OLYMPIAD, GSM8K, SOLVED]), "train")
    assert dropped == {}
    assert [task.hidden["target"] for task in tasks] == ["4", "204", "70", "\\frac{1}{2}", "3,000", "\\sqrt{2}"]
    assert [task.fields["problem"] for task in tasks][1:5] == ["Find x.", "Find y.", "Find z.", "Ann has 3 pens."]
    assert all(set(task.fields) == {"problem"} for task in tasks)


@pytest.mark.parametrize(
    "answer",
    ["First \\boxed{3} pens, then 4 more.\n#### 7", "#### 7\n\n##### Check\n3 + 4 = 7", "\\boxed{3} and 4.\n#### 7\n##### Check\n3 + 4"],
)
def test_gsm8k_s_answer_is_what_follows_its_four_hashes(tmp_path, answer):
    tasks, _ = load_maths(write(tmp_path / "x.jsonl", [{**GSM8K, "answer": answer}]), "train")
    assert tasks[0].hidden["target"] == "7"


def test_what_questions_share_is_read_before_the_question(tmp_path):
    tasks, _ = load_maths(write(tmp_path / "x.jsonl", [{**OLYMPIAD, "context": " Let x be 2. "}, {**OLYMPIAD, "context": ""}]), "test")
    assert [task.fields["problem"] for task in tasks] == ["Let x be 2.\nFind z.", "Find z."]


def test_parquet_loads(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([OLYMPIAD, {**OLYMPIAD, "final_answer": ["3"]}]), tmp_path / "x.parquet")
    assert [task.hidden["target"] for task in load_maths(tmp_path / "x.parquet", "test").tasks] == ["\\frac{1}{2}", "3"]


def test_difficulties_are_chosen_and_the_others_counted(tmp_path):
    path = write(tmp_path / "x.jsonl", [POLARIS, {**POLARIS, "difficulty": "1/8"}])
    tasks, dropped = load_maths(path, "train", difficulty="5/8")
    assert ([task.number for task in tasks], dropped) == ([0], {"another difficulty": 1})


HOSTILE = {
    "no problem": {"answer": "3"},
    "no answer: one of answer": {"problem": "p"},
    "no answer: answer is empty": {"problem": "p", "answer": " "},
    "no answer: solution ends in no box": {"problem": "p", "solution": "it is 3"},
    "several answers: final_answer is a list of 2": {**OLYMPIAD, "final_answer": ["1", "2"]},
    "several answers: is_multiple_answer": {**OLYMPIAD, "is_multiple_answer": True},
    "an answer with a tolerance: error is '1e-1'": {**OLYMPIAD, "error": "1e-1"},
    "an answer of an unknown form: answer is a dict": {"problem": "p", "answer": {"value": 3}},
    "an answer of an unknown form: answer is a bool": {"problem": "p", "answer": True},
    "an answer that is too long": {"problem": "p", "answer": "{" * 10_000},
    "an answer that is not finite: answer is nan": {"problem": "p", "answer": float("nan")},
    "an answer that is not finite: answer is 1e400": {"problem": "p", "answer": "1e400"},
    "no answer: answer has nothing behind its ####": {**GSM8K, "answer": "She has 3.\n#### "},
    "a problem with a picture": {**OLYMPIAD, "image_1": "1606.jpg"},
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_a_hostile_row_is_refused_by_file_row_and_reason_or_left_out_and_counted(tmp_path, reason):
    path = write(tmp_path / "x.jsonl", [POLARIS, HOSTILE[reason], AIME25])
    with pytest.raises(DataError, match=rf"x\.jsonl, row 1: {reason}.*or leave such rows out with bad_rows=drop"):
        load_maths(path, "train")
    tasks, dropped = load_maths(path, "train", bad_rows="drop")
    assert [task.number for task in tasks] == [0, 2]
    assert list(dropped.values()) == [1]


def test_a_target_that_the_checker_cannot_read_is_refused_at_load(tmp_path):
    rows = [SOLVED, {"problem": "p", "answer": "\\text{}"}, {"problem": "q", "answer": "x^2 + 1"}]
    path = write(tmp_path / "x.jsonl", rows)
    with MathsChecker(workers=1) as checker:
        with pytest.raises(DataError, match=r"row 1: an answer that the checker cannot read"):
            load_maths(path, "train", understood_by(checker))
        tasks, dropped = load_maths(path, "train", understood_by(checker), bad_rows="drop")
    assert ([task.number for task in tasks], dropped) == ([0, 2], {"an answer that the checker cannot read": 1})


def test_training_problems_that_are_test_problems_are_left_out_and_counted(tmp_path):
    train, _ = load_maths(write(tmp_path / "a.jsonl", [POLARIS, AIME25]), "train")
    test, _ = load_maths(write(tmp_path / "b.jsonl", [{"problem": "  what  is $2+2$? ", "answer": "4"}]), "test")
    kept, dropped = without(train, test, "problem")
    assert ([task.number for task in kept], dropped) == ([1], {"a problem of the test file": 1})


@pytest.mark.parametrize(
    "text",
    ["4", "-3", "3,000", "1.5", "2/3", "\\frac{1}{2}", "$7$", "+2", ".5", "12{,}345", "12 345", "1.5e3", "3 1/2", "$5", "5 cm", "50\\%"],
)
def test_plain_numbers(text):
    assert is_number(text)


@pytest.mark.parametrize("text", ["", "x", "2+2", "1,2", "nan", "1e400", "inf", "1 2 +", "[1]", "/", "-", "2 = 2"])
def test_what_is_no_plain_number(text):
    assert not is_number(text)


def test_a_world_of_files_is_played_and_its_splits_share_no_problem(tmp_path, caplog):
    rows = [{**POLARIS, "problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(7)]
    train = write(tmp_path / "polaris.jsonl", [*rows, {"problem": "Half?", "answer": "\\frac{1}{2}"}, {**POLARIS, "problem": "FIND X."}])
    test = write(tmp_path / "aime24.jsonl", [AIME24, {**AIME24, "Problem": "Find u."}])
    files = {"train": str(train), "test": str(test)}
    with make_game("maths_debate", turns=2, **files) as environment, make_game("maths_ensemble", reasoners=2, users=1, **files) as judged:
        texts = {split: {task.fields["problem"] for task in environment.tasks(split, 0, 20)} for split in ("train", "validation", "test")}
        assert {split: len(found) for split, found in texts.items()} == {"train": 7, "validation": 1, "test": 2}
        assert not texts["train"] & texts["validation"]
        assert not (texts["train"] | texts["validation"]) & texts["test"]
        said = {"reasoner": "So\n#### 204", "user": "```python\nprint(102 * 2)\n```", "judge": "#### \\boxed{204}"}
        for one in (environment, judged):
            assert scores(played(one.workflow, one.tasks("test", 0, 1), lambda turn: said[turn.role.name]), "correct") == [1.0]
    assert "1 rows are left out: a problem of the test file" in caplog.text
    with pytest.raises(ValueError, match="train and test must name"):
        make_game("maths_debate")
