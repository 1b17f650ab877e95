"""Any game, with small models and common settings: the way to a game of your own without a config file.

Command:   python -m experiments.train --config=experiments/configs/game.py:my_game.py:Lock --workdir=runs/lock
           ... --config.game.<option>=... --config.script.<option>=... --config.recipe.name=magrpo --config.sft.steps=0
Variants:  none; what follows the first colon names the game, as `marl_llm.games.make_game` reads it.
Expected:  whatever the game allows. Hardware: any; a game of a few tokens trains in a minute on two CPU cores.
"""

from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError


def get_config(arg=None):
    """`arg` names the game."""
    if not arg:
        raise ConfigError("name the game behind the file, e.g. --config=experiments/configs/game.py:my_game.py:Lock")
    c = base_config(arg.rpartition(":")[2], game=arg, recipe="grpo")
    c.model.preset = "nano"
    c.recipe.rewards = "mixed"
    c.recipe.returns = "outcome_plus_local"  # with "outcome" a role's own pay in an earlier turn would reach nobody
    return c
