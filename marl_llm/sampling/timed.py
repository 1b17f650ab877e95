"""What the programs of a scheduler cost: seconds of each kind, and the first run of each shape, which compiles it."""

from __future__ import annotations

import collections
import logging
import time

log = logging.getLogger(__name__)


class Timed:
    """Counts the seconds of a program in `stats`, and logs the first run of each shape.

    Args:
      name: of the scheduler.
      stats: gets `<kind>_s`, and of first runs `compilations` and `compile_s` instead; `shape[0]` is the kind.
      shapes: that ran before; gets this one.
    """

    def __init__(self, name: str, stats: collections.Counter, shapes: set[tuple], shape: tuple):
        self.name, self.stats, self.shapes, self.shape = name, stats, shapes, shape

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, kind, error, trace) -> None:
        took = time.perf_counter() - self.started
        if self.shape not in self.shapes and error is None:
            self.shapes.add(self.shape)
            self.stats["compilations"] += 1
            self.stats["compile_s"] += took
            log.info("engine: model %s compiled %s in %.1f s (%d shapes)", self.name, self.shape, took, len(self.shapes))
        else:
            self.stats[f"{self.shape[0]}_s"] += took
