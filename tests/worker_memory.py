"""What the tests leave in the memory of a pytest process, and the limits on it.

XLA maps every compiled CPU program into the process, about 20 maps each, and keeps it until the program is freed. Linux allows 65,530 maps
per process (`vm.max_map_count`); past it, loading the next program is a segmentation fault. A process that runs a whole suite therefore
frees its programs after each file, and the run fails long before the limit.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import pathlib

import jax
import pytest

MAX_MAPS = int(os.environ.get("MARL_LLM_TEST_MAX_MAPS", 20_000))  # memory maps of one process
FREE_ABOVE_GB, GROWN_GB = 2.0, 0.4  # resident memory above which programs are freed within a file, if it grew so much since the last time
FREE_ABOVE = 2_000  # maps above which programs are freed after a file: fewer are left to the next file, which may need them too
MAX_GB = float(os.environ.get("MARL_LLM_TEST_MAX_GB", 3.0))  # resident memory of one process, 10^9 bytes
PROC = pathlib.Path("/proc/self")


@dataclasses.dataclass
class Peak:
    """The most that one process held: memory maps, and resident memory in 10^9 bytes, with the file of tests that reached it."""

    maps: int = 0
    gb: float = 0.0
    file: str = ""

    def look(self, file: str = "") -> int:
        """Counts the present maps after a test, or a file of tests, and returns them; the kernel itself keeps the maximum of the resident
        memory. 0 without `/proc`."""
        if not PROC.exists():
            return 0
        present = (PROC / "maps").read_bytes().count(b"\n")
        self.maps = max(self.maps, present)
        held = _status_gb("VmHWM")
        if held > self.gb:
            self.gb, self.file = held, file
        return present


def _status_gb(field: str) -> float:
    """A size that the kernel tells of this process, in 10^9 bytes."""
    fields = dict(line.split(":", 1) for line in (PROC / "status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024 / 1e9


def free_programs() -> None:
    """Frees every compiled program that no Python object holds, and gives the memory back where the C library can (glibc)."""
    jax.clear_caches()
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def excesses(peaks: dict[str, Peak], max_maps: int = MAX_MAPS, max_gb: float = MAX_GB) -> list[str]:
    """One line per limit that a process passed; process name -> peak."""
    lines = [f"{name} held {p.maps:,} memory maps, limit {max_maps:,}" for name, p in peaks.items() if p.maps > max_maps]
    lines += [f"{name} held {p.gb:.2f} GB in {p.file}, limit {max_gb:g} GB" for name, p in peaks.items() if p.gb > max_gb]
    return lines


class WorkerMemory:
    """A pytest plugin: frees compiled programs after each file, prints each process's peak, fails the run above the limits.

    Runs in every worker of pytest-xdist (which sends its peak to the controller) as well as in a run without workers.
    """

    def __init__(self):
        self.peak, self.peaks, self.left_gb = Peak(), {}, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item, nextitem):
        result = yield
        ends_file = nextitem is None or nextitem.path != item.path
        if (ends_file and self.peak.look(item.nodeid.partition("::")[0]) > FREE_ABOVE) or self._has_grown():
            free_programs()
            self.left_gb = _status_gb("VmRSS") if PROC.exists() else 0.0
        return result

    def _has_grown(self) -> bool:
        """Whether the process holds much, and much more than when programs were freed last."""
        return PROC.exists() and _status_gb("VmRSS") > max(FREE_ABOVE_GB, self.left_gb + GROWN_GB)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        """xdist's controller: a worker has ended. One that crashed has sent nothing; xdist fails its test."""
        if sent := getattr(node, "workeroutput", {}).get("peak"):
            self.peaks[node.gateway.id] = Peak(**sent)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        config = session.config
        if hasattr(config, "workeroutput"):
            config.workeroutput["peak"] = dataclasses.asdict(self.peak)
            return
        if self.peak.maps:  # tests ran in this process
            self.peaks["this process"] = self.peak
        if excesses(self.peaks) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for name, peak in sorted(self.peaks.items()):
            terminalreporter.write_line(f"{name}: at most {peak.maps:,} memory maps and {peak.gb:.2f} GB ({peak.file})")
        for line in excesses(self.peaks):
            terminalreporter.write_line(f"FAILED: {line} (tests/worker_memory.py)", red=True)
