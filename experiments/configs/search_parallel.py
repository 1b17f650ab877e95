"""Workflow A of UnityMAS-O, parallel retrieval: a decomposer writes queries, an answerer reads what they find; F1 pays both.

Command:   python -m experiments.train --config=experiments/configs/search_parallel.py --workdir=runs/a
Variants:  :smoke runs the same code in a few steps; :full is the paper's size on NQ or HotpotQA, and needs files and a checkpoint:
           ...:full --config.game.train=nq/train.parquet --config.game.test=nq/test.parquet --config.game.index=http://host:8000
           --config.model.path=Qwen2.5-1.5B-Instruct
"""

from experiments.base import variant
from experiments.configs.sizes import full_search, mini_search, smoke_workflow


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    if variant("search_parallel", arg, ("smoke", "full")) == "full":
        return full_search("search_parallel", "question_parallel")
    c = mini_search("search_parallel", "fact_parallel")
    c.steps = 200
    return smoke_workflow(c) if arg == "smoke" else c
