"""One POST: the deadline covers all of it, connections are kept, proxies are used, and nothing is kept of what a server says."""

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from marl_llm.tools import _http
from marl_llm.tools._http import HttpError, post_json, split_url
from marl_llm.tools.results import FailureKind

LIMIT_S = 60.0


class Echo:
    """A server that keeps connections and says what it saw; `proxied` are the targets of requests in a proxy's form."""

    def __init__(self, headers=()):
        self.seen, self.connections, self.lock = [], 0, threading.Lock()
        echo = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with echo.lock:
                    echo.connections += 1

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with echo.lock:
                    echo.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(307 if self.path == "/moved" else 200)
                for name, value in (*headers, ("Content-Length", str(len(body)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        threads = {"daemon_threads": True, "request_queue_size": 256}
        self.server = type("Threads", (http.server.ThreadingHTTPServer,), threads)(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def silent():
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def fails(url, timeout_s=0.3, **options):
    """The error, which comes long before anything that hangs would end."""
    tick = time.monotonic()
    with pytest.raises(HttpError) as caught:
        post_json(url, {}, timeout_s, **options)
    assert time.monotonic() - tick < LIMIT_S / 4
    return caught.value


def test_the_deadline_covers_a_name_that_is_not_found_out(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(LIMIT_S))
    error = fails("http://slow.example/v1")
    release.set()
    assert (error.kind, error.sent) == (FailureKind.DEADLINE, False)


def test_a_name_that_hangs_holds_up_neither_others_nor_the_end_of_the_program():
    code = (
        "import socket, sys, time; sys.path[:0] = sys.argv[2:]\n"
        "find = socket.getaddrinfo\n"
        "socket.getaddrinfo = lambda host, *rest, **more: time.sleep(60) if host == 'slow.example' else find(host, *rest, **more)\n"
        "from marl_llm.tools._http import HttpError, post_json\n"
        "for _ in range(40):\n"
        "    try: post_json('http://slow.example/', {}, 0.02)\n"
        "    except HttpError: pass\n"
        "print(post_json(sys.argv[1].replace('127.0.0.1', 'localhost'), {'a': 1}, 20.0).body)"
    )
    tick = time.monotonic()
    with Echo() as server:
        done = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "b'{\"a\": 1}'", done.stderr
    assert time.monotonic() - tick < LIMIT_S / 2


def test_the_deadline_covers_all_addresses_that_are_tried(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full, contextlib.ExitStack() as stack:
        port = full.getsockname()[1]
        for _ in range(8):  # nobody accepts: further connections are not taken
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        address = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 40)
        error = fails(f"http://many.example:{port}/", 1.0)
    assert (error.kind, error.sent) == (FailureKind.DEADLINE, False)


def test_the_deadline_covers_the_handshake_the_head_and_a_proxy(monkeypatch):
    with silent() as port:
        handshake, head = fails(f"https://127.0.0.1:{port}/"), fails(f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        tunnel = fails("https://far.example/")
    assert {error.kind for error in (handshake, head, tunnel)} == {FailureKind.DEADLINE}
    assert (handshake.sent, head.sent) == (False, True)


def test_connections_are_kept_for_the_next_request():
    with Echo() as server:
        for number in range(5):
            assert json.loads(post_json(server.url, number, LIMIT_S).body) == number
        assert (len(server.seen), server.connections) == (5, 1)


def no_name(*_, **__):
    raise socket.gaierror("no such name")


@pytest.mark.parametrize("url", ["http://a..b/", "http://no name/", f"http://{'x' * 300}/", "http://127.0.0.1:1/"])
def test_a_server_that_cannot_be_reached_is_unavailable_and_got_nothing(url, monkeypatch):
    if "127" not in url:
        monkeypatch.setattr(socket, "getaddrinfo", no_name)
    error = fails(url, LIMIT_S)
    assert (error.kind, error.sent) == (FailureKind.UNAVAILABLE, False)


def test_proxies_of_the_environment_are_used_but_not_to_reach_this_machine(monkeypatch):
    with Echo() as proxy, Echo() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        assert post_json("http://far.example/v1?a=1", {}, LIMIT_S).status == 200
        assert [path for path, *_ in proxy.seen] == ["http://far.example/v1?a=1"]
        for host in ("127.0.0.1", "localhost", "LOCALHOST"):
            post_json(server.url.replace("127.0.0.1", host), {}, LIMIT_S, {"Authorization": "Bearer x"})
        assert (len(proxy.seen), len(server.seen)) == (1, 3)
        monkeypatch.setenv("NO_PROXY", "far.example")
        monkeypatch.setattr(socket, "getaddrinfo", no_name)
        assert fails("http://far.example/v1", LIMIT_S).kind == FailureKind.UNAVAILABLE
        assert len(proxy.seen) == 1


def test_redirects_are_not_followed_cookies_not_kept_and_answers_not_unpacked():
    with Echo([("Location", "/other"), ("Set-Cookie", "a=b; Path=/"), ("Content-Encoding", "gzip")]) as server:
        answer = post_json(server.url + "/moved", {"a": 1}, LIMIT_S)
        assert (answer.status, answer.body, answer.headers["location"]) == (307, b'{"a": 1}', "/other")
        post_json(server.url, {}, LIMIT_S)
    assert [path for path, *_ in server.seen] == ["/moved", "/"]
    assert "cookie" not in server.seen[1][1]
    assert server.seen[0][1]["accept-encoding"] == "identity"


def test_a_fork_asks_with_connections_of_its_own():
    with Echo() as server:
        post_json(server.url, {}, LIMIT_S)
        child = os.fork()
        if child == 0:
            os._exit(post_json(server.url, {}, LIMIT_S).status != 200)
        ends = time.monotonic() + LIMIT_S
        while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
            time.sleep(0.01)
        if not done[0]:
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert done == (child, 0)


def test_many_threads_share_one_loop_and_each_gets_its_own_answer():
    found = {}
    with Echo() as server:
        threads = [
            threading.Thread(target=lambda number=number: found.update({number: json.loads(post_json(server.url, number, LIMIT_S).body)}))
            for number in range(100)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: number for number in range(100)}
    assert sum(thread.name == "http" for thread in threading.enumerate()) <= 2


def test_threads_that_are_the_first_to_ask_make_one_loop(monkeypatch):
    made = []

    class SlowLoop(_http._Loop):
        def __init__(self):
            made.append(self)
            time.sleep(0.05)
            super().__init__()

    monkeypatch.setattr(_http, "_Loop", SlowLoop)
    _http._made.cache_clear()
    with Echo() as server:
        threads = [threading.Thread(target=post_json, args=(server.url, number, LIMIT_S)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 1


@pytest.mark.parametrize("url", ["ftp://x", "x", "http://", "http://u:p@x/", "http://u@x/", "http://:p@x/", "http://x:99999/", "http://x:y/"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError):  # noqa: PT011
        split_url(url)


def test_no_time_is_no_request(monkeypatch):
    monkeypatch.setattr(_http, "_clients", None)
    assert fails("http://127.0.0.1:1/", 0.0).kind == FailureKind.DEADLINE
