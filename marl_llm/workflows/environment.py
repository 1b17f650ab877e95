"""Environments: a workflow with everything that it needs to be played again and again. What a trainer is given; it trains nothing itself.

    with make_game("fact_parallel", worlds=32) as environment:
        tasks = environment.tasks("train", 0, 32)          # tasks 0 ... 31 of the training split, the same at every call
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.workflows.assignment import ScriptTurn
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.renderer import Renderer
from marl_llm.workflows.splits import Tasks
from marl_llm.workflows.views import CoachGuide


@dataclasses.dataclass(frozen=True, eq=False)
class Environment:
    """A workflow, its tasks and tools, and who can play it without having learned it. A context manager: tools may own processes.

    Attributes:
      workflow: the team.
      tasks: (split, first, count) -> tasks `first ... first + count` of "train", "validation" or "test". A pure function; splits share
        no content (law 12).
      headline: the metric of the workflow that says how well the team did, in [0, 1].
      renderer: how models that are made for this environment read and write; None: models bring their own (a checkpoint's chat template).
      script: who plays every role in the supervised warm-up; None where there is no teacher.
      random_player: a player without skill that keeps the format; None where there is none.
      close: lets go of what the tools hold.
      guide: what a coach is told of the team, and its rubric; None: it cannot be coached.
      rivals: roles that play against each other; what the workflow pays one of them is its own result, from -1 (lost) to 1 (won). Empty
        for a team.
      picture: the fields at the end of a path as lines of text for people; None where there is nothing to draw.
      program: who plays whole episodes in the place of the workflow's body, see `ProgramTeam`; None: the body is played.

    Raises:
      WorkflowError: a headline that the workflow does not measure, tasks that are no function, a guide of other roles, or rivals that are
        no roles.
    """

    workflow: Workflow
    tasks: Tasks
    headline: str
    renderer: Renderer | None = None
    script: Callable[[ScriptTurn], str | tuple[int, ...]] | None = None
    random_player: Callable[[ScriptTurn], str | tuple[int, ...]] | None = None
    close: Callable[[], None] = lambda: None
    guide: CoachGuide | None = None
    rivals: tuple[str, ...] = ()
    picture: Callable[[Mapping[str, Any]], list[str] | None] | None = None
    program: Callable[..., Any] | None = None

    def __post_init__(self):
        name = self.workflow.name
        if not callable(self.tasks):
            raise WorkflowError(
                f"environment {name!r}: tasks is a {type(self.tasks).__name__}; it must be a function of (split, first, count)"
            )
        if self.headline not in self.workflow.metrics:
            known = ", ".join(self.workflow.metrics) or "none"
            raise WorkflowError(f"environment {name!r}: its headline {self.headline!r} is no metric of the workflow ({known})")
        if strangers := set(self.rivals) - set(self.workflow.roles):
            raise WorkflowError(f"environment {name!r}: its rivals {sorted(strangers)} are no roles of the workflow")
        if self.guide is not None:
            self.guide.check(self.workflow)

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
