"""What a program is at, for people who wait: long work says its name, and a heartbeat tells it when nothing else was said for a while.

    with Heartbeat(print):
        with doing("playing", 32) as work:
            work.done += 1          # the heartbeat says "playing: 1 of 32 (5 s)"
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator

EVERY_S = 5.0

_works: list[Activity] = []  # of all threads, in the order in which they began
_compiling: dict[int, str] = {}  # thread -> the program that XLA compiles for it
_writers: list[weakref.WeakMethod] = []  # of those who keep a line of their own at the bottom of a terminal
_said_at = 0.0  # when somebody last wrote to the same place
_listening = False


class Activity:
    """Something that takes long.

    Attributes:
      name: what is being done.
      total: of how many parts it consists; None: of no countable ones. done: how many are ready.
    """

    def __init__(self, name: str, total: int | None = None):
        self.name, self.total, self.done, self.since = name, total, 0, time.monotonic()


@contextlib.contextmanager
def doing(name: str, total: int | None = None) -> Iterator[Activity]:
    """Says what is being done within."""
    work = Activity(name, total)
    _works.append(work)
    try:
        yield work
    finally:
        _works.remove(work)


def said() -> None:
    """Somebody wrote a line: the heartbeat waits anew."""
    global _said_at
    _said_at = time.monotonic()


def write_with(write: Callable[[str], None]) -> None:
    """Lines go through this method until it is released, or its object is gone."""
    _writers.append(weakref.WeakMethod(write))


def release(write: Callable[[str], None]) -> None:
    """See `write_with`; a second call does nothing."""
    _writers[:] = [one for one in _writers if one() not in (None, write)]


def _writer() -> Callable[[str], None] | None:
    """The latest that is still there."""
    return next((write for one in reversed(_writers) if (write := one()) is not None), None)


def told(now: float) -> str | None:
    """The latest work that is under way, how far it is, and what is compiled for it; None where nothing is."""
    works, compiled = list(_works), list(_compiling.values())
    if not works:
        return None
    work = works[-1]
    count = "" if work.total is None else f" {work.done} of {work.total}"
    program = f", compiling {compiled[-1]}" if compiled else ""
    return f"{work.name}{count}{program} ({now - work.since:.0f} s)"


def _listen() -> None:
    """Follows what is compiled: JAX tells of a program when its text is ready, and again when XLA has compiled it."""
    global _listening
    if _listening:
        return
    _listening = True
    import jax

    def heard(event: str, seconds: float, **about) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            name = str(about.get("fun_name", "a program"))
            _compiling[threading.get_ident()] = name.removeprefix("jit(").removesuffix(")")
        elif event == "/jax/core/compile/backend_compile_duration":
            _compiling.pop(threading.get_ident(), None)

    jax.monitoring.register_event_duration_secs_listener(heard)


class Heartbeat:
    """Writes a line when nothing was written for `every_s` seconds and something is being done; a context manager.

    Args:
      write: takes a line, while nobody else does (`write_with`).
    """

    def __init__(self, write: Callable[[str], None], every_s: float | int = EVERY_S):
        self.write, self._every_s = write, float(every_s)
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._run, name="marl_llm heartbeat", daemon=True)

    def look(self, now: float) -> float:
        """Writes if it is time to; seconds until it is to be looked at again."""
        waited = now - _said_at
        if waited < self._every_s:
            return self._every_s - waited
        if (line := told(now)) is not None:
            (_writer() or self.write)(line)
            said()
            return self._every_s
        return min(1.0, self._every_s)

    def _run(self) -> None:
        pause = self._every_s
        while not self._ended.wait(pause):
            pause = self.look(time.monotonic())

    def __enter__(self) -> Heartbeat:
        _listen()
        said()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
