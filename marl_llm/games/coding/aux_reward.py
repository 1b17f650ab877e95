"""The reward of two agents who write `aux` and an entry point: four levels, each of which may end the evaluation (MAGRPO, App. C).

| level | pays | ends if |
|---|---|---|
| structure | 0.4 `aux` returns a value, 0.6 so does the entry point | there is no entry point, or its part gives `aux` another meaning |
| syntax | 0.5 both parts can be parsed together | they cannot |
| tests | the share of hidden cases that pass | none passes |
| cooperation | 0.5 the entry point calls `aux`, 1.0 it is no wrapper of it, -0.5 what `aux` returns is thrown away | – |

The weights are the release's. They reproduce the returns of Table 2 from the printed levels to within a point (a test).
"""

from __future__ import annotations

import dataclasses

from marl_llm.games.coding.aux_source import Parts

STRUCTURE, SYNTAX, TESTS, COOPERATION = 1.0, 0.5, 1.0, 1.5  # most that each level pays
MOST = STRUCTURE + SYNTAX + TESTS + COOPERATION
AUX_SHARE, MAIN_SHARE = 0.4, 0.6
CALLS, NO_WRAPPER, THROWN_AWAY = 0.5, 1.0, -0.5
LEVELS = ("structure", "syntax", "tests", "cooperation")


@dataclasses.dataclass(frozen=True)
class Levels:
    """What each level paid, in points; `reached` counts the levels that were evaluated."""

    structure: float = 0.0
    syntax: float = 0.0
    tests: float = 0.0
    cooperation: float = 0.0
    reached: int = 1

    @property
    def total(self) -> float:
        """In [0, 4]."""
        return self.structure + self.syntax + self.tests + self.cooperation


def static_levels(parts: Parts) -> Levels:
    """What can be said without running the program; `reached` is 2 where the tests come next."""
    structure = AUX_SHARE * parts.aux + MAIN_SHARE * parts.main
    if not parts.main or parts.redefined:
        return Levels(structure)
    return Levels(structure, SYNTAX, reached=2) if parts.parses else Levels(structure)


def judged_levels(parts: Parts, pass_rate: float | int, aux_matters: bool = True) -> Levels:
    """All levels of a program that passed a share of the hidden cases.

    `aux_matters`: whether it fails a case once `aux` raises; without it there is no bonus for cooperation (an option of this library).
    """
    levels = static_levels(parts)
    if levels.reached < 2:
        return levels
    if pass_rate <= 0:
        return dataclasses.replace(levels, reached=3)
    bonus = 0.0
    if parts.calls and parts.aux and aux_matters:
        bonus = CALLS + (NO_WRAPPER if parts.uses and not parts.wrapper else 0.0) + (0.0 if parts.uses else THROWN_AWAY)
    return dataclasses.replace(levels, tests=TESTS * pass_rate, cooperation=bonus, reached=4)


def single_levels(main: bool, parses: bool, pass_rate: float | int) -> Levels:
    """Of a single agent, which has no `aux`: the entry point is the whole structure, and nobody cooperates."""
    if not main:
        return Levels()
    return Levels(STRUCTURE, SYNTAX, TESTS * pass_rate, reached=3) if parses else Levels(STRUCTURE)
