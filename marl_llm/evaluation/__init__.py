"""Third floor, below training: what an evaluation found, intervals, transcripts."""

from marl_llm.evaluation.at_k import at_k, at_k_by_draws, best_of
from marl_llm.evaluation.intervals import clustered, over_seeds, wilson
from marl_llm.evaluation.outcomes import Evaluation, Outcome, paired
from marl_llm.evaluation.transcripts import episode

__all__ = ["Evaluation", "Outcome", "at_k", "at_k_by_draws", "best_of", "clustered", "episode", "over_seeds", "paired", "wilson"]
