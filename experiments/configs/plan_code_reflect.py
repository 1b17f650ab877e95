"""Workflow D of UnityMAS-O: plan, code, verify, reflect over three rounds; programs run in the sandbox, hidden tests pay.

Command:   python -m experiments.train --config=experiments/configs/plan_code_reflect.py --workdir=runs/d
           ... --config.recipe.name=ppo      a critic per model; at_grpo and mappa (REINFORCE++) work on the same workflow
           ... --config.game.hide_fields=planner.advice      the ablation in which nobody hears the reflection; with --config.steps=0
           --config.sft.run=runs/d --config.sft.step=80 a team that was trained with it is measured without it
Variants:  :smoke; :ppo, :at_grpo and :reinforce are the recipes that docs/findings.md compares; :full is the paper's size on
           DeepCoder's problems: ...:full --config.game.train=train.parquet --config.game.test=test.parquet --config.model.path=...
"""

from experiments.configs.sizes import full_size, small_workflow, smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'full', or the name of a compared recipe."""
    arg = variant("plan_code_reflect", arg, ("smoke", "full", "ppo", "at_grpo", "reinforce"))
    if arg == "full":
        return full_size(base_config("plan_code_reflect", game="problems", recipe="ppo"))
    recipe = {"ppo": "ppo", "at_grpo": "at_grpo", "reinforce": "mappa"}.get(arg, "grpo")
    c = small_workflow("plan_code_reflect", "functions", recipe)
    c.steps = 80
    c.sft.update(steps=350, fresh=175, tasks=32)
    c.game.noise = 0.15
    c.rollout.tasks = 24
    c.optimizer.update(learning_rate=4e-4, minibatch=32)
    c.evaluation.final_tasks = 300
    c.recipe.loss_aggregation = "token_mean"
    if recipe == "grpo":  # a planner's first prompt is the same in all plays; later prompts differ by what went before
        c.recipe.group_by = "instance,agent,turn"
        c.recipe.rewards, c.recipe.returns = "mixed", "immediate"
    if recipe in ("grpo", "at_grpo"):
        c.recipe.group_size = 8 if recipe == "grpo" else 4
        c.recipe.scale_advantages, c.recipe.filter_zero_variance, c.recipe.zero_variance_in_denominator = "none", True, False
    if recipe == "mappa":
        c.recipe.group_size, c.recipe.rewards, c.recipe.returns = 8, "mixed", "immediate"
    if recipe == "ppo":
        c.recipe.group_size = 8
        c.optimizer.critic_learning_rate = 1e-3
    return smoke_workflow(c) if arg == "smoke" else c
