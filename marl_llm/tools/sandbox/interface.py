"""What runs programs, wherever that is: one `submit`, and the forms of asking that are made of it.

`Sandbox` runs them on this host, `ClusterSandbox` on the nodes of a cluster. A tool asks an `Executor` and need not know which.
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
from collections.abc import Sequence

from marl_llm.tools.sandbox.limits import Execution
from marl_llm.tools.sandbox.queueing import Submission


class Executor(abc.ABC):
    """Runs programs behind a fence. A context manager."""

    @abc.abstractmethod
    def submit(self, request: Submission) -> concurrent.futures.Future:
        """Queues one execution; the future's result is an `Execution` and never an exception. Until it starts, the caller's clock stands
        still (`tools.waiting`): its place in the queue is nobody's failure.

        Raises:
          SandboxError: it is closed, or was made before a fork.
          KeyError, ValueError: an unknown profile, or arguments out of range.
        """

    @abc.abstractmethod
    def metrics(self) -> dict[str, float]:
        """Figures for a step's metrics: the level in force and counts since the start."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends every program; jobs without an outcome fail as unavailable. May be called twice."""

    def run(self, request: Submission) -> Execution:
        """One execution, blocking."""
        return self.submit(request).result()

    async def arun(self, request: Submission) -> Execution:
        """One execution from an event loop."""
        return await asyncio.wrap_future(self.submit(request))

    def run_batch(self, requests: Sequence[Submission]) -> list[Execution]:
        """Many executions, blocking, in the order of the requests."""
        futures = [self.submit(request) for request in requests]
        return [future.result() for future in futures]

    async def arun_batch(self, requests: Sequence[Submission]) -> list[Execution]:
        """Many executions from an event loop, in the order of the requests."""
        return list(await asyncio.gather(*(asyncio.wrap_future(self.submit(request)) for request in requests)))

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_) -> None:
        self.close()
