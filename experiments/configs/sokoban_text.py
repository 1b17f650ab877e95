"""Stronger-MAS on Sokoban 6x6, one box, in text: a Tool writes a Python program that is run, a Planner decides; AT-GRPO on Qwen3.

Command:   python -m experiments.train --config=experiments/configs/sokoban_text.py --config.model.path=Qwen3-1.7B --workdir=runs/text
           ... --config.assignment=shared; --config.game.agents=single; --config.game.rewards_form=paper or outcome
Expected:  what the paper reports stands in `marl_llm/runs/reported.py`; not run here, it needs GPUs.
Hardware:  the paper used 8 x H100; see `experiments/configs/plan_path_text.py` for a plan.
Variants:  :full is the same; :smoke runs the same code in two steps, with short responses.
"""

from experiments.configs.sizes import in_text


def get_config(arg=None):
    """`arg` may be 'full' or 'smoke'."""
    return in_text("sokoban_text", arg)
