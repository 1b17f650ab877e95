"""How well one coach agrees with another: error, Cohen's kappa and a table of bands, for all actions and by role."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

BANDS = ((0, 2), (2, 4), (4, 6), (6, 8), (8, 10))
EXACT = 0.125  # points


def agreement(said: Sequence[float | None], rubric: Sequence[float], roles: Sequence[str]) -> dict[str, Any]:
    """How well scores agree with a rubric's.

    Args:
      said: of each action; None: there was none, which is counted and left out of the other figures.
      rubric: the score that it should be. roles: who acted.

    Returns:
      `all` and one entry per role, each with `actions`, `missing`, `exact` (share within an eighth of a point), `mae` (mean absolute
      error), `bias` (said − rubric), `spearman`, and `kappa` (Cohen's, quadratic weights, of scores rounded to whole numbers); and `bands`,
      `[5, 5]` counts of actions by the rubric's band and the said one. A figure that does not exist is left out.
    """
    rows = list(zip(said, rubric, roles, strict=True))
    report = {"all": _figures(rows)}
    report |= {role: _figures([row for row in rows if row[2] == role]) for role in dict.fromkeys(roles)}
    table = np.zeros((len(BANDS), len(BANDS)), int)
    for score, true, _ in rows:
        if score is not None:
            table[_band(true), _band(score)] += 1
    return report | {"bands": table.tolist()}


def agreement_text(report: dict[str, Any]) -> str:
    """The table for people."""
    lines = [f"  {'':<12} actions  missing  exact    MAE   bias  spearman  kappa"]
    for name, values in report.items():
        if name != "bands":
            widths = {"exact": 5, "mae": 5, "bias": 5, "spearman": 8, "kappa": 5}
            figures = "  ".join(f"{values[key]:>{width}.3f}" if key in values else "–".rjust(width) for key, width in widths.items())
            lines.append(f"  {name:<12} {values['actions']:>7}  {values['missing']:>7}  {figures}")
    lines.append("  rubric's band (rows) and the coach's " + "  ".join(f"{low}-{high}".rjust(6) for low, high in BANDS))
    for (low, high), row in zip(BANDS, report["bands"]):
        lines.append(f"  {f'{low}-{high}':>36} " + "  ".join(f"{count:>6}" for count in row))
    return "\n".join(lines)


def _figures(rows: Sequence[tuple[float | None, float, str]]) -> dict[str, int | float]:
    pairs = np.asarray([row[:2] for row in rows if row[0] is not None], np.float64).reshape(-1, 2)
    scores, true = pairs.T
    error = scores - true

    def mean(x):
        return float(np.mean(x)) if len(x) else float("nan")

    figures = {
        "exact": mean(np.abs(error) < EXACT),
        "mae": mean(np.abs(error)),
        "bias": mean(error),
        "spearman": _correlation(_ranks(scores), _ranks(true)),
        "kappa": weighted_kappa(np.rint(scores), np.rint(true)),
    }
    counts = {"actions": len(rows), "missing": len(rows) - len(pairs)}
    return counts | {name: value for name, value in figures.items() if math.isfinite(value)}


def weighted_kappa(first: np.ndarray, second: np.ndarray) -> float:
    """Cohen's kappa with quadratic weights: 1 − mean (a_i − b_i)² / mean_{i,j} (a_i − b_j)²; 1 where both always say the same number."""
    if not len(first):
        return float("nan")
    chance = float(np.var(first) + np.var(second) + (first.mean() - second.mean()) ** 2)  # of independent pairs
    return 1.0 if chance == 0 else 1.0 - float(np.mean((first - second) ** 2)) / chance


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; ties get their mean."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[inverse]


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _band(value: float) -> int:
    return next(i for i, (_, high) in enumerate(BANDS) if value < high or high == BANDS[-1][1])
