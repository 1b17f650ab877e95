"""The `openai` and `anthropic` packages with tools against a served chat model. Needs both packages; the suite does not.

    python -m venv V && V/bin/pip install -e '.[test]' openai anthropic
    PYTHONPATH=tests/serving:tests/text V/bin/python -m pytest -n 0 -s tests/live/agent_clients.py

What is seen: a call, its answer and a reply, streaming and not, through each interface; no token is encoded again.
"""

import json

import anthropic
import openai
import pytest
from serving_lab import LOOK, ended, scripted

from marl_llm.serving import ChatServer

CALL = ended('Look. <tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call>')
USER = {"role": "user", "content": "Where?"}


@pytest.fixture
def server(tmp_path):
    """A model that calls a tool, then answers; it records."""
    with ChatServer({"m": scripted(CALL, ended("ok"), size=3)}, record=tmp_path / "plays.jsonl") as one:
        yield one


def base_of(server, episode):
    return server.url.replace("/v1", f"/episodes/{episode}")


def openai_of(server, episode):
    return openai.OpenAI(base_url=f"{base_of(server, episode)}/v1", api_key="none", max_retries=0)


def counts_are_those_of_a_kept_history(server, episode):
    counts = server.episode(episode)
    print(f"\n{counts}")
    assert (counts["replies"], counts["lineages"], counts["reencoded"], counts["forked"]) == (2, 1, 0, 0)
    assert counts["relayed"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_chat_completions_of_openai(server, streams):
    client = openai_of(server, "chat")
    body = dict(model="m", tools=[LOOK], max_tokens=200)
    if streams:
        with client.chat.completions.stream(messages=[USER], **body) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=[USER], **body).choices[0]
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name, json.loads(call.function.arguments)) == ("tool_calls", "look", {"x": 3})
    answer = {"role": "tool", "tool_call_id": call.id, "content": "wall"}
    said = choice.message.model_dump(include={"role", "content", "tool_calls"})
    said["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
    ]
    second = client.chat.completions.create(messages=[USER, said, answer], **body).choices[0]
    assert (second.message.content, second.finish_reason) == ("ok", "stop")
    counts_are_those_of_a_kept_history(server, "chat")


@pytest.mark.parametrize("streams", [False, True])
def test_responses_of_openai(server, streams):
    client = openai_of(server, "responses")
    body = dict(model="m", tools=[{"type": "function"} | LOOK["function"]], max_output_tokens=200)
    if streams:
        with client.responses.stream(input=[USER], **body) as stream:
            first = stream.get_final_response()
    else:
        first = client.responses.create(input=[USER], **body)
    assert first.output_text.rstrip() == "Look."
    call = first.output[1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"x": 3})
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "wall"}
    assert client.responses.create(input=[USER, *items, answer], **body).output_text == "ok"
    counts_are_those_of_a_kept_history(server, "responses")


@pytest.mark.parametrize("streams", [False, True])
def test_messages_of_anthropic(server, streams):
    client = anthropic.Anthropic(base_url=base_of(server, "messages"), api_key="none", max_retries=0)
    tools = [{"name": "look", "description": "Looks at a cell.", "input_schema": LOOK["function"]["parameters"]}]
    body = dict(model="m", tools=tools, max_tokens=200)
    if streams:
        with client.messages.stream(messages=[USER], **body) as stream:
            first = stream.get_final_message()
    else:
        first = client.messages.create(messages=[USER], **body)
    text, call = first.content
    assert (text.text.rstrip(), call.name, call.input, first.stop_reason) == ("Look.", "look", {"x": 3}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "wall"}
    said = [{"type": "text", "text": text.text}, {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input}]
    history = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, **body).content[0].text == "ok"
    counts_are_those_of_a_kept_history(server, "messages")


def test_what_is_not_served_is_a_bad_request_in_each_package(server):
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        openai_of(server, "a").responses.create(model="m", input="x", top_logprobs=3)
    with pytest.raises(openai.BadRequestError, match="tools\\[0\\]"):
        openai_of(server, "a").chat.completions.create(model="m", messages=[USER], tools=[{"type": "custom", "custom": {"name": "x"}}])
    client = anthropic.Anthropic(base_url=base_of(server, "a"), api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        client.messages.create(model="m", max_tokens=3, messages=[USER], extra_body={"top_k": 3})
