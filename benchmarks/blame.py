"""Whom a coach blames: twelve faults, each injected alone into perfect plays of the small data pipeline (MAPPA, section 3.2).

    python -m benchmarks.blame                                    the rubric, at the end of the play and at the action
    python -m benchmarks.blame --coach=runs/coach [--tables=10]   a small coach (`python -m marl_llm coach`), at the end

A play is right where the responsible action alone has the lowest score. Prints one JSON line: the share of plays that are right, over all
faults and for each one, and for a small coach how far it is from the rubric in these plays.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any


def plays(environment: Any, tables: int, when: str) -> list[tuple[Any, list[Any]]]:
    """(fault, views of its actions) of every play: each fault on `tables` test tables, of its kind if it has one."""
    from benchmarks.pipeline_faults import FAULTS, faulty_player
    from marl_llm.cli.coach import scripted
    from marl_llm.coaching.small import views_of

    given, played = environment.tasks("test", 0, 4 * tables), []
    for fault in FAULTS:
        tasks = [task for task in given if fault.kind in (None, task.stratum)][:tables]
        by_task = collections.defaultdict(list)
        for view in views_of(scripted(environment, faulty_player(fault), tasks, 1), when):
            by_task[view.task["given"].digest].append(view)
        played += [(fault, views) for views in by_task.values()]
    return played


def right(role: str, views: Sequence[Any], scores: Sequence[float | None]) -> bool:
    """Whether the action of this role alone has the lowest score, and none is missing."""
    if None in scores:
        return False
    own = [score for view, score in zip(views, scores, strict=True) if view.call.role == role]
    others = [score for view, score in zip(views, scores, strict=True) if view.call.role != role]
    return max(own) < min(others)


def shares(played: Sequence[tuple[Any, list[Any]]], scores: Sequence[float | None]) -> dict[str, Any]:
    """`scores`: of all views, one play after the other."""
    verdicts, at = collections.defaultdict(list), 0
    for fault, views in played:
        verdicts[fault.name].append(right(fault.role, views, scores[at : at + len(views)]))
        at += len(views)
    every = [verdict for some in verdicts.values() for verdict in some]
    return {"right": round(sum(every) / len(every), 4), "plays": len(every)} | {
        "faults": {name: round(sum(some) / len(some), 4) for name, some in verdicts.items()}
    }


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blame", description=__doc__.splitlines()[0])
    parser.add_argument("--coach", type=pathlib.Path, help="directory of a small coach; without it the rubric is asked")
    parser.add_argument("--tables", type=int, default=10, help="test tables per fault (%(default)s)")
    asked = parser.parse_args(argv)
    from marl_llm.runs.command import code_of

    try:
        report = of_rubric(asked.tables) if asked.coach is None else of_small(asked.coach, asked.tables)
    except Exception as error:
        return code_of(error)
    print(json.dumps(report))
    return 0


def _world() -> Any:
    from marl_llm.games import make_game

    return make_game("tiny_pipeline")


def of_rubric(tables: int, environment: Any = None) -> dict[str, Any]:
    """The rubric's shares, by when it is asked."""
    return {when: _rubric(environment or _world(), tables, when) for when in ("end", "action")}


def _rubric(environment: Any, tables: int, when: str) -> dict[str, Any]:
    from marl_llm.coaching.small import rubric_value

    played = plays(environment, tables, when)
    return shares(played, [rubric_value(view, environment.guide) for _, views in played for view in views])


def of_small(folder: pathlib.Path, tables: int) -> dict[str, Any]:
    """A small coach's shares, and its mean absolute error against the rubric on the same actions."""
    from marl_llm.cli.coach import scores_of
    from marl_llm.coaching.small import read_record, rubric_value

    environment = _world()
    played = plays(environment, tables, "end")
    views = [view for _, some in played for view in some]
    scores = scores_of(folder, read_record(folder, environment.guide)["max_prompt"], environment.guide, views)
    wanted = [rubric_value(view, environment.guide) for view in views]
    gaps = [abs(a - b) for a, b in zip(scores, wanted, strict=True) if a is not None]
    known = {"missing": sum(score is None for score in scores), "mae": round(sum(gaps) / max(1, len(gaps)), 3)}
    return {"end": shares(played, scores) | known}


if __name__ == "__main__":
    sys.exit(main())
