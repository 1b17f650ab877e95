"""Figures of a coached run: scores by role, whether the coach favours a kind of task or length, and whether it tells good from bad.

The bias of MAPPA's Table 3 is the difference of a role's mean scores between two strata. Its interval here is a bootstrap over *tasks*,
since actions of one task are no independent draws; `matched` compares actions of plays that ended alike.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from marl_llm.tools.results import FailureKind
from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.rewards import COACH
from marl_llm.workflows.trajectory import Episode, RoleCall, Score

DRAWS = 200  # of a bootstrap in a training step
WINDOW = 20  # steps of the alarm
NODE = f"scorer {COACH}"


@dataclasses.dataclass(frozen=True)
class ScoredAction:
    """One action as the coach judged it.

    Attributes:
      task, role, stratum: whose, of which kind of task.
      score: None: missing.
      tokens: of the response.
      outcome: of the play, e.g. the environment's headline in [0, 1]; of an action that belongs to several paths, their mean; NaN of a
        candidate that was not picked, for its play went on without it.
      log_prob: of the response under the policy that gave it, mean over its tokens, in nats; None where no policy of this program spoke.
    """

    task: int
    role: str
    stratum: str
    score: float | int | None
    tokens: int
    outcome: float | int
    cached: bool = False
    capped: bool = False
    log_prob: float | None = None


Interval = tuple[float, float, float]  # figure, low, high of 95 %; NaN where there is none


def scored_actions(rollout: Rollout, headline: str) -> list[ScoredAction]:
    """Every action that the coach was asked about, once however many paths it is part of, aborted plays left out.

    Args:
      headline: a metric of the workflow.
    """
    actions, outcome_of = [], rollout.workflow.metrics[headline]
    for episode in rollout.episodes:
        outcomes = collections.defaultdict(list)
        for path in episode.trajectories:
            outcome = float(outcome_of(path))
            for call in path.calls:
                outcomes[call.id].append(outcome)
        for call, verdict in _verdicts(episode):
            score = None if verdict.value is None else float(verdict.value)
            who = (episode.task.number, call.role, episode.task.stratum)
            own = None if call.log_probs is None or not call.log_probs.size else float(np.mean(call.log_probs))
            outcome = _mean(outcomes[call.id])
            actions.append(ScoredAction(*who, score, int(call.tokens.size), outcome, verdict.cached, verdict.capped, own))
    return actions


def _verdicts(episode: Episode) -> Iterable[tuple[RoleCall, Score]]:
    """What the coach said of each action of a play, candidates that were not picked included."""
    verdicts = {}
    for path in (*episode.trajectories, *episode.candidates):
        for call in path.calls:
            if COACH in path.scores.get(call.id, ()):
                verdicts.setdefault(call.id, (call, path.scores[call.id][COACH]))
    return verdicts.values()


def gap(actions: Sequence[ScoredAction], first: str, second: str, *, matched: bool = False, draws: int = 1000, seed: int = 0) -> Interval:
    """Mean score in stratum `first` minus that in `second` (MAPPA, Table 3: regression − classification), with a bootstrap over tasks.

    Args:
      actions: of one role.
      matched: the mean of the differences among successes and among failures (an outcome of 1 or more, or less), weighted by how many
        there are to compare, n₁n₂/(n₁+n₂): kinds of tasks that are solved at another rate do not differ for that reason.
    """
    used = [action for action in actions if action.score is not None and action.stratum in (first, second)]

    def figure(rows: np.ndarray) -> float:
        total = weight = 0.0
        for cell in (rows[rows[:, 2] >= 1], rows[rows[:, 2] < 1]) if matched else (rows,):
            in_first, in_second = cell[cell[:, 1] == 1, 0], cell[cell[:, 1] == 0, 0]
            if in_first.size and in_second.size:
                votes = in_first.size * in_second.size / (in_first.size + in_second.size)
                total, weight = total + votes * (in_first.mean() - in_second.mean()), weight + votes
        return total / weight if weight else math.nan

    return _bootstrapped(used, lambda action: (action.score, float(action.stratum == first), action.outcome), figure, draws, seed)


def length_slope(actions: Sequence[ScoredAction], *, draws: int = 1000, seed: int = 0) -> Interval:
    """Points of score per unit of ln(tokens) within strata: least squares after each stratum's means are taken off."""
    return _slope([action for action in actions if action.tokens > 0], lambda action: math.log(action.tokens), draws, seed)


def own_slope(actions: Sequence[ScoredAction], *, draws: int = 1000, seed: int = 0) -> Interval:
    """Points of score per nat of mean log-prob within strata: how far a coach favours what the player finds likely, as a coach that is the
    player's own model may."""
    return _slope([action for action in actions if action.log_prob is not None], lambda action: action.log_prob, draws, seed)


def _slope(actions: Sequence[ScoredAction], regressor: Callable[[ScoredAction], float], draws: int, seed: int) -> Interval:
    used = [action for action in actions if action.score is not None]
    names = {name: number for number, name in enumerate(sorted({action.stratum for action in used}))}

    def figure(rows: np.ndarray) -> float:
        x, y = rows[:, 1].copy(), rows[:, 0].copy()
        for stratum in np.unique(rows[:, 2]):
            in_stratum = rows[:, 2] == stratum
            x[in_stratum] -= x[in_stratum].mean()
            y[in_stratum] -= y[in_stratum].mean()
        spread = float(x @ x)
        return float(x @ y) / spread if spread > 1e-12 else math.nan

    return _bootstrapped(used, lambda action: (action.score, regressor(action), float(names[action.stratum])), figure, draws, seed)


def auc(actions: Sequence[ScoredAction]) -> float:
    """Probability that an action of a successful play has a higher score than one of a failed play; ties count half. NaN without both."""
    used = [action for action in actions if action.score is not None]
    good = np.sort([action.score for action in used if action.outcome >= 1])
    bad = np.asarray([action.score for action in used if action.outcome < 1])
    if not good.size or not bad.size:
        return math.nan
    below, upto = np.searchsorted(good, bad, "left"), np.searchsorted(good, bad, "right")
    return float(np.mean(good.size - upto + 0.5 * (upto - below)) / good.size)


def rising_while_falling(scores: Sequence[float], successes: Sequence[float], window: int = WINDOW, rise: float = 0.5) -> bool:
    """Whether, over the last `window` steps, the mean score rose by `rise` or more while success fell (reward hacking, section 4.4).

    Compares the means of the window's two halves.
    """
    if min(len(scores), len(successes)) < window:
        return False
    half = window // 2

    def change(x):
        return float(np.mean(x[-half:]) - np.mean(x[-window:-half]))

    return change(list(scores)) >= rise and change(list(successes)) < 0


def coach_figures(rollout: Rollout, headline: str, draws: int = DRAWS) -> dict[str, float]:
    """Figures of a step by name; nothing where nobody coaches.

    `coach/asked`, `coach/missing` (masked actions, and scores that failed an attempt at a play), `coach/failed_<kind>`, `coach/score`;
    `coach/<role>/score`, `.../spread`, `.../cached`, `.../capped`, `.../auc`; `.../length_slope` and `.../own_slope`; with
    several strata `.../score/<stratum>`, and of two `.../gap`: matched on success, in the order of their names the second minus the first.
    Slopes and gaps have intervals, `..._low` and `..._high`.
    """
    if all(scorer.name != COACH for scorer in rollout.workflow.scorers):
        return {}
    actions = scored_actions(rollout, headline)
    kinds = collections.Counter(
        failure.kind for episode in rollout.episodes for failure in episode.failures if failure.node == NODE
    )
    for episode in rollout.episodes:
        kinds.update(verdict.missing.partition(":")[0] for _, verdict in _verdicts(episode) if verdict.missing)
    known = (*(kind.value for kind in FailureKind), "scorer")
    figures = {f"coach/failed_{kind}": float(kinds[kind]) for kind in known}
    missing, scored = sum(kinds.values()), [action for action in actions if action.score is not None]
    figures |= {"coach/asked": float(len(scored) + missing), "coach/missing": float(missing)}
    figures["coach/score"] = _mean([action.score for action in scored])
    for role in rollout.workflow.roles:
        of_role = [action for action in scored if action.role == role]
        figures |= {f"coach/{role}/{name}": x for name, x in _role_figures(of_role, draws).items()}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _role_figures(actions: Sequence[ScoredAction], draws: int) -> dict[str, float]:
    scores = [action.score for action in actions]
    figures = {"score": _mean(scores), "spread": float(np.std(scores)) if scores else math.nan, "auc": auc(actions)}
    figures |= {"cached": _mean([action.cached for action in actions]), "capped": _mean([action.capped for action in actions])}
    for name, slope in (("length_slope", length_slope), ("own_slope", own_slope)):
        figures |= dict(zip((name, f"{name}_low", f"{name}_high"), slope(actions, draws=draws)))
    strata = sorted({action.stratum for action in actions})
    if len(strata) > 1:
        figures |= {f"score/{name}": _mean([action.score for action in actions if action.stratum == name]) for name in strata}
    if len(strata) == 2:
        figures |= dict(zip(("gap", "gap_low", "gap_high"), gap(actions, strata[1], strata[0], matched=True, draws=draws)))
    return figures


def _bootstrapped(
    actions: Sequence[ScoredAction], row: Callable[[ScoredAction], tuple], figure: Callable[[np.ndarray], float], draws: int, seed: int
) -> Interval:
    """A figure of all rows, and its 2.5 % and 97.5 % quantiles over draws of whole tasks with replacement."""
    if not actions:
        return math.nan, math.nan, math.nan
    rows = np.asarray([row(action) for action in actions], np.float64)
    value = float(figure(rows))
    tasks = collections.defaultdict(list)
    for number, action in enumerate(actions):
        tasks[action.task].append(number)
    groups, rng = [np.asarray(numbers) for numbers in tasks.values()], np.random.default_rng(seed)
    estimates = [figure(rows[np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])]) for _ in range(draws)]
    estimates = [estimate for estimate in estimates if math.isfinite(estimate)]
    low, high = np.quantile(estimates, (0.025, 0.975)) if estimates else (math.nan, math.nan)
    return value, float(low), float(high)


def _mean(values: Sequence[float | int | bool]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
