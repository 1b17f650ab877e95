"""Trains the models that your own program asks through OpenAI's API: each role has a model, and may have a reward, of its own.

    marl attach --roles=solver=models/smollm2,checker=models/smollm2 --tasks=tasks.jsonl --steps=50 --workdir=runs/app \
        -- python my_app.py --task {task}

The program is started once per episode and finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment. Its task is the argument {task},
the variable MARL_TASK, or GET $MARL_EPISODE_URL/task; {name} is one field of it. It posts its reward to $MARL_EPISODE_URL/reward and ends.
The same command continues the run; docs/attach.md has the rules.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from absl import flags, logging

from marl_llm.runs import command
from marl_llm.runs.command import ConfigError

FLAGS = flags.FlagValues()
_ROLES = flags.DEFINE_list(
    "roles", [], "ROLE=CHECKPOINT for each role; ROLE+ROLE=CHECKPOINT for roles that share a model.", flag_values=FLAGS
)
_TASKS = flags.DEFINE_string("tasks", None, "File of JSON lines, a task each.", flag_values=FLAGS)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; made if missing, else continued.", flag_values=FLAGS)
_RECIPE = flags.DEFINE_string("recipe", "grpo", "Recipe that samples no tree.", flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 50, "Optimisation steps.", lower_bound=1, flag_values=FLAGS)
_PER_STEP = flags.DEFINE_integer("tasks_per_step", 8, "Tasks of a step.", lower_bound=1, flag_values=FLAGS)
_GROUP = flags.DEFINE_integer("group_size", None, "Episodes of each task; default: the recipe's.", lower_bound=1, flag_values=FLAGS)
_TIMEOUT = flags.DEFINE_float("timeout_s", 120.0, "Seconds for an episode.", lower_bound=0.0, flag_values=FLAGS)
_PROCESSES = flags.DEFINE_integer("processes", 8, "Episodes at once.", lower_bound=1, flag_values=FLAGS)
_STAYS = flags.DEFINE_bool("stays", False, "The program stays, and reads a line of JSON per episode (docs/attach.md).", flag_values=FLAGS)
_LORA = flags.DEFINE_integer("lora_rank", None, "Trains adapters of this rank on frozen models.", lower_bound=1, flag_values=FLAGS)
_SET = flags.DEFINE_multi_string(
    "set", [], "KEY=VALUE: any other option of the config, e.g. optimizer.learning_rate=1e-5.", flag_values=FLAGS
)


def models_of(roles: list[str], lora_rank: int | None) -> dict[str, Any]:
    """Role -> model, of the flag. Raises `ConfigError`."""
    from marl_llm.runs.api import load_model

    models: dict[str, Any] = {}
    for text in roles:
        names, equals, path = text.partition("=")
        if not equals or not path or not all(names.split("+")):
            raise ConfigError(f"--roles: {text!r} must be ROLE=CHECKPOINT, e.g. solver=models/smollm2")
        model = load_model(path, lora_rank=lora_rank)
        if twice := [name for name in names.split("+") if name in models]:
            raise ConfigError(f"--roles: the role {twice[0]!r} has two models")
        models |= dict.fromkeys(names.split("+"), model)
    return models


def options_of(settings: list[str]) -> dict[str, Any]:
    """The options of --set, as sections. Raises `ConfigError`.

    >>> options_of(["optimizer.learning_rate=1e-05", "seed=3", "placement=split"])
    {'optimizer': {'learning_rate': 1e-05}, 'seed': 3, 'placement': 'split'}
    """
    options: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        *sections, name = key.split(".")
        if not equals or not all([*sections, name]):
            raise ConfigError(f"--set={text}: write KEY=VALUE, e.g. --set=optimizer.learning_rate=1e-5")
        place = options
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set={text}: {section} is a value already")
        try:
            place[name] = json.loads(value)
        except ValueError:
            place[name] = value
    return options


def _attach(program: list[str]) -> None:
    """Flags and the program's command to `marl_llm.attach`."""
    from marl_llm.runs.attach import Command, attach

    logging.set_verbosity(logging.WARNING)
    needed = {"--roles": _ROLES.value, "--tasks": _TASKS.value, "--workdir": _WORKDIR.value, "-- PROGRAM": program}
    if missing := [name for name, value in needed.items() if not value]:
        raise ConfigError(f"{missing[0]} is missing, e.g. marl attach --roles=solver=DIR --tasks=FILE --workdir=DIR -- python my_app.py")
    options = options_of(_SET.value)
    rollout = {"tasks": _PER_STEP.value, "timeout_s": _TIMEOUT.value, "concurrency": _PROCESSES.value}
    recipe = {"name": _RECIPE.value} | ({} if _GROUP.value is None else {"group_size": _GROUP.value}) | options.pop("recipe", {})
    options["rollout"] = rollout | options.get("rollout", {})
    played_by = Command(program, _STAYS.value)
    attach(models_of(_ROLES.value, _LORA.value), played_by, _TASKS.value, recipe, steps=_STEPS.value, workdir=_WORKDIR.value, **options)


def main(argv: list[str]) -> int:
    """Runs the command; what stands behind `--` is the person's program, whose arguments are its own."""
    place = argv.index("--") if "--" in argv else len(argv)
    program = argv[place + 1 :]

    def run(_: list[str]) -> None:
        _attach(program)

    sys.argv = ["marl attach", *argv[:place]]
    command.run(run, FLAGS, interrupted="interrupted; the same command goes on from the last checkpoint")
    return 0
