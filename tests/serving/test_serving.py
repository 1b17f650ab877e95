"""Our own server of chat completions: the same scores as in process, bounded, silent, and never surprised."""

import asyncio
import collections
import dataclasses
import http.client
import json
import pathlib
import re
import threading
import time
import types

import coach_lab as lab
import jax
import numpy as np
import pytest

from marl_llm.coaching import ChatCoach, coached, of_client
from marl_llm.models import init_params, make_model_config
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.sampling.requests import Completion, RequestError
from marl_llm.serving import ChatServer, local, policy_answers
from marl_llm.serving.certain import CertainText
from marl_llm.serving.completions import MAX_BODY, read_reward
from marl_llm.serving.resent import ClientLeft
from marl_llm.serving.server import EpisodeRefused, Record
from marl_llm.text import ByteTokenizer, Chat, JinjaTemplate, Message, train_pieces
from marl_llm.tools.chat import ChatClient, ChatReply, OpenAICompatible, Options, PolicyBackend
from marl_llm.workflows import PlainText
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.samples import sample_table

NEEDS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
QWEN3 = JinjaTemplate((pathlib.Path(__file__).parents[1] / "data/chat_templates/qwen3.jinja").read_text(encoding="utf-8"))


def post(server, body, path="/v1/chat/completions", method="POST", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[2].split("/")[0]), timeout=30)
    headers = {"Content-Type": "application/json"} | headers if method == "POST" else headers
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def streamed(server, body, path):
    """The events of a stream, which must end as a stream does."""
    status, headers, said = post(server, body | dict(stream=True), path)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    *events, done, rest = said.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def said_in(choice):
    return choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content", "")


def scoring(messages, options):
    """A model without a model: the score is a digit of what it reads."""
    return ChatReply(f"why\nSCORE: {len(messages[1]['content']) % 11}", "stop", 7, 5)


def test_an_endpoint_at_our_own_server_gives_the_same_scores_as_the_model_in_process(tmp_path, monkeypatch):
    config = make_model_config("nano", lab.SPEECH.tokenizer.vocab_size)
    params = init_params(config, jax.random.key(0))
    sizes = EngineConfig(max_num_seqs=4, prompt_tokens=64, response_tokens=8, decode_steps=2)
    messages = [{"role": "user", "content": "how good? "}]
    with Engine({"coach": (config, params)}, jax.random.key(1), sizes=sizes, tokenizers={"coach": lab.SPEECH.tokenizer}) as engine:
        answers = policy_answers(engine, "coach", lab.SPEECH, max_prompt=64, max_tokens=8)
        with ChatServer({"coach": answers}, record=tmp_path / "plays.jsonl") as server:
            with ChatClient(OpenAICompatible(server.url, "coach", None)) as there, ChatClient(PolicyBackend(answers)) as here:
                for temperature in (0.0, 1.0):
                    options = dict(max_tokens=6, temperature=temperature, seed=3)
                    said = [client.complete(messages, **options).outcome() for client in (there, here)]
                    assert said[0] == said[1]
                    assert said[0].completion_tokens <= 6
                assert there.complete(messages, max_tokens=9).outcome() == there.complete(messages, max_tokens=8).outcome()
            assert post(server, dict(model="coach", messages=[dict(role="user", content="x" * 65)]))[0] == 400
            for path, body in (("chat/completions", dict(messages=messages)), ("completions", dict(prompt="how good? "))):
                body |= dict(model="coach", max_tokens=7, seed=3)
                whole = json.loads(post(server, body, f"/v1/{path}")[2])
                events = streamed(server, body | dict(stream_options={"include_usage": True}), f"/v1/{path}")
                assert len(pieces := [said_in(event["choices"][0]) for event in events[:-1]]) > 3  # chunks of two tokens
                assert "".join(pieces) == said_in(whole["choices"][0])
                assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
                assert (events[-1]["choices"], events[-1]["usage"]) == ([], whole["usage"])
            text = said_in(whole["choices"][0])
            ends = body | dict(stop=text[2:4])
            until = json.loads(post(server, ends, "/v1/completions")[2])["choices"][0]["text"]
            assert until == text[: text.index(text[2:4])] == "".join(
                said_in(event["choices"][0]) for event in streamed(server, ends, "/v1/completions")
            )
            log_probs_are_those_of_the_record(server, messages, tmp_path / "plays.jsonl")
        assert answers(messages, Options(max_tokens=6, seed=1)) != answers(messages, Options(max_tokens=6, seed=2))
        drawn = answers(messages, Options(max_tokens=6, temperature=0.7))
        assert lab.SPEECH.tokenizer.decode(drawn.sampled["ids"]).startswith(drawn.text)
        assert drawn.sampled["prompt"] == lab.SPEECH.tokenizer.encode("how good? ")
        assert len(drawn.sampled["log_probs"]) == len(drawn.sampled["sampled_log_probs"]) == drawn.completion_tokens
        assert drawn.sampled["log_probs"] != drawn.sampled["sampled_log_probs"]
        assert answers("how good? ", Options(max_tokens=6, temperature=0.0)).text  # PlainText reads a message as it stands
        with monkeypatch.context() as patch:
            patch.setattr(type(lab.SPEECH.tokenizer), "encode", None)  # refused before it is encoded
            with pytest.raises(RequestError, match="has 2,049 characters, which do not fit in the 64 tokens"):
                answers("x" * 2049, Options(max_tokens=6))
        with pytest.raises(RequestError, match="the prompt has 0 tokens, 1 to 64 are served"):
            answers("", Options())


def log_probs_are_those_of_the_record(server, messages, file):
    """Streaming and not, of chats and completions: ids and log-probs of a reply are those that are written down, nothing encoded again."""
    bodies = {"chat/completions": dict(messages=messages, logprobs=True), "completions": dict(prompt="how good? ", logprobs=0)}
    for kind, body in bodies.items():
        body |= dict(model="coach", max_tokens=7, seed=3, temperature=0.7)
        whole = json.loads(post(server, body, f"/episodes/{kind[:4]}/v1/{kind}")[2])["choices"][0]
        ends = [event["choices"][0] for event in streamed(server, body, f"/episodes/{kind[:4]}/v1/{kind}")]
        assert [one["logprobs"] for one in ends[:-1]] == [None] * (len(ends) - 1)
        lines = [json.loads(line) for line in file.read_text().splitlines()][-2:]
        for told, line in zip((whole["logprobs"], ends[-1]["logprobs"]), lines):
            if kind == "completions":
                assert (told["ids"], told["token_logprobs"]) == (line["ids"], line["log_probs"])
                assert "".join(told["tokens"]).startswith(line["text"])
            else:
                assert [(one["id"], one["logprob"]) for one in told["content"]] == list(zip(line["ids"], line["log_probs"]))
                assert "".join(one["token"] for one in told["content"]).startswith(line["text"])
        plain = {key: value for key, value in body.items() if key != "logprobs"}
        assert json.loads(post(server, plain, f"/v1/{kind}")[2])["choices"][0]["logprobs"] is None
    for wrong in (
        dict(logprobs=1), dict(logprobs=True, top_logprobs=2, temperature=0), dict(logprobs="yes"), dict(logprobs=True, top_logprobs=1),
        dict(top_logprobs=1, temperature=0), dict(logprobs=True, top_logprobs=True, temperature=0),
    ):  # fmt: skip
        assert post(server, dict(model="coach", messages=messages) | wrong)[0] == 400
    for wrong in (dict(logprobs=5), dict(logprobs=True), dict(logprobs=1), dict(logprobs=2, temperature=0)):
        status, _, said = post(server, dict(model="coach", prompt="how good? ") | wrong, "/v1/completions")
        assert (status, b"logprobs must be 0" in said) == (400, True)
    greedy = dict(model="coach", max_tokens=3, temperature=0)
    chat = post(server, greedy | dict(messages=messages, logprobs=True, top_logprobs=1))[2]
    for one in json.loads(chat)["choices"][0]["logprobs"]["content"]:
        assert [(top["token"], top["logprob"]) for top in one["top_logprobs"]] == [(one["token"], one["logprob"])]
    told = json.loads(post(server, greedy | dict(prompt="how good? ", logprobs=1), "/v1/completions")[2])["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{token: value} for token, value in zip(told["tokens"], told["token_logprobs"], strict=True)]


@pytest.mark.parametrize(
    ("drawn", "stops", "certain"),
    [("one two", (), "one two"), ("one two", ("two",), "one "), ("one tw", ("two",), "one "), ("one t", ("xyz", "two"), "one "),
     ("one", ("x",), "one"), ("", ("x",), ""), ("one aa", ("aab",), "one "), ("one two", ("two!", "one two?", "x"), "")],
)  # fmt: skip
def test_what_may_become_a_stop_text_is_held_back(drawn, stops, certain):
    ids = lab.SPEECH.tokenizer.encode(drawn)
    for size in (1, 2, 100):
        text = CertainText(lab.SPEECH, None, stops)
        assert "".join(text.read(ids[at : at + size]) for at in range(0, len(ids), size)) == certain


class Dripping:
    """An engine without a model: it draws the ids of a text, a few at a time."""

    def __init__(self, ids, size, log_prob=0.0, finish="stop"):
        self.ids, self.size, self.log_prob, self.finish = ids, size, log_prob, finish

    def submit(self, request, on_tokens=None):
        for at in range(0, len(self.ids), self.size):
            if on_tokens is not None:
                on_tokens(np.asarray(self.ids[at : at + self.size]))
        if on_tokens is not None:
            on_tokens(None)
        value = np.full(len(self.ids), self.log_prob, np.float32)
        done = Completion(np.asarray(self.ids), value, value, value, self.finish, 4)
        return types.SimpleNamespace(result=lambda: done, cancel=lambda: None)


UNASKED_CALL = 'Look <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'  # text, where no tools are offered


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("mode", "drawn", "said"),
    [
        ("on", "<think>\nis 2 < 3?\n</think>\n\nYes: 2 < 3.<|im_end|>", "Yes: 2 < 3."),
        ("on", "No thought.<|im_end|>", "No thought."),
        ("on", "<think>\nnever ends", "<think>\nnever ends"),  # cut off: all that there is, at the end
        ("off", "Yes é.<|im_end|>", "Yes é."),
        ("off", f"{UNASKED_CALL}<|im_end|>", UNASKED_CALL),
        ("off", "a <b> c</b><|im_end|>", "a <b> c</b>"),
    ],
)
def test_a_chat_formats_thinking_is_no_part_of_a_stream(mode, drawn, said, size):
    tokenizer = ByteTokenizer(NEEDS, ("<|im_end|>",))
    chat, pieces = Chat(tokenizer, QWEN3, {"enable_thinking": mode == "on"}), []
    parts = re.split(f"({'|'.join(map(re.escape, NEEDS))})", drawn)
    ids = [i for part in parts for i in ([257 + NEEDS.index(part)] if part in NEEDS else tokenizer.encode(part))]
    finish = "stop" if drawn.endswith("<|im_end|>") else "length"
    answers = policy_answers(Dripping(ids, size, finish=finish), "m", chat, max_prompt=400)
    asked = [{"role": "user", "content": "Is it?"}]
    reply = answers.stream(asked, Options(), pieces.append)
    assert reply == answers(asked, Options())
    assert "".join(pieces) == reply.text == said
    assert all(pieces)
    early = mode == "off" or "</think>" in drawn  # elsewhere any beginning may still turn out to be thinking
    assert len(pieces) > 1 if early and size == 1 else pieces[0] == said if not early else pieces


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_a_stream_names_the_role_once_and_the_end_once(kind):
    policy = policy_answers(Dripping(list(b"hello"), 2), "m", lab.SPEECH, max_prompt=64)
    asked = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat/completions" else {"prompt": "x"}
    with ChatServer({"m": policy, "silent": lambda messages, options: ChatReply("", "stop")}) as server:
        events, silent = (streamed(server, asked | {"model": model}, f"/v1/{kind}") for model in ("m", "silent"))
    role = {"role": "assistant"}
    pieces = [said_in(event["choices"][0]) for event in events]
    assert len(pieces) == 4
    chat = [role | {"content": pieces[0]}, {"content": pieces[1]}, {"content": pieces[2]}, {}]
    said = [{"delta": delta} for delta in chat] if kind == "chat/completions" else [{"text": piece} for piece in pieces]
    rest = [{"index": 0, "finish_reason": finish, "logprobs": None} for finish in (None, None, None, "stop")]
    assert [event["choices"] for event in events] == [[one | two] for one, two in zip(said, rest)]
    name = "chat.completion.chunk" if kind == "chat/completions" else "text_completion"
    assert {(event["id"], event["object"], event["model"]) for event in events} == {(events[0]["id"], name, "m")}
    nothing = {"delta": role | {"content": ""}} if kind == "chat/completions" else {"text": ""}
    assert [event["choices"] for event in silent] == [[nothing | rest[-1]]]


@pytest.mark.parametrize(
    ("options", "budget", "temperature", "top_p", "stops"),
    [
        (Options(), 8, 1.0, 1.0, ()), (Options(max_tokens=3, temperature=0.0, stop=("a", "b")), 3, 0.0, 1.0, ("a", "b")),
        (Options(max_tokens=9, top_p=0.5, seed=4), 8, 1.0, 0.5, ()), (Options(max_tokens=8, temperature=0.5), 8, 0.5, 1.0, ()),
    ],
)  # fmt: skip
def test_the_engine_is_asked_for_what_the_options_say_and_the_reply_tells_it(options, budget, temperature, top_p, stops):
    engine, asked = Dripping(list(b"xyz"), 2), []
    drips = engine.submit
    engine.submit = lambda request, on_tokens=None: asked.append(request) or drips(request, on_tokens)
    for version in (None, 7):
        answers = policy_answers(engine, "m", lab.SPEECH, max_prompt=64, max_tokens=8, timeout_s=5.0, version=version)
        reply = answers([{"role": "user", "content": "x"}], options)
        drawn = reply.sampled
        assert (drawn["version"], drawn["temperature"], drawn["top_p"]) == (4 if version is None else 7, temperature, top_p)
        assert (drawn["prompt"], drawn["ids"]) == (list(asked[-1].prompt), list(b"xyz"))
        assert (reply.prompt_tokens, reply.completion_tokens, reply.finish_reason) == (len(asked[-1].prompt), 3, "stop")
    request = asked[0]
    assert (request.model, request.max_tokens, request.stop_strings, request.timeout) == ("m", budget, stops, 5.0)
    assert (request.settings.temperature, request.settings.top_p) == (temperature, top_p)
    assert request.stop_ids == tuple(lab.SPEECH.stop_ids)
    assert asked[1] == request
    answers([{"role": "user", "content": "x"}], dataclasses.replace(options, seed=5))
    answers([{"role": "user", "content": "y"}], options)
    assert len({one.seed for one in asked}) == 3


def test_a_prompt_of_just_the_lane_is_served_and_one_token_or_too_many_characters_are_refused():
    answers = policy_answers(Dripping(list(b"xyz"), 2), "m", lab.SPEECH, max_prompt=64)
    for size in (1, 64):
        assert answers("x" * size, Options()).prompt_tokens == size
    two = [{"role": "system", "content": "x" * 1024}, {"role": "user", "content": "x" * 1024}]
    longer = [two[0], {"role": "user", "content": "x" * 1025}]
    for asked, problem in (
        ("x" * 65, "the prompt has 65 tokens, 1 to 64 are served"), ("x" * 2048, "the prompt has 2048 tokens"),
        ("x" * 2049, "the prompt has 2,049 characters"), (two, "the prompt has 2049 tokens"), (longer, "the prompt has 2,049 characters"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=problem):
            answers(asked, Options())


def test_a_developers_message_is_a_systems_and_the_order_of_a_messages_fields_draws_nothing_else():
    chat, asked = Chat(ByteTokenizer(NEEDS, ("<|im_end|>",)), QWEN3, {"enable_thinking": False}), []
    engine = Dripping(list(b"xyz"), 2)
    drips = engine.submit
    engine.submit = lambda request, on_tokens=None: asked.append(request) or drips(request, on_tokens)
    answers = policy_answers(engine, "m", chat, max_prompt=400)
    for first in ({"role": "system", "content": "a"}, {"role": "developer", "content": "a"}, {"content": "a", "role": "system"}):
        answers([first, {"role": "user", "content": "x"}], Options())
    assert asked[0].prompt == asked[1].prompt
    assert asked[0] == asked[2]


@pytest.mark.parametrize(("finish", "told"), [("stop", "stop"), ("length", "length"), ("timeout", "length"), ("cancelled", "length")])
def test_only_a_reply_that_the_model_ended_says_stop(finish, told):
    engine = Dripping(list(b"xyz"), 2)
    drips = engine.submit

    def submit(request, on_tokens=None):
        handle = drips(request, on_tokens)
        return types.SimpleNamespace(result=lambda: dataclasses.replace(handle.result(), finish=finish), cancel=lambda: None)

    engine.submit = submit
    answers = policy_answers(engine, "m", lab.SPEECH, max_prompt=64)
    assert answers("x", Options()).finish_reason == answers.stream("x", Options(), [].append).finish_reason == told


@pytest.mark.parametrize("asked", ["x", [{"role": "user", "content": "x"}]], ids=["text", "chat"])
def test_a_replys_text_ends_before_its_stop_token_whose_id_is_told(asked):
    tokenizer = lab.SPEECH.tokenizer
    drawn = [*tokenizer.encode("yes"), lab.SPEECH.stop_ids[0]]
    answers = policy_answers(Dripping(drawn, 2), "m", lab.SPEECH, max_prompt=64)
    pieces = []
    for reply in (answers(asked, Options()), answers.stream(asked, Options(), pieces.append)):
        assert (reply.text, reply.sampled["ids"], reply.completion_tokens) == ("yes", drawn, 4)
    assert "".join(pieces) == "yes"


def test_words_that_the_vocabulary_lacks_are_refused_in_whatever_message_they_stand():
    tokenizer = train_pieces(("one", "two", "end"))
    renderer = PlainText(tokenizer, tuple(tokenizer.ids_of(("end",)).tolist()), "two")
    answers = policy_answers(Dripping([2, 3], 2), "m", renderer, max_prompt=64)
    messages = [{"role": "system", "content": "one"}, {"role": "user", "content": "two three"}, {"role": "user", "content": "four"}]
    for asked, lacks in ((messages, "2 of the words ('three', 'four')"), ("one three", "1 of the words ('three')")):
        with pytest.raises(RequestError, match=re.escape(lacks)):
            answers(asked, Options())
    assert answers(messages[:1], Options()).text == "one two"


def test_a_client_that_leaves_ends_its_request_and_counts_as_a_failure():
    """Once with what the engine draws, once with a function's whole reply."""
    engine, cancelled = Dripping(list(b"hello"), 2), []
    drips = engine.submit

    def submit(request, on_tokens=None):
        return types.SimpleNamespace(result=drips(request, on_tokens).result, cancel=lambda: cancelled.append(request.model))

    def leaves(event):
        raise ClientLeft

    engine.submit = submit
    with ChatServer({"m": policy_answers(engine, "m", lab.SPEECH, max_prompt=64), "f": drawing}) as server:
        for model in "mf":
            with pytest.raises(ClientLeft):
                server.answer(json.dumps({"model": model, "prompt": "x", "stream": True}).encode(), "completions", None, leaves)
        assert cancelled == ["m"]
        assert server.stats() == {"requests": 2, "refused": 0, "busy": 0, "failed": 2, "tokens": 0, "malformed_calls": 0, "unmet": 0}


def test_a_server_counts_the_tokens_of_its_replies_and_what_it_refuses(tmp_path):
    with ChatServer({"m": drawing}, queue=0, record=tmp_path / "plays.jsonl") as server:
        for prompt in ("one", "three"):
            assert post(server, {"model": "m", "prompt": prompt}, "/episodes/a/v1/completions")[0] == 200
        assert post(server, {"model": "m"}, "/v1/completions")[0] == 400
        assert post(server, {"reward": 1}, "/episodes/b/reward")[0] == 400
        counts = {"requests": 3, "refused": 2, "busy": 0, "failed": 0, "tokens": 8, "malformed_calls": 0, "unmet": 0}
        assert server.stats() == counts


def test_a_server_with_a_key_answers_those_who_bring_it():
    with ChatServer({"m": drawing}, key="s3cret") as server:
        body = {"model": "m", "prompt": "x"}
        assert post(server, body, "/v1/completions")[0] == 401
        assert post(server, body, "/v1/completions", Authorization="Bearer s3cret")[0] == 200


def test_an_episodes_name_has_at_most_128_characters(tmp_path):
    with ChatServer({"m": drawing}, record=tmp_path / "plays.jsonl") as server:
        for size, status in ((128, 200), (129, 404)):
            assert post(server, {"model": "m", "prompt": "x"}, f"/episodes/{'a' * size}/v1/completions")[0] == status
            assert post(server, {"reward": 1}, f"/episodes/{'a' * size}/reward")[0] == status


def test_a_record_that_is_closed_takes_neither_replies_nor_pay(tmp_path):
    record = Record(tmp_path / "plays.jsonl")
    record.keep("a", {"text": "x"})
    record.close()
    for ask in (lambda: record.check("a"), lambda: record.keep("a", {"text": "y"}), lambda: record.pay("a", {"reward": 1})):
        with pytest.raises(EpisodeRefused, match="this server has stopped"):
            ask()
    with ChatServer({"m": drawing}, record=tmp_path / "other.jsonl") as server:
        pass
    status, said = server.answer(b'{"model": "m", "prompt": "x"}', "completions", "a")
    assert (status, "has stopped" in said["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"temperature": 1e9}, "temperature is too large"), ({"top_p": -1e9}, "top_p is too large"), ({"top_p": 10**400}, "number"),
        ({"temperature": 9e8}, None), ({"max_tokens": 5, "max_completion_tokens": 0}, "at least 1"),
        ({"max_tokens": 0, "max_completion_tokens": 5}, "at least 1"), ({"messages": []}, "'messages' is not served"),
        ({"logprobs": 0, "temperature": 1}, "tells no logprobs"), ({"logprobs": 1, "temperature": 1}, "or 1 at temperature 0"),
    ],
    ids=str,
)  # fmt: skip
def test_each_bound_of_a_request_is_told_by_the_name_of_its_field(options, problem):
    with ChatServer({"m": drawing}) as server:
        status, said = server.answer(json.dumps({"model": "m", "prompt": "x"} | options).encode(), "completions")
    assert status == (200 if problem is None else 400)
    assert problem is None or problem in said["error"]["message"]


def test_messages_and_a_prompt_are_each_served_at_their_own_path_alone():
    with ChatServer({"m": drawing}) as server:
        messages = [{"role": "user", "content": "x"}]
        for kind, given, other in (("completions", {"prompt": "x"}, "messages"), ("chat/completions", {"messages": messages}, "prompt")):
            status, said = server.answer(json.dumps({"model": "m", other: "x"} | given).encode(), kind)
            assert (status, f"'{other}' is not served at /v1/{kind}" in said["error"]["message"]) == (400, True)
            _, said = server.answer(json.dumps({"model": "m"} | given).encode(), kind)
            assert said["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            assert (said["model"], said["choices"][0]["finish_reason"]) == ("m", "stop")
            events, stream = [], {"model": "m", "stream": True, "stream_options": {"include_usage": True}} | given
            assert server.answer(json.dumps(stream).encode(), kind, None, events.append) == (200, {})
            assert events[-1]["usage"] == said["usage"]


def test_each_of_several_prompts_gets_its_replies_in_their_order(tmp_path):
    def echo(prompt, options):
        return ChatReply(f"<{prompt}>", "stop", len(prompt), 1)

    with ChatServer({"m": echo}, record=tmp_path / "plays.jsonl") as server:
        body = {"model": "m", "prompt": ["a", "bc"], "n": 2}
        _, said = server.answer(json.dumps(body).encode(), "completions", "e")
        assert [(one["index"], one["text"]) for one in said["choices"]] == [(0, "<a>"), (1, "<a>"), (2, "<bc>"), (3, "<bc>")]
        assert said["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        sent = []
        server.answer(json.dumps(body | {"stream": True}).encode(), "completions", None, sent.append)
        pieces = [(one["choices"][0]["index"], one["choices"][0]["text"]) for one in sent if one["choices"][0]["text"]]
        assert pieces == [(0, "<a>"), (1, "<a>"), (2, "<bc>"), (3, "<bc>")]
        lines = list(map(json.loads, (tmp_path / "plays.jsonl").open()))
        assert [(line["number"], line["messages"]) for line in lines] == [(0, "a"), (1, "a"), (2, "bc"), (3, "bc")]
        for prompt, why in (([], "a list"), (["a", ""], "a list of texts"), ([1, 2], "takes no prompt as ids"), (["a"] * 33, "64 replies")):
            status, said = server.answer(json.dumps(body | {"prompt": prompt}).encode(), "completions")
            assert (status, why in said["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("paid", "taken"),
    [
        ({"reward": 0}, True), ({"rewards": {"m": 0.5}}, True), ({"reward": 9e14}, True), ({"reward": -9e14}, True),
        ({"reward": 1e30}, False), ({"rewards": {"m": -1e30}}, False), ({"rewards": {"m": True}}, False), ({"task": "t"}, False),
        ({"reward": 1, "task": ""}, True), ({"reward": None}, False), ({"reward": 1, "rewards": {"m": 1, "n": 1}}, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_reward_is_a_finite_number_for_the_team_or_for_models_that_are_served(paid, taken):
    body = json.dumps(paid).encode()
    if taken:
        assert read_reward(body, {"m": drawing}) == paid
        return
    with pytest.raises(ValueError, match="reward|there is no model"):
        read_reward(body, {"m": drawing})


class EngineStandIn:
    """Takes what an engine is made of, draws nothing, and is given parameters."""

    def __init__(self, models, key, sizes, tokenizers):
        self.models, self.sizes, self.tokenizers, self.renewed, self.closed = models, sizes, tokenizers, [], False

    def set_params(self, model, params):
        self.renewed.append((model, params))

    def close(self):
        self.closed = True


def test_a_local_model_is_made_with_every_size_and_names_its_replies_by_its_files_and_version(monkeypatch, tmp_path):
    made, opened, config = [], [], types.SimpleNamespace(max_position=2048)
    monkeypatch.setattr(local, "read_config", lambda path: config)
    monkeypatch.setattr(local, "load_pretrained", lambda path, stacked: (config, f"params of {path}"))
    monkeypatch.setattr(local, "is_large", lambda config, platform: False)
    monkeypatch.setattr(local, "load_chat", lambda path, options: opened.append((path, options)) or lab.SPEECH)
    monkeypatch.setattr(local, "Engine", lambda *given, **named: made.append(EngineStandIn(*given, **named)) or made[-1])
    (tmp_path / "model.bin").write_bytes(b"weights")
    path = str(tmp_path)
    with local.LocalModel(path, max_prompt=48, max_tokens=5, max_num_seqs=3, thinking="off") as model:
        sizes = made[0].sizes
        assert (sizes.max_num_seqs, sizes.prompt_tokens, sizes.response_tokens, sizes.admit) == (3, 48, 5, 3)
        assert (model.answers.max_prompt, model.answers.max_tokens) == (48, 5)
        assert (made[0].models, made[0].tokenizers) == ({"model": (config, f"params of {path}")}, {"model": lab.SPEECH.tokenizer})
        assert opened == [(path, {"enable_thinking": False})]
        by_path, by_files, digest = model.backend(), model.backend(content=True), local.digest_of(tmp_path)
        assert (by_path.identity, by_files.identity) == (f"policy:{path}", f"policy:{digest}")
        for version in (1, 2):  # of the files' name, not of the version before
            model.renew({"w": version}, version)
            assert (by_path.identity, by_files.identity) == (f"policy:{path}+{version}", f"policy:{digest}+{version}")
        assert made[0].renewed == [("model", {"w": 1}), ("model", {"w": 2})]
        with ChatClient(by_path) as client:
            failure = client.complete([{"role": "user", "content": "x" * 49}], max_tokens=1).failure
        assert (failure.kind.value, "1 to 48 are served" in failure.message) == ("refused", True)
    assert made[0].closed
    local.LocalModel(path, max_num_seqs=40, renderer=lab.SPEECH).close()
    assert (made[1].sizes.max_num_seqs, made[1].sizes.admit, len(opened)) == (40, 16, 1)
    for positions, max_tokens, prompt in ((2048, 1024, 1024), (2048, 48, 2000), (40_960, 1024, 8192), (9216, 1024, 8192), (100, 1024, 1)):
        config.max_position = positions
        local.LocalModel(path, max_tokens=max_tokens, renderer=lab.SPEECH).close()
        assert made[-1].sizes.prompt_tokens == prompt


def test_a_large_local_model_is_read_where_it_was_loaded(monkeypatch):
    """It says what a small one would; and new parameters are copied, for whoever gave them may go on training them."""
    config = make_model_config("micro", lab.SPEECH.tokenizer.vocab_size)
    layouts = {stacked: init_params(config, jax.random.key(0), stacked=stacked) for stacked in (False, True)}
    later = init_params(config, jax.random.key(1))
    monkeypatch.setattr(local, "read_config", lambda path: config)
    monkeypatch.setattr(local, "load_pretrained", lambda path, stacked: (config, layouts[stacked]))
    said = {}
    for large in (False, True):
        monkeypatch.setattr(local, "is_large", lambda config, platform, large=large: large)
        with local.LocalModel("a", max_prompt=48, max_tokens=8, max_num_seqs=2, renderer=lab.SPEECH) as model:
            replies = [model.answers([{"role": "user", "content": "hello"}], Options(temperature=0.0)).text]
            if large:
                served = model._engine._schedulers["model"].weights.params["base"]
                for x, y in zip(jax.tree.leaves(served), jax.tree.leaves(layouts[True]), strict=True):
                    assert x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()
            given = jax.tree.map(lambda x: x + 0, later)
            model.renew(given, 1)
            jax.tree.map(lambda x: x.delete(), given)
            replies.append(model.answers([{"role": "user", "content": "hello"}], Options(temperature=0.0)).text)
        said[large] = replies
    assert said[True] == said[False]
    assert said[True][0] != said[True][1]


def test_a_checkpoint_is_its_files_with_their_names_and_contents(tmp_path):
    digests = []
    for name, content in (("a", b"1"), ("b", b"1"), ("a", b"2")):
        folder = tmp_path / str(len(digests))
        (folder / "within").mkdir(parents=True)
        (folder / "within" / "note").write_text(str(len(digests)))  # a folder within is no part of it
        (folder / "z").write_bytes(b"same")
        (folder / name).write_bytes(content)
        digests.append(local.digest_of(folder))
    assert len(set(digests)) == 3
    (tmp_path / "0" / "within" / "note").write_text("other")
    assert local.digest_of(tmp_path / "0") == digests[0]


def drawing(messages, options):
    """A model without a model that says what it drew."""
    text = messages if isinstance(messages, str) else messages[-1]["content"]
    ids = list(text.encode())
    return ChatReply(text.upper(), "stop", 3, len(ids), sampled={"prompt": [1, 2, 3], "ids": ids, "log_probs": [-1.0] * len(ids)})


def test_replies_of_episodes_are_written_down_and_no_others(tmp_path):
    file = tmp_path / "plays.jsonl"

    def body(text):
        return dict(model="m", messages=[dict(role="user", content=text)])

    with ChatServer({"m": drawing}, record=file) as server:
        assert post(server, body("unseen"))[0] == 200
        for episode, text in (("a", "one"), ("b.2", "two"), ("a", "three")):
            assert post(server, body(text), f"/episodes/{episode}/v1/chat/completions")[0] == 200
        status, _, said = post(server, dict(model="m", prompt="four"), "/episodes/a/v1/completions")
        assert (status, json.loads(said)["object"], json.loads(said)["choices"][0]["text"]) == (200, "text_completion", "FOUR")
        assert post(server, body("x"), "/episodes/a%20b/v1/completions")[0] == 404
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["episode"], one["number"], bytes(one["ids"]).decode()) for one in lines] == [
        ("a", 0, "one"), ("b.2", 0, "two"), ("a", 1, "three"), ("a", 2, "four"),
    ]  # fmt: skip
    assert lines[1] == {
        "episode": "b.2", "number": 0, "model": "m", "messages": [{"role": "user", "content": "two"}], "text": "TWO",
        "finish_reason": "stop", "prompt": [1, 2, 3], "ids": [116, 119, 111], "log_probs": [-1.0] * 3,
    }  # fmt: skip
    asked = []
    with ChatServer({"m": lambda *said: asked.append(said) or drawing(*said)}) as server:
        status, _, said = post(server, body("x"), "/episodes/a/v1/chat/completions")
        assert (status, asked) == (400, [])
        assert b"--record=FILE" in said
        for wrong in (dict(model="m"), dict(model="m", prompt=["two", 2]), dict(model="m", prompt="")):
            assert post(server, wrong, "/v1/completions")[0] == 400


def test_a_play_is_paid_once_and_nothing_that_is_no_reward_is_written(tmp_path):
    file = tmp_path / "plays.jsonl"
    with ChatServer({"m": drawing}, record=file) as server:
        post(server, dict(model="m", prompt="one"), "/episodes/a/v1/completions")
        wrong = [{}, {"reward": True}, {"reward": "1"}, {"rewards": {"n": 1}}, {"rewards": [1]}, {"reward": 1, "task": 3},
                 {"reward": 1, "more": 2}, b'{"reward": NaN}', b'{"reward": 1e999}', b"[" * 10_000, b"\xff"]  # fmt: skip
        for body in wrong:
            assert post(server, body, "/episodes/a/reward")[0] == 400, body
        status, _, said = post(server, {"reward": 1}, "/episodes/b/reward")
        assert (status, b"no reply of episode 'b' was recorded here" in said) == (400, True)
        status, _, said = post(server, {"reward": 0.5, "rewards": {"m": -1}, "task": "t"}, "/episodes/a/reward")
        assert (status, json.loads(said)) == (200, {"episode": "a", "replies": 1})
        status, _, said = post(server, {"reward": 1}, "/episodes/a/reward")
        assert (status, b"has its reward already" in said) == (400, True)
    _, paid = map(json.loads, file.read_text().splitlines())
    assert paid == {"episode": "a", "reward": 0.5, "rewards": {"m": -1}, "task": "t"}
    with ChatServer({"m": drawing}) as server:
        assert post(server, {"reward": 1}, "/episodes/a/reward")[0] == 400


def test_no_reply_is_recorded_after_its_episode_was_paid(tmp_path):
    """Neither one that is asked for later, nor one that was under way when the pay came."""
    file, asked, paid = tmp_path / "plays.jsonl", threading.Event(), threading.Event()

    def slow(messages, options):
        if messages == "slow":
            asked.set()
            assert paid.wait(20)
        return drawing(messages, options)

    answers = []
    with ChatServer({"m": slow}, record=file) as server:
        def ask(text, **more):
            return post(server, dict(model="m", prompt=text, **more), "/episodes/a/v1/completions")

        assert ask("one")[0] == 200
        thread = threading.Thread(target=lambda: answers.append(ask("slow")))
        thread.start()
        assert asked.wait(20)
        assert post(server, {"rewards": {}}, "/episodes/a/reward")[0] == 400  # pays nobody
        assert post(server, {"reward": 1}, "/episodes/a/reward")[0] == 200
        paid.set()
        thread.join()
        answers += [ask("two"), ask("three", stream=True)]
        assert post(server, {"reward": 0}, "/episodes/a/reward")[0] == 400
    for status, _, said in answers:
        assert (status, b"has its reward already" in said) == (400, True)
    assert [json.loads(line).get("text", "pay") for line in file.read_text().splitlines()] == ["ONE", "pay"]
    with ChatServer({"m": slow}, record=file) as server:  # on the same file: the pay in it stays the first
        status, _, said = post(server, dict(model="m", prompt="one"), "/episodes/a/v1/completions")
        assert (status, b"IDs must be new" in said) == (400, True)
        assert post(server, {"reward": 0}, "/episodes/a/reward")[0] == 400
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["log_probs", "sampled_log_probs"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_reply_of_a_model_that_is_broken_is_an_error_and_is_not_recorded(name, value, tmp_path):
    def broken(messages, options):
        reply = drawing(messages, options)
        return dataclasses.replace(reply, sampled=dict(reply.sampled) | {name: [value]})

    policy = policy_answers(Dripping(list(b"hello"), 2, value if name == "log_probs" else 0.0), "m", lab.SPEECH, max_prompt=64)
    with ChatServer({"function": broken, "policy": policy}, record=tmp_path / "plays.jsonl") as server:
        for model in ("function", "policy") if name == "log_probs" else ("function",):
            for more in ({}, {"logprobs": 0}) if model == "policy" else ({},):
                status, _, said = post(server, dict(model=model, prompt="x") | more, "/episodes/a/v1/completions")
                assert (status, b"not finite" in said, b"NaN" in said.replace(b"hold NaN", b"")) == (500, True, False)
            status, _, said = post(server, dict(model=model, prompt="x", stream=True), "/episodes/a/v1/completions")
            *_, last, _ = said.split(b"\n\n") if status == 200 else (said, b"")
            assert b"not finite" in last
            assert b"[DONE]" not in said
    assert (tmp_path / "plays.jsonl").read_text() == ""


def test_the_text_that_is_certain_is_read_in_linear_time():
    class Counting(ByteTokenizer):
        def decode(self, ids):
            counted.append(len(ids))
            return super().decode(ids)

    work = []
    for size in (1000, 8000):
        for text in ("word " * (size // 5), " " * size, "<" * size, "é" * (size // 2), "<tool_call>" + "x" * size):
            counted: list[int] = []
            tokenizer = Counting(NEEDS, ("<|im_end|>",))
            ids, chat = tokenizer.encode(text), Chat(tokenizer, QWEN3, {"enable_thinking": False})
            counted.clear()
            certain = CertainText(chat, chat.start([Message("user", "x")]), ("a stop text",))
            assert text.startswith("".join(certain.read(ids[at : at + 16]) for at in range(0, size, 16)))
            work.append((size, sum(counted) / len(ids)))
    assert max(per_id for _, per_id in work) < 8  # ids decoded per id of the reply; 8,000 / 32 where each chunk decodes all


TAKEN = [
    {"presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tool_choice": "none", "user": "me"},
    {"parallel_tool_calls": True, "logit_bias": {}, "n": 1, "store": False, "metadata": {"run": "a"}, "stream_options": None, "seed": 3},
    {"max_completion_tokens": 5, "tools": None, "top_logprobs": None, "service_tier": "auto", "modalities": ["text"], "logprobs": False},
    {"parallel_tool_calls": False, "tool_choice": "auto", "stop": [], "repetition_penalty": 1.0, "best_of": 1},
    {"reasoning_effort": "low", "top_p": 1, "store": True, "stream_options": {"include_usage": True}},
]  # fmt: skip
REFUSED = [
    ("presence_penalty", 0.1), ("frequency_penalty", -1), ("response_format", {"type": "xml"}), ("tool_choice", "required"),
    ("tool_choice", {"type": "function"}), ("parallel_tool_calls", "no"), ("logit_bias", {"50256": -100}), ("n", 0), ("n", True),
    ("n", "1"), ("tools", [{"type": "function"}]), ("functions", []), ("modalities", ["audio"]), ("echo", True), ("suffix", "x"),
    ("echo", 0), ("presence_penalty", False), ("reasoning_effort", "utmost"), ("max_tokens", 0),
    ("max_completion_tokens", "7"), ("max_tokens", 1.5), ("stop", ""), ("stop", ["a", ""]), ("stop", {}), ("top_p", "1"), ("stream", 1),
]  # fmt: skip


@pytest.mark.parametrize("more", TAKEN, ids=str)
def test_what_programs_send_by_habit_and_has_no_effect_is_taken(more):
    with ChatServer({"m": drawing}) as server:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        plain, sent = (json.loads(post(server, body | extra)[2])["choices"] for extra in ({}, more))
        assert sent == plain


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, Options()), ({"max_tokens": 7, "max_completion_tokens": 5}, Options(max_tokens=5)),
        ({"max_tokens": 5, "max_completion_tokens": 7}, Options(max_tokens=5)), ({"max_tokens": 1}, Options(max_tokens=1)),
        ({"max_completion_tokens": 7, "seed": 0}, Options(max_tokens=7, seed=0)), ({"temperature": 0}, Options(temperature=0.0)),
        ({"top_p": 0.5, "stop": "end", "seed": 3}, Options(top_p=0.5, stop=("end",), seed=3)),
        ({"stop": ["b", "a"], "temperature": 1.5, "top_p": 1}, Options(temperature=1.5, top_p=1.0, stop=("b", "a"))),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_gets_the_options_that_a_request_names_and_no_others(asked, options):
    heard = []
    with ChatServer({"m": lambda messages, options: heard.append(options) or drawing(messages, options)}) as server:
        for kind, body in (("chat/completions", {"messages": [{"role": "user", "content": "x"}]}), ("completions", {"prompt": "x"})):
            assert post(server, body | {"model": "m"} | asked, f"/v1/{kind}")[0] == 200
    assert heard == [options, options]


def test_more_tokens_than_a_role_may_reply_with_are_cut_or_refused_as_its_owner_chose():
    capped = policy_answers(Dripping(list(b"hello"), 2), "m", lab.SPEECH, max_prompt=64, max_tokens=5)
    with ChatServer({"capped": capped, "strict": dataclasses.replace(capped, over_budget="refuse")}) as server:
        def ask(model, **more):
            body = {"model": model, "messages": [{"role": "user", "content": "x"}]} | more
            status, _, said = post(server, body)
            return status, json.loads(said).get("error", {}).get("message", "")

        assert [ask(model, max_tokens=5)[0] for model in ("capped", "strict")] == [200, 200]
        assert ask("strict")[0] == ask("capped", max_completion_tokens=6)[0] == 200
        for name in ("max_tokens", "max_completion_tokens"):
            status, reason = ask("strict", **{name: 6})
            assert (status, "max_tokens=6, but a reply of 'm' has at most 5" in reason, "\n" in reason) == (400, True, False)
    with pytest.raises(ValueError, match="over_budget='drop' must be one of cap, refuse"):
        dataclasses.replace(capped, over_budget="drop")


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=str)
def test_what_would_have_an_effect_is_refused_by_name(name, value):
    with ChatServer({"m": drawing}) as server:
        for kind, body in (("chat/completions", {"messages": [{"role": "user", "content": "x"}]}), ("completions", {"prompt": "x"})):
            status, _, said = post(server, body | {"model": "m", name: value}, f"/v1/{kind}")
            assert (status, name in json.loads(said)["error"]["message"].replace("max_tokens must", f"{name} must")) == (400, True)


def test_a_message_may_come_in_parts_and_an_assistants_may_be_empty():
    heard = []
    with ChatServer({"m": lambda messages, options: heard.append(messages) or drawing(messages, options)}) as server:
        def ask(*messages):
            return post(server, {"model": "m", "messages": list(messages)})

        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        empty = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": [], "name": ""}
        assert ask({"role": "system", "content": parts}, empty, {"role": "assistant"}, {"role": "user", "content": "x"})[0] == 200
        assert list(heard[0]) == [
            {"role": "system", "content": "one two"}, {"role": "assistant", "content": ""}, {"role": "assistant", "content": ""},
            {"role": "user", "content": "x"},
        ]  # fmt: skip
        for message, why in (
            ({"content": None}, "content"), ({}, "content"), ({"content": []}, "empty list"),
            ({"content": [{"type": "text"}]}, "content[0]"),
            ({"content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}, "content[2]: parts like"),
            ({"content": [{"type": "text", "text": 3}]}, "content[0]"), ({"content": ["x"]}, "content[0]"), ({"content": 3}, "content"),
            ({"content": "x", "name": "me"}, "'name' is not served"), ({"content": "x", "tool_calls": [{}]}, "'tool_calls' is not served"),
            ({"content": [{"type": "text", "text": "x", "cache_control": {}}]}, "content[0]"),
        ):  # fmt: skip
            status, _, said = ask({"role": "user"} | message)
            assert (status, why in json.loads(said)["error"]["message"]) == (400, True), message
    assert len(heard) == 1


def test_a_coached_rollout_by_endpoint_is_paid_as_in_process():
    guide, pays = lab.guide(), []
    with ChatServer({"m": scoring}) as server:
        for backend in (OpenAICompatible(server.url, "m", None), PolicyBackend(scoring)):
            with ChatClient(backend) as client:
                workflow = coached(lab.team(), ChatCoach(of_client(client), guide), guide)
                pays.append([row.local for row in sample_table(lab.play(workflow, n=4)).samples])
    assert pays[0] == pays[1]
    assert len(set(pays[0])) > 1


def test_many_plays_at_once_lose_no_score_double_none_and_never_pass_the_cap():
    asked = collections.Counter()
    lock = threading.Lock()

    def counting(messages, options):
        with lock:
            asked[messages[1]["content"]] += 1
        time.sleep(0.001)
        return scoring(messages, options)

    guide = lab.guide()
    with ChatServer({"m": counting}, concurrency=16, queue=64) as server:
        backend = OpenAICompatible(server.url, "m", None)
        with ChatClient(backend, concurrency=64, backoff_s=0.05) as client:
            rollout = lab.play(coached(lab.team(), ChatCoach(of_client(client), guide), guide), n=24)
            counts = client.metrics()
    table = sample_table(rollout)
    assert len(table) == sum(asked.values()) == counts["chat/calls"] == 72
    assert set(asked.values()) == {1}
    assert all("coach" in row.components for row in table.samples)
    with ChatServer({"m": scoring}) as server:
        with ChatClient(OpenAICompatible(server.url, "m", None), cap_usd=0.02, prices=(1.0, 100.0), concurrency=8) as client:
            coach = ChatCoach(of_client(client, max_tokens=50), guide)
            try:
                rollout = lab.play(coached(lab.team(), coach, guide), n=24, attempts=1)
                kinds = {failure.kind for episode in rollout.episodes for failure in episode.failures}
            except RolloutError as error:  # which three calls come first decides whether any play is whole
                kinds = {re.search("node 'scorer coach': (\\w+)", str(error))[1]}
            spent = client.metrics()["chat/usd"]
    assert kinds == {"budget"}
    assert 0 < spent <= 0.02


def test_sixty_four_calls_are_in_the_server_at_once_and_never_one_more():
    """Nobody is answered before 64 are there: what the client may have under way is what the server sees."""
    changed, inside, seen = threading.Condition(), [0, 0], []

    def waiting(messages, options):
        with changed:
            inside[0] += 1
            inside[1] = max(inside)
            changed.notify_all()
            changed.wait_for(lambda: inside[1] >= 64, 60)
            seen.append(messages[1]["content"])
            inside[0] -= 1
        return scoring(messages, options)

    guide = lab.guide()
    with ChatServer({"m": waiting}, concurrency=128) as server:
        with ChatClient(OpenAICompatible(server.url, "m", None), concurrency=64) as client:
            rollout = lab.play(coached(lab.team(), ChatCoach(of_client(client), guide), guide), n=30)
    assert inside == [0, 64]
    assert len(seen) == len(set(seen)) == 90
    assert all("coach" in row.components for row in sample_table(rollout).samples)


def test_a_full_queue_turns_clients_away_with_a_pause_and_nothing_is_lost():
    gate = threading.Event()

    def slow(messages, options):
        gate.wait(20)
        return scoring([{}, {"content": ""}], options)

    body = dict(model="m", messages=[dict(role="user", content="x")])
    with ChatServer({"m": slow}, concurrency=1, queue=1) as server:
        found = []
        threads = [threading.Thread(target=lambda: found.append(post(server, body)[0])) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            if server.stats()["requests"] == 2:
                break
            time.sleep(0.01)
        status, headers, _ = post(server, body)
        gate.set()
        for thread in threads:
            thread.join()
    assert (status, headers["Retry-After"], found) == (429, "1", [200, 200])


def test_two_hundred_clients_at_once_streaming_and_not_each_get_their_own_reply_once():
    asked, lock = collections.Counter(), threading.Lock()

    def counting(messages, options):
        with lock:
            asked[messages[0]["content"]] += 1
        return drawing(messages, options)

    got = {}
    with ChatServer({"m": counting}, concurrency=16, queue=200) as server:

        def ask(number):
            body = dict(model="m", messages=[dict(role="user", content=f"client {number}")])
            if number % 2:
                got[number] = "".join(said_in(event["choices"][0]) for event in streamed(server, body, "/v1/chat/completions"))
            else:
                got[number] = said_in(json.loads(post(server, body)[2])["choices"][0])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (server.stats()["requests"], server.stats()["busy"]) == (200, 0)
    assert got == {number: f"CLIENT {number}" for number in range(200)}
    assert set(asked.values()) == {1}


BAD = [
    b"", b"{", b"[]", b"\xff\xfe", b'{"model": "m"}', {"model": "n", "messages": []}, {"model": "m", "messages": []},
    {"model": "m", "messages": [{"role": "user"}]}, {"model": "m", "messages": [{"role": "user", "content": "x", "more": 1}]},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{}]},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 65},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": "7"},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": [3]},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": True}, b"[" * 100_000,
    {"model": ["m"], "messages": [{"role": "user", "content": "x"}]}, {"model": "m", "messages": [{"role": ["user"], "content": "x"}]},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": "yes"},
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": True},  # a function tells none
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": []},
]  # fmt: skip


def test_what_cannot_be_served_is_refused_with_a_reason_and_a_model_that_fails_says_no_text(capfd):
    def broken(messages, options):
        raise RuntimeError(messages[0]["content"])

    with ChatServer({"m": scoring, "broken": broken}) as server:
        for body in BAD:
            status, _, said = post(server, body)
            assert status == 400
            assert json.loads(said)["error"]["message"]
        status, _, said = post(server, {"model": "broken", "messages": [{"role": "user", "content": "a secret"}]})
        assert (status, b"secret" in said) == (500, False)
        assert post(server, b"x", **{"Content-Length": str(MAX_BODY + 1)})[0] == 413
        assert post(server, b"{}", "/v2")[0] == post(server, None, "/", "GET")[0] == 404
        assert json.loads(post(server, None, "/v1/models", "GET")[2])["data"] == [dict(id=n, object="model") for n in ("m", "broken")]
        streamed = {"model": "m", "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "x"}], "stream": True}
        status, headers, said = post(server, streamed)
        assert (status, headers["Content-Type"], said.endswith(b"data: [DONE]\n\n")) == (200, "text/event-stream", True)
        assert "SCORE: 1" in json.loads(said.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]["delta"]["content"]
        assert (server.stats()["refused"], server.stats()["failed"]) == (len(BAD), 1)
    assert "secret" not in "".join(capfd.readouterr())
    for build in (lambda: ChatServer({}), lambda: ChatServer({"m": scoring}, concurrency=0)):
        with pytest.raises(ValueError, match="at least"):
            build()


def test_a_server_that_is_gone_is_unavailable_not_a_score():
    with ChatServer({"m": scoring}) as server:
        url = server.url
    with ChatClient(OpenAICompatible(url, "m", None), attempts=1) as client:
        result = asyncio.run(ChatCoach(of_client(client), lab.guide()).score(_view()))
    assert result.failure.kind.value == "unavailable"


def _view():
    seen = []

    class Keeper:
        async def score(self, view):
            seen.append(view)
            return await ChatCoach(_says, lab.guide()).score(view)

    async def _says(view, messages):
        from marl_llm.tools.results import success

        return success(ChatReply("SCORE: 5"), 0.0)

    lab.play(coached(lab.team(), Keeper()))
    return seen[0]
