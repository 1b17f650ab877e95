"""What carries the messages of an MCP server at an address: bounded bytes, named faults, no redirect, no key where none belongs.

The package `mcp` speaks over it; tests/live/mcp_servers.py has both together.
"""

import asyncio
import gzip
import json
import time

import httpx2
import pytest
from http_stand_in import HttpStandIn, send

from marl_llm.tools._mcp_http import HttpConnection
from marl_llm.tools.mcp_server import MAX_LINE, McpAddress, McpError, McpServer
from marl_llm.tools.results import FailureKind
from marl_llm.workflows import WorkflowError, mcp_tools

JSON = {"Content-Type": "application/json"}


class Address(HttpStandIn):
    """A server that answers each request as `answer` says: status, headers, body or pieces of it; `None` drops the connection."""

    def __init__(self):
        super().__init__("/mcp")
        self.answer, self.asked = (200, JSON, b"{}"), []

    def handle(self, handler):
        self.asked.append((handler.command, dict(handler.headers)))
        status, headers, body = self.answer
        first, *others = [b"x"] if body is None else [body] if isinstance(body, bytes) else body
        size = len(first) + sum(map(len, others)) + (body is None)
        send(handler, status, first, {"Content-Length": str(size)} | headers)
        for piece in others:
            time.sleep(0.02)  # so that they come one by one
            handler.wfile.write(piece)
        handler.close_connection = True


@pytest.fixture
def address():
    with Address() as one:
        yield one


def ask(url, method="POST", key_env=None):
    """(status and body, or None; the connection) of one request."""
    async def exchange():
        connection = HttpConnection(McpAddress(url, key_env))
        async with httpx2.AsyncClient(transport=connection, timeout=20) as client:
            try:
                response = await client.request(method, url)
                return (response.status_code, response.content), connection
            except httpx2.StreamError:
                return None, connection

    return asyncio.run(exchange())


def test_an_answer_within_the_bound_passes(address):
    address.answer = 200, JSON, b"x" * MAX_LINE
    found, connection = ask(address.url)
    assert (found, connection.ended.is_set()) == ((200, b"x" * MAX_LINE), False)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((200, JSON, b"x" * (MAX_LINE + 1)), "bad_reply", f"it sent a message of more than {MAX_LINE} bytes"),
        ((200, JSON | {"Content-Encoding": "gzip"}, gzip.compress(b"{}")), "bad_reply", "it compresses its answer"),
        ((200, JSON, None), "unavailable", "RemoteProtocolError"),
        ((401, {}, b""), "refused", "status 401: it asks for a key (key_env)"),
        ((403, {}, b""), "refused", "status 403"),
        ((404, JSON, b'{"jsonrpc": "2.0"}'), "unavailable", "status 404"),
        ((429, {}, b""), "rate_limited", "status 429"),
        ((502, {}, b"<html>"), "unavailable", "status 502"),
        ((400, {}, b"<html>\x1b[31m"), "refused", "status 400: <html> [31m"),
        ((410, JSON, b'{"detail": "gone"}'), "refused", "status 410: {"),
        ((400, {"Content-Type": "text/event-stream"}, b"x" * (MAX_LINE + 1)), "bad_reply", "more than"),
        ((200, JSON | {"Mcp-Session-Id": "\xfc"}, b"{}"), "bad_reply", "its session id holds characters"),
        ((200, JSON | {"Mcp-Session-Id": "a\tb"}, b"{}"), "bad_reply", "its session id holds characters"),
    ],
)
def test_what_is_no_answer_ends_the_session_by_name(address, answer, kind, message):
    address.answer = answer
    found, connection = ask(address.url)
    failure = connection.failure("anything else")
    assert found is None or (found[0], json.loads(found[1])["error"]["code"]) == (400, -32000)
    assert (failure.kind, message in str(failure), connection.ended.is_set()) == (kind, True, True), failure


def test_an_address_where_nobody_is_and_the_packages_own_reasons_are_named():
    with Address() as gone:
        pass
    found, connection = ask(gone.url)
    assert (found[0], connection.failure().kind) == (400, FailureKind.UNAVAILABLE)
    for reason, kind in (("SSE stream failed: too large", "bad_reply"), ("SSE stream ended without a response", "unavailable")):
        connection = HttpConnection(McpAddress(gone.url))
        assert (connection.failure(reason).kind, str(connection.failure())) == (kind, reason)
        assert connection.ended.is_set()
        connection.note(FailureKind.CRASH, "a later reason")
        assert connection.failure().kind == kind, "the first reason counts"


def test_an_error_of_the_protocol_passes_at_any_status(address):
    body = b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32602, "message": "no such tool"}}'
    address.answer = 400, JSON, body
    found, connection = ask(address.url)
    assert (found, connection.ended.is_set()) == ((400, body), False)


def test_a_key_that_a_server_repeats_is_left_out_of_its_answer(address, monkeypatch):
    monkeypatch.setenv("TOOLS_KEY", "word-nobody-reads")
    for kind in ("application/json", "text/event-stream"):
        address.answer = 200, {"Content-Type": kind}, [b"you: word-", b"nobody-reads, word-", b"nobody"]
        assert ask(address.url, key_env="TOOLS_KEY")[0] == (200, b"you: [key], word-nobody")
        assert ask(address.url)[0] == (200, b"you: word-nobody-reads, word-nobody")


def test_no_stream_of_what_the_server_says_unasked_is_opened(address):
    assert ask(address.url, "GET")[0][0] == 405
    assert address.asked == []


def test_redirects_are_handed_on_without_the_key(address, monkeypatch):
    monkeypatch.setenv("TOOLS_KEY", "word-nobody-reads")
    address.answer = 302, {"Location": "http://127.0.0.1:1/word-nobody-reads"}, b""
    connection = HttpConnection(McpAddress(address.url, "TOOLS_KEY"))
    response = asyncio.run(connection.handle_async_request(httpx2.Request("POST", address.url)))
    assert (response.status_code, len(address.asked), connection.ended.is_set()) == (302, 1, False)
    assert response.headers["location"] == "http://127.0.0.1:1/[key]"


def test_the_key_is_read_from_the_environment_and_stands_in_no_message(address, monkeypatch):
    monkeypatch.setenv("TOOLS_KEY", "word-nobody-reads")
    connection = HttpConnection(McpAddress(address.url, "TOOLS_KEY"))
    assert "word-nobody-reads" not in str(connection.failure("it said word-nobody-reads"))
    for url, key_env, message in (
        ("ftp://x/mcp", None, "not an http"),
        ("http://user:word@127.0.0.1/mcp", None, "must not hold a user"),
        ("http://192.0.2.1/mcp", "TOOLS_KEY", "would travel unencrypted"),
        ("http://127.0.0.1/mcp", "NO_SUCH_VARIABLE", "holds no key"),
    ):
        with pytest.raises(McpError, match=message) as found:
            McpAddress(url, key_env)
        assert "word@" not in str(found.value)


def test_a_key_that_is_gone_is_named(address, monkeypatch):
    monkeypatch.setenv("TOOLS_KEY", "word-nobody-reads")
    with McpServer(McpAddress(address.url, "TOOLS_KEY")) as server:
        monkeypatch.delenv("TOOLS_KEY")
        with pytest.raises(McpError, match="the environment variable TOOLS_KEY holds no key"):
            server.tools()


def test_what_is_neither_a_command_nor_an_address_is_told_in_one_line():
    for server in ("http://127.0.0.1:8000/mcp", []):
        with pytest.raises(WorkflowError, match="as a list, .*or an McpAddress") as found:
            mcp_tools(server)
        assert "\n" not in str(found.value)


def test_a_server_of_an_address_is_named_by_it_without_its_query():
    with McpServer(McpAddress("http://127.0.0.1:9/mcp?token=hidden")) as server:
        assert server.name == "http://127.0.0.1:9/mcp"
    assert json.dumps(server.name)
