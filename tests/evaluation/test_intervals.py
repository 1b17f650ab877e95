"""Confidence intervals against values worked out by hand and from published tables."""

import math

import numpy as np
import pytest

from marl_llm.evaluation import over_seeds, wilson
from marl_llm.evaluation.intervals import jeffreys


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),  # z² / (n + z²) with z = 1.959964
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),  # 0.5 ± z / (2 √(n + z²))
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), Statistics in Medicine 17, Table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(successes, episodes, low, high):
    assert np.allclose(wilson(successes, episodes), (low, high), rtol=0, atol=5.1e-5)


@pytest.mark.parametrize(("successes", "episodes"), [(470, 500), (1, 7), (33, 100), (499, 500)])
def test_wilson_solves_the_score_equation(successes, episodes):
    """Both ends p satisfy |p̂ - p| = z √(p (1 - p) / n)."""
    for p in wilson(successes, episodes):
        assert abs(successes / episodes - p) == pytest.approx(1.959963985 * math.sqrt(p * (1 - p) / episodes), rel=1e-7)


def test_wilson_is_symmetric_and_narrows():
    for n in (3, 50, 999):
        for k in range(0, n + 1, max(n // 7, 1)):
            low, high = wilson(k, n)
            mirrored = wilson(n - k, n)
            assert np.allclose((low, high), (1 - mirrored[1], 1 - mirrored[0]))
            assert 0 <= low <= k / n <= high <= 1
            assert high - low > 3 * (lambda i: i[1] - i[0])(wilson(100 * k, 100 * n))


def test_wilson_covers_as_often_as_it_says():
    """Exact coverage, summed over all outcomes of the binomial: near 95 % on average over p."""
    n, covered = 40, []
    for p in np.linspace(0.02, 0.98, 97):
        chance = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
        covered.append(sum(c for k, c in enumerate(chance) if wilson(k, n)[0] <= p <= wilson(k, n)[1]))
    assert abs(np.mean(covered) - 0.95) < 0.006
    assert min(covered) > 0.85


@pytest.mark.parametrize("interval", [wilson, jeffreys])
@pytest.mark.parametrize(("successes", "episodes"), [(0, 0), (-1, 3), (4, 3)])
def test_what_is_no_rate_is_refused(successes, episodes, interval):
    with pytest.raises(ValueError, match=f"{successes} successes in {episodes} episodes is no rate"):
        interval(successes, episodes)


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [(0, 7, 0.0, 0.292), (1, 7, 0.016, 0.501), (2, 7, 0.065, 0.648), (0, 10, 0.0, 0.217), (10, 10, 0.783, 1.0), (3, 10, 0.093, 0.606)],
)
def test_jeffreys(successes, episodes, low, high):
    """Brown, Cai and DasGupta (2001), Statistical Science 16, Table 5."""
    assert np.allclose(jeffreys(successes, episodes), (low, high), rtol=0, atol=6e-4)


def test_over_seeds():
    """Mean 0.9; deviations -0.04, 0.01, 0.03; variance 0.0026 / 2; half-width 4.30265 √(0.0013 / 3)."""
    assert np.allclose(over_seeds([0.86, 0.91, 0.93]), (0.9, 0.9 - 0.0895670, 0.9 + 0.0895670), atol=1e-6)
    assert np.allclose(over_seeds([0.0, 1.0]), (0.5, 0.5 - 6.3531024, 0.5 + 6.3531024), atol=1e-6)  # 12.7062 · √(0.5 / 2)
    assert over_seeds([0.4]) == (0.4, -math.inf, math.inf)
    assert over_seeds([0.7] * 5)[1:] == pytest.approx((0.7, 0.7))
    with pytest.raises(ValueError, match="no seeds to average"):
        over_seeds([])


@pytest.mark.parametrize(("seeds", "t"), [(2, 12.706), (11, 2.228), (31, 2.042), (32, 2.0395), (61, 2.0003), (121, 1.9799)])
def test_over_seeds_uses_students_quantile(seeds, t):
    values = np.arange(seeds, dtype=float).tolist()
    _, low, high = over_seeds(values)
    assert (high - low) / 2 / (np.std(values, ddof=1) / math.sqrt(seeds)) == pytest.approx(t, abs=5e-4)
