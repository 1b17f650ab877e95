"""Hosted play beside updates: a rollout in the background, and a queue of episodes that are at most one step late.

With `PlayOptions.max_staleness` the whole next step is played while the models learn from this one. With `PlayOptions.oversample` more
tasks are begun than a step trains on, and it trains on those that are complete first. Late groups belong to the next step, which waits for
them. So no task is dropped, every task is trained on once, and none later than one step after it was begun. Which tasks are late depends on
time; `bias_figures` compares late episodes with the others of their step.

The engine finishes a request under the parameters that it was admitted with (`Engine.set_params`), and a late episode makes its later calls
with those of the next step, so each sample has the version that its own request met. With `PlayOptions.weight_update="in_flight"` requests
under way continue with the new parameters, and a sample has the version that drew its first token.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from marl_llm.untrusted import check_count
from marl_llm.workflows import Controller, Rollout, Task, WorkflowError
from marl_llm.workflows.metrics import episode_metrics
from marl_llm.workflows.trajectory import Episode, RoleCall

Tasks = Callable[[int, int], list[Task]]  # (first, count) -> tasks of the training split
Given = Mapping[str, list[int]]  # model -> versions of the parameters that the engine was given, in order


def version_of(given: Given, call: RoleCall) -> int:
    """Version of the parameters that drew a call's first token; 0 of a model that is not the team's own."""
    return given[call.model][call.version] if call.model in given else 0


class BackgroundRollout(NamedTuple):
    """A rollout that is played in a thread of its own, beside an update."""

    step: int  # that began it
    places: Sequence[int]  # of its tasks in the training split
    given: Given  # what its engine was and is given
    thread: threading.Thread
    rollout: Future

    @classmethod
    def start(cls, play: Callable[[], Rollout], step: int, places: Sequence[int], given: Given) -> BackgroundRollout:
        """Begins `play`; `rollout` then holds what it returns or raises."""
        rollout = Future()

        def run() -> None:
            try:
                rollout.set_result(play())
            except BaseException as error:  # for whoever fetches it
                rollout.set_exception(error)

        thread = threading.Thread(target=run, name="marl_llm plays beside an update", daemon=True)
        thread.start()
        return cls(step, places, given, thread, rollout)


@dataclasses.dataclass(eq=False)
class _Group:
    """All episodes of one task."""

    place: int  # of the task in the training split
    task: Task
    given: Given  # what its engine was and is given
    episodes: list[Episode] = dataclasses.field(default_factory=list)


class EpisodeQueue:
    """Begins groups of episodes and gives each step those that are complete first; none is older than one step.

    Args:
      controller: who plays; several of its rollouts are under way at once.
      plays: per task.
      tasks: of the training split.
    """

    def __init__(self, controller: Controller, plays: int, tasks: Tasks):
        self._controller, self._plays, self._tasks = controller, plays, tasks
        self._changed = threading.Condition()
        self._groups: dict[int, _Group] = {}  # by the task's number; late ones, and those of the step that is played
        self._complete: list[_Group] = []  # in the order in which they ended, and not yet given to a step
        self._error: BaseException | None = None
        self._rollouts: list[BackgroundRollout] = []
        self._behind: dict[str, list[int]] = {}  # step -> places that the step before left to it

    def play(self, step: int, first: int, count: int, over: int, given: Given) -> tuple[Rollout, dict[int, Given]]:
        """`count` groups: the late ones of the step before, and of tasks up to `first + count + over` those that are complete first.

        `given`: what the engine was given, which is returned for each task, as it was when the task was begun. Raises what a play raised,
        and `RolloutError` if every play failed.
        """
        if not 0 <= over < count:
            raise WorkflowError(f"oversample={over} must be below the {count} tasks of a step: all late plays belong to the next step")
        start, hung = time.perf_counter(), self._controller.hung()
        late = list(self._groups.values())
        known = self._behind.get(str(step), [])
        again = [] if late else known  # a run that was stopped between two checkpoints: they are played from their start
        self._begin(step, [*again, *range(first + len(known), first + count + over)], given)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (len(self._complete) >= count and all(group in self._complete for group in late))
            )
            if self._error:
                raise self._error
            early = [group for group in self._complete if group not in late]
            taken = sorted([*late, *early[: count - len(late)]], key=lambda group: group.place)
            for group in taken:
                self._complete.remove(group)
                del self._groups[group.task.number]
            left = sorted(group.place for group in self._groups.values())
        self._behind = {str(step): known, str(step + 1): left}
        episodes = [episode for group in taken for episode in sorted(group.episodes, key=lambda episode: episode.play)]
        self._controller.check_played(episodes)
        rollout = self._controller.joined(episodes, step, self._plays, time.perf_counter() - start, hung)
        return rollout, {group.task.number: group.given for group in taken}

    def _begin(self, step: int, places: Sequence[int], given: Given) -> None:
        groups = [_Group(place, self._tasks(place, 1)[0], given) for place in places]
        with self._changed:
            for group in groups:
                if group.task.number in self._groups:
                    raise WorkflowError(f"task {group.task.number} is late and would be begun a second time: tasks need distinct numbers")
                self._groups[group.task.number] = group
        tasks = [group.task for group in groups]
        play = functools.partial(self._controller.play, tasks, step, self._plays, share=True, heard=self._add)
        begun = BackgroundRollout.start(play, step, places, given)
        begun.rollout.add_done_callback(self._end)
        self._rollouts = [*(rollout for rollout in self._rollouts if rollout.thread.is_alive()), begun]

    def _add(self, episode: Episode) -> None:
        with self._changed:
            group = self._groups[episode.task.number]
            group.episodes.append(episode)
            if len(group.episodes) == self._plays:
                self._complete.append(group)
                self._changed.notify_all()

    def _end(self, rollout: Future) -> None:
        with self._changed:
            self._error = self._error or rollout.exception()
            self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> None:
        """Until nothing is under way: before an evaluation, which may need another engine, and at the end."""
        for rollout in self._rollouts:
            rollout.thread.join(seconds)

    def state(self) -> dict[str, Any]:
        """Places of tasks that are behind, as JSON, for the step to come and the one that was played last."""
        return {"behind": self._behind}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`: what was late is played from its start, under the parameters of then. Raises `AttributeError`,
        `LookupError`, `TypeError` or `ValueError` for a state that no queue leaves."""
        self._behind = {step: [check_count(place, f"behind.{step}") for place in places] for step, places in state["behind"].items()}
        if twice := [step for step, places in self._behind.items() if len(set(places)) < len(places)]:
            raise ValueError(f"behind.{twice[0]} has a task twice")


def bias_figures(rollout: Rollout, headline: str, left: int) -> dict[str, float]:
    """What was chosen in a step, and how late plays differ from the others; a figure that nobody has is left out.

    `oversample/left` groups were begun and are given to the next step; `oversample/late` groups came from the step before. Of plays that
    are not aborted: `oversample/{late,early}_{tokens,score,seconds}`, means of drawn tokens per play, of the headline and of the
    time taken.
    """
    late = [episode for episode in rollout.episodes if episode.step < rollout.step]
    early = [episode for episode in rollout.episodes if episode.step == rollout.step]
    figures = {"oversample/left": float(left), "oversample/late": float(len({episode.task.number for episode in late}))}
    for when, episodes in (("late", late), ("early", early)):
        if played := [episode for episode in episodes if not episode.aborted]:
            tokens = [sum(call.tokens.size for call in _drawn(episode)) for episode in played]
            scores = [episode_metrics(rollout.workflow, episode).get(headline, 0.0) for episode in played]
            figures[f"oversample/{when}_tokens"] = float(np.mean(tokens))
            figures[f"oversample/{when}_score"] = float(np.mean(scores))
            figures[f"oversample/{when}_seconds"] = float(np.mean([episode.seconds for episode in played]))
    return figures


def _drawn(episode: Episode) -> list[RoleCall]:
    """Calls of a play that a policy drew, each once, candidates included; none of an aborted play."""
    calls = {call.id: call for path in (*episode.trajectories, *episode.candidates) for call in path.calls}
    return [call for call in calls.values() if call.log_probs is not None]
