"""One attempt at a job, as the host sees it: pipes that fill, a record that comes or does not."""

import os
import time

from marl_llm.tools.sandbox.limits import Limits
from marl_llm.tools.sandbox.queueing import Job
from marl_llm.tools.sandbox.slot import Slot

BACKSTOP_S = 5.0  # after a job's own limit: its supervisor must have reported by then
PACK_S = 20.0  # and this much later where it packs a workspace
CHANNEL_BYTES = 8 << 20


def waiting_s(limits: Limits, packs: bool) -> float:
    """Seconds until a supervisor must have reported; `packs`: a workspace."""
    return limits.timeout_s + BACKSTOP_S + PACK_S * packs


class Attempt:
    """The read ends of an attempt's pipes and what came through them."""

    def __init__(self, job: Job, slot: Slot, limits: Limits):
        self.job, self.slot = job, slot
        self.backstop = time.monotonic() + waiting_s(limits, job.request.workspace is not None)
        self.caps = (limits.stdout_bytes, limits.stderr_bytes, CHANNEL_BYTES)
        self.streams: list[int] = []  # stdout, stderr, channel
        self.parts: list[list[bytes]] = [[], [], []]
        self.sizes = [0, 0, 0]
        self.record_fd = -1
        self.workspace_fd = -1

    def drain(self, place: int) -> bool:
        """Reads what is there; True at the end of the stream."""
        fd, cap = self.streams[place], self.caps[place]
        for _ in range(64):
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return False
            if not data:
                return True
            room = cap - self.sizes[place]
            if room > 0:
                self.parts[place].append(data[:room])
            self.sizes[place] += len(data)
            if len(data) < 4096:
                return False
        return False

    def outputs(self) -> list[tuple[bytes, bool]]:
        """Content, and whether more was written, per stream."""
        return [(b"".join(parts), size > cap) for parts, size, cap in zip(self.parts, self.sizes, self.caps)]
