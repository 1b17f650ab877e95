"""Training and evaluation from Python: the runs are those of the command."""

import json
import pathlib
import subprocess
import sys

import pytest

import marl_llm as ml
from marl_llm.games import GameError, find_game
from marl_llm.games.registry import name_of_game
from marl_llm.runs.api import make_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.workdir import read_record
from marl_llm.workflows import Environment

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "rollout": {"tasks": 2},
    "evaluation": {"tasks": 4, "final_tasks": 4, "every": 10, "ablate_roles": False},
    "quick_compile": True,
    "devices": 1,
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A finished run of a library's game, with a model per role."""
    path = tmp_path_factory.mktemp("api") / "run"
    game = ml.make_game("joint_letter", letters=3)
    roles = [role.name for role in game.roles]
    results = ml.train(game, {role: ml.load_model("nano") for role in roles}, "magrpo", steps=2, workdir=path, **SMALL)
    return path, roles, results


def test_a_run_from_python_is_a_run_of_the_command(letters):
    path, roles, results = letters
    record = read_record(path)
    assert record["config"]["game"]["name"] == "joint_letter"
    assert record["config"]["game"]["letters"] == 3
    assert record["config"]["assignment"] == ",".join(f"{role}={role}" for role in roles)
    assert json.loads((path / "evaluation.json").read_text()) == results
    assert {row["phase"] for row in map(json.loads, (path / "metrics.jsonl").open())} == {"train", "eval"}


def test_the_same_call_returns_the_evaluation_and_more_steps_continue_the_run(letters, capsys):
    path, roles, results = letters
    game = ml.make_game("joint_letter", letters=3)
    again = ml.train(game, {role: "nano" for role in roles}, "magrpo", steps=2, workdir=path, **SMALL)
    assert again == results
    assert "is complete" in capsys.readouterr().err
    more = ml.resume(path, steps=3)
    assert more["steps"] == 3
    assert [row["step"] for row in map(json.loads, (path / "metrics.jsonl").open()) if row["phase"] == "train"] == [1, 2, 3]


def test_evaluate_measures_a_checkpoint_and_prints_a_table(letters):
    path, _, results = letters
    found = ml.evaluate(path, step=2, tasks=4)
    assert found["after"] == results["after"]
    assert str(found).splitlines()[-1].lstrip().startswith(("after", "swapped", "letter")) or "after" in str(found)
    with pytest.raises(ConfigError, match="evaluate has no option 'task'; did you mean 'tasks'"):
        ml.evaluate(path, task=4)
    with pytest.raises(ConfigError, match=r"split='train' must be one of test, validation"):
        ml.evaluate(path, split="train")


def test_roles_share_a_model_if_they_are_given_the_same_object():
    one = ml.load_model("nano")
    config = make_config("plan_path", {"tool": one, "planner": one}, steps=1)
    assert config.assignment == "tool=tool_planner,planner=tool_planner"
    assert list(config.models) == ["tool_planner"]
    config = make_config("plan_path", {"tool": ml.load_model("nano"), "planner": ml.load_model("nano")}, steps=1)
    assert set(config.models) == {"tool", "planner"}
    assert list(make_config("plan_path", "nano", steps=1).models) == ["tool_planner"]


def test_a_recipe_is_a_name_a_mapping_or_a_recipe():
    from marl_llm.algorithms import make_recipe

    by_value = make_config("plan_path", "nano", make_recipe("grpo", group_size=3), steps=1)
    by_mapping = make_config("plan_path", "nano", {"name": "grpo", "group_size": 3}, steps=1)
    assert by_value.recipe.group_size == by_mapping.recipe.group_size == 3
    assert by_value.recipe.name == "grpo"
    with pytest.raises(ConfigError, match="lacks the name of the recipe"):
        make_config("plan_path", "nano", {"group_size": 3}, steps=1)


@pytest.mark.parametrize(
    ("models", "options", "why"),
    [
        ({"tool": "nano"}, {}, "'planner' is no role, or has no model; the game's roles are tool, planner"),
        ({"tool": "nano", "planer": "nano", "planner": "nano"}, {}, "'planer' is no role"),
        ("nono", {}, "no checkpoint 'nono' .*no preset of that name; there are nano, micro"),
        (3, {}, "'tool' has a int; give a name or what load_model returns"),
        ("nano", {"rolout": {}}, "there is no option 'rolout'; did you mean 'rollout'"),
        ("nano", {"rollout": {"task": 3}}, "there is no option 'rollout.task'; did you mean 'tasks'"),
        ("nano", {"rollout": 3}, "rollout=3 must be a mapping with some of aborted_limit"),
        ("nano", {"rollout": {"tasks": "many"}}, "rollout.tasks='many' is of another type"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_line(models, options, why):
    with pytest.raises(ConfigError, match=why) as caught:
        make_config("plan_path", models, steps=1, **options)
    assert "\n" not in str(caught.value)


def test_a_model_has_only_options_that_there_are():
    with pytest.raises(ConfigError, match="a model has no option 'lora_rnk'; did you mean 'lora_rank'"):
        ml.load_model("nano", lora_rnk=3)
    assert ml.load_model("nano", lora_rank=3).options == {"preset": "nano", "kind": "trained", "lora_rank": 3}


def closed_environment(closed: list) -> Environment:
    """An environment of one's own, that says when it is closed."""
    import dataclasses

    made = ml.make_game("sums")
    return dataclasses.replace(made, close=lambda: closed.append(True))


def test_an_object_of_ones_own_is_trained_and_stays_open(tmp_path):
    closed: list = []
    environment = closed_environment(closed)
    results = ml.train(environment, "nano", "grpo", steps=1, workdir=tmp_path / "run", **SMALL)
    assert results["steps"] == 1
    assert not closed
    assert read_record(tmp_path / "run")["config"]["game"] == {"name": f"object {environment.workflow.name}"}
    assert ml.evaluate(tmp_path / "run", tasks=2)["after"]["tasks"] == 2


def test_an_object_of_another_process_is_asked_for_again():
    with pytest.raises(GameError, match="'object never given' was an object of another Python process: pass it to marl_llm.train again"):
        find_game("object never given")
    with pytest.raises(GameError, match="neither an Environment nor a Game"):
        name_of_game(Environment)


def test_training_works_in_a_process_that_has_started_jax(tmp_path):
    script = f"""
import jax, jax.numpy as jnp
jnp.ones(3).sum().block_until_ready()
import marl_llm as ml
small = {SMALL!r} | {{"devices": 0}}
first = ml.train("joint_letter", "nano", "magrpo", steps=1, workdir={str(tmp_path / "one")!r}, **small)
second = ml.train("joint_letter", "nano", "magrpo", steps=1, workdir={str(tmp_path / "two")!r}, **small)
assert first["after"] == second["after"], (first, second)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


LOSS = """
import jax.numpy as jnp

def loss(log_probs, old_log_probs, advantages, mask):
    return -jnp.exp(log_probs - old_log_probs) * advantages

def advantages(samples, returns):
    return returns - 0.5
"""


def test_a_loss_and_advantages_of_ones_own_are_files_or_functions_and_a_run_keeps_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "own.py").write_text(LOSS)
    named = {"name": "grpo", "policy_loss": f"{tmp_path}/own.py:loss", "advantages": f"{tmp_path}/own.py:advantages"}
    by_name = ml.train("joint_letter", "nano", named, steps=1, workdir=tmp_path / "named", **SMALL)
    names: dict = {}
    exec(LOSS, names)
    given = {"name": "grpo", "policy_loss": names["loss"], "advantages": names["advantages"]}
    by_value = ml.train("joint_letter", "nano", given, steps=1, workdir=tmp_path / "given", **SMALL)
    plain = ml.train("joint_letter", "nano", "grpo", steps=1, workdir=tmp_path / "plain", **SMALL)
    figures = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[1]) for name in ("named", "given", "plain")]
    key = next(name for name in figures[0] if name.startswith("model/") and name.endswith("/grad_norm"))
    assert figures[0][key] == figures[1][key] != figures[2][key]
    assert by_name["after"] == by_value["after"]
    assert plain["steps"] == 1
    assert (tmp_path / "named" / "game" / "own.py").read_text() == LOSS
    (tmp_path / "own.py").unlink()
    assert ml.resume(tmp_path / "named", steps=2)["steps"] == 2
    with pytest.raises(ConfigError, match="was a function of another Python process"):
        resume_in_another_process(tmp_path / "given")
    (tmp_path / "named" / "game" / "own.py").write_text(LOSS + "\nprint('changed')\n")
    with pytest.raises(ConfigError, match="it would run the code of .*own.py"):
        ml.evaluate(tmp_path / "named", tasks=2)


def resume_in_another_process(path):
    """What a new process would do with the run: it knows no function of this one."""
    from marl_llm.games import registry

    known = dict(registry._GIVEN)
    registry._GIVEN.clear()
    try:
        ml.resume(path, steps=3, trust=True)
    finally:
        registry._GIVEN.update(known)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("loss", "'loss' names no function: write it like 'my_loss.py:loss'"),
        ("nowhere.py:loss", "there is no file nowhere.py .*which 'nowhere.py:loss' names"),
        ("marl_llm.algorithms.losses:clipped_rato", "there is no function 'clipped_rato' in it; did you mean 'clipped_ratio'"),
    ],
)
def test_a_function_that_is_not_there_is_said_in_one_line(name, why, tmp_path):
    with pytest.raises(ConfigError, match=why) as caught:
        ml.train("joint_letter", "nano", {"name": "grpo", "policy_loss": name}, steps=1, workdir=tmp_path / "run", **SMALL)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
