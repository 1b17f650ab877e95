"""Sokoban 6x6, one box: a Tool and a Planner, two separate models, learn rooms that they have not seen with AT-GRPO.

Command:   python -m experiments.train --config=experiments/configs/sokoban.py --workdir=runs/sokoban
Expected:  docs/puzzles.md, "Sokoban 6x6".
Hardware:  one CPU core, float32, below ten minutes.
Variants:  sokoban.py:split hides the inner walls from the Planner; sokoban.py:single is one agent, sokoban.py:single_split one that sees no
           inner walls; sokoban.py:two has two boxes; sokoban.py:paper pays as printed (B.5), sokoban.py:outcome the outcome alone (B.6);
           sokoban.py:smoke
"""

from experiments.configs.sizes import board
from marl_llm.runs.base import smoke, variant

_VARIANTS = {
    "split": dict(view="split"),
    "single": dict(agents="single"),
    "single_split": dict(agents="single", view="split"),
    "two": dict(boxes=2),
    "paper": dict(rewards_form="paper"),
    "outcome": dict(rewards_form="outcome"),
}


def get_config(arg=None):
    """`arg` may be 'smoke' or one of the variants above."""
    arg = variant("sokoban", arg, ("smoke", *_VARIANTS))
    c = board("sokoban")
    c.game.frame = "player"
    c.steps = 600
    c.sft.steps = 3000
    c.evaluation.every = 150
    c.game.update(_VARIANTS.get(arg, {}))
    return smoke(c) if arg == "smoke" else c
