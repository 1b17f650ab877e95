"""Time that counts against a deadline, and time that does not: a call that waits in a queue for a worker is not late.

    result = await within(2.0, tool())   # in tool(), wherever a call begins to wait for a worker:  arrived = waiting()
                                         # and, from any thread, when it has one:                  arrived()

A queue tells the clock of whoever asks, and needs to know nothing of deadlines; a deadline reads the clock, and needs to know nothing of
queues. The clock is a context variable, so it follows awaits and tasks. Whoever hands work to a thread takes it along (`Clock.use`).
"""

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

LOOK_S = 0.01  # least pause between two looks at a clock
_clock: contextvars.ContextVar["Clock | None"] = contextvars.ContextVar("clock", default=None)


class Clock:
    """The time of one call. It stands still while anything that the call asked for waits. May be read and told from any thread.

    A clock that is made within the use of another is part of it: what stops it stops the other as well.

    Args:
      apart: it is part of no other clock; those who wait for its work share it (`shared`).
    """

    def __init__(self, apart: bool = False):
        self._parent = None if apart else _clock.get()
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._waits, self._since, self._waited = 0, 0.0, 0.0
        self._sharing: list[Clock] = []

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Makes this the clock that `waiting` tells, in this context."""
        token = _clock.set(self)
        try:
            yield
        finally:
            _clock.reset(token)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Stops the clock of the present call as well, whenever this one stands still."""
        own = _clock.get()
        if own is None:
            yield
            return
        with self._lock:
            self._sharing.append(own)
            if self._waits:
                own._change(1)
        try:
            yield
        finally:
            with self._lock:
                self._sharing.remove(own)
                if self._waits:
                    own._change(-1)

    def elapsed(self) -> float:
        """Seconds since the clock was made, without those in which it stood still."""
        with self._lock:
            return (self._since if self._waits else time.monotonic()) - self._start - self._waited

    def _change(self, by: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._waits == 0:
                self._since = now
                for other in self._sharing:
                    other._change(1)
            self._waits += by
            if self._waits == 0:
                self._waited += now - self._since
                for other in self._sharing:
                    other._change(-1)
        if self._parent is not None:
            self._parent._change(by)


def waiting() -> Callable[[], None]:
    """Stops the clock of the present call until the returned function is called, from whatever thread; a second time it does nothing."""
    clock, lock, over = _clock.get(), threading.Lock(), []
    if clock is None:
        return lambda: None
    clock._change(1)

    def arrived() -> None:
        with lock:
            if over:
                return
            over.append(True)
        clock._change(-1)

    return arrived


def _look(deadline: asyncio.Timeout, clock: Clock, timeout_s: float | int, timer: list[asyncio.TimerHandle]) -> None:
    """Ends what is late, or looks again later; `timer` holds the next look. Not a closure of `within`: one that names itself is a cycle,
    and would keep what every call has made until Python looks for such."""
    loop, left = asyncio.get_running_loop(), timeout_s - clock.elapsed()
    if left <= 0:
        deadline.reschedule(loop.time())
    else:
        timer[:] = [loop.call_later(max(left, LOOK_S), _look, deadline, clock, timeout_s, timer)]


async def within(timeout_s: float | int | None, work: Awaitable[T]) -> T:
    """What is awaited, with a clock of its own.

    Args:
      timeout_s: most seconds by that clock; None for any number.

    Raises:
      Expired: the time is over. A TimeoutError that `work` raises itself is another.
    """
    clock, timer = Clock(), []
    try:
        async with asyncio.timeout(None) as deadline:
            if timeout_s is not None:
                _look(deadline, clock, timeout_s, timer)
            with clock.use():
                return await work
    except TimeoutError:
        if deadline.expired():
            raise Expired(f"no answer within {timeout_s} s") from None
        raise
    finally:
        for handle in timer:
            handle.cancel()


class Expired(TimeoutError):
    """The time of a call is over, the time that it waited for a worker not counted."""
