"""Several replies to one request, and answers that should be JSON."""

import json

import pytest
from serving_lab import ask, ended, events, refusal, scripted

from marl_llm.serving import ChatServer
from marl_llm.tools.chat import ChatReply

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_several_replies_are_drawn_each_by_itself_and_streamed_by_their_numbers(kind, tmp_path):
    texts = ["One.", "Two.", "Three."]
    policies = {name: scripted(*map(ended, texts), size=2) for name in ("m", "s")}
    body = {"prompt": "Where?"} if kind == "completions" else {}
    asked = {"messages": None} | body if kind == "completions" else body
    with ChatServer(policies, record=tmp_path / "plays.jsonl") as server:
        whole = ask(server, f"/episodes/a/v1/{kind}", n=3, **asked)
        found = events(server, f"/v1/{kind}", **{"model": "s", "n": 3, "stream_options": {"include_usage": True}} | asked)
        assert ask(server, f"/v1/{kind}", model="s", **asked)["choices"][0]["index"] == 0
    told = [choice.get("text", choice.get("message", {}).get("content")) for choice in whole["choices"]]
    assert told == texts
    streamed = dict.fromkeys(range(3), "")
    for event in found[:-1]:
        choice = event["choices"][0]
        streamed[choice["index"]] += choice.get("text", choice.get("delta", {}).get("content")) or ""
    assert list(streamed.values()) == texts
    assert len([event for event in found if event["choices"] and event["choices"][0]["finish_reason"] == "stop"]) == 3
    assert found[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)
    assert whole["usage"]["prompt_tokens"] == len(policies["m"].engine.asked[0].prompt)
    seeds = [request.seed for request in policies["s"].engine.asked]
    assert len(set(seeds)) == 3
    assert seeds[3] == seeds[0]  # the first of several is the only one
    assert [json.loads(line)["number"] for line in (tmp_path / "plays.jsonl").read_text().splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "asked", "kept"),
    [
        ('{"name": "x"}', FORMAT, True), ('{"name": 3}', FORMAT, False), ("no", FORMAT, False), ("{}", {"type": "json_object"}, True),
        ("[]", {"type": "json_object"}, False), ("no", {"type": "text"}, True), ('```{"name": "x"}```', FORMAT, False),
    ],
)  # fmt: skip
def test_a_format_is_checked_after_the_reply_and_nothing_of_the_text_is_changed(text, asked, kept):
    with ChatServer({"m": scripted(ended(text)), "f": lambda *_: ChatReply(text, "stop")}) as server:
        for model in "mf":
            choice = ask(server, model=model, response_format=asked)["choices"][0]
            assert (choice["message"]["content"], choice.get("unmet")) == (text, None if kept else ["response_format"])
            assert events(server, model=model, response_format=asked)[-1]["choices"][0].get("unmet") == choice.get("unmet")
        assert server.stats()["unmet"] == (0 if kept else 4)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"response_format": "json"}, "response_format.type must be one of"),
        ({"response_format": {"type": "xml"}}, "response_format.type must"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "a"}}}}, "schema.pattern is not checked here"),
        ({"n": 0}, "n must be 1 to 64"), ({"n": 65}, "n must be"), ({"n": 1.5}, "n must be"),
    ],
)  # fmt: skip
def test_other_formats_and_numbers_are_refused_in_one_line(asked, why):
    with ChatServer({"m": scripted(ended("x"))}) as server:
        assert why in refusal(server, **asked)
