"""Helper and main agent in a small world: who does which part of a problem is a convention that nobody tells them.

    problem   number plus 3 then magnitude
    helper    def aux ( x ) : x = x + 3 ; return x          main   def f ( x ) : x = aux ( x ) ; x = abs ( x ) ; return x

Both read the problem alone and write at once. The scripted player writes each half rightly, but draws for both apart who does what:
the helper the first operation, the last, or all; the main agent what is left of any of these, or everything. Problems, operations and
splits are those of `functions`; programs run in the sandbox. Problems may hold words of two readings, which feedback alone can settle.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.coding.aux_feedback import NOTES
from marl_llm.games.coding.aux_team import Views
from marl_llm.games.coding.functions import AMBIGUOUS, BY_NAME, NUMBERS, OPS, OTHER, PROTOCOL, function_task, unclear_places
from marl_llm.games.kit.miniature import word_renderer
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.tools.results import ToolResult, success
from marl_llm.workflows import FormatError, PlainText, Role, ScriptTurn, Task
from marl_llm.workflows.errors import WorkflowError

HELPER_PARTS = ("first", "last", "all")
MAIN_PARTS = {"rest": "first", "before": "last", "wrap": "all", "alone": None}  # part -> the helper's part that it goes with
WEIGHTS = {"first": 0.4, "last": 0.4, "all": 0.2, "rest": 0.3, "before": 0.3, "wrap": 0.3, "alone": 0.1}
NOTE_WORDS = {"The examples pass.": "pass", "Not all examples pass.": "wrong", "": "none"}
HIDDEN = ("tests", "visible_tests", "loose", "plan_gold")
Plan = tuple[tuple[str, int], ...]


@functools.cache
def aux_tokenizer(ambiguous: bool = False) -> PieceTokenizer:
    """One token per word of problems, programs and notes; `ambiguous`: also of words with two readings."""
    words = [word for op in OPS for word in (op.name, *op.words, *op.code.replace("{n}", "").split())]
    own = ("aux", "helper:", "main:", "mine", "other", "note", "pass", "keep", *HELPER_PARTS, *MAIN_PARTS)
    kinds = ("number", "list", "0", "6", "7", "8", "9", "(", ")", ":")
    unclear = AMBIGUOUS.values() if ambiguous else ()
    return train_pieces(tuple(dict.fromkeys((*PROTOCOL, *kinds, *NUMBERS, *own, *words, *unclear))))


def aux_renderer(ambiguous: bool = False) -> PlainText:
    """A response ends with `.`."""
    return word_renderer(aux_tokenizer(ambiguous))


def aux_task(split: str, seed: int, number: int, visible: int = 3, ambiguous: float | int = 0.0) -> Task:
    """A problem; `visible` of its cases are for feedback, and this share of its operations that can be told by a word with two readings is.

    Raises `ValueError` for an unknown split, a share outside [0, 1], or more than three visible cases.
    """
    if not 0 <= visible <= 3:
        raise ValueError(f"visible={visible} is not in [0, 3]")
    if not 0 <= ambiguous <= 1:
        raise ValueError(f"ambiguous={ambiguous} is not in [0, 1]")
    made = function_task(split, seed, number, ambiguous)
    hidden = {"tests": made.hidden["tests"], "visible_tests": made.hidden["visible_tests"][:visible], "loose": False}
    fields = {"problem": made.fields["problem"], "entry": "f", "parameters": "x", "preamble": ""}
    return Task(number, fields, hidden | {"plan_gold": made.hidden["plan_gold"]}, split)


def read_line(field: str, name: str) -> Callable[[str], dict[str, Any]]:
    """A function in one line. Raises `FormatError` for a response that does not begin and end as one."""
    head, tail = f"def {name} ( x ) : ", "return x"

    def parse(text: str) -> dict[str, Any]:
        text = text.strip()
        if not text.startswith(head) or not text.endswith(tail):
            raise FormatError(f"{head.strip()} ... {tail} is expected")
        return {field: text}

    return parse


def mini_aux_roles(single: bool = False) -> dict[str, Role]:
    """Helper and main agent who speak in a few dozen words."""
    sizes = dict(max_tokens=48, max_prompt=128)
    helper = Role("helper", "{problem} {seen_helper} helper:", read_line("aux_code", "aux"), {"aux_code": ""}, **sizes)
    main = Role("main", "{problem} {seen_main} main:", read_line("main_code", "f"), {"main_code": ""}, **sizes)
    return {"main": main} if single else {"helper": helper, "main": main}


def _or_none(code: str) -> str:
    return code or "none"


def _noted(aux_code: str, main_code: str, note_aux: str, note_main: str) -> tuple[str, str]:
    words = [NOTE_WORDS.get(note, note) for note in (note_aux, note_main)]
    return f"mine {_or_none(aux_code)} note {words[0]}", f"mine {_or_none(main_code)} note {words[1]}"


WORDS = Views(
    helper_first=lambda aux_code: f"other {_or_none(aux_code)}",
    both=lambda aux_code, main_code: (
        f"mine {_or_none(aux_code)} other {_or_none(main_code)}", f"mine {_or_none(main_code)} other {_or_none(aux_code)}",
    ),
    noted=_noted,
)  # fmt: skip


def statements(plan: Plan) -> list[str]:
    """A plan as statements."""
    return [BY_NAME[name].code.format(n=n) for name, n in plan]


def helper_program(plan: Plan, part: str) -> str:
    """`aux` for one of `HELPER_PARTS`."""
    lines = statements({"first": plan[:1], "last": plan[-1:], "all": plan}[part])
    return f"def aux ( x ) : {' ; '.join([*lines, 'return x'])}"


def main_program(plan: Plan, part: str) -> str:
    """The entry point for one of `MAIN_PARTS`."""
    call = ["x = aux ( x )"]
    before, after = statements(plan[:-1]), statements(plan[1:])
    lines = {"rest": call + after, "before": before + call, "wrap": call, "alone": statements(plan)}[part]
    return f"def f ( x ) : {' ; '.join([*lines, 'return x'])}"


def readings(problem: str, plan: Plan) -> list[Plan]:
    """All plans that the problem's words allow, the one that is meant first."""
    places = unclear_places(problem)
    step_readings = [((name, n), (OTHER[name], n)) if i in places else ((name, n),) for i, (name, n) in enumerate(plan)]
    return list(itertools.product(*step_readings))


def read_as(problem: str, plan: Plan, names: Sequence[str]) -> Plan | None:
    """The reading whose unclear words stand for these operations, in order; None if there is none."""
    places = unclear_places(problem)
    return next((reading for reading in readings(problem, plan) if [reading[i][0] for i in places] == list(names)), None)


def part_of(problem: str, plan: Plan, aux_code: str) -> str | None:
    """Which part of a plan a helper wrote, in any reading of the problem; None if it is none of them."""
    written = {helper_program(reading, part): part for reading in readings(problem, plan) for part in reversed(HELPER_PARTS)}
    return written.get(aux_code)


def scripted_expert(truth: float | int = 1.0) -> Callable[..., Any]:
    """The expert of the small world, a feedback tool: it names the main agent's part that goes with what the helper wrote, and what the
    unclear words of the problem mean.

    `truth`: share of its advice that is right; otherwise it names another part and the other meanings, as advice on another problem would.
    Raises `WorkflowError` for a share outside [0, 1].
    """
    if not 0 <= truth <= 1:
        raise WorkflowError(f"truth={truth} is not in [0, 1]")
    fits = {helper: main for main, helper in MAIN_PARTS.items() if helper}

    def feedback(aux_code: str, main_code: str, problem: str, plan_gold: Plan) -> ToolResult:
        rng = random.Random(f"expert {problem} {aux_code} {main_code}")
        part = part_of(problem, plan_gold, aux_code)
        note_aux, note_main = ("keep", fits[part]) if part else ("first", "rest")
        meanings = [plan_gold[i][0] for i in unclear_places(problem)]
        if rng.random() >= truth:
            note_aux = rng.choice([word for word in HELPER_PARTS if word != part])
            note_main = rng.choice([word for word in fits.values() if word != note_main])
            meanings = [OTHER[name] for name in meanings]
        return success(dict(zip(NOTES, (" ".join([note, *meanings]) for note in (note_aux, note_main)))), 0.0)

    return feedback


def helper_player(
    noise: float | int = 0.0, heed: float | int = 0.5, lean: float | int = 0.0, single: bool = False
) -> Callable[[ScriptTurn], str]:
    """A player of both roles, or of the single agent.

    Args:
      noise: how often a number of a plan is another.
      heed: how often it takes note of what it reads of an earlier answer, or of advice.
      lean: by how much it favours one convention: at 1 the helper always does the first operation, at -1 the last, and at 0
        the halves overlap equally in both.
    """

    def play(turn: ScriptTurn) -> str:
        rng, fields, helping = turn.random, turn.fields, turn.role.name == "helper"
        plan = tuple((name, int(rng.choice(NUMBERS)) if rng.random() < noise else n) for name, n in fields["plan_gold"])
        heeds = not single and rng.random() < heed
        note = fields.get("note_aux" if helping else "note_main", "") if heeds else "unread"
        own = fields.get("aux_code" if helping else "main_code", "")
        if own and fields.get("round_") and NOTE_WORDS.get(note) in ("none", "pass"):
            return own
        part, *meanings = note.split() or [""]
        plan = read_as(fields["problem"], plan, meanings) or rng.choice(readings(fields["problem"], plan))
        if single:
            return main_program(plan, "alone")
        if helping:
            return helper_program(plan, _helper_part(fields, part, heeds, rng, lean))
        return main_program(plan, _main_part(fields, part, heeds, rng, lean))

    return play


def _helper_part(fields: Mapping[str, Any], note: str, heeds: bool, rng: random.Random, lean: float | int) -> str:
    own = part_of(fields["problem"], fields["plan_gold"], fields.get("aux_code", ""))
    if note in HELPER_PARTS:
        return note
    if heeds and own is not None:  # "keep", or a second turn: what it did before
        return own
    return _drawn(HELPER_PARTS, rng, lean)


def _main_part(fields: Mapping[str, Any], note: str, heeds: bool, rng: random.Random, lean: float | int) -> str:
    other = part_of(fields["problem"], fields["plan_gold"], fields.get("aux_code", ""))
    if note in MAIN_PARTS:
        return note
    if heeds and other is not None and "other" in fields.get("seen_main", ""):
        return next(main for main, helper in MAIN_PARTS.items() if helper == other)
    return _drawn(tuple(MAIN_PARTS), rng, lean)


def _drawn(parts: Sequence[str], rng: random.Random, lean: float | int) -> str:
    tilt = {"first": 1 + lean, "rest": 1 + lean, "last": 1 - lean, "before": 1 - lean}
    return rng.choices(parts, [WEIGHTS[part] * tilt.get(part, 1 - abs(lean)) for part in parts])[0]


def random_helper(turn: ScriptTurn) -> str:
    """The random player: functions of random operations that keep the form."""
    rng = turn.random
    plan = tuple((rng.choice(OPS).name, int(rng.choice(NUMBERS))) for _ in range(rng.randint(1, 3)))
    if turn.role.name == "helper":
        return helper_program(plan, "all")
    return main_program(plan, rng.choice(tuple(MAIN_PARTS)))
