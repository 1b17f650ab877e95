"""A game of TextArena (arXiv 2504.11442), one role per seat; by default Kuhn poker with two tiny models that play each other.

Command:   pip install 'marl_llm[ta]'
           python -m experiments.train --config=experiments/configs/textarena.py --workdir=runs/kuhn
           ... --config.assignment=shared              one model on all seats
Expected:  docs/external_games.md, which lists what plays and what is refused.
Variants:  :smoke; :chat, for a checkpoint: ...:chat --config.game.game=TicTacToe --config.model.path=Qwen3-1.7B
"""

from experiments.base import base_config, variant
from experiments.configs.sizes import real_model, small_workflow, smoke_workflow, without_tied


def get_config(arg=None):
    """`arg` may be 'smoke' or 'chat'."""
    arg = variant("textarena", arg, ("smoke", "chat"))
    if arg == "chat":
        c = real_model(base_config("textarena", game="textarena", recipe="grpo"))
        c.game.form = "brackets"
        c.rollout.update(tasks=16, slots=64, chunk=32, timeout_s=900.0)
        c.optimizer.update(minibatch=64, learning_rate=1e-6)
        return c
    c = without_tied(small_workflow("textarena", "textarena", "grpo"))
    c.game.max_prompt, c.game.max_tokens, c.game.moves = 320, 12, 30
    c.recipe.branches = 8
    c.recipe.group_by = "instance,agent"
    c.steps, c.rollout.tasks = 30, 8
    c.warm_start.steps, c.warm_start.tasks = 200, 16
    c.optimizer.learning_rate = 3e-4
    c.evaluation.update(tasks=64, final_tasks=200)
    return smoke_workflow(c) if arg == "smoke" else c
