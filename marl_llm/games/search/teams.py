"""Workflows A and B of UnityMAS-O, section 6: parallel retrieval, and retrieve, extract, answer.

    A   decompose ─▶ each query: retrieve ─────────────▶ answer
    B   decompose ─▶ each query: retrieve ─▶ evidence ─▶ answer

Every call is paid the final answer's F1 and its own format. The gold answers are hidden: no prompt can hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.tools.results import ToolResult
from marl_llm.tools.retriever.interface import MAX_QUERY
from marl_llm.workflows import Role, Trajectory, Workflow, compute, each, json_object, numbered, sequence, short_text, texts, tool
from marl_llm.workflows.answers import answer_f1, exact_match
from marl_llm.workflows.rewards import Reward, broadcast, format_penalty

MAX_QUERIES = 3
TOP_K = 4


def retrieve_with(retriever: Any, top_k: int = TOP_K, deadline_s: float | int = 30.0) -> Callable[..., Any]:
    """A tool of one query: the contents of its best passages, as a tuple of texts. `retriever` is a `marl_llm.tools.Retriever`.

    Of a query that is longer than any retriever takes, the beginning is searched for.
    """

    async def retrieve(query: str) -> ToolResult:
        result = await retriever.asearch([query[:MAX_QUERY]], top_k, float(deadline_s))
        return result.map(lambda hits: tuple(str(hit.document["contents"]) for hit in hits[0]))

    return retrieve


def final_f1(path: Trajectory) -> float:
    """F1 of the answer with which a trajectory ended."""
    return answer_f1(path.fields["answer"], path.fields["answers"])


def shared_f1() -> tuple[Reward, ...]:
    """r_i = F1(final answer) + format penalty of the call itself (UnityMAS-O, section 6, A and B)."""
    return broadcast(final_f1, name="f1"), format_penalty(1.0)


def decompose_role(**options: Any) -> Role:
    """Question -> one to three search queries, as JSON."""
    return Role(
        "decompose",
        "Question: {question}\n\n"
        f"Write the search queries that find what is needed to answer it: one for a simple question, at most {MAX_QUERIES}.\n"
        'Reply with JSON only: {{"queries": ["...", "..."]}}',
        **dict(parse=json_object(queries=texts(MAX_QUERIES, cut=True)), writes={"queries": ()}, max_tokens=128) | options,
    )


def evidence_role(**options: Any) -> Role:
    """One query's passages -> what in them matters, as JSON."""
    return Role(
        "evidence",
        "Question: {question}\nSearch query: {query}\nPassages:\n{passages}\n\n"
        "Copy what helps to answer the question, in at most 75 words; write none if nothing does.\n"
        'Reply with JSON only: {{"evidence": "..."}}',
        **dict(parse=json_object(evidence=short_text(75)), writes={"evidence": ""}, show={"passages": numbered}, trim="passages")
        | dict(max_tokens=128) | options,
    )


def answer_role(reads: str = "passages", **options: Any) -> Role:
    """Question and passages (or evidence) -> a short answer, as JSON."""
    return Role(
        "answer",
        "Question: {question}\n" + reads.capitalize() + ":\n{" + reads + "}\n\n"
        "Answer in as few words as possible.\n"
        'Reply with JSON only: {{"answer": "..."}}',
        **dict(parse=json_object(answer=short_text()), writes={"answer": ""}, show={reads: numbered}, trim=reads, max_tokens=128) | options,
    )


def unique_passages(found: tuple[Sequence[str], ...]) -> tuple[str, ...]:
    """Passages of all queries, each once, in the order found."""
    return tuple(dict.fromkeys(passage for passages in found for passage in passages))


def parallel_retrieval(
    retrieve: Callable[..., Any],
    decompose: Role | None = None,
    answer: Role | None = None,
    max_queries: int = MAX_QUERIES,
    rewards: tuple[Reward, ...] | None = None,
    hidden: tuple[str, ...] = ("answers",),
) -> Workflow:
    """Workflow A, of two roles.

    Args:
      retrieve: a tool of one `query`; see `retrieve_with`. It may read hidden fields, e.g. which index to search:
        what it finds is for all.
      decompose: reads `question`, writes `queries`.
      answer: reads `question` and `passages`, writes `answer`.
      rewards: by default `shared_f1`.
      hidden: fields that tasks carry for rewards and scripts; `answers` among them.
    """
    body = sequence(
        decompose or decompose_role(),
        each("queries", as_="query", do=tool(retrieve, "found", name="retrieve", reveals=("found",)), collect="found", at_most=max_queries),
        compute(unique_passages, "passages", name="merge"),
        answer or answer_role(),
    )
    return _question_team("parallel_retrieval", body, rewards, hidden)


def retrieve_extract_answer(
    retrieve: Callable[..., Any],
    decompose: Role | None = None,
    evidence: Role | None = None,
    answer: Role | None = None,
    max_queries: int = MAX_QUERIES,
    rewards: tuple[Reward, ...] | None = None,
    hidden: tuple[str, ...] = ("answers",),
) -> Workflow:
    """Workflow B, of three roles: `evidence` reads `query` and its `passages` and writes `evidence`; `answer` reads `evidences`."""
    extract = sequence(tool(retrieve, "passages", name="retrieve", reveals=("passages",)), evidence or evidence_role())
    body = sequence(
        decompose or decompose_role(),
        each("queries", as_="query", do=extract, collect={"evidence": "evidences"}, at_most=max_queries),
        answer or answer_role("evidences"),
    )
    return _question_team("retrieve_extract_answer", body, rewards, hidden)


def _question_team(name: str, body: Any, rewards: tuple[Reward, ...] | None, hidden: tuple[str, ...]) -> Workflow:
    paid = shared_f1() if rewards is None else rewards

    def em(path: Trajectory) -> float:
        return exact_match(path.fields["answer"], path.fields["answers"])

    return Workflow(name, body, ("question",), hidden, rewards=paid, metrics={"f1": final_f1, "em": em}, score="at_end")
