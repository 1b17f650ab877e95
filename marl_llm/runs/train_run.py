"""Trains a team from one config: opens all that a run needs, in order, and closes it again. The loop is `marl_llm.runs.loop`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib
import shlex
import sys
import traceback

from ml_collections import config_dict

from marl_llm.activity import Heartbeat
from marl_llm.errors import DamagedError, TeacherError
from marl_llm.runs import checks, command, trust
from marl_llm.runs.building import begins_elsewhere, build_team, hardware_of, sources_of, start_jax, tools_of
from marl_llm.runs.command import ConfigError, TrainingError
from marl_llm.runs.continuing import Stopwatch, results_of, up_to
from marl_llm.runs.loop import TrainingRun, learn
from marl_llm.runs.stopping import GRACE_S, Stopping
from marl_llm.runs.workdir import open_workdir, process_log


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a run is started: what changes nothing of its results and is no part of its config.

    Attributes:
      config_file: where the config comes from, for the run's record.
      cache: directory of compiled programs; "" none; None: `building.CACHE`, unless the environment names another.
      game_dir: where the run directory keeps a user's file, if the game is to be read from there.
      grace_s: seconds from SIGTERM to the end of the process.
      step: of a run that continues, the checkpoint to go back to; None: the newest.
      distributed, lost_after_s: the processes of one run, "off" for one, and the silence after which one is lost (docs/pods.md).
    """

    config_file: str = ""
    cache: str | None = None
    game_dir: pathlib.Path | None = None
    grace_s: float = GRACE_S
    step: int | None = None
    distributed: str = "off"
    lost_after_s: float = 120.0

    def resume_command(self, workdir: pathlib.Path) -> str:
        """The command that continues the run in a directory; of many processes, this one's."""
        given = ["--trust"] * trust.asked()
        given += [f"--compilation_cache={self.cache}"] * (self.cache is not None)
        given += [f"--grace_s={self.grace_s:g}"] * (self.grace_s != GRACE_S)
        given += [f"--distributed={self.distributed}"] * (self.distributed != "off")
        return shlex.join(["python", "-m", "experiments.train", f"--resume={workdir}", *given])


def train_run(config: config_dict.ConfigDict, workdir: pathlib.Path, launch: Launch = Launch()) -> dict:
    """Runs a config to its end and returns the final evaluation. `marl_llm.cli.train` says what it writes into the directory.

    On many processes (`launch.distributed`) all run this; process 0 owns the directory, and what it decides or refuses holds for all.

    Raises `ConfigError` for a config that cannot be run and `TrainingError` for a run that cannot go on.
    """
    clock = Stopwatch()
    from marl_llm.runs.base import check
    from marl_llm.runs.resolve import resolve
    from marl_llm.runs.teachers import choose_steps, find_teachers

    check(config, launch.game_dir)
    from marl_llm.training import processes

    count = processes.start(launch.distributed, launch.lost_after_s)
    # before the game is made: an environment's index would start JAX with one device
    mesh = start_jax(config, launch.cache, count, launch.game_dir)
    from marl_llm.training import Checkpoints

    again = launch.resume_command(workdir)
    watch = processes.Watch(launch.lost_after_s if count > 1 else 0.0, again)
    beat = Heartbeat(_print_to_stderr) if processes.leads() else contextlib.nullcontext()
    with watch, beat, tools_of(config, count), resolve(config, launch.game_dir) as plan:
        if not plan.hosted:
            checks.devices(config, mesh.shape["data"])
        checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep, config.checkpoint.background)
        if begins_elsewhere(config.sft) and not checkpoints.steps():
            sources_of(config.sft, plan.assignment.trained)  # before a directory is made for a run that cannot begin
        choose_steps(config, workdir)
        teachers = None if checkpoints.steps() else find_teachers(config, plan)

        def open_directory() -> tuple[bool, list[int]]:
            continued = open_workdir(workdir, config, launch.config_file, hardware_of(mesh), plan.own_files, plan.headline)
            return continued, checkpoints.steps() if continued else []

        continues, done = processes.from_first(open_directory)
        done = up_to(done, launch.step)
        processes.check_shared(workdir)
        if (results := results_of(workdir, config, done)) is not None:
            print(f"{workdir} is complete; its report is {workdir / 'report.html'}", file=sys.stderr)
            return results
        try:
            stopping = Stopping(checkpoints, again, launch.grace_s)
            with process_log(workdir), stopping as stop, checkpoints, build_team(plan, config, mesh, teachers=teachers) as team:
                return _learn(TrainingRun(plan, config, workdir, team, checkpoints, clock, stop), done if continues else None)
        except Exception as error:
            if (explained := _explain(error, plan, workdir)) is None:
                raise
            raise explained from error
        finally:
            gc.unfreeze()


def _learn(run: TrainingRun, done: list[int] | None) -> dict:
    """See `learn`. A teacher that fails does so before anything of its step is learned: what came before it is kept."""
    try:
        return learn(run, done)
    except TeacherError:
        run.keep()
        raise


def _explain(error: Exception, plan, workdir: pathlib.Path) -> TrainingError | None:
    """A `TrainingError` of one line, with the traceback in a file; None for an error that says all itself, or is no user's to mend."""
    from marl_llm.training import processes
    from marl_llm.workflows import RolloutError

    reason = command.told(error, map(str, plan.own_files.values()))
    if reason is None or isinstance(error, ConfigError | TrainingError | OSError | DamagedError | processes.ProcessError):
        return None
    trace = workdir / ("error.txt" if processes.leads() else f"error_{processes.rank()}.txt")
    trace.write_text("".join(traceback.format_exception(error)))
    passes = isinstance(error, RolloutError | TeacherError)  # which another try need not meet again
    after = "Once that is mended, the same command goes on from the last checkpoint. " if passes else ""
    return TrainingError(f"{reason.rstrip('.')}. {after}The whole traceback is in {trace}")


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
