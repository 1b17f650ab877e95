"""What one model of a team has of its own: `config.models.<name>.optimizer` and `config.models.<name>.recipe`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from marl_llm.algorithms import FUNCTIONS, Recipe, with_loss
from marl_llm.games import GameSpec, find_function
from marl_llm.runs import checks
from marl_llm.runs.command import ConfigError

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan

SECTIONS = ("optimizer", "recipe")


def find_functions(config: config_dict.ConfigDict, game_dir: pathlib.Path | None) -> dict[str, GameSpec]:
    """Key of the config -> the user's function that it names, of the team's recipe and of its models'. Raises `GameError`."""
    sections = {"recipe": config.recipe} | {f"models.{name}.recipe": model.recipe for name, model in config.models.items()}
    named = {f"{path}.{field}": section.get(field) for path, section in sections.items() for field in FUNCTIONS}
    return {key: find_function(name, game_dir) for key, name in named.items() if name is not None}


def own_values(config: config_dict.ConfigDict, model: str, section: str) -> dict[str, Any]:
    """What a model sets in its "optimizer" or its "recipe"."""
    return checks.given(config.models[model][section]) if model in config.models else {}


def recipes_of(
    config: config_dict.ConfigDict, trained: Iterable[str], recipe: Recipe, functions: Mapping[str, GameSpec]
) -> dict[str, Recipe]:
    """Trained model -> its recipe: the team's, with the fields of the loss that are its own. Raises `ConfigError`."""
    names = list(trained)
    for model in config.models:
        for section in SECTIONS:
            values = own_values(config, model, section)
            if values and model not in names:
                raise ConfigError(f"config.models.{model}.{section}.{next(iter(values))} would have no effect: the model does not train")
    recipes = {}
    for model in names:
        own = own_values(config, model, "recipe")
        own |= {field: functions[f"models.{model}.recipe.{field}"].thing for field in FUNCTIONS if field in own}
        try:
            recipes[model] = with_loss(recipe, **own) if own else recipe
        except ValueError as error:
            raise ConfigError(f"config.models.{model}.recipe: {error}") from error
    return recipes


def optimizer_of(config: config_dict.ConfigDict, model: str | None = None) -> dict[str, Any]:
    """The options of a model's optimizer: the team's, and those that are its own."""
    return dict(config.optimizer) | (own_values(config, model, "optimizer") if model else {})


def own_learners(config: config_dict.ConfigDict, plan: Plan, platform: str) -> dict[str, Any]:
    """Model -> how it is updated (`LearnerOptions`), of those that have something of their own."""
    names = [name for name in plan.assignment.trained if any(own_values(config, name, section) for section in SECTIONS)]
    return {name: learner_options(config, plan, platform, name) for name in names}


def learner_options(config: config_dict.ConfigDict, plan: Plan, platform: str, model: str | None = None) -> Any:
    """How a model is updated, or with None the team, on a platform ('cpu', 'gpu' or 'tpu'): `marl_llm.training.LearnerOptions`."""
    from marl_llm.runs.building import microbatch_tokens
    from marl_llm.training import LearnerOptions, make_optimizer

    o = optimizer_of(config, model)
    return LearnerOptions(
        plan.recipe if model is None else plan.recipes[model],
        make_optimizer(o["max_grad_norm"], b2=o["b2"], weight_decay=o["weight_decay"], name=o["name"]),
        o["row_tokens"] or plan.row_tokens,
        o["minibatch"],
        o["epochs"],
        microbatch_tokens(config, plan, platform),
        o["critic"],
    )
