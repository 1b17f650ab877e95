"""Asking a retriever: what a server and a client pass on, their exact bounds, and which failure is told of whom."""

import asyncio
import json
import types
import urllib.error
import urllib.request

import pytest

from marl_llm.tools import FailureKind, Hit, RetrieverClient, _chat_backends, build_bm25
from marl_llm.tools._http import HttpError, HttpReply
from marl_llm.tools.results import failed, success
from marl_llm.tools.retriever import RetrieverServer, client, open_index, open_server, server
from marl_llm.tools.retriever.interface import MAX_TOPK, LocalRetriever

URL = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path):
    build_bm25([{"id": str(n), "contents": f"planet number{n}"} for n in range(20)], tmp_path / "index", stopwords=None)
    return tmp_path / "index"


class RetrieverStandIn(LocalRetriever):
    """Keeps what it is asked and gives one answer."""

    def __init__(self, answer):
        self.answer, self.asked, self.passages = answer, [], range(7)

    def search(self, queries, topk=5, deadline_s=30.0):
        self.asked.append((queries, topk, deadline_s))
        return self.answer


def post(service, body, path="/retrieve", **headers):
    request = urllib.request.Request(service.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_server_passes_on_queries_hits_and_its_deadline():
    stand_in = RetrieverStandIn(success([[Hit({"contents": "a"}, 2.0)]], 0.0))
    with RetrieverServer(stand_in, topk=7, deadline_s=4.5) as service:
        for more, path, topk in (
            ({}, "/retrieve", 7), ({"topk": None}, "/retrieve/", 7), ({"topk": 1}, "/retrieve", 1), ({"topk": MAX_TOPK}, "/retrieve", 1000),
        ):  # fmt: skip
            assert post(service, {"queries": ["a"]} | more, path) == (200, {"result": [[{"contents": "a"}]]})
            assert stand_in.asked[-1] == (["a"], topk, 4.5)
        scored = {"result": [[{"document": {"contents": "a"}, "score": 2.0}]]}
        assert post(service, {"queries": ["a"], "return_scores": True}) == (200, scored)
        assert post(service, {"queries": ["a"], "return_scores": False})[1] != scored
        for topk in (0, MAX_TOPK + 1):
            assert post(service, {"queries": ["a"], "topk": topk})[0] == 400


@pytest.mark.parametrize("kind", FailureKind)
def test_a_search_that_is_late_is_503_and_any_other_failure_500(kind):
    with RetrieverServer(RetrieverStandIn(failed(kind, "the reason", 0.0))) as service:
        status, said = post(service, {"queries": ["a"]})
    assert (status, "the reason" in json.dumps(said)) == (503 if kind is FailureKind.DEADLINE else 500, True)


def test_as_many_queries_as_are_served_are_served_and_one_more_is_refused(monkeypatch):
    monkeypatch.setattr(server, "MAX_QUERIES", 2)
    assert server.read_request(b'{"queries": ["a", "b"]}', 3) == (["a", "b"], 3, False)
    with pytest.raises(ValueError, match="3 queries in one request; at most 2"):
        server.read_request(b'{"queries": ["a", "b", "c"]}', 3)


def test_two_servers_share_a_port_only_if_both_say_so():
    stand_in = RetrieverStandIn(success([[]], 0.0))
    with RetrieverServer(stand_in, share_port=True) as service:
        with RetrieverServer(stand_in, port=service.port, share_port=True) as second:
            assert second.port == service.port
        with pytest.raises(ValueError, match=f"port {service.port} cannot be used"):
            RetrieverServer(stand_in, port=service.port)
    with RetrieverServer(stand_in, key="s3cret") as service:
        assert post(service, {"queries": ["a"]})[0] == 401
        assert post(service, {"queries": ["a"]}, Authorization="Bearer s3cret")[0] == 200


def test_an_encoder_is_refused_where_it_would_have_no_effect(folder):
    with pytest.raises(ValueError, match="is a BM25 index: an encoder would have no effect"):
        open_index(folder, "test_retriever:encode")
    assert len(open_index(folder)) == 20


class WireStandIn:
    """In place of the network and of time: gives its answers in turn, each after `took` seconds, and notes what it is asked."""

    def __init__(self, monkeypatch, answers, took=0.0):
        self.answers, self.took, self.now, self.asked, self.slept = list(answers), took, 100.0, [], []
        monkeypatch.setattr(_chat_backends, "post_json", self.post)
        monkeypatch.setattr(client, "time", types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def post(self, url, payload, timeout_s, headers):
        self.asked.append((url, payload, timeout_s, headers))
        self.now += self.took
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return HttpReply(answer[0], {}, answer[1])


def hits_of(count):
    return json.dumps({"result": [[{"document": {"contents": str(n)}, "score": n} for n in range(count)]]}).encode()


@pytest.mark.parametrize("form", ["search", "asearch"])
def test_both_forms_of_a_clients_search_are_checked_and_pass_on_what_is_asked(form, monkeypatch):
    wire = WireStandIn(monkeypatch, [(200, hits_of(2))])
    asker = RetrieverClient(URL + "/")

    def ask(*given):
        return asker.search(*given) if form == "search" else asyncio.run(asker.asearch(*given))

    for wrong in (("a", 2), (["a"], 0), (["a"], 1001), (["x" * 16_385], 2)):
        with pytest.raises((TypeError, ValueError)):
            ask(*wrong)
    found = ask(["a"], 2, 3.0)
    assert [hit.score for hit in found.outcome()[0]] == [0.0, 1.0]
    assert wire.asked == [(URL + "/retrieve", {"queries": ["a"], "topk": 2, "return_scores": True}, 3.0, None)]
    asker.close()


@pytest.mark.parametrize("given", [URL, URL + "/", URL + "/retrieve", URL + "/retrieve/"])
def test_a_clients_address_may_have_its_path_already(given):
    asker = RetrieverClient(given, attempts=1)
    assert asker.url.rstrip("/") == URL + "/retrieve"
    asker.close()
    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        RetrieverClient(given, attempts=0)


@pytest.mark.parametrize(("count", "kind"), [(0, None), (2, None), (3, FailureKind.BAD_REPLY)])
def test_a_list_has_at_most_as_many_hits_as_were_asked_for(count, kind, monkeypatch):
    WireStandIn(monkeypatch, [(200, hits_of(count))])
    asker = RetrieverClient(URL, attempts=1)
    found = asker.search(["a"], 2)
    assert (found.failure and found.failure.kind) == kind
    asker.close()


def test_attempts_share_one_deadline_and_pause_twice_as_long_each_time(monkeypatch):
    wire = WireStandIn(monkeypatch, [(500, b"busy")] * 3, took=1.0)
    asker = RetrieverClient(URL, attempts=3)
    found = asker.search(["a"], 2, 10.0)
    assert (found.failure.kind, found.attempts, found.failure.message) == (FailureKind.UNAVAILABLE, 3, f"{URL}/retrieve: status 500: busy")
    assert [timeout_s for _, _, timeout_s, _ in wire.asked] == pytest.approx([10.0, 8.95, 7.85])
    assert [seconds for seconds in wire.slept if seconds] == pytest.approx([0.05, 0.1])
    assert found.seconds == pytest.approx(3.15)
    wire.answers, wire.asked = [(500, b"busy")] * 3, []
    found = asker.search(["a"], 2, 1.02)  # the pause ends with the deadline, behind which nothing is asked
    assert (len(wire.asked), found.attempts) == (1, 1)
    assert found.seconds == pytest.approx(1.02)
    found = asker.search(["a"], 2, 0.0)
    assert (found.failure.kind, found.attempts, len(wire.asked)) == (FailureKind.DEADLINE, 1, 1)
    asker.close()


@pytest.mark.parametrize(
    ("answer", "kind", "attempts"),
    [
        ((400, b"no s3cret"), FailureKind.REFUSED, 1), ((499, b"s3cret"), FailureKind.REFUSED, 1), ((408, b""), FailureKind.UNAVAILABLE, 2),
        ((429, b""), FailureKind.RATE_LIMITED, 2), ((500, b"s3cret"), FailureKind.UNAVAILABLE, 2), ((302, b""), FailureKind.REFUSED, 1),
        (HttpError(FailureKind.UNAVAILABLE, "lost s3cret", True), FailureKind.UNAVAILABLE, 2), ((200, b"{"), FailureKind.BAD_REPLY, 2),
        (HttpError(FailureKind.DEADLINE, "late", True), FailureKind.DEADLINE, 2),
    ],
    ids=str,
)  # fmt: skip
def test_which_answers_are_asked_again_and_no_message_holds_the_key(answer, kind, attempts, monkeypatch):
    monkeypatch.setenv("MARL_LLM_RETRIEVER_KEY", "s3cret")
    wire = WireStandIn(monkeypatch, [answer] * 9)
    asker = open_server(URL, attempts=2)
    found = asker.search(["a"], 2)
    assert (found.failure.kind, found.attempts, len(wire.asked)) == (kind, attempts, attempts)
    assert "s3cret" not in found.failure.message
    assert wire.asked[0][3] == {"Authorization": "Bearer s3cret"}
    asker.close()


def test_hits_hold_no_key_and_one_that_is_gone_is_named(monkeypatch):
    monkeypatch.setenv("MARL_LLM_RETRIEVER_KEY", "s3cret")
    wire = WireStandIn(monkeypatch, [(200, hits_of(1).replace(b'"0"', b'"you: s3cret"'))])
    asker = open_server(URL, attempts=2)
    (hit,) = asker.search(["a"], 2).outcome()[0]
    assert hit.document == {"contents": "you: [key]"}
    monkeypatch.delenv("MARL_LLM_RETRIEVER_KEY")
    failure = asker.search(["a"], 2).failure
    assert (failure.kind, len(wire.asked)) == (FailureKind.REFUSED, 1)
    assert "the environment variable MARL_LLM_RETRIEVER_KEY holds no key" in failure.message
    asker.close()
