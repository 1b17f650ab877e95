"""The smallest MAGRPO: two models that act at once agree on a letter, paid by one joint scalar.

Command:   python -m experiments.train --config=experiments/configs/joint_letter.py --workdir=runs/letter
Expected:  100 % on held-out digit pairs (seeds 0-2); 0 % when the rewards are permuted.
Hardware:  two CPU cores; 90 % after 6 s of training, besides compilation (docs/findings.md).
Variants:  joint_letter.py:permuted gives every joint action another one's reward, and must learn nothing; joint_letter.py:smoke
"""

from marl_llm.runs.base import base_config, smoke, variant


def get_config(arg=None):
    """`arg` may be 'smoke' or 'permuted'."""
    c = base_config("joint_letter", game="joint_letter", recipe="magrpo")
    c.steps = 250
    c.model.preset = "nano"
    c.recipe.update(group_size=16, scale_advantages="none", entropy_coef=0.04, kl_coef=0.0)
    c.rollout.tasks = 16
    c.optimizer.update(learning_rate=2e-3, minibatch=64)
    c.evaluation.update(every=125, tasks=100, final_tasks=100)
    c.checkpoint.every = 125
    arg = variant("joint_letter", arg, ("smoke", "permuted"))
    c.control.permute_rewards = arg == "permuted"
    return smoke(c) if arg == "smoke" else c
