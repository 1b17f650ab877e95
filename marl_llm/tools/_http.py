"""One HTTP POST with a hard deadline, on the standard library.

A socket's timeout starts anew with every byte, so a server that drips one byte a second can hold a client forever. Here a timer shuts the
connection down when the deadline comes, wherever the exchange stands: the handshake, the headers or the body.
"""

import contextlib
import dataclasses
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.parse
from typing import Any

from marl_llm.tools.results import FailureKind

MAX_BODY = 64 * 2**20  # bytes; a larger answer is a fault of the server, and would fill this process


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
      ValueError: another scheme, no host, or a user and password in the URL.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http(s) URL, e.g. http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ValueError("a URL must not hold a user or a password: they would end up in logs")
    return parts


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def post_json(url: str, payload: Any, timeout_s: float, headers: dict[str, str] | None = None) -> HttpReply:
    """Posts `payload` as JSON and reads the whole answer within `timeout_s` seconds. Redirects are not followed.

    Raises:
      HttpError: no answer: no connection, a dropped one, a broken exchange, an answer larger than `MAX_BODY`, or the deadline.
    """
    parts = split_url(url)
    deadline = time.monotonic() + timeout_s
    if timeout_s <= 0:
        raise HttpError(FailureKind.DEADLINE, "no time was left for the request", sent=False)
    body = json.dumps(payload).encode()
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    expired = threading.Event()
    open_socket: list[socket.socket] = []  # a reference of our own: http.client drops its one before it reads a body without a length

    def expire() -> None:
        expired.set()
        for sock in open_socket:
            with contextlib.suppress(OSError):  # closed in the meantime: nothing left to interrupt
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    sent = False
    try:
        http.client.HTTPConnection.connect(connection)
        open_socket[:] = [connection.sock]
        if parts.scheme == "https":
            # In steps, so that the timer holds a socket that it can interrupt during the handshake.
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(connection.sock, server_hostname=parts.hostname, do_handshake_on_connect=False)
            open_socket[:] = [connection.sock]
            connection.sock.do_handshake()
        if expired.is_set():
            raise TimeoutError
        sent = True
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json", "Connection": "close", **(headers or {})})
        response = connection.getresponse()
        chunks, size = [], 0
        while chunk := response.read1(2**16):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_BODY:
                raise HttpError(FailureKind.BAD_REPLY, f"the answer is larger than {MAX_BODY} bytes", sent=True)
        if expired.is_set():  # the shutdown looks like the end of the body
            raise HttpError(FailureKind.DEADLINE, f"no complete answer in {timeout_s:.3g} s", sent=True)
        if response.length:  # http.client reports a body that ends early only through what is left of Content-Length
            raise HttpError(FailureKind.UNAVAILABLE, f"the connection ended {response.length} bytes before the answer did", sent=True)
        return HttpReply(response.status, {name.lower(): value for name, value in response.getheaders()}, b"".join(chunks))
    except (OSError, http.client.HTTPException) as error:
        if expired.is_set() or isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            raise HttpError(FailureKind.DEADLINE, f"no complete answer in {timeout_s:.3g} s", sent) from error
        raise HttpError(FailureKind.UNAVAILABLE, f"{type(error).__name__}: {error}", sent) from error
    except HttpError:
        raise
    except Exception as error:  # an answer may break http.client in ways of its own, e.g. a chunk of negative length
        raise HttpError(FailureKind.BAD_REPLY, f"the answer cannot be read: {type(error).__name__}: {error}", sent) from error
    finally:
        timer.cancel()
        connection.close()
