"""Workflow A of UnityMAS-O, parallel retrieval: a decomposer writes queries, an answerer reads what they find; F1 pays both.

Command:   python -m experiments.train --config=experiments/configs/search_parallel.py --workdir=runs/a
Variants:  :smoke runs the same code in a few steps; :full is the paper's size on NQ or HotpotQA, and needs files and a checkpoint:
           ...:full --config.game.train=nq/train.parquet --config.game.test=nq/test.parquet --config.game.index=http://host:8000
           --config.model.path=Qwen2.5-1.5B-Instruct
"""

from experiments.configs.sizes import search


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    return search("search_parallel", arg, steps=200)
