"""A league: a team trains against its past selves, or with them, beside itself.

Every `every` steps the team's trained parameters (adapters, where it has some) are kept as a past self; `keep` of them stay, the newest. A
step's tasks are divided into `matches` of equal size. In a match with a past self one role learns and the past self plays all others, so
that nothing that it says is trained on; roles take this seat in turns. In every other match the team plays itself.

Which past self a match meets is drawn by its priority (`marl_llm.evaluation.opponent_priorities`) from the seed, the step and the match's
number alone. The results that priorities come from fade, so that a self that was not met for long counts as unknown again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from marl_llm.algorithms import Samples
from marl_llm.evaluation import opponent_priorities, rating_against
from marl_llm.evaluation.elo import PRIORITIES
from marl_llm.rollout import Episodes
from marl_llm.untrusted import check_count, check_keys, check_number

FADING = 0.95  # weight of older results, at each step


@dataclasses.dataclass(frozen=True)
class LeagueOptions:
    """How a team meets its past selves. Raises `ValueError` naming the option.

    Attributes:
      keep: past selves that are kept, the newest; 0: no league. every: steps between two of them.
      matches: of a step, each with an equal part of its tasks.
      share: chance that a match is played with a past self.
      priority: which selves are met most, one of `PRIORITIES`.
    """

    keep: int = 0
    every: int = 20
    matches: int = 4
    share: float = 0.5
    priority: str = "hard"

    def __post_init__(self):
        for name, low in (("keep", 0), ("every", 1), ("matches", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"league.{name}={getattr(self, name)} must be at least {low}")
        if not 0 < self.share <= 1:
            raise ValueError(f"league.share={self.share:g} must be above 0, and at most 1")
        if self.priority not in PRIORITIES:
            raise ValueError(f"league.priority={self.priority!r} must be one of {', '.join(PRIORITIES)}")

    @classmethod
    def of(cls, section: Any) -> LeagueOptions:
        """Those of a config's section: a mapping that holds more."""
        return cls(**{field.name: section[field.name] for field in dataclasses.fields(cls)})


def league_conflict(
    league: LeagueOptions, *, roles: int, tasks: int | None = None, hosted: bool = False, refills: int = 0, processes: int = 1
) -> str:
    """Why a league cannot be had beside these; empty if it can, and where there is none. `tasks` of a step; None: not known yet."""
    reasons = (
        (processes > 1, f"a league plays in one process, and this run has {processes}; start it without --distributed"),
        (hosted, "hosted play has no league; play a value-state game compiled (hosted=False)"),
        (roles < 2, "the game has one role, whose past selves have nobody to play with"),
        (refills, "refills replace single tasks, and a match keeps its own; use one of them"),
        (tasks is not None and tasks % league.matches, f"tasks={tasks} of a step do not divide into matches={league.matches}"),
    )
    return next((f"keep={league.keep}: {why}" for wrong, why in reasons if league.keep and wrong), "")


@dataclasses.dataclass(frozen=True)
class LeagueMatch:
    """A part of a step's tasks and who plays them.

    Attributes:
      first, count: the tasks, by number. learns: roles that learn. past: index of the past self that plays all others; None: nobody.
    """

    first: int
    count: int
    learns: tuple[str, ...]
    past: int | None = None


@dataclasses.dataclass
class PastSelf:
    """A team as it was.

    Attributes:
      step: before which it was kept. params: model -> its trained parameters, or adapters.
      rating: the team's Elo points then. plays, score: of the present team against it, faded: how many, and their sum in [0, plays].
    """

    step: int
    params: Mapping[str, dict]
    rating: float
    plays: float = 0.0
    score: float = 0.0

    @property
    def win_rate(self) -> float:
        """How often the present team beats it, a draw being half a win; one drawn episode is added, so that an unknown self has 1/2."""
        return (self.score + 0.5) / (self.plays + 1)


class League:
    """The past selves of a team, and what came of meeting them.

    Args:
      options: see `LeagueOptions`. seed: of the draws of opponents.

    Attributes:
      selves: the oldest first.
      rating: of the present team in Elo points, its start having 0; None: the game's seats share one outcome.
      best: the highest rating so far.
    """

    def __init__(self, options: LeagueOptions, seed: int, competitive: bool):
        self.options, self._seed = options, seed
        self.selves: list[PastSelf] = []
        self.rating = 0.0 if competitive else None
        self.best = 0.0

    def keep_self(self, step: int, params: Mapping[str, dict]) -> None:
        """Keeps a copy of a team's parameters before a step, where one is due and is not kept yet."""
        if step % self.options.every or any(past.step == step for past in self.selves):
            return
        self.selves.append(PastSelf(step, jax.tree.map(jnp.copy, dict(params)), self.rating or 0.0))
        del self.selves[: -self.options.keep]

    def matches(self, step: int, first: int, count: int, roles: Sequence[str]) -> list[LeagueMatch]:
        """The matches of a step's tasks `first ... first + count`; `roles` are those that train."""
        o, size = self.options, count // self.options.matches
        chances = opponent_priorities([past.win_rate for past in self.selves], o.priority)
        matches = []
        for number in range(o.matches):
            draws = np.random.default_rng((self._seed, step, number, 1))  # by identity (law 6)
            if draws.random() < o.share:
                role = roles[(step * o.matches + number) % len(roles)]
                matches.append(LeagueMatch(first + number * size, size, (role,), int(draws.choice(len(chances), p=chances))))
            else:
                matches.append(LeagueMatch(first + number * size, size, tuple(roles)))
        return matches

    def record(self, matches: Sequence[LeagueMatch], ended: Episodes) -> dict[str, float]:
        """Takes down how the episodes `[E B]` of a step's matches ended (NumPy, in their order); its figures by name."""
        for past in self.selves:
            past.plays, past.score = FADING * past.plays, FADING * past.score
        met: list[np.ndarray] = []
        for number, match in enumerate(matches):
            if match.past is None:
                continue
            part = jax.tree.map(lambda x, at=number * match.count, size=match.count: np.asarray(x)[at : at + size], ended)
            scores = scores_of(part, match.learns[0])
            met.append(scores)
            self.selves[match.past].plays += len(scores)
            self.selves[match.past].score += float(scores.sum())
        figures = {"league/selves": float(len(self.selves)), "league/episodes": float(sum(map(len, met)))}
        figures["league/worst"] = min(past.win_rate for past in self.selves)
        if figures["league/episodes"]:
            figures["league/score"] = float(np.mean(np.concatenate(met)))
        if self.rating is not None:
            plays = [past.plays for past in self.selves]
            shares = [past.score / past.plays if past.plays else 0.5 for past in self.selves]
            self.rating = rating_against(shares, plays, [past.rating for past in self.selves], around=self.rating)
            self.best = max(self.best, self.rating)
            figures |= {"league/rating": self.rating, "league/rating_fall": self.best - self.rating}
        return figures

    # ------------------------------------------------------------------------------------------------ checkpoints
    def stored(self, now: Mapping[str, dict]) -> dict[str, dict]:
        """Parameters for a checkpoint by name, `<model>.past<number>`; `now`, the team's own, where there are fewer selves than `keep`.

        So a checkpoint's arrays do not depend on the step, and can be restored before its state is read.
        """
        every = [past.params for past in self.selves] + [now] * (self.options.keep - len(self.selves))
        return {f"{name}.past{number}": params[name] for number, params in enumerate(every) for name in now}

    def state(self) -> dict[str, Any]:
        """What else `restore` needs, as JSON."""
        selves = [{"step": past.step, "rating": past.rating, "plays": past.plays, "score": past.score} for past in self.selves]
        return {"selves": selves, "rating": self.rating, "best": self.best}

    def restore(self, state: Mapping[str, Any], stored: Mapping[str, dict], models: Sequence[str], played: bool) -> None:
        """Continues from what `state` and `stored` gave. `played`: whether a step was, and so a self was kept before it.

        Raises `LookupError`, `TypeError` or `ValueError` for a state that no league of these options leaves.
        """
        selves = []
        for number, past in enumerate(state["selves"]):
            where = f"league.selves.{number}"
            check_keys(past, where, ("step", "rating", "plays", "score"))
            step, rating = check_count(past["step"], f"{where}.step"), check_number(past["rating"], f"{where}.rating")
            plays = check_number(past["plays"], f"{where}.plays", 0)
            score = check_number(past["score"], f"{where}.score", 0, plays)
            selves.append(PastSelf(step, {name: stored[f"{name}.past{number}"] for name in models}, rating, plays, score))
        steps = [past.step for past in selves]
        if not played <= len(selves) <= self.options.keep or steps != sorted(set(steps)):
            most = f"{int(played)} to {self.options.keep} selves"
            raise ValueError(f"league.selves are of steps {steps}: there must be {most}, the oldest first")
        if (state["rating"] is None) != (self.rating is None):
            raise ValueError(f"league.rating is {state['rating']}, but a game has one if and only if its seats compete")
        self.rating = None if self.rating is None else check_number(state["rating"], "league.rating")
        self.selves, self.best = selves, check_number(state["best"], "league.best")


def scores_of(ended: Episodes, role: str) -> np.ndarray:
    """What a role got in the episodes that count, flat: 1 won, 1/2 drawn, 0 lost; the outcome itself where all seats share it."""
    result = ended.outcome if ended.results is None else (np.sign(ended.results[role]) + 1) / 2
    return np.asarray(result, np.float64)[~ended.aborted]


def learning_samples(matches: Sequence[LeagueMatch], roles: Sequence[str], table: Samples) -> Bool[np.ndarray, "S"]:
    """Whether each sample was spoken by a role that learns in its match."""
    number = np.searchsorted([match.first for match in matches], table.instance, side="right") - 1
    learns = np.asarray([[role in match.learns for role in roles] for match in matches])
    return learns[number, table.agent]
