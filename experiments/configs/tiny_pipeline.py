"""The data pipeline of MAPPA on generated tables: engineer, modeler and analyst, paid by a rubric that looks at the files and finds causes.

Command:   python -m experiments.train --config=experiments/configs/tiny_pipeline.py --workdir=runs/tables
           ... --config.coach.when=action            scores that cannot see what an action leads to
           ... --config.coach.study=shift:regression:1.5      a coach that favours a kind of task (see `marl_llm.coaching.studies`)
Expected:  docs/coached_games.md, "Data pipeline".
Variants:  :smoke; :full has the paper's constants on modelling tasks in DSBench's schema, and needs them, a checkpoint and a coach:
           ...:full --config.game.folder=dsbench --config.game.manifest=dsbench/reviewed.csv --config.model.path=Qwen3-4B
           --config.coach.url=https://.../chat/completions --config.coach.served_as=NAME
"""

from experiments.configs.sizes import small_workflow, smoke_workflow
from marl_llm.runs.base import base_config, variant


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    arg = variant("tiny_pipeline", arg, ("smoke", "full"))
    if arg == "full":
        return _full()
    c = small_workflow("tiny_pipeline", "tiny_pipeline", "mappa")
    c.steps = 25
    c.sft.update(steps=200, tasks=32, fresh=50)
    c.rollout.tasks = 24
    c.recipe.group_size = 8
    # An action is paid for itself, against the mean of its place: at the end of a play the rubric knows who is to blame.
    c.recipe.returns, c.recipe.baseline = "immediate", "place"
    c.coach.update(kind="rubric", when="end", truth="last")
    c.optimizer.minibatch = 1024  # one optimizer step per rollout
    c.evaluation.update(tasks=40, final_tasks=200)
    c.evaluation.ablate_roles = False
    return smoke_workflow(c) if arg == "smoke" else c


def _full():
    """Qwen3-4B three times, 16 tasks x 2 plays, 84 steps, lr 1e-6, KL 0.01, temperature 1.0 (MAPPA, Table 7)."""
    c = base_config("data_pipeline", game="data_pipeline", recipe="mappa")
    c.steps = 84  # of 30 epochs that were planned, 21 were run
    c.model.preset = None
    c.rollout.update(tasks=16, max_num_seqs=32, decode_steps=32, timeout_s=7200.0)
    c.optimizer.update(minibatch=16, row_tokens=40_960, learning_rate=1e-6, warmup=3, b2=0.95)
    c.coach.update(kind="endpoint", when="end", truth="last", key_env="COACH_KEY")
    c.evaluation.update(every=2, tasks=6, final_tasks=6, sampled=True)
    return c
