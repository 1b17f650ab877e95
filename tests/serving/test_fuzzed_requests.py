"""Whatever is sent to the endpoint is answered or refused in one line of JSON, and no episode is lost."""

import json
import random

from serving_lab import LOOK, USER, ask, ended, get, scripted

from marl_llm.serving import ChatServer
from marl_llm.serving.dialects import DIALECTS

REQUESTS = 600
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}
STRANGE = [
    None, True, 0, -1, 1e30, 2**70, "", "x", "<|im_end|>", "</tool_call>", "\ud800", [], {}, [None], [[]], {"type": "function"},
    {"type": "text", "text": "x"}, {"role": "user"}, "a" * 200, [{"type": "tool_use"}],
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
]  # fmt: skip
BODIES = {
    "chat/completions": {
        "model": "m", "messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                   {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "wall"}]}],
        "tools": [LOOK], "tool_choice": "auto", "n": 2, "max_tokens": 5, "temperature": 0.5, "stop": ["z"], "seed": 1, "stream": False,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, "parallel_tool_calls": True,
    },
    "completions": {"model": "m", "prompt": ["x", "y"], "max_tokens": 5, "logprobs": 0, "stream": True, "n": 1},
    "messages": {
        "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stream": True, "tool_choice": {"type": "any"},
        "messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "wall"}]}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}], "stop_sequences": ["z"],
    },
    "responses": {
        "model": "m", "input": [USER, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                                {"type": "function_call_output", "call_id": "c1", "output": "wall"}],
        "tools": [{"type": "function", "name": "look"}], "text": {"format": {"type": "json_object"}}, "max_output_tokens": 5,
        "instructions": "s", "stream": False, "tool_choice": "auto",
    },
}  # fmt: skip


def places(value):
    """(container, key) of every value within a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs):
        yield value, key
        yield from places(item)


def changed(body, draw):
    """A body with one to three of its values taken away, exchanged, doubled or given another name."""
    body = json.loads(json.dumps(body))
    for _ in range(draw.randint(1, 3)):
        container, key = draw.choice(list(places(body)) or [(body, "model")])
        way = draw.randrange(4)
        if way == 0:
            container[key] = draw.choice(STRANGE)
        elif way == 1 and isinstance(container, dict):
            container.pop(key, None)
        elif way == 2 and isinstance(container, list):
            container.insert(key, container[key])
        elif isinstance(container, dict):
            container[draw.choice(["more", "type", "content", "tool_calls", "name"])] = draw.choice(STRANGE)
    return body


def test_hundreds_of_changed_requests_are_each_answered_or_refused_in_one_line(tmp_path, capfd):
    draw, statuses = random.Random(7), []
    policy = scripted(ended("z"), max_prompt=1500)
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        for _ in range(REQUESTS):
            kind = draw.choice(list(BODIES))
            body = json.dumps(changed(BODIES[kind], draw)).encode()
            if draw.random() < 0.1:
                body = body[: draw.randrange(len(body))]
            sent = []
            status, found = server.answer(body, kind, "a", sent.append)
            statuses.append(status)
            assert status in (200, 400), (kind, body, found)
            if status == 400:
                message = found["error"]["message"]
                assert message, body
                assert "\n" not in message, (message, body)
                assert len(message) < 2000
            json.dumps([found, *sent], allow_nan=False)
        written = len((tmp_path / "plays.jsonl").read_text().splitlines())
        assert get(server, "/episodes/a")[1]["replies"] == written > 0
        assert ask(server, "/episodes/a/v1/chat/completions", max_tokens=5)["choices"]
        assert server.pay(b'{"reward": 1}', "a")[0] == 200
        assert server.stats()["failed"] == 0
    assert set(BODIES) == set(DIALECTS)
    assert min(statuses.count(200), statuses.count(400)) > REQUESTS / 10
    assert capfd.readouterr().err == ""


def test_the_requests_that_are_changed_are_served_as_they_are():
    with ChatServer({"m": scripted(ended("z"))}) as server:
        for kind, body in BODIES.items():
            sent = []
            assert server.answer(json.dumps(body).encode(), kind, None, sent.append)[0] == 200
            assert bool(sent) == body["stream"]
