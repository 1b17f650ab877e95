"""Training and evaluation from Python: `marl_llm.train`, `evaluate`, `load_model` and `make_game`, as in a notebook.

    import marl_llm as ml

    game = ml.make_game("plan_path")
    results = ml.train(game, {"tool": ml.load_model("micro"), "planner": ml.load_model("micro")}, "at_grpo", steps=200, workdir="runs/x")
    print(ml.evaluate("runs/x", tasks=100))

A run that is started here is a run like any other: its directory is resumed, evaluated and viewed by the command `marl` too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.runs.command import ConfigError
from marl_llm.runs.evaluate_run import EvaluationOptions, evaluate_run
from marl_llm.runs.measuring import page_text
from marl_llm.runs.train_run import Launch, train_run
from marl_llm.runs.workdir import game_dir_of, read_config

if TYPE_CHECKING:
    from marl_llm.algorithms import Recipe
    from marl_llm.games import Game
    from marl_llm.training import Team
    from marl_llm.workflows import Environment

DEEP = {"stacked_layers": True}  # of a team that begins with checkpoints: one layer's program, which compiles in seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """One model of a team. Roles that are given the same object share its parameters; equal but separate objects are separate models.

    Attributes:
      options: what `config.models.<name>` holds: `preset` or `path`, `kind`, `lora_rank`, and fields of the shape
        (`marl_llm.runs.base.model_section`).
    """

    options: Mapping[str, Any]


class Results(dict):
    """The figures of an evaluation, as `evaluation.json` holds them. Printed, they are a table."""

    def __str__(self) -> str:
        if "duels" in self:
            from marl_llm.runs.duels import duel_text

            return duel_text(self["duels"])
        return page_text(self, self["headline"])


def load_model(name: str | os.PathLike, *, lora_rank: int | None = None, kind: str = "trained", **options: Any) -> Model:
    """A model of a team: a checkpoint, or a small model with random parameters. Its weights are read when training starts.

    Args:
      name: a checkpoint directory in Hugging Face's form, a `.gguf` file, or a preset of `marl_llm.models.PRESETS`, e.g. "micro".
      lora_rank: trains adapters of this rank on the frozen model; None: trains all parameters.
      kind: "trained" or "frozen".
      options: further keys of `marl_llm.runs.base.model_section`, e.g. `lora_alpha=16.0`, `compute_dtype="bfloat16"`, `thinking="off"`,
        and what is its own of the optimizer and the loss: `optimizer={"learning_rate": 1e-5}`, `recipe={"kl_coef": 0.01}`.

    Raises `ConfigError` if there is neither such a checkpoint nor such a preset, for a checkpoint whose config cannot be read, and for an
    unknown option.
    """
    from marl_llm.models import PRESETS, read_config
    from marl_llm.runs.base import model_section

    text = os.fspath(name)
    if os.path.exists(text):
        try:
            read_config(text)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        where = {"path": text}
    elif text in PRESETS:
        where = {"preset": text}
    else:
        raise ConfigError(
            f"there is no checkpoint {text!r} (from {os.getcwd()}), and no preset of that name"
            f"{hints.meant(text, PRESETS) or '; there are ' + ', '.join(PRESETS)}. "
            "`marl model smollm2 --out=models/smollm2` fetches a small real model"
        )
    given = where | {"kind": kind, "lora_rank": lora_rank} | options
    known = model_section()
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"a model has no option {unknown[0]!r}{hints.meant(unknown[0], known) or '; it has ' + ', '.join(known)}")
    return Model(MappingProxyType({key: value for key, value in given.items() if value is not None}))


def make_config(
    game: str | Game | Environment, models: Any, recipe: str | Recipe | Mapping = "at_grpo", **options: Any
) -> config_dict.ConfigDict:
    """The config that `train` runs; arguments as there. `print(make_config(...))` shows every option that there is."""
    from marl_llm.games.registry import name_of_game
    from marl_llm.runs.base import base_config, model_section

    name, game_options = (game, {}) if isinstance(game, str) else name_of_game(game)
    recipe_options = _recipe_options(recipe)
    try:
        config = base_config(name, game=name, recipe=recipe_options["name"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    config.model.kind = None
    config.model.lora_alpha = None
    config.assignment, sections = _assign(models, _roles_of(config, game, game_options))
    for model, section in sections.items():
        config.models[model] = model_section(**{"lora_alpha": 16.0} if section.get("lora_rank") else {})
        _update(config.models[model], section, f"models.{model}.")
    defaults = DEEP if any("path" in section for section in sections.values()) else {}
    given = defaults | {"recipe": recipe_options, "game": game_options} | options
    _update(config, given, "")
    return config


def train(
    game: str | Game | Environment,
    models: Any,
    recipe: str | Recipe | Mapping = "at_grpo",
    *,
    steps: int,
    workdir: str | os.PathLike,
    **options: Any,
) -> Results:
    """Trains a team and returns its final evaluation; the run directory holds all that a run of the command holds.

    Called again with the same arguments it continues the run; of one that is complete it returns the evaluation. It may be called many
    times in a process, before or after JAX has started. Devices that JAX has started with are used: start it with
    `marl_llm.training.use_cpu_devices(n)` for n CPU devices.

    Args:
      game: a name as `make_game` reads it, what `make_game(name, **options)` returned, or a `Game` or `Environment` of your own. A run of
        an object that has no name is continued by passing the object again.
      models: role -> its `Model` or the name that `load_model` takes; roles with the same `Model` share it. A single one: all roles do.
      recipe: a name of `marl_llm.algorithms.RECIPES`, a `Recipe`, or a mapping such as `{"name": "grpo", "group_size": 8}`. A loss or
        advantages of your own are functions: `{"name": "grpo", "policy_loss": my_loss}` (`marl_llm.algorithms.functions`).
      steps: optimisation steps: one rollout and one update of each model that trains.
      workdir: the run's directory.
      options: keys and sections of the config, e.g. `seed=1, rollout={"tasks": 16}, optimizer={"learning_rate": 1e-4}`
        (docs/options.md).

    Raises `ConfigError` for what cannot be run and `TrainingError` for a run that cannot go on, each in one line.
    """
    config = make_config(game, models, recipe, steps=steps, **options)
    return Results(train_run(config, pathlib.Path(workdir), Launch(config_file="marl_llm.train")))


@contextlib.contextmanager
def open_team(
    game: str | Game | Environment, models: Any, recipe: str | Recipe | Mapping = "at_grpo", **options: Any
) -> Iterator[Team]:
    """A team to be trained by a loop of your own, as `marl_llm.training.team` describes it; arguments as those of `train`.

    Nothing is written. Raises `ConfigError` for what cannot be trained.
    """
    from marl_llm.runs.base import check
    from marl_llm.runs.building import build_team, start_jax, tools_of
    from marl_llm.runs.resolve import resolve

    config = make_config(game, models, recipe, **options)
    check(config)
    mesh = start_jax(config, None)
    with tools_of(config), resolve(config) as plan, build_team(plan, config, mesh) as team:
        yield team


def resume(workdir: str | os.PathLike, *, trust: bool = False, **options: Any) -> Results:
    """Continues a run to its end, or further with `steps=...`, and returns the final evaluation.

    `options` are as those of `train`. A directory that is not this user's own is refused without `trust` (docs/trust.md).
    """
    path = pathlib.Path(workdir)
    config = read_config(path, trust)
    _update(config, options, "")
    return Results(train_run(config, path, Launch(config_file="marl_llm.resume", game_dir=game_dir_of(path))))


def evaluate(run: str | os.PathLike, *, trust: bool = False, **options: Any) -> Results:
    """Evaluates a checkpoint of a run on held-out tasks: before and after training, swapped, and each role's start put back.

    `options` are fields of `marl_llm.runs.evaluate_run.EvaluationOptions`, e.g. `step=100, split="validation", tasks=64, temperature=1.0`.
    Raises `ConfigError` for an unknown option, and as `evaluate_run`.
    """
    known = [field.name for field in dataclasses.fields(EvaluationOptions)]
    if unknown := [key for key in options if key not in known]:
        raise ConfigError(f"evaluate has no option {unknown[0]!r}{hints.meant(unknown[0], known) or '; it has ' + ', '.join(known)}")
    tuples = {key: tuple(options[key]) for key in ("seats", "opponents", "best_of") if key in options}
    results, _ = evaluate_run(os.fspath(run), EvaluationOptions(**options | tuples), trust)
    return Results(results)


def _recipe_options(recipe: str | Recipe | Mapping) -> dict[str, Any]:
    """The keys of `config.recipe` that a recipe sets; functions by the names under which `find_function` finds them again."""
    from marl_llm.algorithms import FUNCTIONS, make_recipe
    from marl_llm.games.registry import name_of_function

    if isinstance(recipe, str):
        return {"name": recipe}
    if isinstance(recipe, Mapping):
        options = dict(recipe)
        if "name" not in options:
            raise ConfigError(f"recipe={options} lacks the name of the recipe that it starts from, e.g. 'name': 'grpo'")
    else:
        preset = make_recipe(recipe.name, recipe.preset)
        values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
        options = {name: value for name, value in values.items() if value != getattr(preset, name)}
        options |= {"name": recipe.name, "preset": recipe.preset}
    functions = {key: name_of_function(options[key]) for key in FUNCTIONS if callable(options.get(key))}
    return options | functions


def _roles_of(config: config_dict.ConfigDict, game: str | Game | Environment, options: Mapping[str, Any]) -> list[str]:
    """The names of a game's roles; an environment that is made to see them is closed again."""
    from marl_llm.games import find_game
    from marl_llm.runs.players import budgets
    from marl_llm.workflows import Environment

    if not isinstance(game, str):
        return list(budgets(game))
    try:
        made = find_game(config.game.name).make(**options)
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    if isinstance(made, Environment):
        made.close()
    return list(budgets(made))


def _assign(models: Any, roles: list[str]) -> tuple[str, dict[str, dict]]:
    """`config.assignment`, and model -> its section. A model is named by its role, or by its roles with "_" between."""
    if not isinstance(models, Mapping):
        models = dict.fromkeys(roles, load_model(models) if isinstance(models, str) else models)
    if wrong := [role for role in models if role not in roles] or [role for role in roles if role not in models]:
        raise ConfigError(f"models: {wrong[0]!r} is no role, or has no model; the game's roles are {', '.join(roles)}")
    made = {role: load_model(model) if isinstance(model, str) else model for role, model in models.items()}
    if wrong := [role for role, model in made.items() if not isinstance(model, Model)]:
        raise ConfigError(f"models: {wrong[0]!r} has a {type(made[wrong[0]]).__name__}; give a name or what load_model returns")
    names = {model: "_".join(role for role in roles if made[role] is model) for model in made.values()}
    assignment = ",".join(f"{role}={names[made[role]]}" for role in roles)
    return assignment, {name: dict(model.options) for model, name in names.items()}


def _update(section: config_dict.ConfigDict, values: Mapping[str, Any], path: str) -> None:
    """Sets keys and sections of a config. Raises `ConfigError` naming a key that is not there, or a value of another type."""
    from marl_llm.runs.base import TeacherSections

    for key, value in values.items():
        where = f"{path}{key}"
        if key not in section and not isinstance(section, TeacherSections):  # which makes one by name
            raise ConfigError(f"there is no option {where!r}{hints.meant(key, section) or '; there are ' + ', '.join(section)}")
        if isinstance(section[key], config_dict.ConfigDict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}={value!r} must be a mapping with some of {', '.join(section[key])}")
            _update(section[key], value, f"{where}.")
            continue
        try:
            section[key] = ",".join(map(str, value)) if isinstance(value, tuple) else value
        except TypeError as error:
            raise ConfigError(f"{where}={value!r} is of another type than the option's: {error}") from error
