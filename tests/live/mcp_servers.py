"""Real servers of the package `mcp` and tools of roles. Needs that package; the suite has stand-ins for servers.

    python -m venv V && V/bin/pip install -e '.[test,mcp]'
    V/bin/python -m pytest -n 0 -s tests/live/mcp_servers.py

What is seen: schemas, answers and refusals of a real server; one that crashes, hangs, answers megabytes, lies about its schema, prints what
is no message, or is no server at all is a named failure, and the next call is served; no process is left.
"""

import asyncio
import pathlib
import sys
import time

import pytest

from marl_llm.tools.mcp_server import McpServer
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

server.run()
'''
# Speaks the protocol by hand, and answers a call of `lie` otherwise than its output schema says.
LIAR = '''
import json, sys

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
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
        found = {"content": [], "structuredContent": {"x": "no"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)
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


def test_a_server_that_lies_about_its_schema_cannot_be_read(tmp_path):
    (tmp_path / "liar.py").write_text(LIAR)
    with McpServer([sys.executable, "liar.py"], str(tmp_path)) as server:
        assert [tool.name for tool in mcp_tools(server)] == ["lie"]
        failure = call(server, "lie").failure
    assert (failure.kind, "structured content" in failure.message) == ("bad_reply", True), failure


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
