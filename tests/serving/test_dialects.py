"""Anthropic's messages and OpenAI's responses are the same replies in another form."""

import json

import pytest
from serving_lab import LOOK, ScriptedEngine, ask, ended, post, scripted

from marl_llm.serving import ChatServer
from marl_llm.serving.anthropic_messages import translate

CALL = ended('Look. <tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call>')
SCHEMA = LOOK["function"]["parameters"]
ANTHROPIC = [{"name": "look", "description": "Looks at a cell.", "input_schema": SCHEMA}]
FLAT = [{"type": "function"} | LOOK["function"]]


def named_events(server, path, **body):
    """The events of a stream whose events have names."""
    status, headers, said = post(server, {"model": "m", "stream": True} | body, path)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream"), said
    *parts, rest = said.decode().split("\n\n")
    assert rest == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(found):
    """The content of a streamed message, put together as the package `anthropic` does."""
    blocks = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"json": ""})
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["text" if event["delta"]["type"] == "text_delta" else "json"] = (
                blocks[event["index"]].get("text" if event["delta"]["type"] == "text_delta" else "json", "")
                + event["delta"].get("text", event["delta"].get("partial_json", ""))
            )
    for block in blocks:
        said = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(said)
    return blocks


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?beta=true"])
def test_anthropics_messages_streaming_and_not(path):
    with ChatServer({"m": scripted(CALL, size=3)}) as server:
        body = dict(max_tokens=300, system="Be brief.", messages=[{"role": "user", "content": "Where?"}], tools=ANTHROPIC)
        whole = ask(server, path, **body)
        found = named_events(server, path, **body)
        chat = ask(server, messages=[{"role": "system", "content": "Be brief."}, *body["messages"]], tools=[LOOK])
    call = chat["choices"][0]["message"]["tool_calls"][0]
    text = {"type": "text", "text": "Look."}
    assert whole["content"] == [text, {"type": "tool_use", "id": call["id"], "name": "look", "input": {"x": 3}}]
    assert (whole["type"], whole["role"], whole["stop_reason"], whole["stop_sequence"]) == ("message", "assistant", "tool_use", None)
    used = chat["usage"]
    assert whole["usage"] == {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    assert message_of(found) == whole["content"]
    assert [found[0]["type"], found[-2]["type"], found[-1]["type"]] == ["message_start", "message_delta", "message_stop"]
    assert (found[-2]["delta"]["stop_reason"], found[-2]["usage"]) == ("tool_use", whole["usage"])


def test_openais_responses_streaming_and_not():
    with ChatServer({"m": scripted(CALL, size=3)}) as server:
        body = dict(instructions="Be brief.", input="Where?", tools=FLAT, reasoning={"effort": "low"}, store=False)
        whole = ask(server, "/v1/responses", **body)
        found = named_events(server, "/v1/responses", **body)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
        chat = ask(server, messages=messages, tools=[LOOK])
    message, call = whole["output"]
    told = chat["choices"][0]["message"]["tool_calls"][0]
    assert (message["content"][0]["text"], whole["status"]) == ("Look.", "completed")
    assert (call["call_id"], call["name"], json.loads(call["arguments"])) == (told["id"], "look", {"x": 3})
    used = whole["usage"]
    assert (used["input_tokens"], used["total_tokens"]) == (chat["usage"]["prompt_tokens"], chat["usage"]["total_tokens"])
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert (found[0]["type"], found[-1]["type"]) == ("response.created", "response.completed")
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    assert text == found[-1]["response"]["output"][0]["content"][0]["text"]
    assert text.rstrip() == "Look."
    [arguments] = [event["arguments"] for event in found if event["type"] == "response.function_call_arguments.done"]
    assert arguments == call["arguments"]
    assert [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"] == ["message", "function_call"]


def test_a_history_in_each_form_keeps_the_ids_of_the_episode(tmp_path):
    policies = {name: scripted(CALL, ended("ok")) for name in "ar"}
    with ChatServer(policies, record=tmp_path / "plays.jsonl") as server:
        path, user = "/episodes/a/v1/messages", {"role": "user", "content": "Where?"}
        first = ask(server, path, model="a", max_tokens=300, messages=[user], tools=ANTHROPIC)
        result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": [{"type": "text", "text": "wall"}]}
        history = [user, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        assert ask(server, path, model="a", max_tokens=300, messages=history, tools=ANTHROPIC)["stop_reason"] == "end_turn"
        path = "/episodes/r/v1/responses"
        first = ask(server, path, model="r", input=[user], tools=FLAT)
        result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "wall"}
        second = ask(server, path, model="r", input=[user, *first["output"], result], tools=FLAT)
        assert second["output"][0]["content"][0]["text"] == "ok"
        assert [server.episode(name)["reencoded"] for name in "ar"] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "plays.jsonl").read_text().splitlines()]
    assert [line["relayed"] > 0 for line in lines] == [False, True, False, True]
    assert lines[1]["prompt"] == lines[3]["prompt"]


def test_a_reply_that_is_cut_off_says_so_in_each_form_and_choices_are_translated():
    policy = scripted("never ends")
    with ChatServer({"m": policy}) as server:
        message = ask(server, "/v1/messages", max_tokens=3, messages=[{"role": "user", "content": "x"}])
        assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 3)
        choice = {"type": "any", "disable_parallel_tool_use": True}
        body = dict(max_tokens=3, messages=[{"role": "user", "content": "x"}], tools=ANTHROPIC, tool_choice=choice)
        assert ask(server, "/v1/messages", **body)["unmet"] == ["tool_choice"]
        asked = translate({"model": "m"} | body)
        assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
        response = ask(server, "/v1/responses", max_output_tokens=3, input="x", text={"format": {"type": "json_object"}})
        assert (response["status"], response["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
        assert response["unmet"] == ["response_format"]
        last = named_events(server, "/v1/responses", max_output_tokens=3, input="x")[-1]
        assert last["type"] == "response.incomplete"
        named = ask(server, "/v1/responses", input="x", tools=FLAT, tool_choice={"type": "function", "name": "look"})
        assert (named["tool_choice"], named["unmet"]) == ({"type": "function", "name": "look"}, ["tool_choice"])


@pytest.mark.parametrize(
    ("path", "asked", "why"),
    [
        ("messages", {"messages": [{"role": "user", "content": "x"}]}, "max_tokens is missing"),
        ("messages", {"max_tokens": 3, "messages": []}, "messages must be a list"),
        ("messages", {"max_tokens": 3, "messages": [{"role": "system", "content": "x"}]}, "messages[0].role must be user or assistant"),
        ("messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: a block"),
        ("messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "top_k": 5}, "'top_k' is not served"),
        (
            "messages", {"max_tokens": 3, "messages": [{"role": role, "content": "x"} for role in ("user", "assistant")]},
            "messages[1]: a message of the assistant is not continued",
        ),
        ("messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ("messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}], "thinking": {"type": "enabled"}}, "'thinking'"),
        ("responses", {}, "input must be"), ("responses", {"input": "x", "previous_response_id": "resp_1"}, "no response is stored here"),
        ("responses", {"input": [{"type": "image"}]}, "input[0]: an item of type 'image'"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]: only functions"),
        ("responses", {"input": "x", "text": 3}, "text must be an object"),
        ("responses", {"input": "x", "top_logprobs": 3}, "'top_logprobs'"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_in_the_form_of_each(path, asked, why):
    with ChatServer({"m": scripted(ended("x"))}) as server:
        status, _, said = post(server, {"model": "m"} | asked, f"/v1/{path}")
    found = json.loads(said)
    assert (status, why in found["error"]["message"]) == (400, True), found
    assert found.get("type") == ("error" if path == "messages" else None)


def test_a_failure_within_a_stream_is_an_event(monkeypatch):
    policy = scripted("some text that never ends", size=2)
    monkeypatch.setattr(ScriptedEngine, "submit", broken(ScriptedEngine.submit))
    with ChatServer({"m": policy}) as server:
        body = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        said = post(server, body, "/v1/messages")[2].decode()
    assert "event: error\n" in said.split("\n\n")[-2] + "\n"
    assert "message_stop" not in said


def broken(submit):
    """An engine that fails after it drew."""
    def fails(self, request, on_tokens=None):
        handle = submit(self, request, on_tokens)

        def result():
            raise RuntimeError("broken")

        handle.result = result
        return handle

    return fails
