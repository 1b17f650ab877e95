"""Evaluates any checkpoint of a run on held-out tasks: the team before and after, swapped, with each role's start put back, the floor.

    python -m experiments.evaluate --run=runs/first                                   the newest checkpoint, 500 tasks of the test split
    python -m experiments.evaluate --run=runs/first --step=200 --tasks=1000 --seed=7 --temperature=1 --plays=4
    python -m experiments.evaluate --run=runs/first --seats=tool=start,planner=trained            one table of seats instead of the page
    python -m experiments.evaluate --run=runs/first --seats=tool=run:runs/second                  the Tool of another run in this team

A seat is trained[:MODEL], start[:MODEL], run:DIR[@STEP][#MODEL], scripted, random, and where play is hosted outside:URL#NAME or human
(`marl_llm.training.seats`); roles that are left out are trained. --seats may be given many times. Prints a table and writes it as JSON
with --output, and every play's outcome with --outcomes. Nothing in the run directory is changed.
"""

from __future__ import annotations

import json
import pathlib

from absl import flags, logging

from experiments import command
from experiments.building import opened
from experiments.command import ConfigError
from experiments.measuring import measure, page_text, tables

_RUN = flags.DEFINE_string("run", None, "Run directory.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest. Step 0 is the warm start.")
_TASKS = flags.DEFINE_integer("tasks", 500, "Held-out tasks.", lower_bound=1)
_PLAYS = flags.DEFINE_integer("plays", 1, "Plays of each task.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", None, "Seed of the evaluation; default: the config's.")
_SPLIT = flags.DEFINE_enum("split", "test", ["test", "validation"], "Which held-out split.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_SEATS = flags.DEFINE_multi_string("seats", [], "ROLE=SEAT,ROLE=SEAT: a table of its own; default: the whole page.")
_OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.")
_OUTCOMES = flags.DEFINE_string("outcomes", None, "File for one line of JSON per play.")


def seatings(plan, texts: list[str]) -> dict[str, dict[str, str]]:
    """The tables of seats by name. Raises `ConfigError` for a seat or a role that there is not."""
    from marl_llm.training import parse_seats
    from marl_llm.training.seats import seat_table

    if not texts:
        return tables(plan)
    try:
        found = {text: {role: str(seat) for role, seat in parse_seats(text).items()} for text in texts}
        for seats in found.values():
            seat_table(seats, plan.assignment.roles, plan.assignment.policies)
        return found
    except ValueError as error:
        raise ConfigError(f"--seats: {error}") from error


def evaluate() -> dict:
    """Carries the flags out and returns the figures."""
    if not _RUN.value:
        raise ConfigError("--run is missing, e.g. --run=runs/first")
    with opened(_RUN.value, _STEP.value, seed=_SEED.value) as (_, plan, team, step):
        try:
            named = seatings(plan, _SEATS.value)
            page, records = measure(team, named, _SPLIT.value, _TASKS.value, temperature=_TEMPERATURE.value, plays=_PLAYS.value)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        results = {"run": _RUN.value, "step": step, "split": _SPLIT.value, "headline": team.headline, **page}
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(results, indent=1))
    if _OUTCOMES.value:
        lines = [{"seats": name, **one} for name, record in records.items() for one in outcomes_of(record)]
        pathlib.Path(_OUTCOMES.value).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return results


def outcomes_of(record) -> list[dict]:
    """One JSON object per play."""
    return [{name: getattr(one, name) for name in ("task", "play", "score", "turns", "void")} for one in record.outcomes]


def main(argv) -> None:
    """Prints the table."""
    logging.set_verbosity(logging.WARNING)
    results = evaluate()
    print(f"step {results['step']} of {results['run']}, {_TASKS.value} tasks of the {results['split']} split:")
    print(page_text(results, results["headline"]))


if __name__ == "__main__":
    command.run(main)
