"""Questions on Python's library for small general models: a searcher finds descriptions, an answerer names the function that is meant.

    question   Which part of Python's shutil does this: "Copy data from src to dst in the most"?
    query      copy data from src to dst                                  (searcher)
    passages   1. shutil.copyfile: Copy data from src to dst in the most efficient way possible. ...
    answer     copyfile                                                   (answerer)

Workflow A of UnityMAS-O with one query. Small models begin with a sentence in which a name is partly right, so both are paid for how near
an answer comes to the name (`name_share`), and the searcher for the rank of what it should find, too. The figure that counts is the
answer's F1.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import tempfile
from typing import Any

from marl_llm.games.descriptions import MODULES, SHARES, descriptions
from marl_llm.games.search.teams import parallel_retrieval, retrieve_with
from marl_llm.workflows import Environment, Role, Task, Trajectory, Workflow, numbered, plain
from marl_llm.workflows.answers import answer_f1
from marl_llm.workflows.rewards import absolute, broadcast
from marl_llm.workflows.splits import listed_tasks, split_of

WORDS = (8, 30)  # of a description
QUOTED = 10  # words of it in a question
SHOWN = 24  # words of a passage
FOUND_PAY = 0.5  # of the searcher, for the right passage in the first place


def library_tasks() -> dict[str, list[Task]]:
    """Split -> its questions. Hidden: `answers`, names alone and with their module, `module`, and `sources`, how right passages begin."""
    names_of: dict[tuple[str, str], list[str]] = {}  # question and module -> names
    for name, text in descriptions(*WORDS):
        module, own = module_and_name(name)
        last = own.rpartition(".")[2]
        if not text.startswith(last):  # a signature says how it is called, not what it does
            quoted = " ".join(re.sub(rf"\b{re.escape(last)}\b", "it", text).split()[:QUOTED])
            names_of.setdefault((f'Which part of Python\'s {module} does this: "{quoted}"?', module), []).append(name)
    parts: dict[str, list[Task]] = {split: [] for split in SHARES}
    for (question, module), names in names_of.items():
        split = split_of(question, SHARES)
        answers = tuple(dict.fromkeys(answer for name in names for answer in (name.rpartition(".")[2], module_and_name(name)[1], name)))
        hidden = {"answers": answers, "module": module, "sources": tuple(f"{name}: " for name in names)}
        parts[split].append(Task(len(parts[split]), {"question": question}, hidden, split))
    return parts


def module_and_name(name: str) -> tuple[str, str]:
    """`os.path.join` -> `os.path` and `join`; the longest module that the descriptions come from."""
    module = max((candidate for candidate in MODULES if name.startswith(f"{candidate}.")), key=len)
    return module, name[len(module) + 1 :]


def build_library(folder: str) -> Any:
    """A `BM25Index` of all descriptions in a new directory: what is searched is the same for all splits."""
    from marl_llm.tools.retriever import build_bm25

    passages = ((name, " ".join(text.split()[:SHOWN])) for name, text in descriptions(*WORDS))
    return build_bm25([{"id": name, "contents": f"{name}: {text}"} for name, text in passages], folder)


def _one_query(text: str) -> dict[str, Any]:
    return {"queries": (plain("query")(text)["query"],)}


def library_roles(max_prompt: int = 256, max_tokens: int = 32) -> dict[str, Role]:
    """A searcher and an answerer that reply without any form."""
    sizes = dict(max_tokens=max_tokens, max_prompt=max_prompt)
    ask = "Question: {question}\n\nWrite the words to search for in an index of descriptions.\nReply with these words alone."
    answer = "Descriptions:\n{passages}\n\nQuestion: {question}\n\nReply with its name alone."
    shown = dict(show={"passages": numbered}, trim="passages")
    return {
        "searcher": Role("searcher", ask, _one_query, {"queries": ()}, **sizes),
        "answerer": Role("answerer", answer, plain("answer"), {"answer": ""}, **shown, **sizes),
    }


def rank_pay(path: Trajectory) -> float:
    """1 / rank of the right passage among those found, 0 without it."""
    ranks = [rank for rank, passage in enumerate(path.fields["passages"], 1) if passage.startswith(path.fields["sources"])]
    return 1.0 / ranks[0] if ranks else 0.0


def name_share(path: Trajectory) -> float:
    """How near an answer comes to a right name, in [0, 1]: the harmonic mean of its nearest word and of all its words on average.

    A word's nearness is the F1 of its parts and the name's, split at points and underscores, without the module, which the question tells.
    A word of one part counts only if it is the name: else quoting the description, whose words are often parts of the name, would be paid.
    A word said again counts nothing: else the name repeated up to the budget would earn as much as the name.
    """

    def parts(word: str) -> str:
        return " ".join(re.findall(r"[A-Za-z0-9]+", word.replace(f"{path.fields['module']}.", "")))

    def nearness(word: str, name: str) -> float:
        return answer_f1(word, (name,)) if " " in word or word == name else 0.0

    words = [parts(word) for word in path.fields["answer"].split()]
    new = [word not in words[:place] for place, word in enumerate(words)]
    near = [[first * nearness(word, parts(name)) for word, first in zip(words, new) if word] for name in path.fields["answers"]]
    return max(float(statistics.harmonic_mean([max(scores), statistics.fmean(scores)])) if scores else 0.0 for scores in near)


def library_team(retrieve: Any, roles: dict[str, Role]) -> Workflow:
    """The workflow. `retrieve` is a tool of one query: see `retrieve_with`."""
    rewards = (broadcast(name_share, name="name"), absolute(lambda _, path: rank_pay(path), ("searcher",), name="found", weight=FOUND_PAY))
    team = parallel_retrieval(retrieve, roles["searcher"], roles["answerer"], 1, rewards, ("answers", "module", "sources"))
    return dataclasses.replace(team, name="library_questions", metrics={**team.metrics, "name": name_share, "found": rank_pay})


def library_questions(max_prompt: int = 256, max_tokens: int = 32, top_k: int = 3) -> Environment:
    """A searcher and an answerer on questions about Python's library, which every machine has.

    Args:
      top_k: passages that a query finds.

    Raises `ValueError` if `top_k` is below 1.
    """
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    folder = tempfile.TemporaryDirectory(prefix="library-")
    index = build_library(f"{folder.name}/index")
    team = library_team(retrieve_with(index, top_k), library_roles(max_prompt, max_tokens))
    return Environment(team, listed_tasks(library_tasks()), "f1", close=folder.cleanup)
