"""The nodes of a Ray cluster as a `Cluster`: one actor per node, with a sandbox that runs as many programs at a time as the node has CPUs.

    with ClusterSandbox(RayCluster("10.0.0.1:6379")) as sandbox:

The cluster must be there already (`ray start`), its nodes with the same Python, Ray and marl_llm. Ray is imported here only, and only when
a `RayCluster` is made.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from marl_llm.tools.results import Failure, FailureKind
from marl_llm.tools.sandbox.cluster import NodeLost
from marl_llm.tools.sandbox.limits import Execution, Level, Limits, SandboxError
from marl_llm.tools.sandbox.pool import Sandbox
from marl_llm.tools.sandbox.queueing import Submission

STOP_LIMIT_S = 2.0


class NodeSandbox:
    """What the actor of a node is: a sandbox there, whose troubles are values."""

    def __init__(self, workers: int, minimum: int, limits: Limits):
        self._settings = dict(workers=workers, minimum=Level(minimum), limits=limits)
        self._sandbox: Sandbox | None = None

    async def start(self) -> tuple[int, str]:
        """`(level, "")`, or `(0, why there is no sandbox)`."""
        try:
            self._sandbox = Sandbox(**self._settings)
        except SandboxError as error:
            return 0, str(error)
        return int(self._sandbox.level), ""

    async def run(self, request: Submission) -> Execution:
        """One execution."""
        try:
            return await self._sandbox.arun(request)
        except SandboxError as error:  # it is closed, or this node has no such profile
            kind = FailureKind.UNAVAILABLE if self._sandbox.closed else FailureKind.CRASH
            return Execution(None, Failure(kind, str(error)), 0.0)

    async def stop(self) -> None:
        """Ends all programs."""
        if self._sandbox is not None:
            self._sandbox.close()


class RayWorker:
    """The actor of one node, as `cluster.Worker`."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor = ray, actor
        self._ready = _asked(lambda: actor.start.remote(), _level)

    def ready(self) -> concurrent.futures.Future:
        """As `Worker.ready`."""
        return self._ready

    def submit(self, request: Submission) -> concurrent.futures.Future:
        """As `Worker.submit`."""
        return _asked(lambda: self._actor.run.remote(request))

    def stop(self) -> None:
        """Asks the sandbox to end, then ends the actor; an actor that does not answer is ended as well."""
        concurrent.futures.wait([_asked(lambda: self._actor.stop.remote())], STOP_LIMIT_S)
        with contextlib.suppress(Exception):  # the actor, its node or Ray is gone: then there is nothing to end
            self._ray.kill(self._actor)


class RayCluster:
    """A Ray cluster as `cluster.Cluster`.

    Args:
      address: of the cluster, e.g. `10.0.0.1:6379` or, for Ray's client, `ray://10.0.0.1:10001`; None for the one that this host is in.
      workers: programs at a time on each node; None: its CPUs (as Ray counts them; a node with `--num-cpus=0` is not used).
      share: processes that use the cluster alike, each of which takes its part of each node's CPUs.
      minimum: the weakest fence that is acceptable on a node.
      limits: for requests that bring none.

    Raises:
      SandboxError: Ray is not installed, or there is no cluster.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        share: int = 1,
        minimum: Level = Level.NAMESPACES,
        limits: Limits | None = None,
    ):
        try:
            import ray
        except ImportError as error:
            raise SandboxError(f"tools on Ray need the package ({error}): pip install 'marl_llm[ray]'") from error
        self._ray, self._workers, self._share = ray, workers, share
        self._minimum, self._limits = minimum, limits or Limits()
        self._joined = not ray.is_initialized()
        if self._joined:
            try:
                with _own_signals():
                    ray.init(address=address or "auto", namespace="marl_llm", log_to_driver=False, configure_logging=False)
            except (OSError, RuntimeError, ValueError) as error:
                where = f"at {address!r}" if address else "here"
                raise SandboxError(f"there is no Ray cluster {where} ({_line(error)}): start one with `ray start --head`") from error

    def nodes(self) -> dict[str, int]:
        """As `Cluster.nodes`."""
        try:
            alive = [node for node in self._ray.nodes() if node["Alive"]]
        except Exception as error:  # Ray raises classes of its own and of gRPC
            raise NodeLost(f"Ray does not say which nodes there are: {_line(error)}") from error
        cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}
        return {name: self._workers or max(1, count // self._share) for name, count in cpus.items() if count}

    def start(self, node: str, slots: int) -> RayWorker:
        """As `Cluster.start`. The actor takes `slots` of the node's CPUs for as long as it lives; Ray does not start it anew."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        kind = self._ray.remote(num_cpus=slots, max_restarts=0, max_task_retries=0, scheduling_strategy=place)(NodeSandbox)
        try:
            return RayWorker(self._ray, kind.remote(slots, int(self._minimum), self._limits))
        except Exception as error:
            raise NodeLost(f"Ray starts nothing there: {_line(error)}") from error

    def close(self) -> None:
        """Leaves the cluster, if this joined it."""
        if self._joined:
            self._ray.shutdown()


def _level(answer: tuple[int, str]) -> int:
    level, problem = answer
    if problem:
        raise SandboxError(problem)
    return level


def _asked(call: Callable[[], Any], read: Callable[[Any], Any] = lambda value: value) -> concurrent.futures.Future:
    """What an actor answers, read; whatever Ray says instead is `NodeLost` with its words."""
    done: concurrent.futures.Future = concurrent.futures.Future()

    def pass_on(answer: concurrent.futures.Future) -> None:
        try:
            done.set_result(read(answer.result()))
        except SandboxError as error:
            done.set_exception(error)
        except Exception as error:
            done.set_exception(NodeLost(_line(error)))

    try:
        call().future().add_done_callback(pass_on)
    except Exception as error:  # the actor is known to be dead, or this program has left the cluster
        done.set_exception(NodeLost(_line(error)))
    return done


def _line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts a handler of its own on SIGTERM; a run that is told to stop has one already (`marl_llm.runs.stopping`)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
