"""Scores of actions: asked once per action, awaited before the play ends, stored; and what rewards pay, computed once and read by all."""

import asyncio

import pytest
from wordy import SPEECH, Says

from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import (
    Controller,
    Role,
    Score,
    Scorer,
    Task,
    Workflow,
    WorkflowError,
    compute,
    each,
    plain,
    repeat,
    sequence,
    shared,
    together,
)
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import broadcast, scored
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import from_json, read_trajectories, report_episodes, write_trajectories


def role(name, prompt="{question}"):
    return Role(name, f"{name}: {prompt}", parse=plain(name), writes={name: "?"})


def echo(prompt, request):
    return prompt.split(": ", 1)[1] + str(request.seed[-1])


class Judge:
    """A scorer that keeps what it saw."""

    def __init__(self, score=lambda view: float(len(view.call.text)), delay=0.0):
        self.views, self.score, self.delay = [], score, delay

    async def __call__(self, view):
        self.views.append(view)
        await asyncio.sleep(self.delay)
        found = self.score(view)
        return Score(found, reason=f"of {view.call.role}") if isinstance(found, float) else found


def team(judge, rewards=None, **options):
    length = compute(lambda a, gold: len(a) + len(gold), "n", name="length")
    body = sequence(repeat(role("a"), length, at_most=2), role("b", "{a}"))
    rewards = (scored("judge", weight=0.1),) if rewards is None else rewards
    return Workflow("w", body, ("question",), ("gold",), rewards=rewards, scorers=(Scorer("judge", judge, **options),), score="at_end")


def play(workflow, n=2, **options):
    tasks = [Task(i, {"question": f"q{i}"}, {"gold": "secret"}) for i in range(n)]
    with Controller(workflow, shared(workflow), Says(echo), SPEECH, **options) as controller:
        return controller.play(tasks)


@pytest.mark.parametrize("when", ["action", "end"])
def test_every_action_is_scored_once_and_paid_what_was_said_of_it(when):
    judge = Judge()
    rollout = play(team(judge, when=when))
    table = sample_table(rollout)
    assert len(judge.views) == len(table) == 6
    for row in table.samples:
        assert row.components == {"judge": pytest.approx(0.1 * len(row.call.text))}
        assert row.team == 0.0
    for way in rollout.trajectories:
        assert {call.id: way.scores[call.id]["judge"].reason for call in way.calls} == {call.id: f"of {call.role}" for call in way.calls}


def test_a_scorer_at_the_end_sees_what_followed_and_no_scorer_sees_hidden_fields_unless_it_may():
    judge, early, trusted = Judge(), Judge(), Judge()
    play(team(judge), n=1)
    play(team(early, when="action"), n=1)
    play(team(trusted, truth="all"), n=1)
    first = judge.views[0]
    assert (first.call.role, first.role.name, first.earlier) == ("a", "a", ())
    assert [event.node for event in first.later] == ["length", "a", "length", "b"]
    assert first.task == {"question": "q0"}
    assert first.outcome["b"]
    assert {"gold", "n"}.isdisjoint({**first.outcome, **first.before, **first.after})
    assert all("n" not in event.writes for view in judge.views for event in (*view.earlier, *view.later))
    assert first.truth == {}
    assert trusted.views[0].truth == {"gold": "secret", "n": trusted.views[0].outcome["n"]}
    last = early.views[-1]
    assert (last.later, last.outcome, [event.node for event in last.earlier]) == ((), {}, ["a", "length", "a", "length"])


@pytest.mark.parametrize("when", ["action", "end"])
def test_what_ran_beside_an_action_was_not_before_it(when):
    judge = Judge()
    several = each("items", "item", role("c", "{item}"), {"c": "all"}, at_most=2)
    body = sequence(role("a"), together(role("b"), several), role("d", "{b}"))
    scorers = (Scorer("judge", judge, when=when),)
    play(Workflow("w", body, ("question",), ("gold",), start={"items": ("x", "y")}, scorers=scorers), n=1)
    assert [(view.call.role, [name for name in "abcd" if name in view.before]) for view in judge.views] == [
        ("a", []), ("b", ["a"]), ("c", ["a"]), ("c", ["a"]), ("d", ["a", "b", "c"]),
    ]  # fmt: skip


def test_a_scorer_at_the_action_is_never_told_how_the_play_ended():
    """Also of the last action, about which it is asked when the play is over."""
    judge = Judge()
    play(team(judge, when="action", result=lambda way: 1.0))
    assert len(judge.views) == 6
    assert {view.result for view in judge.views} == {None}


def test_only_the_named_roles_are_scored():
    judge = Judge()
    table = sample_table(play(team(judge, roles=("b",)), n=1))
    assert [view.call.role for view in judge.views] == ["b"]
    assert [row.components for row in table.samples[:2]] == [{}, {}]


def test_an_action_on_several_trajectories_is_asked_about_once():
    judge = Judge()
    rollout = play(team(judge), n=1, branching={"a": 2})
    calls = {call.id for way in rollout.trajectories for call in way.calls}
    assert len(rollout.trajectories) == 4
    assert sorted(view.call.id for view in judge.views) == sorted(calls)


def test_candidates_that_are_scored_when_made_wait_for_their_score():
    judge = Judge(lambda view: float(view.call.seed[-1]), delay=0.001)
    workflow = Workflow("w", role("a"), ("question",), rewards=(scored("judge"),), scorers=(Scorer("judge", judge, when="action"),))
    with Controller(workflow, shared(workflow), Says(echo), SPEECH, branching={"a": 3}, pick="greedy") as controller:
        rollout = controller.play([Task(0, {"question": "q"})])
    assert rollout.trajectories[0].calls[0].choice == 2
    assert [one.earned[one.calls[-1].id].local for one in rollout.episodes[0].candidates] == [0.0, 1.0]
    late = Workflow("w", role("a"), ("question",), rewards=(scored("judge"),), scorers=(Scorer("judge", judge),))
    with pytest.raises(WorkflowError, match="pays 'a' by the scorer 'judge', which is asked at the end.*score='at_end'"):
        Controller(late, shared(late), Says(echo), SPEECH, branching={"a": 3}, pick="greedy")


def with_value(score, value):
    """The score with another value, whatever type checkers say."""
    object.__setattr__(score, "value", value)
    return score


async def never(view):
    await asyncio.sleep(60)


FAILURES = {
    "an exception": (Judge(lambda view: 1 / 0), "scorer", "ZeroDivisionError"),
    "a lost connection": (Judge(lambda view: (_ for _ in ()).throw(ConnectionError("gone"))), "unavailable", "gone"),
    "a failed result": (Judge(lambda view: failed(FailureKind.REFUSED, "over the cap", 0.0)), "refused", "over the cap"),
    "no number": (Judge(lambda view: float("nan")), "scorer", "must be a Score of a finite number"),
    "a truth value": (Judge(lambda view: Score(True)), "scorer", "must be a Score of a finite number"),
    "a text": (Judge(lambda view: "7"), "scorer", "must be a Score of a finite number"),
    "a number as text": (Judge(lambda view: with_value(Score(1.0), "7")), "scorer", "must be a Score of a finite number"),
    "several numbers": (Judge(lambda view: with_value(Score(1.0), [7])), "scorer", "must be a Score of a finite number"),
    "a number without end": (Judge(lambda view: Score(10**5000)), "scorer", "must be a Score of a finite number"),
    "too late": (never, "deadline", "no score of .* within 0.05 s"),
}


@pytest.mark.parametrize("when", ["action", "end"])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_scorer_that_fails_aborts_the_play_and_is_counted_never_a_middle_score(kind, when):
    broken, counted, message = FAILURES[kind]

    async def ask(view):
        return await broken(view) if view.task["question"] == "q1" and view.call.role == "a" else Score(1.0)

    rollout = play(team(ask, when=when, timeout_s=0.05), n=3, attempts=2)
    assert [episode.aborted for episode in rollout.episodes] == [False, True, False]
    failures = rollout.episodes[1].failures
    assert {(failure.node, failure.kind) for failure in failures} == {("scorer judge", counted)}
    table = sample_table(rollout)
    figures = rollout_metrics(rollout, table)
    assert figures[f"failed_{counted}"] == figures["scorer/judge/failed"] == len(failures)
    assert (figures["scorer/judge/calls"], figures["scorer/judge/value"]) == (6.0, 1.0)
    assert all(row.excluded == "aborted" for row in table.samples if row.instance == 1)
    with pytest.raises(RolloutError, match=message):
        play(team(lambda view: broken(view), when=when, timeout_s=0.05), n=1)


@pytest.mark.parametrize("option", [{"result": lambda path: 10**400}, {"result": lambda path: None}, {"history": lambda: 1 / 0}])
def test_a_scorer_whose_author_fails_is_named(option):
    with pytest.raises(WorkflowError, match="scorer 'judge': its result or history raised (Overflow|Type|ZeroDivision)Error"):
        play(team(Judge(), **option), n=1)


def test_a_result_of_a_tool_is_a_score_too():
    rollout = play(team(Judge(lambda view: success(Score(3.0), 0.0))), n=1)
    assert [row.local for row in sample_table(rollout).samples] == pytest.approx([0.3] * 3)


def test_scores_are_written_as_events_read_again_and_no_replay_asks_anybody(tmp_path):
    judge = Judge()
    workflow = team(judge)
    rollout = play(workflow)
    write_trajectories(tmp_path, rollout)
    asked = len(judge.views)
    for line, episode in zip(read_trajectories(tmp_path), rollout.episodes):
        said = [event for event in line["events"] if event["kind"] == "score"]
        assert [event["parents"] for event in said] == [[call.id] for call in episode.trajectories[0].calls]
        found = from_json(line)
        again = replay(line, workflow, shared(workflow), SPEECH)
        assert found.trajectories[0].scores == again.trajectories[0].scores == episode.trajectories[0].scores
        assert found.trajectories[0].earned == again.trajectories[0].earned == episode.trajectories[0].earned
    assert len(judge.views) == asked


def test_what_a_trajectory_earned_is_computed_once_whoever_reads_it(tmp_path):
    asked = []

    def counted(way):
        asked.append(way.branch)
        return broadcast(lambda way: 1.0)(way)

    for branching, pick, ways in (({}, None, 1), ({"a": 2}, None, 4), ({"a": 2}, "greedy", 3)):
        asked.clear()
        rollout = play(team(Judge(), rewards=(counted,)), n=1, branching=branching, pick=pick)
        table = sample_table(rollout)
        rollout_metrics(rollout, table)
        write_trajectories(tmp_path, rollout)
        list(report_episodes(rollout, table))
        assert len(asked) == len(rollout.trajectories) == ways


def test_scorers_that_cannot_be_are_refused():
    one = Scorer("judge", Judge())
    refused = [
        (lambda: Scorer("x", Judge(), when="later"), "when='later' is unknown; choose one of action, end"),
        (lambda: Scorer("x", Judge(), timeout_s=0), "timeout_s=0 must be above 0"),
        (lambda: Workflow("w", role("a"), ("question",), scorers=(one, one)), "two scorers are called 'judge'"),
        (lambda: team(Judge(), roles=("c",)), "scores the role 'c'"),
        (lambda: team(Judge(), rewards=(scored("jugde"),)), "reads the scorer 'jugde'.*did you mean 'judge'"),
    ]
    for build, message in refused:
        with pytest.raises(WorkflowError, match=message):
            build()
