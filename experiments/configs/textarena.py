"""A game of TextArena (arXiv 2504.11442), one role per seat; by default Kuhn poker with two tiny models that play each other.

Command:   pip install 'marl_llm[ta]'
           python -m experiments.train --config=experiments/configs/textarena.py --workdir=runs/kuhn
           ... --config.assignment=shared              one model on all seats
           python -m experiments.train --config=experiments/configs/textarena.py:spiral --workdir=runs/spiral     SPIRAL: one model, and
                                                       each seat's running mean as baseline in place of groups
           python -m experiments.evaluate --run=runs/kuhn --opponents=random,scripted,start --temperature=1
Expected:  docs/external_games.md, which lists what plays and what is refused.
Variants:  :spiral; :smoke; :chat, for a checkpoint: ...:chat --config.game.game=TicTacToe --config.model.path=Qwen3-1.7B
"""

from experiments.configs.sizes import real_model, small_workflow, smoke_workflow, without_tied
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'spiral', 'smoke' or 'chat'."""
    arg = variant("textarena", arg, ("spiral", "smoke", "chat"))
    # what the game pays a seat is the team reward of each of its responses; as an outcome of the play the last seat's would be everyone's
    own = dict(rewards="mixed", returns="immediate")
    if arg == "chat":
        c = real_model(base_config("textarena", game="textarena", recipe="grpo"))
        c.recipe.update(own)
        c.game.form = "brackets"
        c.rollout.update(tasks=16, max_num_seqs=64, decode_steps=32, timeout_s=900.0)
        c.optimizer.update(minibatch=64, learning_rate=1e-6)
        return c
    if arg == "spiral":
        c = small_workflow("textarena", "textarena", "spiral")
        c.assignment = "shared"
        c.steps, c.rollout.tasks = 60, 32
    else:
        c = without_tied(small_workflow("textarena", "textarena", "grpo"))
        c.recipe.update(group_size=8, group_by="instance,agent")
        c.steps, c.rollout.tasks = 30, 8
    c.recipe.update(own)
    c.game.max_prompt, c.game.max_tokens, c.game.moves = 320, 12, 30
    c.sft.steps, c.sft.tasks = 200, 16
    c.optimizer.learning_rate = 3e-4
    c.evaluation.update(tasks=64, final_tasks=200)
    return smoke_workflow(c) if arg == "smoke" else c
