"""What plays score and are paid by the number of their turns: a table of the report, from the plays that a run recorded."""

import collections
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.reporting import page

_ROWS = 12  # numbers of turns with a row of their own; longer plays share the last


def table_html(plays: Sequence[Mapping[str, Any]], metric: str) -> str:
    """The section; nothing where all recorded plays have the same number of turns. Aborted plays are left out.

    Args:
      plays: in the schema of `episodes`. metric: the name of the score.
    """
    played = [play for play in plays if play["status"] != "aborted"]
    lengths = sorted({play["turns"] for play in played})
    if len(lengths) < 2:
        return ""
    rows: dict[str, list[Mapping[str, Any]]] = collections.defaultdict(list)
    for play in sorted(played, key=lambda one: one["turns"]):
        shared = len(lengths) > _ROWS and play["turns"] >= lengths[_ROWS - 1]
        rows[f"{lengths[_ROWS - 1]} and more" if shared else str(play["turns"])].append(play)
    cells = [
        [turns, page.number(len(some)), page.number(statistics.fmean(map(_score, some))), page.number(statistics.fmean(map(_pay, some)))]
        for turns, some in rows.items()
    ]
    intro = (
        "Means over the recorded plays. The pay of a play is the sum of the team's and the roles' own rewards of its responses, which "
        "returns that add up turns (to_go, trajectory) train on. If it grows with the turns while the score does not, prolonging pays: "
        "see python -m marl_llm check."
    )
    return page.section("Pay by turns", page.table(["turns", "plays", metric.replace("_", " "), "pay of a play"], cells), intro)


def _score(play: Mapping[str, Any]) -> float:
    score = play.get("score")
    return float(score) if page.is_number(score) else float(play["status"] == "success")


def _pay(play: Mapping[str, Any]) -> float:
    """What the responses with which the play went on were paid in all."""
    chosen = [one for step in play["steps"] for one in step["responses"] if one["chosen"]]
    return sum(float(one["team"]) + float(one["local"]) for one in chosen)
