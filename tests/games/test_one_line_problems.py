"""Problems of one line: their tests are what their programs print in the sandbox, and no problem is in two splits."""

import dataclasses

import pytest
from debates import played, scores

from marl_llm.games import make_game
from marl_llm.games.coding.one_line import PROGRAMS, one_line_task
from marl_llm.tools.judge import judge_stdio

SPLITS = ("train", "validation", "test")


def test_every_problems_program_passes_its_tests_in_the_sandbox_and_another_program_does_not():
    seen = {}
    for number in range(80):
        task = one_line_task("train", 0, number)
        seen.setdefault(task.hidden["references"][0].translate({ord(digit): None for digit in "0123456789"}), task)
    assert len(seen) >= len(PROGRAMS)
    for task in seen.values():
        program, tests = task.hidden["references"][0], task.hidden["tests"]
        cases = judge_stdio(program, tests, 10.0).outcome().cases
        assert [case.state for case in cases] == ["passed"] * len(tests), (task.fields, tests)
        wrong = judge_stdio(f"print(1000)\n{program}", tests, 10.0).outcome().cases
        assert "passed" not in {case.state for case in wrong}


def test_a_problem_belongs_to_one_split_and_is_the_same_each_time():
    problems = {split: {one_line_task(split, 0, number).fields["problem"] for number in range(400)} for split in SPLITS}
    assert not problems["train"] & problems["validation"]
    assert not (problems["train"] | problems["validation"]) & problems["test"]
    assert all(len(part) > 20 for part in problems.values())
    assert one_line_task("test", 3, 7) == one_line_task("test", 3, 7) != one_line_task("test", 4, 7)
    with pytest.raises(ValueError, match="split"):
        one_line_task("tset", 0, 0)


def test_the_last_test_has_equal_numbers_so_that_a_program_that_never_compares_fails():
    tasks = [one_line_task("train", 0, number) for number in range(200)]
    equal = [task for task in tasks if "equal" in task.fields["problem"]]
    assert equal
    for task in equal:
        assert task.hidden["tests"][-1][1] != "0\n"


@pytest.mark.parametrize(("agents", "turns"), [("team", 1), ("team", 2), ("single", 2)])
def test_a_program_is_paid_by_the_tests_and_every_prompt_begins_with_the_example(agents, turns):
    right, wrong = "```python\nprint(int(input()) + 1)\n```", "```python\nprint(1)\n```"

    def script(turn):
        program = right if turn.fields["problem"] == "right" else wrong
        return "**Test Input:**\n4\n**Test Output:**\n5" if turn.role.name == "tester" else program

    hidden = {**one_line_task("test", 0, 0).hidden, "tests": (("1\n", "2\n"), ("4\n", "5\n")), "references": ("print(int(input()) + 1)",)}
    tasks = [dataclasses.replace(one_line_task("test", 0, 0), number=n, fields={"problem": text, "interface": ""}, hidden=hidden)
             for n, text in enumerate(("right", "wrong"))]  # fmt: skip
    with make_game("one_line_debate", agents=agents, turns=turns) as environment:
        rollout = played(environment.workflow, tasks, script)
    assert scores(rollout, "solved") == [1.0, 0.0]
    for path in rollout.trajectories:
        assert all(call.prompt.startswith("Problem: Read an integer and print twice that number.\n") for call in path.calls)
    assert len(rollout.trajectories[1].calls) == turns * (1 + (agents == "team"))
