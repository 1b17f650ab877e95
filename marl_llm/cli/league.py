"""Plays checkpoints against each other, or with each other, and rates them.

    python -m marl_llm league --runs=runs/first                         up to 12 of its checkpoints, from the first to the last
    python -m marl_llm league --runs=runs/a,runs/b,runs/c@200           the newest checkpoint of each run, or the one that is named

Every pair plays the same tasks in every seat. Where seats win and lose the table has Elo with 95 % intervals; where they share one outcome
its diagonal is self-play and the rest cross-play, with partners that a team was not trained with, and the means of both have 95 % intervals
over tasks. The game is that of the first run. Keep checkpoints for it with `config.checkpoint.keep`. --output names a CSV file with a line
for each pair. Nothing in a run is changed.
"""

from __future__ import annotations

import csv
import pathlib

from absl import flags, logging

from marl_llm.runs import command, trust
from marl_llm.runs.command import ConfigError
from marl_llm.runs.evaluate_run import SPLITS

FLAGS = flags.FlagValues()
_RUNS = flags.DEFINE_list("runs", [], "Run directories, DIR or DIR@STEP; of a single DIR its checkpoints.", flag_values=FLAGS)
_MOST = flags.DEFINE_integer("most", 12, "Checkpoints of a single run.", lower_bound=2, flag_values=FLAGS)
_TASKS = flags.DEFINE_integer("tasks", 100, "Tasks that each pair plays in each seat.", lower_bound=1, flag_values=FLAGS)
_SPLIT = flags.DEFINE_enum("split", "test", list(SPLITS), "Which held-out split.", flag_values=FLAGS)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 is greedy.", lower_bound=0.0, flag_values=FLAGS)
_OUTPUT = flags.DEFINE_string("output", None, "CSV file with a line for each pair.", flag_values=FLAGS)


def players_of(runs: list[str], most: int) -> dict[str, str]:
    """Name -> seat. Raises `ConfigError` for a run without such a checkpoint, or twice the same player."""
    from marl_llm.runs.cross_play import spread_steps
    from marl_llm.training import Checkpoints

    players: dict[str, str] = {}
    for text in runs:
        place, _, named = text.partition("@")
        steps = Checkpoints(pathlib.Path(place) / "checkpoints").steps()
        if not steps or (named and (not named.isdecimal() or int(named) not in steps)):
            raise ConfigError(f"--runs={text}: {place} has no checkpoint {named}; it has steps {steps or 'none'}")
        chosen = [int(named)] if named else spread_steps(steps, most) if len(runs) == 1 else steps[-1:]
        for step in chosen:
            name = str(step) if len(runs) == 1 else f"{pathlib.Path(place).name}@{step}"
            if name in players:
                raise ConfigError(f"--runs: {name} comes twice")
            players[name] = f"run:{place}@{step}"
    if len(players) < 2:
        raise ConfigError(f"--runs={','.join(runs)}: {len(players)} player; two are needed. Keep more with config.checkpoint.keep")
    return players


def main(argv) -> None:
    """Prints the table, and writes the file that is asked for."""
    from marl_llm.runs.building import opened
    from marl_llm.runs.cross_play import cross_play, csv_rows, table_rows

    logging.set_verbosity(logging.WARNING)
    if not _RUNS.value:
        raise ConfigError("--runs is missing, e.g. --runs=runs/first")
    if len(_RUNS.value) > 1 or "@" in _RUNS.value[0]:
        command.refuse_idle(command.given_flags(FLAGS, ("most",)), "it is for a single run without @STEP")
    command.check_writable("output", _OUTPUT.value)
    players = players_of(_RUNS.value, _MOST.value)
    with opened(_RUNS.value[0].partition("@")[0], None, trust.asked()) as (_, _, team, _):
        try:
            result = cross_play(team, players, _SPLIT.value, _TASKS.value, _TEMPERATURE.value)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if _OUTPUT.value:
        with open(_OUTPUT.value, "w", newline="") as file:
            csv.writer(file).writerows(csv_rows(result))
    head, *rows = table_rows(result)
    print("\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)))
    for name, (mean, low, high) in result.means().items():
        print(f"{name.replace('_', '-')} {mean:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    command.run(main, FLAGS)
