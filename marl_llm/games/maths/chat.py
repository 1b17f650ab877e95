"""MathChat (MAPPA, section 3.1 and Appendix B): a problem solver, a code executor and a verifier, one after the other.

    solver ─▶ [ executor ─▶ run_python ] until it writes no program, T times at most ─▶ verifier ─▶ check

The solver drafts a solution. The executor may write a program in a fenced block, which is run; it then continues its conversation with the
output, and may write another. The verifier reads the executor's last words and the last output, and gives the answer in a box.

| information | solver | executor | verifier |
|---|---|---|---|
| `full` | problem | problem, solution | problem, what the executor handed over |
| `partial` (A.1) | problem | solution | what the executor handed over |

Readings, where paper and release differ or are silent: T is 5 (Table 7; the release's script has 2); several blocks of one response are one
program, as cells of a notebook; a program is shown its output, or the last line of its error; a block that does not end breaks the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.maths.debate import ANSWER_CHARACTERS, Answers
from marl_llm.hints import check_word
from marl_llm.tools.maths import extract_answer
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.sandbox import Limits, Program, Submission, default_sandbox
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.untrusted import read_text
from marl_llm.workflows import FormatError, Role, Trajectory, Workflow, WorkflowError, compute, repeat, sequence, tool
from marl_llm.workflows.parsers import Parser, fenced_blocks
from marl_llm.workflows.rewards import Reward, broadcast

EXECUTOR_TURNS = 5
INFORMATION = ("full", "partial")
INPUTS, HIDDEN = ("problem",), ("target",)
OUTPUT_CHARACTERS = 4000  # of a program's output, cut in the middle
NO_PROGRAM = "no_program"
RAN = {"output": "", "printed": "", "ran": NO_PROGRAM}  # what there is before a program has run

TEAM = "You work in a team of three: Problem Solver, then Code Executor, then Verifier. You are the {who}.\n"
BUDGET = "You have {tokens} tokens, thinking included; what is longer is cut off.\n"
SOLVER = (
    "The team succeeds only if the Verifier, who speaks last, gives the right answer. Your task is to draft a solution of the problem.\n"
)
EXECUTOR = (
    "The team succeeds only if the Verifier, who speaks last, gives the right answer. Your task is to work out or to check the solution "
    "with Python.\nA program in a block that begins with ```python is run for you, and you read what it prints. Then you can improve it, "
    "or state your result without a program.\n"
)
VERIFIER = (
    "You speak last: the team succeeds only if your answer is right. Weigh what you read and give the final answer, in this form:\n"
    "\\boxed{{answer}}\n"
)
OBSERVATION = "## Output of your program\n{output}\n\nImprove it, or state your result without a program."


def fenced(text: str) -> str:
    """A text between fences that are longer than any in it: it cannot end its own block."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def chat_roles(
    information: str = "full", executor_turns: int = EXECUTOR_TURNS, max_tokens: int = 4096, max_prompt: int = 24_576
) -> dict[str, Role]:
    """The three roles with prompts for general models, after Appendix B; the budgets are Table 7's, in tokens.

    The prompts name the budget that a role really has. Raises `ValueError` for an unknown `information`.
    """
    check_word("information", information, INFORMATION)
    problem = ("Problem", "problem")
    known = (problem,) if information == "full" else ()
    again = dict(continues=True, observation=OBSERVATION, trim="output") if executor_turns > 1 else dict(trim="solution")

    def role(name: str, who: str, task: str, parse: Parser, writes: tuple[str, ...], *blocks: tuple[str, str], **options: Any) -> Role:
        parts = [TEAM.format(who=who), task, BUDGET.format(tokens=max_tokens), *(f"\n## {title}\n{{{field}}}\n" for title, field in blocks)]
        shown = dict.fromkeys((field for _, field in blocks), fenced) | ({"output": fenced} if options.get("continues") else {})
        fallbacks = dict.fromkeys(writes, "")
        return Role(name, "".join(parts), parse, fallbacks, show=shown, max_tokens=max_tokens, max_prompt=max_prompt, **options)

    handed = ("From the Code Executor", "handed")
    drafted = ("From the Problem Solver", "solution")
    executes = ("code", "execution", "executed")
    return {
        "solver": role("solver", "Problem Solver", SOLVER, read_solution, ("solution", "solved"), problem),
        "executor": role("executor", "Code Executor", EXECUTOR, read_execution, executes, *known, drafted, **again),
        "verifier": role("verifier", "Verifier", VERIFIER, read_verdict, ("answer",), *known, handed, trim="handed"),
    }


# ---- what they say


def read_solution(text: str) -> dict[str, Any]:
    """The whole text, and the answer in its last box if there is one. Raises `FormatError` for nothing."""
    if not text.strip():
        raise FormatError("an empty response")
    return {"solution": text.strip(), "solved": boxed(text)}


def read_execution(text: str) -> dict[str, Any]:
    """The text, its program (empty without one) and the answer in its last box. Raises `FormatError`: nothing, a block without an end."""
    if not text.strip():
        raise FormatError("an empty response")
    blocks = fenced_blocks(text, "python")
    if len(blocks) < sum(line.strip(" \t") == "```python" for line in text.split("\n")):
        raise FormatError("a program whose block does not end", {"execution": text.strip()})
    return {"code": "".join(blocks), "execution": text.strip(), "executed": boxed(text)}


def read_verdict(text: str) -> dict[str, Any]:
    """The answer in the last box. Raises `FormatError` for none, or one that is too long."""
    answer = extract_answer(text, "boxed")
    if not answer or len(answer) > ANSWER_CHARACTERS:
        raise FormatError(f"an answer of 1 to {ANSWER_CHARACTERS} characters is expected in \\boxed{{}}")
    return {"answer": answer}


def boxed(text: str) -> str:
    """The answer in the last box of a text; "" for none, or one that is too long."""
    answer = extract_answer(text, "boxed") or ""
    return answer if len(answer) <= ANSWER_CHARACTERS else ""


def hand_over(execution: str, output: str) -> str:
    """What the verifier reads of the executor: its last words, and behind them what its last program printed."""
    return f"{execution}\n\nLast output:\n{output}" if output else execution


# ---- tools


class ChatTools:
    """Checks answers as `Answers` does, and runs programs for `math_chat`.

    Args:
      timeout_s: of one program.
      answers: who checks answers, with `correct` and `close`; by default `Answers`.
    """

    def __init__(self, timeout_s: float | int = 30.0, answers: Any = None):
        self.answers = answers or Answers(timeout_s=timeout_s)
        self._limits = Limits(timeout_s=timeout_s, stdout_bytes=1 << 16, stderr_bytes=1 << 14)
        self._ran = Verdicts()

    async def correct(self, answer: str, target: str) -> ToolResult:
        """As `Answers.correct`."""
        return await self.answers.correct(answer, target)

    async def run(self, code: str) -> ToolResult:
        """`output`: what is shown of a program; `printed`: the last line that it printed; `ran`: "ok", or what ended it."""
        return await self._ran.of(content_key(code), lambda: self._execute(code))

    async def _execute(self, code: str) -> ToolResult:
        done = await default_sandbox().arun(Submission(code, limits=self._limits))
        return done.map(shown)

    def close(self) -> None:
        """Ends the checker's processes."""
        self.answers.close()


def shown(program: Program) -> dict[str, str]:
    """What a program's end is to the team; see `ChatTools.run`."""
    printed, complained = read_text(program.stdout_bytes).value, read_text(program.stderr_bytes).value.strip()
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    output = cut_middle(printed.strip())
    if program.outcome != "ok":
        why = complained.splitlines()[-1][:200] if complained else program.outcome
        return {"output": f"{output}\n{why}".strip(), "printed": "", "ran": program.outcome}
    return {"output": output or "(it printed nothing)", "printed": lines[-1][:ANSWER_CHARACTERS] if lines else "", "ran": "ok"}


def cut_middle(text: str, most: int = OUTPUT_CHARACTERS) -> str:
    """The two ends of a text that is too long, and how much was left out."""
    return text if len(text) <= most else f"{text[: most // 2]}\n... ({len(text) - most} more characters) ...\n{text[-(most // 2) :]}"


# ---- the workflow


def math_chat(
    tools: Any,
    roles: Mapping[str, Role] | None = None,
    information: str = "full",
    executor_turns: int = EXECUTOR_TURNS,
    inputs: tuple[str, ...] = INPUTS,
    hidden: tuple[str, ...] = HIDDEN,
    hand_over: Callable[[str, str], str] = hand_over,
    answered: Callable[..., str] | None = None,
    rewards: Sequence[Reward] = (),
    metrics: Mapping[str, Callable[[Trajectory], float]] | None = None,
    timeout_s: float | int = 120.0,
) -> Workflow:
    """The workflow of the module's text.

    Args:
      tools: who runs programs and checks answers: `ChatTools`, or another with `run` and `correct`.
      roles: "solver", "executor" and "verifier", which write as those of `chat_roles`, the default, do.
      information: one of `INFORMATION`; only the default roles read it.
      executor_turns: most actions of the executor.
      hand_over: what the executor said last and its last output -> what the verifier reads of them.
      answered: of the open fields, the verifier's `answer` among them -> the answer that counts; None: the one that it gave.
      rewards: beside the outcome, which pays everybody 1 for a right answer as a team reward.
      metrics: beside those of `chat_metrics`.
      timeout_s: of one tool call.

    Raises:
      WorkflowError: a bound below 1. ValueError: an unknown `information`.
    """
    if executor_turns < 1:
        raise WorkflowError(f"executor_turns={executor_turns} must be at least 1")
    roles = roles or chat_roles(information, executor_turns)

    async def run_python(code: str, output: str, printed: str) -> ToolResult:
        if not code.strip():
            return success({"output": output, "printed": printed, "ran": NO_PROGRAM}, 0.0)
        return await tools.run(code)

    async def check(solved: str, executed: str, printed: str, answer: str, target: str) -> ToolResult:
        results = [await tools.correct(claim, target) for claim in (solved, executed, printed, answer)]
        if failures := [result for result in results if not result.ok]:
            return failures[0]
        solver, executor, program, verifier = (result.value for result in results)
        return success({"solver_correct": solver, "executor_correct": max(executor, program), "correct": verifier}, 0.0)

    body = sequence(
        roles["solver"],
        repeat(
            roles["executor"], tool(run_python, tuple(RAN), timeout_s=timeout_s),
            at_most=executor_turns, until=lambda ran: ran == NO_PROGRAM, name="executor_turns",
        ),
        compute(hand_over, "handed", name="hand_over", reads=("execution", "output")),
        roles["verifier"],
        *(() if answered is None else (compute(answered, "answer", name="answered"),)),
        tool(check, ("solver_correct", "executor_correct", "correct"), timeout_s=timeout_s),
    )  # fmt: skip
    right = broadcast(lambda path: path.fields["correct"], name="correct")
    return Workflow("math_chat", body, inputs, hidden, dict(RAN), (right, *rewards), {**chat_metrics(), **(metrics or {})})


def chat_metrics() -> dict[str, Callable[[Trajectory], float]]:
    """Figures of a play. `correct`, the headline, is the verifier's answer.

    `tool_share`: of the executor's actions, those with a program (Fig. 3); `tool_plays`: whether there was one at all. `lost_by_executor`:
    the solver had the right answer and neither the executor nor its last program has it; `lost_by_verifier`: one of these had it, the
    verifier has not. `found_by_executor` and `found_by_verifier` are the reverse. `<role>_tokens` are those of one action.
    """

    def right(name: str) -> Callable[[Trajectory], bool]:
        return lambda path: path.fields[name] == 1.0

    solver, executor, verifier = right("solver_correct"), right("executor_correct"), right("correct")

    def programs(path):
        return [bool(call.writes["code"].strip()) for call in path.by("executor")]

    return {
        "correct": lambda path: float(verifier(path)),
        "solver_correct": lambda path: float(solver(path)),
        "executor_correct": lambda path: float(executor(path)),
        "tool_share": lambda path: sum(programs(path)) / len(programs(path)),
        "tool_plays": lambda path: float(any(programs(path))),
        "executor_actions": lambda path: float(len(programs(path))),
        "lost_by_executor": lambda path: float(solver(path) and not executor(path)),
        "lost_by_verifier": lambda path: float(executor(path) and not verifier(path)),
        "found_by_executor": lambda path: float(executor(path) and not solver(path)),
        "found_by_verifier": lambda path: float(verifier(path) and not executor(path)),
        **{f"{role}_tokens": tokens_of(role) for role in ("solver", "executor", "verifier")},
    }


def tokens_of(role: str) -> Callable[[Trajectory], float]:
    """Mean tokens of a role's actions in a play."""
    return lambda path: sum(call.tokens.size for call in path.by(role)) / max(1, len(path.by(role)))
