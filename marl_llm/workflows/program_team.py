"""A team whose episodes a foreign program plays: it asks the roles through a server, in any order, and says what an episode was paid.

What it plays has no graph: the workflow names the roles, the task and the pay. `marl_llm.training.attached` plays it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.workflows.environment import Environment
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.function_team import ROLE_OPTIONS, paid_to_calls, paid_to_team, stripped, tasks_of_rows
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.nodes import PROMPT, REPLY, Call, FunctionNode
from marl_llm.workflows.renderer import Renderer
from marl_llm.workflows.roles import Role

TASK = "task"  # the field that holds a whole row
MOST_REQUESTS = 1000  # of a role in an episode, for the numbers of the workflow's requests; nothing is refused beyond
SIZES = {"max_prompt": 2048, "max_tokens": 256}  # of a role that says nothing else


@dataclasses.dataclass(frozen=True)
class ProgramTeam:
    """Makes the `Environment` of a program.

    Attributes:
      roles: names, which are the models that the program asks for, or role -> its `max_prompt` and `max_tokens`.
      tasks: rows, each what the program is given as its task, split by their content (65, 15 and 20 %); or split -> rows.
      headline: "reward", what the team was paid; as a share it is read within [0, 1].
      renderer: how models that have no chat format of their own read and write.
      name: of the team.

    Raises:
      WorkflowError: no roles, options that no role has, or a split without tasks.
    """

    roles: Sequence[str] | Mapping[str, Mapping[str, Any]]
    tasks: Sequence[Any] | Mapping[str, Sequence[Any]]
    renderer: Renderer | None = None
    name: str = "program"

    def environment(self, program: Callable[..., Any], close: Callable[[], None] = lambda: None) -> Environment:
        """The environment that `program` plays: awaited with a task and a client, see `marl_llm.training.attached`."""
        options = self.roles if isinstance(self.roles, Mapping) else dict.fromkeys(self.roles, {})
        if not options:
            raise WorkflowError(f"team {self.name!r} has no roles: name the models that the program asks for")
        for role, given in options.items():
            if strange := [option for option in given if option not in ROLE_OPTIONS]:
                raise WorkflowError(f"team {self.name!r}: role {role!r} has no option {strange[0]!r}; there are {', '.join(SIZES)}")
        roles = {role: Role(role, f"{{{PROMPT}}}", stripped, {REPLY: ""}, **SIZES | dict(given)) for role, given in options.items()}
        body = FunctionNode(self.name, _not_here, {role: Call(spec, role) for role, spec in roles.items()}, MOST_REQUESTS, 1.0)
        metrics = {"reward": paid_to_team}
        workflow = Workflow(self.name, body, (TASK,), rewards=(paid_to_calls,), metrics=metrics, score="at_end")
        return Environment(workflow, tasks_of_rows(self._rows(), ()), "reward", self.renderer, close=close, program=program)

    def _rows(self) -> Any:
        if isinstance(self.tasks, Mapping):
            return {split: [{TASK: row} for row in rows] for split, rows in self.tasks.items()}
        return [{TASK: row} for row in self.tasks]


async def _not_here(t: Any, task: Any) -> float:
    raise WorkflowError("a foreign program plays this team: train it, or play it with marl_llm.training")
