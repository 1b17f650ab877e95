"""`python -m marl_llm check` finds each planted fault, names its law, and finds none in a sound team."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import faulty_games
import jax
import pytest

from marl_llm.checking import CheckError, Subject, check, report_text
from marl_llm.checking.honesty import _planted
from marl_llm.checking.junk import battery
from marl_llm.checking.verdict import Finding
from marl_llm.cli.check import main
from marl_llm.games import make_game
from marl_llm.games.hosted import hosted
from marl_llm.text import train_pieces
from marl_llm.workflows import PlainText, Task

HERE = pathlib.Path(__file__).parent
FAULTS = {  # the planted fault -> the checks that must fail, and no other; and words of the evidence
    "team": (set(), ""),
    "unseeded_draw": ({"same seed", "forks", "groups"}, "the global random state"),
    "shared_state": ({"same seed", "forks", "groups"}, "outlives a play"),
    "leaked_field": ({"secrets"}, "show the hidden 'answer'"),
    "pays_the_copied_prompt": ({"junk pay"}, "copied prompt: the score is 1.00"),
    "pays_empty_text": ({"junk pay"}, "empty: the score is 1.00"),
    "crashes_on_junk": ({"junk"}, "raised IndexError"),
    "mixed_groups": ({"forks", "groups"}, "have the numbers [1, 2, 2, 3]"),
    "small_budget": ({"budgets"}, "18 are allowed"),
    "overlapping_splits": ({"splits"}, "are tasks of train too"),
    "pays_nobody": ({"pay"}, "no reward ever pays speller, checker"),
    "pays_one_role": (set(), ""),
    "unbounded_reward": ({"bounds"}, "the bound is 10"),
    "order_dependent_draw": ({"same seed"}, "outlives a play"),
    "idle_teacher": ({"teacher"}, "scores 0"),
    "duel": (set(), ""),
    "pays_a_rivals_junk": ({"junk pay"}, "empty: a wins 1.00 of its games"),
    "unwritable_picture": ({"people"}, "a list of lines"),
    "unwritable_task": ({"people"}, "is no JSON"),
}
LAW = {
    "same seed": 6, "forks": 4, "groups": 3, "secrets": 11, "junk pay": 11, "junk": 14, "bounds": 10, "budgets": 10, "splits": 12,
    "people": 10, "pay": 10,
}  # fmt: skip


def command(*arguments):
    """Runs the command in a process of its own: without the checks of shapes, which take ten times as long."""
    given = [sys.executable, "-m", "marl_llm", "check", *arguments]
    root = HERE.parents[1]
    return subprocess.run(given, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def reports():
    done = command(*(f"{HERE / 'faulty_games.py'}:{name}" for name in FAULTS), "--json")
    assert done.returncode == 1, done.stderr
    return dict(zip(FAULTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds_the_planted_fault_and_no_other_and_names_the_law(reports, fault):
    wanted, words = FAULTS[fault]
    found = {one["name"]: one for one in reports[fault]["verdicts"] if one["status"] == "fail"}
    assert set(found) == wanted, {name: one["evidence"] for name, one in found.items()}
    assert words in " ".join(one["evidence"] for one in found.values())
    assert all(one["law"] == LAW.get(name, 8) for name, one in found.items())


def test_check_names_the_roles_that_no_reward_ever_pays(reports):
    found = {one["name"]: one for one in reports["pays_one_role"]["verdicts"]}
    assert found["pay"]["status"] == "note"
    assert "no reward ever pays checker: " in found["pay"]["evidence"]
    sound = {one["name"]: one for one in reports["team"]["verdicts"]}
    assert (sound["pay"]["status"], sound["pay"]["evidence"]) == ("pass", "every role is paid: speller, checker")


def test_check_counts_the_words_that_the_vocabulary_lacks():
    tokenizer = train_pieces(("Backwards:", "How", "many", "letters?", "none"))
    environment = dataclasses.replace(faulty_games.team(), renderer=PlainText(tokenizer, tuple(tokenizer.ids_of(("none",)).tolist())))
    words = [task.fields["word"] for task in environment.tasks("train", 0, 2)]
    (found,) = check(environment, names=("budgets",), tasks=2, plays=2, few=2)
    assert "speller's prompts hold 2 words that the vocabulary lacks" in found.evidence
    assert all(repr(word) in found.evidence for word in words)
    (sound,) = check(faulty_games.team(), names=("budgets",), tasks=2, plays=2, few=2)
    assert "lacks" not in sound.evidence  # its bytes spell everything


def test_check_prints_a_report_with_the_first_prompt_of_each_role_and_ends_with_0_for_a_sound_team(capsys):
    assert main([f"{HERE / 'faulty_games.py'}:team", "--tasks=2", "--plays=2", "--few=2", "--held_out=16"]) == 0
    said = capsys.readouterr().out
    assert "all 14 checks passed" in said
    assert said.count("--- the first prompt of speller") == said.count("Backwards: ") == 1
    assert main(["no_such_game"]) == 2
    assert "unknown game 'no_such_game'" in capsys.readouterr().err


def test_a_game_with_one_task_in_every_split_is_noted_and_not_failed():
    (one,) = check(hosted(make_game("matrix"), jax.random.key(0)), names=("splits",), held_out=2)
    assert (one.status, one.law) == ("note", 12)
    assert "there is one task" in one.evidence


def test_a_zero_sum_game_that_is_none_fails_and_sizes_out_of_range_are_refused():
    found = {one.name: one for one in check(faulty_games.team(), names=("bounds",), tasks=2, plays=2, few=2, zero_sum=True)}
    assert found["bounds"].status == "fail"
    assert "declared zero-sum" in found["bounds"].evidence
    with pytest.raises(CheckError, match="at least 2 tasks"):
        Subject(faulty_games.team(), tasks=1)


def test_junk_never_exceeds_a_roles_budget():
    environment = faulty_games.team()
    for says in battery(environment.renderer).values():
        plays = Subject(environment).play(environment.tasks("train", 0, 1), says)
        calls = [call for one in plays for path in one.trajectories for call in path.calls]
        assert all(len(call.text.encode()) < environment.workflow.roles[call.role].max_tokens * 3 for call in calls)


def test_junk_of_ids_is_heard_within_a_roles_budget():
    environment = hosted(make_game("sokoban"), jax.random.key(0))  # its prompts are longer than its responses
    for name, says in battery(environment.renderer).items():
        (episode,) = Subject(environment).play(environment.tasks("train", 0, 1), says)
        assert not episode.aborted, name
        calls = episode.trajectories[0].calls
        assert all(0 < call.tokens.size <= environment.workflow.roles[call.role].max_tokens < len(call.prompt_ids) for call in calls), name


def test_a_hidden_value_that_all_tasks_share_tells_no_task():
    def constant(split, first, count):
        return [dataclasses.replace(task, hidden={"answer": "How"}) for task in faulty_games.draw(split, first, count)]

    (found,) = check(faulty_games.team(draw=constant), names=("secrets",), tasks=4, plays=2, few=2)
    assert (found.status, "no prompt tells a hidden value" in found.evidence) == ("pass", True)


@pytest.mark.parametrize(
    ("open_fields", "status", "words"),
    [
        (lambda first, second, n: {"word": f"{first} or {second}", "hint": ""}, "fail", "show the hidden 'answer'"),
        (lambda first, second, n: {"word": (first, second)[n % 2], "hint": (second, first)[n % 2]}, "pass", "no prompt tells"),
        (lambda first, second, n: {"word": [first, {"b": second}], "hint": ""}, "pass", "no prompt tells"),
        (lambda first, second, n: {"word": first, "hint": second}, "warn", "the open field 'hint' is the hidden 'answer' in every task"),
    ],
)
def test_an_answer_that_is_an_open_value_of_its_task_may_be_read(open_fields, status, words):
    """Which is larger, a or b, is a sound task; where it is always b, that is told, and so is an answer that an open text mentions."""

    def choices(split, first, count):
        return [Task(n, open_fields(100 + n, 5000 + n, n), {"answer": str(5000 + n)}, split) for n in range(first, first + count)]

    (finding,) = check(faulty_games.team(draw=choices, script=lambda turn: "a"), names=("secrets",), tasks=8, plays=2, few=2)
    assert finding.status == status
    assert words in finding.evidence


@pytest.mark.parametrize(("characters", "status"), [(128, "pass"), (129, "fail")])
def test_where_models_bring_their_vocabulary_a_script_s_tokens_are_estimated(characters, status):
    team = faulty_games.team(script=lambda turn: "1" * (characters if turn.role.name == "speller" else 1))
    (finding,) = check(dataclasses.replace(team, renderer=None), names=("budgets",), tasks=2, plays=2, few=2)
    assert finding.status == status
    assert ("said about 32 of 32 tokens" if status == "pass" else "says about 33 tokens, 32 are allowed") in finding.evidence
    (finding,) = check(dataclasses.replace(team, renderer=None, script=None, random_player=None), names=("budgets",), tasks=2, few=2)
    assert (finding.status, "said" in finding.evidence) == ("pass", False)  # nobody spoke


def test_a_fault_that_stops_several_checks_is_told_once():
    def broken(turn):
        raise KeyError(f"no hint for task {turn.seed[1]}, asked in request {turn.seed[3]}")

    environment = dataclasses.replace(make_game("notes"), script=broken)
    found = check(environment, tasks=2, plays=2, few=2, held_out=2)
    failing = [one for one in found if one.status == "fail"]
    assert len(failing) > 3
    assert len({one.evidence for one in failing}) == 1
    text = report_text(found)
    assert text.count("no hint for task") == 1
    assert all(one.name in text for one in failing)
    assert f"{len(failing)} of {len(found)} checks failed" in text


def test_a_report_counts_the_companions_of_a_failed_check_and_the_laws_that_are_broken():
    found = [
        Finding("forks", 4, "fail", "it raised"), Finding("pay", 10, "pass", "all are paid"), Finding("groups", 3, "fail", "it raised"),
        Finding("teacher", 14, "note", "there is none"), Finding("junk", 4, "fail", "another fault"),
    ]  # fmt: skip
    text = report_text(found)
    assert "it raised (the same in 1 more: groups)" in text
    assert text.splitlines()[-1] == "3 of 5 checks failed: law 3, law 4"


@pytest.mark.parametrize("value", ["gold", ("gold", "silver"), ["gold"], {"a": ("gold",), "b": [["gold"]]}])
def test_nonces_are_planted_wherever_a_hidden_text_lies(value):
    planted = _planted(Task(3, {}, {"answer": value, "number": 7}))
    texts = str(value).count("gold") + str(value).count("silver")
    assert str(planted.hidden["answer"]).count("zq3xanswervk") == texts
    assert type(planted.hidden["answer"]) is type(value)
    assert planted.hidden["number"] == 7
