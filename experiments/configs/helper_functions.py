"""Helper and main agent (MAGRPO) on generated functions: both write at once and are paid one joint reward.

Command:   python -m experiments.train --config=experiments/configs/helper_functions.py --workdir=runs/aux
           ... --config.game.style=sequential --config.steps=0      a baseline: single, parallel, sequential, discussion, feedback
           ... --config.control.permute_rewards=True                 the control
Expected:  docs/two_agents.md, "Helper and main agent".
Variants:  :smoke; :individual pays each agent for its own function's form; :feedback has a second turn with a scripted expert,
           who also knows what unclear words mean (`game.feedback=plain`, `game.truth=0.0`: nothing, wrong advice);
           :full has the paper's constants, :full_feedback those of two turns, :released the release's recipe; they need a checkpoint:
           ...:full --config.game.humaneval=HumanEval.jsonl.gz --config.model.path=Qwen2.5-Coder-3B
"""

from experiments.configs.sizes import magrpo_full, small_workflow, smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'individual', 'feedback', 'full', 'full_feedback' or 'released'."""
    arg = variant("helper_functions", arg, ("smoke", "individual", "feedback", "full", "full_feedback", "released"))
    if arg in ("full", "full_feedback", "released"):
        c = magrpo_full(base_config("function_problems", game="function_problems", recipe="magrpo"))
        if arg == "released":
            c.recipe.preset, c.optimizer.learning_rate = "released", 2e-5
            return c
        c.recipe.temperature, c.recipe.top_p = 0.7, 0.9
        c.optimizer.learning_rate = 1e-6
        if arg == "full_feedback":
            c.game.style, c.game.visible, c.game.turns = "feedback", 2, 2
            c.steps, c.optimizer.learning_rate = 2200, 5e-6
        return c
    c = small_workflow("helper_functions", "helper_functions", "magrpo")
    c.steps = 100
    c.sft.steps = 800  # with 500 steps of 16 a third of the halves were misread words, which reinforcement did not mend
    c.sft.tasks = 32
    c.sft.fresh = 300
    c.rollout.tasks = 16
    c.recipe.group_size = 8
    c.recipe.kl_coef = 0.0
    c.recipe.scale_advantages = "none"
    c.recipe.filter_zero_variance, c.recipe.zero_variance_in_denominator = True, False
    c.optimizer.learning_rate = 8e-4
    c.optimizer.minibatch = 256  # one optimizer step per rollout: with several the response-level ratio leaves its clip range
    c.evaluation.final_tasks = 300
    if arg == "individual":
        c.game.individual = True
        c.recipe.rewards, c.recipe.scope, c.recipe.group_by = "local", "agent", "instance,agent,turn"
    if arg == "feedback":
        c.game.style = "feedback"
        c.game.ambiguous = 1.0  # what no convention settles: unclear words, whose meaning the expert knows
        c.game.heed = 0.8
        c.sft.tasks = 16  # of two turns each
    return smoke_workflow(c) if arg == "smoke" else c
