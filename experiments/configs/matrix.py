"""Matrix games of two agents (MAGRPO, Appendix A): joint rewards find the joint optimum, individual ones an equilibrium.

Command:   python -m experiments.train --config=experiments/configs/matrix.py:posg_2 --workdir=runs/matrix
           python -m benchmarks.matrix_games        all three settings, ten seeds each, in one process
           python -m marl_llm league --runs=runs/league    of a run of :league, who beats whom among its checkpoints
Expected:  docs/two_agents.md, "Matrix games".
Variants:  without a word the joint utility pays both (Table 4); :posg_1 and :posg_2 pay each agent its own part (Table 5); :league is
           zero-sum, the higher of five words wins, against past selves; :smoke
"""

from marl_llm.games.matrix import POSG_2
from marl_llm.runs.base import base_config, smoke, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'posg_1', 'posg_2' or 'league'."""
    arg = variant("matrix", arg, ("smoke", "posg_1", "posg_2", "league"))
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
    if arg == "league":
        play_in_a_league(c)
    return smoke(c) if arg == "smoke" else c


def play_in_a_league(c):
    """One model on both seats, against its past selves: of five words the higher one wins."""
    won = [[(i > j) - (i < j) for j in range(5)] for i in range(5)]
    c.game.utility = "; ".join(["0 0 0 0 0"] * 5)
    c.game.first, c.game.second = ("; ".join(" ".join(str(sign * x) for x in row) for row in won) for sign in (1, -1))
    c.assignment = "shared"
    c.recipe.update(rewards="local", returns="immediate", group_by="instance,agent,turn", group_size=20)
    c.league.update(keep=6, every=5, matches=4)
    c.checkpoint.update(every=5, keep=12)
    c.rollout.tasks = 8
    c.optimizer.update(learning_rate=3e-4, minibatch=16)
    c.evaluation.sampled = False
