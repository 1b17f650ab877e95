"""Plays of an environment by players that are no models: how they are made, what they say, and how two of them are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from marl_llm.algorithms import Recipe, make_recipe
from marl_llm.reporting.files import Jsonable
from marl_llm.sampling.requests import SamplingParams
from marl_llm.workflows import Assignment, Controller, Environment, Episode, RoleCall, Rollout, Scripted, ScriptTurn, Task, Trajectory
from marl_llm.workflows.play import finish, run_all
from marl_llm.workflows.samples import SampleTable, sample_table

PLAYER = "player"
CHARACTERS_PER_TOKEN = 4  # where models bring their own vocabulary
Words = str | tuple[int, ...]
Says = Callable[[ScriptTurn], Words]


def own_recipe() -> Recipe:
    """The recipe of games that come without a config, as `experiments/configs/game.py` has it."""
    return make_recipe("grpo", rewards="mixed", returns="outcome_plus_local")


class CheckError(ValueError):
    """The game cannot be checked at all; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """What is checked, and how much of it is played.

    Attributes:
      environment: a workflow with its tasks; `games.hosted.hosted` makes one of a value-state game.
      tasks, plays: of the scripted and of the random player: plays of each task.
      few: tasks of every other check.
      held_out: tasks of each split that are compared with those of the others.
      bound: the largest absolute reward of one call.
      zero_sum: whether the rewards of all roles in one play must add up to 0.
      recipe: how it is to be trained.
    """

    environment: Environment
    tasks: int = 16
    plays: int = 4
    few: int = 4
    held_out: int = 64
    bound: float = 10.0
    zero_sum: bool = False
    recipe: Recipe = dataclasses.field(default_factory=own_recipe)

    def __post_init__(self):
        if min(self.tasks, self.few, self.held_out) < 2 or self.plays < 2 or self.bound <= 0:
            raise CheckError("a check needs at least 2 tasks, 2 plays of each and a bound above 0")
        tooled = [name for name, role in self.environment.workflow.roles.items() if role.tools]
        if tooled and self.environment.renderer is None:
            why = "its scripted player needs the environment's renderer, a chat format, to call them"
            raise CheckError(f"role {tooled[0]!r} calls tools within its response, and {why}: it cannot be checked")

    @functools.cached_property
    def honest(self) -> tuple[Episode, ...] | None:
        """Plays of the scripted player; None where the environment has none."""
        return None if self.environment.script is None else self.play(self.draw(self.tasks), self.environment.script, self.plays)

    @functools.cached_property
    def random(self) -> tuple[Episode, ...] | None:
        """Plays of the random player; None where the environment has none."""
        player = self.environment.random_player
        return None if player is None else self.play(self.draw(self.tasks), player, self.plays)

    @property
    def says(self) -> Says:
        """The best player that there is: the scripted one, else the random one, else one that says nothing."""
        return self.environment.script or self.environment.random_player or silent

    def draw(self, count: int) -> list[Task]:
        """The first training tasks."""
        return self.environment.tasks("train", 0, count)

    def play(self, tasks: Sequence[Task], says: Says, plays: int = 1, **options: Any) -> tuple[Episode, ...]:
        """Plays every task, also where all plays are aborted. `options` are those of `Controller`. Raises `WorkflowError`."""
        environment = self.environment
        assignment = Assignment(dict.fromkeys(environment.workflow.roles, PLAYER), {PLAYER: Scripted(says)})
        renderer = {} if environment.renderer is None else {PLAYER: environment.renderer}
        options = {"attempts": 1, "settings": SamplingParams(), **options}
        with Controller(environment.workflow, assignment, None, renderer, **options) as controller:
            jobs = [controller.episode(task, 0, play, plays) for task in tasks for play in range(plays)]
            return tuple(finish(run_all(jobs)))

    def table(self, episodes: Sequence[Episode], plays: int) -> SampleTable:
        """The samples of these plays."""
        assignment = Assignment(dict.fromkeys(self.environment.workflow.roles, PLAYER))
        return sample_table(Rollout(self.environment.workflow, assignment, 0, plays, tuple(episodes), 0.0), training=(PLAYER,))

    def score(self, path: Trajectory) -> float:
        """The headline of one trajectory."""
        return float(self.environment.workflow.metrics[self.environment.headline](path))


# --- players ---------------------------------------------------------------------------------------------------------------------------


def silent(turn: ScriptTurn) -> Words:
    """Says nothing."""
    del turn
    return ""


def again(episodes: Sequence[Episode]) -> Says:
    """A player that replays recorded calls on any path and in any play, by task and request number."""
    calls: dict[tuple[int, int], RoleCall] = {}
    for episode in episodes:
        for event in episode.events() or episode.remains:
            if isinstance(event, RoleCall):
                calls.setdefault((episode.task.number, event.request_number), event)

    def says(turn: ScriptTurn) -> Words:
        call = calls.get((turn.seed[1], turn.seed[3]))
        if call is None:
            return ""
        return tuple(call.tokens.tolist()) if turn.role.speaks_ids else call.text

    return says


def heard_by(says: Says, heard: list[tuple[ScriptTurn, str]]) -> Says:
    """The same player; appends its prompts to `heard`, also in plays that end in an error."""

    def noted(turn: ScriptTurn) -> Words:
        heard.append((turn, "\n".join(message.content for message in turn.messages)))
        return says(turn)

    return noted


# --- comparing -------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """The process-wide random generators of Python and NumPy in another state; afterwards they are as before."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global one is the point)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def plain(value: Any) -> str:
    """A value as text that is equal for equal values."""

    def default(item: Any) -> Any:
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        if isinstance(item, Jsonable):
            return item.to_json()
        return sorted(map(repr, item)) if isinstance(item, set | frozenset) else repr(item)

    return json.dumps(value, sort_keys=True, default=default)


def happened(episode: Episode) -> list[str]:
    """A play as lines that can be compared with another play's: one per event of each path, without the paths' numbers."""
    if episode.aborted:
        return [f"aborted: {failure.node}: {failure.kind}" for failure in episode.failures]
    return [line for path in episode.trajectories for line in lines_of(path)]


def lines_of(path: Trajectory) -> list[str]:
    """One line per event of a trajectory, and one for its end."""
    lines = []
    for event in path.events:
        if isinstance(event, RoleCall):
            pay = path.earned.get(event.id)
            paid = None if pay is None else [pay.team, pay.local, dict(pay.components)]
            lines.append(f"{event.node} read {event.prompt!r} and said {event.text!r}: {plain([event.writes, event.illegal, paid])}")
        else:
            lines.append(f"{event.node} wrote {plain(event.writes)}")
    return [*lines, f"end: {plain(path.fields)}"]


def first_difference(first: Sequence[str], second: Sequence[str]) -> str | None:
    """Where two plays differ, in words; None if they do not."""
    for a, b in zip(first, second):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            cut = slice(max(0, at - 30), at + 50)
            return f"{a.split(' ')[0]}: …{a[cut]!r} against …{b[cut]!r}"
    return None if len(first) == len(second) else f"{len(first)} events against {len(second)}"


def pays(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Role -> what each of its calls was paid, team and local, in plays that are not aborted."""
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        for path in episode.trajectories:
            for call in path.calls:
                rewards.setdefault(call.role, []).append(path.earned[call.id].team + path.earned[call.id].local)
    return rewards


def mean(values: Sequence[float]) -> float:
    """The mean, 0 of none."""
    return float(np.mean(values)) if len(values) else 0.0


def cut_to(turn: ScriptTurn, text: str, renderer: Any) -> Words:
    """What a model could have said of a text: no more than the role's budget, its stop token included."""
    most = turn.role.max_tokens
    if renderer is None:
        return text[: most * CHARACTERS_PER_TOKEN]
    text = text.encode("utf-8", "replace").decode()
    ids = renderer.tokenizer.encode(text[: most * 16])[: most - 1]
    return (*ids, renderer.stop_ids[0]) if turn.role.speaks_ids else renderer.tokenizer.decode(ids)
