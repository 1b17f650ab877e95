"""MathChat's team (MAPPA) on generated chains of operations: a solver, an executor whose programs run, and a verifier.

Command:   python -m experiments.train --config=experiments/configs/chain_maths.py --workdir=runs/chain
Expected:  docs/mappa.md, "MathChat".
Variants:  :smoke; :outcome has no coach and pays everybody for a right answer (GRPO).
"""

from experiments.base import variant
from experiments.configs.sizes import small_workflow, smoke_workflow


def get_config(arg=None):
    """`arg` may be 'smoke' or 'outcome'."""
    arg = variant("chain_maths", arg, ("smoke", "outcome"))
    c = small_workflow("chain_maths", "chain_maths", "grpo" if arg == "outcome" else "mappa")
    c.steps = 60
    c.warm_start.update(steps=450, tasks=32, fresh=225)
    c.rollout.tasks = 16
    c.recipe.branches = 8
    if arg != "outcome":
        c.recipe.preset, c.recipe.group_by = "released", "agent,turn"
    c.optimizer.minibatch = 512  # one optimizer step per rollout
    c.evaluation.update(tasks=100, final_tasks=400)
    c.evaluation.ablate_roles = False
    return smoke_workflow(c) if arg == "smoke" else c
