"""A session of the package `mcp` with a server at an address, by streamable HTTP; see `marl_llm.tools.mcp_server`.

The package bounds the events of a stream and follows redirects within the address's own origin alone. The rest is bounded here, where the
bytes arrive: a body that is too large, a status that says the server is not served, and a connection that drops end the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2

from marl_llm.local_server import is_loopback
from marl_llm.tools._chat_backends import HIDDEN, read_key, redacted
from marl_llm.tools._http import split_url
from marl_llm.tools._mcp_session import PackageSession, shake_hands
from marl_llm.tools.mcp_server import MAX_LINE, McpAddress, McpFailure
from marl_llm.tools.results import FailureKind
from marl_llm.untrusted import flatten_text, read_json

TIMEOUT_S = 300.0  # of a request that nobody waits for any more; calls have their own deadlines
FAREWELL_S = 2.0  # to end a session
CLOSED = {"code": -32000, "message": "the session is over"}  # as the package tells of a closed connection
# Statuses that say of no single request what they say: the server, the address or the key is at fault.
FAULTS = {401: FailureKind.REFUSED, 403: FailureKind.REFUSED, 404: FailureKind.UNAVAILABLE, 408: FailureKind.UNAVAILABLE,
          429: FailureKind.RATE_LIMITED}  # fmt: skip


class HttpConnection(httpx2.AsyncBaseTransport):
    """The bytes of a session, with its fault.

    Attributes:
      key: of the server, or None. ended: set when no further request can be served.
    """

    def __init__(self, address: McpAddress):
        direct = {"trust_env": False} if is_loopback(split_url(address.url).hostname) else {}
        self.key, self._fault = read_key(address.key_env), None
        self._inner = httpx2.AsyncHTTPTransport(**direct)
        self.ended = asyncio.Event()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """One request. A fault is noted and answered as the end of the session: an exception would cancel whoever waits."""
        if request.method == "GET":  # a stream of what the server says unasked, which no role reads
            return httpx2.Response(405, request=request)
        limit = FAREWELL_S if request.method == "DELETE" else TIMEOUT_S
        try:
            with anyio.fail_after(limit):
                response = await self._inner.handle_async_request(request)
        except (httpx2.TransportError, TimeoutError, OSError) as error:
            if request.method == "DELETE":
                raise httpx2.TransportError(str(error)) from None
            return self._over(request, FailureKind.UNAVAILABLE, f"{type(error).__name__}: {error}")
        status = response.status_code
        kind = FAULTS.get(status, FailureKind.UNAVAILABLE if status >= 500 else None)
        if kind is not None and request.method == "POST":
            await response.aclose()
            return self._over(request, kind, f"status {status}{': it asks for a key (key_env)' if status == 401 else ''}")
        session_id = response.headers.get("mcp-session-id", "")
        if not (session_id.isascii() and session_id.isprintable()):
            await response.aclose()
            return self._over(request, FailureKind.BAD_REPLY, "its session id holds characters that no header can send back")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            return self._over(request, FailureKind.BAD_REPLY, "it compresses its answer, which may unpack to any size")
        bounded = status >= 400 or not response.headers.get("content-type", "").lower().startswith("text/event-stream")
        stream = _Body(response.stream, self, bounded)
        if status >= 400 and request.method == "POST":
            return await self._error(request, response, stream)
        return httpx2.Response(status, headers=self._headers(response), stream=stream, extensions=response.extensions, request=request)

    def without_key(self, data: bytes) -> tuple[bytes, bytes]:
        """(bytes without the key, the last ones, with which a key may begin)."""
        key = (self.key or "").encode()
        data = data.replace(key, HIDDEN.encode()) if key else data
        rest = next((size for size in range(len(key) - 1, 0, -1) if data.endswith(key[:size])), 0)
        return data[: len(data) - rest], data[len(data) - rest :]

    def _headers(self, response: httpx2.Response) -> list[tuple[str, str]]:
        return [(name, redacted(value, self.key)) for name, value in response.headers.multi_items()]

    async def _error(self, request: httpx2.Request, response: httpx2.Response, stream: _Body) -> httpx2.Response:
        """An error of the protocol as it stands; any other body says that no server of tools is there, or that it refuses."""
        status = response.status_code
        try:
            body = b"".join([chunk async for chunk in stream])
        except httpx2.StreamError as error:
            return self._over(request, FailureKind.UNAVAILABLE, str(error))
        finally:
            await response.aclose()
        if not _is_error(body):
            return self._over(request, FailureKind.REFUSED, f"status {status}: {flatten_text(body, 100)}")
        return httpx2.Response(status, headers={"Content-Type": "application/json"}, content=body, request=request)

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._inner.aclose()

    def note(self, kind: FailureKind, message: str) -> None:
        """Notes why the session is over; the first reason counts."""
        self._fault = self._fault or McpFailure(kind, redacted(message, self.key))
        self.ended.set()

    def _over(self, request: httpx2.Request, kind: FailureKind, message: str) -> httpx2.Response:
        self.note(kind, message)
        return httpx2.Response(400, json={"jsonrpc": "2.0", "id": 0, "error": CLOSED}, request=request)

    def failure(self, message: str = "") -> McpFailure:
        """Why there is no answer; `message` is the package's reason."""
        if self._fault is None and message.startswith("SSE stream failed"):
            self.note(FailureKind.BAD_REPLY, message)
        elif self._fault is None:
            self.note(FailureKind.UNAVAILABLE, message or "its session has ended")
        return self._fault


class _Body(httpx2.AsyncByteStream):
    """The bytes of an answer without the key, at most `MAX_LINE` where they are one message."""

    def __init__(self, stream: Any, connection: HttpConnection, bounded: bool):
        self._stream, self._connection, self._bounded = stream, connection, bounded

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, rest = 0, b""
        try:
            async for chunk in self._stream:
                size += len(chunk)
                if self._bounded and size > MAX_LINE:
                    self._connection.note(FailureKind.BAD_REPLY, f"it sent a message of more than {MAX_LINE} bytes")
                    raise httpx2.StreamError("too large")
                text, rest = self._connection.without_key(rest + chunk)
                if text:
                    yield text
            if rest:
                yield rest
        except (httpx2.TransportError, OSError) as error:
            self._connection.note(FailureKind.UNAVAILABLE, f"{type(error).__name__}: {error}")
            raise httpx2.StreamError("broken") from None

    async def aclose(self) -> None:
        await self._stream.aclose()


def _is_error(body: bytes) -> bool:
    """Whether a body is an error of the protocol."""
    answer = read_json(body).value
    error = answer.get("error") if isinstance(answer, dict) else None
    return isinstance(error, dict) and type(error.get("code")) is int


@contextlib.asynccontextmanager
async def open_http_session(address: McpAddress) -> AsyncIterator[PackageSession]:
    """A server that has shaken hands. Raises `McpFailure`."""
    try:
        connection = HttpConnection(address)
    except ValueError as error:  # the variable held a key when the address was made
        raise McpFailure(FailureKind.REFUSED, str(error)) from None
    try:
        from mcp.client.streamable_http import streamable_http_client
    except ImportError:
        raise McpFailure(FailureKind.REFUSED, "it needs the package mcp: pip install 'marl_llm[mcp]'") from None
    for name in ("mcp.client.streamable_http", "httpx2", "httpcore2"):  # what a stranger's server says belongs in no log
        logging.getLogger(name).setLevel(logging.CRITICAL)
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {connection.key}"} if connection.key else {})
    try:
        async with (
            httpx2.AsyncClient(transport=connection, headers=headers, timeout=TIMEOUT_S) as client,
            streamable_http_client(address.url, http_client=client, max_sse_event_size=MAX_LINE) as streams,
            shake_hands(connection, *streams) as session,
        ):
            yield session
    except Exception:
        if connection.ended.is_set():  # the package's exceptions are about tasks, the fault is about the server
            raise connection.failure() from None
        raise
    finally:
        connection.ended.set()
