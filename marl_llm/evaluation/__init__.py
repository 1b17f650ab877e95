"""Third floor, below training: what an evaluation found, intervals, transcripts."""

from marl_llm.evaluation.at_k import at_k, at_k_by_draws, best_of
from marl_llm.evaluation.elo import Ratings, elo_ratings, opponent_priorities, rating_against
from marl_llm.evaluation.intervals import clustered, over_seeds, wilson
from marl_llm.evaluation.outcomes import Evaluation, Outcome, paired
from marl_llm.evaluation.transcripts import episode

__all__ = [
    "Evaluation", "Outcome", "Ratings", "at_k", "at_k_by_draws", "best_of", "clustered", "elo_ratings", "episode", "opponent_priorities",
    "over_seeds", "paired", "rating_against", "wilson",
]  # fmt: skip
