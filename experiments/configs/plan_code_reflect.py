"""Workflow D of UnityMAS-O: plan, code, verify, reflect over three rounds; programs run in the sandbox, hidden tests pay.

Command:   python -m experiments.train --config=experiments/configs/plan_code_reflect.py --workdir=runs/d
           ... --config.recipe.name=ppo      a critic per model; at_grpo and mappa (REINFORCE++) work on the same workflow
           ... --config.world.blank=planner.advice      the ablation in which nobody hears the reflection
Variants:  :smoke; :ppo, :at_grpo and :reinforce are the recipes that docs/workflows_trained.md compares; :full is the paper's size on
           DeepCoder's problems: ...:full --config.world.train=train.parquet --config.world.test=test.parquet --config.model.path=...
"""

from experiments.team_base import full_size, smoke_team, team_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'full', or the name of a compared recipe."""
    arg = variant("plan_code_reflect", arg, ("smoke", "full", "ppo", "at_grpo", "reinforce"))
    if arg == "full":
        return full_size(team_config("plan_code_reflect", "problems", "ppo"))
    recipe = {"ppo": "ppo", "at_grpo": "at_grpo", "reinforce": "mappa"}.get(arg, "grpo")
    c = team_config("plan_code_reflect", "functions", recipe)
    c.steps = 150
    c.warm_start.steps = 300
    c.warm_start.tasks = 32
    c.optimizer.learning_rate = 3e-4
    c.recipe.reduce = "token_mean"
    c.rollout.tasks = 16
    return smoke_team(c) if arg == "smoke" else c
