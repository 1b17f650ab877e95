"""How far a run is: one live line on a terminal, a plain line now and then in a log.

The rate is that of the last `WINDOW_S` seconds and leaves out the first step, which compiles: that step may take a hundred times as long as
the next, and no estimate is made from it.
"""

import collections
import numbers
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from marl_llm import activity

WINDOW_S = 30.0
REDRAW_S = 0.1  # a terminal needs no more than ten lines a second
_BAR_CELLS = 20
_MIN_BAR_CELLS = 5


@runtime_checkable
class Stream(Protocol):
    """What `Progress` needs of a text stream; `sys.stderr`, files and `io.StringIO` have it."""

    encoding: Any  # str, or None for a stream that is not encoded

    def write(self, text: str, /) -> Any: ...

    def flush(self) -> Any: ...

    def isatty(self) -> bool: ...

    def fileno(self) -> int: ...


class Progress:
    """Shows how far a loop is; a context manager. Does not decide anything and keeps no state of the run.

    Args:
      total: the step at which the loop ends.
      label: what runs, for instance "train".
      stream: where to write; None is `sys.stderr`. A terminal (`isatty`) gets one live line, anything else plain lines.
      every_s: seconds between two plain lines in a log.
      start: the step at which this process begins, above 0 when a run resumes.
      clock: seconds, monotonic; tests pass their own.
    """

    def __init__(
        self,
        total: int,
        label: str,
        stream: Stream | None = None,
        every_s: float | int = 10,
        *,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._label, self._every_s, self._clock = total, label, every_s, clock
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._step, self._figures = start, dict[str, SupportsFloat | str]()
        self._times = collections.deque([(clock(), start)])
        self._first = clock()
        self._compiled_s: float | None = None  # of the first step
        self._shown_at: float | None = None
        self._shown_step: int | None = None
        self._closed = False
        activity.write_with(self.note)

    def update(self, step: int, **figures: SupportsFloat | str) -> None:
        """Says that `step` steps are done. `figures` are shown as they are (strings, ints) or with three digits."""
        now = self._clock()
        self._step, self._figures = step, figures
        if self._compiled_s is None:
            self._compiled_s = now - self._first
            self._times.clear()
        self._times.append((now, step))
        while len(self._times) > 2 and now - self._times[1][0] > WINDOW_S:
            self._times.popleft()
        pause = REDRAW_S if self._live else self._every_s
        if self._shown_at is None or now - self._shown_at >= pause or (self._live and step >= self._total):
            self._show(now)

    def note(self, text: str) -> None:
        """Writes one lasting line, above the live line on a terminal."""
        activity.said()
        self._stream.write(f"\r{text}\x1b[K\n" if self._live else f"{text}\n")
        if self._live and self._shown_step is not None:
            self._show(self._clock())
        self._stream.flush()

    def close(self) -> None:
        """Shows the last state if it was not shown, and ends the line; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        activity.release(self.note)
        if self._times[-1][1] != self._shown_step and self._compiled_s is not None:
            self._show(self._clock())
        if self._live and self._shown_step is not None:
            self._stream.write("\n")
        self._stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _show(self, now: float) -> None:
        activity.said()
        self._shown_at, self._shown_step = now, self._step
        if self._live:
            self._stream.write(f"\r{self._line(self._columns() - 1)}\x1b[K")
        else:
            self._stream.write(f"{self._line(None)}\n")
        self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):  # a terminal without a size, or a stream without a file
            return 80

    def _line(self, width: int | None) -> str:
        """Label, bar, step/total, figures, rate and ETA; what does not fit in `width` is left out, least needed first."""
        head = f"{self._label} {self._step}/{self._total}"
        figures = [f"{name} {_figure(value)}" for name, value in self._figures.items()]
        tail = self._pace()
        if width is None:
            return "  ".join([head, *figures, tail])
        while len("  ".join([head, *figures, tail])) > width and figures:
            figures.pop()
        text = "  ".join([head, *figures, tail])
        cells = min(_BAR_CELLS, width - len(text) - 3)
        if cells >= _MIN_BAR_CELLS:
            text = "  ".join([f"{self._label} {self._bar(cells)} {self._step}/{self._total}", *figures, tail])
        return text[: max(width, 0)]

    def _bar(self, cells: int) -> str:
        full, empty = ("█", "░") if _can_write(self._stream, "█░") else ("#", ".")
        done = min(cells, cells * self._step // max(self._total, 1))
        return full * done + empty * (cells - done)

    def _pace(self) -> str:
        (t0, s0), (t1, s1) = self._times[0], self._times[-1]
        if self._step >= self._total:
            return f"done in {_duration(t1 - self._first)}"
        if s1 <= s0 or t1 <= t0:
            return "ETA ?" if self._compiled_s is None else f"first step {_duration(self._compiled_s)}"
        rate = (s1 - s0) / (t1 - t0)
        pace = f"{rate:.3g} steps/s" if rate >= 0.1 else f"{1 / rate:.3g} s/step"
        return f"{pace}  ETA {_duration((self._total - s1) / rate)}"


def _can_write(stream: Stream, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _figure(value: SupportsFloat | str) -> str:
    return str(value) if isinstance(value, str | numbers.Integral) else f"{float(value):.3g}"


def _duration(seconds: float | int) -> str:
    minutes, s = divmod(int(round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
