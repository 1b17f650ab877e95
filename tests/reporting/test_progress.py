"""Progress: one overwritten line on a terminal, few plain lines in a log, and an honest ETA."""

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from marl_llm.reporting import Progress


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A terminal that knows no size: 80 columns."""

    def __init__(self, encoding="utf-8"):
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return True


def test_log_gets_a_line_every_ten_seconds_and_the_last():
    stream, clock = io.StringIO(), Clock()
    with Progress(100, "train", stream, every_s=10, clock=clock) as progress:
        for step in range(1, 101):
            clock.now = step * 0.25  # 25 s in all
            progress.update(step, success=step / 100)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "41/100", "81/100", "100/100"]
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "success 0.41" in lines[1]
    assert "4 steps/s" in lines[1]
    assert "ETA 0:15" in lines[1]
    assert lines[-1].endswith("done in 0:25")


def test_log_shows_the_last_step_once_when_the_loop_breaks():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, "train", stream, clock=clock)
    progress.update(1)
    progress.update(2)
    progress.close()
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/100", "2/100"]


def test_an_error_in_the_loop_still_ends_the_line():
    stream = Terminal()

    def loop():
        with Progress(10, "train", stream) as progress:
            progress.update(1)
            raise KeyError("x")

    with pytest.raises(KeyError):
        loop()
    assert stream.getvalue().endswith("\n")


def test_terminal_overwrites_one_line_and_ends_it_once():
    stream, clock = Terminal(), Clock()
    with Progress(50, "train", stream, clock=clock) as progress:
        for step in range(1, 51):
            clock.now = float(step)
            progress.update(step, success=0.5)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    frames = text.rstrip("\n").split("\r")[1:]
    assert len(frames) == 50
    assert all(len(frame.removesuffix("\x1b[K")) <= 79 for frame in frames)
    assert "██████████" in frames[25]
    assert "25/50" in frames[24]
    assert "1 steps/s" in frames[24]
    assert "ETA 0:25" in frames[24]


def test_terminal_is_redrawn_ten_times_a_second_at_most_but_always_at_the_end():
    stream, clock = Terminal(), Clock()
    with Progress(1000, "train", stream, clock=clock) as progress:
        for step in range(1, 1001):
            clock.now = step / 1000
            progress.update(step)
    frames = stream.getvalue().split("\r")[1:]
    assert len(frames) <= 12
    assert "1000/1000" in frames[-1]


@pytest.mark.parametrize("columns", [100, 60, 30, 12])
def test_a_real_terminal_is_never_overrun(columns):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        with Progress(50, "train", stream) as progress:
            progress.update(7, success=0.123456, turns=2.5, reward=1.0)
        text = os.read(master, 4096).decode()
    os.close(master)
    frame = text.split("\r")[1].removesuffix("\x1b[K")
    assert frame.startswith("train ")
    assert len(frame) <= columns - 1
    assert ("success 0.123" in frame) == (columns >= 60)
    assert ("█" in frame) == (columns >= 100)


def test_a_stream_without_blocks_gets_ascii():
    stream = Terminal("ascii")
    with Progress(10, "train", stream) as progress:
        progress.update(5)
    assert "##########.........." in stream.getvalue()
    assert stream.getvalue().isascii()


def test_the_rate_forgets_the_compilation_and_counts_from_the_resumed_step():
    stream, clock = io.StringIO(), Clock()
    progress = Progress(1000, "train", stream, every_s=0, start=500, clock=clock)
    clock.now = 60.0  # the first step compiles for a minute
    progress.update(501)
    assert stream.getvalue() == "train 501/1000  first step 1:00\n"  # and no estimate: the next step will not compile
    for step in range(502, 602):
        clock.now += 1.0
        progress.update(step)
    assert "1 steps/s  ETA 6:39" in stream.getvalue().splitlines()[-1]


def test_a_note_stays_above_the_live_line():
    stream = Terminal()
    with Progress(10, "train", stream) as progress:
        progress.update(1)
        progress.note("eval: 50 %")
    lines = stream.getvalue().split("\n")
    assert lines[0].split("\r")[-1] == "eval: 50 %\x1b[K"
    assert "1/10" in lines[1]
