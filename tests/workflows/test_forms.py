"""The three forms of Appendix B's rewards on plays of hand-made calls: what is paid in which turn, and nothing for what cannot be read."""

import numpy as np
import pytest

from marl_llm.games.coding.debate import debate_rewards
from marl_llm.workflows import Task
from marl_llm.workflows.forms import rewards_in_form
from marl_llm.workflows.trajectory import RoleCall, Trajectory

SCORES = (0.25, 0.5, 1.0)  # what each turn's answer is worth by itself; the second cannot be read


def call_of(number, turn, score, role="coder", items=(), illegal=None):
    about = dict(id=f"c{number}", node=role, role=role, agent=0, model="m", parents=(), turn=turn, request_number=number)
    about |= dict(items=items, group=f"g{number}", choice=0, branch=0, seed=(), prompt="", prompt_ids=(), text="")
    about |= dict(tokens=np.zeros(0, np.int32), log_probs=None, sampled_log_probs=None, finish="stop", version=0)
    return RoleCall(**about, writes={"score": score}, illegal=illegal)


def play():
    calls = [call_of(turn, turn, score, illegal="no code" if turn == 2 else None) for turn, score in enumerate(SCORES, 1)]
    return Trajectory(Task(0, {}), tuple(calls), {}, len(calls), 0)


@pytest.mark.parametrize(
    ("form", "local", "team"),
    [
        ("paper", {1: 0.25, 3: 1.0}, {1: 0.25, 2: 0.5, 3: 1.0}),
        ("safe", {1: 0.25, 2: -0.25, 3: 1.0}, {1: 0.25, 2: 0.25, 3: 0.5}),
        ("outcome", {1: 1.0, 2: 0.0, 3: 1.0}, {1: 0.0, 2: 0.0, 3: 1.0}),
    ],
)
def test_what_cannot_be_read_has_no_parts_in_any_form(form, local, team):
    def score(call, beside, path=None):
        return beside("score")

    parts = {"coder": lambda call, beside: {"passes": beside("score")}}
    (reward,) = rewards_in_form(form, parts, {"coder": score}, {"coder": lambda *of: score(*of) == 1.0})
    paid = {True: {}, False: {}}
    for award in reward(play()):
        paid[award.team][award.call.turn] = paid[award.team].get(award.call.turn, 0.0) + award.value
    assert paid[True] == team
    assert paid[False] == local


def test_in_the_safe_form_each_role_and_each_seat_of_it_improves_on_itself():
    """Two seats of the coder and a tester speak in two turns; each is paid what it scored more than in its own turn before."""
    said = [("coder", (0,), 0.5), ("coder", (1,), 0.25), ("tester", (0,), 0.75)]
    said += [("coder", (0,), 0.625), ("coder", (1,), 1.0), ("tester", (0,), 0.5)]
    calls = [call_of(number, 1 + number // 3, score, role, items) for number, (role, items, score) in enumerate(said)]
    parts = dict.fromkeys(("coder", "tester"), lambda call, beside: {"passes": call.writes["score"]})
    team = dict.fromkeys(("coder", "tester"), lambda call, beside, path: 0.0)
    (reward,) = rewards_in_form("safe", parts, team, team)
    paid = [award.value for award in reward(Trajectory(Task(0, {}), tuple(calls), {}, 2, 0)) if not award.team]
    assert paid == [0.5, 0.25, 0.75, 0.125, 0.75, -0.25]


def test_a_tester_that_is_scored_when_its_test_is_made_faces_the_program_before():
    """In the second turn the golden tests have not run yet: the team's pay of the tester is the first program's share, the coder's none."""
    calls = [call_of(0, 1, 0.0), call_of(1, 2, 0.0), call_of(2, 2, 0.0, "tester")]
    calls[0].writes["golden"] = 0.75
    (reward,) = debate_rewards("paper")
    paid = {award.call.id: award.value for award in reward(Trajectory(Task(0, {}), tuple(calls), {}, 2, 0)) if award.team}
    assert paid == {"c0": 0.75, "c1": 0.0, "c2": 0.75}
