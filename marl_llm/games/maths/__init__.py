"""Mathematical problems solved by a reasoner and a Python user, alone, in pairs or in ensembles, or by a chain of three; and small
generated worlds of sums and chains of operations."""

from marl_llm.games.maths.chain import ChainTools, chain_player, chain_renderer, chain_task
from marl_llm.games.maths.chain_coach import chain_better, chain_brief, chain_contribution, chain_rubric
from marl_llm.games.maths.chat import ChatTools, chat_roles, math_chat
from marl_llm.games.maths.competitions import load_competition
from marl_llm.games.maths.data import load_maths, understood_by
from marl_llm.games.maths.debate import Answers, debate_roles, maths_debate, single_reasoner
from marl_llm.games.maths.ensemble import judge_role, maths_ensemble
from marl_llm.games.maths.sums import SumAnswers, sums_judge, sums_player, sums_renderer, sums_roles, sums_task, sums_tokenizer

__all__ = [
    "ChatTools", "chat_roles", "math_chat", "load_competition",
    "ChainTools", "chain_better", "chain_brief", "chain_contribution", "chain_player", "chain_rubric", "chain_renderer", "chain_task",
    "Answers", "debate_roles", "maths_debate", "single_reasoner", "judge_role", "maths_ensemble",
    "load_maths", "understood_by",
    "SumAnswers", "sums_judge", "sums_player", "sums_roles", "sums_renderer", "sums_task", "sums_tokenizer",
]  # fmt: skip
