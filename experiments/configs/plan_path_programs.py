"""Plan-Path with programs: a Tool whose words are lines of Python writes a search that is really run, a Planner decides; AT-GRPO.

Command:   python -m experiments.train --config=experiments/configs/plan_path_programs.py --workdir=runs/programs
           ... --config.assignment=shared; --config.game.agents=single: one agent that sees the walls and moves by hand
Expected:  see docs/puzzles.md, "Plan-Path with programs".
Hardware:  one CPU core, float32; about five minutes of CPU time.
Variants:  :10x10 plays 10x10 maps; :smoke runs the same code in a few steps.
"""

from experiments.configs.sizes import small_workflow, smoke_workflow, without_tied
from marl_llm.runs.base import variant


def get_config(arg=None):
    """`arg` may be '10x10' or 'smoke'."""
    arg = variant("plan_path_programs", arg, ("10x10", "smoke"))
    c = without_tied(small_workflow("plan_path_programs", game="plan_path_programs", recipe="at_grpo"))
    c.steps = 24
    c.rollout.tasks = 12
    c.recipe.group_size = 8
    c.optimizer.minibatch = 32
    c.sft.update(steps=120, tasks=16, fresh=60)
    c.evaluation.update(every=12, final_tasks=200, sampled=False)
    if arg == "10x10":
        c.game.update(height=10, width=10, max_distance=32)
    return smoke_workflow(c) if arg == "smoke" else c
