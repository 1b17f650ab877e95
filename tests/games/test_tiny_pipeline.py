"""The small data pipeline: programs that run on shared files, who is to blame when they fail, and what cannot be gamed."""

import asyncio
import collections
import dataclasses
import functools
import io
import random
import types

import numpy as np
import pytest

from benchmarks.blame import of_rubric, right
from benchmarks.pipeline_faults import FAULTS, faulty_player
from marl_llm.cli.coach import scripted
from marl_llm.coaching import coached, rubric_coach
from marl_llm.coaching.small import rubric_value, views_of
from marl_llm.games import make_game
from marl_llm.games.pipeline.environments import LIMITS, outcome_cap, read_turns
from marl_llm.games.pipeline.rubric import FileFacts, actions_of, blame
from marl_llm.games.pipeline.runs import run_in_workspace, texts_of
from marl_llm.games.pipeline.statements import REQUIRED, STATEMENTS, perfect_player, pipeline_tokenizer
from marl_llm.games.pipeline.tables import (
    SHARES,
    array_faults,
    draw_generator,
    generator_text,
    read_array,
    submission_fault,
    table_task,
    well_made,
)
from marl_llm.tools.sandbox import Workspace, default_sandbox
from marl_llm.workflows import Assignment, Controller, Scripted
from marl_llm.workflows.metrics import rollout_metrics, team_metrics
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.splits import split_of
from marl_llm.workflows.storage import from_json, read_trajectories, write_trajectories

GOOD = "load fill_mean scale save_xtrain save_ytrain save_xtest"


@functools.cache
def environment(**options):
    return make_game("tiny_pipeline", **options)


def play(player, tasks, when="end", truth="none", **options):
    found = environment(**options)
    team = coached(found.workflow, rubric_coach(found.guide), found.guide, when=when, truth=truth)
    cast = Assignment(dict.fromkeys(team.roles, "script"), {"script": Scripted(player)})
    with Controller(team, cast, None, found.renderer) as controller:
        return controller.play(tasks, 0)


def scores(episode):
    path = episode.trajectories[0]
    return {call.role: path.scores[call.id]["coach"].value for call in path.calls}


def tasks(kind=None, count=2, split="test"):
    found = environment().tasks(split, 0, 12)
    return [task for task in found if kind in (None, task.stratum)][:count]


# --- the environment ----------------------------------------------------------------------------------------------------------------------


def test_a_generator_belongs_to_one_split_and_tables_are_the_same_at_every_call():
    seen = {split_of(generator_text(*draw_generator(random.Random(i))), SHARES) for i in range(200)}
    assert seen == set(SHARES)
    texts = collections.defaultdict(set)
    for split in SHARES:
        for task in environment().tasks(split, 0, 15):
            texts[split].add(task.fields["given"].files()["train.csv"])
    assert len(set.union(*texts.values())) == sum(map(len, texts.values())) == 45
    again = table_task("test", 0, 3)
    assert (again.fields, again.hidden) == (environment().tasks("test", 3, 1)[0].fields, environment().tasks("test", 3, 1)[0].hidden)


def test_every_piece_is_one_token():
    tokenizer = pipeline_tokenizer()
    for statements in STATEMENTS.values():
        for piece in statements:
            assert len(tokenizer.encode(f"{piece} {piece}")) == 2
            assert tokenizer.decode(tokenizer.encode(f"{piece} save")) == f"{piece} save"


def test_the_perfect_team_succeeds_and_the_careless_one_in_about_half_of_its_plays():
    rollout = play(perfect_player, tasks(count=5))
    found = team_metrics(rollout)
    assert found["success"] == [1.0] * 5
    assert set(found["success_classification"]) | set(found["success_regression"]) == {1.0}
    assert np.mean(found["raw_auc"]) > 0.9
    assert np.mean(found["raw_rmse"]) < 0.15
    half = team_metrics(play(environment().script, environment().tasks("train", 0, 24)))["success"]
    assert 0.3 < np.mean(half) < 0.65


def test_a_metric_of_another_kind_is_left_out_and_a_raw_one_without_success():
    rollout = play(faulty_player(FAULTS[0]), tasks("regression"))
    figures = rollout_metrics(rollout, sample_table(rollout))
    assert figures["team/fair_rmse"] == 0.5
    assert not {"team/raw_rmse", "team/fair_accuracy", "team/success_classification"} & set(figures)


def test_the_files_of_a_play_lie_beside_its_line(tmp_path):
    rollout = play(perfect_player, tasks(count=1))
    write_trajectories(tmp_path, rollout)
    path = from_json(read_trajectories(tmp_path)[0], tmp_path).trajectories[0]
    assert path.fields["files"] == rollout.trajectories[0].fields["files"]
    assert "submission.csv" in path.fields["files"].sizes()


def test_equal_programs_on_the_files_that_they_name_run_once():
    class Counting:
        def __init__(self):
            self.calls = 0

        async def arun(self, submission):
            self.calls += 1
            return await default_sandbox().arun(submission)

    sandbox = Counting()
    run = run_in_workspace("numpy", LIMITS, sandbox, only_named=True)
    code = 'open("b.txt", "w").write(open("a.txt").read() * 2)  # c.txt'

    async def all_of_them():
        return [(await run(code, Workspace.from_files({"a.txt": "x", "c.txt": other}))).outcome() for other in "yz"]

    first, second = asyncio.run(all_of_them())
    assert sandbox.calls == 1
    assert first["files"].files() == {"c.txt": b"y", "a.txt": b"x", "b.txt": b"xx"}
    assert second["files"].files()["c.txt"] == b"z"


# --- blame --------------------------------------------------------------------------------------------------------------------------------


def test_twelve_injected_faults_are_blamed_on_the_responsible_action_at_the_end_and_not_all_at_the_action():
    found = of_rubric(1, environment())
    assert found["end"]["faults"] == {fault.name: 1.0 for fault in FAULTS}
    assert len(FAULTS) == found["end"]["plays"] == 12
    missed = [name for name, share in found["action"]["faults"].items() if share < 1]
    assert missed == ["leaves gaps", "drops rows to predict", "drops rows of X alone", "submits scores for probabilities"]


def test_a_play_is_blamed_rightly_where_the_responsible_action_alone_is_lowest():
    views = [types.SimpleNamespace(call=types.SimpleNamespace(role=role)) for role in ("engineer", "modeler", "analyst")]
    for scores, expected in (([2, 9, 8], True), ([2, 2, 8], False), ([9, 2, 8], False), ([2, None, 8], False)):
        assert right("engineer", views, scores) == expected


# --- what a small coach reads -------------------------------------------------------------------------------------------------------------


def briefs(player, count=1, kind="regression", when="end"):
    """(brief, the rubric's score) of every action of plays."""
    guide = environment().guide
    views = views_of(scripted(environment(), player, tasks(kind, count), 1), when)
    return [(guide.brief(view), rubric_value(view, guide)) for view in views]


def test_a_brief_tells_files_programs_and_complaints():
    forgets = dict(zip([fault.name for fault in FAULTS], FAULTS))["forgets X_test"]
    said = [brief for brief, _ in briefs(faulty_player(forgets))]
    assert said == [
        "engineer ok X_train.npy writes there y_train.npy writes there X_test.npy omits none plain then modeler ok "
        "then analyst error names X_test.npy finds X_test.npy none end none",
        "modeler ok model.npy writes there rich then analyst error names X_test.npy finds X_test.npy none end none",
        "analyst error submission.csv writes none plain names X_test.npy finds X_test.npy none end none",
    ]
    assert briefs(perfect_player)[2] == ("analyst ok submission.csv writes there rich end valid", 9.0)
    gaps = dict(zip([fault.name for fault in FAULTS], FAULTS))["leaves gaps"]
    assert "X_train.npy writes odd" in briefs(faulty_player(gaps))[0][0]
    assert briefs(lambda turn: "save nothing", when="action")[0] == ("engineer illegal", 0.0)


def test_equal_briefs_have_equal_scores_and_few_words():
    seen = collections.defaultdict(set)
    for player in (environment().script, environment().random_player, *map(faulty_player, FAULTS)):
        for brief, score in briefs(player, 4, None):
            seen[brief].add(score)
    assert {brief: scores for brief, scores in seen.items() if len(scores) > 1} == {}
    assert len(seen) > 35
    assert len({word for brief in seen for word in brief.split()}) < 30


@pytest.mark.parametrize(
    ("engineer", "expected"), [(GOOD.replace(" save_xtest", ""), (2, 9, 8)), (GOOD.replace(" save_xtrain", ""), (2, 8, 8))]
)
def test_an_upstream_absence_never_costs_the_one_who_meets_it(engineer, expected):
    rollout = play(lambda turn: engineer if turn.role.name == "engineer" else perfect_player(turn), tasks("regression", 1))
    assert tuple(scores(rollout.episodes[0]).values()) == expected


def test_the_outcome_caps_the_analyst_alone_and_only_with_truth():
    def poor(turn):
        return "load fit_mean save_model" if turn.role.name == "modeler" else perfect_player(turn)

    given = tasks("regression", 1)
    assert scores(play(poor, given).episodes[0]) == {"engineer": 9, "modeler": 8, "analyst": 8}
    known = scores(play(poor, given, truth="last").episodes[0])
    assert known == {"engineer": 9, "modeler": 8, "analyst": 6}


def test_a_repeated_program_costs_and_a_second_turn_can_mend():
    def stubborn(turn):
        return "load fill_mean" if turn.role.name == "engineer" else perfect_player(turn)

    def mends(turn):
        first = turn.role.name == "engineer" and not turn.fields["last"]
        return GOOD.replace(" save_xtest", "") if first else perfect_player(turn)

    given = tasks("regression", 1)
    path = play(stubborn, given, turns="3,1,1").trajectories[0]
    assert [path.scores[call.id]["coach"].value for call in path.by("engineer")] == [2, 1, 0]
    path = play(mends, given, turns="3,1,1").trajectories[0]
    assert [path.scores[call.id]["coach"].value for call in path.by("engineer")] == [6, 9]
    assert path.fields["grade"].problem == ""


# --- attacks ------------------------------------------------------------------------------------------------------------------------------


def run_program(code, files):
    run = run_in_workspace("numpy", LIMITS)
    return asyncio.run(run(code, files)).outcome()


ATTACKS = {
    "prints that it saved": 'print("saved X_train.npy")',
    "an empty file": 'open("X_train.npy", "w").close()',
    "a folder": 'import os; os.mkdir("X_train.npy")',
    "a link": 'import os; os.symlink("train.csv", "X_train.npy")',
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_only_a_file_with_content_is_a_file_that_was_saved(attack):
    found = run_program(ATTACKS[attack], Workspace.from_files({"train.csv": "a\n1\n"}))
    assert found["state"] == "ok"
    assert not found["files"].sizes().get("X_train.npy")


def array_file(header, data=b"\0" * 8):
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x93NUMPY", b"\x80\x04K\x01.", array_file("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"),
        array_file("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}"),
        array_file("{'descr': '<f8', 'fortran_order': False, 'shape': (1048575, 1048575)}"),
        array_file("{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}"),
        array_file("__import__('os').system('true')"), array_file("[" * 100),
    ],
)  # fmt: skip
def test_what_is_no_array_of_numbers_is_never_unpickled_and_is_no_array(data):
    assert read_array(data) is None
    task = tasks(count=1)[0]
    expected = {"X_train.npy": "it is no array of numbers"} if data else {}
    assert array_faults(task.fields["given"], Workspace.from_files({"X_train.npy": data})) == expected


def test_an_array_is_read_as_numpy_reads_it():
    for array in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.ones(4)):
        out = io.BytesIO()
        np.save(out, array)
        np.testing.assert_array_equal(read_array(out.getvalue()), array)


def test_an_error_that_names_a_file_of_another_shifts_no_blame():
    path = play(perfect_player, tasks("regression", 1)).trajectories[0]
    given = path.fields["given"]
    actions = actions_of(path.events, given)
    facts = FileFacts(REQUIRED, array_faults, submission_fault, well_made)
    assert blame(actions, given, facts, over=True) == {}
    lies = {**actions[1].use.writes, "state": "error", "error": "FileNotFoundError: 'X_train.npy'; shapes (60,3) (54,)"}
    actions[1] = dataclasses.replace(actions[1], use=dataclasses.replace(actions[1].use, writes=lies))
    assert list(blame(actions, given, facts, over=False)) == [actions[1].call.id]


def test_a_comment_names_no_file_and_longer_programs_earn_no_more():
    assert texts_of('open("a")  # "b"\nx = "c"\n') == {"a"}
    assert texts_of("(" * 10_000) == frozenset()

    def long(turn):
        return perfect_player(turn).replace("load ", "load raw raw raw ") if turn.role.name == "engineer" else perfect_player(turn)

    given = tasks("regression", 1)
    assert scores(play(long, given).episodes[0]) == scores(play(perfect_player, given).episodes[0])


def test_a_nonce_in_the_answers_appears_in_no_prompt_view_file_or_output():
    nonce = "271828.1828"
    task = tasks("regression", 1)[0]
    answers = {one: float(nonce) if i == 0 else value for i, (one, value) in enumerate(task.hidden["answers"].items())}
    seen = []
    found = environment()
    guide = found.guide
    coach = rubric_coach(guide)

    class Kept:
        async def score(self, view):
            seen.append(view)
            return await coach.score(view)

    team = coached(found.workflow, Kept(), guide, truth="none")
    cast = Assignment(dict.fromkeys(team.roles, "script"), {"script": Scripted(perfect_player)})
    with Controller(team, cast, None, found.renderer) as controller:
        path = controller.play([dataclasses.replace(task, hidden={"answers": answers})], 0).trajectories[0]
    assert len(seen) == 3
    for view in seen:
        assert nonce not in repr(view) + view.call.prompt
        assert outcome_cap(view) is None
        assert "grade" not in view.outcome
    for content in path.fields["files"].files().values():
        assert nonce.encode() not in content
    assert all(nonce not in str(event.writes.get("printed")) for event in path.events)


def test_turns_are_three_numbers():
    assert read_turns("3,5, 2") == (3, 5, 2)
    for text in ("3,5", "3,5,0", "a,b,c", ""):
        with pytest.raises(ValueError, match="three whole numbers"):
            read_turns(text)
