"""A trained team distilled into one smaller model that plays all its roles: each role learns from the model that played it.

Command:   python -m experiments.train --config=experiments/configs/distill.py:runs/first --workdir=runs/one
           ... --config.model.preset=micro --config.recipe.policy_coef=1 (the game's rewards beside the teachers)
Variants:  none; what follows the colon is the directory of the team's run, whose newest checkpoint teaches.
Expected:  of quickstart's team (93.6, 91.0, 93.8 %) one model of the same size keeps 91.2, 90.0, 90.6 %, with 18 % of its tokens.
Hardware:  what the team needed; its models are held once more, without an optimizer. Quickstart's: one core, 1.8 to 2.7 minutes.
"""

import pathlib

from marl_llm.runs import trust
from marl_llm.runs.base import base_config, teacher_section
from marl_llm.runs.checks import given
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.workdir import game_dir_of, read_config

KEPT = ("game", "script", "rollout", "tools", "evaluation", "model", "mesh")  # sections of the team's run


def get_config(arg=None):
    """`arg` is the directory of the team's run."""
    if not arg:
        raise ConfigError("name the team's run behind the file, e.g. --config=experiments/configs/distill.py:runs/first")
    run = pathlib.Path(arg)
    team = read_config(run, trust.asked())
    with resolve(team, game_dir_of(run)) as plan:
        roles, options = list(plan.assignment.roles), plan.options[plan.assignment.trained[0]]
    c = base_config("distill", game=team.game.name, recipe="reinforce_pp", game_dir=game_dir_of(run))
    for key in KEPT:
        c[key].update(given(team[key]))
    c.update(assignment="shared", hosted=team.hosted, stacked_layers=team.stacked_layers, quick_compile=team.quick_compile)
    if "path" in options:  # the team's checkpoint learns, with adapters if the team's models have them
        c.model.update(kind="trained", path=options["path"], lora_rank=options.get("lora_rank"))
    else:
        c.model.update(kind="trained", preset="nano", lora_rank=None)
    c.recipe.update(policy_coef=0.0, distill_coef=1.0)  # one play of a task is enough: nothing is compared
    c.steps = 300
    for role in roles:
        c.teachers[role] = teacher_section(run=str(run))
    return c
