"""Workflow C: M-ASK's iterative search, of five roles (Chen et al., arXiv:2601.04703; UnityMAS-O, section 6, C).

    plan ─▶ (answer) ─▶ [ search ─▶ each sub-question: retrieve ─▶ summary ─▶ update ─▶ answer ] repeated, until search says <end>

The planner builds a knowledge state and a first answer, and is paid that answer's score. Within the loop the answerer is called after each
update and is paid its answer's score; search, summary and update share what the turn improved. An `<end>` is paid 0. The two releases
differ in ways that the options name; `UNITYMAS` and `M_ASK` are their settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from marl_llm.games.search.teams import unique_passages
from marl_llm.workflows import (
    FormatError,
    Role,
    RoleCall,
    Trajectory,
    Workflow,
    call,
    compute,
    each,
    numbered,
    repeat,
    sequence,
    stop,
    tagged,
    tool,
    when,
)
from marl_llm.workflows.answers import answer_f1, exact_match
from marl_llm.workflows.rewards import Reward, absolute, delta, format_penalty

END = "<end>"
MAX_EVIDENCE_WORDS = 75
MAX_SUB_QUESTIONS = 5


@dataclasses.dataclass(frozen=True)
class MAskOptions:
    """Where the releases differ."""

    # call the answerer once after planning, and measure the first turn's gain against its answer; else the planner's
    initial_answer: bool = True
    yes_no_exact: bool = False  # score by exact match where an accepted answer is yes or no
    penalise_end_format: bool = True  # an `<end>` in a broken format is punished like any other response
    max_turns: int = 3  # most turns of the loop
    format_weight: float | int = 1.0


UNITYMAS = MAskOptions()
M_ASK = MAskOptions(initial_answer=False, yes_no_exact=True, penalise_end_format=False, max_turns=5)


def read_search(text: str) -> dict[str, Any]:
    """`<end>`, or one to five distinct sub-questions, one a line, in `<sub_questions>`. An end beside other text ends, and is illegal."""
    if END in text:
        if text.strip() != END:
            raise FormatError("text beside <end>", {"ended": True})
        return {"sub_questions": (), "ended": True}
    block = tagged(("sub_questions",))(text)["sub_questions"]
    lines = tuple(line.strip() for line in block.splitlines() if line.strip())
    if not lines or len(lines) > MAX_SUB_QUESTIONS:
        raise FormatError(f"{len(lines)} sub-questions; one to {MAX_SUB_QUESTIONS} are expected")
    if len(set(lines)) < len(lines):
        raise FormatError("a sub-question occurs twice")
    return {"sub_questions": lines, "ended": False}


def _short_evidence(fields: dict[str, str]) -> dict[str, Any]:
    words = len(fields["evidence"].split())
    if not 1 <= words <= MAX_EVIDENCE_WORDS:
        raise FormatError(f"{words} words of evidence; one to {MAX_EVIDENCE_WORDS} are expected")
    return fields


PLAN = (
    "Question: {question}\n\nWrite down what you know that bears on it, and the best answer that you can give without searching.\n"
    "Reply with <knowledge>...</knowledge><final_answer>...</final_answer> and nothing else."
)
SEARCH = (
    "Question: {question}\nKnown so far:\n{knowledge}\n\nIf this suffices to answer, reply with <end> and nothing else.\n"
    f"Otherwise reply with <sub_questions>...</sub_questions>: what to search for, one a line, at most {MAX_SUB_QUESTIONS}."
)
SUMMARY = (
    f"Question: {{question}}\nPassages:\n{{passages}}\n\nWrite down what in them helps to answer, in at most {MAX_EVIDENCE_WORDS} words.\n"
    "Reply with <evidence>...</evidence> and nothing else."
)
UPDATE = (
    "Question: {question}\nKnown so far:\n{knowledge}\nNew evidence:\n{evidence}\n\nRewrite what is known with the new evidence.\n"
    "Reply with <knowledge>...</knowledge> and nothing else."
)
ANSWER = (
    "Question: {question}\nKnown:\n{knowledge}\n\nAnswer in as few words as possible.\n"
    "Reply with <answer>...</answer> and nothing else."
)


def m_ask_roles(max_tokens: int = 128) -> dict[str, Role]:
    """The five roles with prompts for general models, by name."""
    planned = tagged({"knowledge": "knowledge", "final_answer": "plan_answer"})
    evidence = tagged(("evidence",), read=_short_evidence)
    passages = dict(show={"passages": numbered}, trim="passages")
    return {
        "plan": Role("plan", PLAN, planned, {"knowledge": "", "plan_answer": ""}, max_tokens=max_tokens),
        "search": Role("search", SEARCH, read_search, {"sub_questions": (), "ended": False}, max_tokens=max_tokens),
        "summary": Role("summary", SUMMARY, evidence, {"evidence": ""}, max_tokens=max_tokens, **passages),
        "update": Role("update", UPDATE, tagged(("knowledge",)), {"knowledge": ""}, max_tokens=max_tokens),
        "answer": Role("answer", ANSWER, tagged(("answer",)), {"answer": ""}, max_tokens=max_tokens),
    }


def iterative_search(
    retrieve: Callable[..., Any],
    roles: dict[str, Role] | None = None,
    options: MAskOptions = UNITYMAS,
    hidden: tuple[str, ...] = ("answers",),
) -> Workflow:
    """Workflow C. The paper's assignment lets `plan` and `answer` share a model: see `M_ASK_MODELS`.

    Args:
      retrieve: a tool of one `query`. It may read a hidden field, e.g. which index is the task's: what it finds is for all.
      roles: plan (question -> knowledge, plan_answer), search (-> sub_questions, ended), summary (passages -> evidence), update
        (knowledge, evidence -> knowledge) and answer (knowledge -> answer); by default `m_ask_roles`.
      hidden: fields that tasks carry for rewards and scripts; `answers` among them.
    """
    roles = roles or m_ask_roles()
    first = [call(roles["answer"], name="answer_0")] if options.initial_answer else []
    body = sequence(
        roles["plan"],
        *first,
        repeat(
            roles["search"],
            when(lambda ended: ended, stop(), name="ended"),
            each("sub_questions", "query", tool(retrieve, "found", name="retrieve", reveals=("found",)), "found", MAX_SUB_QUESTIONS),
            compute(unique_passages, "passages", name="merge"),
            roles["summary"],
            roles["update"],
            roles["answer"],
            at_most=options.max_turns,
            name="search_loop",
        ),
    )

    def score(text: str, path: Trajectory) -> float:
        return answer_f1(text, path.fields["answers"], options.yes_no_exact)

    def final(path: Trajectory) -> str:
        return path.fields["answer"] or path.fields["plan_answer"]

    return Workflow(
        "m_ask",
        body,
        ("question",),
        hidden,
        start={"answer": ""},
        rewards=_rewards(options, score),
        score="at_end",  # a search is paid for the answer that follows it
        metrics={
            "f1": lambda path: answer_f1(final(path), path.fields["answers"]),
            "em": lambda path: exact_match(final(path), path.fields["answers"]),
        },
    )


M_ASK_MODELS = {"plan": "reason", "answer": "reason", "search": "search", "summary": "summary", "update": "update"}


def _rewards(options: MAskOptions, score: Callable[[str, Trajectory], float]) -> tuple[Reward, ...]:
    """Absolute F1 to plan and answer, its gain to the loop's roles, 0 to an end, a penalty to broken formats."""

    def ends(role_call: RoleCall) -> bool:
        return role_call.role == "search" and bool(role_call.writes["ended"])

    def turns(path: Trajectory) -> dict[int, float]:
        return {answer.turn: score(answer.writes["answer"], path) for answer in path.by("answer")}  # turn 0: answer_0, if it is there

    def planned(path: Trajectory) -> float:
        return score(path.by("plan")[0].writes["plan_answer"], path)

    punished = format_penalty(options.format_weight, exempt=None if options.penalise_end_format else ends)
    return (
        absolute(lambda _, path: planned(path), ("plan",), name="f1"),
        absolute(lambda role_call, path: score(role_call.writes["answer"], path), ("answer",), name="f1"),
        delta(turns, ("search", "summary", "update"), name="f1_gain", start=planned),  # a turn that ends has no score, hence 0
        punished,
    )
