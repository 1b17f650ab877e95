"""Tools at the endpoint: told by the checkpoint's own template, calls read into `tool_calls`, and what is malformed remains text."""

import dataclasses
import json
import types

import pytest
from checkpoint_text import chat_of
from serving_lab import LOOK, USER, ScriptedEngine, ask, ended, events, post, refusal, scripted

from marl_llm.serving import ChatServer, policy_answers
from marl_llm.serving.json_schema import check_schema, fits
from marl_llm.text import ByteTokenizer, Message, ToolCall
from marl_llm.text.loading import spoken

CALL = '<tool_call>\n{"name": "look", "arguments": {"x": 3}}\n</tool_call>'
OTHER = {"type": "function", "function": {"name": "go"}}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "x"}
FAMILIES = ("qwen2.5", "qwen3", "llama3.2", "mistral_nemo")


def call(call_id="c1", name="look", arguments='{"x": 3}'):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answered(*calls, order=None):
    """A history with calls and their answers."""
    tools = [{"role": "tool", "tool_call_id": one["id"], "content": f"saw {one['id']}"} for one in calls]
    tools = tools if order is None else [tools[place] for place in order]
    return [USER, {"role": "assistant", "content": None, "tool_calls": list(calls)}, *tools]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_as_the_template_writes_it_becomes_a_tool_call_with_an_id(family):
    chat = chat_of(family)
    drawn = spoken(chat, Message("assistant", "", None, (ToolCall("look", {"x": 3}),)))
    policy = scripted(chat.tokenizer.decode(drawn), chat=chat)
    policy.engine._drawn = [list(drawn)]
    with ChatServer({"m": policy}) as server:
        choice = ask(server, tools=[LOOK])["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        [told] = choice["message"]["tool_calls"]
        assert (told["type"], told["function"]["name"], json.loads(told["function"]["arguments"])) == ("function", "look", {"x": 3})
        assert told["id"].startswith("call_")
        assert policy.engine.asked[0].prompt == chat.start([Message("user", "Where?")], [LOOK]).ids
        assert ask(server, tools=[LOOK])["choices"][0]["message"] == choice["message"]  # equal requests, equal replies
        other = ask(server, tools=[LOOK], seed=1)["choices"][0]["message"]["tool_calls"][0]
        assert other["id"] != told["id"]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_and_answers_in_a_history_are_rendered_as_the_template_says(family):
    chat = chat_of(family)
    policy = scripted(ended("I saw it.", family), family=family)
    with ChatServer({"m": policy}) as server:
        choice = ask(server, tools=[LOOK], messages=answered(call()))["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "I saw it."}, "stop")
    said = [Message("user", "Where?"), Message("assistant", "", None, (ToolCall("look", {"x": 3}),)), Message("tool", "saw c1")]
    assert policy.engine.asked[0].prompt == chat.encode_messages(said, [LOOK])


def test_tools_answers_stand_in_the_order_of_the_calls():
    policies = {name: scripted(ended("ok")) for name in "ab"}
    calls = call("c1"), call("c2", arguments='{"x": 4}')
    with ChatServer(policies) as server:
        for name, order in (("a", (0, 1)), ("b", (1, 0))):
            ask(server, model=name, tools=[LOOK], messages=answered(*calls, order=order))
    assert policies["a"].engine.asked[0].prompt == policies["b"].engine.asked[0].prompt


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("drawn", "choice", "text", "calls", "malformed"),
    [
        (ended(f"Look. {CALL}"), "auto", "Look.", 1, 0), (ended(CALL + CALL), "auto", "", 2, 0),
        (ended("No call."), "auto", "No call.", 0, 0),
        (ended(CALL), "none", CALL, 0, 0), (ended(CALL), "required", "", 1, 0),
        (ended('a <tool_call>{"name": 3}</tool_call>'), "auto", 'a <tool_call>{"name": 3}</tool_call>', 0, 1),
        (ended(f"{CALL}<tool_call>oh</tool_call>"), "auto", f"{CALL}<tool_call>oh</tool_call>", 0, 1),
        (ended("<tool_call>{"), "auto", "<tool_call>{", 0, 1), ("<tool_call>{", "auto", "<tool_call>{", 0, 1),
        (CALL, "auto", CALL, 0, 0),
    ],
)  # fmt: skip
def test_what_is_drawn_is_told_alike_streaming_and_not(drawn, choice, text, calls, malformed, size):
    with ChatServer({"m": scripted(drawn, size=size)}) as server:
        whole = ask(server, tools=[LOOK], tool_choice=choice)["choices"][0]
        found = [event["choices"][0] for event in events(server, tools=[LOOK], tool_choice=choice)]
        assert server.stats()["malformed_calls"] == 2 * malformed
    message = whole["message"]
    assert (message["content"] or "", len(message.get("tool_calls", ()))) == (text, calls)
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop" if drawn.endswith("<|im_end|>") else "length")
    assert "".join(one["delta"].get("content") or "" for one in found).rstrip() == text
    streamed = [one for event in found for one in event["delta"].get("tool_calls", ())]
    assert [one.pop("index") for one in streamed] == list(range(calls))
    assert streamed == message.get("tool_calls", [])
    assert [one["finish_reason"] for one in found] == [None] * (len(found) - 1) + [whole["finish_reason"]]
    assert found[0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize(
    ("drawn", "asked", "unmet"),
    [
        (ended("no"), {"tool_choice": "required"}, ["tool_choice"]), (ended(CALL), {"tool_choice": "required"}, None),
        (ended(CALL), {"tool_choice": {"type": "function", "function": {"name": "go"}}}, ["tool_choice"]),
        (ended(CALL), {"tool_choice": {"type": "function", "function": {"name": "look"}}}, None),
        (ended(CALL + CALL), {"parallel_tool_calls": False}, ["parallel_tool_calls"]),
        (ended(CALL.replace("look", "fly")), {}, ["tools"]), (ended(CALL), {"parallel_tool_calls": False}, None),
        (ended(CALL.replace("3", '"3"')), {"tools": [{"type": "function", "function": LOOK["function"] | {"strict": True}}]}, ["tools"]),
        (ended(CALL), {"tools": [{"type": "function", "function": LOOK["function"] | {"strict": True}}]}, None),
    ],
)  # fmt: skip
def test_what_a_model_does_not_keep_to_is_told_and_counted(drawn, asked, unmet):
    with ChatServer({"m": scripted(drawn)}) as server:
        choice = ask(server, **{"tools": [LOOK, OTHER]} | asked)["choices"][0]
        last = events(server, **{"tools": [LOOK, OTHER]} | asked)[-1]["choices"][0]
        assert server.stats()["unmet"] == (0 if unmet is None else 2)
    assert choice.get("unmet") == last.get("unmet") == unmet
    if unmet == ["parallel_tool_calls"]:
        assert len(choice["message"]["tool_calls"]) == 1


def test_a_recorded_call_keeps_the_ids_that_were_drawn(tmp_path):
    policy = scripted(ended(f"Look. {CALL}"))
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        told = ask(server, "/episodes/a/v1/chat/completions", tools=[LOOK])["choices"][0]["message"]
    line = json.loads((tmp_path / "plays.jsonl").read_text())
    assert (line["tools"], line["tool_calls"], line["finish_reason"], line["text"]) == ([LOOK], told["tool_calls"], "tool_calls", "Look.")
    assert policy.renderer.tokenizer.decode(line["ids"]) == ended(f"Look. {CALL}")


@pytest.mark.parametrize(("family", "why"), [("smollm2", "no way to announce tools"), ("gemma2", "no way to announce tools")])
def test_a_checkpoint_that_knows_no_tools_says_so_in_one_line(family, why):
    with ChatServer({"m": scripted(ended("x", family), family=family), "f": lambda *_: None}) as server:
        assert why in refusal(server, tools=[LOOK])
        assert "takes no tools" in refusal(server, model="f", tools=[LOOK])
        assert ask(server, tools=[], parallel_tool_calls=False)["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"tools": {}}, "tools must be a list"), ({"tools": [{}]}, "tools[0]: only functions"),
        ({"tools": [LOOK, LOOK]}, "'look' stands there twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name must"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "the parameters a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "more": 1}}]}, "tools[0].function.more is not served"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}, "tools[0].function.strict must"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"items": {"pattern": "a"}}}}]},
            "tools[0].function.parameters.items.pattern is not checked here",
        ),
        ({"tool_choice": "required"}, "tool_choice='required' needs tools"), ({"tool_choice": "any"}, "tool_choice must be one of"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "go"}}}, "tool_choice names 'go'"),
        ({"tools": [LOOK], "parallel_tool_calls": 1}, "parallel_tool_calls must"),
        ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "x"}]}, "messages[0].tool_call_id: no assistant's message"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id must name"),
        ({"messages": answered(call())[:2]}, "messages[1]: the call 'c1' has no answer"),
        ({"messages": [*answered(call())[:2], USER]}, "the call 'c1' has no answer"),
        ({"messages": [*answered(call()), ANSWER]}, "messages[3].tool_call_id: 'c1' has its answer"),
        ({"messages": [*answered(call())[:2], ANSWER | {"tool_call_id": "c2"}]}, "messages[2].tool_call_id: 'c2' is none"),
        ({"messages": answered(call(), call())}, "messages[1].tool_calls: two calls have one id"),
        ({"messages": answered(call(arguments="{"))}, "messages[1].tool_calls[0].function.arguments must be a JSON object"),
        ({"messages": answered(call(arguments="[1]"))}, "messages[1].tool_calls[0].function.arguments must be a JSON object"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [call("")]}]}, "messages[1].tool_calls[0]: the id must not be empty"),
        ({"messages": answered(call(name="x" * 1025))}, "messages[1].tool_calls[0]: the id must not be empty, and the name must have at"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0] must be a call"),
    ],
)  # fmt: skip
def test_malformed_tools_and_calls_are_refused_in_one_line_that_names_the_place(asked, why):
    policy = scripted(ended("x"))
    with ChatServer({"m": policy}) as server:
        assert why in refusal(server, **asked)
        assert post(server, {"model": "m", "prompt": "x", "tools": [LOOK]}, "/v1/completions")[0] == 400
    assert policy.engine.asked == []


def test_a_strange_schema_is_a_misfit_and_never_an_exception():
    deep = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    wide = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}, "$ref": "#/$defs/a"}
    for schema in (deep, wide, {"$ref": "#/nowhere"}, {"type": "strange"}, {"minimum": "1"}, {"required": 3}, {"properties": 3}):
        assert not fits({"a": 1} if "minimum" not in schema else 1, schema)
    person = {
        "type": "object", "required": ["name"], "additionalProperties": False,
        "properties": {"name": {"type": "string", "minLength": 1}, "age": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
                       "tags": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2, "uniqueItems": True}, "of": {"$ref": "#"}},
    }  # fmt: skip
    check_schema(person)
    good = [{"name": "x"}, {"name": "x", "age": None}, {"name": "x", "age": 3.0, "tags": ["a", 1]}, {"name": "x", "of": {"name": "y"}}]
    bad = [{}, [], {"name": ""}, {"name": 1}, {"name": "x", "more": 1}, {"name": "x", "age": -1}, {"name": "x", "age": True},
           {"name": "x", "tags": ["b"]}, {"name": "x", "tags": [True]}, {"name": "x", "tags": ["a", 1, "a"]},
           {"name": "x", "tags": ["a", "a"]},
           {"name": "x", "of": {}}]  # fmt: skip
    assert [fits(value, person) for value in (*good, *bad)] == [True] * len(good) + [False] * len(bad)
    for schema in ({"pattern": "a"}, {"properties": {"a": {"if": {}}}}, {"type": "str"}, {"anyOf": []}, {"enum": 3}, [], {"items": 3}):
        with pytest.raises(ValueError, match="schema"):
            check_schema(schema)


@pytest.mark.parametrize(
    ("family", "drawn"),
    [("llama3.2", '{"name": "Ann", "parameters": {"a": 1}}'), ("qwen2.5", f"So {CALL}"), ("mistral_nemo", "[TOOL_CALLS] is how")],
)
def test_where_no_tools_are_offered_nothing_is_a_call(family, drawn):
    with ChatServer({"m": scripted(ended(drawn, family), family=family)}) as server:
        message = ask(server)["choices"][0]["message"]
        deltas = [event["choices"][0]["delta"] for event in events(server)]
    assert message == {"role": "assistant", "content": drawn}
    assert [delta["content"] for delta in deltas if delta.get("content")] != [drawn]  # it was streamed in pieces
    assert "".join(delta.get("content") or "" for delta in deltas) == drawn


def test_a_schema_that_nobody_checks_may_say_anything():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "pattern": "a"}}}
    with ChatServer({"m": scripted(ended("x"))}) as server:
        for strict in ({}, {"strict": False}, {"strict": None}):
            assert ask(server, tools=[tool | {"function": tool["function"] | strict}])["choices"][0]["message"]["content"] == "x"


def test_a_call_that_is_only_thought_of_holds_no_stream_back():
    drawn = "<think>\nI might <tool_call>{}</tool_call>, or not.\n</think>\n\nThere is no need to look."
    with ChatServer({"m": scripted(ended(drawn, "qwen3"), family="qwen3", size=3)}) as server:
        pieces = [event["choices"][0]["delta"].get("content") for event in events(server, tools=[LOOK])]
    assert "".join(filter(None, pieces)) == "There is no need to look."
    assert len(list(filter(None, pieces))) > 3


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("think", ["", "<think>\nhm\n</think>\n\n"])
@pytest.mark.parametrize("argument", ["</think> hi", "<think> a </think> hi"])
@pytest.mark.parametrize(("behind", "text", "calls"), [("", "", 1), (" More </think> hi", "More </think> hi", 1), ("{", "", 0)])
def test_a_tag_in_a_calls_argument_is_no_end_of_a_thought_in_a_stream(behind, text, calls, think, argument, size):
    drawn = f'{think}<tool_call>\n{{"name": "look", "arguments": {{"x": "{argument}"}}}}\n</tool_call>{behind}'
    if not calls:
        drawn = text = drawn.replace("</tool_call>", "")  # cut off within the call
        text = drawn.removeprefix(think) if think else " hi\"}}\n{"
    chat = chat_of("qwen3", ByteTokenizer(("<|im_start|>", "<|im_end|>", "<think>", "</think>"), ("<|im_end|>",)))  # calls come in bytes
    with ChatServer({"m": scripted(ended(drawn, "qwen3"), chat=chat, size=size, max_tokens=800)}) as server:
        whole = ask(server, tools=[LOOK])["choices"][0]["message"]
        deltas = [event["choices"][0]["delta"] for event in events(server, tools=[LOOK])]
    assert (whole["content"] or "", len(whole.get("tool_calls", ()))) == (text, calls)
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == calls


@pytest.mark.parametrize("name", ["search the web", "", "a" * 200, "\N{SNOWMAN} <|im_end|>"])
def test_a_program_can_answer_the_call_of_a_tool_that_the_model_invented(name):
    drawn = f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{"x": "\\ud83d"}}}}</tool_call>'
    with ChatServer({"m": scripted(drawn, ended("Oh."))}) as server:
        server.models["m"].engine._drawn[0] = [*chat_of("qwen2.5").tokenizer.encode(drawn), *chat_of("qwen2.5").stop_ids[:1]]
        message = ask(server, tools=[LOOK])["choices"][0]["message"]
        [told] = message["tool_calls"]
        assert (told["function"]["name"], json.loads(told["function"]["arguments"])) == (name, {"x": "\ufffd"})
        history = [USER, message, {"role": "tool", "tool_call_id": told["id"], "content": "There is no such tool."}]
        assert ask(server, tools=[LOOK], messages=history)["choices"][0]["message"]["content"] == "Oh."


class StoppingEngine(ScriptedEngine):
    """Ends a reply behind the first stop text, as the engine does."""

    def submit(self, request, on_tokens=None):
        text = self.chat.tokenizer.decode(self._drawn[0])
        ends = [text.find(stop) + len(stop) for stop in request.stop_strings if stop in text]
        self._drawn = [self.chat.tokenizer.encode(text[: min(ends)])] if ends else self._drawn
        done = super().submit(request, on_tokens).result()
        done = dataclasses.replace(done, finish="stop") if ends else done
        return types.SimpleNamespace(result=lambda: done, cancel=lambda: None)


@pytest.mark.parametrize(
    ("drawn", "thinking", "stop", "text", "calls"),
    [
        ("<think>\nI look.\n</think>\n\nAction: look\nObservation: wall", "on", "Observation:", "Action: look\n", 0),
        (f"Look. {CALL}\n\nEND more", "off", "END", "Look.", 1),
        (f"Look. {CALL}\n\nmore", "off", "\n\n", "Look.", 1),  # which the prompt's own opening, an empty thought, has too
        ("<think>\nI look. Observation: wall", "on", "Observation:", "", 0),
        (f"Look. {CALL}", "off", '"x"', 'Look. <tool_call>\n{"name": "look", "arguments": {', 0),
        (f"END. {CALL}", "off", "END", "", 0),
    ],
)
def test_a_reply_that_ends_at_a_stop_text_is_whole(drawn, thinking, stop, text, calls):
    chat = chat_of("qwen3", options={"enable_thinking": thinking == "on"})

    def server():
        engine = StoppingEngine(chat, [drawn])
        engine.chat = chat
        return ChatServer({"m": policy_answers(engine, "m", chat, max_prompt=2000, max_tokens=400)})

    tools = [LOOK] if calls or "tool_call" in drawn else []
    with server() as served:
        choice = ask(served, tools=tools, stop=[stop])["choices"][0]
    assert (choice["message"]["content"] or "", len(choice["message"].get("tool_calls", ()))) == (text, calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    with server() as served:
        deltas = [event["choices"][0]["delta"] for event in events(served, tools=tools, stop=[stop])]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    with server() as served:
        tools = [{"name": "look", "input_schema": {}}] if tools else []
        body = {"model": "m", "messages": [USER], "max_tokens": 400, "stop_sequences": ["No.", stop], "tools": tools}
        status, _, said = post(served, body, "/v1/messages")
    answer = json.loads(said)
    expected = ("tool_use", None) if calls else ("stop_sequence", stop)
    assert (status, answer["stop_reason"], answer["stop_sequence"]) == (200, *expected)
