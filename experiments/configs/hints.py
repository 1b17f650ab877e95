"""A small Hanabi: two players who see each other's cards only; do teams that were trained apart understand each other?

Command:   python -m experiments.train --config=experiments/configs/hints.py --config.seed=0 --workdir=runs/hints_0      and seeds 1, 2
           python -m marl_llm league --runs=runs/hints_0,runs/hints_1,runs/hints_2 --temperature=0
Variants:  without a word self-play; :league half of all matches with past selves; :other_play with the second player's colours renamed in
           training (Hu et al. 2020, arXiv:2003.02979); :smoke
"""

from marl_llm.runs.base import base_config, smoke, variant


def get_config(arg=None):
    """`arg` may be 'smoke', 'league' or 'other_play'."""
    arg = variant("hints", arg, ("smoke", "league", "other_play"))
    c = base_config("hints", game="hints", recipe="magrpo")
    c.steps = 200
    c.assignment = "shared"
    c.model.preset = "nano"
    # every row is paid for what both laid since its speaker's last word
    c.recipe.update(scope="agent", group_by="instance,agent,turn", group_size=8, scale_advantages="none", entropy_coef=0.003, kl_coef=0.0)
    c.rollout.tasks = 16
    c.optimizer.update(learning_rate=2e-3, minibatch=384)
    c.sft.steps = 20
    c.evaluation.update(every=100, tasks=100, final_tasks=100, transcripts=0, ablate_roles=False)
    c.checkpoint.every = 100
    c.devices = 1
    if arg == "league":
        c.league.update(keep=6, every=20)
    c.game.other_play = arg == "other_play"
    return smoke(c) if arg == "smoke" else c
