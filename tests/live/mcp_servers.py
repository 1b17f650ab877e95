"""Real servers of the package `mcp` and tools of roles. Needs that package; the suite has stand-ins for servers.

    python -m venv V && V/bin/pip install -e '.[test,mcp]'
    V/bin/python -m pytest -n 0 -s tests/live/mcp_servers.py

What is seen: schemas, answers and refusals of a real server; one that crashes, hangs, answers megabytes, prints what is no message, refuses
to shake hands, or is no server at all is a named failure, and the next call is served; its own schema for its answers is not looked at; no
process is left. The same by streamable HTTP, where the server of this test is started again once it has ended, as a service is.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from marl_llm.tools.mcp_server import McpAddress, McpServer
from marl_llm.workflows import WorkflowError, mcp_tools

SERVER = '''
import asyncio, os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("tiny")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool(structured_output=False)
def raises() -> str:
    raise KeyError("nope")

@server.tool(structured_output=False)
def crash() -> str:
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool(structured_output=False)
def big() -> str:
    return "x" * 3_000_000

@server.tool(structured_output=False)
def hang() -> str:
    time.sleep(600)

@server.tool(structured_output=False)
async def slow() -> str:
    await asyncio.sleep(600)

@server.tool(structured_output=False)
def noise() -> str:
    os.write(1, b"no message\\n" * 1000)
    return "done"

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]), json_response=sys.argv[2] == "json")
else:
    server.run()
'''
SERVICE = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, *sys.argv[1:]])"
# Speaks the protocol by hand, and answers a call of `lie` otherwise than its output schema says, whose pattern takes years to look for.
LIAR = '''
import json, sys

SCHEMA = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["x"]}
TOOL = {"name": "lie", "inputSchema": {"type": "object"}, "outputSchema": SCHEMA}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    found = {"tools": [TOOL]}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        found = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "liar", "version": "1"}}
    elif asked["method"] == "tools/call":
        found = {"content": [], "structuredContent": {"x": "a" * 40 + "!"}}
    answer = {"result": found} if asked["method"] != sys.argv[1] else {"error": {"code": int(sys.argv[2]), "message": "not today"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"]} | answer), flush=True)
'''


def call(server, name, timeout_s=60, **arguments):
    return asyncio.run(server.call(name, arguments, timeout_s))


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    with McpServer([sys.executable, "server.py"], str(tmp_path)) as one:
        yield one


def test_schemas_answers_and_refusals_are_the_servers(server):
    tools = {tool.name: tool for tool in mcp_tools(server)}
    assert list(tools) == ["add", "raises", "crash", "big", "hang", "slow", "noise"]
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].arguments["required"] == ["a", "b"]
    assert asyncio.run(tools["add"].function(a=1, b=2)).value == "3"
    assert (call(server, "add", a="x").value.is_error, call(server, "raises").value.is_error) == (True, True)
    assert call(server, "nothing").value.is_error
    assert call(server, "noise").value.text == "done"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("crash", "crash", "last words"), ("big", "bad_reply", "more than 1048576 bytes"), ("hang", "deadline", "3 s")],
)
def test_what_breaks_a_server_is_a_named_failure_and_the_next_call_is_served(server, name, kind, message):
    assert call(server, "add", a=1, b=1).value.text == "2"
    failure = call(server, name, 3).failure
    assert (failure.kind, message in failure.message) == (kind, True), failure
    assert call(server, "add", a=1, b=2).value.text == "3"


def test_a_slow_call_leaves_the_server_to_others(server):
    assert call(server, "add", a=1, b=1).value.text == "2"
    assert call(server, "slow", 1).failure.kind == "deadline"
    start = time.monotonic()
    assert call(server, "add", a=1, b=2).value.text == "3"
    print(f"\nanswered {time.monotonic() - start:.2f} s after another call's deadline")


def test_a_servers_schema_for_its_answers_is_not_looked_at(tmp_path):
    (tmp_path / "liar.py").write_text(LIAR)
    with McpServer([sys.executable, "liar.py", "never", "0"], str(tmp_path)) as server:
        assert [tool.name for tool in mcp_tools(server)] == ["lie"]
        assert call(server, "lie").value.text == f'{{"x": "{"a" * 40}!"}}'


def test_errors_of_the_protocol_are_failures_and_those_of_a_tool_are_refusals(tmp_path):
    (tmp_path / "liar.py").write_text(LIAR)
    for code, kind in ((-32700, "bad_reply"), (-32600, "bad_reply"), (-32000, "unavailable"), (-32602, None)):
        with McpServer([sys.executable, "liar.py", "tools/call", str(code)], str(tmp_path)) as server:
            answer = call(server, "lie")
        if kind is None:
            assert (answer.value.text, answer.value.is_error) == ("not today", True)
        else:
            assert (answer.failure.kind, answer.failure.message) == (kind, "the MCP server: not today")
    with McpServer([sys.executable, "liar.py", "initialize", "-32602"], str(tmp_path)) as server:
        with pytest.raises(WorkflowError, match="liar.py initialize -32602': not today"):
            mcp_tools(server)


def test_what_is_no_server_is_told_in_one_line(tmp_path):
    for command, message in (
        (["/no/such/program"], "No such file"),
        ([sys.executable, "-c", "print('hello'); raise SystemExit('ended early')"], "stderr ends: ended early"),
    ):
        with McpServer(command, str(tmp_path)) as server, pytest.raises(WorkflowError, match=message):
            mcp_tools(server)


def test_no_process_is_left(server):
    assert call(server, "add", a=1, b=1).ok
    mark = server._guard.mark.encode()
    server.close()

    def has(path):
        try:
            return mark in path.read_bytes()
        except OSError:
            return False

    assert [path for path in pathlib.Path("/proc").glob("[0-9]*/environ") if has(path)] == []


@pytest.fixture(params=["json", "stream"])
def service(tmp_path, request):
    """A server at an address, and the process that starts it again."""
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVICE, str(tmp_path / "server.py"), str(port), request.param]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        with McpServer(McpAddress(f"http://127.0.0.1:{port}/mcp")) as one:
            yield one, port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(port):
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise TimeoutError(port)


def test_over_http_schemas_answers_and_refusals_are_the_servers(service):
    server, _ = service
    tools = {tool.name: tool for tool in mcp_tools(server)}
    assert tools["add"].arguments["required"] == ["a", "b"]
    assert asyncio.run(tools["add"].function(a=1, b=2)).value == "3"
    assert (call(server, "add", a="x").value.is_error, call(server, "raises").value.is_error) == (True, True)
    assert call(server, "nothing").value.is_error


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("crash", "unavailable", ""), ("big", "bad_reply", "1048576 byte"), ("slow", "deadline", "3 s")],
)
def test_over_http_what_breaks_a_call_is_a_named_failure_and_the_next_is_served(service, name, kind, message):
    server, port = service
    assert call(server, "add", a=1, b=1).value.text == "2"
    failure = call(server, name, 3).failure
    print(f"\n{name}: {failure}")
    assert (failure.kind, message in failure.message) == (kind, True), failure
    _wait_for(port)
    assert call(server, "add", a=1, b=2).value.text == "3"


def test_over_http_a_server_that_hangs_fails_every_call_until_it_is_killed(service):
    server, port = service
    assert call(server, "add", a=1, b=1).value.text == "2"
    assert call(server, "hang", 2).failure.kind == "deadline"
    after = call(server, "add", 20, a=1, b=2)
    print(f"\nafter a call that hangs: {after}")
    assert after.ok or after.failure.kind == "deadline"


def test_an_address_without_a_server_is_told_in_one_line():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = McpAddress(f"http://127.0.0.1:{free.getsockname()[1]}/mcp")
        with pytest.raises(WorkflowError, match="the MCP server 'http://127.0.0.1.*ConnectError") as found:
            mcp_tools(address)
    assert "\n" not in str(found.value)


MUTE_AT_ADDRESS = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = {"tools": [{"name": "mute", "description": self.headers["Authorization"], "inputSchema": {"type": "object"}}]}
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            found = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "mute", "version": "1"}}
        body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}).encode() if "id" in asked else b""
        if asked["method"] == "tools/call":
            body = b"{"
        self.send_response(200 if body else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_over_http_what_is_no_message_cannot_be_read_and_no_key_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLS_KEY", "word-nobody-reads")
    (tmp_path / "mute.py").write_text(MUTE_AT_ADDRESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(tmp_path / "mute.py"), str(port)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        with McpServer(McpAddress(f"http://127.0.0.1:{port}/mcp", "TOOLS_KEY")) as server:
            assert [(tool.name, tool.description) for tool in mcp_tools(server)] == [("mute", "Bearer [key]")]
            failure = call(server, "mute").failure
        assert (failure.kind, "Failed to parse JSON" in failure.message) == ("bad_reply", True), failure
    finally:
        process.kill()
        process.wait()
