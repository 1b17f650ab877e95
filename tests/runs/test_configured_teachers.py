"""Distillation from a config: who teaches, what is refused, and that a run of it continues as if it had not stopped."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import marl_llm as ml
from experiments.configs import distill
from marl_llm.cli.export import export
from marl_llm.models import load_pretrained
from marl_llm.runs.api import make_config
from marl_llm.runs.building import opened, start_jax
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.teachers import find_teachers, make_teachers
from marl_llm.runs.workdir import read_record
from marl_llm.training import Checkpoints

ROOT = pathlib.Path(__file__).parents[2]
ROLES = ("first", "second")
EVALUATION = {"tasks": 4, "final_tasks": 4, "every": 10, "ablate_roles": False}
SMALL = {"rollout": {"tasks": 8}, "evaluation": EVALUATION, "checkpoint": {"every": 3}, "quick_compile": True, "devices": 1}
ALONE = {"name": "magrpo", "policy_coef": 0.0, "distill_coef": 1.0}  # the teacher's word alone, no reward


def options_of_student(teachers, seed=3):
    """Arguments of `ml.train`: one model for both roles, which learns from `teachers` alone."""
    student = ml.load_model("nano")
    optimizer = {"learning_rate": 1e-2, "warmup": 0, "decay_steps": 100}
    return ml.make_game("joint_letter", letters=3), dict.fromkeys(ROLES, student), ALONE, SMALL | {
        "teachers": teachers, "seed": seed, "optimizer": optimizer
    }  # fmt: skip


def train_student(workdir, run, steps):
    game, models, recipe, options = options_of_student({role: {"run": str(run)} for role in ROLES})
    return ml.train(game, models, recipe, steps=steps, workdir=workdir, **options)


def config_of(teachers, models=None, recipe=ALONE, letters=3, **options):
    models = dict.fromkeys(ROLES, ml.load_model("nano")) if models is None else models
    return make_config(ml.make_game("joint_letter", letters=letters), models, recipe, steps=4, teachers=teachers, **SMALL | options)


def teachers_of(config):
    """(sources, teachers) of a config, as a run has them."""
    mesh = start_jax(config, None)
    with resolve(config) as plan:
        sources = find_teachers(config, plan)
        return sources, make_teachers(sources, config, mesh)


def metrics_of(run, key):
    return [row[key] for row in map(json.loads, (run / "metrics.jsonl").open()) if row["phase"] == "train"]


def assert_equal(params, others):
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def team(tmp_path_factory):
    """A trained team with a model per role."""
    path = tmp_path_factory.mktemp("teachers") / "team"
    ml.train(ml.make_game("joint_letter", letters=3), dict.fromkeys(ROLES, "nano"), "magrpo", steps=1, workdir=path, **SMALL)
    return path


@pytest.fixture(scope="module")
def student(team):
    """One model that both models of the team have taught."""
    path = team.parent / "student"
    train_student(path, team, 6)
    return path


def test_a_team_is_distilled_into_one_model(team, student):
    for role in ROLES:
        distances = metrics_of(student, f"model/first_second/distill_kl/{role}")
        assert distances[0] > 0.5
        assert distances[-1] < 0.5 * distances[0], distances
    assert read_record(student)["config"]["teachers"]["second"] == {
        "run": str(team), "step": 1, "model": None, "path": None, "preset": None, "url": None, "key_env": None, "timeout_s": None,
        "context": None,
    }  # fmt: skip


def test_a_run_with_teachers_continues_as_if_it_had_not_stopped(team, student, tmp_path):
    """Law 7; the same command without a step goes on with the checkpoint that the run began with, though its teacher has trained on."""
    teacher = shutil.copytree(team, tmp_path / "team")
    train_student(tmp_path / "student", teacher, 3)
    shutil.copytree(teacher / "checkpoints" / "0", teacher / "checkpoints" / "9")
    train_student(tmp_path / "student", teacher, 6)
    assert read_record(tmp_path / "student")["config"]["teachers"]["first"]["step"] == 1
    for key in ("model/first_second/loss", "model/first_second/distill_kl/first"):
        assert metrics_of(tmp_path / "student", key) == metrics_of(student, key)
    with opened(student) as (_, _, whole, _):
        expected = jax.device_get(whole.learners["first_second"].params)
    with opened(tmp_path / "student") as (_, _, resumed, _):
        assert_equal(jax.device_get(resumed.learners["first_second"].params), expected)
    shutil.rmtree(teacher)
    assert ml.evaluate(tmp_path / "student", tasks=4)["step"] == 6  # which needs no teacher
    with pytest.raises(ConfigError, match=r"config\.teachers\.first\.run='.*team': .*config.json cannot be read"):
        ml.resume(tmp_path / "student", steps=8)


def test_a_teacher_has_the_parameters_of_the_runs_model(team):
    runs = {"first": {"run": str(team), "model": "second"}, "second": {"run": str(team)}}
    sources, teachers = teachers_of(config_of(runs))
    assert (sources["second"].step, sources["second"].model) == (1, "second")
    assert teachers["first"] is teachers["second"]  # one source: read and held once
    _, others = teachers_of(config_of({"first": {"run": str(team)}, "second": {"run": str(team), "step": 0}}))
    with opened(team) as (_, _, trained, _):
        assert_equal(teachers["second"].params, trained.learners["second"].params)
        assert_equal(others["first"].params, trained.learners["first"].params)
        assert_equal(others["second"].params, trained.learners["second"].start)


def test_adapters_are_merged_into_the_teacher(tmp_path):
    game, run = ml.make_game("joint_letter", letters=3), tmp_path / "lora"
    ml.train(game, dict.fromkeys(ROLES, ml.load_model("nano", lora_rank=2)), "magrpo", steps=0, workdir=run, **SMALL)
    with opened(run) as (_, _, begun, _):
        learner = begun.learners["first_second"]
        moved = jax.tree.map(lambda x: x + 0.1, learner.policy.params)
        learner.trained = learner.trained._replace(policy=learner.policy._replace(params=moved))
        checkpoints = Checkpoints(run / "checkpoints")
        checkpoints.save(2, begun.policies(), checkpoints.state(0) | {"step": 2})
        _, teachers = teachers_of(config_of({"first": {"run": str(run)}}))
        assert_equal(teachers["first"].params, learner.params)


def test_an_exported_model_teaches_as_its_run_does(team, tmp_path):
    export(str(team), "first", tmp_path / "first")
    _, teachers = teachers_of(config_of({"first": {"path": str(tmp_path / "first")}, "second": {"preset": "micro"}}))
    assert_equal(teachers["first"].params, load_pretrained(tmp_path / "first")[1])
    assert teachers["second"].config.width > teachers["first"].config.width  # a student may be the smaller one
    other = config_of({"first": {"path": str(tmp_path / "first")}}, letters=4)
    with resolve(other) as plan, pytest.raises(ConfigError, match="first' has another tokenizer than model 'first_second': token 28 is"):
        find_teachers(other, plan)


def test_the_config_distill_makes_one_student_of_a_teams_run(team):
    config = distill.get_config(str(team))
    with resolve(config) as plan:
        sources = find_teachers(config, plan)
    assert plan.assignment.roles == dict.fromkeys(ROLES, "shared")
    assert {role: (source.model, source.step) for role, source in sources.items()} == {"first": ("first", 1), "second": ("second", 1)}
    assert config.game.letters == 3
    with pytest.raises(ConfigError, match="name the team's run behind the file"):
        distill.get_config()


@pytest.mark.parametrize(
    ("teacher", "why"),
    [
        ({"run": "nowhere"}, r"config\.teachers\.first\.run='nowhere' has no checkpoint; it has none"),
        ({"run": "TEAM", "step": 7}, r"first\.run='.*team' has no checkpoint 7; it has 0, 1"),
        ({"run": "TEAM", "model": "frist"}, r"no parameters of a model 'frist' \(config\.teachers\.first\.model\); did you mean 'first'"),
        ({"path": "nowhere"}, r"config\.teachers\.first\.path='nowhere': .*nowhere"),
        ({"preset": "mikro"}, r"config\.teachers\.first\.preset='mikro': unknown model preset 'mikro'"),
    ],
)
def test_a_teacher_that_is_not_there_is_named_before_a_directory_is_made(team, tmp_path, teacher, why):
    teacher = {name: str(team) if value == "TEAM" else value for name, value in teacher.items()}
    game, models, recipe, options = options_of_student({"first": teacher})
    with pytest.raises(ConfigError, match=why):
        ml.train(game, models, recipe, steps=2, workdir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_what_a_teachers_run_would_send_is_refused_without_trust(team, tmp_path):
    run = shutil.copytree(team, tmp_path / "team")
    record = json.loads((run / "config.json").read_text())
    record["config"]["coach"]["url"] = "http://127.0.0.1:1/v1"
    (run / "config.json").write_text(json.dumps(record))
    config = config_of({"first": {"run": str(run)}})
    untrusted = r"first\.run=.*would use coach\.url='http://127.0.0.1:1/v1'\. Nothing of it was run"
    with resolve(config) as plan, pytest.raises(ConfigError, match=untrusted):
        find_teachers(config, plan)


PRESET, URL = {"preset": "nano"}, "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("teachers", "options", "why"),
    [
        ({}, {}, r"config\.recipe\.distill_coef=1 needs a teacher for a role of model 'first_second': set config\.teachers\.first\.run"),
        ({"frist": PRESET}, {}, r"config\.teachers\.frist teaches no role; did you mean 'first'"),
        ({"first": {}}, {}, r"config\.teachers\.first names no teacher: set its run, path, url, context or preset"),
        ({"first": {"url": URL, "path": "a"}}, {}, r"config\.teachers\.first\.url would have no effect: its path names the teacher"),
        ({"first": PRESET | {"key_env": "KEY"}}, {}, r"config\.teachers\.first\.key_env would have no effect: it names no url"),
        ({"first": PRESET | {"model": "x"}}, {}, r"config\.teachers\.first\.model would have no effect: it names no run or url"),
        ({"first": {"url": URL}}, {}, r"an endpoint tells no whole distributions, which recipe\.distill_divergence='reverse_kl'"),
        ({"first": {"url": URL}}, {"recipe": ALONE | {"distill_top_k": 21}}, r"20 likeliest tokens at most, and recipe\.distill_top_k=21"),
        ({"first": {"url": URL}}, {"recipe": ALONE | {"distill_divergence": "sampled", "temperature": 0.5}},
         r"first\.url: an endpoint tells log-probs at temperature 1, and recipe\.temperature=0\.5"),
        ({"first": {"url": URL, "timeout_s": 0.0}}, {}, r"config\.teachers\.first\.timeout_s=0"),
        ({"first": PRESET | {"run": "a"}}, {}, r"config\.teachers\.first\.preset would have no effect: its run names the teacher"),
        ({"first": PRESET | {"step": 2}}, {}, r"config\.teachers\.first\.step would have no effect: it names no run"),
        ({"first": {"run": "a", "step": -1}}, {}, r"config\.teachers\.first\.step=-1 must be at least 0"),
        ({"first": PRESET}, {"recipe": "magrpo"}, r"first would have no effect: recipe\.distill_coef is 0 for model 'first_second'"),
        ({"first": PRESET}, {"models": {"first": "nano", "second": "nano"}}, r"needs a teacher for a role of model 'second'"),
        (
            {"first": PRESET}, {"models": {"first": ml.load_model("nano", kind="frozen"), "second": "nano"}},
            r"config\.teachers\.first would have no effect: model 'first', which plays the role, does not train",
        ),
        ({}, {"models": {"first": "nano", "second": ml.load_model("nano", recipe={"distill_coef": 0.5})}, "recipe": "magrpo"},
         r"config\.models\.second\.recipe\.distill_coef=0\.5 needs a teacher for a role of model 'second'"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_with_its_option(teachers, options, why):
    with pytest.raises(ConfigError, match=why), resolve(config_of(teachers, **options)):
        pass


def test_teachers_are_flags_without_a_section_in_the_config_file():
    command = [sys.executable, "-m", "marl_llm", "train", "quickstart", "--config.recipe.name=grpo", "--config.recipe.distill_coef=1"]
    done = subprocess.run(
        [*command, "--config.teachers.tool.preset=micro", "--config.teachers.planner.preset=small", "--dry_run"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "\nteachers\n  tool       preset=micro\n  planner    preset=small\n" in done.stdout, done.stderr
    assert "teachers 0." in done.stdout  # in the memory that the run takes
