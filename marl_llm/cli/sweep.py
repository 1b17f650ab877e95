"""Trains a config with all combinations of a few seeds and learning rates, all teams side by side in one program.

    python -m marl_llm sweep --config=experiments/configs/quickstart.py --vary=optimizer.learning_rate=1e-3,3e-4 --vary=seed=0,1,2
    python -m marl_llm sweep --config=experiments/configs/quickstart.py --vary=seed=0,1,2,3 --config.steps=100 --out=runs/seeds

Every team learns what it would learn alone with that config, up to rounding, and its directory OUT/VALUES, for example
`learning_rate=1e-3_seed=0`, is that of any run: it can be viewed, evaluated, collected, exported and resumed. Seconds of a step in its
metrics.jsonl are its share of the sweep's. The table, also in OUT/table.md, has a row per setting: means over its seeds, with 95 %
intervals. The game is a value-state game that is played compiled. The same command goes on after an interruption; SIGTERM and a second
Ctrl-C stop after the step, with checkpoints.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from absl import flags, logging
from ml_collections import config_flags

from marl_llm.runs.building import CACHE
from marl_llm.runs.command import ConfigError
from marl_llm.runs.sweep_configs import SweptConfig, sweep_configs
from marl_llm.untrusted import read_json_file

FLAGS = flags.FlagValues()
_CONFIG = config_flags.DEFINE_config_file("config", None, "A training config, e.g. experiments/configs/quickstart.py.", flag_values=FLAGS)
_VARY = flags.DEFINE_multi_string(
    "vary", [], "KEY=VALUE,VALUE,...: a key of the config and its values; may be given many times.", flag_values=FLAGS
)
_OUT = flags.DEFINE_string("out", "runs/sweep", "Directory of the runs, one for each team.", flag_values=FLAGS)
_CACHE = flags.DEFINE_string(
    "compilation_cache", None, f"Directory of compiled programs; empty: none. Default: $JAX_COMPILATION_CACHE_DIR, else {CACHE}.",
    flag_values=FLAGS,
)
INTERRUPTED = "interrupted; the same command goes on from the last checkpoint that all teams have"
LEGEND = "Brackets: 95 % intervals; over seeds (Student's t) where a setting has several, else over the tasks of its one team."


def interval_text(values: list[float], of_one: list[float]) -> str:
    """Mean and 95 % interval over seeds; of a single value its own interval `of_one`."""
    from marl_llm.evaluation import over_seeds

    mean, low, high = over_seeds(values)
    if len(values) == 1:
        low, high = of_one
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def table(settings: dict[str, list[dict]]) -> str:
    """The Markdown table of evaluations by setting, greedy on the test split."""
    head = ["setting", "seeds", "before", "after", "gain", "lowest seed", "highest seed"]
    rows = [head, ["---"] * len(head)]
    for setting, evaluations in settings.items():
        before, after = ([evaluation[when]["success"] for evaluation in evaluations] for when in ("before", "after"))
        gain = [evaluation["gain"]["difference"] for evaluation in evaluations]
        of_one = [evaluations[0][when]["interval"] for when in ("before", "after", "gain")]
        cells = [interval_text(*pair) for pair in zip((before, after, gain), of_one)]
        rows.append([setting, str(len(evaluations)), *cells, f"{min(after):.3f}", f"{max(after):.3f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def summary(teams: Sequence[SweptConfig], folders: Mapping[str, pathlib.Path]) -> str:
    """The table of finished runs with its headline figure and legend. Raises `ConfigError` for an evaluation that cannot be read."""
    settings: dict[str, list[dict]] = {}
    for team in teams:
        settings.setdefault(team.setting, []).append(read_json_file(folders[team.name] / "evaluation.json", error=ConfigError))
    headline = settings[teams[0].setting][0]["headline"]
    return f"headline figure: {headline}, test split, greedy\n\n{table(settings)}\n\n{LEGEND}"


def main(argv) -> None:
    """Trains what is missing and prints the table."""
    from marl_llm.runs.sweep_run import train_sweep
    from marl_llm.runs.train_run import Launch

    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    if _CONFIG.value is None:
        raise ConfigError("--config is missing, e.g. --config=experiments/configs/quickstart.py")
    teams, out = sweep_configs(_CONFIG.value, _VARY.value), pathlib.Path(_OUT.value)
    launch = Launch(config_flags.get_config_filename(FLAGS["config"]), _CACHE.value)
    folders = train_sweep(teams, out, launch)
    text = summary(teams, folders)
    (out / "table.md").write_text(text + "\n")
    print(text)
