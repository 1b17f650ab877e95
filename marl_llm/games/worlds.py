"""The workflows of this library with their tasks and tools: generated ones, and the data sets of the papers. See `make_game`.

| name | workflow | tasks |
|---|---|---|
| `fact_parallel`, `fact_extract`, `fact_iterative` | A, B, C in the small world of facts | generated |
| `functions` | D in the small world of functions | generated |
| `question_parallel`, `question_extract`, `question_iterative` | A, B, C with prompts for general models | NQ, HotpotQA: parquet or jsonl |
| `library_questions` | A with one query and prompts for small general models | descriptions of Python's library |
| `problems` | D with prompts for general models | DeepCoder's mix: parquet or jsonl |
| `sokoban_text`, `sudoku_text` | the same team on Sokoban and on Sudoku 4x4 | generated |
| `plan_path_programs` | the same for tiny models, whose words are lines of Python | generated |
| `plan_path_text` | Stronger-MAS's Tool and Planner on a grid, in text; the Tool's program is run | generated |
| `function_debate` | coder and unit tester in a small world of functions | generated |
| `code_debate` | coder and unit tester with prompts for general models | APPS, CodeContests, LiveCodeBench: parquet, jsonl or json |
| `helper_functions` | helper and main agent in the small world of functions | generated |
| `function_problems` | helper and main agent with prompts for general models | HumanEval, CoopHumanEval: jsonl, jsonl.gz or parquet |
| `notes` | two writers in a small world of facts | generated |
| `writing` | two writers with prompts for general models | TLDR, arXiv abstracts: parquet, jsonl or json |
| `sums` | reasoner and Python user in a small world of word problems | generated |
| `maths_debate` | reasoner and Python user with prompts for general models | Polaris, AIME, OlympiadBench, GSM8K: parquet, jsonl or json |
| `tiny_pipeline` | engineer, modeler and analyst on shared files | generated tables |
| `data_pipeline` | the same with prompts for general models | DSBench's modelling tasks: csv, with rows in jsonl |
| `chain_maths` | MathChat (MAPPA): solver, executor, verifier | generated |
| `math_chat` | MathChat with prompts for general models | AIME, AMC: parquet, jsonl or json |
| `reasoning_gym` | solver, or solver and verifier, on problems of the package reasoning-gym (extra `rg`) | its generators |
| `textarena` | the seats of a game of the package textarena (extra `ta`) | its deals |
| `openenv` | one role in the environment of an OpenEnv server (extra `openenv`) | its seeds |
| `sums_ensemble`, `maths_ensemble` | N reasoners, M Python users and a judge | as `sums`, `maths_debate` |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from marl_llm.games import coding, maths, search
from marl_llm.games.coding.aux_worlds import function_problems, helper_functions  # noqa: F401 (names of `registry`)
from marl_llm.games.coding.debate import HIDDEN as CODE_HIDDEN
from marl_llm.games.coding.functions import SHARES as FUNCTION_SHARES
from marl_llm.games.coding.team import ROUNDS
from marl_llm.games.external.openenv import openenv  # noqa: F401 (a name of `registry`)
from marl_llm.games.external.reasoning_gym import reasoning_gym  # noqa: F401 (a name of `registry`)
from marl_llm.games.external.textarena import textarena  # noqa: F401 (a name of `registry`)
from marl_llm.games.maths.chat_worlds import chain_maths, math_chat  # noqa: F401 (names of `registry`)
from marl_llm.games.maths.ensemble import ORDER
from marl_llm.games.maths.sums import HIDDEN as SUMS_HIDDEN
from marl_llm.games.maths.sums import SHARES as SUMS_SHARES
from marl_llm.games.pipeline.worlds import data_pipeline, tiny_pipeline  # noqa: F401 (names of `registry`)
from marl_llm.games.plan_path.lines import plan_path_programs  # noqa: F401 (a name of `registry`)
from marl_llm.games.plan_path.text import plan_path_text  # noqa: F401 (a name of `registry`)
from marl_llm.games.search.library import library_questions  # noqa: F401 (a name of `registry`)
from marl_llm.games.sokoban.text import sokoban_text  # noqa: F401 (a name of `registry`)
from marl_llm.games.sudoku.text import sudoku_text  # noqa: F401 (a name of `registry`)
from marl_llm.games.writing.notes import notes  # noqa: F401 (a name of `registry`)
from marl_llm.games.writing.worlds import writing  # noqa: F401 (a name of `registry`)
from marl_llm.workflows import Task, WorkflowError, World
from marl_llm.workflows.answers import normalise_answer
from marl_llm.workflows.rows import DataError, log_dropped, without
from marl_llm.workflows.splits import Tasks, drawn_tasks, hold_out, listed_tasks


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
    tasks = drawn_tasks(lambda split, number: coding.function_task(split, functions_seed, number, ambiguous_share, rare), FUNCTION_SHARES)
    return World(workflow, tasks, "all_passed", coding.function_speech(), coding.function_player(noise, ignore_advice, withhold_advice))


def _from_files(train: str, test: str, load: Callable[..., list[Task]], field: str, bad_rows: str) -> Tasks:
    """Tasks of two files, again and again from the start; the last rows of the training file are the validation split.

    No two splits share a `field` (law 12): of rows for training, those that come again for validation are left out; a row that is in
    both files is an error.
    """
    if not train or not test:
        raise ValueError("train and test must name parquet or jsonl files of tasks, e.g. --config.game.train=nq/train.parquet")
    rows, held_out = (load(path, split, bad_rows=bad_rows) for path, split in ((train, "train"), (test, "test")))
    if len(rows) < 5:
        raise DataError(f"{train} has {len(rows)} rows; at least 5 are needed, for the last fifth is the validation split")
    if not held_out:
        raise DataError(f"{test} has no rows")
    search.check_disjoint(rows, held_out, field)
    return _in_splits(rows, held_out, field, train)


def _in_splits(rows: list[Task], held_out: list[Task], field: str, train: str) -> Tasks:
    """As `_from_files`, of rows that share no `field` with those held out; `train` is for messages."""
    kept, validation = hold_out(rows)

    def text(task):
        return normalise_answer(str(task.fields[field]))

    known = {text(task) for task in validation}
    training = [task for task in kept if text(task) not in known]
    if not training:
        repeated = f"every {field} of its first {len(kept)} rows comes again in the last ones"
        raise DataError(f"{train}: {repeated}, which are the validation split")
    return listed_tasks({"train": training, "validation": validation, "test": held_out})


def _question_world(build: Callable[..., Any], train: str, test: str, index: str, top_k: int, bad_rows: str, **more: Any) -> World:
    from marl_llm.tools.retriever import open_index, open_server

    if not index:
        raise ValueError("index must name a retriever: a directory built by marl_llm.tools.retriever, or the address of its server")
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    tasks = _from_files(train, test, search.load_questions, "question", bad_rows)
    if "://" not in index:
        return World(build(search.retrieve_with(open_index(index), top_k), **more), tasks, "f1")
    client = open_server(index)
    return World(build(search.retrieve_with(client, top_k), **more), tasks, "f1", close=client.close)


def question_parallel(train: str = "", test: str = "", index: str = "", top_k: int = 4, bad_rows: str = "refuse") -> World:
    """Workflow A. Files of questions, and a retriever: the directory of an index or the address of a server.

    Args:
      train, test: files; the last rows of the first are the validation split.
      index: the directory of an index or the address of a server.
      top_k: passages per query.
      bad_rows: "refuse" rows that cannot be used, or "drop" and count them.
    """
    return _question_world(search.parallel_retrieval, train, test, index, top_k, bad_rows)


def question_extract(train: str = "", test: str = "", index: str = "", top_k: int = 4, bad_rows: str = "refuse") -> World:
    """Workflow B; options as `question_parallel`."""
    return _question_world(search.retrieve_extract_answer, train, test, index, top_k, bad_rows)


def question_iterative(
    train: str = "", test: str = "", index: str = "", top_k: int = 5, release: str = "unitymas", bad_rows: str = "refuse"
) -> World:
    """Workflow C; options as `question_parallel`. `release` is "unitymas" or "m_ask", whose differences `search.MAskOptions` lists."""
    releases = {"unitymas": search.UNITYMAS, "m_ask": search.M_ASK}
    if release not in releases:
        raise ValueError(f"release={release!r} is unknown; the releases are {', '.join(releases)}")
    return _question_world(search.iterative_search, train, test, index, top_k, bad_rows, options=releases[release])


def problems(train: str = "", test: str = "", rounds: int = ROUNDS, bad_rows: str = "refuse") -> World:
    """Workflow D on programming problems with tests, judged in the sandbox; `bad_rows` as `question_parallel`."""
    tasks = _from_files(train, test, coding.load_problems, "problem", bad_rows)
    if rounds < 1:
        raise WorkflowError(f"rounds={rounds} must be at least 1")
    return World(coding.plan_code_verify_reflect(coding.verifier(), rounds=rounds), tasks, "all_passed")


# ---- Stronger-MAS: code and maths


def function_debate(
    functions_seed: int = 0,
    rare: float = 0.25,
    agents: str = "team",
    turns: int = 3,
    rewards_form: str = "safe",
    noise: float = 0.15,
    misreading: float = 1.0,
    slip: float = 0.3,
    trivial: float = 0.2,
    keep: float = 0.5,
) -> World:
    """Coder and unit tester on generated functions of numbers; programs run in the sandbox.

    Args:
      rare: how much more seldom the second reading of `gap` is meant.
      agents: "team", or "single": the coder alone.
      turns: most turns.
      rewards_form: "paper" (Appendix B.2), "safe" or "outcome" (B.6), see `workflows.forms`.
      noise, misreading, slip, trivial, keep: habits of the scripted player, see `coding.function_debate_player`.
    """
    roles = coding.function_debate_roles()
    roles = roles if agents == "team" else {"coder": roles["coder"]}
    workflow = coding.code_debate(coding.FunctionRuns(), roles, agents, turns, rewards_form, ("problem",), CODE_HIDDEN)
    tasks = drawn_tasks(lambda split, number: coding.debate_task(split, functions_seed, number, rare), FUNCTION_SHARES)
    return World(workflow, tasks, "solved", coding.debate_speech(), coding.function_debate_player(noise, misreading, slip, trivial, keep))


def code_debate(
    train: str = "",
    test: str = "",
    agents: str = "team",
    turns: int = 4,
    rewards_form: str = "safe",
    difficulty: str = "",
    train_tests: int = 16,
    bad_rows: str = "refuse",
    references: str = "run",
    timeout_s: float = 10.0,
    max_prompt: int = 8192,
    max_tokens: int = 4096,
) -> World:
    """Coder and unit tester on programming problems in the schemas of `coding.contests`, judged in the sandbox.

    Args:
      train, test: files; the last rows of the first are the validation split. Training problems that are test problems too are left out.
      agents, turns, rewards_form: as `function_debate`; the single agent of the paper has one turn.
      difficulty: only training rows of this difficulty, e.g. APPS's "introductory".
      train_tests: most golden tests of a training problem; tests of the others all count.
      bad_rows: "refuse" rows that cannot be used, or "drop" and count them.
      references: "run" those of the training problems and leave out those that fail, or "trust" them.
      timeout_s: of one program on one test.
      max_prompt, max_tokens: of each role.
    """
    _two_files(train, test)
    if references not in ("run", "trust"):
        raise ValueError(f"references={references!r} is unknown; choose run or trust")
    rows = coding.load_contests(train, "train", difficulty, train_tests, bad_rows)
    found = coding.load_contests(test, "test", bad_rows=bad_rows)
    apart = without(rows.tasks, found.tasks, "problem")
    tasks = apart.tasks
    for path, loaded in ((train, rows), (train, apart), (test, found)):
        log_dropped(path, loaded)
    if references == "run":
        checked = coding.check_references(tasks)
        tasks = log_dropped(train, checked)
    roles = coding.debate_roles(max_tokens, max_prompt) if agents == "team" else {"coder": coding.single_coder(max_tokens, max_prompt)}
    workflow = coding.code_debate(coding.Runs(timeout_s), roles, agents, turns, rewards_form)
    return World(workflow, _splits_of(tasks, found.tasks, train, test), "solved")


def sums(
    sums_seed: int = 0,
    least: int = 2,
    most: int = 3,
    rare: float = 0.25,
    agents: str = "team",
    turns: int = 2,
    rewards_form: str = "safe",
    slip: float = 0.2,
    misreading: float = 1.0,
    adopt: float = 0.5,
) -> World:
    """Reasoner and Python user on generated word problems; programs run in the sandbox.

    Args:
      least, most: operations of a problem.
      rare: how much more seldom the second reading of `grows` is meant.
      agents: "team", or "single": the reasoner alone.
      turns: most turns.
      rewards_form: "paper" (Appendix B.1), "safe" or "outcome" (B.6), see `workflows.forms`.
      slip, misreading, adopt: habits of the scripted player, see `maths.sums_player`.
    """
    roles = maths.sums_roles()
    roles = roles if agents == "team" else {"reasoner": roles["reasoner"]}
    answers = maths.SumAnswers(strict=rewards_form == "safe")
    workflow = maths.maths_debate(answers, roles, agents, turns, rewards_form, ("problem",), SUMS_HIDDEN)
    tasks = drawn_tasks(lambda split, number: maths.sums_task(split, sums_seed, number, least, most, rare), SUMS_SHARES)
    return World(workflow, tasks, "correct", maths.sums_speech(), maths.sums_player(slip, misreading, adopt))


def sums_ensemble(
    reasoners: int = 3,
    users: int = 3,
    sums_seed: int = 0,
    least: int = 2,
    most: int = 3,
    rare: float = 0.25,
    rewards_form: str = "safe",
    slip: float = 0.2,
    misreading: float = 1.0,
    noise: float = 0.5,
    group_seats: bool = False,
) -> World:
    """N reasoners, M Python users and a judge on the problems of `sums`; `noise` is the scripted judge's, other options as `sums`.

    With `group_seats` the seats of one role are candidates for their common prompt.
    """
    answers = maths.SumAnswers(strict=rewards_form == "safe")
    roles = {**maths.sums_roles(), "judge": maths.sums_judge()}
    workflow = maths.maths_ensemble(answers, reasoners, users, roles, rewards_form, ("problem",), SUMS_HIDDEN, group_seats=group_seats)

    def draw(split, number):
        return _with_order(maths.sums_task(split, sums_seed, number, least, most, rare))

    script = maths.sums_player(slip, misreading, noise=noise)
    return World(workflow, drawn_tasks(draw, SUMS_SHARES), "correct", maths.sums_speech(), script)


def maths_debate(
    train: str = "",
    test: str = "",
    agents: str = "team",
    turns: int = 4,
    rewards_form: str = "safe",
    difficulty: str = "",
    bad_rows: str = "refuse",
    timeout_s: float = 10.0,
    max_prompt: int = 8192,
    max_tokens: int = 4096,
) -> World:
    """Reasoner and Python user on problems in the schemas of `maths.data`; math-verify compares answers, programs run in the sandbox.

    Args:
      train, test: files; the last rows of the first are the validation split. Training problems that are test problems too are left out.
      agents, turns, rewards_form: as `sums`; the single agent of the paper has one turn.
      difficulty: only training rows of this difficulty, e.g. Polaris's "5/8".
      bad_rows: "refuse" rows that cannot be used, or "drop" and count them.
      timeout_s: of one program.
      max_prompt, max_tokens: of each role.
    """
    answers = maths.Answers(rewards_form == "safe", timeout_s)
    try:
        tasks = _maths_tasks(answers, train, test, difficulty, bad_rows)
        size = (max_tokens, max_prompt)
        roles = maths.debate_roles(*size) if agents == "team" else {"reasoner": maths.single_reasoner(*size)}
        workflow = maths.maths_debate(answers, roles, agents, turns, rewards_form)
        return World(workflow, tasks, "correct", close=answers.close)
    except BaseException:
        answers.close()
        raise


def maths_ensemble(
    train: str = "",
    test: str = "",
    reasoners: int = 3,
    users: int = 3,
    rewards_form: str = "safe",
    difficulty: str = "",
    bad_rows: str = "refuse",
    timeout_s: float = 10.0,
    group_seats: bool = False,
) -> World:
    """N reasoners, M Python users and a judge; options as `maths_debate` and `sums_ensemble`."""
    answers = maths.Answers(rewards_form == "safe", timeout_s)
    try:
        tasks = _maths_tasks(answers, train, test, difficulty, bad_rows)

        def ordered(split, first, count):
            return [_with_order(task) for task in tasks(split, first, count)]

        workflow = maths.maths_ensemble(answers, reasoners, users, None, rewards_form, group_seats=group_seats)
        return World(workflow, ordered, "correct", close=answers.close)
    except BaseException:
        answers.close()
        raise


def _maths_tasks(answers: Any, train: str, test: str, difficulty: str, bad_rows: str) -> Tasks:
    _two_files(train, test)
    understood = maths.understood_by(answers.checker)
    rows = maths.load_maths(train, "train", understood, difficulty, bad_rows)
    found = maths.load_maths(test, "test", understood, bad_rows=bad_rows)
    apart = without(rows.tasks, found.tasks, "problem")
    for path, loaded in ((train, rows), (train, apart), (test, found)):
        log_dropped(path, loaded)
    return _splits_of(apart.tasks, found.tasks, train, test)


def _with_order(task: Task) -> Task:
    """The task with what its ballot is shuffled by."""
    return dataclasses.replace(task, fields={**task.fields, ORDER: f"{task.split} {task.number}"})


def _two_files(train: str, test: str) -> None:
    if not train or not test:
        raise ValueError("train and test must name parquet, jsonl or json files of tasks, e.g. --config.game.train=apps/train.jsonl")


def _splits_of(rows: list[Task], held_out: list[Task], train: str, test: str) -> Tasks:
    if len(rows) < 5 or not held_out:
        short = f"{train} has {len(rows)} usable rows; at least 5 are needed" if held_out else f"{test} has no usable rows"
        raise DataError(f"{short}; the last fifth of the training rows is the validation split")
    return _in_splits(rows, held_out, "problem", train)
