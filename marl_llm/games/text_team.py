"""The prompts of Stronger-MAS's Tool and Planner (Appendices C.2 and D), and the roles that read them: what puzzles in text share.

The paper's text of the first turn stands in a role's first prompt, that of later turns in all others. `history` holds, for each former
turn, the Tool's code and what it printed, the Planner's words, and the (action, state) pairs (a reading of `action_state_history`). The
single agent's prompt is not printed: it is the Planner's without a Tool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from marl_llm.games.programs import PuzzleRules, answer_parser, clip, program_team
from marl_llm.hints import check_word
from marl_llm.workflows import Environment, Role, ScriptTurn, WorkflowError, code_block
from marl_llm.workflows.splits import Tasks

PROMPT_TOKENS, RESPONSE_TOKENS = 16_384, 4_096  # Appendix C.1
RESULTS = {
    "done": "all of it was done.", "solved": "it solved the task.", "illegal": "it was not legal.",
    "empty": "the list was empty.", "unread": "the answer could not be read.",
}  # fmt: skip

TOOL_FIRST = """You are an AI assistant designed to be helpful. Utilize your programming expertise to address the task. Propose Python \
code (within a single python code block) for the user to run. Ensure each response contains only ONE code block. Use the 'print' function \
to output the action list that moves from the start to the goal. You may output the full action list if you can reach the target, or a \
partial list if uncertain.
Formatting requirements:
* Begin the Python block with ```python and end with ```.
* The program's output IS the action list (e.g., [U,R,D,L]).
* Print ONLY the action list (no extra text).

Task: """
TOOL_LATER = """Refine your Python solution to produce a correct, executable action list.

Task: """
TOOL_LAST = """

Requirements:
* Output must be an action list that reaches the goal without violating constraints (stay in-bounds, avoid obstacles).
* If certain, print the full list; if uncertain, print a safe partial prefix.
* Single python code block only; program output IS the action list.
* Begin with ```python and end with ```; print ONLY the action list (e.g., [U,R,D,L]).

Respond in the format:
**Code:**
```python
# corrected code here
# last line prints ONLY the action list
```"""
PLANNER_FIRST = """You are a planning and reasoning agent. You will receive:
* The original task description
* The Code Agent's (Tool Agent's) code
* The code execution output
Your job is to reason carefully, decide the final action list, and format your response EXACTLY as specified.
Instructions:
* Read the task, inspect the code, and verify the execution output against the task requirements and environment constraints (bounds, \
obstacles, goal).
* If the code/output is correct and sufficient, adopt it.
* Otherwise, improve or override it with your own reasoning.
* Keep reasoning concise but explicit: justify why the final action is correct.

FORMATTING IS MANDATORY. Give the final action list AFTER the line that begins with ####. Example:
#### [U,R,D,L]

Task Description: """
PLANNER_LATER = """You are a planning and reasoning agent.

Task: """
PLANNER_LAST = """

Instructions:
* Verify feasibility of the proposed action sequence step by step.
* If it collides, goes out of bounds, loops, or fails to reach the goal, correct it (you may shorten, extend, or replace the sequence).
* Prefer the simplest valid plan; if uncertain, provide the best safe prefix and explain briefly.
* Keep reasoning concise but explicit.

FORMATTING IS MANDATORY. Give the FINAL action list AFTER the line that begins with ####. Example:
#### [U,R,D,L]"""
SOLO_LAST = """

You are a planning and reasoning agent. Decide the action list of this turn. Keep reasoning concise but explicit.

FORMATTING IS MANDATORY. Give the final action list AFTER the line that begins with ####. Example:
#### [U,R,D,L]"""


class Prompts(NamedTuple):
    """What a game's roles read around the task, the view of this turn and the history. `proposal` is what a proposal is called."""

    tool_first: str
    tool_later: str
    tool_last: str
    planner_first: str
    planner_later: str
    planner_last: str
    solo_last: str
    proposal: str = "Proposed action"
    results: Mapping[str, str] = RESULTS


ACTIONS = Prompts(TOOL_FIRST, TOOL_LATER, TOOL_LAST, PLANNER_FIRST, PLANNER_LATER, PLANNER_LAST, SOLO_LAST)


def phase_of(prompts: Prompts) -> Callable[[int], dict[str, str]]:
    """The words that differ between the first turn and later ones, by field, of the number of the turn."""

    def phase(turn_number: int) -> dict[str, str]:
        first = {"tool_opening": prompts.tool_first, "tool_closing": "", "planner_opening": prompts.planner_first, "planner_closing": ""}
        later = dict(zip(first, (prompts.tool_later, prompts.tool_last, prompts.planner_later, prompts.planner_last)))
        return later if turn_number else first

    return phase


def teller(prompts: Prompts) -> Callable[[int, Mapping[str, Any]], str]:
    """One turn as an entry of the history."""

    def tell(turn_number: int, turn: Mapping[str, Any]) -> str:
        lines = [f"Turn {turn_number + 1}:"]
        if turn["ran"]:
            lines += [f"Tool Agent's code:\n{turn['code'].strip() or '(none)'}", f"It printed: {clip(turn['printed'].strip())}"]
        lines += [f"Planner: {clip(turn['remark'], 2000) or '(nothing)'}"]
        lines += [f"The {i}-th action is {action}. The {i}-th state is {state}." for i, (action, state) in enumerate(turn["trace"], 1)]
        lines += [f"Result: {prompts.results[turn['status']]}"]
        return "\n".join(lines)

    return tell


def told(entries: tuple[str, ...]) -> str:
    """The history as text, with its heading; nothing before the second turn."""
    return "" if not entries else "\n\nHistory (previous attempts, planner feedback, and trajectory):\n" + "\n\n".join(entries)


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """The options that every puzzle in text has.

    Attributes:
      agents: "team" (tool, planner) or "single" (solo).
      turns: T. rewards_form: see `programs`.
      last_line: reads the last line of what the program printed; otherwise the whole must be the answer.
      noise: how often the scripted player errs.
      max_prompt, max_tokens: budgets of every role, in tokens.
    """

    agents: str
    turns: int
    rewards_form: str
    last_line: bool
    noise: float
    max_prompt: int
    max_tokens: int


def text_environment(
    puzzle: PuzzleRules,
    prompts: Prompts,
    options: TextOptions,
    tasks: Tasks,
    player: Callable[[float], Callable[[ScriptTurn], str]],
    **rules: Any,
) -> Environment:
    """A puzzle that is played in text, with its tasks.

    Args:
      prompts: what the roles read.
      player: how often it errs -> a player of all roles.
      rules: `propose` and `unread`, as `program_team`.

    Raises `WorkflowError` for unknown words in `agents` or `rewards_form`.
    """
    check_word(f"{puzzle.name}.agents", options.agents, ("team", "single"), WorkflowError)
    workflow = program_team(
        puzzle,
        text_roles(puzzle, prompts, options),
        turns=options.turns,
        rewards_form=options.rewards_form,
        last_line=options.last_line,
        phase=None if options.agents == "single" else phase_of(prompts),
        history=teller(prompts),
        **rules,
    )
    return Environment(workflow, tasks, "solved", None, player(options.noise), player(1.0))


def text_roles(puzzle: PuzzleRules, prompts: Prompts, options: TextOptions) -> tuple[Role, ...]:
    """Tool and Planner, or the single agent."""
    budget = dict(max_prompt=options.max_prompt, max_tokens=options.max_tokens, trim="history", trim_from="start")
    answer = dict(parse=answer_parser("steps", puzzle, keep="remark"), writes={"steps": None, "remark": ""})
    if options.agents == "single":
        text = "Task: {task}\n\nEnvironment:\n{view}{history}" + _literal(prompts.solo_last)
        return (Role("solo", text, show={"history": told}, **answer, **budget),)
    tool_prompt = "{tool_opening}{task}\n\nEnvironment:\n{view}{history}{tool_closing}"
    tool = Role("tool", tool_prompt, code_block("code"), {"code": ""}, show={"history": told}, **budget)
    planner = Role(
        "planner",
        "{planner_opening}{task}\n\nEnvironment:\n{view}\n\nTool Agent's latest code and output:\n* Code:\n{code}\n* Execution output: "
        "{printed}\n* " + _literal(prompts.proposal) + ": {proposal}{history}{planner_closing}",
        show={"history": told, "printed": lambda text: clip(text.strip()), "proposal": lambda text: clip(text) or "(none)"},
        **answer,
        **budget,
    )
    return tool, planner


def _literal(text: str) -> str:
    """A text as a template that says it."""
    return text.replace("{", "{{").replace("}", "}}")
