"""A helper who writes `aux` and a main agent who writes the entry point: MAGRPO's coding team and its baselines behind one switch.

| style | turns | who reads what |
|---|---|---|
| `single` | 1 | one agent writes the entry point alone |
| `parallel` | 1 | both at once; neither sees the other's part (naive concatenation, and MAGRPO's own first turn) |
| `sequential` | 1 | the main agent reads the helper's part |
| `discussion` | 2 | as `parallel`; in the second turn each reads both first answers |
| `feedback` | 2 or more | as `parallel`; after each turn both get a note, and then read their own last answer and the note |

Every turn is judged on the hidden cases and pays both agents its joint reward; with several turns a recipe adds them up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from marl_llm.games.coding.aux_data import HIDDEN
from marl_llm.games.coding.aux_feedback import NOTES
from marl_llm.games.coding.aux_judge import WRITES, AuxJudge
from marl_llm.games.coding.aux_reward import AUX_SHARE, COOPERATION, LEVELS, MAIN_SHARE, MOST, STRUCTURE, SYNTAX, TESTS
from marl_llm.games.coding.schemes import SCHEMES
from marl_llm.hints import check_word
from marl_llm.workflows import FormatError, Role, Workflow, compute, repeat, sequence, together, tool, when
from marl_llm.workflows.efficiency import EFFICIENCY
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rewards import absolute, per_turn
from marl_llm.workflows.trajectory import RoleCall, Trajectory

STYLES = ("single", "parallel", "sequential", "discussion", "feedback")
INPUTS = ("problem", "entry", "parameters", "preamble")
_MOST = dict(zip(LEVELS, (STRUCTURE, SYNTAX, TESTS, COOPERATION)))

RULES = """Instructions:
- Write Python code only.
- Put no fence around it.
- Write no text before or after it.
- Write no tests and no examples.
"""
HELPER = """Write a helper function for the problem below.

Problem:
{problem}

""" + RULES + """- Name the function aux.
- Return something that is useful for solving the problem.
{seen_helper}
Begin like this:
def aux(...):"""
MAIN = """Solve the problem below.

Problem:
{problem}

Another programmer writes a function aux(...) for the same problem, which you may call. You do not see it.

""" + RULES + """- Do not define aux.
- Write the function {entry} alone, with the parameters ({parameters}).
- You may assign what a call of aux returns to a name and use it.
- Return the result.
{seen_main}
Begin like this:
def {entry}({parameters}):"""
ALONE = """Solve the problem below.

Problem:
{problem}

""" + RULES + """- Write the function {entry} with the parameters ({parameters}).

Begin like this:
def {entry}({parameters}):"""


@dataclasses.dataclass(frozen=True)
class Views:
    """How agents are told of earlier answers, as texts of the fields `seen_helper` and `seen_main`.

    Attributes:
      helper_first: the helper's part -> what the main agent reads of it (`sequential`).
      both: helper's part, main part -> (what the helper reads, what the main agent reads) (`discussion`).
      noted: helper's part, main part, note for the helper, note for main -> the same (`feedback`).
    """

    helper_first: Callable[[str], str]
    both: Callable[[str, str], tuple[str, str]]
    noted: Callable[[str, str, str, str], tuple[str, str]]


def _said(title: str, code: str) -> str:
    return f"\n{title}:\n{code or '(nothing that could be read)'}\n"


def _noted(aux_code: str, main_code: str, note_aux: str, note_main: str) -> tuple[str, str]:
    notes = [f"\nFeedback:\n{note}\n" if note else "" for note in (note_aux, note_main)]
    return _said("Your last answer", aux_code) + notes[0], _said("Your last answer", main_code) + notes[1]


TEXTS = Views(
    helper_first=lambda aux_code: _said("The other programmer's function", aux_code),
    both=lambda aux_code, main_code: (
        _said("Your last answer", aux_code) + _said("The other programmer's answer", main_code),
        _said("Your last answer", main_code) + _said("The other programmer's answer", aux_code),
    ),
    noted=_noted,
)


def read_code(field: str) -> Callable[[str], dict[str, Any]]:
    """The whole response as code, without one fence around all of it. An empty one is illegal."""

    def parse(text: str) -> dict[str, Any]:
        code = text.strip()
        lines = code.split("\n")
        if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
            code = "\n".join(lines[1:-1]).strip()
        if not code:
            raise FormatError("no code")
        return {field: code}

    return parse


def aux_roles(max_tokens: int = 256, max_prompt: int = 2048, single: bool = False) -> dict[str, Role]:
    """Helper and main agent in the paper's structure, own words; 256 tokens are the release's."""
    sizes = dict(max_tokens=max_tokens, max_prompt=max_prompt)
    if single:
        return {"main": Role("main", ALONE, read_code("main_code"), {"main_code": ""}, **sizes)}
    return {
        "helper": Role("helper", HELPER, read_code("aux_code"), {"aux_code": ""}, trim="seen_helper", **sizes),
        "main": Role("main", MAIN, read_code("main_code"), {"main_code": ""}, trim="seen_main", **sizes),
    }


def aux_main(
    judge: AuxJudge,
    roles: dict[str, Role] | None = None,
    style: str = "parallel",
    views: Views = TEXTS,
    feedback: Callable[..., Any] | None = None,
    turns: int = 2,
    individual: bool = False,
    inputs: tuple[str, ...] = INPUTS,
    hidden: tuple[str, ...] = HIDDEN,
    timeout_s: float | int = 120.0,
) -> Workflow:
    """The workflow.

    Args:
      judge: who judges programs.
      roles: "helper" and "main", or "main" alone for `single`; by default `aux_roles`.
      style: one of `STYLES`.
      views: how agents are told of earlier answers.
      feedback: the tool of style `feedback`, which writes `note_aux` and `note_main`; see `aux_feedback`.
      turns: of style `feedback`.
      individual: pays each agent what it alone did for the structure, as a local reward, in place of the joint one.
      timeout_s: of one judgement.

    Raises `WorkflowError`: an unknown style, or options that do not belong to it.
    """
    check_word("style", style, STYLES, WorkflowError)
    if (style == "feedback") != (feedback is not None):
        raise WorkflowError(f"style={style!r}: a tool for feedback belongs to style='feedback' and to no other")
    if style == "feedback" and turns < 2:
        raise WorkflowError(f"turns={turns}: feedback needs a second turn")
    roles = roles or aux_roles(single=style == "single")

    parts = ("main_code", "entry", "preamble", "tests", "loose")
    if style == "single":
        verdict = tool(judge.single, WRITES, "judge", timeout_s, parts)
    else:
        verdict = tool(judge.pair, WRITES, "judge", timeout_s, ("aux_code", *parts))
    seen = ("seen_helper", "seen_main")
    if style == "single":
        body = sequence(roles["main"], verdict)
    elif style == "parallel":
        body = sequence(together(roles["helper"], roles["main"]), verdict)
    elif style == "sequential":
        shown = compute(views.helper_first, "seen_main", name="show", reads=("aux_code",))
        body = sequence(roles["helper"], shown, roles["main"], verdict)
    else:
        body = repeat(*_rounds(roles, verdict, style, views, feedback, turns, seen), at_most=turns if feedback else 2, name="turns")
    start = {"aux_code": "", "main_code": "", "seen_helper": "", "seen_main": "", "round_": 0}
    start |= dict.fromkeys(NOTES, "") if feedback else {}
    fields = tuple(f"level_{name}" for name in LEVELS)
    joint = (per_turn(fields, names=LEVELS),)
    return Workflow(
        f"aux_main_{style}", body, inputs, hidden, start, rewards=own_structure(judge) if individual else joint,
        metrics=aux_metrics(style != "single", judge.effect != "off"),
    )  # fmt: skip


def _rounds(roles: dict[str, Role], verdict: Any, style: str, views: Views, feedback: Any, turns: int, seen: tuple[str, str]) -> list:
    """The parts of one turn of `discussion` and `feedback`."""
    def pair(texts):
        return dict(zip(seen, texts))

    count = compute(lambda round_: round_ + 1, "round_", name="count")
    if style == "discussion":
        shown = compute(lambda aux_code, main_code: pair(views.both(aux_code, main_code)), seen, name="show")
        return [together(roles["helper"], roles["main"]), verdict, shown]
    shown = compute(lambda *texts: pair(views.noted(*texts)), seen, name="show", reads=("aux_code", "main_code", *NOTES))
    advised = sequence(tool(feedback, NOTES, name="feedback", timeout_s=300.0, reveals=NOTES), shown)
    return [together(roles["helper"], roles["main"]), verdict, count, when(lambda round_: round_ < turns, advised, name="again")]


def own_structure(judge: AuxJudge) -> tuple[Any, ...]:
    """Individual rewards, the control of joint ones: each agent is paid for its own function's form and for nothing else."""

    def form(call: RoleCall, path: Trajectory) -> float:
        entry = path.fields["entry"]
        if call.role == "helper":
            return AUX_SHARE * judge.parts(call.writes["aux_code"], "", entry).aux
        return MAIN_SHARE * judge.parts("", call.writes["main_code"], entry).main

    return (absolute(form, ("helper", "main"), name="own_structure"),)


def aux_metrics(team: bool, effect: bool = False) -> dict[str, Callable[[Trajectory], float]]:
    """Figures of a play's last turn, in [0, 1]: `passed` (headline), levels, `return`, schemes of passed programs; and its tokens."""
    def level(name):
        return lambda path: path.fields[f"level_{name}"] / _MOST[name]

    def scheme(name):
        return lambda path: float(path.fields["passed"] and path.fields["scheme"] == name)

    metrics: dict[str, Callable[[Trajectory], float]] = {"passed": lambda path: float(path.fields["passed"])}
    names = LEVELS if team else LEVELS[:3]
    metrics |= {name: level(name) for name in names}
    if team:
        metrics["return"] = lambda path: sum(path.fields[f"level_{name}"] for name in LEVELS) / MOST
        metrics["first_return"] = lambda path: sum(path.written(f"level_{name}")[0][1] for name in LEVELS) / MOST  # of the first turn
        metrics |= {f"scheme_{name}": scheme(name) for name in SCHEMES}
    if effect:
        metrics["aux_matters"] = lambda path: float(path.fields["passed"] and path.fields["aux_matters"])
    return metrics | EFFICIENCY
