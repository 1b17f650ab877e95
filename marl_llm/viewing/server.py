"""The viewer's server: the page and its data, on this machine alone, from the standard library.

It answers GET only, to callers that name this machine as the host, so that no page of another site can read a run through the browser.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from marl_llm.viewing.runs import StoredRun, ViewError, compared

PAGE = pathlib.Path(__file__).parent / "page"
KINDS = {"index.html": "text/html", "view.js": "text/javascript", "view.css": "text/css"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
MOST_FAULTS = 20  # that the page lists
SMALL = 1024  # bytes that are not worth compressing


def answer(runs: Sequence[StoredRun], path: str, query: dict[str, str]) -> Any:
    """The data behind an address `/api/...`. Raises `KeyError`, `IndexError` or `ValueError` for what there is not."""
    if path == "/api/runs":
        return [{"name": run.name, "path": str(run.path), "headline": run.headline(), "faults": run.faults()[:MOST_FAULTS]} for run in runs]
    if path == "/api/versions":
        return [run.refresh() for run in runs]
    if path == "/api/compare":
        return compared(runs[int(query["first"])], runs[int(query["second"])], query.get("seats", "after"))
    run = runs[int(query.get("run", "0"))]
    if path == "/api/plays":
        return run.rows()
    if path == "/api/search":
        return run.search(query["text"])
    if path == "/api/play":
        return run.play(query["id"])
    if path == "/api/call":
        return run.call(query["id"], int(query["call"]))
    if path == "/api/group":
        return run.group(query["id"], int(query["call"]))
    if path == "/api/figures":
        return run.figures()
    raise KeyError(path)


class LocalHandler(BaseHTTPRequestHandler):
    """What the viewer's servers have in common: only callers that name this machine are answered, and no page runs another's scripts."""

    protocol_version = "HTTP/1.1"

    def _is_local(self) -> bool:
        """Whether the caller named this machine; otherwise it has been answered."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host in ("127.0.0.1", "localhost", "[::1]"):
            return True
        self.close_connection = True  # what it sent is not read
        self._send(403, b"this server answers to 127.0.0.1 and localhost only", "text/plain")
        return False

    def _send(self, code: int, body: bytes, kind: str) -> None:
        packed = len(body) > SMALL and "gzip" in (self.headers.get("Accept-Encoding") or "")
        body = gzip.compress(body, 2) if packed else body
        self.send_response(code)
        heads = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store"}
        heads |= {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for head, value in (heads | ({"Content-Encoding": "gzip"} if packed else {})).items():
            self.send_header(head, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: who looks at what is nobody's affair."""


class _Handler(LocalHandler):
    runs: Sequence[StoredRun] = ()

    def do_GET(self) -> None:
        """The page, a file of it, or data."""
        if not self._is_local():
            return
        url = urllib.parse.urlsplit(self.path)
        name = url.path.lstrip("/") or "index.html"
        if name in KINDS:
            self._send(200, (PAGE / name).read_bytes(), KINDS[name])
            return
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            found = answer(self.runs, url.path, query)
        except (KeyError, IndexError, ViewError, ValueError) as error:
            code = 400 if isinstance(error, ViewError) else 404
            text = str(error) if isinstance(error, ViewError) else f"there is no {url.path} {query}"
            self._send(code, json.dumps({"error": text}).encode(), "application/json")
            return
        self._send(200, json.dumps(found).encode(), "application/json")


class LocalServer:
    """Serves a handler on this machine until it is closed; a context manager. Raises `ViewError` when the port is taken (0: a free one)."""

    def __init__(self, handler: type[LocalHandler], port: int, name: str):
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        except (OSError, OverflowError) as error:
            raise ViewError(f"port {port} cannot be used ({error}): choose another with --port, or 0 for a free one") from error
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class ViewServer(LocalServer):
    """Serves runs (at least one) until it is closed; a context manager. Raises `ViewError` when the port is taken (0: a free one)."""

    def __init__(self, runs: Sequence[StoredRun], port: int = 0):
        super().__init__(type("Handler", (_Handler,), {"runs": tuple(runs)}), port, "viewer")

    def wait(self) -> None:
        """Until somebody interrupts."""
        self._thread.join()
