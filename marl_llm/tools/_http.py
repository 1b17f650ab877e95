"""One HTTP POST with a hard deadline.

httpx's own timeouts begin anew with every address that is tried and every byte that comes, so a server that drips one byte a second can
hold a client forever. Here all of an exchange runs in one cancel scope: the look-up of the name, the addresses that are tried, a proxy,
the handshake, the head and the body. The clients live in one event loop, in a thread of its own: connections stay open for the next
request, and the certificates are read once.
"""

import asyncio
import dataclasses
import functools
import http.cookiejar
import json
import logging
import os
import socket
import threading
import urllib.parse
from collections.abc import Coroutine
from typing import Any

from marl_llm.local_server import is_loopback
from marl_llm.tools.results import FailureKind

MAX_BODY = 64 * 2**20  # bytes; a larger answer is a fault of the server, and would fill this process
KEEP_S = 3.0  # how long a connection waits for the next request: less than servers wait, which close it in the middle of one otherwise
ENVIRONMENT = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")


class HttpError(Exception):
    """The exchange gave no answer.

    Attributes:
      kind: why.
      sent: whether the request may have reached the server, so that it may have been carried out and charged.
    """

    def __init__(self, kind: FailureKind, message: str, sent: bool):
        super().__init__(message)
        self.kind, self.sent = kind, sent


@dataclasses.dataclass(frozen=True)
class HttpReply:
    """Status, headers (lower-case names) and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes


def split_url(url: str) -> urllib.parse.SplitResult:
    """The parts of an http or https URL.

    Raises:
      ValueError: another scheme, no host, a port that is none, or a user and password in the URL.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http(s) URL, e.g. http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ValueError("a URL must not hold a user or a password: they would end up in logs")
    parts.port  # noqa: B018 (raises)
    return parts


def post_json(url: str, payload: Any, timeout_s: float, headers: dict[str, str] | None = None) -> HttpReply:
    """Posts `payload` as JSON and reads the whole answer within `timeout_s` seconds.

    Redirects are not followed and cookies not kept. The environment's proxies (`HTTPS_PROXY`, `NO_PROXY`, ...) are used, but never to reach
    this machine.

    Raises:
      HttpError: no answer: no connection, a dropped one, a broken exchange, an answer larger than `MAX_BODY`, or the deadline.
    """
    parts = split_url(url)
    if timeout_s <= 0:
        raise HttpError(FailureKind.DEADLINE, "no time was left for the request", sent=False)
    clients = _clients()
    exchange = _Exchange(url, json.dumps(payload).encode(), {"Content-Type": "application/json", **(headers or {})})
    return clients.run(exchange.post(clients, is_loopback(parts.hostname), timeout_s))


class _Exchange:
    """One request and its answer."""

    def __init__(self, url: str, body: bytes, headers: dict[str, str]):
        self._url, self._body, self._headers, self._sent = url, body, headers, False

    async def post(self, clients: "_Clients", direct: bool, timeout_s: float) -> HttpReply:
        """The answer. Raises `HttpError`."""
        import anyio
        import httpx2

        try:
            with anyio.fail_after(timeout_s):
                return await self._answer(clients.client(direct))
        except TimeoutError as error:
            raise HttpError(FailureKind.DEADLINE, f"no complete answer in {timeout_s:.3g} s", self._sent) from error
        except HttpError:
            raise
        except Exception as error:  # names, addresses and answers may break their readers in ways of their own
            about = f"{type(error).__name__}: {error}"
            if not self._sent or isinstance(error, OSError | httpx2.TransportError):
                raise HttpError(FailureKind.UNAVAILABLE, about, self._sent) from error
            raise HttpError(FailureKind.BAD_REPLY, f"the answer cannot be read: {about}", sent=True) from error

    async def _answer(self, client: Any) -> HttpReply:
        chunks, size = [], 0
        more = {"extensions": {"trace": self._trace}}
        async with client.stream("POST", self._url, content=self._body, headers=self._headers, **more) as response:
            async for chunk in response.aiter_raw():
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_BODY:
                    raise HttpError(FailureKind.BAD_REPLY, f"the answer is larger than {MAX_BODY} bytes", sent=True)
        return HttpReply(response.status_code, {name.lower(): value for name, value in response.headers.items()}, b"".join(chunks))

    async def _trace(self, event: str, _: dict[str, Any]) -> None:
        self._sent = self._sent or event.endswith("send_request_headers.started")


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up in threads that nobody waits for: the usual ones would hold up the end of the program while a look-up hangs."""

    async def getaddrinfo(self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0) -> list[tuple]:
        addresses = self.create_future()

        def settle(set_outcome: Any, outcome: Any) -> None:
            if not addresses.done():
                set_outcome(outcome)

        def look_up() -> None:
            try:
                outcome = addresses.set_result, socket.getaddrinfo(host, port, family, type, proto, flags)
            except Exception as error:
                outcome = addresses.set_exception, error
            self.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=look_up, name="http-name", daemon=True).start()
        return await addresses


class _Clients:
    """An event loop in a thread of its own, and the HTTP clients that live in it."""

    def __init__(self):
        for name in ("httpx2", "httpcore2"):  # a line per request helps nobody
            logging.getLogger(name).setLevel(logging.WARNING)
        self._loop, self._known = _Loop(), {}
        threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, HttpReply]) -> HttpReply:
        """The result of a coroutine, from any thread but the loop's."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt: nobody waits for it any more
            future.cancel()
            raise

    def client(self, direct: bool) -> Any:
        """A client that uses the environment's proxies as they are now, or none."""
        import httpx2

        environment = tuple((name, value) for name, value in os.environ.items() if name.lower() in ENVIRONMENT)
        if (direct, environment) not in self._known:
            self._known[direct, environment] = httpx2.AsyncClient(
                timeout=None,
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=KEEP_S),
                mounts=dict.fromkeys(("all://", "http://", "https://")) if direct else None,
                headers={"Accept-Encoding": "identity"},
                cookies=http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=())),
            )
        return self._known[direct, environment]


_MAKING = threading.Lock()  # `functools.cache` alone lets threads that ask at once make one loop each


@functools.cache
def _made() -> _Clients:
    return _Clients()


def _clients() -> _Clients:
    """The clients of this process."""
    with _MAKING:
        return _made()


def _after_fork() -> None:
    """A child has no thread of its parent's loop."""
    _made.cache_clear()
    _MAKING.release()


os.register_at_fork(before=_MAKING.acquire, after_in_parent=_MAKING.release, after_in_child=_after_fork)
