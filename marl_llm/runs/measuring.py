"""What is looked at while a team trains and when it is done: alarms, and the page of figures that `train` and `evaluate` print."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from marl_llm.runs.command import TrainingError

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan

ABORTED_STEPS = 20  # steps whose aborted plays are counted together
SILENT_ALARM = 50  # steps without any gradient for a model (law 8)
RATING_FALL = 100  # Elo points below the best: odds of 1.8 to 1
LITTLE_ENTROPY = 0.02  # nats per token
NO_SIGNAL = 64  # samples that all earned the same, before a run of checkpoints ends
SHOWN = 160  # characters of a response
UNPAID = {"pays": [], "paid_samples": 0}  # of a checkpoint's state: the first two different rewards, and the samples looked at until then
WHOLE = ("random", "before", "after", "swapped")  # tables of seats of a page; all others are under "pairs"


def check_finite(figures: dict, step: int, model: str) -> None:
    """Raises `TrainingError` when the loss or the gradient is not finite (law 10)."""
    bad = [name for name in ("loss", "grad_norm", "critic_grad_norm") if not math.isfinite(figures.get(name, 0.0))]
    if bad:
        raise TrainingError(
            f"step {step}, model {model}: {' and '.join(bad)} not finite. Nothing of that step was saved; the last checkpoint is "
            "whole. Lower optimizer.learning_rate, or look at metrics.jsonl for what grew before"
        )


class Alarms:
    """Reports a model without a gradient, and a sampler whose log-probs are not the scorer's.

    Args:
      silent: model -> steps since its last gradient; kept up to date in place, so that it can be checkpointed.
      say: where a line goes.
    """

    def __init__(self, silent: dict[str, int], say: Callable[[str], None]):
        self.silent, self._say = silent, say

    def look(self, step: int, model: str, figures: dict) -> None:
        """Looks at the metrics of one model's update."""
        self.silent[model] = 0 if figures["groups_with_signal"] and figures["grad_norm"] else self.silent.get(model, 0) + 1
        if self.silent[model] and self.silent[model] % SILENT_ALARM == 0:
            self._say(f"ALARM step {step}: model {model} got no gradient for {self.silent[model]} steps (all its groups are tied)")
        gap, bound = figures["log_prob_gap"], figures["log_prob_gap_bound"]
        if not figures.get("staleness") and not gap <= bound:  # so that NaN alarms too; other parameters than those sampled from do differ
            self._say(f"ALARM step {step}: model {model}, sampler and scorer differ by {gap:.1e} nats (bound {bound:.0e}, law 2)")


class LeagueWatch:
    """Reports when a team in a league collapses: its rating falls, or it hardly varies and yet loses to a past self.

    Args:
      say: where a line goes. Each kind of collapse is reported when it begins, and again when it has passed in between.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._told: set[str] = set()

    def look(self, step: int, figures: Mapping[str, float]) -> None:
        """Looks at a step's figures; those of a run without a league say nothing."""
        if "league/selves" not in figures:
            return
        entropies = [value for name, value in figures.items() if name.startswith("role/") and name.endswith("/entropy")]
        entropy, worst, fall = sum(entropies) / len(entropies), figures["league/worst"], figures.get("league/rating_fall", 0.0)
        lines = {
            "rating": (fall > RATING_FALL, f"its rating fell {fall:.0f} Elo points below its best"),
            "entropy": (entropy < LITTLE_ENTROPY and worst < 0.5,
                        f"its responses hardly vary ({entropy:.3f} nats per token), and a past self beats it ({worst:.2f})"),
        }  # fmt: skip
        for kind, (broken, line) in lines.items():
            if broken and kind not in self._told:
                self._say(f"ALARM step {step}: the team collapses in its league: {line}")
            (self._told.add if broken else self._told.discard)(kind)


class SignalWatch:
    """Reports before the first update that nothing can be learned: every sample so far earned the same. A run of checkpoints then ends.

    Args:
      say: where a line goes.
      reward_of: (team pay, own pay) -> what a sample trains on.
      stops: whether the run ends when `NO_SIGNAL` samples have earned the same.
      rewarded: whether any model learns from rewards; if none does, equal ones are no news.
      state: holds the keys of `UNPAID`, as `seen` was at a checkpoint; without them, as earlier versions wrote it, there was signal.

    Raises `TrainingError` from `look`.
    """

    def __init__(self, say: Callable[[str], None], reward_of: Callable, stops: bool, rewarded: bool = True, state: Mapping = UNPAID):
        self._say, self._reward_of, self._stops, self._rewarded = say, reward_of, stops, rewarded
        self.seen, self._told = {key: state[key] for key in UNPAID if key in state}, False

    def look(self, step: int, batch: Any) -> None:
        """Looks at a step's batch, until two samples earned different rewards."""
        if not self._rewarded or len(self.seen.get("pays", (0, 1))) > 1:
            return
        pays = self._reward_of(batch.table.team, batch.table.local)[batch.table.where].tolist()
        different, samples = sorted({*self.seen["pays"], *pays})[:2], self.seen["paid_samples"] + len(pays)
        self.seen = {"pays": different, "paid_samples": samples}
        if len(different) != 1:
            return
        line = f"step {step}: all {samples} samples so far earned {different[0]:g}, so there is nothing to learn from them"
        stops = self._stops and samples >= NO_SIGNAL
        if stops or not self._told:
            self._told = True
            line += said_by_roles(batch.rollout) + ". Make the task easier, the prompt clearer, or the pay graded"
            if stops:
                raise TrainingError(f"{line}; `python -m marl_llm profile` counts what is paid")
            self._say(line)


def signal_watch(plan: Any, say: Callable[[str], None], state: Mapping = UNPAID) -> SignalWatch:
    """The watch of a run: one of checkpoints ends without signal, unless a teacher gives one (`distill_coef`)."""
    recipes = plan.recipes.values()
    stops = any(options.get("path") for options in plan.options.values()) and not any(recipe.distill_coef for recipe in recipes)
    return SignalWatch(say, plan.recipe.reward_of, stops, any(recipe.policy_coef for recipe in recipes), state)


def said_by_roles(rollout: Any) -> str:
    """What each role of hosted play said first, and how often it could not be read; nothing of compiled play."""
    calls = [call for episode in getattr(rollout, "episodes", ()) for path in episode.trajectories for call in path.calls]
    by_role: dict[str, list] = {}
    for call in calls:
        by_role.setdefault(call.role, []).append(call)
    told = [
        f"; {role} could not be read {sum(not call.legal for call in role_calls)} of {len(role_calls)} times, "
        f"and said first {role_calls[0].text[:SHOWN]!r}"
        for role, role_calls in by_role.items()
    ]
    return "".join(told)


class RecentShare:
    """How many of all there were, over the last `steps` steps."""

    def __init__(self, steps: int):
        self.counted: collections.deque[tuple[float, float]] = collections.deque(maxlen=steps)

    def add(self, part: float, of: float) -> float:
        """Counts a step; the share in [0, 1] over the steps that are kept."""
        self.counted.append((part, of))
        part, of = (sum(column) for column in zip(*self.counted))
        return part / max(of, 1.0)


class AbortedWatch:
    """Ends a run whose tools or engines fail too often to train on what is left.

    Only `ABORTED_STEPS` whole steps are judged, so that a short disturbance stops nothing. The steps are those of this process: a run that
    is resumed begins to count anew.

    Args:
      limit: share of aborted plays in [0, 1] above which the run ends; 1: never.
    """

    def __init__(self, limit: float):
        self._limit, self._share = limit, RecentShare(ABORTED_STEPS)
        self._failed: collections.deque[dict[str, float]] = collections.deque(maxlen=ABORTED_STEPS)

    def look(self, step: int, figures: Mapping[str, float], example: Callable[[str], str] = str) -> None:
        """Looks at a step's figures; `example` says a failure of a kind in words.

        Raises `TrainingError` naming the most frequent kind of failure.
        """
        if "episodes" not in figures:  # played compiled: there are no tools
            return
        share = self._share.add(figures["aborted"] * figures["episodes"], figures["episodes"])
        self._failed.append({name: x for name, x in figures.items() if name.startswith("failed_")})
        if len(self._share.counted) < ABORTED_STEPS or share <= self._limit:
            return
        total: collections.Counter[str] = collections.Counter()
        for failed in self._failed:
            total.update(failed)
        kind, tries = total.most_common(1)[0]
        reason = kind.removeprefix("failed_")
        last = example(reason)
        raise TrainingError(
            f"step {step}: {share:.0%} of the plays of the last {ABORTED_STEPS} steps are aborted "
            f"(rollout.aborted_limit={self._limit:g}). "
            f"Most frequent reason: {reason}, {tries:.0f} tries{last and '; the last: ' + last}. "
            "The steps before it are in the last checkpoint; once that is mended, --resume goes on from there, and counts anew"
        )


def failure_of(rollout: Any, kind: str) -> str:
    """The last failure of a kind in a rollout, in words; empty if there is none, as in compiled play, whose `rollout` is None."""
    failures = [failure for episode in (rollout.episodes if rollout else ()) for failure in episode.failures if failure.kind == kind]
    return f"node {failures[-1].node}: {failures[-1].message}" if failures else ""


def late_tasks(rollout: Any) -> list[int]:
    """Numbers of the tasks that the step before began (`rollout.oversample`), in order."""
    return sorted({episode.task.number for episode in rollout.episodes if episode.step < rollout.step})


def late_line(records: list[dict]) -> str:
    """How late plays differ from the others, of the figures of `training.oversample`: means over steps with both; a line, or empty."""
    records_with_both = [record for record in records if "oversample/late_score" in record and "oversample/early_score" in record]
    if not records_with_both:
        return ""

    def mean(name):
        return sum(record[f"oversample/{name}"] for record in records_with_both) / len(records_with_both)

    parts = [f"{name} {mean(f'late_{name}'):.3g} (others {mean(f'early_{name}'):.3g})" for name in ("tokens", "score", "seconds")]
    return f"late plays, {mean('late'):.1f} tasks per step over {len(records_with_both)} steps, per play: {', '.join(parts)}\n"


def tables(plan: Plan, ablate_roles: bool = True) -> dict[str, dict[str, str]]:
    """The page's tables of seats by name: before, after, random if the game has such a player; with `ablate_roles` swapped and the pairs.

    Swapped hands every trained model on to the roles of the next one of its shape; with one model there is nothing to swap. A pair is the
    trained team with one role's model as it was before.
    """
    roles, trained = plan.assignment.roles, plan.assignment.trained
    learned = [role for role, model in roles.items() if model in trained]
    tables_by_name = {"before": dict.fromkeys(learned, "start"), "after": {}}
    if plan.played.random_player is not None:
        tables_by_name["random"] = dict.fromkeys(roles, "random")
    if ablate_roles and len(learned) > 1:
        if len(trained) > 1 and len({plan.shapes[name] for name in trained}) == 1:
            following = dict(zip(trained, [*trained[1:], trained[0]]))
            tables_by_name["swapped"] = {role: f"trained:{following[roles[role]]}" for role in learned}
        tables_by_name |= {f"{role} untrained": {role: "start"} for role in learned}
    return tables_by_name


def measure(
    team, seatings: Mapping[str, Mapping[str, Any]], split: str, tasks: int, *, temperature: float = 0.0, plays: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`(page, records)`: the figures of every table of seats, pairs under "pairs", as evaluation.json holds them, and what was played."""
    records = {name: team.evaluate(seats, split, tasks, plays=plays, temperature=temperature) for name, seats in seatings.items()}
    summaries = {name: evaluation.summary() for name, evaluation in records.items()}
    page: dict[str, Any] = {name: summaries.pop(name) for name in WHOLE if name in summaries}
    return page | {"pairs": summaries}, records


def page_text(page: Mapping[str, Any], headline: str) -> str:
    """A page in a few lines."""
    def line(name, f):
        return (
            f"  {name:<34} {headline} {f['success']:6.1%}  [{f['interval'][0]:.1%}, {f['interval'][1]:.1%}]   turns {f['turns']:.2f}   "
            + "  ".join(f"{r} well-formed {x['well_formed']:.0%}" for r, x in f["roles"].items())
        )

    parts = {name: page[name] for name in WHOLE if name in page}
    return "\n".join(line(name, f) for name, f in {**parts, **page["pairs"]}.items())
