"""One blocking function, offered as a call, a batch, and the asyncio forms of both, over a bounded pool of threads.

A tool's real work happens in other processes or on other machines; a thread that waits for it costs nothing. Bounding the threads bounds
the concurrency, and the asyncio forms never block the loop.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from marl_llm.tools.results import ToolResult
from marl_llm.tools.waiting import waiting

Asked = TypeVar("Asked")
T = TypeVar("T")


class Calls(Generic[Asked, T]):
    """The four forms of a tool call.

    Args:
      function: does one call, blocking, and turns every failure of the infrastructure into a `ToolResult`.
      concurrency: most calls under way at a time; the others wait in order.
      name: of the threads, for people who look at a stack dump.
    """

    def __init__(self, function: Callable[[Asked], ToolResult[T]], concurrency: int, name: str):
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self._function = function
        self._pool = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, request: Asked) -> concurrent.futures.Future:
        """Queues one call. Until a thread takes it up, the caller's clock stands still."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this tool is closed: make a new one")
            arrived = waiting()
            future = self._pool.submit(self._carry_out, request, arrived)
        future.add_done_callback(lambda _: arrived())  # dropped before it began
        return future

    def _carry_out(self, request: Asked, arrived: Callable[[], None]) -> ToolResult[T]:
        arrived()
        return self._function(request)

    def call(self, request: Asked) -> ToolResult[T]:
        """One call, blocking."""
        return self.submit(request).result()

    def batch(self, requests: Sequence[Asked]) -> list[ToolResult[T]]:
        """Many calls, blocking; results in the order of the requests."""
        futures = [self.submit(request) for request in requests]
        return [future.result() for future in futures]

    async def acall(self, request: Asked) -> ToolResult[T]:
        """One call from an event loop."""
        return await asyncio.wrap_future(self.submit(request))

    async def abatch(self, requests: Sequence[Asked]) -> list[ToolResult[T]]:
        """Many calls from an event loop; results in the order of the requests."""
        return list(await asyncio.gather(*(self.acall(request) for request in requests)))

    def close(self) -> None:
        """Finishes the calls under way, drops the queued ones and ends the threads."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
