"""A small coach that trains beside the team: it leaves the crowd of tens, is checked by a rubric, and belongs to checkpoints."""

import argparse
import json
import pathlib
import random

import jax
import numpy as np
import pytest
from test_runs import in_this_process, run  # noqa: F401

from marl_llm.cli.coach import Lesson, _write, learned
from marl_llm.coaching import small
from marl_llm.reporting import read_metrics
from marl_llm.runs.base import base_config
from marl_llm.runs.coaching import CoachWatch, make_coaching
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.training import Checkpoints, make_mesh
from marl_llm.workflows import Assignment, Controller, Scripted

OWN = pathlib.Path(__file__).parents[1] / "games" / "own" / "coached.py"
BRIEFS = [f"speaker reads x says {word}" for word in "xyz"]
# plays of a team that knows nothing end by chance, and a brief says how
PARITY = '''

def odd(path):
    return float(int(path.calls[0].tokens[0]) % 2)


def by_chance() -> "Environment":
    import dataclasses

    environment = echo()
    brief = lambda view: f"speaker reads x says {'x' if int(view.call.tokens[0]) % 2 else 'y'}"
    workflow = dataclasses.replace(environment.workflow, metrics={"right": odd})
    return dataclasses.replace(environment, workflow=workflow, guide=dataclasses.replace(environment.guide, brief=brief))
'''


@pytest.fixture(scope="module")
def tens(tmp_path_factory):
    """A small coach that says 10 to nearly everything, whatever its record claims."""
    folder = tmp_path_factory.mktemp("coach") / "tens"
    asked = argparse.Namespace(preset="nano", epochs=4, batch=32, learning_rate=0.02, seed=0)
    lessons = [Lesson(brief, float(score), "speaker", None) for brief in BRIEFS for score in [10] * 30 + [8, 5, 2]]
    _write(folder, *learned(lessons, asked, make_mesh(1), lambda line: None)[:3])
    good = {"all": {"mae": 0.0, "kappa": 1.0, "actions": 9, "missing": 0}}
    with resolve(config()) as plan:
        record = {"guide": plan.played.guide.version, "max_prompt": 16, "unseen": {"it": good}}
    (folder / small.RECORD).write_text(json.dumps(record))
    return folder


def config(game=f"{OWN}:echo", **coach):
    found = base_config("t", game, "mappa")
    found.model.update(preset="nano", layers=1)
    found.update(steps=1, devices=1)
    found.rollout.tasks, found.recipe.group_size, found.optimizer.minibatch = 4, 4, 16
    found.evaluation.update(every=1000, tasks=2, final_tasks=2, transcripts=0)
    found.checkpoint.every = 1
    found.sft.steps = 0
    found.coach.update(coach)
    return found


def test_a_coach_that_says_ten_to_everything_is_paid_nothing_and_learns_to_tell_actions_apart(tens):
    own = config(kind="small", path=str(tens), learn=0.005)

    def rng(turn):
        return random.Random(repr(turn.seed)).random()

    def script(turn):
        return turn.fields["digit"] if rng(turn) < 0.5 else "!" if rng(turn) < 0.7 else "0"

    with resolve(own) as plan:
        coaching = make_coaching(own, plan)
        workflow, players = coaching.attach(plan.played.workflow), Assignment({"speaker": "s"}, {"s": Scripted(script)})
        with Controller(workflow, players, None, plan.played.renderer) as controller:
            found, said = [], []
            for step in range(40):
                rollout = controller.play(plan.played.tasks("train", 2 * step, 2), step, plays=8)  # one shape of rows
                said.append({score["coach"].value for path in rollout.trajectories for score in path.scores.values()})
                found.append(coaching.trained.learn(rollout, "right"))
        assert not coaching.trained.learn(rollout_without_pairs(rollout), "right").get("coach/pairwise")
        coaching.close()
    assert said[0] == {10.0}
    assert found[0]["coach/pairwise"] == 0.0
    assert np.mean([one["coach/pairwise"] for one in found[-5:]]) > 0.9
    assert len(said[-1]) > 1
    assert [one["coach/version"] for one in found] == list(range(40))
    assert all(one["coach/log_prob_gap"] < 1e-3 for one in found)
    checked = [one for one in found if one["coach/checked"]]
    assert 10 < sum(one["coach/checked"] for one in checked) < 60  # 5 % of 640
    assert all(one["coach/drift"] >= abs(one["coach/drift_bias"]) for one in checked)
    assert np.mean([one["coach/drift"] for one in checked[:3]]) > 1.0  # a ten for what the rubric gives a four


def rollout_without_pairs(rollout):
    import dataclasses

    return dataclasses.replace(rollout, episodes=rollout.episodes[:1])


def test_a_run_keeps_its_coach_in_checkpoints_and_goes_on_with_it(tens, tmp_path, monkeypatch):
    monkeypatch.setattr("marl_llm.viewing.write_report", lambda path: path)  # other runs draw it
    (tmp_path / "environment.py").write_text(OWN.read_text() + PARITY)

    def make(steps):
        return config(f"{tmp_path / 'environment.py'}:by_chance", kind="small", path=str(tens), learn=0.005)

    for name, stops in (("whole", (3,)), ("resumed", (1, 3))):
        for steps in stops:
            own = make(steps)
            own.steps = steps
            own.evaluation.update(sampled=True, samples=3, temperature=0.6)
            page = run(own, tmp_path / name)
    assert (page["after"]["episodes"], page["after"]["temperature"]) == (2, 0)
    assert (page["sampled"]["after"]["episodes"], page["sampled"]["after"]["temperature"], page["sampled"]["after"]["tasks"]) == (6, 0.6, 2)
    lines = {name: [one for one in read_metrics(tmp_path / name) if one["phase"] == "train"] for name in ("whole", "resumed")}
    for one, other in zip(lines["whole"], lines["resumed"], strict=True):
        assert one["coach/paired"] > 4
        names = [name for name in one if name.startswith("coach/") and name not in ("coach/seconds", "coach/calls", "coach/actions")]
        same = [name for name in names if name in ("coach/pairwise", "coach/paired", "coach/reward", "coach/version", "coach/score")]
        assert len(same) == 5
        assert [one[name] for name in same] == pytest.approx([other[name] for name in same], abs=1e-5)
    assert [one["coach/version"] for one in lines["whole"]] == [0, 1, 2]
    ends, begun = [], None
    for name in ("whole", "resumed"):
        store = Checkpoints(tmp_path / name / "checkpoints")
        assert store.state(3)["team"]["trained.coach"] == {"version": 3}
        own = make(3)
        with resolve(own) as plan:
            coaching = make_coaching(own, plan)
            like = {"trained.coach": coaching.trained.policy}
            begun, end = (store.restore(step, like)["trained.coach"].params for step in (0, 3))
            ends.append(end)
            with pytest.raises(ValueError, match=r"trained\.coach\.version must be a whole number"):
                coaching.trained.restore(coaching.trained.policy, {"version": "3"})
            coaching.close()
    leaves = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)]) for params in (*ends, begun)]
    np.testing.assert_allclose(leaves[0], leaves[1], atol=1e-5)
    assert np.max(np.abs(leaves[0] - leaves[2])) > 1e-3


def test_a_coach_that_trains_is_refused_where_it_cannot_be(tens):
    refused = [
        (dict(kind="rubric", learn=0.1), "learn would have no effect: a coach of kind 'rubric'"),
        (dict(kind="small", path=str(tens), learn=-1.0), "learn=-1.0 must be above 0"),
        (dict(kind="ensemble", members=f"rubric; small path={tens} learn=0.1"), "'learn=0.1' is no option of a member"),
    ]
    for coach, message in refused:
        with pytest.raises(ConfigError, match=message):
            resolve(config(**coach))
    for key, value in (("max_staleness", 1), ("batch_invariant", True)):
        own = config(kind="small", path=str(tens), learn=0.1)
        own.rollout[key], own.recipe.rollout_correction = value, "truncate"
        with pytest.raises(ConfigError, match=f"config.rollout.{key}: a coach that trains"):
            resolve(own)


def test_more_samples_of_an_evaluation_that_there_is_not_are_refused():
    for key, value in (("samples", 4), ("temperature", 0.6)):
        own = config()
        own.evaluation[key] = value
        with pytest.raises(ConfigError, match="config.evaluation.samples and temperature would have no effect"):
            resolve(own)
    own.evaluation.update(sampled=True, temperature=-1.0)
    with pytest.raises(ConfigError, match="evaluation.temperature=-1.0 must be positive"):
        resolve(own)


def test_a_run_notes_once_when_its_coach_has_moved_from_the_rubric_by_more_than_a_small_coach_may():
    told = []
    watch = CoachWatch(told.append)
    for step, (drift, checked) in enumerate([(0.5, 20), (0.8, 20), (5.0, 0), (1.5, 20), (1.5, 20), (0.0, 200), (3.0, 400)]):
        watch.look_at_drift(step, {"coach/checked": float(checked)} | ({"coach/drift": drift} if checked else {}))
    assert [line.split(":")[0] for line in told] == ["note step 3", "note step 6"]
    assert "over 3 steps the coach was 0.93 points from the rubric; a small coach may begin with 0.7" in told[0]
    watch.look_at_drift(9, {})
