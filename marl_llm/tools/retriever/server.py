"""The retriever's HTTP server: JSON in the `/retrieve` form that Search-R1's clients speak.

  POST /retrieve   {"queries": ["...", ...], "topk": 3, "return_scores": true}
                   -> {"result": [[{"document": {"id": ..., "contents": ...}, "score": 12.3}, ...], ...]}
                   without `return_scores`: {"result": [[{"id": ..., "contents": ...}, ...], ...]}
  GET  /health     -> {"status": "ok", "passages": N}

A request that cannot be served gets 400 and a line that says why; a fault of the server gets 500. Neither is an empty result. Who may ask
is said in `marl_llm.local_server`.
"""

import importlib
import pathlib

from marl_llm.local_server import LocalHandler, LocalServer, Refused
from marl_llm.tools.results import FailureKind
from marl_llm.tools.retriever.bm25 import BM25Index, read_about
from marl_llm.tools.retriever.dense import DenseIndex
from marl_llm.tools.retriever.interface import LocalRetriever, check_request
from marl_llm.untrusted import Bounds, read_json

MAX_REQUEST = 16 * 2**20  # bytes
MAX_QUERIES = 4096
BOUNDS = Bounds(size=MAX_REQUEST, depth=8, values=4 * MAX_QUERIES)
NO_PATH = "no such path; there are POST /retrieve and GET /health"


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


class RetrieverServer(LocalServer):
    """Serves one retriever from threads until it is closed; `with RetrieverServer(index) as server: server.url`.

    Args:
      retriever: a local index.
      host, port: where to listen; port 0 takes a free one. A host other than this machine needs a key.
      topk: hits per query where a request does not say.
      deadline_s: of one request; a later answer is 503.
      key: clients must send it as a bearer token.
      share_port: lets several processes listen on the same port; the kernel spreads the connections.

    Raises:
      ValueError: the port is taken, or another machine could ask without a key.
    """

    def __init__(
        self,
        retriever: LocalRetriever,
        host: str = "127.0.0.1",
        port: int = 0,
        topk: int = 3,
        deadline_s: float = 30.0,
        key: str | None = None,
        share_port: bool = False,
    ):
        self.retriever, self.topk, self.deadline_s = retriever, topk, deadline_s
        super().__init__(_Handler, self, port, host=host, key=key, share_port=share_port)


def read_request(body: bytes, topk: int) -> tuple[list[str], int, bool]:
    """Queries, hits per query and whether scores are wanted. Queries are valid text.

    Args:
      topk: where the request does not say.

    Raises:
      ValueError, TypeError: with the reason, for the client.
    """
    parsed = read_json(body, BOUNDS)
    if not parsed.ok:
        raise ValueError(f"Expecting JSON within bounds; the body is {parsed.problem}")
    request = parsed.value
    if not isinstance(request, dict) or "queries" not in request:
        raise ValueError('the body must be an object: {"queries": ["..."], "topk": 3, "return_scores": true}')
    queries = request["queries"]
    topk = topk if request.get("topk") is None else request["topk"]
    check_request(queries, topk)
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"{len(queries)} queries in one request; at most {MAX_QUERIES}")
    return queries, topk, bool(request.get("return_scores", False))


class _Handler(LocalHandler):
    max_body = MAX_REQUEST

    def get(self) -> None:
        if self.path != "/health":
            raise Refused(404, NO_PATH)
        self.reply(200, dict(status="ok", passages=len(self.server.service.retriever.passages)))

    def post(self, body: bytes) -> None:
        if self.path.rstrip("/") != "/retrieve":
            raise Refused(404, NO_PATH)
        service = self.server.service
        try:
            queries, topk, with_scores = read_request(body, service.topk)
        except (ValueError, TypeError) as error:
            return self.reply(400, self.error(str(error)))
        result = service.retriever.search(queries, topk, service.deadline_s)
        if result.failure is not None:
            status = 503 if result.failure.kind == FailureKind.DEADLINE else 500
            return self.reply(status, self.error(result.failure.message))
        documents = [
            [dict(document=hit.document, score=hit.score) if with_scores else hit.document for hit in hits] for hits in result.outcome()
        ]
        self.reply(200, dict(result=documents))
