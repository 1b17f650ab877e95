"""The loop of a training run, read from top to bottom: `learn`, then the parts that it calls.

A fork of the loop starts from a copy of this file, or from an own loop over the public functions of `marl_llm.training` (docs/library.md).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from marl_llm.activity import doing
from marl_llm.runs.building import begins_elsewhere, params_of, restored
from marl_llm.runs.continuing import Stopwatch, continued, goes_on
from marl_llm.runs.measuring import (
    UNPAID,
    AbortedWatch,
    Alarms,
    LeagueWatch,
    SignalWatch,
    check_finite,
    failure_of,
    late_line,
    late_tasks,
    measure,
    page_text,
    signal_watch,
    tables,
)
from marl_llm.runs.run_files import RunFiles
from marl_llm.runs.stopping import Stopping
from marl_llm.runs.workdir import write_json

GROUP = 16  # plays of one task that are kept at a checkpoint, so that samples can be seen beside those that they were compared with
# figures of a model whose roles did not speak in a step
SILENT = {"groups_with_signal": 0, "grad_norm": 0.0, "log_prob_gap": 0.0, "log_prob_gap_bound": 0.0}


@dataclasses.dataclass
class TrainingRun:
    """What a run holds while it trains.

    Attributes:
      plan, config: `marl_llm.runs.resolve.Plan` and the config that it came from. workdir: the run's directory.
      team, checkpoints, clock, stop: what learns, where it is kept, the time that it took, and who tells it to stop.
      files: the files that grow. progress: the line in the terminal. Both are opened by `learn`.
      state: what a checkpoint keeps beside the parameters: step, samples and tokens so far.
      step_end: when the last step ended, in seconds of `time.perf_counter`.
    """

    plan: Any
    config: Any
    workdir: pathlib.Path
    team: Any
    checkpoints: Any
    clock: Stopwatch
    stop: Stopping
    files: Any = None
    progress: Any = None
    state: dict = dataclasses.field(default_factory=dict)
    step_end: float = 0.0

    def keep(self) -> None:
        """Writes a checkpoint of what was learned before a step that failed, unless there is one."""
        if self.state["step"] not in self.checkpoints.steps():
            self.save(self.state["step"])

    def save(self, step: int) -> None:
        """Writes a checkpoint of what was learned up to a step."""
        state = self.state | {"team": self.team.state()} | self.clock.now()
        self.stop.whole(self.checkpoints.save, step, self.team.policies(), state)


@dataclasses.dataclass(frozen=True)
class Watches:
    """What looks at every step: each says in one line what is wrong, or ends the run with a `TrainingError`."""

    coach: Any
    aborted: AbortedWatch
    signal: SignalWatch
    league: LeagueWatch
    alarms: Alarms
    programs: Any
    compilations: Any


def learn(run: TrainingRun, done: list[int] | None) -> dict:
    """Start or resume, the loop, the final evaluation, which it returns.

    `done`: steps of the checkpoints of a run that continues, maybe none; None: a new run.
    """
    from marl_llm.training import processes, speed

    # ------------------------------------------------------------------------------------------------ start or resume
    watches = start_or_resume(run, done)
    config = run.config

    # ------------------------------------------------------------------------------------------------ the loop
    timed: list[dict] = []  # of the steps of this process
    run.step_end = time.perf_counter()
    for step in run.stop.steps(range(run.state["step"], config.steps)):
        record, batch = train_step(run, watches, step)
        timed.append({key: x for key, x in record.items() if key.startswith(("time/", "speed/", "oversample/"))})
        if len(timed) == 1:  # all that lives as long as the run is there, its programs too: each full collection took as long as a step
            gc.collect()
            gc.freeze()  # `train_run` puts it back
            goes_on(run.workdir, config, run.team, run.checkpoints, done)
        finish_step(run, record, batch)
        agreed = processes.agreed_stop(step + 1, run.stop.asked, samples=run.state["samples"], norm=run.team.norm())
        run.stop.boundary(step + 1, run.save, run.files.close, agreed)
    run.progress.close()
    if not timed:
        goes_on(run.workdir, config, run.team, run.checkpoints, done)
    run.checkpoints.wait()  # evaluation.json stands for a run whose last checkpoint is whole
    if timed:
        print(late_line(timed) + speed.summary_text(timed, watches.compilations), file=sys.stderr)

    # ------------------------------------------------------------------------------------------------ what was learned
    results = final_evaluation(run)
    if processes.leads():
        write_results(results, run.workdir, run.team.headline, run.clock)
    return results


def start_or_resume(run: TrainingRun, done: list[int] | None) -> Watches:
    """Opens the run's files and brings its team to where the loop begins: a new start, or the newest of the checkpoints `done`."""
    from marl_llm import reporting
    from marl_llm.training import speed

    compilations = speed.Compilations()
    state = open_files(run, done)
    if state is None:
        supervised_start(run)
    run.progress = reporting.Progress(run.config.steps, "train", start=state["step"] if state else 0)
    set_state(run, state)
    print_setup(run, bool(done))
    watches = make_watches(run, compilations)
    if not done:
        record_start(run)
        run.progress.note(f"the report at any time: python -m marl_llm view {run.workdir} --report")
    return watches


def open_files(run: TrainingRun, done: list[int] | None) -> dict | None:
    """Opens the run's files. Of a run that continues, its team is put where the newest of `done` left it; returns the state there."""
    state = restored(run.team, run.checkpoints, done[-1]) if done else None  # before a line of the run's files is touched
    run.files = RunFiles(run.workdir, run.plan, run.config, None if done is None else (done[-1] if done else -1))
    return state


def set_state(run: TrainingRun, state: dict | None) -> None:
    """Sets what a checkpoint keeps beside the parameters: that of a new run, or what `open_files` found."""
    config = run.config
    if state is None:
        state = {"step": 0, "seed": config.seed, "sampled_tokens": 0, "samples": 0, "silent": dict.fromkeys(run.team.trained, 0)}
        run.state = state | UNPAID | {"decay_steps": config.optimizer.decay_steps or config.steps}
    else:
        run.clock.goes_on(state)
        run.state = continued(config, run.workdir, state)


def make_watches(run: TrainingRun, compilations: Any) -> Watches:
    """What looks at every step. Its lines go to the run's progress."""
    from marl_llm.runs.coaching import CoachWatch
    from marl_llm.training.programs import ProgramWatch

    plan, note = run.plan, run.progress.note
    return Watches(
        CoachWatch(note),
        AbortedWatch(run.config.rollout.aborted_limit),
        signal_watch(plan, note, run.state),
        LeagueWatch(note),
        Alarms(run.state["silent"], note),
        ProgramWatch(note),
        compilations,
    )


def print_setup(run: TrainingRun, continues: bool) -> None:
    """Prints which pay reaches whom, what a coach may cost, and, of a new run, a hint where a warm-up is missing."""
    from marl_llm.runs.coaching import cost_line

    for line in filter(None, (run.plan.pay, "" if continues else run.plan.unguided(run.config), cost_line(run.config, run.plan))):
        run.progress.note(line)


def record_start(run: TrainingRun) -> None:
    """The validation figure and the checkpoint of step 0."""
    run.progress.note(f"step 0: validation {run.team.headline} {validate(run, 0):.1%}")
    run.save(0)  # after its line in metrics.jsonl, as every checkpoint: so no line comes twice


def supervised_start(run: TrainingRun) -> None:
    """Imitation of the scripted player, the models of another run, or nothing; the team then begins its reinforcement."""
    from marl_llm import reporting

    start, team = run.config.sft, run.team
    if begins_elsewhere(start):
        team.start_from(params_of(start, team.models()))
        return
    if start.steps:
        with reporting.Progress(start.steps, "supervised warm-up") as progress:
            for step in range(start.steps):
                figures = team.sft_step(step % (start.fresh or start.steps), start.tasks, sft_rate(start, step))
                record_sft(run, step, figures)
                progress.update(step + 1, loss=figures["loss"])
    team.start_rl()


def sft_rate(start: Any, step: int) -> float:
    """The learning rate of a step of imitation, of a config's section `sft`."""
    from marl_llm.training import linear_decay

    return float(linear_decay(step, start.steps, start.learning_rate, warmup=20, floor=0.1))


def record_sft(run: TrainingRun, step: int, figures: dict[str, float]) -> None:
    """Writes a line of the first step of imitation, of every tenth and of the last. Raises `TrainingError` for one that is not finite."""
    if step == 0 or step % 10 == 9 or step == run.config.sft.steps - 1:
        check_finite(figures, step, "of the supervised warm-up")
        run.files.metrics.write({"phase": "sft", "step": step + 1, **run.clock.now(), **figures})


def train_step(run: TrainingRun, watches: Watches, step: int) -> tuple[dict, Any]:
    """One rollout and one update of each model that trains: the step's figures by name, and its batch."""
    config, team = run.config, run.team
    start = time.perf_counter()
    rates, critic_rates = learning_rates(config, team.trained, step, run.state["decay_steps"])
    batch = run.files.looked_at(play_step(run, watches, step))
    watches.signal.look(step + 1, batch)
    watches.league.look(step + 1, batch.figures)
    played = time.perf_counter()
    updates = team.learn(batch, rates, critic_rates)
    coach_figures = watches.coach.look_at_drift(step + 1, team.train_coach(batch))
    return step_record(run, watches, batch, updates, (start, played, time.perf_counter())) | coach_figures, batch


def step_record(run: TrainingRun, watches: Watches, batch: Any, updates: dict, times: tuple[float, float, float]) -> dict:
    """The figures of a step by name, once its updates are looked at and its samples counted.

    `times`, in seconds of `time.perf_counter`: when the step began, when its plays had ended, and when its updates had.
    """
    config, team, state, step = run.config, run.team, run.state, batch.step
    start, played, learned = times
    for name in team.assignment.training(step):
        figures = updates.get(name) or SILENT  # its roles did not speak
        check_finite(figures, step, name)
        watches.alarms.look(step + 1, name, figures)
    state["step"] = step + 1
    state |= {key: state[key] + int(batch.figures[key]) for key in ("samples", "sampled_tokens")} | watches.signal.seen
    rates, _ = learning_rates(config, team.trained, step, state["decay_steps"])
    record = {"phase": "train", "step": step + 1, **rate_figures(rates), **step_figures(run.plan, batch, updates)}
    record |= {key: state[key] for key in ("samples", "sampled_tokens")} | run.clock.now()
    # playing is prompts, sampling, tools and rewards; learning is scores, gradient and step; the rest is evaluation and the host's
    record |= {"time/sample": played - start, "time/update": learned - played, "time/other": start - run.step_end}
    sample_s = batch.figures["seconds"] if config.rollout.max_staleness else played - start
    record |= speed_figures(run, batch, updates, sample_s, learned - played)
    record |= {"speed/compilations": watches.compilations.programs} | watches.programs.look(step + 1)
    run.step_end = learned
    return record


def finish_step(run: TrainingRun, record: dict, batch: Any) -> None:
    """Writes the step's line and, where they are due, the validation figure, plays, a checkpoint and the report."""
    config, files, step = run.config, run.files, record["step"]
    files.metrics.write(record)
    run.progress.update(step, **{run.team.headline: record["success"], "turns": record["turns"]})
    if step % config.evaluation.every == 0 or step == config.steps:
        run.progress.note(f"step {step}: validation {run.team.headline} {validate(run, step):.1%}")
    if step % config.checkpoint.every == 0 or step == config.steps:
        files.plays(batch, min(run.plan.recipe.plays, GROUP), "train", step, run.team.advantages)  # a whole group
        run.save(step)
        files.report_now_and_then()


def play_step(run: TrainingRun, watches: Watches, step: int) -> Any:
    """A step's batch; with `rollout.max_staleness` the next step is begun, to be played while this one is learned from.

    With `rollout.oversample` nothing is left to the step behind a checkpoint, so that a run which is killed loses no play.
    An error here leaves a checkpoint: nothing of this step was learned, and what came before it is whole.
    """
    from marl_llm.runs.coaching import first_failure

    config, team, after = run.config, run.team, step + 1
    tasks, keeps = config.rollout.tasks, after % config.checkpoint.every == 0
    try:
        over = [0 if after == config.steps or keeps else config.rollout.oversample]
        batch = team.play(step, step * tasks, tasks, *(over if config.rollout.oversample else []))
        watches.coach.look(after, batch.figures, lambda: first_failure(batch.rollout))
        watches.aborted.look(after, batch.figures, lambda kind: failure_of(batch.rollout, kind))
        if config.rollout.max_staleness and after < config.steps and not keeps:  # on policy after a checkpoint, as if resumed
            team.prepare(after, after * tasks, tasks)
    except Exception:
        run.keep()
        raise
    return batch


def learning_rates(config, models: Iterable[str], step: int, decay_steps: int) -> tuple[Any, Any]:
    """Of the policies and of their critics, at a step: one for all models, or by model where they differ."""
    from marl_llm.runs.own_options import optimizer_of
    from marl_llm.training import decay_share, scheduled_rate

    rates: dict[str, float] = {}
    critic_rates: dict[str, float] = {}
    for name in models:
        o = optimizer_of(config, name)
        decay = functools.partial(decay_share, o["schedule"], cooldown=o["cooldown"])
        rate = functools.partial(scheduled_rate, decay, step, decay_steps, warmup=o["warmup"], floor=0.05)
        rates[name] = float(rate(peak=o["learning_rate"]))
        critic_rates[name] = float(rate(peak=o["critic_learning_rate"] or o["learning_rate"]))
    return tuple(by_model if len(set(by_model.values())) > 1 else next(iter(by_model.values())) for by_model in (rates, critic_rates))


def rate_figures(rates: float | Mapping[str, float]) -> dict[str, float]:
    """The learning rate of a step; where models differ, their mean and each one's own."""
    if not isinstance(rates, Mapping):
        return {"learning_rate": rates}
    by_model = {f"model/{name}/learning_rate": rate for name, rate in rates.items()}
    return {"learning_rate": sum(rates.values()) / len(rates)} | by_model


def step_figures(plan, batch, updates: dict) -> dict:
    """A step's figures by name: of the rollout, of each role, of each model's update."""
    record = dict(batch.figures)
    if "oversample/late" in record:
        record["oversample/late_tasks"] = " ".join(map(str, late_tasks(batch.rollout)))
    if batch.left_out is not None:
        record["refills/left_out_tasks"] = " ".join(map(str, batch.left_out))
    for name, update in updates.items():
        shares = ("tied_share/", "mixed_share/")
        record |= {f"model/{name}/{key}": x for key, x in update.items() if not key.startswith(shares)}
        for role in [role for role, model in plan.assignment.roles.items() if model == name]:
            record[f"role/{role}/zero_variance"] = update.get(f"tied_share/{role}", 0.0)
            record[f"role/{role}/mixed_groups"] = update.get(f"mixed_share/{role}", update.get("mixed_prompt_share", 0.0))
    return record


def speed_figures(run: TrainingRun, batch, updates: dict, sample_s: float, update_s: float) -> dict:
    """Tokens per second and, where all models have one shape, the share of what this machine could do at best."""
    from marl_llm.training import speed

    plan, team, done, epochs = run.plan, run.team, batch.figures, run.config.optimizer.epochs
    groups = sum(update["groups"] for update in updates.values())
    share = sum(update["groups_with_signal"] for update in updates.values()) / max(groups, 1)  # of the rows that went through an update
    tokens = done["prompt_tokens"] + done["sampled_tokens"]
    figures = {"speed/sampled_tokens_per_s": done["sampled_tokens"] / sample_s}
    figures["speed/trained_tokens_per_s"] = share * epochs * tokens / update_s
    shapes = list(set(plan.shapes.values()))
    if len(shapes) == 1 and len(plan.shapes) == len(plan.options):
        limits = speed.machine_limits(team.mesh, shapes[0].compute_dtype)
        sampled = speed.rollout_work(shapes[0], done, len(team.roles), team.mesh.shape["data"])
        figures["speed/sample_roofline"] = limits.seconds(sampled) / sample_s
        frozen = all(model.get("lora_rank") for model in plan.options.values())
        figures["speed/update_roofline"] = limits.seconds(speed.update_work(shapes[0], done, share, epochs, frozen)) / update_s
    return figures


@doing("evaluating on the validation split")
def validate(run: TrainingRun, step: int) -> float:
    """A greedy evaluation on the validation split, with its line in metrics.jsonl."""
    summary = run.team.evaluate({}, "validation", run.config.evaluation.tasks).summary()
    record = {"phase": "eval", "step": step, **{name: summary[name] for name in ("success", "turns", "aborted")}}
    record |= dict(zip(("success_low", "success_high"), summary["interval"])) | {f"team/{name}": x for name, x in summary["team"].items()}
    run.files.metrics.write(record | {f"role/{role}/{name}": x for role, part in summary["roles"].items() for name, x in part.items()})
    return summary["success"]


@doing("measuring what was learned")
def final_evaluation(run: TrainingRun) -> dict:
    """The final evaluation on the test split, which no setting was chosen on: greedy, and at a temperature if asked for."""
    from marl_llm.evaluation import paired

    plan, config, team, files = run.plan, run.config, run.team, run.files
    v, seatings = config.evaluation, tables(plan, config.evaluation.ablate_roles)
    page, records = measure(team, seatings, "test", v.final_tasks)
    results = {"split": "test", "headline": team.headline, "pay": plan.pay, "seed": config.seed, "steps": config.steps, **page}
    results["gain"] = paired(records["before"], records["after"])
    parts = {"greedy": records}
    if v.sampled:
        again = {name: seats for name, seats in seatings.items() if name not in ("random", "swapped")}
        how = {"temperature": float(v.temperature or plan.recipe.temperature), "plays": v.samples}
        results["sampled"], parts["sampled"] = measure(team, again, "test", v.final_tasks, **how)
    files.outcomes(records)
    for when, step in (("before", 0), ("after", config.steps)):
        files.plays(records[when], v.transcripts, when, step)
    files.table(parts, v.final_tasks)
    files.close()
    return results | {f"train_{name}": x for name, x in run.clock.now().items()}


def write_results(results: dict, workdir: pathlib.Path, headline: str, clock: Stopwatch) -> None:
    """evaluation.json, the report, and what was learned in a few lines."""
    from marl_llm.viewing import write_report

    write_json(workdir / "evaluation.json", results)
    report = write_report(workdir)
    head = f"{results['after']['tasks']} held-out tasks of the {results['split']} split:\n"
    print(head + page_text(results, headline) + f"\nreport: {report}   total {clock.now()['wall_s']:.0f} s", file=sys.stderr)
