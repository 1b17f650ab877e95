"""The workflows of this library with their tasks and tools: generated ones, and the data sets of the papers. See `make_game`.

| name | workflow | tasks |
|---|---|---|
| `fact_parallel`, `fact_extract`, `fact_iterative` | A, B, C in the small world of facts | generated |
| `functions` | D in the small world of functions | generated |
| `question_parallel`, `question_extract`, `question_iterative` | A, B, C with prompts for general models | NQ, HotpotQA: parquet or jsonl |
| `problems` | D with prompts for general models | DeepCoder's mix: parquet or jsonl |
| `plan_path_programs` | the same for tiny models, whose words are lines of Python | generated |
| `plan_path_text` | Stronger-MAS's Tool and Planner on a grid, in text; the Tool's program is run | generated |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marl_llm.games import coding, search
from marl_llm.games.coding.functions import SHARES as FUNCTION_SHARES
from marl_llm.games.coding.team import ROUNDS
from marl_llm.games.plan_path.lines import plan_path_programs  # noqa: F401 (a name of `registry`)
from marl_llm.games.plan_path.text import plan_path_text  # noqa: F401 (a name of `registry`)
from marl_llm.workflows import Task, WorkflowError, World
from marl_llm.workflows.answers import normalise_answer
from marl_llm.workflows.rows import DataError

HOLD_OUT = 1000  # rows at the end of a training file that are for validation


def _fact_world(build: Callable[..., Any], worlds: int, facts_seed: int, top_k: int, noise: float, random_relation: bool) -> World:
    facts = search.FactBase(worlds, facts_seed, top_k)
    script = search.fact_player(noise, random_relation)
    return World(build(facts.retrieve), facts.tasks, "f1", search.fact_speech(), script, close=facts.close)


def fact_parallel(worlds: int = 64, facts_seed: int = 0, top_k: int = 1, noise: float = 0.1, random_relation: bool = True) -> World:
    """Workflow A on generated facts. `noise` and `random_relation` are those of the scripted player, `worlds` of the training split."""
    return _fact_world(search.mini_parallel_retrieval, worlds, facts_seed, top_k, noise, random_relation)


def fact_extract(worlds: int = 64, facts_seed: int = 0, top_k: int = 1, noise: float = 0.1, random_relation: bool = True) -> World:
    """Workflow B on generated facts; options as `fact_parallel`."""
    return _fact_world(search.mini_retrieve_extract_answer, worlds, facts_seed, top_k, noise, random_relation)


def fact_iterative(worlds: int = 64, facts_seed: int = 0, top_k: int = 1, noise: float = 0.1, random_relation: bool = True) -> World:
    """Workflow C on generated facts; options as `fact_parallel`."""
    return _fact_world(search.mini_iterative_search, worlds, facts_seed, top_k, noise, random_relation)


def functions(
    functions_seed: int = 0,
    ambiguous_share: float = 1.0,
    rare: float = 0.25,
    noise: float = 0.1,
    ignore_advice: float = 0.5,
    withhold_advice: float = 0.5,
    rounds: int = ROUNDS,
    hide_fields: str = "",
) -> World:
    """Workflow D on generated functions, judged in the real sandbox.

    Args:
      ambiguous_share, rare: how often an operation is told by a word with two readings, which only the tests tell apart, and how much
        more seldom the second of them is meant: see `coding.function_task`.
      noise, ignore_advice, withhold_advice: habits of the scripted player, see `coding.function_player`.
      rounds: most rounds.
      hide_fields: ablations, `role.field` with commas between, e.g. `planner.advice`: the role never sees the field.
    """
    roles = coding.mini_coding_roles()
    for pair in filter(None, (part.strip() for part in hide_fields.split(","))):
        role, _, field = pair.partition(".")
        if role not in roles:
            raise ValueError(f"hide_fields={pair!r}: there is no role {role!r}; the roles are {', '.join(roles)}")
        roles = coding.hide_fields(roles, role, field)
    workflow = coding.mini_plan_code_verify_reflect(coding.mini_verifier(), roles, rounds)

    def tasks(split: str, first: int, count: int) -> list[Task]:
        if split not in FUNCTION_SHARES:
            raise ValueError(f"unknown split {split!r}; the splits are {', '.join(FUNCTION_SHARES)}")
        return [coding.function_task(split, functions_seed, number, ambiguous_share, rare) for number in range(first, first + count)]

    return World(workflow, tasks, "all_passed", coding.function_speech(), coding.function_player(noise, ignore_advice, withhold_advice))


def _from_files(train: str, test: str, load: Callable[..., list[Task]], field: str) -> Callable[[str, int, int], list[Task]]:
    """Tasks of two files, again and again from the start; the last rows of the training file are the validation split.

    No two splits share a `field` (law 12): of rows for training, those that come again for validation are left out; a row that is in
    both files is an error.
    """
    if not train or not test:
        raise ValueError("train and test must name parquet or jsonl files of tasks, e.g. --config.game.train=nq/train.parquet")
    rows, held_out = load(train, "train"), load(test, "test")
    if len(rows) < 5:
        raise DataError(f"{train} has {len(rows)} rows; at least 5 are needed, for the last fifth is the validation split")
    if not held_out:
        raise DataError(f"{test} has no rows")
    search.check_disjoint(rows, held_out, field)
    kept = len(rows) - min(HOLD_OUT, len(rows) // 5)
    text = lambda task: normalise_answer(str(task.fields[field]))  # noqa: E731
    validation = {text(task) for task in rows[kept:]}
    parts = {"train": [task for task in rows[:kept] if text(task) not in validation], "validation": rows[kept:], "test": held_out}
    if not parts["train"]:
        raise DataError(f"{train}: every {field} of its first {kept} rows comes again in the last ones, which are the validation split")

    def tasks(split: str, first: int, count: int) -> list[Task]:
        if split not in parts:
            raise ValueError(f"unknown split {split!r}; the splits are {', '.join(parts)}")
        part = parts[split]
        found = [part[number % len(part)] for number in range(first, first + count)]
        return [Task(number, one.fields, one.hidden, split) for number, one in enumerate(found, first)]

    return tasks


def _question_world(build: Callable[..., Any], train: str, test: str, index: str, top_k: int, **more: Any) -> World:
    from marl_llm.tools.retriever import RetrieverClient, open_index

    if not index:
        raise ValueError("index must name a retriever: a directory built by marl_llm.tools.retriever, or the address of its server")
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    tasks = _from_files(train, test, search.load_questions, "question")
    if "://" not in index:
        return World(build(search.retrieve_with(open_index(index), top_k), **more), tasks, "f1")
    client = RetrieverClient(index)
    return World(build(search.retrieve_with(client, top_k), **more), tasks, "f1", close=client.close)


def question_parallel(train: str = "", test: str = "", index: str = "", top_k: int = 4) -> World:
    """Workflow A. Files of questions, and a retriever: the directory of an index or the address of a server."""
    return _question_world(search.parallel_retrieval, train, test, index, top_k)


def question_extract(train: str = "", test: str = "", index: str = "", top_k: int = 4) -> World:
    """Workflow B; options as `question_parallel`."""
    return _question_world(search.retrieve_extract_answer, train, test, index, top_k)


def question_iterative(train: str = "", test: str = "", index: str = "", top_k: int = 5, release: str = "unitymas") -> World:
    """Workflow C; options as `question_parallel`. `release` is "unitymas" or "m_ask", whose differences `search.MAskOptions` lists."""
    releases = {"unitymas": search.UNITYMAS, "m_ask": search.M_ASK}
    if release not in releases:
        raise ValueError(f"release={release!r} is unknown; the releases are {', '.join(releases)}")
    return _question_world(search.iterative_search, train, test, index, top_k, options=releases[release])


def problems(train: str = "", test: str = "", rounds: int = ROUNDS) -> World:
    """Workflow D on programming problems with tests, judged in the sandbox."""
    tasks = _from_files(train, test, coding.load_problems, "problem")
    if rounds < 1:
        raise WorkflowError(f"rounds={rounds} must be at least 1")
    return World(coding.plan_code_verify_reflect(coding.verifier(), rounds=rounds), tasks, "all_passed")
