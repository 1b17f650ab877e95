"""The parts of a training run's loop: how it begins, a step's play and its figures, validation, and the page at its end."""

from __future__ import annotations

import pathlib
import sys

from marl_llm.activity import doing
from marl_llm.runs.building import begins_elsewhere, params_of
from marl_llm.runs.continuing import Stopwatch, continued
from marl_llm.runs.measuring import check_finite, failure_of, late_tasks, measure, page_text, tables
from marl_llm.runs.run_files import RunFiles
from marl_llm.runs.workdir import write_json


def begun(team, config, workdir: pathlib.Path, files: RunFiles, clock: Stopwatch, state: dict | None) -> dict:
    """The state of a run that has begun: by a warm start, or that of the checkpoint from which the team was restored."""
    if state is None:
        warm_start(team, config, files, clock)
        state = {"step": 0, "seed": config.seed, "sampled_tokens": 0, "samples": 0, "silent": dict.fromkeys(team.trained, 0)}
        return state | {"decay_steps": config.optimizer.decay_steps or config.steps}
    clock.goes_on(state)
    return continued(config, workdir, state)


def warm_start(team, config, files: RunFiles, clock: Stopwatch) -> None:
    """Imitation of the scripted player, the models of another run, or nothing; the team then begins its reinforcement."""
    from marl_llm import reporting
    from marl_llm.training import linear_decay

    w = config.warm_start
    if begins_elsewhere(w):
        team.start_from(params_of(w, team.models()))
        return
    if w.steps:
        with reporting.Progress(w.steps, "warm start") as progress:
            for step in range(w.steps):
                rate = float(linear_decay(step, w.steps, w.learning_rate, warmup=20, floor=0.1))
                figures = team.imitate(step % (w.fresh or w.steps), w.tasks, rate)
                if step == 0 or step % 10 == 9 or step == w.steps - 1:
                    check_finite(figures, step, "of the warm start")
                    files.metrics.write({"phase": "warm_start", "step": step + 1, **clock.now(), **figures})
                    progress.update(step + 1, loss=figures["loss"])
    team.begin()


def played(team, config, step: int, watches, keep):
    """A step's batch; with `rollout.ahead` the next step is begun, to be played while this one is learned from.

    With `rollout.over_start` nothing is left to the step behind a checkpoint, so that a run which is killed loses no play.
    What stops the run here is said after `keep`: nothing of this step was learned, and what came before it is whole.
    """
    from marl_llm.runs.coaching import first_failure

    tasks, after = config.rollout.tasks, step + 1
    try:
        over = [0 if after == config.steps or after % config.checkpoint.every == 0 else config.rollout.over_start]
        batch = team.play(step, step * tasks, tasks, *(over if config.rollout.over_start else []))
        of_coach, of_void = watches
        of_coach.look(after, batch.figures, lambda: first_failure(batch.rollout))
        of_void.look(after, batch.figures, lambda kind: failure_of(batch.rollout, kind))
        if config.rollout.ahead and after < config.steps and after % config.checkpoint.every:  # on policy after a checkpoint, as if resumed
            team.prepare(after, after * tasks, tasks)
    except Exception:
        keep()
        raise
    return batch


def learning_rates(optimizer, step: int, decay_steps: int) -> tuple[float, float]:
    """Of the policies and of their critics, at a step."""
    from marl_llm.training import linear_decay

    peaks = optimizer.learning_rate, optimizer.critic_learning_rate or optimizer.learning_rate
    rate, critic_rate = (float(linear_decay(step, decay_steps, peak, optimizer.warmup, floor=0.05)) for peak in peaks)
    return rate, critic_rate


def line(plan, batch, updates: dict) -> dict:
    """A step's figures by name: of the rollout, of each role, of each model's update."""
    record = dict(batch.figures)
    if "over_start/late" in record:
        record["over_start/late_tasks"] = " ".join(map(str, late_tasks(batch.rollout)))
    for name, found in updates.items():
        shares = ("tied_share/", "mixed_share/")
        record |= {f"model/{name}/{key}": x for key, x in found.items() if not key.startswith(shares)}
        for role in [role for role, model in plan.assignment.roles.items() if model == name]:
            record[f"role/{role}/zero_variance"] = found.get(f"tied_share/{role}", 0.0)
            record[f"role/{role}/mixed_groups"] = found.get(f"mixed_share/{role}", found.get("mixed_prompt_share", 0.0))
    return record


def speeds(plan, config, team, batch, updates: dict, sample_s: float, update_s: float) -> dict:
    """Tokens per second and, where all models have one shape, the share of what this machine could do at best."""
    from marl_llm.training import speed

    done, epochs = batch.figures, config.optimizer.epochs
    groups = sum(found["groups"] for found in updates.values())
    trained = sum(found["useful_groups"] for found in updates.values()) / max(groups, 1)  # share of the rows that went through an update
    tokens = done["prompt_tokens"] + done["sampled_tokens"]
    out = {"speed/sampled_tokens_per_s": done["sampled_tokens"] / sample_s}
    out["speed/trained_tokens_per_s"] = trained * epochs * tokens / update_s
    shapes = list(set(plan.shapes.values()))
    if len(shapes) == 1 and len(plan.shapes) == len(plan.options):
        limits = speed.machine_limits(team.mesh, shapes[0].compute_dtype)
        sampled = speed.rollout_work(shapes[0], done, len(team.roles), team.mesh.shape["data"])
        out["speed/sample_roofline"] = limits.seconds(sampled) / sample_s
        frozen = all(one.get("lora_rank") for one in plan.options.values())
        out["speed/update_roofline"] = limits.seconds(speed.update_work(shapes[0], done, trained, epochs, frozen)) / update_s
    return out


@doing("evaluating on the validation split")
def validate(team, config, files: RunFiles, step: int) -> float:
    """A greedy evaluation on the validation split, with its line in metrics.jsonl."""
    found = team.evaluate({}, "validation", config.evaluation.tasks).summary()
    record = {"phase": "eval", "step": step, **{name: found[name] for name in ("success", "turns", "void")}}
    record |= dict(zip(("success_low", "success_high"), found["interval"])) | {f"team/{name}": x for name, x in found["team"].items()}
    files.metrics.write(record | {f"role/{role}/{name}": x for role, part in found["roles"].items() for name, x in part.items()})
    return found["success"]


@doing("measuring what was learned")
def final_page(plan, config, team, files: RunFiles) -> dict:
    """The final evaluation on the test split, which no setting was chosen on: greedy, and at a temperature if asked for."""
    from marl_llm.evaluation import paired

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
    return results


def tell(results: dict, workdir: pathlib.Path, headline: str, clock: Stopwatch) -> None:
    """evaluation.json, the report, and what was learned in a few lines."""
    from marl_llm import reporting

    write_json(workdir / "evaluation.json", results)
    report = reporting.write_report(workdir)
    head = f"{results['after']['tasks']} held-out tasks of the {results['split']} split:\n"
    print(head + page_text(results, headline) + f"\nreport: {report}   total {clock.now()['wall_s']:.0f} s", file=sys.stderr)
