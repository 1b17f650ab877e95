"""Trains the models that a foreign program asks: `marl_llm.attach`. The run is one like all others.

    import marl_llm as ml

    async def play(task, client):
        ...  # asks client.base_url with any client of OpenAI's API, the role as model; returns the reward

    ml.attach({"solver": "models/smollm2", "checker": "models/smollm2"}, play, "tasks.jsonl", steps=50, workdir="runs/app")

`play` may be a command too, which `marl attach` takes behind `--`; `Command(parts, stays=True)` is one whose processes stay.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from marl_llm.data_files import read_rows
from marl_llm.games import make_game
from marl_llm.runs.api import Results, train
from marl_llm.runs.command import ConfigError
from marl_llm.tools.commands import CommandProgram
from marl_llm.tools.workers import WorkerProgram
from marl_llm.workflows import Environment, ProgramTeam, WorkflowError

if TYPE_CHECKING:
    from marl_llm.algorithms import Recipe

COMMAND = "marl_llm.runs.attach:command_team"  # the game of a run whose program is a command
PROCESSES = 8  # of a command at once, unless rollout.concurrency says otherwise
CONCURRENCY = 64  # episodes of an async function at once, unless rollout.concurrency says otherwise


@dataclasses.dataclass(frozen=True)
class Command:
    """A program that plays episodes.

    Attributes:
      parts: program and arguments.
      stays: whether its processes stay and read a line of JSON per episode (`marl_llm.tools.workers`), or one is started for each.
    """

    parts: Sequence[str]
    stays: bool = False


def attach(
    roles: Mapping[str, Any],
    play: Callable[..., Any] | Sequence[str] | Command,
    tasks: str | os.PathLike | Sequence[Any] | Mapping[str, Sequence[Any]],
    recipe: str | Recipe | Mapping = "grpo",
    *,
    steps: int,
    workdir: str | os.PathLike,
    **options: Any,
) -> Results:
    """Trains the models of a program's roles on the episodes that it plays, and returns the final evaluation.

    Called again with the same arguments it continues the run, as `train` does. Of the tasks 65 % train, 15 % validate and 20 % are the
    test; which is which follows from their content.

    Args:
      roles: role -> its model, as `train` takes them. The role is the model's name in requests.
      play: `async def play(task, client)`: asks at `client.base_url` with `client.api_key`, and returns the team's reward, or
        `{"reward": 1.0, "rewards": {"solver": 0.5}}`, or None where it posted the reward itself (docs/attach.md). Or a command, program
        and arguments, that is run once per episode (`marl_llm.tools.commands`), or a `Command`; its tasks are a file.
      tasks: a file of JSON lines, or rows; each is what `play` is given. Split -> rows: the splits are yours.
      recipe: as `train` takes it, one that samples no tree.
      steps, workdir: as `train` takes them.
      options: as `train` takes them; `rollout` has `tasks`, `timeout_s` (None: 120) and `concurrency` (64, of commands 8) of episodes,
        `max_prompt` (2,048) and `max_tokens` (256) of requests.

    Raises `ConfigError` and `TrainingError` as `train`.
    """
    if not roles:
        raise ConfigError("roles={} names no role: give role -> model, e.g. {'solver': 'models/smollm2'}")
    try:
        if callable(play):
            rows = read_tasks(tasks) if isinstance(tasks, str | os.PathLike) else tasks
            environment = ProgramTeam(tuple(roles), rows, name=_name(play, rows)).environment(play)
        else:
            environment = _command_environment(roles, play if isinstance(play, Command) else Command(play), tasks)
    except WorkflowError as error:
        raise ConfigError(str(error)) from error
    options["rollout"] = {"concurrency": CONCURRENCY if callable(play) else PROCESSES} | dict(options.get("rollout", {}))
    return train(environment, roles, recipe, steps=steps, workdir=workdir, **options)


def _command_environment(roles: Iterable[str], program: Command, tasks: Any) -> Environment:
    """The environment of a command. Raises `ConfigError` for a command that is none, and for tasks that are no file."""
    command = program.parts
    if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
        raise ConfigError(f"play={command!r:.80}: give an async function, or a command as a list, e.g. ['python', 'my_app.py']")
    if not isinstance(tasks, str | os.PathLike):
        raise ConfigError("tasks: those of a command are a file of JSON lines, which a resumed run reads again")
    where = os.path.abspath(tasks)
    return make_game(COMMAND, command=shlex.join(command), tasks=where, roles=",".join(roles), folder=os.getcwd(), stays=program.stays)


def command_team(command: str, tasks: str, roles: str, folder: str = ".", stays: bool = False) -> Environment:
    """The environment of a command, as a run's config names it.

    Args:
      command: as a shell would read it; no shell does.
      tasks: a file of JSON lines.
      roles: names, with commas between.
      folder: where the command is started.
      stays: see `Command`.
    """
    kind = WorkerProgram if stays else CommandProgram
    program = kind(shlex.split(command), folder)
    return ProgramTeam(tuple(roles.split(",")), read_tasks(tasks), name="command").environment(program, program.close)


def read_tasks(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a task file. Raises `ConfigError` for a file that is not there, or holds no rows."""
    try:
        rows = list(read_rows(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tasks={os.fspath(path)!r}: {error}") from error
    if not rows:
        raise ConfigError(f"tasks={os.fspath(path)!r} has no rows: write a JSON object per line")
    return rows


def _name(play: Callable[..., Any], rows: Any) -> str:
    """The team's name in the run's config: with other tasks it is another run."""
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True, default=repr).encode()).hexdigest()
    return f"{getattr(play, '__name__', type(play).__name__)}_{digest[:8]}"
