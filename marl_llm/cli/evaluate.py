"""Evaluates any checkpoint of a run on held-out tasks: the team before and after, swapped, with each role's start put back, the floor.

    python -m experiments.evaluate --run=runs/first                                   the newest checkpoint, 500 tasks of the test split
    python -m experiments.evaluate --run=runs/first --step=200 --tasks=1000 --seed=7 --temperature=1 --plays=4
    python -m experiments.evaluate --run=runs/first --seats=tool=start,planner=trained            one table of seats instead of the page
    python -m experiments.evaluate --run=runs/first --seats=tool=run:runs/second                  the Tool of another run in this team
    python -m experiments.evaluate --run=runs/kuhn --opponents=random,scripted,start              each seat against them (`duels`)

A seat is trained[:MODEL], start[:MODEL], run:DIR[@STEP][#MODEL], scripted, random, and where play is hosted outside:URL#NAME or human
(`marl_llm.training.seats`); roles that are left out are trained. --seats may be given many times. Prints a table and writes it as JSON
with --output, and every play's outcome with --outcomes. Nothing in the run directory is changed.
"""

from __future__ import annotations

import json
import pathlib

from absl import flags, logging

from marl_llm.runs import trust
from marl_llm.runs.command import ConfigError, check_writable
from marl_llm.runs.duels import duel_text
from marl_llm.runs.evaluate_run import SPLITS, EvaluationOptions, evaluate_run, outcome_lines
from marl_llm.runs.measuring import page_text

FLAGS = flags.FlagValues()
_RUN = flags.DEFINE_string("run", None, "Run directory.", flag_values=FLAGS)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest. Step 0 is the supervised warm-up.", flag_values=FLAGS)
_TASKS = flags.DEFINE_integer("tasks", 500, "Held-out tasks.", lower_bound=1, flag_values=FLAGS)
_PLAYS = flags.DEFINE_integer("plays", 1, "Plays of each task.", lower_bound=1, flag_values=FLAGS)
_K = flags.DEFINE_list("k", [], "Also the expected best of so many plays of a task, e.g. 1,3,5; at most --plays.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", None, "Seed of the evaluation; default: the config's.", flag_values=FLAGS)
_SPLIT = flags.DEFINE_enum("split", "test", list(SPLITS), "Which held-out split.", flag_values=FLAGS)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0, flag_values=FLAGS)
_SEATS = flags.DEFINE_multi_string("seats", [], "ROLE=SEAT,ROLE=SEAT: a table of its own; default: the whole page.", flag_values=FLAGS)
_OPPONENTS = flags.DEFINE_list(
    "opponents", [], "Seats that each role plays against, trained and as its start: shares won, drawn and lost.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.", flag_values=FLAGS)
_OUTCOMES = flags.DEFINE_string("outcomes", None, "File for one line of JSON per play.", flag_values=FLAGS)


def options_of_flags() -> EvaluationOptions:
    """The flags as options. Raises `ConfigError` for sizes of --k that are no whole numbers."""
    if wrong := [size for size in _K.value if not size.isdecimal()]:
        raise ConfigError(f"--k={','.join(_K.value)}: {wrong[0]!r} is no whole number between 1 and --plays={_PLAYS.value}")
    return EvaluationOptions(
        step=_STEP.value,
        split=_SPLIT.value,
        tasks=_TASKS.value,
        plays=_PLAYS.value,
        temperature=_TEMPERATURE.value,
        seats=tuple(_SEATS.value),
        opponents=tuple(_OPPONENTS.value),
        best_of=tuple(map(int, _K.value)),
        seed=_SEED.value,
    )


def at_k_text(at_k, left_out) -> str:
    """The table in lines, with how many tasks had too few plays for a figure."""
    def cell(k, value, tasks):
        return f"@{k} {'–' if value is None else f'{value:.3f}'}" + (f" ({tasks} of the tasks left out: too few plays)" if tasks else "")

    return "\n".join(
        f"  {who:<20} {name:<24} " + "  ".join(cell(k, value, left_out[who][name][k]) for k, value in values.items())
        for who, figures in at_k.items() for name, values in figures.items()
    )  # fmt: skip


def main(argv) -> None:
    """Prints the table, and writes what the flags ask for."""
    logging.set_verbosity(logging.WARNING)
    if not _RUN.value:
        raise ConfigError("--run is missing, e.g. --run=runs/first")
    check_writable("output", _OUTPUT.value)
    check_writable("outcomes", _OUTCOMES.value)
    results, records = evaluate_run(_RUN.value, options_of_flags(), trust.asked())
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(results, indent=1))
    if _OUTCOMES.value:
        pathlib.Path(_OUTCOMES.value).write_text("".join(json.dumps(line) + "\n" for line in outcome_lines(records)))
    print(f"step {results['step']} of {results['run']}, {_TASKS.value} tasks of the {results['split']} split:")
    print(duel_text(results["duels"]) if "duels" in results else page_text(results, results["headline"]))
    if "at_k" in results:
        print(f"expected best of k of {_PLAYS.value} plays, without replacement:\n{at_k_text(results['at_k'], results['at_k_left_out'])}")
