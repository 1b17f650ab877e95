"""Reward backpropagation: contributions that sum to the outcome, traced from the last action to the first."""

import asyncio
import math

import coach_lab as lab
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_llm.coaching import coached, messages_for
from marl_llm.coaching.backward import GRID, Backward, attributed, counterfactual_coach
from marl_llm.coaching.coach import ChatCoach, of_rubric
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.tools.waiting import waiting
from marl_llm.workflows import WorkflowError
from marl_llm.workflows.trajectory import Score

SHARES = st.lists(st.floats(-1, 1, allow_nan=False), min_size=1, max_size=12)


@given(SHARES, st.sampled_from([-1.0, 1.0, 0.0, -1 / 3, 0.1]))
def test_contributions_sum_to_the_outcome_exactly_and_none_is_against_it(said, outcome):
    shares, error = attributed(said, outcome)
    total = round(outcome / GRID) * GRID
    assert math.fsum(shares) == total
    assert sum(shares) == total  # in any order: all are multiples of the grid
    assert error == pytest.approx(abs(math.fsum(said) - outcome), abs=GRID)
    assert all(share * total >= 0 for share in shares)
    if any(one * total > 0 for one in said):
        assert all(share == 0 for one, share in zip(said, shares) if one * total < 0 and share != max(shares, key=abs))


def test_contributions_keep_their_proportions_and_are_shared_alike_where_there_are_none():
    assert attributed([0.0, -0.5, -0.5], -1.0) == ([0.0, -0.5, -0.5], 0.0)
    assert attributed([0.9, -0.2, -0.6], -1.0)[0] == pytest.approx([0.0, -0.25, -0.75], abs=GRID)
    assert attributed([0.0, 0.0], 1.0) == ([0.5, 0.5], 1.0)


def going_back(said, alpha=0.5, beta=5.0, result=0.0, forward=lab.rubric, **options):
    """(views that the backward coach got, Backward, rollout) of a play whose actions explain `said`, last first."""
    guide, seen, asked = lab.guide(), [], []

    def process(view):
        asked.append(view)
        return forward(view)

    def explains(view):
        seen.append(view)
        return 5 + 5 * said[len(seen) - 1], None, f"because of {view.call.role}{len(seen)}"

    both = [ChatCoach(of_rubric(rubric), guide, 1) for rubric in (process, explains)]
    coach = Backward(*both, alpha, beta)
    workflow = coached(lab.team(), coach, guide, when="end", result=lambda path: result, **options)
    return seen, asked, coach, lab.play(workflow)


def test_a_play_is_traced_from_its_last_action_to_its_first_with_what_is_left_to_explain():
    seen, asked, coach, rollout = going_back([-0.6, 0.5, -0.2])
    (path,) = rollout.trajectories
    assert [view.call.id for view in seen] == [call.id for call in reversed(path.calls)]
    assert "because of b1" in seen[1].residual
    assert "because of b1" in seen[2].residual
    assert "because of a2" in seen[2].residual
    assert seen[0].residual == "The play's result is 0, from 0 (failed) to 1 (as good as can be)."
    assert all(view.later == () and view.outcome == {} and view.result is None for view in asked)  # p knows no outcome
    said = [path.scores[call.id]["coach"] for call in path.calls]
    assert [one.members for one in said] == [(8, pytest.approx(-0.25, abs=GRID)), (8, 0.0), (6.5, pytest.approx(-0.75, abs=GRID))]
    assert [one.value for one in said] == pytest.approx([4 - 1.25, 4.0, 3.25 - 3.75], abs=1e-4)
    assert coach.metrics()["backward_error"] == pytest.approx(0.7)
    text = messages_for(seen[1], lab.guide())[0][1]["content"]
    assert "BEGIN left to explain" in text
    assert "How much of what is left unexplained" in text
    assert "left to explain" not in messages_for(asked[0], lab.guide())[0][1]["content"]


def test_a_contribution_is_not_capped_though_the_action_is():
    """One coach asks in both passes, as the kinds model, endpoint and served do: a cap of 4 would blame whoever brought the success."""
    guide = lab.guide(cap=lambda view: 4)
    coach = ChatCoach(of_rubric(lambda view: (8 if view.residual is None else 10 if view.call.role == "b" else 5, None, "")), guide, 1)
    rollout = lab.play(coached(lab.team(), Backward(coach, coach, 1, 1), guide, when="end", result=lambda path: 1.0))
    (path,) = rollout.trajectories
    assert [path.scores[call.id]["coach"].members for call in path.calls] == [(4, 0.0), (4, 0.0), (4, 1.0)]
    assert coach.metrics()["capped"] == 3
    alone = counterfactual_coach(lab.guide(cap=lambda view: 4, contribution=lambda view: float(view.call.role == "b")))
    shares = lab.play(coached(lab.team(), Backward(coach, alone, 0, 1), guide, when="end", result=lambda path: 1.0)).trajectories[0]
    assert [shares.scores[call.id]["coach"].value for call in shares.calls] == [0.0, 0.0, 1.0]


def test_a_play_whose_action_has_no_score_has_none_and_nobody_waits_for_ever():
    class Silent:
        async def score(self, view):
            return failed(FailureKind.UNAVAILABLE, "gone", 0.0)

    for forward, backward in ((Silent(), None), (None, Silent())):
        good = ChatCoach(of_rubric(lab.rubric), lab.guide(), 1)
        coach = Backward(forward or good, backward or good, 1, 1)
        rollout = lab.play(coached(lab.team(), coach, when="end", result=lambda path: 1.0, missing="mask"))
        assert [score["coach"].missing for score in rollout.trajectories[0].scores.values()] == ["unavailable: gone"] * 3
        assert coach._plays == {}


def test_what_cannot_go_backwards_is_refused():
    good = ChatCoach(of_rubric(lab.rubric), lab.guide(), 1)
    with pytest.raises(WorkflowError, match="alpha=-1"):
        Backward(good, good, -1, 0)
    with pytest.raises(WorkflowError, match="has no contribution"):
        counterfactual_coach(lab.guide())
    with pytest.raises(WorkflowError, match="needs the outcome of the play"):
        lab.play(coached(lab.team(), Backward(good, good, 1, 1), when="end"))


@pytest.mark.parametrize("end", ["cancelled", "closed"])
def test_a_rollout_that_was_given_up_leaves_no_play_to_the_next(end):
    guide, views = lab.guide(), []
    backward = Backward(*[ChatCoach(of_rubric(lab.rubric), guide, 1)] * 2, 0.5, 5.0)

    class Watched:
        async def score(self, view):
            views.append(view)
            return await backward.score(view)

    lab.play(coached(lab.team(), Watched(), guide, when="end", result=lambda path: 1.0))
    loop = asyncio.new_event_loop()
    first = loop.create_task(backward.score(views[0]))
    loop.run_until_complete(asyncio.sleep(0.01))
    if end == "cancelled":
        first.cancel()
        loop.run_until_complete(asyncio.gather(first, return_exceptions=True))
        assert not backward._plays
    loop.close()
    first._log_destroy_pending = False

    async def again():
        return await asyncio.wait_for(asyncio.gather(*map(backward.score, views)), 30)

    assert all(said.ok for said in asyncio.run(again()))


@pytest.mark.parametrize("faulty", ["forward", "backward"])
def test_a_rubric_that_raises_is_named_as_with_a_plain_coach(faulty):
    def broken(view):
        raise KeyError("no such word")

    coaches = {name: ChatCoach(of_rubric(broken if name == faulty else lab.rubric), lab.guide(), 1) for name in ("forward", "backward")}
    coach = Backward(**coaches, alpha=1, beta=1)
    with pytest.raises(WorkflowError, match="the rubric raised KeyError on [ab]:[0-2]:0: 'no such word'"):
        lab.play(coached(lab.team(), coach, when="end", result=lambda path: 1.0))
    assert coach._plays == {}


class Queued:
    """A coach that waits for a worker."""

    async def score(self, view):
        arrived = waiting()
        await asyncio.sleep(0.15)
        arrived()
        return success(Score(5.0), 0.0)


def test_no_action_is_late_while_a_coach_waits_in_a_queue():
    good = ChatCoach(of_rubric(lab.rubric), lab.guide(), 1)
    for forward, backward in ((Queued(), good), (good, Queued())):
        coach = Backward(forward, backward, 1, 1)
        rollout = lab.play(coached(lab.team(), coach, when="end", deadline_s=0.1, result=lambda path: 1.0), attempts=1)
        assert [len(path.scores) for path in rollout.trajectories] == [3]


def test_whoever_leaves_leaves_the_others_their_play_and_the_last_one_ends_it():
    views, ended, seconds = [], [], {"coach": 0.05}

    class Watched:
        async def score(self, view):
            views.append(view)
            return success(Score(5.0), 0.0)

    class Slow:
        async def score(self, view):
            try:
                await asyncio.sleep(seconds["coach"])
            except asyncio.CancelledError:
                ended.append(view.call.id)
                raise
            return success(Score(5.0), 0.0)

    lab.play(coached(lab.team(), Watched(), when="end", result=lambda path: 1.0))
    backward = Backward(Slow(), Slow(), 1, 1)

    async def asked(leave):
        asking = [asyncio.create_task(backward.score(view)) for view in views]
        await asyncio.sleep(0.01)
        for task in asking[leave]:
            task.cancel()
        return await asyncio.gather(*asking, return_exceptions=True)

    first, second, last = asyncio.run(asked(slice(2, 3)))
    assert first.ok
    assert second.ok
    assert isinstance(last, asyncio.CancelledError)
    assert not ended
    seconds["coach"] = 30
    asyncio.run(asked(slice(0, 3)))
    assert sorted(ended) == sorted(view.call.id for view in views)
    assert backward._plays == {}
