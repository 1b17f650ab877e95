"""Reasoner and Python user (Stronger-MAS) on generated word problems: both solve at once and stop when their answers are equal.

Command:   python -m experiments.train --config=experiments/configs/sums.py --workdir=runs/sums
           ... --config.game.rewards_form=paper      Appendix B.1 as printed; outcome is B.6
           ... --config.game.agents=single           the reasoner alone
Expected:  docs/code_and_maths.md, "Maths: reasoner and Python user".
Variants:  :smoke; :grpo compares whole plays; :ensemble and :ensemble_grpo have N reasoners, M Python users and a judge
           (--config.game.reasoners=2 --config.game.users=2); :full has the paper's constants and needs files and a checkpoint:
           ...:full --config.game.train=polaris.jsonl --config.game.test=aime24.jsonl --config.model.path=Qwen3-1.7B
"""

from experiments.configs.sizes import at_grpo_full, mini_debate, smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'grpo', 'ensemble', 'ensemble_grpo', 'full' or 'ensemble_full'."""
    arg = variant("sums", arg, ("smoke", "grpo", "ensemble", "ensemble_grpo", "full", "ensemble_full"))
    if arg in ("full", "ensemble_full"):
        game = "maths_debate" if arg == "full" else "maths_ensemble"
        return at_grpo_full(base_config(game, game=game, recipe="at_grpo"))
    c = mini_debate("sums", "sums_ensemble" if arg.startswith("ensemble") else "sums", grpo=arg.endswith("grpo"))
    c.sft.update(steps=800, fresh=200)
    return smoke_workflow(c) if arg == "smoke" else c
