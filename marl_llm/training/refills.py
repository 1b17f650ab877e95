"""Dynamic sampling: tasks whose groups teach nothing are replaced by fresh ones, in rounds, up to a bound.

After DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2), which draws anew without a bound and trains on single agents' prompts.
The first round plays the tasks of a step. A task has signal if the returns of at least one of its groups differ. While fewer tasks than
the step needs have signal, a further round plays the next tasks of the training split, `refills` rounds at most. The step trains on the
tasks with signal that come first in the split; where the bound was reached, tasks without signal fill it up. So every step trains on the
same number of tasks, and which ones depends on the tasks and their draws alone: not on time, devices or the kind of play.

How many tasks were drawn beyond those of the steps is kept in a checkpoint, so that a resumed run draws the tasks that it would have drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from marl_llm.algorithms import Recipe, Samples
from marl_llm.algorithms.recipe_rules import GROUPED
from marl_llm.training.packing import Tokens
from marl_llm.training.update import compute_advantages
from marl_llm.untrusted import check_count

HALVINGS = 2  # a further round plays all, half or a quarter of a step's tasks: compiled play has a program for each
SUMMED = ("samples", "sampled_tokens", "prompts", "prompt_tokens", "episodes", "seconds")  # figures of all rounds; the others: of the first

Signal = Mapping[int, tuple[int, int]]  # task -> (groups whose returns differ, groups)


class RefillRound(NamedTuple):
    """Tasks that were played together."""

    numbers: tuple[int, ...]  # of the tasks, in the order of the training split
    signal: Signal  # of those of which a sample trains
    figures: dict[str, float]  # of this round's plays alone
    played: Any  # the plays, as the team's kind of play has them


def grouping_conflict(recipe: Recipe) -> str:
    """Why a recipe's groups do not each belong to one task; empty if they do."""
    reasons = (
        (recipe.advantage_estimator not in GROUPED,
         f"recipe.advantage_estimator={recipe.advantage_estimator!r} makes no groups"),
        (not {"instance", "env"} & set(recipe.group_by), f"recipe.group_by={recipe.group_by!r} puts several tasks into one group"),
        (recipe.joint == "cross", "recipe.joint='cross' pairs the plays of a whole step; use joint='aligned'"),
    )  # fmt: skip
    return next((why for wrong, why in reasons if wrong), "")


def refill_conflict(
    refills: int,
    recipe: Recipe,
    *,
    max_staleness: int | None = 0,
    oversample: int | None = 0,
    coached: bool = False,
    permuted: bool = False,
) -> str:
    """Why `refills` cannot be had beside these; empty if it can."""
    grouping = grouping_conflict(recipe)
    reasons = (
        (grouping, grouping),
        (max_staleness, "max_staleness=1 plays the next step before it is known which tasks come next; use one of them"),
        (oversample, "oversample leaves tasks to the next step, and so does not know which come next; use one of them"),
        (coached, "a coach is told of whole steps"),
        (permuted, "control.permute_rewards deals the rewards out anew after the tasks were chosen by them"),
    )
    return next((f"refills={refills}: {why}" for wrong, why in reasons if refills and wrong), "")


def signal_of(recipe: Recipe, tokens: Tokens, table: Samples) -> Signal:
    """Task -> (groups whose returns differ, groups), over the samples that count.

    The returns are those before a KL penalty, which differs from response to response even if all are paid the same.
    """
    charged = bool(recipe.kl_coef) and recipe.kl_where == "reward"
    tied = compute_advantages(dataclasses.replace(recipe, kl_coef=0.0) if charged else recipe, tokens, table).zero_variance
    rows = np.flatnonzero(table.where)
    keys = np.stack([np.asarray(table.instance), *(np.asarray(getattr(table, axis)) for axis in recipe.group_by)], axis=1)[rows]
    _, first = np.unique(keys, axis=0, return_index=True)
    signal: dict[int, tuple[int, int]] = {}
    for row in rows[first].tolist():
        task = int(table.instance[row])
        differing, groups = signal.get(task, (0, 0))
        signal[task] = differing + int(not tied[row]), groups + 1
    return signal


def tasks_of_round(count: int, missing: int, devices: int) -> int:
    """How many tasks a further round plays: `count`, or the half or quarter of it that holds the missing ones.

    >>> [tasks_of_round(48, missing, 1) for missing in (48, 24, 13, 5)]
    [48, 24, 24, 12]
    """
    size = count
    for _ in range(HALVINGS):
        if size % (2 * devices) == 0 and size // 2 >= missing:
            size //= 2
    return size


def chosen_tasks(rounds: Sequence[RefillRound], count: int) -> list[int]:
    """The tasks that a step trains on, in the order of the split: those with signal first, then tied ones, then those without a sample."""
    signal = {number: counts for refill in rounds for number, counts in refill.signal.items()}

    def rank(number: int) -> int:
        return 2 if number not in signal else 0 if signal[number][0] else 1

    numbers = [number for refill in rounds for number in refill.numbers]
    chosen = set(sorted(numbers, key=rank)[:count])  # sorted keeps the order of the split among equals
    return [number for number in numbers if number in chosen]


def tasks_left_out(rounds: Sequence[RefillRound], chosen: Sequence[int]) -> tuple[int, ...]:
    """The tasks that were played and are not trained on, in the order of the split."""
    return tuple(number for refill in rounds for number in refill.numbers if number not in set(chosen))


def refill_figures(rounds: Sequence[RefillRound], chosen: Sequence[int]) -> dict[str, float]:
    """A step's figures: those of the first round, whose tasks nobody chose, with samples and tokens of all rounds, and what was chosen.

    `refills/rounds` beyond the first; `refills/tasks` drawn; `refills/signal_before` and `refills/signal_after`, shares of groups whose
    returns differ in the first round and in what the step trains on; `refills/tied`, tasks without signal; `refills/unused`, tasks with
    signal that the step did not need; `refills/filled_up`, tasks without signal that it trains on all the same.
    """
    signal = {number: counts for refill in rounds for number, counts in refill.signal.items()}
    drawn = [number for refill in rounds for number in refill.numbers]
    differing = {number for number in drawn if signal.get(number, (0, 0))[0]}

    def share(numbers: Sequence[int]) -> float:
        counts = [signal[number] for number in numbers if number in signal]
        return sum(differing_groups for differing_groups, _ in counts) / max(sum(groups for _, groups in counts), 1)

    figures = dict(rounds[0].figures)
    figures |= {name: sum(refill.figures[name] for refill in rounds) for name in SUMMED if name in figures}
    return figures | {
        "refills/rounds": float(len(rounds) - 1),
        "refills/tasks": float(len(drawn)),
        "refills/signal_before": share(rounds[0].numbers),
        "refills/signal_after": share(chosen),
        "refills/tied": float(len(drawn) - len(differing)),
        "refills/unused": float(len(differing - set(chosen))),
        "refills/filled_up": float(len(set(chosen) - differing)),
    }


class Refills:
    """Plays rounds of tasks until a step has as many with signal as it needs.

    Args:
      limit: further rounds at most; 0: each step plays its tasks once, whatever they teach.
      devices: that divide the tasks of a round.

    Attributes:
      extra: step -> tasks drawn before it beyond those of the steps, for the step that was played last and the one behind it.
    """

    def __init__(self, limit: int, devices: int = 1):
        self.limit, self._devices = limit, devices
        self.extra: dict[int, int] = {}

    def rounds(self, play: Callable[[int, int, set[int]], RefillRound | None], step: int, first: int, count: int) -> list[RefillRound]:
        """The rounds of a step.

        `play(first, count, drawn)` plays tasks `first ... first + count` of the training split. It plays nothing and returns None if one of
        them is among the `drawn` ones of this step, because a small split began anew; that ends the refilling.
        """
        extra = self.extra.get(step, max(self.extra.values(), default=0))
        position, size, differing = first + extra, count, 0
        rounds: list[RefillRound] = []
        drawn: set[int] = set()
        while (refill := play(position, size, drawn)) is not None:
            rounds.append(refill)
            position += size
            drawn |= set(refill.numbers)
            differing += sum(bool(differing_groups) for differing_groups, _ in refill.signal.values())
            if differing >= count or len(rounds) > self.limit:
                break
            size = tasks_of_round(count, count - differing, self._devices)
        self.extra = {step: extra, step + 1: position - first - count}
        return rounds

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint; empty where nothing is refilled."""
        return {"refilled": {str(step): extra for step, extra in self.extra.items()}} if self.limit else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; checkpoints of runs without refills have none. Raises `AttributeError` or `ValueError` otherwise."""
        self.extra = {int(step): check_count(extra, f"refilled.{step}") for step, extra in state.get("refilled", {}).items()}
