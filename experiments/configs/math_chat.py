"""MathChat (MAPPA): three chat models on competition problems, every action scored by an outside coach, with the paper's constants.

Command:   python -m experiments.train --config=experiments/configs/math_chat.py --workdir=runs/math_chat
               --config.game.train=AIME_1983_2024.json --config.game.test=aime_2025.json --config.model.path=Qwen3-4B
               --config.coach.url=https://... --config.coach.served_as=gemini-2.5-flash --config.coach.key_env=KEY
               --config.coach.cap_usd=... --config.coach.prices=...
Expected:  no run of this size has been made. The paper (Table 1, Qwen3-4B): AMC 78.1 -> 85.9, AIME 49.2 -> 66.7.
Variants:  :partial, where only the solver reads the problem; :smoke, with rewards of the outcome and no coach.
"""

from experiments.configs.sizes import smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'full' (the same), 'partial' or 'smoke'.

    Section 3.1, Appendix E and Table 7: 512 training rows (seed 42), 32 prompts with 2 plays a step, 8 epochs of 16 steps, Adam with rate
    1e-6, KL 0.01 in the reward, clip 0.2, temperature 1, minibatches of 16, 4,096 new tokens, five actions of the executor. From the
    release: betas 0.9 and 0.95, a warm-up of 3 %. Readings: a minibatch is in prompts, and the validation rows are the last fifth of
    the pool. The paper measures four samples at temperature 0.6 every 4 steps; here that is done once, before and after the training, and
    every 4 steps one greedy play is measured.
    """
    arg = variant("math_chat", arg, ("full", "partial", "smoke"))
    c = base_config("math_chat", game="math_chat", recipe="grpo" if arg == "smoke" else "mappa")
    c.steps = 128
    c.model.preset = None
    c.model.thinking = "off" if arg == "smoke" else "on"
    c.rollout.update(tasks=32, max_num_seqs=64, decode_steps=32, timeout_s=3600.0)
    c.optimizer.update(minibatch=16, learning_rate=1e-6, warmup=4, b2=0.95)
    c.evaluation.update(every=4, tasks=30, final_tasks=30, sampled=True, samples=4, temperature=0.6, ablate_roles=False)
    if arg == "smoke":
        return smoke_workflow(c)
    c.game.pool = 512
    c.game.information = "partial" if arg == "partial" else "full"
    c.coach.kind, c.coach.truth = "endpoint", "last"
    return c
