"""What every experiment config starts from, and what a config means.

A config file has `get_config(arg=None)`, starts from `base_config(...)` and sets what differs. The config is locked: a key that
does not exist is refused wherever it is set, in the file or on the command line. Options of the recipe, the game, its scripted player and
the models that are left at None keep the value of the recipe's preset, the game, the player and the model's preset; `--dry_run` prints
what they come to.

`config.game.name` is a game or a workflow of the library, or an object of a file or module of your own (`my_game.py:Lock`); see
`marl_llm.games.make_game`. `config.model` describes every model; `config.models.<name>`, made by `model_section()`, says how one differs.
`config.teachers.<role>`, made by `teacher_section()`, names the model that a role is distilled from.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from marl_llm.algorithms import LOSS_FIELDS, Recipe
from marl_llm.games import GameError, find_game
from marl_llm.models import ModelConfig
from marl_llm.reporting.trackers import missing
from marl_llm.runs import checks
from marl_llm.runs.command import ConfigError
from marl_llm.runs.options import placeholder
from marl_llm.runs.sections import (
    SECTIONS,
    ModelSection,
    OptimizerSection,
    RunSection,
    TeacherSection,
    fill_defaults,
    own_optimizer_fields,
    section_of,
)  # fmt: skip


def _own_values(cls: type, *skip: str) -> dict[str, Any]:
    """A placeholder per field of a dataclass that owns its options; None: as it has them. Tuples are written with commas between."""
    return {field.name: placeholder(field.type) for field in dataclasses.fields(cls) if field.name not in skip}


def _parameters(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """A placeholder per parameter of a game or of its scripted player."""
    return {name: placeholder(p.annotation if p.annotation is not p.empty else type(p.default)) for name, p in parameters.items()}


def model_section(**values) -> config_dict.ConfigDict:
    """What may be said of one model, `config.models.<name>`; None: as `config.model` has it.

    Its `optimizer` and `recipe` hold what is its own of `config.optimizer` and of the loss in `config.recipe`; None: as the team's.

    `kind` is one of `players.KINDS`. A trained or frozen model has a `preset` (random parameters; further keys are fields of `ModelConfig`)
    or a `path` (a Hugging Face checkpoint's directory, whose chat opens as `thinking` says, "on" or "off"), and trains
    adapters if `lora_rank` is set. An outside model has a `url` up to `/chat/completions`, the name `served_as` there, and the environment
    variable `key_env` that holds the key. With `sampler="vllm"` a vLLM server at `url` draws for a trained or frozen model.
    """
    section = _common_section(**{field.name: None for field in dataclasses.fields(ModelSection)})
    section.optimizer = config_dict.ConfigDict({name: placeholder(field.type) for name, field in own_optimizer_fields().items()})
    section.recipe = config_dict.ConfigDict(_own_values(Recipe, *(f.name for f in dataclasses.fields(Recipe) if f.name not in LOSS_FIELDS)))
    section.lock().update(values)
    return section


def _common_section(**values: Any) -> config_dict.ConfigDict:
    """What may be said of all models at once, `config.model`."""
    section = ModelSection.config(**values)
    section.update(_own_values(ModelConfig, "vocab_size", "rope_scaling", "window_pattern", "rope_pattern", "dense_layers", "value_head"))
    return section


def teacher_section(**values) -> config_dict.ConfigDict:
    """Whom one role is distilled from, `config.teachers.<role>`: `run` (with `step` and `model`), `path`, `preset`,
    `context` or `url` (with `model`, `key_env` and `timeout_s`)."""
    section = TeacherSection.config()
    section.lock().update(values)
    return section


class ModelSections(config_dict.ConfigDict):
    """`config.models`: a section by model. One that is named first on the command line is made when it is asked for.

    A name that no model has is refused when the config is resolved.
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and re.fullmatch(r"[A-Za-z][\w-]*", key) and key not in self:
            self[key] = self._new_section()
        return super().__getitem__(key)

    def _new_section(self) -> config_dict.ConfigDict:
        return model_section()


class TeacherSections(ModelSections):
    """`config.teachers`: a section by role, made as those of `ModelSections` are."""

    def _new_section(self) -> config_dict.ConfigDict:
        return teacher_section()


def base_config(name: str, game: str, recipe: str, game_dir: pathlib.Path | None = None) -> config_dict.ConfigDict:
    """The locked base: every key that an experiment may set, with the values that small experiments share.

    `game_dir` is where a run directory keeps a user's file. Raises `GameError` for an unknown game.
    """
    spec = find_game(game, game_dir)
    c = RunSection.config(name=name)
    for section in SECTIONS:
        if section.key:
            c[section.key] = section.config()
    c.game = config_dict.ConfigDict({"name": game, **_parameters(spec.options)})
    c.script = config_dict.ConfigDict(_parameters(spec.script_options))  # options of a value-state game's scripted player
    c.model = _common_section()
    c.models, c.teachers = ModelSections(), TeacherSections()
    c.recipe = config_dict.ConfigDict({"name": recipe, "preset": "paper", **_own_values(Recipe, "name", "preset")})
    c.lock()
    c.models.unlock()  # a config file adds sections by name
    c.teachers.unlock()
    return c


def variant(name: str, arg: str | None, known: tuple[str, ...]) -> str:
    """The variant that a config file was asked for; "" for none. Raises `ConfigError` listing those that it has."""
    if arg in (None, ""):
        return ""
    if arg not in known:
        raise ConfigError(f"{name} has no variant {arg!r}; it has {', '.join(map(repr, known))}")
    return arg


def smoke(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """The `:smoke` variant: the same code paths in about a minute."""
    config.quick_compile = True
    config.steps = min(config.steps, 4)
    config.sft.update(steps=min(config.sft.steps, 10), tasks=min(config.sft.tasks, 8))
    config.evaluation.update(every=2, tasks=16, final_tasks=16)
    config.checkpoint.every = 2
    config.rollout.tasks = min(config.rollout.tasks, 8)
    return config


def check(config: config_dict.ConfigDict, game_dir: pathlib.Path | None = None) -> None:
    """Raises `ConfigError` for keys that are missing or unknown, and for numbers out of range. Makes no game."""
    start = "marl_llm.runs.base.base_config"
    try:
        base = base_config(config.name, config.game.name, config.recipe.name, game_dir)
    except GameError as error:
        raise ConfigError(str(error)) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"the config lacks a name, a game or a recipe; start from {start}") from error
    free = ("config.game", "config.script", "config.models", "config.teachers")  # the game refuses what is not its own
    checks.compare_keys(config, base, "config", start, free)
    for sections, make in (("models", model_section), ("teachers", teacher_section)):
        for name, section in config[sections].items():
            if not isinstance(section, config_dict.ConfigDict):
                raise ConfigError(f"config.{sections}.{name}={section!r} must be made by marl_llm.runs.base.{make.__name__}")
            checks.compare_keys(section, make(), f"config.{sections}.{name}", start)
    fill_defaults(config)
    for section in SECTIONS:
        section.of(section_of(config, section))
    for name, model in config.models.items():
        OptimizerSection.check({key: value for key, value in model.optimizer.items() if value is not None}, f"models.{name}.optimizer")
    for role, teacher in config.teachers.items():
        TeacherSection.check(teacher, f"teachers.{role}")
    checks.parse_placement(config.placement)
    if config.logger and (why := missing(config.logger)):
        raise ConfigError(f"config.logger={config.logger!r} {why}")
