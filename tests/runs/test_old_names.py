"""Names of earlier versions: run directories with them are read as their own, code is warned, flags and configs are told the new name."""

import importlib
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

import marl_llm as ml
from marl_llm import hints, old_names, sampling
from marl_llm.algorithms import FIELDS, make_recipe
from marl_llm.algorithms.recipes import with_loss
from marl_llm.games import make_game
from marl_llm.reporting import read_episodes, read_metrics, worst_plays
from marl_llm.runs import workdir
from marl_llm.runs.api import make_config
from marl_llm.runs.card import run_card
from marl_llm.runs.command import ConfigError
from marl_llm.runs.sections import CoachSection, RolloutSection
from marl_llm.viewing.runs import StoredRun
from marl_llm.workflows import Environment
from marl_llm.workflows.storage import read_trajectories

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "rollout": {"tasks": 2},
    "evaluation": {"tasks": 4, "final_tasks": 4, "every": 10, "ablate_roles": False},
    "sft": {"steps": 1, "tasks": 2},
    "quick_compile": True,
    "devices": 1,
}
TIMES = ("time/", "speed/", "programs/", "wall_s", "cpu_s")  # figures that no run repeats


def with_old(values, names):
    """The values under the names that they had."""
    before = {new: old for old, new in names.items()}
    return {before.get(name, name): value for name, value in values.items()}


def make_old(run):
    """Gives a run directory the names and the layout of the version before, which had one optimizer and one schedule."""
    record = json.loads((run / "config.json").read_text())
    config = record["config"]
    config["recipe"] = with_old(config["recipe"], old_names.RECIPE_FIELDS)
    config["rollout"] = with_old(config["rollout"], old_names.ROLLOUT_OPTIONS) | {"swap": "drain", "adapters": "auto"}
    config["optimizer"] = {name: value for name, value in config["optimizer"].items() if name not in ("name", "schedule", "cooldown")}
    config["warm_start"] = config.pop("sft")
    for section in config["models"].values():
        section["recipe"] = with_old(section["recipe"], old_names.RECIPE_FIELDS)
    (run / "config.json").write_text(json.dumps(record | {"layout": 2}))
    parts = {new: old for old, new in old_names.METRICS.items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"phase": "warm_start"} if line["phase"] == "sft" else line for line in lines]
    old = [{"/".join(parts.get(part, part) for part in key.split("/")): value for key, value in line.items()} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    outcomes = (run / "outcomes.jsonl").read_text()
    (run / "outcomes.jsonl").write_text(outcomes.replace('"aborted": false', '"void": false'))
    results = (run / "evaluation.json").read_text()
    (run / "evaluation.json").write_text(results.replace('"aborted": 0', '"void": 0'))


def figures(run):
    """The training lines of a run without what depends on time."""
    lines = [line for line in read_metrics(run) if line["phase"] == "train"]
    return [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of today, and a copy of it with the names of the version before."""
    folder = tmp_path_factory.mktemp("names")
    game = ml.make_game("joint_letter", letters=3)
    models = {role.name: ml.load_model("nano") for role in game.roles}
    ml.train(game, models, {"name": "magrpo", "group_size": 3}, steps=2, workdir=folder / "new", **SMALL)
    shutil.copytree(folder / "new", folder / "old")
    make_old(folder / "old")
    return folder / "new", folder / "old"


def test_an_old_name_of_the_engine_is_told_the_new_one():
    for old, new in old_names.ENGINE_NAMES.items():
        assert hasattr(sampling, new)
        with pytest.raises(AttributeError, match=f"{old} is called {new} now"):
            getattr(sampling, old)


@pytest.mark.parametrize(("module", "old"), [(module, old) for module, names in old_names.MODULE_NAMES.items() for old in names])
def test_code_that_imports_an_old_name_is_warned_and_gets_the_new_one(module, old):
    room = importlib.import_module(module)
    with pytest.warns(FutureWarning, match=f"{module}.{old} is called {old_names.MODULE_NAMES[module][old]} now"):
        assert getattr(room, old) is getattr(room, old_names.MODULE_NAMES[module][old])
    with pytest.raises(AttributeError, match=f"'{module}' has no attribute 'Wrld'"):
        room.Wrld  # noqa: B018


def test_a_file_of_a_game_that_names_the_old_type_is_played(tmp_path):
    text = (pathlib.Path(__file__).parents[1] / "games" / "own" / "coached.py").read_text(encoding="utf-8")
    (tmp_path / "before.py").write_text(text.replace("Environment", "World"), encoding="utf-8")
    with pytest.warns(FutureWarning, match="World is called Environment now"), make_game(f"{tmp_path / 'before.py'}:echo") as game:
        assert isinstance(game, Environment)


def test_an_old_run_is_evaluated_viewed_and_continued_with_equal_figures(runs):
    new, old = runs
    text = (old / "metrics.jsonl").read_text() + (old / "config.json").read_text()
    assert all(f'"{word}"' in text for word in ("branches", "slots", "exact", "correction_cap"))
    assert "useful_groups" in text
    assert "groups_with_signal" not in text
    record = workdir.read_record(old)
    assert record["layout"] == workdir.LAYOUT == 4
    assert record["config"] == workdir.read_record(new)["config"]
    assert figures(old) == figures(new) != []
    assert '"void"' in (old / "outcomes.jsonl").read_text() + (old / "evaluation.json").read_text()
    for view in (StoredRun.records, StoredRun.evaluation, StoredRun.outcomes):
        assert view(StoredRun(old)) == view(StoredRun(new))
    assert "| before |" in run_card(old, "solo", ["letter"], 2)
    assert ml.evaluate(old, trust=True, step=2, tasks=4)["after"] == ml.evaluate(new, step=2, tasks=4)["after"]
    assert ml.resume(old, trust=True, steps=3)["after"] == ml.resume(new, steps=3)["after"]
    assert [line["step"] for line in figures(old)] == [1, 2, 3]
    assert [line["phase"] for line in read_metrics(old)] == ["sft", "eval", "train", "train", "eval", "train", "eval"]
    assert figures(old) == figures(new)
    assert workdir.differences(*(workdir.read_record(run)["config"] for run in (old, new))) == []


def test_what_the_converter_does_not_know_is_refused(runs, tmp_path):
    _, old = runs
    for number, (change, why) in enumerate((
        ({"branches": 3, "group_size": 4}, "config.recipe has both 'branches' and 'group_size', which is its name now"),
        ({"of_another_time": 3}, "of_another_time"),
    )):  # fmt: skip
        run = tmp_path / str(number)
        run.mkdir()
        record = json.loads((old / "config.json").read_text())
        record["config"]["recipe"] |= change
        (run / "config.json").write_text(json.dumps(record | {"layout": 2}))
        with pytest.raises(ConfigError, match=why):
            workdir.read_config(run, trusted=True)
    (run / "config.json").write_text(json.dumps(record | {"layout": 1}))
    with pytest.raises(ConfigError, match="was written by an earlier version"):
        workdir.read_config(run, trusted=True)


def test_values_are_renamed_with_their_options():
    config = {"rollout": {"swap": "now", "adapters": "together", "pool": "shared", "tasks": 2}}
    rollout = old_names.convert_config(config)["rollout"]
    assert rollout == {"weight_update": "in_flight", "lora_serving": "multi", "block_pool": "shared", "tasks": 2}
    assert old_names.convert_config({"rollout": rollout})["rollout"] == rollout


def test_an_aborted_play_of_before_is_none_of_the_worst(tmp_path):
    play = {"episode": "a", "status": "void", "success": 0, "void": True}
    (tmp_path / "episodes.jsonl").write_text(json.dumps(play) + "\n")
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(play) + "\n")
    new = [{"episode": "a", "status": "aborted", "success": 0, "aborted": True}]
    assert read_episodes(tmp_path) == read_trajectories(tmp_path) == new
    assert worst_plays([(one, None) for one in new], 1) == []


def test_an_action_without_a_score_aborts_its_play_under_either_word():
    old = {"coach": {"missing": "void"}, "game": {"raises": "void", "on_bad_feedback": "void", "name": "void"}}
    new = {"coach": {"missing": "abort"}, "game": {"raises": "abort", "on_bad_feedback": "abort", "name": "void"}}
    assert old_names.convert_config(old) == old_names.convert_config(new) == new
    with pytest.raises(ConfigError, match=r"missing='void'.*it is called 'abort' now"):
        CoachSection.check({"missing": "void"})


def test_each_new_name_is_an_option_and_no_old_one_is():
    for names, known in ((old_names.RECIPE_FIELDS, FIELDS), (old_names.ROLLOUT_OPTIONS, RolloutSection.__dataclass_fields__)):
        assert set(names.values()) <= set(known)
        assert not set(names) & set(known)


def test_code_with_an_old_field_is_warned():
    with pytest.warns(FutureWarning, match="recipe field 'branches' is called 'group_size' now"):
        recipe = make_recipe("grpo", branches=3)
    assert recipe == make_recipe("grpo", group_size=3)
    with pytest.warns(FutureWarning, match="'reduce' is called 'loss_aggregation' now"):
        assert with_loss(recipe, reduce="token_mean").loss_aggregation == "token_mean"
    with pytest.raises(ValueError, match="recipe has both 'branches' and 'group_size'"), pytest.warns(FutureWarning):
        make_recipe("grpo", branches=3, group_size=4)


def test_a_flag_or_an_option_with_an_old_name_is_told_the_new_one():
    with pytest.raises(ConfigError, match="it is called 'max_num_seqs' now"):
        make_config("plan_path", "nano", rollout={"slots": 3}, steps=1)
    with pytest.raises(ConfigError, match=r"weight_update='now'.*it is called 'in_flight' now"):
        RolloutSection.check({"weight_update": "now"})
    assert hints.suggestion("branches", ("group_size", "branching")) == "it is called 'group_size' now"
    assert hints.meant("branchs", ("branches", "x")) == "; did you mean 'branches'?"
    flags = ["--config=experiments/configs/quickstart.py", "--config.recipe.branches=3"]
    command = [sys.executable, "-m", "experiments.train", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["error: --config.recipe.branches: unknown key 'branches'; it is called 'group_size' now"]
