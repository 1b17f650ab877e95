"""Trains a team of language models on a game or a workflow, from one config. Read it from top to bottom.

    python -m experiments.train --config=experiments/configs/quickstart.py --workdir=runs/first --config.recipe.alpha=0.5
    python -m experiments.train --config=experiments/configs/quickstart.py:smoke --workdir=runs/smoke
    python -m experiments.train --config=experiments/configs/quickstart.py --dry_run      prints what would run, and exits
    python -m experiments.train --config=experiments/configs/game.py:my_game.py:Lock --workdir=runs/lock      a game of your own
    python -m experiments.train --resume=runs/first                                       continues; needs nothing but the directory
    python -m experiments.train --resume=runs/first --config.steps=1000                   continues further; so may devices and mesh change
    python -m experiments.train --resume=runs/first --step=200                            goes back to a checkpoint before a damaged one

The same command on the same directory continues too. SIGTERM and a second Ctrl-C stop a run after its step, with a checkpoint. The run
directory holds config.json, metrics.jsonl, tensorboard/, episodes.jsonl and episodes_tokens.jsonl, checkpoints/, evaluation.json,
outcomes.jsonl, report.html and plots/; tokenizer.model or a workflow's graph.svg, trajectories.jsonl (whole plays as graphs, to be
replayed) and before_after.md; and game/, a copy of a user's own file. The report is written at checkpoints, at most once a minute, and at
the end; `python -m marl_llm.reporting.report DIR` writes it at any time.
"""

from __future__ import annotations

import contextlib
import gc
import pathlib
import shlex
import sys
import time
import traceback

from absl import flags, logging
from ml_collections import config_flags

from marl_llm.activity import Heartbeat
from marl_llm.errors import DamagedError
from marl_llm.runs import checks, command, trust
from marl_llm.runs.building import CACHE, begins_elsewhere, build_team, hardware_of, restored, sources_of, start_jax, tools_of
from marl_llm.runs.command import ConfigError, TrainingError
from marl_llm.runs.continuing import Stopwatch, goes_on, up_to
from marl_llm.runs.loop import begun, final_page, learning_rates, line, played, speeds, tell, validate
from marl_llm.runs.measuring import VOID_LIMIT, Alarms, SignalWatch, VoidWatch, check_finite, late_line
from marl_llm.runs.run_files import RunFiles
from marl_llm.runs.stopping import GRACE_S, Stopping
from marl_llm.runs.workdir import home_of, open_workdir, process_log
from marl_llm.untrusted import read_json_file

FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, e.g. experiments/configs/quickstart.py[:variant].", flag_values=FLAGS
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run; made if missing, continued if it holds the same config.", flag_values=FLAGS
)
_RESUME = flags.DEFINE_string("resume", None, "Run directory to continue; no other flag is needed.", flag_values=FLAGS)
_STEP = flags.DEFINE_integer(
    "step", None, "With --resume: the checkpoint to go back to; later ones are set aside.", lower_bound=0, flag_values=FLAGS
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print roles, models, recipe, sizes and shapes, and exit.", flag_values=FLAGS)
_CACHE = flags.DEFINE_string(
    "compilation_cache", None, f"Directory of compiled programs; empty: none. Default: $JAX_COMPILATION_CACHE_DIR, else {CACHE}.",
    flag_values=FLAGS,
)
_DISTRIBUTED = flags.DEFINE_string(
    "distributed", "off", "One run on many processes: auto, off or host:port,processes,rank (docs/pods.md).", flag_values=FLAGS
)
_LOST_AFTER = flags.DEFINE_float("lost_after_s", 120.0, "Seconds of silence after which a process is lost.", 2.0, flag_values=FLAGS)
_GRACE = flags.DEFINE_float(
    "grace_s", GRACE_S, "Seconds from SIGTERM to the end: for the rest of the step and a checkpoint.", 0.0, flag_values=FLAGS
)

GROUP = 16  # plays of one task that are kept at a checkpoint, so that samples can be seen beside those that they were compared with
# figures of a model whose roles did not speak in a step
SILENT = {"useful_groups": 0, "grad_norm": 0.0, "log_prob_gap": 0.0, "log_prob_gap_bound": 0.0}


def train(
    config, workdir: pathlib.Path, config_file: str, cache: str | None, home: pathlib.Path | None = None, grace_s: float = GRACE_S
) -> dict:
    """Runs a config to its end and returns the final evaluation. See the module's text for what it writes.

    `home` is where the run directory keeps a user's file, if the game is to be read from there. `grace_s` is what SIGTERM leaves.
    On many processes (`--distributed`) all run this; process 0 owns the directory, and what it decides or refuses holds for all.
    """
    clock = Stopwatch()
    from marl_llm.runs.base import check, resolve

    check(config, home)
    from marl_llm.training import processes

    count = processes.start(_DISTRIBUTED.value, _LOST_AFTER.value) if FLAGS.is_parsed() else 1
    mesh = start_jax(config, cache, count, home)  # before the game is made: a world's index would start JAX with one device
    from marl_llm.training import Checkpoints
    from marl_llm.workflows import RolloutError

    watch = processes.Watch(_LOST_AFTER.value if count > 1 else 0.0, again(workdir, cache, grace_s))
    beat = Heartbeat(lambda line: print(line, file=sys.stderr, flush=True)) if processes.leads() else contextlib.nullcontext()
    with watch, beat, tools_of(config, count), resolve(config, home) as plan:
        if not plan.hosted:
            checks.devices(config, mesh.shape["data"])
        checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep, config.checkpoint.background)
        if begins_elsewhere(config.warm_start) and not checkpoints.steps():
            sources_of(config.warm_start, plan.assignment.trained)  # before a directory is made for a run that cannot begin

        def opened() -> tuple[bool, list[int]]:
            continued = open_workdir(workdir, config, config_file, hardware_of(mesh), plan.found, plan.headline)
            return continued, checkpoints.steps() if continued else []

        continues, done = processes.from_first(opened)
        done = up_to(done, _STEP.value) if FLAGS.is_parsed() else done
        processes.check_shared(workdir)
        if done and done[-1] == config.steps and (workdir / "evaluation.json").exists() and (workdir / "report.html").exists():
            print(f"{workdir} is complete; its report is {workdir / 'report.html'}", file=sys.stderr)
            return read_json_file(workdir / "evaluation.json", error=ConfigError)
        try:
            stopping = Stopping(checkpoints, again(workdir, cache, grace_s), grace_s)
            with process_log(workdir), stopping as stop, checkpoints, build_team(plan, config, mesh) as team:
                return learn(plan, config, workdir, team, checkpoints, clock, done if continues else None, stop)
        except Exception as error:
            own = [plan.found.folder / file for file in plan.found.files]
            said = command.told(error, map(str, own))
            plain = (ConfigError, TrainingError, OSError, DamagedError, processes.ProcessError)
            if said is None or isinstance(error, plain):
                raise
            trace = workdir / ("error.txt" if processes.leads() else f"error_{processes.rank()}.txt")
            trace.write_text("".join(traceback.format_exception(error)))
            mended = isinstance(error, RolloutError)  # every play failed, which another try need not meet again
            after = "Once that is mended, the same command goes on from the last checkpoint. " if mended else ""
            raise TrainingError(f"{said.rstrip('.')}. {after}The whole traceback is in {trace}") from error
        finally:
            gc.unfreeze()


def again(workdir: pathlib.Path, cache: str | None, grace_s: float) -> str:
    """The command that continues a run; of many processes, this one's."""
    given = ["--trust"] * trust.asked()
    given += [f"--compilation_cache={cache}"] * (cache is not None) + [f"--grace_s={grace_s:g}"] * (grace_s != GRACE_S)
    if FLAGS.is_parsed() and _DISTRIBUTED.value != "off":
        given.append(f"--distributed={_DISTRIBUTED.value}")
    return shlex.join(["python", "-m", "experiments.train", f"--resume={workdir}", *given])


def learn(plan, config, workdir: pathlib.Path, team, checkpoints, clock: Stopwatch, done: list[int] | None, stop: Stopping) -> dict:
    """Warm start or resume, the loop, what was learned. `done`: steps of the checkpoints of a run that continues."""
    from marl_llm import reporting
    from marl_llm.runs.coaching import CoachWatch, cost_line
    from marl_llm.training import processes, speed
    from marl_llm.training.programs import ProgramWatch

    # ------------------------------------------------------------------------------------------------ where it begins
    compilations, c, o = speed.Compilations(), config, config.optimizer
    state = restored(team, checkpoints, done[-1]) if done else None  # before a line of the run's files is touched
    files = RunFiles(workdir, plan, config, None if done is None else (done[-1] if done else -1))
    state = begun(team, config, workdir, files, clock, state)
    progress = reporting.Progress(c.steps, "train", start=state["step"])
    watches = CoachWatch(progress.note), VoidWatch(VOID_LIMIT if c.rollout.void_limit is None else c.rollout.void_limit)
    for said in filter(None, (plan.pay, "" if done else plan.unguided(config), cost_line(config, plan))):
        progress.note(said)

    def save(step):
        return stop.whole(checkpoints.save, step, team.policies(), state | {"team": team.state()} | clock.now())

    alarms, watch = Alarms(state["silent"], progress.note), ProgramWatch(progress.note)
    signal = SignalWatch(progress.note, plan.recipe.reward_of, any(one.get("path") for one in plan.options.values()))
    if not done:
        progress.note(f"step 0: validation {team.headline} {validate(team, config, files, 0):.1%}")
        save(0)  # after its line in metrics.jsonl, as every checkpoint: so no line comes twice
        progress.note(f"the report at any time: python -m marl_llm.reporting.report {workdir}")

    # ------------------------------------------------------------------------------------------------ the loop
    timed, end = [], time.perf_counter()  # the steps of this process
    for step in stop.steps(range(state["step"], c.steps)):
        tick = time.perf_counter()
        rate, critic_rate = learning_rates(o, step, state["decay_steps"])
        batch = files.looked_at(played(team, c, step, watches, lambda step=step: step in checkpoints.steps() or save(step)))
        signal.look(step + 1, batch)
        tock = time.perf_counter()
        updates = team.learn(batch, rate, critic_rate)
        of_coach = watches[0].look_at_drift(step + 1, team.train_coach(batch))
        tack = time.perf_counter()
        for name in team.assignment.training(step):
            found = updates.get(name) or SILENT  # its roles did not speak
            check_finite(found, step, name)
            alarms.look(step + 1, name, found)
        state["step"] = step + 1
        state |= {key: state[key] + int(batch.figures[key]) for key in ("samples", "sampled_tokens")}
        record = {"phase": "train", "step": step + 1, "learning_rate": rate, **line(plan, batch, updates), **of_coach}
        record |= {key: state[key] for key in ("samples", "sampled_tokens")} | clock.now()
        # playing is prompts, sampling, tools and rewards; learning is scores, gradient and step; the rest is evaluation and the host's
        record |= {"time/sample": tock - tick, "time/update": tack - tock, "time/other": tick - end}
        record |= speeds(plan, config, team, batch, updates, batch.figures["seconds"] if c.rollout.ahead else tock - tick, tack - tock)
        record |= {"speed/compilations": compilations.programs} | watch.look(step + 1)
        end = tack
        timed.append({key: x for key, x in record.items() if key.startswith(("time/", "speed/", "over_start/"))})
        if len(timed) == 1:  # all that lives as long as the run is there, its programs too: each full collection took as long as a step
            gc.collect()
            gc.freeze()  # `train` puts it back
            goes_on(workdir, config, team, checkpoints, done)
        files.metrics.write(record)
        progress.update(step + 1, **{team.headline: record["success"], "turns": record["turns"]})
        last = step + 1 == c.steps
        if (step + 1) % c.evaluation.every == 0 or last:
            progress.note(f"step {step + 1}: validation {team.headline} {validate(team, config, files, step + 1):.1%}")
        if (step + 1) % c.checkpoint.every == 0 or last:
            files.plays(batch, min(plan.recipe.plays, GROUP), "train", step + 1, team.advantages)  # a whole group
            save(step + 1)
            files.report_now_and_then()
        stop.boundary(step + 1, save, files.close, processes.agreed_stop(step + 1, stop.asked, samples=state["samples"], norm=team.norm()))
    progress.close()
    if not timed:
        goes_on(workdir, config, team, checkpoints, done)
    checkpoints.wait()  # evaluation.json stands for a run whose last checkpoint is whole
    if timed:
        print(late_line(timed) + speed.summary_text(timed, compilations), file=sys.stderr)

    # ------------------------------------------------------------------------------------------------ what was learned
    results = final_page(plan, config, team, files) | {f"train_{name}": x for name, x in clock.now().items()}
    files.close()
    if processes.leads():
        tell(results, workdir, team.headline, clock)
    return results


def main(argv) -> None:
    """Flags to `train`; errors that a user can mend are printed without a traceback."""
    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    if _RESUME.value:
        if _WORKDIR.value or not config_flags.get_config_filename(FLAGS["config"]).startswith(command.RESUMED):
            raise ConfigError("--resume takes the directory alone; leave --config and --workdir out")
    elif _CONFIG.value is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/quickstart.py")
    config, workdir = _CONFIG.value, pathlib.Path(_RESUME.value or _WORKDIR.value or "")
    home = home_of(workdir) if _RESUME.value else None
    if _STEP.value is not None and not _RESUME.value:
        raise ConfigError(f"--step={_STEP.value} goes back to a checkpoint of a run that continues: it needs --resume=DIR")
    if _DRY_RUN.value:
        from marl_llm.planning import this_machine
        from marl_llm.runs.base import resolve

        with resolve(config, home) as plan:
            print(plan.table(config))
            print("", *this_machine.lines(config, plan, start_jax(config, _CACHE.value, home=home)), sep="\n")
        return
    if not str(_WORKDIR.value or _RESUME.value or ""):
        raise ConfigError("--workdir is missing, e.g. --workdir=runs/first")
    train(config, workdir, config_flags.get_config_filename(FLAGS["config"]), _CACHE.value, home, _GRACE.value)


if __name__ == "__main__":
    command.run(main, FLAGS, interrupted="interrupted; the same command goes on from the last checkpoint")
