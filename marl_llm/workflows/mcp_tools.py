"""Tools of a role from a server that speaks the Model Context Protocol.

    tools = mcp_tools(["python", "my_server.py"])  # or mcp_tools(McpAddress("https://tools.example/mcp", key_env="TOOLS_KEY"))
    role = Role("solver", "{question}", parse=plain("answer"), writes={"answer": ""}, tools=tools)

The schemas are the server's. What it answers is data, which the role reads; an error that it tells of is a refusal, `error: ...`. A server
that crashes, hangs or cannot be read aborts the play as a named failure of the tool. `marl_llm.tools.mcp_server` says how it is run.
"""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm import hints
from marl_llm.tools.mcp_server import McpAddress, McpError, McpServer, McpTool
from marl_llm.tools.results import ToolResult
from marl_llm.untrusted import read_value
from marl_llm.workflows.errors import ToolRefusal, WorkflowError
from marl_llm.workflows.roles import BOUNDS, TOOL_NAME, RoleTool

MAX_TOLD = 16_000  # characters of a tool's description and schema: they stand in every prompt
PING_GRACE_S = 10.0  # beyond the deadline of a call, in which its server is looked at


def mcp_tools(
    server: Sequence[str] | McpAddress | McpServer, names: Sequence[str] = (), timeout_s: float | int = 30.0
) -> tuple[RoleTool, ...]:
    """The tools of a server; it is started, or its address is asked, now.

    Args:
      server: a command, whose server ends with this program; an address; or an `McpServer` to close yourself, e.g. by
        `Environment(close=...)`.
      names: of the tools that the role gets, in this order; none: all.
      timeout_s: of a call. One that takes longer aborts the play, or lets it be played again.

    Raises:
      WorkflowError: a server that cannot be started or reached, or lists no tools in time, a name that it does not have, or a tool that no
        role can have: a name that no model could call, a schema that is none of an object, or more than 16,000 characters.
    """
    try:
        own = None if isinstance(server, McpServer) else McpServer(server)
    except McpError as error:
        raise WorkflowError(str(error)) from None
    try:
        tools = _role_tools(own or server, names, timeout_s)
    except BaseException:
        if own is not None:
            own.close()
        raise
    if own is not None:
        atexit.register(own.close)
    return tools


def _role_tools(server: McpServer, names: Sequence[str], timeout_s: float | int) -> tuple[RoleTool, ...]:
    """The named tools of a server, or all. Raises `WorkflowError`."""
    try:
        tools = {tool.name: tool for tool in server.tools()}
    except McpError as error:
        raise WorkflowError(str(error)) from None
    if strange := [name for name in names if name not in tools]:
        raise WorkflowError(f"MCP tool {strange[0]!r}: {hints.suggestion(strange[0], tools)}")
    if not tools:
        raise WorkflowError(f"the MCP server {server.name!r} lists no tools")
    return tuple(role_tool(server, tools[name], timeout_s) for name in names or tools)


def role_tool(server: McpServer, tool: McpTool, timeout_s: float | int) -> RoleTool:
    """A server's tool as a role's. Raises `WorkflowError` for one that no role can have."""
    where, advice = f"MCP tool {tool.name!r:.100}", "; leave it out with names=(...)"
    if not re.fullmatch(TOOL_NAME, tool.name):
        raise WorkflowError(f"{where}: no model could call it; names have 1 to 64 letters, digits, _ and -{advice}")
    schema = read_value(tool.arguments, BOUNDS)
    if not schema.ok or not isinstance(schema.value, dict) or schema.value.get("type") != "object":
        raise WorkflowError(f"{where}: its arguments are no JSON schema of an object{advice}")
    if (told := len(tool.description) + len(json.dumps(schema.value))) > MAX_TOLD:
        raise WorkflowError(f"{where} tells of itself in {told} characters, more than {MAX_TOLD}{advice}")
    return RoleTool(tool.name, _calling(server, tool.name, timeout_s), tool.description, schema.value, timeout_s + PING_GRACE_S)


def _calling(server: McpServer, name: str, timeout_s: float | int) -> Callable[..., Any]:
    """The function of a tool."""

    async def call(**arguments: Any) -> ToolResult:
        result = await server.call(name, arguments, timeout_s)
        if result.ok and result.value.is_error:
            raise ToolRefusal(result.value.text)
        return result.map(lambda answer: answer.text)

    return call
