"""docs/small_real_model.md: the file of the page makes an environment whose reward pays what the page says, and its commands resolve."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.configs import smol_game, smol_reasoning, smol_search, smol_writing  # noqa: E402
from marl_llm.cli import tiny  # noqa: E402
from marl_llm.games import make_game  # noqa: E402
from marl_llm.runs.command import ConfigError  # noqa: E402
from marl_llm.runs.resolve import resolve  # noqa: E402
from marl_llm.workflows import Controller, Environment, Scripted  # noqa: E402
from marl_llm.workflows.assignment import Assignment  # noqa: E402
from marl_llm.workflows.metrics import rollout_metrics  # noqa: E402
from marl_llm.workflows.samples import sample_table  # noqa: E402

PAGE = (ROOT / "docs" / "small_real_model.md").read_text(encoding="utf-8")
NAME = "my_titles.py:titles"


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The file of the page, in a folder where a user stands."""
    text = "".join(re.findall(r"<!-- my_titles.py -->\n```python\n(.*?)```\n", PAGE, re.DOTALL))
    assert len([line for line in text.splitlines() if line.strip()]) <= 40
    (tmp_path / "my_titles.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_the_reward_pays_for_titles_and_tags_of_the_text_and_for_tags_that_the_title_leaves():
    with make_game(NAME) as environment:
        (task,) = environment.tasks("test", 0, 1)
        content = [word for word in dict.fromkeys(re.findall(r"[a-z]{4,}", task.fields["post"].lower()))]
        title, tags = " ".join(content[:4]), ", ".join(content[4:7])
        for said, figures in (
            ((title, tags), (1.0, 1.0)),
            ((title, ", ".join(content[:3])), (1.0, 0.0)),
            ((" ".join(content[:1] * 4), tags), (0.25, 1.0)),
            (("zebra zebu zoo zero", f"{content[4]}, zebra, {content[5]}, x"), (0.0, 0.5)),
            ((" ".join(content[:2]), ""), (0.25, 0.0)),
            (("", ""), (0.0, 0.0)),
        ):
            player = Scripted(lambda turn, said=said: said[turn.role.name == "tagger"])
            assignment = Assignment(dict.fromkeys(environment.workflow.roles, "p"), {"p": player})
            with Controller(environment.workflow, assignment, None, {}) as controller:
                rollout = controller.play([task])
            found = rollout_metrics(rollout, sample_table(rollout, training=()))
            assert (found["team/title"], found["team/tags"]) == pytest.approx(figures)
            assert found["team/both"] == pytest.approx(sum(figures) / 2)


def test_the_commands_of_the_page_resolve_to_the_file(tmp_path):
    assert f"marl train smol_game:{NAME} --config.model.path=models/smollm2 --workdir=runs/titles" in PAGE
    config = smol_game.get_config(NAME)
    sizes = dict(width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=64)
    config.model.path = str(tiny.make(tmp_path / "tiny", "qwen2", 512, **sizes))
    with resolve(config) as plan:
        assert isinstance(plan.game, Environment)
        assert plan.budgets == {"titler": (160, 24), "tagger": (160, 24)}
    with pytest.raises(ConfigError, match="name the game behind the file"):
        smol_game.get_config()


def test_the_configs_of_a_small_real_model_differ_in_game_and_reward_alone():
    shared = ("model", "rollout", "optimizer", "evaluation")
    writing, own, search = smol_writing.get_config(), smol_game.get_config(NAME), smol_search.get_config()
    reasoning = smol_reasoning.get_config()
    for section in shared:
        assert writing[section] == own[section] == search[section] == reasoning[section]
    assert (writing.game.task, writing.game.constants) == ("descriptions", "graded")
    assert smol_writing.get_config("paper").game.constants == "paper"
    assert search.game.name == "library_questions"
    assert {one.get_config("smoke").steps for one in (smol_search, smol_reasoning, smol_writing)} == {2}
