"""Plain functions in threads, for an event loop: a limit of calls per tool, and a deadline that begins when the call does.

A thread cannot be stopped. A call that is late is therefore left behind: its thread ends when the function does, and another thread takes
its place in the tool's limit. Threads left behind are bounded too. Beyond `SPARE` per call of its limit a tool's limit shrinks, and a
tool that has no thread left answers every call with `Stalled` until some of its functions have come back.

The first function that ends wakes the loop, and whatever ends before the loop comes round is handed over with it (`tools.mailbox`).
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from marl_llm.tools.mailbox import Mailbox
from marl_llm.tools.waiting import LOOK_S, Clock, waiting

IDLE_S = 10.0  # a thread without a call ends after so long
SPARE = 4  # threads left behind per call of the limit, before the limit shrinks


class Late(Exception):
    """The function did not end within its deadline."""


class Stalled(Exception):
    """The function was not called: all threads that its tool may have are held by calls that hang."""


class Threads:
    """Runs functions in daemon threads for whichever event loop asks.

    Args:
      limit: most calls of one tool at a time; the others wait in order.
    """

    def __init__(self, limit: int = 32):
        self._limit = limit
        self._lines: dict[str, _Line] = {}
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()

    def run(self, function: Callable[[], Any], timeout_s: float | int | None = None, tool: str = "") -> asyncio.Future[Any]:
        """A future of the running loop with what the function returns or raises.

        Args:
          timeout_s: from when the function is called, which may be later than now; then the future raises `Late`.
          tool: whose limit the call counts against.

        A future that is cancelled leaves its call behind, as a late one is.
        """
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            mailbox = self._mailboxes[loop] = Mailbox(loop)
        line = self._lines.get(tool)
        if line is None:
            line = self._lines.setdefault(tool, _Line(tool, self._limit))
        call = _Call(function, loop.create_future(), mailbox, timeout_s)
        call.future.add_done_callback(lambda _: line.settled(call))
        line.enter(call)
        if timeout_s is not None:
            call.timer = loop.call_later(timeout_s, line.look, call)
        return call.future

    def hung(self) -> dict[str, int]:
        """Calls that were late, by tool, since the start; only tools that had any."""
        return {name: line.late for name, line in self._lines.items() if line.late}

    def close(self) -> None:
        """Lets the threads go: calls under way finish unheard, waiting ones raise `Stalled`."""
        for line in self._lines.values():
            line.close()


class _Call:
    """One call: waiting until it has `started`, over once `future` is done. Its clock begins with it (`tools.waiting`)."""

    def __init__(self, function: Callable[[], Any], future: asyncio.Future[Any], mailbox: Mailbox, timeout_s: float | int | None):
        self.function, self.future, self.mailbox, self.timeout_s = function, future, mailbox, timeout_s
        self.context, self.clock = contextvars.copy_context(), None
        self.started, self.arrived = False, waiting()
        self.ended = self.left = False
        self.timer: asyncio.TimerHandle | None = None

    def carry_out(self) -> Any:
        """In a thread."""
        with self.clock.use():
            return self.function()


class _Line:
    """The calls of one tool and the threads that carry them out."""

    def __init__(self, name: str, limit: int):
        self._name, self._limit, self._most = name, limit, (1 + SPARE) * limit
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._handed: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = 0  # threads that wait at `_handed`, less what lies there
        self._running = self._left = 0  # calls in threads: heard, and left behind
        self._closed = False
        self.late = 0

    def enter(self, call: _Call) -> None:
        """Starts a call, or lets it wait."""
        with self._lock:
            self._waiting.append(call)
            self._serve()

    def look(self, call: _Call) -> None:
        """In the loop, when a call may be late."""
        if call.future.done():
            return
        left = call.timeout_s - (call.clock.elapsed() if call.started else 0.0)
        if left > 0:
            call.timer = call.future.get_loop().call_later(max(left, LOOK_S), self.look, call)
            return
        with self._lock:
            self.late += 1
        call.future.set_exception(Late(f"no answer within {call.timeout_s} s"))

    def settled(self, call: _Call) -> None:
        """In the loop, once the future of a call is done: by its result, by its deadline or by a cancellation."""
        call.arrived()
        if call.timer is not None:
            call.timer.cancel()
        with self._lock:
            if not call.started or call.ended:
                return
            call.left = True
            self._running -= 1
            self._left += 1
            self._serve()

    def close(self) -> None:
        """See `Threads.close`."""
        with self._lock:
            self._closed = True
            self._serve()
            for _ in range(self._idle):
                self._handed.put(None)
            self._idle = 0

    def _serve(self) -> None:
        """Starts as many waiting calls as there are threads for. With the lock."""
        while self._waiting and not self._closed and self._running < min(self._limit, self._most - self._left):
            call = self._waiting.popleft()
            if call.future.done():
                continue
            call.arrived()
            call.clock, call.started = call.context.run(Clock), True
            self._running += 1
            if self._idle:
                self._idle -= 1
                self._handed.put(call)
                continue
            try:
                threading.Thread(target=self._work, args=(call,), daemon=True, name=f"tool {self._name}").start()
            except RuntimeError as error:  # the system gives no more threads
                call.ended = True
                self._running -= 1
                call.mailbox.put(call.future, None, Stalled(f"tool {self._name!r}: {error}"))
        if self._closed or self._left >= self._most:
            why = "the controller is closed" if self._closed else f"{self._left} of its calls hang, and no thread is spent on another"
            while self._waiting:
                call = self._waiting.popleft()
                call.mailbox.put(call.future, None, Stalled(f"tool {self._name!r}: {why}"))

    def _work(self, call: _Call) -> None:
        """A thread's life."""
        while call is not None:
            try:
                result, error = call.context.run(call.carry_out), None
            except SystemExit as raised:  # which would end the loop, and the run without a word
                result, error = None, RuntimeError(f"it called sys.exit({raised.code!r})")
            except BaseException as raised:  # whatever it is, it belongs to the one who awaits
                result, error = None, raised
            with self._lock:
                call.ended = True  # before anyone hears of it, so that nobody takes this thread for a lost one
                if call.left:
                    self._left -= 1
                    self._serve()
                    return  # another thread took this one's place
                self._running -= 1
                self._serve()
                stays = not self._closed
                self._idle += stays
            call.mailbox.put(call.future, result, error)
            del result, error
            call = self._next() if stays else None

    def _next(self) -> _Call | None:
        """What is handed to a thread that waits; None if it is to end."""
        try:
            return self._handed.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if not self._handed.empty():
                    return self._handed.get()
                self._idle -= 1
                return None
