"""Parts of the optimizer and of the loss that one model of a team has of its own."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import marl_llm as ml
from marl_llm.runs.api import make_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.loop import learning_rates, rate_figures
from marl_llm.runs.own_options import learner_options, own_learners
from marl_llm.runs.resolve import resolve
from marl_llm.training import make_optimizer

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"rollout": {"tasks": 2}, "quick_compile": True, "devices": 1}


def config_of(**sections):
    """Two models of Plan-Path; `sections`: what one of them, the planner, has of its own."""
    return make_config("plan_path", {"tool": "nano", "planner": ml.load_model("nano", **sections)}, "at_grpo", steps=4, **SMALL)


def test_each_model_has_its_learning_rate_and_schedule():
    config = config_of(optimizer={"learning_rate": 1e-2, "warmup": 0})
    with resolve(config):
        rates, critic_rates = learning_rates(config, ("tool", "planner"), 0, 4)
    assert rates == {"tool": pytest.approx(1.5e-3 / 5), "planner": pytest.approx(1e-2)}
    assert critic_rates == rates
    assert rate_figures(rates)["model/planner/learning_rate"] == pytest.approx(1e-2)
    assert rate_figures(0.5) == {"learning_rate": 0.5}
    alike = config_of()
    with resolve(alike):
        assert learning_rates(alike, ("tool", "planner"), 0, 4) == (pytest.approx(3e-4), pytest.approx(3e-4))


def test_each_model_has_its_optimizer_and_its_schedule():
    config = config_of(optimizer={"name": "muon", "schedule": "cosine", "warmup": 0})
    config.optimizer.update(schedule="constant", decay_steps=10)
    with resolve(config) as plan:
        rates, _ = learning_rates(config, ("tool", "planner"), 5, 10)
        own = own_learners(config, plan, "cpu")
        assert own["planner"].optimizer is make_optimizer(1.0, b2=0.99, weight_decay=0.0, name="muon")
        assert learner_options(config, plan, "cpu").optimizer is make_optimizer(1.0, b2=0.99, weight_decay=0.0, name="adamw")
    assert rates == {"tool": pytest.approx(1.5e-3), "planner": pytest.approx(1.5e-3 * 0.525)}
    config.models.planner.optimizer.schedule = None
    with pytest.raises(ConfigError, match=r"config.optimizer.decay_steps=10 would have no effect: schedule is not linear or cosine or wsd"):
        with resolve(config):
            pass


def test_a_rate_reaches_its_model_alone():
    recipe = {"name": "at_grpo", "entropy_coef": 0.1}  # so that groups of equal rewards have a gradient too
    with ml.open_team("plan_path", {"tool": "nano", "planner": "nano"}, recipe, **SMALL) as team:
        team.start_rl()
        before = jax.device_get(team.learners["tool"].policy.params), jax.device_get(team.learners["planner"].policy.params)
        team.learn(team.play(0, 0, 2), {"tool": 0.0, "planner": 1e-2})
        for name, old in zip(("tool", "planner"), before, strict=True):
            now = jax.device_get(team.learners[name].policy.params)
            same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(now), strict=True))
            assert same == (name == "tool")


def test_each_model_has_its_loss_and_optimizer(tmp_path):
    own = {"optimizer": {"max_grad_norm": 0.5, "minibatch": 4}, "recipe": {"kl_coef": 0.05, "loss": "cispo"}}
    evaluation = {"tasks": 2, "final_tasks": 2, "every": 10, "ablate_roles": False}
    results = ml.train(
        "plan_path", {"tool": "nano", "planner": ml.load_model("nano", **own)}, "at_grpo", steps=1, workdir=tmp_path / "run",
        evaluation=evaluation, **SMALL,
    )  # fmt: skip
    assert results["steps"] == 1
    figures = next(line for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if line["phase"] == "train")
    assert figures["model/planner/kl_coef"] == 0.05
    assert figures["model/tool/kl_coef"] == 0
    assert "model/planner/kl" in figures
    assert "model/tool/kl" not in figures
    assert "model/tool/clip_low" in figures
    assert "model/planner/clip_low" not in figures  # cispo clips no ratio
    assert ml.resume(tmp_path / "run", steps=2)["steps"] == 2


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"optimizer": {"learning_rate": -1.0}}, r"config.models.planner.optimizer.learning_rate=-1.0 must be positive and finite"),
        ({"optimizer": {"minibatch": 0}}, r"config.models.planner.optimizer.minibatch=0 must be at least 1"),
        ({"optimizer": {"name": "lion"}}, r"config.models.planner.optimizer.name='lion'"),
        ({"optimizer": {"name": "adafactor", "b2": 0.9}}, r"planner.optimizer.b2 would have no effect: name is not adamw or muon"),
        ({"optimizer": {"cooldown": 0.5}}, r"config.models.planner.optimizer.cooldown would have no effect: schedule is not wsd"),
        ({"recipe": {"clip_low": 3.0}}, r"config.models.planner.recipe: at_grpo: clip_low=3.0 must be a number"),
        ({"recipe": {"kl_kind": "k1"}}, r"config.models.planner.recipe: at_grpo: kl_kind='k1' would have no effect"),
        ({"kind": "frozen", "optimizer": {"warmup": 1}}, "planner.optimizer.warmup would have no effect: the model does not train"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(sections, why):
    with pytest.raises(ConfigError, match=why), resolve(config_of(**sections)):
        pass


def test_a_field_of_the_team_is_no_option_of_a_model():
    with pytest.raises(ConfigError, match="there is no option 'models.planner.recipe.group_size'"):
        config_of(recipe={"group_size": 2})


def dry_run(*flags):
    """What `marl train quickstart` says with these flags, before anything is loaded."""
    command = [sys.executable, "-m", "marl_llm", "train", "quickstart", *flags, "--dry_run"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_models_options_are_flags_without_a_section_in_the_config_file():
    done = dry_run("--config.models.planner.optimizer.learning_rate=3e-4", "--config.models.planner.recipe.entropy_coef=0.5")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  planner") and "kind=" in line]
    assert "optimizer.learning_rate=0.0003, recipe.entropy_coef=0.5" in line
    wrong = dry_run("--config.models.planer.optimizer.learning_rate=3e-4")
    assert (wrong.returncode, wrong.stderr) == (2, "error: config.models.planer plays no role; did you mean 'planner'?\n")
