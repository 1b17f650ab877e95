"""Coaches: one path from messages to a score, whoever answers; what is asked, what is read, what a failure is."""

import asyncio

import coach_lab as lab
import pytest

from marl_llm.coaching import (
    ChatCoach,
    Unreadable,
    coach_score,
    coached,
    messages_for,
    of_client,
    of_rubric,
    read_answer,
    rubric_coach,
    write_answer,
)
from marl_llm.coaching.answers import break_labels
from marl_llm.tools.chat import ChatClient, ChatReply, PolicyBackend
from marl_llm.workflows import WorkflowError
from marl_llm.workflows.samples import sample_table


class Kept:
    """A coach that keeps its views, before another one scores."""

    def __init__(self, coach):
        self.coach, self.views = coach, []

    async def score(self, view):
        self.views.append(view)
        return await self.coach.score(view)


def views(answer=lab.echo, when="end", truth="none", **options):
    guide = lab.guide(**options)
    kept = Kept(rubric_coach(guide))
    rollout = lab.play(coached(lab.team(), kept, guide, when=when, truth=truth), answer=answer)
    return kept.views, rollout


@pytest.mark.parametrize("when", ["action", "end"])
def test_every_action_is_asked_once_and_paid_a_tenth_of_its_score_and_kept(when):
    seen, rollout = views(when=when)
    table = sample_table(rollout)
    assert [view.call.id for view in seen] == [row.call.id for row in table.samples]
    assert [row.components for row in table.samples] == [{"coach": pytest.approx(x)} for x in (0.8, 0.8, 0.65)]
    assert [row.team for row in table.samples] == [0.0] * 3
    scores = rollout.trajectories[0].scores
    assert [scores[row.call.id]["coach"].reason for row in table.samples] == [f"said {row.call.text}" for row in table.samples]


@pytest.mark.parametrize("when", ["action", "end"])
def test_a_view_shows_what_the_action_caused_and_its_earlier_actions(when):
    first, second, last = views(when=when)[0]
    assert [use.node for use in first.observations] == ["show", "grade"]
    assert first.after["shown"] == f"seen {first.call.text}"
    assert "shown" not in first.before
    assert (len(first.own_earlier), len(second.own_earlier), last.own_earlier) == (0, 1, ())
    assert [event.node for event in first.later] == ([] if when == "action" else ["show", "grade", "a", "show", "grade", "b"])
    assert first.stratum == "even"


@pytest.mark.parametrize("when", ["action", "end"])
@pytest.mark.parametrize(("truth", "told"), [("none", []), ("last", ["b"]), ("last_role", ["b"]), ("all", ["a", "a", "b"])])
def test_hidden_answers_stand_in_no_view_and_no_prompt_without_truth(when, truth, told):
    seen, _ = views(when=when, truth=truth)
    assert [view.call.role for view in seen if view.truth] == told
    for view in seen:
        text = messages_for(view, lab.guide())[0][1]["content"]
        shown = repr([{n: x for n, x in vars(event).items()} for event in (*view.earlier, *view.later)]) + repr([view.outcome, view.before])
        assert ("nonce-7f3" in text) == ("grade" in text) == bool(view.truth)
        if not view.truth:
            assert "nonce-7f3" not in shown
            assert "grade':" not in shown


@pytest.mark.parametrize(("said", "value"), [
    ("why\nSCORE: 7", 7), ("SCORE: 7.5", 7.5), ("SCORE: 7/10", 7), ("SCORE: 10\n", 10), ("SCORE: 0 / 10", 0), ("SCORE: 7\n\nSCORE: 7.0", 7),
    ("> SCORE: 10\nSCORE: 3", 3), ('he wrote "SCORE: 10"\nSCORE: 3', 3), ("```\nSCORE: 10\n```\nSCORE: 3", 3), ("SCORE:\t4  ", 4),
    ("~~~\nSCORE: 7", 7),
])  # fmt: skip
def test_a_score_is_a_line_of_its_own(said, value):
    assert read_answer(said).value == value


@pytest.mark.parametrize("said", [
    "", "7", "SCORE 7", "SCORE: -7", "SCORE: +7", "SCORE: nan", "SCORE: 11", "SCORE: 10.5", "SCORE: 1e1", "SCORE: 7 points", "SCORE: 7/100",
    "SCORE: 7\nSCORE: 8", "> SCORE: 7", '"SCORE: 7"', "```\nSCORE: 7\n```", "the SCORE: 7", "SCORE: seven", "SCORE: ٧", "ＳＣＯＲＥ: 7",
    "SCORE: 7\nCORRECT: maybe", "CORRECT: yes\nCORRECT: no\nSCORE: 7", "SCORE: 7\nSCORE: -1", "score: 7", "SCORE: 99999",
])  # fmt: skip
def test_what_is_no_score_is_unreadable_never_a_guess(said):
    with pytest.raises(Unreadable):
        read_answer(said)


def test_what_a_rubric_writes_is_read_as_it_was():
    for value, correct, reason in ((7, None, "why"), (0.125, True, ""), (10, False, "the output holds\nSCORE: 3\nCORRECT: yes")):
        said = read_answer(write_answer(value, correct, reason))
        assert (said.value, said.correct, said.reason) == (value, correct, break_labels(reason))
    for bad in (-0.1, 10.1, float("nan"), True, "7"):
        with pytest.raises(ValueError, match="from 0 to 10"):
            write_answer(bad, None, "")


def answering(*replies, **options):
    """A coach of a model that gives these replies in turn, and what it was asked."""
    asked = []

    def policy(messages, _):
        asked.append(messages)
        return ChatReply(replies[min(len(asked), len(replies)) - 1], "stop", 1, 1)

    client = ChatClient(PolicyBackend(policy), concurrency=1)
    return ChatCoach(of_client(client), lab.guide(**options)), asked


def test_an_unreadable_reply_is_asked_for_again_with_the_reason_and_then_is_a_failure():
    view = views()[0][0]
    coach, asked = answering("no idea", "SCORE: 4")
    result = asyncio.run(coach.score(view))
    assert (result.outcome().value, result.attempts) == (4, 2)
    assert asked[1][:2] == asked[0]
    assert asked[1][2] == {"role": "assistant", "content": "no idea"}
    assert "no line of its own" in asked[1][3]["content"]
    coach, asked = answering("SCORE: 12")
    result = asyncio.run(coach.score(view))
    assert (len(asked), result.failure.kind.value, coach.metrics()["unreadable"]) == (2, "bad_reply", 2)
    assert "'12' after 'SCORE:' is no number from 0 to 10" in result.failure.message


def test_arithmetic_caps_what_a_coach_says_and_is_counted():
    view = views()[0][0]
    coach, _ = answering("SCORE: 9", cap=lambda view: 4)
    said = asyncio.run(coach.score(view)).outcome()
    assert (said.value, said.capped, coach.metrics()["capped"]) == (4, True, 1)
    coach, _ = answering("SCORE: 3", cap=lambda view: 4)
    assert asyncio.run(coach.score(view)).outcome().value == 3
    assert coach.metrics()["capped"] == 0


def test_a_rubric_that_gives_no_score_is_named():
    view = views()[0][0]
    for bad in (None, 7, (11, None, ""), (7, "yes", ""), (7, None)):
        with pytest.raises(WorkflowError, match="the rubric gave"):
            asyncio.run(rubric_coach(lab.guide(rubric=lambda view, bad=bad: bad)).score(view))


def test_coaching_that_cannot_be_is_refused():
    guide = lab.guide()
    workflow, coach = lab.team(), rubric_coach(guide)
    refused = [
        (lambda: coached(coached(workflow, coach), coach), "has a coach already"),
        (lambda: coached(lab.team(rewards=(coach_score(0.2),)), coach, weight=0.1), "weight=0.1 would have no effect"),
        (lambda: rubric_coach(lab.guide(rubric=None)), "has no rubric"),
        (lambda: lab.guide(when="later"), "when='later' is unknown"),
        (lambda: ChatCoach(of_rubric(lab.rubric), guide, 0), "format_attempts=0"),
        (lambda: coached(workflow, coach, truth="some"), "truth='some' is unknown"),
        (lambda: coached(workflow, coach, missing="guess"), "missing='guess' is unknown"),
        (lambda: lab.CoachGuide("x", {"a": ""}).check(workflow), "role_texts lacks the role 'b'"),
        (lambda: lab.CoachGuide("x", {"a": "", "b": "", "c": ""}).check(workflow), "there is no role 'c'"),
    ]
    for build, message in refused:
        with pytest.raises(WorkflowError, match=message):
            build()
    own = coached(lab.team(rewards=(coach_score(0.2),)), coach)
    assert [row.local for row in sample_table(lab.play(own)).samples] == pytest.approx([1.6, 1.6, 1.3])
