"""Plain functions in threads, for an event loop: `run_in_executor`, cheaper where many end at once.

Waking an event loop from a thread costs a system call and a turn of the interpreter's lock. Here the first function that ends wakes the
loop, and whatever ends before the loop comes round is handed over with it.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import weakref
from collections.abc import Callable
from typing import Any


class Threads:
    """Runs functions in the threads of `pool` for whichever event loop asks. The pool stays its owner's."""

    def __init__(self, pool: concurrent.futures.Executor):
        self._pool = pool
        self._desks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Desk] = weakref.WeakKeyDictionary()

    def run(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """A future of the running loop with what the function returns or raises. Cancelled, the function finishes unheard."""
        loop = asyncio.get_running_loop()
        desk = self._desks.get(loop)
        if desk is None:
            desk = self._desks[loop] = _Desk(loop)
        future = loop.create_future()
        self._pool.submit(desk.work, future, function)
        return future


class _Desk:
    """Where threads lay down what they have for one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)  # the loop is the key under which the desk is kept
        self._done: collections.deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = collections.deque()
        self._called = False  # whether the loop is going to look; false before it looks, so that nothing is left lying

    def work(self, future: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        """In a thread."""
        try:
            found, error = function(), None
        except BaseException as raised:  # whatever it is, it belongs to the one who awaits
            found, error = None, raised
        self._done.append((future, found, error))
        loop = self._loop()
        if self._called or loop is None or loop.is_closed():  # a closed loop has nobody left who awaits
            return
        self._called = True
        loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """In the loop."""
        self._called = False
        while self._done:
            future, found, error = self._done.popleft()
            if future.done():  # cancelled, by a deadline
                continue
            if error is None:
                future.set_result(found)
            elif isinstance(error, StopIteration):  # which no future can hold
                future.set_exception(RuntimeError(f"the function raised StopIteration: {error}"))
            else:
                future.set_exception(error)
