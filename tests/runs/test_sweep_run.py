"""A sweep's run directories are those of its teams trained alone, and what cannot be swept is refused in one line."""

import json
import shutil

import jax
import numpy as np
import pytest

from marl_llm.cli.sweep import summary, table
from marl_llm.reporting import read_metrics
from marl_llm.runs import loop, sweep_run, train_run
from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.sweep_configs import sweep_configs
from marl_llm.training import Checkpoints, make_mesh
from marl_llm.untrusted import read_json_file

VARIED = ["optimizer.learning_rate=1e-3,3e-3", "seed=5,6"]
NAMES = ["learning_rate=1e-3_seed=5", "learning_rate=1e-3_seed=6", "learning_rate=3e-3_seed=5", "learning_rate=3e-3_seed=6"]
ALONE = NAMES[3]
OF_THE_MACHINE = ("time/", "speed/", "programs/", "wall_s", "cpu_s", "train_wall_s", "train_cpu_s")


def tiny():
    """The maps and the model of tests/training/test_sweep.py."""
    c = base_config("tiny", "plan_path", "at_grpo")
    c.game.update(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2)
    c.model.update(width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    c.recipe.update(group_size=3, entropy_coef=0.01)
    c.optimizer.update(row_tokens=64, minibatch=32, epochs=1, microbatch_tokens=128, warmup=0)
    c.sft.update(steps=24, tasks=8, fresh=12, learning_rate=2e-2)
    c.rollout.tasks, c.steps, c.devices = 8, 2, 1
    c.evaluation.update(every=1, tasks=12, final_tasks=12, transcripts=1, ablate_roles=False)
    c.checkpoint.every = 1
    return c


def figures(record):
    """What does not depend on the machine."""
    return {name: x for name, x in record.items() if not name.startswith(OF_THE_MACHINE)}


def numbers(value):
    """A JSON value with its numbers as approximations."""
    if isinstance(value, dict):
        return {key: numbers(x) for key, x in value.items()}
    if isinstance(value, list):
        return [numbers(x) for x in value]
    return pytest.approx(value, rel=2e-3, abs=1e-5) if isinstance(value, float) else value


def params_of(run, team_of):
    """The parameters in the last checkpoint of a run."""
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.restore_params(checkpoints.steps()[-1], team_of)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """`(out, alone, policies)`: a sweep of four teams, one of them trained alone, and the shapes of their models."""
    place = tmp_path_factory.mktemp("sweep")
    patch = pytest.MonkeyPatch()
    for module in (sweep_run, train_run):
        patch.setattr(module, "start_jax", lambda *_, **__: make_mesh(1))
    patch.setattr("marl_llm.viewing.write_report", lambda path, pictures=True: (path / "report.html").write_text("") and None)
    policies = {}
    saved = loop.TrainingRun.save

    def save(run, step):
        policies.update(run.team.models())
        saved(run, step)

    patch.setattr(loop.TrainingRun, "save", save)
    teams = sweep_configs(tiny(), VARIED)
    assert list(sweep_run.train_sweep(teams, place / "out")) == NAMES
    train_run.train_run(next(one.config for one in teams if one.name == ALONE), place / "alone")
    yield place / "out", place / "alone", policies
    patch.undo()


def test_every_line_of_a_swept_team_is_that_of_the_team_alone(swept):
    out, alone, _ = swept
    lines, expected = (list(map(figures, read_metrics(run))) for run in (out / ALONE, alone))
    assert [line["model/planner/groups_with_signal"] > 0 for line in lines if line["phase"] == "train"] == [True, True]
    assert len(lines) == len(expected)
    for line, wanted in zip(lines, expected, strict=True):
        assert line == numbers(wanted)
    assert figures(read_metrics(out / NAMES[0])[-2]) != numbers(expected[-2])


def test_a_swept_team_has_the_evaluation_and_the_parameters_of_the_team_alone(swept):
    out, alone, policies = swept
    assert (out / ALONE / "outcomes.jsonl").read_text() == (alone / "outcomes.jsonl").read_text()
    found, wanted = (figures(read_json_file(run / "evaluation.json")) for run in (out / ALONE, alone))
    assert found == numbers(wanted)
    mine, theirs, other = (params_of(run, policies) for run in (out / ALONE, alone, out / NAMES[0]))
    pairs = list(zip(*map(jax.tree.leaves, (mine, theirs, other)), strict=True))
    assert max(np.max(np.abs(x - y)) for x, y, _ in pairs) < 5e-5
    assert max(np.max(np.abs(x - z)) for x, _, z in pairs) > 1e-3


def test_plays_of_a_swept_team_are_kept_as_those_of_the_team_alone(swept):
    out, alone, _ = swept
    mine, theirs = ([json.loads(line) for line in (run / "episodes.jsonl").open()] for run in (out / ALONE, alone))
    assert [(play["when"], play["step"], play["task"]) for play in mine] == [(play["when"], play["step"], play["task"]) for play in theirs]
    assert mine == numbers(theirs)


def test_a_swept_team_is_continued_alone(swept, tmp_path):
    out, alone, _ = swept
    longer = next(one.config for one in sweep_configs(tiny(), VARIED) if one.name == ALONE)
    longer.steps, longer.optimizer.decay_steps = 3, 2
    after = []
    for run in (out / ALONE, alone):
        copied = shutil.copytree(run, tmp_path / run.parent.name / run.name)
        train_run.train_run(longer, copied)
        after.append(figures(read_metrics(copied)[-2]))
    assert after[0]["step"] == 3
    assert after[0] == numbers(after[1])


def test_an_interrupted_sweep_goes_on_from_the_checkpoint_that_all_teams_have(swept, tmp_path, monkeypatch):
    out, _, _ = swept
    finish_step = loop.finish_step

    def interrupted(run, record, batch):
        if (record["step"], run.workdir.name) == (2, NAMES[2]):
            raise KeyboardInterrupt
        finish_step(run, record, batch)

    monkeypatch.setattr(loop, "finish_step", interrupted)
    teams = sweep_configs(tiny(), VARIED)
    with pytest.raises(KeyboardInterrupt):
        sweep_run.train_sweep(teams, tmp_path / "out")
    runs = {name: tmp_path / "out" / name for name in NAMES}
    left = {name: (read_metrics(run)[-1]["step"], Checkpoints(run / "checkpoints").steps()) for name, run in runs.items()}
    assert left == {NAMES[0]: (2, [0, 1, 2]), NAMES[1]: (2, [0, 1, 2]), NAMES[2]: (1, [0, 1]), NAMES[3]: (1, [0, 1])}
    monkeypatch.undo()
    sweep_run.train_sweep(teams, tmp_path / "out")
    for name in NAMES:
        assert list(map(figures, read_metrics(tmp_path / "out" / name))) == [numbers(figures(line)) for line in read_metrics(out / name)]


def test_a_sweep_with_an_evaluation_of_another_step_is_not_complete(swept, tmp_path, monkeypatch, capsys):
    out = shutil.copytree(swept[0], tmp_path / "out")
    trained = []
    monkeypatch.setattr(sweep_run, "_train", lambda runs, done, devices: trained.append(done))
    for steps in (2, 1):
        path = out / NAMES[1] / "evaluation.json"
        path.write_text(json.dumps(read_json_file(path) | {"steps": steps}))
        sweep_run.train_sweep(sweep_configs(tiny(), VARIED), out)
        assert ("is complete" in capsys.readouterr().err) == (steps == 2)
    assert trained == [[[0, 1, 2]] * len(NAMES)]


def test_the_table_has_a_row_for_each_setting_with_both_seeds(swept):
    out, _, _ = swept
    text = summary(sweep_configs(tiny(), VARIED), {name: out / name for name in NAMES})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| learning_rate")]
    after = [read_json_file(out / name / "evaluation.json")["after"]["success"] for name in NAMES]
    assert [row[:2] for row in rows] == [["learning_rate=1e-3", "2"], ["learning_rate=3e-3", "2"]]
    assert [float(row[3].split()[0]) for row in rows] == pytest.approx([np.mean(after[:2]), np.mean(after[2:])], abs=1e-3)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "--vary is missing, e.g. --vary="),
        (["model.width=16,32"], "may differ in seed, optimizer.learning_rate, .*; for model.width use `marl compare"),
        (["recipe.name=grpo,ppo"], "for recipe.name use `marl compare --variant=NAME:recipe.name=VALUE`"),
        (["optimizer.learnin_rate=1"], "did you mean 'optimizer.learning_rate'"),
        (["seed=a"], "config.seed=a must be of the type int"),
        (["seed=1,1"], "a value comes twice"),
        (["optimizer.learning_rate=1e-3,0.001"], "a value comes twice"),
        (["seed=1", "seed=2"], "--vary=seed is given twice"),
    ],
)
def test_what_cannot_be_varied_is_refused_with_what_can(texts, said):
    with pytest.raises(ConfigError, match=said) as error:
        sweep_configs(tiny(), texts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hosted": True}, "is played hosted, and a sweep plays compiled"),
        ({"recipe.kl_coef": 0.1}, "a sweep cannot have a KL to the start"),
        ({"rollout.refills": 1}, "a sweep cannot have tasks that are played in place of others"),
    ],
)
def test_a_config_that_cannot_be_swept_leaves_no_directory(monkeypatch, tmp_path, changes, said):
    monkeypatch.setattr(sweep_run, "start_jax", lambda *_, **__: make_mesh(1))
    config = tiny()
    config.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=said):
        sweep_run.train_sweep(sweep_configs(config, ["seed=0"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_row_of_the_table_has_the_interval_over_seeds_or_over_the_tasks_of_one():
    def evaluation(before, after):
        parts = {name: {"success": x, "interval": [x - 0.1, x + 0.1]} for name, x in (("before", before), ("after", after))}
        return parts | {"gain": {"difference": after - before, "interval": [0.0, 0.5]}}

    _, _, *rows = table({"a": [evaluation(0.25, 0.5), evaluation(0.25, 0.75)], "b": [evaluation(0.25, 0.5)]}).splitlines()
    half = 12.7062 * 0.125  # Student's t with one degree of freedom
    after, gain = (f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]" for mean in (0.625, 0.375))
    assert rows[0] == f"| a | 2 | 0.250 [0.250, 0.250] | {after} | {gain} | 0.500 | 0.750 |"
    assert rows[1] == "| b | 1 | 0.250 [0.150, 0.350] | 0.500 [0.400, 0.600] | 0.250 [0.000, 0.500] | 0.500 | 0.500 |"
