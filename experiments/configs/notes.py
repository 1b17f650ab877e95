"""Two writers (MAGRPO) on generated posts: both write at once and are paid one joint reward for lengths that fit, style and coherence.

Command:   python -m experiments.train --config=experiments/configs/notes.py --workdir=runs/notes
           ... --config.game.grounded=True           words must occur in the post
           ... --config.game.style=sequential --config.steps=0      a baseline: single, parallel, sequential, discussion
           ... --config.control.permute_rewards=True                 the control
Expected:  docs/two_agents.md, "Writing".
Variants:  :smoke; :tldr and :arxiv have the paper's constants and need files and a checkpoint:
           ...:tldr --config.game.train=tldr/train.parquet --config.game.test=tldr/test.parquet --config.model.path=Qwen3-1.7B
"""

from experiments.configs.sizes import magrpo_full, small_workflow, smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'tldr' or 'arxiv'."""
    arg = variant("notes", arg, ("smoke", "tldr", "arxiv"))
    if arg in ("tldr", "arxiv"):
        c = magrpo_full(base_config("writing", game="writing", recipe="magrpo"))
        c.game.task = arg
        c.recipe.temperature, c.recipe.top_p = 0.8, 0.95
        c.optimizer.learning_rate = 5e-6
        return c
    c = small_workflow("notes", "notes", "magrpo")
    c.steps = 60
    c.sft.steps = 2000  # copying from the post is learned after 600 or so; without it grounding means nothing
    c.sft.tasks = 16
    c.rollout.tasks = 16
    c.recipe.group_size = 8
    c.recipe.kl_coef = 0.0
    c.optimizer.learning_rate = 6e-4
    c.optimizer.minibatch = 256  # one optimizer step per rollout
    c.evaluation.final_tasks = 300
    return smoke_workflow(c) if arg == "smoke" else c
