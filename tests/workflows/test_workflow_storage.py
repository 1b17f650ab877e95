"""Trajectories written down, read back and replayed."""

import dataclasses
import json

import numpy as np
import pytest
from wordy import SPEECH, Says

from marl_llm.reporting.episodes import EpisodeWriter, read_episodes, read_tokens
from marl_llm.tools.results import FailureKind, failed
from marl_llm.workflows import (
    Assignment,
    Controller,
    Role,
    Scripted,
    Task,
    Workflow,
    WorkflowError,
    compute,
    each,
    plain,
    repeat,
    sequence,
    shared,
    tool,
)
from marl_llm.workflows.errors import ReplayError
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import broadcast, format_penalty
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import from_json, named, read_trajectories, report_episodes, to_json, write_trajectories
from marl_llm.workflows.trajectory import RoleCall

PARTS = compute(lambda question: ("x", "y"), "parts", name="parts")


def role(name, prompt="{question}"):
    return Role(name, f"{name}: {prompt}", parse=plain(name), writes={name: ""})


def page(a):
    return failed(FailureKind.REFUSED, "no", 0.0) if a.startswith("q2") else a * 2


def team(length=1, prompt="{all}"):
    count = compute(lambda b: len(b) * length, "n", name="count")
    fan = each("parts", "part", sequence(role("e", "{part}{page}")), {"e": "all"}, at_most=2)
    body = sequence(role("a"), tool(page, "page"), PARTS, fan, repeat(role("b", prompt), count, at_most=2))
    return Workflow("w", body, inputs=("question",), rewards=(broadcast(lambda way: way.fields["n"], name="n"), format_penalty()))


def speak(prompt, request):
    return prompt.split(": ", 1)[1][:3] + f"{np.random.default_rng(request.seed).random():.2f}"


def play(workflow=None, n=3, branching=None, **options):
    workflow = workflow or team()
    given = [Task(i, {"question": f"q{i}"}) for i in range(n)]
    with Controller(workflow, shared(workflow), Says(speak), SPEECH, branching) as controller:
        return controller.play(given, 6, **options)


def assert_same(before, after):
    assert [way.branch for way in before.trajectories] == [way.branch for way in after.trajectories]
    for a, b in zip(before.events(), after.events(), strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                np.testing.assert_array_equal(x, y)
            elif field.name not in ("seconds", "messages"):  # which records leave out
                assert x == y, field.name


@pytest.mark.parametrize("branching", [{}, {"a": 2, "b": 2}])
def test_what_is_read_is_what_was_written_and_replays(tmp_path, branching):
    rollout = play(branching=branching, plays=2)
    write_trajectories(tmp_path, rollout)
    lines = read_trajectories(tmp_path)
    assert [line["episode"] for line in lines] == [f"train-6/{i}/{p}" for i in range(3) for p in range(2)]
    assert [line["aborted"] for line in lines] == [False] * 4 + [True] * 2
    for line, episode in zip(lines, rollout.episodes):
        found = from_json(line)
        assert_same(episode, found)
        if episode.aborted:
            assert found.failures == episode.failures
            assert [e.id for e in found.remains] == [e.id for e in episode.remains]
            continue
        again = replay(found, team(), shared(team()), SPEECH, plays=2, branching=branching)
        assert_same(episode, again)
        assert [way.fields for way in again.trajectories] == [way.fields for way in episode.trajectories]
        assert [way.fields for way in found.trajectories] == [way.fields for way in episode.trajectories]


KEYED = [{1: 2}, {"a": 1}, {(0, 1): {2.5: (None,)}, "a": 0}, ({True: "x"},), {"workspace_sha256": None, "pairs": ((1, 2),)}]


@pytest.mark.parametrize("value", KEYED, ids=str)
def test_keys_of_a_field_come_back_as_they_were(value, tmp_path):
    workflow = Workflow("w", sequence(role("a"), compute(lambda a: value, "d", name="count")), ("question",))
    rollout = play(workflow, n=1)
    write_trajectories(tmp_path, rollout)
    (line,) = read_trajectories(tmp_path)
    assert repr(from_json(line).trajectories[0].fields["d"]) == repr(value)
    assert replay(line, workflow, rollout.assignment, SPEECH).trajectories


def test_a_task_comes_back_whole():
    workflow, task = team(), Task(4, {"question": "q"}, {}, "test", "regression", "template 3")
    with Controller(workflow, shared(workflow), Says(speak), SPEECH) as controller:
        rollout = controller.play([task])
    assert from_json(json.loads(json.dumps(to_json(rollout, rollout.episodes[0])))).task == task


@pytest.mark.parametrize("branching", [{}, {"a": 2, "b": 2}])
def test_an_episode_is_found_by_the_name_of_any_of_its_plays(branching):
    rollout = play(branching=branching, plays=2)
    reports = {report["episode"] for report, _ in report_episodes(rollout, sample_table(rollout, training=()), "train")}
    assert named(rollout.episodes, "train", reports) == tuple(rollout.episodes)
    assert named(rollout.episodes, "after", reports) == named(rollout.episodes, "train", set()) == ()
    found = [named(rollout.episodes, "train", {name}) for name in sorted(reports)]
    assert all(len(one) == 1 for one in found)
    assert {one.name for (one,) in found} == {one.name for one in rollout.episodes}


def test_the_graph_and_the_pay_are_in_the_lines(tmp_path):
    rollout = play(n=1)
    write_trajectories(tmp_path / "some.jsonl", rollout)
    (line,) = read_trajectories(tmp_path / "some.jsonl")
    seen = set()
    for event in line["events"]:
        assert set(event["parents"]) <= seen
        seen.add(event["id"])
        if event["kind"] == "role":
            assert event["earned"]["components"]["n"] == event["earned"]["team"] == 7
    assert line["paths"][0]["events"] == [event["id"] for event in line["events"]]


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (team(prompt="{all} {a}"), "the prompt is another than the recorded one"),
        (team(length=2), "count:.*: computed {'n': 14}, and once {'n': 7}"),
        (Workflow("w", sequence(role("a"), role("b")), inputs=("question",)), "never given|is not what|another than the recorded"),
    ],
)
def test_a_workflow_that_means_something_else_does_not_replay(workflow, message):
    with pytest.raises(ReplayError, match=message):
        replay(play(n=1).episodes[0], workflow, shared(workflow), SPEECH)


def test_a_shorter_workflow_says_what_is_missing():
    short = Workflow("w", sequence(role("a"), tool(page, "page")), inputs=("question",))
    with pytest.raises(ReplayError, match="first that is missing is parts"):
        replay(play(n=1).episodes[0], short, shared(short), SPEECH)


def test_aborted_and_scripted_plays_cannot_be_replayed():
    with pytest.raises(ReplayError, match="is aborted"):
        replay(play().episodes[2], team(), shared(team()), SPEECH)
    one = Workflow("w", role("a"), inputs=("question",))
    played_by = Assignment({"a": "s"}, {"s": Scripted(lambda turn: "x")})
    with Controller(one, played_by, None, SPEECH) as controller:
        (episode,) = controller.play([Task(0, {"question": "q"})]).episodes
    with pytest.raises(ReplayError, match="no policy"):
        replay(episode, one, played_by, SPEECH)


def test_what_json_cannot_hold_is_named(tmp_path):
    odd = Workflow("w", sequence(role("a"), compute(lambda a: {1, 2}, "x", name="sets")), inputs=("question",))
    with pytest.raises(WorkflowError, match=r"6/0/0 cannot be written: the output of 'sets', field 'x', holds set"):
        write_trajectories(tmp_path, play(odd, n=1))


def test_the_report_takes_them(tmp_path):
    rollout = play(branching={"b": 2})
    table = sample_table(rollout)
    with EpisodeWriter(tmp_path) as writer:
        for episode, tokens in report_episodes(rollout, table):
            writer.write(episode, tokens)
    episodes, tokens = read_episodes(tmp_path), read_tokens(tmp_path)
    assert len(episodes) == len(tokens) == 2 * 4 + 1
    assert [e["status"] for e in episodes].count("aborted") == 1
    forked = [step for step in episodes[0]["steps"] if step["role"] == "b"]
    assert [len(step["responses"]) for step in forked] == [2, 2]
    assert all(sum(r["chosen"] for r in step["responses"]) == 1 for step in episodes[0]["steps"])
    way = rollout.trajectories[0]
    assert [r["text"] for s in episodes[0]["steps"] for r in s["responses"] if r["chosen"]] == [c.text for c in way.calls]
    assert json.dumps(episodes)
    assert len({e["episode"] for e in episodes}) == 9
    assert sum(isinstance(e, RoleCall) for e in way.events) == len(episodes[0]["steps"])


SEED_STEP = 2**30  # as evaluations have it


def evaluated(passed, hidden=None, step=SEED_STEP):
    """Three plays of which the last is aborted; `passed` is the headline of the others."""
    whole = team()
    workflow = Workflow(
        "w", whole.body, inputs=("question",), hidden=("gold",), rewards=whole.rewards, metrics={"all_passed": lambda way: passed}
    )
    given = [Task(i, {"question": f"q{i}"}, {"gold": hidden or f"gold {i}"}) for i in range(3)]
    with Controller(workflow, shared(workflow), Says(speak), SPEECH) as controller:
        return controller.play(given, step)


@pytest.mark.parametrize(("passed", "status"), [(1.0, "success"), (0.5, "partial"), (0.0, "failed")])
def test_c4_a_recorded_play_has_status_score_gold_and_tools_and_no_step_of_seeds(tmp_path, passed, status):
    rollout = evaluated(passed)
    plays = list(report_episodes(rollout, sample_table(rollout, training=()), "before", headline="all_passed"))
    with EpisodeWriter(tmp_path) as writer:
        for play_, tokens in plays:
            writer.write(play_, tokens)
    first, _, aborted = read_episodes(tmp_path)
    assert str(SEED_STEP) not in (tmp_path / "episodes.jsonl").read_text()
    assert (first["episode"], first["step"], first["when"]) == ("before-0/0", None, "before")
    assert (first["status"], first["headline"], first["score"]) == (status, "all_passed", passed)
    assert first["hidden"] == {"gold": "gold 0"}
    assert "gold" not in first["task"]
    said = [first["steps"][0]["responses"][0]["text"]]
    used = [(use["after"], use["node"], use["turn"], use["writes"]) for use in first["tools"]]
    assert used[:2] == [(1, "page", 0, {"page": said[0] * 2}), (1, "parts", 0, {"parts": ["x", "y"]})]
    assert used[2:] == [(4, "count", 1, {"n": 7}), (5, "count", 2, {"n": 7})]
    assert (aborted["status"], "score" in aborted, len(aborted["steps"])) == ("aborted", False, 1)
    assert "page: refused: no" in aborted["failures"][0]
    at = [play_["step"] for play_, _ in report_episodes(rollout, sample_table(rollout, training=()), "after", step=7)]
    assert at == [7, 7, 7]


def test_c4_what_a_report_cannot_hold_is_named():
    rollout = evaluated(1.0, hidden={1, 2})
    with pytest.raises(WorkflowError, match="task 0, hidden, field 'gold', cannot be written: set"):
        list(report_episodes(rollout, sample_table(rollout, training=()), "after"))
    with pytest.raises(WorkflowError, match="headline 'f2' is no metric of the workflow; it has all_passed"):
        list(report_episodes(rollout, sample_table(rollout, training=()), "after", headline="f2"))


def test_c4_graphs_of_plays_before_and_after_training_are_both_kept_and_replay(tmp_path):
    rollout = evaluated(1.0)
    for when, step in (("before", 0), ("after", 4)):
        write_trajectories(tmp_path, rollout, when, step)
    lines = read_trajectories(tmp_path)
    expected = [(f"{when}-{task}/0", step) for when, step in (("before", 0), ("after", 4)) for task in range(3)]
    assert [(line["episode"], line["step"]) for line in lines] == expected
    assert from_json(lines[0]).step == SEED_STEP
    assert_same(rollout.episodes[0], replay(lines[0], rollout.workflow, shared(rollout.workflow), SPEECH))
