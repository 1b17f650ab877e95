"""Rewards of Stronger-MAS's Appendix B in their three forms, for any workflow: who is paid for what in each turn.

| form | team | local |
|---|---|---|
| `paper` | the result, in every turn, as printed | the parts of the role's own score, in every turn, as printed |
| `safe` | what this turn improved of the result | what this turn improved of each part |
| `outcome` | the result: solved or not (Appendix B.6) | 1 if the answer is well-formed (B.6) |

`paper` pays a standing result again in every turn, so that a team that goes on without need earns more than one that is done at once.
`safe` pays each part once: over a play the payments of a role add up to the score of its last answer. With candidates that are scored when
they are made the two differ by a constant within a group, and so not at all in an advantage.

Malformed answers: every part of an illegal call is 0 (the mask m of Appendix B; reading: it is 0 where an answer cannot be parsed, and a
failure of the infrastructure is no mask but aborts the play).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rewards import Award, Reward
from marl_llm.workflows.trajectory import RoleCall, Trajectory

FORMS = ("paper", "safe", "outcome")
Beside = Callable[..., Any]  # field, default, earlier -> what was written to it beside a call; see `written_beside`
Parts = Callable[[RoleCall, Beside], Mapping[str, float]]
Result = Callable[[RoleCall, Beside, Trajectory], float]


def written_beside(path: Trajectory, call: RoleCall) -> Beside:
    """A function of (field, default, earlier): what was written to a field in the call's turn, and for its item of an `each` or for all.

    With `earlier` it is what was written last, in this turn or before. A candidate that is scored when it is made sees what its own tools
    wrote, and nothing of those who speak at the same time.
    """

    def value(field: str, default: Any = None, earlier: bool = False) -> Any:
        for event in reversed(path.events):
            now = event.turn == call.turn or earlier and event.turn < call.turn
            if now and field in event.writes and event.items == call.items[: len(event.items)]:
                return event.writes[field]
        return default

    return value


def check_form(form: str) -> str:
    """The form. Raises `WorkflowError` for an unknown one."""
    if form not in FORMS:
        raise WorkflowError(f"rewards_form={form!r} is unknown; choose one of {', '.join(FORMS)}")
    return form


def check_debate(rewards_form: str, agents: str, turns: int, history: int) -> None:
    """Raises `ValueError` for options that no debate of two roles has: an unknown form or `agents`, or bounds that are too low."""
    check_form(rewards_form)
    if agents not in ("team", "single"):
        raise WorkflowError(f"agents={agents!r} is unknown; choose team or single")
    if turns < 1 or history < 0:
        raise WorkflowError(f"turns={turns} must be at least 1, and history={history} at least 0")


def rewards_in_form(form: str, parts: Mapping[str, Parts], team: Mapping[str, Result], solved: Mapping[str, Result]) -> tuple[Reward, ...]:
    """The rewards of a workflow in one form.

    Args:
      form: one of `FORMS`.
      parts: role -> its local score's parts by name, weights applied, of a call and of what was written beside it. They are asked for legal
        calls only.
      team: role -> the result that all are paid for, in [0, 1].
      solved: role -> whether the problem is solved, for `outcome`.

    Raises `WorkflowError` for an unknown form.
    """
    check_form(form)

    def outcome(path: Trajectory) -> Iterator[Award]:
        for call in path.calls:
            if call.role in parts:
                yield Award(call, float(solved[call.role](call, written_beside(path, call), path)), "solved", team=True)
                yield Award(call, float(call.legal), "well_formed")

    def dense(path: Trajectory) -> Iterator[Award]:
        last: dict[tuple[str, tuple[int, ...]], dict[tuple[str, bool], float]] = {}
        for call in path.calls:
            if call.role not in parts:
                continue
            written = written_beside(path, call)
            scores = {("result", True): float(team[call.role](call, written, path))}
            if call.legal:
                scores |= {(name, False): float(value) for name, value in parts[call.role](call, written).items()}
            speaker = call.role, call.items
            before = last.get(speaker, {}) if form == "safe" else {}
            for name, is_team in dict.fromkeys([*scores, *before]):
                value = scores.get((name, is_team), 0.0) - before.get((name, is_team), 0.0)
                yield Award(call, value, name, team=is_team)
            last[speaker] = scores

    reward = outcome if form == "outcome" else dense
    reward.__qualname__ = f"rewards in form {form!r}"
    return (reward,)
