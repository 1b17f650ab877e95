"""Confidence intervals for success rates and for means over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
# two-sided 95 % quantiles of Student's t by degrees of freedom; above 30 an expansion in 1/df is right to four digits
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
       2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """95 % Wilson score interval of a success rate. Raises `ValueError` unless `0 <= successes <= episodes > 0`."""
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes in {episodes} episodes is no rate")
    p, n, z = successes / episodes, episodes, Z95
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % Student interval over seeds: `(mean, low, high)`; one seed has an infinite interval."""
    if not values:
        raise ValueError("no seeds to average")
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return mean, -math.inf, math.inf
    t = T95[n - 2] if n - 2 < len(T95) else Z95 + (Z95**3 + Z95) / (4 * (n - 1)) + 2.823 / (n - 1) ** 2
    half = t * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half
