"""Stronger-MAS on Sokoban 6x6, one box, in text: a Tool writes a Python program that is run, a Planner decides; AT-GRPO on Qwen3.

Command:   python -m experiments.train --config=experiments/configs/sokoban_text.py --config.model.path=Qwen3-1.7B --workdir=runs/text
           ... --config.assignment=shared; --config.game.agents=single; --config.game.rewards_form=paper or outcome
Expected:  what the paper reports stands in `experiments/reported.py`; not run here, it needs GPUs.
Hardware:  the paper used 8 x H100; see `experiments/configs/plan_path_text.py` for a plan.
Variants:  :full is the same; :smoke runs the same code in two steps, with short responses.
"""

from experiments.base import base_config, variant
from experiments.configs.sizes import at_grpo_full, smoke_workflow


def get_config(arg=None):
    """`arg` may be 'full' or 'smoke'."""
    c = at_grpo_full(base_config("sokoban_text", game="sokoban_text", recipe="at_grpo"))
    if variant("sokoban_text", arg, ("full", "smoke")) == "smoke":
        c = smoke_workflow(c)
        c.game.turns = 2
        c.rollout.max_prompt, c.rollout.max_tokens = 2048, 64
    return c
