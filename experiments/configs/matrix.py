"""Matrix games of two agents (MAGRPO, Appendix A): joint rewards find the joint optimum, individual ones an equilibrium.

Command:   python -m experiments.train --config=experiments/configs/matrix.py:posg_2 --workdir=runs/matrix
           python -m benchmarks.matrix_games        all three settings, ten seeds each, in one process
Expected:  docs/two_agents.md, "Matrix games".
Variants:  without a word the joint utility pays both (Table 4); :posg_1 and :posg_2 pay each agent its own part (Table 5); :smoke
"""

from marl_llm.games.matrix import POSG_2
from marl_llm.runs.base import base_config, smoke, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'posg_1' or 'posg_2'."""
    arg = variant("matrix", arg, ("smoke", "posg_1", "posg_2"))
    c = base_config("matrix", game="matrix", recipe="magrpo")
    c.steps = 50
    c.model.preset = "nano"
    c.recipe.group_size = 40
    c.recipe.kl_coef = 0.0
    if arg.startswith("posg"):
        c.recipe.rewards = "local"
        c.recipe.scope, c.recipe.group_by = "agent", "instance,agent,turn"  # each agent is paid and compared for itself
    if arg == "posg_2":
        c.game.first, c.game.second = POSG_2
    c.rollout.tasks = 1
    c.optimizer.learning_rate = 1e-3
    c.optimizer.minibatch = 80
    c.sft.steps = 30
    c.evaluation.every = 25
    c.evaluation.tasks = c.evaluation.final_tasks = 200
    c.evaluation.sampled = True
    c.devices = 1
    return smoke(c) if arg == "smoke" else c
