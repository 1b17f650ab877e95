"""N reasoners, M Python users and a judge (Stronger-MAS, section 5.2, Fig. 5): all solve at once, the judge reads the answers and decides.

    (each seat: reasoner ─▶ check) ∥ (each chair: Python user ─▶ run ─▶ check) ─▶ ballot ─▶ judge ─▶ check

The ballot's order is shuffled by the task's identity, so that no place in it tells who wrote it. With N = 1 and M = 0 there is nothing to
judge, and the reasoner speaks alone and once: an ensemble of one agent.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from marl_llm.games.kit.debate import quoted
from marl_llm.games.maths.debate import (
    INPUTS,
    debate_rewards,
    debate_roles,
    maths_debate,
    read_answer,
    reasoner_part,
    single_reasoner,
    user_part,
)
from marl_llm.tools.results import ToolResult
from marl_llm.workflows import Role, Trajectory, Workflow, after_hashes, compute, each, sequence, together, tool
from marl_llm.workflows.forms import check_form

ORDER = "order"  # an input field that no prompt reads: what the ballot is shuffled by


def judge_role(max_tokens: int = 4096, max_prompt: int = 8192) -> Role:
    """The judge, with a prompt for general models (reading: the paper prints none)."""
    def show(ballot):
        return "\n".join(f"[{i}] {quoted(answer) if answer else 'no answer'}" for i, answer in enumerate(ballot, 1))

    text = (
        "You are a helpful assistant that decides which answer to a math problem is right.\n\nProblem:\n{problem}\n\n"
        "Answers of several solvers:\n{ballot}\n\n"
        "Check them against the problem; the most frequent one may be wrong. The last line must hold only the final answer after ####."
    )
    budget = dict(max_tokens=max_tokens, max_prompt=max_prompt, trim="ballot")
    return Role("judge", text, after_hashes("verdict", read_answer), {"verdict": ""}, show={"ballot": show}, **budget)


def maths_ensemble(
    answers: Any,
    reasoners: int,
    users: int,
    roles: dict[str, Role] | None = None,
    rewards_form: str = "safe",
    inputs: tuple[str, ...] = INPUTS,
    hidden: tuple[str, ...] = ("target",),
    timeout_s: float | int = 120.0,
    group_seats: bool = False,
) -> Workflow:
    """The workflow; tasks have the input field `order` beside `inputs`.

    Args:
      answers, rewards_form, inputs, hidden, timeout_s: as `debate.maths_debate`.
      reasoners, users: N and M, each at least 1; or 1 and 0, one agent.
      roles: "reasoner", "user" and "judge"; by default those with prompts for general models.
      group_seats: whether the N reasoners, who are asked the same prompt, are candidates for it, and so the M Python users: a play then
        gives AT-GRPO groups without forks. Otherwise a seat is compared with its own candidates only.

    Raises `ValueError` for too few seats.
    """
    check_form(rewards_form)
    if (reasoners, users) == (1, 0) and not group_seats:
        role = roles["reasoner"] if roles else single_reasoner()
        alone = maths_debate(answers, {"reasoner": role}, "single", 1, rewards_form, (*inputs, ORDER), hidden, timeout_s=timeout_s)
        return dataclasses.replace(alone, name="maths_ensemble")
    if reasoners < 1 or users < 1:
        why = "; group_seats has no effect with one agent" if group_seats else ", or 1 and 0: one agent"
        raise ValueError(f"reasoners={reasoners} and users={users} must be at least 1{why}")
    roles = roles or {**debate_roles(), "judge": judge_role()}
    reason, use = reasoner_part(answers, roles["reasoner"], timeout_s), user_part(answers, roles["user"], timeout_s)

    def ballot(answers: Sequence[str], outputs: Sequence[str], order: Any) -> tuple[str, ...]:
        votes = [*answers, *outputs]
        random.Random(f"ballot {order}").shuffle(votes)
        return tuple(votes)

    async def settle(verdict: str, target: str) -> ToolResult:
        judged = await checker.correct(verdict, target)
        return judged.map(lambda right: {"judge_correct": right, "settled": True})

    checker = answers
    body = sequence(
        together(
            each("seats", "seat", reason, {"answer": "answers", "reasoner_correct": "reasoners_correct"}, reasoners),
            each("chairs", "chair", use, {"printed": "outputs", "user_correct": "users_correct"}, users),
        ),
        compute(ballot, "ballot"),
        roles["judge"],
        tool(settle, ("judge_correct", "settled"), timeout_s=timeout_s),
    )
    start = {"seats": tuple(range(reasoners)), "chairs": tuple(range(users)), "history": ()}
    rewards = debate_rewards(rewards_form, ("reasoner", "user", "judge"))
    metrics = ensemble_metrics(reasoners, users)
    return Workflow("maths_ensemble", body, (*inputs, ORDER), hidden, start, rewards, metrics, group_seats=group_seats)


def ensemble_metrics(reasoners: int, users: int) -> dict[str, Any]:
    """`correct`, the headline: the judge is right. `majority`: the most frequent answer is (of equally frequent ones the first on the
    ballot); `any_correct`: an upper bound; `seat_i`, `chair_i`: each alone, the best of which is the single best."""
    def rights(path):
        return (*path.fields["reasoners_correct"], *path.fields["users_correct"])

    alone = {f"seat_{i}": (lambda path, i=i: float(path.fields["reasoners_correct"][i])) for i in range(reasoners)}
    alone |= {f"chair_{i}": (lambda path, i=i: float(path.fields["users_correct"][i])) for i in range(users)}
    return {
        "correct": lambda path: float(path.fields["judge_correct"]),
        "majority": majority,
        "any_correct": lambda path: float(max(rights(path))),
        **alone,
    }


def majority(path: Trajectory) -> float:
    """1.0 if the most frequent answer of the ballot is right. Answers count as equal where their texts are."""
    right = {}
    votes = zip((*path.fields["answers"], *path.fields["outputs"]), (*path.fields["reasoners_correct"], *path.fields["users_correct"]))
    for answer, is_right in votes:
        right[answer] = float(is_right)
    count = collections.Counter(answer for answer in path.fields["ballot"] if answer)
    return right[max(count, key=count.__getitem__)] if count else 0.0
