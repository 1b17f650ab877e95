"""How often the 95 % intervals hold the true figure, and how often a planted difference of five points is found, by simulation.

    python -m benchmarks.intervals --trials=2000 --seed=0

Tasks are drawn with their own chance of success (Beta of mean .6: some are easy, some hopeless), plays of a task with that chance; the
truth is the mean over all tasks that could be drawn. Cases: one play a task, four and sixteen (clustered by task), scores between
0 and 1 (clustered), tasks that come in clusters of ten alike. A second team is better by five points on every task: `found` is the share
of trials whose paired interval lies above 0, `found_unpaired` that of the interval that forgets which task was which, and `false_alarms`
the share of paired intervals without 0 when the two teams are equally good.

Writes the coverage for few tasks as a table to stderr, with the coverages that single plays allow at all (docs/findings.md), and prints
one JSON line;
exit code 1 when a coverage of a case lies outside 93 to 97 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

import numpy as np

from marl_llm.evaluation import Evaluation, Outcome, clustered, paired, wilson
from marl_llm.evaluation.intervals import difference

MEAN, SPREAD = 0.6, 2.0  # of the Beta: a + b
GAIN = 0.05


def chances(dice: np.random.Generator, tasks: int, clusters: int = 0) -> tuple[np.ndarray, list[str]]:
    """Each task's chance of success, and its cluster's name."""
    drawn = dice.beta(MEAN * SPREAD, (1 - MEAN) * SPREAD, clusters or tasks)
    if not clusters:
        return drawn, [""] * tasks
    return np.repeat(drawn, tasks // clusters), [str(i // (tasks // clusters)) for i in range(tasks)]


def evaluation(scores: np.ndarray, names: list[str]) -> Evaluation:
    """The record of scores `[tasks, plays]`."""
    rows = (Outcome(task, play, float(score), 1, cluster=names[task]) for (task, play), score in np.ndenumerate(scores))
    return Evaluation("test", {}, 1.0, "success", tuple(rows), {})


def play(dice: np.random.Generator, chance: np.ndarray, plays: int, graded: bool) -> np.ndarray:
    """Scores `[tasks, plays]`: 0 or 1, or with `graded` anything between, of the same mean."""
    wide = np.repeat(chance[:, None], plays, 1)
    if graded:
        return dice.beta(np.maximum(wide, 1e-3) * 3, np.maximum(1 - wide, 1e-3) * 3)
    return (dice.random(wide.shape) < wide).astype(float)


def coverage(dice: np.random.Generator, trials: int, tasks: int, plays: int, graded: bool = False, clusters: int = 0) -> float:
    """Share of trials whose interval holds the true mean."""
    held = 0
    for _ in range(trials):
        chance, names = chances(dice, tasks, clusters)
        low, high = evaluation(play(dice, chance, plays, graded), names).interval
        held += low <= MEAN <= high
    return held / trials


def power(dice: np.random.Generator, trials: int, tasks: int, plays: int, gain: float) -> tuple[float, float]:
    """Shares of trials in which the paired and the unpaired interval lie above 0 (without a gain: do not hold 0)."""
    seen = np.zeros(2)
    for _ in range(trials):
        chance = chances(dice, tasks)[0] * (1 - gain)
        first, second = (evaluation(play(dice, p, plays, False), [""] * tasks) for p in (chance, chance + gain))
        low, high = paired(first, second)["interval"]
        half = math.hypot(*(np.subtract(*reversed(record.interval)) / 2 for record in (first, second)))
        apart = second.success - first.success

        def alarm(lower, upper):
            return lower > 0 or (gain == 0 and upper < 0)

        seen += alarm(low, high), alarm(apart - half, apart + half)
    return tuple(seen / trials)


RATES = (0.0, 0.1, 0.5, 0.9, 1.0)


def few(dice: np.random.Generator, trials: int, tasks: int, plays: int, rate: float, alike: bool) -> tuple[float, float]:
    """Percent of trials whose interval holds a mean of `rate`, and whose paired interval of two such teams holds 0."""
    held = np.zeros(2)
    for _ in range(trials):
        chance = np.full(tasks, rate) if alike or rate in (0, 1) else dice.beta(rate * SPREAD, (1 - rate) * SPREAD, tasks)
        first, second = ((dice.random((tasks, plays)) < chance[:, None]).mean(1) for _ in range(2))
        (low, high), (worst, best) = clustered([[x] for x in first]), difference([[x] for x in second - first])
        held += low <= rate <= high, worst <= 0 <= best
    return tuple(100 * held / trials)


def table(dice: np.random.Generator, trials: int) -> str:
    """Markdown: coverage by tasks, plays and true rate, for tasks that are alike and tasks that differ, of a mean / of a difference."""
    lines = ["| tasks | plays | chances | " + " | ".join(f"rate {rate:g}" for rate in RATES) + " |", "|---" * (3 + len(RATES)) + "|"]
    for tasks in (3, 5, 10, 100):
        for plays in (1, 2, 8):
            for alike in (True, False):
                shares = [few(dice, trials, tasks, plays, rate, alike) for rate in RATES]
                cells = " | ".join(f"{mean:.1f} / {gain:.1f}" for mean, gain in shares)
                lines.append(f"| {tasks} | {plays} | {'alike' if alike else 'Beta'} | {cells} |")
    return "\n".join(lines)


def attainable(tasks: int, rate: float) -> list[float]:
    """Percents, in order, in which an interval of single plays can hold a rate.

    More successes move an interval up, so the numbers of successes that hold a rate are consecutive, and at 1/2 success and failure
    change places. Each such range has one chance.
    """
    chance = [math.comb(tasks, won) * rate**won * (1 - rate) ** (tasks - won) for won in range(tasks + 1)]
    ranges = [(first, last) for first in range(tasks + 1) for last in range(first, tasks + 1)]
    return sorted({round(100 * sum(chance[a : b + 1]), 6) for a, b in ranges if rate != 0.5 or a + b == tasks})


def limits() -> str:
    """Markdown: of single plays the coverages nearest to 95 % that are possible, and the exact ones of Wilson's interval and of ours."""
    lines = ["| tasks | rate | at most 95 | at least 95 | Wilson | ours |", "|---" * 6 + "|"]
    for tasks in (3, 5, 10, 100):
        for rate in (0.1, 0.5):
            chance = [math.comb(tasks, won) * rate**won * (1 - rate) ** (tasks - won) for won in range(tasks + 1)]
            ours = [clustered([[1.0]] * won + [[0.0]] * (tasks - won)) for won in range(tasks + 1)]
            held = [100 * sum(c for c, (low, high) in zip(chance, ends) if low <= rate <= high)
                    for ends in ([wilson(won, tasks) for won in range(tasks + 1)], ours)]  # fmt: skip
            possible = attainable(tasks, rate)
            below, above = max(p for p in possible if p <= 95), min(p for p in possible if p >= 95)
            lines.append(f"| {tasks} | {rate:g} | {below:.1f} | {above:.1f} | {held[0]:.1f} | {held[1]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, began = np.random.default_rng(options.seed), time.time()
    held = {
        "400 tasks, 1 play": coverage(dice, options.trials, 400, 1),
        "100 tasks, 1 play": coverage(dice, options.trials, 100, 1),
        "100 tasks, 4 plays": coverage(dice, options.trials, 100, 4),
        "30 tasks, 16 plays": coverage(dice, options.trials, 30, 16),
        "100 tasks, 4 plays, graded": coverage(dice, options.trials, 100, 4, graded=True),
        "400 tasks in 40 clusters, 1 play": coverage(dice, options.trials, 400, 1, clusters=40),
    }
    print(table(dice, options.trials), limits(), sep="\n\n", file=sys.stderr)
    powers = {}
    for plays in (1, 4, 16):
        with_pairs, without = power(dice, options.trials // 2, 400, plays, GAIN)
        powers[f"400 tasks, {plays} plays"] = {"found": with_pairs, "found_unpaired": without}
        powers[f"400 tasks, {plays} plays"]["false_alarms"] = power(dice, options.trials // 2, 400, plays, 0.0)[0]
    good = all(0.93 <= share <= 0.97 for share in held.values())
    print(json.dumps({"coverage": held, "five_points": powers, "trials": options.trials, "seed": options.seed, "good": good,
                      "seconds": round(time.time() - began, 1)}))  # fmt: skip
    sys.exit(not good)


if __name__ == "__main__":
    main()
