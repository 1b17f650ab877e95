"""Tools of an MCP server: what it tells becomes schemas, what it answers is data, and whatever else it does is a named failure."""

import asyncio
import contextlib
import json
import threading
import types

import pytest
from test_role_tools import asked, play

from marl_llm.tools import mcp_server
from marl_llm.tools._mcp_session import text_of
from marl_llm.tools.mcp_server import McpAddress, McpAnswer, McpError, McpFailure, McpServer, McpTool
from marl_llm.tools.results import FailureKind
from marl_llm.workflows import WorkflowError, mcp_tools

OBJECT = {"type": "object", "properties": {"word": {"type": "string"}}}
TOOLS = [McpTool("lookup", "Looks a word up.", OBJECT), McpTool("other", "", OBJECT)]


class StandIn:
    """A server that does what the word of a call says, and counts how often it is started."""

    def __init__(self, tools=TOOLS, fails_to_start=None):
        self.tools, self.starts, self.ends, self.fails = tools, 0, 0, fails_to_start
        self.deaf = False

    @contextlib.asynccontextmanager
    async def open(self, command, folder, env):
        self.starts += 1
        if self.fails is not None:
            raise self.fails
        self.ended = asyncio.Event()
        try:
            yield self
        finally:
            await asyncio.sleep(0.1)  # a program takes a while to end
            self.ends += 1

    async def list_tools(self):
        return self.tools

    async def ping(self):
        if self.deaf:
            await asyncio.sleep(60)

    async def call_tool(self, name, arguments):
        word = arguments["word"]
        if self.ended.is_set():
            raise McpFailure(FailureKind.CRASH, "it has ended")
        if word == "crash":
            self.ended.set()
            raise McpFailure(FailureKind.CRASH, "it has ended;\nits stderr ends: boom")
        if word == "lie":
            raise McpFailure(FailureKind.BAD_REPLY, "not as its schema says")
        if word in ("slow", "deaf"):
            self.deaf = word == "deaf"
            await asyncio.sleep(60)
        self.deaf = False
        return McpAnswer(f"<{word}>", is_error=word == "wrong")


@pytest.fixture
def stand_in():
    return StandIn()


@pytest.fixture
def server(stand_in):
    with McpServer(["server"], open_session=stand_in.open) as one:
        yield one


def call(server, word, timeout_s=20):
    return asyncio.run(server.call("lookup", {"word": word}, timeout_s))


def test_what_a_server_tells_of_a_tool_becomes_its_schema(server):
    lookup, other = mcp_tools(server, timeout_s=5)
    assert lookup.schema == {"type": "function", "function": {"name": "lookup", "description": "Looks a word up.", "parameters": OBJECT}}
    assert lookup.timeout_s > 5, "its own deadline comes first, and names the server"
    assert other.name == "other"
    assert [tool.name for tool in mcp_tools(server, names=("other",))] == ["other"]


@pytest.mark.parametrize(
    ("tools", "names", "message"),
    [
        ([], (), "the MCP server 'server' lists no tools"),
        (TOOLS, ("lokup",), "MCP tool 'lokup': .*lookup"),
        ([McpTool("a/b", "", OBJECT)], (), "'a/b': no model could call it"),
        ([McpTool("a", "", {"type": "string"})], (), "'a': its arguments are no JSON schema of an object"),
        ([McpTool("a", "", [OBJECT])], (), "no JSON schema of an object"),
        ([McpTool("a", "", {"type": "object", "x": float("nan")})], (), "no JSON schema of an object"),
        ([McpTool("a", "x" * 20_000, OBJECT)], (), "'a' tells of itself in .* more than 16000; leave it out"),
    ],
)
def test_a_tool_that_no_role_can_have_is_told_in_one_line(server, stand_in, tools, names, message):
    stand_in.tools = tools
    with pytest.raises(WorkflowError, match=message) as found:
        mcp_tools(server, names)
    assert "\n" not in str(found.value)


def test_a_role_reads_the_answer_and_the_refusal(server, monkeypatch):
    import test_role_tools as lab

    monkeypatch.setattr(lab, "TOOL", mcp_tools(server)[0])
    rollout, _ = play([asked("lookup", word="x"), asked("lookup", word="wrong"), "done"])
    first, second, last = rollout.trajectories[0].calls
    assert "<x>" in lab.TOKENIZER.decode(second.prompt_ids)
    assert "error: <wrong>" in lab.TOKENIZER.decode(last.prompt_ids)


@pytest.mark.parametrize(("word", "kind"), [("crash", "crash"), ("lie", "bad_reply"), ("slow", "deadline")])
def test_a_server_that_gives_no_answer_aborts_the_play_by_name(server, monkeypatch, word, kind):
    import test_role_tools as lab

    monkeypatch.setattr(lab, "TOOL", mcp_tools(server, timeout_s=0.2)[0])
    rollout, _ = play([asked("lookup", word=word), "fine", "fine"], n=2)
    failures = [failure for episode in rollout.episodes for failure in episode.failures]
    assert [failure.kind for failure in failures] == [kind]
    assert "MCP server" in failures[0].message
    assert "\n" not in failures[0].message


def test_a_server_that_has_ended_is_started_again_for_the_next_call(server, stand_in):
    assert call(server, "x").value == McpAnswer("<x>")
    assert call(server, "crash").failure.kind is FailureKind.CRASH
    assert call(server, "y").value == McpAnswer("<y>")
    assert (stand_in.starts, stand_in.ends) == (2, 1)


def test_after_a_deadline_a_server_that_answers_a_ping_goes_on_and_another_is_replaced(server, stand_in, monkeypatch):
    monkeypatch.setattr(mcp_server, "PING_S", 0.2)
    assert call(server, "slow", 0.1).failure.kind is FailureKind.DEADLINE
    assert call(server, "x").ok
    assert stand_in.starts == 1
    assert call(server, "deaf", 0.1).failure.kind is FailureKind.DEADLINE
    assert call(server, "y").ok
    assert (stand_in.starts, stand_in.ends) == (2, 1)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_server_that_cannot_be_started_is_one_line_for_people_and_a_failure_of_a_call(grouped):
    error = OSError("no such\nprogram")
    stand_in = StandIn(fails_to_start=ExceptionGroup("tasks", [error]) if grouped else error)
    with McpServer(["server"], open_session=stand_in.open) as server:
        with pytest.raises(WorkflowError, match="the MCP server 'server': OSError: no such program"):
            mcp_tools(server)
        assert call(server, "x").failure.kind is FailureKind.CRASH
        stand_in.fails = None
        assert call(server, "x").ok
    with pytest.raises(McpError, match="as a list"):
        McpServer("python server.py")


def test_calls_from_many_loops_at_once_share_one_server(server, stand_in):
    async def many():
        return await asyncio.gather(*(server.call("lookup", {"word": str(n)}, 20) for n in range(20)))

    assert [one.value.text for one in asyncio.run(many())] == [f"<{n}>" for n in range(20)]
    assert stand_in.starts == 1
    server.close()
    server.close()
    assert stand_in.ends == 1


class Mute(StandIn):
    """A server that never shakes hands."""

    @contextlib.asynccontextmanager
    async def open(self, command, folder, env):
        self.starts += 1
        try:
            await asyncio.sleep(60)
            yield self
        finally:
            self.ends += 1


def test_a_server_that_never_shakes_hands_is_ended_after_a_calls_deadline(monkeypatch):
    monkeypatch.setattr(mcp_server, "PING_S", 0.1)
    mute = Mute()
    with McpServer(["server"], open_session=mute.open) as server:
        assert call(server, "x", 0.2).failure.kind is FailureKind.DEADLINE
        assert (mute.starts, mute.ends) == (1, 1)


@pytest.mark.parametrize("names", [("lokup",), ()])
def test_what_was_started_for_tools_that_nobody_gets_is_ended(stand_in, monkeypatch, names):
    stand_in.tools = TOOLS if names else []
    monkeypatch.setattr(mcp_server, "_open_with_package", stand_in.open)
    with pytest.raises(WorkflowError, match="MCP tool 'lokup'" if names else "lists no tools"):
        mcp_tools(["server"], names)
    assert (stand_in.starts, stand_in.ends) == (1, 1)
    assert [thread for thread in threading.enumerate() if thread.name == "mcp"] == []


def test_a_server_at_an_address_is_served_alike_and_starts_no_process(stand_in):
    with McpServer(McpAddress("http://127.0.0.1:9/mcp"), open_session=stand_in.open) as server:
        assert [tool.name for tool in mcp_tools(server)] == ["lookup", "other"]
        assert call(server, "x").value == McpAnswer("<x>")
        assert server._guard._process is None


def test_a_result_is_told_as_text():
    def block(kind, text=""):
        return types.SimpleNamespace(type=kind, text=text)

    assert text_of([block("text", "a"), block("image"), block("text", "b")]) == "a\n[image]\nb"
    assert text_of([]) == ""
    assert json.loads(text_of([], {"x": [1]})) == {"x": [1]}
