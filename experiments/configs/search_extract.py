"""Workflow B of UnityMAS-O, retrieve, extract, answer: three roles, evidence is written per query, all are paid the answer's F1.

Command:   python -m experiments.train --config=experiments/configs/search_extract.py --workdir=runs/b
Variants:  :smoke, and :full as in search_parallel.py.
"""

from experiments.base import variant
from experiments.configs.sizes import full_search, mini_search, smoke_workflow


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    if variant("search_extract", arg, ("smoke", "full")) == "full":
        return full_search("search_extract", "question_extract")
    c = mini_search("search_extract", "fact_extract")
    return smoke_workflow(c) if arg == "smoke" else c
