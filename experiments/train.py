"""Trains a team of language models on a game, from one config. Read it from top to bottom.

A config of a workflow (`experiments.team_base`) is trained by `experiments.train_team`, with the same flags and files.

    python -m experiments.train --config=experiments/configs/quickstart.py --workdir=runs/first --config.recipe.alpha=0.5
    python -m experiments.train --config=experiments/configs/quickstart.py:smoke --workdir=runs/smoke
    python -m experiments.train --config=experiments/configs/quickstart.py --dry_run      prints what would run, and exits
    python -m experiments.train --resume=runs/first                                       continues; needs nothing but the directory

The same command on the same directory continues too. The run directory holds config.json, metrics.jsonl, tensorboard/,
episodes.jsonl and episodes_tokens.jsonl, checkpoints/, tokenizer.model, evaluation.json, report.html and plots/.
"""

from __future__ import annotations

import pathlib
import sys
import time

from absl import flags, logging
from ml_collections import config_flags

from experiments import command
from experiments.common import Alarms, TrainingError, check_finite, hardware_of, start_jax, summary_text

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file, e.g. experiments/configs/quickstart.py[:variant].")
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run; made if missing, continued if it holds the same config.")
_RESUME = flags.DEFINE_string("resume", None, "Run directory to continue; no other flag is needed.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print roles, models, recipe, sizes and shapes, and exit.")
_CACHE = flags.DEFINE_string("compilation_cache", "~/.cache/marl_llm/xla", "Directory of compiled programs; empty: none.")

def train(config, workdir: pathlib.Path, config_file: str, cache: str) -> dict:
    """Runs a config to its end and returns the final evaluation. See the module's text for what it writes."""
    started, cpu_started = time.time(), time.process_time()

    # ------------------------------------------------------------------------------------------------ the plan and the directory
    from experiments.base import check_devices, microbatch_tokens, resolve
    from experiments.workdir import open_workdir, write_json

    plan = resolve(config)
    mesh = start_jax(config, cache)
    from marl_llm.training import speed

    compilations = speed.Compilations()
    check_devices(config, mesh.shape["data"])
    continues = open_workdir(workdir, config, config_file, hardware_of(mesh))

    import jax
    import jax.numpy as jnp

    from marl_llm import evaluation, reporting, training
    from marl_llm.models import SAMPLE, TRAIN, init_params, param_shardings
    from marl_llm.reporting import files

    game, models, configs = plan.game, plan.models, plan.configs
    roles = [r.name for r in game.roles]
    checkpoints = training.Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    done = checkpoints.steps()
    complete = (workdir / "evaluation.json").exists() and (workdir / "report.html").exists()
    if continues and complete and done and done[-1] == config.steps:
        print(f"{workdir} is complete; its report is {workdir / 'report.html'}", file=sys.stderr)
        import json

        return json.loads((workdir / "evaluation.json").read_text())
    if hasattr(game.tokenizer, "save"):
        game.tokenizer.save(workdir / "tokenizer.model")

    # ------------------------------------------------------------------------------------------------ policies
    root = jax.random.key(config.seed)
    init_key, warm_key, data_key, update_key = jax.random.split(root, 4)
    u = config.optimizer
    optimizer = training.make_optimizer(u.max_grad_norm, b2=u.b2, weight_decay=u.weight_decay)
    on_mesh = lambda policies: jax.device_put(policies, param_shardings(policies, mesh, TRAIN))  # noqa: E731
    fresh = {m: training.make_policy(init_params(plan.model, init_key, stacked=config.stacked_layers), optimizer) for m in models}
    fresh = on_mesh(fresh)
    resume_step = (done[-1] if done else -1) if continues else None
    if continues:  # the plays of an end that was cut short are played again
        files.keep_lines(workdir / "episodes.jsonl", lambda play: play.get("when") == "train")
    metrics = reporting.MetricsWriter(workdir, resume_step=resume_step)
    episodes = reporting.EpisodeWriter(workdir, resume_step=resume_step)
    wall = lambda: time.time() - started  # noqa: E731

    # ------------------------------------------------------------------------------------------------ compiled functions
    e = config.rollout.environments
    rollout = training.make_rollout(game, plan.recipe, plan.assignment, configs, mesh, environments=e)
    update = training.make_update(
        plan.recipe,
        plan.model,
        optimizer,
        mesh,
        minibatch=u.minibatch,
        epochs=u.epochs,
        microbatch_tokens=microbatch_tokens(config, mesh.devices.flat[0].platform),
        permute_rewards=config.control.permute_rewards,
    )
    v = config.evaluation
    team = evaluation.TeamEvaluation(game, plan.assignment, configs, mesh, chunk=v.episodes, seed=v.seed)
    plays = {m: jnp.asarray([plan.assignment[r] == m for r in roles]) for m in models}
    limits = speed.machine_limits(mesh, plan.model.compute_dtype)
    clock = []  # of the steps of this process

    # ------------------------------------------------------------------------------------------------ warm start, or resume
    def warm_start():
        """One base by imitation of the scripted player; every model starts as a copy of it."""
        w = config.warm_start
        if not w.steps:
            return fresh
        imitate = training.make_imitation(
            [game], plan.model, optimizer, mesh, environments=w.environments, branches=w.branches, script=plan.script
        )
        base = fresh[models[0]]
        with reporting.Progress(w.steps, "warm start") as progress:
            for step in range(w.steps):
                rate = training.linear_decay(step, w.steps, w.learning_rate, warmup=20, floor=0.1)
                base, figures = imitate(base, jnp.int32(step), rate, warm_key)
                if step == 0 or step % 10 == 9 or step == w.steps - 1:
                    figures = {k: float(v) for k, v in jax.device_get(figures).items()}
                    check_finite(figures, step, "base of the warm start")
                    metrics.write({"phase": "warm_start", "step": step + 1, "wall_s": wall(), **figures})
                    progress.update(step + 1, loss=figures["loss"])
        return {m: on_mesh(training.make_policy(base.params, optimizer)) for m in models}

    if done:
        begin = done[-1]
        base = {m: p.params for m, p in checkpoints.restore(0, fresh).items()}
        policies = checkpoints.restore(begin, fresh)
        state = checkpoints.state(begin)
        print(f"continuing {workdir} after step {begin}", file=sys.stderr)
    else:
        begin = 0
        state = {"step": 0, "next_instance": 0, "seed": config.seed, "sampled_tokens": 0, "samples": 0}
        state |= {"wall_s": 0.0, "cpu_s": 0.0, "silent": dict.fromkeys(models, 0)}  # silent: steps since each model's last gradient
        policies = warm_start()
        base = jax.tree.map(jnp.copy, {m: p.params for m, p in policies.items()})
    wall_before = state["wall_s"] - wall() if done else 0.0  # of the processes before this one
    cpu_before = state["cpu_s"] - (time.process_time() - cpu_started) if done else 0.0

    # the one reshard between update and sampling; nothing moves where the two rule tables agree
    sampling = param_shardings({m: fresh[m].params for m in models}, mesh, SAMPLE)
    params_of = lambda: jax.device_put({m: policies[m].params for m in models}, sampling)  # noqa: E731
    reference = base if plan.recipe.kl_coef else dict.fromkeys(models)

    def evaluate(step):
        figures = team.team(params_of(), "validation", v.episodes)
        record = {"phase": "eval", "step": step, "success": figures["success"], "turns": figures["turns"]}
        record |= {f"role/{r}/well_formed": figures["roles"][r]["well_formed"] for r in roles}
        metrics.write(record)
        return figures["success"]

    # ------------------------------------------------------------------------------------------------ the loop
    progress = reporting.Progress(config.steps, "train", start=begin)
    alarms = Alarms(state["silent"], progress.note)
    if not done:
        progress.note(f"step 0: validation success {evaluate(0):.1%}")
        state |= {"wall_s": wall(), "cpu_s": time.process_time() - cpu_started}
        checkpoints.save(0, policies, state)  # after its line in metrics.jsonl, as every checkpoint: so no line comes twice
    end = time.perf_counter()
    for step in range(begin, config.steps):
        tick = time.perf_counter()
        rate = training.linear_decay(step, config.steps, u.learning_rate, u.warmup, floor=0.05)
        batch = rollout(params_of(), jnp.int32(state["next_instance"]), data_key)
        summary = jax.device_get(batch.summary)
        tock = time.perf_counter()
        if summary["void"] == 1.0:
            raise TrainingError(f"step {step}: no instance could be played; the game's settings contradict each other")
        record = {"phase": "train", "step": step + 1, "learning_rate": float(rate)}
        trained = 0.0  # share of the rows that went through an update
        for m in models:
            key = jax.random.fold_in(update_key, step)
            policies[m], figures = update(policies[m], reference[m], batch.rows, plays[m], rate, key)
            figures = {k: float(x) for k, x in jax.device_get(figures).items()}
            check_finite(figures, step, m)
            trained += figures["useful_groups"] / max(float(summary["prompts"]), 1)
            alarms.look(step + 1, m, figures)
            figures["kl"] = figures.get("kl", figures.get("old_kl", 0.0))
            figures["clip_fraction"] = figures.get("clip_low", 0.0) + figures.get("clip_high", 0.0)
            record |= {f"model/{m}/{k}": x for k, x in figures.items() if not k.startswith("tied_share/")}
            for agent, r in enumerate(roles):
                if plan.assignment[r] == m:
                    record[f"role/{r}/zero_variance"] = figures[f"tied_share/{agent}"]
                    record[f"role/{r}/mixed_groups"] = figures.get("mixed_prompt_share", 0.0)
        tack = time.perf_counter()
        state["step"], state["next_instance"] = step + 1, state["next_instance"] + e
        state["samples"] += int(summary["samples"])
        state["sampled_tokens"] += int(summary["sampled_tokens"])
        state["wall_s"], state["cpu_s"] = wall() + wall_before, time.process_time() - cpu_started + cpu_before
        record |= {k: float(x) for k, x in summary.items()}
        for r in roles:
            record[f"role/{r}/reward"] = plan.recipe.alpha * record[f"role/{r}/team"] + record[f"role/{r}/local"]
        record |= {k: state[k] for k in ("samples", "sampled_tokens", "wall_s", "cpu_s")}
        # a rollout is one dispatch (prompts, sampling, rewards), so is an update (scores, gradient, step); the rest is the host's
        record |= {"time/sample": tock - tick, "time/update": tack - tock, "time/other": tick - end}
        end = tack
        done_by = {k: float(summary[k]) for k in ("prompts", "prompt_tokens", "samples", "sampled_tokens", "turns")}
        sampled = speed.rollout_work(plan.model, done_by, len(roles), mesh.shape["data"])
        learnt = speed.update_work(plan.model, done_by, trained, u.epochs)
        record |= {
            "speed/sampled_tokens_per_s": done_by["sampled_tokens"] / (tock - tick),
            "speed/trained_tokens_per_s": trained * u.epochs * (done_by["prompt_tokens"] + done_by["sampled_tokens"]) / (tack - tock),
            "speed/sample_roofline": limits.seconds(sampled) / (tock - tick),
            "speed/update_roofline": limits.seconds(learnt) / (tack - tock),
            "speed/compilations": compilations.programs,
        }
        clock.append({k: x for k, x in record.items() if k.startswith(("time/", "speed/"))})
        metrics.write(record)
        progress.update(step + 1, success=record["success"], turns=record["turns"])
        last = step + 1 == config.steps
        if (step + 1) % v.every == 0 or last:
            progress.note(f"step {step + 1}: validation success {evaluate(step + 1):.1%}")
        if (step + 1) % config.checkpoint.every == 0 or last:
            play = evaluation.episode(
                game, batch.rollout, batch.instances, 0, plan.assignment, name=f"train-{step + 1}", step=step + 1, when="train"
            )
            episodes.write(*play)
            checkpoints.save(step + 1, policies, state)
    progress.close()
    if clock:
        instant = training.make_random_rollout(game, plan.recipe, mesh, environments=e)
        game_s = speed.seconds_of(lambda: instant(params_of(), jnp.int32(0), data_key).summary)
        print(speed.summary_text(clock, game_s, compilations), file=sys.stderr)

    # ------------------------------------------------------------------------------------------------ what was learned
    after = params_of()
    results = team.everything(base, after, v.final_episodes)
    results |= {"seed": config.seed, "steps": config.steps, "train_wall_s": state["wall_s"], "train_cpu_s": state["cpu_s"]}
    for when, params, step in (("before", base, 0), ("after", after, config.steps)):
        batch = team.batches(params, "test", 1)[0]
        for i in range(min(v.transcripts, v.episodes)):
            name = f"{when}-{i}"
            episodes.write(
                *evaluation.episode(
                    game, batch.rollout, batch.instances, i, plan.assignment, name=name, step=step, when=when
                )
            )
    metrics.close()
    episodes.close()
    write_json(workdir / "evaluation.json", results)
    report = reporting.write_report(workdir)
    print(summary_text(results) + f"\nreport: {report}   total {wall():.0f} s", file=sys.stderr)
    return results


def main(argv) -> None:
    """Flags to `train`; errors that a user can mend are printed without a traceback."""
    from experiments.base import ConfigError, resolve
    from experiments.train_team import describe, train_team
    from experiments.workdir import read_config

    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    try:
        if _RESUME.value:
            if _CONFIG.value is not None or _WORKDIR.value:
                raise ConfigError("--resume takes the directory alone; leave --config and --workdir out")
            workdir = pathlib.Path(_RESUME.value)
            config, config_file = read_config(workdir)
        else:
            if _CONFIG.value is None:
                raise ConfigError("--config is missing, e.g. --config=experiments/configs/quickstart.py")
            config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value or "")
            config_file = config_flags.get_config_filename(flags.FLAGS["config"])
        team = "world" in config  # a workflow on the host
        if _DRY_RUN.value:
            print(describe(config) if team else resolve(config).table(config))
            return
        if not str(_WORKDIR.value or _RESUME.value or ""):
            raise ConfigError("--workdir is missing, e.g. --workdir=runs/first")
        (train_team if team else train)(config, workdir, config_file, _CACHE.value)
    except (ConfigError, TrainingError, OSError) as error:
        command.fail(error)
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ not in ("CheckpointError", "LineError"):  # their rooms are imported only once training starts
            raise
        command.fail(error, command.DAMAGED)


if __name__ == "__main__":
    command.run(main)
