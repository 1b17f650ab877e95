"""Reasoner and Python user (Stronger-MAS, Fig. 2, Appendices B.1 and C.2): both solve at once and stop when their answers are equal.

    [ (reasoner ─▶ check) ∥ (Python user ─▶ run ─▶ check) ─▶ compare ─▶ equal or last turn? stop ] repeated

In the first turn both read the problem alone, later both solutions and both answers too, and each decides who is right. The final answer is
the reasoner's (reading: the paper does not say whose it is where they never agree). The target is hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.games.kit.debate import fenced_code, note_turn, quoted, show_instructions
from marl_llm.tools.maths import MathsChecker, extract_answer, is_number
from marl_llm.tools.results import FailureKind, ToolResult, success
from marl_llm.tools.sandbox import Executor, Limits, Program, Submission, default_sandbox
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.untrusted import read_text
from marl_llm.workflows import FormatError, Role, Trajectory, Workflow, after_hashes, code_block, repeat, sequence, together, tool
from marl_llm.workflows.forms import Beside, check_debate, rewards_in_form
from marl_llm.workflows.graph import Node
from marl_llm.workflows.trajectory import RoleCall

TURNS = 4
ANSWER_CHARACTERS = 500
SOLUTION_CHARACTERS = 4000  # of a solution in the history
INPUTS, HIDDEN = ("problem",), ("target",)
MAX_DEPTH = 16  # of brackets in an answer
RAN_NOT = {"printed": "", "ran": 0.0}

PROBLEM = "\n\nProblem:\n{problem}\n\n{history}"
REASONER = {"first": (
    "First outline the key reasoning steps. Then carry out the full solution. Summarize the steps in:\n**Reasoning Steps:**\n"
    "The last line must hold only the final answer, a single number or expression, simplified if possible, after ####, e.g.\n#### 123"
), "later": (
    "History (previous attempts and outputs):\n{history}\n\n"
    "First compare your previous answer with the Python user's printed output.\n"
    "- If the output corrects a slip in your reasoning, adopt the corrected value.\n"
    "- If the code likely has a bug, keep the mathematically correct answer and explain briefly.\n"
    "Then solve the problem again, more robustly. The last line must hold only the final answer after ####, e.g.\n#### 123"
)}  # fmt: skip
USER = {"first": (
    "Write correct, readable Python that computes the final answer. Use only the standard library and deterministic math.\n"
    "At the end print only the final answer, on one line. Write the program in one block that begins with ```python."
), "later": (
    "History (reasoning against execution):\n{history}\n\n"
    "Judge whether the reasoner's answer or your previous printed result is more likely correct. Fix or rewrite the code so that it "
    "reliably computes the correct final answer. Prefer exact arithmetic.\n"
    "At the end print only the final answer, on one line. Write the program in one block that begins with ```python."
)}  # fmt: skip
SINGLE_LATER = (
    "Your previous solution:\n{history}\n\n"
    "Check it and solve the problem again. The last line must hold only the final answer after ####."
)


def history_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """The history as prompts show it."""
    parts = []
    for entry in entries:
        lines = [f"Turn {entry['turn']}", f"Reasoning: {quoted(entry['solution'], SOLUTION_CHARACTERS)}"]
        lines.append(f"Reasoner's answer: {quoted(entry['answer'])}" if entry["answer"] else "Reasoner's answer: none could be read")
        if "code" in entry:
            lines.append(fenced_code(entry["code"]))
            lines.append(f"Printed output: {quoted(entry['printed'])}" if entry["printed"] else f"Printed output: none ({entry['status']})")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def read_answer(text: str) -> str:
    """An answer without the box around it. Raises `FormatError` for none, or one that is too long."""
    answer = extract_answer(f"#### {text}", "hashes")
    if not answer or len(answer) > ANSWER_CHARACTERS:
        raise FormatError(f"an answer of 1 to {ANSWER_CHARACTERS} characters is expected after ####")
    return answer


def read_solution(text: str) -> dict[str, Any]:
    """The answer on the last line that begins with ####, and the solution before it, for the history. Raises `FormatError`."""
    solution = text.strip()[:SOLUTION_CHARACTERS]
    try:
        return {**after_hashes("answer", read_answer)(text), "solution": solution}
    except FormatError as error:
        raise FormatError(str(error), {"solution": solution}) from error


def debate_roles(max_tokens: int = 4096, max_prompt: int = 8192) -> dict[str, Role]:
    """Reasoner and Python user with prompts for general models, after Appendix C.2."""
    budget = dict(max_tokens=max_tokens, max_prompt=max_prompt, trim="history", trim_from="start")
    reasons = "You are a helpful assistant that solves math problems via careful reasoning."
    programs = "You are a helpful programming assistant that solves math problems with Python."
    shown = {name: show_instructions(instructions, history_text) for name, instructions in (("reasoner", REASONER), ("user", USER))}
    answer = {"answer": "", "solution": ""}
    return {
        "reasoner": Role("reasoner", reasons + PROBLEM, read_solution, answer, show=shown["reasoner"], **budget),
        "user": Role("user", programs + PROBLEM, code_block("code"), {"code": ""}, show=shown["user"], **budget),
    }


# ---- tools


class Answers:
    """Checks answers with `MathsChecker` and runs programs in the sandbox.

    Args:
      strict: numbers are compared exactly, and where the target is a number so must the answer be: an expression that is the question
        itself (`12 + 7` for 19) is no answer. False: as printed, NumEq of whatever number the answer is.
      timeout_s: of one program.
      checker, sandbox: by default their own.
    """

    def __init__(self, strict: bool = True, timeout_s: float | int = 10.0, checker: Any = None, sandbox: Executor | None = None):
        self._strict, self._timeout_s, self._sandbox = strict, timeout_s, sandbox
        self.checker = checker or MathsChecker(exact_integers=strict)
        self._ran, self._checked = Verdicts(), Verdicts()

    async def correct(self, answer: str, target: str) -> ToolResult:
        """Whether an answer equals the target: 1.0 or 0.0. A target that cannot be read is a failure, which aborts the play."""
        if not answer or is_deep(answer) or (self._strict and is_number(target) and not is_number(answer)):
            return success(0.0, 0.0)
        return await self._checked.of(content_key(answer, target), lambda: self._check(answer, target))

    async def equal(self, a: str, b: str) -> ToolResult:
        """Whether two answers, both of players, are equal. One that cannot be read equals nothing."""
        if not a or not b or is_deep(a) or is_deep(b):
            return success(False, 0.0)
        result = await self._checked.of(content_key(a, b), lambda: self._check(a, b))
        if not result.ok and result.failure.kind == FailureKind.BAD_INPUT:
            return success(False, result.seconds, result.attempts)
        return result.map(lambda right: right == 1.0)

    async def run(self, code: str) -> ToolResult:
        """What a program printed on its one line: `printed`, `ran` (1.0 where it did so without error) and `status`."""
        if not code.strip():
            return success({**RAN_NOT, "status": "there is no program"}, 0.0)
        return await self._ran.of(content_key(code), lambda: self._execute(code))

    def close(self) -> None:
        """Ends the checker's processes."""
        self.checker.close()

    async def _check(self, answer: str, target: str) -> ToolResult:
        result = await self.checker.acheck(f"#### {answer}", target, "hashes")
        return result.map(lambda verdict: float(verdict.correct))

    async def _execute(self, code: str) -> ToolResult:
        limits = Limits(timeout_s=self._timeout_s, stdout_bytes=1 << 16)
        done = await (self._sandbox or default_sandbox()).arun(Submission(code, limits=limits))
        return done.map(printed_line)


def printed_line(program: Program) -> dict[str, Any]:
    """What `Answers.run` gives of a program that has ended."""
    lines = [line.strip() for line in read_text(program.stdout_bytes).value.splitlines() if line.strip()]
    if program.outcome != "ok":
        complaint = read_text(program.stderr_bytes).value.strip().splitlines()
        return {**RAN_NOT, "status": f"{program.outcome}: {complaint[-1][:200]}" if complaint else program.outcome}
    if program.stdout_truncated or len(lines) != 1 or len(lines[0]) > ANSWER_CHARACTERS:
        return {**RAN_NOT, "status": f"it printed {len(lines)} lines; one short line is expected"}
    return {"printed": lines[0], "ran": 1.0, "status": "ok"}


def is_deep(text: str) -> bool:
    """Whether brackets stand deeper than in any answer, or do not close: parsing such a text takes seconds, and it is no answer."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, abs(depth))
    return deepest > MAX_DEPTH or depth > 1


# ---- rewards


def answer_parts(form: str, correct: str) -> Any:
    """B.1, of the reasoner, and read so of the judge: .2 schema + .8 the answer is right; `safe`: .1 and .9, each paid once."""
    low = 0.1 if form == "safe" else 0.2
    return lambda call, beside: {"schema": low, "step": (1 - low) * beside(correct, 0.0)}


def user_parts(form: str) -> Any:
    """Not printed; reading: .1 one block + .1 it ran and printed one line + .8 the answer is right. `safe`: .1 ran + .9, each paid once."""

    def parts(call: RoleCall, beside: Beside) -> dict[str, float]:
        ran, right = beside("ran", 0.0), beside("user_correct", 0.0)
        if form == "safe":
            return {"ran": 0.1 * ran, "step": 0.9 * right}
        return {"block": 0.1, "ran": 0.1 * ran, "step": 0.8 * right}

    return parts


def debate_rewards(form: str, roles: Sequence[str] = ("reasoner", "user")) -> tuple[Any, ...]:
    """Appendix B.1 in one of `workflows.forms.FORMS`.

    Team: whether the final answer is right, for all. Of an answer that is scored when it is made, and in `safe`, whether that answer is.
    """
    own = {"reasoner": "reasoner_correct", "user": "user_correct", "judge": "judge_correct"}
    final = own[roles[-1] if roles[-1] == "judge" else "reasoner"]

    def right(call: RoleCall, beside: Beside, path: Trajectory) -> float:
        finished = beside("settled") is not None
        return float(path.fields[final] if finished and form != "safe" else beside(own[call.role], 0.0))

    parts = {role: user_parts(form) if role == "user" else answer_parts(form, own[role]) for role in roles}
    return rewards_in_form(form, parts, dict.fromkeys(roles, right), dict.fromkeys(roles, right))


# ---- the workflow


def maths_debate(
    answers: Any,
    roles: dict[str, Role] | None = None,
    agents: str = "team",
    turns: int = TURNS,
    rewards_form: str = "safe",
    inputs: tuple[str, ...] = INPUTS,
    hidden: tuple[str, ...] = HIDDEN,
    history: int = 0,
    timeout_s: float | int = 120.0,
) -> Workflow:
    """The workflow.

    Args:
      answers: who checks answers and runs programs: `Answers`, or another with its methods `correct`, `equal` and `run`.
      roles: "reasoner" and "user"; by default `debate_roles`.
      agents: "team", or "single": the reasoner alone, for one turn, or until it gives the same answer twice (Appendix F).
      turns: most turns T.
      rewards_form: one of `workflows.forms.FORMS`.
      history: how many turns the history holds, the latest; 0: all.
      timeout_s: of one tool call.

    Raises `ValueError` for an unknown word or a bound below 1.
    """
    check_debate(rewards_form, agents, turns, history)
    roles = roles or (debate_roles() if agents == "team" else {"reasoner": single_reasoner()})

    async def compare(answer: str, printed: str) -> ToolResult:
        return (await answers.equal(answer, printed)).map(lambda equal: {"agreed": equal, "settled": True})

    async def repeated(answer: str, history: Any) -> ToolResult:
        return await compare(answer, history[-1]["answer"] if history else "")

    both, compared, fields = reasoner_part(answers, roles["reasoner"], timeout_s), repeated, ("solution", "answer")
    if agents == "team":
        both, compared = together(both, user_part(answers, roles["user"], timeout_s)), compare
        fields += ("code", "printed", "status")
    settle = tool(compared, ("agreed", "settled"), timeout_s=timeout_s)
    body = repeat(both, settle, note_turn(fields, history), at_most=turns, until=lambda agreed: agreed, name="turns")
    rewards, metrics = debate_rewards(rewards_form, tuple(roles)), debate_metrics(agents == "team")
    return Workflow(f"maths_debate_{agents}", body, inputs, hidden, {"history": (), "turn_": 0}, rewards, metrics)


def reasoner_part(answers: Any, role: Role, timeout_s: float | int) -> Node:
    """The reasoner, and whether its answer is right, which stays hidden."""
    return sequence(role, tool(answers.correct, "reasoner_correct", "check_reasoner", timeout_s, ("answer", "target")))


def user_part(answers: Any, role: Role, timeout_s: float | int) -> Node:
    """The Python user, its program's run, and whether its answer is right, which stays hidden."""
    ran = tool(answers.run, ("printed", "ran", "status"), "run", timeout_s, ("code",))
    return sequence(role, ran, tool(answers.correct, "user_correct", "check_user", timeout_s, ("printed", "target")))


def single_reasoner(max_tokens: int = 4096, max_prompt: int = 8192) -> Role:
    """The single agent's role."""
    show = show_instructions({**REASONER, "later": SINGLE_LATER}, history_text)
    return dataclasses.replace(debate_roles(max_tokens, max_prompt)["reasoner"], show=show)


def debate_metrics(team: bool) -> dict[str, Any]:
    """Figures of a play. `correct`, the headline: the final answer is right. `false_agreement`: both agree on a wrong one.

    `adopted_right` counts turns after which a wrong reasoner gave the Python user's right answer, `adopted_wrong` those after which a right
    one gave the other's wrong answer, and `chances_...` how often each could happen: the shares are quotients of the means.
    """
    figures = {"correct": lambda path: float(path.fields["reasoner_correct"]), "turns_taken": lambda path: float(path.turns)}
    if team:
        figures |= {
            "agreed": lambda path: float(path.fields["agreed"]),
            "false_agreement": lambda path: float(path.fields["agreed"] and not path.fields["reasoner_correct"]),
            "user_correct": lambda path: float(path.fields["user_correct"]),
        }
        for kind, right in (("right", 1.0), ("wrong", 0.0)):
            figures[f"chances_{kind}"] = lambda path, right=right: float(len(_chances(path, right)))
            figures[f"adopted_{kind}"] = lambda path, right=right: float(sum(_chances(path, right)))
    return figures


def _chances(path: Trajectory, right: float) -> list[bool]:
    """For each turn after one in which the Python user printed a right (wrong) answer and the reasoner's was the contrary: adopted?"""
    reasoner, user, printed, answer = (path.per_turn(name) for name in ("reasoner_correct", "user_correct", "printed", "answer"))
    turns = [t for t in sorted(reasoner) if t + 1 in answer and printed[t] and user[t] == right and reasoner[t] == 1 - right]
    return [answer[turn + 1] == printed[turn] for turn in turns]
