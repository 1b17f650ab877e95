"""One guard for every server of this library: programs and pages of this machine are answered, and nobody else."""

import contextlib
import http.client
import json
import pathlib
import socket
import sys
import threading
import time

import pytest

from marl_llm import local_server
from marl_llm.local_server import LocalHandler, LocalServer, Refused, is_loopback
from marl_llm.serving import ChatServer
from marl_llm.tools.chat import ChatReply
from marl_llm.tools.results import success
from marl_llm.tools.retriever import LocalRetriever, RetrieverServer
from marl_llm.viewing import HumanSeat, StoredRun, ViewServer

sys.path.insert(0, str(pathlib.Path(__file__).parent / "viewing"))
import stored

LIMIT_S = 20.0
LOCAL_HOSTS = ["127.0.0.1", "127.0.0.1:80", "127.1.2.3:8000", "localhost", "LOCALHOST:9", "localhost.", "[::1]", "[::1]:8000"]
FOREIGN_HOSTS = [
    "evil.com", "evil.com:127.0.0.1", "127.0.0.1.evil.com", "localhost.evil.com:8000", "127.0.0.1@evil.com", "evil.com#127.0.0.1",
    "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0.0.0.0", "[::]", "[::2]:80", "[127.0.0.1]", "::1", "127.0.0.1:x", "",
    "localhost..", "127.0.0.1, evil.com", "local host", "xlocalhost",
]  # fmt: skip
LOCAL_ORIGINS = ["http://127.0.0.1:8000", "http://localhost", "https://LOCALHOST:1", "http://[::1]:3000"]
FOREIGN_ORIGINS = [
    "null", "https://evil.com", "http://localhost.evil.com", "http://127.0.0.1.evil.com", "file://", "", "localhost", "http://",
    "ftp://localhost", "chrome-extension://localhost", "http://evil.com/http://localhost", "http://localhost@evil.com",
    "http://127.0.0.1:80 https://evil.com", "http://localhost/x",
]  # fmt: skip
FOREIGN_TYPES = [
    None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", "text/json",
    "application/json-patch+json", "xapplication/json", "text/plain; application/json", "application/json, text/plain", "",
]  # fmt: skip


class Service:
    """One of the servers: where it listens, a path to read, one to post to with a good body, and what must not change."""

    def __init__(self, server, read, path, body, changes):
        self.port, self.read, self.path, self.body, self.changes = int(server.url.split(":")[2].split("/")[0]), read, path, body, changes

    def send(self, data):
        """The answer to raw bytes, and the seconds until the server ended the connection or had answered."""
        tick = time.monotonic()
        with socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S) as connection:
            with contextlib.suppress(OSError):  # refused in the middle
                connection.sendall(data)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while b"\r\n\r\n" not in answer or len(answer.partition(b"\r\n\r\n")[2]) < _length(answer):
                    if not (more := connection.recv(65536)):
                        break
                    answer += more
        return answer, time.monotonic() - tick

    def post(self, *lines, body=None, host="127.0.0.1", kind="application/json", version="1.1"):
        """The status and the text of the answer."""
        body = self.body if body is None else body
        head = [f"POST {self.path} HTTP/{version}", *([] if host is None else [f"Host: {host}"])]
        head += [] if kind is None else [f"Content-Type: {kind}"]
        head += [] if any(line.lower().startswith("content-length") for line in lines) else [f"Content-Length: {len(body)}"]
        return _read("\r\n".join([*head, *lines]).encode() + b"\r\n\r\n" + body, self)

    def get(self, *lines, path=None, host="127.0.0.1"):
        head = [f"GET {path or self.read} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), *lines]
        return _read("\r\n".join(head).encode() + b"\r\n\r\n", self)


def _length(answer):
    head = answer.partition(b"\r\n\r\n")[0].lower()
    return int(head.partition(b"content-length:")[2].split()[0]) if b"content-length:" in head else 0


def _read(data, service):
    answer, seconds = service.send(data)
    assert seconds < 10  # on a busy machine; by itself milliseconds
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"access-control" not in head.lower()
    return int(head.split()[1]), body.decode()


class Index(LocalRetriever):
    """A retriever that counts what it is asked."""

    passages = ()

    def __init__(self):
        self.asked = []

    def search(self, queries, topk, deadline_s):
        self.asked.append(queries)
        return success([[] for _ in queries], 0.0)


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    asked, index = [], Index()

    def model(messages, options):
        asked.append(messages)
        return ChatReply("yes", "stop", 1, 1, sampled={"prompt": [1], "ids": [2]})

    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    run = stored.make_run(folder / "run", [stored.play("train-1/0/0", 0)])
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(ChatServer({"m": model}, record=folder / "plays.jsonl"))
        seat, found = stack.enter_context(HumanSeat()), stack.enter_context(RetrieverServer(index))
        viewer = stack.enter_context(ViewServer([StoredRun(run)]))
        seat.show("r", [("user", "hello")])

        def records():
            return (len(asked), (folder / "plays.jsonl").read_text())

        yield {
            "chat": Service(served, "/v1/models", "/v1/chat/completions", json.dumps(chat).encode(), records),
            "reward": Service(served, "/health", "/episodes/e/reward", b'{"reward": 1}', records),
            "seat": Service(seat, "/api/turn", "/api/answer", b'{"number": 1, "text": "x"}', lambda: seat.turn()["open"]),
            "retriever": Service(found, "/health", "/retrieve", b'{"queries": ["x"]}', lambda: len(index.asked)),
            "viewer": Service(viewer, "/api/runs", "/", b"{}", lambda: None),
        }


NAMES = ("chat", "reward", "seat", "retriever", "viewer")
POSTING = ("chat", "reward", "seat", "retriever")


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_names_another_host_is_refused_and_nothing_runs(services, name):
    service = services[name]
    before = service.changes()
    for host in FOREIGN_HOSTS:
        for status, said in (service.get(host=host), service.post(host=host)):
            assert (status, "Host" in json.dumps(json.loads(said))) == (403, True), host
    for lines in ([], ["Host: 127.0.0.1", "Host: 127.0.0.1"], ["Host: 127.0.0.1", "Host: evil.com"], ["Host : 127.0.0.1"]):
        assert service.get(*lines, host=None)[0] == service.post(*lines, host=None)[0] == 400, lines
    assert service.post(host=None, version="1.0")[0] == 400
    assert service.get(path=f"http://evil.com{service.read}")[0] == 400
    for host in LOCAL_HOSTS:
        assert service.get(host=host)[0] == 200, host
    assert service.changes() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_another_site_is_refused_and_nothing_runs(services, name):
    service = services[name]
    before = service.changes()
    for origin in FOREIGN_ORIGINS:
        for status, said in (service.get(f"Origin: {origin}"), service.post(f"Origin: {origin}")):
            assert (status, "Origin" in said) == (403, True), origin
    assert service.get("Origin: http://localhost", "Origin: https://evil.com")[0] == 403
    assert service.get("Sec-Fetch-Site: cross-site")[0] == service.post("Sec-Fetch-Site: cross-site")[0] == 403
    assert service.get("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")[0] == 403  # data are no page
    for origin in LOCAL_ORIGINS:
        assert service.get(f"Origin: {origin}", "Sec-Fetch-Site: same-site")[0] == 200
    preflight = b"OPTIONS %s HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    assert _read(preflight % service.path.encode(), service)[0] >= 400
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    assert service.get(*upgrade, "Origin: https://evil.com")[0] == 403
    assert service.get(*upgrade)[0] == 200  # an answer, and no socket
    assert service.changes() == before


def test_a_link_of_another_site_may_open_a_page_and_no_more(services):
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert [services[name].get(*link, path="/")[0] for name in ("viewer", "seat")] == [200, 200]
    assert services["viewer"].get("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", path="/")[0] == 403
    assert services["viewer"].get(*link, path="/view.js")[0] == 403


@pytest.mark.parametrize("name", POSTING)
def test_a_body_that_does_not_say_that_it_is_json_is_refused_and_nothing_runs(services, name):
    service = services[name]
    before = service.changes()
    for kind in FOREIGN_TYPES:
        status, said = service.post(kind=kind)
        assert (status, "application/json" in said) == (415, True), kind
    assert service.post("Content-Type: text/plain")[0] == 415  # two of them
    assert service.changes() == before


def test_json_is_taken_with_its_parameters_and_in_any_case():
    index = Index()
    with RetrieverServer(index) as server:
        service = Service(server, "/health", "/retrieve", b'{"queries": ["x"]}', None)
        for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", " application/json ;q"):
            assert service.post(kind=kind) == (200, '{"result": [[]]}'), kind
        assert service.post("Origin: http://localhost:1", "Sec-Fetch-Site: same-site")[0] == 200
    assert len(index.asked) == 5


@pytest.mark.parametrize("name", POSTING)
def test_a_body_whose_length_is_not_told_plainly_is_refused_and_the_connection_ends(services, name):
    service = services[name]
    before = service.changes()
    for lines, status in (
        ([f"Content-Length: {len(service.body)}"] * 2, 400), (["Content-Length: -1"], 400), (["Content-Length: 1e3"], 400),
        (["Content-Length: 0x10"], 400), (["Content-Length: 9, 9"], 400), (["Content-Length: " + "9" * 5000], 413),
        (["Content-Length: 99999999999"], 413), (["Content-Length:"], 411), (["Transfer-Encoding: chunked"], 411),
        (["Content-Length: 5", "Transfer-Encoding: chunked"], 411), (["no header", "Content-Length: 5"], 400),
    ):  # fmt: skip
        assert service.post(*lines)[0] == status, lines
    assert service.get("Content-Length: 5")[0] == service.get("Transfer-Encoding: chunked")[0] == 400
    smuggled = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n" + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert service.send(smuggled)[0].count(b"HTTP/1.1 ") == 1
    assert service.changes() == before


def test_a_body_of_the_most_bytes_is_taken_and_no_byte_more():
    class Small(LocalHandler):
        max_body = 10

        def post(self, body):
            self.reply(200, body.decode())

    with LocalServer(Small, None) as server:
        service = Service(server, "/", "/", b"", None)
        assert service.post(body=b"0123456789") == (200, '"0123456789"')
        assert service.post(body=b"0123456789a") == (413, '{"error": "a body has at most 10 bytes"}')
        assert service.post("Content-Length: 000000000003", body=b"abc") == (200, '"abc"')
        assert service.post("Content-Length: 0", body=b"") == (200, '""')


def test_heads_without_end_or_form_get_a_status_and_no_thread(services):
    service = services["chat"]
    for head, status in (
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Filler: 1\r\n" * 10_000 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505), (b"GET /health\r\n\r\n", 400),
        (b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 501), (b"PUT /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    ):  # fmt: skip
        assert _read(head, service)[0] == status, head[:30]
    two = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2
    with socket.create_connection(("127.0.0.1", service.port), timeout=LIMIT_S) as connection:
        connection.sendall(two)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.count(b'{"ok": true}') == 2  # one after the other


def test_a_body_that_ends_early_is_named_and_one_that_drips_ends_in_time(services, monkeypatch):
    service = services["reward"]
    with socket.create_connection(("127.0.0.1", service.port), timeout=LIMIT_S) as connection:
        head = f"POST {service.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
        connection.sendall(head.encode() + b'{"rew')
        connection.shutdown(socket.SHUT_WR)
        assert b"the body ended after 5 of 15 bytes" in b"".join(iter(lambda: connection.recv(65536), b""))
    monkeypatch.setattr(local_server, "BODY_S", 0.3)
    monkeypatch.setattr(local_server, "HEAD_S", 0.3)
    for data, status in ((head.encode(), b" 408 "), (head[:40].encode(), b"")):
        with socket.create_connection(("127.0.0.1", service.port), timeout=LIMIT_S) as connection:
            connection.sendall(data)
            drips = threading.Event()
            thread = threading.Thread(target=_drip, args=(connection, drips))
            thread.start()
            with contextlib.suppress(ConnectionError):
                assert status in connection.recv(65536)
            drips.set()
            thread.join()


def _drip(connection, ends):
    """A byte every 50 ms: a timeout per byte would never come."""
    while not ends.wait(0.05):
        with contextlib.suppress(OSError):
            connection.sendall(b"1")


@pytest.mark.parametrize("name", NAMES)
def test_refusals_take_no_memory(services, name):
    import resource

    service = services[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        service.post("Origin: https://evil.com", body=b"x" * 200_000)
        service.post("Content-Length: 999999999", body=b"x" * 200_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def test_a_key_is_asked_for_and_another_address_needs_one(capfd):
    index = Index()
    for host in ("0.0.0.0", "", "::", "example.com"):
        with pytest.raises(ValueError, match="give it a key"):
            RetrieverServer(index, host)
    with pytest.raises(ValueError, match="the key is empty"):
        ChatServer({"m": lambda *_: None}, key=" ")
    with RetrieverServer(index, "0.0.0.0", key="s3cret") as server:
        service = Service(server, "/health", "/retrieve", b'{"queries": ["x"]}', None)
        for line in ([], ["Authorization: Bearer s3cre"], ["Authorization: Bearer s3crets"], ["Authorization: Basic s3cret"],
                     ["Authorization: s3cret"], ["Authorization: Bearer \xff"], ["Authorization: Bearer s3cret"] * 2, ["X: Bearer s3cret"]):
            status, said = service.post(*line)
            assert (status, "s3cret" in said) == (401, False), line
            assert service.get(*line)[0] == 401
        assert index.asked == []
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert service.post(f"Authorization: {scheme} s3cret", host="retriever.cluster:80")[0] == 200
        assert service.post("Authorization: Bearer s3cret", "Origin: https://evil.com")[0] == 403
    assert "s3cret" not in "".join(capfd.readouterr())


def test_a_handler_that_fails_is_a_status_and_the_server_goes_on(capfd):
    class Failing(LocalHandler):
        def get(self):
            if self.path == "/nan":
                return self.reply(200, {"value": float("nan")})
            raise {"/refused": Refused(418, "no tea"), "/key": KeyError("x")}[self.path]

    with LocalServer(Failing, None) as server:
        service = Service(server, "/", "/", b"", None)
        assert service.get(path="/refused") == (418, '{"error": "no tea"}')
        assert service.get(path="/key") == (500, '{"error": "the server failed: KeyError; see its log"}')
        assert service.get(path="/nan") == (500, '{"error": "the answer holds a number that is not finite"}')
        assert service.post()[0] == 404
    assert "KeyError" in capfd.readouterr().err


def test_closing_ends_connections_that_wait_and_a_taken_port_is_named():
    class Answering(LocalHandler):
        def get(self):
            self.reply(200, {})

    with LocalServer(Answering, None) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        connection.request("GET", "/")
        connection.getresponse().read()
        with pytest.raises(OSError, match=f"port {server.port} cannot be used .*--port"):
            LocalServer(LocalHandler, None, server.port, error=OSError)
    tick = time.monotonic()
    assert connection.sock.recv(1) == b""
    assert time.monotonic() - tick < local_server.IDLE_S / 2


def test_connections_beyond_the_most_are_turned_away(monkeypatch):
    monkeypatch.setattr(local_server, "MAX_CONNECTIONS", 2)
    with LocalServer(LocalHandler, None) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            link = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)))
            link.request("GET", "/")  # answered and refused, or kept: either way it was let in
        more = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S))
        with contextlib.suppress(ConnectionError):
            more.sendall(b"x")
        assert b" 503 " in more.recv(1000)


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("Localhost.", True), ("127.evil.com", False), ("127.0.0.1.evil.com", False),
     ("", False), ("0.0.0.0", False), ("10.0.0.1", False), ("127.0.0.1:80", False)],
)  # fmt: skip
def test_a_host_is_this_machine_or_it_is_not(host, local):
    assert is_loopback(host) is local
