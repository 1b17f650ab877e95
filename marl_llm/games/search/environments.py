"""Environments of search: `fact_parallel`, `fact_extract`, `fact_iterative` on generated facts; `question_parallel`, `question_extract`,
`question_iterative` on NQ or HotpotQA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marl_llm.games.kit.datasets import disjoint_files
from marl_llm.games.search.data import load_questions
from marl_llm.games.search.facts import FactBase, fact_renderer
from marl_llm.games.search.m_ask import M_ASK, UNITYMAS, iterative_search
from marl_llm.games.search.mini import fact_player, mini_iterative_search, mini_parallel_retrieval, mini_retrieve_extract_answer
from marl_llm.games.search.teams import parallel_retrieval, retrieve_extract_answer, retrieve_with
from marl_llm.hints import check_word
from marl_llm.workflows import Environment


def _fact_environment(
    build: Callable[..., Any], worlds: int, facts_seed: int, top_k: int, noise: float, random_relation: bool
) -> Environment:
    facts = FactBase(worlds, facts_seed, top_k)
    script = fact_player(noise, random_relation)
    return Environment(build(facts.retrieve), facts.tasks, "f1", fact_renderer(), script, close=facts.close)


def fact_parallel(worlds: int = 64, facts_seed: int = 0, top_k: int = 1, noise: float = 0.1, random_relation: bool = True) -> Environment:
    """Workflow A on generated facts. `noise` and `random_relation` are those of the scripted player, `worlds` of the training split."""
    return _fact_environment(mini_parallel_retrieval, worlds, facts_seed, top_k, noise, random_relation)


def fact_extract(worlds: int = 64, facts_seed: int = 0, top_k: int = 1, noise: float = 0.1, random_relation: bool = True) -> Environment:
    """Workflow B on generated facts; options as `fact_parallel`."""
    return _fact_environment(mini_retrieve_extract_answer, worlds, facts_seed, top_k, noise, random_relation)


def fact_iterative(worlds: int = 64, facts_seed: int = 0, top_k: int = 1, noise: float = 0.1, random_relation: bool = True) -> Environment:
    """Workflow C on generated facts; options as `fact_parallel`."""
    return _fact_environment(mini_iterative_search, worlds, facts_seed, top_k, noise, random_relation)


def _question_environment(
    build: Callable[..., Any], train: str, test: str, index: str, top_k: int, bad_rows: str, **more: Any
) -> Environment:
    from marl_llm.tools.retriever import open_index, open_server

    if not index:
        raise ValueError("index must name a retriever: a directory built by marl_llm.tools.retriever, or the address of its server")
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    tasks = disjoint_files(load_questions, train, test, "question", bad_rows)
    if "://" not in index:
        return Environment(build(retrieve_with(open_index(index), top_k), **more), tasks, "f1")
    client = open_server(index)
    return Environment(build(retrieve_with(client, top_k), **more), tasks, "f1", close=client.close)


def question_parallel(train: str = "", test: str = "", index: str = "", top_k: int = 4, bad_rows: str = "refuse") -> Environment:
    """Workflow A on files of questions (NQ, HotpotQA), and a retriever: the directory of an index or the address of a server.

    Args:
      train, test: files; the last rows of the first are the validation split.
      index: the directory of an index or the address of a server.
      top_k: passages per query.
    """
    return _question_environment(parallel_retrieval, train, test, index, top_k, bad_rows)


def question_extract(train: str = "", test: str = "", index: str = "", top_k: int = 4, bad_rows: str = "refuse") -> Environment:
    """Workflow B; options as `question_parallel`."""
    return _question_environment(retrieve_extract_answer, train, test, index, top_k, bad_rows)


def question_iterative(
    train: str = "", test: str = "", index: str = "", top_k: int = 5, release: str = "unitymas", bad_rows: str = "refuse"
) -> Environment:
    """Workflow C; options as `question_parallel`. `release` is "unitymas" or "m_ask", whose differences `m_ask.MAskOptions` lists."""
    releases = {"unitymas": UNITYMAS, "m_ask": M_ASK}
    check_word("release", release, releases)
    return _question_environment(iterative_search, train, test, index, top_k, bad_rows, options=releases[release])
