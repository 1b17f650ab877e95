"""A team whose episodes a foreign program plays, in runs like all others: validated, checkpointed, resumed, viewed."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.sampling.requests import SamplingParams
from marl_llm.serving import PolicyAnswers, policy_answers
from marl_llm.serving.episodes import EpisodeServer, ForeignEpisode
from marl_llm.tools.results import FailureKind
from marl_llm.training.attached import ABORTS, AttachOptions, check_recipe, play_all
from marl_llm.training.batch import Batch
from marl_llm.training.hosted import HostedTeam
from marl_llm.training.served import CurrentEngine
from marl_llm.workflows import (
    Assignment,
    Environment,
    Episode,
    Inside,
    Renderer,
    Rollout,
    RolloutError,
    Task,
    Trajectory,
    Workflow,
    WorkflowError,
)
from marl_llm.workflows.nodes import PAID
from marl_llm.workflows.play import finish
from marl_llm.workflows.program_team import TASK
from marl_llm.workflows.rewards import earned
from marl_llm.workflows.trajectory import FailedAttempt, RoleCall

TIMEOUT_S = 120.0  # of one episode, where `PlayOptions.timeout_s` is None
PROGRAM = "program"  # the node that a failure names


class AttachedTeam(HostedTeam):
    """See the module's text and `HostedTeam`: its environment has a `program`.

    Raises:
      WorkflowError: as `HostedTeam`; a recipe that samples a tree or a nucleus; a role whose player is no model of this program.
    """

    def play(self, step: int, first: int, count: int, over: int = 0) -> Batch:
        """See `Team.play`. Further figures: `aborted/<reason>`, episodes for each of `ABORTS`; `refused`, requests and pays that were
        refused; `relayed`, `forked` and `reencoded`, prompt tokens (docs/attach.md)."""
        batch = super().play(step, first, count, over)
        if aborted := [episode for episode in batch.rollout.episodes if episode.aborted]:
            share = f"{len(aborted)} of {len(batch.rollout.episodes)} episodes were aborted"
            print(f"step {step + 1}: {share}; the first: {aborted[0].failures[-1].message}", file=sys.stderr)
        return dataclasses.replace(batch, figures=batch.figures | batch.rollout.counts)

    def _controller(
        self,
        engine: CurrentEngine | None,
        assignment: Assignment,
        settings: SamplingParams,
        branching: Mapping[str, int] | None = None,
        pick: str | None = None,
        workflow: Workflow | None = None,
    ) -> ProgramController:
        """See `HostedTeam._controller`."""
        check_recipe(self.options.recipe)
        play = self._options
        options = AttachOptions(TIMEOUT_S if play.timeout_s is None else play.timeout_s, play.concurrency)
        return ProgramController(self.environment, assignment, engine, self._renderers(), settings, options)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ProgramRollout(Rollout):
    """A rollout that a foreign program played."""

    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)  # figures by name that its episodes do not hold


class ProgramController:
    """Plays the episodes of an environment's program, in the place of a `Controller`.

    Args:
      environment: with a program.
      assignment: role -> model; all are models of this program.
      engine: that has these models.
      renderer: model -> how it reads and writes.
      settings: how tokens are drawn, whatever the program asks for.
      options: time limit and number of episodes at once.

    Raises:
      WorkflowError: a role whose player is no model of this program.
    """

    def __init__(
        self,
        environment: Environment,
        assignment: Assignment,
        engine: CurrentEngine | None,
        renderer: Mapping[str, Renderer],
        settings: SamplingParams,
        options: AttachOptions,
    ):
        for role in environment.workflow.roles:
            if engine is None or not isinstance(assignment.model(role), Inside):
                raise WorkflowError(f"the role {role!r} is no model of this program: a foreign program asks outside models itself")
        self.workflow, self.assignment, self._program = environment.workflow, assignment, environment.program
        self._engine, self._renderer, self._settings, self._options = engine, renderer, settings, options

    def close(self) -> None:
        """Nothing is left to close: each rollout closes its server."""

    def __enter__(self) -> ProgramController:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def play(self, tasks: Sequence[Task], step: int = 0, plays: int = 1, *, share: bool = False) -> ProgramRollout:
        """Plays every task `plays` times; see `Controller.play`. Raises `RolloutError` if every episode was aborted."""
        start, which = time.perf_counter(), [(task, number) for task in tasks for number in range(plays)]
        asked = [((step, task.number, number), task.fields[TASK]) for task, number in which]
        with EpisodeServer(self._answers(), self._settings.temperature, concurrency=self._options.concurrency) as server:
            played = finish(play_all(server, self._program, asked, self._options))
            refused = server.stats()["refused"]
        episodes = tuple(self._episode(task, step, number, played_task) for (task, number), played_task in zip(which, played, strict=True))
        if not share:
            self.check_played(episodes)
        return ProgramRollout(
            self.workflow, self.assignment, step, plays, episodes, time.perf_counter() - start, counts=_counts(played, refused)
        )

    def check_played(self, episodes: Sequence[Episode]) -> None:
        """Raises `RolloutError` if there are episodes and every one was aborted."""
        if episodes and all(episode.aborted for episode in episodes):
            message = episodes[0].failures[-1].message
            raise RolloutError(f"all {len(episodes)} episodes of the program were aborted; the first: {message}")

    def _answers(self) -> dict[str, PolicyAnswers]:
        """Role -> who answers."""
        answers = {}
        for name, role in self.workflow.roles.items():
            model, limits = self.assignment.roles[name], dict(max_prompt=role.max_prompt, max_tokens=role.max_tokens)
            limits["timeout_s"] = self._options.timeout_s  # a reply may take as long as its play
            answers[name] = policy_answers(self._engine.engine, model, self._renderer[model], **limits)
        return answers

    def _episode(self, task: Task, step: int, number: int, played: ForeignEpisode) -> Episode:
        turns: collections.Counter[str] = collections.Counter()
        calls = []
        for order, line in enumerate(played.replies):
            calls.append(self._call(line, number, order, turns[line["model"]]))
            turns[line["model"]] += 1
        if played.pay is None:
            kind = FailureKind.DEADLINE.value if played.aborted == "late" else "team"
            failure = FailedAttempt(PROGRAM, kind, f"{played.aborted}: {played.message}")
            return Episode(task, step, number, (), (failure,), remains=tuple(calls))
        by_role = played.pay.get("rewards", {})
        local = {role: [float(by_role[role])] * turns[role] for role in by_role}
        paid = {"team": float(played.pay.get("reward", 0.0)), "local": local, "error": "", "metrics": {}}
        fields, roles = {**task.fields, PAID: paid}, tuple(self.workflow.roles)
        path = Trajectory(task, tuple(calls), fields, max(turns.values()), number, roles=roles)
        return Episode(task, step, number, (dataclasses.replace(path, earned=earned(self.workflow, path)),))

    def _call(self, line: Mapping[str, Any], play: int, order: int, turn: int) -> RoleCall:
        """A reply as it is recorded, as a role's call."""
        role, name = line["model"], f"{line['model']}.{turn}/{play}"
        model, prompt = self.assignment.roles[role], tuple(line["prompt"])
        return RoleCall(
            id=name, node=role, role=role, agent=list(self.workflow.roles).index(role), model=model, parents=(), turn=turn,
            request_number=order, items=(), group=name, choice=0, branch=play, seed=(),
            prompt=self._renderer[model].tokenizer.decode(prompt[line.get("relayed", 0) :]), prompt_ids=prompt, text=line["text"],
            tokens=np.asarray(line["ids"], np.int32), log_probs=np.asarray(line["log_probs"]),
            sampled_log_probs=np.asarray(line["sampled_log_probs"]), finish=line["finish_reason"], version=line["version"], writes={},
            illegal=None,
        )  # fmt: skip


def _counts(played: Sequence[ForeignEpisode], refused: int) -> dict[str, float]:
    """The figures of a rollout that only its server knows."""
    aborts = collections.Counter(episode.aborted for episode in played if episode.pay is None)
    counts = {f"aborted/{reason}": float(aborts[reason]) for reason in ABORTS} | {"refused": float(refused)}
    for name in ("relayed", "forked", "reencoded"):
        counts[name] = float(sum(line.get(name, 0) for episode in played for line in episode.replies))
    return counts


__all__ = ["AttachedTeam", "ProgramController", "ProgramRollout"]
