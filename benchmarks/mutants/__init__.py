"""Small deliberate faults, each of which some test must notice: a measure of what the tests guard.

    python -m benchmarks.mutants --rooms=algorithms,models --list      checks that every fault still fits its file
    python -m benchmarks.mutants --rooms=algorithms                    applies them one at a time and runs their tests

A mutant replaces one passage of one file by a wrong one. The tables of this folder hold them, one table per room of the library.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import pkgutil


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One deliberate fault."""

    name: str  # "room: what is wrong", unique
    file: str  # relative to the repository
    old: str  # stands in the file exactly once
    new: str  # what it is replaced by
    tests: str  # pytest arguments, at least one of which must fail


class StaleMutant(ValueError):
    """The passage that a mutant replaces is not in its file exactly once; the mutant must be written anew."""


def rooms() -> list[str]:
    """The rooms that have a table."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("__"))


def mutants_of(room: str) -> list[Mutant]:
    """The mutants of a room, in the order of its table.

    A table is a module with `FAULTS`: (file, tests) -> {what is wrong: (old, new)} or {what is wrong: (old, new, tests)}.
    """
    table = importlib.import_module(f"{__name__}.{room}").FAULTS
    return [
        Mutant(f"{room}: {name}", file, old, new, *(own or (tests,)))
        for (file, tests), faults in table.items()
        for name, (old, new, *own) in faults.items()
    ]


def mutated(root: pathlib.Path, mutant: Mutant) -> str:
    """The text of the mutant's file with the fault in it. Raises `StaleMutant`."""
    path = root / mutant.file
    text = path.read_text() if path.exists() else ""
    if text.count(mutant.old) != 1:
        raise StaleMutant(f"{mutant.name}: {mutant.file} has the old text {text.count(mutant.old)} times, expected once: {mutant.old!r}")
    if mutant.old == mutant.new:
        raise StaleMutant(f"{mutant.name}: old and new text are the same")
    missing = [test for test in mutant.tests.split() if not (root / test.split("::")[0]).exists()]
    if missing:
        raise StaleMutant(f"{mutant.name}: no such test file: {', '.join(missing)}")
    return text.replace(mutant.old, mutant.new)
