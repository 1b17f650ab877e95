"""Coaches: who scores an action. Whatever kind it is, it answers *text* to *messages*, and the text is read by one function."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marl_llm.coaching.answers import Unreadable, read_answer, write_answer
from marl_llm.coaching.prompts import messages_for
from marl_llm.tools.chat import ChatClient, ChatReply, Message
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.trajectory import Score
from marl_llm.workflows.views import ActionView, CoachGuide

MAX_ANSWER = 1024  # tokens of a coach's reply
MAX_QUOTED = 1000  # characters of an unreadable reply that go back to who wrote it

Answers = Callable[[ActionView, Sequence[Message]], Awaitable[ToolResult[ChatReply]]]
Ask = Callable[[ActionView, CoachGuide], tuple[Sequence[Message], int]]


@runtime_checkable
class Coach(Protocol):
    """Scores one action. A failure is the infrastructure's, never a score."""

    async def score(self, view: ActionView) -> ToolResult[Score]:
        """The score of an action, in [0, 10]."""
        ...


class ChatCoach:
    """A coach that answers text to messages: a model behind an address, a model of this program, or a rubric that writes the same form.

    Args:
      answers: (view, messages) -> a reply; see `of_client` and `of_rubric`. All but a rubric read the messages alone.
      guide: what the environment tells of its team.
      format_attempts: how often a reply that cannot be read is asked for in all; each time with the reason. Then there is no score.
      ask: (view, guide) -> the messages, and how many of their blocks were cut; see `small.brief_messages` for tiny models.

    Raises:
      WorkflowError: fewer than one attempt.
    """

    def __init__(self, answers: Answers, guide: CoachGuide, format_attempts: int = 2, ask: Ask = messages_for):
        if format_attempts < 1:
            raise WorkflowError(f"format_attempts={format_attempts} must be at least 1")
        self._answers, self.guide, self._attempts, self._ask = answers, guide, format_attempts, ask
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("actions", "unreadable", "capped", "cut"), 0.0)

    async def score(self, view: ActionView) -> ToolResult[Score]:
        """See `Coach`. Unreadable replies in all attempts are a failure of the kind bad_reply."""
        start = time.monotonic()
        messages, cut = self._ask(view, self.guide)
        self._count(actions=1, cut=cut)
        problem = ""
        for attempt in range(1, self._attempts + 1):
            result = await self._answers(view, messages)
            if result.failure is not None:
                return result
            reply = result.outcome()
            try:
                score = read_answer(reply.text)
            except Unreadable as error:
                problem = str(error)
                self._count(unreadable=1)
                again = f"That cannot be read: {problem}. Answer again, in the form that was asked for."
                said_before = {"role": "assistant", "content": reply.text[:MAX_QUOTED] or "(nothing)"}
                messages = [*messages, said_before, {"role": "user", "content": again}]
                continue
            score = self._capped(view, dataclasses.replace(score, cached=reply.cached))
            return success(score, time.monotonic() - start, attempt)
        message = f"{view.call.id}: the coach's reply cannot be read: {problem}"
        return failed(FailureKind.BAD_REPLY, message, time.monotonic() - start, self._attempts)

    def over(self, change: Callable[[Answers], Answers]) -> ChatCoach:
        """The same coach with changed answers, for studies."""
        return ChatCoach(change(self._answers), self.guide, self._attempts, self._ask)

    def metrics(self) -> dict[str, float]:
        """Counts since it was made: actions, unreadable replies, scores that were capped, blocks of prompts that were cut."""
        with self._lock:
            return dict(self._counts)

    def _capped(self, view: ActionView, score: Score) -> Score:
        """The score, or what arithmetic allows at most. A contribution, which a coach that goes backwards says, has no cap: 5 is none."""
        cap = None if self.guide.cap is None or view.residual is not None else self.guide.cap(view)
        if cap is None or score.value <= cap:
            return score
        self._count(capped=1)
        return dataclasses.replace(score, value=float(cap), capped=True)

    def _count(self, **by: int) -> None:
        with self._lock:
            for name, value in by.items():
                self._counts[name] += value


def of_client(client: ChatClient, max_tokens: int = MAX_ANSWER, draw: int = 0, temperature: float = 0.0) -> Answers:
    """Answers of a client's model. `draw` is the number of the sample where one model is asked several times."""

    async def answers(view: ActionView, messages: Sequence[Message]) -> ToolResult[ChatReply]:
        return await client.acomplete(messages, draw=draw, max_tokens=max_tokens, temperature=temperature)

    return answers


def of_rubric(rubric: Callable[[ActionView], Any], better: Callable[[ActionView], str] | None = None) -> Answers:
    """Answers of a function of the view, and of one that corrects actions, written in the form that models are asked for."""

    async def answers(view: ActionView, messages: Sequence[Message]) -> ToolResult[ChatReply]:
        return success(ChatReply(rubric_text(rubric, view, better), "stop", 0, 0), 0.0)

    return answers


def rubric_text(rubric: Callable[[ActionView], Any], view: ActionView, better: Callable[[ActionView], str] | None = None) -> str:
    """A rubric's answer about a view, as text.

    Raises:
      WorkflowError: it raises, gives neither a `Score` nor (value, correct, reason), or no number from 0 to 10.
    """
    try:
        judgement, corrected = rubric(view), better(view) if better else ""
    except Exception as error:
        raise WorkflowError(f"the rubric raised {type(error).__name__} on {view.call.id}: {error}") from error
    if isinstance(judgement, Score):
        judgement = (judgement.value, judgement.correct, judgement.reason)
    is_triple = isinstance(judgement, tuple) and len(judgement) == 3
    if not is_triple or not isinstance(judgement[2], str) or judgement[1] not in (True, False, None):
        raise WorkflowError(f"the rubric gave {judgement!r:.200} for {view.call.id}; it must give a Score, or (value, correct, reason)")
    if not isinstance(corrected, str):
        raise WorkflowError(f"CoachGuide.better gave {corrected!r:.200} for {view.call.id}; it must give a text")
    try:
        return write_answer(*judgement, corrected)
    except ValueError as error:
        raise WorkflowError(f"the rubric gave {view.call.id} {error}") from error


def rubric_coach(guide: CoachGuide) -> ChatCoach:
    """The coach of an environment's rubric. Raises `WorkflowError` if the environment has none."""
    if guide.rubric is None:
        raise WorkflowError("the environment's guide has no rubric: give CoachGuide(rubric=...), or choose another kind of coach")
    return ChatCoach(of_rubric(guide.rubric, guide.better if guide.corrects else None), guide, format_attempts=1)


def metrics_of(coach: Any) -> Mapping[str, float]:
    """A coach's counts, if it keeps any."""
    return coach.metrics() if hasattr(coach, "metrics") else {}
