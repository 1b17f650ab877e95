"""Workflow B of UnityMAS-O, retrieve, extract, answer: three roles, evidence is written per query, all are paid the answer's F1.

Command:   python -m experiments.train --config=experiments/configs/search_extract.py --workdir=runs/b
Variants:  :smoke, and :full as in search_parallel.py.
"""

from experiments.configs.sizes import search


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    return search("search_extract", arg)
