"""Mathematical problems solved by a reasoner and a Python user, alone, in pairs or in ensembles; and a small generated world of sums."""

from marl_llm.games.maths.data import load_maths, understood_by
from marl_llm.games.maths.debate import Answers, debate_roles, maths_debate, single_reasoner
from marl_llm.games.maths.ensemble import judge_role, maths_ensemble
from marl_llm.games.maths.sums import SumAnswers, sums_judge, sums_player, sums_roles, sums_speech, sums_task, sums_tokenizer

__all__ = [
    "Answers", "debate_roles", "maths_debate", "single_reasoner", "judge_role", "maths_ensemble",
    "load_maths", "understood_by",
    "SumAnswers", "sums_judge", "sums_player", "sums_roles", "sums_speech", "sums_task", "sums_tokenizer",
]  # fmt: skip
