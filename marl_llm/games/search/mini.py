"""Workflows A, B and C in the small world of facts: the same graphs and rewards, with roles that speak in a few dozen words.

`fact_player` is the scripted player of all of them. Without noise it scores 1; with noise, or with `random_relation`, it makes the warm
start from which there is something left to learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.games.search.facts import HIDDEN, JOBS, NAME, PAGE_WORDS, QUESTION_WORDS, YEARS
from marl_llm.games.search.m_ask import UNITYMAS, MAskOptions, iterative_search
from marl_llm.games.search.teams import parallel_retrieval, retrieve_extract_answer
from marl_llm.workflows import FormatError, Role, ScriptTurn, Workflow, plain
from marl_llm.workflows.roles import Fields

MAX_QUERIES = 2
RELATIONS = ("director", "year", "studio", "born", "job", "made")


def read_queries(text: str) -> dict[str, Any]:
    """`q <name> <relation>`, up to two, with `;` between: names and relations of pages only."""
    queries = []
    for part in text.split(";"):
        match = NAME.fullmatch(" ".join(part.split()[1:3]))
        words = part.split()
        if len(words) != 4 or words[0] != "q" or match is None or words[3] not in RELATIONS:
            raise FormatError(f"not a query: {part.strip()!r}")
        queries.append(" ".join(words[1:]))
    if len(queries) > MAX_QUERIES or len(set(queries)) < len(queries):
        raise FormatError("more than two queries, or one twice")
    return {"queries": tuple(queries)}


def _read_search(text: str) -> dict[str, Any]:
    if text.strip() == "end":
        return {"sub_questions": (), "ended": True}
    return {"sub_questions": read_queries(text)["queries"], "ended": False}


def pages(items: Sequence[str]) -> str:
    """Pages in a row, for `Role.show`."""
    return " | ".join(item for item in items if item) or "nothing"


def mini_roles() -> dict[str, Role]:
    """Roles of the small world by name; each workflow takes those that it knows."""

    def role(name: str, prompt: str, field: str, words: int, **options: Any) -> Role:
        return Role(name, prompt, **dict(parse=plain(field, words), writes={field: ""}, max_tokens=words + 1, max_prompt=96) | options)

    shown = {"show": {"passages": pages}}
    return {
        "decompose": Role("decompose", "ask {question} queries:", parse=read_queries, writes={"queries": ()}, max_tokens=10, max_prompt=16),
        "evidence": role("evidence", "ask {question} for {query} see {passages} evidence:", "evidence", 12, **shown),
        "answer": role("answer", "ask {question} see {passages} answer:", "answer", 3, **shown),
        "answer_evidence": role("answer", "ask {question} know {evidences} answer:", "answer", 3, show={"evidences": pages}),
        "plan": Role("plan", "ask {question} answer:", _read_plan, dict(knowledge="nothing", plan_answer=""), max_tokens=4, max_prompt=16),
        "search": Role(
            "search", "ask {question} know {knowledge} next:", _read_search, {"sub_questions": (), "ended": False},
            max_tokens=10, max_prompt=96,
        ),
        "summary": role("summary", "ask {question} see {passages} evidence:", "evidence", 24, **shown),
        "update": role("update", "ask {question} know {knowledge} see {evidence} know", "knowledge", 24, trim="evidence"),
        "answer_knowledge": role("answer", "ask {question} know {knowledge} answer:", "answer", 3),
    }


def _read_plan(text: str) -> dict[str, Any]:
    """The planner of the small world only guesses: nothing is known before the first search."""
    return {"plan_answer": plain("answer", 3)(text)["answer"], "knowledge": "nothing"}


def mini_parallel_retrieval(retrieve: Callable[..., Any]) -> Workflow:
    """Workflow A."""
    roles = mini_roles()
    return parallel_retrieval(retrieve, roles["decompose"], roles["answer"], MAX_QUERIES, hidden=HIDDEN)


def mini_retrieve_extract_answer(retrieve: Callable[..., Any]) -> Workflow:
    """Workflow B."""
    roles = mini_roles()
    return retrieve_extract_answer(retrieve, roles["decompose"], roles["evidence"], roles["answer_evidence"], MAX_QUERIES, hidden=HIDDEN)


def mini_iterative_search(retrieve: Callable[..., Any], options: MAskOptions = UNITYMAS) -> Workflow:
    """Workflow C."""
    roles = mini_roles()
    chosen = {name: roles[name] for name in ("plan", "search", "summary", "update")} | {"answer": roles["answer_knowledge"]}
    return iterative_search(retrieve, chosen, options, HIDDEN)


def fact_player(noise: float = 0.0, random_relation: bool = False) -> Callable[[ScriptTurn], str]:
    """A player of every role of the small world.

    Args:
      noise: how often a response is one random word instead.
      random_relation: queries name the right names, but any relation: what is left to learn is which.
    """

    def play(turn: ScriptTurn) -> str:
        rng, fields = turn.random, turn.fields
        if rng.random() < noise:
            return rng.choice((*YEARS, *JOBS, *PAGE_WORDS, *QUESTION_WORDS))
        queries = list(fields["queries_gold"])
        if random_relation:
            queries = [f"{query.rsplit(' ', 1)[0]} {rng.choice(RELATIONS)}" for query in queries]
        request = " ; ".join(f"q {query}" for query in dict.fromkeys(queries))
        name = turn.role.name
        if name == "decompose":
            return request
        if name == "search":
            return "end" if turn.turn > 1 else request
        if name == "plan":
            return "nothing"
        if name == "evidence":  # the question says what matters, whatever was searched: of the pages that this query was about
            about = _parts(fields["query"])[0]
            matters = [query for query in fields["queries_gold"] if _parts(query)[0] == about]
            return " | ".join(filter(None, (_relevant(query, fields["passages"]) for query in matters))) or "nothing"
        if name == "summary":
            return " | ".join(filter(None, (_relevant(query, fields["passages"]) for query in fields["queries_gold"]))) or "nothing"
        if name == "update":
            return fields["evidence"]
        if turn.node == "answer_0":
            return "nothing"
        return fields["answers"][0] if _answerable(fields) else "nothing"

    return play


def _answerable(fields: Fields) -> bool:
    """Whether what an answerer reads tells the answer: every gold query's name and relation stand in one page or piece of evidence.

    A teacher that answers without having read it would teach to guess.
    """
    known = fields.get("passages") or fields.get("evidences") or fields.get("knowledge") or ()
    known = known.split(" | ") if isinstance(known, str) else known

    def told(name, relation):
        return any(name in piece and relation in piece.split() for piece in known)

    return all(told(*_parts(query)) for query in fields["queries_gold"])


def _parts(query: str) -> tuple[str, str]:
    name, relation = query.rsplit(" ", 1)
    return name, relation


def _relevant(query: str, pages: Sequence[str]) -> str:
    """The name that a query asks about, and the relation with its value, from the first page that has both."""
    name, relation = _parts(query)
    for page in pages:
        words = page.split()
        if relation in words and name in page:
            at = words.index(relation)
            return " ".join([*name.split(), *words[at : at + (2 if relation in ("year", "job") else 3)]])
    return ""
