"""Trains the teams of a sweep in one program, each into a run directory of its own. `marl sweep` is the command.

Teams are played and updated together (`marl_llm.training.Sweep`). Files, checkpoints, evaluations and reports are those of
`marl_llm.runs.loop`, one team after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from marl_llm.activity import Heartbeat, doing
from marl_llm.runs import checks, loop
from marl_llm.runs.building import begins_elsewhere, build_team, hardware_of, sources_of, start_jax
from marl_llm.runs.command import ConfigError
from marl_llm.runs.continuing import Stopwatch, goes_on, results_of
from marl_llm.runs.stopping import Stopping
from marl_llm.runs.sweep_configs import SweptConfig
from marl_llm.runs.train_run import Launch
from marl_llm.runs.workdir import open_workdir, write_json

if TYPE_CHECKING:
    from marl_llm.reporting import Progress
    from marl_llm.training import Sweep


@dataclasses.dataclass(frozen=True)
class TeamNotes:
    """The progress of one team of a sweep: its lines carry its name. How far all are is the sweep's own line."""

    name: str
    progress: Progress

    def note(self, text: str) -> None:
        """Writes one lasting line."""
        self.progress.note(f"{self.name}: {text}")

    def update(self, step: int, **figures: Any) -> None:
        """Nothing to do: the sweep's line is updated once for all teams."""


class SweepCheckpoints:
    """The checkpoints that all runs of a sweep have: those that they can go on from together.

    Args:
      of_runs: `marl_llm.training.Checkpoints` of each.
    """

    def __init__(self, of_runs: Sequence[Any]):
        self.of_runs = of_runs

    def steps(self) -> list[int]:
        """Steps at which every run has a complete checkpoint, ascending."""
        return sorted(set.intersection(*(set(checkpoints.steps()) for checkpoints in self.of_runs)))

    def wait(self, only_if_done: bool = False) -> None:
        """See `Checkpoints.wait`."""
        for checkpoints in self.of_runs:
            checkpoints.wait(only_if_done)


_LAUNCH = Launch()


def train_sweep(teams: Sequence[SweptConfig], out: pathlib.Path, launch: Launch = _LAUNCH) -> dict[str, pathlib.Path]:
    """Trains every team and evaluates it; returns its run directory by name, below `out`.

    A sweep that was interrupted goes on from the newest checkpoint that all its runs have.

    Raises `ConfigError` for a config that cannot be run or swept, and for runs that cannot go on together; `TrainingError` for one that
    cannot go on at all.
    """
    from marl_llm.runs.base import check

    for swept in teams:
        check(swept.config)
    mesh = start_jax(teams[0].config, launch.cache)
    folders = {swept.name: out / swept.name for swept in teams}
    with contextlib.ExitStack() as opened, Heartbeat(lambda line: print(line, file=sys.stderr, flush=True)):
        checkpoints = SweepCheckpoints([opened.enter_context(_checkpoints_of(swept, folders[swept.name])) for swept in teams])
        stop = Stopping(checkpoints, "the same command", launch.grace_s)
        pairs = zip(teams, checkpoints.of_runs, strict=True)
        runs = [_open_run(swept, mesh, of_run, stop, opened) for swept, of_run in pairs]
        _check_alike(runs)
        continues = [_open_directory(run, launch, mesh) for run in runs]
        if all(continues) and None not in [results_of(run.workdir, run.config, run.checkpoints.steps()) for run in runs]:
            print(f"{out} is complete", file=sys.stderr)
            return folders
        done = _steps_to_continue(runs, checkpoints.steps(), continues)
        try:
            opened.enter_context(stop)
            _train(runs, done, list(mesh.devices.flat) if teams[0].config.devices else None)
        finally:
            gc.unfreeze()
    return folders


def _checkpoints_of(swept: SweptConfig, folder: pathlib.Path) -> Any:
    """The checkpoints of a team's run directory."""
    from marl_llm.training import Checkpoints

    return Checkpoints(folder / "checkpoints", swept.config.checkpoint.keep, swept.config.checkpoint.background)


def _open_run(swept: SweptConfig, mesh: Any, checkpoints: Any, stop: Stopping, opened: contextlib.ExitStack) -> loop.TrainingRun:
    """A run with its team, which `opened` closes. Nothing is written yet."""
    from marl_llm.runs.resolve import resolve

    config, clock = swept.config, Stopwatch()
    plan = opened.enter_context(resolve(config))
    if plan.hosted:
        raise ConfigError(f"{config.game.name} is played hosted, and a sweep plays compiled: train these teams with `marl compare`")
    checks.devices(config, mesh.shape["data"])
    if begins_elsewhere(config.sft) and not checkpoints.steps():
        sources_of(config.sft, plan.assignment.trained)
    team = opened.enter_context(build_team(plan, config, mesh))
    return loop.TrainingRun(plan, config, checkpoints.directory.parent, team, checkpoints, clock, stop)


def _check_alike(runs: Sequence[loop.TrainingRun]) -> None:
    """Raises `ConfigError` for teams that one program cannot train."""
    from marl_llm.training.sweep import SweepError, check_alike

    try:
        check_alike([run.team for run in runs])
    except SweepError as error:
        raise ConfigError(str(error)) from error


def _open_directory(run: loop.TrainingRun, launch: Launch, mesh: Any) -> bool:
    """Makes a run's directory, or recognises one that continues, which it returns."""
    return open_workdir(run.workdir, run.config, launch.config_file, hardware_of(mesh), run.plan.own_files, run.plan.headline)


def _steps_to_continue(runs: Sequence[loop.TrainingRun], common: list[int], continues: Sequence[bool]) -> list[list[int] | None]:
    """Per run the checkpoints `common` that all can go on from: [] where one of them has learned nothing yet, and None for a new run.

    Raises `ConfigError` where some have learned and there is no checkpoint that all have.
    """
    newest = {run.workdir: max(run.checkpoints.steps(), default=0) for run in runs}
    if not common and any(newest.values()):
        ahead, behind = (choose(newest, key=newest.__getitem__) for choose in (max, min))
        raise ConfigError(
            f"{ahead} has learned {newest[ahead]} steps, but has no checkpoint in common with {behind}: choose another --out, "
            f"or continue it alone with `marl train --resume={ahead}`"
        )
    return [common if continued else None for continued in continues]


def _train(runs: Sequence[loop.TrainingRun], done: Sequence[list[int] | None], devices: list | None) -> None:
    """The loop of a sweep: start or resume, the steps, what was learned."""
    # ------------------------------------------------------------------------------------------------ start or resume
    training = start_or_resume(runs, done, devices)
    stop, steps = runs[0].stop, runs[0].config.steps

    # ------------------------------------------------------------------------------------------------ the loop
    began = runs[0].state["step"]
    for step in stop.steps(range(began, steps)):
        train_step(training, step)
        if step == began:
            gc.collect()
            gc.freeze()  # as in the loop of one run
            _go_on(runs, done)
        stop.boundary(step + 1, training.save, training.close)
    training.progress.close()
    if began == steps:
        _go_on(runs, done)
    for run in runs:
        run.checkpoints.wait()

    # ------------------------------------------------------------------------------------------------ what was learned
    training.sweep.unstack()
    with doing("evaluating teams", len(runs)) as work:
        for run in runs:
            write_evaluation(run)
            work.done += 1


@dataclasses.dataclass
class TrainingSweep:
    """What a sweep holds while it trains."""

    sweep: Sweep  # the teams in one program. runs: what each team's run holds. watches: what looks at each team's steps
    runs: Sequence[loop.TrainingRun]
    watches: Sequence[loop.Watches]
    progress: Progress  # the line in the terminal
    step_end: float  # when the last step ended, in seconds of `time.perf_counter`

    def save(self, step: int) -> None:
        """Writes a checkpoint of every team."""
        self.sweep.unstack()
        for run in self.runs:
            run.save(step)

    def close(self) -> None:
        """Closes the files of every run."""
        for run in self.runs:
            run.files.close()


def start_or_resume(runs: Sequence[loop.TrainingRun], done: Sequence[list[int] | None], devices: list | None) -> TrainingSweep:
    """Opens the files of every run and brings its team to where the loop begins: a new start, or the newest of its checkpoints `done`."""
    from marl_llm import reporting
    from marl_llm.training import Sweep, speed
    from marl_llm.training.programs import ProgramWatch

    first, compilations = runs[0], speed.Compilations()
    states = [loop.open_files(run, steps) for run, steps in zip(runs, done, strict=True)]
    new, elsewhere = not any(states), begins_elsewhere(first.config.sft)
    for run in runs if new and elsewhere else ():
        loop.supervised_start(run)  # takes another run's models and computes nothing
    sweep = Sweep([run.team for run in runs], devices)
    if new and not elsewhere:
        supervised_start(sweep, runs)
    progress = reporting.Progress(first.config.steps, f"sweep of {len(runs)} teams", start=0 if new else states[0]["step"])
    first.progress = progress
    loop.print_setup(first, not new)
    for run, state in zip(runs, states, strict=True):
        run.progress = TeamNotes(run.workdir.name, progress)
        loop.set_state(run, state)
    programs = ProgramWatch(progress.note)  # of the process, so one for all
    watches = [dataclasses.replace(loop.make_watches(run, compilations), programs=programs) for run in runs]
    for run in runs if new else ():
        loop.record_start(run)
    return TrainingSweep(sweep, runs, watches, progress, time.perf_counter())


def supervised_start(sweep: Sweep, runs: Sequence[loop.TrainingRun]) -> None:
    """Imitation of the scripted player by all teams; they then begin their reinforcement."""
    from marl_llm import reporting

    start = runs[0].config.sft
    if start.steps:
        with reporting.Progress(start.steps, "supervised warm-up") as progress:
            for step in range(start.steps):
                rates = [loop.sft_rate(run.config.sft, step) for run in runs]
                all_figures = sweep.sft_step(step % (start.fresh or start.steps), start.tasks, rates)
                for run, figures in zip(runs, all_figures, strict=True):
                    loop.record_sft(run, step, figures)
                progress.update(step + 1, loss=sum(figures["loss"] for figures in all_figures) / len(all_figures))
    sweep.start_rl()


def train_step(training: TrainingSweep, step: int) -> None:
    """One rollout and one update of every team, with its line, evaluation and checkpoint; seconds in its line are its share."""
    sweep, runs, before = training.sweep, training.runs, training.step_end
    tasks, start = runs[0].config.rollout.tasks, time.perf_counter()
    played = sweep.play(step, step * tasks, tasks)
    batches = [run.files.looked_at(batch) for run, batch in zip(runs, played, strict=True)]
    for watches, batch in zip(training.watches, batches, strict=True):
        watches.signal.look(step + 1, batch)
    learning = time.perf_counter()
    updates = sweep.learn(batches, learning_rates(runs, step))
    training.step_end = time.perf_counter()
    times = tuple(before + (moment - before) / len(runs) for moment in (start, learning, training.step_end))
    config = runs[0].config
    if any((step + 1) % interval == 0 for interval in (config.evaluation.every, config.checkpoint.every)) or step + 1 == config.steps:
        sweep.unstack()
    successes = []
    for run, watches, batch, update in zip(runs, training.watches, batches, updates, strict=True):
        run.step_end = before
        record = loop.step_record(run, watches, batch, update, times)
        loop.finish_step(run, record, batch)
        successes.append(record["success"])
    mean = sum(successes) / len(successes)
    training.progress.update(step + 1, **{runs[0].team.headline: mean, "least": min(successes), "most": max(successes)})


def learning_rates(runs: Sequence[loop.TrainingRun], step: int) -> dict[str, list[float]]:
    """Model -> the rate of every team at a step."""
    of_runs = [loop.learning_rates(run.config, run.team.trained, step, run.state["decay_steps"])[0] for run in runs]
    return {name: [rate[name] if isinstance(rate, dict) else rate for rate in of_runs] for name in runs[0].team.trained}


def write_evaluation(run: loop.TrainingRun) -> None:
    """The final evaluation of a run, with its report; its PNGs, which take a second each, `marl view DIR --report` writes."""
    from marl_llm.viewing import write_report

    write_json(run.workdir / "evaluation.json", loop.final_evaluation(run))
    write_report(run.workdir, pictures=False)


def _go_on(runs: Sequence[loop.TrainingRun], done: Sequence[list[int] | None]) -> None:
    """After the first step of runs that continue; see `continuing.goes_on`."""
    for run, steps in zip(runs, done, strict=True):
        goes_on(run.workdir, run.config, run.team, run.checkpoints, steps)
