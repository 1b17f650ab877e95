"""Third floor: success on held-out instances, swap tests, mixed pairs, intervals, transcripts."""

from marl_llm.evaluation.intervals import over_seeds, wilson
from marl_llm.evaluation.teams import TeamEvaluation, figures
from marl_llm.evaluation.transcripts import episode

__all__ = ["TeamEvaluation", "episode", "figures", "over_seeds", "wilson"]
