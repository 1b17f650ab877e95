"""The chat client against a real server that misbehaves on purpose."""

import asyncio
import datetime
import email.utils
import logging
import subprocess
import sys
import threading
import time

import pytest
from misbehaving_server import MisbehavingServer, completion

from marl_llm.tools import ChatClient, FailureKind, OpenAICompatible, PolicyBackend
from marl_llm.tools._chat_backends import read_reply, retry_after_s
from marl_llm.tools._chat_store import ChatStore
from marl_llm.tools._http import HttpError, post_json
from marl_llm.tools.chat import ChatReply, ChatRequest, Options, Pace, content_key

KEY = "sk-very-secret-0123456789"
HELLO = [{"role": "user", "content": "hello"}]
PRICES = (1.0, 2.0)  # USD per million tokens


@pytest.fixture(autouse=True)
def key_in_environment(monkeypatch):
    monkeypatch.setenv("TEST_CHAT_KEY", KEY)


def make(server: MisbehavingServer, **settings) -> ChatClient:
    backend = OpenAICompatible(server.url, "test-model", key_env="TEST_CHAT_KEY")
    return ChatClient(backend, **dict(backoff_s=0.01, deadline_s=20.0) | settings)


def test_a_reply_with_usage():
    with MisbehavingServer() as server, make(server) as client:
        result = client.complete(HELLO, max_tokens=5, temperature=0.5, stop=("\n",))
        assert result.outcome() == ChatReply("HELLO", "stop", 7, 3)
        assert result.attempts == 1
        seen = server.seen[0]
        assert seen["path"] == "/v1/chat/completions"
        assert seen["body"] == dict(model="test-model", messages=HELLO, max_tokens=5, temperature=0.5, stop=["\n"])
        assert seen["headers"]["Authorization"] == f"Bearer {KEY}"
        metrics = client.metrics()
        assert metrics["chat/prompt_tokens"] == 7
        assert metrics["chat/completion_tokens"] == 3
        assert metrics["chat/calls"] == metrics["chat/attempts"] == 1


@pytest.mark.parametrize(
    "behaviour",
    [500, 502, 503, 408, 429, (429, {"Retry-After": "0.05"}, b""), "drop", "short_json", "truncated", (200, {}, b'{"choices": []}')],
    ids=lambda behaviour: behaviour[0] if isinstance(behaviour, tuple) else str(behaviour),
)
def test_passing_trouble_is_tried_again(behaviour):
    with MisbehavingServer(behaviour, behaviour) as server, make(server) as client:
        result = client.complete(HELLO)
        assert result.outcome().text == "HELLO"
        assert result.attempts == 3
        assert client.metrics()["chat/retries"] == 2


@pytest.mark.parametrize("behaviour", ["drip_body", "drip_headers"])
def test_a_drip_cannot_hold_an_attempt_longer_than_its_time(behaviour):
    """Each byte comes well within any socket timeout; only a limit on the whole attempt ends it."""
    with MisbehavingServer(behaviour) as server, make(server, attempt_s=0.3) as client:
        result = client.complete(HELLO)
        assert result.outcome().text == "HELLO"
        assert result.attempts == 2


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (500, FailureKind.UNAVAILABLE),
        ("drop", FailureKind.UNAVAILABLE),
        ("truncated", FailureKind.UNAVAILABLE),
        (429, FailureKind.RATE_LIMITED),
        ("short_json", FailureKind.BAD_REPLY),
    ],
)
def test_lasting_trouble_is_a_failure_and_never_a_reply(behaviour, kind):
    with MisbehavingServer(*[behaviour] * 3) as server, make(server, attempts=3) as client:
        result = client.complete(HELLO)
        assert result.value is None
        assert result.failure.kind == kind
        assert result.failure.retriable
        assert len(server.seen) == result.attempts == 3
        assert client.metrics()[f"chat/failed_{kind.value}"] == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 301])
def test_a_refusal_is_not_repeated(status):
    with MisbehavingServer(status) as server, make(server) as client:
        result = client.complete(HELLO)
        assert result.failure.kind == FailureKind.REFUSED
        assert not result.failure.retriable
        assert len(server.seen) == 1


def test_an_empty_account_is_not_asked_again():
    with MisbehavingServer((429, {}, b'{"error": {"code": "insufficient_quota"}}')) as server, make(server) as client:
        assert client.complete(HELLO).failure.kind == FailureKind.BUDGET
        assert len(server.seen) == 1


def test_nobody_listens():
    with MisbehavingServer() as server:
        url = server.url
    with ChatClient(OpenAICompatible(url, "m", key_env=None), attempts=2, backoff_s=0.01) as client:
        assert client.complete(HELLO).failure.kind == FailureKind.UNAVAILABLE


def test_the_deadline_covers_all_attempts():
    with MisbehavingServer(*["drip_body"] * 50) as server, make(server, deadline_s=0.8, attempt_s=0.25, attempts=50) as client:
        result = client.complete(HELLO)
        assert result.failure.kind == FailureKind.DEADLINE
        assert 1 <= len(server.seen) <= 5


def test_a_deadline_that_passes_between_two_attempts_is_no_rate_limit(monkeypatch):
    with MisbehavingServer(*["drip_body"] * 50) as server, make(server, deadline_s=0.8, attempt_s=0.25, attempts=50) as client:
        wait = client._pace.wait

        def late(tokens, deadline):  # a machine that has no time for this thread
            time.sleep(0.4)
            return wait(tokens, deadline)

        monkeypatch.setattr(client._pace, "wait", late)
        result = client.complete(HELLO)
    assert result.failure.kind == FailureKind.DEADLINE
    assert "0.8 s are over" in result.failure.message
    assert result.attempts == 1


def test_a_pause_longer_than_the_deadline_fails_at_once():
    with MisbehavingServer((429, {"Retry-After": "3600"}, b"")) as server, make(server, deadline_s=5.0) as client:
        result = client.complete(HELLO)
        assert result.failure.kind == FailureKind.RATE_LIMITED
        assert result.attempts == len(server.seen) == 1


def test_retry_after_holds_back_other_calls_too():
    with MisbehavingServer((429, {"Retry-After": "0.4"}, b"")) as server, make(server, attempts=1) as client:
        assert client.complete(HELLO).failure.kind == FailureKind.RATE_LIMITED
        assert client.complete(HELLO).ok
        assert server.seen[1]["at"] - server.seen[0]["at"] >= 0.39


def test_retry_after_forms():
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
    assert retry_after_s("2.5") == 2.5
    assert retry_after_s("-3") == 0.0
    assert 90 < retry_after_s(email.utils.format_datetime(later, usegmt=True)) <= 100
    assert retry_after_s("soon") is None
    assert retry_after_s(None) is None


def test_concurrency_is_bounded_and_used():
    requests = [ChatRequest(({"role": "user", "content": str(n)},)) for n in range(9)]
    with MisbehavingServer(*["slow"] * 9, together=3) as server, make(server, concurrency=3) as client:
        assert [result.outcome().text for result in client.complete_batch(requests)] == [str(n) for n in range(9)]
        assert server.most_under_way == 3


def test_rate_limits_spread_attempts():
    requests = [ChatRequest(({"role": "user", "content": str(n)},)) for n in range(4)]
    with MisbehavingServer() as server, make(server, requests_per_minute=60 / 0.15) as client:
        client.complete_batch(requests)
        times = sorted(seen["at"] for seen in server.seen)
        assert times[-1] - times[0] >= 3 * 0.15 / 2


def test_token_limit_and_a_turn_after_the_deadline():
    pace = Pace(None, tokens_per_minute=600.0)
    now = time.monotonic()
    assert pace.wait(100, now + 1.0)
    assert not pace.wait(1, now + 1.0)  # 100 tokens are 10 s of this budget
    assert now + 10.0 <= pace._next_token < now + 20.0


def test_of_several_pauses_the_longest_holds_and_each_limit_holds_apart():
    pace = Pace(None, None)
    now = time.monotonic()
    for seconds in (1.0, 300.0, 2.0):
        pace.pause(seconds)
    assert not pace.wait(1, now + 300.0)
    both = Pace(requests_per_minute=6.0, tokens_per_minute=600.0)  # a request is 10 s, and so are 100 tokens
    assert both.wait(1, now + 300.0)
    assert now + 10.0 <= both._next_request < now + 20.0
    assert both._next_token < now + 10.0
    assert not both.wait(1, now + 9.0)


def test_the_cache_is_by_content_and_survives(tmp_path):
    path = tmp_path / "chat.sqlite"
    with MisbehavingServer() as server:
        with make(server, cache=path) as client:
            first = client.complete(HELLO, temperature=1.0)
            assert not first.outcome().cached
            assert client.complete(HELLO, temperature=1.0).outcome().cached
            assert not client.complete(HELLO, temperature=0.9).outcome().cached
            assert not client.complete(HELLO, temperature=1.0, draw=1).outcome().cached
            assert client.metrics()["chat/cache_hits"] == 1
        with make(server, cache=path) as client:
            again = client.complete(HELLO, temperature=1.0)
            assert (again.outcome().text, again.outcome().cached, again.attempts) == ("HELLO", True, 0)
        other = ChatClient(OpenAICompatible(server.url, "another-model", key_env=None), cache=path)
        assert not other.complete(HELLO, temperature=1.0).outcome().cached
        other.close()
        assert len(server.seen) == 4
    assert KEY.encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_whatever_a_reply_depends_on_parts_the_cache_and_the_bodys_other_fields_are_sent(tmp_path):
    url = "http://127.0.0.1:1/v1"
    backends = [
        OpenAICompatible(url, "m", None), OpenAICompatible(url, "n", None), OpenAICompatible(url[:-1] + "2", "m", None),
        *(OpenAICompatible(url, "m", None, extra=extra) for extra in ({"effort": "low"}, {"effort": "high"}, {"top_k": 5})),
    ]  # fmt: skip
    options = [dict(max_tokens=5), dict(temperature=0.5), dict(top_p=0.5), dict(stop=("a",)), dict(stop=("a", "b")), dict(seed=5)]
    said = [HELLO, [*HELLO, *HELLO], [{"role": "system", "content": "hello"}], [{"role": "user", "content": "hello "}]]
    requests = [ChatRequest(tuple(messages)) for messages in said] + [ChatRequest(tuple(HELLO), Options(**one)) for one in options]
    requests.append(ChatRequest(tuple(HELLO), draw=1))
    keys = {content_key(backend.identity, request) for backend in backends for request in requests}
    assert len(keys) == len(backends) * len(requests)
    again = OpenAICompatible(url, "m", None, extra={"top_k": 5})
    assert content_key(again.identity, ChatRequest(tuple(HELLO))) in keys
    with MisbehavingServer() as server:
        for extra in ({"effort": "low"}, {"effort": "high", "top_k": 5}):
            with ChatClient(OpenAICompatible(server.url, "m", None, extra=extra), cache=tmp_path / "c") as client:
                assert not client.complete(HELLO).outcome().cached
        assert [seen["body"] for seen in server.seen] == [
            dict(model="m", messages=HELLO, effort="low"), dict(model="m", messages=HELLO, effort="high", top_k=5)
        ]  # fmt: skip


@pytest.mark.parametrize("name", [None, "new/folder/chat.sqlite"])
def test_a_store_keeps_the_first_reply_and_sets_aside_up_to_the_cap_and_no_more(tmp_path, name):
    store = ChatStore(name and tmp_path / name)
    assert store.reply("a") is None
    for reply in ("one", "two"):
        store.keep("a", reply)
    store.keep("b", "three")
    assert (store.reply("a"), store.reply("b")) == ("one", "three")
    first, second = store.reserve(0.5, 1.0), store.reserve(0.5, 1.0)  # to the cap itself
    assert (store.reserve(0.25, 1.0), store.spent()) == (None, 1.0)
    store.settle(first, 0.25)
    assert (store.spent(), store.reserve(0.5, 1.0)) == (0.75, None)
    assert store.reserve(0.25, 1.0) not in (None, first, second)
    assert store.reserve(9.0, None) is not None
    assert store.spent() == 10.0
    store.close()


def test_failures_are_not_cached(tmp_path):
    with MisbehavingServer(500) as server, make(server, cache=tmp_path / "c", attempts=1) as client:
        assert not client.complete(HELLO).ok
        assert client.complete(HELLO).outcome().text == "HELLO"


def test_equal_requests_at_the_same_time_are_paid_once():
    with MisbehavingServer("slow") as server, make(server, concurrency=4) as client:
        results = client.complete_batch([ChatRequest(tuple(HELLO))] * 4)
        assert [result.outcome().text for result in results] == ["HELLO"] * 4
        assert len(server.seen) == 1


def test_the_cap_is_never_passed_and_outlives_the_client(tmp_path):
    """HELLO is bounded by 5 bytes + 16 = 21 tokens and 1000 of reply: 2021e-6 USD; it costs 7 + 2 · 3 = 13e-6."""
    settings = dict(prices=PRICES, cap_usd=2040e-6, cache=tmp_path / "c")
    with MisbehavingServer() as server:
        with make(server, **settings) as client:
            assert client.complete(HELLO, max_tokens=1000, draw=0).ok
            assert client.complete(HELLO, max_tokens=1000, draw=1).ok  # 13 + 2021 <= 2040
            assert client.metrics()["chat/usd"] == pytest.approx(26e-6)
            refused = client.complete(HELLO, max_tokens=1000, draw=2)  # 26 + 2021 > 2040
            assert refused.failure.kind == FailureKind.BUDGET
            assert client.complete(HELLO, max_tokens=1000, draw=0).outcome().cached
        with make(server, **settings) as client:
            assert client.complete(HELLO, max_tokens=1000, draw=3).failure.kind == FailureKind.BUDGET
            assert client.complete(HELLO, max_tokens=900, draw=3).ok
        assert len(server.seen) == 3


def test_calls_under_way_count_against_the_cap():
    requests = [ChatRequest(({"role": "user", "content": str(n)},), Options(max_tokens=1000)) for n in range(4)]
    with MisbehavingServer(*["slow"] * 4) as server, make(server, concurrency=4, prices=PRICES, cap_usd=4100e-6) as client:
        results = client.complete_batch(requests)
        assert sorted(result.ok for result in results) == [False, False, True, True]
        assert len(server.seen) == 2


@pytest.mark.parametrize(("behaviour", "charged"), [("short_json", True), ("truncated", True), ("drop", True), (500, False), (429, False)])
def test_what_may_have_been_billed_is_counted(behaviour, charged):
    with MisbehavingServer(behaviour) as server, make(server, prices=PRICES, attempts=1) as client:
        assert not client.complete(HELLO, max_tokens=1000).ok
        assert client.metrics()["chat/usd"] == pytest.approx(2021e-6 if charged else 0.0)


def test_a_reply_without_usage_costs_its_bound():
    body = completion("hi").replace(b"prompt_tokens", b"other")
    with MisbehavingServer((200, {}, body)) as server, make(server, prices=PRICES) as client:
        assert client.complete(HELLO, max_tokens=1000).outcome().prompt_tokens is None
        assert client.metrics()["chat/usd"] == pytest.approx(2021e-6)
        assert client.metrics()["chat/uncounted_replies"] == 1


@pytest.mark.parametrize("settings", [dict(cap_usd=1.0), dict(attempts=0), dict(deadline_s=0.0), dict(concurrency=0)])
def test_settings_that_contradict_are_refused(settings):
    with pytest.raises(ValueError, match="must|needs"):
        ChatClient(OpenAICompatible("http://127.0.0.1:1/v1", "m", key_env=None), **settings)


def test_malformed_requests_are_refused_before_they_cost():
    with ChatClient(OpenAICompatible("http://127.0.0.1:1/v1", "m", key_env=None), cap_usd=1.0, prices=PRICES) as client:
        for messages in ([], [{"role": "robot", "content": "x"}], [{"role": "user"}]):
            with pytest.raises(ValueError, match="message"):
                client.complete(messages, max_tokens=1)
        with pytest.raises(ValueError, match="needs max_tokens"):
            client.complete(HELLO)


def test_the_key_is_shown_nowhere(caplog, capfd, monkeypatch):
    caplog.set_level(logging.DEBUG)
    echo = f'{{"error": "invalid key {KEY}"}}'.encode()
    with MisbehavingServer((401, {}, echo), (500, {}, echo), (200, {}, echo)) as server, make(server, attempts=1) as client:
        shown = [repr(client.complete(HELLO)) for _ in range(3)]
        assert "[key]" in shown[0]
        assert "[key]" in shown[1]
        shown += [repr(client), repr(vars(client)), repr(vars(client._backend)), str(client.metrics())]
    shown += [caplog.text, *capfd.readouterr()]
    assert not [text for text in shown if KEY in text]


@pytest.mark.parametrize("key", ["", "  ", "two words", "line\nbreak", "é"])
def test_an_unusable_key_is_refused_without_showing_it(monkeypatch, key):
    monkeypatch.setenv("TEST_CHAT_KEY", key)
    with pytest.raises(ValueError, match="TEST_CHAT_KEY") as caught:
        OpenAICompatible("https://example.org/v1", "m", key_env="TEST_CHAT_KEY")
    assert not key.strip() or key not in str(caught.value)


def test_a_key_does_not_travel_in_the_clear():
    with pytest.raises(ValueError, match="unencrypted"):
        OpenAICompatible("http://example.org/v1", "m", key_env="TEST_CHAT_KEY")
    OpenAICompatible("http://example.org/v1", "m", key_env="TEST_CHAT_KEY", allow_plain_http=True)
    OpenAICompatible("http://example.org/v1", "m", key_env=None)
    with pytest.raises(ValueError, match="user or a password"):
        OpenAICompatible("https://me:secret@example.org/v1", "m", key_env=None)


def test_a_redirect_does_not_take_the_key_along():
    with MisbehavingServer() as other, MisbehavingServer((307, {"Location": other.url}, b"")) as server, make(server) as client:
        assert client.complete(HELLO).failure.kind == FailureKind.REFUSED
        assert not other.seen


def test_asyncio_does_not_block_the_loop():
    async def ask(client):
        ticks, done = 0, asyncio.Event()

        async def tick():
            nonlocal ticks
            while not done.is_set():
                ticks += 1
                await asyncio.sleep(0.005)

        ticking = asyncio.create_task(tick())
        results = await client.acomplete_batch([ChatRequest(({"role": "user", "content": str(n)},)) for n in range(3)])
        one = await client.acomplete(HELLO)
        done.set()
        await ticking
        return [result.outcome().text for result in [*results, one]], ticks

    with MisbehavingServer("slow", "slow", "slow", "slow") as server, make(server, concurrency=2) as client:
        texts, ticks = asyncio.run(ask(client))
    assert texts == ["0", "1", "2", "HELLO"]
    assert ticks > 3


def test_a_policy_of_our_own():
    calls = []

    def policy(messages, options):
        calls.append(options)
        return ChatReply(messages[-1]["content"][::-1], "stop", 5, options.max_tokens)

    with ChatClient(PolicyBackend(policy), prices=PRICES, cap_usd=1.0) as client:
        assert client.complete(HELLO, max_tokens=5).outcome() == ChatReply("olleh", "stop", 5, 5)
        assert client.complete(HELLO, max_tokens=5).ok
        assert len(calls) == 2  # in training a policy changes, so nothing is cached
        assert client.metrics()["chat/usd"] == pytest.approx(30e-6)
    with ChatClient(PolicyBackend(policy, version="step-7")) as client:
        assert not client.complete(HELLO, max_tokens=5).outcome().cached
        assert client.complete(HELLO, max_tokens=5).outcome().cached
    with pytest.raises(ValueError, match="no effect"):
        ChatClient(PolicyBackend(policy), cache="never-made.sqlite")


def test_a_policy_that_is_late_or_broken():
    release = threading.Event()

    def late(messages, options):
        release.wait(0.05)
        return ChatReply("too late")

    def broken(messages, options):
        raise ZeroDivisionError("a fault of this program")

    with ChatClient(PolicyBackend(late), attempt_s=0.01, attempts=2, backoff_s=0.0) as client:
        assert client.complete(HELLO).failure.kind == FailureKind.DEADLINE
    with ChatClient(PolicyBackend(broken)) as client, pytest.raises(ZeroDivisionError):
        client.complete(HELLO)


def test_replies_that_say_nothing_are_outcomes():
    assert read_reply(completion("x").replace(b'"x"', b"null")).text == ""
    assert read_reply(completion("x", finish_reason="length")).finish_reason == "length"
    for body in (b"", b"[]", b"{}", b'{"choices": [{}]}', b'{"choices": [{"message": {"content": 3}}]}', b"\xff\xfe"):
        with pytest.raises(ValueError, match="answer"):
            read_reply(body)


def test_an_answer_without_end_is_cut(monkeypatch):
    monkeypatch.setattr("marl_llm.tools._http.MAX_BODY", 1000)
    with MisbehavingServer((200, {}, b"x" * 5000)) as server, pytest.raises(HttpError, match="larger than") as caught:
        post_json(server.url, dict(messages=HELLO), 10.0)
    assert caught.value.kind == FailureKind.BAD_REPLY


def test_importing_the_tools_is_cheap():
    code = "import sys, marl_llm.tools; marl_llm.tools.ChatClient; marl_llm.tools.MathsChecker; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "numpy", "bm25s", "math_verify", "sympy", "pyarrow"} & set(loaded)


# ---- whatever a server says (A8, C14)

DATES = ["Fri, 01 Jan 1000000 00:00:00 GMT", "Mon, 99 Foo 2020 99:99:99 +9999", "1 Jan 9999 00:00:00 -2359", "nan", "1e400"]
DATES += ["x" * 10_000, "", ",", "\ud800"]


@pytest.mark.parametrize("header", DATES, ids=lambda header: header[:30])
def test_a8_any_retry_after_is_a_pause_or_none(header):
    assert (retry_after_s(header) or 0.0) >= 0.0
    with MisbehavingServer((429, {"Retry-After": header.encode("ascii", "replace").decode()}, b"")) as server, make(server) as client:
        assert client.complete(HELLO).ok or len(server.seen) == 1


@pytest.mark.parametrize("prompt", [-(10**9), 10**9, 10**290, True, 1.5, "7", None, 22], ids=str)
@pytest.mark.parametrize("reply", [-1, 3, 1001], ids=str)
def test_a8_bad_usage_counts_as_the_requests_own_bound(prompt, reply):
    """HELLO is bounded by 21 tokens and 1000 of reply: 2021e-6 USD."""
    body = completion("hi", prompt, reply)
    with MisbehavingServer((200, {}, body)) as server, make(server, prices=PRICES, cap_usd=0.003) as client:
        result = client.complete(HELLO, max_tokens=1000)
        assert (result.outcome().text, result.outcome().prompt_tokens, result.outcome().completion_tokens) == ("hi", None, None)
        assert client.metrics()["chat/usd"] == pytest.approx(2021e-6)
        assert client.metrics()["chat/uncounted_replies"] == 1
        assert client.metrics()["chat/prompt_tokens"] == 0
        assert client.complete(HELLO, draw=1, max_tokens=1000).failure.kind == FailureKind.BUDGET


BAD_BODIES = {
    "deep": b'{"choices":' + b"[" * 100_000, "deep object": b'{"a":' * 5000 + b"1" + b"}" * 5000, "digits": b"9" * 5000,
    "nan": b'{"usage": NaN}', "many": b"[" + b"1," * 200_000 + b"1]", "invalid": b"\xff\xfe", "null": b"null",
    "no text": b'{"choices": [{"message": {"content": []}}]}',
    "choices": b'{"choices": {"0": {"message": {"content": "x"}}}}', "long": b'"' + b"x" * (5 << 20) + b'"',
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a8_a_reply_that_cannot_be_read_is_a_bad_reply(name):
    with MisbehavingServer((200, {}, BAD_BODIES[name])) as server, make(server, attempts=1) as client:
        assert client.complete(HELLO).failure.kind == FailureKind.BAD_REPLY


def test_a3_half_a_character_in_a_reply_is_replaced_in_the_cache_too(tmp_path):
    half = (200, {}, completion("half \ud83d", finish_reason="\ud83d"))
    with MisbehavingServer(half) as server, make(server, cache=tmp_path / "c") as client:
        for cached in (False, True):
            reply = client.complete(HELLO).outcome()
            assert (reply.text, reply.finish_reason, reply.cached) == ("half \ufffd", "\ufffd", cached)


def test_a8_a_policys_reply_is_checked_like_a_servers():
    replies = [ChatReply("a\ud800", "stop", -5, 10**30), ChatReply("b" * (2 << 20))]
    with ChatClient(PolicyBackend(lambda messages, options: replies.pop(0)), attempts=1, prices=PRICES) as client:
        assert client.complete(HELLO, max_tokens=5).outcome() == ChatReply("a\ufffd", "stop")
        assert client.complete(HELLO, max_tokens=5).failure.kind == FailureKind.BAD_REPLY


@pytest.mark.parametrize("tail", ["", "/", "/chat/completions", "/chat/completions/", "//"])
def test_c14_the_url_may_hold_the_endpoint(tail):
    with MisbehavingServer() as server:
        backend = OpenAICompatible(server.url + tail, "m", key_env=None)
        assert backend.identity == OpenAICompatible(server.url, "m", key_env=None).identity
        with ChatClient(backend) as client:
            assert client.complete(HELLO).ok
        assert server.seen[0]["path"] == "/v1/chat/completions"
