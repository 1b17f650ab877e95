"""A data-science pipeline of three roles on shared files (MAPPA): the workflow, its metrics, a rubric, and a small world of tables."""

from marl_llm.games.pipeline.rubric import FileFacts, blame, pipeline_rubric

__all__ = ["FileFacts", "blame", "pipeline_rubric"]
