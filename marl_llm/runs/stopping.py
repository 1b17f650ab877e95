"""A run that is told to stop: SIGTERM (a preempted machine, a scheduler's time limit) and Ctrl-C. docs/resume.md has the table.

Between two steps a run can be left without loss, so SIGTERM waits for the end of the step under way, writes a checkpoint, and ends the
process with exit code 143. If that takes longer than the grace time, the process ends at once and the last whole checkpoint stands; one
that is being written in the background becomes whole first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from marl_llm.runs.command import STOPPED

GRACE_S = 25.0  # of the 30 s that Google's preemptible machines and Kubernetes give


class Stopped(SystemExit):
    """The run was told to stop, and has said so; exit code 143. A `SystemExit`, so that no event loop takes it for a failed task."""

    def __init__(self):
        super().__init__(STOPPED)


class Stopping(contextlib.AbstractContextManager):
    """Listens to SIGTERM and Ctrl-C while a run is open; `asked` says that the run is to stop.

    Outside of the steps (start, supervised warm-up, final evaluation) there is nothing to wait for: SIGTERM raises `Stopped` at once and
    Ctrl-C `KeyboardInterrupt`. Within `steps`, SIGTERM asks, and so does a second Ctrl-C; a third one raises `KeyboardInterrupt`. A
    thread counts the grace time from the arrival of SIGTERM, so that it holds while the interpreter waits for a device or a compiler too.
    Signals reach the main thread only: opened in another thread, this listens to nothing.

    Args:
      checkpoints: `marl_llm.training.Checkpoints` of the run.
      again: the command that continues.
      grace_s: seconds from SIGTERM to the end of the process. Ctrl-C has no such limit.
    """

    def __init__(self, checkpoints, again: str, grace_s: float = GRACE_S):
        self.asked = False
        self._checkpoints, self._again, self._grace_s = checkpoints, again, grace_s
        self._writing = threading.RLock()  # held while a checkpoint is written
        self._stepping, self._told, self._interrupts = False, False, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminated)}
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)
        self._thread = threading.Thread(target=self._watch, name="grace", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._fd_before)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
        self._before = {}

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        """The steps, in which a signal waits for `boundary`."""
        if self.asked:  # whoever was interrupted took `Stopped` for a failure of its own
            self._outside()
        self._stepping = True
        yield from steps
        self._stepping = False
        if self.asked:  # behind the last boundary
            self._outside()

    def whole(self, save: Callable, *args) -> None:
        """Writes a checkpoint, `save(*args)`; the end of the grace time waits for it, because a kill could do no more harm."""
        with self._writing:
            save(*args)

    def boundary(self, step: int, save: Callable[[int], Any], close: Callable[[], None], agreed: bool | None = None) -> None:
        """The end of step `step`. If the run is to stop: a checkpoint, closed files, the message, and `Stopped`.

        Several processes stop if they have `agreed` to, not by what each was asked: a signal that came while they told each other is
        for the next boundary. None: by what this process was asked.

        Raises `CheckpointError` where a write in the background has failed since the last step.
        """
        self._checkpoints.wait(only_if_done=True)
        if not (self.asked if agreed is None else agreed):
            return
        with self._writing:
            if step not in self._checkpoints.steps():
                save(step)
            self._checkpoints.wait()
            close()
            self._tell(f"stopped after step {step}, with a checkpoint")
        raise Stopped

    def _tell(self, reason: str) -> None:
        """Prints the last message, once, past Python's streams, in which a signal may have interrupted another print."""
        if not self._told:
            self._told = True
            _say(f"{reason}. To continue:\n  {self._again}")

    def _last(self) -> str:
        """The last whole checkpoint, in words; one that is being written in the background is finished first."""
        from marl_llm.training import CheckpointError

        try:
            steps = self._checkpoints.steps()
        except CheckpointError as error:
            return str(error)
        return f"the last whole checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint yet: the run begins again"

    def _outside(self) -> NoReturn:
        self._tell(f"stopped outside of the steps; {self._last()}")
        raise Stopped

    def _terminated(self, *_) -> None:
        if not self._stepping:
            self.asked = True
            self._outside()
        if not self.asked:
            _say(f"SIGTERM: a checkpoint follows at the end of this step, if that comes within {self._grace_s:g} s")
        self.asked = True

    def _interrupted(self, *_) -> None:
        self._interrupts += 1
        if not self._stepping or self._interrupts > 2:
            raise KeyboardInterrupt
        if self._interrupts == 1:
            _say("Ctrl-C: the run goes on. A second Ctrl-C stops it with a checkpoint at the end of the step, a third one at once")
        else:
            _say("Ctrl-C: a checkpoint follows at the end of this step; once more stops at once, without one")
            self.asked = True

    def _watch(self) -> None:
        """Ends the process when the grace time is over. Python's own handlers wait for the interpreter; the pipe does not."""
        deadline = None
        while select.select([self._reader], [], [], None if deadline is None else max(0.0, deadline - time.monotonic()))[0]:
            arrived = os.read(self._reader, 64)
            if 0 in arrived:
                return
            if signal.SIGTERM in arrived and deadline is None:
                deadline = time.monotonic() + self._grace_s
        with self._writing:
            self._tell(f"stopped at once: what was under way took longer than --grace_s={self._grace_s:g}; {self._last()}")
            os._exit(STOPPED)


def _say(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())
