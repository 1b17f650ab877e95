"""The three forms of Appendix B's rewards on plays of hand-made calls: what is paid in which turn, and nothing for what cannot be read."""

import numpy as np
import pytest

from marl_llm.workflows import Task
from marl_llm.workflows.forms import rewards_in_form
from marl_llm.workflows.trajectory import RoleCall, Trajectory

SCORES = (0.25, 0.5, 1.0)  # what each turn's answer is worth by itself; the second cannot be read


def play():
    calls = []
    for turn, score in enumerate(SCORES, 1):
        about = dict(id=f"c{turn}", node="coder", role="coder", agent=0, model="m", parents=(), turn=turn, request_number=turn)
        about |= dict(items=(), group=f"g{turn}", choice=0, branch=0, seed=(), prompt="", prompt_ids=(), text="")
        about |= dict(tokens=np.zeros(0, np.int32), log_probs=None, sampled_log_probs=None, finish="stop", version=0)
        calls.append(RoleCall(**about, writes={"score": score}, illegal="no code" if turn == 2 else None))
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
    score = lambda call, beside, path=None: beside("score")  # noqa: E731
    parts = {"coder": lambda call, beside: {"passes": beside("score")}}
    (reward,) = rewards_in_form(form, parts, {"coder": score}, {"coder": lambda *of: score(*of) == 1.0})
    paid = {True: {}, False: {}}
    for award in reward(play()):
        paid[award.team][award.call.turn] = paid[award.team].get(award.call.turn, 0.0) + award.value
    assert paid[True] == team
    assert paid[False] == local
