"""The retriever's HTTP server: JSON in the `/retrieve` form that Search-R1's clients speak.

  POST /retrieve   {"queries": ["...", ...], "topk": 3, "return_scores": true}
                   -> {"result": [[{"document": {"id": ..., "contents": ...}, "score": 12.3}, ...], ...]}
                   without `return_scores`: {"result": [[{"id": ..., "contents": ...}, ...], ...]}
  GET  /health     -> {"status": "ok", "passages": N}

A request that cannot be served gets 400 and a line that says why; a fault of the server gets 500. Neither is an empty result.
"""

import http.server
import importlib
import json
import pathlib
import socket
import sys
import threading
import traceback
from typing import Any

from marl_llm.tools.results import FailureKind
from marl_llm.tools.retriever.bm25 import BM25Index, read_about
from marl_llm.tools.retriever.dense import DenseIndex
from marl_llm.tools.retriever.interface import LocalRetriever, check_request
from marl_llm.untrusted import Bounds, read_json, valid_text

MAX_REQUEST = 16 * 2**20  # bytes
MAX_QUERIES = 4096
BOUNDS = Bounds(size=MAX_REQUEST, depth=8, values=4 * MAX_QUERIES)
IDLE_S = 60.0  # a connection that sends nothing for so long is closed


def open_index(folder: str | pathlib.Path, encoder: str | None = None) -> LocalRetriever:
    """Opens a BM25 or dense index.

    Args:
      encoder: for a dense index, `package.module:function`, texts to embeddings.

    Raises:
      ValueError: a dense index without an encoder, or a BM25 index with one.
    """
    folder = pathlib.Path(folder)
    dense = read_about(folder).get("kind") == "dense"
    if dense and encoder is None:
        raise ValueError(f"{folder} is a dense index: say how queries are encoded, --encoder=package.module:function")
    if not dense and encoder is not None:
        raise ValueError(f"{folder} is a BM25 index: an encoder would have no effect")
    if not dense:
        return BM25Index(folder)
    module, _, function = encoder.partition(":")
    return DenseIndex(folder, getattr(importlib.import_module(module), function))


class RetrieverServer:
    """Serves one retriever from threads; `with RetrieverServer(index) as server: server.url`.

    Args:
      retriever: a local index.
      host, port: where to listen; port 0 takes a free one.
      topk: hits per query where a request does not say.
      deadline_s: of one request; a later answer is 503.
      share_port: lets several processes listen on the same port; the kernel spreads the connections.
    """

    def __init__(
        self,
        retriever: LocalRetriever,
        host: str = "127.0.0.1",
        port: int = 0,
        topk: int = 3,
        deadline_s: float = 30.0,
        share_port: bool = False,
    ):
        handler = type("Handler", (_Handler,), dict(retriever=retriever, topk=topk, deadline_s=deadline_s))
        listening = type("Listening", (_Threads,), dict(allow_reuse_port=share_port))
        self._server = listening((host, port), handler)
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def serve_forever(self) -> None:
        """Serves until `close` or an interrupt."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "RetrieverServer":
        threading.Thread(target=self.serve_forever, daemon=True, name="retriever-server").start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_request(body: bytes, topk: int) -> tuple[list[str], int, bool]:
    """Queries, hits per query and whether scores are wanted. Queries are valid text.

    Args:
      topk: where the request does not say.

    Raises:
      ValueError, TypeError: with the reason, for the client.
    """
    said = read_json(body, BOUNDS)
    if not said.ok:
        raise ValueError(f"Expecting JSON within bounds; the body is {said.problem}")
    request = said.value
    if not isinstance(request, dict) or "queries" not in request:
        raise ValueError('the body must be an object: {"queries": ["..."], "topk": 3, "return_scores": true}')
    queries = request["queries"]
    topk = topk if request.get("topk") is None else request["topk"]
    check_request(queries, topk)
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"{len(queries)} queries in one request; at most {MAX_QUERIES}")
    return queries, topk, bool(request.get("return_scores", False))


class _Threads(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # thousands of environments may ask at once; the default of 5 drops connections

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is not this server's fault; anything else is worth a traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    retriever: LocalRetriever
    topk: int
    deadline_s: float
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        """Queries are training data, and millions of lines help nobody."""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, dict(status="ok", passages=len(self.retriever.passages)))
        else:
            self._answer(404, dict(error=f"no such path: {self.path}; there are POST /retrieve and GET /health"))

    def do_POST(self) -> None:
        if self.path.rstrip("/") != "/retrieve":
            self.close_connection = True  # the body was not read
            return self._answer(404, dict(error=f"no such path: {self.path}; there are POST /retrieve and GET /health"))
        length = self.headers.get("Content-Length", "")
        if not length:
            self.close_connection = True
            return self._answer(411, dict(error="a request needs a Content-Length"))
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            return self._answer(400, dict(error=f"Content-Length must be a number of bytes, not {length[:50]!r}"))
        if len(length) > 12 or int(length) > MAX_REQUEST:
            self.close_connection = True
            return self._answer(413, dict(error=f"a request may have at most {MAX_REQUEST} bytes"))
        try:
            queries, topk, with_scores = read_request(self.rfile.read(int(length)), self.topk)
        except (ValueError, TypeError) as error:
            return self._answer(400, dict(error=str(error)))
        try:
            result = self.retriever.search(queries, topk, self.deadline_s)
        except Exception as error:
            traceback.print_exc()
            return self._answer(500, dict(error=f"{type(error).__name__} while searching; see the server's log"))
        if result.failure is not None:
            status = 503 if result.failure.kind == FailureKind.DEADLINE else 500
            return self._answer(status, dict(error=result.failure.message))
        found = [
            [dict(document=hit.document, score=hit.score) if with_scores else hit.document for hit in hits] for hits in result.outcome()
        ]
        return self._answer(200, dict(result=found))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = valid_text(json.dumps(content, ensure_ascii=False)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
