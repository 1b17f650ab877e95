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

from marl_llm.runs import command, trust
from marl_llm.runs.building import opened
from marl_llm.runs.command import ConfigError
from marl_llm.runs.duels import duel_seats, duel_table, duel_text
from marl_llm.runs.measuring import measure, page_text, tables

FLAGS = flags.FlagValues()
_RUN = flags.DEFINE_string("run", None, "Run directory.", flag_values=FLAGS)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint's step; default: the newest. Step 0 is the warm start.", flag_values=FLAGS)
_TASKS = flags.DEFINE_integer("tasks", 500, "Held-out tasks.", lower_bound=1, flag_values=FLAGS)
_PLAYS = flags.DEFINE_integer("plays", 1, "Plays of each task.", lower_bound=1, flag_values=FLAGS)
_K = flags.DEFINE_list("k", [], "Also the expected best of so many plays of a task, e.g. 1,3,5; at most --plays.", flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", None, "Seed of the evaluation; default: the config's.", flag_values=FLAGS)
_SPLIT = flags.DEFINE_enum("split", "test", ["test", "validation"], "Which held-out split.", flag_values=FLAGS)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0, flag_values=FLAGS)
_SEATS = flags.DEFINE_multi_string("seats", [], "ROLE=SEAT,ROLE=SEAT: a table of its own; default: the whole page.", flag_values=FLAGS)
_OPPONENTS = flags.DEFINE_list(
    "opponents", [], "Seats that each role plays against, trained and as its start: shares won, drawn and lost.", flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the figures as JSON.", flag_values=FLAGS)
_OUTCOMES = flags.DEFINE_string("outcomes", None, "File for one line of JSON per play.", flag_values=FLAGS)


def seatings(plan, texts: list[str]) -> dict[str, dict]:
    """The tables of seats by name. Raises `ConfigError` for a seat or a role that there is not."""
    from marl_llm.training import parse_seats
    from marl_llm.training.seats import seat_table

    if not texts:
        return tables(plan)
    try:
        return {text: seat_table(parse_seats(text), plan.assignment.roles, plan.assignment.policies) for text in texts}
    except ValueError as error:
        raise ConfigError(f"--seats: {error}") from error


def evaluate() -> dict:
    """Carries the flags out and returns the figures."""
    if not _RUN.value:
        raise ConfigError("--run is missing, e.g. --run=runs/first")
    with opened(_RUN.value, _STEP.value, trust.asked(), seed=_SEED.value) as (_, plan, team, step):
        try:
            how = dict(plays=_PLAYS.value, temperature=_TEMPERATURE.value)
            if _OPPONENTS.value and (_SEATS.value or _K.value):
                raise ConfigError("--opponents makes tables of its own: leave --seats and --k out")
            if _OPPONENTS.value:
                named = duel_seats(plan, _OPPONENTS.value)
                records = {key: team.evaluate(seats, _SPLIT.value, _TASKS.value, **how) for key, seats in named.items()}
                page = {"plays": _PLAYS.value, "temperature": _TEMPERATURE.value, "duels": duel_table(records)}
            else:
                page, records = measure(team, seatings(plan, _SEATS.value), _SPLIT.value, _TASKS.value, **how)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            at_k = {name: best_of_plays(record, _K.value, _PLAYS.value) for name, record in records.items()} if _K.value else {}
        except ValueError as error:
            raise ConfigError(f"--k={','.join(_K.value)}: {error}") from error
        results = {"run": _RUN.value, "step": step, "split": _SPLIT.value, "headline": team.headline, **page}
        results |= {"at_k": at_k} if at_k else {}
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(results, indent=1))
    if _OUTCOMES.value:
        columns = ("task", "play", "score", "turns", "void")
        said = {name if isinstance(name, str) else " ".join(name): record for name, record in records.items()}
        plays = [{"seats": name} | {c: getattr(one, c) for c in columns} for name, record in said.items() for one in record.outcomes]
        pathlib.Path(_OUTCOMES.value).write_text("".join(json.dumps(play) + "\n" for play in plays))
    return results


def best_of_plays(record, sizes: list[str], plays: int) -> dict[str, dict[str, float]]:
    """Figure -> k -> mean over tasks of the expected best of k plays, of the headline and of every figure of the team.

    Raises `ValueError` for sizes that are no whole numbers between 1 and `plays`.
    """
    if wrong := [k for k in sizes if not k.isdigit() or not 1 <= int(k) <= plays]:
        raise ValueError(f"{wrong[0]!r} is no whole number between 1 and --plays={plays}")
    names = dict.fromkeys([record.headline, *(name for one in record.played for name in one.team)])
    return {name: {k: record.at_k(name, int(k)) for k in sizes} for name in names}


def at_k_text(at_k) -> str:
    """The table in lines."""
    def line(who, name, found):
        return f"  {who:<20} {name:<24} " + "  ".join(f"@{k} {value:.3f}" for k, value in found.items())

    return "\n".join(line(who, name, found) for who, figures in at_k.items() for name, found in figures.items())


def main(argv) -> None:
    """Prints the table."""
    logging.set_verbosity(logging.WARNING)
    results = evaluate()
    print(f"step {results['step']} of {results['run']}, {_TASKS.value} tasks of the {results['split']} split:")
    print(duel_text(results["duels"]) if "duels" in results else page_text(results, results["headline"]))
    if "at_k" in results:
        print(f"expected best of k of {_PLAYS.value} plays, without replacement:\n{at_k_text(results['at_k'])}")


if __name__ == "__main__":
    command.run(main, FLAGS)
