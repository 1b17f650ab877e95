"""How good predictions are: raw metrics of submissions that came, and fair ones that count those that did not (MAPPA, section 3.2).

    fair = success · raw + (1 − success) · penalty

The penalty of a missing submission is 0.5 for accuracy, 0 for F1, and half of the target's range for errors; the raw metric is a mean over
successes. Errors are shares of the range of the answers. A reading: F1 is the mean over the answers' classes, and a missing AUC counts 0.5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

KINDS = ("classification", "regression")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of predictions."""

    name: str  # in tables and figures
    kind: str  # of task, one of `KINDS`
    function: Callable[[np.ndarray, np.ndarray], float]  # (truth, predictions), arrays of one length -> a number
    penalty: float  # what a play without a valid submission counts
    larger_is_better: bool = True  # its direction
    numbers: bool = False  # whether predictions must be numbers; otherwise they are labels, compared as texts


def accuracy(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Share of equal labels."""
    return float(np.mean(truth == predicted))


def macro_f1(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Mean over the classes of `truth` of 2·TP / (2·TP + FP + FN)."""
    scores = []
    for label in np.unique(truth):
        hit, wanted, named = np.sum((truth == label) & (predicted == label)), np.sum(truth == label), np.sum(predicted == label)
        scores.append(2 * hit / (wanted + named))
    return float(np.mean(scores))


def roc_auc(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Probability that a case of the larger of two classes has the larger prediction; ties count half.

    Raises `ValueError` unless the truth has two classes.
    """
    classes = np.unique(truth)
    if len(classes) != 2:
        raise ValueError(f"an AUC needs two classes among the answers, which have {len(classes)}")
    _, place, count = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # from 1, the mean among equals
    above = truth == classes[1]
    n, m = int(above.sum()), int((~above).sum())
    return float((ranks[above].sum() - n * (n + 1) / 2) / (n * m))


def mean_absolute_error(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Mean |error|, as a share of the range of the truth, in [0, 1e6]."""
    return _share(np.mean(np.minimum(np.abs(predicted / 2 - truth / 2), 1e300)) * 2, truth)


def root_mean_square_error(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Square root of the mean square, as a share of the range of the truth, in [0, 1e6]."""
    error = np.abs(predicted / 2 - truth / 2)
    top = float(error.max())
    return _share(0.0 if top == 0 else 2 * min(top, 1e300) * float(np.sqrt(np.mean((error / top) ** 2))), truth)


def _share(error: float, truth: np.ndarray) -> float:
    """An error as a share of the range; one beyond any sense counts a million ranges, so that means stay finite."""
    return float(min(error / (float(truth.max()) - float(truth.min())), 1e6))


METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "classification", accuracy, 0.5),
        Metric("f1", "classification", macro_f1, 0.0),
        Metric("auc", "classification", roc_auc, 0.5, numbers=True),
        Metric("mae", "regression", mean_absolute_error, 0.5, larger_is_better=False, numbers=True),
        Metric("rmse", "regression", root_mean_square_error, 0.5, larger_is_better=False, numbers=True),
    )
}


def fair(success: float, raw: float | None, penalty: float) -> float:
    """The fair figure of a share of successes and their mean; `raw` is None where nothing succeeded.

    Raises `ValueError` for a raw figure without success, or a success without one.
    """
    if (raw is None) != (success == 0):
        raise ValueError(f"success={success} with raw={raw}: a raw figure is the mean over successes, and None without any")
    return (0.0 if raw is None else success * raw) + (1 - success) * penalty


# Hard caps of a coach's score for the Analyst (MAPPA, C.4): at least this AUC, or less than this share of the range.
AUC_CAPS = ((0.85, 9), (0.75, 8), (0.65, 6), (0.55, 4), (0.0, 3))
RMSE_CAPS = ((0.10, 9), (0.25, 8), (0.50, 6))


def score_cap(auc: float | None = None, rmse: float | None = None) -> int | None:
    """The highest score that the outcome allows; None without an outcome. An error of exactly half the range falls to 4."""
    if auc is not None:
        return next(cap for least, cap in AUC_CAPS if auc >= least)
    return None if rmse is None else next((cap for below, cap in RMSE_CAPS if rmse < below), 4)
