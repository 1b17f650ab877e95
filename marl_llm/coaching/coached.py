"""A workflow with a coach: any workflow can be coached, and none has to change for it.

    workflow = coached(world.workflow, rubric_coach(world.guide), world.guide)
    Controller(workflow, ...)                       # every action asked once; scores in the trajectories, pay in the table of samples

The coach is a `Scorer` of the name "coach" and `rewards.coach_score` pays what it says. The workflow itself stays as it is for the warm
start and for evaluations, which need no coach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from marl_llm.coaching.coach import Coach
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.rewards import COACH, coach_score
from marl_llm.workflows.scoring import Scorer
from marl_llm.workflows.views import CoachGuide


def coached(
    workflow: Workflow,
    coach: Coach,
    guide: CoachGuide | None = None,
    *,
    when: str | None = None,
    truth: str = "none",
    missing: str = "void",
    weight: float | int | None = None,
    deadline_s: float | int = 300.0,
    history: Callable[[], Mapping[str, float]] | None = None,
) -> Workflow:
    """The workflow with a coach.

    Args:
      when: "action" or "end"; None: as the guide says, else "end".
      truth, missing, history: see `Scorer`.
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
    scorer = Scorer(COACH, coach.score, None, moment, truth, deadline_s, missing, history)
    own = () if pays else (coach_score(0.1 if weight is None else weight),)
    return dataclasses.replace(workflow, scorers=(*workflow.scorers, scorer), rewards=(*workflow.rewards, *own))
