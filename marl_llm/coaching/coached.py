"""A workflow with a coach: any workflow can be coached, and none has to change for it.

    workflow = coached(environment.workflow, rubric_coach(environment.guide), environment.guide)
    Controller(workflow, ...)                       # every action asked once; scores in the trajectories, pay in the table of samples

The coach is a `Scorer` of the name "coach" and `rewards.coach_score` pays what it says. The workflow itself stays as it is for the warm
start and for evaluations, which need no coach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.coaching.coach import Coach, metrics_of
from marl_llm.coaching.history import History
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.rewards import COACH, coach_score
from marl_llm.workflows.scoring import Scorer
from marl_llm.workflows.trajectory import Trajectory
from marl_llm.workflows.views import CoachGuide


def coached(
    workflow: Workflow,
    coach: Coach,
    guide: CoachGuide | None = None,
    *,
    when: str | None = None,
    truth: str = "none",
    missing: str = "abort",
    weight: float | int | None = None,
    deadline_s: float | int = 300.0,
    history: Callable[[], Mapping[str, float]] | None = None,
    result: Callable[[Trajectory], float | int] | None = None,
) -> Workflow:
    """The workflow with a coach.

    Args:
      when: "action" or "end"; None: as the guide says, else "end".
      truth, missing, history, result: see `Scorer`.
      weight: of a score in the pay; None: 0.1, or what a reward of the workflow that reads the coach says.
      deadline_s: of one score with all attempts, time in queues not counted.

    Raises:
      WorkflowError: it is coached already, or has its own reward of the coach's scores and a weight is given.
    """
    if any(scorer.name == COACH for scorer in workflow.scorers):
        raise WorkflowError(f"workflow {workflow.name!r} has a coach already")
    pays = [reward for reward in workflow.rewards if COACH in getattr(reward, "scorers", ())]
    if pays and weight is not None:
        raise WorkflowError(f"weight={weight} would have no effect: workflow {workflow.name!r} has a reward of the coach's scores")
    moment = when or (guide.when if guide else "end")
    scorer = Scorer(COACH, coach.score, None, moment, truth, deadline_s, missing, history, result)
    own = () if pays else (coach_score(0.1 if weight is None else weight),)
    return dataclasses.replace(workflow, scorers=(*workflow.scorers, scorer), rewards=(*workflow.rewards, *own))


@dataclasses.dataclass(frozen=True, eq=False)
class Coaching:
    """Who coaches a team while it trains, and how; what a `HostedTeam` is given.

    Attributes:
      coach: see `Coach`.
      guide: of the environment.
      options: keyword arguments of `coached`.
      clients: what the coach asks through; closed with the team.
      models: what clients ask in this process; closed behind them.
      history: what the coach is told of the run so far; None: nothing.
      corrections: weight of a step towards what the coach would have said in the actions' place (MAPPA, 4.4); 0: no such step.
      trained: trains the coach beside the team, a `training.trained_coach.TrainedCoach`; None: the coach stays as it is.
    """

    coach: Coach
    guide: CoachGuide | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clients: tuple[Any, ...] = ()
    models: tuple[Any, ...] = ()
    history: History | None = None
    corrections: float = 0.0
    trained: Any = None

    def attach(self, workflow: Workflow) -> Workflow:
        """The workflow with this coach; raises as `coached`."""
        return coached(workflow, self.coach, self.guide, history=self.history, **self.options)

    def metrics(self) -> dict[str, float]:
        """Counts since it was made, by name: of the coach, and of its clients calls, cache hits, tokens, USD and seconds."""
        counts = dict(metrics_of(self.coach))
        for client in self.clients:
            for name, value in client.metrics("").items():
                name = name.removeprefix("/")
                counts[name] = counts.get(name, 0.0) + value
        return {f"coach/{name}": value for name, value in counts.items()}

    def looked(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Takes in the figures of a step that is over; returns `metrics`."""
        if self.history is not None:
            self.history.look(figures)
        return self.metrics()

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        return {} if self.history is None else {"history": self.history.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave; a checkpoint without a history is one that begins."""
        if self.history is not None:
            self.history.restore(state.get("history", ()))

    def close(self) -> None:
        """Ends the clients' threads and the models."""
        for opened in (*self.clients, *self.models):
            opened.close()


def check_coached(workflow: Workflow) -> None:
    """Refuses a workflow that pays a coach's scores while nobody coaches. Raises `WorkflowError`."""
    pays = any(COACH in getattr(reward, "scorers", ()) for reward in workflow.rewards)
    if pays and all(scorer.name != COACH for scorer in workflow.scorers):
        raise WorkflowError(f"workflow {workflow.name!r} pays a coach's scores and has no coach: set config.coach.kind, or use coached()")


def check_missing(workflow: Workflow, returns: str, scope: str) -> None:
    """Refuses to leave single actions out where a return sums over others: the sums would have holes.

    Raises:
      WorkflowError: naming the scorer and what to choose.
    """
    for scorer in workflow.scorers:
        if scorer.missing == "mask" and not (returns == "immediate" or (returns == "to_go" and scope == "token")):
            raise WorkflowError(
                f"scorer {scorer.name!r} says missing='mask', but returns={returns!r} adds up scores of several actions, and the sums "
                "would have holes: use missing='aborted', returns='immediate', or returns='to_go' with scope='token'"
            )
