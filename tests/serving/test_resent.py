"""A request that is sent again has one reply in its episode, and one whose client left has none."""

import dataclasses
import http.client
import json
import threading
import time
import types

import pytest
from checkpoint_text import chat_of
from serving_lab import USER, ScriptedEngine, ended, post

from marl_llm.serving import ChatServer, policy_answers
from marl_llm.serving.episodes import EpisodeServer
from marl_llm.serving.resent import ClientLeft, Connection, DrawNumbers

PATH = "/episodes/a/v1/chat/completions"
AGAIN = {"X-Stainless-Retry-Count": "1"}
BODY = {"model": "m", "messages": [USER]}


class SlowEngine(ScriptedEngine):
    """Draws when it is told to.

    Attributes:
      go: set it, for all requests.
      alone: numbers of requests that may go before.
    """

    def __init__(self, texts):
        super().__init__(chat_of("qwen2.5"), [ended(text) for text in texts])
        self.go, self.alone = threading.Event(), []

    def submit(self, request, on_tokens=None):
        number, handle = len(self.asked), super().submit(request, on_tokens)

        def result():
            ends = time.monotonic() + 30
            while number not in self.alone and not self.go.wait(0.01):
                assert time.monotonic() < ends
            return handle.result()

        return types.SimpleNamespace(result=result, cancel=handle.cancel)


@pytest.fixture
def engine():
    return SlowEngine(["one", "two", "three", "four"])


@pytest.fixture
def served(engine, tmp_path):
    """A server that records, and a function for the texts of its record."""
    answers = policy_answers(engine, "m", chat_of("qwen2.5"), max_prompt=2000, max_tokens=400)
    path = tmp_path / "plays.jsonl"
    with ChatServer({"m": answers}, record=path) as server:
        yield server, lambda: [line.get("text", "paid") for line in map(json.loads, path.read_text().splitlines())]


def text_of(answer):
    status, _, said = answer
    assert status == 200, said
    return json.loads(said)["choices"][0]["message"]["content"]


def wait_until(condition, seconds=20):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.001)


def drop(server, path, body, engine):
    """Sends a request and hangs up before it is answered; returns when the server knows."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[2].split("/")[0]), timeout=30)
    asked, failed = len(engine.asked), server.stats()["failed"]
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: len(engine.asked) > asked)
    connection.close()
    engine.go.set()
    wait_until(lambda: server.stats()["failed"] > failed)


def test_a_reply_whose_client_has_left_is_not_recorded(served, engine):
    server, recorded = served
    drop(server, PATH, BODY, engine)
    assert recorded() == []
    assert text_of(post(server, BODY, PATH, **AGAIN)) == "two"
    assert recorded() == ["two"]
    counts = server.episode("a")
    assert (counts["replies"], counts["lineages"]) == (1, 1), "the dropped request is no conversation"


def test_a_request_that_is_sent_again_gets_the_reply_that_was_recorded(served, engine):
    server, recorded = served
    engine.go.set()
    assert text_of(post(server, BODY, PATH)) == "one"
    for _ in range(2):
        assert text_of(post(server, BODY, PATH, **AGAIN)) == "one"
    assert text_of(post(server, BODY, "/episodes/b/v1/chat/completions", **AGAIN)) == "two", "another episode's request is another"
    assert text_of(post(server, BODY, PATH)) == "three", "without the header it is a new request"
    assert text_of(post(server, BODY, PATH, **AGAIN)) == "three"
    assert text_of(post(server, BODY | {"max_tokens": 9}, PATH, **AGAIN)) == "four", "another body is another request"
    assert recorded() == ["one", "two", "three", "four"]


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_a_stream_is_told_again_whole(served, engine, kind):
    server, recorded = served
    engine.go.set()
    said = {"prompt": "x"} if kind == "completions" else {"messages": [USER]}
    path, body = f"/episodes/a/v1/{kind}", {"model": "m", "stream": True} | said
    first, again = (post(server, body, path, **more)[2].split(b"\n\n") for more in ({}, AGAIN))
    assert first[-2] == again[-2] == b"data: [DONE]"

    def told(found):
        choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in found[:-2]]
        return "".join(one.get("text", one.get("delta", {}).get("content", "")) for one in choices), choices[-1]["finish_reason"]

    assert told(first) == told(again)
    assert told(first)[0].startswith("one")
    assert len(recorded()) == 1


def test_outside_of_episodes_equal_requests_are_asked_of_the_model(served, engine):
    server, recorded = served
    engine.go.set()
    assert [text_of(post(server, BODY, **AGAIN)) for _ in range(2)] == ["one", "two"]
    assert recorded() == []


def test_a_dropped_request_changes_no_other_draw_of_its_episode(engine):
    answers = policy_answers(engine, "m", chat_of("qwen2.5"), max_prompt=2000, max_tokens=400)
    with EpisodeServer({"m": answers}) as server:
        addresses = [server.address(server.episodes.open((0, 7))) for _ in range(2)]
        paths = [f"/episodes/{one.split('/')[-2]}/v1/chat/completions" for one in addresses]
        drop(server, paths[0], BODY, engine)
        post(server, BODY, paths[0], **AGAIN)
        post(server, BODY, paths[0])
        for _ in range(2):
            post(server, BODY, paths[1])
    dropped, again, after, first, second = (request.seed for request in engine.asked)
    assert dropped == again == first
    assert after == second != first


def test_numbers_of_draws_follow_from_the_answered_requests():
    numbers = DrawNumbers()
    assert [numbers.take(False), numbers.take(False)] == [1, 2]
    numbers.settle(1, True)
    assert numbers.take(True) == 2, "the one that is under way"
    numbers.settle(2, False)
    assert numbers.take(False) == 3, "2 is still under way"
    numbers.settle(2, True)
    assert numbers.take(True) == 3
    numbers.settle(3, False)
    numbers.settle(3, False)
    assert numbers.take(True) == 3, "nothing is under way: the next one"


def test_a_caller_that_left_while_it_waited_is_not_asked_of_the_model(engine):
    answers = policy_answers(engine, "m", chat_of("qwen2.5"), max_prompt=2000, max_tokens=400)
    with EpisodeServer({"m": answers}) as server:
        name = server.episodes.open((0,))
        with pytest.raises(ClientLeft):
            server.answer(json.dumps(BODY).encode(), "chat/completions", name, None, Connection(lambda: True))
    assert engine.asked == []


def test_equal_requests_that_are_all_sent_again_keep_their_own_numbers():
    numbers = DrawNumbers()
    first = [numbers.take(False) for _ in range(3)]
    again = [numbers.take(True) for _ in range(3)]
    assert sorted(again) == first == [1, 2, 3]


def test_a_request_that_was_turned_away_is_drawn_when_it_is_sent_again(engine):
    answers = policy_answers(engine, "m", chat_of("qwen2.5"), max_prompt=2000, max_tokens=400)
    with EpisodeServer({"m": answers}, concurrency=1, queue=0) as server:
        name, texts = server.episodes.open((0, 7)), []
        path = f"/episodes/{name}/v1/chat/completions"
        thread = threading.Thread(target=lambda: texts.append(text_of(post(server, BODY, path))))
        thread.start()
        while not engine.asked:
            time.sleep(0.01)
        assert post(server, BODY, path)[0] == 429
        engine.go.set()
        thread.join()
        texts.append(text_of(post(server, BODY, path, **AGAIN)))
        texts.append(text_of(post(server, BODY, path, **AGAIN)))  # that answer was lost: it is given again
        assert texts == ["one", "two", "two"]
        assert [line["text"] for line in server.episodes.take(name, "unpaid").replies] == ["one", "two"]


def test_a_request_that_was_turned_away_has_a_draw_of_its_own_and_one_that_had_a_reply_keeps_it(engine):
    answers = policy_answers(engine, "m", chat_of("qwen2.5"), max_prompt=2000, max_tokens=400)
    with EpisodeServer({"m": answers}, concurrency=2, queue=0) as server:
        name, texts = server.episodes.open((0, 7)), []
        path = f"/episodes/{name}/v1/chat/completions"

        def begin(body, asked, **headers):
            thread = threading.Thread(target=lambda: texts.append(text_of(post(server, body, path, **headers))))
            thread.start()
            while len(engine.asked) < asked:
                time.sleep(0.01)
            return thread

        other = BODY | {"messages": [USER | {"content": "Else?"}]}
        threads = [begin(BODY, 1), begin(other, 2)]
        assert [post(server, BODY, path, **headers)[0] for headers in ({}, AGAIN, AGAIN)] == [429] * 3  # the same request
        engine.alone.append(1)
        threads.pop().join()
        threads.append(begin(BODY, 3, **AGAIN))  # while the first is under way
        assert engine.asked[0].seed != engine.asked[2].seed
        for number, thread in zip((0, 2), threads, strict=True):
            engine.alone.append(number)
            thread.join()
        assert text_of(post(server, BODY, path, **AGAIN)) == "three"  # whose answer was lost
        assert len(server.episodes.take(name, "unpaid").replies) == len(engine.asked) == 3


@pytest.mark.parametrize(("finish", "expected"), [("timeout", 500), ("cancelled", 500), ("length", 200)])
def test_a_reply_that_a_time_limit_cut_off_is_no_sample_of_an_episode(finish, expected):
    class LateEngine(ScriptedEngine):
        def submit(self, request, on_tokens=None):
            done = dataclasses.replace(super().submit(request, on_tokens).result(), finish=finish)
            return types.SimpleNamespace(result=lambda: done, cancel=lambda: None)

    chat = chat_of("qwen2.5")
    answers = policy_answers(LateEngine(chat, [ended("The answer is 4")]), "m", chat, max_prompt=2000, max_tokens=5)
    with EpisodeServer({"m": answers}) as server:
        name = server.episodes.open((0, 7))
        status, _, said = post(server, BODY, f"/episodes/{name}/v1/chat/completions")
        assert (status, len(server.episodes.take(name, "unpaid").replies)) == (expected, int(expected == 200))
        assert expected == 200 or "time limit" in json.loads(said)["error"]["message"]
    with ChatServer({"m": answers}) as server:  # nobody trains on it: what there is
        assert json.loads(post(server, BODY)[2])["choices"][0]["finish_reason"] == "length"


def test_top_log_probs_are_refused_where_replies_are_not_drawn_greedily(engine):
    engine.go.set()
    answers = policy_answers(engine, "m", chat_of("qwen2.5"), max_prompt=2000, max_tokens=400)
    body = BODY | {"temperature": 0, "logprobs": True}
    for temperature, top, expected in ((1.0, 1, 400), (0.0, 1, 200), (1.0, 0, 200)):
        with EpisodeServer({"m": answers}, temperature) as server:
            path = f"/episodes/{server.episodes.open((0, 7))}/v1/chat/completions"
            assert post(server, body | {"top_logprobs": top}, path)[0] == expected
