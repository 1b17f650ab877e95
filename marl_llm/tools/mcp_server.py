"""A program of a person's own that offers tools by the Model Context Protocol, over its standard input and output.

It is started because the person named its command, without a shell, with a few variables of the environment (`PATH`, `HOME` and the like)
and those that were given. What it says is data: an answer is a text, and whatever else it does is a named failure (law 14). A server that
has ended, or does not answer a ping after a deadline, is started again for the next call. It ends with this process, however that ends.

The protocol is that of the package `mcp` (extra `mcp`), which is imported when a server starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marl_llm.errors import UserError
from marl_llm.tools.commands import Guard
from marl_llm.tools.results import FailureKind, ToolResult, failed, success

START_S = 60.0  # for a server to start and to list its tools
PING_S = 5.0
MAX_LINE = 1 << 20  # bytes of one message of a server
MAX_TOOLS = 256
MAX_MESSAGE = 300  # characters of why something failed


class McpError(UserError, RuntimeError):
    """A server that cannot be started, or lists no tools that can be used."""


class McpFailure(Exception):
    """A server gave no answer: the kind, and why in one line."""

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(" ".join(message.split())[:MAX_MESSAGE])
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class McpTool:
    """A tool as its server tells of it.

    Attributes:
      name, description: for the model.
      arguments: a JSON schema.
    """

    name: str
    description: str
    arguments: Any


@dataclasses.dataclass(frozen=True)
class McpAnswer:
    """What a tool answered.

    Attributes:
      text: all its texts, one below the other; what is no text stands as `[image]`.
      is_error: whether the server says that it could not serve the call.
    """

    text: str
    is_error: bool = False


@runtime_checkable
class McpSession(Protocol):
    """A running server. Its functions raise `McpFailure`."""

    ended: asyncio.Event  # set when the server has ended

    async def list_tools(self) -> list[McpTool]:
        """All its tools."""
        ...

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> McpAnswer:
        """What a tool answers."""
        ...

    async def ping(self) -> None:
        """Returns when the server answers."""
        ...


OpenSession = Callable[[Sequence[str], str, Mapping[str, str]], contextlib.AbstractAsyncContextManager[McpSession]]


class McpServer:
    """Calls the tools of a server, from any thread and any event loop; a context manager.

    Args:
      command: program and arguments.
      folder: where it is started.
      env: further variables of its environment.
      open_session: how a server is started; by default through the package `mcp`.
    """

    def __init__(
        self, command: Sequence[str], folder: str = ".", env: Mapping[str, str] | None = None, open_session: OpenSession | None = None
    ):
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise McpError(f"command={command!r:.80}: give program and arguments as a list, e.g. ['python', 'my_server.py']")
        self.command, self._folder, self._guard = tuple(command), folder, Guard()
        mark, value = self._guard.mark.split("=", 1)
        self._env, self._open = {**(env or {}), mark: value}, open_session or _open_with_package
        self._holder: asyncio.Task | None = None
        self._session: asyncio.Future[McpSession] | None = None
        self._starting, self._stop = asyncio.Lock(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()

    def tools(self) -> list[McpTool]:
        """What the server offers; it is started if it does not run. Raises `McpError`."""
        try:
            return asyncio.run_coroutine_threadsafe(self._list(), self._loop).result()
        except McpFailure as error:
            raise McpError(f"the MCP server {' '.join(self.command)!r:.200}: {error}") from None

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float | int) -> ToolResult[McpAnswer]:
        """What a tool answers; a failure where the server gives no answer in time, or none that can be read."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments, timeout_s), self._loop))

    def close(self) -> None:
        """Ends the server; a second call does nothing."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._guard.close()

    def __enter__(self) -> McpServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # What follows runs in the server's own event loop.

    async def _list(self) -> list[McpTool]:
        try:
            async with asyncio.timeout(START_S):
                return await (await self._running()).list_tools()
        except TimeoutError:
            await self._end()
            raise McpFailure(FailureKind.DEADLINE, f"it did not list its tools within {START_S:g} s") from None

    async def _call(self, name: str, arguments: Mapping[str, Any], timeout_s: float | int) -> ToolResult[McpAnswer]:
        start = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await (await self._running()).call_tool(name, arguments)
        except TimeoutError:
            await self._end_unless_alive()
            return failed(FailureKind.DEADLINE, f"no answer of the MCP server within {timeout_s:g} s", time.perf_counter() - start)
        except McpFailure as error:
            return failed(error.kind, f"the MCP server: {error}", time.perf_counter() - start)
        return success(answer, time.perf_counter() - start)

    async def _running(self) -> McpSession:
        """The session; one that has ended is replaced. Raises `McpFailure`."""
        async with self._starting:
            opened = self._session
            if opened is not None and opened.done() and (opened.exception() or opened.result().ended.is_set()):
                await asyncio.wait([self._holder])  # until what is left of it is killed
            if self._holder is None or self._holder.done():
                self._guard.start()
                self._session, self._stop = self._loop.create_future(), asyncio.Event()
                self._holder = asyncio.create_task(self._hold(self._session, self._stop))
            session = self._session
        return await asyncio.shield(session)

    async def _hold(self, session: asyncio.Future[McpSession], stop: asyncio.Event) -> None:
        """Keeps a server until it ends, or should."""
        try:
            async with self._open(self.command, self._folder, self._env) as opened:
                session.set_result(opened)
                waits = [asyncio.create_task(event.wait()) for event in (stop, opened.ended)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for one in waits:
                    one.cancel()
        except Exception as raised:  # of a stranger's program and its protocol: data
            error = raised
            while isinstance(error, ExceptionGroup):  # of the tasks that carry a session
                error = error.exceptions[0]
            found = error if isinstance(error, McpFailure) else McpFailure(FailureKind.CRASH, f"{type(error).__name__}: {error}")
            if not session.done():
                session.set_exception(found)
                session.exception()  # whoever waits for it gets it; nobody may

    async def _end(self) -> None:
        if self._holder is not None:
            self._stop.set()
            await asyncio.wait([self._holder], timeout=PING_S)

    async def _end_unless_alive(self) -> None:
        """Ends a server that answers no ping, so that the next call starts another."""
        try:
            async with asyncio.timeout(PING_S):
                await (await self._running()).ping()
        except (TimeoutError, McpFailure):
            await self._end()


@contextlib.asynccontextmanager
async def _open_with_package(command: Sequence[str], folder: str, env: Mapping[str, str]) -> AsyncIterator[McpSession]:
    from marl_llm.tools import _mcp_session  # the package takes a while to import

    async with _mcp_session.open_session(command, folder, env) as session:
        yield session
