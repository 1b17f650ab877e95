"""docs/metrics.md has a row for every key that a run writes, and docs/does_not_learn.md speaks of keys that there are."""

import pathlib
import re

import pytest

from marl_llm.games import make_game
from marl_llm.workflows import Assignment, Controller, Scripted
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.samples import sample_table

ROOT = pathlib.Path(__file__).parents[2]


def documented() -> list[re.Pattern]:
    """Each key of the page as a pattern; a key without a section belongs to the one before it in its row."""
    found = []
    for row in re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE):
        prefix = ""
        for key in re.findall(r"`([^`]+)`", row):
            if "/" in key:
                prefix = key.rpartition("/")[0] + "/"
            key = key if "/" in key or not prefix else prefix + key
            found.append(re.compile(re.sub(r"<\w+>", "[^/]+", key)))
    return found


def undocumented(keys) -> set[str]:
    """Keys without a row."""
    patterns = documented()
    return {key for key in keys if not any(pattern.fullmatch(key) for pattern in patterns)}


@pytest.mark.parametrize("game", ["notes", "fact_parallel"])
def test_every_figure_of_a_hosted_step_has_a_row(game):
    with make_game(game) as environment:
        roles = environment.workflow.roles
        assignment = Assignment(dict.fromkeys(roles, "player"), {"player": Scripted(environment.script)})
        with Controller(environment.workflow, assignment, None, {"player": environment.renderer}) as controller:
            rollout = controller.play(environment.tasks("train", 0, 2))
        figures = rollout_metrics(rollout, sample_table(rollout, training=()))
    assert undocumented(figures.keys() - {"aborted_share"}) == set()  # the run writes that one as `aborted`
    assert undocumented(["role/a/unheard_of", "model/b/loss/c", "unheard_of"]) == {"role/a/unheard_of", "model/b/loss/c", "unheard_of"}


def test_every_figure_that_the_training_loop_adds_has_a_row():
    files = ("marl_llm/runs/loop.py", "marl_llm/training/rollouts.py")
    source = "".join((ROOT / file).read_text() for file in files)
    keys = set(re.findall(r'"((?:time|speed)/\w+)"', source)) | {f"role/a/{name}" for name in re.findall(r'f"role/\{role\}/(\w+)"', source)}
    assert len(keys) > 10
    assert undocumented(keys) == set()


def test_the_advice_speaks_of_metrics_that_there_are():
    text = (ROOT / "docs" / "does_not_learn.md").read_text()
    names = {name for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    known = (ROOT / "docs" / "metrics.md").read_text()
    assert len(names) > 12
    assert {name for name in names if name.rpartition("/")[2] not in known and f"`{name}`" not in known} - {"train", "eval"} == set()
