"""Every environment of Stronger-MAS for chat models, on a tiny chat checkpoint: plays, trains two steps, resumes, is exported.

Plan-Path's stands in `test_plan_path_text.py`. The environments share one shape of model and prompt: they compile one set of programs.
"""

import pytest
from test_code_data import apps, write
from test_maths_data import AIME24, POLARIS
from text_environment import whole_path

BOARDS = {"sokoban_text": {"turns": 1, "tool_answer": "box_path"}, "sudoku_text": {"turns": 1}}


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_in_text_plays_trains_resumes_and_is_exported(tmp_path, name):
    figures = whole_path(tmp_path, name, BOARDS[name])
    assert figures["samples"] == 2 * 2 * 1 * 4  # E, N, T, K
    assert (figures["aborted"], figures["team/program_no_program"]) == (0.0, 1.0)  # a random model writes no code block


FILES = {
    "code": ("function_debate", "full", 2, 2),  # config, variant, responses of a turn in the first turn, turns
    "maths": ("sums", "full", 2, 2),
    "ensemble": ("sums", "ensemble_full", 2 + 1 + 1, 1),
}


@pytest.mark.parametrize("environment", FILES)
def test_a_world_of_files_plays_trains_resumes_and_is_exported(tmp_path, environment):
    name, variant, speakers, turns = FILES[environment]
    if environment == "code":
        rows, held_out, game = [apps(n) for n in range(0, 24, 2)], [apps(n) for n in range(40, 48, 2)], {"difficulty": "introductory"}
    else:
        rows, held_out, game = [{**POLARIS, "problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)], [AIME24], {}
    game |= {"train": str(write(tmp_path / "train.jsonl", rows)), "test": str(write(tmp_path / "test.jsonl", held_out))}
    game |= {"reasoners": 2, "users": 1} if environment == "ensemble" else {"turns": turns}
    figures = whole_path(tmp_path, name, game, variant)
    assert figures["samples"] == 2 * speakers * turns * 4  # E, N, T, K
    assert figures["aborted"] == 0.0
