"""Options check themselves where they are defined: types, ranges, and what contradicts inside a section."""

import dataclasses

import pytest

from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.options import ByModels
from marl_llm.runs.sections import SECTIONS, EvaluationSection, OptimizerSection, RolloutSection, ToolsSection, section_of
from marl_llm.training import PlayOptions

CONFIG = base_config("x", "plan_path", "at_grpo")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_config_has_every_option_with_its_default_and_each_says_what_it_means(section):
    values = section_of(CONFIG, section)
    for field in dataclasses.fields(section):
        if field.default is not dataclasses.MISSING:
            assert values[field.name] == field.default
            assert field.default is not None or str(field.metadata["unset"]), f"{field.name} does not say what None stands for"
        assert len(field.metadata["meaning"]) > 5
        assert "None" not in field.metadata["meaning"]


def test_play_options_and_the_rollout_section_have_the_same_defaults():
    defaults = {field.name: field.default for field in dataclasses.fields(RolloutSection)}
    assert {field.name: field.default for field in dataclasses.fields(PlayOptions)}.items() <= defaults.items()


@pytest.mark.parametrize(
    ("section", "values", "why"),
    [
        (RolloutSection, {"max_num_seqs": "many"}, r"config\.rollout\.max_num_seqs='many' must be a whole number"),
        (RolloutSection, {"max_num_seqs": True}, r"config\.rollout\.max_num_seqs=True must be a whole number"),
        (RolloutSection, {"max_num_seqs": None}, r"config\.rollout\.max_num_seqs=None must be a whole number"),
        (RolloutSection, {"batch_invariant": 1}, r"config\.rollout\.batch_invariant=1 must be True or False"),
        (RolloutSection, {"block_pool": "ownn"}, r"config\.rollout\.block_pool='ownn' is not one of own, shared; did you mean 'own'\?"),
        (OptimizerSection, {"b2": 1.0}, r"config\.optimizer\.b2=1\.0 must lie between 0 and 1"),
        (OptimizerSection, {"learning_rate": "fast"}, r"config\.optimizer\.learning_rate='fast' must be a number"),
        (EvaluationSection, {"samples": 3}, r"config\.evaluation\.samples and temperature would have no effect"),
        (ToolsSection, {"address": "h:1"}, r"config\.tools\.address='h:1' would have no effect"),
    ],
)
def test_a_section_that_is_made_is_right(section, values, why):
    section.of(section.config())
    with pytest.raises(ConfigError, match=why):
        section.of(dict(section.config()) | values)


def test_one_models_own_section_is_named_in_the_error():
    with pytest.raises(ConfigError, match=r"config\.models\.tool\.optimizer\.epochs=0 must be at least 1"):
        OptimizerSection.check({"epochs": 0}, "models.tool.optimizer")


def test_what_was_changed_is_what_differs_from_the_default():
    values = dict(RolloutSection.config()) | {"max_num_seqs": 8, "tasks": 3, "timeout_s": None}
    assert RolloutSection.changed(values, ("tasks",)) == {"max_num_seqs": 8}


def test_a_default_that_follows_from_the_models_is_shown_as_values():
    assert str(ByModels(1.5e-3, 1e-6, 1e-4)) == "0.0015; with checkpoints 1e-06, or 0.0001 for their adapters"
    assert str(ByModels(128, 32, 32)) == "128; with checkpoints 32"
