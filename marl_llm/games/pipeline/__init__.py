"""A data-science pipeline of three roles on shared files (MAPPA): the workflow, its metrics, a rubric, and a small world of tables."""

from marl_llm.games.pipeline.metrics import METRICS, Metric, fair, score_cap
from marl_llm.games.pipeline.rubric import FileFacts, blame, pipeline_rubric
from marl_llm.games.pipeline.runs import limits_for, run_in_workspace
from marl_llm.games.pipeline.submissions import Joined, join
from marl_llm.games.pipeline.team import Grade, pipeline

__all__ = [
    "METRICS", "Metric", "fair", "score_cap",
    "FileFacts", "blame", "pipeline_rubric",
    "limits_for", "run_in_workspace",
    "Joined", "join",
    "Grade", "pipeline",
]  # fmt: skip
