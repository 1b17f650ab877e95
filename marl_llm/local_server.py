"""The HTTP server of every service of this library, with one guard: programs and pages of this machine are answered, and nobody else.

A page of any web site can make its reader's browser send requests to this machine. The browser says so in `Origin`, in
`Sec-Fetch-Site`, in `Host` where a site's name was pointed at this machine (DNS rebinding), and it asks for leave (a preflight) before it
sends JSON. So a request

- names a loopback address or `localhost` in its one `Host`; the port is not compared, since a tunnel may change it;
- has no `Origin`, or one whose host is local, whatever its port; `null` is not local;
- is not `cross-site`, unless it opens a page;
- says `application/json` if it has a body; no preflight is ever granted, and no answer has a CORS header;
- carries the key as a bearer token, if the server has one. A server that listens on another address than loopback must have one. It cannot
  know its names, so there the key guards in place of `Host`.

A body has one `Content-Length` within the handler's bound. Head and body must arrive within a time, so that slow clients hold no thread.
What is refused gets a status and one line of JSON, and no handler sees it.
"""

from __future__ import annotations

import contextlib
import email.errors
import hmac
import http.server
import io
import ipaddress
import json
import re
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

IDLE_S, HEAD_S, BODY_S, WRITE_S = 60.0, 10.0, 60.0, 60.0  # most seconds between requests, for a head, for a body, for a write
DRAIN_S = 0.5  # how long a refused client may go on sending: an unread socket that is closed would take the answer away
MAX_CONNECTIONS = 1536  # each has a thread, of about 27 KiB
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9.-]+))(?::[0-9]{0,5})?")
_BROKEN_HEAD = (
    email.errors.MissingHeaderBodySeparatorDefect,
    email.errors.FirstHeaderLineIsContinuationDefect,
    email.errors.MisplacedEnvelopeHeaderDefect,
)


class Refused(Exception):
    """A request that is not served: status, and the reason for the client."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether a host (without brackets and port) is this machine: `localhost`, or an address of 127.0.0.0/8 or ::1."""
    host = host.lower().removesuffix(".")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(authority: str) -> bool:
    """Whether a `Host` header, perhaps with a port, names this machine."""
    match = _AUTHORITY.fullmatch(authority.strip())
    if match is None:
        return False
    return is_loopback(match["v6"]) if match["v6"] and ":" in match["v6"] else bool(match["name"]) and is_loopback(match["name"])


def is_local_origin(origin: str) -> bool:
    """Whether an `Origin` header is that of a page of this machine."""
    scheme, _, authority = origin.strip().partition("://")
    return scheme.lower() in ("http", "https") and names_this_machine(authority)


class LocalHandler(http.server.BaseHTTPRequestHandler):
    """One connection. A subclass answers in `get` and `post`, which only see what the guard let through.

    Attributes:
      max_body: most bytes of a body.
      more_headers: of every answer.
      refused: whether the request was refused, perhaps before its head was read.
    """

    server: _Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that a head that cannot be read is answered with a status too
    server_version, sys_version = "marl_llm", ""
    disable_nagle_algorithm = True
    timeout = WRITE_S
    max_body = 1 << 20
    more_headers: Mapping[str, str] = {}
    rfile: io.BufferedReader

    def get(self) -> None:
        """Answers `self.path`."""
        raise Refused(404, "there is nothing here")

    def post(self, body: bytes) -> None:
        """Answers a body that was sent to `self.path`."""
        raise Refused(404, "there is nothing here")

    def is_page(self) -> bool:
        """Whether `self.path` is a page, which a link of another site may open."""
        return False

    def reply(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Sends JSON. A number that JSON cannot hold becomes an error of the server."""
        try:
            text = json.dumps(value, allow_nan=False)
        except ValueError:
            status, text = 500, json.dumps(self.error("the answer holds a number that is not finite"))
        self.send_body(status, text.encode(), "application/json", headers)

    def error(self, reason: str) -> dict[str, Any]:
        """The JSON of a refusal."""
        return {"error": reason}

    def client_has_left(self) -> bool:
        """Whether the connection is closed at the other end, as far as is known here."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:  # it was reset
            return True

    def send_body(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        """Sends an answer."""
        self.send_response(status)
        about = {"Content-Type": kind, "Content-Length": str(len(body)), "X-Content-Type-Options": "nosniff"}
        if self.close_connection:
            about["Connection"] = "close"
        for name, value in {**about, **self.more_headers, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, reason: str) -> None:
        """Answers what is not served, and ends the connection: the rest of the request is not read."""
        self.close_connection = self.refused = True
        self.reply(status, self.error(reason), {"WWW-Authenticate": "Bearer"} if status == 401 else None)

    # What follows is called by http.server.

    def setup(self) -> None:
        super().setup()
        self.refused, self._clock = False, _TimedReader(self.connection)
        self.rfile = io.BufferedReader(self._clock, 1 << 16)

    def handle_one_request(self) -> None:
        self._clock.allow(IDLE_S)
        try:
            if not self.rfile.peek(1):
                self.close_connection = True
                return
        except TimeoutError:
            self.close_connection = True
            return
        self._clock.allow(HEAD_S)
        super().handle_one_request()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        try:
            self._check_caller()
        except Refused as refused:
            self.refuse(refused.status, str(refused))
            return False
        return True

    def handle_expect_100(self) -> bool:
        return True  # the guard comes first

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(lambda: self.post(self._read_body()))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.refuse(code, message or self.responses[code][0])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: who asks for what is nobody's affair."""

    def finish(self) -> None:
        super().finish()
        if not self.refused:
            return
        ends = time.monotonic() + DRAIN_S
        with contextlib.suppress(OSError):  # the client has gone: nothing is left to read
            self.connection.shutdown(socket.SHUT_WR)
            while (left := ends - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(1 << 16):
                    break

    def _answer(self, serve: Any) -> None:
        try:
            serve()
        except Refused as refused:
            self.refuse(refused.status, str(refused))
        except (ConnectionError, TimeoutError):
            raise  # the client's; see `_Server.handle_error`
        except Exception as error:
            traceback.print_exc()
            self.refuse(500, f"the server failed: {type(error).__name__}; see its log")

    def _get(self) -> None:
        if self.headers.get("Content-Length", "0").strip() != "0" or "Transfer-Encoding" in self.headers:
            raise Refused(400, "a GET has no body")
        self.get()

    def _check_caller(self) -> None:
        """Raises `Refused` unless the request comes from this machine, or with the key."""
        if any(isinstance(defect, _BROKEN_HEAD) for defect in self.headers.defects):
            raise Refused(400, "the head has a line that is no header")
        if not self.path.startswith("/"):
            raise Refused(400, "a request's target begins with /")
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1:
            raise Refused(400, f"a request has one Host header, not {len(hosts)}")
        if not self.server.any_host and not names_this_machine(hosts[0]):
            raise Refused(403, "Host: this server answers to localhost, 127.0.0.1 and [::1] only")
        if len(origins) > 1 or not all(map(is_local_origin, origins)):
            raise Refused(403, "Origin: pages of other sites are not answered")
        sites = [site.strip().lower() for site in self.headers.get_all("Sec-Fetch-Site", [])]
        opens_page = self.command == "GET" and self.is_page() and self.headers.get("Sec-Fetch-Mode") == "navigate"
        if "cross-site" in sites and not opens_page:
            raise Refused(403, "Sec-Fetch-Site: pages of other sites are not answered")
        if self.server.key is not None and not self._has_key(self.server.key):
            raise Refused(401, "Authorization: this server asks for its key as a bearer token")

    def _has_key(self, key: str) -> bool:
        given = self.headers.get_all("Authorization", [])
        scheme, _, token = given[0].strip().partition(" ") if len(given) == 1 else ("", "", "")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("utf-8", "replace"), key.encode())

    def _read_body(self) -> bytes:
        """Raises `Refused` for a body that is too long, too slow, cut short or not said to be JSON."""
        lengths, kinds = self.headers.get_all("Content-Length", []), self.headers.get_all("Content-Type", [])
        if not "".join(lengths).strip() or "Transfer-Encoding" in self.headers:
            raise Refused(411, "a body comes with a Content-Length, and not in chunks")
        length = lengths[0].strip()
        if len(lengths) > 1 or not (length.isascii() and length.isdigit()):
            raise Refused(400, f"Content-Length is one number of bytes, not {', '.join(lengths)[:50]!r}")
        if len(length) > 12 or int(length) > self.max_body:
            raise Refused(413, f"a body has at most {self.max_body} bytes")
        if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "Content-Type: a body must say that it is application/json")
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        self._clock.allow(BODY_S)
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_S:g} s") from None
        if len(body) < int(length):
            raise Refused(400, f"the body ended after {len(body)} of {length} bytes")
        return body


class _TimedReader(io.RawIOBase):
    """Reads a socket until a moment. A socket's own timeout begins anew with every byte."""

    def __init__(self, connection: socket.socket):
        self._connection, self._ends = connection, 0.0

    def allow(self, seconds: float) -> None:
        """From now."""
        self._ends = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(WRITE_S)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # the default of 5 drops connections

    def __init__(self, address: tuple[str, int], handler: type[LocalHandler], service: Any, key: str | None, share_port: bool):
        self.service, self.key, self.any_host = service, key, not is_loopback(address[0])
        self.allow_reuse_port = share_port
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        super(http.server.HTTPServer, self).server_bind()  # without a look-up of this machine's name, which may take seconds

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._connections) >= MAX_CONNECTIONS
            self._connections.add(request)
        if not full:
            return super().process_request(request, client_address)
        with contextlib.suppress(OSError):  # nobody reads it
            request.setblocking(False)
            request.send(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n")
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """Those that wait for a request; answers under way are still sent."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # ended in the meantime
                    connection.shutdown(socket.SHUT_RD)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not this server's fault; anything else is worth a traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class LocalServer:
    """Serves until it is closed; a context manager.

    Args:
      handler: answers connections; it finds `service` as `self.server.service`.
      port: 0 takes a free one.
      host: where to listen. Any other than a loopback address needs a key.
      key: clients must send it as a bearer token; None: whoever is on this machine may ask.
      share_port: lets several processes listen on the same port; the kernel spreads the connections.
      error: what is raised for an address that cannot be used, and for a missing or empty key.

    Attributes:
      url: `http://127.0.0.1:8000`, without a path.
    """

    def __init__(
        self,
        handler: type[LocalHandler],
        service: Any,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        key: str | None = None,
        share_port: bool = False,
        error: type[Exception] = ValueError,
    ):
        if key is not None and not key.strip():
            raise error("the key is empty")
        if key is None and not is_loopback(host):
            raise error(f"whoever reaches {host} could ask this server: give it a key, or leave it at 127.0.0.1")
        try:
            self._server = _Server((host, port), handler, service, key, share_port)
        except (OSError, OverflowError) as problem:
            where = f"port {port} cannot be used" if is_loopback(host) else f"{host}, port {port}, cannot be used"
            raise error(f"{where} ({problem}): choose another with --port, or 0 for a free one") from problem
        self.port = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name=handler.__name__, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until somebody interrupts, or closes it."""
        self._thread.join()

    def close(self) -> None:
        """Stops listening and ends connections that wait; answers under way are finished by their threads."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._thread.join()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
