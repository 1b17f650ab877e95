"""Environments of maths. Reasoner and Python user (Stronger-MAS): `sums`, `maths_debate`; with a judge `sums_ensemble`, `maths_ensemble`.
MathChat (MAPPA): `chain_maths`, `math_chat`. `sums...` and `chain_maths` are generated, for tiny models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from marl_llm.games.kit.datasets import apart_from_test, check_two_files, split_tasks, unlike
from marl_llm.games.kit.miniature import SHARES
from marl_llm.games.maths import chain, chain_coach
from marl_llm.games.maths.chat import NO_PROGRAM, ChatTools, chat_roles
from marl_llm.games.maths.chat import math_chat as math_chat_workflow
from marl_llm.games.maths.competitions import check_apart, load_competition, pool_of
from marl_llm.games.maths.data import load_maths, understood_by
from marl_llm.games.maths.debate import Answers, debate_roles, single_reasoner
from marl_llm.games.maths.debate import maths_debate as debate_team
from marl_llm.games.maths.ensemble import ORDER
from marl_llm.games.maths.ensemble import maths_ensemble as ensemble_team
from marl_llm.games.maths.sums import HIDDEN as SUMS_HIDDEN
from marl_llm.games.maths.sums import SumAnswers, sums_judge, sums_player, sums_renderer, sums_roles, sums_task
from marl_llm.workflows import ActionView, CoachGuide, Environment, Task
from marl_llm.workflows.rows import DataError, log_dropped
from marl_llm.workflows.splits import Tasks, drawn_tasks, hold_out, listed_tasks

SUCCESS = "The answer of the Verifier, who speaks last, decides whether the team succeeds."


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
) -> Environment:
    """Reasoner and Python user on generated word problems; programs run in the sandbox.

    Args:
      rare: how much more seldom the second reading of `grows` is meant.
      agents: "team", or "single": the reasoner alone.
      rewards_form: "paper" (Appendix B.1), "safe" or "outcome" (B.6), see `workflows.forms`.
      slip, misreading, adopt: habits of the scripted player, see `maths.sums_player`.
    """
    roles = sums_roles()
    roles = roles if agents == "team" else {"reasoner": roles["reasoner"]}
    answers = SumAnswers(strict=rewards_form == "safe")
    workflow = debate_team(answers, roles, agents, turns, rewards_form, ("problem",), SUMS_HIDDEN)
    tasks = drawn_tasks(lambda split, number: sums_task(split, sums_seed, number, least, most, rare), SHARES)
    return Environment(workflow, tasks, "correct", sums_renderer(), sums_player(slip, misreading, adopt))


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
) -> Environment:
    """N reasoners, M Python users and a judge on the problems of `sums`; `noise` is the scripted judge's, other options as `sums`.

    With `group_seats` the seats of one role are candidates for their common prompt.
    """
    answers = SumAnswers(strict=rewards_form == "safe")
    roles = {**sums_roles(), "judge": sums_judge()}
    workflow = ensemble_team(answers, reasoners, users, roles, rewards_form, ("problem",), SUMS_HIDDEN, group_seats=group_seats)

    def draw(split, number):
        return _with_order(sums_task(split, sums_seed, number, least, most, rare))

    script = sums_player(slip, misreading, noise=noise)
    return Environment(workflow, drawn_tasks(draw, SHARES), "correct", sums_renderer(), script)


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
) -> Environment:
    """Reasoner and Python user on problems in the schemas of `maths.data`; math-verify compares answers, programs run in the sandbox.

    Args:
      train, test: files; the last rows of the first are the validation split. Training problems that are test problems too are left out.
      agents, turns, rewards_form: as `sums`; the single agent of the paper has one turn.
      difficulty: only training rows of this difficulty, e.g. Polaris's "5/8".
      timeout_s: of one program.
    """
    answers = Answers(rewards_form == "safe", timeout_s)
    try:
        tasks = _maths_tasks(answers, train, test, difficulty, bad_rows)
        size = (max_tokens, max_prompt)
        roles = debate_roles(*size) if agents == "team" else {"reasoner": single_reasoner(*size)}
        workflow = debate_team(answers, roles, agents, turns, rewards_form)
        return Environment(workflow, tasks, "correct", close=answers.close)
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
) -> Environment:
    """N reasoners, M Python users and a judge; options as `maths_debate` and `sums_ensemble`."""
    answers = Answers(rewards_form == "safe", timeout_s)
    try:
        tasks = _maths_tasks(answers, train, test, difficulty, bad_rows)

        def ordered(split, first, count):
            return [_with_order(task) for task in tasks(split, first, count)]

        workflow = ensemble_team(answers, reasoners, users, None, rewards_form, group_seats=group_seats)
        return Environment(workflow, ordered, "correct", close=answers.close)
    except BaseException:
        answers.close()
        raise


def _maths_tasks(answers: Any, train: str, test: str, difficulty: str, bad_rows: str) -> Tasks:
    check_two_files(train, test)
    understood = understood_by(answers.checker)
    rows = load_maths(train, "train", understood, difficulty, bad_rows)
    test_rows = load_maths(test, "test", understood, bad_rows=bad_rows)
    return split_tasks(apart_from_test(rows, test_rows, "problem", train, test), test_rows.tasks, unlike("problem"), train, test)


def _with_order(task: Task) -> Task:
    """The task with what its ballot is shuffled by."""
    return dataclasses.replace(task, fields={**task.fields, ORDER: f"{task.split} {task.number}"})


def chain_maths(
    information: str = "full",
    executor_turns: int = 2,
    chain_seed: int = 0,
    least: int = 2,
    most: int = 3,
    filler_price: float = 0.25,
    phase_at: float = 0.0,
    wrong: float = 0.3,
    program: float = 0.5,
    trust: float = 0.5,
    claims: float = 1.0,
    slip: float = 0.7,
    repeats: float = 0.1,
    filler: int = 4,
    points: bool = True,
) -> Environment:
    """MathChat's team on generated chains of operations; programs run in the sandbox.

    Args:
      information: "full", or "partial": the executor reads the solver's words alone, the verifier the executor's.
      executor_turns: most actions of the executor.
      filler_price: what the rubric takes off for a piece of filler.
      phase_at: rolling success from which it does; above 0 it needs `config.coach.history`.
      wrong, program, trust, claims, slip, repeats, filler, points: habits of the scripted player, see `maths.chain_player`.
    """
    tools = chain.ChainTools()
    workflow = math_chat_workflow(
        tools, chain.chain_roles(information, executor_turns), information, executor_turns, hidden=chain.HIDDEN,
        hand_over=chain.chain_hand_over, answered=chain.chain_answer, metrics=chain.chain_metrics(),
    )  # fmt: skip
    tasks = drawn_tasks(lambda split, number: chain.chain_task(split, chain_seed, number, least, most), SHARES)
    player = chain.chain_player(wrong, program, trust, claims, slip, repeats, filler, points)
    guide = chat_guide(information, executor_turns)
    version = f"chain_maths-2-{information}-{filler_price}" + (f"-{phase_at}" if phase_at else "")
    rubric = chain_coach.chain_rubric(information, filler_price, phase_at)
    guide = dataclasses.replace(
        guide, rubric=rubric, brief=chain_coach.chain_brief, contribution=chain_coach.chain_contribution, version=version,
        better=chain_coach.chain_better, strategic=phase_at > 0,
    )  # fmt: skip
    return Environment(workflow, tasks, "correct", chain.chain_renderer(), player, close=tools.close, guide=guide)


def math_chat(
    train: str = "",
    test: str = "",
    information: str = "full",
    executor_turns: int = 5,
    pool: int = 0,
    pool_seed: int = 42,
    bad_rows: str = "refuse",
    timeout_s: float = 30.0,
    max_prompt: int = 24_576,
    max_tokens: int = 4096,
) -> Environment:
    """MathChat on competition problems in the schemas of `maths.competitions`; math-verify compares answers, programs run in the sandbox.

    Args:
      train, test: files; the last fifth of the training rows is the validation split. No problem may stand in both files.
      information, executor_turns: as `chain_maths`.
      pool: how many of the training rows are drawn for training and validation, by `pool_seed`; 0: all. The paper draws 512 of 933.
      timeout_s: of one program.
      max_prompt, max_tokens: of each role; a prompt of the executor holds its whole conversation.
    """
    tools = ChatTools(timeout_s)
    try:
        tasks = _competition_tasks(tools, train, test, pool, pool_seed, bad_rows)
        roles = chat_roles(information, executor_turns, max_tokens, max_prompt)
        workflow = math_chat_workflow(tools, roles, information, executor_turns, timeout_s=timeout_s + 90.0)
        return Environment(workflow, tasks, "correct", close=tools.close, guide=chat_guide(information, executor_turns, max_tokens))
    except BaseException:
        tools.close()
        raise


def chat_guide(information: str, executor_turns: int, max_tokens: int | None = None) -> CoachGuide:
    """What a coach is told of the team, after Appendix B.4. The limit on tokens is the one that the roles have."""
    who = "Problem Solver (drafts a solution), Code Executor (checks it with Python) and Verifier (gives the final answer), in this order."
    reads = "All read the problem." if information == "full" else "The Problem Solver reads it; the others read what came just before."
    limit = "" if max_tokens is None else f" An action has {max_tokens} tokens, thinking included."
    program = "Whether the program is in the right form, is correct Python and computes what the problem asks for"
    return CoachGuide(
        f"A team of three solves a mathematical problem: {who} {reads}{limit} Judge how well the action serves its role with what the "
        "agent could know, and whether it is as short as it can be.",
        {
            "solver": "Draft a solution that the Code Executor can check.",
            "executor": f"Compute or check the solution with Python, in at most {executor_turns} actions, and hand the result over.",
            "verifier": "Weigh what came before and give the right final answer in the form that was asked for.",
        },
        success=SUCCESS,
        questions={
            "solver": ("Is the approach right?", "Is each step sound?", "Can the next agent work with it?"),
            "executor": (f"{program}?", "Was a program run, if one was needed?", "Was the output read correctly?"),
            "verifier": ("Is the answer in its box?", "Is it what the evidence says?", "Did it notice errors of the others?"),
        },
        feedback=_feedback,
        when="action",
    )


def _feedback(view: ActionView) -> str:
    """What running its program said to an executor."""
    runs = [use.writes for use in view.observations if use.writes.get("ran", NO_PROGRAM) != NO_PROGRAM]
    return "\n".join(f"The program ended: {run['ran']}. It printed:\n{run['output']}" for run in runs)


def _competition_tasks(tools: ChatTools, train: str, test: str, pool: int, pool_seed: int, bad_rows: str) -> Tasks:
    check_two_files(train, test)
    understood = understood_by(tools.answers.checker)
    rows, held_out = (load_competition(path, split, understood, bad_rows) for path, split in ((train, "train"), (test, "test")))
    for path, loaded in ((train, rows), (test, held_out)):
        log_dropped(path, loaded)
    drawn = pool_of(rows.tasks, pool, pool_seed)
    if len(drawn) < 5:
        raise DataError(f"{train} has {len(drawn)} usable rows; at least 5 are needed, for the last fifth is the validation split")
    training, validation = hold_out(drawn)
    parts = {
        "train": training,
        "validation": [dataclasses.replace(task, split="validation") for task in validation],
        "test": held_out.tasks,
    }
    check_apart(parts)
    return listed_tasks(parts)
