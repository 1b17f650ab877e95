"""Evaluates any checkpoint of a run on fresh instances: the team, roles swapped, one trained model beside untrained ones, the random floor.

    python -m experiments.evaluate --run=runs/first                                   the newest checkpoint, 500 instances of the test split
    python -m experiments.evaluate --run=runs/first --step=200 --episodes=1000 --seed=7 --temperature=1
    python -m experiments.evaluate --run=runs/first --with=runs/second:tool           the Tool of another run in this team

Prints a table and writes it as JSON with --output. Nothing in the run directory is changed.
"""

from __future__ import annotations

import json
import pathlib

from absl import flags, logging

from experiments import command
from experiments.common import start_jax, summary_text

_RUN = flags.DEFINE_string("run", None, "Run directory.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest. Step 0 is the warm start.")
_EPISODES = flags.DEFINE_integer("episodes", 500, "Held-out instances.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 2026, "Seed of the instances.")
_SPLIT = flags.DEFINE_enum("split", "test", ["test", "validation"], "Which held-out split.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_WITH = flags.DEFINE_list("with", [], "Models from other runs, each as RUN_DIRECTORY:MODEL, comma-separated.")
_OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.")


def load(run: pathlib.Path, step: int | None, mesh):
    """`(plan, trained parameters, warm-start parameters, step)` of a run. Raises `ConfigError` or `CheckpointError`."""
    import jax

    from experiments.base import ConfigError, resolve
    from experiments.workdir import read_config
    from marl_llm import training
    from marl_llm.models import TRAIN, init_params, param_shardings

    config, _ = read_config(run)
    plan = resolve(config)
    o = config.optimizer
    optimizer = training.make_optimizer(o.max_grad_norm, b2=o.b2, weight_decay=o.weight_decay)
    start = lambda: init_params(plan.model, jax.random.key(0), stacked=config.stacked_layers)  # noqa: E731
    like = {m: training.make_policy(start(), optimizer) for m in plan.models}
    like = jax.device_put(like, param_shardings(like, mesh, TRAIN))
    checkpoints = training.Checkpoints(run / "checkpoints")
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        raise ConfigError(f"{run} has no checkpoint {'' if step is None else step}; it has steps {steps or 'none'}")
    step = steps[-1] if step is None else step
    params = lambda s: {m: p.params for m, p in checkpoints.restore(s, like).items()}  # noqa: E731
    return plan, params(step), params(0), step


def evaluate() -> dict:
    """Carries the flags out and returns the figures."""
    from experiments.base import ConfigError
    from experiments.workdir import read_config
    from marl_llm.evaluation import TeamEvaluation

    run = pathlib.Path(_RUN.value)
    mesh = start_jax(read_config(run)[0], "~/.cache/marl_llm/xla")
    plan, after, before, step = load(run, _STEP.value, mesh)
    for entry in _WITH.value:
        other, _, model = entry.rpartition(":")
        if not other or model not in after:
            raise ConfigError(f"--with={entry} is not RUN_DIRECTORY:MODEL with a model of this run ({', '.join(after)})")
        other_plan, params, _, _ = load(pathlib.Path(other), None, mesh)
        if other_plan.model != plan.model or model not in params:
            raise ConfigError(f"--with={entry}: that run has other models ({', '.join(params)}; {other_plan.model})")
        after[model] = params[model]
    devices = mesh.shape["data"]
    chunk = min(128, -(-_EPISODES.value // devices) * devices)
    team = TeamEvaluation(
        plan.game, plan.assignment, plan.configs, mesh, chunk=chunk, seed=_SEED.value, temperature=_TEMPERATURE.value
    )
    return team.everything(before, after, _EPISODES.value, _SPLIT.value) | {"run": str(run), "step": step}


def main(argv) -> None:
    """Prints the table; a mendable error is one line and exit code 2."""
    from experiments.base import ConfigError

    logging.set_verbosity(logging.WARNING)
    try:
        if not _RUN.value:
            raise ConfigError("--run is missing, e.g. --run=runs/first")
        results = evaluate()
        if _OUTPUT.value:
            pathlib.Path(_OUTPUT.value).write_text(json.dumps(results, indent=1))
    except (ConfigError, OSError) as error:
        command.fail(error)
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":  # its room is imported only once evaluation starts
            raise
        command.fail(error, command.DAMAGED)
    print(f"step {results['step']} of {results['run']}: " + summary_text(results))


if __name__ == "__main__":
    command.run(main)
