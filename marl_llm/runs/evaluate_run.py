"""Evaluates a checkpoint of a run on held-out tasks, with any table of seats."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from marl_llm.runs.building import opened
from marl_llm.runs.command import ConfigError
from marl_llm.runs.duels import duel_seats, duel_table
from marl_llm.runs.measuring import measure, tables

if TYPE_CHECKING:
    from marl_llm.evaluation import Evaluation
    from marl_llm.runs.resolve import Plan

SPLITS = ("test", "validation")
FIGURES = ("task", "play", "score", "turns", "aborted")


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """What is measured of a run.

    Attributes:
      step: of the checkpoint; None: the newest. Step 0 is the supervised warm-up.
      split, tasks, plays: how many held-out tasks of which split ("test" or "validation"), and plays of each.
      temperature: 0 is greedy.
      seats: texts such as "tool=start,planner=trained", a table each; empty: the whole page (before, after, swapped, ...).
      opponents: seats that each role plays against, e.g. "random"; a table of its own.
      best_of: also the expected best of so many plays of a task, each at most `plays`.
      seed: of the evaluation; None: the config's.

    Raises `ConfigError` for an unknown split, for what is less than one, and for opponents beside seats or `best_of`.
    """

    step: int | None = None
    split: str = "test"
    tasks: int = 500
    plays: int = 1
    temperature: float = 0.0
    seats: tuple[str, ...] = ()
    opponents: tuple[str, ...] = ()
    best_of: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self):
        if self.split not in SPLITS:
            raise ConfigError(f"split={self.split!r} must be one of {', '.join(SPLITS)}")
        if self.tasks < 1 or self.plays < 1 or self.temperature < 0:
            raise ConfigError(f"tasks={self.tasks}, plays={self.plays}: at least 1; temperature={self.temperature:g}: at least 0")
        if wrong := [size for size in self.best_of if not 1 <= size <= self.plays]:
            raise ConfigError(f"best of {wrong[0]} plays: {wrong[0]} is no whole number between 1 and --plays={self.plays}")
        if self.opponents and (self.seats or self.best_of):
            raise ConfigError("--opponents makes tables of its own: leave --seats and --k out")


def evaluate_run(
    run: str | pathlib.Path, options: EvaluationOptions = EvaluationOptions(), trusted: bool = False
) -> tuple[dict[str, Any], dict[str, Evaluation]]:
    """`(results, records)` of a run directory: the figures as evaluation.json holds them, and every table's plays by its name.

    Nothing in the directory is changed. Raises `ConfigError` for a run, a checkpoint, a seat or a role that there is not, and for a
    directory that is neither this user's nor `trusted` (docs/trust.md).
    """
    with opened(run, options.step, trusted, seed=options.seed) as (_, plan, team, step):
        how = {"plays": options.plays, "temperature": options.temperature}
        try:
            if options.opponents:
                named = duel_seats(plan, options.opponents)
                records = {key: team.evaluate(seats, options.split, options.tasks, **how) for key, seats in named.items()}
                page = how | {"duels": duel_table(records)}
            else:
                page, records = measure(team, parse_seat_tables(plan, options.seats), options.split, options.tasks, **how)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        results = {"run": str(run), "step": step, "split": options.split, "headline": team.headline, **page}
    if options.best_of:
        measured = {name: best_of_plays(record, options.best_of) for name, record in records.items()}
        results["at_k"], results["at_k_left_out"] = ({name: pair[i] for name, pair in measured.items()} for i in (0, 1))
    return results, {name if isinstance(name, str) else " ".join(name): record for name, record in records.items()}


def parse_seat_tables(plan: Plan, texts: tuple[str, ...]) -> dict[str, dict]:
    """The tables of seats by name; without texts, the page's. Raises `ConfigError` for a seat or a role that there is not."""
    from marl_llm.training import parse_seats
    from marl_llm.training.seats import seat_table

    if not texts:
        return tables(plan)
    try:
        return {text: seat_table(parse_seats(text), plan.assignment.roles, plan.assignment.policies) for text in texts}
    except ValueError as error:
        raise ConfigError(f"--seats: {error}") from error


def best_of_plays(record: Evaluation, sizes: tuple[int, ...]) -> tuple[dict[str, dict[str, float | None]], dict[str, dict[str, int]]]:
    """Figure -> k -> mean over tasks of the expected best of k plays, of the headline and of every figure of the team; and how many tasks
    that leaves out, because fewer than k of their plays were not aborted and measured it. None where it leaves all out."""
    from marl_llm.evaluation import at_k

    best, left_out = {}, {}
    tasks = len({outcome.task for outcome in record.outcomes})
    for name in dict.fromkeys([record.headline, *(name for outcome in record.played for name in outcome.team)]):
        pools = {size: [pool for pool in record.pools(name).values() if len(pool) >= size] for size in sizes}
        best[name] = {str(size): at_k(whole, size) if whole else None for size, whole in pools.items()}
        left_out[name] = {str(size): tasks - len(whole) for size, whole in pools.items()}
    return best, left_out


def outcome_lines(records: dict[str, Evaluation]) -> list[dict[str, Any]]:
    """One value per play: its table of seats, task, play, score, turns and whether it is aborted."""
    return [
        {"seats": name} | {figure: getattr(outcome, figure) for figure in FIGURES}
        for name, record in records.items()
        for outcome in record.outcomes
    ]
