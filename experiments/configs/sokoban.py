"""Sokoban 6x6, one box: a Tool and a Planner, two separate models, learn rooms that they have not seen with AT-GRPO.

Command:   python -m experiments.train --config=experiments/configs/sokoban.py --workdir=runs/sokoban
Expected:  docs/stronger_mas.md; no model has been trained with it yet.
Hardware:  two CPU cores, float32; how long a run takes has not been measured.
Variants:  sokoban.py:split hides the inner walls from the Planner; sokoban.py:single is one agent, sokoban.py:single_split one that sees no
           inner walls; sokoban.py:two has two boxes; sokoban.py:paper pays as printed (B.5), sokoban.py:outcome the outcome alone (B.6);
           sokoban.py:smoke
"""

from experiments.base import base_config, smoke, variant

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
    c = base_config("sokoban", game="sokoban", recipe="at_grpo")
    c.steps = 300
    c.recipe.scale = "none"
    c.recipe.reduce = "token_mean"
    c.recipe.skip_tied = True
    c.recipe.tied_in_denominator = False
    c.recipe.entropy_coef = 0.005
    c.optimizer.learning_rate = 1e-3
    c.warm_start.steps = 700
    c.evaluation.every = 100
    c.evaluation.sampled = True
    arg = variant("sokoban", arg, ("smoke", *_VARIANTS))
    c.game.update(_VARIANTS.get(arg, {}))
    return smoke(c) if arg == "smoke" else c
