"""Coder and unit tester (Stronger-MAS) on generated functions: both speak at once, programs run in the sandbox, golden tests pay.

Command:   python -m experiments.train --config=experiments/configs/function_debate.py --workdir=runs/code
           ... --config.game.rewards_form=paper      Appendix B.2 as printed; outcome is B.6
           ... --config.game.agents=single           the coder alone
Expected:  docs/code_and_maths.md, "Code: coder and unit tester".
Variants:  :smoke; :grpo compares whole plays; :full has the paper's constants and needs files and a checkpoint:
           ...:full --config.game.train=apps/train.jsonl --config.game.test=apps/test.jsonl --config.model.path=Qwen3-1.7B
"""

from experiments.configs.sizes import at_grpo_full, mini_debate, smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'grpo' or 'full'."""
    arg = variant("function_debate", arg, ("smoke", "grpo", "full"))
    if arg == "full":
        return at_grpo_full(base_config("code_debate", game="code_debate", recipe="at_grpo"))
    c = mini_debate("function_debate", "function_debate", grpo=arg == "grpo")
    c.sft.update(steps=500, fresh=250)  # after 250 it hardly knew templates that it was not trained on
    c.rollout.tasks = 24
    return smoke_workflow(c) if arg == "smoke" else c
