"""One line of the report of a check."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
      name: of the check. law: the number of the law in docs/architecture.md that it stands for.
      status: "pass", "warn" (no law is broken, and training may still go wrong), "fail" or "note".
      evidence: what was seen, in words.
    """

    name: str
    law: int
    status: str
    evidence: str


def passed(name: str, law: int, evidence: str) -> Finding:
    """A law that holds."""
    return Finding(name, law, "pass", evidence)


def failed(name: str, law: int, evidence: str) -> Finding:
    """A law that is broken."""
    return Finding(name, law, "fail", evidence)


def warned(name: str, law: int, evidence: str) -> Finding:
    """A law that holds in the game, and training that may still go wrong."""
    return Finding(name, law, "warn", evidence)


def note(name: str, law: int, evidence: str) -> Finding:
    """What could not be checked, or what a reader should know."""
    return Finding(name, law, "note", evidence)


def verdict(name: str, law: int, good: bool, evidence: str, otherwise: str) -> Finding:
    """Passed with the one evidence, or failed with the other."""
    return passed(name, law, evidence) if good else failed(name, law, otherwise)
