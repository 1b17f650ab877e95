"""Who plays whom: the assignment σ from roles to models (UnityMAS-O, Eq. 3), and which models train when. Data, apart from the workflow.

    Assignment({"plan": "a", "answer": "a", "search": "b"})                                   # partly shared
    shared(workflow, "policy"), separate(workflow)                                            # the two ends
    Assignment({"plan": "a", "judge": "gpt"}, {"gpt": Outside(client)})                       # an outside model
    Assignment({"plan": "a", "code": "b"}, {"b": Inside(trained=False)})                      # a frozen role
    Assignment({"plan": "a", "code": "b"}, schedule=alternate(("a", 10), ("b", 10)))          # one after the other

Two roles that play one model share its parameters, its optimizer and its buffer; nothing else about them is shared.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from marl_llm.hints import suggestion
from marl_llm.text import Message
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.roles import Fields, Role


@runtime_checkable
class ChatModel(Protocol):
    """A model outside this program; `marl_llm.tools.ChatClient` is one."""

    async def acomplete(self, messages: Any, draw: int = 0, **options: Any) -> Any:
        """A `ToolResult` of a reply with `text` and `finish_reason`."""
        ...


@dataclasses.dataclass(frozen=True)
class ScriptTurn:
    """What a scripted player sees when it is its turn.

    `seed` is the call's identity, that of the request a model would get.
    """

    role: Role
    node: str  # the role's place in the workflow
    fields: Fields  # the state, hidden fields included: a teacher may know the answer
    messages: tuple[Message, ...]
    turn: int
    seed: tuple[int, ...]

    @property
    def random(self) -> random.Random:
        """A generator of this call's own, the same whenever the call is played."""
        return random.Random(repr(self.seed))


@dataclasses.dataclass(frozen=True)
class Inside:
    """A model of this program, reached through the sampling engine under its name. `trained=False` freezes it."""

    trained: bool = True


@dataclasses.dataclass(frozen=True)
class Outside:
    """A model outside of this program, reached through a chat client. It has no tokens here and is never trained."""

    client: ChatModel
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # beside max_tokens, temperature, top_p and stop


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A function that plays: a teacher for the supervised warm-up, a random player, an ablation. It is never trained by reinforcement.

    It returns the response as text, or as the ids that a role which speaks ids is to say.
    """

    play: Callable[[ScriptTurn], str | tuple[int, ...]]


Model = Inside | Outside | Scripted


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which models train at a step: phases of (models, steps), again and again. No phases: all of them, always."""

    phases: tuple[tuple[tuple[str, ...], int], ...] = ()

    def __post_init__(self):
        for models, steps in self.phases:
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1 or not models:
                raise WorkflowError(f"schedule: a phase is (models, steps) with at least one of each, not ({models!r}, {steps!r})")

    def at(self, step: int, models: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `models` that train at this step, from 0."""
        if step < 0:
            raise ValueError(f"step {step} is below 0")
        if not self.phases:
            return models
        place = step % sum(steps for _, steps in self.phases)
        for training, steps in self.phases:
            if place < steps:
                return tuple(model for model in models if model in training)
            place -= steps
        raise AssertionError("a place below the sum lies in a phase")


def alternate(*phases: tuple[str | tuple[str, ...], int]) -> Schedule:
    """Spells of (model or models, steps), in turn."""
    return Schedule(tuple(((models,) if isinstance(models, str) else tuple(models), steps) for models, steps in phases))


@dataclasses.dataclass(frozen=True)
class Assignment:
    """σ.

    Attributes:
      roles: role -> name of the model that plays it.
      models: name -> what it is; a name without an entry is a trained `Inside`.
      schedule: which models train when.

    Raises:
      WorkflowError: a model that plays nobody, or a schedule of models that do not train or never gives one its turn.
    """

    roles: Mapping[str, str]
    models: Mapping[str, Model] = dataclasses.field(default_factory=dict)
    schedule: Schedule = Schedule()

    def __post_init__(self):
        for name in self.models:
            if name not in self.roles.values():
                hint = suggestion(name, self.roles.values())
                raise WorkflowError(f"assignment: the model {name!r} plays no role: take it out; {hint}")
        scheduled = [name for models, _ in self.schedule.phases for name in models]
        for name in scheduled:
            if name not in self.trained:
                raise WorkflowError(f"schedule: {name!r} is no trained model of this assignment, {suggestion(name, self.trained)}")
        for name in self.trained if scheduled else ():
            if name not in scheduled:
                raise WorkflowError(f"schedule: the model {name!r} never trains: give it a phase, or freeze it with Inside(trained=False)")

    def model(self, role: str) -> Model:
        """Who plays the role."""
        return self.models.get(self.roles[role], Inside())

    @property
    def policies(self) -> tuple[str, ...]:
        """Models that the sampling engine has to serve, in the order of the roles."""
        return tuple(dict.fromkeys(name for name in self.roles.values() if isinstance(self.models.get(name, Inside()), Inside)))

    @property
    def trained(self) -> tuple[str, ...]:
        """Models that train at some step, in the order of the roles."""
        return tuple(name for name in self.policies if self.models.get(name, Inside()).trained)

    def training(self, step: int) -> tuple[str, ...]:
        """Models that train at this step."""
        return self.schedule.at(step, self.trained)

    def check(self, workflow: Workflow) -> None:
        """Raises `WorkflowError` naming a role that nobody plays, that the workflow does not have, or whose player cannot play it."""
        for role in workflow.roles:
            if role not in self.roles:
                raise WorkflowError(f"the role {role!r} of workflow {workflow.name!r} is unassigned: name the model that plays it")
        for role in self.roles:
            if role not in workflow.roles:
                raise WorkflowError(f"assignment: workflow {workflow.name!r} has no role {role!r}, {suggestion(role, workflow.roles)}")
        for name, role in workflow.roles.items():
            if role.tools and isinstance(self.model(name), Outside):
                raise WorkflowError(f"the role {name!r} calls tools within its response, which an Outside model cannot")
            if role.speaks_ids and isinstance(self.model(name), Outside):
                raise WorkflowError(f"the role {name!r} reads and says ids, which an Outside model has none of; play the game in text")


def shared(workflow: Workflow, model: str = "policy") -> Assignment:
    """One model plays everybody."""
    return Assignment(dict.fromkeys(workflow.roles, model))


def separate(workflow: Workflow) -> Assignment:
    """Each role has a model of its own, of its own name."""
    return Assignment({role: role for role in workflow.roles})
