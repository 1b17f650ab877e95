"""The examples run, each in a few steps, and stay short."""

import importlib.util
import pathlib
import types

import pytest

from marl_llm.reporting import read_metrics

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SMALL = {
    "rollout": {"tasks": 2},
    "sft": {"steps": 2, "tasks": 2},
    "evaluation": {"tasks": 2, "final_tasks": 2, "every": 10, "ablate_roles": False},
    "quick_compile": True,
    "devices": 1,
}


def example(name):
    """An example as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_nine_and_each_is_short_and_in_the_list():
    lines = {name: [line for line in (FOLDER / f"{name}.py").read_text().splitlines() if line.strip()] for name in NAMES}
    assert {name: len(found) for name, found in lines.items() if len(found) > (70 if name == "own_game" else 60)} == {}
    page = (FOLDER / "README.md").read_text()
    assert len(NAMES) == 9
    assert [name for name in NAMES if f"[{name}.py]({name}.py)" not in page] == []


@pytest.mark.parametrize("name", ["train_from_python", "own_loss", "own_team", "own_game", "team_function", "sub_agents"])
def test_a_training_example_trains(name, tmp_path, capsys):
    example(name).main(str(tmp_path / "run"), 1, **SMALL)
    assert "  after " in capsys.readouterr().out
    trained = [line for line in read_metrics(tmp_path / "run") if line["phase"] == "train"]
    assert [line["step"] for line in trained] == [1]
    assert any(value > 0 for key, value in trained[0].items() if key.endswith("/groups"))


def test_the_team_function_is_short_and_passes_every_check():
    from marl_llm.checking import check

    assert len([line for line in (FOLDER / "team_function.py").read_text().splitlines() if line.strip()]) <= 40
    found = check(example("team_function").colours, tasks=4, plays=2, few=2, held_out=8)
    assert [one for one in found if one.status == "fail"] == []


def test_a_planner_that_calls_a_sub_agent_passes_every_check():
    from marl_llm.checking import check

    found = check(example("sub_agents").addition, tasks=4, plays=2, few=2, held_out=8)
    assert [one for one in found if one.status == "fail"] == []


def test_the_own_loop_plays_learns_and_evaluates(capsys):
    example("own_loop").main(steps=1, tasks=2, **SMALL)
    printed = capsys.readouterr().out
    assert printed.startswith("step 0: success ")
    assert 0 <= float(printed.splitlines()[-1]) <= 1


def test_the_own_teams_reward_pays_for_each_part():
    paid = example("own_team").vowels_and_order
    words = {"abc": 1.0, "acb": 2 / 3, "abb": 2 / 3, "bcd": 2 / 3, "": 1 / 3, "zzz": 1 / 3}
    for word, value in words.items():
        assert paid(types.SimpleNamespace(fields={"letter": "a", "final": word})) == pytest.approx(value), word


def test_the_real_team_and_the_served_role_run_on_a_tiny_checkpoint(tmp_path, monkeypatch, capsys):
    from marl_llm.cli import tiny

    sizes = dict(width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=64)
    tiny.make(tmp_path / "tiny", "qwen2", 512, **sizes)
    small = SMALL | {"sft": {"steps": 0}, "optimizer": {"row_tokens": 400, "minibatch": 64}}
    small["rollout"] = {"tasks": 2, "max_num_seqs": 4, "max_tokens": 4}
    example("small_real_team").main(str(tmp_path / "run"), str(tmp_path / "tiny"), 1, **small)
    assert "  after " in capsys.readouterr().out
    assert example("serve_a_role").main(str(tmp_path / "run")) == "titler"
    assert "titler says" in capsys.readouterr().out
