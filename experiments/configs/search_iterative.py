"""Workflow C of UnityMAS-O, M-ASK: plan, then search, summarise, update and answer in turns; planning and answering share a model.

Command:   python -m experiments.train --config=experiments/configs/search_iterative.py --workdir=runs/c
           ... --config.assignment=shared                                       one model for all five roles
           ...:full --config.game.release=m_ask                                as M-ASK itself differs from UnityMAS-O
Variants:  :smoke, and :full as in search_parallel.py.
"""

from experiments.configs.sizes import search

MODELS = "plan=reason,answer=reason,search=search,summary=summary,update=update"


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    return search("search_iterative", arg, steps=60, assignment=MODELS)
