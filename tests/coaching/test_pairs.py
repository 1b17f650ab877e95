"""What a coach that trains is paid for: pairs of actions of one task and role, whose plays ended differently."""

import dataclasses
import functools

import coach_lab as lab
import pytest

from marl_llm.coaching import coached, rubric_coach
from marl_llm.coaching.pairs import Judged, judged, rivals, share_right
from marl_llm.coaching.small import views_of


@functools.cache
def view(role):
    seen = views_of(lab.play(lab.team()), "end")[0]
    return dataclasses.replace(seen, call=dataclasses.replace(seen.call, role=role))


def action(brief, score, outcome, task=0, role="a"):
    return Judged(task, view(role), brief, float(score), float(outcome))


def paid(actions):
    known = [one.score for one in actions]
    pairs = [(one.score, *([known[i] for i in side] for side in sides)) for one, sides in zip(actions, rivals(actions)) if any(sides)]
    return [share_right(*one) for one in pairs]


BRIEFS = [("good", 1), ("bad", 0), ("good", 1), ("worse", 0)]


@pytest.mark.parametrize(
    ("says", "want"),
    [
        (lambda brief: 10, 0.0),  # 10 to everything: a tie is no order
        (lambda brief: {"good": 9, "bad": 3, "worse": 1}[brief], 1.0),
        (lambda brief: {"good": 1, "bad": 3, "worse": 9}[brief], 0.0),
        (lambda brief: {"good": 5, "bad": 3, "worse": 9}[brief], 0.5),
    ],
)
def test_a_coach_is_paid_the_share_of_pairs_that_it_orders_and_nothing_for_saying_ten_to_everything(says, want):
    found = paid([action(brief, says(brief), outcome) for brief, outcome in BRIEFS])
    assert sum(found) / len(found) == want


def test_one_who_leaves_the_crowd_of_tens_is_paid_more_whoever_moves_first():
    """So that saying 10 to everything is no equilibrium: the action of a failed play earns by a lower score at once."""
    assert share_right(9, [10, 10], []) == 1.0
    assert share_right(9, [], [10, 10]) == share_right(10, [10], [10]) == 0.0
    assert share_right(None, [10], []) == 0.0  # a reply that cannot be read is never right
    assert share_right(5, [], []) == 0.0


def test_only_actions_of_one_task_and_role_that_can_be_told_apart_are_compared():
    actions = [
        action("good", 9, 1), action("bad", 1, 0), action("good", 9, 0), action("bad", 1, 0, task=1), action("bad", 1, 0, role="b"),
        action("other", 5, 1),
    ]  # fmt: skip
    assert rivals(actions) == [([], [1]), ([0, 5], []), ([5], []), ([], []), ([], []), ([], [1, 2])]


def test_actions_come_with_their_brief_their_score_and_how_their_play_ended():
    guide = lab.guide(brief=lambda view: f"{view.call.role} {len(view.later)} later")
    metric = {"first": lambda path: float(path.calls[0].seed[1] == 0)}
    rollout = lab.play(coached(lab.team(metrics=metric), rubric_coach(guide), guide), n=2)
    found = judged(rollout, "first", guide, "end")
    whose = [(one.task, one.view.call.role, one.score, one.outcome) for one in found[:3]]
    assert whose == [(0, "a", 8, 1), (0, "a", 8, 1), (0, "b", 6.5, 1)]
    assert [one.outcome for one in found[3:]] == [0, 0, 0]
    assert {one.brief for one in found} == {"a 6 later", "a 3 later", "b 0 later"}
    assert {one.brief for one in judged(rollout, "first", guide, "action")} == {"a 0 later", "b 0 later"}


@pytest.mark.parametrize("outcomes", [(1.0, 0.0, 0.5, 0.25), (0.5, 1.0, 0.0, 0.25), (0.0, 0.0, 1.0, 1.0)])
def test_an_action_on_several_paths_has_the_mean_of_their_outcomes_in_whatever_order_they_come(outcomes):
    guide = lab.guide(brief=lambda view: view.call.text)
    rollout = lab.play(coached(lab.team(), rubric_coach(guide), guide), n=2)
    shared, alone = rollout.trajectories
    ends = iter(outcomes)
    workflow = dataclasses.replace(rollout.workflow, metrics={"end": lambda path: next(ends)})
    episodes = (dataclasses.replace(rollout.episodes[0], trajectories=(shared,) * 3), rollout.episodes[1])
    found = judged(dataclasses.replace(rollout, workflow=workflow, episodes=episodes), "end", guide, "end")
    mean = sum(outcomes[:3]) / 3
    assert [(one.task, one.outcome) for one in found] == [(0, mean)] * len(shared.calls) + [(1, outcomes[3])] * len(alone.calls)
