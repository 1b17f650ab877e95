"""Sudoku 4x4: a Tool and a Planner, two separate models, learn to fill grids that they have not seen with AT-GRPO.

Command:   python -m experiments.train --config=experiments/configs/sudoku.py --workdir=runs/sudoku
Expected:  docs/puzzles.md, "Sudoku 4x4".
Hardware:  two CPU cores, float32; about five minutes.
Variants:  sudoku.py:split hides the boxes from the Planner; sudoku.py:raw shows digits instead of what is taken; sudoku.py:single is one
           agent, sudoku.py:single_split one that sees no boxes; sudoku.py:paper pays as printed (B.3), sudoku.py:outcome the outcome
           alone (B.6); sudoku.py:smoke
"""

from experiments.configs.sizes import board
from marl_llm.runs.base import smoke, variant

_VARIANTS = {
    "split": dict(view="split"),
    "raw": dict(view="raw"),
    "single": dict(agents="single"),
    "single_split": dict(agents="single", view="split"),
    "paper": dict(rewards_form="paper"),
    "outcome": dict(rewards_form="outcome"),
}


def get_config(arg=None):
    """`arg` may be 'smoke' or one of the variants above."""
    arg = variant("sudoku", arg, ("smoke", *_VARIANTS))
    c = board("sudoku")
    c.steps = 400
    c.game.illegal = "stop"
    c.game.max_turns = 6  # a team that fills one wave of visible singles a turn needs five on one puzzle in ten
    c.sft.steps = 350
    c.evaluation.every = 50
    c.game.update(_VARIANTS.get(arg, {}))
    return smoke(c) if arg == "smoke" else c
