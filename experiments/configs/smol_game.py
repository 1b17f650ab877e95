r"""A workflow of your own with a small real model, an adapter per role: 4 tasks of 4 plays a step, for two cores (GRPO).

Command:   python -m experiments.train --config=experiments/configs/smol_game.py:my_titles.py:titles --workdir=runs/titles \
               --config.model.path=models/smollm2
           ... --config.assignment=shared                  one adapter for all roles
Hardware:  two CPU cores, float32. `docs/small_real_model.md` writes such a workflow.
"""

from experiments.configs.sizes import small_real_model
from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError


def get_config(arg=None):
    """`arg` names the game."""
    if not arg:
        raise ConfigError("name the game behind the file, e.g. --config=experiments/configs/smol_game.py:my_titles.py:titles")
    c = small_real_model(base_config(arg.rpartition(":")[2], game=arg, recipe="grpo"))
    c.recipe.update(group_by="instance,agent,turn", rewards="mixed", returns="outcome_plus_local")
    return c
