"""The figures of a run in Weights & Biases or trackio too, for people who look at all their runs there. `metrics.jsonl` stays the truth."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

TRACKERS = ("wandb", "trackio")


def missing(kind: str) -> str:
    """Why a tracker cannot be used here; "" where it can."""
    if kind not in TRACKERS:
        return f"is none of {', '.join(TRACKERS)}"
    return "" if importlib.util.find_spec(kind) else f"needs its package: pip install 'marl_llm[{kind}]'"


class Tracker:
    """Sends scalars to `wandb` or `trackio`, on this machine only unless their own settings say otherwise.

    Weights & Biases writes offline runs below the run directory (`wandb sync` sends them later; WANDB_MODE=online sends them at once);
    trackio keeps its database where TRACKIO_DIR says. A figure is called `<phase>/<key>`, e.g. `train/role/tool/reward`, over
    `<phase>/step`. A run that goes on continues the same entry, whose figures of steps after the last checkpoint then come twice.
    Whatever the package raises is told once on stderr and ends the tracking, not the run.

    Args:
      kind: one of `TRACKERS`. Raises `ValueError` where it cannot be used.
      workdir: the run directory, whose name and parent name the entry and its project.
      config: of the run, as JSON.
    """

    def __init__(self, kind: str, workdir: pathlib.Path, config: Mapping[str, Any]):
        if why := missing(kind):
            raise ValueError(f"logger={kind!r} {why}")
        self._kind, self._package = kind, importlib.import_module(kind)
        workdir = workdir.absolute()
        named = {"project": "marl_llm", "name": workdir.name, "config": dict(config)}
        if kind == "wandb":
            named |= {"dir": str(workdir), "mode": os.environ.get("WANDB_MODE", "offline"), "group": workdir.parent.name, "resume": "allow"}
            named["id"] = f"{workdir.parent.name}-{workdir.name}"
        else:
            named |= {"group": workdir.parent.name, "resume": "allow"}
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
