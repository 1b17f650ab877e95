"""Feedback between two turns of a helper and a main agent (MAGRPO, Appendix B, Learning Modes): one function, five modes.

| mode | says | knows |
|---|---|---|
| `plain` | nothing | – |
| `passed` | whether all visible cases pass | visible cases |
| `levels_short` | yes or no per level, a count | syntax trees and visible cases |
| `levels` | the same with the error and the first failing visible case | the same |
| `expert` | what a model outside says to each agent | problem, both programs, visible cases |

Hidden cases are never an argument of any of them. (The release prints failing assertions of the tests that are paid.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.games.coding.aux_judge import AuxJudge
from marl_llm.hints import check_word
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.untrusted import read_json
from marl_llm.workflows.errors import FormatError, WorkflowError

MODES = ("plain", "passed", "levels_short", "levels", "expert")
ON_BAD = ("abort", "plain")
NOTES = ("note_aux", "note_main")
SHOWN = 200  # characters of a value
EXPERT_PROMPT = """Two programmers solve one problem together. One writes a helper function `aux`, the other the function `{entry}`,
which may call it. Read both programs and say what each should change. Do not write the whole solution.

Problem:
{problem}

Helper:
{aux_code}

Main:
{main_code}

Examples that must hold:
{examples}

Reply with one JSON object and nothing else: {{"aux": "advice to the helper, or OK", "main": "advice to the main programmer, or OK"}}"""


def check_mode(mode: str, visible: int | None = None) -> str:
    """The mode. Raises `WorkflowError` for an unknown one, or one that needs visible cases where there are none."""
    check_word("feedback", mode, MODES, WorkflowError)
    if visible == 0 and mode in ("passed", "levels_short", "levels"):
        raise WorkflowError(f"feedback={mode!r} tells of visible cases, and visible=0 leaves none")
    return mode


def report_feedback(judge: AuxJudge, mode: str) -> Callable[..., Any]:
    """A tool that writes `NOTES` from the syntax trees and the visible cases; every mode but `expert`."""
    check_mode(mode)

    async def feedback(
        aux_code: str, main_code: str, entry: str, preamble: str, visible_tests: Sequence[Any], loose: bool
    ) -> ToolResult:
        if mode == "plain":
            return success({"note_aux": "", "note_main": ""}, 0.0)
        parts = judge.parts(aux_code, main_code, entry)
        cases: Sequence[Any] = ()
        if parts.main and parts.parses and visible_tests:
            ran = await judge.states("\n".join((preamble, aux_code, main_code)), entry, visible_tests, loose)
            if not ran.ok:
                return ran
            cases = ran.value
        passed = sum(case.state == "passed" for case in cases)
        if mode == "passed":
            note = "The examples pass." if visible_tests and passed == len(visible_tests) else "Not all examples pass."
            return success({"note_aux": note, "note_main": note}, 0.0)

        def word(good):
            return "yes" if good else "no"

        lines = [f"aux returns a value: {word(parts.aux)}", f"{entry} returns a value: {word(parts.main)}"]
        lines += [f"the program can be parsed: {word(parts.parses)}", f"examples passed: {passed} of {len(visible_tests)}"]
        lines += [f"{entry} uses aux: {word(parts.calls and parts.uses)}"]
        if mode == "levels":
            lines += [f"error: {parts.error}"] if parts.error else []
            lines += [_first_failing(entry, visible_tests, cases)] if passed < len(cases) else []
        return success(dict.fromkeys(NOTES, "\n".join(lines)), 0.0)

    return feedback


def _first_failing(entry: str, tests: Sequence[Any], cases: Sequence[Any]) -> str:
    number = next(i for i, case in enumerate(cases) if case.state != "passed")
    arguments, wanted = tests[number]
    case = cases[number]
    outcome = f"returned {case.value!r:.{SHOWN}}" if case.state == "wrong" else f"{case.state} {case.error}"[:SHOWN].strip()
    return f"{entry}({', '.join(f'{argument!r:.{SHOWN}}' for argument in arguments)}) should be {wanted!r:.{SHOWN}}, but {outcome}"


def expert_feedback(ask: Callable[[str, int], ToolResult], on_bad: str = "abort") -> Callable[..., Any]:
    """A tool that writes `NOTES` from what a model outside says.

    Args:
      ask: (prompt, number of the try) -> a result whose outcome is the reply's text; see `asking`.
      on_bad: what an unreadable reply comes to after a second try that names the reason: "abort", or "plain", which gives no advice.

    Raises `WorkflowError` for an unknown `on_bad`.
    """
    check_word("on_bad_feedback", on_bad, ON_BAD, WorkflowError)

    def feedback(problem: str, aux_code: str, main_code: str, entry: str, visible_tests: Sequence[Any]) -> ToolResult:
        examples = "\n".join(f"{entry}{tuple(arguments)!r} == {wanted!r}" for arguments, wanted in visible_tests) or "(none)"
        texts = dict(problem=problem, aux_code=aux_code, main_code=main_code, entry=entry, examples=examples)
        prompt, why = EXPERT_PROMPT.format(**texts), ""
        for number in range(2):
            reply = ask(prompt + (f"\n\nYour last reply could not be used: {why}" if why else ""), number)
            if not reply.ok:
                return reply
            try:
                return success(read_advice(reply.value), reply.seconds, number + 1)
            except FormatError as error:
                why = str(error)
        if on_bad == "plain":
            return success({"note_aux": "", "note_main": ""}, reply.seconds, 2)
        return failed(FailureKind.BAD_REPLY, f"the expert's reply cannot be used: {why}", reply.seconds, 2)

    return feedback


def read_advice(text: str) -> dict[str, str]:
    """`NOTES` from an expert's reply, with or without a fence around it. Raises `FormatError`."""
    body = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    reply = read_json(body)
    if not reply.ok or not isinstance(reply.value, dict):
        raise FormatError(f"not a JSON object ({reply.problem or type(reply.value).__name__})")
    for name in ("aux", "main"):
        if not isinstance(reply.value.get(name), str):
            raise FormatError(f"the entry {name!r} is missing or no text")
    return {"note_aux": reply.value["aux"].strip(), "note_main": reply.value["main"].strip()}


def asking(client: Any, max_tokens: int = 512) -> Callable[[str, int], ToolResult]:
    """`ask` of `expert_feedback` from a `marl_llm.tools.chat.ChatClient`."""

    def ask(prompt: str, number: int) -> ToolResult:
        reply = client.complete([{"role": "user", "content": prompt}], draw=number, max_tokens=max_tokens)
        return reply.map(lambda completion: completion.text)

    return ask
