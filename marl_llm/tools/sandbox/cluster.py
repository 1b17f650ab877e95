"""One sandbox on every node of a cluster, behind the interface of one.

Jobs wait here, fairly between environments, and a node gets no more than it can run at once. A node that is lost is a failure of the
infrastructure: its jobs are sent to others, at most `TRIES` times each, and an answer that comes late is dropped, so a job has one
outcome. It may have *run* more than once, from the same files and the same seed. When no node is left, jobs fail as unavailable.

What a cluster is, is said by two small protocols; `on_ray` carries them out.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import itertools
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from marl_llm.tools.results import Failure, FailureKind
from marl_llm.tools.sandbox.interface import Executor
from marl_llm.tools.sandbox.limits import Execution, Level, Limits, SandboxError
from marl_llm.tools.sandbox.profiles import PROFILES
from marl_llm.tools.sandbox.queueing import FairQueue, Job, Submission
from marl_llm.tools.waiting import waiting

TRIES = 3  # nodes that a job is given to
START_LIMIT_S = 180.0
SILENCE_S = 300.0  # after a job's own limit: its node must have answered by then; ten attempts and the start of zygotes fit in
LOOK_S = 10.0  # between two looks for nodes that came
ELSEWHERE = frozenset({FailureKind.CRASH, FailureKind.UNAVAILABLE})  # failures of one node's sandbox


class NodeLost(RuntimeError):
    """A node, or what runs there, is gone or does not answer; one line says why."""


@runtime_checkable
class Worker(Protocol):
    """The sandbox of one node. Nothing here blocks or raises."""

    def ready(self) -> concurrent.futures.Future:
        """Its `Level`, as a number, once it can be given jobs. The future's exception is `SandboxError` or `NodeLost`."""

    def submit(self, request: Submission) -> concurrent.futures.Future:
        """One execution there: an `Execution`, or the exception `NodeLost`."""

    def stop(self) -> None:
        """Ends it and its programs, if it is there."""


@runtime_checkable
class Cluster(Protocol):
    """Nodes that come and go."""

    def nodes(self) -> dict[str, int]:
        """The nodes that are there now: name -> executions at a time. Raises `NodeLost` if nobody can say."""

    def start(self, node: str, slots: int) -> Worker:
        """A sandbox on a node. Raises `NodeLost` if nothing can be started there."""

    def close(self) -> None:
        """Lets go of the cluster."""


@dataclasses.dataclass(eq=False)
class Host:
    """A worker as it is seen here. `running`: ticket -> job, and the time by which the node must have answered."""

    node: str
    worker: Worker
    slots: int
    since: float
    level: int = 0  # 0: not ready yet
    running: dict[int, tuple[ClusterJob, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class ClusterJob(Job):
    """A job, and the hosts that it was given to."""

    tried: list[Host] = dataclasses.field(default_factory=list)
    failure: Failure | None = None  # what ended the last try


class ClusterSandbox(Executor):
    """Runs programs on all nodes of a cluster.

    Args:
      cluster: see `Cluster`; closed with this.
      limits: for requests that bring none.
      note: is told of nodes that are lost and found, in one line each.

    Raises:
      SandboxError: there is no node, none started, or one does not give the level that was demanded.
    """

    def __init__(self, cluster: Cluster, limits: Limits | None = None, note: Callable[[str], None] = lambda line: None):
        self._cluster, self.limits, self._note = cluster, limits or Limits(), note
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `_closed`, so that nothing is taken in after the end
        self._closed, self._pid = False, os.getpid()
        self._open: set[ClusterJob] = set()  # jobs without an outcome
        self._hosts: list[Host] = []  # from here on: of the thread alone
        self._queue: FairQueue[ClusterJob] = FairQueue()
        self._retries: list[ClusterJob] = []
        self._expiries: list[tuple[float, int, ClusterJob]] = []
        self._numbers, self._tickets = itertools.count(), itertools.count()
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, float] = {}  # node -> when it did not start
        self._next_look = 0.0
        self._last_problem = "no node has a free CPU for tools"
        try:
            self._begin()
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._serve, name="sandbox-cluster", daemon=True)
        self._thread.start()

    # ---- asking

    def submit(self, request: Submission) -> concurrent.futures.Future:
        """As `Executor.submit`."""
        if request.profile not in PROFILES:
            raise KeyError(f"no profile {request.profile!r}; there are {', '.join(PROFILES)}")
        if os.getpid() != self._pid:
            raise SandboxError("this sandbox was made before a fork: make one in this process")
        now, future = time.monotonic(), concurrent.futures.Future()
        expires = None if request.deadline_s is None else now + request.deadline_s
        job = ClusterJob(next(self._numbers), request, request.limits or self.limits, future, now, expires, waiting())
        with self._lock:
            if self._closed:
                job.arrived()
                raise SandboxError("this sandbox is closed: make a new one")
            self._counts["submitted"] += 1
            self._open.add(job)
            self._events.put(lambda: self._take(job))
        future.add_done_callback(lambda _: self._open.discard(job))
        return future

    def metrics(self) -> dict[str, float]:
        """As `Sandbox.metrics`, and `nodes`: how many there are, `nodes_lost`: how often one was lost."""
        hosts = [host for host in list(self._hosts) if host.level]
        names = ("submitted", "done", "failed", "retried", "nodes_lost")
        figures = {name: self._counts[name] for name in names} | {"nodes": len(hosts), "waiting": len(self._queue) + len(self._retries)}
        figures |= {"running": sum(len(host.running) for host in hosts), "level": min((host.level for host in hosts), default=0)}
        return {f"sandbox/{name}": float(value) for name, value in figures.items()}

    def close(self) -> None:
        """Ends the sandboxes of all nodes; jobs without an outcome fail as unavailable. May be called twice."""
        with self._lock:
            self._closed = True
            self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- nodes

    def _begin(self) -> None:
        """The first nodes: waits until each has started or failed."""
        self._look(first=True)
        wanted = [(host, host.worker.ready()) for host in self._hosts]
        concurrent.futures.wait([ready for _, ready in wanted], START_LIMIT_S)
        for host, ready in wanted:
            if not ready.done():
                self._lose(host, f"its sandbox did not start within {START_LIMIT_S:g} s; are its CPUs taken?")
            elif isinstance(error := ready.exception(), SandboxError):
                raise SandboxError(f"node {host.node}: {error}") from error
            else:
                self._is_ready(host, ready)
        if not self._hosts:
            raise SandboxError(f"no node of the cluster can run programs: {self._last_problem}")
        self.level = Level(min(host.level for host in self._hosts))

    def _look(self, first: bool = False) -> None:
        """Starts a sandbox on each node that has none, unless it failed to start a moment ago."""
        self._next_look = time.monotonic() + LOOK_S
        try:
            nodes = self._cluster.nodes()
        except NodeLost as error:
            self._last_problem = str(error)
            return
        here = {host.node for host in self._hosts}
        for node, slots in nodes.items():
            if node in here or time.monotonic() - self._refused.get(node, -LOOK_S) < LOOK_S:
                continue
            try:
                host = Host(node, self._cluster.start(node, slots), slots, time.monotonic())
            except NodeLost as error:
                self._refused[node], self._last_problem = time.monotonic(), f"node {node}: {error}"
                continue
            self._hosts.append(host)
            if not first:
                self._when(host.worker.ready(), lambda ready, host=host: self._is_ready(host, ready))

    def _is_ready(self, host: Host, ready: concurrent.futures.Future) -> None:
        if host not in self._hosts:
            return
        if error := ready.exception():
            self._refused[host.node] = time.monotonic()
            self._lose(host, str(error))
            return
        host.level = ready.result()
        self._note(f"tools: node {host.node} runs {host.slots} programs at a time")

    def _lose(self, host: Host, why: str) -> None:
        """Forgets a host; its jobs go elsewhere."""
        if host not in self._hosts:
            return
        self._hosts.remove(host)
        self._last_problem = f"node {host.node}: {why}"
        self._counts["nodes_lost"] += 1
        self._note(f"tools: lost {self._last_problem}; {len(host.running)} programs were running there")
        for job, _ in host.running.values():
            self._again(job, Failure(FailureKind.UNAVAILABLE, self._last_problem))
        host.running.clear()
        host.worker.stop()

    # ---- jobs

    def _take(self, job: ClusterJob) -> None:
        self._queue.push(job.request.environment, job)
        if job.expires is not None:
            heapq.heappush(self._expiries, (job.expires, job.number, job))

    def _dispatch(self) -> None:
        """Gives waiting jobs to hosts with room; says of each that has nowhere to go why."""
        if (self._queue or self._retries) and (not self._hosts or time.monotonic() > self._next_look):
            self._look()
        for job in list(self._retries):
            if job.future.done() or not any(host not in job.tried for host in self._hosts):
                self._retries.remove(job)
                self._fail(job, job.failure)
            elif host := self._free(job.tried):
                self._retries.remove(job)
                self._send(job, host)
        while self._queue and (host := self._free()):
            job = self._queue.pop()
            if self._may_start(job):
                self._send(job, host)
        while self._queue and not self._hosts:
            job = self._queue.pop()
            if self._may_start(job):
                self._fail(job, Failure(FailureKind.UNAVAILABLE, f"no node of the cluster is left ({self._last_problem})"))

    def _free(self, tried: list[Host] | tuple = ()) -> Host | None:
        """The least busy host that has room; None if there is none."""
        free = [host for host in self._hosts if host.level and len(host.running) < host.slots and host not in tried]
        return min(free, key=lambda host: len(host.running) / host.slots, default=None)

    def _may_start(self, job: ClusterJob) -> bool:
        job.queued = False
        job.arrived()
        return not job.future.done() and job.future.set_running_or_notify_cancel()

    def _send(self, job: ClusterJob, host: Host) -> None:
        now, ticket = time.monotonic(), next(self._tickets)
        job.tried.append(host)
        job.started = job.started or now
        left = None if job.expires is None else max(0.001, job.expires - now)
        host.running[ticket] = (job, now + job.limits.timeout_s + SILENCE_S)
        request = dataclasses.replace(job.request, limits=job.limits, environment=None, deadline_s=left)
        self._when(host.worker.submit(request), lambda answer: self._answered(host, ticket, answer))

    def _answered(self, host: Host, ticket: int, answer: concurrent.futures.Future) -> None:
        """A node's answer. One whose ticket is not known any more comes from a node that was given up, and is dropped."""
        if ticket not in host.running:
            return
        if error := answer.exception():
            self._lose(host, str(error))
            return
        job, _ = host.running.pop(ticket)
        done = answer.result()
        job.attempts += done.attempts
        if done.failure is None:
            self._settle(job, done)
        elif done.failure.kind in ELSEWHERE:
            self._again(job, done.failure)
            if done.failure.kind is FailureKind.UNAVAILABLE:  # its sandbox is closed: it would answer every job so, and at once
                self._lose(host, done.failure.message)
        else:
            self._fail(job, done.failure)

    def _again(self, job: ClusterJob, failure: Failure) -> None:
        """Another host, or the failure that ended the last try."""
        job.failure = failure
        if len(job.tried) >= TRIES:
            self._fail(job, Failure(failure.kind, f"{len(job.tried)} nodes gave no outcome; the last: {failure.message}"))
        elif not job.future.done():
            self._counts["retried"] += 1
            self._retries.append(job)

    def _fail(self, job: ClusterJob, failure: Failure) -> None:
        self._settle(job, Execution(None, failure, 0.0, level=self.level))

    def _settle(self, job: ClusterJob, done: Execution) -> None:
        """The outcome, once: a job that has one keeps it."""
        now = time.monotonic()
        job.arrived()
        if job.future.done():
            return
        self._counts["done" if done.ok else "failed"] += 1
        waited, attempts = (job.started or now) - job.submitted + done.queued_s, max(1, job.attempts, len(job.tried))
        job.future.set_result(dataclasses.replace(done, seconds=now - job.submitted, attempts=attempts, queued_s=waited))

    # ---- the thread

    def _when(self, future: concurrent.futures.Future, then: Callable[[concurrent.futures.Future], None]) -> None:
        """Has the thread do `then(future)` once it is done."""
        future.add_done_callback(lambda done: self._events.put(lambda: then(done)))

    def _serve(self) -> None:
        """Events and clocks. If it ends, whatever for, nobody waits for ever."""
        try:
            while True:
                self._tick()
                self._dispatch()
                try:
                    event = self._events.get(timeout=self._pause())
                except queue.Empty:
                    continue
                if event is None:
                    return
                event()
        finally:
            self._end()

    def _pause(self) -> float | None:
        """Seconds until a clock has to be looked at; None: until something happens."""
        times = [due for host in self._hosts for _, due in host.running.values()]
        times += [host.since + START_LIMIT_S for host in self._hosts if not host.level]
        times += [self._expiries[0][0]] if self._expiries else []
        times += [self._next_look] if self._queue or self._retries else []
        return max(0.0, min(times) - time.monotonic()) + 0.001 if times else None

    def _tick(self) -> None:
        now = time.monotonic()
        while self._expiries and self._expiries[0][0] <= now:
            job = heapq.heappop(self._expiries)[2]
            if job.future.done() or (not job.tried and not self._may_start(job)):
                continue
            self._fail(job, Failure(FailureKind.DEADLINE, "the deadline passed" + (" in the queue" if not job.tried else "")))
        for host in list(self._hosts):
            if any(due < now for _, due in host.running.values()):
                self._lose(host, "it did not answer in time")
            elif not host.level and now > host.since + START_LIMIT_S:
                self._refused[host.node] = now
                self._lose(host, f"its sandbox did not start within {START_LIMIT_S:g} s")

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        for job in list(self._open):
            if job.tried or self._may_start(job):
                self._fail(job, Failure(FailureKind.UNAVAILABLE, "the sandbox was closed"))
        self._let_go()

    def _let_go(self) -> None:
        for host in self._hosts:
            host.worker.stop()
        self._hosts = []
        self._cluster.close()
