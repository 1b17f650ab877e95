"""First light: a Tool and a Planner, two separate models, learn Plan-Path on 6x6 maps with AT-GRPO.

Command:   python -m experiments.train --config=experiments/configs/quickstart.py --workdir=runs/first
Expected:  500 held-out maps, greedy, mean of three seeds: from 39.0 % after the supervised warm-up to 92.0 %. Every seed: docs/findings.md.
Hardware:  two CPU cores, float32; how long it takes stands in docs/results.md, in the row "command one".
Variants:  quickstart.py:smoke runs the same code in a few steps and learns nothing.
"""

from experiments.configs.sizes import without_tied
from marl_llm.runs.base import base_config, smoke, variant


def get_config(arg=None):
    """`arg` may be 'smoke'."""
    c = without_tied(base_config("quickstart", game="plan_path", recipe="at_grpo"))
    c.steps = 500
    c.game.max_moves = 4
    c.recipe.entropy_coef = 0.01
    c.sft.steps = 250
    return smoke(c) if variant("quickstart", arg, ("smoke",)) else c
