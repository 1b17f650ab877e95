"""Async tools of an event loop: a limit of calls per tool, and a deadline that holds even where a call will not be cancelled.

A coroutine that is late is cancelled. One that swallows its cancellation cannot be stopped: after `GRACE_S` it is left behind, and another
call takes its place. As with threads (`workflows.threads`), those left behind are bounded: beyond them a tool's calls fail with `Stalled`.
A coroutine that never awaits holds up the whole loop; that is a fault in the tool, and plain functions are for it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from marl_llm.tools.waiting import LOOK_S, Clock, waiting
from marl_llm.workflows.threads import Late, Stalled

LIMIT = 256  # calls of one async tool at a time
SPARE = 4  # calls left behind per call of the limit, before a tool fails at once
GRACE_S = 1.0  # for a cancelled call to end


class Coroutines:
    """Awaits the calls of async tools.

    Args:
      limit: most calls of one tool at a time, in one event loop; the others wait in order.
    """

    def __init__(self, limit: int = LIMIT):
        self._limit = limit
        self._lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Line]] = weakref.WeakKeyDictionary()
        self._late: collections.Counter[str] = collections.Counter()

    async def run(self, call: Callable[[], Coroutine], timeout_s: float | int, tool: str) -> Any:
        """What the call returns or raises.

        Args:
          timeout_s: from when the call begins, time in the queues of what it asks not counted (`tools.waiting`).
          tool: whose limit it counts against.

        Raises:
          Late: it was not done in time.
          Stalled: it was not begun, because too many calls of this tool hang, or it cancelled itself.
        """
        lines = self._lines.setdefault(asyncio.get_running_loop(), {})
        line = lines.setdefault(tool, _Line(asyncio.Semaphore(self._limit)))
        arrived = waiting()
        try:
            await line.gate.acquire()
        finally:
            arrived()
        try:
            if line.left >= SPARE * self._limit:
                raise Stalled(f"tool {tool!r}: {line.left} of its calls hang and cannot be cancelled")
            return await self._within(line, call, timeout_s, tool)
        finally:
            line.gate.release()

    def hung(self) -> dict[str, int]:
        """Calls that were late, by tool, since the start; only tools that had any."""
        return dict(self._late)

    async def _within(self, line: _Line, call: Callable[[], Coroutine], timeout_s: float | int, tool: str) -> Any:
        clock = Clock()
        with clock.use():
            task = asyncio.create_task(_contained(call))
        try:
            while (left := timeout_s - clock.elapsed()) > 0:
                await asyncio.wait({task}, timeout=max(left, LOOK_S))
                if task.cancelled():
                    raise Stalled(f"tool {tool!r}: the call cancelled itself")
                if task.done():
                    return task.result()
            self._late[tool] += 1
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE_S)
        finally:  # late, or the one who awaits was cancelled
            if not task.done():
                task.cancel()
                line.left += 1
                task.add_done_callback(line.came_back)
            task.add_done_callback(_unheard)
        raise Late(f"no answer within {timeout_s} s")


@dataclasses.dataclass
class _Line:
    """One tool in one loop: who may call it, and how many calls were left behind."""

    gate: asyncio.Semaphore
    left: int = 0

    def came_back(self, task: asyncio.Task) -> None:
        """A call that had been left behind has ended."""
        del task
        self.left -= 1


async def _contained(call: Callable[[], Coroutine]) -> Any:
    """The call; a tool that ends the process as a script would (`sys.exit`) ends its own call."""
    try:
        return await call()
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


def _unheard(task: asyncio.Task) -> None:
    """Takes what a task raised, so that nobody is told that it was never asked for."""
    if not task.cancelled():
        task.exception()


def run_loop(job: Coroutine) -> Any:
    """`asyncio.run`, which waits for cancelled tasks for ever, but with `GRACE_S` for those that will not end."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(job)
    finally:
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
            task.add_done_callback(_unheard)
        if rest:
            loop.run_until_complete(asyncio.wait(rest, timeout=GRACE_S))
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # it was told of as late
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
