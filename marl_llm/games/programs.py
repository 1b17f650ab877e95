"""Teams in which a Tool writes a program that is really run, and a Planner decides: what Plan-Path, Sokoban and Sudoku in text share.

    begin ─▶ [ tool ─▶ execute ─▶ planner ─▶ step ] at most T times, until it is solved          (a single agent: [ solo ─▶ step ])

This is the game workflow of Stronger-MAS (Appendices C.2 and D). `PuzzleRules` are functions of plain values. `execute` runs the Tool's
program in the sandbox, reads what it printed, and simulates it; `step` applies the Planner's answer. Both note what `measured` gives, from
which the rewards are made; no role reads it.

**What may go wrong** with a program or an answer is a word of `PROGRAM_STATES` or `ANSWER_STATES`, counted in the workflow's metrics, and
the mask m of Appendix B is then 0. What the sandbox itself breaks aborts the play.

| form | team | local |
|---|---|---|
| `paper` | Appendix B's, as printed, of the state that the answer leads to | .1 format + .1 legal + .8 the game's own score, times m |
| `safe` | what the role's answer gained, as a share of the way: (e − e') / e_0 | .8 of the same gain, minus `unread`, −.1 illegal |
| `outcome` | 1 if the answer solves it (B.6) | 1 if it can be read (B.6) |

In `safe`, e is what the role's last readable answer left to do, or what is left where it answers if that is less: so its gains add up to at
most 1 over a play, whatever it does, undoing costs what doing paid, and nobody is paid for what the other one did. A Tool is paid for the
simulation of what it proposes, a Planner for what is done.
"""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from marl_llm.hints import check_word
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.sandbox import Limits, Program, Submission, default_sandbox
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.untrusted import read_text
from marl_llm.workflows import FormatError, Role, Trajectory, Workflow, WorkflowError, after_hashes, compute, repeat, sequence, tool
from marl_llm.workflows.graph import Node
from marl_llm.workflows.rewards import Award, Reward

FORMS = ("safe", "paper", "outcome")
FORMAT, LEGAL, MAIN = 0.1, 0.1, 0.8  # Appendix B's coefficients, the same in B.3, B.4 and B.5
SHOWN = 500  # characters of a program's output that the Planner reads
LIMITS = Limits(timeout_s=5.0, memory_mb=256, stdout_bytes=64 * 1024, stderr_bytes=16 * 1024)
MOVES = "UDLR"

# What became of a Tool's program: it printed something, there was none (or several), or why it printed nothing that counts.
PROGRAM_STATES = ("ran", "no_program", "timeout", "flood", "memory", "error", "silent")
# What became of a list: readable and done, or done up to the end of the puzzle, or why not.
ANSWER_STATES = ("done", "solved", "illegal", "empty", "no_list", "nested", "other_words", "too_long", "unread")
EXCEPTIONS = frozenset(name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException))


@dataclasses.dataclass(frozen=True)
class Applied:
    """What a list of steps does to a state.

    Attributes:
      state: after it.
      status: one of `ANSWER_STATES`.
      legal: there was a step, and no step was illegal.
      left: what is left to do after it, 0 if it is solved.
      team: Appendix B's team reward of the state after it.
      executes, proposes: Appendix B's .8 score of an agent that acts, and of one that proposes; in [0, 1].
      trace: (step, state after it) as texts, of the steps that were done.
      legal_terms: Appendix B's .1 terms beside the format's, of an agent that acts and of one that proposes, where they are not `legal`.
    """

    state: Any
    status: str
    legal: bool
    left: float
    team: float
    executes: float
    proposes: float
    trace: tuple[tuple[str, str], ...] = ()
    legal_terms: tuple[bool, bool] | None = None


def status_of(solved: bool, stopped: bool, steps: Any) -> str:
    """What became of a list that could be read."""
    return "solved" if solved else "illegal" if stopped else "done" if steps else "empty"


@dataclasses.dataclass(frozen=True)
class PuzzleRules:
    """The rules of a game that is played by lists of steps on a state of plain values (which transcripts keep as JSON)."""

    name: str  # of the workflow
    apply: Callable[[Any, Any, Any], Applied]  # state, start, steps -> what the steps do; `start` is the play's first state
    left: Callable[[Any, Any], float]  # a state, the play's first state -> what is left to do, above 0 until it is solved
    read: Callable[[str], Any]  # text -> steps. Raises `FormatError` with one of `ANSWER_STATES`
    write: Callable[[Any], str]  # steps -> text, in the form that `read` reads
    describe: Callable[[Any], str]  # a state -> what roles read of it
    stdin: Callable[[Any], str] = lambda state: ""  # a state -> what the Tool's program reads


# --- a program ---------------------------------------------------------------------------------------------------------------------------


def ending_of(program: Program) -> dict[str, str]:
    """`state` of `PROGRAM_STATES` and the `printed` text; of a program that failed the last line of its complaint, Python's names only."""
    printed, complained = read_text(program.stdout_bytes).value, read_text(program.stderr_bytes).value
    if program.timed_out:
        return {"state": "timeout", "printed": "(the program did not end in time)"}
    if program.stdout_truncated:
        return {"state": "flood", "printed": "(the program printed too much)"}
    if program.outcome in ("memory", "disk"):
        return {"state": "memory", "printed": "(the program used too much memory)"}
    if program.outcome != "ok":
        last = complained.strip().splitlines()[-1] if complained.strip() else ""
        name = last.partition(":")[0].strip()
        return {"state": "error", "printed": last if name in EXCEPTIONS else "(the program failed)"}
    return {"state": "ran" if printed.strip() else "silent", "printed": printed}


def program_runner(limits: Limits = LIMITS) -> Callable[[str, str], Awaitable[ToolResult]]:
    """An async function (code, stdin) -> a result of `ending_of`. The same program with the same input is run once."""
    endings = Verdicts()

    async def run(code: str, stdin: str) -> ToolResult:
        if not code.strip():
            return success({"state": "no_program", "printed": "(there is no program)"}, 0.0)

        async def once() -> ToolResult:
            done = await default_sandbox().arun(Submission(code, stdin, limits=limits))
            return done.map(ending_of)

        return await endings.of(content_key(code, stdin), once)

    return run


# --- a list ------------------------------------------------------------------------------------------------------------------------------


def bracketed(text: str) -> list[str]:
    """The words of a list `[a, b]`, each without one pair of quotes. Raises `FormatError` with one of `ANSWER_STATES`."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]") and len(text) > 1):
        raise FormatError("no_list")
    inside = text[1:-1]
    if "[" in inside or "]" in inside:
        raise FormatError("nested")
    words = [word.strip() for word in inside.split(",")] if inside.strip() else []
    return [word[1:-1] if len(word) > 2 and word[0] == word[-1] and word[0] in "'\"" else word for word in words]


def read_moves(text: str, at_most: int) -> str:
    """The moves of a list such as `[U, R]` or `["U", "R"]`, as letters; nothing else is read. Raises `FormatError` as `bracketed`."""
    words = bracketed(text)
    if any(word not in ("U", "D", "L", "R") for word in words):
        raise FormatError("other_words")
    if len(words) > at_most:
        raise FormatError("too_long")
    return "".join(words)


def write_moves(letters: str) -> str:
    """`[U, R]`."""
    return f"[{', '.join(letters)}]"


def clip(text: str, size: int = SHOWN) -> str:
    """The start of a text, and a sign that it went on."""
    return text if len(text) <= size else f"{text[:size]}…"


def answer_parser(field: str, puzzle: PuzzleRules, keep: str | None = None) -> Callable[[str], dict[str, Any]]:
    """`after_hashes` of a puzzle's steps. `keep` names a field for the whole text, which is kept of a malformed answer too."""
    inner = after_hashes(field, puzzle.read)

    def parse(text: str) -> dict[str, Any]:
        kept = {} if keep is None else {keep: text.strip()}
        try:
            return inner(text) | kept
        except FormatError as error:
            raise FormatError(str(error), kept) from error

    return parse


# --- the workflow ------------------------------------------------------------------------------------------------------------------------

NOTHING_MADE = {"code": "", "ran": "", "printed": "", "proposal": "", "tool_status": ""}  # what there is of a Tool before it has spoken


def program_team(
    puzzle: PuzzleRules,
    roles: Sequence[Role],
    *,
    turns: int = 4,
    rewards_form: str = "safe",
    run: Callable[[str, str], Awaitable[ToolResult]] | None = None,
    last_line: bool = False,
    fit: Callable[[Any], Any] = lambda steps: steps,
    phase: Callable[[int], Mapping[str, str]] | None = None,
    history: Callable[[int, Mapping[str, Any]], str] | None = None,
    adopted: Any = None,
    propose: Callable[[Any, Any, Any], Applied] | None = None,
    unread: float | int = FORMAT,
    cap: int = 20_000,
) -> Workflow:
    """The workflow of the module's text. Tasks give `instance`, the first state, and `task`, which is told in words.

    Args:
      roles: (tool, planner), where the tool writes `code` and the planner `steps` (None: it could not be read) and `remark`; or (solo,),
        which writes as the planner does.
      turns: T.
      rewards_form: one of `FORMS`.
      run: see `program_runner`.
      last_line: the Tool's list is the last line of what it printed; otherwise it is the whole of it.
      fit: cuts a proposal to what the Planner may repeat. The Tool is scored on what is left of it.
      phase: the number of the turn, from 0 -> texts that differ from turn to turn, by field.
      history: turn and what happened in it -> an entry of the field `history`; see `step` below for its names. None: no history.
      adopted: what the Planner's `steps` are where it adopts the proposal without writing it again; None: it always writes steps.
      propose: what a Tool's list does, where it says something else than the Planner's; by default `puzzle.apply`.
      unread: what an answer that cannot be read costs under `safe`.
      cap: characters of an entry.

    Raises:
      WorkflowError: an unknown `rewards_form`, or roles that are neither of the two.
    """
    names = tuple(role.name for role in roles)
    if names not in (("tool", "planner"), ("solo",)):
        raise WorkflowError(f"the roles {', '.join(names)} are neither tool and planner nor solo")
    check_word(f"{puzzle.name}.rewards_form", rewards_form, FORMS, WorkflowError)

    def begin(instance: Any) -> dict[str, Any]:
        return {"state": instance, "view": puzzle.describe(instance), "turn_number": 0, "over": puzzle.left(instance, instance) == 0}

    parts: list[Node | Role] = []
    if phase is not None:
        parts.append(compute(phase, tuple(phase(0)), name="phase", reads=("turn_number",)))
    if names != ("solo",):
        execute = _execution(puzzle, run or program_runner(), last_line, fit, propose or puzzle.apply)
        parts += [roles[0], tool(execute, ("ran", "printed", "proposal", "tool_status", "proposed"), timeout_s=60.0)]
    reads = ("state", "instance", "steps", "remark", "turn_number", "history", *NOTHING_MADE)
    step_writes = ("state", "view", "status", "made", "turn_number", "history", "over")
    parts += [roles[-1], compute(_turn_end(puzzle, history, adopted, cap), step_writes, reads=reads)]
    return Workflow(
        puzzle.name,
        sequence(
            compute(begin, ("state", "view", "turn_number", "over")),
            repeat(*parts, at_most=turns, until=lambda over: over, name="turns"),
        ),
        inputs=("task", "instance"),
        start={**NOTHING_MADE, "history": (), "status": "none"},
        rewards=(paid_by(rewards_form, puzzle, unread),),
        metrics=_metrics(puzzle, names),
    )


def _execution(
    puzzle: PuzzleRules,
    run: Callable[[str, str], Awaitable[ToolResult]],
    last_line: bool,
    fit: Callable[[Any], Any],
    propose: Callable[[Any, Any, Any], Applied],
) -> Callable[..., Awaitable[ToolResult]]:
    """The tool between Tool and Planner: runs the program, reads the list that it printed, simulates it. Arguments as `program_team`."""

    async def execute(code: str, state: Any, instance: Any) -> ToolResult:
        done = await run(code, puzzle.stdin(state))
        if not done.ok:
            return done
        ending, steps, why = done.outcome(), None, "unread"
        if ending["state"] == "ran":
            printed = ending["printed"].strip()
            try:
                steps = fit(puzzle.read(printed.splitlines()[-1] if last_line else printed))
            except FormatError as error:
                why = str(error)
        applied = None if steps is None else propose(state, instance, steps)
        fields = {
            "ran": ending["state"],
            "printed": ending["printed"],
            "proposal": "" if steps is None else puzzle.write(steps),
            "tool_status": why if applied is None else applied.status,
            "proposed": measured(applied, puzzle.left(state, instance)),
        }
        return ToolResult(fields, None, done.seconds, done.attempts)

    return execute


def _turn_end(
    puzzle: PuzzleRules, history: Callable[[int, Mapping[str, Any]], str] | None, adopted: Any, cap: int
) -> Callable[..., dict[str, Any]]:
    """The end of a turn: applies the last role's answer. `made` are the fields of `NOTHING_MADE`; the others as `program_team`."""

    def step(state: Any, instance: Any, steps: Any, remark: str, turn_number: int, earlier: tuple[str, ...], *made: str) -> dict[str, Any]:
        if adopted is not None and steps == adopted:
            proposal = made[list(NOTHING_MADE).index("proposal")]
            steps = puzzle.read(proposal) if proposal else None  # there may be nothing to adopt
        applied = None if steps is None else puzzle.apply(state, instance, steps)
        after = state if applied is None else applied.state
        status = "unread" if applied is None else applied.status
        turn = dict(zip(NOTHING_MADE, made)) | {"remark": remark, "status": status, "trace": () if applied is None else applied.trace}
        turn |= {"steps": "" if steps is None else puzzle.write(steps)}
        entry = () if history is None else (history(turn_number, turn)[:cap],)
        fields = {"state": after, "view": puzzle.describe(after), "status": status, "made": measured(applied, puzzle.left(state, instance))}
        return fields | {"turn_number": turn_number + 1, "history": (*earlier, *entry), "over": puzzle.left(after, instance) == 0}

    return step


def measured(applied: Applied | None, before: float | int) -> dict[str, Any]:
    """What rewards read of an answer; None is one that could not be read. `before` is what was left to do."""
    if applied is None:
        return {"well_formed": False, "before": float(before)}
    terms = applied.legal_terms or (applied.legal, applied.legal)
    scores = dict(left=float(applied.left), team=float(applied.team), executes=float(applied.executes), proposes=float(applied.proposes))
    scores |= dict(before=float(before), executes_legal=float(terms[0]), proposes_legal=float(terms[1]))
    return {"well_formed": True, "legal": applied.legal, "solved": applied.left == 0, **scores}


# --- pay ---------------------------------------------------------------------------------------------------------------------------------


def paid_by(form: str, puzzle: PuzzleRules, unread: float | int = FORMAT) -> Reward:
    """The rewards of the module's table."""

    def reward(path: Trajectory) -> list[Award]:
        start = path.task.fields["instance"]
        awards, initial = [], puzzle.left(start, start) or 1.0
        claims: dict[str, float] = {}
        proposed, made = path.per_turn("proposed"), path.per_turn("made")
        for call in path.calls:
            answer = (proposed if call.role == "tool" else made)[call.turn]
            claim = min(claims.get(call.role, initial), answer["before"])
            claims[call.role] = answer.get("left", claims.get(call.role, initial))
            gain = (claim - claims[call.role]) / initial if answer["well_formed"] else 0.0
            team, parts = _pay(form, answer, gain, call.role == "tool", unread)
            awards += [Award(call, team, "team", team=True), *(Award(call, value, name) for name, value in parts.items())]
        return awards

    reward.__qualname__ = f"paid_by {form!r}"
    return reward


def _pay(
    form: str, answer: Mapping[str, Any], gain: float | int, proposes: bool, unread: float | int = FORMAT
) -> tuple[float, dict[str, float]]:
    """Team reward and local parts of one answer."""
    read = answer["well_formed"]
    if form == "outcome":
        return float(read and answer["solved"]), {"format": float(read)}
    if form == "paper":
        if not read:
            return 0.0, {"format": 0.0, "legal": 0.0, "score": 0.0}
        kind = "proposes" if proposes else "executes"
        return answer["team"], {"format": FORMAT, "legal": LEGAL * answer[f"{kind}_legal"], "score": MAIN * answer[kind]}
    illegal = read and not answer["legal"]
    return gain, {"format": -unread * (not read), "legal": -LEGAL * illegal, "progress": MAIN * gain}


def _metrics(puzzle: PuzzleRules, names: tuple[str, ...]) -> dict[str, Callable[[Trajectory], float]]:
    """Success, turns, what is left, and how often each thing became of a program or a list."""
    def share(field, word):
        return lambda path: _share(path, field, word)

    def left(path: Trajectory) -> float:
        start = path.fields["instance"]
        return puzzle.left(path.fields["state"], start) / (puzzle.left(start, start) or 1.0)

    metrics: dict[str, Callable[[Trajectory], float]] = {
        "solved": lambda path: float(path.fields["over"]),
        "turns": lambda path: float(path.turns),
        "left": left,
    }
    metrics |= {f"answer_{word}": share("status", word) for word in ("done", "solved", "illegal", "empty", "unread")}
    if "tool" in names:
        metrics |= {f"program_{word}": share("ran", word) for word in PROGRAM_STATES}
        metrics |= {f"proposal_{word}": share("tool_status", word) for word in ANSWER_STATES}
        metrics["tool_solves_at_once"] = lambda path: float("solved" in [word for _, word in path.written("tool_status")[:1]])
    return metrics


def _share(path: Trajectory, field: str, word: str) -> float:
    values = [value for _, value in path.written(field)]
    return values.count(word) / max(1, len(values))
