"""Results of other threads for the futures of an event loop.

Waking a loop from a thread costs a system call and a turn of the interpreter's lock. What threads lay down before the loop comes round is
handed over with one call.
"""

from __future__ import annotations

import asyncio
import collections
import weakref
from typing import Any


class Mailbox:
    """Results that threads hand to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)  # whoever keeps a mailbox by its loop must not keep the loop
        self._done: collections.deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = collections.deque()
        self._called = False  # whether the loop is going to look; false before it looks, so that nothing is left lying

    def lay(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Adds a result for the loop, from any thread, without waking the loop."""
        self._done.append((future, result, error))

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Adds a result for the loop, and wakes it."""
        self.lay(future, result, error)
        self.tell()

    def tell(self) -> None:
        """Wakes the loop, if there are results that it does not know of."""
        loop = self._loop()
        if self._called or not self._done or loop is None or loop.is_closed():  # a closed loop has nobody left who awaits
            return
        self._called = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed since the line above
            return

    def _deliver(self) -> None:
        """Sets the results; runs in the loop."""
        self._called = False
        while self._done:
            future, result, error = self._done.popleft()
            if future.done():  # cancelled, or late
                continue
            if error is None:
                future.set_result(result)
            elif isinstance(error, StopIteration):  # which no future can hold
                future.set_exception(RuntimeError(f"the function raised StopIteration: {error}"))
            else:
                future.set_exception(error)
