"""Confidence intervals of 95 %: for success rates, for means of tasks with several plays, for differences, and for means over seeds.

How often each holds the truth is simulated by `python -m benchmarks.intervals`; the table is in docs/findings.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.special import betaincinv, stdtrit

Z95 = 1.959963984540054


def wilson(successes: float | int, episodes: float | int) -> tuple[float, float]:
    """95 % Wilson score interval of a success rate. Raises `ValueError` unless `0 <= successes <= episodes` and `episodes >= 1`."""
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes in {episodes} episodes is no rate")
    p, n, z = successes / episodes, episodes, Z95
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # the ends of all and of none are exact, which rounding would miss
    return max(0.0, centre - half) if successes else 0.0, min(1.0, centre + half) if successes < episodes else 1.0


def jeffreys(successes: float | int, episodes: float | int) -> tuple[float, float]:
    """95 % interval of a success rate with equal tails of Jeffreys' posterior, Beta(successes + 1/2, failures + 1/2).

    The ends of none and of all are 0 and 1 (Brown, Cai and DasGupta 2001, doi 10.1214/ss/1009213286, section 3.1.3). Raises `ValueError`
    as `wilson`.
    """
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes in {episodes} episodes is no rate")
    a, b = successes + 0.5, episodes - successes + 0.5
    low, high = (float(betaincinv(a, b, tail)) for tail in (0.025, 0.975))
    return low if successes else 0.0, high if successes < episodes else 1.0


def clustered(scores: Sequence[Sequence[float | int]]) -> tuple[float, float]:
    """95 % interval of the mean of all scores, where those of one inner list (a task's plays, a cluster's tasks) belong together.

    Scores within [0, 1]: the outer ends of Wilson's and Jeffreys' intervals (Wilson's is too short at few successes, Jeffreys' at none)
    with an effective sample size, the number of independent successes and failures whose mean varies as much as this one. That variance
    is between clusters (Miller, "Adding Error Bars to Evals", arXiv 2411.00640, Eq. 4, with its G/(G-1)), with one cluster more whose
    variance is that of a single play: few clusters that agree by chance do not give a width of zero. The effective size is never below
    the number of clusters. With one score of 0 or 1 per cluster it is that number.
    Other scores: Student's t with G - 1 degrees of freedom. One cluster, or none, says nothing: (0, 1).
    """
    scores = [cluster for cluster in scores if len(cluster)]
    groups = len(scores)
    if groups < 2:
        return 0.0, 1.0
    count, sizes = sum(map(len, scores)), [len(cluster) for cluster in scores]
    mean = sum(map(sum, scores)) / count
    variance = sum(r * r for r in _residuals(scores)) * groups / (groups - 1) / count**2
    if any(not 0 <= score <= 1 for cluster in scores for score in cluster):
        half = float(stdtrit(groups - 1, 0.975)) * math.sqrt(variance)
        return mean - half, mean + half
    mean = min(1.0, max(0.0, mean))  # a sum of floats may be past 1
    shrunk = (mean * groups + 1) / (groups + 2)
    variance = ((groups - 1) * variance + shrunk * (1 - shrunk) / groups) / groups
    size = max(mean * (1 - mean) / variance, count**2 / sum(n * n for n in sizes))
    ends = wilson(mean * size, size), jeffreys(mean * size, size)
    return min(low for low, _ in ends), max(high for _, high in ends)


def difference(scores: Sequence[Sequence[float | int]]) -> tuple[float, float]:
    """95 % interval of the mean of differences of two rates, each within [-1, 1]; those of one inner list belong together.

    Two tasks more, that change with chance 1/2 in either direction, are added to the G clusters (the adjustment of Agresti and Min 2005,
    doi 10.1002/sim.1781, which adds 1/2 to each cell of a paired table): few clusters that agree do not give a width of zero. One
    cluster, or none, says nothing: (-1, 1). Differences outside of [-1, 1] are measured in units of the largest.
    """
    scores = [cluster for cluster in scores if len(cluster)]
    unit = max([1.0, *(abs(score) for cluster in scores for score in cluster)])
    groups, count = len(scores), sum(map(len, scores))
    if groups < 2:
        return -unit, unit
    mean = sum(map(sum, scores)) / count / unit
    squares = sum((r * groups / count / unit) ** 2 for r in _residuals(scores)) + groups * mean**2
    centre = mean * groups / (groups + 2)
    half = Z95 * math.sqrt(((squares + 1) / (groups + 2) - centre**2) / (groups + 2))
    return max(-1.0, centre - half) * unit, min(1.0, centre + half) * unit


def _residuals(scores: Sequence[Sequence[float | int]]) -> list[float | int]:
    """Each cluster's total less what it would be at the mean of all."""
    mean = sum(map(sum, scores)) / sum(map(len, scores))
    return [sum(cluster) - len(cluster) * mean for cluster in scores]


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % Student interval over seeds: `(mean, low, high)`; one seed has an infinite interval."""
    if not values:
        raise ValueError("no seeds to average")
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, -math.inf, math.inf
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half
