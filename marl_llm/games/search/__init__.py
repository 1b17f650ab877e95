"""Questions answered by searching: workflows A, B and C of UnityMAS-O, their data, and a small generated world to train them in."""

from marl_llm.games.kit.datasets import check_disjoint
from marl_llm.games.search.data import load_questions
from marl_llm.games.search.facts import FactBase, FactWorld, fact_renderer, fact_tokenizer, name_split
from marl_llm.games.search.m_ask import M_ASK, M_ASK_MODELS, UNITYMAS, MAskOptions, iterative_search, m_ask_roles
from marl_llm.games.search.mini import (
    fact_player,
    mini_iterative_search,
    mini_parallel_retrieval,
    mini_retrieve_extract_answer,
    mini_roles,
)
from marl_llm.games.search.teams import (
    answer_role,
    decompose_role,
    evidence_role,
    final_f1,
    parallel_retrieval,
    retrieve_extract_answer,
    retrieve_with,
    shared_f1,
)

__all__ = [
    "answer_role", "decompose_role", "evidence_role", "final_f1", "parallel_retrieval", "retrieve_extract_answer",
    "retrieve_with", "shared_f1",
    "M_ASK", "M_ASK_MODELS", "UNITYMAS", "MAskOptions", "iterative_search", "m_ask_roles",
    "check_disjoint", "load_questions",
    "FactBase", "FactWorld", "fact_player", "fact_renderer", "fact_tokenizer", "mini_iterative_search", "mini_parallel_retrieval",
    "mini_retrieve_extract_answer", "mini_roles", "name_split",
]  # fmt: skip
