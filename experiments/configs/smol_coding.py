r"""A coder and a unit tester that share one real model, SmolLM2-135M with an adapter each, on problems of one line (GRPO).

Command:   python -m marl_llm model smollm2 --out=models/smollm2
           python -m marl_llm profile experiments/configs/smol_coding.py --path=models/smollm2 --tasks=32 --plays=4
           python -m experiments.train --config=experiments/configs/smol_coding.py --workdir=runs/coding --config.model.path=models/smollm2
           ... --config.game.agents=single                 the coder alone
           ... --config.control.permute_rewards=True       the control
Expected:  docs/results.md, "Real models".
Hardware:  two CPU cores, float32; programs run in the sandbox.
"""

from experiments.configs.sizes import small_real_model
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke'."""
    smoke = variant("smol_coding", arg, ("smoke",)) == "smoke"
    c = small_real_model(base_config("smol_coding", game="one_line_debate", recipe="grpo"), smoke)
    c.recipe.update(group_by="instance,agent,turn", rewards="mixed", returns="immediate")
    return c
