"""What a config means: typed values that were checked one by one and against each other, ready to be built from."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import config_dict

from marl_llm.algorithms import FUNCTIONS, Recipe, make_recipe, pay_reach
from marl_llm.games import Game, GameSpec, find_game
from marl_llm.models import ModelConfig
from marl_llm.runs import checks, players
from marl_llm.runs.base import check
from marl_llm.runs.coaching import check_coach, cost_line
from marl_llm.runs.command import ConfigError
from marl_llm.runs.contradictions import check_whole
from marl_llm.runs.own_options import SECTIONS, find_functions, own_values, recipes_of
from marl_llm.runs.sections import (
    ROW_TOKENS,
    CheckpointSection,
    EvaluationSection,
    OptimizerSection,
    RolloutSection,
    SftSection,
    fill_open_options,
)  # fmt: skip
from marl_llm.untrusted import read_json_file
from marl_llm.workflows import Assignment, Environment, Task, with_roles


@dataclasses.dataclass(frozen=True)
class Plan:
    """A resolved config: typed values that were checked one by one and together. A context manager, for an environment owns tools.

    Attributes:
      found: what the game's name stands for. game: the game, with its options.
      played: the game itself, or, of a value-state game with `config.hosted`, the environment that it makes.
      text: budgets of that environment, where it is played in ordinary text.
      recipe: of the team. recipes: trained model -> its own, which differs in its loss at most.
      options: model -> what its section came to. shapes: model of this program -> its shape.
      script: options of the scripted player.
      own_files: a user's files, from their names in the run's folder `game/` to where they are.
    """

    found: GameSpec
    game: Game | Environment
    played: Game | Environment
    text: Any
    recipe: Recipe
    recipes: dict[str, Recipe]
    assignment: Assignment
    options: dict[str, dict]
    shapes: dict[str, ModelConfig]
    script: dict[str, Any]
    own_files: Mapping[pathlib.Path, pathlib.Path]

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: Any) -> None:
        if isinstance(self.game, Environment):
            self.game.close()

    @property
    def hosted(self) -> bool:
        """Played through the controller and the engine, not compiled."""
        return isinstance(self.played, Environment)

    @property
    def headline(self) -> str:
        """The name of the figure that files and tables call "success"."""
        return self.played.headline if isinstance(self.played, Environment) else "success"

    @property
    def pay(self) -> str:
        """Which pay reaches whom under the recipe, in one line."""
        r, reach = self.recipe, pay_reach(self.recipe)
        reached = f"the team's pay reaches {reach['team']}; a role's own (local) pay reaches {reach['local']}"
        return f"pay (rewards={r.rewards}, returns={r.returns}): {reached}"

    def unguided(self, config: config_dict.ConfigDict) -> str:
        """A note for a run that begins with random models although there is a scripted player to imitate; else the empty string."""
        w, options = config.sft, [self.options[name] for name in self.assignment.trained]
        if w.steps or w.run or w.models or config.teachers or self.game.script is None or all("path" in model for model in options):
            return ""
        return (
            "note: no supervised warm-up (config.sft.steps=0), although this game has a scripted player to imitate. A model with "
            "random parameters is paid only for what it says by chance; try --config.sft.steps=200"
        )

    @property
    def budgets(self) -> dict[str, tuple[int, int]]:
        """Role -> its longest prompt and its longest response, in tokens."""
        return players.budgets(self.played)

    @property
    def row_tokens(self) -> int:
        """Of a packed row, unless the config says otherwise."""
        return max(ROW_TOKENS, *(prompt + response for prompt, response in self.budgets.values()))

    def table(self, config: config_dict.ConfigDict) -> str:
        """What `--dry_run` prints: roles, models, recipe fields, sizes and shapes; of a workflow, the picture of its graph."""
        g, r, e = self.game, self.recipe, config.rollout.tasks
        k = r.group_size
        kind, name = ("workflow", g.workflow.name) if isinstance(g, Environment) else ("game", config.game.name)
        head = f"{config.name}: {kind} {name}, recipe {r.name} ({r.preset}), {config.steps} steps, seed {config.seed}"
        rows = [head + (", hosted" if config.hosted else ""), "", "roles"]
        for role, (prompt, response) in self.budgets.items():
            text = f"prompt [E={e}, P<={prompt}]  responses [E={e}, K={k}, R<={response}]"
            if isinstance(g, Environment):
                text += f"  reads {', '.join(g.workflow.roles[role].reads)}; writes {', '.join(g.workflow.roles[role].writes)}"
            elif beside := next([n for n in stage if n != role] for stage in g.stages if role in stage):
                text += f"  together with {', '.join(beside)}"
            rows.append(f"  {role:<10} -> model {self.assignment.roles[role]:<10} {text}")
        rows += ["", f"models (trained: {', '.join(self.assignment.trained)}; each with its own parameters and optimizer)"]
        for model, options in self.options.items():
            m = self.shapes.get(model)
            shape = m and (
                f"  {m.parameters:,} parameters (V={m.vocab_size} D={m.width} Y={m.layers} H={m.query_heads} J={m.key_value_heads} "
                f"d={m.head_dim} F={m.feed_forward})"
            )
            own = {f"{section}.{key}": value for section in SECTIONS for key, value in own_values(config, model, section).items()}
            rows.append(f"  {model:<10} " + ", ".join(f"{key}={value}" for key, value in (options | own).items()) + (shape or ""))
        plays = f"{k} candidates per prompt, '{r.pick}' goes on" if r.sampling == "tree" else f"{k} plays each"
        rows += teacher_rows(config, self.assignment.roles)
        rows += ["", f"per step: {e} tasks, {plays}"]
        if isinstance(g, Environment):
            rows[-1] += f"; headline figure: {g.headline}"
        else:
            samples = e * k * g.max_turns * len(g.roles)
            rows[-1] += f"; at most {samples:,} samples (E={e} x K={k} x T={g.max_turns} x N={len(g.roles)})"

        def given(name):
            return "default" if config.game[name] is None else config.game[name]

        value = given if isinstance(g, Environment) else lambda name: getattr(g, name, "")
        rows += [self.pay, *filter(None, [self.unguided(config), cost_line(config, self)])]
        rows += ["", "game", *(f"  {name:<20} {value(name)}" for name in self.found.options)]
        recipe_fields = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
        recipe_fields |= {name: config.recipe[name] for name in FUNCTIONS}
        rows += ["", "recipe", *(f"  {name:<20} {field}" for name, field in recipe_fields.items())]
        for section in (RolloutSection, OptimizerSection, SftSection, EvaluationSection, CheckpointSection):
            rows += ["", section.key, *(f"  {name:<20} {value}" for name, value in section.shown(config[section.key]).items())]
        if isinstance(g, Environment):
            from marl_llm.workflows import to_mermaid

            rows += ["", to_mermaid(g.workflow, dict(self.assignment.roles))]
        return "\n".join(rows)


def teacher_rows(config: config_dict.ConfigDict, roles: Iterable[str]) -> list[str]:
    """Whom each role learns from, for `--dry_run`; nothing where nobody has a teacher."""
    named = {role: checks.given(config.teachers[role]) for role in roles if role in config.teachers}
    rows = [f"  {role:<10} " + ", ".join(f"{key}={value}" for key, value in options.items()) for role, options in named.items()]
    return ["", "teachers", *rows] if rows else []


def resolve(config: config_dict.ConfigDict, game_dir: pathlib.Path | None = None, sizes_only: bool = False) -> Plan:
    """Checks a config and turns it into typed values. Whoever resolves it closes it (`with resolve(config) as plan`).

    `game_dir` is where a run directory keeps a user's file. `sizes_only` is for `marl_llm plan`, which needs no parameters: an environment
    whose models are checkpoints may name a published preset in place of a `path`.

    Options that are left open and depend on the models are set in the config (`marl_llm.runs.sections`). Raises `ConfigError` for an
    unknown name, an impossible or contradictory value, or an option that would have no effect.
    """
    check(config, game_dir)
    given = checks.given
    try:
        functions = find_functions(config, game_dir)
        replaced = {key.removeprefix("recipe."): function.thing for key, function in functions.items() if key.startswith("recipe.")}
        fields = given(config.recipe, ("name", "preset")) | replaced
        recipe = make_recipe(config.recipe.name, config.recipe.preset, **fields)
        spec = find_game(config.game.name, game_dir)
        game = spec.make(**given(config.game, ("name",)))
    except FileNotFoundError as error:
        raise ConfigError(_missing_file(config, error)) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    try:
        if isinstance(game, Environment):
            game = _listed(_cut(game, config.rollout), config.rollout.task_list)
        played, text = game, None
        if config.hosted and isinstance(game, Game):
            played, text = players.hosted_environment(config, game, recipe)
        assignment, options, shapes = players.resolve_models(config, played, sizes_only)
        fill_open_options(config, [options[name] for name in assignment.trained])
        recipes, own_files = recipes_of(config, assignment.trained, recipe, functions), _own_files([spec, *functions.values()])
        plan = Plan(spec, game, played, text, recipe, recipes, assignment, options, shapes, given(config.script), own_files)
        check_whole(config, plan)
        check_coach(config, plan)
        return plan
    except (ValueError, TypeError) as error:
        if isinstance(game, Environment):
            game.close()
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _own_files(sources: Iterable[GameSpec]) -> dict[pathlib.Path, pathlib.Path]:
    """The files of a user's game and functions, as a run keeps them. Raises `ConfigError` for two of one name."""
    files: dict[pathlib.Path, pathlib.Path] = {}
    for source in sources:
        for file, path in source.sources.items():
            if files.setdefault(file, path) != path:
                raise ConfigError(f"{files[file]} and {path} have one name, under which a run would keep both: rename one")
    return files


def _missing_file(config: config_dict.ConfigDict, error: FileNotFoundError) -> str:
    """Which option of the game names a file that is not there, as a person reads it."""
    file = str(error.filename or error)
    keys = [f"config.game.{key}" for key, value in config.game.items() if isinstance(value, str) and value and value in file]
    reason = f"there is no file {file} (from {pathlib.Path.cwd()})" if error.filename else file
    return f"{keys[0] if keys else config.game.name}: {reason}"


def _cut(environment: Environment, rollout: config_dict.ConfigDict) -> Environment:
    """The environment with its roles' budgets cut to what the config allows."""
    most = {name: rollout[name] for name in ("max_prompt", "max_tokens") if rollout[name] is not None}

    def cut(role):
        return dataclasses.replace(role, **{name: min(value, getattr(role, name)) for name, value in most.items()})

    return dataclasses.replace(environment, workflow=with_roles(environment.workflow, cut)) if most else environment


def _listed(environment: Environment, path: str | None) -> Environment:
    """The environment whose training tasks are those of a list, again and again. Raises `ConfigError` for a file that holds no list."""
    if not path:
        return environment
    try:
        numbers = read_json_file(path)["tasks"]
        if not isinstance(numbers, list) or not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("its 'tasks' are no list of task numbers, or an empty one")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"config.rollout.task_list={path!r} cannot be used ({error}); make it with marl_llm profile --output") from error

    def tasks(split: str, first: int, count: int) -> list[Task]:
        if split != "train":
            return environment.tasks(split, first, count)
        at = [numbers[number % len(numbers)] for number in range(first, first + count)]
        return [dataclasses.replace(environment.tasks("train", task, 1)[0], number=number) for number, task in enumerate(at, first)]

    return dataclasses.replace(environment, tasks=tasks)
