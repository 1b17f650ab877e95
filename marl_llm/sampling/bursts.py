"""Requests that are made at the same moment are submitted together, so that one program admits them.

An admission of a small model costs the same with one row as with all slots; and a thread that is woken by each of them would take the
interpreter's lock from the one that makes them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any


class Bursts:
    """What callers of an event loop hand in, given on in bursts.

    A burst is over when `full` have come, when two turns of the loop bring nobody, or after `MOST` turns.

    Args:
      release: is given a burst, in the loop.
    """

    MOST = 64

    def __init__(self, release: Callable[[list[Any]], None], full: int):
        self._release, self._full = release, full
        self._open: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[Any]] = weakref.WeakKeyDictionary()

    def add(self, item: Any) -> None:
        """Hands something in. In a running loop."""
        loop = asyncio.get_running_loop()
        burst = self._open.get(loop)
        if burst is None:
            burst = self._open[loop] = []
            loop.call_soon(self._turn, loop, burst, 1, False, self.MOST)
        burst.append(item)
        if len(burst) >= self._full:
            self._end(loop)

    def _turn(self, loop: asyncio.AbstractEventLoop, burst: list[Any], before: int, quiet: bool, left: int) -> None:
        if self._open.get(loop) is not burst:  # it was full
            return
        if left and (len(burst) > before or not quiet):
            loop.call_soon(self._turn, loop, burst, len(burst), len(burst) == before, left - 1)
        else:
            self._end(loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._release(self._open.pop(loop))
