"""The pool: many executions, a few warm zygotes, one thread that watches.

`submit` never blocks and may be called from any thread, a rollout loop's included. A job is handed to an idle zygote at once or waits in
its environment's queue. Its outcome is set exactly once, from the record that its supervisor wrote; an attempt without a record (a killed
zygote, a failed mount) is tried again and can never become an outcome.
"""

import concurrent.futures
import contextlib
import heapq
import itertools
import os
import select
import threading
import time
from collections import Counter

from marl_llm.tools.results import Failure, FailureKind
from marl_llm.tools.sandbox import slot as slots
from marl_llm.tools.sandbox.attempt import Attempt
from marl_llm.tools.sandbox.inside import frames
from marl_llm.tools.sandbox.interface import Executor
from marl_llm.tools.sandbox.limits import Execution, Level, Limits, SandboxError, program_of, read_record
from marl_llm.tools.sandbox.profiles import PROFILES
from marl_llm.tools.sandbox.queueing import FairQueue, Job, Submission
from marl_llm.tools.sandbox.workspace import Workspace
from marl_llm.tools.waiting import waiting
from marl_llm.untrusted import read_json

MAX_ATTEMPTS = 10
MAX_FAILED_STARTS = 5
START_LIMIT_S = 120.0
TICK_S = 0.2


class Sandbox(Executor):
    """Runs programs on this host behind a fence.

    Args:
      workers: executions at a time.
      minimum: the weakest fence that is acceptable.
      level: exactly this fence (for tests and comparisons); None for the best there is.
      limits: for requests that bring none.
      fixed_addresses: whether zygotes run without address randomisation, so that `id` and set order repeat.
      freeze_clock: whether `time.time` starts at a fixed moment (see `inside.candidate.Clock`).

    Raises:
      SandboxError: the machine does not give `minimum`; says which features are missing and why.
    """

    def __init__(
        self,
        workers: int | None = None,
        minimum: Level = Level.NAMESPACES,
        level: Level | None = None,
        limits: Limits | None = None,
        fixed_addresses: bool = True,
        freeze_clock: bool = True,
    ):
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.workers = workers or os.cpu_count() or 1
        self.limits = limits or Limits()
        if level is None:
            level = slots.best_level(minimum)
        elif slots.missing(level):
            lacks = "; ".join(f"{name}: {why}" for name, why in slots.missing(level).items())
            raise SandboxError(f"this machine does not give {level.name}: {lacks}")
        elif level < minimum:
            raise SandboxError(f"level {level.name} is below the demanded minimum {minimum.name}")
        self.level, self._fixed, self._freeze = level, fixed_addresses and not slots.features()["no_aslr"], freeze_clock
        self._lock = threading.RLock()
        self._queues: dict[str, FairQueue[Job]] = {}
        self._slots: dict[str, list[slots.Slot]] = {}
        self._started_at: dict[slots.Slot, float] = {}
        self._failed_starts: Counter[str] = Counter()
        self._runs: dict[int, tuple[Attempt, int]] = {}  # fd -> run, place in streams or -1 for the record
        self._active: set[Attempt] = set()
        self._expiries: list[tuple[float, int, Job]] = []
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter()
        self._sockets: dict[int, slots.Slot] = {}
        self._last_complaint = ""
        self._closed, self._idle, self._pid = False, False, os.getpid()
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._empty = slots.memory_file("empty", b"")
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="sandbox", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed

    # ---- asking

    def submit(self, request: Submission) -> concurrent.futures.Future:
        """As `Executor.submit`."""
        if request.profile not in PROFILES:
            raise KeyError(f"no profile {request.profile!r}; there are {', '.join(PROFILES)}")
        if os.getpid() != self._pid:
            raise SandboxError("this sandbox was made before a fork: make one in this process")
        PROFILES[request.profile].entries()
        now, future = time.monotonic(), concurrent.futures.Future()
        expires = None if request.deadline_s is None else now + request.deadline_s
        job = Job(next(self._numbers), request, request.limits or self.limits, future, now, expires, waiting())
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox is closed: make a new one")
            self._counts["submitted"] += 1
            self._queues.setdefault(request.profile, FairQueue()).push(request.environment, job)
            if expires is not None:
                heapq.heappush(self._expiries, (expires, job.number, job))
            self._dispatch()
            if self._idle:
                os.eventfd_write(self._wake, 1)
        return future

    def warm(self, profile: str = "bare", timeout_s: float | int = START_LIMIT_S) -> None:
        """Starts all zygotes of a profile and waits for them.

        Raises:
          SandboxError: they did not start in time.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            while len(self._slots.get(profile, [])) < self.workers:
                self._spawn(profile)
            os.eventfd_write(self._wake, 1)
        while True:
            with self._lock:
                if sum(slot.ready is not None for slot in self._slots.get(profile, [])) >= self.workers:
                    return
                if self._failed_starts[profile]:
                    raise SandboxError(f"zygotes of profile {profile!r} do not start: {self._last_complaint}")
            if time.monotonic() > end:
                raise SandboxError(f"zygotes of profile {profile!r} did not start within {timeout_s} s")
            time.sleep(0.005)

    def metrics(self) -> dict[str, float]:
        """Figures for a step's metrics: the level in force and counts since the start."""
        with self._lock:
            waiting = sum(len(queue) for queue in self._queues.values())
            names = ("submitted", "done", "failed", "retried", "zygotes_started", "zygotes_lost")
            figures = {"level": self.level, "waiting": waiting, "running": len(self._active)} | {name: self._counts[name] for name in names}
            return {f"sandbox/{name}": float(value) for name, value in figures.items()}

    def zygotes(self) -> list[int]:
        """Process ids of the zygotes that serve now."""
        with self._lock:
            return [slot.process.pid for group in self._slots.values() for slot in group if slot.ready]

    def close(self) -> None:
        """Ends every zygote and program; jobs without an outcome fail as unavailable. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- handing out (under the lock)

    def _dispatch(self) -> None:
        """Gives waiting jobs to idle zygotes, and starts zygotes where there are too few."""
        for profile, queue in self._queues.items():
            group = self._slots.setdefault(profile, [])
            idle = [slot for slot in group if slot.ready and slot.job is None]
            while queue and idle and len(self._active) < self.workers:
                job = queue.pop()
                if not job.queued or not self._may_start(job):
                    continue
                self._start(job, idle.pop())
            starting = sum(1 for slot in group if not slot.ready)
            while len(queue) > len(idle) + starting and len(group) < self.workers and self._failed_starts[profile] < MAX_FAILED_STARTS:
                self._spawn(profile)
                starting += 1

    def _may_start(self, job: Job) -> bool:
        job.queued = False
        job.arrived()
        if job.attempts == 0 and not job.future.set_running_or_notify_cancel():
            return False
        if job.expires is not None and time.monotonic() > job.expires:
            self._fail(job, FailureKind.DEADLINE, "the deadline passed in the queue")
            return False
        return True

    def _spawn(self, profile: str) -> None:
        slot = slots.Slot(PROFILES[profile], self.level, self._fixed)
        self._counts["zygotes_started"] += 1
        self._slots.setdefault(profile, []).append(slot)
        self._started_at[slot] = time.monotonic()
        self._epoll.register(slot.socket, select.EPOLLIN)
        self._sockets[slot.socket.fileno()] = slot

    def _start(self, job: Job, slot: slots.Slot) -> None:
        """Makes the pipes of one attempt and sends it off."""
        request, limits = job.request, job.limits
        job.attempts += 1
        job.started = job.started or time.monotonic()
        run, sent_fds = Attempt(job, slot, limits), []
        slot.job = run
        self._active.add(run)
        try:
            fds = [self._null] * frames.FD_COUNT
            sent_fds.append(slots.memory_file("code", frames.pack_payload(request.code.encode("utf-8", "surrogatepass"), request.calls)))
            fds[frames.PAYLOAD] = sent_fds[-1]
            stdin = request.stdin.encode("utf-8", "surrogatepass") if isinstance(request.stdin, str) else request.stdin
            fds[frames.STDIN] = self._empty
            if stdin:
                sent_fds.append(slots.memory_file("stdin", stdin))
                fds[frames.STDIN] = sent_fds[-1]
            for place in (frames.STDOUT, frames.STDERR, frames.CHANNEL)[: 3 if request.calls else 2]:
                reader, fds[place] = os.pipe()
                os.set_blocking(reader, False)
                sent_fds.append(fds[place])
                run.streams.append(reader)
            run.record_fd, fds[frames.RECORD] = os.pipe()
            sent_fds.append(fds[frames.RECORD])
            if request.workspace is not None:
                sent_fds.append(slots.memory_file("workspace", request.workspace.data))
                fds[frames.WORKSPACE_IN] = sent_fds[-1]
                run.workspace_fd = fds[frames.WORKSPACE_OUT] = os.memfd_create("workspace_out", os.MFD_CLOEXEC)
            for place, fd in enumerate(run.streams):
                self._runs[fd] = (run, place)
                self._epoll.register(fd, select.EPOLLIN)
            self._runs[run.record_fd] = (run, -1)
            self._epoll.register(run.record_fd, select.EPOLLIN)
            message = {"id": job.number, "seed": request.seed, "freeze_clock": self._freeze, "workspace": request.workspace is not None}
            slot.send(message | limits.message(), fds)
        except OSError as error:  # no descriptors left here, or the zygote died: never the program's doing
            self._discard(run)
            self._again(job, f"{type(error).__name__}: {error}")
            self._lose(slot)
        finally:
            for fd in sent_fds:
                os.close(fd)

    def _discard(self, run: Attempt) -> None:
        """Closes an attempt; a supervisor that still runs it sees its record's pipe close, and stops."""
        self._active.discard(run)
        for fd in (*run.streams, run.record_fd):
            if self._runs.pop(fd, None) is not None:
                self._epoll.unregister(fd)
            if fd >= 0:
                os.close(fd)
        run.streams, run.record_fd = [], -1
        if run.workspace_fd >= 0:
            os.close(run.workspace_fd)
            run.workspace_fd = -1
        if run.slot.job is run:
            run.slot.job = None

    def _lose(self, slot: slots.Slot) -> None:
        """Forgets a zygote, and makes sure that it is dead. A run of its goes on to its own end: a record, or a closed pipe."""
        group = self._slots.get(slot.profile.name, [])
        if slot not in group:
            return
        group.remove(slot)
        self._started_at.pop(slot, None)
        self._sockets.pop(slot.socket.fileno(), None)
        self._epoll.unregister(slot.socket)
        self._counts["zygotes_lost"] += 1
        slot.close()

    def _again(self, job: Job, problem: str) -> None:
        """Another attempt, at the head of its environment's queue, or a failure of the infrastructure."""
        job.last_problem = problem
        if job.attempts >= MAX_ATTEMPTS:
            self._fail(job, FailureKind.CRASH, f"{job.attempts} attempts ended without an outcome; the last: {problem}")
            return
        self._counts["retried"] += 1
        job.queued = True
        self._queues[job.request.profile].push(job.request.environment, job, front=True)

    def _fail(self, job: Job, kind: FailureKind, message: str) -> None:
        job.queued = False
        self._counts["failed"] += 1
        self._set(job, None, Failure(kind, message))

    def _fail_queued(self, queue: FairQueue[Job], kind: FailureKind, message: str) -> None:
        while queue:
            job = queue.pop()
            if job.queued and (job.attempts or job.future.set_running_or_notify_cancel()):
                self._fail(job, kind, message)

    def _set(self, job: Job, program, failure: Failure | None) -> None:
        now = time.monotonic()
        job.arrived()
        waited = (job.started or now) - job.submitted
        if not job.future.done():
            job.future.set_result(Execution(program, failure, now - job.submitted, max(1, job.attempts), level=self.level, queued_s=waited))

    # ---- watching

    def _watch(self) -> None:
        """The thread: outputs, records, zygotes that come and go, clocks. If it ends, whatever for, nobody waits for ever."""
        try:
            self._watch_all()
        finally:
            with self._lock:
                self._closed = True
                self._shut()

    def _watch_all(self) -> None:
        while not self._closed:
            with self._lock:
                self._tick()
                self._dispatch()  # of what a clock put back into its queue, for which no event comes
                busy = self._active or self._expiries or any(not s.ready for g in self._slots.values() for s in g)
                self._idle = not busy
            events = self._epoll.poll(TICK_S if busy else None)
            with self._lock:
                self._idle = False
                for fd, mask in events:
                    if fd in self._runs:
                        self._on_stream(fd)
                    elif fd in self._sockets:
                        self._on_zygote(self._sockets[fd], mask)
                    elif fd == self._wake:
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                if not self._closed:
                    self._dispatch()

    def _shut(self) -> None:
        for run in list(self._active):
            self._discard(run)
            self._fail(run.job, FailureKind.UNAVAILABLE, "the sandbox was closed")
        for queue in self._queues.values():
            self._fail_queued(queue, FailureKind.UNAVAILABLE, "the sandbox was closed")
        for group in list(self._slots.values()):
            for slot in list(group):
                self._lose(slot)
        self._epoll.close()
        for fd in (self._null, self._empty, self._wake):
            os.close(fd)

    def _on_stream(self, fd: int) -> None:
        run, place = self._runs[fd]
        if place >= 0:
            if run.drain(place):
                self._epoll.unregister(fd)
                del self._runs[fd]
            return
        data = os.read(fd, frames.MAX_MESSAGE)
        if not data:
            self._discard(run)
            self._again(run.job, "the zygote or supervisor died before it reported")
            return
        self._finish(run, *read_record(data))

    def _finish(self, run: Attempt, record: dict, problem: str) -> None:
        """From a record to an outcome. All writers are dead by now, so the streams hold all there will be."""
        job, workspace = run.job, None
        for place in range(len(run.streams)):
            while run.streams[place] in self._runs and not run.drain(place):
                if not select.select([run.streams[place]], [], [], 0)[0]:
                    break
        if run.workspace_fd >= 0 and record.get("workspace") == "saved":
            workspace = Workspace(frames.read_file(run.workspace_fd))
        outputs = run.outputs()
        self._discard(run)
        if problem:
            self._again(job, problem)
            return
        program = program_of(record, outputs, workspace)
        if program.signal == 9 and program.outcome == "signal" and job.kills == 0:
            # A program may kill itself, and so may the machine's operator or its memory killer: believed when it happens again.
            job.kills += 1
            self._again(job, "killed from outside")
            return
        self._counts["done"] += 1
        self._set(job, program, None)

    def _on_zygote(self, slot: slots.Slot, mask: int) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            data = slot.socket.recv(frames.MAX_MESSAGE)
        parsed = read_json(data)
        if isinstance(parsed.value, dict):
            slot.ready = parsed.value
            self._failed_starts[slot.profile.name] = 0
            self._started_at.pop(slot, None)
            return
        name = slot.profile.name
        if slot.ready is None:
            slot.process.wait()
            self._failed_starts[name] += 1
            self._last_complaint = slot.complaint()
        self._lose(slot)
        if self._failed_starts[name] >= MAX_FAILED_STARTS:
            self._give_up(name)

    def _give_up(self, profile: str) -> None:
        """No zygote of a profile starts: its jobs fail, with what the zygote said."""
        problem = f"zygotes of profile {profile!r} do not start: {self._last_complaint}"
        self._fail_queued(self._queues.get(profile, FairQueue()), FailureKind.CRASH, problem)
        self._failed_starts[profile] = 0

    def _tick(self) -> None:
        """Clocks that nobody else watches."""
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            job = heapq.heappop(self._expiries)[2]
            if job.future.done():
                continue
            run = next((run for run in self._active if run.job is job), None)
            if run is not None:
                self._discard(run)
                self._lose(run.slot)
            elif not job.attempts and job.queued and not job.future.set_running_or_notify_cancel():
                continue
            self._fail(job, FailureKind.DEADLINE, "the deadline passed" if run else "the deadline passed in the queue")
        for run in [run for run in self._active if run.backstop < now]:
            self._discard(run)
            self._lose(run.slot)
            self._again(run.job, "the supervisor did not report in time")
        for slot, since in list(self._started_at.items()):
            if now - since > START_LIMIT_S:
                slot.process.kill()
