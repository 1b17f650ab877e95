"""MathChat's team (MAPPA) on generated chains of operations: a solver, an executor whose programs run, and a verifier.

A rubric scores every action.

Command:   python -m experiments.train --config=experiments/configs/chain_maths.py --workdir=runs/chain
           ... --config.coach.study=permuted         the controls; constant:5
           ... --config.game.information=partial     only the solver reads the problem
Expected:  docs/coached_games.md, "MathChat".
Variants:  :smoke; :outcome has no coach and pays everybody for a right answer (GRPO on the same plays).
           `experiments/configs/math_chat.py` has the paper's constants.
"""

from experiments.configs.sizes import small_workflow, smoke_workflow
from marl_llm.runs.base import variant


def get_config(arg=None):
    """`arg` may be 'smoke' or 'outcome'."""
    arg = variant("chain_maths", arg, ("smoke", "outcome"))
    c = small_workflow("chain_maths", "chain_maths", "grpo" if arg == "outcome" else "mappa")
    c.steps = 50
    c.sft.update(steps=600, tasks=32, fresh=300)
    c.rollout.tasks = 16
    c.recipe.group_size = 8
    if arg != "outcome":
        c.coach.kind = "rubric"
        c.recipe.preset = "released"  # an action is paid for itself
        c.recipe.group_by = "agent,turn"  # and compared with others of its place: the rubric's scales differ from role to role
    c.optimizer.minibatch = 512  # one optimizer step per rollout
    c.evaluation.ablate_roles = False
    return smoke_workflow(c) if arg == "smoke" else c
