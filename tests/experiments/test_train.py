"""The loop: alarms, and errors before anything is overwritten (laws 8 and 10)."""

import itertools
import json
import os
import pathlib
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

from benchmarks import resume
from experiments import common, train, workdir
from experiments.base import ConfigError, base_config
from marl_llm import evaluation, training
from marl_llm.reporting import read_metrics
from marl_llm.training import CheckpointError, make_mesh


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """The suite has started JAX already, with eight devices; two of them train."""
    monkeypatch.setattr(train, "start_jax", lambda config, cache: make_mesh(config.devices))
    yield
    let_go()


def let_go():
    """What the end of a process does."""
    for handle in workdir._HELD.values():
        os.close(handle)
    workdir._HELD.clear()


def letters():
    """A run of seconds: two models, no warm start."""
    c = base_config("letters", game="joint_letter", recipe="magrpo")
    c.steps, c.devices = 6, 2
    c.model.preset = "nano"
    c.recipe.branches = 4
    c.recipe.kl_coef = 0.0
    c.rollout.environments = 4
    c.optimizer.minibatch = 16
    c.evaluation.every = 3
    c.evaluation.episodes = c.evaluation.final_episodes = 4
    c.evaluation.transcripts = 1
    c.checkpoint.every = 2
    return c


def run(config, path):
    let_go()
    return train.train(config, path, "letters.py", "")


GOOD = {"loss": 0.1, "grad_norm": 1.0, "log_prob_gap": 1e-6, "useful_groups": 8.0, "updates": 1.0, "groups": 8.0, "tied_share": 0.5}
GOOD |= {"tied_share/0": 0.25, "tied_share/1": 0.75}


def fake_update(monkeypatch, figures_of):
    """Puts in the update's place one that adds 1 to every parameter and says `figures_of(model, call)`."""

    def make_update(*_, **__):
        calls = [itertools.count(1), itertools.count(1)]

        def update(policy, reference, rows, plays, rate, key):
            agent = int(np.argmax(plays))
            said = GOOD | figures_of(("first", "second")[agent], next(calls[agent]))
            return policy._replace(params=jax.tree.map(lambda x: x + 1, policy.params)), {k: jnp.float32(v) for k, v in said.items()}

        return update

    monkeypatch.setattr(training, "make_update", make_update)


def embedding(path, step, model):
    leaves = {k: v for k, v in resume.arrays(path).items() if k.startswith(f"{step}/{model}['params']")}
    return np.concatenate([np.frombuffer(v.split(b"float32 ", 1)[1], np.float32) for v in leaves.values()])


def test_alarms_errors_and_the_way_back(tmp_path, monkeypatch, capsys):
    """One run through: alarms, a loss that is not finite, a damaged checkpoint, and a good end."""
    path = tmp_path / "run"
    monkeypatch.setattr(common, "SILENT_ALARM", 2)

    def figures(model, call):
        if model == "second":
            return {"useful_groups": 0.0, "updates": 0.0, "grad_norm": 0.0}
        return {"log_prob_gap": {2: 1e-2, 3: np.nan}.get(call, 1e-6), "loss": np.nan if call == 5 else 0.1}

    fake_update(monkeypatch, figures)
    with pytest.raises(train.TrainingError) as error:
        run(letters(), path)
    assert str(error.value).startswith("step 4, model first: loss not finite. Nothing of that step was saved")
    assert "Lower optimizer.learning_rate" in str(error.value)
    said = capsys.readouterr().err
    alarms = [line for line in said.splitlines() if line.startswith("ALARM")]
    assert alarms == [
        "ALARM step 2: model first, sampler and scorer differ by 1.0e-02 nats",
        "ALARM step 2: model second got no gradient for 2 steps (all its groups are tied)",
        "ALARM step 3: model first, sampler and scorer differ by nan nats",
        "ALARM step 4: model second got no gradient for 4 steps (all its groups are tied)",
    ]
    # nothing of the bad step was written
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["0", "2", "4"]
    assert np.allclose(embedding(path, 4, "first"), embedding(path, 0, "first") + 4, atol=1e-5)
    lines = [(r["phase"], r["step"]) for r in read_metrics(path)]
    assert lines == [("eval", 0), *(("train", i) for i in (1, 2, 3)), ("eval", 3), ("train", 4)]
    assert not (path / "evaluation.json").exists()
    assert not (path / "report.html").exists()

    # a damaged checkpoint is told, and its folder given up, the run goes on from the one before
    kept = tmp_path / "kept"
    shutil.copytree(path / "checkpoints" / "4", kept)
    for part in (path / "checkpoints" / "4" / "policies" / "first").rglob("*"):
        if part.is_file():
            part.write_bytes(part.read_bytes()[:7])
    with pytest.raises(CheckpointError, match=r"checkpoints/4 cannot be read: .* Delete that folder to go on from step 2\.") as damage:
        run(letters(), path)
    assert "\n" not in str(damage.value)
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["0", "2", "4"]
    shutil.rmtree(path / "checkpoints" / "4")
    shutil.move(kept, path / "checkpoints" / "4")

    # to the end, as the same command would; the count of steps without a gradient went on
    fake_update(monkeypatch, lambda model, call: {"useful_groups": 0.0} if model == "second" else {})
    results = run(letters(), path)
    said = capsys.readouterr().err
    assert "continuing" in said
    assert "ALARM step 6: model second got no gradient for 6 steps" in said
    assert json.loads((path / "evaluation.json").read_text()) == results
    lines = [(r["phase"], r["step"]) for r in read_metrics(path)]
    assert lines == [("eval", 0), *(("train", i) for i in (1, 2, 3)), ("eval", 3), *(("train", i) for i in (4, 5, 6)), ("eval", 6)]
    assert [r["samples"] for r in read_metrics(path) if r["phase"] == "train"] == [32, 64, 96, 128, 160, 192]

    # complete: the same command says so and changes nothing; another config is refused
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
    assert run(letters(), path) == results
    assert "is complete; its report is" in capsys.readouterr().err
    other = letters()
    other.steps = 7
    with pytest.raises(ConfigError, match=r"config\.steps: 6 -> 7"):
        run(other, path)
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before


def test_instances_that_cannot_be_played_end_the_run(tmp_path, monkeypatch):
    """Before the first update, so that nothing is trained on void episodes."""
    figures = {"success": 0.0, "turns": 0.0, "roles": {r: {"well_formed": 0.0} for r in ("first", "second")}}
    team = types.SimpleNamespace(team=lambda *a: figures, compiled=None, key=jax.random.key(0))
    monkeypatch.setattr(evaluation, "TeamEvaluation", lambda *a, **k: team)
    monkeypatch.setattr(training, "make_rollout", lambda *a, **k: lambda *b: types.SimpleNamespace(summary={"void": jnp.float32(1)}))
    fake_update(monkeypatch, lambda *a: pytest.fail("an update of void episodes"))
    with pytest.raises(train.TrainingError, match="step 0: no instance could be played; the game's settings contradict each other"):
        run(letters(), tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["0"]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("environments", 5, r"config\.rollout\.environments=5 does not divide over 2 devices")],
)
def test_what_does_not_divide_is_refused_before_the_directory_is_made(tmp_path, key, value, why):
    config = letters()
    config.rollout[key] = value
    with pytest.raises(ConfigError, match=why):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such thing"), 2),
        (train.TrainingError("not finite"), 2),
        (OSError(28, "No space left on device", "metrics.jsonl"), 2),
        (CheckpointError("checkpoint 4 cannot be read"), 3),
    ],
)
def test_errors_are_one_line_and_a_code(monkeypatch, capsys, tmp_path, error, code):
    def fails(*_):
        raise error

    monkeypatch.setattr(train, "train", fails)
    workdir.open_workdir(tmp_path / "run", letters(), "letters.py", "")
    flag = lambda value: types.SimpleNamespace(value=value)  # noqa: E731
    for name, value in dict(_CONFIG=None, _WORKDIR=None, _RESUME=str(tmp_path / "run"), _DRY_RUN=False, _CACHE="").items():
        monkeypatch.setattr(train, name, flag(value))
    with pytest.raises(SystemExit) as end:
        train.main(["train"])
    assert end.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_other_errors_keep_their_traceback(monkeypatch, tmp_path):
    """A fault of the library is no fault of the user: nothing is hidden."""

    def fails(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train, "train", fails)
    workdir.open_workdir(tmp_path / "run", letters(), "letters.py", "")
    flag = lambda value: types.SimpleNamespace(value=value)  # noqa: E731
    for name, value in dict(_CONFIG=None, _WORKDIR=None, _RESUME=str(tmp_path / "run"), _DRY_RUN=False, _CACHE="").items():
        monkeypatch.setattr(train, name, flag(value))
    with pytest.raises(RuntimeError, match="a bug"):
        train.main(["train"])
