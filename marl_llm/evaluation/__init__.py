"""Third floor, below training: what an evaluation found, intervals, transcripts."""

from marl_llm.evaluation.intervals import over_seeds, wilson
from marl_llm.evaluation.outcomes import Evaluation, Outcome, clustered, paired
from marl_llm.evaluation.transcripts import episode

__all__ = ["Evaluation", "Outcome", "clustered", "episode", "over_seeds", "paired", "wilson"]
