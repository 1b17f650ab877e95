"""The figures of a run in Weights & Biases or trackio too, for people who look at all their runs there. `metrics.jsonl` stays the truth."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
import uuid
from collections.abc import Mapping
from typing import Any

TRACKERS = ("wandb", "trackio")


def missing(kind: str) -> str:
    """Why a tracker cannot be used here; "" where it can."""
    if kind not in TRACKERS:
        return f"is none of {', '.join(TRACKERS)}"
    return "" if importlib.util.find_spec(kind) else f"needs its package: pip install 'marl_llm[{kind}]'"


def entry_of(workdir: pathlib.Path) -> str:
    """The name of a run's entry, kept in the run directory: unlike any other run's, and the same when the run goes on."""
    kept = workdir / "tracker_entry"
    if not kept.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        kept.write_text(f"{workdir.name}-{uuid.uuid4().hex[:8]}\n", encoding="utf-8")
    return kept.read_text(encoding="utf-8").strip()


class Tracker:
    """Sends scalars to `wandb` or `trackio`, on this machine only unless their own settings say otherwise.

    Weights & Biases writes offline runs below the run directory (`wandb sync` sends them later; WANDB_MODE=online sends them at once);
    trackio keeps its database where TRACKIO_DIR says. A figure is called `<phase>/<key>`, e.g. `train/role/tool/reward`, over
    `<phase>/step`. A run that goes on continues the same entry, whose figures of steps after the last checkpoint then come twice.
    Whatever the package raises is told once on stderr and ends the tracking, not the run.

    Args:
      kind: one of `TRACKERS`. Raises `ValueError` where it cannot be used.
      workdir: the run directory. Its parent's name is the entry's group.
      config: of the run, as JSON.
    """

    def __init__(self, kind: str, workdir: pathlib.Path, config: Mapping[str, Any]):
        if why := missing(kind):
            raise ValueError(f"logger={kind!r} {why}")
        self._kind, self._package = kind, importlib.import_module(kind)
        workdir = workdir.absolute()
        entry = entry_of(workdir)
        named = {"project": "marl_llm", "name": entry, "config": dict(config), "group": workdir.parent.name, "resume": "allow"}
        if kind == "wandb":
            named |= {"id": entry, "dir": str(workdir), "mode": os.environ.get("WANDB_MODE", "offline")}
        self._open = True
        self._try(lambda: self._package.init(**named))

    def add(self, phase: str, step: int, scalars: Mapping[str, float]) -> None:
        """Sends one line of `metrics.jsonl`."""
        figures = {f"{phase}/{key}": value for key, value in scalars.items()} | {f"{phase}/step": step}
        self._try(lambda: self._package.log(figures))

    def close(self) -> None:
        """Ends the entry; a second call does nothing."""
        self._try(lambda: self._package.finish())
        self._open = False

    def _try(self, call) -> None:
        if not self._open:
            return
        try:
            call()
        except Exception as error:  # of a package that talks to disks and servers of its own
            self._open = False
            print(f"{self._kind} failed and is left out from here on: {type(error).__name__}: {error}", file=sys.stderr)
