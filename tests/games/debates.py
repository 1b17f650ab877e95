"""What the tests of both debates share: plays by scripts, what they pay, prompts as files."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "workflows"))  # `wordy`

from wordy import SPEECH, Says

from marl_llm.workflows import Assignment, Controller, Scripted
from marl_llm.workflows.samples import sample_table

__all__ = ["SPEECH", "Says", "pay", "pinned", "played", "scores"]
PROMPTS = pathlib.Path(__file__).parents[1] / "data" / "prompts"


def played(team, tasks, script, renderer=None):
    """The tasks played by one script in every role."""
    assignment = Assignment(dict.fromkeys(team.roles, "t"), {"t": Scripted(script)})
    with Controller(team, assignment, None, renderer or {}) as controller:
        return controller.play(tasks)


def pay(rollout):
    """Role -> what it was paid in all turns of all plays together, team and local."""
    sums = {}
    for row in sample_table(rollout, training=()).samples:
        sums[row.call.role] = sums.get(row.call.role, 0.0) + row.team + row.local
    return sums


def scores(rollout, name):
    """A metric of every play."""
    return [rollout.workflow.metrics[name](path) for path in rollout.trajectories]


def pinned(name, rollout):
    """Asserts that the prompts of a rollout are those of a file."""
    text = "".join(f"===== {call.role}, turn {call.turn}\n{call.prompt}\n" for path in rollout.trajectories for call in path.calls)
    assert text == (PROMPTS / name).read_text(), f"tests/data/prompts/{name} holds other prompts"
