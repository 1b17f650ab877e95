"""Configs of code and maths: every variant is made of known keys, and `:full` has the paper's constants on environments of files."""

import importlib

import pytest

from marl_llm.runs.base import check
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve

VARIANTS = {
    "function_debate": ("", "smoke", "grpo", "full"),
    "sums": ("", "smoke", "grpo", "ensemble", "ensemble_grpo", "full", "ensemble_full"),
}
FULL = {("function_debate", "full"): "code_debate", ("sums", "full"): "maths_debate", ("sums", "ensemble_full"): "maths_ensemble"}


def config(file, variant):
    return importlib.import_module(f"experiments.configs.{file}").get_config(variant)


@pytest.mark.parametrize(("file", "variant"), [(file, variant) for file, known in VARIANTS.items() for variant in known])
def test_every_variant_is_made_of_known_keys(file, variant):
    c = config(file, variant)
    check(c)
    if (file, variant) in FULL:
        assert (c.game.name, c.steps, c.rollout.tasks, c.optimizer.learning_rate) == (FULL[file, variant], 150, 32, 1e-6)
        assert (c.model.thinking, c.optimizer.weight_decay, c.recipe.name) == ("off", 0.01, "at_grpo")
        with pytest.raises(ConfigError, match="train and test must name parquet, jsonl or json files"):
            resolve(c)
    else:
        with resolve(c) as plan:
            assert plan.recipe.name == ("grpo" if variant.endswith("grpo") else "at_grpo")
            assert plan.recipe.group_size == 4
