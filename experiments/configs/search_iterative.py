"""Workflow C of UnityMAS-O, M-ASK: plan, then search, summarise, update and answer in turns; planning and answering share a model.

Command:   python -m experiments.train --config=experiments/configs/search_iterative.py --workdir=runs/c
           ... --config.assignment=shared                                       one model for all five roles
           ...:full --config.game.release=m_ask                                as M-ASK itself differs from UnityMAS-O
Variants:  :smoke, and :full as in search_parallel.py.
"""

from experiments.base import variant
from experiments.configs.sizes import full_search, mini_search, smoke_workflow

MODELS = "plan=reason,answer=reason,search=search,summary=summary,update=update"


def get_config(arg=None):
    """`arg` may be 'smoke' or 'full'."""
    if variant("search_iterative", arg, ("smoke", "full")) == "full":
        c = full_search("search_iterative", "question_iterative")
    else:
        c = mini_search("search_iterative", "fact_iterative")
        c.steps = 60
    c.assignment = MODELS
    return smoke_workflow(c) if arg == "smoke" else c
