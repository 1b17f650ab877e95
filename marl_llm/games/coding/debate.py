"""Coder and unit tester (Stronger-MAS, Fig. 2, Appendices B.2 and C.2): both speak at once, the test is run on the program.

    [ (coder ─▶ golden tests) ∥ (tester ─▶ reference, mutants) ─▶ the test on the program ─▶ agreed or last turn? stop ] repeated

In the first turn both read the problem alone. They stop when the program passes the tester's own test ("aligned"); otherwise both read the
mismatch history. Golden tests, the reference and mutants are hidden: no prompt holds anything made of them, and the run that the history
tells of is a process of its own that never held a golden input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.games.kit.debate import fenced_code, note_turn, quoted, show_instructions
from marl_llm.workflows import FormatError, Role, Trajectory, Workflow, code_block, compute, repeat, sequence, together, tool
from marl_llm.workflows.forms import Beside, check_debate, rewards_in_form
from marl_llm.workflows.trajectory import RoleCall

TURNS = 4
MUTATION_THRESHOLD = 0.60  # tau_mut of B.2
TEST_CHARACTERS = 65_536  # of a tester's input and of its output
INPUTS = ("problem", "interface")
HIDDEN = ("function", "tests", "references", "mutants", "shown")
NO_TEST: dict[str, Any] = {"input": None, "output": None, "problem": "the test could not be read"}

PROBLEM = "\n\nProblem:\n{problem}\n\n{interface}\n\n{history}"
CODER = {"first": (
    "Think step by step, then write a Python program that solves the problem.\n"
    "Important:\n- Do not hardcode or fabricate inputs.\n"
    "First decide on the number and types of inputs, then implement the solution.\n"
    "Write the whole program in one block that begins with ```python."
), "later": (
    "Use the history below to guide your fixes:\n{history}\n\n"
    "If your previous code crashed, first fix the bug.\n"
    "If it ran but its output differs from the expected output, decide whether the test case is correct.\n"
    "- If the test is correct, refine your code to pass it.\n- If the test is wrong, verify your program's logic and keep it.\n"
    "Write the final, corrected program in one block that begins with ```python."
)}  # fmt: skip
TESTER = {"first": (
    "Provide one new high-quality test case. Before giving it, reason carefully to ensure that the output is correct, "
    "then derive the output for your chosen input.\n"
    "Respond in the format:\n**Test Input:**\ninput here\n**Test Output:**\noutput here"
), "later": (
    "Analyze the history below:\n{history}\n\n"
    "First decide whether your previous test case was correct. If it was wrong or unclear, provide a corrected test case.\n"
    "Respond in the format:\n**Test Input:**\ninput here\n**Test Output:**\noutput here"
)}  # fmt: skip
SINGLE_LATER = "Your previous program:\n{history}\n\nCheck it and write it again, corrected, in one block that begins with ```python."


def history_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """The mismatch history as a prompt shows it."""
    parts = []
    for entry in entries:
        lines = [f"Turn {entry['turn']}", fenced_code(entry["code"])]
        if entry["input"] is None:
            lines.append(f"No test: {entry['problem']}")
        else:
            lines += [f"Test input: {quoted(entry['input'])}", f"Expected output: {quoted(entry['output'])}"]
            lines.append(f"Actual output: {quoted(entry['actual'])}" if entry["status"] == "ok" else f"Outcome: {entry['status']}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def last_program(entries: Sequence[Mapping[str, Any]]) -> str:
    """The last program of a history as a prompt shows it."""
    return f"```python\n{entries[-1]['code'].rstrip()}\n```"


def debate_roles(max_tokens: int = 4096, max_prompt: int = 8192) -> dict[str, Role]:
    """Coder and tester with prompts for general models, after Appendix C.2 (the problem stands before the instructions)."""
    budget = dict(max_tokens=max_tokens, max_prompt=max_prompt, trim="history", trim_from="start")
    writes_code = "You are a helpful assistant that writes and corrects Python code."
    writes_tests = "You are a helpful assistant that creates and refines unit test cases (input and expected output) for a coding task."
    shown = {name: show_instructions(instructions, history_text) for name, instructions in (("coder", CODER), ("tester", TESTER))}
    return {
        "coder": Role("coder", writes_code + PROBLEM, code_block("code"), {"code": ""}, show=shown["coder"], **budget),
        "tester": Role("tester", writes_tests + PROBLEM, read_test, {"test": NO_TEST}, show=shown["tester"], **budget),
    }


def read_test(text: str) -> dict[str, Any]:
    """The one test of a response: `**Test Input:**` and `**Test Output:**`, each once, in this order; CRLF becomes LF.

    A fenced block around a part is taken off. Raises `FormatError`, whose field `test` says what is missing, for the next turn's prompt.
    """
    text = text.replace("\r\n", "\n")
    marks = ("**Test Input:**", "**Test Output:**")
    counts = [text.count(mark) for mark in marks]
    problem = ""
    for mark, count in zip(marks, counts):
        if count != 1:
            problem = problem or (f"{mark} is missing" if count == 0 else f"{mark} occurs {count} times; give one test")
    before, _, rest = text.partition(marks[0])
    test_input, _, wanted = rest.partition(marks[1])
    if not problem and marks[1] in before:
        problem = "**Test Output:** stands before **Test Input:**"
    test_input, wanted = _unfenced(test_input), _unfenced(wanted)
    if not problem and not wanted.strip():
        problem = "**Test Output:** is empty"
    if not problem and max(len(test_input), len(wanted)) > TEST_CHARACTERS:
        problem = f"the test is too long; {TEST_CHARACTERS} characters are allowed"
    if problem:
        raise FormatError(problem, {"test": {**NO_TEST, "problem": problem}})
    return {"test": {"input": test_input, "output": wanted, "problem": ""}}


def _unfenced(part: str) -> str:
    """A part of a test without the white space and the fence around it, ended by a line break."""
    lines = part.strip().split("\n")
    if len(lines) >= 2 and lines[0].strip().startswith("```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    return "\n".join(line.rstrip() for line in lines) + "\n" if any(lines) else ""


# ---- rewards


def coder_parts(form: str) -> Any:
    """B.2: .1 builds + .1 a smoke subset runs + .8 golden pass share. `safe`: .1 every golden test runs without error + .9 that share,
    so that a program that only prints for the first tests earns nothing by it, and any that runs more than one that cannot be read."""

    def parts(call: RoleCall, beside: Beside) -> dict[str, float]:
        golden = beside("golden", 0.0)
        if form == "safe":
            return {"run": 0.1 * beside("clean", 0.0), "golden": 0.9 * golden}
        return {"build": 0.1 * beside("builds", 0.0), "run": 0.1 * beside("smoke", 0.0), "golden": 0.8 * golden}

    return parts


def tester_parts(form: str) -> Any:
    """B.2: .2 valid + .8 the reference passes (reading of its odd "> tau_mut"; the term of mutants is struck out there).

    `safe`: .1 valid + .1 right + .8 min(1, killed mutants / .60) of a right test; a copy of an example in the statement is not right.
    So a test on which all readings of the problem agree earns .2, and one that tells them apart up to 1.
    """

    def parts(call: RoleCall, beside: Beside) -> dict[str, float]:
        valid, right = beside("test_valid", 0.0), beside("test_right", 0.0)
        if form == "safe":
            right *= 1.0 - beside("test_copied", 0.0)
            killed = right * min(1.0, beside("test_kills", 0.0) / MUTATION_THRESHOLD)
            return {"valid": 0.1 * valid, "right": 0.1 * right, "kills": 0.8 * killed}
        return {"valid": 0.2 * valid, "right": 0.8 * right}

    return parts


def debate_rewards(form: str, roles: Sequence[str] = ("coder", "tester")) -> tuple[Any, ...]:
    """Appendix B.2 in one of `workflows.forms.FORMS`.

    Team: the golden pass share p of the turn's program. A tester that is scored when its test is made faces the program before, whose p is
    the same for all its candidates.
    """
    def golden(call, beside, path):
        return beside("golden", 0.0, call.role != "coder")

    parts = {"coder": coder_parts(form), "tester": tester_parts(form)}
    team = dict.fromkeys(roles, golden)
    solved = dict.fromkeys(roles, lambda call, beside, path: float(golden(call, beside, path) == 1.0))
    return rewards_in_form(form, {role: parts[role] for role in roles}, team, solved)


# ---- the workflow


def code_debate(
    runs: Any,
    roles: dict[str, Role] | None = None,
    agents: str = "team",
    turns: int = TURNS,
    rewards_form: str = "safe",
    inputs: tuple[str, ...] = INPUTS,
    hidden: tuple[str, ...] = HIDDEN,
    history: int = 0,
    timeout_s: float | int = 300.0,
) -> Workflow:
    """The workflow.

    Args:
      runs: who runs programs on tests: `runs.Runs`, or another with its methods `golden`, `test_quality` and `on_test`.
      roles: "coder" and "tester"; by default `debate_roles`.
      agents: "team", or "single": the coder alone, for one turn, or until it writes the same program twice (Appendix F).
      turns: most turns T.
      rewards_form: one of `workflows.forms.FORMS`.
      history: how many turns the history holds, the latest; 0: all.
      timeout_s: of one tool call.

    Raises `ValueError` for an unknown word or a bound below 1.
    """
    check_debate(rewards_form, agents, turns, history)
    roles = roles or (debate_roles() if agents == "team" else {"coder": single_coder()})

    golden = ("golden", "builds", "smoke", "clean")
    coder = sequence(roles["coder"], tool(runs.golden, golden, "grade_program", timeout_s, ("code", "function", "tests")))
    if agents == "single":

        def revise(history: Any, code: str, turn_: int) -> dict[str, Any]:
            entry = {"code": code, "turn": turn_ + 1}
            return {"again": bool(history) and history[-1]["code"] == code, "history": (entry,), "turn_": turn_ + 1}

        body = repeat(coder, compute(revise, ("again", "history", "turn_")), at_most=turns, until=lambda again: again, name="turns")
    else:
        quality = ("test_valid", "test_right", "test_kills", "test_copied")
        graded = tool(runs.test_quality, quality, "grade_test", timeout_s, ("test", "function", "references", "mutants", "shown"))
        seen = ("aligned", "actual", "status")
        ran = tool(runs.on_test, seen, "run_test", timeout_s, ("code", "test", "function"), seen)
        both = together(coder, sequence(roles["tester"], graded))
        noted = note_turn(("code", "test", "actual", "status"), history)
        body = repeat(both, ran, noted, at_most=turns, until=lambda aligned: aligned, name="turns")
    start = {"history": (), "turn_": 0}
    rewards, metrics = debate_rewards(rewards_form, tuple(roles)), debate_metrics(agents == "team")
    return Workflow(f"code_debate_{agents}", body, inputs, hidden, start, rewards, metrics)


def single_coder(max_tokens: int = 4096, max_prompt: int = 8192) -> Role:
    """The single agent's role, which reads its own last program."""
    show = show_instructions({**CODER, "later": SINGLE_LATER}, last_program)
    return dataclasses.replace(debate_roles(max_tokens, max_prompt)["coder"], show=show)


def debate_metrics(team: bool) -> dict[str, Any]:
    """Figures of a play. `solved`, the headline: the last program passes all golden tests. `any_turn` counts a program of any turn, which
    is how the release measures; it is no headline."""
    def last(name):
        return lambda path: float(path.fields[name])

    figures = {
        "solved": lambda path: float(path.fields["golden"] == 1.0),
        "golden": last("golden"),
        "any_turn": lambda path: float(any(value == 1.0 for _, value in path.written("golden"))),
        "turns_taken": lambda path: float(path.turns),
    }
    if team:
        figures |= {"aligned": last("aligned"), "false_alignment": false_alignment}
        figures |= {name: last(name) for name in ("test_valid", "test_right", "test_kills")}
    return figures


def false_alignment(path: Trajectory) -> float:
    """1.0 where coder and tester agree on a program that fails a golden test."""
    return float(path.fields["aligned"] and path.fields["golden"] < 1.0)
