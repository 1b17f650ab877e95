"""Which tasks teach, lists of tasks, and rewards computed again."""

import json

import faulty_games
import numpy as np
import pytest

from marl_llm.algorithms import Samples, make_recipe
from marl_llm.checking import Subject
from marl_llm.cli import profiling, rescore
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import _listed
from marl_llm.training.batch import Batch
from marl_llm.training.packing import Tokens, TokenSample


def batch(team):
    """One sample per reward: `team[task]` are the rewards of a task's plays."""
    rewards = np.asarray(team, np.float32)
    tasks, plays = rewards.shape
    column = np.arange(tasks * plays, dtype=np.int32)
    tokens = Tokens.of([TokenSample((1, 2), np.asarray([3]), np.zeros(1, np.float32), str(i)) for i in column])
    zero = np.zeros_like(column)
    paid = dict(team=rewards.reshape(-1), local=np.zeros(len(column), np.float32), where=np.ones(len(column), bool))
    table = Samples(instance=column // plays, env=column, agent=zero, turn=zero, trajectory=column, **paid, order=zero)
    return Batch(0, ("one",), tokens, table, zero, {}, lambda *_: [])


def test_a_task_teaches_if_one_of_its_groups_has_unequal_returns():
    rows = profiling._rows(make_recipe("grpo", group_size=2), batch([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    assert [(row["task"], row["mean"], row["spread"], row["teaches"]) for row in rows] == [
        (0, 0.5, 0.5, True), (1, 1.0, 0.0, False), (2, 0.0, 0.0, False),
    ]  # fmt: skip
    text = profiling.table(rows)
    assert "3 tasks: 1 give a gradient, 2 do not" in text
    assert "no gradient: 1, 2" in text


def test_a_profile_takes_a_checkpoint_and_leaves_a_configs_own(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(profiling, "profile", lambda config, tasks: seen.append((config.model.path, config.recipe.group_size, tasks)) or [])
    monkeypatch.setattr(profiling, "table", lambda rows: "none")
    writing = "experiments/configs/smol_writing.py"
    assert profiling.main([writing, "--path=models/smollm2", "--tasks=3", "--plays=2"]) == 0
    assert profiling.main([writing, "--tasks=3", "--plays=2"]) == 0
    assert seen == [("models/smollm2", 2, 3), (None, 2, 3)]


@pytest.mark.parametrize(("rewards", "means"), [("team", [0.5, 1.0]), ("local", [-3.0, -3.0]), ("mixed", [-2.5, -2.0])])
def test_a_profile_tells_the_reward_of_the_recipe(rewards, means):
    played = batch([[1.0, 0.0], [1.0, 1.0]])
    played.table.local[:] = -3.0
    assert [row["mean"] for row in profiling._rows(make_recipe("grpo", group_size=2, rewards=rewards), played)] == means


def test_a_list_of_tasks_is_played_again_and_again_and_only_in_training(tmp_path):
    environment, path = faulty_games.team(), tmp_path / "tasks.json"
    path.write_text(json.dumps({"tasks": [5, 9]}))
    few = _listed(environment, str(path))
    all_ = environment.tasks("train", 0, 12)
    found = few.tasks("train", 2, 3)
    assert [task.number for task in found] == [2, 3, 4]
    assert [task.fields for task in found] == [all_[5].fields, all_[9].fields, all_[5].fields]
    assert few.tasks("test", 0, 2) == environment.tasks("test", 0, 2)
    assert _listed(environment, None) is environment
    path.write_text('{"tasks": []}')
    with pytest.raises(ConfigError, match="make it with marl_llm profile"):
        _listed(environment, str(path))


def test_rescore_shows_which_calls_other_rewards_would_pay_otherwise():
    environment = faulty_games.team()
    (episode,) = Subject(environment).play(environment.tasks("train", 0, 1), environment.script)
    (path,) = episode.trajectories
    same, other = rescore._calls(environment, path), rescore._calls(faulty_games.unbounded_reward(), path)
    assert [call["stored"] for call in same] == [call["now"] for call in same]
    assert other[0]["now"] == other[0]["stored"] + len(path.calls[0].text)
    text = rescore.table([{"calls": other}], {"aborted": 2, "tree": 0})
    assert text.splitlines()[1].split()[-1] == "1"
    assert text.endswith("1 plays; left out: 2 aborted")
