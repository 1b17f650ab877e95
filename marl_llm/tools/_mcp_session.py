"""A session of the package `mcp`, and how it reaches a server on this machine; see `marl_llm.tools.mcp_server`, and `_mcp_http` for others.

The package reads lines of any length, so the process and its pipes are kept here: a line beyond the bound ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import anyio

from marl_llm.tools.commands import TAIL_BYTES, last_lines
from marl_llm.tools.mcp_server import MAX_LINE, MAX_TOOLS, McpAnswer, McpFailure, McpTool
from marl_llm.tools.results import FailureKind

INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
CLOSED = (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)  # a pipe or a stream at its end


@runtime_checkable
class McpConnection(Protocol):
    """What carries a session's messages."""

    ended: asyncio.Event  # set when it carries no more

    def failure(self, message: str = "") -> McpFailure:
        """Why there is no answer; `message` is the package's reason."""
        ...


class PackageSession:
    """See `mcp_server.McpSession`."""

    def __init__(self, connection: McpConnection, client: Any):
        self._connection, self.ended, self._client = connection, connection.ended, client

    async def list_tools(self) -> list[McpTool]:
        """All pages of the list. Raises `McpFailure`."""
        from mcp import MCPError
        from mcp.types import PaginatedRequestParams

        tools, params = [], None
        while True:
            try:
                page = await self._asked(self._client.list_tools(params=params))
            except MCPError as error:
                raise McpFailure(FailureKind.REFUSED, error.message) from None
            tools += [McpTool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            if len(tools) > MAX_TOOLS:
                raise McpFailure(FailureKind.BAD_REPLY, f"it lists more than {MAX_TOOLS} tools")
            if not page.next_cursor or not page.tools:
                return tools
            params = PaginatedRequestParams(cursor=page.next_cursor)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> McpAnswer:
        """One call. Raises `McpFailure`.

        The package's own `call_tool` would check the result against the server's schema: a pattern in that can hold up the whole program.
        """
        from mcp import MCPError
        from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(arguments)))
        try:
            result = await self._asked(self._client.send_request(request, CallToolResult))
        except MCPError as error:
            return McpAnswer(error.message, is_error=True)
        return McpAnswer(text_of(result.content, result.structured_content), result.is_error)

    async def ping(self) -> None:
        """Returns when the server answers, whatever it says. Raises `McpFailure`."""
        from mcp import MCPError

        with contextlib.suppress(MCPError):
            await self._asked(self._client.send_ping())

    async def _asked(self, answer: Any) -> Any:
        """What is awaited. Raises `McpFailure` for what cannot be read, and the package's `MCPError` for a server's own error."""
        from mcp import MCPError

        try:
            return await answer
        except MCPError as error:
            if (failure := _failure_of(error, self._connection)) is not None:
                raise failure from None
            raise
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:  # not as its schema, or the protocol's, says
            raise McpFailure(FailureKind.BAD_REPLY, f"{type(error).__name__}: {error}") from None


class ServerProcess:
    """The process of a server.

    Attributes:
      ended: set when it has closed its output, or its input.
    """

    def __init__(self, process: Any):
        self._process, self._said, self._fault = process, b"", ""
        self.ended = asyncio.Event()

    async def read(self, messages: Any) -> None:
        """Sends what the server says on, a message a line, until it ends or says too much at once."""
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        rest = b""
        async with messages:
            with _setting(self.ended), contextlib.suppress(*CLOSED):
                while True:
                    *lines, rest = (rest + await self._process.stdout.receive()).split(b"\n")
                    if max(map(len, (rest, *lines))) > MAX_LINE:
                        self._fault = f"it sent a message of more than {MAX_LINE} bytes"
                        break
                    for line in lines:
                        try:
                            message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                        except ValueError:
                            continue  # a line that is no message: a server prints what it likes
                        await messages.send(message)

    async def write(self, messages: Any) -> None:
        """Writes messages to the server, until it takes no more."""
        with _setting(self.ended), contextlib.suppress(*CLOSED):
            async with messages:
                async for sent in messages:
                    await self._process.stdin.send(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async def read_errors(self) -> None:
        """Keeps the end of the server's standard error."""
        with contextlib.suppress(*CLOSED):
            while True:
                self._said = (self._said + await self._process.stderr.receive())[-TAIL_BYTES:]

    def failure(self, message: str = "") -> McpFailure:
        """Why there is no answer. The server's own last words say more than the package's `message`."""
        if self._fault:
            return McpFailure(FailureKind.BAD_REPLY, self._fault)
        if not self.ended.is_set():  # it says itself that the connection is closed
            return McpFailure(FailureKind.UNAVAILABLE, message)
        last_words = last_lines(self._said)
        return McpFailure(FailureKind.CRASH, f"it has ended{f'; its stderr ends: {last_words}' if last_words else ''}")

    async def kill(self) -> None:
        """Kills it with its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.aclose()


@contextlib.asynccontextmanager
async def open_session(command: Sequence[str], folder: str, env: Mapping[str, str]) -> AsyncIterator[PackageSession]:
    """A server that has shaken hands. Raises `McpFailure`, and `OSError` for a command that cannot be started."""
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(env)
    process = await anyio.open_process(command, cwd=folder, env=environment, start_new_session=True)
    server = ServerProcess(process)
    received, to_session = anyio.create_memory_object_stream(0)
    from_session, sent = anyio.create_memory_object_stream(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.read, received)
        tasks.start_soon(server.write, sent)
        tasks.start_soon(server.read_errors)
        try:
            async with shake_hands(server, to_session, from_session) as session:
                yield session
        finally:
            with anyio.CancelScope(shield=True):
                await server.kill()
            tasks.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def shake_hands(connection: McpConnection, received: Any, sent: Any) -> AsyncIterator[PackageSession]:
    """A session over two streams of messages. Raises `McpFailure`."""
    try:
        from mcp import ClientSession, MCPError
    except ImportError:
        raise McpFailure(FailureKind.REFUSED, "it needs the package mcp: pip install 'marl_llm[mcp]'") from None
    async with ClientSession(received, sent) as client:
        try:
            await client.initialize()
        except MCPError as error:
            raise _failure_of(error, connection) or McpFailure(FailureKind.REFUSED, error.message) from None
        except (ValueError, RuntimeError) as error:
            raise McpFailure(FailureKind.BAD_REPLY, f"{type(error).__name__}: {error}") from None
        yield PackageSession(connection, client)


def _failure_of(error: Any, connection: McpConnection) -> McpFailure | None:
    """What an `MCPError` says of the server or of its answer, which is not the tool's; None for an error of the tool."""
    from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST, PARSE_ERROR

    if connection.ended.is_set() or error.code == CONNECTION_CLOSED:
        return connection.failure(error.message)
    return McpFailure(FailureKind.BAD_REPLY, error.message) if error.code in (INVALID_REQUEST, PARSE_ERROR) else None


@contextlib.contextmanager
def _setting(event: asyncio.Event) -> Iterator[None]:
    """Sets an event at the end of what it is the context of."""
    try:
        yield
    finally:
        event.set()


def text_of(content: Sequence[Any], structured: Any = None) -> str:
    """A result's texts, one below the other; of a result without content its value as JSON."""
    if not content:
        return "" if structured is None else json.dumps(structured, ensure_ascii=False)
    return "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in content)
