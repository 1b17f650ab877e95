"""Stronger-MAS on Plan-Path, 10x10, in text: a Tool writes a Python program that is run, a Planner decides; AT-GRPO on Qwen3.

Command:   python -m experiments.train --config=experiments/configs/plan_path_text.py --config.model.path=Qwen3-1.7B --workdir=runs/text
           ... --config.assignment=shared         one model for both roles; --config.game.agents=single: the single agent
           ... --config.game.rewards_form=paper   Appendix B.4 as printed; =outcome: B.6
Expected:  what the paper reports stands in `experiments/reported.py`; not run here, it needs GPUs.
Hardware:  the paper used 8 x H100; `python -m experiments.plan --config=experiments/configs/plan_path_text.py
           --config.model.preset=qwen3-1.7b --topology=h100:8` says what a run needs, without a checkpoint.
Variants:  :full is the same; :smoke runs the same code in two steps, with short responses.
"""

from experiments.base import base_config, variant
from experiments.configs.sizes import at_grpo_full, smoke_workflow


def get_config(arg=None):
    """`arg` may be 'full' or 'smoke'."""
    c = at_grpo_full(base_config("plan_path_text", game="plan_path_text", recipe="at_grpo"))
    if variant("plan_path_text", arg, ("full", "smoke")) == "smoke":
        c = smoke_workflow(c)
        c.game.turns = 2
        c.rollout.max_prompt, c.rollout.max_tokens = 2048, 64
    return c
