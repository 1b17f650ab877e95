r"""Two writers that share one real model, SmolLM2-135M with an adapter each, learn to explain parts of Python's library (MAGRPO).

Command:   python -m marl_llm model smollm2 --out=models/smollm2
           python -m experiments.train --config=experiments/configs/smol_writing.py --workdir=runs/writing \
               --config.model.path=models/smollm2
           ... :paper                                      MAGRPO's printed reward, which never reads the post
           ... --config.control.permute_rewards=True      the control
           ... --config.assignment=shared                  one adapter for both
           ... --config.game.style=single                  one writer at the same budget
Expected:  return .396 -> .851 sampled, .506 -> .792 greedy on 64 held-out descriptions (three seeds); one core, 31 CPU min. The first
           writer ends with key words in a row, the second with sentences about them.
Hardware:  two CPU cores, float32, 2.8 GiB.
"""

from experiments.configs.sizes import small_real_model
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'paper' or 'smoke'."""
    arg = variant("smol_writing", arg, ("paper", "smoke"))
    c = small_real_model(base_config("smol_writing", game="writing", recipe="magrpo"), arg == "smoke")
    c.game.task = "descriptions"
    c.game.constants = "paper" if arg == "paper" else "graded"
    c.game.max_prompt, c.game.max_tokens = 208, 48
    return c
