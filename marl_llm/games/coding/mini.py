"""Workflow D in the small world of functions: the same graph, rewards and sandbox, with roles that speak in a few dozen words.

`function_player` is the scripted player of all three roles. Its planner guesses at ambiguous words and follows advice; its reflector knows
the right plan and names the first operation that differs, so that without noise every problem is solved once each guess has been corrected.
`hide_fields` makes the ablations: a team in which nobody hears the advice is the blind retry that a reflection has to beat.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.games.coding.functions import AMBIGUOUS, BY_NAME, HIDDEN, NUMBERS, OPS, OTHER, plan_text, program
from marl_llm.games.coding.team import ROUNDS, plan_code_verify_reflect
from marl_llm.tools.judge import ajudge_calls
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.workflows import FormatError, Role, ScriptTurn, Workflow

READINGS = {word: op.name for op in OPS for word in op.words}
_ADVICE = re.compile(r"at (\d) try (\w+)")
Plan = tuple[tuple[str, int], ...]


def read_plan(text: str) -> Plan:
    """A plan from its words: two or three operations of one kind, each with its number if it takes one. Raises `FormatError`."""
    steps = []
    for part in text.split("|"):
        words = part.split()
        op = BY_NAME.get(words[0]) if words else None
        if op is None or len(words) != 1 + op.takes_number or (op.takes_number and words[1] not in NUMBERS):
            raise FormatError(f"not an operation: {part.strip()!r}")
        steps.append((op.name, int(words[1]) if op.takes_number else 1))
    if not 2 <= len(steps) <= 3:
        raise FormatError(f"{len(steps)} operations; two or three are expected")
    return tuple(steps)


def _read_plan(text: str) -> dict[str, Any]:
    return {"plan": plan_text(read_plan(text))}


def _read_code(text: str) -> dict[str, Any]:
    text = text.strip()
    if not text.startswith("def f ( x ) :"):
        raise FormatError("the program must begin with def f ( x ) :")
    return {"code": text}


def _read_advice(text: str) -> dict[str, Any]:
    match = _ADVICE.fullmatch(text.strip())
    if text.strip() != "none" and (match is None or match[2] not in BY_NAME):
        raise FormatError("advice is none, or at <place> try <operation>")
    return {"advice": text.strip()}


def mini_coding_roles() -> dict[str, Role]:
    """Planner, coder and reflector of the small world, by name."""
    plan, report = "{problem} was {plan} says {advice} plan:", "{problem} was {plan} {report} advice:"
    return {
        "planner": Role("planner", plan, _read_plan, {"plan": "none"}, max_tokens=10, max_prompt=48),
        "coder": Role("coder", "{plan} code:", _read_code, {"code": ""}, max_tokens=48, max_prompt=16),
        "reflector": Role("reflector", report, _read_advice, {"advice": "none"}, max_tokens=6, max_prompt=48),
    }


def mini_verifier(sandbox: Any = None, timeout_s: float | int = 10.0) -> Callable[..., Any]:
    """The verifying tool of the small world: hidden tests in the real sandbox, and a report of five words."""
    verdicts = Verdicts()

    async def verify(code: str, function: str, tests: Sequence[Any]) -> ToolResult:
        if not code:
            return success(verdict_of(0, tests), 0.0)
        judged = await verdicts.of(
            content_key(code, function, tests), lambda: ajudge_calls(code, function, tests, timeout_s, sandbox=sandbox)
        )
        return judged.map(lambda judgement: verdict_of(sum(case.state == "passed" for case in judgement.cases), tests))

    def verdict_of(passed: int, tests: Sequence[Any]) -> dict[str, Any]:
        return {"pass_rate": passed / len(tests), "report": f"passed {passed} of {len(tests)} wrong"}

    return verify


def mini_plan_code_verify_reflect(verify: Callable[..., Any], roles: dict[str, Role] | None = None, rounds: int = ROUNDS) -> Workflow:
    """Workflow D."""
    start = {"plan": "none", "advice": "none"}
    return plan_code_verify_reflect(verify, roles or mini_coding_roles(), rounds, inputs=("problem",), hidden=HIDDEN, start=start)


def hide_fields(roles: dict[str, Role], role: str, field: str) -> dict[str, Role]:
    """Roles in which one never sees a field: the ablation that tells whether anyone listens.

    Raises `KeyError` for an unknown role, `ValueError` for a field that it does not read.
    """
    old = roles[role]
    if field not in old.reads:
        raise ValueError(f"role {role!r} does not read {field!r}; it reads {', '.join(old.reads)}")
    return roles | {role: dataclasses.replace(old, show={**old.show, field: lambda _: "none"})}


def function_player(noise: float = 0.0, ignore_advice: float = 0.0, withhold_advice: float = 0.0) -> Callable[[ScriptTurn], str]:
    """A player of all three roles, perfect if all is 0; with the habits below it makes a supervised warm-up that has something to learn.

    Args:
      noise: how often a response loses its last word.
      ignore_advice: how often the planner writes its last plan again, whatever the advice.
      withhold_advice: how often the reflector says `none`, though it knows better.
    """

    def play(turn: ScriptTurn) -> str:
        rng, fields, role = turn.random, turn.fields, turn.role.name
        if role == "planner":
            text = fields["plan"] if ignore_advice and fields["plan"] != "none" and rng.random() < ignore_advice else _plan(fields, rng)
        elif role == "coder":
            text = "def f ( x ) : return x" if fields["plan"] == "none" else program(read_plan(fields["plan"]))
        else:
            text = "none" if withhold_advice and rng.random() < withhold_advice else _advice(fields)
        return " ".join(text.split()[:-1]) if rng.random() < noise else text

    return play


def _plan(fields: Any, rng: Any) -> str:
    """What the problem's words say, with a guess at ambiguous ones; after the first round, the last plan with the advice followed."""
    match = _ADVICE.fullmatch(fields["advice"])
    if match and fields["plan"] != "none":
        plan = list(read_plan(fields["plan"]))
        place = int(match[1]) - 1
        if place < len(plan):
            plan[place] = (match[2], plan[place][1])
        return plan_text(tuple(plan))
    plan = []
    for part in fields["problem"].split(" ", 1)[1].split(" then "):
        word, *number = part.split()
        readings = sorted({name for name, unclear in AMBIGUOUS.items() if unclear == word})
        plan.append((rng.choice(readings) if readings else READINGS[word], int(number[0]) if number else 1))
    return plan_text(tuple(plan))


def _advice(fields: Any) -> str:
    """The first operation that is not the right one."""
    if fields["plan"] == "none":
        return "none"
    for place, ((name, _), (right, _)) in enumerate(zip(read_plan(fields["plan"]), fields["plan_gold"]), 1):
        if name != right and OTHER.get(name) == right:
            return f"at {place} try {right}"
    return "none"
