"""Workflow D of UnityMAS-O, section 6: plan, code, verify, reflect, over three rounds.

    [ planner ─▶ coder ─▶ verify ─▶ all passed or last round? stop ─▶ reflector ] repeated

Planner and coder are paid R_0 in the first round and R_t − R_{t−1} after it; the reflector of round t is paid R_{t+1} − R_t. R is the
share of hidden tests that pass.

**What the report may say.** Hidden tests are hidden from roles, so the report on them holds counts and the names of Python's own
exceptions only: a message or a class name of the candidate's making could carry a hidden input into the next prompt, and from there into a
program that answers by table. Visible tests are reported in full, and run in a process of their own that never held a hidden one.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.programs import EXCEPTIONS
from marl_llm.tools.judge import Case, Judgement, ajudge_calls, ajudge_stdio
from marl_llm.tools.results import ToolResult
from marl_llm.workflows import Role, Workflow, code_block, compute, plain, repeat, sequence, stop, tool, when
from marl_llm.workflows.rewards import delayed, delta, format_penalty

ROUNDS = 3
HIDDEN_TESTS = 8  # that count, from the first
VISIBLE_TESTS = 3
# Score deltas as the module's text has them, and a penalty for each broken format.
REWARDS = (
    delta("pass_rate", ("planner", "coder"), name="pass_gain"),
    delayed("pass_rate", ("reflector",), name="next_pass_gain"),
    format_penalty(1.0),
)

PLANNER = (
    "Problem:\n{problem}\n\nExamples:\n{visible}\n\nEarlier attempt:\n{code}\nIts report:\n{report}\nAdvice:\n{advice}\n\n"
    "Write a plan for a Python program: the algorithm, its steps and the edge cases. No code."
)
CODER = (
    "Problem:\n{problem}\n\nExamples:\n{visible}\n\nPlan:\n{plan}\n\n{interface}\n"
    "Write the whole program in one block that begins with ```python."
)
REFLECTOR = (
    "Problem:\n{problem}\n\nProgram:\n{code}\n\nReport:\n{report}\n\nWhat is wrong, and how should the next plan differ?"
)


def coding_roles(max_tokens: int = 4096, max_prompt: int = 12_288) -> dict[str, Role]:
    """The three roles with prompts for general models, by name."""
    budget = dict(max_tokens=max_tokens, max_prompt=max_prompt)
    return {
        "planner": Role("planner", PLANNER, plain("plan"), {"plan": ""}, trim="code", **budget),
        "coder": Role("coder", CODER, code_block("code"), {"code": ""}, trim="plan", **budget),
        "reflector": Role("reflector", REFLECTOR, plain("advice"), {"advice": ""}, trim="code", **budget),
    }


def plan_code_verify_reflect(
    verify: Callable[..., Any],
    roles: dict[str, Role] | None = None,
    rounds: int = ROUNDS,
    inputs: tuple[str, ...] = ("problem", "visible", "interface"),
    hidden: tuple[str, ...] = ("function", "tests", "visible_tests"),
    start: Mapping[str, str] | None = None,
    timeout_s: float | int = 120.0,
) -> Workflow:
    """Workflow D.

    Args:
      verify: a tool that reads `code` and fields of the task and writes `pass_rate` and `report`; see `verifier`.
      roles: planner (-> plan), coder (-> code) and reflector (-> advice); by default `coding_roles`.
      rounds: most rounds.
      inputs, hidden: fields of the tasks.
      start: what `plan`, `code`, `report` and `advice` hold in the first round; by default nothing.
      timeout_s: of one verification.
    """
    roles = roles or coding_roles()
    body = repeat(
        roles["planner"],
        roles["coder"],
        tool(verify, ("pass_rate", "report"), name="verify", timeout_s=timeout_s, reveals=("pass_rate", "report")),
        compute(lambda round_: round_ + 1, "round_", name="count"),
        when(lambda pass_rate, round_: pass_rate == 1.0 or round_ == rounds, stop(), name="finished"),
        roles["reflector"],
        at_most=rounds,
        name="rounds",
    )
    return Workflow(
        "plan_code_verify_reflect",
        sequence(body),
        inputs,
        hidden,
        start={**dict.fromkeys(("plan", "code", "report", "advice"), ""), **(start or {}), "round_": 0},
        rewards=REWARDS,
        score="at_end",  # the planner is paid for what the coder makes of the plan
        metrics={
            "pass_rate": lambda path: float(path.fields["pass_rate"]),
            "all_passed": lambda path: float(path.fields["pass_rate"] == 1.0),
            "rounds": lambda path: float(path.turns),
        },
    )


def verifier(timeout_s: float | int = 10.0, sandbox: Any = None) -> Callable[..., Any]:
    """A verifying tool over the sandbox: programs read standard input, or, where the task names a `function`, that is called.

    Args:
      timeout_s: of one program (called functions: of all tests together).
      sandbox: `marl_llm.tools.Sandbox`; by default the process's own.
    """

    async def verify(code: str, function: str, tests: Sequence[Any], visible_tests: Sequence[Any]) -> ToolResult:
        if not code.strip():
            return ToolResult({"pass_rate": 0.0, "report": "there is no program"}, None, 0.0)

        async def judge(cases: Sequence[Any]) -> ToolResult:
            if function:
                return await ajudge_calls(code, function, cases, timeout_s, sandbox=sandbox, tuples_as_lists=True)
            return await ajudge_stdio(code, cases, timeout_s, sandbox=sandbox)

        shown, secret = await asyncio.gather(judge(visible_tests), judge(tests[:HIDDEN_TESTS]))
        for judged in (shown, secret):
            if not judged.ok:
                return judged
        value = {"pass_rate": secret.outcome().pass_rate, "report": report(shown.outcome(), secret.outcome(), visible_tests)}
        return ToolResult(value, None, max(shown.seconds, secret.seconds), max(shown.attempts, secret.attempts))

    return verify


def report(shown: Judgement, secret: Judgement, visible_tests: Sequence[Any]) -> str:
    """Visible tests in full, hidden ones as counts; see the module's text."""
    lines = []
    for number, (case, (test_input, wanted)) in enumerate(zip(shown.cases, visible_tests), 1):
        if case.state != "passed":
            detail = case.error or (f"got {_brief(case.value)}" if case.state == "wrong" and case.value is not None else "")
            detail = f"; {detail:.300}" if detail else ""
            lines.append(f"example {number}: {case.state}; input {_brief(test_input)}, expected {_brief(wanted)}{detail}")
    states = collections.Counter(_state(case) for case in secret.cases)
    passed = states.pop("passed", 0)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return "\n".join([*lines, f"hidden tests: {passed} of {len(secret.cases)} passed" + (f"; {counts}" if counts else "")])


def _brief(value: Any) -> str:
    """The start of a value's text; Python refuses to print integers of more than 4,300 digits."""
    try:
        return f"{value!r:.300}"
    except ValueError:
        return f"({type(value).__name__} with a number too long to print)"


def _state(case: Case) -> str:
    """A hidden test's outcome without a word of the candidate's."""
    kind = case.error.partition(":")[0]
    return f"raised {kind}" if case.state == "raised" and kind in EXCEPTIONS else case.state
