"""Outcomes that were reached once are not reached again: candidates of one problem often write the very same program."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import pickle
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from marl_llm.tools.results import ToolResult
from marl_llm.tools.waiting import Clock


@dataclasses.dataclass
class _Judging:
    """One judge at work: its task, its clock, and how many await it."""

    task: asyncio.Task
    clock: Clock
    askers: int = 0


class Verdicts:
    """A cache of tool results. The sandbox gives the same program the same outcome, so nothing changes but the time.

    Failures of the infrastructure are not kept. It holds at most `size` results, and is emptied when it is full. Results are shared by all
    event loops, judges at work by those who ask in the same loop.
    """

    def __init__(self, size: int = 65_536):
        self._size = size
        self._known: dict[Hashable, ToolResult] = {}
        self._running: dict[asyncio.AbstractEventLoop, dict[Hashable, _Judging]] = {}

    async def of(self, key: Hashable, judge: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The result of this key; `judge()` is awaited by the first who asks, and the others wait for it.

        The clock of everyone who waits runs while the judge works, and stands still while the judge waits in a queue. Whoever is late or
        cancelled leaves the others their judge; the last one who leaves ends it.
        """
        if key in self._known:
            return self._known[key]
        running = self._of_this_loop()
        judging = running.get(key)
        if judging is None:
            judging = running[key] = _start(judge)
            judging.task.add_done_callback(lambda _: _forget(running, key, judging))
        judging.askers += 1
        try:
            with judging.clock.shared():
                result = await asyncio.shield(judging.task)
        finally:
            judging.askers -= 1
            if not judging.askers and not judging.task.done() and not judging.task.get_loop().is_closed():
                _forget(running, key, judging)  # at once: whoever asks next gets a judge that goes on
                judging.task.cancel()
        if result.ok:
            if len(self._known) >= self._size:
                self._known.clear()
            self._known[key] = result
        return result

    def _of_this_loop(self) -> dict[Hashable, _Judging]:
        """The judges at work in the running loop. A closed loop's will never end: they are dropped."""
        for loop in list(self._running):
            if loop.is_closed():
                self._running.pop(loop, None)
        return self._running.setdefault(asyncio.get_running_loop(), {})


def _start(judge: Callable[[], Awaitable[ToolResult]]) -> _Judging:
    """A judge at work, by a clock that is nobody's own."""
    clock = Clock(apart=True)

    async def work() -> ToolResult:
        return await judge()

    with clock.use():
        return _Judging(asyncio.get_running_loop().create_task(work()), clock)


def _forget(running: dict[Hashable, _Judging], key: Hashable, judging: _Judging) -> None:
    if running.get(key) is judging:
        del running[key]
    if judging.task.done() and not judging.task.cancelled():
        judging.task.exception()  # read, even where nobody awaits it any more


def content_key(*parts: Any) -> bytes:
    """A key of 32 bytes, however large the parts are: equal for equal parts, and for no others.

    The parts are pickled without references, so every value is told from one of another type, and two from one. A part that cannot be
    pickled raises what pickle raises.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.fast = True  # no references: what is equal has one form, wherever its parts lie in memory
    pickler.dump(parts)
    return hashlib.sha256(file.getbuffer()).digest()
