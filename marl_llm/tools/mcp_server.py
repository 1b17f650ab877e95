"""A server that offers tools by the Model Context Protocol: a person's own program, over its standard input and output, or an address.

A program is started because the person named its command, without a shell, with a few variables of the environment (`PATH`, `HOME` and the
like) and those that were given. It ends with this process, however that ends. An address is asked by streamable HTTP. What a server says is
data: an answer is a text, and whatever else it does is a named failure (law 14). A program that has ended is started again for the next
call, and so is one that does not answer a ping after a deadline; a session with an address is opened again likewise.

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
from marl_llm.tools._chat_backends import check_key
from marl_llm.tools.commands import Guard
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.untrusted import flatten_text

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
        super().__init__(flatten_text(message, MAX_MESSAGE))
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


@dataclasses.dataclass(frozen=True)
class McpAddress:
    """A server at an address, e.g. http://127.0.0.1:8000/mcp.

    Attributes:
      key_env: environment variable with a key that is sent as a bearer token; None: no key.

    Raises:
      McpError: no http(s) URL, one with a user or password, or a key that is not set or would travel unencrypted.
    """

    url: str
    key_env: str | None = None

    def __post_init__(self):
        try:
            check_key(self.url, self.key_env)
        except ValueError as error:
            raise McpError(f"the address of an MCP server: {error}") from None


OpenSession = Callable[[Sequence[str] | McpAddress, str, Mapping[str, str]], contextlib.AbstractAsyncContextManager[McpSession]]


class McpServer:
    """Calls the tools of a server, from any thread and any event loop; a context manager.

    Args:
      server: program and arguments, or an address.
      folder: where a program is started.
      env: further variables of its environment.
      open_session: how a server is started; by default through the package `mcp`.
    """

    def __init__(
        self,
        server: Sequence[str] | McpAddress,
        folder: str = ".",
        env: Mapping[str, str] | None = None,
        open_session: OpenSession | None = None,
    ):
        is_command = not isinstance(server, str | McpAddress) and server and all(isinstance(part, str) for part in server)
        if not is_command and not isinstance(server, McpAddress):
            raise McpError(
                f"server={server!r:.80}: give program and arguments as a list, e.g. ['python', 'my_server.py'], or an McpAddress with a url"
            )
        self._server: tuple[str, ...] | McpAddress = tuple(server) if is_command else server
        self.name = " ".join(server)[:200] if is_command else server.url.partition("?")[0][:200]
        self._folder, self._guard = folder, Guard()
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
            raise McpError(f"the MCP server {self.name!r}: {error}") from None

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
            if opened is not None and opened.done() and (self._stop.is_set() or opened.exception() or opened.result().ended.is_set()):
                await asyncio.wait([self._holder])  # until what is left of it is killed
            if self._holder is None or self._holder.done():
                if not isinstance(self._server, McpAddress):
                    self._guard.start()
                self._session, self._stop = self._loop.create_future(), asyncio.Event()
                self._holder = asyncio.create_task(self._hold(self._session, self._stop))
            session = self._session
        return await asyncio.shield(session)

    async def _hold(self, session: asyncio.Future[McpSession], stop: asyncio.Event) -> None:
        """Keeps a server until it ends, or should."""
        try:
            async with self._open(self._server, self._folder, self._env) as opened:
                session.set_result(opened)
                waits = [asyncio.create_task(event.wait()) for event in (stop, opened.ended)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for waiting in waits:
                        waiting.cancel()
        except Exception as raised:  # of a stranger's program and its protocol: data
            error = raised
            while isinstance(error, ExceptionGroup):  # of the tasks that carry a session
                error = error.exceptions[0]
            failure = error if isinstance(error, McpFailure) else McpFailure(FailureKind.CRASH, f"{type(error).__name__}: {error}")
            _fail(session, failure)
        finally:
            _fail(session, McpFailure(FailureKind.DEADLINE, "it did not shake hands in time"))  # it was cancelled

    async def _end(self) -> None:
        if self._holder is not None:
            self._stop.set()
            _, late = await asyncio.wait([self._holder], timeout=PING_S)
            if late:  # it has not shaken hands yet, or does not say goodbye
                self._holder.cancel()
                await asyncio.wait([self._holder], timeout=PING_S)

    async def _end_unless_alive(self) -> None:
        """Ends a server that answers no ping, so that the next call starts another."""
        try:
            async with asyncio.timeout(PING_S):
                await (await self._running()).ping()
        except (TimeoutError, McpFailure):
            await self._end()


def _fail(session: asyncio.Future[McpSession], failure: McpFailure) -> None:
    """Gives whoever waits for a session the reason why there is none; nobody may."""
    if not session.done():
        session.set_exception(failure)
        session.exception()


@contextlib.asynccontextmanager
async def _open_with_package(server: Sequence[str] | McpAddress, folder: str, env: Mapping[str, str]) -> AsyncIterator[McpSession]:
    from marl_llm.tools import _mcp_http, _mcp_session  # the package takes a while to import

    of_address = isinstance(server, McpAddress)
    async with _mcp_http.open_http_session(server) if of_address else _mcp_session.open_session(server, folder, env) as session:
        yield session
