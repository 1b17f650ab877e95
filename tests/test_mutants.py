"""The instrument that measures the tests: it must notice, let live, and report what it could not try."""

import contextlib
import io
import json

import pytest

from benchmarks.mutants import Mutant, StaleMutant, mutants_of, mutated, rooms
from benchmarks.mutants.__main__ import copy_tree, main, measure, sample, told_in, verdict


def write_tree(folder):
    """A project of one function and one test."""
    (folder / "adder.py").write_text("def add(a, b):\n    return a + b\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_adder.py").write_text("from adder import add\n\n\ndef test_add():\n    assert add(2, 0) == 2\n")
    return folder


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path)


def mutant(name, old, new, tests="test_adder.py"):
    return Mutant(name, "adder.py", old, new, tests)


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """(tree, report, what was printed) of a run of five faults."""
    tree, printed = write_tree(tmp_path_factory.mktemp("tried")), io.StringIO()
    faults = [mutant("tools: a product", "a + b", "a * b"), mutant("difference", "a + b", "a - b"), mutant("gone", "a ** b", "a")]
    faults += [mutant("no test runs", "a + b", "a", "test_adder.py::test_none"), mutant("crash", "return a + b", "import os; os.abort()")]
    with contextlib.redirect_stdout(printed):
        report = measure(faults, tree, limit_s=60, baseline=False)
    return tree, report, printed.getvalue()


def test_a_score_counts_what_was_noticed_and_names_what_was_not(tried):
    tree, report, _ = tried
    assert (report["killed"], report["survived"], report["error"]) == (2, 1, 2)
    assert report["survivors"] == ["difference"]
    assert report["score"] == round(2 / 3, 4)
    assert len(report["errors"]) == 2
    assert "gone: adder.py has the old text 0 times" in report["errors"][0]
    assert (tree / "adder.py").read_text().endswith("return a + b\n"), "the tree is put back"


def test_what_a_run_has_tried_can_be_read_from_its_output(tried, tmp_path, capsys):
    assert told_in(tried[2]) == {"tools: a product", "difference", "crash"}, "an error is no verdict"
    listed = mutants_of("text")
    log = tmp_path / "run.log"
    log.write_text(tried[2] + f"killed     9.9 s  {listed[0].name}\n")
    assert main(["--list", "--rooms=text", f"--done={log}"]) == 0
    assert json.loads(capsys.readouterr().out)["mutants"] == len(listed) - 1


def test_a_package_that_is_called_runs_is_copied_and_a_folder_of_runs_is_not(tmp_path):
    for name in ("package/runs/one.py", "runs/first/metrics.jsonl", ".venv/bin/python", "package/__pycache__/one.pyc"):
        (tmp_path / "root" / name).parent.mkdir(parents=True)
        (tmp_path / "root" / name).touch()
    copy_tree(tmp_path / "root", tmp_path / "tree")
    copied = [path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("*") if path.is_file()]
    assert copied == ["package/runs/one.py"]


def test_tests_that_fail_without_a_fault_prove_nothing(tree):
    (tree / "test_adder.py").write_text("def test_add():\n    assert False\n")
    report = measure([mutant("product", "a + b", "a * b")], tree, limit_s=60, baseline=True)
    assert (report["killed"], report["error"]) == (0, 1)
    assert "without any fault" in report["errors"][0]


def test_a_hang_and_a_crash_are_noticed():
    assert [verdict(code) for code in (None, -11, 1, 0, 2, 4, 5)] == ["killed", "killed", "killed", "survived", "error", "error", "error"]


def test_every_table_can_be_read_and_no_name_stands_twice():
    mutants = [mutant for room in rooms() for mutant in mutants_of(room)]
    assert len({m.name for m in mutants}) == len(mutants) >= 120


def test_an_old_text_that_stands_twice_is_stale(tree):
    (tree / "adder.py").write_text("a + b\na + b\n")
    with pytest.raises(StaleMutant, match="2 times"):
        mutated(tree, mutant("double", "a + b", "a"))


def test_a_sample_has_each_rooms_share_and_is_drawn_by_its_seed():
    mutants = [mutant for room in rooms() for mutant in mutants_of(room)]
    chosen = sample(mutants, 130, 0)
    assert len(chosen) == 130
    assert chosen == sample(mutants, 130, 0) != sample(mutants, 130, 1)
    for room in rooms():
        share = 130 * len(mutants_of(room)) / len(mutants)
        assert abs(sum(m.name.startswith(f"{room}:") for m in chosen) - share) < 1
    assert sample(mutants, 10_000, 0) == mutants


def test_every_fault_still_fits_its_file(capsys):
    assert main(["--list"]) == 0, capsys.readouterr().out
