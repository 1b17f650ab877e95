"""Trains a team of language models on a game or a workflow, from one config.

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
the end; `python -m marl_llm view DIR --report` writes it at any time.
"""

from __future__ import annotations

import pathlib

from absl import flags, logging
from ml_collections import config_flags

from marl_llm.runs import command
from marl_llm.runs.building import CACHE, start_jax
from marl_llm.runs.command import ConfigError
from marl_llm.runs.stopping import GRACE_S
from marl_llm.runs.train_run import Launch, train_run
from marl_llm.runs.workdir import game_dir_of

INTERRUPTED = "interrupted; the same command goes on from the last checkpoint"
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


def main(argv) -> None:
    """Flags to `train_run`."""
    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    if _RESUME.value:
        if _WORKDIR.value or not config_flags.get_config_filename(FLAGS["config"]).startswith(command.RESUMED):
            raise ConfigError("--resume takes the directory alone; leave --config and --workdir out")
    elif _CONFIG.value is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/quickstart.py")
    config, workdir = _CONFIG.value, pathlib.Path(_RESUME.value or _WORKDIR.value or "")
    game_dir = game_dir_of(workdir) if _RESUME.value else None
    if _STEP.value is not None and not _RESUME.value:
        raise ConfigError(f"--step={_STEP.value} goes back to a checkpoint of a run that continues: it needs --resume=DIR")
    if _DRY_RUN.value:
        from marl_llm.planning import this_machine
        from marl_llm.runs.resolve import resolve
        from marl_llm.runs.teachers import span_rows

        with resolve(config, game_dir) as plan:
            print(plan.table(config))
            mesh = start_jax(config, _CACHE.value, game_dir=game_dir)
            print(*span_rows(config, plan), "", *this_machine.lines(config, plan, mesh), sep="\n")
        return
    if not str(_WORKDIR.value or _RESUME.value or ""):
        raise ConfigError("--workdir is missing, e.g. --workdir=runs/first")
    config_file = config_flags.get_config_filename(FLAGS["config"])
    launch = Launch(config_file, _CACHE.value, game_dir, _GRACE.value, _STEP.value, _DISTRIBUTED.value, _LOST_AFTER.value)
    train_run(config, workdir, launch)
