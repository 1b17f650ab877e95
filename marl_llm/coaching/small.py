"""A small coach: a tiny model that was trained to say what a rubric says. It reads a short text of the environment, the brief of an action.

    executor  _ _ _ _ a a _ a  p p _ p b b _ b  solved x claims y said _ printed x    ->    SCORE: 9

Its reply is read by the function that reads every coach's. It knows no rubric when it scores, and is measured against one on plays of a
team that it never saw (`agreement`); without enough agreement it may train nobody. `marl_llm/cli/coach.py` trains and measures it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from marl_llm.coaching.answers import SCORE, read_answer
from marl_llm.coaching.coach import rubric_text
from marl_llm.text import PieceTokenizer, train_pieces
from marl_llm.untrusted import read_json_file
from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.renderer import PlainText
from marl_llm.workflows.trajectory import RoleCall
from marl_llm.workflows.views import ActionView, CoachGuide, ViewMaker

RECORD, TOKENIZER = "coach.json", "tokenizer.model"  # beside the checkpoint's files
STEP = 0.25  # between two scores that it can say
MAX_REPLY = 3  # tokens: the label, the number, the end
MAX_WORDS = 4096  # different ones in the briefs that it learns from
LEAST_KAPPA, MOST_ERROR, MOST_MISSING = 0.8, 0.7, 0.01  # agreement on unseen teams, without which it trains nobody
_END = "<end>"


def brief_of(view: ActionView, guide: CoachGuide) -> str:
    """What a small coach reads of an action. Raises `WorkflowError` where the environment writes none, or fails to."""
    if guide.brief is None:
        raise WorkflowError("the environment's guide has no brief, which a small coach reads: give CoachGuide(brief=...)")
    try:
        brief = guide.brief(view)
    except Exception as error:
        raise WorkflowError(f"the brief raised {type(error).__name__} on {view.call.id}: {error}") from error
    if not isinstance(brief, str) or not brief.split():
        raise WorkflowError(f"the brief of {view.call.id} is {brief!r:.100}; it must be a text that is not empty")
    return " ".join(brief.split())


def brief_messages(view: ActionView, guide: CoachGuide) -> tuple[list[dict[str, str]], int]:
    """The brief as the one message that a small coach is asked; see `ChatCoach`."""
    return [{"role": "user", "content": brief_of(view, guide)}], 0


def answer_of(value: float | int) -> str:
    """A score as the small coach says it: to the next quarter."""
    return f"{SCORE} {round(float(value) / STEP) * STEP:g}"


def renderer_for(briefs: Iterable[str]) -> PlainText:
    """A vocabulary of one piece per word of these briefs, and the answers. Raises `WorkflowError` for briefs of too many words."""
    answers = {word for n in range(round(10 / STEP) + 1) for word in answer_of(n * STEP).split()}
    words = {word for brief in briefs for word in brief.split()}
    if _END in words or len(words) > MAX_WORDS:
        raise WorkflowError(f"briefs of {len(words)} different words: a small coach reads {MAX_WORDS} at most, none of them {_END!r}")
    return renderer_of(train_pieces((_END, *sorted(words | answers))))


def renderer_of(tokenizer: PieceTokenizer) -> PlainText:
    """How a small coach with this vocabulary reads and writes."""
    return PlainText(tokenizer, (int(tokenizer.ids_of([_END])[0]),), between="")


def views_of(rollout: Rollout, when: str) -> list[ActionView]:
    """A view of every action of the plays that are not aborted, as a coach without the truth gets it."""
    action_views = []
    for path in rollout.trajectories:
        views = ViewMaker(rollout.workflow, path.task)
        end = path.fields if when == "end" else None
        for number, event in enumerate(path.events):
            if isinstance(event, RoleCall):
                action_views.append(views.make(event, path.events if when == "end" else _until(path.events, number), when, "none", end, {}))
    return action_views


def rubric_value(view: ActionView, guide: CoachGuide) -> float:
    """What the environment's rubric says of an action, by the way that its coach takes."""
    return float(read_answer(rubric_text(guide.rubric, view)).value)


def read_record(folder: str | pathlib.Path, guide: CoachGuide) -> dict[str, Any]:
    """What was measured of a small coach when it was trained.

    Raises:
      WorkflowError: the directory holds none, it was trained for another rubric, or it agrees too little with it to train anyone.
    """
    path = pathlib.Path(folder) / RECORD
    try:
        record = read_json_file(path)
        version, most, unseen = record["guide"], int(record["max_prompt"]), record["unseen"]
        faults = [disagreement(team, figures["all"]) for team, figures in unseen.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise WorkflowError(f"{folder} is no small coach ({why}); train one with python -m marl_llm coach") from error
    if version != guide.version:
        raise WorkflowError(f"the small coach of {folder} learned {version!r}; the environment's is {guide.version!r}: train another")
    if not faults:
        raise WorkflowError(f"the small coach of {folder} was measured on no team that it never saw: train it with --unseen")
    for fault in filter(None, faults):
        raise WorkflowError(f"the small coach of {folder} agrees too little with its rubric {fault}; train it longer or on more teams")
    return record | {"max_prompt": most}


def disagreement(team: str, figures: dict[str, Any]) -> str:
    """What in the figures of `agreement` forbids a coach to train the team; empty if nothing does. Raises for figures that are none."""
    error, kappa = float(figures.get("mae", 10.0)), float(figures.get("kappa", 0.0))
    missing = float(figures["missing"] / max(1, figures["actions"]))
    if error <= MOST_ERROR and kappa >= LEAST_KAPPA and missing <= MOST_MISSING:
        return ""
    return (
        f"on {team}: mean absolute error {error:.2f} (at most {MOST_ERROR}), kappa {kappa:.2f} (at least {LEAST_KAPPA}), "
        f"{missing:.1%} of its replies missing (at most {MOST_MISSING:.0%})"
    )


def _until(events: Sequence[Any], number: int) -> Sequence[Any]:
    """Events up to the next action: those that had happened when an action was scored at once."""
    after = (i for i in range(number + 1, len(events)) if isinstance(events[i], RoleCall))
    return events[: next(after, len(events))]
