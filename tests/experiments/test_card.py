"""The model card says what the run's files say, and claims nothing that was not measured."""

import json

import pytest

from marl_llm.runs.card import card, run_card
from marl_llm.runs.command import ConfigError

RECORD = {
    "name": "team", "layout": 2, "command": "python -m experiments.train --config=a|b", "commit": "abc", "date": "2026-01-01",
    "hardware": "1 x cpu", "seed": 3,
    "config": {
        "steps": 20, "game": {"name": "lock"}, "recipe": {"name": "grpo"}, "model": {"path": None}, "models": {"b": {"path": "Base/B"}},
    },
}  # fmt: skip
MEASURED = {"success": 0.5, "interval": [0.25, 0.75], "tasks": 40, "aborted": 2}
FIGURES = {"split": "test", "headline": "opened", "steps": 20, "before": MEASURED | {"success": 0.125}, "after": MEASURED}


def test_a_card_names_the_roles_the_command_the_licence_and_the_measured_figures():
    text = card(RECORD, FIGURES, "a", ["keeper", "opener"], 20, "apache-2.0")
    front = dict(line.split(": ", 1) for line in text.split("---")[1].strip().splitlines())
    assert {key: json.loads(value) for key, value in front.items()} == {
        "license": "apache-2.0", "tags": ["marl_llm", "reinforcement-learning"]
    }  # fmt: skip
    for line in ("| plays | `keeper` and `opener` |", "| seed | 3 |", "| commit | abc |", "| checkpoint | after step 20 of 20 |"):
        assert line in text
    assert "| command | `python -m experiments.train --config=a\\|b` |" in text
    assert "| before | 12.5 % | [25.0, 75.0] | 40 | 2 |\n| after | 50.0 % | [25.0, 75.0] | 40 | 2 |" in text
    assert json.loads(text.split("```json\n")[1].split("\n```")[0]) == RECORD["config"]
    assert "was not measured" not in text


def test_a_card_says_what_is_not_known():
    text = card(RECORD, FIGURES, "b", ["opener"], 10)
    assert 'license: "unknown"' in text
    assert 'base_model: "Base/B"' in text
    assert "bound by that checkpoint's licence" in text
    assert "This checkpoint, of step 10, was not measured." in text
    assert "has not been evaluated" in card(RECORD, None, "b", [], 0)


def test_a_damaged_evaluation_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RECORD))
    assert "has not been evaluated" in run_card(tmp_path, "a", ["keeper"], 0)
    for damaged in ("{", "{}", "[]"):
        (tmp_path / "evaluation.json").write_text(damaged)
        with pytest.raises(ConfigError, match="evaluation.json cannot be read"):
            run_card(tmp_path, "a", ["keeper"], 0)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        run_card(tmp_path, "a", ["keeper"], 0)


def test_no_text_of_a_record_becomes_markup_or_another_line_of_the_card():
    evil = "<img src=x onerror=alert(1)>\n# taken | cell"
    record = RECORD | {name: evil for name in ("name", "date", "hardware", "commit", "command")}
    text = card(record, None, "a", ["keeper"], 0)
    body = text.partition("## Config")[0]
    assert "<img" not in body
    assert "\n# taken" not in body
    assert "&lt;img src=x onerror=alert(1)&gt; # taken \\| cell" in body
