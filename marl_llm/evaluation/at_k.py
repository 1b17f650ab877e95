"""Measures of the best of k samples: pass@k, acc@k and coop@k (MAGRPO, Appendix B, Eqs. 6 to 8).

All three are the mean over tasks of E[max of k samples], drawn without replacement from a pool of M samples per task, and differ in what a
sample's value is: whether all tests passed, the share of tests passed, or the normalised cooperation return. The expectation is computed
exactly from the order statistics of the pool; `draws` gives the estimate by random subsets that the paper's Table 3 may have used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def best_of(values: Sequence[float], k: int) -> float:
    """E[max of k of these values, drawn without replacement].

    E = sum_{i=k}^{M} v_(i) C(i-1, k-1) / C(M, k), with v_(1) <= ... <= v_(M). Of values 0 and 1 this is the estimator of pass@k of Chen et
    al. (arXiv 2107.03374, Eq. 1). Raises `ValueError` unless 1 <= k <= M.
    """
    pool = sorted(values)
    if not 1 <= k <= len(pool):
        raise ValueError(f"k={k} of a pool of {len(pool)} samples: k must lie between 1 and the size of the pool")
    subsets = math.comb(len(pool), k)
    return math.fsum(value * (math.comb(i, k - 1) / subsets) for i, value in enumerate(pool) if i >= k - 1)


def at_k(pools: Sequence[Sequence[float]], k: int) -> float:
    """Mean of `best_of` over tasks, each with its pool of samples.

    pass@k: values are 1.0 where all tests passed, else 0.0 (Eq. 6). acc@k: shares of tests passed (Eq. 7). coop@k: normalised cooperation
    returns (Eq. 8). Raises `ValueError` without a task, or where a pool is smaller than k.
    """
    if not pools:
        raise ValueError("no task to average over")
    return math.fsum(best_of(pool, k) for pool in pools) / len(pools)


def at_k_by_draws(pools: Sequence[Sequence[float]], k: int, seed: int = 0, draws: int = 1) -> float:
    """`at_k` estimated by `draws` random subsets per task, one by default. Raises `ValueError` as `at_k`, or for fewer draws than one."""
    if not pools or draws < 1:
        raise ValueError("no task to average over" if not pools else f"draws={draws} must be at least 1")
    rng = np.random.default_rng(seed)
    maxima = []
    for pool in pools:
        if not 1 <= k <= len(pool):
            raise ValueError(f"k={k} of a pool of {len(pool)} samples: k must lie between 1 and the size of the pool")
        maxima += [max(pool[i] for i in rng.choice(len(pool), k, replace=False)) for _ in range(draws)]
    return math.fsum(maxima) / len(maxima)
