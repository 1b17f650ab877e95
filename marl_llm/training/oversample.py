"""Over-started steps of hosted play: more tasks are begun than a step trains on, and it trains on those that are complete first.

Groups that are late go on while the step is learned from, and belong to the next step, which waits for them. So no task is dropped, every
task is trained on once, and none later than one step after it was begun. Which tasks are late depends on time; that it is a choice is
counted: `bias_figures` compares late plays with the others of their step.

A late play makes its later calls with the parameters of the next step (the engine finishes a request under the parameters that it was
admitted with, `Engine.set_params`), so each sample has the version that its own request met. With `PlayOptions.weight_update="in_flight"`
requests under way go on with the new ones, in a play that is made ahead too, and a sample has the version that drew its first token.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from marl_llm.algorithms import Recipe
from marl_llm.sampling.sequences import WEIGHT_UPDATES
from marl_llm.training import processes
from marl_llm.training.mesh import own_mesh
from marl_llm.workflows import Controller, Rollout, Task, WorkflowError
from marl_llm.workflows.metrics import episode_metrics
from marl_llm.workflows.trajectory import Episode, RoleCall

Tasks = Callable[[int, int], list[Task]]  # (first, count) -> tasks of the training split
Given = Mapping[str, list[int]]  # model -> versions of the parameters that the engine was given, in order


def conflict(oversample: int, max_staleness: int, recipe: Recipe, *, coached: bool, batch_invariant: bool, served: Sequence[str]) -> str:
    """Why `oversample` cannot be had beside these; empty if it can."""
    reasons = (
        (max_staleness, "max_staleness=1 already plays a whole step beside an update; use one of them"),
        (recipe.rollout_correction == "none", "late plays meet the parameters of before an update, which the loss must weigh: set "
         "recipe.rollout_correction=truncate (or mask)"),
        (recipe.joint == "cross", "recipe.joint='cross' was not tried with plays of two steps"),
        (coached, "a coach is told of whole steps"),
        (batch_invariant, "batch_invariant promises equal bytes, and who is late depends on time"),
        (served, f"model {served[0] if served else ''} is drawn by a server, which refuses answers begun before a push of parameters"),
    )  # fmt: skip
    return next((f"oversample={oversample}: {why}" for wrong, why in reasons if oversample and wrong), "")


def weight_update_conflict(
    weight_update: str, oversample: int, max_staleness: int, recipe: Recipe, *, batch_invariant: bool, served: Sequence[str],
    several: bool = False
) -> str:
    """Why `PlayOptions.weight_update` cannot be had beside these; empty if it can. `several`: processes."""
    if weight_update not in WEIGHT_UPDATES:
        return f"weight_update={weight_update!r} is unknown; the ways are {', '.join(WEIGHT_UPDATES)}"
    reasons = (
        (batch_invariant, "batch_invariant promises equal bytes, and when parameters arrive depends on time; use weight_update=blocking"),
        (not oversample and not max_staleness,
         "it would have no effect: nothing is under way when parameters change; set max_staleness=1 or oversample"),
        (recipe.rollout_correction == "none",
         "responses are drawn with the parameters of before and after an update, which the loss must weigh: "
         "set recipe.rollout_correction=truncate (or mask)"),
        (served, f"model {served[0] if served else ''} is drawn by a server, which takes parameters only while nothing is under way"),
        (several, "several processes would not take parameters at the same moment; use one, or weight_update=blocking"),
    )  # fmt: skip
    return next((f"weight_update={weight_update}: {why}" for wrong, why in reasons if weight_update == "in_flight" and wrong), "")


def met(given: Given, call: RoleCall) -> int:
    """Version of the parameters that drew a call's first token; 0 of a model that is not the team's own."""
    return given[call.model][call.version] if call.model in given else 0


def check_beside(max_staleness: int, oversample: int, mesh: Mesh, coach_trains: bool = False) -> None:
    """Raises `WorkflowError` where plays cannot go on beside an update: `PlayOptions.max_staleness` and `PlayOptions.oversample`."""
    if coach_trains and max_staleness:
        raise WorkflowError(
            f"max_staleness={max_staleness}: a coach that trains would change while it scores; use max_staleness=0, or a coach that "
            f"stays as it is"
        )
    name, asked = ("max_staleness", max_staleness) if max_staleness else ("oversample", oversample)
    if asked and (devices := own_mesh(mesh).size) > 1:
        raise WorkflowError(
            f"{name}={asked} needs one device in each process and found {devices}: an update and an engine that enter several devices in "
            f"different orders wait for each other; use one device, or {name}=0"
        )
    if oversample and processes.spans(mesh):
        raise WorkflowError(f"oversample={oversample} needs one process: several would not agree on who was late; use one, or oversample=0")


class Underway(NamedTuple):
    """A whole step that is being played beside the update of the one before (`PlayOptions.max_staleness`)."""

    asked: tuple[int, int, int]  # step, first, count
    given: Given  # what its engine was and is given
    thread: threading.Thread
    rollout: Future


@dataclasses.dataclass(eq=False)
class _Group:
    """All plays of one task."""

    place: int  # of the task in the training split
    task: Task
    step: int  # that began it
    episodes: list[Episode] = dataclasses.field(default_factory=list)
    versions: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)  # (task, call) -> of the parameters that it met


class OverStart:
    """Begins groups of plays and gives those of a step that are complete first.

    Args:
      controller: who plays; several of its rollouts are under way at once.
      plays: per task.
      tasks: of the training split.
      version: of the parameters that a call met; asked when its play has ended, while its engine is there.

    Attributes:
      versions: (task, call id) -> version, of the step that was given last.
    """

    def __init__(self, controller: Controller, plays: int, tasks: Tasks, version: Callable[[RoleCall], int]):
        self._controller, self._plays, self._tasks, self._version = controller, plays, tasks, version
        self.versions: dict[tuple[int, str], int] = {}
        self._changed = threading.Condition()
        self._under: dict[int, _Group] = {}  # by the task's number; late ones, and those of the step that is played
        self._complete: list[_Group] = []  # in the order in which they ended, and not yet given to a step
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._behind: dict[str, list[int]] = {}  # step -> places that the step before left to it

    def play(self, step: int, first: int, count: int, over: int) -> Rollout:
        """`count` groups: the late ones of the step before, and of tasks up to `first + count + over` those that are complete first.

        Raises what a play raised, and `RolloutError` if every play failed.
        """
        if not 0 <= over < count:
            raise WorkflowError(f"oversample={over} must be below the {count} tasks of a step: all late plays belong to the next step")
        began, hung = time.perf_counter(), self._controller.hung()
        late = list(self._under.values())
        known = self._behind.get(str(step), [])
        again = [] if late else known  # a run that was stopped between two checkpoints: they are played from their start
        self._begin(step, [*again, *range(first + len(known), first + count + over)])
        with self._changed:
            self._changed.wait_for(lambda: self._error or (len(self._complete) >= count and all(one in self._complete for one in late)))
            if self._error:
                raise self._error
            early = [one for one in self._complete if one not in late]
            taken = sorted([*late, *early[: count - len(late)]], key=lambda one: one.place)
            for one in taken:
                self._complete.remove(one)
                del self._under[one.task.number]
            left = sorted(one.place for one in self._under.values())
        self._behind = {str(step): known, str(step + 1): left}
        self.versions = {key: version for group in taken for key, version in group.versions.items()}
        episodes = [one for group in taken for one in sorted(group.episodes, key=lambda episode: episode.play)]
        self._controller.check_played(episodes)
        return self._controller.joined(episodes, step, self._plays, time.perf_counter() - began, hung)

    def _begin(self, step: int, places: Sequence[int]) -> None:
        groups = [_Group(place, self._tasks(place, 1)[0], step) for place in places]
        with self._changed:
            for one in groups:
                if one.task.number in self._under:
                    raise WorkflowError(f"task {one.task.number} is late and would be begun a second time: tasks need distinct numbers")
                self._under[one.task.number] = one
        tasks = [one.task for one in groups]

        def run() -> None:
            try:
                self._controller.play(tasks, step, self._plays, share=True, heard=self._heard)
            except BaseException as error:  # for whoever waits
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

        self._threads = [*(one for one in self._threads if one.is_alive()), threading.Thread(target=run, daemon=True)]
        self._threads[-1].start()

    def _heard(self, episode: Episode) -> None:
        with self._changed:
            group = self._under[episode.task.number]
            group.episodes.append(episode)
            group.versions |= {(episode.task.number, call.id): self._version(call) for call in _drawn(episode)}
            if len(group.episodes) == self._plays:
                self._complete.append(group)
                self._changed.notify_all()

    def wait(self, seconds: float | None = None) -> None:
        """Until nothing is under way: before an evaluation, which may need another engine, and at the end."""
        for thread in self._threads:
            thread.join(seconds)

    def state(self) -> dict[str, Any]:
        """Places of tasks that are behind, as JSON, for the step to come and the one that was played last."""
        return {"behind": self._behind}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`: what was late is played from its start, under the parameters of then."""
        self._behind = dict(state["behind"])


def bias_figures(rollout: Rollout, headline: str, left: int) -> dict[str, float]:
    """What was chosen in a step, and how late plays differ from the others; a figure that nobody has is left out.

    `oversample/left` groups were begun and are given to the next step; `oversample/late` groups came from the step before. Of plays that
    are not aborted: `oversample/{late,early}_{tokens,score,seconds}`, means of drawn tokens per play, of the headline and of the
    time taken.
    """
    out = {"oversample/left": float(left)}
    out["oversample/late"] = float(len({one.task.number for one in rollout.episodes if one.step < rollout.step}))
    for when in ("late", "early"):
        chosen = [one for one in rollout.episodes if (one.step < rollout.step) == (when == "late") and not one.aborted]
        if not chosen:
            continue
        drawn = [sum(call.tokens.size for call in _drawn(one)) for one in chosen]
        score = [episode_metrics(rollout.workflow, one).get(headline, 0.0) for one in chosen]
        for name, values in (("tokens", drawn), ("score", score), ("seconds", [one.seconds for one in chosen])):
            out[f"oversample/{when}_{name}"] = float(np.mean(values))
    return out


def _drawn(episode: Episode) -> list[RoleCall]:
    """Calls of a play that a policy drew, each once, candidates included; none of an aborted play."""
    calls = {call.id: call for path in (*episode.trajectories, *episode.candidates) for call in path.calls}
    return [call for call in calls.values() if call.log_probs is not None]
