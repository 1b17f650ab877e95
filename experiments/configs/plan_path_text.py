"""Stronger-MAS on Plan-Path, 10x10, in text: a Tool writes a Python program that is run, a Planner decides; AT-GRPO on Qwen3.

Command:   python -m experiments.train --config=experiments/configs/plan_path_text.py --config.model.path=Qwen3-1.7B --workdir=runs/text
           ... --config.assignment=shared         one model for both roles; --config.game.agents=single: the single agent
           ... --config.game.rewards_form=paper   Appendix B.4 as printed; =outcome: B.6
Expected:  what the paper reports stands in `marl_llm/runs/reported.py`; not run here, it needs GPUs.
Hardware:  the paper used 8 x H100; `python -m marl_llm plan --config=experiments/configs/plan_path_text.py
           --config.model.preset=qwen3-1.7b --topology=h100:8` says what a run needs, without a checkpoint.
Variants:  :full is the same; :smoke runs the same code in two steps, with short responses.
"""

from experiments.configs.sizes import in_text


def get_config(arg=None):
    """`arg` may be 'full' or 'smoke'."""
    return in_text("plan_path_text", arg)
