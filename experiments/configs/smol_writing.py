r"""Two writers that share one real model, SmolLM2-135M with an adapter each, learn to explain parts of Python's library (MAGRPO).

Command:   python -m marl_llm model smollm2 --out=models/smollm2
           python -m experiments.train --config=experiments/configs/smol_writing.py --workdir=runs/writing \
               --config.model.path=models/smollm2
           ... :paper                                      MAGRPO's printed reward, which never reads the post
           ... --config.control.permute_rewards=True      the control
           ... --config.assignment=shared                  one adapter for both
           ... --config.game.style=single                  one writer at the same budget
Hardware:  two CPU cores, float32, 3 GB.
"""

from experiments.base import base_config, variant


def small_real_model(c):
    """What the configs of a real model of 10^8 parameters on two cores have in common: an adapter per role, 4 tasks of 4 plays a step."""
    c.steps = 25
    c.model.update(preset=None, lora_rank=16, remat="dots")
    c.recipe.temperature = 0.8
    c.recipe.branches = 4
    c.recipe.kl_coef = 0.0
    c.rollout.update(tasks=4, slots=16, chunk=16)
    c.optimizer.update(minibatch=64, learning_rate=1e-3, warmup=2, row_tokens=400, microbatch_tokens=400)
    c.stacked_layers = True
    c.evaluation.update(every=25, tasks=16, final_tasks=64, ablate_roles=False)
    return c


def get_config(arg=None):
    """`arg` may be 'paper' or 'smoke'."""
    arg = variant("smol_writing", arg, ("paper", "smoke"))
    c = small_real_model(base_config("smol_writing", game="writing", recipe="magrpo"))
    c.game.task = "descriptions"
    c.game.constants = "paper" if arg == "paper" else "graded"
    c.game.max_prompt, c.game.max_tokens = 208, 48
    if arg == "smoke":
        c.steps = 2
        c.evaluation.final_tasks = 4
    return c
