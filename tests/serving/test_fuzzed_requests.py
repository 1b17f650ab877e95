"""Whatever is sent to the endpoint is answered or refused in one line of JSON, and no episode is lost."""

import json
import random

import pytest
from serving_lab import ask, ended, get, scripted

from benchmarks.fuzz_requests import BODIES, Sent, changed, fault_of, make_requests, measure, replies_in
from marl_llm.serving import ChatServer
from marl_llm.serving.dialects import DIALECTS

REQUESTS = 600


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


def test_damaged_requests_over_http_are_answered_or_refused_and_recorded(tmp_path):
    record = tmp_path / "plays.jsonl"
    with ChatServer({"m": scripted(ended("z"), max_prompt=1500)}, record=record) as server:
        port = int(server.url.split(":")[2].split("/")[0])
        found = measure(port, record, make_requests(200, 1), 4)
        assert (found["faults"], found["lost"]) == (0, 0), found
        assert min(found["statuses"].get(status, 0) for status in ("200", "400", "404", "415", "501")) > 0
        assert found["replies"] > 20
        record.write_text("".join(record.read_text().splitlines(True)[:-1]))
        assert measure(port, record, [], 1)["lost"] == found["episodes"], "of these no reply was told now"


STREAM = b'data: {"choices": [{"index": 0, "finish_reason": null}]}\n\ndata: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n'


@pytest.mark.parametrize(
    ("status", "content_type", "body", "fault"),
    [
        (200, "application/json", b'{"choices": [{}]}', ""),
        (200, "text/event-stream", STREAM + b"data: [DONE]\n\n", ""),
        (400, "application/json", b'{"error": {"message": "so"}}', ""),
        (0, "TimeoutError", b"", "no answer"),
        (500, "application/json", b'{"error": {"message": "so"}}', "status 500"),
        (200, "application/json", b'{"choices": []}', "without a reply"),
        (200, "application/json", b'{"choices": [NaN]}', "no JSON"),
        (200, "text/event-stream", STREAM + b'data: {"error": {"message": "paid before"}}\n\n', ""),
        (200, "text/event-stream", STREAM + b'data: {"error": {"message": ""}}\n\n', "without an end"),
        (200, "text/event-stream", STREAM, "without an end"),
        (400, "application/json", b'{"error": {"message": "a\\nb"}}', "in one line"),
        (400, "application/json", b'{"error": {}}', "in one line"),
        (400, "text/plain", b"no", "no JSON"),
    ],
)
def test_an_answer_that_is_neither_right_nor_a_named_refusal_is_a_fault(status, content_type, body, fault):
    found = fault_of(Sent("POST", "/v1/chat/completions", {}, b"", "chat/completions"), status, content_type, body)
    assert fault in found
    assert bool(found) == bool(fault)


def test_replies_of_an_answer_are_counted():
    assert replies_in(b'{"choices": [1, 2]}', False) == 2
    assert replies_in(STREAM, True) == 1
    assert replies_in(b'event: message_stop\ndata: {"type": "message_stop"}\n\n', True) == 1
