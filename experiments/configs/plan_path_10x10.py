"""Plan-Path at the paper's size: 10x10 maps, at least 6 moves from the goal, two separate models, AT-GRPO.

Command:   python -m experiments.train --config=experiments/configs/plan_path_10x10.py --workdir=runs/10x10
Expected:  500 held-out maps, greedy: from 23.2 % after the supervised warm-up to 91.4 and 90.6 % in two runs. More: docs/findings.md.
Hardware:  two CPU cores, float32; 21 min of training on a busy machine.
Variants:  plan_path_10x10.py:smoke
"""

from experiments.configs import quickstart
from marl_llm.runs.base import smoke, variant


def get_config(arg=None):
    """`arg` may be 'smoke'."""
    c = quickstart.get_config()
    c.name = "plan_path_10x10"
    c.game.update(height=10, width=10, max_moves=6, min_distance=6, max_distance=60)
    c.model.preset = "mini"
    c.optimizer.learning_rate = 1e-3
    c.steps = 1000
    c.sft.update(steps=400, learning_rate=1.5e-3)
    c.evaluation.every = 100
    c.checkpoint.every = 250
    return smoke(c) if variant("plan_path_10x10", arg, ("smoke",)) else c
